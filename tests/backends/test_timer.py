"""How operations are timed where a graph holds them, and where none does; the device and its clock are stand-ins."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from ncclep_bench.backends.cuda.timer import CACHES_FLUSHED, OPERATIONS_PER_GRAPH, GraphTimer
from ncclep_bench.runtime.world import SelfGroup


class Clock:
    """A stream whose operations take what they say; `cached`: whether the cache holds what they work on."""

    l2_bytes, blocks = 1 << 20, 132

    def __init__(self, refuses: bool = False) -> None:
        self.now_us, self.refuses, self.captured, self.cached = 0.0, refuses, 0, True

    def operation(self) -> None:
        self.now_us += 5.0 if self.cached else 9.0
        self.cached = True

    def flush(self) -> None:
        self.now_us += 40.0
        self.cached = False

    def capture(self, enqueue: Callable[[], object]) -> Callable[[], None]:
        if self.refuses:
            raise RuntimeError("operation not permitted when stream is capturing")
        self.captured += 1
        before = self.now_us
        enqueue()
        took, self.now_us = self.now_us - before, before

        def replay() -> None:
            self.now_us += took

        return replay

    def record(self) -> float:
        return self.now_us

    def elapsed_us(self, first: float, last: float) -> float:
        return last - first

    def synchronize(self) -> None:
        """Nothing is ever under way."""


class Session:
    group = SelfGroup()
    staging = None

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self.held_ns: list[int] = []
        self.flushed_bytes: list[int] = []

    def meet(self) -> None:
        self._clock.now_us += 100.0

    def allocate(self, nbytes: int) -> int:
        return 1 << 20

    def launch(self, kernel: str, arguments: dict[str, Any], **_: Any) -> Callable[[], None]:
        if kernel == "flush":
            self.flushed_bytes.append(16 * arguments["vecs"])
            return self._clock.flush
        assert kernel == "hold"
        self.held_ns.append(arguments["hold_ns"])
        return lambda: None

    def check(self) -> None:
        """No fault."""


def timer_of(clock: Clock, **options: Any) -> tuple[GraphTimer, Session]:
    session: Any = Session(clock)
    device: Any = clock
    return GraphTimer(session, device, clock.operation, clock.operation, 132, **options), session


def test_a_sample_is_the_share_of_one_operation_in_a_graph_of_several() -> None:
    clock = Clock()
    timer, _ = timer_of(clock)

    assert timer.sample_us(40) == [5.0] * 40
    assert (timer.timing, clock.captured, OPERATIONS_PER_GRAPH) == ("graph", 1, 8)


def test_cold_samples_begin_with_a_flushed_cache_and_leave_the_flush_out() -> None:
    clock = Clock()
    timer, session = timer_of(clock, cold=True)

    assert timer.sample_us(40) == [9.0] * 40
    assert timer.eager_us(3) == [9.0] * 3
    assert timer.update_us(2) == [9.0] * 2
    assert (timer.timing, session.flushed_bytes) == ("eager", [CACHES_FLUSHED * clock.l2_bytes])


def test_cold_samples_of_what_no_graph_holds_are_cold_too() -> None:
    timer, _ = timer_of(Clock(refuses=True), cold=True, may_refuse_capture=True)

    assert (timer.sample_us(3), timer.timing) == ([9.0] * 3, "eager")


def test_calls_are_timed_on_the_host_one_by_one() -> None:
    clock = Clock()
    timer, _ = timer_of(clock)

    times = timer.call_us(7)

    assert (len(times), clock.now_us) == (7, 35.0)
    assert all(0 < us < 1e5 for us in times)


def test_the_first_call_is_one_operation_from_call_to_end() -> None:
    clock = Clock()
    timer, _ = timer_of(clock)

    assert 0 < timer.first_us() < 1e6
    assert clock.now_us == 5.0


def test_what_refuses_to_be_captured_is_timed_launch_by_launch_and_said_to_be() -> None:
    timer, _ = timer_of(Clock(refuses=True), may_refuse_capture=True)

    assert (timer.sample_us(3), timer.timing) == ([5.0] * 3, "eager")
    assert timer.update_us(2) == [5.0] * 2


def test_what_must_be_capturable_fails_where_it_is_not() -> None:
    timer, _ = timer_of(Clock(refuses=True))

    with pytest.raises(RuntimeError, match="not permitted"):
        timer.sample_us(3)


def test_what_needs_the_host_is_timed_launch_by_launch_and_no_device_is_held() -> None:
    clock = Clock()
    timer, session = timer_of(clock, needs_host=True)

    assert (timer.timing, timer.sample_us(40)) == ("eager", [5.0] * 40)
    # None is tried out first: what is counted in the meantime belongs to the samples.
    assert (clock.captured, session.held_ns, clock.now_us) == (0, [], 40 * 105.0)


def test_the_device_is_held_for_as_long_as_the_host_needs_to_fill_the_stream() -> None:
    timer, session = timer_of(Clock())

    timer.eager_us(40)

    assert len(session.held_ns) == 2
    assert session.held_ns[0] >= 32 * 60_000
    assert session.held_ns[1] >= 8 * 60_000
