"""GPUs and their NVLinks: links against the model, fabric, errors, throttling, stray contexts."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from statistics import median

from ncclep_bench.doctor.checks.log_events import events_of
from ncclep_bench.doctor.checks.logged_gpus import is_fabric
from ncclep_bench.doctor.contract import Check, Trouble
from ncclep_bench.doctor.profiles import is_tray, profile_of
from ncclep_bench.doctor.records import Gpu, Link, LinkErrorRate, LinkErrors, PeerStatus, Process, Unreadable
from ncclep_bench.doctor.text import quoted
from ncclep_bench.model.facts import Facts

COUNTER_CEILINGS = frozenset({(1 << bits) - 1 for bits in (8, 16, 32, 64)})

PEER_STATUS = {
    "CNS": "the chipset does not support it",
    "GNS": "the GPU does not support it",
    "TNS": "the topology does not support it",
    "DR": "switched off in the driver",
    "NS": "not supported",
}
"""What nvidia-smi's abbreviations mean."""

MOST_BIT_ERRORS = 1e-12
"""After error correction; a healthy link reports 15e-255, which stands for none."""

CONTEXT_MIB = 1500
"""A CUDA context and the buffers of a communicator that nobody uses stay below this."""


def _by_gpu(links: Sequence[Link]) -> dict[tuple[str, str], list[Link]]:
    grouped: dict[tuple[str, str], list[Link]] = defaultdict(list)
    for link in links:
        grouped[link.where, link.gpu].append(link)
    return grouped


def _numbers(links: Sequence[Link]) -> str:
    return ", ".join(str(link.link) for link in links)


def _links(facts: Facts) -> Iterator[Trouble]:
    gpus = _by_gpu(facts.read("gpus.links", list[Link]))
    usual = int(median(len(links) for links in gpus.values()))
    dark: list[tuple[str, list[Link]]] = []
    for number, ((_, gpu), links) in enumerate(gpus.items()):
        name = f"GPU {gpu}" if gpu else "a GPU"
        model = profile_of(links[0].model) if links[0].model else None
        down = [link for link in links if link.state == "down"]
        up = [link for link in links if link.state == "up"]
        evidence = tuple(f"{link.at}: {name} link {link.link} is {link.state}" for link in down[:6]) or (links[0].at,)
        alike = [peers for peers in gpus.values() if peers[0].model == links[0].model and len(peers) == len(links)]
        most = max(sum(link.state == "up" for link in peers) for peers in alike)
        if down and not up:
            if most or (model and model.soldered):
                kind = f" ({links[0].model})" if links[0].model else ""
                yield Trouble(f"{name}{kind}: all NVLinks are down", evidence, verdict="error")
            else:
                dark.append((name, links))
        elif down and not (model and len(up) >= model.used):
            yield Trouble(
                f"{name}: NVLink degraded, link {_numbers(down)} inactive; {len(up)} of {len(links)} are up",
                evidence,
                verdict=None if model or most > len(up) else "info",
            )
        elif number == len(gpus) - 1 and len(links) < usual and len(gpus) > 1:
            yield Trouble(
                f"{name} ends after {len(links)} of {usual} links: the output stopped in its middle",
                (f"{links[-1].at}: the last link listed is {links[-1].link}",),
                "nvidia-smi nvlink -s   # again, and look at the kernel log if it stops there too",
            )
    unknown = {links[0].model: links for links in gpus.values() if links[0].model and not profile_of(links[0].model)}
    for name, links in unknown.items():
        if all(link.state == "up" for link in links):
            yield Trouble(
                f"{name} is in no machine profile: its {len(links)} listed links are up, and whether it should have "
                "more is not known",
                (links[0].at,),
                "nvidia-smi nvlink -s   # compare with a machine of the same model",
                "not_run",
            )
    fabric = [event for event in events_of(facts, "xid") if is_fabric(event)]
    if dark and fabric:
        yield Trouble(
            f"all NVLinks are down on {', '.join(name for name, _ in dark)}, with NVLink faults (Xid) in the kernel "
            f"log",
            tuple(links[0].at for _, links in dark[:4]) + tuple(quoted(event.at, event.text) for event in fabric[:4]),
            "sudo reboot   # and replace the GPU or its board if the fault returns",
            "error",
        )
    elif dark:
        yield Trouble(
            f"all NVLinks are down on {', '.join(name for name, _ in dark)}: right if no bridge is fitted, "
            "a fault if one is; dcgmi diag passes either way",
            tuple(f"{links[0].at}: {name}, {max(len(links), 1)} listed" for name, links in dark[:8]),
            "nvidia-smi topo -m   # a fitted bridge shows NV# between its two GPUs",
            "info",
        )


def _link_errors(facts: Facts) -> Iterator[Trouble]:
    counters = facts.read("gpus.link_errors", list[LinkErrors])
    readings: dict[tuple[str, str, int, str], list[LinkErrors]] = defaultdict(list)
    for counter in counters:
        readings[counter.where, counter.gpu, counter.link, counter.counter].append(counter)
    for (_, gpu, link, name), values in readings.items():
        first, last = values[0], values[-1]
        said = f"GPU {gpu} link {link}: {name} errors"
        if last.value > first.value:
            yield Trouble(
                f"{said} rise: {first.value}, then {last.value}", tuple(f"{v.at}: {v.value}" for v in (first, last))
            )
        elif last.value in COUNTER_CEILINGS:
            yield Trouble(f"{said} are at the counter's ceiling, {last.value}", (f"{last.at}: {last.value}",))
    counted = [values[-1] for values in readings.values() if 0 < values[-1].value not in COUNTER_CEILINGS]
    counted = [value for value in counted if len(readings[value.where, value.gpu, value.link, value.counter]) == 1]
    if counted:
        worst = max(counted, key=lambda counter: counter.value)
        yield Trouble(
            f"NVLink errors were counted on {len({(c.gpu, c.link) for c in counted})} links, most on GPU {worst.gpu} "
            f"link {worst.link}: {worst.value} {worst.counter}; whether they rise takes two readings",
            tuple(f"{c.at}: GPU {c.gpu} link {c.link} {c.counter} {c.value}" for c in counted[:6]),
            "for i in 1 2; do nvidia-smi nvlink -e; sleep 60; done > nvlink.txt; ncclep-doctor check --from nvlink.txt",
            "info",
        )


def _bit_error_rate(facts: Facts) -> Iterator[Trouble]:
    bad = [rate for rate in facts.read("gpus.link_error_rates", list[LinkErrorRate]) if rate.rate > MOST_BIT_ERRORS]
    if bad:
        worst = max(bad, key=lambda rate: rate.rate)
        yield Trouble(
            f"{len({(rate.where, rate.gpu, rate.link) for rate in bad})} NVLinks have a bit error rate above "
            f"{MOST_BIT_ERRORS:g}, worst GPU {worst.gpu} link {worst.link}: {worst.rate:g} ({worst.kind.lower()})",
            tuple(f"{r.at}: GPU {r.gpu} link {r.link} {r.kind} BER {r.rate:g}" for r in bad[:6]),
        )


def _unreadable(facts: Facts) -> Iterator[Trouble]:
    for device in facts.read("gpus.unreadable", list[Unreadable]):
        yield Trouble(f"{device.device} cannot be read", (f"{device.at}: {device.said}",))


def _is_ill(name: str, value: str) -> bool:
    """Whether a field of the fabric's health says so; its flags are true or false, its other fields words."""
    if name == "incorrect configuration":
        return value not in ("none", "n/a", "")
    return value in ("unhealthy", "degraded", "limited capacity") or (value in ("true", "yes") and name not in _CALM)


def _fabric(facts: Facts) -> Iterator[Trouble]:
    for gpu in facts.read("gpus.query", list[Gpu]):
        # Where indentation was lost, the fields of Health stand by themselves.
        fields = {
            key.rpartition("fabric/")[2]: value
            for key, value in gpu.fields.items()
            if "fabric/" in key or key.startswith("health/")
        }
        state, status = fields.get("state", "N/A").lower(), fields.get("status", "N/A").lower()
        if state in ("n/a", "not supported", "[n/a]"):
            continue
        evidence = (gpu.at, *(f"Fabric {key}: {value}" for key, value in fields.items()))
        ill = [f"{key}: {value}" for key, value in fields.items() if _is_ill(key.rpartition("/")[2], value.lower())]
        if state == "completed" and status in ("success", "n/a") and not ill:
            if is_tray(gpu.fields.get("product name", "")) and set(fields.get("clusteruuid", "1")) <= {"0", "-"}:
                yield Trouble(
                    f"GPU {gpu.gpu} belongs to no NVLink cluster: its ClusterUUID is zero", evidence, verdict="warning"
                )
            continue
        what = "; ".join(ill) if ill else f"state {fields.get('state')}, status {fields.get('status')}"
        yield Trouble(f"GPU {gpu.gpu} is not in a healthy NVLink fabric: {what}", evidence)


_CALM = ("healthy", "registered", "partition assigned")

_BRAKES = re.compile(r"hw slowdown|hw thermal|hw power brake|sw thermal|sync boost", re.IGNORECASE)


def _idle(gpu: Gpu) -> bool:
    fields = gpu.fields
    return any(
        (key.endswith("/idle") and value == "Active")
        or (key.endswith("utilization/gpu") and value.split()[0:1] == ["0"])
        or (key == "performance state" and value in ("P8", "P12"))
        for key, value in fields.items()
    )


def _throttle(facts: Facts) -> Iterator[Trouble]:
    for gpu in facts.read("gpus.query", list[Gpu]):
        brakes = [
            key.rpartition("/")[2]
            for key, value in gpu.fields.items()
            if "reasons/" in key and value == "Active" and _BRAKES.search(key)
        ]
        if brakes:
            yield Trouble(f"GPU {gpu.gpu} is slowed down: {', '.join(brakes)}", (gpu.at, *brakes))


def _pcie(facts: Facts) -> Iterator[Trouble]:
    for gpu in facts.read("gpus.query", list[Gpu]):
        if _idle(gpu):
            continue
        for what in ("generation", "width"):
            found = {
                key.rpartition("/")[2]: value
                for key, value in gpu.fields.items()
                if f"link {what}/" in key or f"{what}/" in key
            }
            most, now = (re.sub(r"\D", "", found.get(key, "")) for key in ("max", "current"))
            if most and now and int(now) < int(most):
                yield Trouble(
                    f"GPU {gpu.gpu}: PCIe link {what} is {now} of {most} under load",
                    (f"{gpu.at}: PCIe link {what} current {now}, max {most}",),
                )


def _memory_errors(facts: Facts) -> Iterator[Trouble]:
    for gpu in facts.read("gpus.query", list[Gpu]):
        for key, value in gpu.fields.items():
            name = key.rpartition("/")[2]
            if "remapped rows" in key and name in ("pending", "remapping failure occurred") and value.lower() == "yes":
                yield Trouble(
                    f"GPU {gpu.gpu}: remapped rows, {name}: yes",
                    (f"{gpu.at}: {key}: {value}",),
                    verdict="error" if "failure" in name else None,
                )
            elif "volatile" in key and "uncorrectable" in name and value.isdecimal() and int(value) > 0:
                yield Trouble(
                    f"GPU {gpu.gpu}: {value} uncorrectable memory errors since the driver was loaded",
                    (f"{gpu.at}: {key}: {value}",),
                    verdict="error",
                )


def _peers(facts: Facts) -> Iterator[Trouble]:
    pairs: dict[str, list[PeerStatus]] = defaultdict(list)
    for pair in facts.read("gpus.peers", list[PeerStatus]):
        if pair.capability in ("read", "write") and pair.status != "OK":
            pairs[pair.status].append(pair)
    for status, found in pairs.items():
        names = list(dict.fromkeys(f"{pair.gpu}-{pair.peer}" for pair in found))
        yield Trouble(
            f"{', '.join(names[:8])}{', …' if len(names) > 8 else ''}: no access to each other's memory: "
            f"{PEER_STATUS.get(status, 'unknown')} ({status})",
            tuple(f"{pair.at}: {pair.gpu} {pair.capability} {pair.peer}: {pair.status}" for pair in found[:6]),
            # A model without peer access is not broken.
            verdict="info" if status in ("GNS", "NS") else None,
        )


def _mig(facts: Facts) -> Iterator[Trouble]:
    sliced = [
        gpu
        for gpu in facts.read("gpus.query", list[Gpu])
        if any(key.endswith("mig mode/current") and value == "Enabled" for key, value in gpu.fields.items())
    ]
    if sliced:
        yield Trouble(
            f"MIG is on for {len(sliced)} GPUs: slices have no peer access and no NVLink",
            tuple(g.at for g in sliced[:8]),
        )


def _stray_contexts(facts: Facts) -> Iterator[Trouble]:
    processes = facts.read("gpus.processes", list[Process])
    gpus_of: dict[tuple[str, int], list[Process]] = defaultdict(list)
    on_gpu: dict[tuple[str, str], list[Process]] = defaultdict(list)
    for process in processes:
        gpus_of[process.where, process.pid].append(process)
        on_gpu[process.where, process.gpu].append(process)
    spread = {
        pid: held
        for (_, pid), held in gpus_of.items()
        if len({p.gpu for p in held}) > 1 and min(p.used_mib for p in held) < CONTEXT_MIB
    }
    home = Counter(min(held, key=lambda p: p.used_mib).gpu for held in spread.values())
    for gpu, count in home.items():
        held = [min(held, key=lambda p: p.used_mib) for held in spread.values()]
        held = [p for p in held if p.gpu == gpu]
        yield Trouble(
            f"{count} processes that work on another GPU hold {sum(p.used_mib for p in held)} MiB on GPU {gpu} too",
            tuple(f"{p.at}: PID {p.pid} {p.used_mib} MiB on GPU {p.gpu}" for p in held[:8]),
        )
    for (_, gpu), there in on_gpu.items():
        worker = max(there, key=lambda p: p.used_mib)
        small = [
            p
            for p in there
            if p.name == worker.name and p.used_mib < min(CONTEXT_MIB, worker.used_mib // 4) and p.pid not in spread
        ]
        if len(small) >= 2:
            yield Trouble(
                f"GPU {gpu} holds contexts of {len(small)} further processes of the same job, "
                f"~{int(median(p.used_mib for p in small))} MiB each, beside the {worker.used_mib} MiB of PID "
                f"{worker.pid}",
                tuple(f"{p.at}: PID {p.pid} {p.used_mib} MiB" for p in small[:8]),
            )


_SMI = "https://docs.nvidia.com/deploy/nvidia-smi/"

CHECKS = (
    Check(
        code="NVL001",
        title="Every NVLink that the model has is up",
        severity="warning",
        needs=("gpus.links",),
        judge=_links,
        why="Pairs of GPUs whose links are down talk over PCIe or fewer links. How many there should be depends on the "
        "model: H100 NVL uses 12 of 18 by design, PCIe cards have links only where a bridge is fitted.",
        by_hand="nvidia-smi nvlink -s",
        remedy="sudo dmesg | grep -E 'Xid|NVLink'   # then reseat the bridge or board, reset the GPU, or replace it",
        reference=f"{_SMI}; reports: Azure/azhpc-diagnostics#73, Azure/azurehpc-health-checks#162, NVIDIA/DCGM#198",
    ),
    Check(
        code="NVL002",
        title="NVLink error counters stand still",
        severity="warning",
        needs=("gpus.link_errors",),
        judge=_link_errors,
        why="Replays and recoveries cost time; rising counters are a bad connection. A counter at its ceiling tells "
        "no more.",
        by_hand="nvidia-smi nvlink -e   # twice, under load",
        remedy="nvidia-smi nvlink -re   # clear, measure again under load; reseat or replace the board if they rise",
        reference=_SMI,
    ),
    Check(
        code="NVL011",
        title="NVLinks have no more bit errors than allowed",
        severity="warning",
        needs=("gpus.link_error_rates",),
        judge=_bit_error_rate,
        why="A link that corrects and repeats much is slow before it is dead: its pair of GPUs is the slowest of every "
        "all-to-all.",
        by_hand="nvidia-smi nvlink -e | grep BER",
        remedy="nvidia-smi nvlink -e   # again under load; reseat or replace cable, bridge or board if it stays",
        reference=_SMI,
    ),
    Check(
        code="NVL003",
        title="The GPUs are in a healthy NVLink fabric",
        severity="error",
        needs=("gpus.query",),
        judge=_fabric,
        why="A GPU whose registration failed, or whose fabric is unhealthy, reaches no peer over NVSwitch; multi-node "
        "NVLink is not used, or crashes.",
        by_hand="nvidia-smi -q | grep -A 12 Fabric",
        remedy="sudo systemctl restart nvidia-fabricmanager   # or, on multi-node NVLink: check the switch trays "
        "and IMEX; "
        "meanwhile export NCCL_MNNVL_ENABLE=0",
        reference="reports: Azure/azhpc-images#506, kubernetes-sigs/dra-driver-nvidia-gpu#626, NVIDIA/nccl#2186",
    ),
    Check(
        code="GPU004",
        title="Every process has a context on its own GPU only",
        severity="warning",
        needs=("gpus.processes",),
        judge=_stray_contexts,
        why="A rank that calls CUDA before it sets its device makes a context on GPU 0, 0.5 to 1 GiB that is never "
        "freed.",
        by_hand="nvidia-smi --query-compute-apps=gpu_bus_id,pid,used_memory --format=csv",
        remedy="torch.cuda.set_device(local_rank)   # before the first CUDA call, in helper threads too",
        reference="reports: pytorch/pytorch#49481, pytorch/pytorch#135279",
    ),
    Check(
        code="GPU005",
        title="No GPU is slowed down",
        severity="warning",
        needs=("gpus.query",),
        judge=_throttle,
        why="One GPU that lowers its clock for heat or power drags every all-to-all to its pace.",
        by_hand="nvidia-smi -q -d PERFORMANCE   # under load",
        remedy="check cooling, power cables and power limit of this GPU",
        reference=f"{_SMI}; report: NVIDIA/NVSentinel#890",
    ),
    Check(
        code="GPU006",
        title="PCIe links run at full width and speed under load",
        severity="warning",
        needs=("gpus.query",),
        judge=_pcie,
        why="A link that trained down halves the bandwidth to host and adapters. Idle GPUs lower it to save power.",
        by_hand="nvidia-smi --query-gpu=pcie.link.gen.current,pcie.link.width.current --format=csv   # under load",
        remedy="reseat the GPU or riser, then reboot",
        reference=f"{_SMI}; reports: NVIDIA/nccl#893, janhq/jan#183",
    ),
    Check(
        code="GPU007",
        title="GPU memory is sound",
        severity="warning",
        needs=("gpus.query",),
        judge=_memory_errors,
        why="Pending remaps need a reset; uncorrectable errors kill the process that meets them, and its peers wait.",
        by_hand="nvidia-smi -q -d ECC,ROW_REMAPPER",
        remedy="sudo nvidia-smi --gpu-reset -i GPU   # with nothing running on it; replace it when remapping failed",
        reference="https://docs.nvidia.com/deploy/a100-gpu-mem-error-mgmt/",
    ),
    Check(
        code="GPU008",
        title="GPUs are whole",
        severity="warning",
        needs=("gpus.query",),
        judge=_mig,
        why="NCCL does not join slices of one GPU, and between GPUs slices have no peer access.",
        by_hand="nvidia-smi --query-gpu=mig.mode.current --format=csv",
        remedy="sudo nvidia-smi -mig 0",
        reference="report: NVIDIA/nccl#1716",
    ),
    Check(
        code="GPU015",
        title="GPUs may use each other's memory",
        severity="warning",
        needs=("gpus.peers",),
        judge=_peers,
        why="Without peer access dispatch and combine copy through host memory, and kernels that write to peers do not "
        "run.",
        by_hand="nvidia-smi topo -p2p r; nvidia-smi topo -p2p w",
        remedy="nvidia-smi topo -m; sudo lspci -vvv | grep ACSCtl   # then BIOS (ACS, IOMMU) or the driver's options",
        reference="https://docs.nvidia.com/deploy/nvml-api/; report: NVIDIA/nccl#667",
    ),
    Check(
        code="GPU009",
        title="Every device answers",
        severity="warning",
        needs=("gpus.unreadable",),
        judge=_unreadable,
        why="A command that stops at a device has found it lost or wedged; what it listed before that still counts.",
        by_hand="nvidia-smi; sudo dmesg | grep -i xid",
        remedy="sudo dmesg | grep -iE 'xid|fallen off'   # then reset the device or reboot",
        reference="https://docs.nvidia.com/deploy/xid-errors/",
    ),
)
