"""Errors of a TOML file name file, key, value and what is allowed."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ncclep_bench.errors import InputError
from ncclep_bench.model.ep_config import EpConfig
from ncclep_bench.model.ep_config_file import load_ep_config
from ncclep_bench.model.scenario import ExpertLoad, Reference, Timing
from ncclep_bench.model.toml_file import MAX_FILE_BYTES, convert, load_toml


class Tables(msgspec.Struct, forbid_unknown_fields=True):
    """Every shape that a file of this package has."""

    timing: Timing = Timing()
    reference: list[Reference] = []
    expert_load: dict[str, ExpertLoad] = {}
    title: str = ""
    done: bool = False


LOAD = {"counts": [1, 2], "source": "a paper", "licence": "CC-BY"}
CLAIM = {"where": {}, "column": "p50_us", "value": 1.0, "source": "a paper"}


@pytest.mark.parametrize(
    ("raw", "type_", "said"),
    [
        (
            {"num_experts": 8, "topk": 2},
            EpConfig,
            "key `topk`: unknown key (value 2); did you mean `top_k`? allowed: num_",
        ),
        ({"num_experts": 8, "zzz": 2}, EpConfig, "key `zzz`: unknown key (value 2); allowed: num_experts, "),
        (
            {"num_experts": "8"},
            EpConfig,
            "key `num_experts`: value '8' is not usable; allowed: a whole number from 1 to 65536",
        ),
        ({"num_experts": True}, EpConfig, "key `num_experts`: value true is not usable; allowed: a whole number"),
        ({"num_experts": -8}, EpConfig, "key `num_experts`: value -8 is not usable; allowed: a whole number from 1"),
        ({"num_experts": 10**30}, EpConfig, "key `num_experts`: value 1000000000000000000000000000000 is not usable"),
        ({"num_experts": 8, "top_k": 2.5}, EpConfig, "key `top_k`: value 2.5 is not usable; allowed: a whole number"),
        ({"num_experts": 8, "mode": "x"}, EpConfig, "key `mode`: value 'x' is not usable; allowed: 'ht', 'll'"),
        (
            {"num_experts": 8, "deadline_s": float("nan")},
            EpConfig,
            "key `deadline_s`: value nan is not usable; allowed: a number above 0",
        ),
        ({"num_experts": 8, "placement": [[0], ["a"]]}, EpConfig, "key `placement[1][0]`: value 'a' is not usable"),
        (
            {"num_experts": 8, "placement": 3},
            EpConfig,
            "key `placement`: value 3 is not usable; allowed: text or a list",
        ),
        ({}, EpConfig, "key `num_experts`: is required and missing; allowed: a whole number from 1 to 65536"),
        (
            {"timing": {"warmpu": 3}},
            Tables,
            "key `timing.warmpu`: unknown key (value 3); did you mean `warmup`? allowed: ",
        ),
        ({"timing": 3}, Tables, "key `timing`: value 3 is not usable; allowed: a table with warmup, min_samples"),
        (
            {"timing": {"ci_share": 2}},
            Tables,
            "key `timing.ci_share`: value 2 is not usable; allowed: a number above 0 to 1",
        ),
        ({"done": "yes"}, Tables, "key `done`: value 'yes' is not usable; allowed: true or false"),
        ({"title": ["a"]}, Tables, "key `title`: value ['a'] is not usable; allowed: text"),
        ({"reference": [CLAIM, {**CLAIM, "value": "1"}]}, Tables, "key `reference[1].value`: value '1' is not usable"),
        (
            {"reference": [{**CLAIM, "valeu": 1}]},
            Tables,
            "key `reference[0].valeu`: unknown key (value 1); did you mean `value`",
        ),
        (
            {"expert_load": {"a": LOAD, "b.c": {**LOAD, "counts": [1, -1]}}},
            Tables,
            "key `expert_load.b.c.counts[1]`: value -1 is not usable; allowed: a whole number from 0",
        ),
        (
            {"expert_load": {"a": LOAD, "b": {**LOAD, "counts": []}}},
            Tables,
            "key `expert_load.b.counts`: value [] is not usable; allowed: a list (at least 1 long), each item",
        ),
        (
            {"expert_load": {"a": LOAD, "b": 3}},
            Tables,
            "key `expert_load.b`: value 3 is not usable; allowed: a table with counts",
        ),
        ({"expert_load": {"a": LOAD, "b": {}}}, Tables, "key `expert_load.b.counts`: is required and missing"),
        (
            {"expert_load": 3},
            Tables,
            "key `expert_load`: value 3 is not usable; allowed: a table, each value a table with counts",
        ),
        ({"\x1b[2J": 1}, Tables, r"key `\x1b[2J`: unknown key (value 1)"),
        ({"title": "x", "done": "y" * 500}, Tables, "key `done`: value 'yyyy"),
    ],
)
def test_a_bad_entry_is_named_with_its_value_and_what_is_allowed(raw: dict[str, Any], type_: type, said: str):
    with pytest.raises(InputError) as caught:
        convert(raw, type_, file="a.toml")

    assert caught.value.message.startswith(f"a.toml: {said}")
    assert len(caught.value.message) < 500


def test_a_good_file_becomes_a_record(tmp_path: Path):
    path = tmp_path / "ep.toml"
    path.write_text('num_experts = 4\nplacement = [[0, 1], [2, 3, 0]]\ndtype = "bfloat16"\ndeadline_s = 5\n')

    assert load_ep_config(path) == EpConfig(
        num_experts=4, placement=((0, 1), (2, 3, 0)), dtype="bfloat16", deadline_s=5.0
    )


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"a = \n", "not valid TOML: .*line 1, column"),
        (b"a = 1\na = 2\n", "not valid TOML: .*line 2"),
        (b"\n\na = '\xff'\n", "line 3: not UTF-8"),
        (b"a = " + b"[" * 20_000, "nested too deeply"),
        (b"a = " + b"9" * 10_000, "not valid TOML"),
        (b"#" * (MAX_FILE_BYTES + 1), "larger than 16 MiB"),
    ],
)
def test_a_file_that_is_no_toml_is_refused(data: bytes, said: str, tmp_path: Path):
    path = tmp_path / "bad.toml"
    path.write_bytes(data)

    with pytest.raises(InputError, match=f"^{re.escape(str(path))}: {said}"):
        load_toml(path)


def test_a_path_that_is_no_file_is_refused(tmp_path: Path):
    os.mkfifo(tmp_path / "pipe")
    for path, said in (
        (tmp_path / "absent.toml", "cannot be read: No such file"),
        (tmp_path, "not a file"),
        (tmp_path / "pipe", "not a file"),
        (Path("a\0b"), "cannot be read"),
        (tmp_path / ("x" * 300), "cannot be read"),
    ):
        with pytest.raises(InputError, match=said):
            load_toml(path)


JSON_LIKE = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
KEYS = st.sampled_from(["timing", "reference", "expert_load", "title", "done", "counts", "warmup", "where"])


@given(
    st.dictionaries(KEYS | st.text(max_size=4), JSON_LIKE | st.dictionaries(KEYS, JSON_LIKE, max_size=3), max_size=4)
)
def test_anything_is_either_a_record_or_an_input_error(raw: dict[str, Any]):
    try:
        said = repr(convert(raw, Tables, file="a.toml"))
    except InputError as error:
        said = error.message

    assert said.startswith(("a.toml: key `", "Tables("))


def test_a_file_saved_with_a_byte_order_mark_is_read(tmp_path: Path) -> None:
    (tmp_path / "a.toml").write_bytes(b"\xef\xbb\xbftokens = 4\n")
    assert load_toml(tmp_path / "a.toml") == {"tokens": 4}
