"""The verifier: fresh inputs, poisoned outputs, and every expected row compared."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np

from ncclep_bench.collectives.contract import Array, Collective, Expected, Problem

POISON = 0xA5

_UNSIGNED = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}


def poison(outputs: Mapping[str, Array]) -> None:
    """Fill writable output arrays with a byte pattern that no right result has."""
    for array in outputs.values():
        array.view(np.uint8).reshape(-1)[...] = POISON


def first_wrong(
    collective: Collective,
    problem: Problem,
    rank: int,
    draw: int,
    outputs: Mapping[str, Array],
    undelivered: frozenset[str] = frozenset(),
) -> str | None:
    """None when all expected rows of a rank are there, else the first that is not: output, row, column, values.

    `undelivered`: outputs that are not looked for.
    """
    for expected in collective.expected(problem, rank, draw):
        if expected.name in undelivered:
            continue
        if expected.name not in outputs:
            return f"rank {rank}: output {expected.name} is missing"
        output = outputs[expected.name]
        if (last := max(expected.rows.tolist(), default=-1)) >= len(output):
            return f"rank {rank}: {expected.name} has {len(output)} rows, row {last} is missing"
        if (wrong := _wrong(expected, output)) is None:
            continue
        everything = (each for each in collective.expected(problem, rank, draw) if each.name == expected.name)
        return f"rank {rank}: {_first(expected, output, wrong)} ({_rows_wrong(everything, output)} rows wrong)"
    return None


def _wrong(expected: Expected, output: Array) -> Array | None:
    """Where a part of the output is not what is expected, in its shape; None where all of it is."""
    got, wanted = _got(expected, output), np.asarray(expected.values)
    if isinstance(expected.tolerance, np.ndarray):
        error = got.astype(np.float64)
        error -= wanted
        np.abs(error, out=error)
        # Not greater: a NaN is wrong.
        right = error <= expected.tolerance.reshape(-1, *[1] * (error.ndim - 1))
        return None if right.all() else ~right
    if got.dtype == wanted.dtype:
        if np.array_equal(_bits(got, 8), _bits(wanted, 8)):
            return None
        got, wanted = _bits(got), _bits(wanted)
    wrong = got != wanted
    return wrong if wrong.any() else None


def _bits(array: Array, most: int = 0) -> Array:
    """The array as integers, of `most` bytes where its rows are as many: as numbers, small floats take far longer."""
    return array.view(_UNSIGNED[most if most and array.shape[-1] * array.itemsize % most == 0 else array.itemsize])


def _got(expected: Expected, output: Array) -> Array:
    """The part of the output that is spoken of; a view where its rows follow each other."""
    rows, first = expected.rows, int(expected.rows[0]) if len(expected.rows) else 0
    if expected.values.ndim > 1:
        output = output[:, expected.column : expected.column + expected.values.shape[1]]
    if len(rows) < 2 or np.array_equal(rows, np.arange(first, first + len(rows))):
        return output[first : first + len(rows)]
    return output[rows]


def _first(expected: Expected, output: Array, wrong: Array) -> str:
    """The first wrong element."""
    at = tuple(int(axis[0]) for axis in np.nonzero(wrong))
    column = expected.column + (at[1] if len(at) > 1 else 0)
    got, wanted = _got(expected, output)[at], np.asarray(expected.values)[at]
    return f"{expected.name} row {int(expected.rows[at[0]])} column {column} is {got}, expected {wanted}"


def _rows_wrong(pieces: Iterable[Expected], output: Array) -> str:
    """How many rows are wrong, of how many."""
    looked_at: set[int] = set()
    found: set[int] = set()
    for expected in pieces:
        looked_at.update(expected.rows.tolist())
        if (wrong := _wrong(expected, output)) is not None:
            found.update(expected.rows[wrong.reshape(len(wrong), -1).any(axis=1)].tolist())
    return f"{len(found)} of {len(looked_at)}"
