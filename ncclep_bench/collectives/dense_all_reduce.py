"""The traditional partner of reduce_scatter_expert_grads: all gradients of all experts summed on every rank."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np

from ncclep_bench.collectives.all_gather_experts import expert_bytes, expert_fields, expert_waiver
from ncclep_bench.collectives.contract import EXPERT_AXES, Array, Bytes, Collective, Expected, Move, Problem
from ncclep_bench.collectives.dense_all_gather import everything_active
from ncclep_bench.collectives.reduce_scatter_expert_grads import REDUCE_SCATTER_EXPERT_GRADS, summed_gradients
from ncclep_bench.model.case import Case
from ncclep_bench.model.plan import Entries, IntArray, RowPlan, Stage


class DenseAllReduce(Collective):
    """Input and output `all_grads` [num_experts, expert_elements]; every rank has every gradient."""

    name = "dense_all_reduce"
    axes = EXPERT_AXES

    def waiver(self, case: Case) -> str | None:
        return expert_waiver(case)

    def empty_inputs(self, problem: Problem, rank: int) -> dict[str, Array]:
        return REDUCE_SCATTER_EXPERT_GRADS.empty_inputs(problem, rank)

    def fill(self, problem: Problem, rank: int, draw: int, inputs: Mapping[str, Array]) -> None:
        REDUCE_SCATTER_EXPERT_GRADS.fill(everything_active(problem), rank, draw, inputs)

    def row_plan(self, problem: Problem) -> RowPlan:
        """Reduce each expert on one rank, then send it to all: 2 (n − 1) / n of the vector per rank, as in a ring."""
        experts, ranks = problem.case.num_experts, problem.placement.ranks
        fields = expert_fields(problem)
        rows_out = (experts,) * ranks
        home = np.arange(experts) % ranks

        def homeward() -> Entries:
            rank, expert = (axis.ravel() for axis in np.indices((ranks, experts)))
            return Entries(rank, expert, home[expert], expert)

        def everywhere() -> Entries:
            src, dst, expert = (axis.ravel() for axis in np.indices((ranks, ranks, experts)))
            return Entries(src, expert, dst, expert)

        at_home: IntArray = np.bincount(home, minlength=ranks)
        to_home = np.tile(at_home, (ranks, 1))
        whole = Stage("all_reduce", "sum", fields, rows_out, everywhere, lambda: np.full((ranks, ranks), experts))
        stages = (
            Stage("reduce", "sum", fields, rows_out, homeward, lambda: to_home),
            Stage("gather", "copy", fields, rows_out, lambda: homeward().transposed(), lambda: to_home.T),
        )
        return RowPlan(ranks, whole, stages)

    def moves(self, case: Case) -> tuple[Move, ...]:
        return (Move("all_grads", "all_grads"),)

    def expected(self, problem: Problem, rank: int, draw: int) -> Iterator[Expected]:
        return summed_gradients(everything_active(problem), tuple(range(problem.case.num_experts)), draw, "all_grads")

    def bytes(self, problem: Problem) -> Bytes:
        plan = self.row_plan(problem)
        ranks, experts = problem.placement.ranks, problem.case.num_experts
        pairs = sum(stage.pair_rows() for stage in plan.stages)
        return expert_bytes(problem, ranks * experts, np.asarray(pairs), plan, busbw_passes=2)


DENSE_ALL_REDUCE = DenseAllReduce()
