"""Dispatch and combine between processes: rows go straight into the peer's mapped window."""

from __future__ import annotations

import numpy as np

from ncclep_bench.backends.contract import Array
from ncclep_bench.backends.host.channels import ChannelPool, Message
from ncclep_bench.backends.host.row_sum import RowSum
from ncclep_bench.backends.host.session import HostSession
from ncclep_bench.backends.host.windows import RowWindows
from ncclep_bench.errors import RankError, UsageError
from ncclep_bench.model.dtype import SCALE_BLOCK, DType
from ncclep_bench.model.ep_config import Layout, Mode
from ncclep_bench.model.placement import Placement
from ncclep_bench.model.plan import IntArray, ranges
from ncclep_bench.routing.assignment import destinations

METADATA = ("topk_weights", "topk_idx")


class TokenHandle:
    """Buffers and layout of one routing at a time over one group; collective to create, to update and to call.

    `max_tokens`: most tokens of any rank (mode `ll`: slots per source on each rank). Outputs are views valid until the
    next call. Mode `ht` exchanges counts in `update`; mode `ll` exchanges nothing and sends counts along with the rows.
    """

    def __init__(
        self,
        session: HostSession,
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
        self.session = session
        self._placement, self._top_k, self._hidden, self._dtype = placement, top_k, hidden, dtype
        self._mode, self._layout, self._alignment, self._slots = mode, layout, alignment, max_tokens
        self._experts = len(placement.experts_of_rank[session.rank])
        self._numpy = {"tokens": dtype.numpy, "topk_weights": np.dtype(np.float32), "topk_idx": np.dtype(np.int32)}
        self._width = {"tokens": hidden, "topk_weights": top_k, "topk_idx": top_k}
        if dtype.scaled:
            self._numpy["scales"] = np.dtype(np.float32)
            self._width["scales"] = -(-hidden // SCALE_BLOCK)
        self._channels = {use: ChannelPool(session) for use in ("dispatch", "tokens", "partials")}
        self._counts = RowWindows(session, 8, session.size, "counts")
        self._windows: dict[str, RowWindows] = {}
        self._expanded_store: dict[str, Array] = {}
        self._packed: dict[tuple[int, str], Array] = {}
        self._settled = True
        slots = session.size * max_tokens if mode == "ll" else 0
        self._capacity = self._returned_capacity = np.full(session.size, slots)
        self._make_windows()

    # ---- layout ----

    def update(self, topk_idx: Array, topk_weights: Array) -> None:
        """Take this rank's new routing, int [tokens, top_k] (−1 masked) and float32; collective.

        Raises UsageError for wrong shapes, an expert that does not exist, or more tokens than mode ll has slots for.
        """
        session, me = self.session, self.session.rank
        check_routing(
            me,
            topk_idx,
            topk_weights,
            top_k=self._top_k,
            num_experts=self._placement.num_experts,
            slots=self._slots if self._mode == "ll" else None,
        )
        rank_of, local = destinations(topk_idx.astype(np.int32, copy=False), me, self._placement)
        self.tokens = len(topk_idx)
        self._sent = [np.flatnonzero((rank_of == rank).any(axis=1)) for rank in range(session.size)]
        self._metadata: list[dict[str, Array]] = []
        for rank, sent in enumerate(self._sent):
            here = rank_of[sent] == rank
            weights = np.where(here, topk_weights[sent], 0).astype(np.float32)
            local_ids = np.where(here, local[sent], -1).astype(np.int32)
            self._metadata.append({"topk_weights": weights, "topk_idx": local_ids})
        sent_counts = np.array([len(sent) for sent in self._sent], dtype=np.int64)
        if self._mode == "ll":
            self._first_row_at = np.full(session.size, me * self._slots)
            self._first_row_from = np.arange(session.size) * self._slots
        else:
            pairs = np.stack(session.exchange(sent_counts, "update"))
            before = np.cumsum(pairs, axis=0) - pairs
            self._first_row_at, self._first_row_from = before[me], before[:, me]
            self._counts.of(me, np.int64)[:, 0] = pairs[:, me]
            self._grow(pairs)
            self._settled = True
        self._plan_return()
        self._open_channels()

    def prime(self) -> None:
        """Send weights and ids alone, so that combine can run without a dispatch before it; collective."""
        self._push(METADATA, {})

    # ---- dispatch ----

    def dispatch(self, tokens: Array, scales: Array | None = None) -> dict[str, Array]:
        """Send `tokens` [tokens, hidden] (float8: with `scales` [tokens, hidden/128]); returns Dispatch's outputs."""
        rows = {"tokens": tokens} if scales is None else {"tokens": tokens, "scales": scales}
        for name in set(self._width) - set(METADATA):
            if name not in rows:
                raise UsageError(f"dispatch of {self._dtype.name} needs {name}")
        for name, array in rows.items():
            self._check_rows(name, array, self.tokens, name)
        self._push(tuple(self._width), rows)
        return self.outputs()

    def outputs(self) -> dict[str, Array]:
        """What the last dispatch delivered, as Dispatch names it."""
        counts = {"source_counts": self._source_counts}
        if self._layout == "expert_major":
            return {**self._expanded, **counts}
        received = {name: self._own(name)[: self._received_rows()] for name in self._width}
        return {**received, **counts, "expert_counts": self._expert_counts}

    def _push(self, names: tuple[str, ...], rows: dict[str, Array]) -> None:
        session, me = self.session, self.session.rank
        if not self._settled:
            session.sync("dispatch")
        channels = self._channels["dispatch"]
        channels.start_receives()
        for peer in session.remote:
            for name in rows:
                np.take(rows[name], self._sent[peer], axis=0, out=self._packed[peer, name], mode="clip")
            channels.start_send(peer)
        for peer in session.rotation():
            first, count = int(self._first_row_at[peer]), len(self._sent[peer])
            if self._mode == "ll":
                self._counts.of(peer, np.int64)[me] = count
                session.stats.control_bytes += 8 if peer != me else 0
            for name in names:
                target = self._windows[name].of(peer, self._numpy[name])[first : first + count]
                if name in rows:
                    self._write_rows(peer, target, rows[name], self._sent[peer])
                else:
                    self._write_rows(peer, target, self._metadata[peer][name], None)
        channels.finish("dispatch")
        session.sync("dispatch")
        self._settled = False
        self._arrange(expand="tokens" in rows)
        if session.remote and self._mode == "ll":
            self._open_return_channels()

    def _write_rows(self, peer: int, target: Array, source: Array, index: IntArray | None) -> None:
        """Copy rows into a peer's window: the one place where dispatch writes, and counts what it writes."""
        if index is None:
            target[...] = source
        else:
            # mode="clip" writes straight into `out`; the default goes through a buffer.
            np.take(source, index, axis=0, out=target, mode="clip")
        if peer != self.session.rank:
            self.session.stats.wire_bytes += target.nbytes

    # ---- what arrived ----

    def _arrange(self, *, expand: bool) -> None:
        """Sort out what arrived: counts, and in the expert-major layout where every choice's row goes."""
        self._source_counts = self._counts.of(self.session.rank, np.int64)[:, 0].copy()
        rows = ranges(self._first_row_from, self._source_counts)
        ids = self._own("topk_idx")[rows]
        valid = ids >= 0
        local = ids[valid]
        if len(local) and int(local.max()) >= self._experts:
            raise RankError(
                f"rank {self.session.rank}: dispatch delivered local expert {int(local.max())} of {self._experts}",
                ranks=(self.session.rank,),
                hint="rows were corrupted on their way: check memory and transport",
            )
        self._expert_counts = np.bincount(local, minlength=self._experts)
        if self._layout != "expert_major":
            return
        per_row = valid.sum(axis=1)
        row_of_choice = np.repeat(rows, per_row)
        order = np.argsort(local.astype(np.int16 if self._experts < 1 << 15 else np.int32), kind="stable")
        starts = self._expert_starts()
        position = ranges(starts[:-1], self._expert_counts)
        position_of_choice = np.empty(len(order), dtype=np.int64)
        position_of_choice[order] = position
        weights = self._own("topk_weights")[rows][valid]
        self._pre_reduction = RowSum(np.concatenate([[0], np.cumsum(per_row)]), position_of_choice, weights)
        self._flat_rows = rows
        self._room(int(starts[-1]))
        self._expanded["expert_counts"] = self._expert_counts
        self._expanded["topk_weights"][position] = weights[order]
        if not expand:
            return
        for name in ("tokens", "scales") if self._dtype.scaled else ("tokens",):
            source = self._own(name)
            done = 0
            # One take per run of rows without a gap: a single one unless blocks are padded.
            for first, count in _runs(starts, self._expert_counts):
                picked = row_of_choice[order[done : done + count]]
                np.take(source, picked, axis=0, out=self._expanded[name][first : first + count], mode="clip")
                done += count

    def _expert_starts(self) -> IntArray:
        if self._mode == "ll":
            return np.arange(self._experts + 1) * (self.session.size * self._slots)
        blocks = -(-self._expert_counts // self._alignment) * self._alignment
        return np.concatenate([[0], np.cumsum(blocks)])

    def _room(self, rows: int) -> None:
        """Expert-major outputs of at least `rows` rows; pages nobody writes cost nothing."""
        if not self._expanded_store or len(self._expanded_store["tokens"]) < rows:
            self._expanded_store = {
                name: np.empty((rows, self._width[name]), self._numpy[name])
                for name in self._width
                if name not in METADATA
            }
            self._expanded_store["topk_weights"] = np.empty(rows, dtype=np.float32)
        self._expanded = {name: array[:rows] for name, array in self._expanded_store.items()}

    def _received_rows(self) -> int:
        if self._mode == "ll":
            return self.session.size * self._slots
        return int(self._source_counts.sum())

    # ---- combine ----

    def combine_rows(self) -> Array:
        """This rank's rows for a copy-free combine in the flat and rank_major layouts, [received rows, hidden].

        Peers read them where they lie; collective on first use.
        """
        return self._partials().of(self.session.rank, self._dtype.numpy)[: self._received_rows()]

    def combine(self, rows: Array, out: Array | None = None) -> Array:
        """Sum `rows` back into one row per token, [tokens, hidden] in the handle's dtype; collective.

        expert_major: `rows` as dispatch laid them out; they are weighted here and added up before they cross. Otherwise
        one row per received token, which the caller has weighted; any array but `combine_rows()` costs a copy.
        """
        windows = self._partials()
        own = windows.of(self.session.rank, self._dtype.numpy)
        if self._layout == "expert_major":
            self._check_rows("rows", rows, len(self._expanded["topk_weights"]), "tokens")
            self._pre_reduce(rows, own)
        else:
            self._check_rows("rows", rows, self._received_rows(), "tokens")
            if rows.ctypes.data != own.ctypes.data:
                own[: len(rows)] = rows
        return self._collect("partials", windows, self._plain_return, out)

    def return_tokens(self, out: Array | None = None) -> Array:
        """Combine what the last dispatch delivered, as identity experts do: each token times its weights' sum."""
        if self._layout == "expert_major":
            return self.combine(self._expanded["tokens"], out)
        return self._collect("tokens", self._windows["tokens"], self._weighted_return, out)

    def _pre_reduce(self, rows: Array, own: Array) -> None:
        sums = own if len(self._flat_rows) == len(own) else np.empty((len(self._flat_rows), self._hidden), own.dtype)
        self._pre_reduction.run(rows, sums)
        if sums is not own:
            own[self._flat_rows] = sums

    def _collect(self, name: str, windows: RowWindows, returning: RowSum, out: Array | None) -> Array:
        """Meet, fetch what lies elsewhere, and add up each token's rows where they lie."""
        session = self.session
        out = np.empty((self.tokens, self._hidden), self._dtype.numpy) if out is None else out
        self._check_rows("out", out, self.tokens, "tokens")
        session.sync("combine")
        channels = self._channels[name]
        channels.start_receives()
        for peer in session.remote:
            channels.start_send(peer)
        channels.finish("combine")
        self._read_sums(windows, returning, out)
        session.sync("combine")
        self._settled = True
        return out

    def _read_sums(self, windows: RowWindows, returning: RowSum, out: Array) -> None:
        """Add up rows in the peers' windows: the one place where combine reads, and counts what it reads."""
        place = returning.index // windows.stride_rows
        foreign = (place != self.session.local.index(self.session.rank)) & (place < len(self.session.local))
        self.session.stats.wire_bytes += int(foreign.sum()) * self._hidden * self._dtype.itemsize
        returning.run(windows.everything(self._dtype.numpy), out)

    def _partials(self) -> RowWindows:
        if self._dtype.scaled:
            raise UsageError(f"combine adds float32, float16 or bfloat16 rows, not {self._dtype.name}")
        if "partials" not in self._windows:
            self._windows["partials"] = self._make_window("tokens", "partial rows")
            self._open_channels()
        return self._windows["partials"]

    # ---- set-up ----

    def _make_window(self, field: str, label: str) -> RowWindows:
        private = int(self._returned_capacity[self.session.rank]) if field == "tokens" and self.session.remote else 0
        row_bytes = self._width[field] * self._numpy[field].itemsize
        rows = int(self._capacity[self.session.rank])
        return RowWindows(self.session, row_bytes, rows, label, private_rows=private)

    def _make_windows(self) -> None:
        had = set(self._windows)
        for windows in self._windows.values():
            windows.close()
        self._windows = {field: self._make_window(field, field) for field in self._width}
        if "partials" in had:
            self._windows["partials"] = self._make_window("tokens", "partial rows")

    def _grow(self, pairs: IntArray) -> None:
        """Larger windows when any rank needs them; every rank sees the same counts, so all decide alike."""
        received, returned = pairs.sum(axis=0), pairs.sum(axis=1)
        if (received > self._capacity).any() or (self.session.remote and (returned > self._returned_capacity).any()):
            self._capacity = np.maximum(self._capacity, received)
            self._returned_capacity = np.maximum(self._returned_capacity, returned)
            self._make_windows()

    def _plan_return(self) -> None:
        """For each of this rank's tokens, where its rows will lie: in local ranks' windows, or returned by others."""
        windows, session = self._windows["tokens"], self.session
        index, private = [], windows.first_private_row
        for rank, sent in enumerate(self._sent):
            first = private
            if rank in session.local:
                first = windows.first_row(rank) + int(self._first_row_at[rank])
            else:
                private += len(sent)
            index.append(first + np.arange(len(sent)))
        out_row, rows = np.concatenate(self._sent), np.concatenate(index)
        total = np.concatenate([metadata["topk_weights"].sum(axis=1) for metadata in self._metadata])
        self._plain_return = RowSum.of(out_row, rows, np.ones(len(rows), np.float32), self.tokens)
        self._weighted_return = RowSum.of(out_row, rows, total.astype(np.float32), self.tokens)

    def _open_channels(self) -> None:
        """Persistent requests for the peers elsewhere, bound to this routing's buffers and counts."""
        session, me = self.session, self.session.rank
        if not session.remote:
            return
        fields = list(self._width)
        for peer in session.remote:
            for name in fields:
                self._pack(peer, name)
        counts = self._counts.of(me, np.int64)
        sends, receives = [], []
        for peer in session.remote:
            first = int(self._first_row_from[peer])
            rows = self._slots if self._mode == "ll" else int(counts[peer, 0])
            for tag, name in enumerate(fields):
                sends.append(Message(peer, self._packed[peer, name], tag))
                receives.append(Message(peer, self._own(name)[first : first + rows], tag))
            if self._mode == "ll":
                announced = self._packed.setdefault((peer, "count"), np.zeros(1, np.int64))
                announced[0] = len(self._sent[peer])
                sends.append(Message(peer, announced, len(fields), control=True))
                receives.append(Message(peer, counts[peer], len(fields)))
        # Mode ll announces no counts: its messages go out even when they are empty.
        if self._mode == "ht":
            sends, receives = _filled(sends), _filled(receives)
        self._channels["dispatch"].configure(sends, receives)
        self._open_return_channels()

    def _pack(self, peer: int, name: str) -> None:
        """A buffer for one field to one peer, the last routing's where it still fits; metadata goes in at once."""
        rows = (len(self._sent[peer]), self._width[name])
        if (peer, name) not in self._packed or self._packed[peer, name].shape != rows:
            self._packed[peer, name] = np.empty(rows, self._numpy[name])
        if name in METADATA:
            self._packed[peer, name][...] = self._metadata[peer][name]

    def _open_return_channels(self) -> None:
        """Requests that bring rows back; their sizes are what has been, or will be, received."""
        session, counts = self.session, self._counts.of(self.session.rank, np.int64)[:, 0]
        for tag, name in enumerate(("tokens", "partials")):
            if name not in self._windows:
                continue
            own, private = self._own(name), self._windows[name].private(self._dtype.numpy)
            sends, receives, done = [], [], 0
            for peer in session.remote:
                first, count = int(self._first_row_from[peer]), int(counts[peer])
                sends.append(Message(peer, own[first : first + count], 16 + tag))
                receives.append(Message(peer, private[done : done + len(self._sent[peer])], 16 + tag))
                done += len(self._sent[peer])
            self._channels[name].configure(_filled(sends), _filled(receives))

    def _own(self, name: str) -> Array:
        return self._windows[name].of(self.session.rank, self._numpy["tokens" if name == "partials" else name])

    def close(self) -> None:
        """Free requests and let go of the windows."""
        for channels in self._channels.values():
            channels.close()
        for windows in (self._counts, *self._windows.values()):
            windows.close()

    # ---- checks ----

    def _check_rows(self, name: str, array: Array, rows: int, like: str) -> None:
        shape, dtype = (rows, self._width[like]), self._numpy[like]
        if array.shape != shape or array.dtype != dtype or not array.flags.c_contiguous:
            raise UsageError(
                f"rank {self.session.rank}: {name} is {array.dtype}{list(array.shape)}",
                hint=f"allowed: contiguous {dtype}{list(shape)}",
            )


def check_routing(
    rank: int, topk_idx: Array, topk_weights: Array, *, top_k: int, num_experts: int | None, slots: int | None
) -> None:
    """Raise UsageError for wrong shapes, an expert that does not exist, or more tokens than mode ll has `slots` for.

    `num_experts` None: which experts they are is not looked at, for what lies on a device.
    """
    where = f"rank {rank}: "
    if topk_idx.ndim != 2 or topk_idx.shape[1] != top_k or topk_idx.dtype.kind != "i":
        raise UsageError(
            f"{where}topk_idx is {topk_idx.dtype}{list(topk_idx.shape)}", hint=f"allowed: integers [tokens, {top_k}]"
        )
    if topk_weights.shape != topk_idx.shape:
        raise UsageError(f"{where}topk_weights is {list(topk_weights.shape)}, topk_idx {list(topk_idx.shape)}")
    if num_experts is not None and len(topk_idx) and (topk_idx.min() < -1 or topk_idx.max() >= num_experts):
        bad = topk_idx[(topk_idx < -1) | (topk_idx >= num_experts)][0]
        raise UsageError(f"{where}topk_idx names expert {bad}", hint=f"allowed: 0 to {num_experts - 1}, or -1")
    if slots is not None and len(topk_idx) > slots:
        raise UsageError(f"{where}{len(topk_idx)} tokens", hint=f"allowed: max_tokens_per_rank, {slots}")


def _filled(messages: list[Message]) -> list[Message]:
    return [message for message in messages if message.array.nbytes]


def _runs(starts: IntArray, counts: IntArray) -> list[tuple[int, int]]:
    """(first row, rows) of the blocks, neighbours without a gap joined."""
    runs: list[tuple[int, int]] = []
    for start, count in zip(starts.tolist(), counts.tolist(), strict=False):
        if runs and sum(runs[-1]) == start:
            runs[-1] = (runs[-1][0], runs[-1][1] + count)
        else:
            runs.append((start, count))
    return runs
