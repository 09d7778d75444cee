from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from ncclep_bench.collectives.contract import Collective, Problem
from ncclep_bench.collectives.rows import BLOCK_BYTES
from ncclep_bench.collectives.verify import first_wrong
from ncclep_bench.registry import COLLECTIVES
from tests.cases import make_case, make_problem

DRAW = 1
WIDE = 2 * BLOCK_BYTES // 2 + 24
"""Elements of two blocks and a little of bfloat16."""


def right(collective: Collective, problem: Problem, rank: int) -> dict[str, np.ndarray[Any, Any]]:
    """The outputs of one rank as they should be, rounded to the dtype."""
    outputs: dict[str, np.ndarray[Any, Any]] = {}
    parts = list(collective.expected(problem, rank, DRAW))
    for name in {part.name for part in parts}:
        own = [part for part in parts if part.name == name]
        values = own[0].values
        rows = 1 + max(int(part.rows.max(initial=-1)) for part in own)
        width = [max(part.column + part.values.shape[1] for part in own)] if values.ndim > 1 else []
        dtype = problem.dtype.numpy if values.dtype == np.float64 else values.dtype
        outputs[name] = np.zeros((rows, *width), dtype)
        for part in own:
            columns = [slice(part.column, part.column + part.values.shape[1])] if width else []
            outputs[name][part.rows, *columns] = part.values
    return outputs


def wide(name: str) -> tuple[Collective, Problem]:
    return COLLECTIVES.get(name), make_problem(
        make_case(name, dtype="bfloat16", expert_elements=WIDE, active_share=1.0, ranks=2, num_experts=4)
    )


@pytest.mark.parametrize("column", [0, 1, BLOCK_BYTES // 2 - 1, BLOCK_BYTES // 2, WIDE - 1])
@pytest.mark.parametrize(
    ("name", "output"),
    [
        ("all_gather_experts", "all_params"),
        ("dense_all_gather", "all_params"),
        ("reduce_scatter_expert_grads", "grads"),
        ("dense_all_reduce", "all_grads"),
    ],
)
def test_one_wrong_element_of_a_wide_row_is_named_wherever_it_lies(name: str, output: str, column: int) -> None:
    collective, problem = wide(name)
    outputs = right(collective, problem, 1)
    assert first_wrong(collective, problem, 1, DRAW, outputs) is None

    outputs[output][1, column] *= np.array(-1, outputs[output].dtype)

    wrong = first_wrong(collective, problem, 1, DRAW, outputs)
    assert wrong is not None
    assert wrong.startswith(f"rank 1: {output} row 1 column {column} is ")
    assert wrong.endswith(f"(1 of {len(outputs[output])} rows wrong)")


def test_one_flipped_bit_of_a_copy_is_wrong_down_to_the_sign_of_zero() -> None:
    collective = COLLECTIVES.get("dispatch")
    problem = make_problem(make_case("dispatch"))
    for name, byte in (("tokens", 0), ("topk_weights", 3), ("topk_idx", 0), ("expert_counts", 0)):
        outputs = right(collective, problem, 0)
        outputs[name].view(np.uint8).reshape(-1)[byte] ^= 0x80
        wrong = first_wrong(collective, problem, 0, DRAW, outputs)
        assert wrong is not None
        assert wrong.startswith(f"rank 0: {name} row 0 column 0 is ")


@pytest.mark.parametrize("name", ["combine", "dispatch_combine", "reduce_scatter_expert_grads"])
def test_a_sum_that_is_not_a_number_is_wrong(name: str) -> None:
    collective = COLLECTIVES.get(name)
    problem = make_problem(make_case(name, active_share=1.0))
    outputs = right(collective, problem, 0)
    next(iter(outputs.values()))[-1, -1] = np.nan

    assert "is nan" in (first_wrong(collective, problem, 0, DRAW, outputs) or "")


def test_exchanged_blocks_of_a_wide_row_are_wrong() -> None:
    collective, problem = wide("all_gather_experts")
    outputs = right(collective, problem, 0)
    block = BLOCK_BYTES // 2
    row = outputs["all_params"][2]
    row[: 2 * block] = np.roll(row[: 2 * block], block)

    assert "row 2 column" in (first_wrong(collective, problem, 0, DRAW, outputs) or "")


def test_wrong_rows_are_counted_over_the_whole_output() -> None:
    collective = COLLECTIVES.get("dispatch")
    problem = make_problem(make_case("dispatch", hidden=8192, dtype="bfloat16", tokens=64, ranks=2, masked_share=None))
    outputs = right(collective, problem, 0)
    rows = len(outputs["tokens"])
    outputs["tokens"][3::2, 5:9] = 0

    wrong = first_wrong(collective, problem, 0, DRAW, outputs)

    assert wrong is not None
    assert "tokens row 3 column 5 is 0" in wrong
    assert wrong.endswith(f"({len(range(3, rows, 2))} of {rows} rows wrong)")


def test_an_output_that_is_too_short_or_not_there_is_told() -> None:
    collective = COLLECTIVES.get("all_gather_experts")
    problem = make_problem(make_case("all_gather_experts", active_share=1.0))
    outputs = right(collective, problem, 0)

    assert "all_params has 7 rows, row 7 is missing" in (
        first_wrong(collective, problem, 0, DRAW, {"all_params": outputs["all_params"][:7]}) or ""
    )
    assert "output all_params is missing" in (first_wrong(collective, problem, 0, DRAW, {}) or "")


def test_what_is_no_input_of_a_rank_stays_as_it_was() -> None:
    collective = COLLECTIVES.get("all_gather_experts")
    problem = make_problem(make_case("all_gather_experts", variant="in_place"))
    inputs = collective.empty_inputs(problem, 1)
    inputs["all_params"][...] = 7

    collective.fill(problem, 1, DRAW, inputs)

    held = list(problem.placement.experts_of_rank[1])
    assert (inputs["all_params"][held] != 7).all()
    assert (np.delete(inputs["all_params"], held, axis=0) == 7).all()
