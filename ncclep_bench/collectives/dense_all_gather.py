"""The traditional partner of all_gather_experts: every rank receives every expert, needed or not."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

import msgspec
import numpy as np

from ncclep_bench.collectives.all_gather_experts import ALL_GATHER_EXPERTS
from ncclep_bench.collectives.contract import EXPERT_AXES, Array, Bytes, Collective, Expected, Move, Problem
from ncclep_bench.model.case import Case
from ncclep_bench.model.plan import RowPlan


def everything_active(problem: Problem) -> Problem:
    """The same problem with every expert active on every rank."""
    case = msgspec.structs.replace(problem.case, variant="out_of_place", active_share=1.0)
    active = np.ones((problem.placement.ranks, problem.placement.num_experts), dtype=bool)
    return replace(problem, case=case, active=active)


class DenseAllGather(Collective):
    """Input `params` [local experts, expert_elements]; output `all_params` [num_experts, expert_elements]."""

    name = "dense_all_gather"
    axes = EXPERT_AXES

    def waiver(self, case: Case) -> str | None:
        return ALL_GATHER_EXPERTS.waiver(case)

    def empty_inputs(self, problem: Problem, rank: int) -> dict[str, Array]:
        return ALL_GATHER_EXPERTS.empty_inputs(everything_active(problem), rank)

    def fill(self, problem: Problem, rank: int, draw: int, inputs: Mapping[str, Array]) -> None:
        ALL_GATHER_EXPERTS.fill(everything_active(problem), rank, draw, inputs)

    def row_plan(self, problem: Problem) -> RowPlan:
        return ALL_GATHER_EXPERTS.row_plan(everything_active(problem))

    def moves(self, case: Case) -> tuple[Move, ...]:
        return (Move("params", "all_params"),)

    def expected(self, problem: Problem, rank: int, draw: int) -> Iterator[Expected]:
        return ALL_GATHER_EXPERTS.expected(everything_active(problem), rank, draw)

    def bytes(self, problem: Problem) -> Bytes:
        return ALL_GATHER_EXPERTS.bytes(everything_active(problem))


DENSE_ALL_GATHER = DenseAllGather()
