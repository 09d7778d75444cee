"""What logs say of GPUDirect RDMA and of transports that start on the GPU."""

from __future__ import annotations

from collections.abc import Iterator

from ncclep_bench.doctor.checks.log_events import GUIDE, events_of, lines, listed, log_check, said, who
from ncclep_bench.doctor.contract import Trouble
from ncclep_bench.doctor.records import Module
from ncclep_bench.model.facts import Facts


def _gdr_disabled(facts: Facts) -> Iterator[Trouble]:
    events = events_of(facts, "gdr_disabled")
    if not events:
        return
    devices = sorted({event.fields["device"] for event in events})
    modules = facts.get("host.modules", list[Module]) or []
    peermem = [module for module in modules if module.name in ("nvidia_peermem", "nv_peer_mem")]
    if peermem:
        reason = (
            f"{peermem[0].name} is loaded but used by nothing: it was built against another RDMA stack, or this "
            f"NCCL does "
            "not know its path, and there is no DMA-BUF"
        )
        fix = "modinfo nvidia_peermem   # reinstall the driver after the RDMA stack, or upgrade NCCL (2.23 or later)"
    else:
        reason, fix = "no peer-memory module and no DMA-BUF", None
    yield Trouble(
        f"GPUDirect RDMA is disabled for {listed(devices)}{who(events)}: {reason}; up to 10 times slower, and no "
        f"GIN GDAKI",
        (*lines(events), *(f"{m.at}: {m.name} used by {', '.join(m.used_by) or 'nothing'}" for m in peermem)),
        fix,
    )


def _no_peermem(facts: Facts) -> Iterator[Trouble]:
    if events := events_of(facts, "no_peermem"):
        after = events_of(facts, "peer_unreachable", "nvshmem_failed")
        yield Trouble(
            f"NVSHMEM cannot use InfiniBand (IBRC){who(events)}: nvidia_peermem is not loaded"
            + ("; 'Peer GPU not accessible' follows from that" if after else ""),
            lines([*events, *after]),
        )


def _unreachable(facts: Facts) -> Iterator[Trouble]:
    causes = events_of(facts, "no_peermem", "ibgda", "devx")
    if (events := events_of(facts, "peer_unreachable", "nvshmem_failed")) and not causes:
        yield Trouble(f"NVSHMEM finds no way from one GPU to another{who(events)}", lines(events))


CHECKS = (
    log_check(
        "GDR002",
        "GPUDirect RDMA is in use",
        _gdr_disabled,
        severity="warning",
        why="Without it every byte to another node is copied through host memory, and GPU-initiated networking is "
        "unavailable.",
        by_hand="lsmod | grep peermem; grep 'GPU Direct RDMA' LOG",
        remedy="sudo modprobe nvidia_peermem && echo nvidia_peermem | sudo tee /etc/modules-load.d/nvidia-peermem.conf",
        reference=f"{GUIDE}; reports: NVIDIA/nccl#1537, NVIDIA/nccl#897",
    ),
    log_check(
        "GDR003",
        "NVSHMEM finds a peer-memory module",
        _no_peermem,
        needs=("log.expert_parallel",),
        why="Its InfiniBand transports register GPU memory through nvidia_peermem, which is not loaded at boot by "
        "default.",
        by_hand="lsmod | grep peermem",
        remedy="sudo modprobe nvidia_peermem && echo nvidia_peermem | sudo tee /etc/modules-load.d/nvidia-peermem.conf",
        reference="report: deepseek-ai/DeepEP#223",
    ),
    log_check(
        "GDR004",
        "RDMA registrations outlive no context",
        said(
            "nvidia-peermem met invalid contexts{who}: registrations were freed after their CUDA context had died, "
            "and are stale",
            "peermem_context",
        ),
        severity="warning",
        needs=("log.kernel",),
        why="A process that ends without deregistering leaves registrations behind.",
        by_hand="sudo dmesg | grep peermem",
        remedy="restart the job   # and prefer DMA-BUF: open kernel modules, Linux 6.1 or later",
        reference="report: NVIDIA/nccl#1474",
    ),
    log_check(
        "GDR005",
        "GPU memory can be registered by DMA-BUF",
        said("registration by DMA-BUF failed{who}", "dmabuf"),
        severity="warning",
        why="It needs a kernel, a driver and an RDMA stack that all know DMA-BUF.",
        by_hand="grep dmabuf LOG; uname -r; cat /proc/driver/nvidia/version",
        remedy="export NCCL_DMABUF_ENABLE=0   # and load nvidia_peermem",
        reference="reports: NVIDIA/nccl#1676, NVIDIA/nccl#778",
    ),
    log_check(
        "GDR006",
        "NVSHMEM can start InfiniBand from the GPU (IBGDA)",
        said("NVSHMEM could not start IBGDA{who}: driver options are missing, or GDRCopy", "ibgda", "gdrcopy"),
        needs=("log.expert_parallel",),
        why="It needs PeerMappingOverride and EnableStreamMemOPs, or NVSHMEM 3.4.5 in its CPU-assisted mode.",
        by_hand="grep -E 'EnableStreamMemOPs|RegistryDwords' /proc/driver/nvidia/params; ls /dev/gdrdrv",
        remedy='options nvidia NVreg_EnableStreamMemOPs=1 NVreg_RegistryDwords="PeerMappingOverride=1;"   '
        "# in /etc/modprobe.d/nvidia.conf, then reboot",
        reference="reports: deepseek-ai/DeepEP#36, NVIDIA/nvshmem#23",
    ),
    log_check(
        "GDR007",
        "The container may use DEVX",
        said("mlx5dv_devx_uar could not be allocated{who}: the container lacks RDMA devices or capabilities", "devx"),
        needs=("log.expert_parallel",),
        why="Queue pairs on the GPU are made through DEVX, which needs the device files and a capability.",
        by_hand="ls -l /dev/infiniband; grep CapEff /proc/self/status",
        remedy="docker run --device=/dev/infiniband --cap-add=IPC_LOCK --cap-add=SYS_RAWIO …",
        reference="report: sgl-project/sglang#12533",
    ),
    log_check(
        "GDR008",
        "NVSHMEM reaches every GPU",
        _unreachable,
        needs=("log.expert_parallel",),
        why="Neither NVLink, PCIe peer access nor a network transport joins the two GPUs it names.",
        by_hand="NVSHMEM_DEBUG=INFO; nvidia-smi topo -p2p r",
        remedy="nvidia-smi topo -p2p r   # and look in the log for the transport that was skipped",
        reference="report: deepseek-ai/DeepEP#223",
    ),
)
