"""EpCommunicator on the cuda backend, its kernels on CPUs."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.conftest import MpiRun
from tests.native.cpu_device import COMPILER

pytestmark = [pytest.mark.mpi, pytest.mark.skipif(COMPILER is None, reason="no g++: kernels cannot be built")]

PROGRAM = Path(__file__).with_name("communicator_ranks.py")


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize(
    "program",
    [
        "experts",
        "layers",
        "scaled",
        "refusals",
        "captured",
        "captured_experts",
        "forgotten",
        "recycled",
        "outlived",
        "many",
        "handles",
    ],
)
def test_calls_are_right_and_refusals_say_why(mpi_run: MpiRun, ranks: int, program: str) -> None:
    done = mpi_run(ranks, "-m", "mpi4py", PROGRAM, "cpu", program, env={"PYTHONPATH": str(PROGRAM.parents[2])})

    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("program", ["experts", "layers"])
def test_calls_are_right_where_no_rank_reaches_another(mpi_run: MpiRun, program: str) -> None:
    env = {"PYTHONPATH": str(PROGRAM.parents[2])}
    done = mpi_run(2, "-m", "mpi4py", PROGRAM, "cpu", program, "messages", env=env)

    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("program", ["absent", "gone"])
def test_a_rank_that_does_not_come_is_named_by_the_others(mpi_run: MpiRun, program: str) -> None:
    done = mpi_run(2, "-m", "mpi4py", PROGRAM, "cpu", program, env={"PYTHONPATH": str(PROGRAM.parents[2])})

    assert done.returncode == 0, done.stderr
