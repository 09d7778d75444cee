"""The launcher that the other tests trust: real ranks, real deadlines, nothing left behind."""

from __future__ import annotations

from pathlib import Path

import pytest

pytestmark = pytest.mark.mpi

# One write per rank: print sends the newline apart, and other ranks' output falls between.
RANK_SUM = """
import sys
from mpi4py import MPI
sys.stdout.write(f"{MPI.COMM_WORLD.allreduce(MPI.COMM_WORLD.rank)}\\n")
"""
STUCK_RANK = """
import os, pathlib, re, signal, sys
from mpi4py import MPI
segments = re.findall(r"/dev/shm/mpich_shm_\\S+", pathlib.Path("/proc/self/maps").read_text())
pathlib.Path(sys.argv[1], str(os.getpid())).write_text("\\n".join(segments))
if MPI.COMM_WORLD.rank == 1:
    os.kill(os.getpid(), signal.SIGSTOP)
MPI.COMM_WORLD.barrier()
"""


def test_every_rank_of_a_run_is_a_real_mpi_rank(mpi_run):
    done = mpi_run(3, "-c", RANK_SUM)

    assert (done.returncode, done.stdout.split()) == (0, ["3", "3", "3"])


def test_a_failing_rank_fails_the_run(mpi_run):
    done = mpi_run(2, "-c", "from mpi4py import MPI; raise SystemExit(MPI.COMM_WORLD.rank * 7)")

    assert done.returncode == 7


def test_a_stopped_rank_ends_at_the_deadline_and_no_rank_is_left(mpi_run, tmp_path: Path):
    with pytest.raises(pytest.fail.Exception, match=r"2 ranks did not end within 3 s"):
        mpi_run(2, "-c", STUCK_RANK, tmp_path, deadline_s=3)

    ranks = list(tmp_path.iterdir())
    assert len(ranks) == 2
    assert [rank.name for rank in ranks if is_running(rank.name)] == []
    assert [segment for rank in ranks for segment in rank.read_text().split() if Path(segment).exists()] == []


def is_running(pid: str) -> bool:
    try:
        return Path("/proc", pid, "stat").read_text().rpartition(") ")[2][0] not in "ZX"
    except FileNotFoundError:
        return False
