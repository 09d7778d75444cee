"""On a machine with GPUs the facts are what nvidia-smi prints, soon, and a healthy machine has no error."""

from __future__ import annotations

import subprocess
import sys
import time
from typing import Any

import pytest

from ncclep_bench.doctor import live_gpus
from ncclep_bench.doctor.collect import Machine, collect
from ncclep_bench.doctor.machine import parsed
from ncclep_bench.doctor.run import all_checks, run_checks

pytestmark = pytest.mark.gpu

PASSING = ("clocks/", "clocks event reasons/", "temperature/", "utilization/", "fb memory usage/used")
MOMENTARY = (*PASSING, "performance state", "gpu power readings/average", "pci/gpu link info/pcie generation/current")


def printed(parser: str, fact: str, *command: str) -> Any:
    done = subprocess.run(["nvidia-smi", *command], capture_output=True, text=True, timeout=60, check=True)
    return parsed(parser, fact, f"$ nvidia-smi {' '.join(command)}\n{done.stdout}", "nvidia-smi")


def without_place(records: list[dict[str, Any]], *also: str) -> list[dict[str, Any]]:
    return [{key: value for key, value in record.items() if key not in ("at", *also)} for record in records]


def test_every_field_is_the_one_that_nvidia_smi_prints():
    facts = collect(Machine()).read("gpus.query", list[dict[str, Any]])
    shown = printed("query", "gpus.query", "-q")

    assert [gpu["gpu"] for gpu in facts] == [gpu["gpu"] for gpu in shown]
    for told, said in zip(facts, shown, strict=True):
        lasting = {key for key in told["fields"] if key in said["fields"] and not key.startswith(MOMENTARY)}
        assert {key: told["fields"][key] for key in lasting} == {key: said["fields"][key] for key in lasting}
        assert len(lasting) > 15


def test_links_paths_and_peer_access_are_those_that_nvidia_smi_prints():
    machine = Machine()
    facts = collect(machine)
    (matrix,) = printed("topology", "gpus.topology", "topo", "-m")
    (told,) = live_gpus.topology(machine.driver)
    for gpu, row in told.paths.items():
        assert row == {peer: path for peer, path in matrix["paths"][gpu].items() if peer in told.paths}
    if facts.fact("gpus.links").state == "value":
        links = printed("nvlink", "gpus.links", "nvlink", "-s")
        assert without_place(facts.fact("gpus.links").value, "version", "remote") == without_place(links)
    if len(told.paths) > 1:
        for access, capability in (("r", "read"), ("w", "write"), ("n", "nvlink")):
            shown = printed("peer_status", "gpus.peers", "topo", "-p2p", access)
            assert [p for p in without_place(facts.fact("gpus.peers").value) if p["capability"] == capability] == (
                without_place(shown)
            )


def test_a_machine_that_works_has_no_error_and_takes_seconds():
    start = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-m", "ncclep_bench.doctor_cli", "check"], capture_output=True, text=True, timeout=120
    )

    assert time.monotonic() - start < 60  # far above what it takes: benchmarks tell how fast it is
    assert done.returncode == 0, done.stdout
    assert [f for f in run_checks(all_checks(), collect(Machine())) if "the check itself failed" in f.summary] == []
