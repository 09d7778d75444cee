"""The machine and the software that a run was measured with, as flat facts for its header."""

from __future__ import annotations

import os
import platform
import socket
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from ncclep_bench.runtime.launch import rank_environment
from ncclep_bench.runtime.world import in_mpi_environment
from ncclep_bench.units import format_bytes

_GPU_LIBRARIES = (
    "cupy-cuda12x", "cupy-cuda13x", "nvidia-nccl-cu12", "nvidia-nccl-cu13", "nccl4py", "nccl-extensions",
)  # fmt: skip


def environment(launcher: str) -> dict[str, Any]:
    """Facts by name; what cannot be found out is None. Does not start MPI."""
    shm = os.statvfs("/dev/shm") if Path("/dev/shm").is_dir() else None
    return {
        "host": socket.gethostname(),
        "kernel": f"{platform.system()} {platform.release()}",
        "cpu": _first_field("/proc/cpuinfo", "model name") or platform.machine(),
        "cores_usable": len(os.sched_getaffinity(0)),
        "memory": _memory(),
        "shared_memory": None if shm is None else format_bytes(shm.f_blocks * shm.f_frsize),
        "launcher": launcher,
        "glibc_tunables": (os.environ if in_mpi_environment() else rank_environment()).get("GLIBC_TUNABLES"),
        "python": platform.python_version(),
        "interpreter": sys.executable,
        **{name: _version(name) for name in ("ncclep-bench", "numpy", "mpi4py", "mpich", "openmpi")},
        **{name: found for name in _GPU_LIBRARIES if (found := _version(name)) is not None},
    }


def _version(distribution: str) -> str | None:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None


def _memory() -> str | None:
    text = _first_field("/proc/meminfo", "MemTotal")
    return None if text is None else format_bytes(int(text.split()[0]) << 10)


def _first_field(file: str, key: str) -> str | None:
    """The first `key: value` of a /proc file."""
    try:
        lines = Path(file).read_text().splitlines()
    except OSError:
        return None
    return next((line.partition(":")[2].strip() for line in lines if line.startswith(key)), None)
