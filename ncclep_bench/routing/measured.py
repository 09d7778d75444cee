"""Routing whose expert loads are those counted in a real model."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import numpy.typing as npt

from ncclep_bench.errors import InputError
from ncclep_bench.model.case import Case
from ncclep_bench.model.scenario import ExpertLoad
from ncclep_bench.routing.token_routing import Chosen

_SHUFFLE_TOKENS = 32
"""Tokens that share one order of experts."""


class MeasuredLoad:
    """Each expert gets its measured share of the choices; `routing_param` names an entry of `expert_load`.

    Drawing top_k distinct experts one after the other in proportion to the counts would flatten the load, so an expert
    is included with probability exactly top_k × its share, by systematic sampling (Madow 1949) over experts in random
    order. An expert whose share exceeds 1 / top_k, which no routing with that top_k can have, goes to every token and
    the others share the rest. What counts do not tell, which experts come together, is as good as independent here.
    """

    def __init__(self, case: Case, *, expert_load: Mapping[str, ExpertLoad], directory: Path | None) -> None:
        name = case.routing_param
        if not isinstance(name, str) or name not in expert_load:
            known = ", ".join(expert_load) or "none, the scenario has no [expert_load.NAME] table"
            raise InputError(
                f'routing_param {name!r} names no measured load for routing "measured"', hint=f"allowed: {known}"
            )
        counts = np.array(expert_load[name].counts, dtype=np.float64)
        if len(counts) != case.num_experts:
            raise InputError(
                f"routing_param {name!r}: expert_load.{name}.counts has {len(counts)} entries, "
                f"num_experts is {case.num_experts}",
                hint=f"allowed: num_experts = {len(counts)}",
            )
        top_k = case.top_k or 1
        if np.count_nonzero(counts) < top_k:
            raise InputError(
                f"routing_param {name!r}: only {np.count_nonzero(counts)} of expert_load.{name}.counts are positive, "
                f"top_k {top_k} needs as many",
                hint=f"allowed: top_k from 1 to {np.count_nonzero(counts)}" if counts.any() else "give measured counts",
            )
        self._always, self._drawn, self._inclusion = _inclusion(counts, top_k)

    def choose(self, first_token: int, count: int, rng: np.random.Generator) -> Chosen:
        always = np.tile(self._always, (count, 1))
        drawn = round(self._inclusion.sum())
        if not drawn:
            return always, None
        chosen = np.empty((count, drawn), dtype=np.int64)
        for first in range(0, count, _SHUFFLE_TOKENS):
            order = rng.permutation(len(self._drawn))
            reach = np.cumsum(self._inclusion[order])
            reach *= drawn / reach[-1]
            # On a grid of 2^-40 the points start + 0, 1, 2, … are exact and stay below the last reach.
            start = rng.integers(0, 1 << 40, size=(min(_SHUFFLE_TOKENS, count - first), 1)) / (1 << 40)
            place = np.searchsorted(reach, start + np.arange(drawn), side="right")
            chosen[first : first + _SHUFFLE_TOKENS] = self._drawn[order][place]
        return np.concatenate((always, chosen), axis=1), None


def _inclusion(
    counts: npt.NDArray[np.float64], top_k: int
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], npt.NDArray[np.float64]]:
    """Experts that every token has, the others, and the others' probabilities: below 1, and they sum to the rest."""
    always = np.zeros(len(counts), dtype=bool)
    while True:
        rest = top_k - np.count_nonzero(always)
        open_counts = np.where(always, 0.0, counts)
        inclusion = rest * open_counts / open_counts.sum() if rest else open_counts * 0.0
        # Within 1e-9 of 1, rounding could let two points fall on one expert.
        full = inclusion > 1 - 1e-9
        if not full.any():
            drawn = np.flatnonzero(~always)
            return np.flatnonzero(always), drawn, inclusion[drawn]
        always |= full
