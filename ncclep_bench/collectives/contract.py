"""What a collective declares, and the problem (one case's routing or activation) that it is declared over."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ncclep_bench.collectives.activation import activation
from ncclep_bench.collectives.token_layout import TokenLayout
from ncclep_bench.model.case import Case
from ncclep_bench.model.dtype import DType, dtype_named
from ncclep_bench.model.placement import Placement, placement_of
from ncclep_bench.model.plan import RowPlan
from ncclep_bench.routing.token_routing import TokenRouting

Array = npt.NDArray[Any]


@dataclass(frozen=True)
class Problem:
    """One case with everything that all ranks can compute alike: placement, routing, activation.

    `routing` is set for token collectives; `active` (bool, [ranks, num_experts]) for parameter collectives, where it
    is `needed` of all_gather_experts and `has_gradient` of reduce_scatter_expert_grads.
    """

    case: Case
    placement: Placement
    routing: TokenRouting | None = None
    active: npt.NDArray[np.bool_] | None = None

    @cached_property
    def dtype(self) -> DType:
        return dtype_named(self.case.dtype)

    @cached_property
    def layout(self) -> TokenLayout:
        """Where tokens go; made once, since plan, inputs and outputs of every rank ask for it."""
        assert self.routing is not None, "a token collective has a routing"
        return TokenLayout(self.case, self.placement, self.routing)


class Expected(NamedTuple):
    """Part of one rank's right result: `values` (float64 or exact) for rows `rows` of output `name`.

    `tolerance` is absolute, one per row (shape [rows]) or 0 for bit equality. `column`: the first one of `values`.
    """

    name: str
    rows: npt.NDArray[np.int64]
    values: Array
    tolerance: Array | float
    column: int = 0


class Bytes(NamedTuple):
    """Byte figures of one case, summed over ranks; see COLUMNS."""

    payload: int
    minimal: int
    minimal_max_rank: int
    planned: int
    ece: int
    algbw: int
    busbw_factor: float


class Move(NamedTuple):
    """Rows that a plan carries: from input array to output array.

    `source_held`, `target_held`: the plan numbers only the rows of experts that the rank holds, in their order.
    """

    source: str
    target: str
    source_held: bool = False
    target_held: bool = False


class Collective(ABC):
    """A collective declares its axes, inputs, plan and right result; it moves nothing itself."""

    name: str
    axes: frozenset[str]
    """Scenario keys that make a difference; the others are None in its cases."""
    variants: tuple[str, ...] = ()
    """Values of the `variant` axis, the default first; empty where there is no variant."""
    partner: str | None = None
    """Traditional collective whose time TAG compares with; None for the partners themselves."""

    @abstractmethod
    def waiver(self, case: Case) -> str | None:
        """Why this case makes no sense for the collective (a layout it lacks, a dtype it cannot add), or None."""

    @abstractmethod
    def empty_inputs(self, problem: Problem, rank: int) -> dict[str, Array]:
        """Input arrays of one rank, zero."""

    @abstractmethod
    def fill(self, problem: Problem, rank: int, draw: int, inputs: Mapping[str, Array]) -> None:
        """Write one rank's input arrays; another `draw` gives other values, the same everywhere.

        Rows that are no input (padding, experts held elsewhere) stay as they are.
        """

    @abstractmethod
    def row_plan(self, problem: Problem) -> RowPlan:
        """What moves."""

    @abstractmethod
    def moves(self, case: Case) -> tuple[Move, ...]:
        """The arrays whose rows the plan carries."""

    def handed_on(self, problem: Problem, rank: int) -> dict[str, Array]:
        """Outputs of a rank that are no row of an input: counts, weights, local ids."""
        return {}

    @abstractmethod
    def expected(self, problem: Problem, rank: int, draw: int) -> Iterator[Expected]:
        """The right result of one rank in pieces, from inputs and routing alone, in float64; knows no plan."""

    @abstractmethod
    def bytes(self, problem: Problem) -> Bytes:
        """Payload, minimal and planned bytes, and what rates divide."""


def problem_of(case: Case, routing: TokenRouting | None = None) -> Problem:
    """The problem of a case: its placement, its routing, its activation matrix."""
    placement = placement_of(case.placement, case.num_experts, case.ranks)
    active = None if case.active_share is None else activation(case, placement)
    return Problem(case, placement, routing, active)


ROUTED_AXES = frozenset(
    {
        "ranks",
        "tokens",
        "batch_size",
        "tokens_per_sequence",
        "hidden",
        "num_experts",
        "placement",
        "top_k",
        "dtype",
        "routing",
        "routing_param",
        "masked_share",
        "empty_ranks",
        "seed",
        "window",
        "cache",
    }
)
"""Axes of every collective that moves tokens."""

TOKEN_AXES = ROUTED_AXES | {"mode", "layout", "alignment", "transport", "num_sms"}
"""Axes of the EP collectives that move tokens."""

EXPERT_AXES = frozenset({"ranks", "num_experts", "expert_elements", "placement", "dtype", "seed", "window", "cache"})
"""Axes of every collective that moves parameters or gradients."""

ACTIVE_AXES = EXPERT_AXES | {"variant", "active_share", "mr_cache_size", "user_memory", "transport", "num_sms"}
"""Axes of the EP collectives that move parameters or gradients."""

BUFFER_VARIANTS = ("out_of_place", "in_place", "registered")
"""Where the rows of a parameter collective lie: peer-reachable memory, the output itself, or the user's own arrays."""


def sum_waiver(case: Case) -> str | None:
    """Why rows of the case's dtype cannot be added up, or None."""
    if dtype_named(case.dtype).scaled:
        return f"float32, float16 and bfloat16 rows can be added up; {case.dtype} is for dispatch"
    return None


def crossing_bytes(pair_rows: npt.NDArray[np.int64], row_bytes: int) -> tuple[int, int]:
    """Minimal bytes of all ranks together, and the most that one rank must send or receive.

    `pair_rows` [ranks, ranks]: distinct rows from each rank to each; those that stay are left out.
    """
    crossing = pair_rows.copy()
    np.fill_diagonal(crossing, 0)
    busiest = np.maximum(crossing.sum(axis=0), crossing.sum(axis=1)).max(initial=0)
    return int(crossing.sum()) * row_bytes, int(busiest) * row_bytes
