"""The traditional partner of dispatch and combine: an all-to-all of equal blocks, padded so that none is dropped."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property

import msgspec
import numpy as np

from ncclep_bench.collectives.combine import COMBINE, combined_tokens
from ncclep_bench.collectives.contract import ROUTED_AXES, Array, Bytes, Collective, Expected, Move, Problem, sum_waiver
from ncclep_bench.collectives.dispatch import DISPATCH, token_bytes, token_row_fields
from ncclep_bench.collectives.dispatch_combine import scaled_tokens
from ncclep_bench.collectives.token_layout import TokenLayout
from ncclep_bench.model.case import Case
from ncclep_bench.model.plan import Entries, IntArray, RowPlan, Stage, ranges

BOTH_WAYS = "dispatch_combine"


def expert_major(problem: Problem) -> Problem:
    """The same problem with received rows in exact expert-major blocks, as the traditional partner lays them out."""
    case = msgspec.structs.replace(problem.case, mode="ht", layout="expert_major", alignment=1)
    return replace(problem, case=case)


@dataclass(frozen=True)
class PaddedSlots:
    """Slots of the padded all-to-all: per pair of ranks a block of `experts` × `capacity` rows.

    `capacity` is the most choices any source has for any expert slot; uneven ranks are padded to the most experts.
    """

    layout: TokenLayout

    @property
    def experts(self) -> int:
        return int(self.layout.placement.local_counts.max())

    @cached_property
    def filled(self) -> IntArray:
        """Choices by rank, local expert and source, in the order of arrivals."""
        arrivals = self.layout.arrivals
        return np.bincount(
            (arrivals.rank * self.experts + arrivals.local) * self.layout.ranks + arrivals.source, minlength=1
        )

    @property
    def capacity(self) -> int:
        return int(self.filled.max())

    @property
    def block(self) -> int:
        return self.experts * self.capacity

    @cached_property
    def slot_in_block(self) -> IntArray:
        """Slot of each arrival within the block from its source to its rank."""
        within = ranges(np.zeros_like(self.filled), self.filled)
        return self.layout.arrivals.local * self.capacity + within

    def exchange(self, problem: Problem) -> Stage:
        """The all-to-all itself: every slot crosses, padding included."""
        ranks, block = self.layout.ranks, self.block

        def entries() -> Entries:
            src, dst, slot = (axis.ravel() for axis in np.indices((ranks, ranks, block)))
            return Entries(src, dst * block + slot, dst, src * block + slot)

        rows_out = (ranks * block,) * ranks
        pair_rows = np.full((ranks, ranks), block, dtype=np.int64)
        return Stage("all_to_all", "copy", token_row_fields(problem), rows_out, entries, lambda: pair_rows)


class PaddedAllToAll(Collective):
    """Dispatch, combine or both, as implementations without EP kernels do it; `variant` says which.

    dispatch: tokens packed per (rank, expert) with padding, exchanged, laid out in expert-major blocks (`tokens`,
    `expert_counts`; no weights or ids cross). combine: `rows` back the same way, weighted sum on the token's rank.
    """

    name = "padded_all_to_all"
    axes = ROUTED_AXES | {"variant", "chain"}
    variants = ("dispatch", "combine", BOTH_WAYS)

    def waiver(self, case: Case) -> str | None:
        return None if case.variant == "dispatch" else sum_waiver(case)

    def empty_inputs(self, problem: Problem, rank: int) -> dict[str, Array]:
        return self._one_way(problem).empty_inputs(expert_major(problem), rank)

    def fill(self, problem: Problem, rank: int, draw: int, inputs: Mapping[str, Array]) -> None:
        self._one_way(problem).fill(expert_major(problem), rank, draw, inputs)

    @staticmethod
    def _one_way(problem: Problem) -> Collective:
        return COMBINE if problem.case.variant == "combine" else DISPATCH

    def row_plan(self, problem: Problem) -> RowPlan:
        layout = expert_major(problem).layout
        slots = PaddedSlots(layout)
        fields = token_row_fields(problem)
        there, back = layout.dispatch_stage(fields), layout.combine_stage(fields, "weighted_sum")
        padded = (layout.ranks * slots.block,) * layout.ranks
        local = np.zeros((layout.ranks, layout.ranks), dtype=np.int64)

        def stage(name: str, rows_out: tuple[int, ...], source: str, target: str, *, weighted: bool = False) -> Stage:
            def entries() -> Entries:
                arrivals, laid_out = layout.arrivals, layout.entries
                place = {
                    "token": (arrivals.source, arrivals.token),
                    "sent": (arrivals.source, arrivals.rank * slots.block + slots.slot_in_block),
                    "received": (arrivals.rank, arrivals.source * slots.block + slots.slot_in_block),
                    "row": (arrivals.rank, laid_out.dst_row),
                }
                return Entries(*place[source], *place[target], laid_out.weight if weighted else None)

            return Stage(name, "weighted_sum" if weighted else "copy", (), rows_out, entries, lambda: local)

        exchange = slots.exchange(problem)
        ways: dict[str, tuple[Stage, ...]] = {
            "dispatch": (
                stage("pack", padded, "token", "sent"),
                exchange,
                stage("layout", there.rows_out, "received", "row"),
            ),
            "combine": (
                stage("pack", padded, "row", "received"),
                exchange,
                stage("sum", back.rows_out, "sent", "token", weighted=True),
            ),
        }
        ways[BOTH_WAYS] = ways["dispatch"] + ways["combine"]
        variant = problem.case.variant or self.variants[0]
        whole = {"dispatch": there, "combine": back, BOTH_WAYS: layout.pair_stage()}[variant]
        return RowPlan(layout.ranks, whole, ways[variant])

    def moves(self, case: Case) -> tuple[Move, ...]:
        return (COMBINE if case.variant == "combine" else DISPATCH).moves(case)

    def handed_on(self, problem: Problem, rank: int) -> dict[str, Array]:
        if problem.case.variant != "dispatch":
            return {}
        return {"expert_counts": expert_major(problem).layout.expert_counts[rank]}

    def expected(self, problem: Problem, rank: int, draw: int) -> Iterator[Expected]:
        if problem.case.variant == "dispatch":
            handed_on = ("tokens", "scales", "expert_counts")
            yield from (e for e in DISPATCH.expected(expert_major(problem), rank, draw) if e.name in handed_on)
        elif problem.case.variant == "combine":
            yield from combined_tokens(problem, rank, draw)
        else:
            yield from scaled_tokens(problem, rank, draw)

    def bytes(self, problem: Problem) -> Bytes:
        ways = 2 if problem.case.variant == BOTH_WAYS else 1
        return token_bytes(problem, self.row_plan(problem), ways=ways)


PADDED_ALL_TO_ALL = PaddedAllToAll()
