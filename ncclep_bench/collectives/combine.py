"""Combine: expert outputs back to the rank of their token, one row per token."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np

from ncclep_bench.collectives.contract import TOKEN_AXES, Array, Bytes, Collective, Expected, Move, Problem, sum_waiver
from ncclep_bench.collectives.dispatch import DISPATCH, expert_positions, token_bytes, token_row_fields
from ncclep_bench.collectives.reference import choices_of, expert_output_key, token_rows, weighted_sums
from ncclep_bench.collectives.rows import BOUND
from ncclep_bench.model.case import Case
from ncclep_bench.model.plan import RowPlan, reduce_then_wire


class Combine(Collective):
    """Sum over a token's experts, accumulated in float32.

    expert_major: input `rows` [n, hidden] lie as dispatch laid them out, one per choice; they are weighted and added up
    on the expert's rank before they cross. flat and rank_major: input `rows` [n, hidden], one per received token, which
    the caller has already weighted and added up. Output `tokens` [tokens, hidden]; a fully masked token is zero.
    """

    name = "combine"
    axes = TOKEN_AXES
    partner = "padded_all_to_all"

    def waiver(self, case: Case) -> str | None:
        return sum_waiver(case) or DISPATCH.waiver(case)

    def empty_inputs(self, problem: Problem, rank: int) -> dict[str, Array]:
        return {"rows": np.zeros((problem.layout.received_rows[rank], problem.case.hidden or 0), problem.dtype.numpy)}

    def fill(self, problem: Problem, rank: int, draw: int, inputs: Mapping[str, Array]) -> None:
        choices = choices_of(problem)
        choices = choices.where(choices.rank == rank)
        rows = inputs["rows"]
        if problem.case.layout == "expert_major":
            choices = choices.ordered(choices.local, choices.source, choices.token)
            counts = np.bincount(choices.local, minlength=len(problem.placement.experts_of_rank[rank]))
            outputs = token_rows(problem, expert_output_key(problem, choices), draw)
            outputs.fill(rows, expert_positions(problem, counts))
            return
        new = np.ones(len(choices.token), dtype=bool)
        new[1:] = (choices.source[1:] != choices.source[:-1]) | (choices.token[1:] != choices.token[:-1])
        source = choices.source[new]
        position = np.arange(len(source))
        if problem.case.layout == "rank_major":
            per_source = np.bincount(source, minlength=problem.placement.ranks)
            within = position - np.repeat(np.cumsum(per_source) - per_source, per_source)
            position = source * (len(rows) // problem.placement.ranks) + within
        for piece, sums in weighted_sums(problem, choices, np.cumsum(new) - 1, len(source), draw):
            rows[position[piece.rows], piece.columns] = sums.astype(np.float32).astype(rows.dtype)

    def row_plan(self, problem: Problem) -> RowPlan:
        layout = problem.layout
        pre_reduced = problem.case.layout != "expert_major"
        whole = layout.combine_stage(token_row_fields(problem), "sum" if pre_reduced else "weighted_sum")
        stages = (whole,) if pre_reduced else reduce_then_wire(whole, layout.ranks)
        return RowPlan(layout.ranks, whole, stages)

    def moves(self, case: Case) -> tuple[Move, ...]:
        return (Move("rows", "tokens"),)

    def expected(self, problem: Problem, rank: int, draw: int) -> Iterator[Expected]:
        yield from combined_tokens(problem, rank, draw)

    def bytes(self, problem: Problem) -> Bytes:
        return token_bytes(problem, self.row_plan(problem))


def combined_tokens(problem: Problem, rank: int, draw: int) -> Iterator[Expected]:
    """Σ weight · expert output of every token of `rank`, whatever way it came back.

    Tolerance: each partial sum and the result are rounded once to the dtype, float32 sums once per term.
    """
    choices = choices_of(problem, rank)
    assert problem.routing is not None
    tokens = np.arange(problem.routing.tokens_per_rank[rank])
    magnitude = np.bincount(choices.token, np.abs(choices.weight), minlength=len(tokens)) * BOUND
    tolerance = magnitude * rounding(problem, terms=problem.case.top_k or 1)
    for piece, sums in weighted_sums(problem, choices, choices.token, len(tokens), draw):
        yield Expected("tokens", tokens[piece.rows], sums, tolerance[piece.rows], piece.columns.start)


def rounding(problem: Problem, terms: int) -> float:
    """Relative error that `terms` float32 additions and two roundings to the dtype may leave."""
    return problem.dtype.epsilon + (terms + 2) * 2.0**-23


COMBINE = Combine()
