"""Slow-downs of operations and products beside each other, on a device of two streams that slow each other down."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest

from ncclep_bench.backends.cuda.overlap import PRODUCT_SIZE, overlap
from ncclep_bench.runtime.world import SelfGroup


class Event:
    """A place in a stream; `at_us` once the device has come there."""

    at_us: float | None = None


class Item(NamedTuple):
    """Work that takes so long alone, or an event to record or to wait for."""

    work_us: float = 0.0
    records: Event | None = None
    awaits: Event | None = None


class Device:
    """Two streams; while both work, each is as many times slower as `slower` says."""

    blocks = 132

    def __init__(self, slower: tuple[float, float]) -> None:
        self.slower, self.now_us = slower, 0.0
        self.streams: tuple[list[Item], list[Item]] = ([], [])
        self.planned_with: list[int | None] = []
        self.longest = 0

    def operation(self) -> None:
        self.streams[0].append(Item(1400.0))

    def matrix_product(self, size: int, most_sms: int | None) -> Callable[[], None]:
        assert size == PRODUCT_SIZE
        self.planned_with.append(most_sms)
        # Tuned to fewer multiprocessors it takes longer.
        work_us = 190.0 if most_sms is None else 190.0 * 132 / most_sms
        return lambda: self.streams[1].append(Item(work_us))

    def record(self, *, aside: bool = False) -> Event:
        event = Event()
        self.streams[aside].append(Item(records=event))
        return event

    def hold_aside(self, event: Event) -> None:
        self.streams[1].append(Item(awaits=event))

    def elapsed_us(self, first: Event, last: Event) -> float:
        assert first.at_us is not None
        assert last.at_us is not None
        return last.at_us - first.at_us

    def synchronize(self) -> None:
        self.longest = max(self.longest, *map(len, self.streams))
        while any(self.streams):
            self._pass_marks()
            heads = [index for index in (0, 1) if self.streams[index] and not self.streams[index][0].awaits]
            rates = {index: 1 / self.slower[index] if len(heads) == 2 else 1.0 for index in heads}
            if not heads:
                continue
            step_us = min(self.streams[index][0].work_us / rates[index] for index in heads)
            self.now_us += step_us
            for index in heads:
                left_us = self.streams[index][0].work_us - step_us * rates[index]
                self.streams[index][:1] = [Item(left_us)] if left_us > 1e-9 else []

    def _pass_marks(self) -> None:
        for stream in self.streams:
            while stream and (stream[0].records or (stream[0].awaits and stream[0].awaits.at_us is not None)):
                if (event := stream.pop(0).records) is not None:
                    event.at_us = self.now_us


class Session:
    group = SelfGroup()

    def __init__(self, device: Device) -> None:
        self.device = device

    def meet(self) -> None:
        self.device.streams[0].append(Item(3.0))

    def launch(self, kernel: str, arguments: dict[str, Any], **_: Any) -> Callable[[], None]:
        assert kernel == "hold"
        return lambda: self.device.streams[0].append(Item(arguments["hold_ns"] / 1e3))

    def check(self) -> None:
        """No fault."""


def overlap_of(device: Device, num_sms: int | None) -> dict[str, float]:
    session: Any = Session(device)
    on: Any = device
    return overlap(session, on, device.operation, num_sms)


def test_both_slow_downs_are_what_the_device_does_to_either() -> None:
    device = Device((1.5, 2.0))

    figures = overlap_of(device, None)

    assert figures == {"overlap_comm": pytest.approx(1.5), "overlap_gemm": pytest.approx(2.0)}
    assert device.planned_with == [None, None]


def test_products_plan_with_what_operations_leave_and_are_held_against_the_whole_device() -> None:
    device = Device((1.0, 1.0))

    figures = overlap_of(device, 32)

    assert figures == {"overlap_comm": pytest.approx(1.0), "overlap_gemm": pytest.approx(132 / 100)}
    assert device.planned_with == [None, 100]


def test_the_other_is_made_longer_until_it_goes_on_for_all_that_is_timed() -> None:
    device = Device((9.0, 1.0))

    figures = overlap_of(device, None)

    assert figures["overlap_comm"] == pytest.approx(9.0)
    # 8 operations of 1.4 ms take 9 times as long: 100 ms, filled by products of 0.19 ms.
    assert device.longest > 8 * 1400 * 9 / 190


def test_what_cannot_be_kept_going_gives_no_figure() -> None:
    assert set(overlap_of(Device((1000.0, 1.0)), None)) == {"overlap_gemm"}
