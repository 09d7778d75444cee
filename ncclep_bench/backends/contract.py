"""What a backend offers: say whether a case can run here, prepare it, and run it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import numpy.typing as npt

from ncclep_bench.collectives.contract import Problem
from ncclep_bench.model.case import Case
from ncclep_bench.runtime.group import Group

Array = npt.NDArray[Any]


@dataclass
class Stats:
    """What this process has moved since `prepare`: counted where the copying is done. `counters` by column name."""

    wire_bytes: int = 0
    control_bytes: int = 0
    messages: int = 0
    counters: dict[str, float] = field(default_factory=dict)

    def count(self, name: str, amount: float = 1) -> None:
        """Add to a counter."""
        self.counters[name] = self.counters.get(name, 0) + amount


def sum_of(*parts: Stats) -> Stats:
    """All of them together, in an object of its own."""
    total = Stats()
    for part in parts:
        total.wire_bytes += part.wire_bytes
        total.control_bytes += part.control_bytes
        total.messages += part.messages
        for name, amount in part.counters.items():
            total.count(name, amount)
    return total


def window_waiver(case: Case, backend: str) -> str | None:
    """Why a backend that calls no library of others cannot take the case's window, or None."""
    if case.window in (None, "off"):
        return None
    return f"window {case.window}: the {backend} backend has no library to register buffers with"


def device_waiver(case: Case, backend: str) -> str | None:
    """Why a backend without devices cannot take the case, or None."""
    if case.cache == "cold":
        return f"cache cold: the {backend} backend flushes no cache, those on GPUs do"
    if case.user_memory is not None:
        return f"user_memory {case.user_memory}: all memory is alike to the {backend} backend, that of GPUs is not"
    return None


class Floor(NamedTuple):
    """What the way between two devices takes at least."""

    flag_us: float
    """One way of a word through peer memory."""
    copy_gbps: float
    """Large copies by the copy engines, pushed, all ranks at once."""


class DeviceTimer(Protocol):
    """Device time of a prepared case; all ranks of its group call alike."""

    timing: str
    """How `sample_us` launches, as the column of that name says it."""
    num_sms: int | None
    """Multiprocessors that an operation may use; None where a library decides."""

    def first_us(self) -> float:
        """Microseconds of the host from the call of one operation until the device is done with it."""

    def sample_us(self, count: int) -> list[float]:
        """Microseconds of this rank per operation, `count` samples."""

    def eager_us(self, count: int) -> list[float]:
        """The same of single launches that the host has enqueued."""

    def call_us(self, count: int) -> list[float]:
        """Microseconds of the host for calls that only enqueue an operation each."""

    def update_us(self, count: int) -> list[float]:
        """The same of taking a routing that is on the device; empty where `update` enqueues nothing."""

    def link_bytes(self, count: int) -> float | None:
        """Bytes per operation that this rank's links have counted over `count` of them; None where none counts."""

    def utilisation(self) -> dict[str, float]:
        """How much of this rank's device is in use while operations follow each other for seconds, by column.

        Without what the driver does not tell.
        """

    def overlap(self) -> dict[str, float]:
        """What operations and matrix products on this rank's device take beside each other, over alone, by column.

        Without what could not be kept going beside the other.
        """

    def floor(self) -> Floor | None:
        """What no operation here can be faster than; None for one rank."""


class Prepared(Protocol):
    """A case with its buffers, ready to run; every method but `close` is called by all ranks of the group alike."""

    local_ranks: tuple[int, ...]
    """Ranks that this process holds: its own, or all of them in memory."""
    algorithm: str
    """How rows reach the peers, as reports name it."""
    undelivered: frozenset[str]
    """Outputs of the collective that a library of others does not give, so nobody can verify them."""
    wire_source: str
    """`counted` when `stats()` counts copies, `nominal` when bytes move inside a library."""

    @property
    def timer(self) -> DeviceTimer | None:
        """What measures device time; None where a launch is over when it returns."""

    def inputs(self, rank: int) -> dict[str, Array]:
        """Input buffers of a local rank, keyed as the collective names them, to be filled by the caller."""

    def update(self, problem: Problem) -> None:
        """Take a new routing or activation into the same buffers, with whatever ranks must exchange."""

    def launch(self, stream: Any = None) -> None:
        """Run once, or `chain` times in a row where the case has one; without a GPU the results are there on return."""

    def poison(self, rank: int) -> None:
        """Fill a local rank's outputs with what no launch leaves, so that the next one shows; inputs are filled later.

        An output may be the memory of an input.
        """

    def outputs(self, rank: int) -> dict[str, Array]:
        """A local rank's results, keyed as the collective names them, to be read until the next launch."""

    def stats(self) -> Stats:
        """Cumulative counts of this process."""

    def close(self) -> None:
        """Free everything; never fails for want of a peer."""


class Backend(Protocol):
    """A way to move rows. `supports` foresees what `prepare` would refuse."""

    name: str
    one_process: bool
    """Whether one process plays every rank."""

    def supports(self, case: Case) -> str | None:
        """None, or the reason why the case is waived here, with the figure that says so."""

    def memory_of(self, case: Case) -> tuple[int, int] | None:
        """Bytes of shared and of private buffers, all ranks together; None where the backend does not foresee them."""

    def prepare(self, problem: Problem, group: Group) -> Prepared:
        """Buffers, windows and mappings for the problem; collective over `group`."""
