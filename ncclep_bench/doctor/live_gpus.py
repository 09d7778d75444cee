"""What the driver says of this machine's GPUs, as the records that recorded output of nvidia-smi becomes."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from ncclep_bench.doctor.records import Gpu, Link, LinkErrorRate, LinkErrors, PeerStatus, Process, Topology, Unreadable
from ncclep_bench.runtime.nvml import Driver, Fabric, GpuState, Missing, NvLink

SOURCE = "NVML"

_Field = Callable[[int | str], str]


def _unit(unit: str, divisor: float = 1, digits: int = 0) -> _Field:
    return lambda value: f"{float(value) / divisor:.{digits}f}{unit}"


def _word(*words: str) -> _Field:
    """The word that a number stands for."""
    return lambda value: words[int(value)] if 0 <= int(value) < len(words) else str(value)


_SWITCH, _ANSWER = _word("Disabled", "Enabled"), _word("No", "Yes")

_FIELDS: dict[str, tuple[str, _Field]] = {
    "minor_number": ("minor number", str),
    "persistence": ("persistence mode", _SWITCH),
    "mig": ("mig mode/current", _SWITCH),
    "performance_state": ("performance state", "P{}".format),
    "utilization_percent": ("utilization/gpu", _unit(" %")),
    "pcie_generation": ("pci/gpu link info/pcie generation/current", str),
    "pcie_generation_max": ("pci/gpu link info/pcie generation/max", str),
    "pcie_width": ("pci/gpu link info/link width/current", _unit("x")),
    "pcie_width_max": ("pci/gpu link info/link width/max", _unit("x")),
    "pcie_replays": ("pci/replays since reset", str),
    "memory_total_bytes": ("fb memory usage/total", _unit(" MiB", 1 << 20)),
    "memory_used_bytes": ("fb memory usage/used", _unit(" MiB", 1 << 20)),
    "ecc": ("ecc mode/current", _SWITCH),
    "ecc_volatile_correctable": ("ecc errors/volatile/correctable", str),
    "ecc_volatile_uncorrectable": ("ecc errors/volatile/uncorrectable", str),
    "ecc_aggregate_correctable": ("ecc errors/aggregate/correctable", str),
    "ecc_aggregate_uncorrectable": ("ecc errors/aggregate/uncorrectable", str),
    "remapped_correctable": ("remapped rows/correctable error", str),
    "remapped_uncorrectable": ("remapped rows/uncorrectable error", str),
    "remapped_pending": ("remapped rows/pending", _ANSWER),
    "remapping_failed": ("remapped rows/remapping failure occurred", _ANSWER),
    "temperature_c": ("temperature/gpu current temp", _unit(" C")),
    "power_milliwatt": ("gpu power readings/average power draw", _unit(" W", 1000, 2)),
    "power_limit_milliwatt": ("gpu power readings/current power limit", _unit(" W", 1000, 2)),
    "power_limit_default_milliwatt": ("gpu power readings/default power limit", _unit(" W", 1000, 2)),
    "clock_sm_mhz": ("clocks/sm", _unit(" MHz")),
    "clock_sm_max_mhz": ("max clocks/sm", _unit(" MHz")),
    "clock_memory_mhz": ("clocks/memory", _unit(" MHz")),
    "clock_memory_max_mhz": ("max clocks/memory", _unit(" MHz")),
}

_REASONS = (
    "idle",
    "applications clocks setting",
    "sw power cap",
    "hw slowdown",
    "sync boost",
    "sw thermal slowdown",
    "hw thermal slowdown",
    "hw power brake slowdown",
    "display clock setting",
)
"""Bits of the reasons for a lower clock, the lowest first."""

_HEALTH: dict[str, tuple[str, _Field]] = {
    "degraded_bw": ("bandwidth", _word("N/A", "Degraded", "Full")),
    "route_recovery": ("route recovery in progress", _word("N/A", "True", "False")),
    "route_unhealthy": ("route unhealthy", _word("N/A", "True", "False")),
    "access_timeout_recovery": ("access timeout recovery", _word("N/A", "True", "False")),
    "partition_assigned": ("partition assigned", _word("N/A", "True", "False")),
}
_STATE = _word("N/A", "Not Started", "In Progress", "Completed")
_SUMMARY = _word("N/A", "Healthy", "Unhealthy", "Limited Capacity")
_CONFIGURATION = _word(
    "N/A",
    "None",
    "Incorrect SysGUID",
    "Incorrect Chassis SN",
    "No Partition",
    "Insufficient NVLinks",
    "Incompatible GPU Firmware",
    "Invalid Location",
    "GPU State Invalid",
)
_UNTOLD = {"absent": "N/A", "not_permitted": "Insufficient Permissions", "failed": "Unknown Error"}

P2P_STATUS = ("OK", "CNS", "GNS", "TNS", "DR", "NS", "U")
"""As `nvidia-smi topo -p2p` has them: fine; not with this chipset, GPU, topology; disabled; not supported; unknown."""

_PATHS = {0: "PSB", 10: "PIX", 20: "PXB", 30: "PHB", 40: "NODE", 50: "SYS"}


def listed(driver: Driver) -> list[dict[str, str]]:
    """Each GPU by name."""
    return [
        {
            "index": str(gpu.index),
            "uuid": gpu.uuid,
            "name": gpu.name,
            "bus_id": gpu.bus_id,
            "compute_capability": _said(gpu, "compute_capability"),
            "driver": driver.version,
        }
        for gpu in driver.gpus
    ]


def query(driver: Driver) -> list[Gpu]:
    """The fields that `nvidia-smi -q` prints and checks read."""
    return [
        Gpu(at=_at(gpu), gpu=gpu.bus_id, fields={**_identity(gpu), **_shown(gpu), **_reasons(gpu), **_fabric(gpu)})
        for gpu in driver.gpus
    ]


def links(driver: Driver) -> list[Link]:
    """State of every NVLink; a GPU without any has none here."""
    return [
        Link(
            at=_at(gpu),
            gpu=str(gpu.index),
            link=link.number,
            state="up" if link.active else "down",
            model=gpu.name,
            version=link.version,
            remote=link.remote,
        )
        for gpu in driver.gpus
        for link in _links(gpu)
    ]


def link_errors(driver: Driver) -> list[LinkErrors]:
    """The error counters of links that are up."""
    return [
        LinkErrors(at=_at(gpu), gpu=str(gpu.index), link=link.number, counter=counter, value=value)
        for gpu in driver.gpus
        for link in _links(gpu)
        for counter, value in link.errors.items()
    ]


def link_error_rates(driver: Driver) -> list[LinkErrorRate]:
    """The bit error rates of links that are up, where the model counts them."""
    return [
        LinkErrorRate(at=_at(gpu), gpu=str(gpu.index), link=link.number, kind=kind, rate=rate)
        for gpu in driver.gpus
        for link in _links(gpu)
        for kind, rate in link.bit_error_rates.items()
    ]


def processes(driver: Driver) -> list[Process]:
    """Who holds memory of which GPU, where the driver tells how much."""
    return [
        Process(at=_at(gpu), gpu=str(gpu.index), pid=held.pid, name=held.name, used_mib=held.used_bytes >> 20)
        for gpu in driver.gpus
        for held in ([] if isinstance(gpu.processes, Missing) else gpu.processes)
        if held.used_bytes is not None
    ]


def unreadable(driver: Driver) -> list[Unreadable]:
    """GPUs that do not answer, and those that fail to answer something that they support."""
    found = [
        Unreadable(at=f"{SOURCE}:{index}", device=f"GPU {index}", said=said)
        for index, said in driver.unreadable.items()
    ]
    for gpu in driver.gpus:
        answers = {**gpu.fields, "links": gpu.links, "fabric": gpu.fabric, "processes": gpu.processes}
        failed = {name: a.reason for name, a in answers.items() if isinstance(a, Missing) and a.state == "failed"}
        if failed:
            said = f"{', '.join(failed)}: {next(iter(failed.values()))}"
            found.append(Unreadable(at=_at(gpu), device=f"GPU {gpu.index}", said=said[:300]))
    return found


def peers(driver: Driver) -> list[PeerStatus]:
    """Whether each GPU can reach each other's memory, by capability."""
    return [
        PeerStatus(
            at=f"{SOURCE}:{pair.gpu}",
            gpu=f"GPU{pair.gpu}",
            peer=f"GPU{pair.peer}",
            capability=capability,
            status=P2P_STATUS[status] if status < len(P2P_STATUS) else "U",
        )
        for pair in driver.peers
        for capability, status in pair.status.items()
    ]


def topology(driver: Driver) -> list[Topology]:
    """The matrix of `nvidia-smi topo -m` without its adapters, which NVML does not know; none if links are untold."""
    if any(isinstance(gpu.links, Missing) and gpu.links.state != "absent" for gpu in driver.gpus):
        return []
    gpus = {gpu.index: gpu for gpu in driver.gpus}
    paths = {f"GPU{index}": {f"GPU{index}": "X"} for index in gpus}
    for pair in driver.peers:
        nvlinks = _between(gpus[pair.gpu], gpus[pair.peer]) if pair.status.get("nvlink") == 0 else 0
        path = f"NV{nvlinks}" if nvlinks else _PATHS.get(-1 if pair.ancestor is None else pair.ancestor, "N/A")
        paths[f"GPU{pair.gpu}"][f"GPU{pair.peer}"] = path
    return [Topology(at=SOURCE, paths=paths)] if paths else []


def _between(gpu: GpuState, peer: GpuState) -> int:
    """NVLinks that lead to the peer itself, or else those that both have into the switches between them."""
    direct = sum(link.remote.lower() == peer.bus_id.lower() for link in _links(gpu) if link.active)
    return direct or min(sum(link.active for link in _links(end)) for end in (gpu, peer))


def _at(gpu: GpuState) -> str:
    return f"{SOURCE}:{gpu.index}"


def _links(gpu: GpuState) -> Iterator[NvLink]:
    yield from [] if isinstance(gpu.links, Missing) else gpu.links


def _said(gpu: GpuState, name: str, show: _Field = str) -> str:
    value = gpu.fields.get(name, Missing("absent", "was not asked"))
    return _UNTOLD[value.state] if isinstance(value, Missing) else show(value)


def _identity(gpu: GpuState) -> dict[str, str]:
    return {"product name": gpu.name, "gpu uuid": gpu.uuid, "pci/bus id": gpu.bus_id}


def _shown(gpu: GpuState) -> dict[str, str]:
    return {key: _said(gpu, name, show) for name, (key, show) in _FIELDS.items()}


def _reasons(gpu: GpuState) -> dict[str, str]:
    mask = gpu.fields.get("event_reasons")
    if not isinstance(mask, int):
        return {f"clocks event reasons/{name}": _said(gpu, "event_reasons") for name in _REASONS}
    return {
        f"clocks event reasons/{name}": "Active" if mask >> bit & 1 else "Not Active"
        for bit, name in enumerate(_REASONS)
    }


def _fabric(gpu: GpuState) -> dict[str, str]:
    if not isinstance(gpu.fabric, Fabric):
        return {"fabric/state": "N/A", "fabric/status": gpu.fabric.reason}
    fabric = gpu.fabric
    # The others say something only of a registration that has ended.
    ended = _STATE(fabric.state) == "Completed"
    return {
        "fabric/state": _STATE(fabric.state),
        "fabric/status": fabric.status if ended else "N/A",
        "fabric/cliqueid": str(fabric.clique) if ended else "N/A",
        "fabric/clusteruuid": fabric.cluster if ended else "N/A",
        "fabric/health/summary": _SUMMARY(fabric.summary),
        "fabric/health/incorrect configuration": _CONFIGURATION(fabric.configuration),
        **{f"fabric/health/{_HEALTH[name][0]}": _HEALTH[name][1](value) for name, value in fabric.health.items()},
    }
