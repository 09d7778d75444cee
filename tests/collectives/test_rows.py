from __future__ import annotations

import numpy as np
import pytest

from ncclep_bench.collectives.rows import BLOCK_BYTES, BOUND, Rows
from ncclep_bench.model.dtype import DTYPES, DType

DTYPE = pytest.mark.parametrize("dtype", DTYPES.values(), ids=list(DTYPES))


def made(keys: range, width: int, dtype: DType, *, seed: int = 0, draw: int = 0) -> np.ndarray:
    rows = Rows(np.array(keys), width, seed, draw, dtype)
    table = np.zeros((len(keys), width), dtype.numpy)
    rows.fill(table)
    for piece in rows.pieces():
        assert table[piece.rows, piece.columns].tobytes() == rows.of(piece).tobytes()
    return table


@DTYPE
def test_values_are_finite_and_lie_within_the_bound_of_the_tolerances(dtype: DType) -> None:
    values = np.abs(made(range(4), 5000, dtype).astype(np.float64))

    assert values.min() >= 0.5
    assert BOUND * 0.9 < values.max() < BOUND


@DTYPE
def test_every_bit_that_may_differ_does(dtype: DType) -> None:
    bits = made(range(64), 64, dtype).view(f"u{dtype.itemsize}")
    mantissa_and_one_exponent_bit = 1 - round(np.log2(dtype.epsilon))

    differing = int(np.bitwise_or.reduce(bits, axis=None) ^ np.bitwise_and.reduce(bits, axis=None))

    assert differing.bit_count() == 1 + mantissa_and_one_exponent_bit


@DTYPE
@pytest.mark.parametrize("width", [1, 7, 33, 4096])
def test_a_row_depends_on_its_key_alone_not_on_its_neighbours_or_its_place(dtype: DType, width: int) -> None:
    many, few = made(range(100), width, dtype), made(range(90, 95), width, dtype)

    assert many[90:95].tobytes() == few.tobytes()


@pytest.mark.parametrize("width", [BLOCK_BYTES // 4 - 1, BLOCK_BYTES // 4, 3 * BLOCK_BYTES // 4 + 5])
def test_a_longer_row_begins_as_a_shorter_one(width: int) -> None:
    short, long = (made(range(2), columns, DTYPES["float32"]) for columns in (width, width + 1001))

    assert (long[:, :width] == short).all()


@DTYPE
def test_rows_blocks_draws_and_seeds_are_told_apart(dtype: DType) -> None:
    block = BLOCK_BYTES // dtype.itemsize
    rows = made(range(3), 2 * block, dtype)
    parts = [
        *rows[:, :block],
        *rows[:, block:],
        made(range(1), block, dtype, draw=1)[0],
        made(range(1), block, dtype, seed=1)[0],
    ]

    for i, part in enumerate(parts):
        for other in parts[:i]:
            # Float8 has 32 such values.
            assert (part != other).mean() > 0.9
        assert (part[1:] != part[:-1]).mean() > 0.9


def test_many_rows_of_the_smallest_dtype_are_all_different() -> None:
    rows = made(range(50_000), 128, DTYPES["float8_e4m3fn"])

    assert len({row.tobytes() for row in rows}) == len(rows)


def test_a_table_that_does_not_fit_is_refused() -> None:
    rows = Rows(np.arange(3), 8, 0, 0, DTYPES["bfloat16"])

    with pytest.raises(ValueError, match="3 rows for a table of 4"):
        rows.fill(np.zeros((4, 8), DTYPES["bfloat16"].numpy))
