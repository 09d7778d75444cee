"""Libraries on the loader's path and in running processes, with the version that stands in the file itself."""

from __future__ import annotations

import contextlib
import functools
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from ncclep_bench.doctor.machine import AbsentError, Machine, Reader, Reading, printed_by

if TYPE_CHECKING:
    import mmap

_FOLDERS = (
    "/usr/lib/x86_64-linux-gnu",
    "/usr/lib/aarch64-linux-gnu",
    "/usr/lib64",
    "/usr/local/lib",
    "/usr/local/cuda/lib64",
)
_LOADER = "/etc/ld.so.conf.d"
_VERSIONS = {
    "libnccl.so": re.compile(rb"NCCL version (\d+\.\d+\.\d+)"),
    "libmpi.so": re.compile(rb"Open MPI v(\d+\.\d+\.\d+)"),
}
_IN_NAME = re.compile(r"\.so\.(\d+\.\d[\d.]*)$")
_MAPPED = re.compile(
    r"\s(/[^\n]*/(lib(?:nccl(?:_ep|-net[\w-]*)?|nvshmem_host|mpi|cudart|cuda|nvidia-ml)\.so)\S*)(?: \(deleted\))?$",
    re.MULTILINE,
)
_CUDA_PACKAGES = ("torch", "cupy-cuda12x", "cupy-cuda13x", "nvidia-cuda-runtime-cu12", "nvidia-cuda-runtime")
_MPI_GPU_CALLS = (b"cudaPointerGetAttributes", b"cuPointerGetAttribute")


def called(pattern: str, wheels: str = "") -> Reader:
    """Paths of every file on the loader's path whose name matches, links too."""

    def read(machine: Machine) -> Reading:
        folders = list(_folders(machine, wheels))
        found = [f"{folder}/{path.name}" for folder in folders for path in sorted(machine.path(folder).glob(pattern))]
        return Reading(found, ", ".join(folders))

    return read


def found(pattern: str, wheels: str = "") -> Reader:
    """Path and version of every library whose name matches, each file once."""

    def read(machine: Machine) -> Reading:
        paths, source = called(pattern, wheels)(machine)
        files: dict[str, str] = {}
        for path in paths:
            files.setdefault(os.path.realpath(machine.path(path)), path)
        if not files:
            raise AbsentError(f"no {pattern.partition('.so')[0]}.so found", source)
        return Reading([{"path": path, "version": _version(real)} for real, path in files.items()], source)

    return read


def mapped(machine: Machine) -> Reading:
    """Communication libraries that this process and those that hold GPUs have loaded."""
    if machine.captured:
        raise AbsentError("a captured folder has no processes", "/proc/PID/maps")
    libraries: list[dict[str, str | int | None]] = []
    shut: list[int] = []
    pids = [os.getpid(), *_holders(machine)]
    for pid in pids:
        try:
            text = Path(f"/proc/{pid}/maps").read_text(errors="replace")
        except PermissionError:
            shut.append(pid)
            continue
        except OSError:  # it has ended, or lives in a PID namespace of its own
            continue
        for path, name in dict.fromkeys(_MAPPED.findall(text)):
            libraries.append({"pid": pid, "library": name, "path": path, "version": _version_of(machine, path)})
    if shut and not libraries:
        raise AbsentError(
            f"process {shut[0]} is another user's; root may look", f"/proc/{shut[0]}/maps", "not_permitted"
        )
    others = f"; not permitted: {len(shut)} of other users, at which root may look" if shut else ""
    return Reading(libraries, f"/proc/PID/maps of {len(pids) - len(shut)} processes{others}")


def cuda(machine: Machine) -> Reading:
    """CUDA versions that compilers, wheels and frameworks here were made for, by what has them."""
    import importlib.metadata
    import json

    builds: dict[str, str] = {}
    toolkit = "/usr/local/cuda/version.json"
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        builds[toolkit] = str(json.loads(machine.text(toolkit))["cuda"]["version"])
    for name in () if machine.captured else _CUDA_PACKAGES:
        try:
            version = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
        build = re.search(r"\+cu(\d{2})(\d)", version)
        if build:
            builds[name] = f"{build[1]}.{build[2]}"
        elif named := re.search(r"cuda(\d\d)x", name):
            builds[name] = named[1]
        elif name.startswith("nvidia-"):
            builds[name] = version
    if not builds:
        raise AbsentError("no CUDA toolkit, wheel or framework", f"{toolkit}, installed Python packages")
    return Reading(builds, ", ".join(builds))


def mpi(machine: Machine) -> Reading:
    """The MPI that a rank would load: implementation, version, and whether it was built for GPU buffers."""
    import sys

    code = f"import sys; sys.path[:] = {sys.path!r}; from ncclep_bench.runtime import world; world.print_library()"
    command = [sys.executable, "-c", code]
    build, _ = printed_by(command, "mpi_build", "mpi.build", "MPI_Get_library_version")(machine)
    if "cuda_aware" not in build and (path := build.get("path")):
        # MPICH answers after MPI_Init only; built for CUDA it calls the runtime to tell whose memory it is given.
        data = _mapped_file(path)
        if data is not None:
            with data:
                build["cuda_aware"] = any(data.find(call) >= 0 for call in _MPI_GPU_CALLS)
    return Reading(build, build.get("path", "MPI_Get_library_version"))


def _folders(machine: Machine, wheels: str) -> Iterator[str]:
    """Folders in the order in which a Python process would find libraries, each once."""
    import site
    import sys

    here = (
        []
        if machine.captured
        else [
            *(f"{base}/{wheels}" for base in (*sys.path, *site.getsitepackages()) if base and wheels),
            f"{sys.prefix}/lib",
        ]
    )
    listed = [
        line.strip()
        for name in _conf_files(machine)
        for line in machine.words(f"{_LOADER}/{name}").splitlines()
        if line.strip().startswith("/")
    ]
    path = machine.environ.get("LD_LIBRARY_PATH", "").split(":")
    for folder in dict.fromkeys([*here, *path, *listed, *_FOLDERS]):
        try:
            if folder and machine.path(folder).is_dir():
                yield folder.rstrip("/")
        except OSError:  # leads out of a captured folder
            continue


def _conf_files(machine: Machine) -> list[str]:
    try:
        return [name for name in machine.names(_LOADER) if name.endswith(".conf")]
    except OSError:
        return []


def _holders(machine: Machine) -> list[int]:
    """Processes that hold GPUs, as far as the driver tells."""
    from ncclep_bench.runtime.nvml import Missing

    try:
        gpus = machine.driver.gpus
    except AbsentError:
        return []
    return sorted({held.pid for gpu in gpus if not isinstance(gpu.processes, Missing) for held in gpu.processes})


def _version_of(machine: Machine, path: str) -> str | None:
    try:
        return _version(os.path.realpath(machine.path(path)))
    except OSError:
        return None


@functools.cache
def _version(file: str) -> str | None:
    """What the file says of itself; where libraries of its kind say nothing, the version in its name."""
    name = os.path.basename(file)
    pattern = next((pattern for library, pattern in _VERSIONS.items() if name.startswith(library)), None)
    data = _mapped_file(file) if pattern else None
    if pattern and data is not None:
        with data:
            if match := pattern.search(data):
                return match[1].decode()
    named = None if pattern else _IN_NAME.search(name)
    return named[1] if named else None


def _mapped_file(file: str) -> mmap.mmap | None:
    import mmap

    with open(file, "rb") as stream:
        if os.fstat(stream.fileno()).st_size == 0:
            return None
        return mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
