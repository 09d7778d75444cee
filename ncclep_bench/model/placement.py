"""Which rank holds which expert: even and uneven blocks, replicas, or an explicit table."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from ncclep_bench.errors import InputError

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt


@dataclass(frozen=True)
class Placement:
    """`experts_of_rank[rank]` lists the experts a rank holds; an expert's position there is its local id.

    Every expert has at least one owner; several owners are replicas; a rank may hold none.
    Raises InputError from `placement_of` and `explicit_placement` when that does not hold.
    """

    num_experts: int
    experts_of_rank: tuple[tuple[int, ...], ...]

    @property
    def ranks(self) -> int:
        return len(self.experts_of_rank)

    @cached_property
    def local_counts(self) -> npt.NDArray[np.int64]:
        """Experts per rank, shape [ranks]."""
        import numpy

        return numpy.array([len(experts) for experts in self.experts_of_rank], dtype=numpy.int64)

    @property
    def in_equal_blocks(self) -> bool:
        """Whether experts lie in rank order, as many on each rank and each once: as an all-gather would put them."""
        most = int(self.local_counts.max())
        held = [expert for experts in self.experts_of_rank for expert in experts]
        return bool((self.local_counts == most).all()) and held == list(range(self.num_experts))

    @cached_property
    def local_id(self) -> npt.NDArray[np.int32]:
        """Local id of an expert on a rank, −1 where the rank lacks it, shape [ranks, num_experts]."""
        import numpy

        table = numpy.full((self.ranks, self.num_experts), -1, dtype=numpy.int32)
        for rank, experts in enumerate(self.experts_of_rank):
            table[rank, list(experts)] = numpy.arange(len(experts))
        return table

    @cached_property
    def owners(self) -> tuple[tuple[int, ...], ...]:
        """Ranks that hold each expert, ascending."""
        owners: list[list[int]] = [[] for _ in range(self.num_experts)]
        for rank, experts in enumerate(self.experts_of_rank):
            for expert in experts:
                owners[expert].append(rank)
        return tuple(tuple(ranks) for ranks in owners)

    @cached_property
    def replica_rank(self) -> npt.NDArray[np.int32]:
        """Rank that serves (requesting rank, expert), shape [ranks, num_experts].

        A rank that holds the expert serves itself; others spread over the replicas by their own number.
        """
        import numpy

        table = numpy.empty((self.ranks, self.num_experts), dtype=numpy.int32)
        for expert, owners in enumerate(self.owners):
            for rank in range(self.ranks):
                table[rank, expert] = rank if rank in owners else owners[rank % len(owners)]
        return table


def explicit_placement(num_experts: int, experts_of_rank: Any) -> Placement:
    """A placement from a list of expert lists, one per rank. Raises InputError naming the expert at fault."""
    table = tuple(tuple(int(expert) for expert in experts) for experts in experts_of_rank)
    seen: set[int] = set()
    for rank, experts in enumerate(table):
        if len(set(experts)) != len(experts):
            raise InputError(f"placement: rank {rank} lists an expert twice: {list(experts)}")
        for expert in experts:
            if not 0 <= expert < num_experts:
                raise InputError(
                    f"placement: rank {rank} lists expert {expert}", hint=f"allowed: 0 to {num_experts - 1}"
                )
        seen.update(experts)
    missing = sorted(set(range(num_experts)) - seen)
    if missing:
        raise InputError(
            f"placement: no rank holds expert {missing[0]}", hint=f"{len(missing)} of {num_experts} lack an owner"
        )
    return Placement(num_experts, table)


def placement_of(spec: str, num_experts: int, ranks: int) -> Placement:
    """The placement that `spec` names on `ranks` ranks.

    `block`: equal consecutive blocks (needs num_experts divisible by ranks); `uneven`: consecutive blocks whose
    sizes differ by at most one; `replicas:N`: `uneven`, each expert also on the next N − 1 ranks.
    Raises InputError with what is allowed.
    """
    kind, _, argument = spec.partition(":")
    if kind == "block" and not argument:
        if num_experts % ranks:
            raise InputError(
                f"num_experts {num_experts} is not divisible by {ranks} ranks",
                hint='choose other ranks or num_experts, or placement = "uneven"',
            )
    elif kind == "replicas" and argument.isdigit() and 1 <= int(argument) <= ranks:
        pass
    elif not (kind == "uneven" and not argument):
        raise InputError(
            f"placement {spec!r} cannot be used with {ranks} ranks",
            hint=f'allowed: "block", "uneven", "replicas:N" with N from 1 to {ranks}',
        )
    bounds = [rank * num_experts // ranks for rank in range(ranks + 1)]
    blocks = [tuple(range(bounds[rank], bounds[rank + 1])) for rank in range(ranks)]
    copies = int(argument) if kind == "replicas" else 1
    table = tuple(
        tuple(expert for copy in range(copies) for expert in blocks[(rank - copy) % ranks]) for rank in range(ranks)
    )
    return Placement(num_experts, table)
