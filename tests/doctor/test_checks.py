"""Every check is triggered by one fixture and left in peace by another, and says why when it cannot run."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ncclep_bench.doctor.collect import Machine, collect
from ncclep_bench.doctor.contract import LEVELS, Check, Finding, Trouble
from ncclep_bench.doctor.nccl_variables import GONE, KNOWN
from ncclep_bench.doctor.run import all_checks, chosen_checks, rule_named, run_checks, worst
from ncclep_bench.errors import InputError
from ncclep_bench.model.ep_config import EpConfig
from ncclep_bench.model.facts import Fact, Facts
from tests.doctor.rank_facts import RANKS_PEACEFUL, RANKS_TRIGGERS, Ranks
from tests.doctor.recorded_texts import RECORDED_TRIGGERS, Recorded, peaceful

LIMITS = """\
Limit                     Soft Limit           Hard Limit           Units
Max stack size            {stack:<20} unlimited            bytes
Max open files            {nofile:<20} 1048576              files
Max locked memory         {memlock:<20} unlimited            bytes
"""
HEALTHY_FILES = {
    "/proc/self/limits": LIMITS.format(stack=8388608, nofile=65536, memlock="unlimited"),
    "/proc/self/status": "Name:\tpython\nCpus_allowed_list:\t0-15,32-47\n",
    "/proc/meminfo": "MemTotal:       131072000 kB\n",
    "/sys/class/net/eth0": "",
    "/sys/class/net/eth1": "",
    "/sys/class/net/eth10": "",
    "/sys/class/net/lo": "",
    "/sys/class/infiniband/mlx5_0": "",
    "/sys/class/infiniband/mlx5_1": "",
    "/sys/class/infiniband/mlx5_10": "",
    "/usr/local/lib/libnccl.so.2.30.7": "…NCCL version 2.30.7+cuda13.0…",
    "/usr/lib64/libnvidia-ml.so.580.65.06": "",
    "/usr/local/lib/libnccl-net.so": "",
    "/dev/infiniband/uverbs0": "",
    "/dev/shm/nccl-Ab12Cd": "",
    "/etc/systemd/logind.conf": "[Login]\nRemoveIPC=no\n",
    "/proc/cmdline": "BOOT_IMAGE=/vmlinuz root=/dev/sda1 ro amd_iommu=on iommu=pt\n",
    "/proc/version": "Linux version 5.15.0-119-generic (buildd@host) (gcc 11.4.0) #129-Ubuntu SMP\n",
    "/proc/modules": "nvidia_peermem 16384 0 - Live 0x0\nnvidia 56 9 nvidia_uvm,nvidia_peermem, Live 0x0\n",
    "/proc/driver/nvidia/version": "NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.65.06  Sun Jul 20 2026\n",
    "/proc/driver/nvidia/params": 'EnableStreamMemOPs: 1\nRegistryDwords: "PeerMappingOverride=1;"\n',
    "/sys/bus/pci/devices/0000:19:00.0/vendor": "0x10de\n",
    "/sys/bus/pci/devices/0000:19:00.0/class": "0x030200\n",
    "/proc/net/route": "Iface\tDestination\tGateway \tFlags\tRefCnt\tUse\tMetric\tMask\tMTU\tWindow\tIRTT\n",
    "/proc/sys/net/ipv4/conf/all/arp_ignore": "0\n",
    "/proc/sys/net/ipv4/conf/all/arp_announce": "0\n",
    "/opt/topo.xml": '<pci busid="0000:19:00.0" class="0x030200"/>',
}
CONFIG = 'num_experts = 64\ntop_k = 8\nhidden = 7168\ndtype = "bfloat16"\n'
H200 = {"uuid": "GPU-0", "name": "NVIDIA H200", "compute_capability": "9.0", "driver": "580.65.06"}
GPUS = [{"index": str(index), **H200} for index in range(4)]
GIB = 1 << 30
SITE = "/opt/venv/lib/python3.12/site-packages"
CONF = "/proc/sys/net/ipv4/conf/all"
ONE_SUBNET = [
    {"at": "ip addr:1", "name": name, "mtu_bytes": 9000, "up": True, "networks": [f"10.1.0.{n}/16"]}
    for n, name in enumerate(("eth2", "eth3"))
]


def mapped(pid: int, version: str, library: str = "libnccl.so") -> dict[str, Any]:
    return {"pid": pid, "library": library, "path": f"/opt/{version}/{library}.2", "version": version}


class Fixture(NamedTuple):
    """A machine: what differs from a healthy one, and a pattern that summary or evidence must show."""

    shows: str = ""
    env: Mapping[str, str] = {}
    files: Mapping[str, str] = {}
    config: str = ""
    ranks: int = 8
    values: Mapping[str, Any] = {}

    def facts(self, folder: Path) -> Facts:
        for name, text in {**HEALTHY_FILES, **self.files}.items():
            path = folder / "root" / name.lstrip("/")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        config = folder / "ep.toml"
        config.write_text(CONFIG + self.config if not self.config.startswith("num_experts") else self.config)
        env = {"NCCL_TOPO_FILE": "/opt/topo.xml", **self.env}
        machine = Machine(folder / "root", env, "/home/somebody", config, self.ranks)
        values = {
            "gpus.list": GPUS,
            "host.shared_memory": {"total_bytes": 64 * GIB, "free_bytes": 60 * GIB},
            "libraries.packages": {"python": "3.12.1", "nvidia-nccl-cu13": "2.28.7"},
            "network.devices": [{"at": "ip addr:1", "name": "eth2", "mtu_bytes": 9000, "up": True}],
            "gpus.cuda": "12.8",
            # A compiler and a framework of different minor versions are no fault.
            "libraries.cuda": {"/usr/local/cuda/version.json": "12.4.1", "nvidia-cuda-runtime-cu12": "12.9.79"},
            "libraries.mapped": [mapped(4711, "2.30.7")],
            "host.numa_policy": {"allowed": True},
            "mpi.build": {"implementation": "Open MPI", "version": "5.0.6", "cuda_aware": True},
            "ep.tensors": [
                {"name": "topk_idx", "dtype": "int64"},
                {"name": "x_scales", "dtype": "float32", "power_of_two": True},
            ],
            "ep.graph": {"key": "decode-64", "padded_tokens": 64, "rdma_buffer_size": 1 << 30},
            **self.values,
        }
        return with_values(collect(machine), values)


def with_values(facts: Facts, values: Mapping[str, Any]) -> Facts:
    """`facts` with some values put in; None takes the fact away."""
    sections = {section: dict(names) for section, names in facts.sections.items()}
    for name, value in values.items():
        section, _, key = name.partition(".")
        sections.setdefault(section, {})[key] = (
            Fact("absent", "fixture", reason="taken away") if value is None else Fact("value", "fixture", value)
        )
    return msgspec.structs.replace(facts, sections=sections)


def config(**fields: Any) -> str:
    return "".join(f"{key} = {value!r}\n".replace("'", '"') for key, value in {"num_experts": 64, **fields}.items())


def rank_process(rank: int, **fields: Any) -> dict[str, Any]:
    """A rank that sleeps in MPI, as two looks show it."""
    process = {"at": f"/proc/{900 + rank}", "pid": 900 + rank, "rank": rank, "ranks": 3, "local_ranks": 3}
    return {**process, "states": ["S", "S"], "cpu_s": 0.1, "meetings": 0, **fields}


def hang(*processes: dict[str, Any], **values: Any) -> dict[str, Any]:
    """The facts of `ncclep-doctor hang`."""
    return {
        "hang.sources": ["job.processes"],
        "hang.window_s": 2.0,
        "job.processes": list(processes),
        "job.meetings": [process for process in processes if process["meetings"] is not None],
        **values,
    }


WAITS = {"waits_in": "combine", "waits_for": [1], "waits_s": 9.5}
STANDING = hang(rank_process(0, **WAITS), rank_process(1, wchan="hrtimer_nanosleep"), rank_process(2, **WAITS))
STOPPED = rank_process(1, states=["T", "T"])
MOVING = hang(*(rank_process(rank, meetings=40) for rank in range(3)))


def stacks(*places: str) -> dict[str, Any]:
    told = [{"at": "py-spy dump", "rank": rank, "frames": [f"{place} (job.py:9)"]} for rank, place in enumerate(places)]
    return {"job.stacks": told}


HANG_TRIGGERS: dict[str, list[Fixture]] = {
    "EP401": [
        Fixture("rank 1 .pid 901. is elsewhere .*; ranks 0, 2 wait for it in combine since 9.5 s", values=STANDING),
        Fixture("rank 1 .pid 901. died", values=hang(*(rank_process(r, states=["S", "SXS"[r]]) for r in range(3)))),
        Fixture("rank 2 has no process any more", values=hang(rank_process(0), rank_process(1))),
        Fixture("rank 0, 2 has no process any more", values=hang(rank_process(1))),
        Fixture(
            "held by a debugger", values=hang(rank_process(0, states=["t", "t"]), rank_process(1), rank_process(2))
        ),
        Fixture(
            "kernel .state D, nfs_wait",
            values=hang(
                rank_process(0, states=["D", "D"], wchan="nfs_wait", cpu_s=0.0), rank_process(1), rank_process(2)
            ),
        ),
        Fixture(
            "rank 1 .pid 901. is stopped", values=hang(*(rank_process(r, states=["STS"[r]] * 2) for r in range(3)))
        ),
        Fixture(
            "rank 1 .pid 901. alone sleeps in futex_wait",
            values=hang(
                rank_process(1, cpu_s=0.0, wchan="futex_wait", meetings=None),
                *(rank_process(r, states=["R", "R"], cpu_s=1.9, meetings=None) for r in (0, 2)),
            ),
        ),
        Fixture("nothing shows whether", values=hang(*(rank_process(r, meetings=None) for r in range(3)))),
    ],
    "EP402": [
        # The first cause is the answer's.
        Fixture(
            "rank 1 .pid 901. is stopped", values=hang(rank_process(0, states=["S", "Z"]), STOPPED, rank_process(2))
        ),
        Fixture(
            "rank 0 .pid 900. is held by a debugger",
            values=hang(rank_process(0, states=["t", "t"]), STOPPED, rank_process(2)),
        ),
        Fixture(
            "rank 0 .pid 900. waits in the kernel .state D, nfs_wait",
            values=hang(rank_process(0, states=["D", "D"], cpu_s=0.0, wchan="nfs_wait"), STOPPED, rank_process(2)),
        ),
        Fixture("rank 0 .pid 900. died", values=hang(rank_process(0, states=["S", "Z"]), rank_process(2))),
    ],
    "EP403": [
        Fixture(
            "rank 2 .pid 902. is elsewhere .*; 0 wait for it",
            values=hang(rank_process(0, **{**WAITS, "waits_for": [1, 2]}), rank_process(1), rank_process(2)),
        ),
        Fixture(
            "rank 1 has no process here",
            values=hang(rank_process(0, ranks=16, states=["T", "T"]), rank_process(2, **WAITS, ranks=16)),
        ),
    ],
    "EP404": [Fixture("rank 2 alone is in sleep", values=stacks("wait", "wait", "sleep", "wait"))],
}


def drift(kind: str, item: str, *healthy: str, now: str | None, machines: int = 1) -> dict[str, Any]:
    """What `ncclep-doctor baseline compare` has found."""
    return {f"drift.{kind}": [{"at": item, "item": item, "healthy": list(healthy), "now": now, "machines": machines}]}


DRIFT_TRIGGERS: dict[str, list[Fixture]] = {
    "EP501": [
        Fixture("from 5.15.0-119 to 6.8.0-40 .up.", values=drift("versions", "kernel", "5.15.0-119", now="6.8.0-40")),
        Fixture("from 2.28.7 to 2.27.3 .down.", values=drift("versions", "libnccl", "2.28.7", now="2.27.3")),
        Fixture("is gone; it was 2.4", values=drift("versions", "package numpy", "2.4", now=None)),
        Fixture("9 healthy machines have 1.2 or 1.3", values=drift("versions", "x", "1.2", "1.3", now="1", machines=9)),
        Fixture("to 96.00.99.00.1A", values=drift("versions", "vbios", "96.00.A5.00.1A", now="96.00.99.00.1A")),
    ],
    "EP502": [Fixture("NCCL_ALGO is new: Tree", values=drift("settings", "NCCL_ALGO", now="Tree"))],
    "EP503": [Fixture("from unlimited to 65536", values=drift("limits", "limit memlock", "unlimited", now="65536"))],
    "EP504": [
        Fixture("NVLinks up changed from 18 to 17", values=drift("links", "GPU 0 NVLinks up", "18", now="17")),
        Fixture("from ACTIVE to DOWN", values=drift("links", "mlx5_0:1 state", "ACTIVE", now="DOWN")),
    ],
    "EP505": [Fixture("from 16x to 8x", values=drift("speeds", "GPU 0 link width", "16x", now="8x"))],
    "EP506": [Fixture("from 0 to 3", values=drift("counters", "GPU 0 uncorrectable error", "0", now="3"))],
}
DRIFT_PEACEFUL: dict[str, list[Fixture]] = {
    f"EP50{number}": [Fixture(values={f"drift.{kind}": []})]
    for number, kind in enumerate(("versions", "settings", "limits", "links", "speeds", "counters"), 1)
}
TRIGGERS: dict[str, list[Fixture]] = {
    "EP001": [Fixture("to 65 experts.*num_experts = 64", config=config(top_k=65))],
    "EP002": [
        Fixture("not divisible by 7 ranks", ranks=7),
        Fixture("experts_per_rank 4 × 8 ranks", config=config(experts_per_rank=4)),
        Fixture("placement lists 2 ranks", config=config(placement=[list(range(32)), list(range(32, 64))])),
        Fixture("no rank holds expert 63", config=config(placement=[list(range(63))]), ranks=1),
        Fixture("divisible by 7 ranks", config=config(dtype="complex64", top_k=65), ranks=7),
    ],
    "EP003": [
        Fixture(
            "2 of 4 ranks hold no expert: 2, 3", config=config(num_experts=2, placement=[[0], [1], [], []]), ranks=4
        ),
        Fixture("rank 0 holds 3 experts", config=config(num_experts=4, placement=[[0, 1, 2], [3]]), ranks=2),
    ],
    "EP004": [Fixture("for how many tokens", config=config(mode="ll"))],
    "EP005": [Fixture("receive slots", config=config(mode="ll", max_tokens_per_rank=131072, hidden=7168), ranks=64)],
    "EP006": [Fixture("24883200 B", config=config(expert_elements=24883200 // 4))],
    "EP007": [
        Fixture("cache of 16", config=config(expert_elements=1 << 20, ep_mr_cache_size=16)),
        Fixture("cache of 0", config=config(expert_elements=1 << 20, ep_mr_cache_size=0)),
    ],
    "EP008": [
        Fixture("init_deadline_s of 0.2 s", config=config(init_deadline_s=0.2)),
        Fixture("deadline_s is infinite", config="num_experts = 64\ndeadline_s = inf\n"),
    ],
    "EP009": [
        Fixture("top_k of at most 32", config=config(top_k=33)),
        Fixture("at most 8192 tokens", config=config(max_tokens_per_rank=16384)),
        Fixture("divisible by 4", config=config(num_experts=8, mode="ll", max_tokens_per_rank=126)),
        Fixture("same number of experts", config=config(placement="uneven"), ranks=7),
    ],
    "EP010": [
        Fixture("mode ll has no layout flat", config=config(mode="ll", layout="flat")),
        Fixture("mode ht has no layout rank_major", config=config(layout="rank_major")),
    ],
    "EP101": [
        Fixture("'float64' is no dtype", config=config(dtype="float64")),
        Fixture("AMD", config=config(dtype="torch.float8_e4m3fnuz")),
        Fixture("no dtype", config=config(dtype="")),
    ],
    "EP102": [Fixture("read as bfloat16 .*ncclBfloat16", config=config(dtype="torch.bfloat16"))],
    "EP103": [
        Fixture(
            "came with NCCL 2.24; this NCCL is 2.21.5",
            config=config(dtype="float8_e4m3fn", hidden=128),
            files={"/usr/local/lib/libnccl.so.2.21.5": "NCCL version 2.21.5+cuda12.4"},
        )
    ],
    "EP104": [
        Fixture(
            r"GPU 0 \(Tesla V100\).*sm_80",
            config=config(dtype="bfloat16"),
            values={"gpus.list": [{**GPUS[0], "name": "Tesla V100", "compute_capability": "7.0"}]},
        )
    ],
    "EP105": [Fixture("hidden 2880", config=config(dtype="float8_e4m3fn", hidden=2880))],
    "EP106": [Fixture("a format to dispatch in", config=config(dtype="fp8", expert_elements=1 << 21))],
    "NCCL001": [
        Fixture("over TCP sockets", env={"NCCL_IB_DISABLE": "1"}),
        Fixture(r"/etc/nccl\.conf:2", files={"/etc/nccl.conf": "# set by an installer\nNCCL_IB_DISABLE=1\n"}),
    ],
    "NCCL002": [
        Fixture("NVLink or PCIe", env={"NCCL_P2P_DISABLE": "1"}),
        Fixture("no peer access at all", env={"NCCL_P2P_LEVEL": "loc"}),
    ],
    "NCCL003": [Fixture("over the network", env={"NCCL_SHM_DISABLE": "1"})],
    "NCCL004": [
        Fixture("no symmetric windows", env={"NCCL_CUMEM_ENABLE": "0"}),
        Fixture("no symmetric windows", env={"NCCL_CUMEM_ENABLE": "true"}),
    ],
    "NCCL005": [Fixture("SHARP is off", env={"NCCL_NVLS_ENABLE": "0"})],
    "NCCL006": [
        Fixture(
            "level is set to NVL", env={"NCCL_P2P_DISABLE": "1", "NCCL_P2P_LEVEL": "NVL", "NCCL_CUMEM_ENABLE": "0"}
        ),
        Fixture("tuned by NCCL_IB_HCA", env={"NCCL_IB_DISABLE": "1", "NCCL_IB_HCA": "mlx5"}),
        Fixture("asked for", env={"NCCL_IB_DISABLE": "1", "NCCL_NET": "ib"}),
        Fixture("NCCL_MNNVL_ENABLE needs", env={"NCCL_CUMEM_ENABLE": "0", "NCCL_MNNVL_ENABLE": "1"}),
        Fixture("asks for NVLSTREE", env={"NCCL_NVLS_ENABLE": "0", "NCCL_ALGO": "NVLSTree"}),
        Fixture("at least 32 CTAs", env={"NCCL_MIN_CTAS": "32", "NCCL_MAX_CTAS": "8"}),
    ],
    "NCCL007": [
        Fixture("only TCP", env={"NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1", "NCCL_IB_DISABLE": "1"}),
    ],
    "NCCL008": [Fixture("'true' as 0", env={"NCCL_IB_DISABLE": "true"})],
    "NCCL009": [
        Fixture("does know NCCL_SOCKET_IFNAME", env={"NCCL_SOCKET_IFNAMES": "eth0"}),
        Fixture("does know NCCL_DEBUG", env={"NCCL_DEBGU": "INFO"}),
        Fixture("does know NCCL_P2P_DISABLE", env={"NCCL_P2P_DISABLED": "1"}),
        Fixture("not a variable that NCCL documents", env={"NCCL_MAKE_IT_FAST": "1"}),
        Fixture("blanks around the name", files={"/etc/nccl.conf": "NCCL_DEBUG = WARN\n"}),
    ],
    "NCCL010": [Fixture("NCCL_NET_GDR_LEVEL took its place", env={"NCCL_IB_CUDA_SUPPORT": "1"})],
    "NCCL011": [
        Fixture(
            "WARN counts, TRACE does not",
            env={"NCCL_DEBUG": "WARN"},
            files={"/etc/nccl.conf": "NCCL_DEBUG=TRACE\n"},
        ),
    ],
    "NCCL012": [
        Fixture("every rank writes", env={"NCCL_DEBUG": "INFO"}),
        Fixture("is no level", env={"NCCL_DEBUG": "DEBUG"}),
        Fixture("nothing without NCCL_DEBUG", env={"NCCL_DEBUG_SUBSYS": "NET"}),
    ],
    "NCCL013": [Fixture("NCCL_ALGO, NCCL_PROTO", env={"NCCL_ALGO": "Ring", "NCCL_PROTO": "Simple"})],
    "GDR001": [Fixture("through host memory", env={"NCCL_NET_GDR_LEVEL": "LOC"})],
    "NET001": [Fixture("forced to eth0", env={"NCCL_SOCKET_IFNAME": "eth0"})],
    "NET002": [
        Fixture("no interface is called ens5.*eth0, eth1", env={"NCCL_SOCKET_IFNAME": "ens5"}),
        Fixture("eth1 is a prefix: it picks eth10", env={"NCCL_SOCKET_IFNAME": "eth1"}),
    ],
    "IB001": [
        Fixture("mlx5_1 is a prefix: it picks mlx5_10", env={"NCCL_IB_HCA": "mlx5_1:1"}),
        Fixture("no adapter is called mlx5_7", env={"NCCL_IB_HCA": "=mlx5_0,mlx5_7"}),
    ],
    "GPU001": [
        Fixture("0 is listed twice", env={"CUDA_VISIBLE_DEVICES": "0,1,0"}),
        Fixture("every GPU is hidden", env={"CUDA_VISIBLE_DEVICES": ""}),
        Fixture("1 after it are hidden", env={"CUDA_VISIBLE_DEVICES": "0,-1,1"}),
    ],
    "GPU002": [Fixture("device 4 does not exist", env={"CUDA_VISIBLE_DEVICES": "0,4"})],
    "GPU003": [Fixture("waits for its kernel", env={"CUDA_LAUNCH_BLOCKING": "1"})],
    "MPI001": [
        Fixture("instead of shared memory", env={"OMPI_MCA_btl": "tcp,self"}),
        Fixture("instead of shared memory", env={"OMPI_MCA_btl": "^vader,openib"}),
        Fixture("instead of shared memory", env={"UCX_TLS": "rc,cuda_copy"}),
        Fixture("instead of shared memory", env={"MPIR_CVAR_NOLOCAL": "1"}),
    ],
    "MPI002": [Fixture("disagree", env={"PMI_SIZE": "4", "WORLD_SIZE": "8"})],
    "LIM001": [
        Fixture("may lock 64 KiB", files={"/proc/self/limits": LIMITS.format(stack=1, nofile=65536, memlock=65536)}),
    ],
    "LIM002": [
        Fixture("1024 files", files={"/proc/self/limits": LIMITS.format(stack=1, nofile=1024, memlock="unlimited")}),
    ],
    "LIM003": [
        Fixture(
            "2 MiB", files={"/proc/self/limits": LIMITS.format(stack="unlimited", nofile=9999, memlock="unlimited")}
        ),
    ],
    "LIM004": [
        Fixture(
            "container's default", values={"host.shared_memory": {"total_bytes": 64 << 20, "free_bytes": 64 << 20}}
        ),
        Fixture("are waived", values={"host.shared_memory": {"total_bytes": 512 << 20, "free_bytes": 512 << 20}}),
        Fixture("nearly full", values={"host.shared_memory": {"total_bytes": 64 * GIB, "free_bytes": GIB}}),
    ],
    "LIM005": [
        Fixture("64 ranks on 32 CPUs", ranks=64),
        Fixture("8 ranks on 2.5 CPUs", files={"/sys/fs/cgroup/cpu.max": "250000 100000\n"}),
    ],
    "LIB001": [
        Fixture(
            "2 versions of NCCL",
            env={"LD_LIBRARY_PATH": "/opt/nccl/lib"},
            files={"/opt/nccl/lib/libnccl.so.2": "NCCL version 2.19.4+cuda12.3"},
        ),
    ],
    "GDR009": [Fixture("nvidia_peermem is not loaded", files={"/proc/modules": "nvidia 56 9 nvidia_uvm, Live 0x0\n"})],
    "GDR010": [
        Fixture(
            "without EnableStreamMemOPs and RegistryDwords",
            files={"/proc/driver/nvidia/params": 'EnableStreamMemOPs: 0\nRegistryDwords: ""\n'},
        )
    ],
    "GDR011": [
        Fixture(
            "1 of 2 RDMA devices may not be opened here: /dev/infiniband/uverbs1",
            values={"rdma.device_files": [{"path": f"/dev/infiniband/uverbs{n}", "usable": n == 0} for n in (0, 1)]},
        ),
        Fixture("no device file", values={"rdma.device_files": []}),
    ],
    "LIB005": [
        Fixture(
            "loaded driver is 570.124.06, its library 580.65.06",
            files={"/proc/driver/nvidia/version": "NVRM version: NVIDIA UNIX x86_64 Kernel Module  570.124.06  Wed\n"},
        )
    ],
    "LIB006": [Fixture("2 network plugins", files={"/usr/lib64/libnccl-net-ofi.so": ""})],
    "TOPO006": [
        Fixture("1 of its 2 PCI", files={"/opt/topo.xml": '<pci busid="0000:19:00.0"/><pci busid="ffff:ff:01.0"/>'}),
    ],
    "TOPO007": [Fixture("intel_iommu=on", files={"/proc/cmdline": "root=/dev/sda1 intel_iommu=on\n"})],
    "LIM011": [Fixture("removes a user's", files={"/etc/systemd/logind.conf": "[Login]\nRemoveIPC=yes\n"})],
    "LIM012": [Fixture("80 segments", values={"host.shared_memory_files": [f"nccl-{n}" for n in range(80)]})],
    "NET006": [
        Fixture(
            r"eth2, eth3 are in one subnet \(10.1.0.0/16\)",
            values={"network.devices": ONE_SUBNET},
        ),
        Fixture(
            r"eth2, eth3 drop packets.*rp_filter 1",
            values={"network.devices": ONE_SUBNET},
            files={f"{CONF}/arp_ignore": "1\n", f"{CONF}/arp_announce": "2\n", f"{CONF}/rp_filter": "1\n"},
        ),
    ],
    "GPU016": [
        Fixture(
            "1 NVIDIA GPUs are in this machine, and their driver is not loaded.*0000:19:00.0: 0x10de:0x2335",
            files={
                "/proc/modules": "nouveau 2478080 0 - Live 0x0\n",
                "/sys/bus/pci/devices/0000:19:00.0/vendor": "0x10de\n",
                "/sys/bus/pci/devices/0000:19:00.0/device": "0x2335\n",
                "/sys/bus/pci/devices/0000:19:00.0/class": "0x030200\n",
            },
            values={"gpus.list": None, "gpus.driver": None},
        )
    ],
    "GDR012": [
        Fixture(
            "1 EFA adapters and no OFI plugin.*0000:53:00.0: 0x1d0f:0xefa2",
            files={
                "/sys/bus/pci/devices/0000:53:00.0/vendor": "0x1d0f\n",
                "/sys/bus/pci/devices/0000:53:00.0/device": "0xefa2\n",
                "/sys/bus/pci/devices/0000:53:00.0/class": "0x020000\n",
            },
            values={"libraries.net_plugins": []},
        )
    ],
    "LIB007": [
        Fixture(
            "the file of the wheel is NCCL 2.27.3, and pip lists nvidia-nccl-cu13 2.28.7",
            values={"libraries.nccl": [{"path": f"{SITE}/nvidia/nccl/lib/libnccl.so.2", "version": "2.27.3"}]},
        )
    ],
    "LIB008": [
        Fixture("2.27.3, 2.30.7", values={"libraries.mapped": [mapped(4711, "2.30.7"), mapped(4712, "2.27.3")]}),
        Fixture("use NCCL 2.27.3, and 2.30.7 is found", values={"libraries.mapped": [mapped(4711, "2.27.3")]}),
    ],
    "LIB009": [
        Fixture("torch is for CUDA 13.0, and the driver runs CUDA 12.8", values={"libraries.cuda": {"torch": "13.0"}})
    ],
    "MPI004": [
        Fixture("built without CUDA", values={"mpi.build": {"implementation": "MPICH", "cuda_aware": False}}),
        Fixture("OMPI_MCA_opal_cuda_support switches that off", env={"OMPI_MCA_opal_cuda_support": "false"}),
    ],
    "LIM013": [Fixture("EPERM", values={"host.numa_policy": {"allowed": False, "error": "EPERM"}})],
    "NVL009": [
        Fixture("no IMEX channel", env={"NCCL_MNNVL_ENABLE": "1"}),
        Fixture("channel0", values={"host.imex_channels": [{"path": "/dev/…/channel0", "usable": False}]}),
    ],
    "NVL010": [
        Fixture(
            "1 NVSwitches and no fabric manager",
            files={
                "/sys/bus/pci/devices/0000:85:00.0/vendor": "0x10de\n",
                "/sys/bus/pci/devices/0000:85:00.0/class": "0x068000\n",
            },
        )
    ],
    "EP212": [
        Fixture("topk_idx is int32", values={"ep.tensors": [{"name": "topk_idx", "dtype": "int32"}]}),
        Fixture("not contiguous", values={"ep.tensors": [{"name": "x", "dtype": "bfloat16", "contiguous": False}]}),
        Fixture("no powers of two", values={"ep.tensors": [{"name": "s", "dtype": "float32", "power_of_two": False}]}),
        Fixture("combine_x is float8_e4m3fn", values={"ep.tensors": [{"name": "combine_x", "dtype": "float8_e4m3fn"}]}),
    ],
    "EP213": [Fixture("may grow after capture", values={"ep.graph": {"key": "d", "rdma_buffer_size": "AUTO"}})],
    "EP209": [
        Fixture(
            "is 64, and a rank may dispatch 256",
            env={"SGLANG_DEEPEP_NUM_MAX_DISPATCH_TOKENS_PER_RANK": "64"},
            config=config(mode="ll", max_tokens_per_rank=256),
        )
    ],
    "EP210": [
        Fixture(
            "4 queue pairs per peer, and 8 experts",
            env={"NVSHMEM_IBGDA_NUM_RC_PER_PE": "4"},
            config=config(mode="ll", max_tokens_per_rank=256),
        )
    ],
    "EP211": [
        Fixture("NCCL 2.30.7|compute capability", values={"gpus.list": [{**GPUS[0], "compute_capability": "8.0"}]}),
        Fixture("older than 2.30.4", values={"libraries.nccl": [{"path": "libnccl.so.2", "version": "2.28.7"}]}),
    ],
    "GPU014": [Fixture("share one queue", env={"CUDA_DEVICE_MAX_CONNECTIONS": "1"})],
    "NCCL017": [
        Fixture("is an old name", env={"TORCH_NCCL_TRACE_BUFFER_SIZE": "2000"}),
        Fixture("RAS is off", env={"NCCL_RAS_ENABLE": "0"}),
    ],
    "LIB002": [
        Fixture(
            "installed last",
            values={"libraries.packages": {"nvidia-nccl-cu12": "2.27.3", "nvidia-nccl-cu13": "2.28.7"}},
        )
    ],
}

PEACEFUL: dict[str, list[Fixture]] = {
    "EP001": [Fixture(config=config(top_k=64))],
    "EP002": [
        Fixture(config=config(experts_per_rank=8)),
        Fixture(config=config(placement="uneven"), ranks=7),
        Fixture(config=config(placement="replicas:2"), ranks=7),
    ],
    "EP003": [Fixture(config=config(placement="uneven"), ranks=7)],
    "EP004": [Fixture(config=config(mode="ll", max_tokens_per_rank=128))],
    "EP005": [Fixture(config=config(mode="ll", max_tokens_per_rank=128, hidden=7168))],
    "EP006": [Fixture(config=config(expert_elements=3 * 4096 * 14336, dtype="bfloat16"))],
    "EP007": [Fixture(config=config(expert_elements=1 << 20, ep_mr_cache_size=256)), Fixture(config=config())],
    "EP008": [Fixture(config=config(init_deadline_s=5.0, deadline_s=600.0))],
    "EP009": [Fixture(config=config(num_experts=256, mode="ll", max_tokens_per_rank=128, top_k=8))],
    "EP010": [Fixture(config=config(mode="ll", layout="expert_major")), Fixture(config=config())],
    "EP101": [Fixture(config=config(dtype="bf16")), Fixture(config=config(dtype="ncclFloat8e4m3", hidden=128))],
    "EP102": [Fixture(config=config(dtype="bfloat16"))],
    "EP103": [Fixture(config=config(dtype="bfloat16"))],
    "EP104": [Fixture(config=config(dtype="float8_e4m3fn", hidden=128))],
    "EP105": [Fixture(config=config(dtype="float8_e4m3fn", hidden=7168)), Fixture(config=config(hidden=2880))],
    "EP106": [Fixture(config=config(dtype="float8_e4m3fn", hidden=7168))],
    "NCCL001": [Fixture(env={"NCCL_IB_DISABLE": "0"}), Fixture(env={"NCCL_IB_DISABLE": ""})],
    "NCCL002": [Fixture(env={"NCCL_P2P_LEVEL": "NVL"})],
    "NCCL003": [Fixture(env={"NCCL_SHM_DISABLE": "0"})],
    "NCCL004": [Fixture(env={"NCCL_CUMEM_ENABLE": "1"})],
    "NCCL005": [Fixture(env={"NCCL_NVLS_ENABLE": "2"})],
    "NCCL006": [
        Fixture(env={"NCCL_P2P_DISABLE": "1", "NCCL_P2P_LEVEL": "LOC"}),
        Fixture(env={"NCCL_IB_HCA": "=mlx5_0", "NCCL_NET": "IB"}),
        Fixture(env={"NCCL_NVLS_ENABLE": "0", "NCCL_ALGO": "^NVLS"}),
        Fixture(env={"NCCL_CUMEM_ENABLE": "0", "NCCL_MNNVL_ENABLE": "2"}),
    ],
    "NCCL007": [Fixture(env={"NCCL_P2P_DISABLE": "1", "NCCL_IB_DISABLE": "1"})],
    "NCCL008": [Fixture(env={"NCCL_IB_TIMEOUT": "0x16", "NCCL_IB_GID_INDEX": "-1", "NCCL_ALGO": "Ring"})],
    "NCCL009": [
        Fixture(env={"NCCL_VERSION": "2.28.7-1", "NCCL_EP_TIMEOUT_MS": "1000", "NCCL_DEBUG": "WARN"}),
        Fixture(env=dict.fromkeys(sorted(KNOWN), "1")),
    ],
    "NCCL010": [Fixture(env={"NCCL_NET_GDR_LEVEL": "SYS"})],
    "NCCL011": [
        Fixture(env={"NCCL_DEBUG": "WARN"}, files={"/etc/nccl.conf": "NCCL_DEBUG=WARN\nNCCL_IB_TIMEOUT=22\n"}),
    ],
    "NCCL012": [
        Fixture(env={"NCCL_DEBUG": "INFO", "NCCL_DEBUG_FILE": "/tmp/n.%p"}),
        Fixture(env={"NCCL_DEBUG": "warn"}),
    ],
    "NCCL013": [Fixture(env={"NCCL_DEBUG": "WARN"})],
    "GDR001": [Fixture(env={"NCCL_NET_GDR_LEVEL": "PHB"})],
    "NET001": [Fixture(env={"NCCL_SOCKET_IFNAME": "^docker0,lo"})],
    "NET002": [Fixture(env={"NCCL_SOCKET_IFNAME": "=eth1"}), Fixture(env={"NCCL_SOCKET_IFNAME": "eth"})],
    "IB001": [Fixture(env={"NCCL_IB_HCA": "=mlx5_0:1,mlx5_1:1"}), Fixture(env={"NCCL_IB_HCA": "^mlx5_9"})],
    "GPU001": [Fixture(env={"CUDA_VISIBLE_DEVICES": "3,1,GPU-0"}), Fixture()],
    "GPU002": [Fixture(env={"CUDA_VISIBLE_DEVICES": "3,0"})],
    "GPU003": [Fixture(env={"CUDA_LAUNCH_BLOCKING": "0"})],
    "MPI001": [
        Fixture(env={"OMPI_MCA_btl": "vader,self,tcp", "UCX_TLS": "all"}),
        Fixture(env={"OMPI_MCA_btl": "^openib", "UCX_TLS": "^tcp", "MPIR_CVAR_NOLOCAL": "0"}),
    ],
    "MPI002": [Fixture(env={"PMI_SIZE": "8", "WORLD_SIZE": "8", "SLURM_NTASKS": "16"})],
    "LIM001": [
        Fixture(),
        Fixture(
            values={"host.rdma_devices": []},
            files={"/proc/self/limits": LIMITS.format(stack=1, nofile=65536, memlock=65536)},
        ),
    ],
    "LIM002": [Fixture()],
    "LIM003": [Fixture()],
    "LIM004": [Fixture()],
    "LIM005": [Fixture(ranks=32)],
    "LIB001": [Fixture()],
    "LIB002": [Fixture()],
    "GDR009": [
        Fixture(),
        Fixture(
            files={
                "/proc/modules": "nvidia 56 9 nvidia_uvm, Live 0x0\n",
                "/proc/version": "Linux version 6.8.0-40-generic (buildd@host)\n",
                "/proc/driver/nvidia/version": "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.65.06\n",
            }
        ),
    ],
    "EP212": [Fixture()],
    "EP213": [Fixture()],
    "NET006": [
        Fixture(),
        Fixture(
            values={"network.devices": ONE_SUBNET},
            files={f"{CONF}/arp_ignore": "1\n", f"{CONF}/arp_announce": "2\n", f"{CONF}/rp_filter": "2\n"},
        ),
        Fixture(
            values={"network.devices": ONE_SUBNET},
            files={
                f"{CONF.removesuffix('all')}{device}/{key}": "1\n"
                for device in ("eth2", "eth3")
                for key in ("arp_ignore", "arp_announce")
            },
        ),
    ],
    "GPU016": [
        Fixture(),
        # A driver that answers is there, though the kernel shows no modules.
        Fixture(files={"/proc/modules": "\n"}, values={"gpus.driver": None}),
        Fixture(
            files={
                "/proc/modules": "nvidia 56 9 nvidia_uvm, Live 0x0\n",
                "/sys/bus/pci/devices/0000:19:00.0/vendor": "0x10de\n",
                "/sys/bus/pci/devices/0000:19:00.0/device": "0x2335\n",
                "/sys/bus/pci/devices/0000:19:00.0/class": "0x030200\n",
            }
        ),
        Fixture(
            files={
                "/proc/modules": "vfio_pci 56 0 - Live 0x0\n",
                "/sys/bus/pci/devices/0000:19:00.0/vendor": "0x10de\n",
                "/sys/bus/pci/devices/0000:19:00.0/device": "0x2335\n",
                "/sys/bus/pci/devices/0000:19:00.0/class": "0x030200\n",
            }
        ),
    ],
    "GDR012": [
        Fixture(),
        Fixture(
            files={
                "/sys/bus/pci/devices/0000:53:00.0/vendor": "0x1d0f\n",
                "/sys/bus/pci/devices/0000:53:00.0/device": "0xefa2\n",
                "/sys/bus/pci/devices/0000:53:00.0/class": "0x020000\n",
                "/etc/ld.so.conf.d/ofi.conf": "# moved\n/opt/amazon/ofi-nccl/lib\n",
                "/opt/amazon/ofi-nccl/lib/libnccl-net-ofi.so": "",
            }
        ),
    ],
    "LIM013": [
        Fixture(),
        Fixture(env={"NCCL_CUMEM_HOST_ENABLE": "0"}, values={"host.numa_policy": {"allowed": False, "error": "EPERM"}}),
    ],
    "NVL010": [
        Fixture(),
        Fixture(
            files={
                "/sys/bus/pci/devices/0000:85:00.0/vendor": "0x10de\n",
                "/sys/bus/pci/devices/0000:85:00.0/class": "0x068000\n",
                "/proc/812/comm": "nv-fabricmanage\n",
            }
        ),
        # The manager of a compute tray runs in the switch trays.
        Fixture(
            files={
                "/sys/bus/pci/devices/0000:85:00.0/vendor": "0x10de\n",
                "/sys/bus/pci/devices/0000:85:00.0/class": "0x068000\n",
            },
            values={"gpus.list": [{**GPUS[0], "name": "NVIDIA GB200"}]},
        ),
    ],
    "TOPO007": [Fixture(), Fixture(files={"/proc/cmdline": "root=/dev/sda1\n"})],
    "EP209": [
        Fixture(
            env={"SGLANG_DEEPEP_NUM_MAX_DISPATCH_TOKENS_PER_RANK": "256"},
            config=config(mode="ll", max_tokens_per_rank=256),
        )
    ],
    "EP210": [Fixture(env={"NVSHMEM_IBGDA_NUM_RC_PER_PE": "8"}, config=config(mode="ll", max_tokens_per_rank=256))],
    "GPU014": [Fixture(env={"CUDA_DEVICE_MAX_CONNECTIONS": "8"})],
    **{
        code: [Fixture()]
        for code in (
            [
                "GDR010",
                "GDR011",
                "LIB005",
                "LIB006",
                "TOPO006",
                "LIM011",
                "LIM012",
                "LIB007",
                "LIB008",
                "LIB009",
                "MPI004",
                "NVL009",
                "EP211",
                "NCCL017",
            ]
        )
    },
}


HANG_PEACEFUL: dict[str, list[Fixture]] = {
    "EP402": [
        Fixture(values=MOVING),
        Fixture(values=STANDING),
        Fixture(values=hang(rank_process(0, states=["D", "R"], cpu_s=1.0), rank_process(1), rank_process(2))),
        Fixture(values=hang(rank_process(0, ranks=16, local_ranks=8))),
        Fixture(values=hang(rank_process(0), STOPPED, rank_process(2))),
        Fixture(values=hang(rank_process(0), rank_process(2))),
        Fixture(values=hang(*(rank_process(rank, states=["S", "X"]) for rank in range(3)))),
    ],
    "EP403": [
        Fixture(values=MOVING),
        Fixture(values=STANDING),
        Fixture(values=hang(rank_process(0, **WAITS), STOPPED, rank_process(2, **WAITS))),
    ],
    "EP404": [
        Fixture(values=stacks("wait", "wait", "wait")),
        Fixture(values=stacks("a", "b", "c", "d")),
        Fixture(values=stacks("wait", "sleep")),
        Fixture(values={**STANDING, **stacks("wait", "sleep", "wait")}),
    ],
}

ALWAYS_SAY_SOMETHING = {
    "EP401": "it says that the job moves, or what holds it up",
    "GPU009": "a device is named only where it could not be read",
    "NCCL016": "one answer is never enough, and two say where the job stands",
}
"""Checks whose fact by its mere presence is worth a line."""

ALL_TRIGGERS: dict[str, list[Any]] = {
    **TRIGGERS,
    **RECORDED_TRIGGERS,
    **RANKS_TRIGGERS,
    **HANG_TRIGGERS,
    **DRIFT_TRIGGERS,
}
BY_CODE = {check.code: check for check in all_checks()}
ALL_PEACEFUL: dict[str, list[Any]] = {
    **PEACEFUL,
    **RANKS_PEACEFUL,
    **HANG_PEACEFUL,
    **DRIFT_PEACEFUL,
    **{code: peaceful(code, BY_CODE[code].needs[0]) for code in RECORDED_TRIGGERS if code not in ALWAYS_SAY_SOMETHING},
}


def each(table: Mapping[str, list[Any]]) -> list[Any]:
    return [
        pytest.param(code, fixture, id=f"{code}-{number}")
        for code, fixtures in table.items()
        for number, fixture in enumerate(fixtures)
    ]


def findings_of(code: str, facts: Facts) -> list[Finding]:
    return run_checks([BY_CODE[code]], facts)


def test_every_check_has_a_fixture_that_triggers_it_and_one_that_does_not():
    codes = {check.code for check in all_checks()}

    assert set(ALL_TRIGGERS) == codes
    assert set(ALL_PEACEFUL) == codes - set(ALWAYS_SAY_SOMETHING)
    assert all(ALL_TRIGGERS.values())
    assert all(ALL_PEACEFUL.values())


@pytest.mark.parametrize(("code", "fixture"), each(ALL_TRIGGERS))
def test_a_fault_is_found_with_evidence_and_remedy(code: str, fixture: Fixture | Recorded | Ranks, tmp_path: Path):
    findings = findings_of(code, fixture.facts(tmp_path))

    assert findings
    for finding in findings:
        assert finding.verdict in LEVELS, finding
        assert finding.evidence, finding
        assert finding.remedy, finding
        assert "the check itself failed" not in finding.summary, finding
    assert re.search(fixture.shows, " ".join(f"{f.summary} {' '.join(f.evidence)}" for f in findings))


@pytest.mark.parametrize(("code", "fixture"), each(ALL_PEACEFUL))
def test_what_is_right_is_left_in_peace(code: str, fixture: Fixture | Recorded | Ranks, tmp_path: Path):
    assert [(finding.verdict, finding.summary) for finding in findings_of(code, fixture.facts(tmp_path))] == [
        ("ok", "")
    ]


@pytest.mark.parametrize("check", [pytest.param(check, id=check.code) for check in all_checks()])
def test_a_check_without_its_facts_is_not_run_and_says_why(check: Check, tmp_path: Path):
    facts = Fixture().facts(tmp_path)
    for name in check.needs:
        (finding,) = run_checks([check], with_values(facts, {name: None}))

        assert finding.verdict == "not_run"
        assert name in finding.summary
        assert "taken away" in finding.summary


def test_a_healthy_machine_has_nothing_but_ok(tmp_path: Path):
    findings = run_checks(all_checks(), Fixture().facts(tmp_path))

    assert {finding.code: finding.verdict for finding in findings} == {
        code: "ok" if code in TRIGGERS else "not_run" for code in ALL_TRIGGERS
    }


def test_a_leftover_environment_of_a_public_report_gets_each_of_its_faults_named(tmp_path: Path):
    leftovers = {
        "NCCL_P2P_DISABLE": "1",
        "NCCL_P2P_LEVEL": "NVL",
        "NCCL_CUMEM_ENABLE": "0",
        "NCCL_SOCKET_IFNAME": "=eth0",
        "NCCL_SET_STACK_SIZE": "1",
        "NCCL_DEBUG": "INFO",
    }
    findings = run_checks(all_checks(), Fixture(env=leftovers).facts(tmp_path))

    assert {finding.code: finding.verdict for finding in findings if finding.verdict in LEVELS} == {
        "NCCL002": "warning",
        "NCCL004": "warning",
        "NCCL006": "error",
        "NCCL012": "info",
        "NET001": "info",
    }


def test_codes_are_unique_and_a_rule_is_complete():
    checks = all_checks()

    assert len({check.code for check in checks}) == len(checks)
    for check in checks:
        assert re.fullmatch(r"(EP|NCCL|GPU|NVL|TOPO|IB|NET|GDR|LIB|LIM|MPI)\d{3}", check.code)
        assert check.severity in LEVELS
        assert all((check.title, check.needs, check.why, check.by_hand, check.remedy, check.reference)), check.code


def test_a_check_that_crashes_becomes_a_finding_and_the_others_still_run(tmp_path: Path):
    def crash(facts: Facts) -> list[Trouble]:
        return [Trouble(str(1 / len(facts.sections["gpus"]["nothing"].source)), ())]

    real = BY_CODE["LIM004"]
    crashing = Check(**{**vars(real), "code": "LIM999", "judge": crash})

    findings = run_checks([crashing, real], Fixture().facts(tmp_path))

    assert [(finding.code, finding.verdict) for finding in findings] == [("LIM999", "warning"), ("LIM004", "ok")]
    assert "KeyError" in findings[0].summary


def test_a_fact_of_another_shape_is_a_finding_and_no_crash(tmp_path: Path):
    facts = with_values(Fixture().facts(tmp_path), {"host.shared_memory": ["a", "list"]})

    (finding,) = findings_of("LIM004", facts)

    assert finding.verdict == "warning"
    assert "host.shared_memory" in finding.summary


def test_select_and_ignore_choose_by_prefix():
    assert {check.code for check in chosen_checks(["mpi", "EP10"], ["MPI"])} == {
        check.code for check in all_checks() if check.code.startswith("EP10")
    }


@pytest.mark.parametrize("prefix", ["XYZ", "EP9", "NCCL0000"])
def test_a_prefix_that_no_code_has_is_refused_with_the_known_ones(prefix: str):
    with pytest.raises(InputError, match=f"{prefix}.*\n.*EP, GDR"):
        chosen_checks([prefix])


def test_a_code_that_does_not_exist_names_the_nearest():
    with pytest.raises(InputError, match="did you mean NCCL001"):
        rule_named("NCL001")


def test_the_worst_finding_decides(tmp_path: Path):
    findings = run_checks(all_checks(), Fixture(env={"NCCL_IB_DISABLE": "1"}).facts(tmp_path))

    assert worst(findings, LEVELS) == "warning"
    assert worst(findings, ("error",)) is None


def test_no_name_is_both_known_and_gone():
    assert not KNOWN & set(GONE)


NAMES = st.sampled_from(sorted(KNOWN | set(GONE))) | st.from_regex(
    r"(NCCL|UCX|CUDA|OMPI_MCA)_[A-Z0-9_]{1,12}", fullmatch=True
)
VALUES = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=12) | st.sampled_from(
    ["0", "1", "-1", "^", "^=", "=", ",", "=eth0", "LOC", "NVL", "mlx5_0:1", "0,0", "99999999999999999999"]
)


@settings(max_examples=150, deadline=None)
@given(env=st.dictionaries(NAMES | st.just("CUDA_VISIBLE_DEVICES"), VALUES, max_size=8), conf=st.text(max_size=60))
def test_no_environment_and_no_conf_file_makes_a_check_fail(env: dict[str, str], conf: str, tmp_path_factory: Any):
    folder = tmp_path_factory.mktemp("noise")
    facts = Fixture(env=env, files={"/etc/nccl.conf": conf.encode(errors="replace").decode()}).facts(folder)

    assert [
        finding for finding in run_checks(all_checks(), facts) if "the check itself failed" in finding.summary
    ] == []


@settings(max_examples=150, deadline=None)
@given(
    fields=st.fixed_dictionaries(
        {"num_experts": st.integers(1, 300)},
        optional={
            "experts_per_rank": st.integers(1, 40),
            "placement": st.sampled_from(["block", "uneven", "replicas:2", "replicas:0", "nonsense", ":"]),
            "top_k": st.integers(1, 1024),
            "hidden": st.integers(1, 1 << 40),
            "expert_elements": st.integers(1, 1 << 40),
            "dtype": st.sampled_from(["float32", "bf16", "fp8", "int8", "", "x" * 100]),
            "mode": st.sampled_from(["ll", "ht"]),
            "max_tokens_per_rank": st.integers(1, 1 << 40),
            "ep_mr_cache_size": st.integers(0, 1 << 20),
        },
    ),
    ranks=st.integers(1, 300),
)
def test_no_configuration_makes_a_check_fail(fields: dict[str, Any], ranks: int):
    facts = Facts(
        host="a",
        sections={
            "ep": {
                "config": Fact("value", "ep.toml", msgspec.to_builtins(EpConfig(**fields))),
                "ranks": Fact("value", "--ranks", ranks),
            },
            "host": {"memory_bytes": Fact("value", "/proc/meminfo", 64 * GIB)},
            "gpus": {"list": Fact("value", "nvidia-smi", GPUS)},
            "libraries": {"nccl": Fact("value", "lib", [{"path": "libnccl.so.2", "version": None}])},
        },
    )
    findings = run_checks(chosen_checks(["EP0", "EP1"]), facts)

    assert {finding.verdict for finding in findings} <= {"ok", *LEVELS}
    assert [finding for finding in findings if "the check itself failed" in finding.summary] == []
