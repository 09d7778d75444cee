"""Dispatch: every token once to each rank that holds one of its experts, laid out flat, per expert or per source."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np

from ncclep_bench.collectives.contract import (
    TOKEN_AXES,
    Array,
    Bytes,
    Collective,
    Expected,
    Move,
    Problem,
    crossing_bytes,
)
from ncclep_bench.collectives.reference import choices_of, copies, token_key, token_rows
from ncclep_bench.collectives.rows import scales
from ncclep_bench.model.case import Case
from ncclep_bench.model.dtype import SCALE_BLOCK, dtype_named
from ncclep_bench.model.ep_config import LAYOUTS
from ncclep_bench.model.plan import Field, RowPlan, wire_then_expand


class Dispatch(Collective):
    """Rows of tokens (with scales for float8), their weights and local expert ids, and the counts.

    Outputs of a rank, n rows in the case's layout: `tokens` [n, hidden]; `scales` [n, hidden/128] float32 (float8
    only); `topk_weights` and `topk_idx` [n, top_k] with local expert ids, 0 and −1 where a choice is elsewhere
    (expert_major: `topk_weights` [n], the one choice the row stands for); `expert_counts` [local experts] and
    `source_counts` [ranks]. Rows: local expert, source rank, token (flat and rank_major: source rank, token). Padding
    and unused slots are left as they are.
    """

    name = "dispatch"
    axes = TOKEN_AXES
    partner = "padded_all_to_all"

    def waiver(self, case: Case) -> str | None:
        mode = case.mode or "ht"
        if case.layout not in LAYOUTS[mode]:
            return f"mode {mode} has no layout {case.layout}; it has {', '.join(LAYOUTS[mode])}"
        if dtype_named(case.dtype).scaled and (case.hidden or 0) % SCALE_BLOCK:
            return f"hidden {case.hidden} is not a multiple of {SCALE_BLOCK}, the elements of one {case.dtype} scale"
        return None

    def empty_inputs(self, problem: Problem, rank: int) -> dict[str, Array]:
        assert problem.routing is not None
        count, hidden = problem.routing.tokens_per_rank[rank], problem.case.hidden or 0
        tokens = {"tokens": np.zeros((count, hidden), problem.dtype.numpy)}
        return tokens | (
            {"scales": np.zeros((count, hidden // SCALE_BLOCK), np.float32)} if problem.dtype.scaled else {}
        )

    def fill(self, problem: Problem, rank: int, draw: int, inputs: Mapping[str, Array]) -> None:
        assert problem.routing is not None
        tokens = np.arange(problem.routing.tokens_per_rank[rank])
        keys = token_key(problem, np.full_like(tokens, rank), tokens)
        token_rows(problem, keys, draw).fill(inputs["tokens"])
        if problem.dtype.scaled:
            np.copyto(inputs["scales"], scales(keys, problem.case.hidden or 0, problem.case.seed, draw))

    def row_plan(self, problem: Problem) -> RowPlan:
        layout = problem.layout
        whole = layout.dispatch_stage(dispatch_fields(problem))
        stages = wire_then_expand(whole, layout.ranks) if problem.case.layout == "expert_major" else (whole,)
        return RowPlan(layout.ranks, whole, stages)

    def moves(self, case: Case) -> tuple[Move, ...]:
        if dtype_named(case.dtype).scaled:
            return (Move("tokens", "tokens"), Move("scales", "scales"))
        return (Move("tokens", "tokens"),)

    def handed_on(self, problem: Problem, rank: int) -> dict[str, Array]:
        return problem.layout.handed_on(rank)

    def expected(self, problem: Problem, rank: int, draw: int) -> Iterator[Expected]:
        choices = choices_of(problem)
        choices = choices.where(choices.rank == rank)
        layout = problem.case.layout
        experts = len(problem.placement.experts_of_rank[rank])
        counts = np.bincount(choices.local, minlength=experts)
        yield Expected("expert_counts", np.arange(experts), counts, 0)
        row = choices.source * (1 << 40) + choices.token
        first = np.flatnonzero(np.concatenate([[True], row[1:] != row[:-1]])) if len(row) else np.zeros(0, np.int64)
        per_source = np.bincount(choices.source[first], minlength=problem.placement.ranks)
        yield Expected("source_counts", np.arange(problem.placement.ranks), per_source, 0)
        if layout == "expert_major":
            choices = choices.ordered(choices.local, choices.source, choices.token)
            position = expert_positions(problem, counts)
            yield Expected("topk_weights", position, choices.weight, 0)
        else:
            position = np.arange(len(first))
            if layout == "rank_major":
                assert problem.routing is not None
                slots = max(problem.routing.tokens_per_rank)
                position = np.concatenate([source * slots + np.arange(n) for source, n in enumerate(per_source)])
            top_k = problem.case.top_k or 1
            line = np.repeat(np.arange(len(first)), np.diff(np.append(first, len(row))))
            weights = np.zeros((len(first), top_k), dtype=np.float32)
            local = np.full((len(first), top_k), -1)
            weights[line, choices.slot] = choices.weight
            local[line, choices.slot] = choices.local
            yield Expected("topk_weights", position, weights, 0)
            yield Expected("topk_idx", position, local, 0)
            choices = choices.where(np.isin(np.arange(len(row)), first))
        keys = token_key(problem, choices.source, choices.token)
        yield from copies("tokens", position, token_rows(problem, keys, draw))
        if problem.dtype.scaled:
            yield Expected("scales", position, scales(keys, problem.case.hidden or 0, problem.case.seed, draw), 0)

    def bytes(self, problem: Problem) -> Bytes:
        return token_bytes(problem, self.row_plan(problem))


def expert_positions(problem: Problem, counts: Array) -> Array:
    """Row of each arrival, ordered by local expert: blocks of `counts` rows, padded (ht) or of fixed capacity (ll)."""
    assert problem.routing is not None
    starts, start = [], 0
    for count in counts.tolist():
        starts.append(start)
        alignment = problem.case.alignment or 1
        capacity = problem.placement.ranks * max(problem.routing.tokens_per_rank)
        start += capacity if problem.case.mode == "ll" else -(-count // alignment) * alignment
    blocks = [start + np.arange(count) for start, count in zip(starts, counts.tolist(), strict=True)]
    return np.concatenate([np.zeros(0, dtype=np.int64), *blocks])


def token_row_fields(problem: Problem) -> tuple[Field, ...]:
    """The fields that are a token itself: its elements, and its scales in float8."""
    hidden, dtype = problem.case.hidden or 0, problem.dtype
    tokens = Field("tokens", hidden * dtype.itemsize, dtype.name if dtype.scaled else None)
    return (tokens, Field("scales", -(-hidden // SCALE_BLOCK) * 4)) if dtype.scaled else (tokens,)


def dispatch_fields(problem: Problem) -> tuple[Field, ...]:
    """The fields that cross in dispatch: the token, its weights and the local ids of its experts."""
    top_k = problem.case.top_k or 1
    return (*token_row_fields(problem), Field("topk_weights", 4 * top_k), Field("topk_idx", 4 * top_k))


def token_bytes(problem: Problem, plan: RowPlan, *, ways: int = 1) -> Bytes:
    """Byte figures of a token collective; `ways` = 2 for there and back."""
    assert problem.routing is not None
    row_bytes = sum(field.row_bytes for field in token_row_fields(problem))
    payload = int((problem.routing.topk_idx >= 0).sum()) * row_bytes * ways
    minimal, busiest = crossing_bytes(problem.layout.pair_rows, row_bytes)
    ranks = problem.placement.ranks
    return Bytes(
        payload,
        minimal * ways,
        busiest * ways,
        plan.traffic().total_bytes,
        0,
        payload // ranks,
        (ranks - 1) / ranks,
    )


DISPATCH = Dispatch()
