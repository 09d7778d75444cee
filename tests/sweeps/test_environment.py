from __future__ import annotations

import os
import subprocess
import sys

import pytest

from ncclep_bench.runtime.launch import rank_environment
from ncclep_bench.sweeps.environment import environment

TUNABLES = "GLIBC_TUNABLES"


def test_ranks_that_a_sweep_starts_write_large_copies_around_the_caches_and_the_run_says_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv(TUNABLES, raising=False)

    told = environment("mpiexec")["glibc_tunables"]

    assert "non_temporal_threshold" in told
    command = [sys.executable, "-c", f"import os; print(os.environ['{TUNABLES}'])"]
    done = subprocess.run(command, env=rank_environment(), capture_output=True, text=True, check=True)
    assert (done.stdout.strip(), done.stderr) == (told, "")


def test_what_the_user_has_set_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(TUNABLES, "glibc.malloc.check=0")

    assert rank_environment()[TUNABLES] == environment("mpiexec")["glibc_tunables"] == "glibc.malloc.check=0"


def test_ranks_that_others_start_are_told_with_what_they_were_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(TUNABLES, raising=False)
    monkeypatch.setenv("PMI_RANK", "0")

    assert environment("mpirun or srun")["glibc_tunables"] is None
    assert TUNABLES not in os.environ
