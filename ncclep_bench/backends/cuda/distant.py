"""Dispatch and combine where some ranks are out of reach: the same kernels, in two launches around an exchange."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from ncclep_bench.backends.cuda.tokens import CHOICE_BYTES, COMBINE, DISPATCH, RECORD_BYTES, Split, TokenHandle
from ncclep_bench.runtime.nccl import Part


class _Run(NamedTuple):
    """Rows that lie one after the other."""

    first: int
    rows: int


class DistantTokenHandle(TokenHandle):
    """A TokenHandle of a session with staging; its `update` and its operations wait for the host.

    The first launch has all warps send, to neighbours into their memory and to others into their outboxes. What lies
    there is exchanged into the very places where a neighbour would have written, and the second launch has all warps
    take what has come. Both keep a State of their own, so they count the same epochs. (A flat dispatch needs no second
    one.) The host knows every rank's counts from `update`, so messages are exact.
    """

    def __init__(self, *args: Any, **named: Any) -> None:
        super().__init__(*args, **named)
        self._take_states = {f"{name}_state": self.session.new_state() for name in ("dispatch", "combine")}
        self._rounds = dict.fromkeys(("layout", "dispatch", "combine"), 0)
        self._outbox_bytes = self._crossed_bytes = 0
        self._outbox_rows = dict.fromkeys(("dispatch", "combine"), 0)
        self._bins = np.zeros((0, 0), np.int32)
        """By source: rows to each expert of each rank, then to each rank; as route_layout counts them."""

    @property
    def _rows(self) -> Any:
        """Rows from each rank (first index) to each."""
        return self._bins[:, self.session.size * self.most_experts :]

    def _phases(self, split: Split) -> tuple[dict[str, int], dict[str, int]]:
        """Arguments of a launch that only sends, and of one that only takes."""
        warps = self._warps(split)
        return {"push_warps": warps, "take_warps": 0}, {"push_warps": 0, "take_warps": warps, **self._take_states}

    def _layout(self, **others: int) -> Callable[[], None]:
        # As in mode ll the kernel neither sends its counts nor waits for those of others.
        layout = super()._layout(**others, low_latency=1)

        def update() -> None:
            layout()
            ranks = self.session.size
            own = np.zeros(ranks * self.most_experts + ranks, np.int32)
            self.session.device.read(self._arguments["own_counts"], own)
            everybody = self.session.agree(own.tobytes(), "the exchange of counts")
            self._bins = np.stack([np.frombuffer(data, np.int32) for data in everybody])
            if self.mode == "ht":
                self._announce(self._rounds["layout"], range(ranks))
            self._rounds["layout"] += 1

        return update

    def _announce(self, epoch: int, sources: Any) -> None:
        """Write what these ranks announce to this one in `epoch`, as their kernels would."""
        rank, ranks, most = self.session.rank, self.session.size, self.most_experts
        for source in sources:
            counts = self._bins[source]
            header = np.concatenate([counts[rank * most : (rank + 1) * most], counts[ranks * most :]]).astype(np.uint64)
            header |= np.uint64((epoch + 1) % (1 << 32) << 32)
            at = self._heap.address("counts") + ((epoch & 1) * ranks + source) * header.nbytes
            self.session.device.write(at, header)

    def dispatching(self, **others: int) -> Callable[[], None]:
        sends, takes = self._phases(DISPATCH[self.mode])
        push = super().dispatching(**others, **(sends if self.staged else {}))
        take = super().dispatching(**others, **takes) if self.staged else None
        rank, slots = self.session.rank, self.slots
        prefix = "stage" if self.staged else "flat"
        fields = {f"{prefix}_rows": self.row_bytes, f"{prefix}_scales": 4 * self.scale_words}
        # A record has more than the weight and the expert of each choice.
        fields |= {"stage_records": RECORD_BYTES * self.top_k} if self.staged else {}
        fields |= {} if self.staged else {"flat_weights": 4 * self.top_k, "flat_idx": 4 * self.top_k}

        def dispatch() -> None:
            epoch = self._rounds["dispatch"]
            self._rounds["dispatch"] += 1
            if self.mode == "ll":
                self._announce(epoch, self.session.out_of_reach)
            push()

            def run_of(source: int, target: int) -> _Run:
                if self.staged:
                    first = ((epoch & 1) * self.session.size + source) * slots
                else:
                    first = source * slots if self.mode == "ll" else int(self._rows[:source, target].sum())
                return _Run(first, int(self._rows[source, target]))

            sent = {peer: run_of(rank, peer) for peer in self.session.out_of_reach}
            come = {peer: run_of(peer, rank) for peer in self.session.out_of_reach}
            rows = sum(run.rows for run in sent.values())
            crossed = self._exchange("dispatch", fields, sent, come)
            self._crossed_bytes += crossed - ((RECORD_BYTES - CHOICE_BYTES) * self.top_k * rows if self.staged else 0)
            self._outbox_rows["dispatch"] += rows
            if take is not None:
                take()

        return dispatch

    def combining(self, rows: int, *, weigh: bool = False, **others: int) -> Callable[[], None]:
        sends, takes = self._phases(COMBINE[self.mode])
        push = super().combining(rows, weigh=weigh, **others, **sends)
        take = super().combining(rows, weigh=weigh, **others, **takes)

        def combine() -> None:
            epoch = self._rounds["combine"]
            self._rounds["combine"] += 1
            push()

            def run_of(source: int, target: int) -> _Run:
                first = ((epoch & 1) * self.session.size + source) * self.slots
                return _Run(first, int(self._rows[target, source]))

            rank = self.session.rank
            sent = {peer: run_of(rank, peer) for peer in self.session.out_of_reach}
            come = {peer: run_of(peer, rank) for peer in self.session.out_of_reach}
            self._crossed_bytes += self._exchange("combine", {"return_rows": self.row_bytes}, sent, come)
            self._outbox_rows["combine"] += sum(run.rows for run in sent.values())
            take()

        return combine

    def _exchange(self, operation: str, fields: dict[str, int], sent: dict[int, _Run], come: dict[int, _Run]) -> int:
        """Each field (a part of the heap, and the bytes of its rows) of these rows, by peer; the bytes sent."""

        def parts(runs: dict[int, _Run], place: Callable[[str, int], int]) -> list[Part]:
            return [
                Part(peer, place(name, peer) + run.first * width, run.rows * width)
                for peer, run in sorted(runs.items())
                for name, width in fields.items()
                if run.rows * width
            ]

        address = self._heap.address
        return self.session.exchange(parts(sent, address), parts(come, lambda name, _: address(name)), operation)

    def moved(self) -> tuple[int, int]:
        """What kernels counted, less what only reached an outbox, and what was exchanged from there."""
        wire, control = super().moved()
        dispatched, combined = self._outbox_rows["dispatch"], self._outbox_rows["combine"]
        in_outboxes = dispatched * self.sent_row_bytes + combined * self.row_bytes
        return wire - in_outboxes + self._crossed_bytes, control
