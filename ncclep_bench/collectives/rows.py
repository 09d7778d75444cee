"""Row contents that any rank can compute for any other: cheap, distinct per row, and new with every draw."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ncclep_bench.model.dtype import SCALE_BLOCK, DType

Array = npt.NDArray[Any]
_Words = npt.NDArray[np.uint64]

BLOCK_BYTES = 1 << 18
"""Of a row, what is made, compared or added up at a time: enough that calls cost little, and caches still hold it."""
BOUND = 2.0
"""Every element is at least 0.5 and less than this, or the negative of such a number."""

_WORDS = BLOCK_BYTES // 8
_GOLDEN = 0x9E3779B97F4A7C15


class Piece(NamedTuple):
    """A part of a table: some whole rows, or some columns of one."""

    rows: slice
    columns: slice


def pieces(count: int, width: int, dtype: DType, terms: int = 1) -> Iterator[Piece]:
    """Pieces that make up `count` rows of `width` elements, each made of about BLOCK_BYTES where a row has `terms`."""
    block = BLOCK_BYTES // dtype.itemsize
    step = max(1, block // max(1, width * terms))
    for row in range(0, count, step):
        for column in range(0, width, block):
            yield Piece(slice(row, min(row + step, count)), slice(column, min(column + block, width)))


class Rows:
    """One row of `width` elements in `dtype` per key; nothing is made before it is asked for.

    A block of a row is a stretch of one random vector of (seed, draw), from a place that a hash of key and block
    chooses and with sign, lowest bit of the exponent and mantissa of its elements flipped as the hash says: a shifted,
    truncated, swapped or stale row differs from the right one almost everywhere. Integers alone, so the same bits
    everywhere.
    """

    def __init__(self, keys: npt.NDArray[np.int64], width: int, seed: int, draw: int, dtype: DType) -> None:
        self._width, self._dtype, self._numpy = width, dtype, dtype.numpy
        self._vector = _random_vector(seed, draw, dtype)
        blocks = np.arange(-(-width * dtype.itemsize // BLOCK_BYTES))
        place = _hash(keys[:, None], blocks, seed, draw)
        self._place: list[list[int]] = (place % np.uint64(_WORDS)).tolist()
        self._flipped = _mixed(place) & np.uint64(_free_bits(dtype))

    def __len__(self) -> int:
        return len(self._place)

    def pieces(self) -> Iterator[Piece]:
        """All rows, in parts that `of` makes at once."""
        return pieces(len(self), self._width, self._dtype)

    def of(self, piece: Piece) -> Array:
        """The contents of some rows, shape [rows, columns], within one block of BLOCK_BYTES of each."""
        block = piece.columns.start * self._dtype.itemsize // BLOCK_BYTES
        columns = piece.columns.stop - piece.columns.start
        made = np.empty((piece.rows.stop - piece.rows.start, -(-columns * self._dtype.itemsize // 8)), np.uint64)
        for line, row in zip(made, range(piece.rows.start, piece.rows.stop), strict=True):
            self._make(row, block, line)
        return made.view(self._numpy)[:, :columns]

    def _make(self, row: int, block: int, line: _Words) -> None:
        place = self._place[row][block]
        np.bitwise_xor(self._vector[place : place + len(line)], self._flipped[row, block], out=line)

    def fill(self, table: Array, at: npt.NDArray[np.int64] | None = None) -> None:
        """Write every row into `table`: row i into row at[i], or into row i of as many."""
        if at is None and len(table) != len(self):
            raise ValueError(f"{len(self)} rows for a table of {len(table)}")
        if self._width * self._dtype.itemsize % 8:
            for piece in self.pieces():
                table[piece.rows if at is None else at[piece.rows], piece.columns] = self.of(piece)
            return
        words = table.view(np.uint64)
        for row, target in enumerate(range(len(self)) if at is None else at.tolist()):
            for block, first in enumerate(range(0, words.shape[1], _WORDS)):
                self._make(row, block, words[target, first : first + _WORDS])


def scales(keys: npt.NDArray[np.int64], hidden: int, seed: int, draw: int) -> npt.NDArray[np.float32]:
    """Positive float32 scales, one per 128 elements of a row; shape [len(keys), ceil(hidden / 128)]."""
    places = _hash(keys[:, None], np.arange(-(-hidden // SCALE_BLOCK)), seed, draw) >> np.uint64(40)
    return np.float32(0.25) + (places.astype(np.float32) + np.float32(0.5)) * np.float32(2.0**-24)


def _free_bits(dtype: DType) -> int:
    """The bits, of all elements of a word, that may be anything in ±[0.5, 2): exponents of 0.5 and 1 differ in one."""
    bits = 8 * dtype.itemsize
    free = 1 << (bits - 1) | (1 << (1 - round(np.log2(dtype.epsilon)))) - 1
    return sum(free << shift for shift in range(0, 64, bits))


@lru_cache(maxsize=4)
def _random_vector(seed: int, draw: int, dtype: DType) -> _Words:
    half = np.full(8 // dtype.itemsize, 0.5).astype(dtype.numpy).view(np.uint64)
    words = np.random.Generator(np.random.Philox(key=[seed, draw])).integers(0, 1 << 64, 2 * _WORDS, dtype=np.uint64)
    words = words & np.uint64(_free_bits(dtype)) | half
    words.flags.writeable = False
    return words


def _hash(keys: npt.NDArray[np.int64], block: npt.NDArray[np.int64], seed: int, draw: int) -> _Words:
    start = np.uint64((seed * 1_000_003 + draw + 1) * _GOLDEN % (1 << 64))
    golden = np.uint64(_GOLDEN)
    return _mixed(_mixed(keys.astype(np.uint64) * golden + start) + block.astype(np.uint64) * golden)


def _mixed(words: _Words) -> _Words:
    """The finaliser of SplitMix64 (Steele et al., 2014), a permutation."""
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        words = (words ^ (words >> np.uint64(shift))) * np.uint64(factor)
    return words ^ (words >> np.uint64(31))
