"""What logs say of GPUs, their driver and the NVLink fabric."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterator

from ncclep_bench.doctor.checks.log_events import events_of, lines, listed, log_check, said, who
from ncclep_bench.doctor.contract import Trouble, Verdict
from ncclep_bench.doctor.records import Event
from ncclep_bench.model.facts import Facts


def _duplicate_gpu(facts: Facts) -> Iterator[Trouble]:
    events = events_of(facts, "duplicate_gpu")
    by_gpu: dict[tuple[str, str], set[int]] = defaultdict(set)
    for event in events:
        by_gpu[event.host, event.fields["gpu"]].update(int(event.fields[end]) for end in ("first", "second"))
    for (host, gpu), ranks in by_gpu.items():
        yield Trouble(
            f"ranks {listed(sorted(ranks))} are all on the same GPU (CUDA device {gpu}"
            + (f" of {host})" if host else ")")
            + ": the local rank does not choose the device",
            lines([event for event in events if event.fields["gpu"] == gpu]),
        )


XIDS: dict[int, tuple[Verdict, str]] = {
    48: ("error", "uncorrectable memory error"),
    61: ("warning", "internal microcontroller warning"),
    62: ("error", "internal microcontroller halt"),
    64: ("error", "row remapping failed"),
    74: ("error", "NVLink error"),
    79: ("error", "GPU has fallen off the bus"),
    94: ("warning", "contained memory error: the process that met it dies"),
    95: ("error", "uncontained memory error"),
    109: ("warning", "context switch timeout"),
    119: ("error", "GSP firmware does not answer"),
    120: ("error", "GSP firmware error"),
    **dict.fromkeys(range(144, 151), ("error", "NVLink 5 fabric error")),
}


APPLICATION = frozenset({13, 31, 43, 45, 63, 92})
"""Faults of the program, or of no consequence by themselves."""


def xid_of(event: Event) -> int:
    """The number of the fault; 45 only tears down what an earlier one broke, and names that."""
    return int((event.fields.get("previous") or event.fields["xid"])[:6])


def is_fabric(event: Event) -> bool:
    """Whether the fault is one of NVLink."""
    return xid_of(event) == 74 or 144 <= xid_of(event) <= 150


def _xids(facts: Facts) -> Iterator[Trouble]:
    found: dict[int, list[Event]] = defaultdict(list)
    for event in events_of(facts, "xid"):
        found[xid_of(event)].append(event)
    for code, events in sorted(found.items()):
        if code in APPLICATION:
            continue
        verdict, meaning = XIDS.get(code, ("info", "see NVIDIA's list"))
        if "nonfatal" in " ".join(event.fields.get("about", "") for event in events).lower():
            verdict = "warning"
        gpus = sorted({event.fields["gpu"] for event in events})
        yield Trouble(
            f"Xid {code} on {listed(gpus)}: {meaning}"
            + (": a fault of the NVLink fabric, not of the job" if is_fabric(events[0]) else ""),
            lines(events),
            verdict=verdict,
        )


def _switch_errors(facts: Facts) -> Iterator[Trouble]:
    events = events_of(facts, "sxid")
    fatal = [
        event
        for event in events
        if re.search(r"\bfatal", event.text, re.IGNORECASE) and "non-fatal" not in event.text.lower()
    ]
    if events:
        codes = Counter(event.fields["xid"] for event in events)
        yield Trouble(
            f"NVSwitch reports SXid {listed(sorted(codes))}",
            lines(fatal or events),
            verdict="error" if fatal else "warning",
        )


def _fabric_manager(facts: Facts) -> Iterator[Trouble]:
    if nothing := events_of(facts, "nothing_to_do"):
        yield Trouble(
            "the fabric manager found no NVSwitch (NV_WARN_NOTHING_TO_DO): not applicable here, no fault",
            lines(nothing),
            "sudo systemctl disable --now nvidia-fabricmanager",
            "info",
        )
    elif version := events_of(facts, "fabric_version"):
        yield Trouble("fabric manager and driver have different versions", lines(version))
    elif failed := events_of(facts, "fabric_failed"):
        yield Trouble(f"the fabric manager failed{who(failed)}", lines(failed))


CHECKS = (
    log_check(
        "GPU010",
        "No two ranks share a GPU",
        _duplicate_gpu,
        why="NCCL refuses two ranks of one communicator on a GPU. The launcher and CUDA_VISIBLE_DEVICES both "
        "choose, or none.",
        by_hand="grep 'Duplicate GPU' LOG",
        remedy="torch.cuda.set_device(int(os.environ['LOCAL_RANK']))   # mpirun: --map-by ppr:N:node, one GPU per "
        "local rank",
        reference="reports: horovod/horovod#3929, NVIDIA/Megatron-LM#661",
    ),
    log_check(
        "GPU011",
        "The kernel log has no GPU faults",
        _xids,
        needs=("log.kernel",),
        why="The driver numbers faults (Xid). Some are the program's own; memory, bus and fabric faults are the "
        "machine's, "
        "and the job's error messages are only their echo.",
        by_hand="sudo dmesg | grep Xid",
        remedy="nvidia-smi -q   # drain the node, reset the GPU or reboot; replace it if the fault returns",
        reference="https://docs.nvidia.com/deploy/xid-errors/; report: NVIDIA/open-gpu-kernel-modules#1150",
    ),
    log_check(
        "GPU012",
        "Driver and libraries are of one version",
        said(
            "driver and library versions differ{who}: the driver was upgraded under its loaded module",
            "driver_mismatch",
        ),
        needs=("log.kernel",),
        why="An unattended upgrade replaces the libraries; the old module stays loaded until the next boot.",
        by_hand="cat /proc/driver/nvidia/version; nvidia-smi",
        remedy="sudo reboot   # and hold the driver's packages",
        reference="report: NVIDIA/nvidia-container-toolkit#171",
    ),
    log_check(
        "GPU013",
        "The driver answers",
        said(
            "nvidia-smi cannot reach the driver{who}: its module is not loaded, or was built for another kernel",
            "no_driver",
        ),
        needs=("log.kernel",),
        why="After a kernel update the module must be built anew; until then there is no GPU.",
        by_hand="lsmod | grep nvidia; sudo dmesg | grep -i nvrm",
        remedy="sudo modprobe nvidia   # if there is no such module: dkms autoinstall, or install the driver again",
        reference="https://docs.nvidia.com/datacenter/tesla/driver-installation-guide/",
    ),
    log_check(
        "NVL004",
        "The fabric manager serves this machine",
        _fabric_manager,
        needs=("log.kernel",),
        why="On machines with NVSwitch it joins the GPUs, and must have the driver's very version; elsewhere it has "
        "nothing to do.",
        by_hand="systemctl status nvidia-fabricmanager; cat /proc/driver/nvidia/version",
        remedy="sudo apt-get install nvidia-fabricmanager-VERSION && sudo systemctl restart nvidia-fabricmanager",
        reference="reports: NVIDIA/gpu-operator#610, pytorch/ci-infra#541",
    ),
    log_check(
        "NVL005",
        "The NVLink fabric is initialised",
        said(
            "CUDA error 802, system not yet initialized{who}: the fabric manager is not running, or not for this "
            "driver",
            "not_initialized",
        ),
        why="GPUs behind NVSwitch refuse work until the fabric manager has set it up.",
        by_hand="systemctl status nvidia-fabricmanager; nvidia-smi -q | grep -A 3 Fabric",
        remedy="sudo systemctl restart nvidia-fabricmanager   # install the driver's very version if it refuses",
        reference="reports: pytorch/ci-infra#541, ollama/ollama#12136",
    ),
    log_check(
        "NVL006",
        "NVLink SHARP multicast can be bound",
        said(
            "multicast memory of NVLink SHARP could not be bound{who}: fabric manager or NVSwitch are in a bad state",
            "nvls_bind",
        ),
        why="Error 401 here is a state of the switch that dcgmi diag does not see.",
        by_hand="grep -i multicast LOG",
        remedy="sudo systemctl restart nvidia-fabricmanager   # meanwhile export NCCL_NVLS_ENABLE=0",
        reference="reports: NVIDIA/DCGM#304, NVIDIA/nccl#1788",
    ),
    log_check(
        "NVL007",
        "NVSwitches report no faults",
        _switch_errors,
        needs=("log.kernel",),
        why="A fatal SXid takes every GPU behind the switch out of the fabric.",
        by_hand="sudo dmesg | grep SXid",
        remedy="drain the node and restart it; replace the switch board if the fault returns",
        reference="https://docs.nvidia.com/datacenter/tesla/fabric-manager-user-guide/",
    ),
    log_check(
        "NVL008",
        "Memory can be shared across nodes (IMEX)",
        said(
            "memory could not be exported or imported{who}: the IMEX channel is missing, not writable, or its "
            "daemon is down",
            "imex",
        ),
        why="Multi-node NVLink shares memory through /dev/nvidia-caps-imex-channels, which containers and users "
        "often lack.",
        by_hand="ls -l /dev/nvidia-caps-imex-channels; nvidia-imex-ctl -N",
        remedy="sudo nvidia-modprobe -c 0 && sudo systemctl restart nvidia-imex   # meanwhile export "
        "NCCL_MNNVL_ENABLE=0",
        reference="reports: microsoft/mscclpp#467, NVIDIA/nvbandwidth#39",
    ),
)
