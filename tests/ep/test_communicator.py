"""The public API on real ranks: calls, refusals, agreement (pitfall 2), dtypes (pitfall 5), leaks (pitfall 1)."""

from __future__ import annotations

from pathlib import Path

import pytest

pytestmark = pytest.mark.mpi

RANKS = Path(__file__).with_name("ranks.py")


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("program", ["layers", "experts", "refusals", "c_names", "nonsense"])
def test_calls_are_right_and_refusals_say_why(mpi_run, ranks: int, program: str):
    done = mpi_run(ranks, "-m", "mpi4py", RANKS, program)

    assert done.returncode == 0, done.stderr


def test_sizes_come_from_the_buffers_and_ranks_that_disagree_all_hear_it(mpi_run):
    done = mpi_run(3, "-m", "mpi4py", RANKS, "sizes_from_the_buffers")

    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("field", ["experts_per_rank", "dtype", "deadline_s", "placement"])
def test_a_field_that_differs_is_named_with_ranks_and_values(mpi_run, field: str):
    done = mpi_run(3, "-m", "mpi4py", RANKS, "mismatch", field)

    assert done.returncode == 0, done.stderr


def test_a_rank_that_never_comes_is_named_within_the_deadline(mpi_run, tmp_path: Path):
    done = mpi_run(3, "-m", "mpi4py", RANKS, "absent", tmp_path, deadline_s=240)

    assert sorted(mark.name for mark in tmp_path.iterdir()) == ["0", "2"], done.stderr


@pytest.mark.parametrize("program", ["late_to_a_call", "destroyed_by_another"])
def test_a_rank_that_does_not_take_part_in_a_call_is_named(mpi_run, program: str):
    done = mpi_run(3, "-m", "mpi4py", RANKS, program)

    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("transport", ["auto", "messages"])
def test_a_thousand_communicators_come_and_go_and_leave_nothing(mpi_run, transport: str):
    done = mpi_run(2, "-m", "mpi4py", RANKS, "thousand", transport, deadline_s=240)

    assert done.returncode == 0, done.stderr
