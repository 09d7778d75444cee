"""A CPU as the device of the cuda backend: kernels built with g++ and the shim header, memory in shared files."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import hashlib
import itertools
import os
import shutil
import struct
import subprocess
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from ncclep_bench.errors import RankError, UsageError
from ncclep_bench.native.loader import ROOT
from ncclep_bench.runtime.device_contract import Allocation
from ncclep_bench.runtime.group import Group
from ncclep_bench.runtime.shared_memory import Mapping, SharedFile, SharedFileHandle

Array = npt.NDArray[Any]

COMPILER = shutil.which("g++")
GUARD_BYTES, GUARD = 4096, 0x5A
_HANDLE = "6q"


def build(kernels: Path, include: Path, flags: Sequence[str] = ()) -> dict[str, Path]:
    """The shared library of every kernel file, by stem; built again only where it, a header or a flag has changed."""
    # Not where TMPDIR says, which is another for each of some tests.
    folder = Path(f"/tmp/ncclep-kernels-{os.getuid()}")
    folder.mkdir(mode=0o700, exist_ok=True)
    shared = hashlib.sha256(" ".join(flags).encode())
    for header in sorted(include.rglob("*.*h")):
        shared.update(header.read_bytes())
    libraries = {}
    for source in sorted(kernels.glob("*.cu")):
        content = shared.copy()
        content.update(source.read_bytes())
        libraries[source] = folder / f"{source.stem}-{content.hexdigest()[:16]}.so"
    # Ranks come at the same time; one builds for all.
    with open(folder / "lock", "w") as lock, ThreadPoolExecutor(os.cpu_count()) as pool:
        fcntl.flock(lock, fcntl.LOCK_EX)
        missing = [source for source, library in libraries.items() if not library.exists()]
        list(pool.map(lambda source: _compile(source, libraries[source], include, flags), missing))
    return {source.stem: library for source, library in libraries.items()}


def _compile(source: Path, library: Path, include: Path, flags: Sequence[str]) -> None:
    unfinished = library.with_suffix(".unfinished")
    command = [str(COMPILER), "-std=c++17", "-O1", "-fPIC", "-shared", "-pthread", "-Wno-unknown-pragmas", *flags]
    env = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}
    subprocess.run([*command, f"-I{include}", "-x", "c++", str(source), "-o", str(unfinished)], check=True, env=env)
    unfinished.rename(library)


@dataclass
class _Memory:
    file: SharedFile
    mapping: Mapping
    allocation: Allocation
    stream_ordered: bool = False

    def behind(self) -> Array:
        """What lies behind memory of this process's own, for nobody to write."""
        return self.mapping.array[self.allocation.nbytes :]


class CpuDevice:
    """Kernels on threads of this process, one per CUDA thread; a launch is over when it returns."""

    blocks, threads, bulk_bytes = 2, 64, 64 << 10

    def __init__(self, root: Path = ROOT, flags: Sequence[str] = ()) -> None:
        """`root`: where the sources are taken from instead of the package; `flags`: more of them for the compiler."""
        self._root, self._flags = root, flags
        self._libraries: dict[tuple[str, ...], dict[str, Path]] = {}
        self._memory: dict[int, _Memory] = {}
        self._identities = itertools.count(1)
        self.mapped: dict[int, bytes] = {}
        """What `map` has given and `unshare` has not taken back."""
        self._recorded: list[Callable[[], object]] | None = None

    def allocate(self, nbytes: int) -> int:
        file = SharedFile.create(nbytes + GUARD_BYTES, "a device's memory", alignment=4096)
        address = self._map(file, nbytes)
        self._memory[address].behind()[:] = GUARD
        return address

    def allocate_stream_ordered(self, nbytes: int) -> int:
        address = self.allocate(nbytes)
        self._memory[address].stream_ordered = True
        return address

    def _map(self, file: SharedFile, nbytes: int) -> int:
        mapping = Mapping.of(file)
        address = int(mapping.array.ctypes.data)
        self._memory[address] = _Memory(file, mapping, Allocation(next(self._identities), address, nbytes))
        return address

    def free(self, address: int) -> None:
        """Its mappings elsewhere keep what it held, as those of a GPU do, and the next may get its address."""
        self.synchronize()
        memory = self._memory.pop(address)
        written = np.flatnonzero(memory.behind() != GUARD)
        assert not written.size, f"{memory.allocation} was written behind its end, at {written[:4]}"
        memory.mapping.close()
        memory.file.close()

    @property
    def allocations(self) -> list[Allocation]:
        """What has been allocated or mapped and not been given back."""
        return [memory.allocation for memory in self._memory.values()]

    def allocation_of(self, address: int) -> Allocation:
        for memory in self._memory.values():
            allocation = memory.allocation
            if 0 <= address - allocation.base < allocation.nbytes and allocation.base not in self.mapped:
                return allocation
        raise UsageError(f"address {address:#x} is no memory of this device")

    def export(self, allocation: Allocation) -> bytes:
        memory = self._memory[allocation.base]
        where = memory.allocation.base, memory.allocation.nbytes
        return b"" if memory.stream_ordered else struct.pack(_HANDLE, *memory.file.handle, *where)

    def map(self, handle: bytes, rank: int) -> int:
        owner, *_, base, nbytes = struct.unpack_from(_HANDLE, handle)
        for mapped in self.mapped.values():
            other, *_, other_base, other_nbytes = struct.unpack_from(_HANDLE, mapped)
            apart = base + nbytes <= other_base or other_base + other_nbytes <= base
            if owner == other and not apart:
                raise RankError(f"the memory of rank {rank} cannot be mapped where other memory is", ranks=(rank,))
        file = SharedFile.open(SharedFileHandle(*struct.unpack_from(_HANDLE, handle)[:4]))
        address = self._map(file, file.nbytes)
        self.mapped[address] = handle
        return address

    def reachable(self, candidates: Collection[int], group: Group) -> set[int]:
        return set(candidates)

    def share(self, address: int, nbytes: int, group: Group, peers: Collection[int]) -> list[int]:
        handles = group.allgather(self.export(self._memory[address].allocation))
        addresses = [self.map(handle, rank) if rank in peers else 0 for rank, handle in enumerate(handles)]
        addresses[group.rank] = address
        group.barrier()
        return addresses

    def unshare(self, addresses: Sequence[int]) -> None:
        for address in addresses:
            del self.mapped[address]
            self.free(address)

    def write(self, address: int, array: Array) -> None:
        self.synchronize()
        ctypes.memmove(address, array.ctypes.data, array.nbytes)

    def write_unused(self, address: int, array: Array) -> None:
        ctypes.memmove(address, array.ctypes.data, array.nbytes)

    def read(self, address: int, array: Array) -> None:
        self.synchronize()
        ctypes.memmove(array.ctypes.data, address, array.nbytes)

    def fill(self, address: int, nbytes: int, byte: int) -> None:
        self.synchronize()
        ctypes.memset(address, byte, nbytes)

    def copy(self, target: int, source: int, nbytes: int) -> None:
        self._enqueue(lambda: ctypes.memmove(target, source, nbytes))

    def _enqueue(self, work: Callable[[], object]) -> None:
        if self._recorded is None:
            work()
        else:
            self._recorded.append(work)

    def function(self, source: Path, include: Path, name: str, defines: Sequence[str]) -> Any:
        flags = (*self._flags, *(f"-D{define}" for define in defines))
        if flags not in self._libraries:
            kernels, headers = (self._root / path.relative_to(ROOT) for path in (source.parent, include))
            self._libraries[flags] = build(kernels, headers, flags)
        launch = getattr(ctypes.CDLL(str(self._libraries[flags][source.stem])), f"{name}_launch")
        launch.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_uint64, ctypes.c_void_p]
        return launch

    def allow_shared(self, function: Any, nbytes: int) -> None:
        assert nbytes <= self.bulk_bytes

    def prepare(
        self,
        function: Any,
        blocks: int,
        threads: int,
        shared_bytes: int,
        arguments: npt.NDArray[np.uint64],
        *,
        early: bool,
    ) -> Callable[[], None]:
        return lambda: self._enqueue(lambda: function(blocks, threads, shared_bytes, arguments.ctypes.data))

    def current(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    @contextlib.contextmanager
    def within(self, stream: int) -> Iterator[None]:
        if not stream:
            raise UsageError(f"stream {stream:#x} is a default one")
        yield

    def capturing(self) -> bool:
        return self._recorded is not None

    @contextlib.contextmanager
    def recording(self) -> Iterator[Callable[[], None]]:
        """What is enqueued inside does not run; calling the result runs it, as a graph's replay does."""
        recorded: list[Callable[[], object]] = []
        self._recorded = recorded
        try:
            yield lambda: [work() for work in recorded] and None
        finally:
            self._recorded = None

    def synchronize(self) -> None:
        """Nothing is ever under way; as with a GPU, nobody can wait for what is only recorded."""
        assert self._recorded is None, "waits during a capture"

    def host_array(self, nbytes: int) -> Array:
        return np.empty(nbytes, np.uint8)

    def wait(self, deadline_s: float) -> bool:
        return True


class ThreadDevice(CpuDevice):
    """The same for ranks that are threads of one process: a peer's memory has one address, so races can be seen."""

    _kept: ClassVar[list[object]] = []

    def allocate(self, nbytes: int) -> int:
        address = super().allocate(nbytes)
        self._kept.append(self._memory[address])
        return address

    def share(self, address: int, nbytes: int, group: Group, peers: Collection[int]) -> list[int]:
        return [int(data) for data in group.allgather(str(address).encode())]

    def unshare(self, addresses: Sequence[int]) -> None:
        """The memory is its owner's."""

    def export(self, allocation: Allocation) -> bytes:
        return struct.pack("q", allocation.base) if super().export(allocation) else b""

    def map(self, handle: bytes, rank: int) -> int:
        return int(struct.unpack_from("q", handle)[0])

    def free(self, address: int) -> None:
        """Kept: a slower rank may still look at it."""
