from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conftest import MpiRun
from tests.native.killed import told_to_survivor

pytestmark = [pytest.mark.gpu, pytest.mark.mpi]

HERE = Path(__file__).parent


@pytest.mark.parametrize("how", [(), ("early",)])
@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
def test_random_cases_are_right_launched_and_replayed(mpi_run: MpiRun, ranks: int, how: tuple[str, ...]) -> None:
    env = {"PYTHONPATH": str(HERE.parents[1])}
    program = HERE / "gpu_cases.py"
    # Ranks that share a GPU take turns, which takes time.
    count = "40" if ranks < 8 else "12"
    done = mpi_run(ranks, "-m", "mpi4py", program, "cuda", str(ranks), count, *how, env=env, deadline_s=300)

    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("ranks", [2, 4])
def test_every_kind_of_case_is_right_when_each_release_and_acquire_dawdles(mpi_run: MpiRun, ranks: int) -> None:
    env = {"PYTHONPATH": str(HERE.parents[1]), "NCCLEP_TEST_DELAYS": str(ranks)}
    done = mpi_run(ranks, "-m", "mpi4py", HERE / "gpu_cases.py", "cuda", ranks, 40, env=env, deadline_s=600)

    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("ranks", [1, 2, 4])
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
        "ordered",
        "tensors",
        "many",
        "gone",
    ],
)
def test_the_calls_of_a_communicator_are_right_and_refusals_say_why(mpi_run: MpiRun, ranks: int, program: str) -> None:
    if program == "tensors":
        pytest.importorskip("torch")
    ranks_program = HERE.parent / "native" / "communicator_ranks.py"
    env = {"PYTHONPATH": str(HERE.parents[1])}
    done = mpi_run(ranks, "-m", "mpi4py", ranks_program, "gpu", program, env=env, deadline_s=300)

    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("ranks", [2, 4])
def test_no_registration_outlives_its_buffer(mpi_run: MpiRun, ranks: int) -> None:
    env = {"PYTHONPATH": str(HERE.parents[1])}
    done = mpi_run(ranks, "-m", "mpi4py", HERE / "registered_cases.py", ranks, 20, env=env, deadline_s=300)

    assert done.returncode == 0, done.stdout + done.stderr


def test_a_rank_killed_while_kernels_run_ends_those_of_the_others_and_frees_its_gpu(tmp_path: Path) -> None:
    before = _memory_used()

    told = told_to_survivor("cuda", tmp_path, deadline_s=120)

    assert "RankError: rank 0: rank 1 did not reach launch" in told
    assert _memory_used() == before


def _memory_used() -> list[int]:
    """MiB on each GPU."""
    command = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    return [int(line) for line in subprocess.check_output(command, text=True).splitlines()]


@pytest.mark.skipif(shutil.which("compute-sanitizer") is None, reason="no compute-sanitizer")
@pytest.mark.parametrize("tool", ["memcheck", "racecheck", "synccheck"])
def test_the_sanitizer_finds_nothing(tool: str, mpi_command: Callable[..., list[str]]) -> None:
    watched = mpi_command(2, "-m", "mpi4py", HERE / "gpu_cases.py", "cuda", "11", "6")
    command = ["compute-sanitizer", "--tool", tool, "--target-processes", "all", "--error-exitcode", "9", *watched]
    done = subprocess.run(command, cwd=HERE.parents[1], capture_output=True, text=True, timeout=550)

    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]


@pytest.mark.parametrize(("ranks", "staging"), [(2, "auto"), (2, "mpi"), (4, "auto")])
def test_random_cases_are_right_where_no_rank_maps_the_memory_of_another(
    mpi_run: MpiRun, ranks: int, staging: str
) -> None:
    env = {"PYTHONPATH": str(HERE.parents[1])}
    program = HERE / "staged_cases.py"
    done = mpi_run(ranks, "-m", "mpi4py", program, staging, ranks, 20, env=env, deadline_s=300)

    assert done.returncode == 0, done.stdout + done.stderr
