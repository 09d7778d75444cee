"""Buffers of the user's own on the cuda backend, its kernels on CPUs."""

from __future__ import annotations

import ast
import subprocess
from pathlib import Path

import pytest

from tests.conftest import MpiRun
from tests.native.cpu_device import COMPILER

pytestmark = [pytest.mark.mpi, pytest.mark.skipif(COMPILER is None, reason="no g++: kernels cannot be built")]

PROGRAM = Path(__file__).parent / "cpu_registration.py"


def run(mpi_run: MpiRun, ranks: int, *task: object) -> subprocess.CompletedProcess[str]:
    return mpi_run(ranks, "-m", "mpi4py", PROGRAM, *task, env={"PYTHONPATH": str(PROGRAM.parents[2])}, deadline_s=240)


@pytest.mark.parametrize(("ranks", "seed", "count"), [(1, 1, 2), (2, 2, 8), (4, 3, 4)])
def test_buffers_come_and_go_and_no_rank_reads_one_that_is_gone(
    mpi_run: MpiRun, ranks: int, seed: int, count: int
) -> None:
    done = run(mpi_run, ranks, "sequences", seed, count)

    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("fault", "caught"), [("in_a_recycled_place", "are wrong"), ("deaf", "cannot be mapped where other memory is")]
)
def test_a_planted_fault_of_the_registration_is_caught(mpi_run: MpiRun, fault: str, caught: str) -> None:
    done = run(mpi_run, 2, "sequences", 1, 4, fault)

    assert done.returncode != 0
    assert caught in done.stdout + done.stderr


def test_a_row_that_cannot_be_used_is_refused_and_the_call_can_be_repeated(mpi_run: MpiRun) -> None:
    done = run(mpi_run, 2, "refusals")

    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "UsageError: rank 0: a row lies at there",
        "UsageError: address there is no memory of this device",
        "UsageError: rank 0: a row of 128 bytes at there ends behind its allocation",
    ]


def test_the_scenarios_count_the_same_registrations_on_both_backends(mpi_run: MpiRun) -> None:
    done = run(mpi_run, 2, "beside_host")

    assert done.returncode == 0, done.stdout + done.stderr
    rows: dict[tuple[str, str, str], dict[str, tuple[dict[str, float | None], str]]] = {}
    for line in done.stdout.splitlines():
        *case, backend, outcome, reason, counted, cost = line.split("|")
        assert (outcome, reason) == ("passed", ""), line
        collective, variant, capacity = case
        rows.setdefault((collective, variant, capacity), {})[backend] = ast.literal_eval(counted), cost
    assert len(rows) == 6
    for (_, variant, _), counts in rows.items():
        (host, host_cost), (cuda, cuda_cost) = counts["host"], counts["cuda"]
        staged = cuda.pop("mr_staged")
        assert host.pop("mr_staged") is None
        assert host == cuda
        assert host_cost == cuda_cost == str(variant == "registered")
        assert staged == (0 if variant == "registered" else None)
