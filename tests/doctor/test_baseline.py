"""A healthy machine is learnt, and what drifts from it is told: this machine, recorded ones, and a fleet."""

from __future__ import annotations

import json
import os
import resource
import shutil
from pathlib import Path
from typing import Any

import msgspec
import pytest
from click.testing import CliRunner, Result
from hypothesis import given, settings
from hypothesis import strategies as st

from ncclep_bench.doctor.baseline import KINDS, Baseline, drift, read_baseline
from ncclep_bench.doctor.collect import FACTS
from ncclep_bench.doctor_cli import main
from ncclep_bench.errors import InputError
from ncclep_bench.model.facts import Fact, Facts

H200X2 = Path(__file__).parents[1] / "data" / "doctor" / "h200x2"


def doctor(*arguments: object) -> Result:
    return CliRunner().invoke(main, ["baseline", *map(str, arguments)])


def said(done: Result) -> dict[str, list[str]]:
    """Code → verdict and summary of each problem."""
    found: dict[str, list[str]] = {}
    for finding in json.loads(done.stdout)["findings"]:
        if finding["verdict"] in ("info", "warning", "error"):
            found.setdefault(finding["code"], []).append(f"{finding['verdict']}: {finding['summary']}")
    return found


def machine(host: str, **values: Any) -> Facts:
    sections: dict[str, dict[str, Fact]] = {}
    for name, value in values.items():
        section, _, key = name.partition("__")
        sections.setdefault(section, {})[key] = Fact("value", "test", value)
    return Facts(host=host, sections=sections)


def document(folder: Path, facts: Facts) -> Path:
    path = folder / f"{facts.host}-{len(list(folder.iterdir()))}.json"
    path.write_bytes(facts.to_json())
    return path


def test_a_baseline_that_is_no_plain_file_is_not_waited_for(tmp_path: Path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "endless").symlink_to("/dev/zero")

    for name in ("pipe", "endless"):
        done = doctor("compare", tmp_path / name)
        assert done.exit_code == 2
        assert "is a folder or a device" in done.stderr


def test_this_machine_has_not_drifted_since_a_moment_ago(tmp_path: Path):
    assert doctor("save", tmp_path / "healthy.json").exit_code == 0
    done = doctor("compare", tmp_path / "healthy.json", "--format", "json", "--fail-on", "warning")

    assert done.exit_code == 0, done.stdout
    assert said(done) == {}


def test_a_lower_limit_and_a_new_setting_of_this_machine_are_drift(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("NCCL_ALGO", raising=False)
    doctor("save", tmp_path / "healthy.json")
    monkeypatch.setenv("NCCL_ALGO", "Tree")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (500, hard))
    try:
        done = doctor("compare", tmp_path / "healthy.json", "--format", "json", "--fail-on", "warning")
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))

    assert done.exit_code == 1
    assert said(done) == {
        "EP502": ["warning: NCCL_ALGO is new: Tree"],
        "EP503": [f"warning: limit nofile changed from {soft} to 500"],
    }


def test_a_lost_link_a_lower_power_limit_and_new_errors_of_a_recorded_machine_are_told(tmp_path: Path):
    now = tmp_path / "now"
    shutil.copytree(H200X2, now)
    for file, before, after in (
        ("nvlink_s.txt", "Link 3: 26.562 GB/s", "Link 3: <inactive>"),
        ("q.txt", "Current Power Limit                           : 700.00 W", "Current Power Limit : 500.00 W"),
        ("q.txt", "DRAM Uncorrectable                            : 0", "DRAM Uncorrectable : 2"),
        ("nvlink_e.txt", "Link 5: Replay Errors: 0", "Link 5: Replay Errors: 7"),
    ):
        text = (now / file).read_text()
        if before not in text:
            before = next(line.strip() for line in text.splitlines() if before.split(":")[0].split("  ")[0] in line)
            after = f"{before.rpartition(':')[0]}: {after.rpartition(': ')[2]}"
        (now / file).write_text(text.replace(before, after, 1))

    assert doctor("save", tmp_path / "healthy.json", "--from", H200X2).exit_code == 0
    same = doctor("compare", tmp_path / "healthy.json", "--from", H200X2, "--format", "json")
    done = doctor("compare", tmp_path / "healthy.json", "--from", now, "--format", "json")
    found = said(done)

    assert (same.exit_code, said(same)) == (0, {})
    assert done.exit_code == 1
    assert found["EP504"] == ["error: GPU 0 NVLinks up changed from 18 to 17"]
    assert found["EP505"] == ["warning: GPU 0 gpu power readings/current power limit changed from 700.00 W to 500.00 W"]
    assert "error: GPU 0 ecc errors/volatile/dram uncorrectable grew from 0 to 2" in found["EP506"]
    assert any("NVLink" in line and "grew from 0 to 7" in line for line in found["EP506"])


def test_a_machine_of_a_fleet_is_compared_with_all_healthy_ones(tmp_path: Path):
    packages = {"python": "3.12.1", "numpy": "2.4.6"}
    fleet = [
        machine(
            f"node-{number}",
            libraries__packages={**packages, **({"torch": "2.9"} if number else {})},
            host__boot_id=f"{number}" * 8,
            host__kernel=("5.15.0-119", "5.15.0-122")[number % 2],
            host__memory_bytes=10**12 + number * 10**8,
            rdma__counters=[{"device": "mlx5_0", "port": 1, "counter": "symbol_error", "value": number}],
            rdma__ports=[{"device": "mlx5_0", "port": 1, "state": "ACTIVE", "rate_gbps": 400.0, "lid": number}],
        )
        for number in range(4)
    ]
    for facts in fleet:
        document(tmp_path, facts)
    odd = machine(
        "node-9",
        libraries__packages={**packages, "numpy": "1.26.4"},
        host__boot_id="9" * 8,
        host__kernel="5.15.0-119",
        host__memory_bytes=10**12,
        rdma__counters=[{"device": "mlx5_0", "port": 1, "counter": "symbol_error", "value": 9000}],
        rdma__ports=[{"device": "mlx5_0", "port": 1, "state": "ACTIVE", "rate_gbps": 200.0, "lid": 77}],
    )
    doctor("save", tmp_path / "fleet.baseline", "--from", *sorted(tmp_path.glob("node-*.json")))
    odd_file = document(tmp_path, odd)
    done = doctor("compare", tmp_path / "fleet.baseline", "--from", odd_file, "--format", "json")

    assert said(done) == {
        "EP501": ["warning: package numpy is 1.26.4; 4 healthy machines have 2.4.6 (down)"],
        "EP504": ["error: mlx5_0:1 rate_gbps is 200.0; 4 healthy machines have 400.0"],
    }
    findings = {finding["code"]: finding for finding in json.loads(done.stdout)["findings"]}
    assert findings["EP506"]["verdict"] == "not_run"
    assert "node-9 has no past" in findings["EP506"]["summary"]


def test_a_counter_that_grew_on_the_same_machine_is_drift_and_one_that_was_reset_is_not():
    def counted(value: int) -> Facts:
        port = {"device": "mlx5_0", "port": 1, "value": value}
        return machine("node-1", rdma__counters=[{**port, "counter": name} for name in ("rnr_nak", "port_xmit")])

    grown = drift(Baseline(machines=[counted(5)]), counted(8)).fact("drift.counters").value
    reset = drift(Baseline(machines=[counted(5)]), counted(0)).fact("drift.counters").value

    assert [(each["item"], each["healthy"], each["now"]) for each in grown] == [("mlx5_0:1 rnr_nak", ["5"], "8")]
    assert reset == []


def test_what_can_no_longer_be_read_is_drift_and_what_was_never_asked_is_none():
    healthy = Baseline(machines=[machine("node-1", gpus__list=[{"index": "0"}], gpus__topology=[])])
    broken = machine("node-1")
    broken.sections["gpus"] = {"list": Fact("failed", "NVML", reason="NVML: driver not loaded")}

    (lost,) = drift(healthy, broken).fact("drift.links").value

    assert lost["item"] == "gpus.list"
    assert "driver not loaded" in lost["now"]
    assert drift(healthy, machine("node-1")).fact("drift.links").state == "absent"


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ('{"baseline_schema": 2, "machines": []}', "schema version 2, this is version 1"),
        ('{"baseline_schema": 1, "machines": []}', "without machines"),
        ('{"schema": 1, "sections": {}}', "not a baseline"),
        ("not json", "not a baseline"),
        ("[" * 100_000, "not a baseline"),
        (None, "cannot be read"),
    ],
)
def test_a_file_that_is_no_baseline_of_this_version_is_refused(text: str | None, reason: str, tmp_path: Path):
    file = tmp_path / "baseline.json"
    if text is not None:
        file.write_text(text)

    with pytest.raises(InputError, match=reason):
        read_baseline(file)
    assert doctor("compare", file).exit_code == 2


def test_a_baseline_that_cannot_be_written_is_wrong_usage(tmp_path: Path):
    assert doctor("save", tmp_path / "no" / "folder.json", "--from", H200X2).exit_code == 2
    assert doctor("save", tmp_path / "file.json", H200X2).exit_code == 2


def test_every_fact_that_is_compared_is_one_that_is_collected():
    assert {name for kind in KINDS.values() for name in kind.items} <= set(FACTS)


NAMES = ("device", "port", "value", "counter", "gpu", "link", "fields", "paths", "name", "soft", "all")
anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=6),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(NAMES),
            inner,
            max_size=4,
        )
    ),
    max_leaves=10,
)


@settings(max_examples=60, deadline=None)
@given(one=anything, other=anything)
def test_no_shape_of_a_strangers_facts_makes_the_comparison_fail(one: Any, other: Any):
    def strange(value: Any) -> Facts:
        names = [name for kind in KINDS.values() for name in kind.items]
        return machine("node-1", **{name.replace(".", "__"): value for name in names})

    found = drift(Baseline(machines=[strange(one)]), strange(other))

    assert {fact.state for fact in found.sections["drift"].values()} == {"value"}
    assert msgspec.json.encode(found)


def test_a_baseline_replaces_an_older_one_and_no_other_file(tmp_path: Path):
    first, second, third = (document(tmp_path, machine(host)) for host in ("node-1", "node-2", "node-3"))
    before = second.read_bytes()

    # FILE left out: the second document would be it.
    done = doctor("save", "--from", first, second, third)
    assert done.exit_code == 2
    assert "not a baseline" in done.stderr
    assert second.read_bytes() == before

    for documents in ([first], [first, second]):
        done = doctor("save", tmp_path / "fleet.baseline", "--from", *documents)
        assert done.exit_code == 0
        assert f"a baseline of {len(documents)} machine" in done.stderr
