"""Read one machine and one rank into facts; every source can be a file tree and a set of variables put in its place."""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Container, Iterator
from threading import Thread

from ncclep_bench.doctor.machine import AbsentError, Machine, Reader, Reading, parsed, printed_by
from ncclep_bench.doctor.settings import ENVIRONMENT, JOB_VARIABLES
from ncclep_bench.doctor.sources import driver, host, libraries, network, pci
from ncclep_bench.errors import InputError
from ncclep_bench.model.anonymous import HIDDEN, SECRET_NAME
from ncclep_bench.model.facts import Fact, Facts
from ncclep_bench.runtime.place import place_of

__all__ = ["FACTS", "Machine", "collect"]

_PACKAGES = (
    "ncclep-bench",
    "numpy",
    "ml_dtypes",
    "mpi4py",
    "mpich",
    "openmpi",
    "torch",
    "cupy-cuda12x",
    "cupy-cuda13x",
    "nccl4py",
    "nccl-extensions",
    "nvidia-nccl-cu12",
    "nvidia-nccl-cu13",
    "nvidia-nvshmem-cu12",
    "nvidia-nvshmem-cu13",
)


def collect(machine: Machine, *, without: Container[str] = ()) -> Facts:
    """Everything the checks need, but for the facts in `without`; what cannot be read becomes a fact that says so.

    Raises InputError for a configuration file that cannot be used, since the user named it.
    """
    facts: dict[str, Fact] = {}
    failed: list[InputError] = []

    def read(name: str) -> None:
        try:
            facts[name] = _fact(machine, name, FACTS[name])
        except InputError as error:
            failed.append(error)

    # Daemons, so that a caller who gives up waiting can still end the process.
    threads = [Thread(target=read, args=(name,), daemon=True) for name in _WAITING if name not in without]
    for thread in threads:
        thread.start()
    for name in FACTS:
        if name not in without and name not in _WAITING:
            read(name)
    for thread in threads:
        thread.join()
    if failed:
        raise failed[0]
    read_here = Facts(host=socket.gethostname(), rank=place_of(machine.environ).rank, sections={})
    return read_here.having({name: facts[name] for name in FACTS if name in facts})


def _fact(machine: Machine, name: str, read: Reader) -> Fact:
    try:
        value, source = read(machine)
    except InputError:
        raise
    except AbsentError as absent:
        return Fact(absent.state, absent.source, reason=str(absent))
    except (FileNotFoundError, NotADirectoryError) as error:
        return Fact("absent", str(error.filename), reason=f"no such file: {error.filename}")
    except PermissionError as error:
        return Fact("not_permitted", str(error.filename), reason="root may look")
    except Exception as error:
        return Fact("failed", name, reason=f"{type(error).__name__}: {error}")
    return Fact("value", source, value)


def _ep_config(machine: Machine) -> Reading:
    if machine.config is None:
        raise AbsentError("no configuration given: --config EPCONFIG.toml", "--config")
    import msgspec

    from ncclep_bench.model.ep_config_file import load_ep_config

    return Reading(msgspec.to_builtins(load_ep_config(machine.config)), str(machine.config))


def _ranks(machine: Machine) -> Reading:
    if machine.ranks is not None:
        return Reading(machine.ranks, "--ranks")
    place = place_of(machine.environ)
    if place.ranks is None:
        raise AbsentError("number of ranks unknown: --ranks N", "--ranks")
    return Reading(place.ranks, f"{ENVIRONMENT}: {place.launcher.ranks}")


def _settings(machine: Machine) -> Reading:
    # NCCL: the environment wins, then NCCL_CONF_FILE or else ~/.nccl.conf, then /etc/nccl.conf; first come, first kept.
    found = [(name, value, ENVIRONMENT) for name, value in machine.environ.items() if JOB_VARIABLES.fullmatch(name)]
    user_file = machine.environ.get("NCCL_CONF_FILE") or f"{machine.home}/.nccl.conf"
    for file in (user_file, "/etc/nccl.conf"):
        found.extend(_conf_lines(machine, file))
    return Reading(
        [
            {"name": name, "value": HIDDEN if SECRET_NAME.search(name) else value, "source": source}
            for name, value, source in found
        ],
        f"{ENVIRONMENT}, {user_file}, /etc/nccl.conf",
    )


def _conf_lines(machine: Machine, file: str) -> Iterator[tuple[str, str, str]]:
    try:
        text = machine.text(file)
    except OSError:
        return
    for number, line in enumerate(text.split("\n"), 1):
        name, equals, value = line.partition("=")
        if equals and not line.startswith("#"):
            yield name, value, f"{file}:{number}"


def _limit(label: str) -> Reader:
    def read(machine: Machine) -> Reading:
        file = "/proc/self/limits"
        row = re.search(rf"^{label}\s+(\w+)\s+(\w+)", machine.text(file), re.MULTILINE)
        if row is None:
            raise AbsentError(f"no row {label!r}", file)
        soft, hard = (None if number == "unlimited" else int(number) for number in row.groups())
        return Reading({"soft": soft, "hard": hard}, f"{file}: {label}")

    return read


def _cpus(machine: Machine) -> Reading:
    file = "/proc/self/status"
    row = re.search(r"^Cpus_allowed_list:\s*(\S+)", machine.text(file), re.MULTILINE)
    if row is None:
        raise AbsentError("no row Cpus_allowed_list", file)
    ends = [part.split("-") for part in row[1].split(",")]
    return Reading(sum(int(end[-1]) - int(end[0]) + 1 for end in ends), f"{file}: Cpus_allowed_list {row[1]}")


def _cpu_quota(machine: Machine) -> Reading:
    for file in ("/sys/fs/cgroup/cpu.max", "/sys/fs/cgroup/cpu/cpu.cfs_quota_us"):
        if machine.path(file).exists():
            break
    else:
        raise AbsentError("no CPU quota", "/sys/fs/cgroup")
    quota, *period = machine.text(file).split()
    if not period:
        period = machine.text("/sys/fs/cgroup/cpu/cpu.cfs_period_us").split()
    if quota in ("max", "-1"):
        raise AbsentError("no CPU quota", file)
    return Reading(int(quota) / int(period[0]), file)


def _memory(machine: Machine) -> Reading:
    """Bytes this process may use: the machine's memory, or the control group's limit if that is less."""
    file = "/proc/meminfo"
    row = re.search(r"^MemTotal:\s*(\d+) kB", machine.text(file), re.MULTILINE)
    if row is None:
        raise AbsentError("no row MemTotal", file)
    smallest = Reading(int(row[1]) << 10, f"{file}: MemTotal")
    for limit_file in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        if machine.path(limit_file).exists():
            limit = machine.text(limit_file).strip()
            if limit.isdecimal() and int(limit) < smallest.value:
                smallest = Reading(int(limit), limit_file)
    return smallest


def _shared_memory(machine: Machine) -> Reading:
    if machine.captured:
        raise AbsentError("a captured folder does not tell its size", "/dev/shm")
    about = os.statvfs("/dev/shm")
    sizes = {"total_bytes": about.f_blocks * about.f_frsize, "free_bytes": about.f_bavail * about.f_frsize}
    return Reading(sizes, "/dev/shm")


def _container(machine: Machine) -> Reading:
    for file, kind in (("/.dockerenv", "docker"), ("/run/.containerenv", "podman")):
        if machine.path(file).exists():
            return Reading(kind, file)
    for name, kind in (("KUBERNETES_SERVICE_HOST", "kubernetes"), ("APPTAINER_NAME", "apptainer")):
        if name in machine.environ:
            return Reading(kind, f"{ENVIRONMENT}: {name}")
    raise AbsentError("no container", "/.dockerenv, /run/.containerenv, environment")


def _names_in(folder: str) -> Reader:
    return lambda machine: Reading(sorted(os.listdir(machine.path(folder))), folder)


def _rdma_devices(machine: Machine) -> Reading:
    folder = "/sys/class/infiniband"
    if machine.path("/sys/class").is_dir() and not machine.path(folder).exists():
        return Reading([], folder)  # without its driver the class itself is missing: that is none, not unknown
    return _names_in(folder)(machine)


def _packages(machine: Machine) -> Reading:
    import importlib.metadata
    import platform

    if machine.captured:
        raise AbsentError("a captured folder does not list packages", "installed Python packages")
    found = {"python": platform.python_version()}
    for name in _PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return Reading(found, "installed Python packages")


def _text(file: str) -> Reader:
    return lambda machine: Reading(machine.text(file).strip(), file)


def _kernel_parameters(machine: Machine) -> Reading:
    """Without what stands behind `--`: the first program's arguments, which are nobody's business."""
    parameters, _, _ = f"{machine.text('/proc/cmdline').strip()} ".partition(" -- ")
    return Reading(parameters.strip(), "/proc/cmdline")


def _row(file: str, pattern: str, what: str) -> Reader:
    """The first group of a line that matches."""

    def read(machine: Machine) -> Reading:
        match = re.search(pattern, machine.text(file), re.MULTILINE)
        if match is None:
            raise AbsentError(f"no line {what}", file)
        return Reading(match[1].strip(), f"{file}: {match[0].strip()}")

    return read


def _namespaces(machine: Machine) -> Reading:
    folder = "/proc/self/ns"
    if machine.captured:
        raise AbsentError("a captured folder has no namespaces", folder)
    return Reading({kind: os.readlink(f"{folder}/{kind}") for kind in ("ipc", "mnt", "net", "pid", "uts")}, folder)


def _device_files(folder: str, prefix: str) -> Reader:
    def read(machine: Machine) -> Reading:
        if not machine.path("/dev").is_dir():
            raise AbsentError("no such folder", "/dev")
        there = machine.path(folder)
        names = sorted(name for name in os.listdir(there) if name.startswith(prefix)) if there.is_dir() else []
        paths = {f"{folder}/{name}": there / name for name in names}
        return Reading([{"path": p, "usable": os.access(real, os.R_OK | os.W_OK)} for p, real in paths.items()], folder)

    return read


def _driver_options(machine: Machine) -> Reading:
    file = "/proc/driver/nvidia/params"
    rows = (line.partition(":") for line in machine.text(file).splitlines())
    return Reading({name.strip(): value.strip().strip('"') for name, colon, value in rows if colon}, file)


def _topology_file(machine: Machine) -> Reading:
    path = machine.environ.get("NCCL_TOPO_FILE")
    if not path:
        raise AbsentError("NCCL_TOPO_FILE is not set", f"{ENVIRONMENT}: NCCL_TOPO_FILE")
    listed = sorted(set(re.findall(r'busid="([0-9a-fA-F]{4}:[0-9a-fA-F:]{5}\.\d)"', machine.text(path))))
    here = {name.lower() for name in os.listdir(machine.path("/sys/bus/pci/devices"))}
    missing = [busid for busid in listed if busid.lower() not in here]
    return Reading({"path": path, "missing": missing, "listed": len(listed)}, path)


def _fabric(machine: Machine) -> Reading:
    """How many NVSwitches PCI shows (NVIDIA bridges that are no PCI bridges), and whether a fabric manager runs."""
    devices, folder = machine.path("/sys/bus/pci/devices"), "/sys/bus/pci/devices"
    switches = 0
    for name in sorted(os.listdir(devices)):
        try:
            kind = (machine.text(f"{folder}/{name}/vendor").strip(), machine.text(f"{folder}/{name}/class").strip()[:6])
        except OSError:
            continue
        switches += kind == ("0x10de", "0x0680")
    manager = any(_comm(machine, pid).startswith("nv-fabricmanage") for pid in os.listdir(machine.path("/proc")))
    return Reading({"switches": switches, "manager": manager}, f"{folder}, /proc/*/comm")


def _comm(machine: Machine, pid: str) -> str:
    try:
        return machine.text(f"/proc/{pid}/comm") if pid.isdecimal() else ""
    except OSError:  # it has ended meanwhile
        return ""


def _modules(machine: Machine) -> Reading:
    file = "/proc/modules"
    return Reading(parsed("modules", "host.modules", machine.text(file), file), file)


def _sysfs_ports(parser: str, fact: str) -> Reader:
    """What a parser of recorded dumps makes of this machine's RDMA class."""

    def read(machine: Machine) -> Reading:
        folder = "/sys/class/infiniband"
        if not machine.path("/sys/class").is_dir():
            raise AbsentError("no such folder", "/sys/class")
        records = parsed(parser, fact, "\n".join(_sysfs_lines(machine, folder)), folder)
        if not records:
            raise AbsentError("no port of an RDMA adapter", folder)
        return Reading(records, folder)

    return read


def _sysfs_lines(machine: Machine, folder: str) -> Iterator[str]:
    for pattern in ("*/hca_type", "*/sys_image_guid", "*/ports/*/*", "*/ports/*/*counters/*", "*/ports/*/gids/*"):
        yield from _sysfs_files(machine, folder, pattern)
    yield from _sysfs_files(machine, folder, "*/ports/*/gid_attrs/*/*")


def _sysfs_files(machine: Machine, folder: str, pattern: str) -> Iterator[str]:
    for path in sorted(machine.path(folder).glob(pattern)):
        shown = f"/{path.relative_to(machine.root)}"
        try:
            text = machine.text(shown) if path.is_file() else ""
        except OSError:  # entries of a GID table that are not in use cannot be read
            continue
        if text.strip():
            yield f"{shown} = {text.strip().splitlines()[0]}"


def _traffic_class(machine: Machine) -> Reading:
    folder = "/sys/class/infiniband"
    lines = []
    for device in machine.names(folder):
        file = f"{folder}/{device}/tc/1/traffic_class"
        if text := machine.words(file):
            lines += [file, text]
    records = parsed("qos", "rdma.traffic_class", "\n".join(lines), f"{folder}/*/tc/1/traffic_class")
    if not records:
        raise AbsentError("no adapter has a traffic class of its own", folder)
    return Reading(records, folder)


_WAITING = ("gpus.list", "mpi.build", "rdma.mtu", "network.devices")
"""Facts that other processes are asked for, each with a deadline: meanwhile the rest is read."""

FACTS: dict[str, Reader] = {
    "ep.config": _ep_config,
    "ep.ranks": _ranks,
    "job.settings": _settings,
    "limits.memlock": _limit("Max locked memory"),
    "limits.nofile": _limit("Max open files"),
    "limits.stack": _limit("Max stack size"),
    "limits.all": host.limits,
    "host.capabilities": host.capabilities,
    "host.control_groups": host.control_groups,
    "host.numa_nodes": host.numa_nodes,
    "host.numa_policy": host.numa_policy,
    "host.cpus": _cpus,
    "host.cpu_quota": _cpu_quota,
    "host.memory_bytes": _memory,
    "host.shared_memory": _shared_memory,
    "host.container": _container,
    "host.interfaces": _names_in("/sys/class/net"),
    "host.rdma_devices": _rdma_devices,
    "libraries.packages": _packages,
    "libraries.nccl": libraries.found("libnccl.so.*", "nvidia/nccl/lib"),
    "libraries.nvml": libraries.called("libnvidia-ml.so.[0-9][0-9][0-9]*.*"),
    "libraries.net_plugins": libraries.called("libnccl-net*.so"),
    "libraries.nccl_ep": libraries.found("libnccl_ep.so*", "nvidia/nccl_ep/lib"),
    "libraries.nvshmem": libraries.found("libnvshmem_host.so*", "nvidia/nvshmem/lib"),
    "libraries.mpi": libraries.found("libmpi.so*"),
    "libraries.cudart": libraries.found("libcudart.so*", "nvidia/cuda_runtime/lib"),
    "libraries.mapped": libraries.mapped,
    "libraries.cuda": libraries.cuda,
    "mpi.build": libraries.mpi,
    "job.topology_file": _topology_file,
    "host.boot_id": _text("/proc/sys/kernel/random/boot_id"),
    "host.namespaces": _namespaces,
    "host.cpu_model": _row("/proc/cpuinfo", r"^model name\s*: (.*)$", "model name"),
    "host.kernel": _row("/proc/version", r"^Linux version (\S+)", "Linux version"),
    "host.command_line": _kernel_parameters,
    "host.remove_ipc": _row("/etc/systemd/logind.conf", r"^RemoveIPC=(.*)$", "RemoveIPC="),
    "host.modules": _modules,
    "host.fabric": _fabric,
    "host.shared_memory_files": _names_in("/dev/shm"),
    "host.imex_driver": _row("/proc/devices", r"^\s*(\d+) nvidia-caps-imex-channels$", "nvidia-caps-imex-channels"),
    "host.imex_channels": _device_files("/dev/nvidia-caps-imex-channels", "channel"),
    "rdma.device_files": _device_files("/dev/infiniband", "uverbs"),
    "rdma.ports": _sysfs_ports("ports", "rdma.ports"),
    "rdma.counters": _sysfs_ports("counters", "rdma.counters"),
    "rdma.gids": _sysfs_ports("gids", "rdma.gids"),
    "rdma.traffic_class": _traffic_class,
    "rdma.mtu": printed_by(["ibv_devinfo"], "ports", "rdma.mtu"),
    "network.devices": network.devices,
    "network.routes": network.routes,
    "network.source_rules": printed_by(["ip", "rule"], "rules", "network.source_rules"),
    "network.sysctls": network.sysctls,
    "pci.devices": pci.devices,
    "pci.acs": pci.access_control,
    "gpus.list": driver.says("listed"),
    "gpus.driver": _text("/proc/driver/nvidia/version"),
    "gpus.boards": driver.boards,
    "gpus.driver_options": _driver_options,
    "gpus.cuda": driver.cuda,
    "gpus.unreadable": driver.unreadable,
    "gpus.topology": driver.topology,
    "gpus.peers": driver.says("peers"),
    "gpus.links": driver.about_links("links"),
    "gpus.link_error_rates": driver.about_links("link_error_rates"),
    "gpus.link_errors": driver.about_links("link_errors"),
    "gpus.query": driver.says("query"),
    "gpus.processes": driver.processes,
}
"""Every fact and the function that reads it."""

SLOW = frozenset({"gpus.topology", "mpi.build"})
"""Facts that nvidia-smi and an MPI library tell, which may take seconds."""
