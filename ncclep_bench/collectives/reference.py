"""The plain reference: the choices of a problem listed one by one, sharing nothing with plans, layouts or backends."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ncclep_bench.collectives.contract import Expected, Problem
from ncclep_bench.collectives.rows import Piece, Rows, pieces


class Choices(NamedTuple):
    """Valid (token, expert) choices, ordered by source rank, token, choice; `token` is the number within its rank."""

    source: npt.NDArray[np.int64]
    token: npt.NDArray[np.int64]
    slot: npt.NDArray[np.int64]
    expert: npt.NDArray[np.int64]
    rank: npt.NDArray[np.int64]
    local: npt.NDArray[np.int64]
    weight: npt.NDArray[np.float32]

    def where(self, mask: npt.NDArray[np.bool_]) -> Choices:
        """The choices that `mask` selects."""
        return Choices._make(column[mask] for column in self)

    def ordered(self, *keys: npt.NDArray[np.int64]) -> Choices:
        """The choices sorted by `keys`, most significant first."""
        order = np.lexsort(keys[::-1])
        return Choices._make(column[order] for column in self)


def choices_of(problem: Problem, source: int | None = None) -> Choices:
    """The valid choices of all tokens, or of the tokens of rank `source`."""
    assert problem.routing is not None, "a token collective has a routing"
    held = problem.placement.experts_of_rank
    home = [
        [rank for rank, experts in enumerate(held) if expert in experts] for expert in range(problem.case.num_experts)
    ]
    position = {(rank, expert): local for rank, experts in enumerate(held) for local, expert in enumerate(experts)}
    parts = []
    for rank in range(len(held)) if source is None else (source,):
        serving = [rank if rank in owners else owners[rank % len(owners)] for owners in home]
        local = [position[owner, expert] for expert, owner in enumerate(serving)]
        topk_idx, topk_weights = problem.routing.of_rank(rank)
        token, slot = np.nonzero(topk_idx >= 0)
        expert = topk_idx[token, slot].astype(np.int64)
        parts.append(
            Choices(
                np.full(len(token), rank),
                token,
                slot,
                expert,
                np.array(serving)[expert],
                np.array(local)[expert],
                topk_weights[token, slot],
            )
        )
    return Choices._make(np.concatenate(column) for column in zip(*parts, strict=True))


def token_key(problem: Problem, source: npt.NDArray[np.int64], token: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """The key of a token's row contents."""
    return source * (problem.case.tokens or 0) + token


def expert_output_key(problem: Problem, choices: Choices) -> npt.NDArray[np.int64]:
    """The key of the row an expert makes of a token."""
    return (choices.expert + 1 << 40) + token_key(problem, choices.source, choices.token)


def token_rows(problem: Problem, keys: npt.NDArray[np.int64], draw: int) -> Rows:
    """Contents of rows of a token's size, shape [keys, hidden]."""
    return Rows(keys, problem.case.hidden or 0, problem.case.seed, draw, problem.dtype)


def copies(name: str, at: npt.NDArray[np.int64], contents: Rows) -> Iterator[Expected]:
    """Row i of `contents`, bit for bit, in row at[i] of an output."""
    for piece in contents.pieces():
        yield Expected(name, at[piece.rows], contents.of(piece), 0, piece.columns.start)


def weighted_sums(
    problem: Problem, choices: Choices, group: npt.NDArray[np.int64], count: int, draw: int
) -> Iterator[tuple[Piece, npt.NDArray[np.float64]]]:
    """Σ weight · expert output over the choices of each of `count` groups, `group` (ascending) being each choice's.

    In float64, in pieces; outputs are rounded to the case's dtype first, as the experts hand them over.
    """
    outputs = token_rows(problem, expert_output_key(problem, choices), draw)
    weight = choices.weight.astype(np.float64)
    first = np.searchsorted(group, np.arange(count + 1)).tolist()
    for piece in pieces(count, problem.case.hidden or 0, problem.dtype, terms=problem.case.top_k or 1):
        start, stop = first[piece.rows.start], first[piece.rows.stop]
        terms = outputs.of(Piece(slice(start, stop), piece.columns)).astype(np.float64)
        terms *= weight[start:stop, None]
        sums = np.empty((piece.rows.stop - piece.rows.start, terms.shape[1]))
        for total, row in zip(sums, range(piece.rows.start, piece.rows.stop), strict=True):
            np.add.reduce(terms[first[row] - start : first[row + 1] - start], axis=0, out=total)
        yield piece, sums
