"""The cuda backend across two hosts, its kernels on CPUs: right, and what ranks of different hosts exchange crosses."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.native.cpu_device import COMPILER

if TYPE_CHECKING:
    from tests.hosts.conftest import Hosts

pytestmark = [
    pytest.mark.hosts,
    pytest.mark.mpi,
    pytest.mark.skipif(COMPILER is None, reason="no g++: kernels cannot be built"),
]

ROOT = Path(__file__).parents[2]


def test_random_cases_are_right_between_hosts_and_cross_the_network(hosts: Hosts) -> None:
    before = hosts.sent_bytes(0)
    program = [sys.executable, "-m", "mpi4py", str(ROOT / "tests/native/cpu_hosts.py"), "real", "mpi", "11", "6"]
    done = hosts.run(*hosts.mpiexec(), "-n", "4", "env", f"PYTHONPATH={ROOT}", *program, deadline_s=240)

    assert done.returncode == 0, done.stdout + done.stderr
    assert hosts.sent_bytes(0) - before > 1_000_000
