"""`--filter` selects cases by an expression and runs nothing else."""

from __future__ import annotations

import pytest

from ncclep_bench.errors import InputError
from ncclep_bench.model.case import Case
from ncclep_bench.sweeps.filter import case_filter

DISPATCH = Case(
    collective="dispatch",
    ranks=4,
    num_experts=8,
    tokens=64,
    layout="flat",
    mode="ht",
    routing_param=1.5,
    masked_share=0.0,
)
GATHER = Case(collective="all_gather_experts", ranks=2, num_experts=16, active_share=0.25, variant="in_place")


@pytest.mark.parametrize(
    ("expression", "selected"),
    [
        ('collective == "dispatch"', [DISPATCH]),
        ('collective != "dispatch"', [GATHER]),
        ("ranks >= 2", [DISPATCH, GATHER]),
        ("2 < ranks <= 4", [DISPATCH]),
        ("ranks in [2, 3]", [GATHER]),
        ("ranks not in (2, 3)", [DISPATCH]),
        ('mode == "ht" or variant == "in_place"', [DISPATCH, GATHER]),
        ('not (mode == "ht" and ranks == 4)', [GATHER]),
        ("active_share < 0.5", [GATHER]),
        ("routing_param > 1", [DISPATCH]),
        ("-1 < masked_share", [DISPATCH]),
        ("active_share == None", [DISPATCH]),
        (" \n tokens == 64 ", [DISPATCH]),
        ("True", [DISPATCH, GATHER]),
        ("masked_share", []),
    ],
)
def test_an_expression_selects_the_cases_it_describes(expression: str, selected: list[Case]) -> None:
    assert list(filter(case_filter(expression), [DISPATCH, GATHER])) == selected


@pytest.mark.parametrize("expression", ["tokens < 100", "tokens > 0", "tokens <= 0", "tokens >= 0"])
def test_a_field_that_a_case_does_not_use_matches_no_ordering(expression: str) -> None:
    assert not case_filter(expression)(GATHER)


def test_a_word_and_a_number_match_no_ordering() -> None:
    assert not case_filter("dtype < 3")(DISPATCH)
    assert not case_filter("dtype >= 3")(DISPATCH)


def test_an_unknown_name_offers_the_nearest_field_and_lists_all() -> None:
    with pytest.raises(InputError) as caught:
        case_filter("tokns > 3")
    assert "unknown name 'tokns'" in str(caught.value)
    assert "did you mean tokens?" in str(caught.value)
    assert "num_experts" in str(caught.value)


def test_a_bare_word_is_told_to_stand_in_quotes() -> None:
    with pytest.raises(InputError, match='"reduce"'):
        case_filter("collective == reduce")


@pytest.mark.parametrize(
    "expression",
    [
        "",
        "ranks ==",
        "ranks = 4",
        "__import__('os').getcwd()",
        "collective.upper()",
        "ranks + 1 == 5",
        "[x for x in [1]]",
        "lambda: 1",
        "ranks is 4",
        "(ranks := 4)",
        "collective[0] == 'd'",
        "f'{ranks}'",
        "b'x' == collective",
        "...",
        "-collective == 1",
        "(" * 300 + "1" + ")" * 300,
        "ranks == 4 and " * 100 + "True",
        "ranks == \0",
    ],
)
def test_anything_else_is_refused_with_an_example(expression: str) -> None:
    with pytest.raises(InputError, match="--filter") as caught:
        case_filter(expression)
    assert 'collective == "dispatch"' in str(caught.value)


def test_the_deepest_expression_that_is_read_can_be_evaluated() -> None:
    assert case_filter("not " * 248 + "True")(DISPATCH)
    assert case_filter("(1 or " * 120 + "1" + ")" * 120)(DISPATCH)
