"""Which rank needs, or has a gradient of, which expert."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from ncclep_bench.model.case import Case
from ncclep_bench.model.placement import Placement


def activation(case: Case, placement: Placement) -> npt.NDArray[np.bool_]:
    """A random activation matrix, bool [ranks, num_experts].

    Its mean is case.active_share as nearly as whole experts allow. Every rank has the same number of active experts,
    within one; which ones, its own included, depends on the seed.
    """
    share = case.active_share or 0.0
    active = np.zeros((placement.ranks, placement.num_experts), dtype=bool)
    rng = np.random.Generator(np.random.Philox(key=[case.seed, 0xAC71]))
    # Cumulative rounding keeps the mean right where share × experts is not whole.
    bounds = np.rint(np.arange(placement.ranks + 1) * share * placement.num_experts).astype(int)
    for rank, count in enumerate(np.diff(bounds)):
        active[rank, rng.permutation(placement.num_experts)[:count]] = True
    return active
