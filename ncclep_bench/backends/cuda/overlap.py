"""Operations beside matrix products on the same device: what either costs the other."""

from __future__ import annotations

import math
from collections.abc import Callable
from statistics import median
from typing import NamedTuple

from ncclep_bench.backends.cuda.session import CudaSession
from ncclep_bench.runtime.device import CudaDevice

PRODUCT_SIZE = 4096
"""Rows and columns of the matrices; a product takes about as long as a layer's dispatch of 4,096 tokens."""

_WINDOW_US = 10_000.0
_REPEATS = 3
_MOST_LENGTHENED = 64
_HOST_US = 30.0
"""What the host needs at most to enqueue a run."""


class _Load(NamedTuple):
    """Something that is enqueued over and over, into the device's stream or aside."""

    run: Callable[[], object]
    aside: bool


def overlap(
    session: CudaSession, device: CudaDevice, several: Callable[[], object], num_sms: int | None
) -> dict[str, float]:
    """Slow-downs by column, this rank's; collective. Operations leave multiprocessors beyond `num_sms` to products."""
    left = device.blocks - num_sms if num_sms is not None and num_sms < device.blocks else None
    operations = _Load(several, aside=False)
    whole, rest = (_Load(device.matrix_product(PRODUCT_SIZE, most), aside=True) for most in (None, left))
    bench = _Bench(session, device)
    figures = {}
    for column, alone, measured, other in (
        ("overlap_comm", operations, operations, rest),
        ("overlap_gemm", whole, rest, operations),
    ):
        if (beside_us := bench.beside_us(measured, other)) is not None:
            figures[column] = beside_us / bench.alone_us(alone)
    return figures


class _Bench:
    """Times of loads, each begun on all ranks together; whatever decides how often something runs is agreed on."""

    def __init__(self, session: CudaSession, device: CudaDevice) -> None:
        self._session, self._device = session, device
        self._alone: dict[_Load, float] = {}

    def alone_us(self, load: _Load) -> float:
        """This rank's time of one run with the device to itself."""
        if load not in self._alone:
            self._timed_us(load, 1)
            count = self._runs(self._timed_us(load, 2)[0])
            self._alone[load] = median(self._timed_us(load, count)[0] for _ in range(_REPEATS))
        return self._alone[load]

    def beside_us(self, load: _Load, other: _Load) -> float | None:
        """The same while the other load goes on; None where that ends first however long it is made."""
        count, others = self._runs(self.alone_us(load)), 2 * self._runs(self.alone_us(other))
        times: list[float] = []
        for _ in range(int(math.log2(_MOST_LENGTHENED)) + _REPEATS):
            elapsed_us, covered = self._timed_us(load, count, other, others)
            if b"" in self._session.group.allgather(b"covered" if covered else b""):
                times, others = [], 2 * others
                continue
            times.append(elapsed_us)
            if len(times) == _REPEATS:
                return median(times)
        return None

    def _runs(self, one_us: float) -> int:
        """How many runs make a window, the same number on all ranks."""
        slowest_us = max(float(data) for data in self._session.group.allgather(repr(one_us).encode()))
        return max(1, math.ceil(_WINDOW_US / max(slowest_us, 1e-3)))

    def _timed_us(self, load: _Load, count: int, other: _Load | None = None, others: int = 0) -> tuple[float, bool]:
        """Microseconds of one run of `load`, and whether `other` went on for all of them."""
        device = self._device
        device.synchronize()
        hold_us = _HOST_US * (count + others)
        self._session.launch("hold", {"hold_ns": int(hold_us * 1e3)}, blocks=1, threads=32)()
        self._session.meet()
        begin = device.record()
        device.hold_aside(begin)
        first = device.record(aside=load.aside)
        for _ in range(count):
            load.run()
        last = device.record(aside=load.aside)
        end = last
        if other is not None:
            for _ in range(others):
                other.run()
            end = device.record(aside=other.aside)
        device.synchronize()
        self._session.check()
        covered = device.elapsed_us(begin, end) >= device.elapsed_us(begin, last)
        return device.elapsed_us(first, last) / count, covered
