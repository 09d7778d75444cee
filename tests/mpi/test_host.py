from __future__ import annotations

from pathlib import Path

import pytest

from tests.conftest import MpiRun

pytestmark = pytest.mark.mpi

HERE = Path(__file__).parent
ROOT = {"PYTHONPATH": str(HERE.parents[1])}


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 8])
def test_random_cases_of_every_collective_are_right_on_real_ranks(mpi_run: MpiRun, ranks: int) -> None:
    count = 60 if ranks < 8 else 25
    done = mpi_run(ranks, "-m", "mpi4py", HERE / "host_cases.py", ranks, count, env=ROOT, deadline_s=240)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(("ranks", "split"), [(3, "MPIR_CVAR_ODD_EVEN_CLIQUES=1"), (4, "MPIR_CVAR_NUM_CLIQUES=2")])
def test_cases_are_right_where_some_peers_share_memory_and_others_do_not(
    mpi_run: MpiRun, ranks: int, split: str
) -> None:
    env = ROOT | dict([split.split("=")])
    done = mpi_run(ranks, "-m", "mpi4py", HERE / "host_cases.py", 10 + ranks, 60, env=env, deadline_s=240)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(
    "program",
    ["registration", "channels", "extra_copies", "corrupted_copies", "skewed_padding", "shortage_on_one_rank"],
)
def test_the_host_backend_counts_what_it_does_and_refuses_what_does_not_fit(mpi_run: MpiRun, program: str) -> None:
    done = mpi_run(3, "-m", "mpi4py", HERE / "host_programs.py", program, env=ROOT, deadline_s=240)
    assert done.returncode == 0, done.stdout + done.stderr
