"""What a host says about itself: limits, variables, interfaces, modules, PCI access control."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from ncclep_bench.doctor.parsers.contract import Parsed
from ncclep_bench.doctor.records import Acs, Module, NetDevice, Route, SourceRule
from ncclep_bench.doctor.settings import JOB_VARIABLES, Setting
from ncclep_bench.doctor.text import Line
from ncclep_bench.model.anonymous import HIDDEN, SECRET_NAME

_ASSIGNMENT = re.compile(r"\s*(?:(?:export|declare -x|set|-x)\s+)?([A-Z_][A-Z0-9_]*)=(.*?)\s*")
_SET_BY = re.compile(r"NCCL INFO (NCCL_\w+) set by environment to (.*?)\.?\s*$")
_ULIMIT = re.compile(r"\s*(\S.*?)\s*\((?:([^,()]*),\s*)?-(\w)\)\s+(unlimited|\d{1,18})\s*", re.IGNORECASE)
_ULIMIT_FACTS = {"l": "limits.memlock", "n": "limits.nofile", "s": "limits.stack"}
_UNITS = {"kbytes": 1024, "bytes": 1, "512 bytes": 512, "blocks": 512, "mbytes": 1 << 20}
_PROC_LIMIT = re.compile(
    r"\s*Max (locked memory|open files|stack size)\s+(unlimited|\d{1,18})\s+(unlimited|\d{1,18})\s+(?:bytes|files)\s*",
    re.IGNORECASE,
)
_PROC_FACTS = {"locked memory": "limits.memlock", "open files": "limits.nofile", "stack size": "limits.stack"}
_IP_LINK = re.compile(r"(?:\d+:\s+)?([\w.@-]+?)(?:@\w+)?:\s+<([A-Z_,0-9-]*)>.*?\bmtu\s+(\d{1,9})\b", re.IGNORECASE)
_IP_ADDRESS = re.compile(r"\s*inet (\d+(?:\.\d+){3}/\d{1,2})\b")
_SOURCE_RULE = re.compile(r"\s*\d{1,6}:\s+from (\d+(?:\.\d+){3}(?:/\d{1,2})?)\s+lookup (\S+)\s*")
_ROUTE = re.compile(
    r"\s*(default|\d+(?:\.\d+){3}(?:/\d{1,2})?)(?: via (\d+(?:\.\d+){3}))? dev ([\w.@-]+)(?:\s.*)?", re.IGNORECASE
)
_OMPI_VERSION = re.compile(
    r"\s*(?:ompi:version:full:|Open MPI: |mpirun \(Open MPI\) |Open MPI v)(\d{1,3}\.\d{1,3}\.\d{1,3}[\w.-]*)(?:,.*)?\s*"
)
_OMPI_CUDA = re.compile(r".*mpi_built_with_cuda_support:value:(true|false)\s*", re.IGNORECASE)
_MPI_LIBRARY = re.compile(r"library: (/\S*/libmpi\S*)")
_MPICH_LINE = re.compile(r"\s*MPICH (Version|Configure):\s+(.*?)\s*", re.IGNORECASE)
_LSMOD = re.compile(
    r"((?:nvidia|nv_peer|mlx|ib_|rdma|gdrdrv|efa|vfio)[a-z0-9_]*)\s+(\d+)\s+(\d+)(?:\s+([a-z-][\w,-]*))?(?:\s+(?:Live|Loading)\s.*)?\s*"
)
_NCCL_VERSION = re.compile(r"\bNCCL version (\d{1,3}\.\d{1,3}\.\d{1,3})\b")
_DRIVER_OPTION = re.compile(r"(EnableStreamMemOPs|RegistryDwords): *(.*)")
_KERNEL = re.compile(r"Linux version (\d\S*)")
_PCI_DEVICE = re.compile(r"\s*((?:[0-9a-f]{4}:)?[0-9a-f]{2}:[0-9a-f]{2}\.[0-7])\s+(\S.*)", re.IGNORECASE)
_ACS = re.compile(r"\s*ACSCtl:\s*(.*)", re.IGNORECASE)
_HYPERVISOR = re.compile(r"virtio|qemu|vmware|hyper-v|xen platform", re.IGNORECASE)


def variables(lines: Sequence[Line]) -> Parsed:
    """NAME=value lines of `env`, launch scripts and logs; only variables that concern a job, secrets left out."""
    found: list[Setting] = []
    for line in lines:
        match = _ASSIGNMENT.fullmatch(line.text) or _SET_BY.search(line.text)
        if match and JOB_VARIABLES.fullmatch(match[1]):
            value = HIDDEN if SECRET_NAME.search(match[1]) else match[2].strip("\"'")
            found.append(Setting(match[1], value, line.at))
    return {"job.settings": found} if found else {}


def limits(lines: Sequence[Line]) -> Parsed:
    """`ulimit -a`, and /proc/PID/limits."""
    found: dict[str, dict[str, int | None]] = {}
    for line in lines:
        if (match := _ULIMIT.fullmatch(line.text)) and match[3] in _ULIMIT_FACTS:
            unit = _UNITS.get((match[2] or "").strip().lower(), 1)
            soft = None if match[4].lower() == "unlimited" else int(match[4]) * unit
            found[_ULIMIT_FACTS[match[3]]] = {"soft": soft, "hard": None}
        elif match := _PROC_LIMIT.fullmatch(line.text):
            soft, hard = (None if number == "unlimited" else int(number) for number in (match[2], match[3]))
            found[_PROC_FACTS[match[1].lower()]] = {"soft": soft, "hard": hard}
    return found


def network(lines: Sequence[Line]) -> Parsed:
    """`ip link` and `ip addr`."""
    found: list[NetDevice] = []
    for line in lines:
        if match := _IP_LINK.match(line.text):
            found.append(
                NetDevice(
                    at=line.at,
                    host=line.host,
                    name=match[1],
                    mtu_bytes=int(match[3]),
                    up="UP" in match[2].upper().split(","),
                    networks=[],
                )
            )
        elif found and (match := _IP_ADDRESS.match(line.text)):
            found[-1].networks.append(match[1])
    return {"network.devices": found} if found else {}


def rules(lines: Sequence[Line]) -> Parsed:
    """`ip rule`: the rules that choose a route table by the sender's address."""
    found = [
        SourceRule(at=line.at, host=line.host, source=match[1], table=match[2])
        for line in lines
        if (match := _SOURCE_RULE.fullmatch(line.text))
    ]
    return {"network.source_rules": found} if found else {}


def routes(lines: Sequence[Line]) -> Parsed:
    """`ip route`."""
    found = [
        Route(
            at=line.at,
            host=line.host,
            device=match[3],
            network=match[1].lower().replace("default", "0.0.0.0/0"),
            gateway=match[2] or "",
        )
        for line in lines
        if (match := _ROUTE.fullmatch(line.text))
    ]
    return {"network.routes": found} if found else {}


def mpi_build(lines: Sequence[Line]) -> Parsed:
    """`ompi_info --parsable --all`, `mpichversion`, MPI_Get_library_version: which MPI, and if it takes GPU buffers."""
    found: dict[str, Any] = {}
    for line in lines:
        if match := _OMPI_VERSION.fullmatch(line.text):
            found |= {"implementation": "Open MPI", "version": match[1]}
        elif match := _MPI_LIBRARY.fullmatch(line.text):
            found["path"] = match[1]
        elif match := _OMPI_CUDA.fullmatch(line.text):
            found["cuda_aware"] = match[1].lower() == "true"
        elif (match := _MPICH_LINE.fullmatch(line.text)) and match[1].lower() == "version":
            found |= {"implementation": "MPICH", "version": match[2]}
        elif match and found.get("implementation") == "MPICH" and "-cuda" in match[2]:
            found["cuda_aware"] = "--with-cuda" in match[2] and "--with-cuda=no" not in match[2]
    return {"mpi.build": found} if found else {}


def modules(lines: Sequence[Line]) -> Parsed:
    """`lsmod` and /proc/modules."""
    found = [
        Module(
            at=line.at,
            host=line.host,
            name=match[1],
            used_by=[user for user in (match[4] or "").split(",") if user not in ("", "-")],
        )
        for line in lines
        if (match := _LSMOD.fullmatch(line.text))
    ]
    return {"host.modules": found} if found else {}


def software(lines: Sequence[Line]) -> Parsed:
    """What /proc/version, /proc/cmdline and /proc/driver/nvidia/* say, and NCCL's own line with its version."""
    found: dict[str, Any] = {}
    versions: dict[str, str] = {}
    for line in lines:
        text = line.text.strip()
        if match := _NCCL_VERSION.search(text):
            versions.setdefault(match[1], line.at)
        elif match := _DRIVER_OPTION.fullmatch(text):
            found.setdefault("gpus.driver_options", {})[match[1]] = match[2].strip('"')
        elif match := _KERNEL.match(text):
            found["host.kernel"] = match[1]
        elif text.startswith("NVRM version:"):
            found["gpus.driver"] = text
        elif text.startswith("BOOT_IMAGE="):
            found["host.command_line"] = text
    if versions:
        found["libraries.nccl"] = [{"path": at, "version": version} for version, at in versions.items()]
    return found


def access_control(lines: Sequence[Line]) -> Parsed:
    """ACSCtl of every device in `lspci -vvv`."""
    title, device = "", ""
    virtual = any(_HYPERVISOR.search(line.text) for line in lines)
    found: list[Acs] = []
    for line in lines:
        if match := _ACS.match(line.text):
            on = [flag[:-1] for flag in match[1].split() if flag.endswith("+")]
            found.append(Acs(at=line.at, host=line.host, device=device, title=title, on=on, virtual=virtual))
        elif match := _PCI_DEVICE.match(line.text):
            device, title = match[1], match[2].strip()
    return {"pci.acs": found} if found else {}
