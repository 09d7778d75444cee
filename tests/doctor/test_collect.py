"""Facts are read from a root folder and variables, say where they came from, and why when there is none."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ncclep_bench.doctor.baseline import KINDS
from ncclep_bench.doctor.collect import FACTS, Machine, collect
from ncclep_bench.doctor.hang import OWN_FACTS
from ncclep_bench.doctor.records import Acs, NetDevice, Route
from ncclep_bench.doctor.run import all_checks, chosen_checks, run_checks
from ncclep_bench.doctor.settings import Setting, Settings, pattern_of, settings_of
from ncclep_bench.errors import InputError
from ncclep_bench.model.facts import SCHEMA, Fact, Facts, facts_from_json
from tests.doctor.rank_facts import RANKS_TRIGGERS
from tests.doctor.recorded_texts import RECORDED_TRIGGERS


def machine_with(folder: Path, files: dict[str, str] | None = None, env: dict[str, str] | None = None) -> Machine:
    for name, text in (files or {}).items():
        path = folder / name.lstrip("/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return Machine(folder, env or {}, "/home/somebody")


def test_this_machine_can_be_read():
    facts = collect(Machine())

    assert facts.read("host.cpus", int) == len(os.sched_getaffinity(0))
    assert facts.read("host.shared_memory", dict[str, int])["total_bytes"] > 0
    assert facts.read("libraries.packages", dict[str, str])["python"] == sys.version.split()[0]
    assert {name: facts.fact(name).reason for name in FACTS if facts.fact(name).state == "failed"} == {}


def test_limits_are_those_of_the_shell_that_started_it():
    code = (
        "from ncclep_bench.doctor.collect import Machine, collect;"
        "print(collect(Machine()).read('limits.nofile', dict)['soft'])"
    )
    done = subprocess.run(
        ["sh", "-c", f'ulimit -S -n 321; exec {sys.executable} -c "{code}"'], capture_output=True, text=True, check=True
    )

    assert done.stdout.strip() == "321"


def test_settings_come_in_the_order_in_which_nccl_heeds_them(tmp_path: Path):
    files = {
        "/home/somebody/.nccl.conf": "NCCL_DEBUG=WARN\nNCCL_IB_TIMEOUT=20\n#NCCL_ALGO=Ring\nno assignment\n",
        "/etc/nccl.conf": "NCCL_IB_TIMEOUT=22\nNCCL_SOCKET_IFNAME==eth0\n",
    }
    settings = settings_of(
        collect(machine_with(tmp_path, files, {"NCCL_DEBUG": "INFO", "HOME": "/root", "SECRET": "x"}))
    )

    assert settings.assignments == [
        Setting("NCCL_DEBUG", "INFO", "environment"),
        Setting("NCCL_DEBUG", "WARN", "/home/somebody/.nccl.conf:1"),
        Setting("NCCL_IB_TIMEOUT", "20", "/home/somebody/.nccl.conf:2"),
        Setting("NCCL_IB_TIMEOUT", "22", "/etc/nccl.conf:1"),
        Setting("NCCL_SOCKET_IFNAME", "=eth0", "/etc/nccl.conf:2"),
    ]
    assert settings.effective["NCCL_IB_TIMEOUT"].value == "20"


def test_nccl_conf_file_takes_the_place_of_the_file_at_home(tmp_path: Path):
    files = {"/home/somebody/.nccl.conf": "NCCL_DEBUG=WARN\n", "/opt/site.conf": "NCCL_DEBUG=TRACE\n"}
    settings = settings_of(collect(machine_with(tmp_path, files, {"NCCL_CONF_FILE": "/opt/site.conf"})))

    assert str(settings.effective["NCCL_DEBUG"]) == "NCCL_DEBUG=TRACE (/opt/site.conf:1)"


def test_arguments_of_the_first_program_are_no_fact(tmp_path: Path):
    cmdline = {"/proc/cmdline": "root=/dev/sda1 iommu=pt -- --token 4711\n"}

    facts = collect(machine_with(tmp_path, cmdline))

    assert facts.read("host.command_line", str) == "root=/dev/sda1 iommu=pt"


def test_a_key_never_gets_into_a_facts_document(tmp_path: Path):
    machine = machine_with(
        tmp_path, {"/etc/nccl.conf": "NCCL_PSK=sesame-in-a-file\n"}, {"NCCL_PSK": "sesame-in-the-open"}
    )

    assert b"sesame" not in collect(machine).to_json()


@pytest.mark.parametrize(
    ("value", "number"),
    [("1", 1), ("0", 0), ("0x16", 22), ("010", 8), ("-1", -1), (" 2", 2), ("3abc", 3), ("true", 0), ("", 0), ("09", 0)],
)
def test_numbers_are_read_as_strtoll_reads_them(value: str, number: int):
    assert Setting("NCCL_X", value, "environment").number == number


def test_an_empty_value_counts_as_unset():
    settings = Settings(
        [Setting("NCCL_IB_DISABLE", "", "environment"), Setting("NCCL_IB_DISABLE", "1", "/etc/nccl.conf:1")]
    )

    assert settings.on("NCCL_IB_DISABLE") is None
    assert settings.off("NCCL_IB_DISABLE") is None


@pytest.mark.parametrize(
    ("text", "picked"),
    [("eth1", ["eth1", "eth10"]), ("=eth1", ["eth1"]), ("eth1:1", ["eth1", "eth10"]), ("^=eth1", ["eth1"])],
)
def test_names_match_by_prefix_unless_told_otherwise(text: str, picked: list[str]):
    pattern = pattern_of(text)

    assert pattern.matches(pattern.names[0], ["eth0", "eth1", "eth10"]) == picked
    assert pattern.exclude == text.startswith("^")


@pytest.mark.parametrize(
    ("files", "cpus"),
    [
        ({"/sys/fs/cgroup/cpu.max": "150000 100000\n"}, 1.5),
        ({"/sys/fs/cgroup/cpu/cpu.cfs_quota_us": "50000\n", "/sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n"}, 0.5),
        ({"/sys/fs/cgroup/cpu.max": "max 100000\n"}, None),
        ({"/sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1\n", "/sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n"}, None),
        ({}, None),
    ],
)
def test_a_cpu_quota_is_read_from_either_version_of_cgroups(files: dict[str, str], cpus: float | None, tmp_path: Path):
    assert collect(machine_with(tmp_path, files)).get("host.cpu_quota", float) == cpus


def test_memory_is_the_smaller_of_machine_and_control_group(tmp_path: Path):
    files = {"/proc/meminfo": "MemTotal:       1024 kB\n", "/sys/fs/cgroup/memory.max": "4096\n"}
    facts = collect(machine_with(tmp_path, files))

    assert (facts.read("host.memory_bytes", int), facts.fact("host.memory_bytes").source) == (
        4096,
        "/sys/fs/cgroup/memory.max",
    )


def test_the_version_of_nccl_is_read_from_the_file_and_links_count_once(tmp_path: Path):
    machine = machine_with(
        tmp_path,
        {
            "/usr/local/lib/libnccl.so.2.27.3": "\0ELF\0 NCCL version 2.27.3+cuda12.9\0",
            "/usr/lib64/libnccl.so.2": "stripped",
            "/usr/lib64/libnccl.so.2.empty": "",
        },
    )
    (tmp_path / "usr/local/lib/libnccl.so.2").symlink_to("libnccl.so.2.27.3")
    libraries = collect(machine).read("libraries.nccl", list[dict[str, str | None]])

    assert sorted(str(library["version"]) for library in libraries) == ["2.27.3", "None", "None"]


def test_folders_that_the_loader_is_told_of_are_searched_too(tmp_path: Path):
    machine = machine_with(
        tmp_path,
        {
            "/etc/ld.so.conf.d/ofi.conf": "# moved\n/opt/amazon/ofi-nccl/lib\n",
            "/etc/ld.so.conf.d/README": "/opt/elsewhere\n",
            "/opt/amazon/ofi-nccl/lib/libnccl-net-ofi.so": "",
            "/opt/elsewhere/libnccl-net.so": "",
            "/usr/lib64/libnvshmem_host.so.3.4.5": "",
        },
    )
    facts = collect(machine)

    assert facts.read("libraries.net_plugins", list[str]) == ["/opt/amazon/ofi-nccl/lib/libnccl-net-ofi.so"]
    assert facts.fact("libraries.nvshmem").value[0]["version"] == "3.4.5"


def test_libraries_that_a_process_has_loaded_are_found_in_it(tmp_path: Path):
    library = tmp_path / "libnccl.so.2"
    library.write_bytes(b"\0NCCL version 2.27.3+cuda12.9\0" + bytes(5000))
    code = (
        "import mmap, sys, msgspec;"
        f"file = open({str(library)!r}, 'rb');"
        "kept = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ);"
        "from ncclep_bench.doctor.collect import Machine, collect;"
        "sys.stdout.buffer.write(msgspec.json.encode(collect(Machine()).read('libraries.mapped', list)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    (found,) = json.loads(done.stdout)
    assert (found["library"], found["path"], found["version"]) == ("libnccl.so", str(library), "2.27.3")


@pytest.mark.mpi
def test_the_mpi_that_a_rank_would_load_tells_its_build():
    build = collect(Machine()).read("mpi.build", dict[str, Any])

    assert build["implementation"] in ("MPICH", "Open MPI")
    assert build["version"][0].isdigit()
    assert Path(build["path"]).is_file()
    assert isinstance(build["cuda_aware"], bool)


ROUTES = (
    "Iface\tDestination\tGateway\tFlags\tRefCnt\tUse\tMetric\tMask\tMTU\tWindow\tIRTT\n"
    "eth0\t00000000\t010200C0\t0003\t0\t0\t0\t00000000\t0\t0\t0\n"
    "eth2\t0000010A\t00000000\t0001\t0\t0\t0\t0000FFFF\t0\t0\t0\n"
    "eth3\t0000020A\t00000000\t0000\t0\t0\t0\t0000FFFF\t0\t0\t0\n"
)


def test_without_ip_the_interfaces_and_their_networks_are_read_from_files(tmp_path: Path):
    files = {
        "/proc/net/route": ROUTES,
        "/sys/class/net/eth2/mtu": "9000\n",
        "/sys/class/net/eth2/flags": "0x1003\n",
        "/sys/class/net/eth3/mtu": "1500\n",
        "/sys/class/net/eth3/flags": "0x1002\n",
    }
    facts = collect(machine_with(tmp_path, files))
    devices = facts.read("network.devices", list[NetDevice])

    assert [(d.name, d.mtu_bytes, d.up, d.networks) for d in devices] == [
        ("eth2", 9000, True, ["10.1.0.0/16"]),
        ("eth3", 1500, False, []),
    ]
    routes = facts.read("network.routes", list[Route])
    assert [(r.device, r.network, r.gateway) for r in routes] == [
        ("eth0", "0.0.0.0/0", "192.0.2.1"),
        ("eth2", "10.1.0.0/16", ""),
    ]


def bridge(folder: Path, address: str, register: int | None, length: int = 4096) -> None:
    """A PCI bridge whose configuration space has three extended capabilities, the last of them access control."""
    device = folder / "sys/bus/pci/devices" / address
    device.mkdir(parents=True)
    (device / "class").write_text("0x060400\n")
    (device / "vendor").write_text("0x1000\n")
    (device / "device").write_text("0xc030\n")
    config = bytearray(4096)
    for offset, header in ((0x100, 0x0001 | 1 << 16 | 0x148 << 20), (0x148, 0x0019 | 1 << 16 | 0x1A0 << 20)):
        config[offset : offset + 4] = header.to_bytes(4, "little")
    config[0x1A0:0x1A4] = ((0x000D if register is not None else 0x0017) | 1 << 16).to_bytes(4, "little")
    config[0x1A6:0x1A8] = (register or 0).to_bytes(2, "little")
    (device / "config").write_bytes(config[:length])


@pytest.mark.parametrize(("cpu", "verdict"), [("flags : fpu vme", "warning"), ("flags : fpu hypervisor", "info")])
def test_access_control_is_read_from_the_configuration_of_bridges(cpu: str, verdict: str, tmp_path: Path):
    bridge(tmp_path, "0000:16:01.0", 0b11101)
    bridge(tmp_path, "0000:16:02.0", 0)
    bridge(tmp_path, "0000:16:03.0", None)
    facts = collect(machine_with(tmp_path, {"/proc/cpuinfo": cpu + "\n"}))
    bridges = facts.read("pci.acs", list[Acs])

    assert [(acs.device, acs.on) for acs in bridges] == [
        ("0000:16:01.0", ["SrcValid", "ReqRedir", "CmpltRedir", "UpstreamFwd"]),
        ("0000:16:02.0", []),
    ]
    (finding,) = run_checks(chosen_checks(["TOPO005"]), facts)
    assert finding.verdict == verdict


def test_a_configuration_that_ends_early_says_what_root_would_add(tmp_path: Path):
    bridge(tmp_path, "0000:16:01.0", 0b11101, length=64)
    fact = collect(machine_with(tmp_path)).fact("pci.acs")

    assert fact.state == "not_permitted"
    assert "root may read" in fact.reason


def test_a_list_of_capabilities_that_leads_in_a_circle_ends(tmp_path: Path):
    bridge(tmp_path, "0000:16:01.0", None)
    config = tmp_path / "sys/bus/pci/devices/0000:16:01.0/config"
    data = bytearray(config.read_bytes())
    data[0x1A0:0x1A4] = (0x0017 | 1 << 16 | 0x100 << 20).to_bytes(4, "little")
    config.write_bytes(data)

    assert collect(machine_with(tmp_path)).fact("pci.acs").state == "absent"


def test_a_captured_folder_tells_limits_nodes_boards_and_adapters(tmp_path: Path):
    files = {
        "/proc/self/limits": "Limit  Soft Limit  Hard Limit  Units\nMax processes   95832   unlimited   processes\n",
        "/proc/self/status": "CapEff:\t0000000000804000\n",
        "/proc/self/cgroup": "0::/slurm/job_7\n",
        "/sys/devices/system/node/node1/cpulist": "32-63\n",
        "/sys/devices/system/node/node1/meminfo": "Node 1 MemTotal:       1024 kB\n",
        "/proc/driver/nvidia/gpus/0000:19:00.0/information": "Model: \t NVIDIA H200\nGPU UUID: \t GPU-1\n",
        "/sys/class/infiniband/mlx5_0/tc/1/traffic_class": "Global tclass=106\n",
        "/proc/devices": "Character devices:\n234 nvidia-caps-imex-channels\n",
    }
    facts = collect(machine_with(tmp_path, files))

    assert facts.read("limits.all", dict[str, Any]) == {"processes": {"soft": 95832, "hard": None}}
    assert facts.read("host.capabilities", list[str]) == ["ipc_lock", "sys_nice"]
    assert facts.read("host.control_groups", dict[str, str]) == {"": "/slurm/job_7"}
    assert facts.fact("host.numa_nodes").value == [{"node": 1, "cpus": "32-63", "memory_bytes": 1 << 20}]
    assert facts.fact("gpus.boards").value[0]["model"] == "NVIDIA H200"
    assert facts.fact("rdma.traffic_class").value[0]["value"] == 106
    assert facts.read("host.imex_driver", str) == "234"


def test_a_missing_class_folder_means_no_adapter_and_a_missing_sysfs_means_unknown(tmp_path: Path):
    assert collect(machine_with(tmp_path)).fact("host.rdma_devices").state == "absent"
    (tmp_path / "sys/class").mkdir(parents=True)
    assert collect(machine_with(tmp_path)).read("host.rdma_devices", list[str]) == []


def test_what_may_not_be_read_is_said_to_be_not_permitted(tmp_path: Path):
    machine = machine_with(tmp_path, {"/proc/self/limits": "secret"})
    (tmp_path / "proc/self/limits").chmod(0)
    tmp_path.chmod(0o755)
    user = os.geteuid()
    if user == 0:
        for folder in tmp_path.parents:
            if folder.owner() == "root" and not folder.stat().st_mode & 1:
                folder.chmod(folder.stat().st_mode | 0o011)
        os.seteuid(65534)
    try:
        fact = collect(machine).fact("limits.nofile")
    finally:
        os.seteuid(user)

    assert (fact.state, fact.source) == ("not_permitted", str(tmp_path / "proc/self/limits"))


def test_a_source_that_makes_no_sense_is_a_failed_fact_and_the_rest_is_read(tmp_path: Path):
    files = {"/sys/fs/cgroup/cpu.max": "rubbish rubbish\n", "/proc/self/status": "Cpus_allowed_list:\t0-3\n"}
    facts = collect(machine_with(tmp_path, files))

    assert facts.fact("host.cpu_quota").state == "failed"
    assert "rubbish" in facts.fact("host.cpu_quota").reason
    assert facts.read("host.cpus", int) == 4


@pytest.mark.parametrize("launcher", ["OMPI_COMM_WORLD", "PMI"])
def test_rank_and_ranks_come_from_the_launcher(launcher: str, tmp_path: Path):
    facts = collect(machine_with(tmp_path, env={f"{launcher}_SIZE": "16", f"{launcher}_RANK": "3"}))

    assert (facts.rank, facts.read("ep.ranks", int)) == (3, 16)


def test_every_need_of_a_check_is_a_fact_that_is_collected_or_recorded(tmp_path: Path):
    recorded = {
        f"{section}.{name}"
        for fixtures in (*RECORDED_TRIGGERS.values(), *RANKS_TRIGGERS.values())
        for section, facts in fixtures[0].facts(tmp_path).sections.items()
        for name in facts
    }

    of_programs = {"ep.tensors", "ep.graph"}
    of_commands = {*OWN_FACTS, *(f"drift.{kind}" for kind in KINDS)}

    assert {name for check in all_checks() for name in check.needs} <= set(FACTS) | recorded | of_programs | of_commands


def test_a_facts_document_survives_json(tmp_path: Path):
    facts = collect(machine_with(tmp_path, {"/proc/self/limits": "x"}, {"NCCL_DEBUG": "INFO"}))

    assert facts_from_json(facts.to_json(), file="facts.json") == facts


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"", "not a facts document"),
        (b"[1, 2]", "not a facts document"),
        (b'{"schema": 1, "host": "a"}', "sections"),
        (b'{"schema": 1, "host": "a", "sections": {"x": {"y": {"state": "well", "source": ""}}}}', "well"),
        (b"\xff\xfe", "not a facts document"),
        (b"[" * 100_000, "not a facts document"),
        (b'{"schema": 99, "host": "a", "sections": {}}', f"schema version 99, this is version {SCHEMA}"),
    ],
)
def test_what_is_no_facts_document_is_refused(data: bytes, said: str):
    with pytest.raises(InputError, match=rf"f\.json: .*{said}"):
        facts_from_json(data, file="f.json")


def test_reading_a_fact_without_a_value_says_why():
    facts = Facts(host="a", sections={"x": {"y": Fact("not_permitted", "/etc/y", reason="needs root")}})

    assert facts.get("x.y", int) is None
    with pytest.raises(InputError, match=r"x\.y: not permitted: needs root \(/etc/y\)"):
        facts.read("x.y", int)
    with pytest.raises(InputError, match=r"a\.b: absent: was not collected"):
        facts.read("a.b", int)
