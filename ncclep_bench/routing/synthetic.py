"""Routings that a formula gives, from balanced to everything on one expert."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from ncclep_bench.errors import InputError
from ncclep_bench.model.case import Case
from ncclep_bench.model.scenario import ExpertLoad
from ncclep_bench.routing.sampling import DistinctDraw
from ncclep_bench.routing.token_routing import Chosen, random_stream


class Uniform:
    """Every set of top_k experts is equally likely; takes no `routing_param`."""

    def __init__(self, case: Case, *, expert_load: Mapping[str, ExpertLoad], directory: Path | None) -> None:
        _no_param(case)
        self._draw = DistinctDraw(np.ones(case.num_experts), case.top_k or 1)

    def choose(self, first_token: int, count: int, rng: np.random.Generator) -> Chosen:
        return self._draw.draw(count, rng), None


class Zipf:
    """The i-th most popular expert (from 0) is drawn in proportion to 1 / (i + 1)^s; `routing_param` = s, default 1.

    Which expert is the i-th is a permutation by seed, so that the hottest one is not always on rank 0.
    """

    def __init__(self, case: Case, *, expert_load: Mapping[str, ExpertLoad], directory: Path | None) -> None:
        s = _number(case, default=1.0, largest=10.0)
        place = random_stream(case.seed, -1).permutation(case.num_experts).astype(np.float64)
        self._draw = DistinctDraw((place + 1.0) ** -s, case.top_k or 1)

    def choose(self, first_token: int, count: int, rng: np.random.Generator) -> Chosen:
        return self._draw.draw(count, rng), None


class LogNormal:
    """An expert's popularity is exp(N(0, sigma)), drawn once by seed; `routing_param` = sigma, default 1."""

    def __init__(self, case: Case, *, expert_load: Mapping[str, ExpertLoad], directory: Path | None) -> None:
        sigma = _number(case, default=1.0, largest=10.0)
        popularity = np.exp(random_stream(case.seed, -1).normal(0.0, sigma, case.num_experts))
        self._draw = DistinctDraw(popularity, case.top_k or 1)

    def choose(self, first_token: int, count: int, rng: np.random.Generator) -> Chosen:
        return self._draw.draw(count, rng), None


class GroupLimited:
    """Experts form n equal consecutive groups; a token takes m groups and its top_k experts within them, all uniform.

    `routing_param` = "n:m", e.g. "8:4" for DeepSeek-V3; n must divide num_experts, and m groups hold top_k experts.
    """

    def __init__(self, case: Case, *, expert_load: Mapping[str, ExpertLoad], directory: Path | None) -> None:
        top_k = case.top_k or 1
        match = re.fullmatch(r"(\d{1,9}):(\d{1,9})", str(case.routing_param))
        groups, taken = (int(match[1]), int(match[2])) if match else (0, 0)
        equal = 1 <= taken <= groups and case.num_experts % groups == 0
        if not equal or taken * case.num_experts // groups < top_k:
            raise _refused(
                case,
                f'"n:m", n groups that divide num_experts {case.num_experts}, of which a token takes m ≤ n that hold '
                f"at least top_k {top_k} experts",
            )
        self._size = case.num_experts // groups
        self._groups = DistinctDraw(np.ones(groups), taken)
        self._places = DistinctDraw(np.ones(taken * self._size), top_k)

    def choose(self, first_token: int, count: int, rng: np.random.Generator) -> Chosen:
        groups = self._groups.draw(count, rng)
        place = self._places.draw(count, rng)
        return np.take_along_axis(groups, place // self._size, axis=1) * self._size + place % self._size, None


class RoundRobin:
    """Choice k of global token g is expert (g × top_k + k) mod num_experts: even load; takes no `routing_param`."""

    def __init__(self, case: Case, *, expert_load: Mapping[str, ExpertLoad], directory: Path | None) -> None:
        _no_param(case)
        self._num_experts = case.num_experts
        self._top_k = case.top_k or 1

    def choose(self, first_token: int, count: int, rng: np.random.Generator) -> Chosen:
        choice = np.arange(first_token * self._top_k, (first_token + count) * self._top_k, dtype=np.int64)
        return (choice % self._num_experts).reshape(count, self._top_k), None


class AllToOne:
    """Every token takes experts p, p + 1, … (mod num_experts): the worst case; `routing_param` = p, default 0."""

    def __init__(self, case: Case, *, expert_load: Mapping[str, ExpertLoad], directory: Path | None) -> None:
        first = _number(case, default=0.0, largest=case.num_experts - 1)
        if not first.is_integer():
            raise _refused(case, f"an expert, 0 to {case.num_experts - 1}")
        self._experts = (int(first) + np.arange(case.top_k or 1)) % case.num_experts

    def choose(self, first_token: int, count: int, rng: np.random.Generator) -> Chosen:
        return np.tile(self._experts, (count, 1)), None


def _number(case: Case, *, default: float, largest: float) -> float:
    """`routing_param` as a number from 0 to `largest`."""
    if case.routing_param is None:
        return default
    try:
        value = float(case.routing_param)
    except ValueError:
        value = math.nan
    if not 0 <= value <= largest:
        raise _refused(case, f"a number from 0 to {largest:g}")
    return value


def _no_param(case: Case) -> None:
    if case.routing_param is not None:
        raise _refused(case, "no routing_param; leave it out")


def _refused(case: Case, allowed: str) -> InputError:
    return InputError(
        f"routing_param {case.routing_param!r} cannot be used with routing {case.routing!r}", hint=f"allowed: {allowed}"
    )
