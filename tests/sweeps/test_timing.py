from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ncclep_bench.model.scenario import Timing
from ncclep_bench.results.statistics import median_ci
from ncclep_bench.runtime.world import SelfGroup
from ncclep_bench.sweeps.timing import host_batch, next_batch, sample

TIMES = st.lists(st.floats(1, 1e6), min_size=0, max_size=300).map(np.array)


@given(times=TIMES, spent_s=st.floats(0, 10), least=st.integers(1, 50), more=st.integers(0, 200))
def test_batches_never_exceed_the_most_samples_nor_double_what_is_there(
    times: np.ndarray, spent_s: float, least: int, more: int
) -> None:
    timing = Timing(min_samples=least, max_samples=least + more)

    count = next_batch(times, spent_s, timing)

    if len(times) < least:
        assert len(times) + count == least
    else:
        assert 0 <= count <= len(times)
        assert count == 0 or len(times) + count <= timing.max_samples


def test_the_fewest_samples_are_taken_even_when_the_budget_is_spent() -> None:
    assert next_batch(np.full(3, 1e6), 100.0, Timing(min_samples=10, budget_s=1)) == 7


def test_a_narrow_interval_of_the_median_ends_timing() -> None:
    steady = np.full(20, 100.0)

    assert next_batch(steady, 0.1, Timing(budget_s=10)) == 0


def test_a_wide_interval_goes_on_until_the_budget_is_spent() -> None:
    scattered = np.tile([50.0, 150.0], 20)
    interval = median_ci(scattered)
    assert interval is not None
    assert interval[1] - interval[0] > 50

    assert next_batch(scattered, 1.0, Timing(budget_s=10)) == 40
    assert next_batch(scattered, 9.9, Timing(budget_s=10)) == 1
    assert next_batch(scattered, 10.0, Timing(budget_s=10)) == 0


def test_the_next_batch_fits_what_is_left_of_the_budget() -> None:
    scattered = np.tile([50.0, 150.0], 20)

    assert next_batch(scattered, 8.0, Timing(budget_s=10)) == 10


@pytest.mark.parametrize("least", [1, 7])
def test_every_iteration_is_launched_once_and_kept(least: int) -> None:
    launches: list[int] = []
    heard: list[str] = []

    samples = sample(
        host_batch(lambda: launches.append(1), SelfGroup(), heard.append),
        SelfGroup(),
        Timing(min_samples=least, max_samples=least + 20, ci_share=1e-9),
        heard.append,
    )

    assert samples.shape == (len(launches), 1)
    assert least <= len(launches) <= least + 20
    assert (samples > 0).all()
    assert heard.count("a timed launch") == len(launches)
