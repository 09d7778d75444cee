"""Dispatch and combine of one routing at a time: buffers, layout on the device, launches that a graph can hold."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ncclep_bench.backends.cuda.session import CudaSession
from ncclep_bench.errors import UsageError
from ncclep_bench.model.dtype import SCALE_BLOCK, DType
from ncclep_bench.model.ep_config import Layout, Mode
from ncclep_bench.model.placement import Placement
from ncclep_bench.native.loader import USUAL_SHARED_BYTES, Launch

Array = npt.NDArray[Any]

VEC_BYTES = 16
LAYOUT_THREADS = (256, 128, 64)
"""Of a block of route_layout: the most for which there is shared memory."""
CHOICE_BYTES = 8
"""Weight and expert of a choice."""
RECORD_BYTES = 16
"""The same with its place among the expert's rows, each word with its epoch."""
BLANK = 0xFF
"""Of every byte where nothing has come, as stage.cuh says."""
LANES_BYTES = 32 * VEC_BYTES
"""What the lanes of a warp load at once."""


class Split(NamedTuple):
    """How a kernel divides its work; measured on two H200, the only place where the shape of a row matters."""

    push_share: float
    """Share of a block's warps that send; the others take what arrives. With 1 all of them send, then take."""
    piece_bytes: int
    """At most so much of a row is one warp's."""
    threads: float = 1
    """Of a block, as a share of the device's usual number; whole warps."""


DISPATCH = {"ht": Split(1 / 4, 1 << 30), "ll": Split(1 / 4, 2 * LANES_BYTES, 5 / 4)}
COMBINE = {"ht": Split(3 / 8, 14 * LANES_BYTES), "ll": Split(1 / 2, 4 * LANES_BYTES)}


class Bulk(NamedTuple):
    """How combine_bulk divides its work, and what it holds in a block's shared memory."""

    push_share: int
    """Of each 8 rows, so many are pushed by the expert's rank; their owner fetches the others."""
    push_warps: int
    """Warps of a block that send; the others add up."""
    push_batch: int
    """Pieces that a warp sends together, with one wait for all their flags."""
    take_slots: int
    """Pieces on their way to a warp that adds up, at least; one for each rank must fit."""
    piece_bytes: int
    """At most so much of a row is a piece."""


def bulk_of(session: CudaSession) -> Bulk | None:
    """How combine of flat rows in mode ht uses bulk copies; None: it does not, or they would not win."""
    return _BULK if session.bulk_bytes and session.blocks <= _MOST_BULK_BLOCKS else None


_BULK = Bulk(push_share=0, push_warps=0, push_batch=1, take_slots=2, piece_bytes=14 * LANES_BYTES)
_MOST_BULK_BLOCKS = 64
"""Grids of at most so many blocks combine by bulk copies; larger ones are faster without."""
_LEAST_BULK_BYTES = 7 * LANES_BYTES
"""Pieces that must be smaller, as rows of many ranks are on their way to each warp, cost more than stores."""


class Place(NamedTuple):
    """An array in the device's memory."""

    address: int
    shape: tuple[int, ...]
    dtype: np.dtype[Any]


_NOT_THERE = 0xFFFFFFFF
"""Where a choice goes that is another rank's: no place among an expert's rows."""


def layout_block(ranks: int, most_experts: int, top_k: int) -> tuple[int, int]:
    """Threads of a block of route_layout, and its shared memory, which may be more than there is."""
    for threads in LAYOUT_THREADS:
        shared_bytes = threads // 4 * (ranks * most_experts + ranks) + 4 * threads * top_k
        if shared_bytes <= USUAL_SHARED_BYTES:
            break
    return threads, shared_bytes


class TokenHandle:
    """Buffers, layout and launches over one group; collective to create and to call, as Dispatch and Combine name them.

    `max_tokens`: most tokens of any rank. `update` only enqueues, as `dispatch` and `combine` do.
    """

    def __init__(
        self,
        session: CudaSession,
        *,
        placement: Placement,
        top_k: int,
        hidden: int,
        dtype: DType,
        mode: Mode,
        layout: Layout,
        max_tokens: int,
        alignment: int = 1,
    ) -> None:
        self.session, self.dtype, self.hidden, self.top_k = session, dtype, hidden, top_k
        self.mode, self.layout, self.alignment = mode, layout, alignment
        self.slots = max_tokens
        self.local_experts = len(placement.experts_of_rank[session.rank])
        self.most_experts = max(int(placement.local_counts.max()), 1)
        self.row_bytes = hidden * dtype.itemsize
        self.scale_words = hidden // SCALE_BLOCK if dtype.scaled else 0
        self.sent_row_bytes = self.row_bytes + 4 * self.scale_words + CHOICE_BYTES * top_k
        self.staged = layout == "expert_major"
        if self.staged and self.most_experts * max_tokens >= _NOT_THERE:
            raise UsageError(
                f"rank {session.rank}: {self.most_experts} local experts x {max_tokens} tokens are too many places for "
                "a word of 32 bits: use more ranks or fewer tokens"
            )
        self.pieces = self._pieces(DISPATCH[mode].piece_bytes)
        # Fetching takes rows out of the peer's own memory, which is where an outbox does not help.
        pushes = mode == "ll" or self.staged or dtype.scaled or session.staging is not None
        self.bulk = None if pushes else bulk_of(session)
        self.return_pieces = self._pieces(COMBINE[mode].piece_bytes)
        if self.bulk is not None:
            self.bulk = self.bulk._replace(take_slots=max(self.bulk.take_slots, session.size))
            if self._bulk_piece_bytes(self.bulk) < _LEAST_BULK_BYTES:
                self.bulk = None
        if self.bulk is not None:
            self.return_pieces = self._pieces(min(self.bulk.piece_bytes, self._bulk_piece_bytes(self.bulk)))
        self.tokens = -1
        self._layout_block = layout_block(session.size, self.most_experts, top_k)
        self._heap = session.heap(parts := self._parts(), flags=self._flags())
        if self.staged and mode == "ll":
            for name in ("stage_rows", "stage_scales"):
                session.device.fill(self._heap.address(name), parts[name], BLANK)
            session.group.barrier()
        self._states = {name: session.new_state() for name in ("layout", "dispatch", "combine")}
        self._allocate(placement)

    def _pieces(self, piece_bytes: int) -> int:
        """Pieces that a row is cut into, none of them empty."""
        vecs = self.row_bytes // VEC_BYTES
        longest = -(-vecs // max(1, -(-self.row_bytes // piece_bytes)))
        return -(-vecs // longest)

    def _bulk_buffers(self, bulk: Bulk) -> int:
        """Buffers that a block of combine_bulk has."""
        return bulk.push_warps * bulk.push_batch + (self._warps(COMBINE[self.mode]) - bulk.push_warps) * bulk.take_slots

    def _bulk_piece_bytes(self, bulk: Bulk) -> int:
        """The largest piece of which a block can hold as many as it has buffers."""
        rest = 8 + 20 * self.session.size
        return ((self.session.bulk_bytes - rest) // self._bulk_buffers(bulk) // VEC_BYTES - 1) * VEC_BYTES

    def _warps(self, split: Split) -> int:
        return int(self.session.device.threads * split.threads) // 32

    def _parts(self) -> dict[str, int]:
        ranks, slots = self.session.size, self.slots
        halves = 2 * ranks * slots
        flat = 0 if self.staged else ranks * slots
        stage = halves if self.staged else 0
        returned = 0 if self.dtype.scaled or (self.bulk and not self.bulk.push_share) else halves
        flags = ("ready_flags", "header_flags", "return_headers")
        return {
            **dict.fromkeys(flags, 8 * ranks),
            "done_flags": 8 * ranks * self.session.blocks,
            "return_done_flags": 8 * ranks * self.session.blocks,
            "counts": 2 * ranks * (self.most_experts + ranks) * 8,
            "flat_rows": flat * self.row_bytes,
            "flat_scales": flat * self.scale_words * 4,
            "flat_weights": flat * self.top_k * 4,
            "flat_idx": flat * self.top_k * 4,
            "stage_rows": stage * self.row_bytes,
            "stage_scales": stage * self.scale_words * 4,
            "stage_records": stage * self.top_k * RECORD_BYTES,
            "stage_flags": stage * self.pieces * 8,
            "return_rows": returned * self.row_bytes,
            "return_flags": returned * self.return_pieces * 8,
            "returning": ranks * slots * self.row_bytes if self.bulk else 0,
        }

    def _flags(self) -> dict[str, int]:
        """Which of the parts are [any][ranks][so many] flags."""
        single = dict.fromkeys(("ready_flags", "header_flags", "return_headers", "done_flags"), 1)
        return single | {
            "stage_flags": self.slots * self.pieces,
            "return_flags": self.slots * self.return_pieces,
        }

    def _allocate(self, placement: Placement) -> None:
        session, ranks, slots, top_k = self.session, self.session.size, self.slots, self.top_k
        rank_of = placement.replica_rank[session.rank].astype(np.int32)
        local_of = placement.local_id[rank_of, np.arange(placement.num_experts)].astype(np.int32)
        arrivals = ranks * slots
        rows_out = self._most_rows()
        own = session.allocate
        self.own = {
            "topk_idx": own(slots * top_k * 4),
            "topk_weights": own(slots * top_k * 4),
            "rows": own(slots * self.row_bytes),
            "scales": own(slots * self.scale_words * 4),
            "out_rows": own(rows_out * self.row_bytes),
            "out_scales": own(rows_out * self.scale_words * 4),
            "out_weights": own(rows_out * 4),
            "expert_counts": own(self.local_experts * 8),
            "source_counts": own(ranks * 8),
            "returning": self._heap.address("returning")
            if self.bulk
            else own((rows_out if self.staged else arrivals) * self.row_bytes),
            "combined": own(slots * self.row_bytes),
        }
        bins = ranks * self.most_experts + ranks
        halves = {f"{name}_at": offset for name, offset in self._heap.offset.items()}
        self._arguments: dict[str, Any] = {
            "heaps": self._heap.addresses,
            "rank": session.rank,
            "ranks": ranks,
            "low_latency": int(self.mode == "ll"),
            "top_k": top_k,
            "num_experts": placement.num_experts,
            "local_experts": self.local_experts,
            "most_experts": self.most_experts,
            "slots": slots,
            "alignment": self.alignment,
            "row_vecs": self.row_bytes // VEC_BYTES,
            "scale_words": self.scale_words,
            "pieces": self.pieces,
            "return_pieces": self.return_pieces,
            **self._roles(DISPATCH[self.mode]),
            "push_share": 0,
            "push_batch": 0,
            "take_slots": 0,
            "staged": int(self.staged),
            "weigh": 0,
            "rank_of_expert": session.upload(rank_of),
            "local_of_expert": session.upload(local_of),
            "block_counts": own(-(-slots // self._layout_block[0]) * bins * 8),
            "own_counts": own(bins * 4),
            "slot_of": own(slots * ranks * 4),
            "within": own(slots * top_k * 4),
            "goes_to": own(slots * top_k * 8),
            "received": own(ranks * 4),
            "arrived_at": own(arrivals * top_k * 4 if self.staged else 0),
            "arrived_weight": own(arrivals * top_k * 4 if self.staged else 0),
            "fault": session.fault,
            "deadline_ns": int(session.deadline_s * 1e9),
            **{f"{name}_state": address for name, address in self._states.items()},
            **halves,
            **self.own,
        }

    def _roles(self, split: Split) -> dict[str, int]:
        warps = self._warps(split)
        push = max(1, round(warps * split.push_share))
        return {"push_warps": push, "take_warps": warps - push or warps}

    def _most_rows(self) -> int:
        """Rows of the expert-major output at worst."""
        if not self.staged:
            return 0
        arrivals = self.session.size * self.slots
        if self.mode == "ll":
            return self.local_experts * arrivals
        return arrivals * min(self.top_k, self.local_experts) + self.local_experts * (self.alignment - 1)

    # ---- routing ----

    def route(self, topk_idx: Array, topk_weights: Array) -> None:
        """Write this rank's routing, [tokens, top_k] each, to the device and make the launches for that many tokens."""
        device = self.session.device
        device.write(self.own["topk_idx"], np.ascontiguousarray(topk_idx, np.int32))
        device.write(self.own["topk_weights"], np.ascontiguousarray(topk_weights, np.float32))
        self.expect(len(topk_idx))
        self.dispatch = self.dispatching()
        if not self.dtype.scaled:
            self.combine = self.combining(self.own["returning"])
            arrived = self.own["out_rows"] if self.staged else self._heap.address("flat_rows")
            self.return_tokens = self.combining(arrived, weigh=not self.staged)

    def expect(self, tokens: int) -> None:
        """Make the launch `update` for so many tokens, whose routing is on the device or will be."""
        self.tokens = self._arguments["tokens"] = tokens
        self.update = self._layout()

    def _layout(self, **others: int) -> Callable[[], None]:
        """The layout, with `others` for some of its arguments; so are the next two."""
        threads, shared_bytes = self._layout_block
        blocks = max(1, -(-self.tokens // threads))
        return self.session.launch(
            "route_layout", self._arguments | others, blocks=blocks, threads=threads, shared_bytes=shared_bytes
        )

    def dispatching(self, **others: int) -> Callable[[], None]:
        """A dispatch of this rank's `rows` and `scales`, unless these are given as addresses elsewhere."""
        ranks = self.session.size
        places = ranks * self.local_experts + self.local_experts + ranks
        shared_bytes = 12 + 4 * places if self.staged else 8 + 8 * ranks
        split = DISPATCH[self.mode]
        kernel = ("dispatch_expert_ll" if self.mode == "ll" else "dispatch_expert") if self.staged else "dispatch_flat"
        threads = 32 * self._warps(split) if self.staged else None
        return self.session.launch(kernel, self._arguments | others, threads=threads, shared_bytes=shared_bytes)

    def combining(self, rows: int, *, weigh: bool = False, **others: int) -> Callable[[], None]:
        """A combine of the rows at an address, with bulk copies one in this rank's heap; `combined`: where sums go."""
        if self.bulk is not None:
            return self._combine_bulk(self.bulk, rows, weigh=weigh, **others)
        split = COMBINE[self.mode]
        arguments = {**self._arguments, **self._roles(split), "returning": rows, "weigh": int(weigh)}
        return self.session.launch(
            f"combine_{self.dtype.name}",
            arguments | others,
            threads=32 * self._warps(split),
            shared_bytes=8 + 12 * self.session.size,
        )

    def _combine_bulk(self, bulk: Bulk, rows: int, *, weigh: bool, **others: int) -> Launch:
        arguments = {
            **self._arguments,
            "push_share": bulk.push_share,
            "push_warps": bulk.push_warps,
            "push_batch": bulk.push_batch,
            "take_warps": self._warps(COMBINE[self.mode]) - bulk.push_warps,
            "take_slots": bulk.take_slots,
            "returning_at": rows - self._heap.addresses[self.session.rank],
            "weigh": int(weigh),
        }
        longest = -(-(self.row_bytes // VEC_BYTES) // self.return_pieces) * VEC_BYTES
        shared_bytes = self._bulk_buffers(bulk) * (longest + VEC_BYTES) + 8 + 20 * self.session.size
        return self.session.launch(f"combine_bulk_{self.dtype.name}", arguments | others, shared_bytes=shared_bytes)

    # ---- what is where ----

    def received_rows(self) -> int:
        """Rows of this rank's output in its layout, from the counts on the device."""
        if self.mode == "ll":
            return self.session.size * self.slots * (self.local_experts if self.staged else 1)
        counts = self._counts()
        if self.staged:
            per_expert = counts[:, : self.local_experts].sum(axis=0)
            return int((-(-per_expert // self.alignment) * self.alignment).sum())
        return int(counts[:, self.most_experts + self.session.rank].sum())

    def _counts(self) -> Array:
        """Mode ht: what every source announced in the last update, [ranks, most_experts + ranks]."""
        updates, _ = self.session.state(self._states["layout"])
        words = np.zeros((2, self.session.size, self.most_experts + self.session.size), np.uint64)
        self.session.device.read(self._heap.address("counts"), words)
        counts: Array = (words[(updates - 1) % 2] & np.uint64(0xFFFFFFFF)).astype(np.int64)
        return counts

    def token_arrays(self, rows: int) -> dict[str, Array]:
        """Host arrays like rows of tokens, with scales in float8."""
        arrays = {"tokens": np.zeros((rows, self.hidden), self.dtype.numpy)}
        if self.scale_words:
            arrays["scales"] = np.zeros((rows, self.scale_words), np.float32)
        return arrays

    def received(self) -> dict[str, Place]:
        """What dispatch delivers, as Dispatch names it; asks the device in mode ht."""
        rows, place, own = self.received_rows(), self._heap.address, self.own
        if self.staged:
            at = {"tokens": own["out_rows"], "scales": own["out_scales"], "topk_weights": own["out_weights"]}
            weights: tuple[int, ...] = (rows,)
        else:
            at = {name: place(f"flat_{name.removeprefix('topk_')}") for name in ("scales", "topk_weights", "topk_idx")}
            at["tokens"], weights = place("flat_rows"), (rows, self.top_k)
        places = {
            "tokens": Place(at["tokens"], (rows, self.hidden), self.dtype.numpy),
            "topk_weights": Place(at["topk_weights"], weights, np.dtype(np.float32)),
            "expert_counts": Place(own["expert_counts"], (self.local_experts,), np.dtype(np.int64)),
            "source_counts": Place(own["source_counts"], (self.session.size,), np.dtype(np.int64)),
        }
        if self.scale_words:
            places["scales"] = Place(at["scales"], (rows, self.scale_words), np.dtype(np.float32))
        if not self.staged:
            places["topk_idx"] = Place(at["topk_idx"], weights, np.dtype(np.int32))
        return places

    def received_arrays(self) -> tuple[dict[str, Array], dict[str, int]]:
        """Host arrays like what dispatch delivers, and where that lies."""
        places = self.received()
        arrays = {name: np.zeros(place.shape, place.dtype) for name, place in places.items()}
        return arrays, {name: place.address for name, place in places.items()}

    # ---- counts ----

    def moved(self) -> tuple[int, int]:
        """Wire and control bytes that this rank has pushed, from what its kernels counted."""
        dispatches, dispatched = self.session.state(self._states["dispatch"])
        combines, combined = self.session.state(self._states["combine"])
        updates, _ = self.session.state(self._states["layout"])
        peers = self.session.size - 1
        wire = dispatched * self.sent_row_bytes + combined * self.row_bytes
        header = 8 * (self.most_experts + self.session.size)
        # In mode ll only pieces with words that look blank have a flag; such are not counted.
        pieces = self.pieces if self.mode == "ht" else 0
        per_row = 8 * pieces + (RECORD_BYTES - CHOICE_BYTES) * self.top_k
        flags = per_row * dispatched if self.staged else 16 * dispatches * peers
        announced = (updates if self.mode == "ht" else dispatches) * peers * header
        returned = 8 * self.return_pieces * combined + 8 * combines * peers
        if self.bulk is not None:
            # Rows that are fetched have no flag; blocks meet at the end.
            returned = 8 * self.return_pieces * (combined * self.bulk.push_share // 8)
            returned += 8 * combines * peers * (1 + self.session.blocks)
        return wire, flags + announced + returned

    def close(self) -> None:
        self._heap.close()
