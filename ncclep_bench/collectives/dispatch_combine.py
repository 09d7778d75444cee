"""The chained pair: dispatch, identity experts, combine, over and over without a host synchronisation between pairs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np

from ncclep_bench.collectives.combine import rounding
from ncclep_bench.collectives.contract import TOKEN_AXES, Array, Bytes, Collective, Expected, Move, Problem, sum_waiver
from ncclep_bench.collectives.dispatch import DISPATCH, dispatch_fields, token_bytes, token_row_fields
from ncclep_bench.collectives.reference import token_key, token_rows
from ncclep_bench.collectives.rows import BOUND
from ncclep_bench.model.case import Case
from ncclep_bench.model.plan import RowPlan, reduce_then_wire, wire_then_expand


class DispatchCombine(Collective):
    """`chain` pairs per sample, reported per pair; the experts hand tokens on unchanged.

    Input `tokens` [tokens, hidden]; output `tokens` [tokens, hidden] = token × the sum of its valid weights. In the
    flat and rank_major layouts the owner applies the weights of each rank's row, since identity experts leave rows
    unweighted.
    """

    name = "dispatch_combine"
    axes = TOKEN_AXES | {"chain"}
    partner = "padded_all_to_all"

    def waiver(self, case: Case) -> str | None:
        return sum_waiver(case) or DISPATCH.waiver(case)

    def empty_inputs(self, problem: Problem, rank: int) -> dict[str, Array]:
        return DISPATCH.empty_inputs(problem, rank)

    def fill(self, problem: Problem, rank: int, draw: int, inputs: Mapping[str, Array]) -> None:
        DISPATCH.fill(problem, rank, draw, inputs)

    def row_plan(self, problem: Problem) -> RowPlan:
        layout = problem.layout
        there = layout.dispatch_stage(dispatch_fields(problem))
        back = layout.combine_stage(token_row_fields(problem), "weighted_sum")
        expert_major = problem.case.layout == "expert_major"
        stages = (
            *(wire_then_expand(there, layout.ranks) if expert_major else (there,)),
            *(reduce_then_wire(back, layout.ranks) if expert_major else (back,)),
        )
        return RowPlan(layout.ranks, layout.pair_stage(), stages)

    def moves(self, case: Case) -> tuple[Move, ...]:
        return (Move("tokens", "tokens"),)

    def expected(self, problem: Problem, rank: int, draw: int) -> Iterator[Expected]:
        yield from scaled_tokens(problem, rank, draw)

    def bytes(self, problem: Problem) -> Bytes:
        return token_bytes(problem, self.row_plan(problem), ways=2)


def scaled_tokens(problem: Problem, rank: int, draw: int) -> Iterator[Expected]:
    """Each token of `rank` times the sum of its valid weights: what identity experts give back."""
    assert problem.routing is not None
    topk_idx, topk_weights = problem.routing.of_rank(rank)
    total = np.where(topk_idx >= 0, topk_weights, 0).astype(np.float64).sum(axis=1)
    tokens = np.arange(len(total))
    sent = token_rows(problem, token_key(problem, np.full_like(tokens, rank), tokens), draw)
    tolerance = BOUND * total * rounding(problem, terms=problem.case.top_k or 1)
    for piece in sent.pieces():
        values = sent.of(piece).astype(np.float64)
        values *= total[piece.rows, None]
        yield Expected("tokens", tokens[piece.rows], values, tolerance[piece.rows], piece.columns.start)


DISPATCH_COMBINE = DispatchCombine()
