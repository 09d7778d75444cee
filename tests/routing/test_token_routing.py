"""One global routing: whatever the rank count, however long, with whatever masked; and what each choice means."""

from __future__ import annotations

import tracemalloc
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ncclep_bench.errors import InputError
from ncclep_bench.model.case import Case
from ncclep_bench.model.placement import placement_of
from ncclep_bench.model.scenario import ExpertLoad
from ncclep_bench.routing.assignment import destinations
from ncclep_bench.routing.statistics import RoutingStatistics, routing_statistics
from ncclep_bench.routing.token_routing import BLOCK_TOKENS, TokenRouting, token_routing
from tests.cases import make_case

LOADS = {"real": ExpertLoad(counts=[5, 0, 9, 4, 1, 7, 2, 30, 8, 3, 6, 11], source="counted", licence="CC0-1.0")}
PARAMETERS: dict[str, list[Any]] = {
    "uniform": [None],
    "zipf": [None, 0, 1.5, 6.0],
    "lognormal": [None, 0.0, 3.0],
    "group_limited": ["4:2", "12:6", "1:1"],
    "round_robin": [None],
    "all_to_one": [None, 11],
    "measured": ["real"],
}


def routed(**axes: Any) -> TokenRouting:
    return token_routing(make_case("dispatch", **{"num_experts": 12, **axes}), expert_load=LOADS)


@st.composite
def laws(draw: st.DrawFn) -> dict[str, Any]:
    routing = draw(st.sampled_from(sorted(PARAMETERS)))
    return {
        "routing": routing,
        "routing_param": draw(st.sampled_from(PARAMETERS[routing])),
        "top_k": draw(st.integers(1, 6)),
        "masked_share": draw(st.sampled_from([None, 0.0, 0.4, 1.0])),
        "seed": draw(st.integers(0, 1 << 40)),
    }


@settings(max_examples=100, deadline=None)
@given(law=laws(), tokens=st.integers(0, 30), ranks=st.integers(1, 6), empty_ranks=st.integers(0, 6))
def test_a_routing_keeps_its_contract(law: dict[str, Any], tokens: int, ranks: int, empty_ranks: int) -> None:
    empty_ranks = min(empty_ranks, ranks)
    routing = routed(**law, tokens=tokens, ranks=ranks, empty_ranks=empty_ranks)
    assert routing.tokens_per_rank == (tokens,) * (ranks - empty_ranks) + (0,) * empty_ranks
    assert routing.tokens_total == tokens * (ranks - empty_ranks) == routing.offsets[-1]
    assert routing.top_k == law["top_k"]
    assert routing.topk_idx.dtype == np.int32
    assert routing.topk_weights.dtype == np.float32
    for experts, weights in zip(routing.topk_idx.tolist(), routing.topk_weights.tolist(), strict=True):
        valid = [expert for expert in experts if expert != -1]
        assert len(set(valid)) == len(valid)
        assert all(0 <= expert < 12 for expert in valid)
        assert all((weight > 0) == (expert != -1) for expert, weight in zip(experts, weights, strict=True))
        assert sum(weights) == pytest.approx(1.0 if valid else 0.0, abs=1e-6)
    for rank in range(ranks):
        experts_view, weights_view = routing.of_rank(rank)
        assert experts_view.base is not None
        assert len(experts_view) == len(weights_view) == routing.tokens_per_rank[rank]


@settings(max_examples=60, deadline=None)
@given(law=laws(), total=st.sampled_from([24, BLOCK_TOKENS, BLOCK_TOKENS + 48]), ranks=st.sampled_from([2, 3, 4, 8]))
def test_the_global_routing_is_the_same_for_every_rank_count(law: dict[str, Any], total: int, ranks: int) -> None:
    total -= total % ranks
    alone, together = routed(**law, ranks=1, tokens=total), routed(**law, ranks=ranks, tokens=total // ranks)
    np.testing.assert_array_equal(alone.topk_idx, together.topk_idx)
    np.testing.assert_array_equal(alone.topk_weights, together.topk_weights)


@settings(max_examples=60, deadline=None)
@given(law=laws(), short=st.integers(0, BLOCK_TOKENS + 40), empty_ranks=st.integers(0, 2))
def test_a_short_routing_is_a_prefix_of_a_long_one_and_empty_ranks_only_cut_it(
    law: dict[str, Any], short: int, empty_ranks: int
) -> None:
    long = routed(**law, ranks=1, tokens=2 * BLOCK_TOKENS + 80)
    part = routed(**law, ranks=2 + empty_ranks, tokens=short // 2, empty_ranks=empty_ranks)
    np.testing.assert_array_equal(part.topk_idx, long.topk_idx[: part.tokens_total])
    np.testing.assert_array_equal(part.topk_weights, long.topk_weights[: part.tokens_total])


def test_another_seed_gives_another_routing_and_blocks_do_not_repeat() -> None:
    first, second = (routed(routing="uniform", tokens=2 * BLOCK_TOKENS, ranks=1, seed=seed).topk_idx for seed in (0, 1))
    assert (first != second).any()
    assert (first[:BLOCK_TOKENS] != first[BLOCK_TOKENS:]).any()


def test_masking_changes_no_other_choice_and_meets_its_share() -> None:
    axes: dict[str, Any] = {"routing": "zipf", "tokens": 5000, "ranks": 4, "top_k": 4}
    whole, masked = routed(**axes), routed(**axes, masked_share=0.25)
    valid = masked.topk_idx >= 0
    np.testing.assert_array_equal(masked.topk_idx[valid], whole.topk_idx[valid])
    # Five standard deviations of 80,000 draws.
    assert np.mean(~valid) == pytest.approx(0.25, abs=5 * np.sqrt(0.25 * 0.75 / valid.size))


@pytest.mark.parametrize("num_experts", [256, 4096])
@pytest.mark.parametrize("routing", ["uniform", "zipf", "round_robin"])
def test_no_tokens_times_experts_array_is_built(routing: str, num_experts: int) -> None:
    case = make_case("dispatch", ranks=64, tokens=1024, num_experts=num_experts, top_k=8, routing=routing)
    tracemalloc.start()
    routing_made = token_routing(case)
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    result_bytes = routing_made.topk_idx.nbytes + routing_made.topk_weights.nbytes
    # One bit per (token, expert) would already be 2 MiB for 256 experts and 32 MiB for 4,096.
    assert peak_bytes < result_bytes + (1 << 20)


def test_a_result_cannot_be_changed_by_accident() -> None:
    with pytest.raises(ValueError, match="read-only"):
        routed(tokens=4, ranks=1).topk_idx[0, 0] = 3


@pytest.mark.parametrize(
    ("axes", "problem", "allowed"),
    [
        ({"routing": "nonsense"}, "unknown routing 'nonsense'", "known: uniform"),
        ({"top_k": 13}, "top_k 13 exceeds num_experts 12", "1 to 12"),
        ({"top_k": None}, "top_k is missing", "1 to 12"),
        ({"tokens": None}, "tokens is missing", "0 or more"),
        ({"empty_ranks": 5}, "empty_ranks 5 exceeds ranks 4", "0 to 4"),
        ({"routing": "uniform", "routing_param": 1.0}, "routing_param 1.0", "leave it out"),
        ({"routing": "round_robin", "routing_param": "x"}, "routing_param 'x'", "leave it out"),
        ({"routing": "zipf", "routing_param": -0.5}, "routing_param -0.5", "0 to 10"),
        ({"routing": "zipf", "routing_param": float("nan")}, "routing_param nan", "0 to 10"),
        ({"routing": "lognormal", "routing_param": "wide"}, "routing_param 'wide'", "0 to 10"),
        ({"routing": "group_limited"}, "routing_param None", '"n:m"'),
        ({"routing": "group_limited", "routing_param": "5:2"}, "routing_param '5:2'", "divide num_experts 12"),
        ({"routing": "group_limited", "routing_param": "4:5"}, "routing_param '4:5'", "m ≤ n"),
        ({"routing": "group_limited", "routing_param": "0:0"}, "routing_param '0:0'", '"n:m"'),
        ({"routing": "group_limited", "routing_param": "12:2"}, "routing_param '12:2'", "top_k 3"),
        ({"routing": "all_to_one", "routing_param": 12}, "routing_param 12", "0 to 11"),
        ({"routing": "all_to_one", "routing_param": 1.5}, "routing_param 1.5", "0 to 11"),
        ({"routing": "measured"}, "routing_param None", "real"),
        ({"routing": "measured", "routing_param": "reel"}, "routing_param 'reel'", "real"),
        (
            {"routing": "measured", "routing_param": "real", "num_experts": 16},
            "counts has 12 entries",
            "num_experts = 12",
        ),
        ({"routing": "measured", "routing_param": "real", "top_k": 12}, "only 11 of", "1 to 11"),
    ],
)
def test_a_key_that_cannot_be_used_is_named_with_its_value_and_what_is_allowed(
    axes: dict[str, Any], problem: str, allowed: str
) -> None:
    values: dict[str, Any] = {"ranks": 4, "tokens": 8, "num_experts": 12, "top_k": 3, "routing": "uniform"} | axes
    with pytest.raises(InputError) as caught:
        token_routing(Case(collective="dispatch", **values), expert_load=LOADS)
    assert problem in caught.value.message
    assert allowed in (caught.value.hint or "")
    assert caught.value.exit_code == 2


@st.composite
def placed(draw: st.DrawFn) -> tuple[TokenRouting, str, int]:
    ranks = draw(st.integers(1, 5))
    placement = draw(st.sampled_from(["uneven", f"replicas:{ranks}", f"replicas:{max(1, ranks - 1)}"]))
    case = make_case(
        "dispatch",
        ranks=ranks,
        tokens=draw(st.integers(0, 8)),
        num_experts=draw(st.integers(3, 9)),
        placement=placement,
        masked_share=draw(st.sampled_from([0.0, 0.5, 1.0])),
        empty_ranks=draw(st.integers(0, ranks)),
        seed=draw(st.integers(0, 100)),
    )
    return token_routing(case), placement, ranks


@settings(max_examples=100, deadline=None)
@given(drawn=placed())
def test_destinations_and_statistics_equal_a_count_by_hand(drawn: tuple[TokenRouting, str, int]) -> None:
    routing, spec, ranks = drawn
    placement = placement_of(spec, routing.num_experts, ranks)
    visited: list[int] = []
    on_rank = [0] * ranks
    on_expert = [0] * routing.num_experts
    for source in range(ranks):
        experts_of_tokens, _ = routing.of_rank(source)
        dst_rank, local_expert = destinations(experts_of_tokens, source, placement)
        assert dst_rank.dtype == local_expert.dtype == np.int32
        for token, experts in enumerate(experts_of_tokens.tolist()):
            ranks_of_token = set()
            for choice, expert in enumerate(experts):
                dst, local = int(dst_rank[token, choice]), int(local_expert[token, choice])
                if expert == -1:
                    assert (dst, local) == (-1, -1)
                    continue
                assert placement.experts_of_rank[dst][local] == expert
                assert dst == source or expert not in placement.experts_of_rank[source]
                ranks_of_token.add(dst)
                on_rank[dst] += 1
                on_expert[expert] += 1
            visited.append(len(ranks_of_token))
    choices = sum(on_rank)
    mean_expert = choices / routing.num_experts
    by_hand = RoutingStatistics(
        distinct_ranks_per_token=sum(visited) / len(visited) if choices else 0.0,
        hottest_expert=max(on_expert) / mean_expert if choices else 0.0,
        imbalance=max(on_rank) / (choices / ranks) if choices else 0.0,
        load_cv=(sum((n - mean_expert) ** 2 for n in on_expert) / len(on_expert)) ** 0.5 / mean_expert
        if choices
        else 0.0,
    )
    assert routing_statistics(routing, placement) == pytest.approx(by_hand)
