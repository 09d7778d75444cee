"""The doctor in every rank of a job: all are compared, silent ones are named in time, nobody is left over."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ncclep_bench.doctor.ranks import MODULE
from ncclep_bench.runtime.processes import process_status
from tests.conftest import MpiRun

pytestmark = pytest.mark.mpi

DOCTOR = ("-m", "ncclep_bench.doctor_cli", "check", "--format", "json")
ANSWERING = (*DOCTOR, "--select", "EP300")
CONFIG = "num_experts = {}\ntop_k = 8\nhidden = 64\n"


@pytest.fixture
def configs(tmp_path: Path) -> str:
    """One file for each of four ranks, of which rank 2 has another number of experts."""
    for rank in range(4):
        (tmp_path / f"ep-{rank}.toml").write_text(CONFIG.format(60 if rank == 2 else 64))
    return str(tmp_path / "ep-%r.toml")


def findings_in(text: str, code: str = "") -> list[dict[str, Any]]:
    document = json.loads(text[text.index("{") : text.rindex("}") + 1])
    return [found for found in document["findings"] if found["code"].startswith(code)]


def errors_in(text: str) -> list[dict[str, Any]]:
    return [found for found in findings_in(text) if found["verdict"] == "error"]


def started(*options: str) -> subprocess.CompletedProcess[str]:
    """`ncclep-doctor check --np 4`."""
    return subprocess.run(
        [sys.executable, *DOCTOR, "--np", "4", *options], capture_output=True, text=True, timeout=240, check=False
    )


def test_the_rank_with_another_configuration_is_named_by_ranks_that_the_doctor_starts(configs: str):
    done = started("--config", configs, "--select", "EP3")
    (odd,) = errors_in(done.stdout)

    assert done.returncode == 1
    assert odd["code"] == "EP301"
    assert odd["summary"].startswith("num_experts differs: 60 on rank 2 on ")
    assert odd["summary"].endswith("64 on the other 3")


def test_the_rank_with_another_configuration_is_named_under_mpirun(configs: str, mpi_run: MpiRun):
    done = mpi_run(4, *DOCTOR, "--config", configs, "--select", "EP3")
    (odd,) = errors_in(done.stdout)

    assert done.returncode == 1
    assert odd["summary"].startswith("num_experts differs: 60 on rank 2 on ")
    assert done.stdout.count('"findings"') == 1


def test_ranks_that_agree_are_well(mpi_run: MpiRun):
    done = mpi_run(4, *DOCTOR, "--select", "EP3", "--select", "LIM2", "--select", "LIB2", "--select", "NET2")

    assert done.returncode == 0
    assert errors_in(done.stdout) == []
    assert [found["rank"] for found in findings_in(done.stdout, "EP300")] == [0, 1, 2, 3]


def test_a_configuration_that_one_rank_cannot_use_is_that_rank_s(configs: str, tmp_path: Path):
    (tmp_path / "ep-1.toml").write_text("num_experts = many\n")
    done = started("--config", configs, "--select", "EP300")
    (odd,) = errors_in(done.stdout)

    assert (odd["rank"], done.returncode) == (1, 1)
    assert "cannot use its configuration" in odd["summary"]
    assert "ep-1.toml" in odd["summary"]


def test_ranks_collect_a_file_each_and_the_files_are_compared(configs: str, tmp_path: Path, mpi_run: MpiRun):
    program = ("-m", "ncclep_bench.doctor_cli")
    collected = tmp_path / "collected"
    collected.mkdir()
    mpi_run(4, *program, "collect", "--config", configs, "-o", collected / "facts-%r.json")
    check = [sys.executable, *program, "check", "--format", "json", "--select", "EP30", "--from", str(collected)]
    first = subprocess.run(check, capture_output=True, text=True, check=False)
    (collected / "facts-1.json").unlink()
    second = subprocess.run(check, capture_output=True, text=True, check=False)

    assert [found["code"] for found in errors_in(first.stdout)] == ["EP301"]
    assert [found["summary"] for found in errors_in(second.stdout) if found["code"] == "EP307"] == [
        "nothing is known of rank 1 of 4"
    ]


STOPPED = "import os, signal; os.kill(os.getpid(), signal.SIGSTOP)"
LATER = "from mpi4py import MPI; " + STOPPED
ABSENT = "from mpi4py import MPI; import time; time.sleep(600)"
NEVER = "import time; time.sleep(600)"


@pytest.mark.parametrize(
    ("does", "silent", "state"),
    [
        (STOPPED, 0, "stopped"),
        (STOPPED, 2, "stopped"),
        (LATER, 0, "stopped"),
        (ABSENT, 2, "sleeping"),
        (NEVER, 2, "sleeping"),
    ],
)
def test_a_rank_that_does_not_answer_is_named_within_the_deadline(
    does: str, silent: int, state: str, mpi_command: Callable[..., list[str]], tmp_path: Path
):
    """One program for each rank, as in a job of several programs."""
    deadline_s = 8
    mpiexec = mpi_command(1)[0]
    own = [sys.executable, *ANSWERING, "--deadline", str(deadline_s)]
    other = [sys.executable, "-c", does]
    parts = [["-n", "1", *(other if rank == silent else own)] for rank in range(3)]
    command = [word for part in parts for word in (":", *part)][1:]
    done = subprocess.run([mpiexec, *command], capture_output=True, text=True, timeout=240, check=False)
    named = errors_in(done.stdout)

    assert done.returncode != 0
    assert [(found["code"], found["rank"]) for found in named] == [("EP300", silent)]
    assert f"it is {state}" in named[0]["summary"]
    assert any("pid " in line for line in named[0]["evidence"])
    # The others have said that they are there.
    assert {found["rank"] for found in findings_in(done.stdout, "EP300") if found["verdict"] == "ok"} == {
        rank for rank in range(3) if rank != silent
    }


def rank_processes(parent: int) -> Iterator[tuple[int, int]]:
    """Ranks that the doctor with this pid has started, and their pids."""
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            words = (entry / "cmdline").read_bytes().split(b"\0")
            environ = dict(word.partition(b"=")[::2] for word in (entry / "environ").read_bytes().split(b"\0"))
        except OSError:
            continue
        module = [b"-m", MODULE.encode()]
        if module in (words[1:3], words[2:4]) and environ.get(b"NCCLEP_TEST_PARENT") == str(parent).encode():
            yield int(environ[b"PMI_RANK"]), int(entry.name)


@pytest.mark.parametrize("wish", [signal.SIGSTOP, signal.SIGKILL])
def test_of_ranks_that_the_doctor_started_one_that_is_stopped_or_killed_is_named_and_none_is_left(wish: signal.Signals):
    mark = os.getpid()
    doctor = subprocess.Popen(
        [sys.executable, *ANSWERING, "--np", "4", "--deadline", "8"],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "NCCLEP_TEST_PARENT": str(mark)},
    )
    ranks: dict[int, int] = {}
    try:
        while len(ranks) < 4 and doctor.poll() is None:
            ranks = dict(rank_processes(mark))
        time.sleep(0.3)
        os.kill(ranks[2], wish)
        stdout, _ = doctor.communicate(timeout=240)
    finally:
        doctor.kill()

    assert doctor.returncode == 1
    assert [(found["code"], found["rank"]) for found in errors_in(stdout)] == [("EP300", 2)]
    assert all(process_status(pid) is None for pid in ranks.values())


def test_whoever_ends_the_doctor_ends_its_ranks_even_one_that_is_stopped():
    mark = os.getpid()
    doctor = subprocess.Popen(
        [sys.executable, *ANSWERING, "--np", "3", "--deadline", "60"],
        env={**os.environ, "NCCLEP_TEST_PARENT": str(mark)},
    )
    ranks: dict[int, int] = {}
    try:
        while len(ranks) < 3 and doctor.poll() is None:
            ranks = dict(rank_processes(mark))
        os.kill(ranks[2], signal.SIGSTOP)
        doctor.terminate()
        doctor.wait(30)
    finally:
        doctor.kill()

    assert doctor.returncode == 130
    assert all(process_status(pid) is None for pid in ranks.values())
