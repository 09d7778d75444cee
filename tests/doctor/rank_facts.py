"""Facts of four ranks on two machines: what differs from rank to rank, and what may."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from ncclep_bench.doctor.compare import group_facts
from ncclep_bench.model.facts import Fact, Facts

GPUS = [{"index": str(n), "uuid": f"GPU-{n}", "name": "NVIDIA H200"} for n in range(2)]


def settings(**variables: object) -> list[dict[str, str]]:
    return [{"name": name, "value": str(value), "source": "environment"} for name, value in variables.items()]


def alike(rank: int) -> dict[str, Any]:
    """The facts of one of four ranks that agree: two machines, two ranks and two GPUs each."""
    return {
        "ep.config": {"num_experts": 64, "top_k": 8, "experts_per_rank": 16},
        "ep.splits": {"send": [4, 4, 4, 4], "receive": [4, 4, 4, 4]},
        "ep.calls": {"dispatch": 40, "combine": 40},
        "ep.graph": {"key": "decode-64", "padded_tokens": 64, "rdma_buffer_size": 1 << 30},
        "job.settings": settings(NCCL_DEBUG="WARN", NCCL_DEBUG_FILE=f"log.{rank}", LOCAL_RANK=rank % 2),
        "libraries.nccl": [{"path": "libnccl.so.2", "version": "2.30.7"}],
        "libraries.packages": {"python": "3.12.1", "torch": "2.12.0"},
        "limits.memlock": {"soft": None, "hard": None},
        "limits.nofile": {"soft": 1 << 20, "hard": 1 << 20},
        "host.boot_id": f"boot-{rank // 2}",
        "host.namespaces": {"ipc": "ipc:[1]", "pid": "pid:[2]", "mnt": f"mnt:[{rank}]"},
        "host.cpu_model": "Intel(R) Xeon(R) Platinum 8480C",
        "host.numa_policy": {"allowed": True},
        "mpi.build": {"implementation": "MPICH", "version": "5.0.2", "path": f"/opt/{rank}/libmpi.so.12"},
        "host.rdma_devices": ["mlx5_0", "mlx5_1"],
        "rdma.device_files": [{"path": f"/dev/infiniband/uverbs{n}", "usable": True} for n in range(2)],
        "gpus.list": GPUS,
        "gpus.query": [{"at": "nvidia-smi -q:1", "gpu": "00000000:19:00.0", "fields": CLOCKS}],
        "ep.ranks": 4,
        "job.answer": {"answered": True, "pid": 4711 + rank, "seconds": 0.5},
        "host.kernel": "6.8.0-51-generic",
        "host.clock": {"offset_s": 0.002 * rank, "uncertain_s": 0.001},
        "rdma.ports": [rail(0), rail(1)],
        "network.devices": [
            interface("eth0", f"10.1.0.{1 + rank // 2}/24"),
            interface("eth1", f"10.2.{rank // 2}.1/31", mtu_bytes=9000),
            interface("docker0", "172.17.0.1/16", mtu_bytes=1500 - rank // 2),
        ],
        "network.path_mtu": [path(rank)] if rank % 2 == 0 else [],
    }


CLOCKS = {
    "product name": "NVIDIA H200",
    "clocks/sm": "420 MHz",
    "max clocks/sm": "1980 MHz",
    "gpu power readings/current power limit": "700.00 W",
}


def rail(number: int, **other: Any) -> dict[str, Any]:
    return {
        "at": f"sysfs:{number}",
        "device": f"mlx5_{number}",
        "port": 1,
        "state": "ACTIVE",
        "rate_gbps": 400,
        **other,
    }


def interface(name: str, network: str, **other: Any) -> dict[str, Any]:
    return {"at": f"ip addr: {name}", "name": name, "mtu_bytes": 9000, "up": True, "networks": [network], **other}


def path(rank: int, **other: Any) -> dict[str, Any]:
    hosts = ("gpu-01", "gpu-02") if rank < 2 else ("gpu-02", "gpu-01")
    return {
        "at": f"probe from {hosts[0]}",
        "host": hosts[0],
        "device": "eth0",
        "address": f"10.1.0.{1 + rank // 2}",
        "mtu_bytes": 9000,
        "peer": hosts[1],
        "peer_device": "eth0",
        "peer_address": f"10.1.0.{2 - rank // 2}",
        "peer_mtu_bytes": 9000,
        "tried_bytes": 9000,
        "passed_bytes": 9000,
        **other,
    }


class Ranks(NamedTuple):
    """Four ranks; what some of them have otherwise, and a pattern that summary or evidence must show."""

    shows: str = ""
    other: Mapping[int, Mapping[str, Any]] = {}
    hosts: tuple[str, ...] = ("gpu-01", "gpu-01", "gpu-02", "gpu-02")

    def documents(self) -> list[Facts]:
        found = []
        for rank, host in enumerate(self.hosts):
            sections: dict[str, dict[str, Fact]] = {}
            for name, value in {**alike(rank), **self.other.get(rank, {})}.items():
                section, _, key = name.partition(".")
                sections.setdefault(section, {})[key] = Fact("value", f"source of {name}", value)
            found.append(Facts(host=host, rank=rank, sections=sections))
        return found

    def facts(self, _: Path) -> Facts:
        return group_facts(self.documents())


class Answering(Ranks):
    """As Ranks, but the facts of the rank that is otherwise, which are judged by themselves."""

    def facts(self, _: Path) -> Facts:
        (odd,) = self.other or (0,)
        return self.documents()[odd]


ANSWER = {"answered": True, "pid": 4712, "seconds": 0.5}

RANKS_TRIGGERS: dict[str, list[Ranks]] = {
    "EP300": [
        Answering(
            "rank 2 on gpu-02 did not answer within 30 s: it is stopped.*pid 4713",
            {2: {"job.answer": {"answered": False, "pid": 4713, "seconds": 30.0, "doing": "is stopped"}}},
        ),
        Answering("rank 1 .*cannot use its conf.*ep.toml: no", {1: {"job.answer": {**ANSWER, "doing": "ep.toml: no"}}}),
    ],
    "EP307": [
        Ranks("number of ranks differs: 8 on rank 1 on gpu-01", {1: {"ep.ranks": 8}}),
        Ranks("nothing is known of rank 4, 5, 6, 7 of 8", {n: {"ep.ranks": 8} for n in range(4)}),
    ],
    "GPU202": [Ranks("GPUs of a node differs.*gpu-02", {n: {"gpus.list": GPUS[:1]} for n in (2, 3)})],
    "GPU203": [
        Ranks(
            "max clocks/sm of NVIDIA H200 differs: .*1500 MHz",
            {
                n: {"gpus.query": [{"at": "q:1", "gpu": "0", "fields": {**CLOCKS, "max clocks/sm": "1500 MHz"}}]}
                for n in (2, 3)
            },
        )
    ],
    "LIB203": [Ranks("NVIDIA driver differs", {3: {"gpus.list": [{**gpu, "driver": "570.1"} for gpu in GPUS]}})],
    "LIB204": [Ranks("kernel differs: 5.15.0-1 on rank 2", {2: {"host.kernel": "5.15.0-1"}})],
    "IB203": [
        Ranks(
            "RDMA port 1 differs: .*mlx5_1:1 DOWN",
            {n: {"rdma.ports": [rail(0), rail(1, state="DOWN")]} for n in (2, 3)},
        )
    ],
    "NET202": [
        Ranks(
            r"MTU differs on network 10.1.0.0/24: .*(eth0 of gpu-02.*eth0 of gpu-01|eth0 of gpu-01.*eth0 of gpu-02)",
            {n: {"network.devices": [interface("eth0", "10.1.0.2/24", mtu_bytes=1500)]} for n in (2, 3)},
        ),
        Ranks(
            r"MTU differs on interfaces called eth1",
            {n: {"network.devices": [interface("eth1", "10.2.9.1/31", mtu_bytes=1500)]} for n in (2, 3)},
        ),
    ],
    "NET203": [
        Ranks(
            r"from eth0 of gpu-01 \(10.1.0.1\) to eth0 of gpu-02 \(10.1.0.2\) packets over 4000 B vanish",
            {0: {"network.path_mtu": [path(0, passed_bytes=4000)]}},
        ),
        Ranks(
            "1500 B fit, and routers say so", {0: {"network.path_mtu": [path(0, passed_bytes=1500, told_bytes=1500)]}}
        ),
        Ranks("no probe, however small", {2: {"network.path_mtu": [path(2, passed_bytes=0)]}}),
    ],
    "NET204": [
        Ranks(
            "clock of gpu-02 is 7.5 s slow", {n: {"host.clock": {"offset_s": -7.5, "uncertain_s": 0.1}} for n in (2, 3)}
        )
    ],
    "EP301": [
        Ranks(
            "experts_per_rank differs: 8 on rank 2 on gpu-02; 16 on the other 3",
            {2: {"ep.config": {"num_experts": 64, "top_k": 8, "experts_per_rank": 8}}},
        ),
        Ranks("max_tokens_per_rank differs", {1: {"ep.config": {**alike(1)["ep.config"], "max_tokens_per_rank": 128}}}),
    ],
    "EP302": [
        Ranks("2 machines are called gpu-01", hosts=("gpu-01",) * 4),
        Ranks("one machine has 2 names", hosts=("pod-a", "pod-b", "gpu-02", "gpu-02")),
    ],
    "EP303": [
        Ranks("rank 0 is on gpu-01, rank 1 on gpu-02", hosts=("gpu-01", "gpu-02", "gpu-01", "gpu-02")),
        Ranks("different numbers of ranks: gpu-01 3, gpu-02 1", hosts=("gpu-01", "gpu-01", "gpu-01", "gpu-02")),
    ],
    "EP304": [
        Ranks(
            "rank 1 sends 5 rows to rank 3, which expects 4",
            {1: {"ep.splits": {"send": [4, 4, 4, 5], "receive": [4, 4, 4, 4]}}},
        )
    ],
    "EP305": [
        Ranks("number of combine calls differs: 39 on rank 3", {3: {"ep.calls": {"dispatch": 40, "combine": 39}}})
    ],
    "EP306": [Ranks("graph differs.*decode-32.*rank 1", {1: {"ep.graph": {"key": "decode-32", "padded_tokens": 32}}})],
    "NCCL201": [
        Ranks(
            "NCCL_ALGO differs: Ring on rank 3 on gpu-02",
            {3: {"job.settings": settings(NCCL_DEBUG="WARN", NCCL_ALGO="Ring")}},
        )
    ],
    "LIB201": [Ranks("2.28.7", {1: {"libraries.nccl": [{"path": "libnccl.so.2", "version": "2.28.7"}]}})],
    "LIB202": [Ranks("torch.*2.9", {1: {"libraries.packages": {"python": "3.12.1", "torch": "2.9.0"}}})],
    "IB201": [Ranks("mlx5_1.*rank 0", {0: {"host.rdma_devices": ["mlx5_1", "mlx5_2"]}})],
    "IB202": [
        Ranks(
            "usable RDMA devices differs: 1 on rank 3",
            {3: {"rdma.device_files": [{"path": f"/dev/infiniband/uverbs{n}", "usable": n == 0} for n in range(2)]}},
        )
    ],
    "GPU201": [
        Ranks("rank 0 on gpu-01, rank 1 on gpu-01 use the same GPU", {1: {"job.settings": settings(LOCAL_RANK=0)}}),
        Ranks(
            "use the same GPU",
            {n: {"job.settings": settings(LOCAL_RANK=n, CUDA_VISIBLE_DEVICES="1")} for n in range(2)},
        ),
    ],
    "LIM201": [
        Ranks("limit of locked memory differs: 65536 on rank 2", {2: {"limits.memlock": {"soft": 65536, "hard": None}}})
    ],
    "LIM202": [Ranks("AMD EPYC.*rank 3", {3: {"host.cpu_model": "AMD EPYC 9654"}})],
    "LIM203": [Ranks("False on rank 2", {2: {"host.numa_policy": {"allowed": False, "error": "EPERM"}}})],
    "MPI201": [
        Ranks(
            "Open MPI 5.0.6 on rank 1 on gpu-01; MPICH 5.0.2 on the other 3",
            {1: {"mpi.build": {"implementation": "Open MPI", "version": "5.0.6"}}},
        )
    ],
    "NET201": [Ranks("live apart: ipc namespace", {1: {"host.namespaces": {"ipc": "ipc:[9]", "pid": "pid:[2]"}}})],
}
"""Codes of checks that compare, with ranks that do not agree."""

RANKS_PEACEFUL: dict[str, list[Ranks]] = {
    **{code: [Ranks()] for code in RANKS_TRIGGERS},
    "EP300": [Answering()],
    "NET202": [
        Ranks(),
        Ranks(other={n: {"network.devices": [interface("lo", "127.0.0.1/8", mtu_bytes=65536 - n)]} for n in range(4)}),
    ],
    "NET203": [
        Ranks(),
        # The difference between the two ends is another check's.
        Ranks(other={0: {"network.path_mtu": [path(0, peer_mtu_bytes=1500, tried_bytes=1500, passed_bytes=1500)]}}),
    ],
    "NET204": [Ranks(other={3: {"host.clock": {"offset_s": 2.0, "uncertain_s": 1.5}}})],
    "GPU201": [
        Ranks(),
        Ranks(other={n: {"job.settings": settings(LOCAL_RANK=n % 2, CUDA_VISIBLE_DEVICES=n % 2)} for n in range(4)}),
    ],
}
