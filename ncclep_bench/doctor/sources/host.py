"""What the kernel grants this process: limits, capabilities, control groups, NUMA nodes."""

from __future__ import annotations

import re

from ncclep_bench.doctor.machine import AbsentError, Machine, Reading

_LIMIT = re.compile(r"Max (\S.*?)\s{2,}(\w+)\s+(\w+)")
_NODES = "/sys/devices/system/node"
_CAPABILITIES = {
    12: "net_admin",
    13: "net_raw",
    14: "ipc_lock",
    17: "sys_rawio",
    19: "sys_ptrace",
    21: "sys_admin",
    23: "sys_nice",
    24: "sys_resource",
}
"""Bits that matter to RDMA, memory policies and looking at other processes."""
_GET_MEMPOLICY = {"x86_64": 239, "aarch64": 236}
"""Number of the system call, which libc does not wrap."""


def limits(machine: Machine) -> Reading:
    """Soft and hard value of every resource limit; None is unlimited."""
    file = "/proc/self/limits"
    rows = (_LIMIT.match(line) for line in machine.text(file).splitlines()[1:])
    return Reading({row[1]: {"soft": _number(row[2]), "hard": _number(row[3])} for row in rows if row}, file)


def capabilities(machine: Machine) -> Reading:
    """Those of the capabilities in force that communication needs."""
    file = "/proc/self/status"
    row = re.search(r"^CapEff:\s*([0-9a-f]+)", machine.text(file), re.MULTILINE)
    if row is None:
        raise AbsentError("no row CapEff", file)
    mask = int(row[1], 16)
    return Reading([name for bit, name in _CAPABILITIES.items() if mask >> bit & 1], f"{file}: CapEff {row[1]}")


def control_groups(machine: Machine) -> Reading:
    """The groups that this process is in, by controller; version 2 has one for all, called ""."""
    file = "/proc/self/cgroup"
    rows = (line.split(":", 2) for line in machine.text(file).splitlines())
    return Reading({row[1]: row[2] for row in rows if len(row) == 3}, file)


def numa_nodes(machine: Machine) -> Reading:
    """CPUs and memory of each NUMA node."""
    nodes = []
    for name in machine.names(_NODES):
        if match := re.fullmatch(r"node(\d+)", name):
            total = re.search(r"MemTotal:\s*(\d+) kB", machine.words(f"{_NODES}/{name}/meminfo"))
            nodes.append(
                {
                    "node": int(match[1]),
                    "cpus": machine.words(f"{_NODES}/{name}/cpulist"),
                    "memory_bytes": int(total[1]) << 10 if total else None,
                }
            )
    return Reading(sorted(nodes, key=lambda node: node["node"]), _NODES)


def numa_policy(machine: Machine) -> Reading:
    """Whether the system call that asks for a memory policy is allowed here, which containers may forbid."""
    import ctypes
    import errno
    import os
    import platform

    call = _GET_MEMPOLICY.get(platform.machine())
    if machine.captured or call is None:
        raise AbsentError("cannot be asked here", "get_mempolicy")
    libc = ctypes.CDLL(None, use_errno=True)
    done = libc.syscall(ctypes.c_long(call), None, None, ctypes.c_ulong(0), None, ctypes.c_ulong(0))
    failure = "" if done == 0 else errno.errorcode.get(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return Reading({"allowed": done == 0, "error": failure}, "get_mempolicy")


def _number(text: str) -> int | None:
    return int(text) if text.isdecimal() else None
