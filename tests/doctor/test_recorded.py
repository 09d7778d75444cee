"""Recorded files are recognised by what they say, survive what happens to pasted text, and are never trusted."""

from __future__ import annotations

import io
import itertools
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from hypothesis import given, settings
from hypothesis import strategies as st

from ncclep_bench.doctor.contract import Finding
from ncclep_bench.doctor.diagnosis import causes_first
from ncclep_bench.doctor.logs import scan as scanning
from ncclep_bench.doctor.logs.scan import scan
from ncclep_bench.doctor.recorded import read_logs, read_recorded
from ncclep_bench.doctor.run import all_checks, run_checks
from ncclep_bench.doctor.text import lines_of
from ncclep_bench.doctor_cli import main
from ncclep_bench.model.facts import Fact, Facts
from ncclep_bench.registry import LOGS, PARSERS
from tests.doctor.recorded_texts import (
    HEALTHY_KERNEL,
    INFO,
    KERNEL,
    MESH,
    PCIE,
    RAS,
    RAS_MISMATCH,
    RECORDED_PEACEFUL,
    RECORDED_TRIGGERS,
    WATCHDOG,
    devinfo,
    gid_table,
    ibstat,
    links,
    lspci,
    said,
    smi_q,
    warn,
)

H200X2 = Path(__file__).parents[1] / "data" / "doctor" / "h200x2"
"""What the tools print on a healthy machine, with neutral identifiers."""

TEXTS = sorted(
    {fixture.text for table in (RECORDED_TRIGGERS, RECORDED_PEACEFUL) for texts in table.values() for fixture in texts}
)


def findings_in(text: str | bytes, folder: Path) -> list[Finding]:
    file = folder / "recorded.txt"
    file.write_bytes(text if isinstance(text, bytes) else text.encode())
    (facts,) = read_recorded([file]).documents
    return run_checks(all_checks(), facts)


def alarms(findings: list[Finding]) -> set[tuple[str, str]]:
    return {(f.code, f.verdict) for f in findings if f.verdict in ("warning", "error")}


def doctor(*arguments: object) -> Result:
    return CliRunner().invoke(main, [str(argument) for argument in arguments], prog_name="ncclep-doctor")


@pytest.mark.parametrize(
    "spoil",
    [
        pytest.param(lambda line: line.strip(), id="indentation-lost"),
        pytest.param(lambda line: line.replace("\t", "    "), id="tabs-to-blanks"),
        pytest.param(lambda line: f"[1,3]<stdout>:{line}", id="tagged-by-mpirun"),
        pytest.param(lambda line: f" 3: {line}", id="tagged-by-srun"),
        pytest.param(lambda line: f"\x1b[1m{line}\x1b[0m", id="coloured"),
        pytest.param(lambda line: line + "\r", id="line-ends-of-windows"),
        pytest.param(lambda line: f"> {line}", id="quoted-in-a-mail"),
    ],
)
@pytest.mark.parametrize(
    ("text", "code"),
    [
        pytest.param(ibstat("Down", "Polling", 10), "IB002", id="ibstat"),
        pytest.param(devinfo(1024, layer="Ethernet"), "IB003", id="ibv_devinfo"),
        pytest.param(links("NVIDIA B200", "+" * 17 + "-"), "NVL001", id="nvlink"),
        pytest.param(INFO + said("NET/IB : GPU Direct RDMA Disabled for HCA 0 'mlx5_0'"), "GDR002", id="nccl"),
        pytest.param(gid_table(3) + gid_table(5), "IB008", id="show_gids"),
    ],
)
def test_what_pasting_does_to_text_does_not_hide_a_fault(text: str, code: str, spoil: Any, tmp_path: Path):
    spoilt = "\n".join(spoil(line) for line in text.splitlines() if line.strip())

    assert code in {found for found, _ in alarms(findings_in(spoilt, tmp_path))}


def test_comment_lines_are_ignored(tmp_path: Path):
    assert alarms(findings_in("# " + warn("Failed to open libibverbs.so[.1]").replace("\n", "\n# "), tmp_path)) == set()


@pytest.mark.parametrize(
    "text",
    [
        pytest.param(links("NVIDIA H100 NVL", "++++--++++--++++--"), id="h100-nvl-uses-12-of-18"),
        pytest.param(links("NVIDIA A100-PCIE-40GB", "-" * 12, "-" * 12), id="pcie-card-without-a-bridge"),
        pytest.param(
            "Nov 29 09:00:00 gpu-07 nv-fabricmanager[8]: failed with error:WARNING Nothing to do "
            "[NV_WARN_NOTHING_TO_DO]\n"
            "Nov 29 09:00:00 gpu-07 systemd[1]: nvidia-fabricmanager.service: Failed with result 'exit-code'.\n",
            id="fabric-manager-without-nvswitch",
        ),
        pytest.param(HEALTHY_KERNEL.text, id="xids-of-applications"),
        pytest.param(RAS + RAS_MISMATCH, id="ras-mismatch-of-one-moment"),
        pytest.param(smi_q(PCIE.format(generation=1, width=8, state="P8", busy=0)), id="pcie-of-an-idle-gpu"),
        pytest.param(
            lspci(
                "SrcValid+ ReqRedir+ UpstreamFwd+", "00:03.0 Ethernet controller: Red Hat, Inc. Virtio network device\n"
            ),
            id="acs-in-a-virtual-machine",
        ),
        pytest.param(
            devinfo() + devinfo(1024, state="PORT_DOWN (1)").replace("port:\t1", "port:\t2"),
            id="mtu-of-a-port-that-is-down",
        ),
        pytest.param("/sys/class/infiniband/mlx5_3/ports/1/counters/link_downed:4\n", id="link-flapped-once"),
        pytest.param(
            links("NVIDIA GB200", "+" * 18)
            + smi_q(
                "    Fabric\n        State : Completed\n        Status : Success\n        CliqueId : 3\n"
                "        ClusterUUID : 5a1c0de0-0000-4000-8000-000000000001\n        Health\n"
                "            Summary : Healthy\n            Partition Assigned : True\n",
                "NVIDIA GB200",
            )
            + "Nov 29 09:00:00 tray-07 systemd[1]: nvidia-fabricmanager.service: Unit is inactive (dead).\n",
            id="fabric-manager-of-a-gb200-tray",
        ),
    ],
)
def test_what_users_complained_about_is_no_alarm(text: str, tmp_path: Path):
    assert alarms(findings_in(text, tmp_path)) == set()


def test_several_files_are_judged_together(tmp_path: Path):
    (tmp_path / "topo.txt").write_text(MESH)
    (tmp_path / "env.txt").write_text("export NCCL_GIN_TYPE=3\n")
    (tmp_path / "tc.txt").write_text("Global tclass=106\n")
    (tmp_path / "more.txt").write_text("NCCL_IB_TC=106\n")
    done = doctor(
        "check", "--from", tmp_path / "topo.txt", tmp_path / "env.txt", tmp_path / "tc.txt", "--format", "json"
    )
    alone = {finding["code"]: finding["verdict"] for finding in json.loads(done.stdout)["findings"]}
    done = doctor("--from", tmp_path, "--format", "json")
    together = {finding["code"]: finding["verdict"] for finding in json.loads(done.stdout)["findings"]}

    assert (alone["IB009"], together["IB009"]) == ("warning", "ok")
    assert alone["TOPO001"] == "ok"


def test_facts_documents_and_root_folders_are_read_too(tmp_path: Path):
    root = tmp_path / "gpu-07"
    (root / "etc").mkdir(parents=True)
    (root / "etc/nccl.conf").write_text("NCCL_IB_DISABLE=1\n")
    document = tmp_path / "facts.json"
    assert doctor("collect", "-o", document).exit_code == 0
    done = doctor("check", "--from", root, document, "--format", "json", "--select", "NCCL001")
    findings = json.loads(done.stdout)["findings"]

    assert len(findings) == 2
    assert (findings[0]["host"], findings[0]["verdict"]) == ("gpu-07", "warning")


def test_a_captured_folder_tells_its_host_and_nothing_of_this_machine(tmp_path: Path):
    (tmp_path / "capture/proc/sys/kernel").mkdir(parents=True)
    (tmp_path / "capture/proc/sys/kernel/hostname").write_text("gpu-09\n")
    (facts,) = read_recorded([tmp_path / "capture"]).documents

    assert facts.host == "gpu-09"
    assert {
        name
        for names in facts.sections.values()
        for name, fact in names.items()
        if fact.state == "value" and fact.value
    } == set()


def test_a_configuration_is_judged_with_recorded_facts(tmp_path: Path):
    config = tmp_path / "ep.toml"
    config.write_text("num_experts = 64\n")
    document = tmp_path / "facts.json"
    doctor("collect", "-o", document)
    for source in (document, Path(__file__).parent):
        done = doctor(
            "check", "--from", source, "--config", config, "--ranks", 7, "--select", "EP002", "--format", "json"
        )

        assert "error" in {finding["verdict"] for finding in json.loads(done.stdout)["findings"]}, source


def test_nothing_of_this_machine_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("NCCL_P2P_DISABLE", "1")
    file = tmp_path / "env.txt"
    file.write_text("NCCL_DEBUG=WARN\n")

    assert alarms(findings_in(file.read_text(), tmp_path)) == set()


def test_a_file_that_says_nothing_is_named_and_is_no_health(tmp_path: Path):
    file = tmp_path / "poem.txt"
    file.write_text("Roses are red\n")
    done = doctor("check", "--from", file, "--format", "json")

    assert done.exit_code == 3
    assert {finding["verdict"] for finding in json.loads(done.stdout)["findings"]} == {"not_run"}
    assert "poem.txt: nothing in it is known" in done.stderr


@pytest.mark.parametrize("name", ["absent.txt", "pipe"])
def test_a_path_that_cannot_be_read_is_wrong_input(name: str, tmp_path: Path):
    os.mkfifo(tmp_path / "pipe")

    assert doctor("check", "--from", tmp_path / name).exit_code == 2
    assert doctor("logs", tmp_path / name).exit_code == 2


def test_a_folder_without_any_file_is_wrong_input_for_logs(tmp_path: Path):
    (tmp_path / "inner").mkdir()
    done = doctor("logs", tmp_path)

    assert done.exit_code == 2
    assert f"{tmp_path}: no file lies right in this folder" in done.stderr


def test_a_link_out_of_a_captured_folder_is_not_followed(tmp_path: Path):
    (tmp_path / "secret").mkdir()
    (tmp_path / "secret/conf").write_text("NCCL_IB_DISABLE=1\n")
    root = tmp_path / "root"
    (root / "etc").mkdir(parents=True)
    (root / "etc/nccl.conf").symlink_to(tmp_path / "secret/conf")

    (facts,) = read_recorded([root]).documents

    assert facts.get("job.settings", list[Any]) in (None, [])


def test_the_matrix_of_a_machine_with_one_gpu_is_read(tmp_path: Path):
    text = "\tGPU0\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\nGPU0\t X \t0-15\t0\t\tN/A\n"
    (tmp_path / "topo.txt").write_text(text)

    (facts,) = read_recorded([tmp_path / "topo.txt"]).documents

    assert [matrix["paths"] for matrix in facts.read("gpus.topology", list[Any])] == [{"GPU0": {"GPU0": "X"}}]


def test_a_healthy_machine_of_two_h200_is_clean():
    (facts,) = read_recorded([H200X2]).documents
    verdicts = {finding.code: finding.verdict for finding in run_checks(all_checks(), facts)}

    assert {code for code, verdict in verdicts.items() if verdict == "ok"} >= {
        *("NVL001", "NVL002", "NVL003", "TOPO001", "TOPO002", "TOPO003", "TOPO004"),
        *("GPU004", "GPU005", "GPU006", "GPU007", "GPU008", "LIM001", "LIM002", "LIM003"),
    }
    assert set(verdicts.values()) == {"ok", "not_run"}


def test_facts_that_the_driver_told_of_two_h200_are_clean_and_whole():
    (facts,) = read_recorded([H200X2.parent / "h200x2_facts.json"]).documents
    findings = run_checks(all_checks(), facts)

    assert not alarms(findings)
    assert {finding.code for finding in findings if finding.verdict in ("ok", "info")} >= {
        *("NVL001", "NVL002", "NVL003", "NVL009", "NVL010", "TOPO001", "TOPO002", "TOPO003", "TOPO004", "TOPO007"),
        *("GPU001", "GPU002", "GPU003", "GPU004", "GPU005", "GPU006", "GPU007", "GPU008", "GPU009", "GPU014", "GPU015"),
    }
    assert not {name for own in facts.sections.values() for name, fact in own.items() if fact.state == "failed"}


def test_versions_of_a_log_and_of_proc_are_facts(tmp_path: Path):
    (tmp_path / "log").write_text(2 * INFO + "Linux version 6.8.0-40-generic (buildd@host)\n")
    (tmp_path / "proc.txt").write_text(
        "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.65.06\n"
        'EnableStreamMemOPs: 1\nRegistryDwords: "a=1"\n'
    )
    (facts,) = read_recorded([tmp_path]).documents

    assert [library["version"] for library in facts.read("libraries.nccl", list[dict[str, str]])] == ["2.28.7"]
    assert facts.read("host.kernel", str) == "6.8.0-40-generic"
    assert facts.read("gpus.driver_options", dict[str, str]) == {"EnableStreamMemOPs": "1", "RegistryDwords": "a=1"}
    assert "580.65.06" in facts.read("gpus.driver", str)


def test_gin_over_a_small_mtu_is_an_error_where_nccl_is_known_to_take_4096_for_granted(tmp_path: Path):
    text = devinfo(1024, layer="Ethernet") + "NCCL_GIN_TYPE=3\n"

    assert ("IB003", "warning") in alarms(findings_in(text, tmp_path))
    assert ("IB003", "error") in alarms(findings_in(text + INFO, tmp_path))


def test_secrets_of_a_recorded_environment_are_left_out(tmp_path: Path):
    text = "NCCL_PSK=hush\nNCCL_OFI_TOKEN=hush\nAWS_SECRET_ACCESS_KEY=hush\nNCCL_DEBUG=INFO\n"
    (tmp_path / "env").write_text(text)
    (facts,) = read_recorded([tmp_path / "env"]).documents

    assert b"hush" not in facts.to_json()
    assert b"NCCL_DEBUG" in facts.to_json()


def test_causes_come_before_effects_and_the_earliest_first(tmp_path: Path):
    log = tmp_path / "job.log"
    log.write_text(
        WATCHDOG.format(0, 1, 900)
        + warn("Attempt to use communicator before the previous operation returned ncclSuccess")
        + warn("NET/IB : Got completion with error 12, opcode 1, len 0, vendor err 129")
        + KERNEL
        + "kernel: NVRM: Xid (PCI:0000:5d:00): 79, pid=77, GPU has fallen off the bus.\n"
    )
    findings = [f for f in causes_first(read_logs([log]).documents[0]) if f.verdict in ("warning", "error")]

    assert [finding.code for finding in findings] == ["IB011", "GPU011", "NCCL015"]


def test_the_rank_that_most_wait_for_is_the_suspect(tmp_path: Path):
    for rank in range(6):
        if rank != 4:
            (tmp_path / f"rank{rank}.log").write_text(
                INFO + f"Warning: NCCL EP timeout for combine receive, rank {rank}, src_rank 4\n"
            )
    done = doctor("logs", tmp_path, "--format", "json", "--fail-on", "error")
    (suspect,) = [f for f in json.loads(done.stdout)["findings"] if f["code"] == "EP201"]

    assert done.exit_code == 1
    assert "suspect rank 4, for which 5 of 5 waiting ranks wait" in suspect["summary"]
    assert len(suspect["evidence"]) == 5


def test_a_line_across_two_chunks_is_found_and_numbered(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(scanning, "CHUNK_BYTES", 700)
    filler = "".join(said(f"Channel {number:02d}/0 : 0[0] -> 1[1] via P2P/CUMEM") for number in range(40))
    text = filler + warn("Failed to open libibverbs.so[.1]")

    (event,) = scan(io.BytesIO(text.encode()), "job.log")["nccl"]

    assert event.at == f"job.log:{len(text.splitlines())}"
    assert event.rank == 5


def test_a_line_without_end_is_cut(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(scanning, "CHUNK_BYTES", 1000)

    assert scan(io.BytesIO(b"NCCL WARN " + b"x" * 50_000), "job.log") == {"nccl": []}


def test_a_fault_that_repeats_is_told_by_its_first_lines():
    text = "".join(
        f"[1,{rank}]<stdout>:{warn('Accept failed: Too many open files').splitlines()[1].partition(':')[2]}\n"
        for rank in (0, 1)
        for _ in range(500)
    )
    events = scan(io.BytesIO(text.encode()), "job.log")["nccl"]

    assert [event.rank for event in events] == [0] * 4 + [1] * 4


@pytest.mark.parametrize("name", ["node-7", "{}"], ids=["alike", "all different"])
def test_a_flood_hides_neither_a_rare_line_nor_the_next_ranks_part(name: str):
    words = ("".join(letters) for letters in itertools.product("ghijklmnop", repeat=5))
    flood = "Warning: NCCL EP timeout for dispatch receive on {}, rank {}, src_rank 900\n"
    lines = [flood.format(name.format(next(words)), rank) for rank in range(5) for _ in range(20_000)]
    lines[90_000] = "kernel: NVRM: Xid (PCI:0000:5d:00): 79, pid=77, GPU has fallen off the bus.\n"

    events = scan(io.BytesIO("".join(lines).encode()), "job.log")

    assert [event.at for event in events["kernel"]] == ["job.log:90001"]
    assert {event.rank for event in events["expert_parallel"]} == set(range(5))


def test_a_cue_holds_no_number_since_lines_that_differ_in_numbers_are_looked_at_once():
    cues = [signature.cue for family in LOGS for signature in LOGS.get(family).signatures]

    assert [cue for cue in cues if re.search(r"\b\d|^[0-9a-f]+$", cue)] == []


def test_control_characters_of_a_log_do_not_reach_the_terminal(tmp_path: Path):
    log = tmp_path / "job.log"
    log.write_text(warn("Failed to open libibverbs.so[.1] \x07\x08\x1b]0;boo\x07"))
    done = doctor("logs", log)

    assert "libibverbs" in done.output
    assert not {"\x07", "\x08", "\x1b"} & set(done.output)


DAMAGE = st.sampled_from(["cut", "shuffled", "bytes", "doubled", "joined"])


def damaged(text: str, how: str, draw: Any) -> bytes:
    raw = text.encode()
    lines = text.splitlines(keepends=True)
    if how == "cut":
        start = draw.draw(st.integers(0, len(raw)))
        return raw[start : draw.draw(st.integers(start, len(raw)))]
    if how == "shuffled":
        return "".join(draw.draw(st.permutations(lines[:60]))).encode()
    if how == "bytes":
        spoilt = bytearray(raw)
        for _ in range(draw.draw(st.integers(1, 12))):
            spoilt[draw.draw(st.integers(0, len(spoilt) - 1))] = draw.draw(st.integers(0, 255))
        return bytes(spoilt)
    if how == "doubled":
        return raw * 3
    return raw.replace(b"\n", draw.draw(st.sampled_from([b" ", b"", b"\t", b"\0"])))


@settings(max_examples=250, deadline=None)
@given(text=st.sampled_from(TEXTS), how=DAMAGE, draw=st.data())
def test_no_damage_to_a_text_makes_a_parser_or_a_check_fail(
    text: str, how: str, draw: Any, tmp_path_factory: pytest.TempPathFactory
):
    findings = findings_in(damaged(text, how, draw), tmp_path_factory.mktemp("damaged"))

    assert [finding for finding in findings if "the check itself failed" in finding.summary] == []


WORDS = sorted({word for text in TEXTS for word in text.split()} | {"\n", "\n\t", ": ", "99999999999999999999", "-"})


@settings(max_examples=150, deadline=None)
@given(noise=st.binary(max_size=400) | st.text(max_size=300).map(str.encode))
def test_pure_noise_is_no_error(noise: bytes, tmp_path_factory: pytest.TempPathFactory):
    findings = findings_in(noise, tmp_path_factory.mktemp("noise"))

    assert [finding for finding in findings if finding.verdict == "error"] == []


@settings(max_examples=150, deadline=None)
@given(
    words=st.lists(
        st.sampled_from(WORDS) | st.sampled_from(["\n", "\n\t", ": ", "99999999999999999999", "-"]), max_size=60
    )
)
def test_words_of_the_tools_in_any_order_make_nothing_fail(words: list[str], tmp_path_factory: pytest.TempPathFactory):
    findings = findings_in(" ".join(words), tmp_path_factory.mktemp("words"))

    assert [finding for finding in findings if "the check itself failed" in finding.summary] == []


@pytest.mark.parametrize("parser", list(PARSERS))
@pytest.mark.parametrize(
    "unit", ["a: ", "1 2 ", "GPU ", "0,", "((", "enabled 0 ", "/sys/class/infiniband/a/", "{", "0:", "[["]
)
def test_no_parser_hangs_on_endless_repetition(parser: str, unit: str):
    lines = lines_of((unit * 3000 + "\n") * 20, "evil.txt")

    PARSERS.get(parser)(lines)


TABLE = """index, name, pstate, pcie.link.gen.current, pcie.link.gen.max, pcie.link.width.current, \
utilization.gpu [%], clocks_event_reasons.hw_thermal_slowdown, ecc.errors.uncorrected.volatile.total
0, NVIDIA H200, P0, 5, 5, 16, 98 %, Not Active, 0
1, NVIDIA H200, P0, {generation}, 5, 16, {busy} %, {hot}, {errors}
"""


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({}, set()),
        ({"generation": 1}, {("GPU006", "warning")}),
        ({"generation": 1, "busy": 0}, set()),
        ({"hot": "Active"}, {("GPU005", "warning")}),
        ({"errors": 2}, {("GPU007", "error")}),
        ({"errors": "[N/A]"}, set()),
    ],
)
def test_a_table_of_gpus_is_judged_as_the_long_query_is(
    values: dict[str, Any], expected: set[tuple[str, str]], tmp_path: Path
):
    text = TABLE.format(**{"generation": 5, "busy": 98, "hot": "Not Active", "errors": 0, **values})

    assert alarms(findings_in(text, tmp_path)) == expected


def test_rows_of_a_table_of_gpus_are_no_processes(tmp_path: Path):
    (tmp_path / "t.csv").write_text(
        "index, pcie.link.gen.current, name, memory.used [MiB]\n0, 5, NVIDIA H200, 16 MiB\n"
    )
    (facts,) = read_recorded([tmp_path / "t.csv"]).documents

    assert facts.fact("gpus.processes").state == "absent"
    assert facts.read("gpus.list", list[Any])[0]["name"] == "NVIDIA H200"


def test_memory_of_processes_in_a_table_of_their_own_is_still_read(tmp_path: Path):
    text = "gpu_uuid, pid, process_name, used_gpu_memory [MiB]\nGPU-1, 4711, python, 71000 MiB\n"
    (tmp_path / "apps.csv").write_text("index, name, pstate\n0, NVIDIA H200, P0\n" + text)
    (facts,) = read_recorded([tmp_path / "apps.csv"]).documents

    assert [process["pid"] for process in facts.read("gpus.processes", list[Any])] == [4711]


@pytest.mark.parametrize(
    ("text", "build"),
    [
        (
            "ompi:version:full:5.0.6\nmca:mpi:base:param:mpi_built_with_cuda_support:value:true\n",
            {"implementation": "Open MPI", "version": "5.0.6", "cuda_aware": True},
        ),
        (
            "Open MPI v4.1.4, package: Debian OpenMPI, ident: 4.1.4, repo rev: v4.1.4, May 26, 2022\n"
            "library: /usr/lib/libmpi.so.40\nmpi_built_with_cuda_support:value:false\n",
            {
                "implementation": "Open MPI",
                "version": "4.1.4",
                "path": "/usr/lib/libmpi.so.40",
                "cuda_aware": False,
            },
        ),
        (
            "MPICH Version:      4.2.3\nMPICH Device:       ch4:ofi\nMPICH configure:    --with-cuda=/usr/local/cuda\n",
            {"implementation": "MPICH", "version": "4.2.3", "cuda_aware": True},
        ),
        ("MPICH Version:      4.2.3\n", {"implementation": "MPICH", "version": "4.2.3"}),
    ],
)
def test_what_an_mpi_says_of_its_build_is_understood(text: str, build: dict[str, Any], tmp_path: Path):
    (tmp_path / "mpi.txt").write_text(text)
    (facts,) = read_recorded([tmp_path / "mpi.txt"]).documents

    assert facts.read("mpi.build", dict[str, Any]) == build


def test_a_query_of_many_gpus_keeps_them_apart(tmp_path: Path):
    text = smi_q("    Performance State : P0\n") + smi_q("    Performance State : P8\n").replace("19:00", "3B:00")
    (tmp_path / "q").write_text(text)
    (facts,) = read_recorded([tmp_path / "q"]).documents

    assert [gpu["gpu"] for gpu in facts.read("gpus.query", list[Any])] == ["00000000:19:00.0", "00000000:3B:00.0"]


def test_a_baseline_in_a_folder_of_records_is_passed_over(tmp_path: Path):
    (tmp_path / "node-1.json").write_bytes(Facts(host="node-1", sections={}).to_json())
    save = ["baseline", "save", str(tmp_path / "good.json"), "--from", str(tmp_path / "node-1.json")]
    assert CliRunner().invoke(main, save).exit_code == 0

    read = read_recorded([tmp_path])

    assert [facts.host for facts in read.documents] == ["node-1"]
    assert read.unknown == [str(tmp_path / "good.json")]


@pytest.mark.parametrize("words", ["GPU", "device.", "Unable to get GPU", "failed to query "])
def test_lines_of_words_without_end_are_read_in_linear_time(words: str) -> None:
    lines = lines_of((words * 4000)[:3990] + "\n", "f") * 20

    start = time.process_time()
    for parser in PARSERS:
        PARSERS.get(parser)(lines)
    assert time.process_time() - start < 2


def piped(text: bytes, *arguments: object) -> list[dict[str, Any]]:
    """What the doctor finds in a real pipe."""
    command = [sys.executable, "-m", "ncclep_bench.doctor_cli", *map(str, arguments), "--format", "json"]
    done = subprocess.run(command, input=text, capture_output=True, check=False)
    assert done.returncode in (0, 1), done.stderr
    found: list[dict[str, Any]] = json.loads(done.stdout)["findings"]
    return [finding for finding in found if finding["verdict"] in ("info", "warning", "error")]


TIMEOUT = "[1,{0}]<stdout>: Warning: NCCL EP timeout for combine receive, rank {0}, src_rank 4\n"


def test_a_log_in_a_pipe_and_logs_in_files_are_judged_together(tmp_path: Path):
    for rank in (1, 2):
        (tmp_path / f"{rank}.log").write_text(TIMEOUT.format(rank))
    (suspect,) = piped(TIMEOUT.format(3).encode(), "logs", tmp_path / "1.log", "-", tmp_path / "2.log")

    assert "rank 4" in suspect["summary"]
    assert "(standard input):1: Warning: NCCL EP timeout" in " ".join(suspect["evidence"])
    assert all(f"{tmp_path / f'{rank}.log'}:1: " in " ".join(suspect["evidence"]) for rank in (1, 2))


def test_output_and_facts_in_a_pipe_are_recognised_by_what_they_say(tmp_path: Path):
    text = RECORDED_TRIGGERS["IB005"][0].text.encode()
    (tmp_path / "recorded.txt").write_bytes(text)
    from_file = piped(b"", "check", "--from", tmp_path / "recorded.txt")
    from_pipe = piped(text, "check", "--from", "-")
    facts = Facts(
        host="gpu-07", sections={"limits": {"memlock": Fact("value", "ulimit -a", {"soft": 65536, "hard": 65536})}}
    )

    assert [f["code"] for f in from_pipe] == [f["code"] for f in from_file]
    assert [f["summary"] for f in from_pipe] == [f["summary"] for f in from_file]
    assert "gpu-07" in [f["host"] for f in piped(facts.to_json(), "check", "--from", "-")]


def test_a_log_in_a_pipe_is_longer_than_the_memory_that_it_takes():
    line = b"node1:4242:4311 [3] NCCL INFO Channel 00/16 : 0 1 2 3 4 5 6 7\n"
    part = line * ((4 << 20) // len(line))
    command = [sys.executable, "-m", "ncclep_bench.doctor_cli", "logs", "-", "--format", "json"]
    doctor = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert doctor.stdin is not None
    for _ in range(64):
        doctor.stdin.write(part)
    (most,) = re.findall(r"VmHWM:\s+(\d+) kB", Path(f"/proc/{doctor.pid}/status").read_text())
    told, _ = doctor.communicate(TIMEOUT.format(5).encode())

    assert "src_rank 4" in told.decode()
    assert int(most) * 1024 < 64 * len(part) / 2


def test_a_file_with_the_name_of_standard_input_in_a_folder_is_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "-").write_text(TIMEOUT.format(1))
    monkeypatch.chdir(tmp_path)

    assert "src_rank 4" in doctor("logs", ".").output
