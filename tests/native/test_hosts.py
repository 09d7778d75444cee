"""The cuda backend among ranks that cannot all map each other's memory, its kernels on CPUs."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from tests.conftest import MpiRun
from tests.native.cpu_device import COMPILER

pytestmark = [pytest.mark.mpi, pytest.mark.skipif(COMPILER is None, reason="no g++: kernels cannot be built")]

PROGRAM = Path(__file__).parent / "cpu_hosts.py"


def on_hosts(mpi_run: MpiRun, hosts: str, staging: str, *task: object) -> subprocess.CompletedProcess[str]:
    """The program with a rank for each letter of `hosts`."""
    env = {"PYTHONPATH": str(PROGRAM.parents[2])}
    return mpi_run(len(hosts), "-m", "mpi4py", PROGRAM, hosts, staging, *task, env=env, deadline_s=240)


@pytest.mark.parametrize(
    ("hosts", "staging", "seed", "count"),
    [("ab", "mpi", 2, 14), ("ab", "nccl", 2, 10), ("aabb", "mpi", 11, 6), ("aba", "nccl", 3, 6), ("AAA", "mpi", 4, 8)],
)
def test_random_cases_are_right_whoever_shares_a_host(
    mpi_run: MpiRun, hosts: str, staging: str, seed: int, count: int
) -> None:
    done = on_hosts(mpi_run, hosts, staging, seed, count)

    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("hosts", "fault", "told"),
    [
        (
            "aabb",
            "lost_rank",
            [
                r"0: RankError: rank 3 \(pid \d+ on .*\) did not take part in dispatch within 4.0 s",
                r"1: RankError: rank 3 \(pid \d+ on .*\) did not take part in dispatch within 4.0 s",
                r"2: RankError: rank 2: rank 3 did not reach launch 1 within 2 s",
            ],
        ),
        (
            "abc",
            "lost_in_nccl",
            [rf"{rank}: RankError: rank 2 \(pid \d+ on .*\) did not reach dispatch within 2.0 s" for rank in (0, 1)],
        ),
        (
            "aab",
            "shared_only",
            [rf"{rank}: CannotRunError: rank 2 cannot map the memory of ranks \[0, 1\]" for rank in range(3)],
        ),
        (
            "ab",
            "no_messages",
            [
                rf"{rank}: CannotRunError: ranks cannot map .*, Gathering sends no messages, .*: rank 0: no GPU"
                for rank in range(2)
            ],
        ),
    ],
)
def test_who_is_lost_or_out_of_reach_is_named_by_everybody_and_nobody_else_is(
    mpi_run: MpiRun, hosts: str, fault: str, told: list[str]
) -> None:
    done = on_hosts(mpi_run, hosts, "mpi", fault)

    assert done.returncode == 0, done.stderr
    lines = sorted(line for line in re.split(r"\n|(?=\d: \w+Error)", done.stdout) if line)
    assert len(lines) == len(told), done.stdout
    for line, pattern in zip(lines, told, strict=True):
        assert re.fullmatch(pattern, line), line


def test_what_is_exchanged_twice_shows_in_the_bytes(mpi_run: MpiRun) -> None:
    done = on_hosts(mpi_run, "ab", "mpi", "twice")

    assert done.returncode == 0, done.stderr
    assert done.stdout.count(": wire bytes") == 2 * 4, done.stdout
