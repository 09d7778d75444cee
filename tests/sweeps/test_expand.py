"""From axes to cases: what is multiplied, what is left out, what follows, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ncclep_bench.errors import InputError
from ncclep_bench.model.case import Case
from ncclep_bench.model.scenario import ExpertLoad, Scenario
from ncclep_bench.registry import COLLECTIVES
from ncclep_bench.sweeps.expand import expand

TOKENS = {"tokens": [16], "hidden": [128], "num_experts": [8], "top_k": [2]}
PARAMETERS = {"num_experts": [8], "expert_elements": [1024]}
PARTNER = "padded_all_to_all"


def scenario(axes: dict[str, list[Any]], file: str = "small.toml", **tables: Any) -> Scenario:
    return Scenario(name="small", file=file, text="", axes=axes, **tables)


def cases(np: int | None = 4, backends: list[str] | None = None, **axes: list[Any]) -> list[Case]:
    return expand(scenario(axes), backends=backends, ranks_available=np)


def refused(np: int | None = 4, **axes: list[Any]) -> str:
    with pytest.raises(InputError) as caught:
        cases(np, **axes)
    assert "small.toml" in str(caught.value)
    return str(caught.value)


def test_axes_are_multiplied_and_defaults_are_written_into_the_case() -> None:
    found = cases(collective=["dispatch"], **TOKENS | {"tokens": [16, 64], "top_k": [1, 2]})
    assert [(case.tokens, case.top_k) for case in found] == [(16, 1), (16, 2), (64, 1), (64, 2)]
    assert found[0] == Case(
        scenario="small",
        collective="dispatch",
        backend="host",
        mode="ht",
        layout="flat",
        ranks=4,
        tokens=16,
        batch_size=16,
        tokens_per_sequence=1,
        hidden=128,
        num_experts=8,
        top_k=1,
        alignment=1,
        routing="uniform",
        masked_share=0.0,
        empty_ranks=0,
    )


@pytest.mark.parametrize("collective", list(COLLECTIVES))
def test_a_case_has_the_axes_that_its_collective_uses_and_no_others(collective: str) -> None:
    every = TOKENS | PARAMETERS | {"mr_cache_size": [64], "active_share": [0.5], "chain": [2], "alignment": [4]}
    always = {"scenario", "collective", "backend", "topology", "placement", "dtype", "seed", "transport", "ranks"}
    for case in cases(collective=[collective], **every):
        given_axes = {key for key, value in case.axes().items() if value is not None}
        assert given_axes - always <= COLLECTIVES.get(collective).axes


def test_duplicates_collapse() -> None:
    assert len(cases(collective=["dispatch", "dispatch"], **TOKENS | {"tokens": [16, 16]})) == 1
    # A partner has neither mode nor layout.
    found = cases(collective=["dispatch", PARTNER], mode=["ht", "ll"], layout=["expert_major"], **TOKENS)
    assert [case.collective for case in found] == ["dispatch", "dispatch", PARTNER]


def test_a_combination_that_the_collective_waives_stays_a_case() -> None:
    (case,) = cases(collective=["dispatch"], mode=["ll"], layout=["flat"], **TOKENS)
    assert COLLECTIVES.get("dispatch").waiver(case)


def test_the_layout_left_out_follows_the_mode() -> None:
    found = cases(collective=["dispatch"], mode=["ht", "ll"], **TOKENS)
    assert [(case.mode, case.layout) for case in found] == [("ht", "flat"), ("ll", "expert_major")]
    assert not any(COLLECTIVES.get("dispatch").waiver(case) for case in found)


def test_a_partner_stands_beside_each_ep_collective_of_the_scenario() -> None:
    found = cases(collective=[PARTNER, "combine", "dispatch"], **TOKENS)
    assert [case.variant for case in found if case.collective == PARTNER] == ["dispatch", "combine"]
    alone = cases(collective=[PARTNER], **TOKENS)
    assert [case.variant for case in alone] == ["dispatch", "combine", "dispatch_combine"]


def test_a_chain_multiplies_the_pair_and_its_partner_alone() -> None:
    found = cases(collective=["dispatch", "dispatch_combine", PARTNER], chain=[1, 4], **TOKENS)
    assert [(case.collective, case.variant, case.chain) for case in found if case.chain] == [
        ("dispatch_combine", None, 1),
        ("dispatch_combine", None, 4),
        (PARTNER, "dispatch_combine", 1),
        (PARTNER, "dispatch_combine", 4),
    ]
    assert len(found) == 6


def test_a_cache_size_multiplies_the_registered_variant_alone() -> None:
    found = cases(
        collective=["all_gather_experts"], variant=["out_of_place", "registered"], mr_cache_size=[16, 64], **PARAMETERS
    )
    assert [(case.variant, case.mr_cache_size) for case in found] == [
        ("out_of_place", None),
        ("registered", 16),
        ("registered", 64),
    ]


def test_each_collective_takes_those_of_the_variants_that_it_has() -> None:
    found = cases(
        collective=["all_gather_experts", "dense_all_gather", "dispatch", PARTNER],
        variant=["in_place"],
        **TOKENS | PARAMETERS,
    )
    assert {(case.collective, case.variant) for case in found} == {
        ("all_gather_experts", "in_place"),
        ("dense_all_gather", None),
        ("dispatch", None),
        (PARTNER, "dispatch"),
    }


def test_cases_are_ordered_by_backend_ranks_and_size_with_partners_beside() -> None:
    found = cases(
        collective=["dispatch", PARTNER, "dense_all_gather", "all_gather_experts"],
        backends=["in_memory", "host"],
        ranks=[2, 4],
        active_share=[0.25, 1.0],
        **TOKENS | PARAMETERS | {"tokens": [16, 64]},
    )
    assert [case.backend for case in found] == ["in_memory"] * 14 + ["host"] * 14
    assert [case.ranks for case in found] == ([2] * 7 + [4] * 7) * 2
    assert [(case.collective, case.tokens, case.active_share) for case in found[:7]] == [
        ("dispatch", 16, None),
        (PARTNER, 16, None),
        ("dispatch", 64, None),
        (PARTNER, 64, None),
        ("all_gather_experts", None, 0.25),
        ("all_gather_experts", None, 1.0),
        ("dense_all_gather", None, None),
    ]


@given(
    st.lists(st.sampled_from(sorted(COLLECTIVES)), min_size=1, max_size=8),
    st.lists(st.sampled_from(["ht", "ll"]), min_size=1, max_size=3),
    st.lists(st.integers(0, 64), min_size=1, max_size=3),
    st.lists(st.sampled_from([1, 2, 4]), min_size=1, max_size=3),
)
def test_no_case_comes_twice_and_every_partner_finds_what_it_is_compared_with(
    collectives: list[str], modes: list[str], tokens: list[int], ranks: list[int]
) -> None:
    axes = TOKENS | PARAMETERS | {"tokens": tokens, "ranks": ranks}
    found = cases(collective=list(collectives), mode=list(modes), **axes)
    identities = [case.case for case in found]
    assert len(set(identities)) == len(identities)
    for case in found:
        if case.variant in collectives:
            beside = {"collective", "variant", "mode", "layout", "alignment"}
            assert any(
                ep.collective == case.variant
                and {k: v for k, v in ep.axes().items() if k not in beside}
                == {k: v for k, v in case.axes().items() if k not in beside}
                for ep in found
            )


def test_tokens_are_batch_size_times_tokens_per_sequence() -> None:
    shape = {"hidden": [128], "num_experts": [8], "top_k": [2]}
    found = cases(collective=["dispatch"], batch_size=[1, 4], tokens_per_sequence=[32], **shape)
    assert [(case.tokens, case.batch_size) for case in found] == [(32, 1), (128, 4)]
    (whole,) = cases(collective=["dispatch"], tokens=[64], tokens_per_sequence=[16], **shape)
    assert whole.batch_size == 4
    (agreeing,) = cases(collective=["dispatch"], tokens=[64], batch_size=[4], tokens_per_sequence=[16], **shape)
    assert agreeing == whole


def test_an_expert_without_a_size_is_a_square_matrix_of_hidden() -> None:
    (case,) = cases(collective=["dense_all_gather"], hidden=[32], num_experts=[8])
    assert (case.expert_elements, case.hidden) == (1024, None)


def test_experts_per_rank_give_the_number_of_experts_for_any_rank_count() -> None:
    found = cases(collective=["dense_all_gather"], experts_per_rank=[1, 2], expert_elements=[8], ranks=[2, 4])
    assert [(case.ranks, case.num_experts) for case in found] == [(2, 2), (2, 4), (4, 4), (4, 8)]


def test_a_measured_load_brings_its_experts_and_top_k() -> None:
    loads = {
        "small": ExpertLoad(counts=[1, 2, 3, 4], top_k=2, source="s", licence="l"),
        "large": ExpertLoad(counts=[1] * 16, top_k=4, source="s", licence="l"),
    }
    axes = {"collective": ["dispatch"], "tokens": [8], "hidden": [8], "routing": ["measured"]}
    found = expand(
        scenario(axes | {"routing_param": ["small", "large"]}, expert_load=loads), backends=None, ranks_available=2
    )
    assert [(case.routing_param, case.num_experts, case.top_k) for case in found] == [("small", 4, 2), ("large", 16, 4)]
    with pytest.raises(InputError, match="routing_param"):
        expand(
            scenario(axes | {"routing_param": ["huge"], "num_experts": [4], "top_k": [2]}, expert_load=loads),
            backends=None,
            ranks_available=2,
        )


def test_the_ranks_there_are_stand_in_for_an_axis_that_is_missing() -> None:
    assert [case.ranks for case in cases(2, collective=["dispatch"], **TOKENS)] == [2]
    assert [case.ranks for case in cases(None, collective=["dispatch"], ranks=[8], **TOKENS)] == [8]
    assert "--np" in refused(None, collective=["dispatch"], **TOKENS)


def test_backends_given_replace_those_of_the_scenario() -> None:
    assert [case.backend for case in cases(collective=["dispatch"], backend=["in_memory"], **TOKENS)] == ["in_memory"]
    found = cases(backends=["host"], collective=["dispatch"], backend=["in_memory"], **TOKENS)
    assert [case.backend for case in found] == ["host"]
    with pytest.raises(InputError, match="unknown backend 'hots'"):
        cases(backends=["hots"], collective=["dispatch"], **TOKENS)


@pytest.mark.parametrize(
    ("axes", "words"),
    [
        (TOKENS, ["`collective`", "missing", "dispatch"]),
        (TOKENS | {"collective": ["dispatch"], "top_k": [2, 9]}, ["`top_k`", "9", "num_experts 8", "1 to 8"]),
        (TOKENS | {"collective": ["dispatch"], "num_experts": [6]}, ["`num_experts`", "6", "4 ranks", "uneven"]),
        (TOKENS | {"collective": ["dispatch"], "placement": ["replicas:5"]}, ["`placement`", "replicas:5", "1 to 4"]),
        (TOKENS | {"collective": ["dispatch"], "placement": ["diagonal"]}, ["`placement`", "diagonal", "uneven"]),
        (TOKENS | {"collective": ["dispatch"], "ranks": [2, 8]}, ["`ranks`", "8", "1 to 4"]),
        (TOKENS | {"collective": ["dispatch"], "ranks": [3]}, ["8", "3 ranks"]),
        (TOKENS | {"collective": ["dispatch"], "empty_ranks": [5]}, ["`empty_ranks`", "5", "0 to 4"]),
        (TOKENS | {"collective": ["dispatch"], "batch_size": [3]}, ["`tokens`", "16", "contradicts", "3"]),
        (TOKENS | {"collective": ["dispatch"], "tokens_per_sequence": [5]}, ["`tokens`", "16", "multiples", "5"]),
        (TOKENS | {"collective": ["dispatch"], "experts_per_rank": [1]}, ["`num_experts`", "8", "contradicts", "4"]),
        (TOKENS | {"collective": ["dispatch"], "variant": ["inplace"]}, ["`variant`", "inplace", "in_place"]),
        (TOKENS | {"collective": ["dispatch"], "routing": ["zipf"], "routing_param": ["steep"]}, ["steep", "number"]),
        (TOKENS | {"collective": ["dispatch"], "routing_param": [1.0]}, ["routing_param", "1.0", "uniform"]),
        (TOKENS | {"collective": ["dispatch"], "routing": ["trace"], "routing_param": ["no.csv"]}, ["no.csv"]),
        ({"collective": ["dispatch"], "hidden": [8], "num_experts": [8], "top_k": [1]}, ["`tokens`", "batch_size"]),
        ({"collective": ["dispatch"], "tokens": [8], "num_experts": [8], "top_k": [1]}, ["`hidden`", "missing"]),
        ({"collective": ["dispatch"], "tokens": [8], "hidden": [8], "top_k": [1]}, ["`num_experts`", "missing"]),
        ({"collective": ["dispatch"], "tokens": [8], "hidden": [8], "num_experts": [8]}, ["`top_k`", "missing"]),
        ({"collective": ["dense_all_gather"], "num_experts": [8]}, ["`expert_elements`", "hidden"]),
        (
            {"collective": ["dense_all_gather"], "experts_per_rank": [1 << 20], "hidden": [8]},
            ["`num_experts`", "4194304", "65536"],
        ),
    ],
)
def test_a_case_that_cannot_run_names_file_key_value_and_what_is_allowed(
    axes: dict[str, list[Any]], words: list[str]
) -> None:
    message = refused(**axes)
    for word in words:
        assert word in message


def test_too_many_cases_are_counted_and_not_made() -> None:
    message = refused(collective=["dispatch"], seed=list(range(1000)), **TOKENS | {"tokens": list(range(1000))})
    assert "1,000,000 cases" in message
    assert "100,000" in message


def test_a_trace_is_found_beside_the_scenario_file_and_checked(tmp_path: Path) -> None:
    (tmp_path / "good.csv").write_text("token,expert_0,expert_1\n0,0,1\n1,2,3\n", encoding="utf-8")
    (tmp_path / "wild.csv").write_text("token,expert_0,expert_1\n0,0,1\n1,2,99\n", encoding="utf-8")
    axes = {"collective": ["dispatch"], "routing": ["trace"]} | TOKENS
    file = str(tmp_path / "s.toml")
    assert expand(scenario(axes | {"routing_param": ["good.csv"]}, file), backends=None, ranks_available=2)
    with pytest.raises(InputError, match=r"s\.toml.*wild\.csv[\s\S]*99"):
        expand(scenario(axes | {"routing_param": ["wild.csv"]}, file), backends=None, ranks_available=2)
