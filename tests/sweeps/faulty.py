"""In-memory ranks with one fault or oddity each, for what a sweep must notice."""

from __future__ import annotations

from typing import Any

from ncclep_bench.backends.contract import Array, Floor, Prepared
from ncclep_bench.backends.in_memory import InMemory, InMemoryPrepared
from ncclep_bench.collectives.contract import Problem
from ncclep_bench.model.case import Case
from ncclep_bench.runtime.group import Group
from ncclep_bench.runtime.shared_memory import NotEnoughSharedMemoryError


class _WrongValue(InMemoryPrepared):
    """One element of the last rank's first output is off from the given launch on."""

    wrong_from = 1
    launches = 0

    def launch(self, stream: Any = None) -> None:
        super().launch(stream)
        self.launches += 1
        if self.launches >= self.wrong_from:
            first = next(iter(self.outputs(self.local_ranks[-1]).values()))
            first.reshape(-1)[0] += 1


class _WrongLater(_WrongValue):
    wrong_from = 8


class _ExtraCopy(InMemoryPrepared):
    """Counts one row too many, as a transport that copies it would."""

    def launch(self, stream: Any = None) -> None:
        super().launch(stream)
        self._stats.wire_bytes += 64


class _Timer:
    """Device times as a timer would give them, of an operation that no graph holds."""

    timing, num_sms = "graph", None

    def first_us(self) -> float:
        return 11.0

    def sample_us(self, count: int) -> list[float]:
        self.timing = "eager"
        return [7.0] * count

    def eager_us(self, count: int) -> list[float]:
        return [9.0] * count

    def call_us(self, count: int) -> list[float]:
        return [5.0] * count

    def update_us(self, count: int) -> list[float]:
        return [3.0] * count

    def link_bytes(self, count: int) -> float | None:
        return 640.0

    def utilisation(self) -> dict[str, float]:
        return {"gpu_util": 1.0, "dram_gbps": 1500.0}

    def overlap(self) -> dict[str, float]:
        return {"overlap_comm": 1.25}

    def floor(self) -> Floor | None:
        return Floor(0.75, 390.0)


class _OnDevice(InMemoryPrepared):
    """Does not deliver the counts of its sources, and is timed by a device."""

    undelivered = frozenset({"source_counts"})

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem)
        self.timer = _Timer()  # type: ignore[assignment]

    def outputs(self, rank: int) -> dict[str, Array]:
        return {name: array for name, array in super().outputs(rank).items() if name not in self.undelivered}


class _Backend(InMemory):
    def __init__(self, name: str, prepared: type[InMemoryPrepared]) -> None:
        self.name, self._prepared = name, prepared

    def prepare(self, problem: Problem, group: Group) -> Prepared:
        return self._prepared(problem)


class _Full(InMemory):
    name = "full"

    def prepare(self, problem: Problem, group: Group) -> Prepared:
        raise NotEnoughSharedMemoryError("9 GiB asked, 1 GiB free in /dev/shm")


class _Choosy(InMemory):
    name = "choosy"

    def supports(self, case: Case) -> str | None:
        return f"{case.ranks} ranks are too many"


WRONG_VALUE = _Backend("wrong_value", _WrongValue)
WRONG_LATER = _Backend("wrong_later", _WrongLater)
ON_DEVICE = _Backend("on_device", _OnDevice)
EXTRA_COPY = _Backend("extra_copy", _ExtraCopy)
FULL = _Full()
CHOOSY = _Choosy()
