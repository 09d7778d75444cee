"""The routing of all tokens of a case, the same for every rank count: it depends on seed and global token alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from ncclep_bench.errors import InputError
from ncclep_bench.model.case import Case
from ncclep_bench.model.scenario import ExpertLoad
from ncclep_bench.registry import ROUTINGS

BLOCK_TOKENS = 1024
"""Global tokens that share one random stream; whole blocks are drawn, so a short routing is a prefix of a long one."""

_SMALLEST = float(np.finfo(np.float32).tiny)
_NO_LOADS: Mapping[str, ExpertLoad] = {}


Chosen = tuple[npt.NDArray[Any], npt.NDArray[np.float64] | None]
"""Experts [tokens, top_k] (−1 masked, else distinct in a token) and raw weights, which need not be normalised, or None
where the law has none."""


class Routing(Protocol):
    """A law by which tokens choose experts; its constructor checks `routing_param`."""

    def __init__(self, case: Case, *, expert_load: Mapping[str, ExpertLoad], directory: Path | None) -> None:
        """Raises InputError naming `routing_param`, its value and what is allowed."""

    def choose(self, first_token: int, count: int, rng: np.random.Generator) -> Chosen:
        """The choices of `count` consecutive global tokens."""


@dataclass(frozen=True)
class TokenRouting:
    """Every token's experts and weights; tokens of rank 0 first, then of rank 1, and so on.

    `topk_idx`: int32 [tokens_total, top_k], −1 = masked. `topk_weights`: float32 of that shape, 0 where masked, else
    positive; the valid ones of a token sum to 1. Both are read-only when `token_routing` made them.
    """

    num_experts: int
    topk_idx: npt.NDArray[np.int32]
    topk_weights: npt.NDArray[np.float32]
    tokens_per_rank: tuple[int, ...]

    @property
    def top_k(self) -> int:
        return int(self.topk_idx.shape[1])

    @property
    def tokens_total(self) -> int:
        return len(self.topk_idx)

    @cached_property
    def offsets(self) -> npt.NDArray[np.int64]:
        """First global token of each rank and, last, the total, shape [ranks + 1]."""
        return np.concatenate(([0], np.cumsum(self.tokens_per_rank, dtype=np.int64))).astype(np.int64)

    def of_rank(self, rank: int) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.float32]]:
        """Views of one rank's experts and weights, [tokens_per_rank[rank], top_k] each."""
        mine = slice(self.offsets[rank], self.offsets[rank + 1])
        return self.topk_idx[mine], self.topk_weights[mine]


def token_routing(
    case: Case, *, expert_load: Mapping[str, ExpertLoad] = _NO_LOADS, directory: Path | None = None
) -> TokenRouting:
    """The routing of a case; without `routing`, uniform.

    `expert_load`: the scenario's table, for routing "measured". `directory`: the scenario file's folder, for "trace".
    A masked choice is decided per entry with probability `masked_share`; it changes neither the other choices nor,
    but for their sum, the other weights. Raises InputError naming the key at fault, its value and what is allowed.
    """
    tokens, top_k, empty_ranks = _sizes(case)
    routing: Routing = ROUTINGS.get(case.routing or "uniform")(case, expert_load=expert_load, directory=directory)
    total = (case.ranks - empty_ranks) * tokens
    topk_idx = np.empty((total, top_k), dtype=np.int32)
    topk_weights = np.empty((total, top_k), dtype=np.float32)
    for first in range(0, total, BLOCK_TOKENS):
        rng = random_stream(case.seed, first // BLOCK_TOKENS)
        chosen, raw = routing.choose(first, BLOCK_TOKENS, rng)
        if raw is None:
            raw = rng.uniform(0.125, 1.0, chosen.shape)
        if case.masked_share:
            chosen = np.where(rng.random(chosen.shape) < case.masked_share, -1, chosen)
        count = min(BLOCK_TOKENS, total - first)
        topk_idx[first : first + count] = chosen[:count]
        topk_weights[first : first + count] = _normalised(raw[:count], chosen[:count] >= 0)
    topk_idx.flags.writeable = topk_weights.flags.writeable = False
    per_rank = (tokens,) * (case.ranks - empty_ranks) + (0,) * empty_ranks
    return TokenRouting(case.num_experts, topk_idx, topk_weights, per_rank)


def random_stream(seed: int, block: int) -> np.random.Generator:
    """The random stream of one block of tokens, or of the law itself (block −1)."""
    key = np.array([seed, block % (1 << 64)], dtype=np.uint64)
    return np.random.Generator(np.random.Philox(key=key))


def _sizes(case: Case) -> tuple[int, int, int]:
    if case.tokens is None:
        raise InputError(f"tokens is missing, {case.collective!r} routes tokens", hint="allowed: 0 or more per rank")
    allowed_top_k = f"allowed: 1 to {case.num_experts}"
    if case.top_k is None:
        raise InputError(f"top_k is missing, {case.collective!r} routes tokens", hint=allowed_top_k)
    if case.top_k > case.num_experts:
        raise InputError(f"top_k {case.top_k} exceeds num_experts {case.num_experts}", hint=allowed_top_k)
    empty_ranks = case.empty_ranks or 0
    if empty_ranks > case.ranks:
        raise InputError(f"empty_ranks {empty_ranks} exceeds ranks {case.ranks}", hint=f"allowed: 0 to {case.ranks}")
    return case.tokens, case.top_k, empty_ranks


def _normalised(raw: npt.NDArray[np.float64], valid: npt.NDArray[np.bool_]) -> npt.NDArray[np.float32]:
    """Weights that sum to 1 over a token's valid choices; a zero becomes the smallest float32: its row still moves."""
    weights = np.where(valid, raw, 0.0)
    # Dividing by the largest first keeps the sum of huge weights finite.
    largest = weights.max(axis=1, keepdims=True)
    weights = np.where(valid, np.maximum(weights / np.where(largest > 0, largest, 1.0), _SMALLEST), 0.0)
    total = weights.sum(axis=1, keepdims=True)
    weights /= np.where(total > 0, total, 1.0)
    return np.where(valid, np.maximum(weights, _SMALLEST), 0.0).astype(np.float32)
