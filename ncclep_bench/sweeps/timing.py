"""The timed loop: ranks start together, take their own time, and agree on when it is enough."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from ncclep_bench.model.scenario import Timing
from ncclep_bench.results.statistics import median_ci, slowest_times
from ncclep_bench.runtime.group import Group

Times = npt.NDArray[np.float64]


def together(group: Group) -> None:
    """Return on all ranks at nearly the same moment."""
    group.barrier()
    # Ranks that had to wait long nap between their tries and leave late; at a second barrier nobody waits long.
    group.barrier()


def timed_us(call: Callable[[], object]) -> float:
    """Microseconds that `call` takes here."""
    start = time.perf_counter_ns()
    call()
    return (time.perf_counter_ns() - start) / 1e3


def host_batch(
    launch: Callable[[], object], group: Group, step: Callable[[str], None]
) -> Callable[[int], Sequence[float]]:
    """What times so many launches on the host, each begun by all ranks together."""

    def batch(count: int) -> list[float]:
        own = []
        gc.disable()
        try:
            for _ in range(count):
                step("a timed launch: waiting for the others")
                together(group)
                step("a timed launch")
                own.append(timed_us(launch))
        finally:
            gc.enable()
        return own

    return batch


def sample(batch: Callable[[int], Sequence[float]], group: Group, timing: Timing, step: Callable[[str], None]) -> Times:
    """Microseconds per iteration and rank, shape [iterations, ranks], the same array on all ranks.

    `batch(count)` gives this rank's microseconds of so many iterations; agreeing on the end once a batch costs little.
    `step` hears what happens.
    """
    samples = np.empty((0, group.size))
    spent_s = 0.0
    while count := next_batch(slowest_times(samples) if len(samples) else np.empty(0), spent_s, timing):
        start = time.perf_counter()
        own = np.array([*batch(count), time.perf_counter() - start])
        step("agreeing on the end of timing")
        gathered = np.stack([np.frombuffer(data) for data in group.allgather(own.tobytes())], axis=1)
        samples = np.concatenate([samples, gathered[:count]])
        spent_s += float(gathered[count].max())
    return samples


def next_batch(times: Times, spent_s: float, timing: Timing) -> int:
    """How many iterations to time next, 0 when it is enough; `times`: the slowest rank's so far, in any unit.

    Depends on its arguments alone, so ranks that know the same times agree. At most doubles what is there.
    """
    count = len(times)
    if count < timing.min_samples:
        return timing.min_samples - count
    if count >= timing.max_samples or spent_s >= timing.budget_s or _narrow_enough(times, timing.ci_share):
        return 0
    left_s = timing.budget_s - spent_s
    affordable = count if spent_s <= left_s else int(left_s / spent_s * count)
    return min(timing.max_samples - count, max(1, affordable))


def _narrow_enough(times: Times, ci_share: float) -> bool:
    interval = median_ci(times)
    if interval is None:
        return False
    median = float(np.median(times))
    return max(median - interval[0], interval[1] - median) <= ci_share * median
