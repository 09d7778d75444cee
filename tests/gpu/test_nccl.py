from __future__ import annotations

from pathlib import Path

import pytest

from ncclep_bench.runtime import nccl
from ncclep_bench.runtime.device import gpu_count
from tests.conftest import MpiRun

pytestmark = [pytest.mark.gpu, pytest.mark.mpi]

HERE = Path(__file__).parent


@pytest.mark.parametrize("ranks", [1, 2])
def test_random_cases_are_right_launched_and_replayed(mpi_run: MpiRun, ranks: int) -> None:
    if (reason := nccl.missing()) is not None:
        pytest.skip(reason)
    if gpu_count() < ranks:
        pytest.skip(f"NCCL takes one rank per GPU: {ranks} ranks, {gpu_count()} GPUs")
    env = {"PYTHONPATH": str(HERE.parents[1])}
    done = mpi_run(ranks, "-m", "mpi4py", HERE / "gpu_cases.py", "nccl", ranks, 25, env=env, deadline_s=300)

    assert done.returncode == 0, done.stdout + done.stderr
