"""Several facts documents are one group: the odd rank is named, however many there are."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest
from click.testing import CliRunner

from ncclep_bench.doctor.collect import Machine, collect
from ncclep_bench.doctor.compare import group_facts
from ncclep_bench.doctor.run import all_checks, run_checks
from ncclep_bench.doctor_cli import main
from ncclep_bench.model.facts import Fact
from ncclep_bench.runtime.place import LAUNCHERS, Launcher
from tests.doctor.rank_facts import Ranks, path


def test_collected_files_of_several_ranks_are_compared(tmp_path: Path):
    ranks = Ranks(other={2: {"ep.config": {"num_experts": 64, "top_k": 8, "experts_per_rank": 8}}})
    for facts in ranks.documents():
        (tmp_path / f"rank{facts.rank}.json").write_bytes(facts.to_json())
    done = CliRunner().invoke(main, ["check", "--from", str(tmp_path), "--select", "EP3", "--format", "json"])
    (odd,) = [f for f in json.loads(done.stdout)["findings"] if f["code"] == "EP301" and f["verdict"] == "error"]

    assert done.exit_code == 1
    assert odd["summary"] == "experts_per_rank differs: 8 on rank 2 on gpu-02; 16 on the other 3"


def test_ranks_that_agree_have_nothing_but_ok(tmp_path: Path):
    verdicts = {f.verdict for f in run_checks(all_checks(), Ranks().facts(tmp_path)) if f.verdict != "not_run"}

    assert verdicts == {"ok"}


def test_mtus_of_two_hosts_are_compared_rail_by_rail(tmp_path: Path):
    documents = Ranks().documents()
    for facts, active in ((documents[0], 4096), (documents[2], 1024)):
        mtu = {"at": "ibv_devinfo:9", "device": "mlx5_0", "port": 1, "max_bytes": 4096, "active_bytes": active}
        facts.sections["rdma"]["mtu"] = Fact(
            "value", "ibv_devinfo", [{**mtu, "state": "ACTIVE", "link_layer": "Ethernet"}]
        )
    findings = run_checks(all_checks(), group_facts(documents))
    (odd,) = [finding for finding in findings if (finding.code, finding.verdict) == ("IB005", "error")]

    assert "gpu-01 4096, gpu-02 1024" in odd.summary


def test_a_path_that_was_probed_is_judged_again_from_its_facts(tmp_path: Path):
    ranks = Ranks(other={0: {"network.path_mtu": [path(0, passed_bytes=4000)]}})
    for facts in ranks.documents():
        (tmp_path / f"rank{facts.rank}.json").write_bytes(facts.to_json())
    done = CliRunner().invoke(main, ["check", "--from", str(tmp_path), "--select", "NET203", "--format", "json"])
    (odd,) = json.loads(done.stdout)["findings"]

    assert (done.exit_code, odd["verdict"]) == (1, "error")
    assert "eth0 of gpu-01 (10.1.0.1) to eth0 of gpu-02 (10.1.0.2) packets over 4000 B vanish" in odd["summary"]


def test_a_thousand_ranks_with_one_odd_one_are_compared_at_once(tmp_path: Path):
    documents = [
        msgspec.structs.replace(facts, rank=4 * group + (facts.rank or 0), host=f"{facts.host}-{group}")
        for group in range(256)
        for facts in Ranks().documents()
    ]
    documents[700].sections["limits"]["memlock"] = Fact("value", "limits", {"soft": 65536, "hard": 65536})
    findings = run_checks(all_checks(), group_facts(documents))
    (odd,) = [finding for finding in findings if finding.code == "LIM201"]

    assert "65536 on rank 700" in odd.summary
    assert "the other 1023" in odd.summary


@pytest.mark.parametrize("launcher", [launcher for launcher in LAUNCHERS if launcher.local_rank])
def test_ranks_that_use_the_same_gpu_are_named_whatever_started_them(launcher: Launcher, tmp_path: Path):
    documents = Ranks().documents()
    for number, facts in enumerate(documents):
        environ = {launcher.rank: str(number), launcher.local_rank: "1"}
        settings = collect(Machine(tmp_path, environ)).fact("job.settings")
        assert {setting["name"] for setting in settings.value} == environ.keys()
        facts.sections["job"]["settings"] = settings
    findings = run_checks(all_checks(), group_facts(documents))

    assert [finding.verdict for finding in findings if finding.code == "GPU201"] == ["error"] * 2
