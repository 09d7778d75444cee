from __future__ import annotations

from pathlib import Path

import pytest

from ncclep_bench.runtime import nccl
from ncclep_bench.runtime.device import gpu_count
from tests.conftest import MpiRun

pytestmark = [pytest.mark.gpu, pytest.mark.mpi]

HERE = Path(__file__).parent


def test_random_cases_are_right(mpi_run: MpiRun) -> None:
    if (reason := nccl.ep_missing()) is not None:
        pytest.skip(reason)
    if gpu_count() < 2:
        pytest.skip("NCCL EP takes one rank per GPU, and needs two")
    env = {"PYTHONPATH": str(HERE.parents[1])}
    done = mpi_run(2, "-m", "mpi4py", HERE / "gpu_cases.py", "nccl_ep", 2, 8, env=env, deadline_s=300)

    assert done.returncode == 0, done.stdout + done.stderr
