"""The row plan: out[dst_rank, dst_row] = Σ weight · in[src_rank, src_row], the one idea under every collective."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int64]
Rows = npt.NDArray[Any]
Reduce = Literal["copy", "sum", "weighted_sum"]


class Field(NamedTuple):
    """One part of a row: its name, bytes per row, and for fp8 the name of its encoding."""

    name: str
    row_bytes: int
    encoding: str | None = None


@dataclass(frozen=True)
class Entries:
    """A sparse matrix of rows: equally long arrays; `weight` is None where every weight is one."""

    src_rank: IntArray
    src_row: IntArray
    dst_rank: IntArray
    dst_row: IntArray
    weight: npt.NDArray[np.float32] | None = None

    def __len__(self) -> int:
        return len(self.src_rank)

    def transposed(self) -> Entries:
        """The same entries the other way, from destination to source."""
        return Entries(self.dst_rank, self.dst_row, self.src_rank, self.src_row, self.weight)

    def where(self, mask: npt.NDArray[np.bool_]) -> Entries:
        """The entries that `mask` selects."""
        weight = None if self.weight is None else self.weight[mask]
        return Entries(self.src_rank[mask], self.src_row[mask], self.dst_rank[mask], self.dst_row[mask], weight)

    @cached_property
    def crossing(self) -> tuple[IntArray, IntArray]:
        """First entry of each distinct (src_rank, src_row, dst_rank), and per entry the index of its crossing."""
        rows, ranks = (int(column.max(initial=0)) + 1 for column in (self.src_row, self.dst_rank))
        key = (self.src_rank * rows + self.src_row) * ranks + self.dst_rank
        order = np.argsort(key, kind="stable")
        ordered = key[order]
        new = np.ones(len(order), dtype=bool)
        new[1:] = ordered[1:] != ordered[:-1]
        crossing_of = np.empty(len(order), dtype=np.int64)
        crossing_of[order] = np.cumsum(new) - 1
        return order[new], crossing_of

    def pair_rows(self, ranks: int) -> IntArray:
        """Rows that cross from src to dst, counted one by one, shape [ranks, ranks]; the diagonal stays at home."""
        first, _ = self.crossing
        return np.bincount(self.src_rank[first] * ranks + self.dst_rank[first], minlength=ranks * ranks).reshape(
            ranks, ranks
        )


class Traffic(NamedTuple):
    """Bytes and messages from each rank (row) to each rank (column), shape [ranks, ranks], diagonal zero."""

    wire_bytes: IntArray
    messages: IntArray

    @property
    def total_bytes(self) -> int:
        return int(self.wire_bytes.sum())


@dataclass(frozen=True)
class Stage:
    """One step of a plan: rows of `entries` move and are reduced into a buffer of `rows_out[rank]` rows.

    Wire stages cross between ranks; the others stay on one rank (packing, pre-reduction, expansion).
    `fields` cross together; `pair_rows` answers how many rows cross per pair without materialising `entries`.
    """

    name: str
    reduce: Reduce
    fields: tuple[Field, ...]
    rows_out: tuple[int, ...]
    entries: Callable[[], Entries]
    pair_rows: Callable[[], IntArray]

    @property
    def row_bytes(self) -> int:
        """Bytes of one crossing row, all fields."""
        return sum(field.row_bytes for field in self.fields)

    def slices(self, count: int) -> list[Entries]:
        """`entries` cut into `count` parts by destination row, which run in any order or pipelined."""
        entries = self.entries()
        return [entries.where(entries.dst_row % count == part) for part in range(count)]

    def run(self, inputs: Sequence[Rows]) -> list[Rows]:
        """Output rows of every rank; sums accumulate in float32; rows that no entry reaches are zero."""
        width, dtype = inputs[0].shape[1], inputs[0].dtype
        outputs: list[Rows] = [np.zeros((rows, width), dtype) for rows in self.rows_out]
        entries = self.entries()
        for dst, output in enumerate(outputs):
            total = output if self.reduce == "copy" else np.zeros(output.shape, dtype=np.float32)
            for src, source in enumerate(inputs):
                part = entries.where((entries.src_rank == src) & (entries.dst_rank == dst))
                if self.reduce == "copy":
                    total[part.dst_row] = source[part.src_row]
                    continue
                rows = source[part.src_row].astype(np.float32)
                np.add.at(total, part.dst_row, rows if part.weight is None else rows * part.weight[:, None])
            output[...] = total.astype(dtype)
        return outputs


@dataclass(frozen=True)
class RowPlan:
    """What moves: the sparse matrix `whole` and the stages it is rewritten into.

    Law: running the stages in order gives the rows of `whole`.
    """

    ranks: int
    whole: Stage
    stages: tuple[Stage, ...]

    def traffic(self) -> Traffic:
        """Bytes and messages per pair of ranks, without materialising rows; a message per field, stage and pair."""
        wire_bytes = np.zeros((self.ranks, self.ranks), dtype=np.int64)
        messages = np.zeros_like(wire_bytes)
        for stage in self.stages:
            crossing = stage.pair_rows().copy()
            np.fill_diagonal(crossing, 0)
            wire_bytes += crossing * stage.row_bytes
            messages += (crossing > 0) * len(stage.fields)
        return Traffic(wire_bytes, messages)

    def run(self, inputs: Sequence[Rows]) -> list[Rows]:
        """Output rows of every rank from the input rows of every rank, stage by stage, rounded after each."""
        buffers = list(inputs)
        for stage in self.stages:
            buffers = stage.run(buffers)
        return buffers


def wire_then_expand(whole: Stage, ranks: int) -> tuple[Stage, ...]:
    """Two stages of a copying plan: a row crosses once to each rank that wants it, and is expanded there.

    Crossed rows lie by source rank, then source row. `whole.pair_rows` counts distinct crossings.
    """

    @cache
    def split() -> tuple[Entries, Entries]:
        entries = whole.entries()
        first, crossing_of = entries.crossing
        arrival = _position_within(entries.dst_rank[first])
        wire = Entries(entries.src_rank[first], entries.src_row[first], entries.dst_rank[first], arrival)
        expand = Entries(entries.dst_rank, arrival[crossing_of], entries.dst_rank, entries.dst_row)
        return wire, expand

    between = tuple(map(int, whole.pair_rows().sum(axis=0)))
    return (
        Stage("wire", "copy", whole.fields, between, lambda: split()[0], whole.pair_rows),
        Stage("expand", "copy", (), whole.rows_out, lambda: split()[1], lambda: _nothing(ranks)),
    )


def reduce_then_wire(whole: Stage, ranks: int) -> tuple[Stage, ...]:
    """Two stages of a summing plan: rows of one rank for the same output row are added up before they cross."""

    @cache
    def split() -> tuple[Entries, Entries]:
        entries = whole.entries()
        first, partial_of = entries.transposed().crossing
        partial = _position_within(entries.src_rank[first])
        reduce = Entries(entries.src_rank, entries.src_row, entries.src_rank, partial[partial_of], entries.weight)
        wire = Entries(entries.src_rank[first], partial, entries.dst_rank[first], entries.dst_row[first])
        return reduce, wire

    between = tuple(map(int, whole.pair_rows().sum(axis=1)))
    return (
        Stage("reduce", whole.reduce, (), between, lambda: split()[0], lambda: _nothing(ranks)),
        Stage("wire", "sum", whole.fields, whole.rows_out, lambda: split()[1], whole.pair_rows),
    )


def ranges(first: IntArray, counts: IntArray) -> IntArray:
    """first[i], first[i] + 1, … of counts[i] numbers each, one after another."""
    numbers: IntArray = np.arange(int(counts.sum())) + np.repeat(first - (np.cumsum(counts) - counts), counts)
    return numbers


def _nothing(ranks: int) -> IntArray:
    """No row crosses between any pair."""
    return np.zeros((ranks, ranks), dtype=np.int64)


def _position_within(groups: IntArray) -> IntArray:
    """Running number of each element within its group, in the order given."""
    order = np.argsort(groups, kind="stable")
    counts = np.bincount(groups)
    position = np.empty(len(groups), dtype=np.int64)
    position[order] = ranges(np.zeros_like(counts), counts)
    return position
