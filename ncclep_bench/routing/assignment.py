"""From chosen experts to ranks and their local experts."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from ncclep_bench.model.placement import Placement


def destinations(
    topk_idx: npt.NDArray[np.int32], source_rank: int | npt.NDArray[np.int64], placement: Placement
) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]]:
    """Rank that serves each choice and the expert's local id there, both int32 of `topk_idx`'s shape, −1 where masked.

    `source_rank`: the rank whose tokens these are, or one per token, shape [tokens, 1].
    """
    valid = topk_idx >= 0
    expert = np.where(valid, topk_idx, 0)
    dst_rank = placement.replica_rank[source_rank, expert]
    local_expert = placement.local_id[dst_rank, expert]
    return np.where(valid, dst_rank, np.int32(-1)), np.where(valid, local_expert, np.int32(-1))
