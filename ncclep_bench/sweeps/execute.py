"""One case, from waiver to measurement: prepared, verified, timed, verified again, its bytes checked."""

from __future__ import annotations

import os
import socket
import time
from collections import Counter
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import msgspec
import numpy as np

from ncclep_bench.backends.contract import Backend, DeviceTimer, Prepared, Stats
from ncclep_bench.collectives.contract import Collective, Problem, problem_of
from ncclep_bench.collectives.verify import first_wrong
from ncclep_bench.model.case import Case
from ncclep_bench.model.measurement import Measurement
from ncclep_bench.registry import BACKENDS, COLLECTIVES
from ncclep_bench.routing.statistics import routing_statistics
from ncclep_bench.routing.token_routing import TokenRouting, token_routing
from ncclep_bench.runtime.group import Group
from ncclep_bench.runtime.shared_memory import NotEnoughSharedMemoryError, PeerAbortedError
from ncclep_bench.sweeps.job import Source
from ncclep_bench.sweeps.timing import host_batch, sample, timed_us, together

UPDATES = 3
"""How often `update` is timed."""

CALLS = 50
"""How often the host's part of a call is timed on a device; the device's queue holds more."""

LINK_LAUNCHES = 20
"""Launches over which the bytes on the links are counted."""

_COLD, _BEFORE, _AFTER = range(3)

_PER_LAUNCH = ("mr_hits", "mr_misses", "mr_evictions", "mr_staged")
_PER_CASE = ("channel_rebuilds",)
_QUOTIENTS = {
    "mr_miss_us": ("mr_miss_total_us", "mr_misses"),
    "channel_rebuild_us": ("channel_rebuild_total_us", "channel_rebuilds"),
    "channel_utilisation": ("channels_used", "channels_open"),
}
"""Columns made from two cumulative counts of the transport."""


class Routings:
    """The routing of a case; the last one is kept, since neighbouring cases differ in the collective alone."""

    _AXES = ("scenario", "ranks", "tokens", "num_experts", "top_k", "routing", "routing_param", "masked_share",
             "empty_ranks", "seed")  # fmt: skip

    def __init__(self) -> None:
        self._key: tuple[Any, ...] | None = None
        self._routing: TokenRouting | None = None

    def of(self, case: Case, source: Source) -> TokenRouting | None:
        """None for collectives that move no tokens."""
        if case.routing is None:
            return None
        key = tuple(getattr(case, axis) for axis in self._AXES)
        if key != self._key:
            self._routing = token_routing(case, expert_load=source.expert_load, directory=Path(source.directory))
            self._key = key
        return self._routing


def measure(
    case: Case, source: Source, group: Group, routings: Routings, step: Callable[[str], None], *, repeat: int = 0
) -> Measurement:
    """What one case gives on `group`; collective; complete on rank 0, which alone compares bytes with the plan.

    `step` hears what this rank does. Raises whatever a backend raises but NotEnoughSharedMemoryError, which waives.
    """
    collective: Collective = COLLECTIVES.get(case.collective)
    backend: Backend = BACKENDS.get(case.backend)
    hosts, oversubscribed = _where(group)
    record = Measurement(
        case=case,
        outcome="waived",
        repeat=repeat,
        started_at=datetime.now(UTC).isoformat(timespec="milliseconds"),
        hosts=hosts,
        oversubscribed=oversubscribed,
        timing="host",
        cache=case.cache or "warm",
        partner=collective.partner or "",
    )
    step("the check whether the case can run here")
    if reason := _agreed(group, collective.waiver(case) or backend.supports(case)):
        return msgspec.structs.replace(record, reason=reason)
    step("building the routing")
    problem = problem_of(case, routings.of(case, source))
    step("prepare: waiting for the others")
    together(group)
    step("prepare")
    prepared, shortage, given_up = None, None, None
    start = time.perf_counter_ns()
    try:
        prepared = backend.prepare(problem, group)
    except NotEnoughSharedMemoryError as error:
        shortage = error.message
    except PeerAbortedError as error:
        given_up = error.with_traceback(None)  # Its frames hold the buffers of the attempt.
    setup_us = (time.perf_counter_ns() - start) / 1e3
    if reason := _agreed(group, shortage):
        if prepared is not None:
            prepared.close()
        return msgspec.structs.replace(record, reason=reason)
    if given_up is not None:
        raise given_up
    assert prepared is not None
    record = msgspec.structs.replace(
        record,
        setup_us=max(_gathered(group, setup_us)),
        algorithm=prepared.algorithm,
        wire_source=prepared.wire_source,
    )
    record = _Run(collective, problem, prepared, group, source, step).measure(record)
    step("close")
    prepared.close()
    return record


class _Moved(NamedTuple):
    """What all ranks together have counted."""

    wire_bytes: int
    control_bytes: int
    counters: Counter[str]


class _Run:
    """A prepared case while it is measured."""

    def __init__(
        self,
        collective: Collective,
        problem: Problem,
        prepared: Prepared,
        group: Group,
        source: Source,
        step: Callable[[str], None],
    ) -> None:
        self.collective, self.problem, self.prepared = collective, problem, prepared
        self.group, self.timing, self.step = group, source.timing, step
        self.chain = problem.case.chain or 1

    def measure(self, record: Measurement) -> Measurement:
        cold_us = self._first_launch()
        timer = self.prepared.timer
        before = self._moved()
        wrong = self._wrong(_BEFORE, "before timing")
        after = self._moved()
        if wrong:
            return self._failed(record, f"{wrong} (before timing)")
        update_us = [self._update() for _ in range(UPDATES)] if timer is None else self._device_updates(timer)
        self._fill(_BEFORE)
        for _ in range(self.timing.warmup):
            self.step("a warm-up launch")
            self.group.barrier()
            self.prepared.launch()
        warm = self._moved()
        if timer is None:
            batch = host_batch(self.prepared.launch, self.group, self.step)
            samples_us = sample(batch, self.group, self.timing, self.step) / self.chain
        else:
            samples_us = sample(self._aligned(timer.sample_us), self.group, self.timing, self.step)
        counters = _columns(warm.counters, self._moved().counters, len(samples_us))
        if timer is not None:
            counters["eager_us"] = float(np.median(self._slowest_us(timer.eager_us, len(samples_us))))
            counters["call_us"] = float(np.median(self._slowest_us(timer.call_us, CALLS)))
            record = msgspec.structs.replace(record, timing=timer.timing, num_sms=timer.num_sms)
            counters |= self._link_figures(timer)
            # Flushes would count as use of the device.
            if self.timing.utilisation and record.cache == "warm":
                counters |= self._of_all(timer.utilisation, "the loop for utilisation", fmean)
            if self.timing.overlap and record.cache == "warm":
                counters |= self._of_all(timer.overlap, "the overlap with matrix products", max)
        wrong = self._wrong(_AFTER, "after timing")
        if wrong:
            return self._failed(record, f"{wrong} (after timing)")
        record = msgspec.structs.replace(
            record,
            outcome="passed",
            verified=True,
            samples_us=samples_us.round(3).tolist(),
            cold_us=cold_us,
            update_us=update_us,
            wire_bytes=(after.wire_bytes - before.wire_bytes) // self.chain,
            control_bytes=(after.control_bytes - before.control_bytes) // self.chain,
            counters=counters,
        )
        return record if self.group.rank else self._with_figures(record)

    def _with_figures(self, record: Measurement) -> Measurement:
        """Bytes and routing statistics; a counted byte more or less than planned fails the case."""
        figures = self.collective.bytes(self.problem)
        record = msgspec.structs.replace(
            record,
            payload_bytes=figures.payload,
            planned_bytes=figures.planned,
            minimal_bytes=figures.minimal,
            minimal_bytes_max_rank=figures.minimal_max_rank,
            ece_bytes=figures.ece,
            algbw_bytes=figures.algbw,
            busbw_factor=figures.busbw_factor,
        )
        if self.problem.routing is not None:
            statistics = routing_statistics(self.problem.routing, self.problem.placement)
            record = msgspec.structs.replace(
                record, tokens_total=self.problem.routing.tokens_total, **statistics._asdict()
            )
        if record.wire_source == "nominal":
            # Nobody sees what a library moves inside: its plan stands for it.
            return msgspec.structs.replace(record, wire_bytes=figures.planned)
        if record.wire_bytes != figures.planned:
            return self._failed(
                record, f"{record.wire_bytes:,} wire_bytes were counted, the row plan says {figures.planned:,}"
            )
        return record

    def _failed(self, record: Measurement, reason: str) -> Measurement:
        return msgspec.structs.replace(
            record,
            outcome="failed",
            verified=False,
            reason=reason,
            samples_us=[],
            cold_us=[],
            update_us=[],
            setup_us=None,
        )

    def _first_launch(self) -> list[float]:
        """Microseconds of each rank's first operation, before anything is warm."""
        self._fill(_COLD)
        self.step("the first launch: waiting for the others")
        together(self.group)
        self.step("the first launch")
        timer = self.prepared.timer
        # On a device a launch only enqueues, after an upload that is no part of it.
        own = timed_us(self.prepared.launch) / self.chain if timer is None else timer.first_us()
        return _gathered(self.group, own)

    def _aligned(self, batch: Callable[[int], list[float]]) -> Callable[[int], list[float]]:
        """`batch`, begun by all ranks together."""

        def together_batch(count: int) -> list[float]:
            self.step("a batch of timed launches: waiting for the others")
            together(self.group)
            self.step("a batch of timed launches")
            return batch(count)

        return together_batch

    def _slowest_us(self, batch: Callable[[int], list[float]], count: int) -> list[float]:
        """The slowest rank's microseconds of each iteration."""
        own = np.array(self._aligned(batch)(count))
        everybody: list[float] = np.max(
            [np.frombuffer(data) for data in self.group.allgather(own.tobytes())], axis=0
        ).tolist()
        return everybody

    def _device_updates(self, timer: DeviceTimer) -> list[float]:
        """Device time of updates; that of the host where the device takes no part."""
        return self._slowest_us(timer.update_us, UPDATES) or [self._update() for _ in range(UPDATES)]

    def _link_figures(self, timer: DeviceTimer) -> dict[str, float]:
        """What the links count, and what they can do at best."""
        self.step("the floor between the devices")
        floor = timer.floor()
        figures = {} if floor is None else {"flag_us": floor.flag_us, "copy_gbps": floor.copy_gbps}
        self.step("counting the bytes on the links")
        own = timer.link_bytes(LINK_LAUNCHES)
        everybody = [
            float(data) if data else None for data in self.group.allgather(b"" if own is None else repr(own).encode())
        ]
        counted = [sent for sent in everybody if sent is not None]
        return figures | ({"link_bytes": sum(counted)} if len(counted) == len(everybody) else {})

    def _of_all(
        self, figures: Callable[[], dict[str, float]], name: str, joined: Callable[[list[float]], float]
    ) -> dict[str, float]:
        """Figures that every rank has, joined to one each."""
        self.step(f"{name}: waiting for the others")
        together(self.group)
        self.step(name)
        own = msgspec.json.encode(figures())
        everybody = [msgspec.json.decode(data, type=dict[str, float]) for data in self.group.allgather(own)]
        told = [column for column in everybody[0] if all(column in each for each in everybody)]
        return {column: joined([each[column] for each in everybody]) for column in told}

    def _update(self) -> float:
        """Microseconds of the slowest rank's `update`."""
        self.step("update: waiting for the others")
        together(self.group)
        self.step("update")
        return max(_gathered(self.group, timed_us(lambda: self.prepared.update(self.problem))))

    def _wrong(self, draw: int, when: str) -> str | None:
        """What is wrong with a launch on fresh inputs, the same on all ranks; None when nothing is."""
        self.step(f"filling inputs for the verification {when}")
        for rank in self.prepared.local_ranks:
            self.prepared.poison(rank)
        # After the poison, since an output may be the input's own memory.
        self._fill(draw)
        self.step(f"the verification {when}: waiting for the others")
        self.group.barrier()
        self.step(f"the launch of the verification {when}")
        self.prepared.launch()
        self.step(f"comparing rows in the verification {when}")
        messages = (
            first_wrong(
                self.collective, self.problem, rank, draw, self.prepared.outputs(rank), self.prepared.undelivered
            )
            for rank in self.prepared.local_ranks
        )
        return _agreed(self.group, next((message for message in messages if message), None))

    def _fill(self, draw: int) -> None:
        for rank in self.prepared.local_ranks:
            self.collective.fill(self.problem, rank, draw, self.prepared.inputs(rank))

    def _moved(self) -> _Moved:
        own = self.prepared.stats()
        everybody = [msgspec.json.decode(data, type=Stats) for data in self.group.allgather(msgspec.json.encode(own))]
        counters: Counter[str] = Counter()
        for stats in everybody:
            counters.update(stats.counters)
        return _Moved(
            sum(stats.wire_bytes for stats in everybody), sum(stats.control_bytes for stats in everybody), counters
        )


def _columns(start: Mapping[str, float], end: Mapping[str, float], launches: int) -> dict[str, float]:
    """Columns from cumulative counts of all ranks at the start and at the end of the timed launches."""
    columns = {name: (end[name] - start.get(name, 0)) / launches for name in _PER_LAUNCH if name in end}
    columns |= {name: end[name] for name in _PER_CASE if name in end}
    for name, (dividend, divisor) in _QUOTIENTS.items():
        if end.get(divisor, 0):
            columns[name] = end.get(dividend, 0) / end[divisor]
    return columns


def _where(group: Group) -> tuple[int, bool]:
    """Number of hosts, and whether any of them has more ranks than cores these may use."""
    own = msgspec.json.encode((socket.gethostname(), len(os.sched_getaffinity(0))))
    places = [msgspec.json.decode(data, type=tuple[str, int]) for data in group.allgather(own)]
    ranks_of_host = Counter(host for host, _ in places)
    return len(ranks_of_host), any(ranks_of_host[host] > cores for host, cores in places)


def _gathered(group: Group, value: float) -> list[float]:
    """Everybody's number, by rank."""
    return [float(data) for data in group.allgather(repr(value).encode())]


def _agreed(group: Group, message: str | None) -> str | None:
    """The first rank's message, if any rank has one."""
    messages = (data.decode() for data in group.allgather((message or "").encode()))
    return next((each for each in messages if each), None)
