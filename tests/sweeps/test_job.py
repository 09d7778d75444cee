from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ncclep_bench.runtime.processes import process_status
from ncclep_bench.sweeps.job import Failure, JobFolder, death_of

RANK = """
import sys
from pathlib import Path
from ncclep_bench.sweeps.job import JobFolder, Step
folder, rank, operations = JobFolder(Path(sys.argv[1])), int(sys.argv[2]), sys.argv[3:]
step = Step(folder, rank)
for operation in operations:
    step(operation)
folder.introduce(rank)
sys.stdin.read()
"""


@pytest.fixture
def folder(tmp_path: Path) -> JobFolder:
    made = JobFolder(tmp_path)
    made.clear()
    return made


@pytest.fixture
def start_rank(folder: JobFolder) -> Iterator[Callable[..., subprocess.Popen[bytes]]]:
    begun: list[subprocess.Popen[bytes]] = []

    def start(rank: int, *operations: str) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-c", RANK, str(folder.path.parent), str(rank), *operations]
        process = subprocess.Popen(command, stdin=subprocess.PIPE)
        begun.append(process)
        end = time.monotonic() + 20
        while all(known.rank != rank for known in folder.ranks()):
            assert process.poll() is None
            assert time.monotonic() < end
            time.sleep(0.01)
        return process

    yield start
    for process in begun:
        process.kill()
        process.communicate()


def wait_for_state(pid: int, states: str) -> None:
    end = time.monotonic() + 10
    while (status := process_status(pid)) is None or status.letter not in states:
        assert time.monotonic() < end
        time.sleep(0.01)


def test_the_rank_that_is_behind_is_named_with_what_it_does(
    folder: JobFolder, start_rank: Callable[..., subprocess.Popen[bytes]]
) -> None:
    start_rank(0, "prepare", "launch", "barrier")
    slow = start_rank(1, "prepare", "launch")

    late = folder.late_ranks(2)

    assert late.startswith(f"rank 1 (pid {slow.pid} on ")
    assert late.endswith("makes no progress in launch")


def test_a_stopped_rank_is_named_even_when_others_are_behind(
    folder: JobFolder, start_rank: Callable[..., subprocess.Popen[bytes]]
) -> None:
    stopped = start_rank(0, "prepare", "launch")
    start_rank(1, "prepare")
    stopped.send_signal(signal.SIGSTOP)
    wait_for_state(stopped.pid, "T")

    late = folder.late_ranks(2)

    assert late.startswith(f"rank 0 (pid {stopped.pid} on ")
    assert late.endswith(" is stopped in launch")


@pytest.mark.parametrize("sent", [signal.SIGKILL, signal.SIGSEGV])
def test_a_dead_rank_is_named_with_its_signal(
    folder: JobFolder, start_rank: Callable[..., subprocess.Popen[bytes]], sent: signal.Signals
) -> None:
    start_rank(0, "launch")
    dead = start_rank(1, "launch")
    dead.send_signal(sent)
    wait_for_state(dead.pid, "Z")

    assert folder.late_ranks(2).endswith(f"was killed by {sent.name} in launch")
    assert folder.late_ranks(2).startswith("rank 1 ")


def test_a_rank_that_ends_by_itself_is_named_with_its_exit_code_and_then_as_gone(
    folder: JobFolder, start_rank: Callable[..., subprocess.Popen[bytes]]
) -> None:
    process = start_rank(0, "launch")
    assert process.stdin is not None
    process.stdin.close()
    wait_for_state(process.pid, "Z")
    rank = folder.ranks()[0]

    assert death_of(rank) == "ended with exit code 0"
    process.wait()
    assert death_of(rank) == "is gone"


def test_a_process_that_took_over_the_pid_is_not_taken_for_the_rank(folder: JobFolder) -> None:
    own = folder.introduce(0)
    earlier = type(own)(0, own.pid, own.started_ticks - 1, own.host)

    assert death_of(own) is None
    assert death_of(earlier) == "is gone"


def test_ranks_that_never_started_are_named(folder: JobFolder) -> None:
    folder.introduce(0)

    assert folder.late_ranks(3) == "rank 1, 2 never started"


def test_an_echo_never_hides_the_cause(folder: JobFolder) -> None:
    folder.fail(0, Failure("rank 1 gave up", echo=True))
    folder.fail(1, Failure("rank 1, launch: no space"))

    assert [failure.message for failure in folder.failures()] == ["rank 1, launch: no space", "rank 1 gave up"]


def test_a_new_job_starts_with_an_empty_folder(folder: JobFolder) -> None:
    folder.introduce(0)
    folder.fail(0, Failure("x"))

    folder.clear()

    assert (folder.ranks(), folder.failures(), os.listdir(folder.path)) == ([], [], [])
