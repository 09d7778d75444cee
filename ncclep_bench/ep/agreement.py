"""What ranks must agree on before they work together, and groups that somebody else made."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, cast

import msgspec

from ncclep_bench.errors import ConfigMismatchError, RankError, UsageError
from ncclep_bench.model.ep_config import EpConfig
from ncclep_bench.runtime.group import Group
from ncclep_bench.runtime.world import MpiGroup, wrap


class CallMismatchError(RankError):
    """Ranks call different things, or the same with different sizes; all of them raise it, nothing has moved."""


class PatientGroup:
    """Somebody's own group object, whose calls end after `deadline_s`.

    The call runs in a thread, which is left behind when it does not return: nothing else can end a foreign call.
    Raises UsageError for an object that breaks the contract, RankError when a call does not return. Such an object
    cannot tell who is absent; an MPI communicator can.
    """

    def __init__(self, group: Group, deadline_s: float) -> None:
        self._group, self.deadline_s = group, deadline_s
        rank, size = cast(Any, group.rank), cast(Any, group.size)
        # Some libraries' groups have methods of these names.
        if not (isinstance(rank, int) and isinstance(size, int) and 0 <= rank < size):
            raise UsageError(
                f"{type(group).__name__} says rank {rank!r} of size {size!r}",
                hint="rank and size are attributes, integers with 0 <= rank < size",
            )
        self.rank, self.size = rank, size

    def allgather(self, data: bytes, /, operation: str = "a later allgather") -> list[bytes]:
        """Everybody's `data`, by rank; `operation` is what errors call the meeting."""
        answer = list(self._within("allgather", operation, self._group.allgather, data))
        if len(answer) != self.size or not all(isinstance(item, bytes | bytearray | memoryview) for item in answer):
            raise UsageError(
                f"rank {self.rank}: {type(self._group).__name__}.allgather returned {_shape_of(answer)}",
                hint=f"allowed: the bytes of each of the {self.size} ranks, in rank order",
            )
        return [bytes(item) for item in answer]

    def barrier(self) -> None:
        """Return when all ranks have come here."""
        self._within("barrier", "a barrier", self._group.barrier)

    def _within(self, method: str, operation: str, call: Callable[..., Any], *arguments: Any) -> Any:
        results: list[Any] = []
        errors: list[BaseException] = []

        def run() -> None:
            try:
                results.append(call(*arguments))
            except BaseException as error:
                errors.append(error)

        thread = threading.Thread(target=run, daemon=True, name=f"{method} of {type(self._group).__name__}")
        thread.start()
        thread.join(self.deadline_s)
        if errors:
            raise errors[0]
        if thread.is_alive():
            raise RankError(
                f"rank {self.rank} of {self.size}: {type(self._group).__name__}.{method} did not return within "
                f"{self.deadline_s:.1f} s, at {operation}: another rank is absent or stuck",
                hint="an MPI communicator as group names the absent rank",
            )
        return results[0]


def join(group: object, deadline_s: float) -> MpiGroup | PatientGroup:
    """`group` with deadlines, and what `allgather` calls need apart from anybody else's; collective for MPI.

    The caller closes an MpiGroup. Raises UsageError for what cannot be a group, RankError naming absent ranks.
    """
    joined = wrap(group.comm if isinstance(group, MpiGroup) else group, deadline_s)
    return joined if isinstance(joined, MpiGroup) else PatientGroup(joined, deadline_s)


def agreed_config(config: EpConfig, group: MpiGroup | PatientGroup, deadline_s: float) -> EpConfig:
    """The EpConfig that all ranks gave, validated; collective.

    Raises ConfigMismatchError naming each field that differs with ranks and values, UsageError for values that no
    EpConfig may have (the same on all ranks), RankError as the group does.
    """
    meeting = "the agreement on the configuration"
    data = msgspec.json.encode(config, enc_hook=repr)
    answers = (
        group.allgather(data, deadline_s, meeting) if isinstance(group, MpiGroup) else group.allgather(data, meeting)
    )
    records = [msgspec.json.decode(answer) for answer in answers]
    differing, odd = [], set[int]()
    for field in EpConfig.__struct_fields__:
        values = [record.get(field) for record in records]
        if any(value != values[0] for value in values):
            differing.append(difference(field, values))
            odd.update(odd_ranks(values))
    if differing:
        raise ConfigMismatchError(
            "; ".join(differing), ranks=tuple(sorted(odd)), hint="give every rank the same EpConfig"
        )
    try:
        # A struct made in Python has not been validated; lists become the tuples that the fields say.
        return msgspec.convert(records[0], EpConfig)
    except msgspec.ValidationError as error:
        raise UsageError(f"EpConfig: {str(error).replace('`$.', '`')}") from None


def difference(name: str, values: Sequence[Any]) -> str:
    """`name` differs: who has which value, by rank."""
    holders: dict[str, list[int]] = {}
    for rank, value in enumerate(values):
        holders.setdefault(str(value), []).append(rank)
    parts = [
        f"{value} on rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
        for value, ranks in holders.items()
    ]
    return f"{name} differs: {'; '.join(parts)}"


def odd_ranks(values: Sequence[Any]) -> list[int]:
    """Ranks whose value is not the most frequent one."""
    texts = [str(value) for value in values]
    usual = max(texts, key=texts.count)
    return [rank for rank, text in enumerate(texts) if text != usual]


def _shape_of(answer: list[Any]) -> str:
    return f"{len(answer)} items of {', '.join(sorted({type(item).__name__ for item in answer})) or 'nothing'}"
