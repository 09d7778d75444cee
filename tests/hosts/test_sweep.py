"""A sweep across two hosts: verified, and what ranks of different hosts exchange crosses the network."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import pytest

from ncclep_bench.results.store import read_run

if TYPE_CHECKING:
    from tests.hosts.conftest import Hosts

pytestmark = [pytest.mark.hosts, pytest.mark.mpi]

SCENARIO = """\
description = "rows between two hosts"
collective = ["dispatch", "combine", "all_gather_experts", "reduce_scatter_expert_grads"]
batch_size = 256
hidden = 1024
num_experts = 16
top_k = 4
expert_elements = 16384
[timing]
budget_s = 0.2
max_samples = 20
"""


def test_a_sweep_across_two_hosts_is_verified_and_crosses_the_network(hosts: Hosts):
    scenario, out = hosts.folder / "small.toml", hosts.folder / "run"
    scenario.write_text(SCENARIO)
    before = hosts.sent_bytes(0)
    sweep = [sys.executable, "-m", "ncclep_bench.cli", "sweep", str(scenario), "--out", str(out)]
    done = hosts.run(*hosts.mpiexec(), "-n", "4", *sweep, deadline_s=240)
    assert done.returncode == 0, done.stdout + done.stderr
    crossed = hosts.sent_bytes(0) - before
    rows = read_run(out).measurements

    assert {row.outcome for row in rows} == {"passed"}
    assert len({row.case.collective for row in rows}) >= 4
    # Uniform routing sends about half of the bytes to the other host, from both hosts, in each of the iterations.
    assert crossed > sum(row.wire_bytes or 0 for row in rows) / 4
