"""All-gather of parameters and reduce-scatter of gradients between processes."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from ncclep_bench.backends.contract import Array
from ncclep_bench.backends.host.channels import ChannelPool, Message
from ncclep_bench.backends.host.registration import ENTRY, PeerSegments, Segments
from ncclep_bench.backends.host.session import HostSession
from ncclep_bench.backends.host.windows import RowWindows
from ncclep_bench.errors import UsageError
from ncclep_bench.model.dtype import DType
from ncclep_bench.model.placement import Placement

BoolArray = npt.NDArray[np.bool_]

SUM_ELEMENTS = 1 << 16
"""Gradients are added in pieces of so many elements, which stay in a core's cache."""

PIECE_BYTES = 1 << 19
"""Rows are pushed in pieces of so many bytes: small enough to stay in a core's cache from one peer to the next, and
well above the size from which the C library writes around the caches in ranks that a sweep starts."""


class ExpertHandle:
    """Expert slots of one group, published once and selected by an activation bitmap per call (S1).

    Collective to create, to update and to call. Arrays from `segments.empty` are read where they lie, published when
    they are first used; other arrays are registered in the cache and copied at each call.
    """

    def __init__(
        self, session: HostSession, segments: Segments, *, placement: Placement, elements: int, dtype: DType
    ) -> None:
        self._session, self._segments, self._placement = session, segments, placement
        self._elements, self._dtype = elements, dtype
        self._row_bytes = elements * dtype.itemsize
        self._held = placement.experts_of_rank[session.rank]
        self._directories = RowWindows(session, ENTRY.itemsize, placement.num_experts, "the expert directory")
        self._calls = RowWindows(session, ENTRY.itemsize, 1, "the call directory")
        self._peers = PeerSegments(session.stats)
        self._channels = {name: ChannelPool(session) for name in ("gather", "reduce")}
        self._published: tuple[int, ...] | None = None
        self._held_back: dict[int, Array] = {}
        self._arrived: dict[tuple[int, int], Array] = {}
        self._pushes: dict[tuple[tuple[int, ...], bool], list[tuple[int, int, int, list[int]]]] = {}

    def bind(self, *, grads: Array | None = None, out: Array | None = None) -> None:
        """Map everybody's gradients, or everybody's gathered experts, once and before the first call; collective.

        Both must come from `segments.empty`, on every rank.
        """
        if grads is not None:
            self._publish(grads)
        if out is not None:
            self._call_line(self._session.rank)[0] = self._segments.locate(out)
        self._session.sync("bind")
        for peer in self._session.local:
            if peer == self._session.rank:
                continue
            if grads is not None:
                self._rows_of(peer, 0, 0)
            if out is not None:
                self._peers.rows(peer, self._call_line(peer)[0], 0, self._row_bytes)
        self._session.sync("bind")

    def update(self, active: Array) -> None:
        """Take this rank's row of `needed` or `has_gradient`, bool [num_experts]; bitmaps are exchanged."""
        if active.shape != (self._placement.num_experts,):
            raise UsageError(
                f"rank {self._session.rank}: the activation is {list(active.shape)}",
                hint=f"allowed: bool [{self._placement.num_experts}]",
            )
        bitmaps = self._session.exchange(np.packbits(np.asarray(active, dtype=bool)), "update")
        self.activate(np.unpackbits(np.stack(bitmaps), axis=1, count=self._placement.num_experts).astype(bool))

    def activate(self, active: BoolArray) -> None:
        """Take everybody's rows, bool [ranks, num_experts], which the caller has exchanged."""
        self._active = active
        self._pushes.clear()

    # ---- all-gather ----

    def all_gather(self, params: Array, out: Array, *, in_place: bool = False) -> None:
        """Bring every needed expert into its row of `out` [num_experts, elements].

        `params` [local experts, elements] are this rank's; with `in_place`, `params` is `out` with them in their rows.
        Owners push into every `out` that they can reach, since they then read their rows once for all peers; a rank
        whose `out` is ordinary memory reads from the owners instead.
        """
        session, me = self._session, self._session.rank
        self._check("out", out, self._placement.num_experts)
        self._check("params", params, self._placement.num_experts if in_place else len(self._held))
        operation = "all_gather_experts"
        reachable = self._publish(params)
        self._call_line(me)[0] = self._segments.locate(out) or self._nowhere(reachable)
        session.sync(operation)
        calls = {rank: self._call_line(rank)[0] for rank in session.local}
        readers = [rank for rank, line in calls.items() if not line["serial"]]
        if readers and any(line["fd"] == _UNREACHABLE for line in calls.values()):
            if not reachable:
                self._register(params, self._slots_for([rank for rank in readers if rank != me], in_place))
            session.sync(operation)
        self._message_gather(params, out, in_place)
        targets = {
            rank: self._peers.rows(rank, calls[rank], self._placement.num_experts, self._row_bytes)
            for rank in session.rotation()
            if rank != me and rank not in readers
        }
        if not in_place:
            targets[me] = out.view(np.uint8)
        self._push(params.view(np.uint8), targets, in_place)
        if me in readers:
            self._pull(out, in_place)
        self._channels["gather"].finish(operation)
        session.sync(operation)
        self._segments.release()

    def _served(self) -> BoolArray:
        """bool [ranks, num_experts]: who wants which expert from this rank."""
        served: BoolArray = self._active & (self._placement.replica_rank == self._session.rank)
        return served

    def _slots_for(self, ranks: list[int], in_place: bool) -> list[int]:
        """Slots of this rank's experts that any of `ranks` wants from it."""
        experts = np.flatnonzero(self._served()[ranks].any(axis=0)).tolist()
        return (
            experts if in_place else [int(self._placement.local_id[self._session.rank, expert]) for expert in experts]
        )

    def _push(self, params: Array, targets: dict[int, Array], in_place: bool) -> None:
        """Write this rank's experts into the targets, piece by piece, so that a piece is read from memory once."""
        key = (tuple(targets), in_place)
        if key not in self._pushes:
            self._pushes[key] = self._push_runs(*key)
        for first, slot, count, wanting in self._pushes[key]:
            source = params[slot : slot + count].reshape(-1)
            rows = [(rank != self._session.rank, targets[rank][first : first + count].reshape(-1)) for rank in wanting]
            for start in range(0, len(source), PIECE_BYTES):
                piece = slice(start, start + PIECE_BYTES)
                for foreign, target in rows:
                    self._copy(target[piece], source[piece], foreign=foreign)

    def _push_runs(self, ranks: tuple[int, ...], in_place: bool) -> list[tuple[int, int, int, list[int]]]:
        """(first expert, first slot, count, ranks) of this rank's stretches of experts that the same `ranks` want."""
        served = self._served()[list(ranks)]
        experts = np.flatnonzero(served.any(axis=0))
        slots = experts if in_place else self._placement.local_id[self._session.rank, experts]
        wanted = [served[:, expert].tobytes() for expert in range(served.shape[1])]
        return [
            (first, slot, count, [rank for rank, wants in zip(ranks, served[:, first], strict=True) if wants])
            for first, slot, count in _runs(experts, slots, lambda expert, _: wanted[expert - 1] == wanted[expert])
        ]

    def _pull(self, out: Array, in_place: bool) -> None:
        """Read every expert this rank wants from its owner."""
        me = self._session.rank
        for peer in self._session.rotation():
            if peer == me:
                continue
            experts = np.flatnonzero(self._active[me] & (self._placement.replica_rank[me] == peer))
            slots = experts if in_place else self._placement.local_id[peer, experts]
            for first, slot, count in _runs(experts, slots, self._contiguous(peer)):
                self._copy(out[first : first + count].view(np.uint8), self._rows_of(peer, slot, count), foreign=True)

    def _copy(self, target: Array, source: Array, *, foreign: bool) -> None:
        """The one place where the all-gather copies rows, and counts those that another rank has or gets."""
        target[...] = source
        if foreign:
            self._session.stats.wire_bytes += target.nbytes

    def _message_gather(self, params: Array, out: Array, in_place: bool) -> None:
        session, me = self._session, self._session.rank
        if not session.remote:
            return
        served, server = self._served(), self._placement.replica_rank[me]
        local_id = self._placement.local_id[me]
        sends = [
            Message(peer, params[expert if in_place else local_id[expert]], expert % _TAGS)
            for peer in session.remote
            for expert in np.flatnonzero(served[peer]).tolist()
        ]
        receives = [
            Message(int(server[expert]), out[expert], expert % _TAGS)
            for expert in np.flatnonzero(self._active[me]).tolist()
            if server[expert] in session.remote
        ]
        self._exchange("gather", sends, receives)

    # ---- reduce-scatter ----

    def reduce_scatter(self, grads: Array, out: Array | None) -> None:
        """Sum each held expert's gradients into its row of `out` [local experts, elements], in float32.

        `grads` [num_experts, elements], of which only rows with a gradient are read; `out` None: the sums go to the
        held rows of `grads` themselves.
        """
        session, me = self._session, self._session.rank
        self._check("grads", grads, self._placement.num_experts)
        if out is not None:
            self._check("out", out, len(self._held))
        mine = np.flatnonzero(self._active[me]).tolist()
        if not self._publish(grads):
            self._register(grads, [expert for expert in mine if self._placement.owners[expert] != (me,)])
        session.sync("reduce_scatter_expert_grads")
        arrived = self._message_gradients(grads, mine)
        late: list[tuple[Array, Array]] = []
        for local, expert in enumerate(self._held):
            target = grads[expert] if out is None else out[local]
            if out is None and len(self._placement.owners[expert]) > 1:
                # Another owner may still read this row: the sum takes its place only after everybody has read.
                late.append((target, self._held_back.setdefault(expert, np.empty_like(target))))
                target = late[-1][1]
            self._sum_into(target, expert, grads, arrived)
        session.sync("reduce_scatter_expert_grads")
        for target, total in late:
            target[...] = total
        self._segments.release()

    def _sum_into(self, target: Array, expert: int, grads: Array, arrived: dict[tuple[int, int], Array]) -> None:
        """Add up one expert: the one place where gradients are read, and foreign ones counted."""
        session, me = self._session, self._session.rank
        terms: list[Array] = []
        for rank in np.flatnonzero(self._active[:, expert]).tolist():
            if rank == me:
                # The sum may take the place of this rank's own gradient, which must then be read first. Where several
                # owners add up the same expert it does not, and all add in rank order: replicas stay equal to the bit.
                terms.insert(0 if self._placement.owners[expert] == (me,) else len(terms), grads[expert])
            elif rank in session.remote:
                terms.append(arrived[rank, expert])
            else:
                row = self._rows_of(rank, expert, 1).view(target.dtype)[0]
                session.stats.wire_bytes += row.nbytes
                terms.append(row)
        if len(terms) < 2:
            target[...] = terms[0] if terms else 0
            return
        for first in range(0, len(target), SUM_ELEMENTS):
            piece = slice(first, first + SUM_ELEMENTS)
            if target.dtype == np.float32:
                total = np.add(terms[0][piece], terms[1][piece], out=target[piece])
            else:
                total = terms[0][piece].astype(np.float32) + terms[1][piece].astype(np.float32)
            for term in terms[2:]:
                total += term[piece].astype(np.float32, copy=False)
            if target.dtype != np.float32:
                target[piece] = total

    def _message_gradients(self, grads: Array, mine: list[int]) -> dict[tuple[int, int], Array]:
        session = self._session
        if not session.remote:
            return {}
        sends = [
            Message(owner, grads[expert], expert % _TAGS)
            for expert in mine
            for owner in self._placement.owners[expert]
            if owner in session.remote
        ]
        wanted = [
            (rank, expert)
            for expert in self._held
            for rank in np.flatnonzero(self._active[:, expert]).tolist()
            if rank in session.remote
        ]
        if set(wanted) != set(self._arrived):
            self._arrived = {key: np.empty(self._elements, self._dtype.numpy) for key in wanted}
        receives = [Message(rank, self._arrived[rank, expert], expert % _TAGS) for rank, expert in wanted]
        self._exchange("reduce", sends, receives)
        self._channels["reduce"].finish("reduce_scatter_expert_grads")
        return self._arrived

    # ---- both ----

    def _exchange(self, name: str, sends: list[Message], receives: list[Message]) -> None:
        channels = self._channels[name]
        channels.configure(sends, receives)
        channels.start_receives()
        for peer in self._session.remote:
            channels.start_send(peer)

    def _publish(self, rows: Array) -> bool:
        """Say where this rank's rows lie, once for all calls; False when they are no reachable memory."""
        line = self._segments.locate(rows)
        if line is not None and line != self._published:
            for slot in range(len(rows)):
                self._directory(self._session.rank)[slot] = (*line[:-1], line[-1] + slot * self._row_bytes)
        self._published = line
        return line is not None

    def _register(self, rows: Array, slots: list[int]) -> None:
        """Copy rows of ordinary memory to where peers can read them, for this call."""
        directory = self._directory(self._session.rank)
        directory[...] = 0
        for slot in slots:
            directory[slot] = self._segments.acquire(rows[slot])

    @staticmethod
    def _nowhere(reachable: bool) -> tuple[int, ...]:
        """The line of an `out` that cannot be reached; its descriptor says whether `params` can."""
        return (0, 0, 0 if reachable else _UNREACHABLE, 0, 0, 0)

    def _directory(self, rank: int) -> Array:
        return self._directories.of(rank, np.uint8).reshape(-1).view(ENTRY)

    def _call_line(self, rank: int) -> Array:
        return self._calls.of(rank, np.uint8).reshape(-1).view(ENTRY)

    def _rows_of(self, peer: int, slot: int, count: int) -> Array:
        directory = self._directory(peer)
        return self._peers.rows(peer, directory[slot], count, self._row_bytes, published=directory["serial"])

    def _contiguous(self, peer: int) -> Callable[[int, int], bool]:
        """Whether the slot of an expert lies right behind the slot before it, in one segment of a peer."""
        directory = self._directory(peer)
        serial, offset = directory["serial"], directory["offset"]

        def joins(_: int, slot: int) -> bool:
            return bool(serial[slot - 1] == serial[slot] and offset[slot] - offset[slot - 1] == self._row_bytes)

        return joins

    def _check(self, name: str, array: Array, rows: int) -> None:
        shape = (rows, self._elements)
        if array.shape != shape or array.dtype != self._dtype.numpy or not array.flags.c_contiguous:
            raise UsageError(
                f"rank {self._session.rank}: {name} is {array.dtype}{list(array.shape)}",
                hint=f"allowed: contiguous {self._dtype.name}{list(shape)}",
            )

    def close(self) -> None:
        """Free requests and let go of what is mapped; the segments are their owner's to close."""
        for channels in self._channels.values():
            channels.close()
        self._peers.close()
        self._directories.close()
        self._calls.close()


_TAGS = 1 << 14
_UNREACHABLE = -1


def _runs(experts: Array, slots: Array, joins: Callable[[int, int], bool]) -> list[tuple[int, int, int]]:
    """(first expert, first slot, count) of stretches consecutive in both; `joins` says whether one may go on."""
    runs: list[tuple[int, int, int]] = []
    for expert, slot in zip(experts.tolist(), slots.tolist(), strict=True):
        if runs:
            first, first_slot, count = runs[-1]
            if expert == first + count and slot == first_slot + count and joins(expert, slot):
                runs[-1] = (first, first_slot, count + 1)
                continue
        runs.append((expert, slot, 1))
    return runs
