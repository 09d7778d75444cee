"""On GPUs: rows of warm and cold caches, what the driver tells of use, and slow-downs beside matrix products."""

from __future__ import annotations

from pathlib import Path

import pytest

from ncclep_bench.results.frames import load_run
from ncclep_bench.runtime.device import gpu_count
from tests.conftest import MpiRun

pytestmark = [pytest.mark.gpu, pytest.mark.mpi]

SCENARIO = """
collective = "dispatch"
backend = "cuda"
tokens = 1024
hidden = 7168
num_experts = 64
top_k = 4
dtype = "bfloat16"
cache = ["warm", "cold"]
num_sms = 16

[timing]
budget_s = 0.3
utilisation = true
overlap = true
"""


def test_every_way_of_timing_gives_its_figures(mpi_run: MpiRun, tmp_path: Path) -> None:
    if gpu_count() < 2:
        pytest.skip("what GPUs do to each other needs two")
    scenario = tmp_path / "timing.toml"
    scenario.write_text(SCENARIO)

    done = mpi_run(
        2, "-m", "ncclep_bench.cli", "sweep", scenario, "--out", tmp_path / "run", "--format", "csv",
        env={"PYTHONPATH": str(Path(__file__).parents[2])}, deadline_s=120,
    )  # fmt: skip

    assert done.returncode == 0, done.stdout + done.stderr
    warm, cold = (row for _, row in load_run(tmp_path / "run").cases.sort_values("cache", ascending=False).iterrows())
    assert (warm["cache"], cold["cache"], warm["timing"], cold["timing"]) == ("warm", "cold", "graph", "eager")
    assert cold["p50_us"] > 0.9 * warm["eager_us"]
    for row in (warm, cold):
        assert row["cold_us"] > row["p50_us"]
        assert 0 < row["call_us"] < 1000
    assert 0.5 < warm["gpu_util"] <= 1
    # Sixteen of a GPU's multiprocessors, and some of the time.
    assert 0 < warm["sm_util"] < 0.5
    assert 0 < warm["nvlink_tx_gbps"] < 500
    assert 0 < warm["dram_gbps"] < 8000
    for name in ("overlap_comm", "overlap_gemm"):
        assert 0.8 < warm[name] < 100
        assert cold[[name]].isna().all()
