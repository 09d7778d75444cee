"""Every scenario file that ships is loaded and expanded."""

from __future__ import annotations

import tomllib

import pytest

from ncclep_bench.collectives.contract import Collective
from ncclep_bench.model.case import Case
from ncclep_bench.registry import COLLECTIVES
from ncclep_bench.sweeps.expand import expand
from ncclep_bench.sweeps.load import axis_types, find_scenarios, load_scenario

ISSUED = {
    "quick",
    "mixtral-8x7b",
    "deepseek-v3-decode",
    "deepseek-v3-prefill",
    "qwen3-30b-a3b",
    "gpt-oss-120b",
    "expert-params",
    "expert-scaling",
    "skew",
    "real-load",
    "cold-start",
    "binding",
    "registration-cache",
}
FILES = sorted(find_scenarios())


def expanded(name: str, ranks: int = 8) -> list[Case]:
    return expand(load_scenario(name), backends=None, ranks_available=ranks)


def waived(case: Case) -> str | None:
    collective: Collective = COLLECTIVES.get(case.collective)
    return collective.waiver(case)


def test_the_promised_scenarios_are_there() -> None:
    assert set(FILES) >= ISSUED


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
@pytest.mark.parametrize("name", FILES)
def test_a_scenario_expands_into_cases_of_which_some_can_run(name: str, ranks: int) -> None:
    found = expanded(name, ranks)
    for collective in {case.collective for case in found}:
        assert any(waived(case) is None for case in found if case.collective == collective)


@pytest.mark.parametrize("name", FILES)
def test_a_scenario_describes_itself_and_has_one_line_for_each_axis(name: str) -> None:
    scenario = load_scenario(name)
    assert scenario.description
    for line in scenario.text.partition("\n[")[0].splitlines():
        if line.strip():
            tomllib.loads(line)


@pytest.mark.parametrize("name", FILES)
def test_an_unverified_claim_says_so_and_selects_axes_that_the_scenario_has(name: str) -> None:
    scenario = load_scenario(name)
    cases = [case.axes() for case in expanded(name)]
    for reference in scenario.reference:
        assert reference.verified or "unverified" in reference.source
        assert set(reference.where) <= set(axis_types())
        assert any(all(case[key] == value for key, value in reference.where.items()) for case in cases), reference


def test_every_axis_of_a_scenario_makes_a_difference_to_one_of_its_collectives() -> None:
    for name in FILES:
        axes = load_scenario(name).axes
        used = {"collective", "backend", "experts_per_rank"}.union(
            *(COLLECTIVES.get(collective).axes for collective in axes["collective"])
        )
        assert set(axes) <= used, name


def test_quick_has_all_eight_collectives_and_few_cases() -> None:
    found = expanded("quick", 4)
    assert {case.collective for case in found} == set(COLLECTIVES)
    assert len(found) * load_scenario("quick").timing.budget_s < 10


def test_the_models_have_their_published_shapes() -> None:
    shapes = {
        name: {(case.hidden, case.num_experts, case.top_k) for case in expanded(name) if case.hidden}
        for name in ("mixtral-8x7b", "deepseek-v3-decode", "deepseek-v3-prefill", "qwen3-30b-a3b", "gpt-oss-120b")
    }
    assert shapes == {
        "mixtral-8x7b": {(4096, 8, 2)},
        "deepseek-v3-decode": {(7168, 256, 8)},
        "deepseek-v3-prefill": {(7168, 256, 8)},
        "qwen3-30b-a3b": {(2048, 128, 8)},
        "gpt-oss-120b": {(2880, 128, 4)},
    }
    assert {(case.mode, case.tokens) for case in expanded("deepseek-v3-decode")} >= {("ll", 128)}
    assert {(case.mode, case.tokens) for case in expanded("deepseek-v3-prefill")} >= {("ht", 4096)}


def test_claims_that_contradict_themselves_are_marked() -> None:
    by_column = {(ref.column, ref.role): ref for ref in load_scenario("mixtral-8x7b").reference}
    for key in (("tag", "ep"), ("ece_gbps", "ep"), ("ece_gbps", "traditional")):
        assert by_column[key].note.startswith("inconsistent: ")


def test_real_loads_carry_their_source_and_licence() -> None:
    scenario = load_scenario("real-load")
    assert len(scenario.expert_load) == 30
    assert set(scenario.axes["routing_param"]) == set(scenario.expert_load)
    for load in scenario.expert_load.values():
        assert "OLMoE" in load.source
        assert load.licence == "Apache-2.0"
    assert {(case.num_experts, case.top_k) for case in expanded("real-load")} == {(8, 2), (64, 8)}
