"""Reduce-scatter of expert gradients: summed over the ranks that have one, delivered to every owner (S7)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np

from ncclep_bench.collectives.all_gather_experts import (
    expert_array,
    expert_bytes,
    expert_fields,
    expert_rows,
    expert_waiver,
    needed_by,
)
from ncclep_bench.collectives.contract import (
    ACTIVE_AXES,
    BUFFER_VARIANTS,
    Array,
    Bytes,
    Collective,
    Expected,
    Move,
    Problem,
)
from ncclep_bench.collectives.rows import BOUND, Piece, pieces
from ncclep_bench.model.case import Case
from ncclep_bench.model.plan import Entries, IntArray, RowPlan, Stage


class ReduceScatterExpertGrads(Collective):
    """`has_gradient[rank, expert]` selects what is added.

    Input `all_grads` [num_experts, expert_elements], of which only rows with a gradient are read; output `grads`
    [local experts, expert_elements], sums in float32, zero where no rank has a gradient. in_place: sums lie in own rows
    of `all_grads`.
    """

    name = "reduce_scatter_expert_grads"
    axes = ACTIVE_AXES
    variants = BUFFER_VARIANTS
    partner = "dense_all_reduce"

    def waiver(self, case: Case) -> str | None:
        return expert_waiver(case)

    def empty_inputs(self, problem: Problem, rank: int) -> dict[str, Array]:
        return {"all_grads": expert_array(problem, problem.case.num_experts)}

    def fill(self, problem: Problem, rank: int, draw: int, inputs: Mapping[str, Array]) -> None:
        present = np.flatnonzero(needed_by(problem)[rank])
        expert_rows(problem, gradient_keys(rank, present), draw).fill(inputs["all_grads"], present)
        for expert in np.flatnonzero(~needed_by(problem)[rank]):
            inputs["all_grads"][expert] = np.nan

    def row_plan(self, problem: Problem) -> RowPlan:
        has_gradient = needed_by(problem)
        placement = problem.placement

        def entries() -> Entries:
            parts = [
                (src, expert, owner, local)
                for owner, experts in enumerate(placement.experts_of_rank)
                for local, expert in enumerate(experts)
                for src in np.flatnonzero(has_gradient[:, expert])
            ]
            return Entries(*np.array(parts, dtype=np.int64).reshape(-1, 4).T)

        rows_out = tuple(map(int, placement.local_counts))
        stage = Stage("reduce", "sum", expert_fields(problem), rows_out, entries, lambda: contributed_pairs(problem))
        return RowPlan(placement.ranks, stage, (stage,))

    def moves(self, case: Case) -> tuple[Move, ...]:
        if case.variant == "in_place":
            return (Move("all_grads", "all_grads", target_held=True),)
        return (Move("all_grads", "grads"),)

    def expected(self, problem: Problem, rank: int, draw: int) -> Iterator[Expected]:
        held = problem.placement.experts_of_rank[rank]
        in_place = problem.case.variant == "in_place"
        sums = summed_gradients(problem, held, draw, "all_grads" if in_place else "grads")
        for expected in sums:
            yield expected if in_place else expected._replace(rows=problem.placement.local_id[rank, expected.rows])

    def bytes(self, problem: Problem) -> Bytes:
        pairs = contributed_pairs(problem)
        return expert_bytes(problem, int(pairs.sum()), pairs, self.row_plan(problem))


def contributed_pairs(problem: Problem) -> IntArray:
    """Gradients that go from each rank to each owner, shape [ranks, ranks]."""
    owned = problem.placement.local_id >= 0
    pairs: IntArray = needed_by(problem).astype(np.int64) @ owned.T.astype(np.int64)
    return pairs


def gradient_keys(rank: int | IntArray, experts: int | IntArray) -> IntArray:
    """Keys of gradient rows, distinct from those of parameters."""
    return np.asarray((np.asarray(rank) + 1 << 40) + np.asarray(experts), dtype=np.int64)


def summed_gradients(problem: Problem, experts: tuple[int, ...], draw: int, name: str) -> Iterator[Expected]:
    """The float64 sum of each expert's gradients in pieces, row number = expert."""
    for expert in experts:
        ranks = np.flatnonzero(needed_by(problem)[:, expert])
        terms = expert_rows(problem, gradient_keys(ranks, expert), draw)
        # Sixteen-bit partners add in a tree and round after every addition, so each term may cost one rounding.
        rounded = problem.dtype.epsilon * max(1, len(ranks) - 1) + len(ranks) * 2.0**-23
        tolerance = np.array([len(ranks) * BOUND * rounded])
        for _, columns in pieces(1, problem.case.expert_elements or 0, problem.dtype):
            total = np.zeros((1, columns.stop - columns.start))
            for row in range(len(ranks)):
                term = terms.of(Piece(slice(row, row + 1), columns)).astype(np.float64)
                total = np.add(total, term, out=term) if row else term
            yield Expected(name, np.array([expert]), total, tolerance, columns.start)


REDUCE_SCATTER_EXPERT_GRADS = ReduceScatterExpertGrads()
