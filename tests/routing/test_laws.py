"""Each routing follows the law it states."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

from ncclep_bench.model.scenario import ExpertLoad
from ncclep_bench.routing.sampling import DistinctDraw
from ncclep_bench.routing.token_routing import TokenRouting, token_routing
from tests.cases import make_case


def routed(routing: str, routing_param: Any = None, **axes: Any) -> TokenRouting:
    loads = axes.pop("expert_load", {})
    case = make_case("dispatch", **{"routing": routing, "routing_param": routing_param, "ranks": 1, **axes})
    return token_routing(case, expert_load=loads)


def within_sampling_error(counts: Any, probability: Any, draws: int) -> bool:
    """Whether binomial counts lie within five standard deviations; seeds are fixed, so the answer never changes."""
    probability = np.asarray(probability)
    return bool(
        (np.abs(counts - draws * probability) <= 5 * np.sqrt(draws * probability * (1 - probability)) + 1e-6).all()
    )


@pytest.mark.parametrize("alike", [pytest.param(1, id="raced"), pytest.param(20, id="drawn again on a repeat")])
@pytest.mark.parametrize(
    ("popularity", "top_k"),
    [([4, 3, 2, 1], 2), ([4, 3, 0, 2, 1], 3), ([80, 10, 6, 4], 2), ([1, 1, 1, 1], 4), ([90, 5, 0, 5], 3)],
)
def test_distinct_draws_follow_the_law_of_one_after_the_other(popularity: list[int], top_k: int, alike: int) -> None:
    draws = 100_000
    share = np.array(popularity) / sum(popularity) / alike
    experts_of_class = np.repeat(np.arange(len(popularity)), alike)
    chosen = DistinctDraw(share[experts_of_class], top_k).draw(draws, np.random.default_rng(1))
    ascending = np.sort(chosen, axis=1)
    assert (ascending[:, 1:] != ascending[:, :-1]).all()
    base = len(popularity) ** np.arange(top_k)
    seen = np.bincount(experts_of_class[chosen] @ base, minlength=len(popularity) ** top_k)
    probability = np.zeros(len(seen))
    for order in itertools.product(range(len(popularity)), repeat=top_k):
        left, chance = 1.0, 1.0
        unused = [alike] * len(popularity)
        for kind in order:
            chance *= unused[kind] * share[kind] / left if unused[kind] else 0.0
            left = max(left - share[kind], 1e-12)
            unused[kind] -= 1 if unused[kind] else 0
        probability[np.dot(order, base)] = chance
    assert probability.sum() == pytest.approx(1)
    assert within_sampling_error(seen, probability, draws)


def test_uniform_gives_every_expert_its_share() -> None:
    idx = routed("uniform", tokens=50_000, num_experts=16, top_k=4).topk_idx
    assert within_sampling_error(np.bincount(idx.ravel(), minlength=16), np.full(16, 0.25), 50_000)


def test_zipf_popularity_falls_as_a_power_of_the_place() -> None:
    counts = np.bincount(routed("zipf", 1.2, tokens=100_000, num_experts=10, top_k=1).topk_idx.ravel(), minlength=10)
    popularity = np.arange(1, 11) ** -1.2
    assert within_sampling_error(np.sort(counts)[::-1], popularity / popularity.sum(), 100_000)


def test_the_hottest_expert_of_zipf_depends_on_the_seed() -> None:
    hottest = {
        int(np.bincount(routed("zipf", 2, tokens=200, seed=seed).topk_idx.ravel()).argmax()) for seed in range(8)
    }
    assert len(hottest) > 2


def test_lognormal_loads_spread_with_sigma() -> None:
    def spread(sigma: float) -> float:
        counts = np.bincount(
            routed("lognormal", sigma, tokens=20_000, num_experts=256, top_k=1).topk_idx.ravel(), minlength=256
        )
        return float(np.log(np.maximum(counts, 0.5)).std())

    assert spread(0.0) < 0.2
    assert spread(1.0) == pytest.approx(1.0, abs=0.2)


@pytest.mark.parametrize(("groups", "taken", "top_k"), [(8, 4, 8), (8, 1, 3), (4, 4, 6), (2, 1, 16)])
def test_group_limited_tokens_stay_within_their_groups_and_use_all_experts(groups: int, taken: int, top_k: int) -> None:
    idx = routed("group_limited", f"{groups}:{taken}", tokens=20_000, num_experts=32, top_k=top_k).topk_idx
    group = np.sort(idx // (32 // groups), axis=1)
    assert ((group[:, 1:] != group[:, :-1]).sum(axis=1) < taken).all()
    assert within_sampling_error(np.bincount(idx.ravel(), minlength=32), np.full(32, top_k / 32), 20_000)


def test_round_robin_and_all_to_one_are_what_their_formula_says() -> None:
    np.testing.assert_array_equal(
        routed("round_robin", tokens=4, num_experts=8, top_k=3).topk_idx, [[0, 1, 2], [3, 4, 5], [6, 7, 0], [1, 2, 3]]
    )
    np.testing.assert_array_equal(routed("all_to_one", 7, tokens=2, num_experts=8, top_k=3).topk_idx, [[7, 0, 1]] * 2)


@pytest.mark.parametrize(
    ("counts", "top_k"),
    [
        pytest.param([47396, 58718, 55366, 32510, 55049, 57385, 57170, 54198], 2, id="a layer of Mixtral"),
        pytest.param([100, 1, 0, 30, 30, 39], 2, id="one expert on every token, one on none"),
        pytest.param([7, 7, 7, 7], 4, id="all experts on every token"),
        pytest.param([3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3], 1, id="top-1"),
    ],
)
def test_measured_loads_come_out_as_they_were_counted(counts: list[int], top_k: int) -> None:
    load = {"here": ExpertLoad(counts=counts, source="counted", licence="CC0-1.0")}
    axes: dict[str, Any] = {"num_experts": len(counts), "top_k": top_k, "expert_load": load}
    idx = routed("measured", "here", tokens=100_000, **axes).topk_idx
    ascending = np.sort(idx, axis=1)
    assert (ascending[:, 1:] != ascending[:, :-1]).all()
    inclusion = top_k * np.array(counts) / sum(counts)
    assert within_sampling_error(np.bincount(idx.ravel(), minlength=len(counts)), inclusion, 100_000)


def test_a_measured_share_beyond_what_top_k_allows_goes_to_every_token_and_the_rest_keeps_its_proportions() -> None:
    load = {"skewed": ExpertLoad(counts=[900, 50, 30, 20], source="counted", licence="CC0-1.0")}
    idx = routed("measured", "skewed", tokens=50_000, num_experts=4, top_k=2, expert_load=load).topk_idx
    assert within_sampling_error(np.bincount(idx.ravel(), minlength=4), [1.0, 0.5, 0.3, 0.2], 50_000)


def test_measured_loads_pair_experts_of_like_load_alike() -> None:
    load = {"even": ExpertLoad(counts=[10] * 6, source="counted", licence="CC0-1.0")}
    idx = np.sort(routed("measured", "even", tokens=100_000, num_experts=6, top_k=2, expert_load=load).topk_idx, axis=1)
    pairs = np.bincount(idx[:, 0] * 6 + idx[:, 1], minlength=36)
    together = pairs[[first * 6 + second for first, second in itertools.combinations(range(6), 2)]]
    # Tokens that share an order of experts are alike, hence more spread than of independent draws.
    assert together.min() > 0.9 * 100_000 / 15
    assert together.max() < 1.1 * 100_000 / 15
