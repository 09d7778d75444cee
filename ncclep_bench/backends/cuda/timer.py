"""Device time of launches between events: replays of a graph, or one by one; ranks aligned before each."""

from __future__ import annotations

import time
from collections.abc import Callable

from ncclep_bench.backends.contract import Floor
from ncclep_bench.backends.cuda.floor import floor_of
from ncclep_bench.backends.cuda.overlap import overlap
from ncclep_bench.backends.cuda.session import CudaSession
from ncclep_bench.backends.cuda.tokens import VEC_BYTES
from ncclep_bench.backends.cuda.utilisation import utilisation
from ncclep_bench.native.loader import Launch
from ncclep_bench.runtime import nvml
from ncclep_bench.runtime.device import CudaDevice

OPERATIONS_PER_GRAPH = 8
CACHES_FLUSHED = 2
"""How many times the size of the cache is written to flush it."""
_RUNS_AT_ONCE = 32
_LEAST_HOLD_US = 60.0
_HOST_MARGIN = 1.5
_COUNTERS_SETTLE_S = 0.02


class GraphTimer:
    """Times what it is given to enqueue; the ranks of the group measure at the same time.

    A graph holds several operations in a row, as a model's layers follow each other, and a sample is its time divided
    by their number: what lies between two operations counts, what the host needs to start the graph does not. `cold`:
    before each operation the cache is flushed and the ranks meet, so operations are timed one by one.
    """

    timing = "graph"
    """`eager` where an operation needs the host or a cold cache, and once one has refused to be captured."""

    def __init__(
        self,
        session: CudaSession,
        device: CudaDevice,
        enqueue: Callable[[], object],
        enqueue_update: Callable[[], object] | None,
        num_sms: int | None,
        *,
        cold: bool = False,
        may_refuse_capture: bool = False,
        needs_host: bool = False,
    ) -> None:
        self._session, self._device = session, device
        self._enqueue, self._enqueue_update = enqueue, enqueue_update
        self.num_sms = num_sms
        self._may_refuse_capture = may_refuse_capture
        self._cold = cold
        self._flush: Launch | None = None
        self._needs_host = needs_host
        if needs_host or cold:
            self.timing = "eager"

    def first_us(self) -> float:
        self._device.synchronize()
        start = time.perf_counter()
        self._enqueue()
        self._device.synchronize()
        elapsed_us = (time.perf_counter() - start) * 1e6
        self._session.check()
        return elapsed_us

    def sample_us(self, count: int) -> list[float]:
        times = None if self.timing == "eager" else self._replayed_us(self._enqueue, count)
        if times is None:
            self.timing = "eager"
            return self.eager_us(count)
        return times

    def eager_us(self, count: int) -> list[float]:
        return self._between_events(count, self._enqueue)

    def call_us(self, count: int) -> list[float]:
        self._device.synchronize()
        times = []
        for _ in range(count):
            start = time.perf_counter()
            self._enqueue()
            times.append((time.perf_counter() - start) * 1e6)
        self._device.synchronize()
        self._session.check()
        return times

    def update_us(self, count: int) -> list[float]:
        if self._enqueue_update is None:
            return []
        times = self._replayed_us(self._enqueue_update, count)
        if times is None:
            times = self._between_events(count, self._enqueue_update)
        return times

    def utilisation(self) -> dict[str, float]:
        several = self._captured(self._enqueue) or self._enqueue
        return utilisation(self._session, self._device, several)

    def overlap(self) -> dict[str, float]:
        if self._needs_host:
            return {}  # The host cannot keep two things going while it waits for one.
        several = self._captured(self._enqueue) or self._enqueue
        return overlap(self._session, self._device, several, self.num_sms)

    def floor(self) -> Floor | None:
        return floor_of(self._session, self._device)

    def link_bytes(self, count: int) -> float | None:
        if self._session.staging is not None:
            return None  # Rows take other ways than the links too.
        before = self._sent_bytes()
        for _ in range(count):
            self._enqueue()
        after = self._sent_bytes()
        self._session.check()
        return None if before is None or after is None else (after - before) / count

    def _sent_bytes(self) -> int | None:
        """What this rank's links have sent when all ranks are done with what they have enqueued."""
        self._device.synchronize()
        self._session.group.barrier()
        time.sleep(_COUNTERS_SETTLE_S)
        sent = nvml.sent_bytes(self._device.bus_id)
        self._session.group.barrier()
        return sent

    def _replayed_us(self, enqueue: Callable[[], object], count: int) -> list[float] | None:
        """None, on all ranks, where it is not to be or cannot be captured."""
        replay = None if self._cold else self._captured(enqueue)
        if replay is None:
            return None
        return [us / OPERATIONS_PER_GRAPH for us in self._between_events(count, replay)]

    def _captured(self, operation: Callable[[], object]) -> Callable[[], None] | None:
        """A graph of several operations; None, on all ranks, where one of them has none."""
        if self._needs_host:
            return None

        def several() -> None:
            for _ in range(OPERATIONS_PER_GRAPH):
                operation()

        replay: Callable[[], None] | None = None
        try:
            replay = self._device.capture(several)
        except Exception:
            if not self._may_refuse_capture:
                raise
        captured = self._session.group.allgather(b"" if replay is None else b"captured")
        return None if b"" in captured else replay

    def _align(self) -> None:
        """Let the ranks meet on the device, with nothing of use in their caches where these are to be cold."""
        if self._cold:
            self._flushing()()
        self._session.meet()

    def _flushing(self) -> Launch:
        if self._flush is None:
            self._flush = flush_of(self._session, self._device.l2_bytes, self._device.blocks)
        return self._flush

    def _between_events(self, count: int, run: Callable[[], object]) -> list[float]:
        """Microseconds between two events around `run`, `count` times; before each the ranks are aligned."""
        times: list[float] = []

        def between() -> tuple[object, object]:
            self._align()
            before = self._device.record()
            run()
            return before, self._device.record()

        self._device.synchronize()
        host_us = 0.0
        if not self._needs_host:
            self._align()
            start = time.perf_counter()
            between()
            host_us = (time.perf_counter() - start) * 1e6
        while len(times) < count:
            rounds = min(_RUNS_AT_ONCE, count - len(times))
            if not self._needs_host:
                # The host fills the stream while the device is held, so no run waits for the host.
                hold_us = rounds * max(_LEAST_HOLD_US, _HOST_MARGIN * host_us)
                self._session.launch("hold", {"hold_ns": int(hold_us * 1e3)}, blocks=1, threads=32)()
            events = [between() for _ in range(rounds)]
            self._device.synchronize()
            self._session.check()
            times += [self._device.elapsed_us(*pair) for pair in events]
        return times


def flush_of(session: CudaSession, cache_bytes: int, blocks: int) -> Launch:
    """The launch that leaves nothing of use in a cache of that size; its memory is the session's."""
    nbytes = CACHES_FLUSHED * cache_bytes
    return session.launch("flush", {"target": session.allocate(nbytes), "vecs": nbytes // VEC_BYTES}, blocks=blocks)
