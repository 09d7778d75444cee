"""Statistics of raw samples: the slowest rank's times, percentiles, the median's confidence interval, saturation."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

Times = npt.NDArray[np.float64]

SATURATION_GAIN = 0.02
"""A doubling that gains less than this no longer pays."""


class Summary(NamedTuple):
    """Statistics of one case, named as the report columns; times in microseconds."""

    samples: int
    p50_us: float
    p90_us: float
    p95_us: float
    p99_us: float
    min_us: float
    max_us: float
    ci_low_us: float | None
    ci_high_us: float | None
    slowest_rank: int


def summarise(samples_us: Sequence[Sequence[float]] | npt.NDArray[Any]) -> Summary:
    """Statistics of `samples_us`, shape [iterations, ranks], at least one of each.

    Raises ValueError when the iterations have different numbers of ranks.
    """
    samples = np.asarray(samples_us, dtype=np.float64)
    times = slowest_times(samples)
    p50, p90, p95, p99 = (float(value) for value in percentiles(times, (50, 90, 95, 99)))
    low, high = median_ci(times) or (None, None)
    least, most = float(times.min()), float(times.max())
    return Summary(len(times), p50, p90, p95, p99, least, most, low, high, slowest_rank(samples))


def slowest_times(samples_us: npt.NDArray[Any]) -> Times:
    """The time of each iteration, which is the slowest rank's; shape [iterations]."""
    times: Times = np.asarray(samples_us, dtype=np.float64).max(axis=1)
    return times


def slowest_rank(samples_us: npt.NDArray[Any]) -> int:
    """The rank that was slowest most often; the lowest of several."""
    samples = np.asarray(samples_us, dtype=np.float64)
    return int(np.bincount(samples.argmax(axis=1), minlength=samples.shape[1]).argmax())


def percentiles(times: Times, percents: Sequence[float]) -> Times:
    """Percentiles with linear interpolation between order statistics (Hyndman and Fan's type 7, numpy's default)."""
    return np.percentile(times, percents)


def median_ci(times: Times) -> tuple[float, float] | None:
    """Ends of the 95 % confidence interval of the median; None below six values, where there is none.

    Order statistics X(j), X(n + 1 - j) with the largest j that P(Binomial(n, 1/2) < j) <= 2.5 % allows: no assumption
    about the distribution (Hahn and Meeker, Statistical Intervals, 1991, section 5.2).
    """
    j = _ci_rank(len(times))
    if j == 0:
        return None
    ordered = np.partition(times, (j - 1, len(times) - j))
    return float(ordered[j - 1]), float(ordered[len(times) - j])


@lru_cache(maxsize=4096)
def _ci_rank(count: int) -> int:
    """The largest j with P(Binomial(count, 1/2) < j) <= 2.5 %; 0 when there is none."""
    if count > 1000:
        # The normal approximation is within one rank here, and big integers would take long.
        return int((count + 1) / 2 - 1.96 * math.sqrt(count) / 2)
    allowed = (1 << count) // 40
    j, term, below = 0, 1, 1
    while below <= allowed:
        term = term * (count - j) // (j + 1)
        j += 1
        below += term
    return j


def saturation_point(sizes: Sequence[float], rates: Sequence[float], gain: float = SATURATION_GAIN) -> float | None:
    """The smallest size after which every further doubling gains less than `gain`; None when no size shows that.

    `sizes` ascend; steps other than doublings count by the gain per doubling, (r2 / r1) ** (1 / log2(s2 / s1)) - 1.
    The largest size alone proves nothing: at least one step must follow.
    """
    saturated: float | None = None
    for index in range(len(sizes) - 2, -1, -1):
        (small, large), (slow, fast) = sizes[index : index + 2], rates[index : index + 2]
        if small <= 0 or slow <= 0 or (fast / slow) ** (1 / math.log2(large / small)) - 1 >= gain:
            break
        saturated = small
    return saturated
