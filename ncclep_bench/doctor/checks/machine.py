"""The machine under the job: kernel modules, driver options, device files, addresses, PCIe, net plugins."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator

import msgspec

from ncclep_bench.doctor.checks.config import config_of
from ncclep_bench.doctor.contract import Check, Trouble
from ncclep_bench.doctor.profiles import is_tray
from ncclep_bench.doctor.records import Gid, Module, NetDevice, PciDevice, Route, SourceRule
from ncclep_bench.doctor.settings import settings_of
from ncclep_bench.model.facts import Facts

PEER_MODULES = ("nvidia_peermem", "nv_peer_mem")
DMABUF_KERNEL = (6, 1)
EP_NCCL = (2, 30, 4)
EP_COMPUTE = (9, 0)
AMAZON, EFA = "0x1d0f", "0xefa"
"""PCI vendor, and how the device numbers of EFA adapters begin (efa0, efa1, …)."""
NVIDIA, DISPLAY = "0x10de", "0x03"
"""PCI vendor, and how the classes of display and 3D controllers begin."""
STRICT = 1
"""Of rp_filter: a packet is dropped if the answer to it would leave by another interface."""


class DeviceFile(msgspec.Struct, frozen=True):
    """A device file, and whether this process may read and write it."""

    path: str
    usable: bool


class TopologyFile(msgspec.Struct, frozen=True):
    """What NCCL_TOPO_FILE names: the PCI addresses in it that this machine does not have, of how many."""

    path: str
    missing: list[str]
    listed: int


class Fabric(msgspec.Struct, frozen=True):
    """NVSwitches on the PCI bus, and whether a fabric manager runs."""

    switches: int
    manager: bool


class Tensor(msgspec.Struct, frozen=True):
    """A tensor that a program passes; `power_of_two` tells of FP8 scales for a kernel that reads exponents only."""

    name: str
    dtype: str
    contiguous: bool = True
    power_of_two: bool | None = None


class Graph(msgspec.Struct, frozen=True):
    """What a program captures: the graph it chose, for how many tokens, and how its buffer is sized."""

    key: str = ""
    padded_tokens: int = 0
    rdma_buffer_size: str | int = "fixed"


_WANTED = {
    "topk_idx": ("int64",),
    "topk_weights": ("float32",),
    "combine_x": ("bfloat16",),
    "dispatch_x": ("bfloat16", "float8_e4m3fn"),
}


def _version(text: str) -> tuple[int, ...]:
    match = re.match(r"\D*(\d{1,6}(?:\.\d{1,6})*)", text)
    return tuple(map(int, match[1].split("."))) if match else ()


def _peer_memory(facts: Facts) -> Iterator[Trouble]:
    modules = facts.read("host.modules", list[Module])
    names = {module.name for module in modules}
    if not facts.read("host.rdma_devices", list[str]) or "nvidia" not in names or names & set(PEER_MODULES):
        return
    kernel = _version(facts.get("host.kernel", str) or "")
    driver = facts.get("gpus.driver", str) or ""
    if "open" in driver.lower() and kernel >= DMABUF_KERNEL:
        return
    yield Trouble(
        "nvidia_peermem is not loaded, and DMA-BUF needs the open kernel module and Linux 6.1: no GPUDirect RDMA",
        (
            f"modules: {', '.join(sorted(names))[:200]} ({facts.fact('host.modules').source})",
            f"kernel {'.'.join(map(str, kernel)) or 'unknown'}, driver {driver[:80] or 'unknown'}",
        ),
    )


def _driver_options(facts: Facts) -> Iterator[Trouble]:
    options = facts.read("gpus.driver_options", dict[str, str])
    lacking = [
        name
        for name, wanted in (("EnableStreamMemOPs", "1"), ("RegistryDwords", "PeerMappingOverride=1"))
        if name in options and wanted not in options[name]
    ]
    if lacking and facts.get("host.rdma_devices", list[str]):
        yield Trouble(
            f"the driver runs without {' and '.join(lacking)}: NVSHMEM before 3.4.5 cannot use IBGDA",
            tuple(
                f"{name}: {options[name] or 'empty'} ({facts.fact('gpus.driver_options').source})" for name in lacking
            ),
        )


def _device_files(facts: Facts) -> Iterator[Trouble]:
    files = facts.read("rdma.device_files", list[DeviceFile])
    shut = [file.path for file in files if not file.usable]
    if shut:
        yield Trouble(
            f"{len(shut)} of {len(files)} RDMA devices may not be opened here: {', '.join(shut[:8])}", tuple(shut[:8])
        )
    elif not files and (adapters := facts.get("host.rdma_devices", list[str])):
        yield Trouble(
            "the machine has RDMA adapters, and this process no device file of them: RDMA cannot be used here",
            (f"adapters: {', '.join(adapters)}", f"no uverbs in {facts.fact('rdma.device_files').source}"),
        )


def _driver_version(facts: Facts) -> Iterator[Trouble]:
    loaded = re.search(r"\b(\d{3,4}\.\d{1,4}(?:\.\d{1,4})?)\b", facts.read("gpus.driver", str))
    libraries = facts.read("libraries.nvml", list[str])
    versions = {match[1] for path in libraries if (match := re.search(r"\.so\.(\d{3,4}\.[\d.]+)$", path))}
    if loaded and versions and loaded[1] not in versions:
        yield Trouble(
            f"the loaded driver is {loaded[1]}, its library {', '.join(sorted(versions))}: the driver was upgraded "
            f"under its module",
            (facts.fact("gpus.driver").source, *libraries[:4]),
        )


def _topology_file(facts: Facts) -> Iterator[Trouble]:
    file = facts.read("job.topology_file", TopologyFile)
    if file.missing:
        yield Trouble(
            f"NCCL_TOPO_FILE describes another machine: {len(file.missing)} of its {file.listed} PCI devices are "
            f"not here",
            (f"{file.path}: {', '.join(file.missing[:6])}",),
        )


def _remove_ipc(facts: Facts) -> Iterator[Trouble]:
    if facts.read("host.remove_ipc", str).lower() in ("yes", "true", "1", "on"):
        yield Trouble(
            "systemd removes a user's shared memory when the last session ends (RemoveIPC)",
            (facts.fact("host.remove_ipc").source,),
        )


def _iommu(facts: Facts) -> Iterator[Trouble]:
    words = [word for word in facts.read("host.command_line", str).split() if "iommu" in word]
    if {"intel_iommu=on", "amd_iommu=on"} & set(words) and "iommu=pt" not in words:
        yield Trouble(
            "the IOMMU translates every device's addresses (on, without iommu=pt): peer transfers are slow or fail",
            (f"{facts.fact('host.command_line').source}: {' '.join(words)}",),
        )


def _one_subnet(facts: Facts) -> Iterator[Trouble]:
    import ipaddress

    by_host: dict[str, dict[str, list[NetDevice]]] = defaultdict(lambda: defaultdict(list))
    for device in facts.read("network.devices", list[NetDevice]):
        for text in device.networks:
            try:
                network = ipaddress.ip_interface(text).network
            except ValueError:
                continue
            if device.up and not network.is_loopback and network.prefixlen < 32:
                by_host[device.host][str(network)].append(device)
    for subnets in by_host.values():
        for subnet, devices in subnets.items():
            names = {device.name for device in devices}
            if len(names) < 2:
                continue
            said = f"{', '.join(device.name for device in devices)} are in one subnet ({subnet}): "
            evidence = tuple(f"{device.at}: {device.name} {', '.join(device.networks)}" for device in devices)
            strict = [name for name in names if _sysctl(facts, name, "rp_filter") == STRICT]
            if any(not _sysctl(facts, name, key) for name in names for key in ("arp_ignore", "arp_announce")):
                yield Trouble(said + "answers may take another adapter than the question (ARP flux)", evidence)
            elif strict:
                yield Trouble(
                    said
                    + f"{', '.join(sorted(strict))} drop packets whose answer would leave by another (rp_filter 1)",
                    (*evidence, facts.fact("network.sysctls").source),
                    "sudo sysctl -w net.ipv4.conf.all.rp_filter=2",
                )


def _sysctl(facts: Facts, device: str, key: str) -> int:
    """What counts for an interface: the larger of its own value and that of all; 0 where it is not told."""
    told = facts.get("network.sysctls", dict[str, dict[str, int]]) or {}
    return max(told.get(name, {}).get(key, 0) for name in (device, "all"))


def _crossing(facts: Facts) -> Iterator[Trouble]:
    import ipaddress

    if facts.fact("job.settings").state == "value" and settings_of(facts).off("NCCL_CROSS_NIC"):
        return
    rails = {gid.netdev for gid in facts.read("rdma.gids", list[Gid]) if gid.kind == "v2" and gid.netdev}
    routed = {route.device for route in facts.read("network.routes", list[Route]) if route.gateway}
    rules = facts.get("network.source_rules", list[SourceRule]) or []
    sources = [ipaddress.ip_network(rule.source, strict=False) for rule in rules]
    alone: list[NetDevice] = []
    subnets = set()
    for device in facts.read("network.devices", list[NetDevice]):
        addresses = [ipaddress.ip_interface(text) for text in device.networks]
        if device.name not in rails or not device.up or not addresses:
            continue
        subnets |= {address.network for address in addresses}
        if device.name not in routed and not any(a.ip in source for a in addresses for source in sources):
            alone.append(device)
    if len(subnets) > 1 and alone:
        yield Trouble(
            f"{', '.join(device.name for device in alone)} have a subnet each and no route out of it: a rail reaches "
            "its own kind only, and NCCL may cross rails",
            tuple(f"{device.at}: {device.name} {', '.join(device.networks)}" for device in alone[:8]),
        )


def _fabric_manager(facts: Facts) -> Iterator[Trouble]:
    fabric = facts.read("host.fabric", Fabric)
    # A container does not see the manager of its host; a compute tray's runs in the switch trays.
    away = facts.fact("host.container").state == "value" or any(
        is_tray(gpu.get("name", "")) for gpu in facts.get("gpus.list", list[dict[str, str]]) or []
    )
    if fabric.switches and not fabric.manager and not away:
        yield Trouble(
            f"there are {fabric.switches} NVSwitches and no fabric manager runs: CUDA will not start (error 802)",
            (facts.fact("host.fabric").source,),
        )


def _tensors(facts: Facts) -> Iterator[Trouble]:
    for tensor in facts.read("ep.tensors", list[Tensor]):
        wanted = _WANTED.get(tensor.name)
        at = (
            f"{tensor.name}: {tensor.dtype}{'' if tensor.contiguous else ', not contiguous'} "
            f"({facts.fact('ep.tensors').source})",
        )
        if wanted and tensor.dtype not in wanted:
            yield Trouble(f"{tensor.name} is {tensor.dtype}; NCCL EP and DeepEP take {' or '.join(wanted)}", at)
        if not tensor.contiguous:
            yield Trouble(
                f"{tensor.name} is a view that is not contiguous: kernels read past its rows", at, "x = x.contiguous()"
            )
        if tensor.power_of_two is False:
            yield Trouble(
                f"the scales {tensor.name} are no powers of two, and the kernel reads exponents only (UE8M0): "
                f"values are off by up to 25 %",
                at,
                "requantise with scales rounded up to a power of two",
            )


def _graph_buffer(facts: Facts) -> Iterator[Trouble]:
    graph = facts.read("ep.graph", Graph)
    if str(graph.rdma_buffer_size).lower() in ("auto", "0"):
        yield Trouble(
            "the low-latency buffer may grow after capture (AUTO), and the graph keeps its old address",
            (f"rdma_buffer_size = {graph.rdma_buffer_size} ({facts.fact('ep.graph').source})",),
        )


def _imex(facts: Facts) -> Iterator[Trouble]:
    channels = facts.read("host.imex_channels", list[DeviceFile])
    settings = settings_of(facts) if facts.fact("job.settings").state == "value" else None
    wanted = settings.on("NCCL_MNNVL_ENABLE") if settings else None
    usable = [channel for channel in channels if channel.usable]
    if not usable and (channels or wanted):
        yield Trouble(
            "no IMEX channel may be opened here: multi-node NVLink cannot share memory",
            (
                facts.fact("host.imex_channels").source,
                *(channel.path for channel in channels[:4]),
                *((str(wanted),) if wanted else ()),
            ),
        )


def _stale_segments(facts: Facts) -> Iterator[Trouble]:
    names = facts.read("host.shared_memory_files", list[str])
    left = [name for name in names if name.startswith("nccl-")]
    if len(left) > 64:
        yield Trouble(
            f"{len(left)} segments of NCCL lie in /dev/shm: many are of jobs that died",
            (facts.fact("host.shared_memory_files").source, *left[:4]),
        )


def _plugins(facts: Facts) -> Iterator[Trouble]:
    plugins = facts.read("libraries.net_plugins", list[str])
    if len({path.rpartition("/")[0] for path in plugins}) > 1:
        yield Trouble(f"{len(plugins)} network plugins are on the loader path; the first one wins", tuple(plugins[:6]))


def _efa_plugin(facts: Facts) -> Iterator[Trouble]:
    adapters = [
        device
        for device in facts.read("pci.devices", list[PciDevice])
        if device.vendor == AMAZON and device.device.startswith(EFA)
    ]
    plugins = facts.read("libraries.net_plugins", list[str])
    if adapters and not any(re.search(r"libnccl-net(?:[\w-]*ofi)?\.so", path) for path in plugins):
        yield Trouble(
            f"there are {len(adapters)} EFA adapters and no OFI plugin on the loader's path: NCCL takes TCP sockets "
            "without a word",
            (
                *(f"{device.at}: {device.vendor}:{device.device}" for device in adapters[:4]),
                f"no libnccl-net.so or libnccl-net-ofi.so in {facts.fact('libraries.net_plugins').source[:200]}",
            ),
        )


class Mapped(msgspec.Struct, frozen=True):
    """A library that a process has loaded."""

    pid: int
    library: str
    path: str
    version: str | None = None


def _mapped(facts: Facts) -> Iterator[Trouble]:
    by_version: dict[str, list[Mapped]] = defaultdict(list)
    for library in facts.read("libraries.mapped", list[Mapped]):
        if library.library == "libnccl.so":
            by_version[library.version or "unknown"].append(library)
    evidence = tuple(f"PID {m.pid}: {m.path} ({v})" for v, found in by_version.items() for m in found[:3])
    if len(by_version) > 1:
        yield Trouble(f"processes here run different versions of NCCL: {', '.join(sorted(by_version))}", evidence)
        return
    # What the loader finds first is what the next process gets.
    first = next(iter(facts.get("libraries.nccl", list[dict[str, str | None]]) or []), None)
    for version, found in by_version.items():
        if first and first["version"] and version not in ("unknown", first["version"]):
            yield Trouble(
                f"running processes use NCCL {version}, and {first['version']} is found first now",
                (*evidence, f"{first['path']} ({first['version']})"),
                verdict="info",
            )


def _wheel(facts: Facts) -> Iterator[Trouble]:
    packages = facts.read("libraries.packages", dict[str, str])
    wheels = {name: version for name, version in packages.items() if name.startswith("nvidia-nccl-cu")}
    for library in facts.read("libraries.nccl", list[dict[str, str | None]]):
        version, path = library.get("version"), library.get("path") or ""
        listed = [text for text in wheels.values() if version and _version(text)[:3] == _version(version)]
        if version and "/nvidia/nccl/lib/" in path and wheels and not listed:
            names = ", ".join(f"{name} {text}" for name, text in wheels.items())
            yield Trouble(
                f"the file of the wheel is NCCL {version}, and pip lists {names}: another wheel overwrote it",
                (f"{path}: NCCL version {version}", names),
            )


def _cuda(facts: Facts) -> Iterator[Trouble]:
    driver = _version(facts.read("gpus.cuda", str))
    # Within a major version any driver from its first release on runs any minor version (minor version compatibility).
    newer = {
        name: text
        for name, text in facts.read("libraries.cuda", dict[str, str]).items()
        if driver and _version(text)[:1] > driver[:1]
    }
    if newer:
        yield Trouble(
            f"{', '.join(f'{name} is for CUDA {text}' for name, text in newer.items())}, and the driver runs CUDA "
            f"{'.'.join(map(str, driver))}",
            (facts.fact("gpus.cuda").source, *(f"{name}: {text}" for name, text in newer.items())),
        )


class MpiBuild(msgspec.Struct, frozen=True):
    """Which MPI it is; `cuda_aware` is None where it does not tell."""

    implementation: str = "MPI"
    version: str = ""
    path: str = ""
    cuda_aware: bool | None = None


_GPU_SWITCHES = ("OMPI_MCA_opal_cuda_support", "OMPI_MCA_mpi_cuda_support", "MPIR_CVAR_ENABLE_GPU")


def _mpi_buffers(facts: Facts) -> Iterator[Trouble]:
    build = facts.read("mpi.build", MpiBuild)
    where = f"{build.implementation} {build.version} ({facts.fact('mpi.build').source})"
    if build.cuda_aware is False:
        yield Trouble(f"{build.implementation} {build.version} was built without CUDA: it reads host memory", (where,))
    elif build.cuda_aware and facts.fact("job.settings").state == "value":
        settings = settings_of(facts)
        for setting in filter(None, (settings.get(name) for name in _GPU_SWITCHES)):
            if setting.value.strip().lower() in ("0", "false", "no", "off"):
                yield Trouble(
                    f"{build.implementation} was built for CUDA, and {setting.name} switches that off",
                    (str(setting), where),
                    f"unset {setting.name}",
                )


class MemoryPolicy(msgspec.Struct, frozen=True):
    """Whether this process may ask for a memory policy, and the error if not."""

    allowed: bool
    error: str = ""


def _memory_policy(facts: Facts) -> Iterator[Trouble]:
    policy = facts.read("host.numa_policy", MemoryPolicy)
    off = facts.fact("job.settings").state == "value" and settings_of(facts).off("NCCL_CUMEM_HOST_ENABLE")
    if not policy.allowed and not off:
        yield Trouble(
            f"this process may not ask for memory policies ({policy.error}): NCCL's host buffers in cuMem fail, or "
            "ranks disagree on them",
            (f"{facts.fact('host.numa_policy').source}: {policy.error}",),
        )


def _capacity(facts: Facts) -> Iterator[Trouble]:
    config, settings = config_of(facts), settings_of(facts)
    for name in ("SGLANG_DEEPEP_NUM_MAX_DISPATCH_TOKENS_PER_RANK", "VLLM_DEEPEP_NUM_MAX_DISPATCH_TOKENS_PER_RANK"):
        setting = settings.get(name)
        if setting and config.max_tokens_per_rank and 0 < setting.number < config.max_tokens_per_rank:
            yield Trouble(
                f"{name} is {setting.number}, and a rank may dispatch {config.max_tokens_per_rank} tokens",
                (str(setting), f"{facts.fact('ep.config').source}: max_tokens_per_rank = {config.max_tokens_per_rank}"),
                f"export {name}={config.max_tokens_per_rank}",
            )


def _queue_pairs(facts: Facts) -> Iterator[Trouble]:
    config, ranks = config_of(facts), facts.read("ep.ranks", int)
    setting = settings_of(facts).get("NVSHMEM_IBGDA_NUM_RC_PER_PE")
    local = -(-config.num_experts // ranks)
    if config.mode == "ll" and setting and setting.number < local:
        yield Trouble(
            f"{setting.number} queue pairs per peer, and {local} experts on a rank want one each",
            (str(setting), f"{facts.fact('ep.config').source}: num_experts = {config.num_experts}, {ranks} ranks"),
            f"export NVSHMEM_IBGDA_NUM_RC_PER_PE={local}",
        )


def _nccl_ep_here(facts: Facts) -> Iterator[Trouble]:
    libraries = facts.read("libraries.nccl", list[dict[str, str | None]])
    newest = max((_version(library.get("version") or "") for library in libraries), default=())
    gpus = facts.read("gpus.list", list[dict[str, str]])
    old = [gpu for gpu in gpus if (found := _version(gpu.get("compute_capability", ""))) and found < EP_COMPUTE]
    lacking = []
    if newest and newest < EP_NCCL:
        lacking.append(f"NCCL {'.'.join(map(str, newest))} is older than 2.30.4")
    if old:
        lacking.append(f"{old[0].get('name')} is older than compute capability 9.0")
    if lacking:
        yield Trouble(
            f"NCCL EP cannot run here: {'; '.join(lacking)}; programs fall back to another all-to-all without a word",
            (facts.fact("libraries.nccl").source, facts.fact("gpus.list").source),
        )


def _connections(facts: Facts) -> Iterator[Trouble]:
    setting = settings_of(facts).get("CUDA_DEVICE_MAX_CONNECTIONS")
    if setting is not None and setting.number == 1:
        yield Trouble(
            "all streams of a GPU share one queue: dispatch does not overlap with computation", (str(setting),)
        )


def _watching(facts: Facts) -> Iterator[Trouble]:
    settings = settings_of(facts)
    if old := settings.get("TORCH_NCCL_TRACE_BUFFER_SIZE"):
        yield Trouble(
            "TORCH_NCCL_TRACE_BUFFER_SIZE is an old name: newer torch reads TORCH_FR_BUFFER_SIZE",
            (str(old),),
            f"export TORCH_FR_BUFFER_SIZE={old.value}",
        )
    if off := settings.off("NCCL_RAS_ENABLE"):
        yield Trouble("RAS is off: a hang cannot be asked who is missing", (str(off),), "unset NCCL_RAS_ENABLE")


def _driverless(facts: Facts) -> Iterator[Trouble]:
    gpus = [
        device
        for device in facts.read("pci.devices", list[PciDevice])
        if device.vendor == NVIDIA and device.class_code.startswith(DISPLAY)
    ]
    names = {module.name for module in facts.read("host.modules", list[Module])}
    # A kernel may show no modules, or have the driver built in; a host that hands its GPUs on to virtual machines
    # needs none.
    answers = any(facts.fact(name).state == "value" for name in ("gpus.list", "gpus.driver"))
    if gpus and not answers and not names & {"nvidia", "vfio_pci"}:
        yield Trouble(
            f"{len(gpus)} NVIDIA GPUs are in this machine, and their driver is not loaded: no program can use them",
            (
                *(f"{gpu.at}: {gpu.vendor}:{gpu.device}" for gpu in gpus[:4]),
                f"no nvidia in {facts.fact('host.modules').source}",
            ),
        )


_GUIDE = "https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/troubleshooting.html"

CHECKS = (
    Check(
        code="GDR009",
        title="GPU memory can be registered with RDMA adapters",
        severity="warning",
        needs=("host.modules", "host.rdma_devices"),
        judge=_peer_memory,
        why="nvidia_peermem is not loaded at boot by default; the alternative, DMA-BUF, needs open modules and "
        "Linux 6.1.",
        by_hand="lsmod | grep peermem; uname -r; cat /proc/driver/nvidia/version",
        remedy="sudo modprobe nvidia_peermem && echo nvidia_peermem | sudo tee /etc/modules-load.d/nvidia-peermem.conf",
        reference=f"{_GUIDE}; reports: NVIDIA/nccl#897, NVIDIA/nccl#1343",
    ),
    Check(
        code="GDR010",
        title="The driver lets GPUs ring adapters' doorbells",
        severity="info",
        needs=("gpus.driver_options",),
        judge=_driver_options,
        why="IBGDA writes to the adapter from the GPU, which the driver allows by two options.",
        by_hand="grep -E 'EnableStreamMemOPs|RegistryDwords' /proc/driver/nvidia/params",
        remedy='options nvidia NVreg_EnableStreamMemOPs=1 NVreg_RegistryDwords="PeerMappingOverride=1;"   '
        "# in /etc/modprobe.d/nvidia.conf, then reboot",
        reference="reports: deepseek-ai/DeepEP#36, NVIDIA/nvshmem#23",
    ),
    Check(
        code="GDR011",
        title="RDMA devices may be opened",
        severity="error",
        needs=("rdma.device_files",),
        judge=_device_files,
        why="Containers admit device files one by one; a rank with fewer adapters than its peers spins without an "
        "error.",
        by_hand="ls -l /dev/infiniband",
        remedy="docker run --device=/dev/infiniband --cap-add=IPC_LOCK …   # Kubernetes: the RDMA device plugin",
        reference="reports: NVIDIA/nccl#2428, sgl-project/sglang#12533",
    ),
    Check(
        code="LIB005",
        title="The driver's library fits the loaded module",
        severity="error",
        needs=("gpus.driver", "libraries.nvml"),
        judge=_driver_version,
        why="An unattended upgrade replaces the library; the old module stays until the next boot.",
        by_hand="cat /proc/driver/nvidia/version; ls /usr/lib/*/libnvidia-ml.so.*",
        remedy="sudo reboot   # and hold the driver's packages",
        reference="report: NVIDIA/nvidia-container-toolkit#171",
    ),
    Check(
        code="TOPO006",
        title="NCCL_TOPO_FILE describes this machine",
        severity="warning",
        needs=("job.topology_file",),
        judge=_topology_file,
        why="A file baked into an image and used on another machine type costs most of the bandwidth.",
        by_hand="grep busid $NCCL_TOPO_FILE; lspci",
        remedy="unset NCCL_TOPO_FILE   # or write it anew: NCCL_TOPO_DUMP_FILE=topo.xml",
        reference="reports: Azure/azurehpc-health-checks#142, Azure/azurehpc-health-checks#143",
    ),
    Check(
        code="TOPO007",
        title="The IOMMU lets peers pass",
        severity="warning",
        needs=("host.command_line",),
        judge=_iommu,
        why="With translation on, peer transfers go through the CPU's IOMMU.",
        by_hand="cat /proc/cmdline",
        remedy="iommu=pt   # add to the kernel's command line, then reboot",
        reference=f"{_GUIDE}; report: NVIDIA/nccl#257",
    ),
    Check(
        code="LIM011",
        title="Shared memory outlives a login session",
        severity="warning",
        needs=("host.remove_ipc",),
        judge=_remove_ipc,
        why="With RemoveIPC=yes the end of an ssh session deletes segments of jobs that go on.",
        by_hand="grep RemoveIPC /etc/systemd/logind.conf",
        remedy="RemoveIPC=no   # in /etc/systemd/logind.conf, then systemctl restart systemd-logind",
        reference=_GUIDE,
    ),
    Check(
        code="LIM012",
        title="No dead job left its segments",
        severity="info",
        needs=("host.shared_memory_files",),
        judge=_stale_segments,
        why="Ranks that are killed leave segments behind, which fill /dev/shm.",
        by_hand="ls /dev/shm | grep -c nccl-; fuser -v /dev/shm/nccl-*",
        remedy="fuser -s /dev/shm/nccl-* || rm /dev/shm/nccl-*   # what no living process has open",
        reference="report: NVIDIA/nccl#342",
    ),
    Check(
        code="NET006",
        title="Every adapter has a subnet of its own",
        severity="warning",
        needs=("network.devices",),
        judge=_one_subnet,
        why="With several interfaces in one subnet Linux answers by any of them: rails mix, and connections fail.",
        by_hand="ip -brief addr; sysctl net.ipv4.conf.all.arp_ignore net.ipv4.conf.all.arp_announce",
        remedy="sudo sysctl -w net.ipv4.conf.all.arp_ignore=1 net.ipv4.conf.all.arp_announce=2   # or a subnet per "
        "rail",
        reference="reports: NVIDIA/nccl#1269, NVIDIA/nccl#601",
    ),
    Check(
        code="NET007",
        title="Rails are routed, or not crossed",
        severity="info",
        needs=("network.devices", "network.routes", "rdma.gids"),
        judge=_crossing,
        why="With a subnet per rail, an adapter reaches the same rail of another node only, unless its address has a "
        "route out; NCCL connects across rails when it finds that shorter.",
        by_hand="ip route; ip rule; ip route get PEER from OWN   # for a pair of different rails",
        remedy="export NCCL_CROSS_NIC=0   # or: ip rule add from ADDRESS table N; ip route add default via GATEWAY "
        "table N",
        reference="reports: NVIDIA/nccl#1348, ROCm/rccl#1303",
    ),
    Check(
        code="GDR012",
        title="EFA adapters have their plugin",
        severity="warning",
        needs=("pci.devices", "libraries.net_plugins"),
        judge=_efa_plugin,
        why="EFA is reached through the OFI plugin alone; its folder has moved between releases, and NCCL falls back "
        "to TCP.",
        by_hand="lspci -nn | grep 1d0f:efa; ldconfig -p | grep nccl-net",
        remedy="echo /opt/amazon/ofi-nccl/lib | sudo tee /etc/ld.so.conf.d/ofi-nccl.conf && sudo ldconfig   # and "
        "export NCCL_NET='AWS Libfabric', which fails aloud",
        reference="reports: NVIDIA-NeMo/RL#1973, SemiAnalysisAI/InferenceX#2979",
    ),
    Check(
        code="GPU016",
        title="The driver of GPUs that are there is loaded",
        severity="error",
        needs=("pci.devices", "host.modules"),
        judge=_driverless,
        why="After an update of the kernel its module is often missing or unsigned; what asks the driver then finds "
        "no GPUs, as on a machine that has none.",
        by_hand="lspci -d 10de: ; lsmod | grep '^nvidia '; sudo dmesg | grep -i nvrm",
        remedy="sudo modprobe nvidia && nvidia-smi   # if there is no such module: dkms status, and install the driver "
        "for $(uname -r)",
        reference="https://docs.nvidia.com/datacenter/tesla/driver-installation-guide/",
    ),
    Check(
        code="LIB007",
        title="The NCCL wheel is the one that pip lists",
        severity="error",
        needs=("libraries.nccl", "libraries.packages"),
        judge=_wheel,
        why="Several wheels write the same file; the last one installed stays, whatever the package list says.",
        by_hand="strings -n 8 SITE-PACKAGES/nvidia/nccl/lib/libnccl.so.2 | grep 'NCCL version'; pip list | grep nccl",
        remedy="pip install --force-reinstall --no-deps nvidia-nccl-cu13",
        reference="reports: marin-community/marin#7344, verl-project/verl#6621",
    ),
    Check(
        code="LIB008",
        title="Running processes use one NCCL",
        severity="warning",
        needs=("libraries.mapped",),
        judge=_mapped,
        why="Which library a process has mapped, not which is installed, decides what it can do and with whom.",
        by_hand="grep libnccl /proc/PID/maps",
        remedy="put the wanted folder first in LD_LIBRARY_PATH, and start the job again",
        reference="reports: NVIDIA/nccl#1267, NVIDIA/TensorRT-LLM#15597",
    ),
    Check(
        code="LIB009",
        title="The driver runs the CUDA that programs are built for",
        severity="error",
        needs=("gpus.cuda", "libraries.cuda"),
        judge=_cuda,
        why="A driver runs every minor version of its CUDA and older ones, so that compiler and framework may differ; "
        "a newer major version it refuses.",
        by_hand="nvidia-smi | grep 'CUDA Version'; nvcc --version; python -c 'import torch; print(torch.version.cuda)'",
        remedy="install the build for the driver's CUDA, such as cu12 wheels, or a newer driver",
        reference="https://docs.nvidia.com/deploy/cuda-compatibility/",
    ),
    Check(
        code="MPI004",
        title="MPI takes GPU buffers",
        severity="info",
        needs=("mpi.build", "gpus.list"),
        judge=_mpi_buffers,
        why="A program that hands a device pointer to an MPI without CUDA support crashes in a copy.",
        by_hand="ompi_info --parsable --all | grep mpi_built_with_cuda_support; mpichversion | grep -i cuda",
        remedy="pass host buffers to MPI, or install a build with CUDA (Open MPI --with-cuda, MPICH --with-cuda)",
        reference="reports: mpi4py/mpi4py#115, conda-forge/openmpi-feedstock#83",
    ),
    Check(
        code="LIM013",
        title="Memory policies may be asked for",
        severity="warning",
        needs=("host.numa_policy",),
        judge=_memory_policy,
        why="Container runtimes forbid the NUMA calls by default; NCCL then cannot place host buffers, and ranks that "
        "may and ranks that may not do not fit together.",
        by_hand="numactl --show   # in the container",
        remedy="docker run --cap-add SYS_NICE …   # or on all ranks: export NCCL_CUMEM_HOST_ENABLE=0",
        reference=f"{_GUIDE}; report: NVIDIA/nccl#2388",
    ),
    Check(
        code="NVL009",
        title="IMEX channels may be opened",
        severity="warning",
        needs=("host.imex_channels",),
        judge=_imex,
        why="Multi-node NVLink shares memory through these device files, which containers and users often lack.",
        by_hand="ls -l /dev/nvidia-caps-imex-channels; nvidia-imex-ctl -N",
        remedy="sudo nvidia-modprobe -c 0 && sudo systemctl restart nvidia-imex   # meanwhile export "
        "NCCL_MNNVL_ENABLE=0",
        reference="reports: microsoft/mscclpp#467, NVIDIA/nvbandwidth#46",
    ),
    Check(
        code="NVL010",
        title="A fabric manager runs where NVSwitches are",
        severity="error",
        needs=("host.fabric",),
        judge=_fabric_manager,
        why="GPUs behind NVSwitch refuse work until the fabric manager has set it up.",
        by_hand="lspci | grep -i nvswitch; systemctl status nvidia-fabricmanager",
        remedy="sudo systemctl enable --now nvidia-fabricmanager   # of the driver's very version",
        reference="reports: pytorch/ci-infra#541, ollama/ollama#12136",
    ),
    Check(
        code="EP212",
        title="Tensors have the form that the kernels read",
        severity="error",
        needs=("ep.tensors",),
        judge=_tensors,
        why="Kernels get addresses: another dtype, a view, or scales of another format are read as garbage without "
        "an error.",
        by_hand="print dtype, is_contiguous() and scales of every tensor that is passed",
        remedy="topk_idx = topk_idx.to(torch.int64); topk_weights = topk_weights.float()",
        reference="reports: NVIDIA/TensorRT-LLM#18689, sgl-project/sglang#39193, vllm-project/vllm#45302",
    ),
    Check(
        code="EP213",
        title="Buffers keep their place after graph capture",
        severity="warning",
        needs=("ep.graph",),
        judge=_graph_buffer,
        why="A graph replays addresses. A buffer that grows moves, and the replay reads and writes the old one.",
        by_hand="print rdma_buffer_size, and the buffer's address before and after capture",
        remedy="give rdma_buffer_size as a number, or capture again after it has grown",
        reference="NCCL EP, README",
    ),
    Check(
        code="LIB006",
        title="One network plugin is installed",
        severity="info",
        needs=("libraries.net_plugins",),
        judge=_plugins,
        why="A plugin of another stack, found first, crashes or hides what the built-in transport offers.",
        by_hand="ldconfig -p | grep nccl-net; echo $LD_LIBRARY_PATH",
        remedy="export NCCL_NET_PLUGIN=/path/of/the/one   # or none",
        reference="reports: NVIDIA/nccl#1710, NVIDIA/nccl#1913",
    ),
    Check(
        code="EP209",
        title="The serving stack's capacity holds the batch",
        severity="error",
        needs=("ep.config", "job.settings"),
        judge=_capacity,
        why="Low-latency buffers have room for that many tokens of each rank, and an assertion for more.",
        by_hand="env | grep NUM_MAX_DISPATCH_TOKENS",
        remedy="raise the variable on every rank",
        reference="reports: deepseek-ai/DeepEP#165, NVIDIA/srt-slurm#44",
    ),
    Check(
        code="EP210",
        title="Every local expert has a queue pair",
        severity="error",
        needs=("ep.config", "ep.ranks", "job.settings"),
        judge=_queue_pairs,
        why="In low-latency mode each local expert sends on a queue pair of its own.",
        by_hand="echo $NVSHMEM_IBGDA_NUM_RC_PER_PE",
        remedy="raise NVSHMEM_IBGDA_NUM_RC_PER_PE",
        reference="report: deepseek-ai/DeepEP#134",
    ),
    Check(
        code="EP211",
        title="NCCL EP can run here",
        severity="info",
        needs=("libraries.nccl", "gpus.list"),
        judge=_nccl_ep_here,
        why="It wants NCCL 2.30.4 and compute capability 9.0; frameworks fall back silently where something is "
        "missing.",
        by_hand="ldconfig -p | grep nccl; nvidia-smi --query-gpu=name,compute_cap --format=csv",
        remedy="pip install -U nvidia-nccl-cu13",
        reference="reports: NVIDIA/TensorRT-LLM#15597, NVIDIA/TransformerEngine#3034",
    ),
    Check(
        code="GPU014",
        title="Streams have queues of their own",
        severity="info",
        needs=("job.settings",),
        judge=_connections,
        why="Some tensor-parallel overlaps want a single queue; expert-parallel ones want several.",
        by_hand="echo $CUDA_DEVICE_MAX_CONNECTIONS",
        remedy="export CUDA_DEVICE_MAX_CONNECTIONS=32   # in the launcher; it has no effect after CUDA has started",
        reference="reports: verl-project/verl#6976, NVIDIA-NeMo/Megatron-Bridge#925",
    ),
    Check(
        code="NCCL017",
        title="A hang would leave traces",
        severity="info",
        needs=("job.settings",),
        judge=_watching,
        why="Flight recorder and RAS tell after a hang which rank was where; both must be on before.",
        by_hand="env | grep -E 'TORCH_FR|TRACE_BUFFER|RAS'",
        remedy="export TORCH_FR_BUFFER_SIZE=2000",
        reference="reports: pytorch/pytorch#140879, vllm-project/vllm#23448",
    ),
)
