"""Memory that the processes of one host share, and how they meet in it: files without names, mappings, futexes.

Linux only (x86-64 and aarch64); nothing here knows MPI.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import os
import platform
import secrets
import socket
import stat
import struct
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from ncclep_bench.errors import BenchError, RankError, UsageError
from ncclep_bench.runtime.processes import process_state
from ncclep_bench.units import format_bytes

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    Bytes = npt.NDArray[np.uint8]

SEGMENT_ALIGNMENT = 2 << 20
"""Sizes and addresses of segments are multiples of one huge page."""
CONTROL_BYTES = 64 << 10
"""Size of a control block unless its creator asks for more scratch."""

_LINE = 64
_SLOT, _ABORT, _MESSAGE, _NONCE = 0, _LINE, 2 * _LINE, 18 * _LINE
_MESSAGE_BYTES = _NONCE - _MESSAGE
_NONCE_BYTES = 16
_STATUS = _NONCE + _LINE
_STATUS_MAGIC = b"ncclep\0\1"
_STATUS_HEAD = struct.Struct("=8sIIQ")  # magic, rank, pid, waiting since (monotonic ns, 0: not waiting)
_STATUS_BYTES = 8 * _LINE
_SCRATCH = _STATUS + _STATUS_BYTES
_SPIN_S = 30e-6
_POLL_S = 0.1


class NotEnoughSharedMemoryError(BenchError):
    """A buffer does not fit in the shared memory directory or in the memory of this machine or container."""


class PeerAbortedError(RankError):
    """Another rank of this host gave up; the message carries its reason."""


# ---- the C library ----

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int64,
]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_libc.syscall.restype = ctypes.c_long
_SYS_FUTEX = {"x86_64": 202, "aarch64": 98}.get(platform.machine(), 98)
_FUTEX_WAIT, _FUTEX_WAKE = 0, 1
_PROT_NONE, _PROT_READ_WRITE = 0, mmap.PROT_READ | mmap.PROT_WRITE
_MAP_FIXED, _MAP_NORESERVE = 0x10, 0x4000
_MADV_POPULATE_WRITE = 23
_MAP_FAILED = ctypes.c_void_p(-1).value
_EVERYBODY = 2**31 - 1


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


def _os_error(what: str) -> OSError:
    number = ctypes.get_errno()
    return OSError(number, f"{what}: {os.strerror(number)}")


def futex_wait(address: int, expected: int, timeout_s: float) -> bool:
    """Sleep until the u32 at `address` is woken or no longer `expected`; False when `timeout_s` passed first.

    May return True early (signals): the caller looks at the value again.
    """
    timeout = _Timespec(int(timeout_s), int(timeout_s % 1 * 1e9))
    result = _libc.syscall(
        ctypes.c_long(_SYS_FUTEX),
        ctypes.c_void_p(address),
        ctypes.c_int(_FUTEX_WAIT),
        ctypes.c_uint32(expected),
        ctypes.byref(timeout),
        ctypes.c_void_p(None),
        ctypes.c_int(0),
    )
    if result == 0:
        return True
    number = ctypes.get_errno()
    if number == errno.ETIMEDOUT:
        return False
    if number in (errno.EAGAIN, errno.EINTR):
        return True
    raise _os_error("futex wait")


def futex_wake(address: int) -> None:
    """Wake everybody who sleeps on the u32 at `address`, in any process."""
    result = _libc.syscall(
        ctypes.c_long(_SYS_FUTEX),
        ctypes.c_void_p(address),
        ctypes.c_int(_FUTEX_WAKE),
        ctypes.c_int(_EVERYBODY),
        ctypes.c_void_p(None),
        ctypes.c_void_p(None),
        ctypes.c_int(0),
    )
    if result < 0:
        raise _os_error("futex wake")


def _no_fence() -> None:
    pass


def _foreign_call_fence() -> None:
    # A foreign call releases and takes the interpreter lock, which orders what stands before it against what
    # stands after it; x86 keeps stores in order and loads in order, so a flag needs nothing there.
    _libc.sched_yield()


_fence: Callable[[], None] = _no_fence if platform.machine() == "x86_64" else _foreign_call_fence


# ---- what is free ----


def shm_directory() -> Path:
    """Where segments live: /dev/shm, or what NCCLEP_SHM_DIR names."""
    return Path(os.environ.get("NCCLEP_SHM_DIR", "/dev/shm"))


def free_shm_bytes(directory: Path | None = None) -> int:
    """Bytes that `directory`, by default the one of our segments, still takes."""
    status = os.statvfs(directory or shm_directory())
    # A tmpfs without a limit reports no blocks at all.
    return status.f_bavail * status.f_frsize if status.f_blocks else free_memory_bytes()


def free_memory_bytes() -> int:
    """Bytes of memory that can still be used: MemAvailable, or less where a control group limits this process."""
    return min([_mem_available(), *_control_group_rooms()])


def _mem_available() -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) << 10
    return os.sysconf("SC_AVPHYS_PAGES") * mmap.PAGESIZE


def _control_group_rooms(root: Path = Path("/sys/fs/cgroup"), own: Path = Path("/proc/self/cgroup")) -> list[int]:
    """What every control group above this process (versions 1 and 2) has left, caches that can be dropped included."""
    rooms: list[int] = []
    try:
        lines = own.read_text().splitlines()
    except OSError:
        return rooms
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            base, limit, usage, cache = root, "memory.max", "memory.current", "inactive_file"
        elif "memory" in controllers.split(","):
            base, limit, usage, cache = (
                root / "memory",
                "memory.limit_in_bytes",
                "memory.usage_in_bytes",
                "total_inactive_file",
            )
        else:
            continue
        # Inside a container the path may be the host's and not exist here; the container's own limit is then at `base`.
        folder = base / path.lstrip("/")
        for group in (folder, *folder.parents):
            if base != group and base not in group.parents:
                break
            with contextlib.suppress(OSError, ValueError):
                most, used = int((group / limit).read_text()), int((group / usage).read_text())
                droppable = 0
                for entry in (group / "memory.stat").read_text().splitlines():
                    name, _, value = entry.partition(" ")
                    if name == cache:
                        droppable = int(value)
                rooms.append(max(0, most - used + droppable))
    return rooms


def require_memory(nbytes: int, label: str) -> None:
    """Raise NotEnoughSharedMemoryError, with the sum, when `nbytes` of ordinary memory are not free."""
    free = free_memory_bytes()
    if nbytes > free:
        raise _not_enough(label, nbytes, free, "memory")


# ---- files and mappings ----


class SharedFileHandle(NamedTuple):
    """How a process of the same host opens a SharedFile; goes through JSON. `inode` tells a reused descriptor."""

    pid: int
    fd: int
    nbytes: int
    inode: int


class SharedFile:
    """A file in shared memory without a name, so that nothing stays behind when its processes are killed."""

    def __init__(self, fd: int, handle: SharedFileHandle) -> None:
        self.fd = fd
        self.handle = handle
        self.nbytes = handle.nbytes

    @classmethod
    def create(cls, nbytes: int, label: str, *, alignment: int = SEGMENT_ALIGNMENT) -> SharedFile:
        """A new file of zeros of `nbytes`, rounded up to `alignment`, all of it allocated.

        `label` says in errors what the memory is for. Raises NotEnoughSharedMemoryError with the sum: a file that
        outgrows its tmpfs later would be SIGBUS at the first touch.
        """
        nbytes = max(1, -(-nbytes // alignment)) * alignment
        directory = shm_directory()
        for free, where in ((free_shm_bytes(), str(directory)), (free_memory_bytes(), "memory")):
            if nbytes > free:
                raise _not_enough(label, nbytes, free, where)
        fd = _unnamed_file(directory)
        try:
            os.posix_fallocate(fd, 0, nbytes)
        except OSError as error:
            os.close(fd)
            if error.errno in (errno.ENOSPC, errno.ENOMEM):
                # Somebody else took the room between the look and the allocation.
                raise _not_enough(label, nbytes, free_shm_bytes(), str(directory)) from error
            raise
        return cls(fd, SharedFileHandle(os.getpid(), fd, nbytes, os.fstat(fd).st_ino))

    @classmethod
    def open(cls, handle: SharedFileHandle) -> SharedFile:
        """The file of another process of this host. Raises OSError when it is not visible here."""
        fd = os.open(f"/proc/{handle.pid}/fd/{handle.fd}", os.O_RDWR | os.O_CLOEXEC)
        status = os.fstat(fd)
        if (status.st_ino, status.st_size) != (handle.inode, handle.nbytes):
            os.close(fd)
            raise OSError(errno.ESTALE, f"descriptor {handle.fd} of process {handle.pid} is another file")
        return cls(fd, handle)

    def close(self) -> None:
        """Give the descriptor back; mappings live on. May be called twice."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    def __del__(self) -> None:
        self.close()


def _not_enough(label: str, asked: int, free: int, where: str) -> NotEnoughSharedMemoryError:
    return NotEnoughSharedMemoryError(
        f"{label} needs {format_bytes(asked)} ({asked} bytes), {where} has {format_bytes(free)} ({free} bytes) free",
        hint="use fewer ranks or smaller cases, or give the container more (docker run --shm-size=...)",
    )


def _unnamed_file(directory: Path) -> int:
    try:
        return os.open(directory, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL):
            raise
    fd, path = tempfile.mkstemp(prefix="ncclep-", dir=directory)
    os.unlink(path)
    return fd


class _AddressRange:
    """Owns reserved addresses; arrays over it hold it as their base, so it is unmapped after the last of them."""

    def __init__(self, nbytes: int) -> None:
        self._munmap = _libc.munmap
        self.address = self.nbytes = 0
        slack = nbytes + SEGMENT_ALIGNMENT
        start = _map(None, slack, _PROT_NONE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE, -1)
        self.address = -(-start // SEGMENT_ALIGNMENT) * SEGMENT_ALIGNMENT
        self.nbytes = nbytes
        end = self.address + nbytes
        for low, high in ((start, self.address), (end, start + slack)):
            if high > low:
                self._munmap(low, high - low)
        self.__array_interface__ = {
            "version": 3,
            "shape": (nbytes,),
            "typestr": "|u1",
            "data": (self.address, False),
        }

    def __del__(self) -> None:
        if self.nbytes:
            self._munmap(self.address, self.nbytes)


def _map(address: int | None, nbytes: int, protection: int, flags: int, fd: int) -> int:
    result: int | None = _libc.mmap(address, nbytes, protection, flags, fd, 0)
    if result is None or result == _MAP_FAILED:
        raise _os_error(f"mapping {nbytes} bytes")
    return result


class Mapping:
    """One SharedFile, or several at fixed strides side by side, in one range of addresses.

    `array` is a uint8 array over the whole range. It, and any view of it, keeps the memory mapped: `close` only drops
    the mapping's own hold. A place that is cleared or replaced changes under views at once.
    """

    def __init__(self, count: int, stride_bytes: int) -> None:
        if count < 1 or stride_bytes < 1 or stride_bytes % mmap.PAGESIZE:
            raise UsageError(f"cannot reserve {count} places of {stride_bytes} bytes: not whole pages")
        import numpy as np

        self.count = count
        self.stride_bytes = stride_bytes
        self._range: _AddressRange | None = _AddressRange(count * stride_bytes)
        self._placed: dict[int, int] = {}
        self.array: Bytes = np.asarray(self._range)

    @classmethod
    def of(cls, file: SharedFile) -> Mapping:
        """The whole of one file."""
        mapping = cls(1, file.nbytes)
        mapping.place(0, file)
        return mapping

    @classmethod
    def reserve(cls, count: int, stride_bytes: int) -> Mapping:
        """Addresses for `count` files; touching a place that holds none is a segmentation fault."""
        return cls(count, stride_bytes)

    def place(self, index: int, file: SharedFile) -> None:
        """Map `file` at `index * stride_bytes`, instead of what was there. Raises UsageError if it is larger."""
        if file.nbytes > self.stride_bytes:
            raise UsageError(f"a file of {file.nbytes} bytes does not fit a place of {self.stride_bytes} bytes")
        start = self._address(index)
        _map(start, file.nbytes, _PROT_READ_WRITE, mmap.MAP_SHARED | _MAP_FIXED, file.fd)
        self._empty(start + file.nbytes, self.stride_bytes - file.nbytes)
        self._placed[index] = file.nbytes

    def clear(self, index: int) -> None:
        """Unmap the file at `index`; the addresses stay reserved."""
        self._empty(self._address(index), self.stride_bytes)
        self._placed.pop(index, None)

    def touch(self, index: int | None = None) -> None:
        """Map every page of the file at `index`, or of all files, now: no later copy pays for page faults.

        Contents do not change.
        """
        for place in self._placed if index is None else (index,):
            nbytes = self._placed[place]
            if _libc.madvise(self._address(place), nbytes, _MADV_POPULATE_WRITE):
                if ctypes.get_errno() != errno.EINVAL:
                    raise _os_error(f"touching {nbytes} bytes")
                self.slot(place)[: nbytes : mmap.PAGESIZE].max()  # before Linux 5.14

    def slot(self, index: int) -> Bytes:
        """The bytes of place `index`."""
        start = index * self.stride_bytes
        return self.array[start : start + self.stride_bytes]

    def close(self) -> None:
        """Let go of the memory; it is unmapped when the last view of `array` is gone. May be called twice."""
        if self._range is not None:
            self.array = self.array[:0].copy()
            self._range = None

    def _address(self, index: int) -> int:
        if self._range is None:
            raise UsageError("the mapping is closed")
        if not 0 <= index < self.count:
            raise UsageError(f"place {index} of {self.count}")
        return self._range.address + index * self.stride_bytes

    @staticmethod
    def _empty(address: int, nbytes: int) -> None:
        if nbytes:
            _map(address, nbytes, _PROT_NONE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE | _MAP_FIXED, -1)


# ---- meeting ----


class ControlHandle(NamedTuple):
    """How peers open a ControlBlock; goes through JSON. The nonce, read back through the memory, proves one host."""

    file: SharedFileHandle
    rank: int
    nonce: str


class ControlBlock:
    """A small segment per rank that its owner writes and its peers on the host read.

    One cache line each for the barrier slot and for the abort flag, then the abort message, a nonce, what the owner
    waits for (`read_status` reads it from outside), and `scratch`: uint8, free for counts, bitmaps and directories;
    publish, then meet, then peers read.
    """

    def __init__(self, file: SharedFile, rank: int) -> None:
        self._file = file
        self._mapping = Mapping.of(file)
        self.rank = rank
        self.pid = file.handle.pid
        array = self._mapping.array
        self.address = array.ctypes.data
        self._words = array[:_MESSAGE].data.cast("I")
        self._message = array[_MESSAGE:_NONCE]
        self._nonce = array[_NONCE : _NONCE + _NONCE_BYTES]
        self._status = array[_STATUS:_SCRATCH]
        self.scratch: Bytes = array[_SCRATCH:]

    @classmethod
    def create(cls, rank: int, scratch_bytes: int = CONTROL_BYTES - _SCRATCH) -> ControlBlock:
        """This process's own block, with a fresh nonce; `rank` is what errors call it.

        Raises NotEnoughSharedMemoryError.
        """
        import numpy as np

        size = _SCRATCH + scratch_bytes
        file = SharedFile.create(size, f"the control block of rank {rank}", alignment=mmap.PAGESIZE)
        block = cls(file, rank)
        block._nonce[:] = np.frombuffer(secrets.token_bytes(_NONCE_BYTES), np.uint8)
        block.waits_for((), "")
        return block

    @classmethod
    def open(cls, handle: ControlHandle) -> ControlBlock:
        """A peer's block. Raises OSError when the peer's memory is not reachable from here: then it is another host."""
        file = SharedFile.open(SharedFileHandle(*handle.file))
        block = cls(file, handle.rank)
        if block.handle.nonce != handle.nonce:
            block.close()
            raise OSError(errno.ESTALE, f"process {handle.file[0]} here is not rank {handle.rank}")
        return block

    @property
    def handle(self) -> ControlHandle:
        return ControlHandle(self._file.handle, self.rank, self._nonce.tobytes().hex())

    @property
    def epoch(self) -> int:
        """The owner's barrier slot."""
        return self._words[0]

    def publish(self, array: npt.NDArray[Any], offset: int = 0) -> None:
        """Copy `array` to `scratch[offset:]` for the peers. Raises UsageError when it does not fit."""
        import numpy as np

        data = np.ascontiguousarray(array).view(np.uint8).reshape(-1)
        if offset + data.nbytes > self.scratch.nbytes:
            raise UsageError(f"{data.nbytes} bytes at {offset} do not fit {self.scratch.nbytes} bytes of scratch")
        self.scratch[offset : offset + data.nbytes] = data

    def peek(self, dtype: npt.DTypeLike, shape: int | tuple[int, ...], offset: int = 0) -> npt.NDArray[Any]:
        """A view of what the owner published at `offset`, as `dtype` in `shape`."""
        import numpy as np

        count = int(np.prod(shape))
        nbytes = count * np.dtype(dtype).itemsize
        return self.scratch[offset : offset + nbytes].view(dtype).reshape(shape)

    def arrive(self) -> int:
        """Owner: step the slot, wake who waits for it, and say its new value."""
        epoch = (self._words[0] + 1) & 0xFFFFFFFF
        _fence()
        self._words[0] = epoch
        futex_wake(self.address)
        return epoch

    def abort(self, message: str) -> None:
        """Owner: let peers that wait, now or later, raise PeerAbortedError with `message` (its first KiB)."""
        import numpy as np

        if not self._words[_ABORT // 4]:
            text = message.encode(errors="replace")[:_MESSAGE_BYTES]
            self._message[: len(text)] = np.frombuffer(text, np.uint8)
            _fence()
            self._words[_ABORT // 4] = 1
            futex_wake(self.address)

    def waits_for(self, ranks: Iterable[int], operation: str, since_ns: int = 0) -> None:
        """Owner: tell who looks from outside for whom it waits, where, and since when (monotonic); 0: for nobody."""
        import numpy as np

        head = _STATUS_HEAD.pack(_STATUS_MAGIC, self.rank, self.pid, since_ns)
        listed = ",".join(map(str, sorted(ranks)))
        text = f"{operation[:128]}\0{listed}".encode(errors="replace")[: _STATUS_BYTES - len(head) - 1]
        record = np.frombuffer(head + text + b"\0", np.uint8)
        self._status[: len(record)] = record

    @property
    def abort_message(self) -> str | None:
        """Why the owner gave up, or None."""
        if not self._words[_ABORT // 4]:
            return None
        _fence()
        return self._message.tobytes().rstrip(b"\0").decode(errors="ignore")

    def close(self) -> None:
        """Let go of the memory and the descriptor. May be called twice."""
        self._words.release()
        self.scratch = self._message = self._nonce = self._status = self.scratch[:0].copy()
        self._mapping.close()
        self._file.close()


class Status(NamedTuple):
    """What a control block tells from outside: whose it is, its barrier slot, and what its owner waits for.

    `since_ns` is monotonic time; 0 where the owner waits for nobody, or not for long.
    """

    inode: int
    rank: int
    pid: int
    epoch: int
    operation: str
    ranks: tuple[int, ...]
    since_ns: int


def read_statuses(pid: int) -> list[Status]:
    """The control blocks that the process `pid` holds open, its own and its peers'; changes nothing.

    Raises OSError where this user may not look at that process.
    """
    found = []
    for name in os.listdir(f"/proc/{pid}/fd"):
        path = f"/proc/{pid}/fd/{name}"
        with contextlib.suppress(OSError):
            # Opening a pipe or a device could wait or act; a control block is a plain file without a name.
            if not os.readlink(path).endswith("(deleted)") or not stat.S_ISREG(os.stat(path).st_mode):
                continue
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
            try:
                if status := _status_of(os.pread(fd, _SCRATCH, 0), os.fstat(fd).st_ino):
                    found.append(status)
            finally:
                os.close(fd)
    return found


def _status_of(block: bytes, inode: int) -> Status | None:
    if len(block) < _SCRATCH:
        return None
    magic, rank, pid, since_ns = _STATUS_HEAD.unpack_from(block, _STATUS)
    if magic != _STATUS_MAGIC:
        return None
    operation, _, rest = block[_STATUS + _STATUS_HEAD.size :].partition(b"\0")
    listed = rest.partition(b"\0")[0].split(b",")
    return Status(
        inode,
        rank,
        pid,
        int.from_bytes(block[:4], sys.byteorder),
        operation[:512].decode(errors="replace"),
        tuple(int(number) for number in listed if number.isdigit()) if since_ns else (),
        since_ns,
    )


class LocalBarrier:
    """The processes of one host meet; each writes its own slot only, and who waits sleeps.

    `blocks` are everybody's control blocks in one order, `index` is this process's; blocks serve one barrier only.
    A waiting rank sleeps on the first late slot: it takes no time from ranks that still work. Only where every rank
    has a core of its own it first spins for a moment, which saves the wake-up.
    """

    def __init__(self, blocks: Sequence[ControlBlock], index: int) -> None:
        self._blocks = tuple(blocks)
        self._own = self._blocks[index]
        self._peers = tuple(block for block in self._blocks if block is not self._own)
        self._spin_s = _SPIN_S if len(self._blocks) <= (os.cpu_count() or 1) else 0.0

    def arrive(self) -> int:
        """Say that this rank is here, without waiting; returns the epoch that the others reach by arriving as well."""
        return self._own.arrive()

    def wait(self, deadline_s: float, operation: str) -> None:
        """Return when every rank has come here as often as this one.

        Raises RankError naming every late rank after `deadline_s`, or as soon as one has died; PeerAbortedError when
        one gave up.
        """
        self._wait(self._peers, self._own.arrive(), deadline_s, operation)

    def wait_for(self, index: int, epoch: int, deadline_s: float, operation: str) -> None:
        """Return when the rank at `index` has arrived `epoch` times; errors as in `wait`."""
        self._wait((self._blocks[index],), epoch, deadline_s, operation)

    def abort(self, message: str) -> None:
        """Give up: every peer that waits raises PeerAbortedError with `message` at once."""
        self._own.abort(message)
        for block in self._peers:
            futex_wake(block.address)

    def _wait(self, blocks: Sequence[ControlBlock], epoch: int, deadline_s: float, operation: str) -> None:
        start = time.perf_counter()
        since_ns = time.monotonic_ns()
        told = False
        try:
            for block in blocks:
                while _behind(seen := block.epoch, epoch):
                    waited_s = time.perf_counter() - start
                    if waited_s < self._spin_s:
                        os.sched_yield()
                        continue
                    given_up = [peer for peer in self._blocks if peer.abort_message is not None]
                    # Who gives up after this meeting was complete does not spoil it for those that wake late.
                    if given_up and _behind(block.epoch, epoch):
                        # All of them: some have given up only because another had.
                        raise PeerAbortedError(
                            "; ".join(f"{_name(peer)} gave up: {peer.abort_message}" for peer in given_up),
                            ranks=tuple(peer.rank for peer in given_up),
                        )
                    if waited_s >= deadline_s:
                        _raise_late(blocks, epoch, f"did not reach {operation} within {deadline_s:.1f} s")
                    elif not futex_wait(block.address, seen, min(deadline_s - waited_s, _POLL_S)):
                        told = True
                        self._own.waits_for(
                            (peer.rank for peer in blocks if _behind(peer.epoch, epoch)), operation, since_ns
                        )
                        gone = [peer for peer in blocks if process_state(peer.pid) in ("zombie", "dead")]
                        _raise_late(gone, epoch, f"ended before {operation}")
        finally:
            if told:
                self._own.waits_for((), "")
        _fence()


def _behind(value: int, epoch: int) -> bool:
    return 0 < (epoch - value) & 0xFFFFFFFF < 1 << 31


def _name(block: ControlBlock) -> str:
    return f"rank {block.rank} (pid {block.pid} on {socket.gethostname()}, {process_state(block.pid)})"


def _raise_late(blocks: Iterable[ControlBlock], epoch: int, what: str) -> None:
    late = [block for block in blocks if _behind(block.epoch, epoch)]
    if late:
        raise RankError(
            f"{', '.join(map(_name, late))} {what}",
            ranks=tuple(block.rank for block in late),
            hint="look at that process: its own messages, its core file, dmesg for the out-of-memory killer",
        )
