"""The gate to NVML (pynvml): what the driver says of every GPU, asked by a child that can be given up."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator
from itertools import permutations
from statistics import median
from typing import Any, Literal, TypeVar

import msgspec

from ncclep_bench.runtime.child import run_bounded

T = TypeVar("T")

_RESTRICTED = ("NoPermission",)
_LACKING = ("NotSupported", "FunctionNotFound", "LibraryNotFound", "DriverNotLoaded", "NotFound", "NoData")


class Missing(msgspec.Struct, frozen=True, tag=True):
    """Why there is no answer; `state` as of a fact."""

    state: Literal["absent", "not_permitted", "failed"]
    reason: str


class NvLink(msgspec.Struct, frozen=True):
    """One NVLink; `remote` is the PCI address of its other end where the driver tells it.

    `bit_error_rates` are those after error correction: of the link's bits (effective) and symbols.
    """

    number: int
    active: bool
    version: int | None = None
    remote: str = ""
    errors: dict[str, int] = {}
    bit_error_rates: dict[str, float] = {}


class Holder(msgspec.Struct, frozen=True):
    """A process that holds memory of a GPU; None: the driver does not tell how much."""

    pid: int
    name: str
    used_bytes: int | None


class Fabric(msgspec.Struct, frozen=True, tag=True):
    """How a GPU stands in its NVLink fabric, numbered as the driver does; of `health` 0 is untold, 1 yes, 2 no."""

    state: int
    status: str
    clique: int
    cluster: str
    summary: int
    configuration: int
    health: dict[str, int]


class GpuState(msgspec.Struct, frozen=True):
    """One GPU: `fields` as in FIELDS."""

    index: int
    bus_id: str
    name: str
    uuid: str
    fields: dict[str, int | str | Missing]
    links: list[NvLink] | Missing
    fabric: Fabric | Missing
    processes: list[Holder] | Missing


class Peers(msgspec.Struct, frozen=True):
    """What one GPU can do with another's memory: capability → status; `ancestor` is where their PCIe paths meet."""

    gpu: int
    peer: int
    status: dict[str, int]
    ancestor: int | None


class Driver(msgspec.Struct, frozen=True, tag=True):
    """The answers of one driver; `unreadable` are GPUs by number, in the driver's words."""

    version: str
    cuda: str
    gpus: list[GpuState]
    unreadable: dict[int, str]
    peers: list[Peers]


P2P_CAPABILITIES = ("read", "write", "nvlink", "atomics", "pcie")

FIELDS: dict[str, Callable[[Any, Any], int | str]] = {
    "compute_capability": lambda nvml, gpu: "{}.{}".format(*nvml.nvmlDeviceGetCudaComputeCapability(gpu)),
    "minor_number": lambda nvml, gpu: nvml.nvmlDeviceGetMinorNumber(gpu),
    "persistence": lambda nvml, gpu: nvml.nvmlDeviceGetPersistenceMode(gpu),
    "mig": lambda nvml, gpu: nvml.nvmlDeviceGetMigMode(gpu)[0],
    "performance_state": lambda nvml, gpu: nvml.nvmlDeviceGetPerformanceState(gpu),
    "utilization_percent": lambda nvml, gpu: nvml.nvmlDeviceGetUtilizationRates(gpu).gpu,
    "event_reasons": lambda nvml, gpu: nvml.nvmlDeviceGetCurrentClocksEventReasons(gpu),
    "pcie_generation": lambda nvml, gpu: nvml.nvmlDeviceGetCurrPcieLinkGeneration(gpu),
    "pcie_generation_max": lambda nvml, gpu: nvml.nvmlDeviceGetMaxPcieLinkGeneration(gpu),
    "pcie_width": lambda nvml, gpu: nvml.nvmlDeviceGetCurrPcieLinkWidth(gpu),
    "pcie_width_max": lambda nvml, gpu: nvml.nvmlDeviceGetMaxPcieLinkWidth(gpu),
    "pcie_replays": lambda nvml, gpu: nvml.nvmlDeviceGetPcieReplayCounter(gpu),
    "memory_total_bytes": lambda nvml, gpu: nvml.nvmlDeviceGetMemoryInfo(gpu).total,
    "memory_used_bytes": lambda nvml, gpu: nvml.nvmlDeviceGetMemoryInfo(gpu, nvml.nvmlMemory_v2).used,
    "ecc": lambda nvml, gpu: nvml.nvmlDeviceGetCurrentEccMode(gpu),
    "ecc_volatile_correctable": lambda nvml, gpu: nvml.nvmlDeviceGetTotalEccErrors(gpu, 0, 0),
    "ecc_volatile_uncorrectable": lambda nvml, gpu: nvml.nvmlDeviceGetTotalEccErrors(gpu, 1, 0),
    "ecc_aggregate_correctable": lambda nvml, gpu: nvml.nvmlDeviceGetTotalEccErrors(gpu, 0, 1),
    "ecc_aggregate_uncorrectable": lambda nvml, gpu: nvml.nvmlDeviceGetTotalEccErrors(gpu, 1, 1),
    "remapped_correctable": lambda nvml, gpu: nvml.nvmlDeviceGetRemappedRows(gpu)[0],
    "remapped_uncorrectable": lambda nvml, gpu: nvml.nvmlDeviceGetRemappedRows(gpu)[1],
    "remapped_pending": lambda nvml, gpu: nvml.nvmlDeviceGetRemappedRows(gpu)[2],
    "remapping_failed": lambda nvml, gpu: nvml.nvmlDeviceGetRemappedRows(gpu)[3],
    "temperature_c": lambda nvml, gpu: nvml.nvmlDeviceGetTemperature(gpu, nvml.NVML_TEMPERATURE_GPU),
    "power_milliwatt": lambda nvml, gpu: nvml.nvmlDeviceGetPowerUsage(gpu),
    "power_limit_milliwatt": lambda nvml, gpu: nvml.nvmlDeviceGetEnforcedPowerLimit(gpu),
    "power_limit_default_milliwatt": lambda nvml, gpu: nvml.nvmlDeviceGetPowerManagementDefaultLimit(gpu),
    "clock_sm_mhz": lambda nvml, gpu: nvml.nvmlDeviceGetClockInfo(gpu, nvml.NVML_CLOCK_SM),
    "clock_sm_max_mhz": lambda nvml, gpu: nvml.nvmlDeviceGetMaxClockInfo(gpu, nvml.NVML_CLOCK_SM),
    "clock_memory_mhz": lambda nvml, gpu: nvml.nvmlDeviceGetClockInfo(gpu, nvml.NVML_CLOCK_MEM),
    "clock_memory_max_mhz": lambda nvml, gpu: nvml.nvmlDeviceGetMaxClockInfo(gpu, nvml.NVML_CLOCK_MEM),
}
"""Single values of a GPU, and the call that gives each."""

_LINK_ERRORS = ("Replay", "Recovery", "CRC FLIT", "CRC Data", "ECC Data")


def ask(deadline_s: float) -> Driver | Missing:
    """What the driver says, from a child process: a driver that hangs costs the deadline and nothing else."""
    code = f"import sys; sys.path[:] = {sys.path!r}; from ncclep_bench.runtime import nvml; nvml.main()"
    try:
        child = run_bounded([sys.executable, "-c", code], deadline_s)
    except OSError as error:  # a TimeoutError too
        return Missing("failed", f"the NVIDIA driver: {error}")
    try:
        answer: Driver | Missing = msgspec.json.decode(child.stdout, type=Driver | Missing)
    except msgspec.MsgspecError:
        said = (child.stderr.strip() or "nothing").splitlines()[-1][:200]
        return Missing("failed", f"the process that asks the NVIDIA driver left with {child.returncode}: {said}")
    return answer


def main() -> None:
    """Print `driver()` as JSON."""
    sys.stdout.write(msgspec.json.encode(driver()).decode())


def driver() -> Driver | Missing:
    """What the driver says, asked in this process, which waits as long as the driver does."""
    try:
        import pynvml
    except ImportError:
        return Missing("absent", "pynvml is not installed: pip install nvidia-ml-py")
    nvml: Any = pynvml
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as error:
        return _missing(error)
    try:
        return _driver(nvml)
    except nvml.NVMLError as error:
        return _missing(error)
    finally:
        nvml.nvmlShutdown()


def sent_bytes(bus_id: str) -> int | None:
    """Bytes of data that the NVLinks of a GPU have sent so far, as its links count them; None where none does.

    Asked in this process, which waits as long as the driver does.
    """
    try:
        import pynvml
    except ImportError:
        return None
    nvml: Any = pynvml
    try:
        nvml.nvmlInit()
    except nvml.NVMLError:
        return None
    try:
        handle = nvml.nvmlDeviceGetHandleByPciBusId(bus_id.encode())
        return _link_bytes(nvml, handle, nvml.NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_TX)
    except nvml.NVMLError:
        return None
    finally:
        nvml.nvmlShutdown()


def _link_bytes(nvml: Any, handle: Any, field: int) -> int | None:
    """A counter in KiB of all links together, in bytes; None where none counts."""
    answers = nvml.nvmlDeviceGetFieldValues(handle, [(field, link) for link in range(nvml.NVML_NVLINK_MAX_LINKS)])
    counted = [int(answer.value.ullVal) for answer in answers if answer.nvmlReturn == nvml.NVML_SUCCESS]
    return sum(counted) << 10 if counted else None


class Meter:
    """How much of a GPU is in use between `start` and `stop`; a kernel that waits in a loop counts as use."""

    def __init__(self, nvml: Any, handle: Any) -> None:
        self._nvml, self._handle = nvml, handle
        self._glances: list[float] = []

    def start(self) -> None:
        """Use counts from here on."""
        self._glances = []
        self._sample, self._carried, self._started_s = self._gpm_sample(), self._link_counts(), time.perf_counter()

    def glance(self) -> None:
        """Ask for the use in the last moments, at most a second; before the GPU is idle again."""
        rates = _try(self._nvml, self._nvml.nvmlDeviceGetUtilizationRates, self._handle)
        if not isinstance(rates, Missing):
            self._glances.append(rates.gpu / 100)

    def stop(self) -> dict[str, float]:
        """Shares of 1 and gigabytes per second, by name of a column; without what the driver does not tell."""
        elapsed_s = time.perf_counter() - self._started_s
        carried = self._link_counts()
        used = {name: (carried[name] - before) / elapsed_s / 1e9 for name, before in self._carried.items()}
        if self._glances:
            used["gpu_util"] = median(self._glances)
        return used | self._gpm(self._sample, self._gpm_sample())

    def _link_counts(self) -> dict[str, int]:
        fields = {
            "nvlink_tx_gbps": self._nvml.NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_TX,
            "nvlink_rx_gbps": self._nvml.NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_RX,
        }
        counts = {
            name: _or(None, self._nvml, _link_bytes, self._nvml, self._handle, field) for name, field in fields.items()
        }
        return {name: count for name, count in counts.items() if count is not None}

    def _gpm_sample(self) -> Any:
        """A sample of the GPU's performance monitors; None where it has none that this process may read."""
        nvml = self._nvml
        try:
            if not nvml.nvmlGpmQueryDeviceSupport(self._handle).isSupportedDevice:
                return None
            sample = nvml.nvmlGpmSampleAlloc()
        except nvml.NVMLError:
            return None
        try:
            return nvml.nvmlGpmSampleGet(self._handle, sample)
        except nvml.NVMLError:
            nvml.nvmlGpmSampleFree(sample)
            return None

    def _gpm(self, first: Any, last: Any) -> dict[str, float]:
        """What lies between two samples, which are given back."""
        nvml = self._nvml
        try:
            if first is None or last is None:
                return {}
            asked = nvml.c_nvmlGpmMetricsGet_t()
            asked.version, asked.numMetrics = nvml.NVML_GPM_METRICS_GET_VERSION, 2
            asked.sample1, asked.sample2 = first, last
            metrics = asked.metrics[:2]
            metrics[0].metricId, metrics[1].metricId = nvml.NVML_GPM_METRIC_SM_UTIL, nvml.NVML_GPM_METRIC_DRAM_BW_UTIL
            nvml.nvmlGpmMetricsGet(asked)
            shares = [metric.value / 100 if metric.nvmlReturn == nvml.NVML_SUCCESS else None for metric in metrics]
            used = {} if shares[0] is None else {"sm_util": shares[0]}
            return used if shares[1] is None else used | {"dram_gbps": shares[1] * self._dram_gbps()}
        except nvml.NVMLError:
            return {}
        finally:
            for sample in (first, last):
                if sample is not None:
                    nvml.nvmlGpmSampleFree(sample)

    def _dram_gbps(self) -> float:
        """What the memory moves at its highest clock, twice a cycle: the monitors give a share of it."""
        clock_mhz = self._nvml.nvmlDeviceGetMaxClockInfo(self._handle, self._nvml.NVML_CLOCK_MEM)
        return float(2 * clock_mhz * self._nvml.nvmlDeviceGetMemoryBusWidth(self._handle) / 8 / 1e3)


@contextlib.contextmanager
def meter(bus_id: str) -> Iterator[Meter | None]:
    """The meter of a GPU; None without a driver. Asked in this process, which waits as long as the driver does."""
    try:
        import pynvml
    except ImportError:
        yield None
        return
    nvml: Any = pynvml
    try:
        nvml.nvmlInit()
    except nvml.NVMLError:
        yield None
        return
    try:
        handle = _or(None, nvml, nvml.nvmlDeviceGetHandleByPciBusId, bus_id.encode())
        yield None if handle is None else Meter(nvml, handle)
    finally:
        nvml.nvmlShutdown()


def _missing(error: Exception) -> Missing:
    kind = type(error).__name__.removeprefix("NVMLError_")
    if kind in _RESTRICTED:
        return Missing("not_permitted", f"NVML: {error}")
    if kind == "LibraryNotFound":
        return Missing("absent", f"no NVIDIA driver is installed, or visible here (NVML: {error})")
    return Missing("absent" if kind in _LACKING else "failed", f"NVML: {error}")


def _try(nvml: Any, read: Callable[..., T], *arguments: Any) -> T | Missing:
    try:
        return read(*arguments)
    except nvml.NVMLError as error:
        return _missing(error)


def _or(default: T, nvml: Any, read: Callable[..., T], *arguments: Any) -> T:
    answer = _try(nvml, read, *arguments)
    return default if isinstance(answer, Missing) else answer


def _driver(nvml: Any) -> Driver:
    handles: dict[int, Any] = {}
    gpus: list[GpuState] = []
    unreadable: dict[int, str] = {}
    for index in range(nvml.nvmlDeviceGetCount()):
        try:
            handle = nvml.nvmlDeviceGetHandleByIndex(index)
            gpus.append(_gpu(nvml, index, handle))
            handles[index] = handle
        except nvml.NVMLError as error:
            unreadable[index] = str(error)
    cuda = _or(0, nvml, nvml.nvmlSystemGetCudaDriverVersion_v2)
    return Driver(
        version=_or("", nvml, nvml.nvmlSystemGetDriverVersion),
        cuda=f"{cuda // 1000}.{cuda % 1000 // 10}" if cuda else "",
        gpus=gpus,
        unreadable=unreadable,
        peers=[_peers(nvml, a, b, handles) for a, b in permutations(handles, 2)],
    )


def _gpu(nvml: Any, index: int, handle: Any) -> GpuState:
    """Raises what NVML raises where the GPU does not even tell its address."""
    return GpuState(
        index=index,
        bus_id=_text(nvml.nvmlDeviceGetPciInfo(handle).busId),
        name=_or("", nvml, nvml.nvmlDeviceGetName, handle),
        uuid=_or("", nvml, nvml.nvmlDeviceGetUUID, handle),
        fields={name: _try(nvml, read, nvml, handle) for name, read in FIELDS.items()},
        links=_try(nvml, _links, nvml, handle),
        fabric=_try(nvml, _fabric, nvml, handle),
        processes=_try(nvml, _holders, nvml, handle),
    )


def _text(said: bytes | str) -> str:
    return said.decode(errors="replace") if isinstance(said, bytes) else said


def _links(nvml: Any, handle: Any) -> list[NvLink]:
    """The links that the GPU has; raises NotSupported where it has none at all."""
    found: list[NvLink] = []
    for number in range(nvml.NVML_NVLINK_MAX_LINKS):
        try:
            active = bool(nvml.nvmlDeviceGetNvLinkState(handle, number))
        except (nvml.NVMLError_NotSupported, nvml.NVMLError_InvalidArgument):
            if not found:
                raise
            break
        found.append(_active_link(nvml, handle, number) if active else NvLink(number, active=False))
    return found


def _active_link(nvml: Any, handle: Any, number: int) -> NvLink:
    remote = _try(nvml, nvml.nvmlDeviceGetNvLinkRemotePciInfo, handle, number)
    counts = {
        name: _try(nvml, nvml.nvmlDeviceGetNvLinkErrorCounter, handle, number, counter)
        for counter, name in enumerate(_LINK_ERRORS)
    }
    return NvLink(
        number,
        active=True,
        version=_or(None, nvml, nvml.nvmlDeviceGetNvLinkVersion, handle, number),
        remote="" if isinstance(remote, Missing) else _text(remote.busId),
        errors={name: count for name, count in counts.items() if not isinstance(count, Missing)},
        bit_error_rates=_or({}, nvml, _bit_error_rates, nvml, handle, number),
    )


def _bit_error_rates(nvml: Any, handle: Any, number: int) -> dict[str, float]:
    """Rates come as a mantissa of four bits above an exponent of eight; 15e-255 stands for none."""
    fields = {
        "Effective": nvml.NVML_FI_DEV_NVLINK_COUNT_EFFECTIVE_BER,
        "Symbol": nvml.NVML_FI_DEV_NVLINK_COUNT_SYMBOL_BER,
    }
    answers = nvml.nvmlDeviceGetFieldValues(handle, [(field, number) for field in fields.values()])
    return {
        name: float(f"{answer.value.ullVal >> 8 & 0xF}e-{answer.value.ullVal & 0xFF}")
        for name, answer in zip(fields, answers, strict=True)
        if answer.nvmlReturn == nvml.NVML_SUCCESS
    }


_HEALTH = ("DEGRADED_BW", "ROUTE_RECOVERY", "ROUTE_UNHEALTHY", "ACCESS_TIMEOUT_RECOVERY", "PARTITION_ASSIGNED")


def _fabric(nvml: Any, handle: Any) -> Fabric:
    """State, status, clique, cluster and health; an older driver knows the second form of the question only."""
    import ctypes
    import uuid

    info = nvml.c_nvmlGpuFabricInfo_v3_t()
    try:
        nvml.nvmlDeviceGetGpuFabricInfoV(handle, ctypes.byref(info))
    except nvml.NVMLError_ArgumentVersionMismatch:
        info = nvml.c_nvmlGpuFabricInfo_v2_t()
        nvml.nvmlDeviceGetGpuFabricInfoV(handle, ctypes.byref(info))
    shift, width = "NVML_GPU_FABRIC_HEALTH_MASK_SHIFT_", "NVML_GPU_FABRIC_HEALTH_MASK_WIDTH_"
    health = {
        name.lower(): info.healthMask >> getattr(nvml, shift + name) & getattr(nvml, width + name)
        for name in ("INCORRECT_CONFIGURATION", *_HEALTH)
    }
    return Fabric(
        state=info.state,
        status="Success" if info.status == 0 else _text(nvml.nvmlErrorString(info.status)),
        clique=info.cliqueId,
        cluster=str(uuid.UUID(bytes=bytes(info.clusterUuid))),
        summary=getattr(info, "healthSummary", 0),
        configuration=health.pop("incorrect_configuration"),
        health=health,
    )


def _holders(nvml: Any, handle: Any) -> list[Holder]:
    return [
        Holder(held.pid, _text(_or("unknown", nvml, nvml.nvmlSystemGetProcessName, held.pid)), held.usedGpuMemory)
        for held in nvml.nvmlDeviceGetComputeRunningProcesses_v3(handle)
    ]


def _peers(nvml: Any, gpu: int, peer: int, handles: dict[int, Any]) -> Peers:
    pair = handles[gpu], handles[peer]
    status = {
        capability: _try(nvml, nvml.nvmlDeviceGetP2PStatus, *pair, number)
        for number, capability in enumerate(P2P_CAPABILITIES)
    }
    return Peers(
        gpu,
        peer,
        {capability: answer for capability, answer in status.items() if not isinstance(answer, Missing)},
        _or(None, nvml, nvml.nvmlDeviceGetTopologyCommonAncestor, *pair),
    )
