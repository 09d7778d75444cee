"""What a driver library says becomes facts that the checks of recorded output judge, and a hanging one costs little."""

from __future__ import annotations

import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ncclep_bench.doctor.collect import Machine, collect
from ncclep_bench.doctor.contract import LEVELS
from ncclep_bench.doctor.preflight import look
from ncclep_bench.doctor.recorded import read_recorded
from ncclep_bench.doctor.run import all_checks, run_checks
from ncclep_bench.model.facts import Facts
from ncclep_bench.runtime import nvml
from ncclep_bench.runtime.child import run_bounded

H200X2 = Path(__file__).parents[1] / "data" / "doctor" / "h200x2"
FAMILIES = ("GPU", "NVL", "TOPO")

Live = Callable[..., Facts]


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("no g++ to build the driver library that stands in")
    folder = tmp_path_factory.mktemp("driver")
    source = Path(__file__).with_name("nvml_standin.cpp")
    command = [compiler, "-shared", "-fPIC", "-o", str(folder / "libnvidia-ml.so.1"), str(source)]
    subprocess.run(command, check=True, timeout=240)
    return folder


@pytest.fixture
def live(library: Path, monkeypatch: pytest.MonkeyPatch) -> Live:
    def facts(fault: str, deadline_s: float = 60) -> Facts:
        monkeypatch.setenv("LD_LIBRARY_PATH", str(library))
        monkeypatch.setenv("NVML_STANDIN", fault)
        return collect(Machine(deadline_s=deadline_s))

    return facts


def verdicts(facts: Facts) -> dict[str, str]:
    """Of the checks that look at GPUs, the worst verdict of each."""
    found: dict[str, str] = {}
    for finding in run_checks([check for check in all_checks() if check.code.startswith(FAMILIES)], facts):
        assert "the check itself failed" not in finding.summary
        if finding.verdict in (*LEVELS, "ok") and found.get(finding.code) not in LEVELS:
            found[finding.code] = finding.verdict
    return found


def test_a_healthy_driver_gives_every_fact_and_no_finding(live: Live):
    facts = live("")

    told = {name for name, fact in facts.sections["gpus"].items() if (fact.source, fact.state) == ("NVML", "value")}
    assert told == {"list", "unreadable", "topology", "peers", "links", "link_errors", "query", "processes"}
    assert facts.read("gpus.cuda", str) == "13.0"
    assert set(verdicts(facts).values()) == {"ok"}
    assert set(verdicts(facts)) >= {
        *("NVL001", "NVL002", "NVL003", "GPU004", "GPU005", "GPU006", "GPU007", "GPU008", "GPU009"),
        *("TOPO001", "TOPO002", "TOPO003", "TOPO004"),
    }


def test_the_driver_s_answers_are_what_nvidia_smi_prints_of_the_same_machine(live: Live):
    facts = live("")
    (recorded,) = read_recorded([H200X2]).documents
    shown = [gpu["fields"] for gpu in recorded.read("gpus.query", list[dict[str, Any]])]
    # Sums over the parts that nvidia-smi prints one by one.
    own = {
        f"ecc errors/{counter}/{kind}"
        for counter in ("volatile", "aggregate")
        for kind in ("correctable", "uncorrectable")
    }
    for gpu, printed in zip(facts.read("gpus.query", list[dict[str, Any]]), shown, strict=True):
        assert gpu["fields"].keys() - printed.keys() == own
        different = {key for key in gpu["fields"].keys() - own if gpu["fields"][key] != printed[key]}
        assert different <= {"gpu power readings/average power draw", "temperature/gpu current temp", "clocks/sm"}
    assert facts.fact("gpus.topology").value[0]["paths"] == recorded.fact("gpus.topology").value[0]["paths"]
    links = [(link["gpu"], link["link"], link["state"], link["model"]) for link in facts.fact("gpus.links").value]
    assert links == [(k["gpu"], k["link"], k["state"], k["model"]) for k in recorded.fact("gpus.links").value]


@pytest.mark.parametrize(
    ("fault", "expected"),
    [
        ("dark", {"NVL001": "warning"}),
        ("replays", {"NVL002": "warning"}),
        ("noisy", {"NVL011": "warning"}),
        ("joining", {"NVL003": "error"}),
        ("weak", {"NVL003": "error"}),
        ("weak old", {"NVL003": "error"}),
        ("told", {}),
        ("stray", {"GPU004": "warning"}),
        ("hot busy", {"GPU005": "warning"}),
        ("narrow busy", {"GPU006": "warning"}),
        ("narrow", {}),
        ("rotten", {"GPU007": "error"}),
        ("mig", {"GPU008": "warning"}),
        ("lost", {"GPU009": "warning"}),
        ("torn", {"GPU009": "warning"}),
        ("mismatch", {"GPU009": "warning"}),
        ("pcie", {"TOPO004": "info"}),
        ("bridged near", {}),
        ("barred", {"GPU015": "warning", "TOPO004": "info"}),
        ("nvl bridged", {}),
    ],
)
def test_a_fault_that_the_driver_tells_is_found(fault: str, expected: dict[str, str], live: Live):
    assert {code: verdict for code, verdict in verdicts(live(fault)).items() if verdict in LEVELS} == expected


@pytest.mark.parametrize(
    ("fault", "name", "state", "reason"),
    [
        ("pcie", "gpus.links", "absent", "Not Supported"),
        ("secret", "gpus.processes", "not_permitted", "Insufficient Permissions"),
        ("stray untold", "gpus.processes", "absent", "does not tell the memory"),
        ("forbidden", "gpus.query", "not_permitted", "Insufficient Permissions"),
        ("mismatch", "gpus.query", "failed", "version mismatch"),
        ("none", "gpus.query", "absent", "no GPU"),
        ("none", "gpus.links", "absent", "no GPU"),
    ],
)
def test_what_the_driver_does_not_tell_is_a_fact_with_the_reason(
    fault: str, name: str, state: str, reason: str, live: Live
):
    fact = live(fault).fact(name)

    assert (fact.state, fact.source) == (state, "NVML")
    assert reason in fact.reason


def test_values_that_a_gpu_does_not_have_are_not_available_and_not_zero(live: Live):
    (fields, _) = (gpu["fields"] for gpu in live("pcie").read("gpus.query", list[dict[str, Any]]))

    assert fields["ecc mode/current"] == fields["ecc errors/volatile/uncorrectable"] == fields["fabric/state"] == "N/A"
    assert fields["remapped rows/pending"] == "No"


def test_what_a_fabric_gives_at_the_end_is_not_available_before(live: Live):
    (fields, _) = (gpu["fields"] for gpu in live("joining").read("gpus.query", list[dict[str, Any]]))

    assert fields["fabric/state"] == "In Progress"
    assert fields["fabric/status"] == fields["fabric/cliqueid"] == fields["fabric/clusteruuid"] == "N/A"


def test_a_model_of_no_profile_is_neither_healthy_nor_ill(live: Live):
    facts = live("novel")
    (finding,) = [f for f in run_checks(all_checks(), facts) if f.code == "NVL001"]

    assert finding.verdict == "not_run"
    assert "NVIDIA X9000 is in no machine profile: its 18 listed links are up" in finding.summary


def test_links_that_lead_to_the_peer_itself_are_counted_as_its_own(live: Live):
    (topology,) = live("nvl bridged").read("gpus.topology", list[dict[str, Any]])

    assert topology["paths"]["GPU0"] == {"GPU0": "X", "GPU1": "NV12"}


def test_a_driver_that_hangs_costs_the_deadline_and_is_named(live: Live):
    facts = live("hang", deadline_s=2)

    assert facts.fact("gpus.query").state == "failed"
    (finding,) = [f for f in run_checks(all_checks(), facts) if f.code == "GPU009"]
    assert finding.verdict == "warning"
    assert "no answer within 2 s" in " ".join(finding.evidence)
    assert facts.fact("gpus.topology").reason == facts.fact("gpus.query").reason


def test_a_sweep_does_not_wait_for_a_driver_that_hangs_and_knows_the_rest(
    library: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("LD_LIBRARY_PATH", str(library))
    monkeypatch.setenv("NVML_STANDIN", "hang")
    found = {finding.code: finding.verdict for finding in look(2, deadline_s=20)}

    assert found["GPU009"] == "warning"
    assert found["LIM004"] != "not_run"


def test_without_a_driver_the_facts_are_absent_and_say_why(monkeypatch: pytest.MonkeyPatch):
    if not isinstance(nvml.driver(), nvml.Missing):
        pytest.skip("this machine has a driver")
    facts = collect(Machine())

    assert {fact.state for name, fact in facts.sections["gpus"].items()} == {"absent"}
    assert "Not Found" in facts.fact("gpus.list").reason


def test_a_command_that_outlives_its_deadline_is_killed_with_its_children(tmp_path: Path):
    mark = tmp_path / "alive"
    code = f"import subprocess, time; subprocess.Popen(['sh', '-c', 'sleep 3; touch {mark}']); time.sleep(600)"
    with pytest.raises(TimeoutError, match=r"no answer within 0\.5 s"):
        run_bounded([sys.executable, "-c", code], 0.5)

    time.sleep(3.5)
    assert not mark.exists()
