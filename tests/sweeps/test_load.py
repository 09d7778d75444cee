"""Scenario files and `--set`: what is read, and what is refused in which words."""

from __future__ import annotations

from pathlib import Path

import pytest

from ncclep_bench.errors import InputError
from ncclep_bench.model.scenario import Scenario, Timing
from ncclep_bench.sweeps.expand import expand
from ncclep_bench.sweeps.load import find_scenarios, load_scenario, with_overrides

SMALL = """
description = "two sizes"
collective = "dispatch"
tokens = [16, 64]
hidden = 128
num_experts = 8
top_k = 2
masked_share = 0
"""


def written(folder: Path, text: str, name: str = "small.toml") -> Path:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


@pytest.fixture
def small(tmp_path: Path) -> Scenario:
    return load_scenario(written(tmp_path, SMALL))


def test_a_scalar_is_a_list_of_one_and_the_text_is_kept(small: Scenario) -> None:
    assert small.name == "small"
    assert small.description == "two sizes"
    assert small.text == SMALL
    assert small.axes == {
        "collective": ["dispatch"],
        "tokens": [16, 64],
        "hidden": [128],
        "num_experts": [8],
        "top_k": [2],
        "masked_share": [0.0],
    }
    assert small.timing == Timing()


def test_tables_become_records(tmp_path: Path) -> None:
    text = (
        SMALL
        + """
[timing]
budget_s = 0.5
[[reference]]
where = { collective = "dispatch", tokens = 16 }
column = "p50_us"
value = 12
source = "a paper"
[expert_load."model/text/0"]
counts = [3, 0, 1, 1, 1, 1, 1, 1]
top_k = 2
source = "a router"
licence = "Apache-2.0"
"""
    )
    scenario = load_scenario(written(tmp_path, text))
    assert scenario.timing.budget_s == 0.5
    assert scenario.reference[0].where == {"collective": "dispatch", "tokens": 16}
    assert scenario.reference[0].role == "ep"
    assert not scenario.reference[0].verified
    assert scenario.expert_load["model/text/0"].counts[0] == 3


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        ("tokns = 3", ["`tokns`", "value 3", "did you mean `tokens`", "num_experts"]),
        ("scenario = 'x'", ["`scenario`", "unknown key"]),
        ("batch_size = -1", ["`batch_size`", "-1", "from 0"]),
        ("batch_size = [4, '8']", ["`batch_size[1]`", "'8'", "whole number"]),
        ("batch_size = []", ["`batch_size`", "at least 1"]),
        ("batch_size = [[4]]", ["`batch_size[0]`", "[4]"]),
        ("batch_size = true", ["`batch_size`", "true"]),
        ("batch_size = 2.5", ["`batch_size`", "2.5"]),
        ("batch_size = { a = 1 }", ["`batch_size`", "whole number"]),
        ("active_share = nan", ["`active_share`", "nan", "from 0 to 1"]),
        ("mode = 'fast'", ["`mode`", "'fast'", "'ht', 'll'"]),
        ("layout = 'round'", ["`layout`", "'round'", "'expert_major'"]),
        ("backend = ['host', 'gpu']", ["`backend[1]`", "'gpu'", "'host'"]),
        ("routing = 'random'", ["`routing`", "'random'", "'uniform'"]),
        ("dtype = 'float64'", ["`dtype`", "'float64'", "'bfloat16'"]),
        ("transport = 'pigeon'", ["`transport`", "'pigeon'", "'messages'"]),
        ("[timing]\nbudget = 1", ["`timing.budget`", "did you mean `budget_s`"]),
        ("[timing]\nbudget_s = 0", ["`timing.budget_s`", "above 0"]),
        ("[timing]\nmin_samples = 2000", ["`timing.min_samples`", "2000", "max_samples 1000"]),
        ("[expert_load.x]\ncounts = [1]\nsource = 's'", ["licence", "required"]),
        ("[expert_load.x]\ncounts = [-1]\nsource = 's'\nlicence = 'l'", ["counts[0]", "-1"]),
        ("[[reference]]\ncolumn = 'p50_us'\nvalue = 1\nsource = 's'\nwhere = { batch = 1 }", ["batch_size", "where"]),
        ("[[reference]]\ncolumn = 'p50'\nvalue = 1\nsource = 's'\nwhere = {}", ["`reference[0].column`", "p50_us"]),
        ("[[reference]]\ncolumn = 'tag'\nvalue = inf\nsource = 's'\nwhere = {}", ["`reference[0].value`", "finite"]),
        (
            "[[reference]]\ncolumn = 'tag'\nvalue = 1\nsource = 's'\nwhere = {}\nrole = 'x'",
            ["`reference[0].role`", "'x'"],
        ),
    ],
)
def test_a_wrong_key_or_value_names_file_key_value_and_what_is_allowed(
    tmp_path: Path, lines: str, words: list[str]
) -> None:
    path = written(tmp_path, SMALL + lines + "\n")
    with pytest.raises(InputError) as caught:
        load_scenario(path)
    for word in [str(path), *words]:
        assert word in str(caught.value)


def test_an_unknown_collective_lists_the_known_ones(tmp_path: Path) -> None:
    path = written(tmp_path, SMALL.replace('"dispatch"', '"dispach"'))
    with pytest.raises(InputError, match=r"`collective`.*'dispach'.*allowed.*'dispatch'"):
        load_scenario(path)


def test_a_missing_file_and_a_folder_are_input_errors(tmp_path: Path) -> None:
    for path in (tmp_path / "none.toml", tmp_path):
        with pytest.raises(InputError, match=str(path)):
            load_scenario(path)


def test_a_bare_name_finds_the_packaged_scenario_from_any_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert load_scenario("quick").name == "quick"


def test_a_scenario_of_the_working_folder_comes_before_the_packaged_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "scenarios").mkdir()
    written(tmp_path / "scenarios", SMALL, "quick.toml")
    written(tmp_path / "scenarios", SMALL, "mine.toml")
    assert load_scenario("quick").description == "two sizes"
    assert "mine" in find_scenarios()
    assert "skew" in find_scenarios()


def test_an_unknown_name_offers_the_nearest_and_lists_all() -> None:
    with pytest.raises(InputError) as caught:
        load_scenario("quik")
    assert "did you mean 'quick'" in str(caught.value)
    assert "deepseek-v3-decode" in str(caught.value)


@pytest.mark.parametrize(
    ("setting", "key", "values"),
    [
        ("tokens=8", "tokens", [8]),
        ("tokens=8,16", "tokens", [8, 16]),
        ("tokens=[8, 16]", "tokens", [8, 16]),
        (" tokens = 8 ", "tokens", [8]),
        ("collective=dispatch,combine", "collective", ["dispatch", "combine"]),
        ("collective=[combine]", "collective", ["combine"]),
        ('routing_param="a,b"', "routing_param", ["a,b"]),
        ("routing_param=a.jsonl#layer=3,step=2", "routing_param", ["a.jsonl#layer=3,step=2"]),
        ("routing_param=8:4", "routing_param", ["8:4"]),
        ("routing_param=0,0.5,1", "routing_param", [0, 0.5, 1]),
        ("placement=replicas:2", "placement", ["replicas:2"]),
    ],
)
def test_a_setting_is_toml_or_bare_words(small: Scenario, setting: str, key: str, values: list[object]) -> None:
    assert with_overrides(small, [setting]).axes[key] == values


def test_a_timing_key_may_be_set_with_or_without_its_table(small: Scenario) -> None:
    timing = with_overrides(small, ["budget_s=0.1", "timing.warmup=0"]).timing
    assert (timing.budget_s, timing.warmup) == (0.1, 0)


def test_two_timing_keys_that_fit_only_together_may_be_set_in_any_order(small: Scenario) -> None:
    timing = with_overrides(small, ["min_samples=5000", "max_samples=9000"]).timing
    assert (timing.min_samples, timing.max_samples) == (5000, 9000)


def test_setting_one_size_drops_the_one_that_it_replaces(small: Scenario) -> None:
    changed = with_overrides(small, ["batch_size=4", "tokens_per_sequence=2", "experts_per_rank=1"])
    assert not {"tokens", "num_experts"} & set(changed.axes)
    both = with_overrides(small, ["batch_size=4", "tokens=4"])
    assert (both.axes["batch_size"], both.axes["tokens"]) == ([4], [4])


def test_overrides_leave_the_loaded_scenario_alone(small: Scenario) -> None:
    with_overrides(small, ["tokens=1", "budget_s=9"])
    assert small.axes["tokens"] == [16, 64]
    assert small.timing.budget_s == Timing().budget_s


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ("tokens", ["no value", "KEY=VALUE"]),
        ("tokens=", ["`tokens`", "''"]),
        ("tokens=1,,2", ["`tokens[1]`", "''"]),
        ("tokens=many", ["`tokens`", "'many'", "whole number"]),
        ("tokens=1,x", ["`tokens[1]`", "'x'"]),
        ("tokens=1\nhidden=2", ["`tokens`"]),
        ("tokns=1", ["unknown key", "did you mean `tokens`", "budget_s"]),
        ("description=x", ["unknown key"]),
        ("budget_s=1,2", ["`budget_s`"]),
        ("min_samples=2000", ["min_samples", "max_samples 1000"]),
        ("tokens=" + "[" * 900, ["`tokens"]),
    ],
)
def test_a_wrong_setting_is_quoted(small: Scenario, setting: str, words: list[str]) -> None:
    with pytest.raises(InputError) as caught:
        with_overrides(small, [setting])
    for word in ["--set " + setting.partition("\n")[0][:10], *words]:
        assert word in str(caught.value)


def test_what_a_setting_makes_of_a_file_is_not_the_file_alone(small: Scenario) -> None:
    changed = with_overrides(with_overrides(small, ["tokens=4"]), ["top_k=99"])
    with pytest.raises(InputError, match=r"\.toml --set tokens=4 --set top_k=99: key `top_k`: value 99"):
        expand(changed, backends=None, ranks_available=4)


def test_a_reference_compares_columns_with_single_values(tmp_path: Path) -> None:
    reference = '[[reference]]\nwhere = { tokens = [16, 64] }\ncolumn = "p50_us"\nvalue = 1\nsource = "a paper"\n'
    with pytest.raises(InputError, match=r"key `reference\[0\].where.tokens`: value \[16, 64\] is not usable"):
        load_scenario(written(tmp_path, SMALL + reference))
