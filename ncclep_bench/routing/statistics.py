"""How uneven a routing is."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ncclep_bench.model.placement import Placement
from ncclep_bench.routing.assignment import destinations
from ncclep_bench.routing.token_routing import TokenRouting


class RoutingStatistics(NamedTuple):
    """Figures of one routing over one placement; each is 0 where there is no valid choice.

    `distinct_ranks_per_token`: mean ranks a token goes to, its own included. `hottest_expert`: tokens of the hottest
    expert / mean. `imbalance`: largest rank load / mean rank load, load = valid choices that land on a rank.
    `load_cv`: standard deviation / mean of tokens per expert.
    """

    distinct_ranks_per_token: float
    hottest_expert: float
    imbalance: float
    load_cv: float


def routing_statistics(routing: TokenRouting, placement: Placement) -> RoutingStatistics:
    """The figures of a routing whose ranks are those of the placement."""
    source_rank = np.repeat(np.arange(placement.ranks), routing.tokens_per_rank)[:, None]
    valid = routing.topk_idx >= 0
    if not valid.any():
        return RoutingStatistics(0.0, 0.0, 0.0, 0.0)
    dst_rank, _ = destinations(routing.topk_idx, source_rank, placement)
    ascending = np.sort(dst_rank, axis=1)
    first_visit = ascending >= 0
    first_visit[:, 1:] &= ascending[:, 1:] != ascending[:, :-1]
    expert_load = np.bincount(routing.topk_idx[valid], minlength=routing.num_experts)
    rank_load = np.bincount(dst_rank[valid], minlength=placement.ranks)
    return RoutingStatistics(
        distinct_ranks_per_token=float(first_visit.sum() / routing.tokens_total),
        hottest_expert=float(expert_load.max() / expert_load.mean()),
        imbalance=float(rank_load.max() / rank_load.mean()),
        load_cv=float(expert_load.std() / expert_load.mean()),
    )
