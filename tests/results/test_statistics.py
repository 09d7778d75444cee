from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ncclep_bench.results.statistics import (
    _ci_rank,
    median_ci,
    percentiles,
    saturation_point,
    slowest_rank,
    slowest_times,
    summarise,
)


def test_the_time_of_an_iteration_is_the_slowest_ranks() -> None:
    samples = np.array([[1.0, 9.0, 2.0], [4.0, 3.0, 8.0], [5.0, 7.0, 6.0]])
    assert slowest_times(samples).tolist() == [9.0, 8.0, 7.0]
    assert slowest_rank(samples) == 1


def test_of_ranks_slowest_equally_often_the_lowest_is_named() -> None:
    assert slowest_rank(np.array([[1.0, 2.0], [2.0, 1.0]])) == 0


def test_percentiles_interpolate_between_order_statistics() -> None:
    assert percentiles(np.arange(1.0, 12.0), (0, 50, 95, 100)).tolist() == [1.0, 6.0, 10.5, 11.0]


@pytest.mark.parametrize(("count", "rank"), [(5, 0), (6, 1), (9, 2), (10, 2), (20, 6), (50, 18), (100, 40)])
def test_the_rank_of_the_interval_agrees_with_published_tables(count: int, rank: int) -> None:
    assert _ci_rank(count) == rank


@given(st.integers(6, 1000))
def test_the_interval_covers_the_median_with_95_percent_and_one_rank_further_in_would_not(count: int) -> None:
    def below(rank: int) -> float:
        return sum(math.comb(count, hits) for hits in range(rank)) / 2**count

    j = _ci_rank(count)
    assert below(j) <= 0.025 < below(j + 1)


def test_the_approximation_for_long_runs_meets_the_exact_rank_where_it_takes_over() -> None:
    assert 0 <= _ci_rank(1002) - _ci_rank(1000) <= 2


def test_the_interval_holds_the_true_median_about_95_times_in_100() -> None:
    draw = np.random.default_rng(1)
    intervals = [median_ci(draw.exponential(1.0, 30)) for _ in range(2000)]
    share = np.mean([low <= math.log(2) <= high for low, high in intervals])  # type: ignore[misc]
    assert 0.94 <= share <= 0.99


def test_fewer_than_six_values_have_no_interval() -> None:
    assert median_ci(np.arange(5.0)) is None
    assert summarise([[1.0]] * 5).ci_low_us is None


def test_a_summary_names_the_columns_and_is_made_of_slowest_times() -> None:
    summary = summarise([[float(value), 0.0] for value in range(1, 101)])
    assert summary.samples == 100
    assert (summary.min_us, summary.p50_us, summary.max_us) == (1.0, 50.5, 100.0)
    assert (summary.ci_low_us, summary.ci_high_us) == (40.0, 61.0)
    assert summary.slowest_rank == 0


def test_the_saturation_point_is_the_smallest_batch_after_which_no_doubling_gains_two_percent() -> None:
    rates = [124.3, 238.6, 392.1, 518.7, 542.3, 543.0]
    assert saturation_point([16, 32, 64, 128, 256, 512], rates) == 256


@pytest.mark.parametrize(
    ("rates", "point"),
    [
        ([1.0, 2.0, 4.0], None),
        ([4.0, 4.0, 4.0], 8),
        ([4.0, 4.0, 5.0], None),
        ([4.0, 5.0, 4.0], 16),
        ([1.0], None),
        ([], None),
    ],
)
def test_saturation_needs_a_further_step_and_every_further_step(rates: list[float], point: float | None) -> None:
    assert saturation_point([8, 16, 32][: len(rates)], rates) == point


def test_a_step_of_four_counts_as_two_doublings() -> None:
    assert saturation_point([8, 32], [100.0, 103.0]) == 8
    assert saturation_point([8, 16], [100.0, 103.0]) is None


def test_a_batch_of_nothing_is_no_base_for_a_doubling() -> None:
    assert saturation_point([0, 8, 16], [0.0, 4.0, 4.0]) == 8
