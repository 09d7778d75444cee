"""All-gather of parameters and reduce-scatter of gradients over slots that every peer has mapped once."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from ncclep_bench.backends.cuda.registration import Registrations
from ncclep_bench.backends.cuda.session import CudaSession
from ncclep_bench.backends.cuda.tokens import VEC_BYTES
from ncclep_bench.model.placement import Placement
from ncclep_bench.native.loader import Launch, Launches
from ncclep_bench.runtime.nccl import Part

BoolArray = npt.NDArray[np.bool_]

SMALLEST_CHUNK_BYTES, CHUNK_BYTES = 2 << 10, 16 << 10
"""Of a block, what one warp copies or adds up at a time: less where there are more warps than work."""
COPY_ENGINE_BYTES = 2 << 20
"""Blocks from here on are copied by the copy engines, which are faster but take longer to start."""


class ExpertHandle:
    """Parameters and gradients of one rank in peer-reachable memory; collective to create, to update and to call.

    To and from ranks out of reach whole blocks are exchanged from where they lie: parameters into their place,
    gradients into an inbox, from which the kernel then adds as it does from a neighbour's memory.
    """

    def __init__(self, session: CudaSession, *, placement: Placement, block_bytes: int, in_place: bool) -> None:
        self.session, self.placement, self.block_bytes, self.in_place = session, placement, block_bytes, in_place
        held = int(placement.local_counts.max())
        experts = placement.num_experts * block_bytes
        parts = {
            "ready_flags": 8 * session.size,
            "done_flags": 8 * session.size * session.blocks,
            "all": experts,
        }
        flags = {"ready_flags": 1, "done_flags": 1}
        self._heap = session.heap(parts, flags=flags, not_in_outbox="all")
        self.all = self._heap.address("all")
        self.held = self.all if in_place else session.allocate(held * block_bytes)
        self._state = session.new_state()
        ranks, experts_held = session.size, len(placement.experts_of_rank[session.rank])
        self._table_bytes = {
            "copies": 24 * placement.num_experts * (ranks + 1),
            "terms": 8 * max(experts_held, 1) * ranks,
            "sums": 8 * max(experts_held, 1),
        }
        self._tables = {name: session.allocate(nbytes) for name, nbytes in self._table_bytes.items()}
        """What kernels read of a call: where rows lie."""
        self._launches = Launches()
        self._crossed_bytes = 0
        self._inbox = self._from_inbox_bytes = 0
        self._aside = 0
        self._late: dict[int, int] = {}
        """By expert, where a sum waits until its place may be written."""
        self.run: Callable[[], None]

    @property
    def copies_by_engine(self) -> bool:
        """Whether parameters go through the copy engines."""
        return self.block_bytes >= COPY_ENGINE_BYTES

    def exchange(self, own: BoolArray) -> BoolArray:
        """Everybody's bitmap, bool [ranks, experts]; collective."""
        bits = np.packbits(own)
        table = np.stack([np.frombuffer(data, np.uint8) for data in self.session.group.allgather(bits.tobytes())])
        return np.unpackbits(table, axis=1, count=self.placement.num_experts).astype(bool)

    def gather(self, needed: BoolArray) -> None:
        """Make the launch `run` that pushes this rank's parameters to whom needs them."""
        me, block = self.session.rank, self.block_bytes
        copies: list[tuple[int, int, int]] = []
        for local, expert in enumerate(self.placement.experts_of_rank[me]):
            source = self._held(local, expert)
            for distance in range(1, self.session.size + 1):
                rank = (me + distance) % self.session.size
                if rank in self.session.out_of_reach or not self._serves(needed, me, rank, expert):
                    continue
                target = self._heap.address("all", rank) + expert * block
                if target != source:
                    copies.append((source, target, int(rank != me)))
        if self.copies_by_engine:
            crossing = sum(crosses for _, _, crosses in copies)
            self.run = self._gather_around(needed, self._copying_by_engine(_joined(copies, block), crossing))
        else:
            self._write_table("copies", np.array(copies, np.uint64).reshape(-1, 3))
            self.run = self._gather_around(needed, self._launch("copy_blocks", len(copies)))

    def _serves(self, needed: BoolArray, holder: int, rank: int, expert: int) -> bool:
        """Whether `rank` takes an expert from that holder."""
        return bool(needed[rank, expert] and self.placement.replica_rank[rank, expert] == holder)

    def _gather_around(self, needed: BoolArray, copy: Callable[[], None]) -> Callable[[], None]:
        """`copy`, followed by what is exchanged with ranks out of reach."""
        if self.session.staging is None:
            return copy
        me, block, held = self.session.rank, self.block_bytes, self.placement.experts_of_rank

        def gather() -> None:
            # In the order in which their holder sends them, which need not be that of the experts' numbers.
            distant = sorted(self.session.out_of_reach)
            away = [
                Part(rank, self._held(local, expert), block)
                for rank in distant
                for local, expert in enumerate(held[me])
                if self._serves(needed, me, rank, expert)
            ]
            coming = [
                Part(holder, self._whole(expert), block)
                for holder in distant
                for expert in held[holder]
                if self._serves(needed, holder, me, expert)
            ]
            copy()
            self._crossed_bytes += self.session.exchange(away, coming, "the all-gather of parameters")

        return gather

    def reduce(self, has_gradient: BoolArray, dtype: str) -> None:
        """Make the launch `run` that reads and adds up the gradients of this rank's experts."""
        moves = _joined(self._late_moves(), self.block_bytes)
        self._bind_terms(has_gradient)
        add = self._adding(dtype)

        def reduce() -> None:
            add()
            for source, target, nbytes in moves:
                self.session.device.copy(target, source, nbytes)

        self.run = self._reduce_around(has_gradient, reduce)

    def _late_moves(self) -> list[tuple[int, int, int]]:
        """Give sums that must wait a place; the copies that end it.

        In place, another owner may still read a row: the sum takes its place only after everybody has read.
        """
        held, owners = self.placement.experts_of_rank[self.session.rank], self.placement.owners
        shared = [
            expert
            for local, expert in enumerate(held)
            if len(owners[expert]) > 1 and self._held(local, expert) == self._whole(expert)
        ]
        if shared and not self._aside:
            self._aside = self.session.allocate(len(held) * self.block_bytes)
        self._late = {expert: self._aside + place * self.block_bytes for place, expert in enumerate(shared)}
        return [(at, self._whole(expert), 0) for expert, at in self._late.items()]

    def _adding(self, dtype: str) -> Launch:
        return self._launch(f"add_blocks_{dtype}", len(self.placement.experts_of_rank[self.session.rank]))

    def _bind_terms(self, has_gradient: BoolArray) -> None:
        """Tell the kernel where gradients are and where sums go."""
        held = self.placement.experts_of_rank[self.session.rank]
        inbox = {(part.peer, expert): part.address for expert, part in self._coming(has_gradient)}
        terms = np.zeros((len(held), self.session.size), np.uint64)
        for local, rank in np.argwhere(has_gradient[:, list(held)].T).tolist():
            terms[local, rank] = inbox.get((rank, held[local])) or self._gradient(rank, held[local])
        self._write_table("terms", terms)
        sums = [self._late.get(expert) or self._held(local, expert) for local, expert in enumerate(held)]
        self._write_table("sums", np.array(sums, np.uint64))

    def _coming(self, has_gradient: BoolArray) -> list[tuple[int, Part]]:
        """Experts whose gradients come from ranks out of reach, and where they arrive."""
        if not self.session.out_of_reach:
            return []
        held = self.placement.experts_of_rank[self.session.rank]
        if self._inbox == 0:
            self._inbox = self.session.allocate(len(held) * len(self.session.out_of_reach) * self.block_bytes)
        coming = [
            (expert, rank)
            for expert in held
            for rank in map(int, np.flatnonzero(has_gradient[:, expert]))
            if rank in self.session.out_of_reach
        ]
        return [
            (expert, Part(rank, self._inbox + place * self.block_bytes, self.block_bytes))
            for place, (expert, rank) in enumerate(coming)
        ]

    def _reduce_around(self, has_gradient: BoolArray, add: Callable[[], None]) -> Callable[[], None]:
        """`add`, preceded by what is exchanged with ranks out of reach."""
        if self.session.staging is None:
            return add

        def reduce() -> None:
            away = [
                Part(owner, self._whole(expert), self.block_bytes)
                for owner in sorted(self.session.out_of_reach)
                for expert in self.placement.experts_of_rank[owner]
                if has_gradient[self.session.rank, expert]
            ]
            coming = [part for _, part in self._coming(has_gradient)]
            self._crossed_bytes += self.session.exchange(away, coming, "the reduce-scatter of gradients")
            add()
            self._from_inbox_bytes += len(coming) * self.block_bytes

        return reduce

    def _whole(self, expert: int) -> int:
        """Where this rank's row of an expert lies among those of all experts."""
        return self.all + expert * self.block_bytes

    def _held(self, local: int, expert: int) -> int:
        """Where it lies among those of the experts that this rank holds."""
        return self.held + (expert if self.in_place else local) * self.block_bytes

    def _gradient(self, rank: int, expert: int) -> int:
        """Where this rank sees the gradient of a rank in reach."""
        return self._heap.address("all", rank) + expert * self.block_bytes

    def _write_table(self, name: str, table: npt.NDArray[np.uint64]) -> None:
        self.session.device.write(self._tables[name], table)

    def _launch(self, kernel: str, blocks: int) -> Launch:
        key = (kernel, blocks, *self._tables.values())
        return self._launches.get(key, lambda: self._prepare(kernel, blocks))

    def _prepare(self, kernel: str, blocks: int) -> Launch:
        # From the most that any rank can have to do: grids must be equal on all ranks, and the same in all launches.
        most_bytes = int(self.placement.local_counts.max()) * self.session.size * self.block_bytes
        warps = self.session.device.threads // 32
        share_bytes = most_bytes // (self.session.blocks * warps) // VEC_BYTES * VEC_BYTES
        chunk_bytes = min(max(share_bytes, SMALLEST_CHUNK_BYTES), CHUNK_BYTES)
        arguments = self.session.block_arguments(self._heap, self._state)
        arguments |= {
            "block_vecs": self.block_bytes // VEC_BYTES,
            "chunk_vecs": chunk_bytes // VEC_BYTES,
            "blocks": blocks,
            **self._tables,
        }
        grid = min(self.session.blocks, -(-most_bytes // (chunk_bytes * warps)))
        return self.session.launch(kernel, arguments, blocks=max(1, grid))

    def _copying_by_engine(self, copies: Sequence[tuple[int, int, int]], crossing_blocks: int) -> Callable[[], None]:
        """Copies of source, target and bytes each between two meetings; so many blocks cross."""
        crossing_vecs = crossing_blocks * self.block_bytes // VEC_BYTES
        leave = self._launches.get(
            ("meet", crossing_vecs),
            lambda: self.session.meeting(crossing_vecs=crossing_vecs, counted=self._state),
        )

        def copy() -> None:
            self.session.meet_neighbours()
            for source, target, nbytes in copies:
                self.session.device.copy(target, source, nbytes)
            leave()

        return copy

    def moved(self) -> tuple[int, int]:
        """Wire and control bytes: what the kernels counted, and what was exchanged."""
        launches, vectors = self.session.state(self._state)
        # What the kernel read from the inbox has crossed in an exchange, and its sender has counted it.
        wire = vectors * VEC_BYTES - self._from_inbox_bytes + self._crossed_bytes
        return wire, 16 * launches * (self.session.size - 1 - len(self.session.out_of_reach))

    def close(self) -> None:
        self._heap.close()


class RegisteredExpertHandle(ExpertHandle):
    """The same for buffers of the user's own, bound anew at every call; the host takes part in each.

    A call that is captured keeps for good what its graph needs: registrations, and the tables that kernels read.

    Rows that peers read are registered, those of memory that no peer can open are copied into this rank's heap first.
    Who needs a row reads it where it lies: parameters too, so that one registration serves all who need them.
    """

    def __init__(
        self,
        session: CudaSession,
        *,
        placement: Placement,
        block_bytes: int,
        registrations: Registrations,
        whole: Sequence[int],
        part: Sequence[int],
    ) -> None:
        """`registrations`: the caller's, also of others; `whole`, `part`: as `place` takes them, on this rank."""
        # In place, the heap holds nothing but what is staged.
        super().__init__(session, placement=placement, block_bytes=block_bytes, in_place=True)
        self.registrations = registrations
        elsewhere = frozenset(range(session.size)) - session.out_of_reach - {session.rank}
        self._held_elsewhere = np.array([not elsewhere.isdisjoint(owners) for owners in placement.owners])
        """Whether another rank in reach holds an expert."""
        self._written: dict[str, npt.NDArray[np.uint64]] = {}
        self._in_graphs: set[str] = set()
        """Tables that later calls leave as they are."""
        self.place(whole, part)

    def place(self, whole: Sequence[int], part: Sequence[int]) -> None:
        """Use these rows from the next call on: addresses of one for each expert, and for each that this rank holds.

        All are aligned memory of this rank's device: whoever has them from a user has looked.
        """
        self.whole, self.part = list(whole), list(part)

    def gather(self, needed: BoolArray) -> None:
        me, size, holder = self.session.rank, self.session.size, self.placement.replica_rank
        near = np.array([rank not in self.session.out_of_reach for rank in range(size)])
        taken = needed & (holder == me) & near[:, None]
        taken[me] = False
        local_of = {expert: local for local, expert in enumerate(self.placement.experts_of_rank[me])}
        read = [(local_of[expert], expert) for expert in np.flatnonzero(taken.any(axis=0)).tolist()]
        # From the next rank on, so that not all read from one at once.
        coming = np.flatnonzero(needed[me] & near[holder[me]])
        coming = coming[np.argsort((holder[me, coming] - me) % size, kind="stable")]
        wanted = list(zip(holder[me, coming].tolist(), coming.tolist(), strict=True))

        def copy() -> None:
            self._publish([(expert, self.part[local]) for local, expert in read], "all_gather_experts")
            copies = [
                (
                    self._held(local_of[expert], expert) if rank == me else self._row(rank, expert),
                    self._whole(expert),
                    int(rank != me),
                )
                for rank, expert in wanted
            ]
            if self.copies_by_engine:
                # Two rows that are neighbours need not be one allocation, so nothing is joined.
                blocks = [(source, target, self.block_bytes) for source, target, _ in copies]
                self._copying_by_engine(blocks, sum(crosses for _, _, crosses in copies))()
            else:
                self._write_table("copies", np.array(copies, np.uint64).reshape(-1, 3))
                self._launch("copy_blocks", len(copies))()
            self.registrations.release()

        self.run = self._gather_around(needed, copy)

    def reduce(self, has_gradient: BoolArray, dtype: str) -> None:
        read = np.flatnonzero(has_gradient[self.session.rank] & self._held_elsewhere).tolist()
        moves = self._late_moves()

        def add() -> None:
            self._publish([(expert, self.whole[expert]) for expert in read], "reduce_scatter_expert_grads")
            self._bind_terms(has_gradient)
            self._adding(dtype)()
            for source, target, _ in moves:
                self.session.device.copy(target, source, self.block_bytes)
            self.registrations.release()

        self.run = self._reduce_around(has_gradient, add)

    def _publish(self, rows: list[tuple[int, int]], operation: str) -> None:
        staged = self.registrations.publish(rows, self.block_bytes, operation)
        address_of = dict(rows)
        for expert in staged:
            self.session.device.copy(super()._whole(expert), address_of[expert], self.block_bytes)

    def _row(self, rank: int, expert: int) -> int:
        """Where this rank sees what a peer in reach has published."""
        return self.registrations.address_of(rank, expert) or super()._gradient(rank, expert)

    def _whole(self, expert: int) -> int:
        return self.whole[expert]

    def _held(self, local: int, expert: int) -> int:
        return self.part[local]

    def _gradient(self, rank: int, expert: int) -> int:
        return self.whole[expert] if rank == self.session.rank else self._row(rank, expert)

    def _write_table(self, name: str, table: npt.NDArray[np.uint64]) -> None:
        capturing = self.session.device.capturing()
        # Writing waits for the device, and rows mostly lie where they lay.
        if name not in self._written or not np.array_equal(self._written[name], table):
            if capturing or name in self._in_graphs:
                room = np.zeros(self._table_bytes[name] // table.itemsize, np.uint64)
                room[: table.size] = table.ravel()
                self._tables[name] = self.session.upload(room)
                self._in_graphs.discard(name)
            else:
                super()._write_table(name, table)
            self._written[name] = table
        if capturing:
            self._in_graphs.add(name)


def _joined(copies: list[tuple[int, int, int]], block_bytes: int) -> list[tuple[int, int, int]]:
    """Source, target and bytes of the copies, those of neighbouring blocks in one."""
    joined: list[tuple[int, int, int]] = []
    for source, target, _ in sorted(copies, key=lambda copy: copy[1]):
        if joined:
            first, at, nbytes = joined[-1]
            if (first + nbytes, at + nbytes) == (source, target):
                joined[-1] = (first, at, nbytes + block_bytes)
                continue
        joined.append((source, target, block_bytes))
    return joined
