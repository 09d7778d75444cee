"""Memory that peers can reach: this rank's segments, its cache of registered buffers (S2), and mappings of others'."""

from __future__ import annotations

import math
import time
from typing import Any

import numpy as np
import numpy.typing as npt

from ncclep_bench.backends.contract import Array, Stats
from ncclep_bench.runtime.registration import RegistrationCache
from ncclep_bench.runtime.shared_memory import Mapping, SharedFile, SharedFileHandle

ENTRY = np.dtype(
    [("serial", "<i8"), ("pid", "<i8"), ("fd", "<i8"), ("nbytes", "<i8"), ("inode", "<i8"), ("offset", "<i8")]
)
"""One line of a rank's directory: which segment a slot's rows lie in, and where.

Serial 0: nothing published; negative: a registered buffer, which may go; positive: memory that stays."""


class Segment:
    """Memory of this rank that any rank of the host can map; touched, so that no copy pays for page faults.

    Raises NotEnoughSharedMemoryError.
    """

    def __init__(self, nbytes: int, label: str, serial: int) -> None:
        self._file = SharedFile.create(nbytes, label)
        self._mapping = Mapping.of(self._file)
        self._mapping.touch()
        self.serial = serial
        self.array = self._mapping.array
        self._address = self.array.ctypes.data

    def offset_of(self, array: Array) -> int | None:
        """Where in the segment `array` starts, or None when it does not lie in it."""
        offset = array.ctypes.data - self._address
        return offset if 0 <= offset <= self._file.nbytes - array.nbytes else None

    def entry(self, offset: int) -> tuple[int, ...]:
        """The directory line of rows at `offset`."""
        handle = self._file.handle
        return (self.serial, handle.pid, handle.fd, handle.nbytes, handle.inode, offset)

    def close(self) -> None:
        """Give the memory back; views that somebody still holds stay readable."""
        self.array = self.array[:0]
        self._mapping.close()
        self._file.close()


class Segments:
    """All segments of this rank: those allocated for the caller, and a least-recently-used cache of registered buffers.

    A registered buffer stays the caller's: its contents are copied into its segment at every use, since ordinary
    memory cannot be shared after the fact. What `acquire` gives stays until `release`, so that peers never lose a
    segment that they read.
    """

    def __init__(self, stats: Stats, capacity: int) -> None:
        self._serial = 0
        self._allocated: list[Segment] = []
        self._cache: RegistrationCache[Segment] = RegistrationCache(capacity, stats.count)

    def empty(self, shape: tuple[int, ...], dtype: npt.DTypeLike) -> Array:
        """Zeroed memory that peers reach without a copy."""
        nbytes = math.prod(shape) * np.dtype(dtype).itemsize
        segment = Segment(nbytes, "an empty() array", self._next_serial())
        self._allocated.append(segment)
        return segment.array[:nbytes].view(dtype).reshape(shape)

    def locate(self, array: Array) -> tuple[int, ...] | None:
        """The directory line of an array inside allocated memory, None for any other."""
        for segment in self._allocated:
            offset = segment.offset_of(array)
            if offset is not None:
                return segment.entry(offset)
        return None

    def acquire(self, array: Array) -> tuple[int, ...]:
        """The directory line of a contiguous user buffer, registered if it is not yet, with its contents of now."""
        segment = self._cache.acquire(
            (array.ctypes.data, array.nbytes),
            lambda: Segment(array.nbytes, "a registered buffer", -self._next_serial()),
        )
        segment.array[: array.nbytes] = array.view(np.uint8).reshape(-1)
        return segment.entry(0)

    def release(self) -> None:
        """Drop the least recently used registrations beyond the capacity."""
        for segment in self._cache.release():
            segment.close()

    def close(self) -> None:
        """Give everything back."""
        for segment in (*self._allocated, *self._cache.clear()):
            segment.close()
        self._allocated = []

    def _next_serial(self) -> int:
        self._serial += 1
        return self._serial


class PeerSegments:
    """Segments of the other ranks, mapped when a published line first names them, dropped when none does any more."""

    def __init__(self, stats: Stats) -> None:
        self._stats = stats
        self._mapped: dict[tuple[int, int], Mapping] = {}

    def rows(self, rank: int, line: Any, count: int, row_bytes: int, *, published: Array | None = None) -> Array:
        """`count` rows of `rank` from a directory line on, as bytes [count, row_bytes].

        `published`: serials that rank still publishes; mappings of other registered buffers go when a new one comes.
        """
        serial, offset = int(line["serial"]), int(line["offset"])
        mapping = self._mapped.get((rank, serial))
        if mapping is None:
            start = time.perf_counter_ns()
            if published is not None:
                self._drop_registered(rank, set(published.tolist()))
            file = SharedFile.open(SharedFileHandle(*(int(line[name]) for name in ("pid", "fd", "nbytes", "inode"))))
            mapping = self._mapped[rank, serial] = Mapping.of(file)
            file.close()
            mapping.touch()
            self._stats.count("mr_miss_total_us", (time.perf_counter_ns() - start) / 1e3)
        return mapping.array[offset : offset + count * row_bytes].reshape(count, row_bytes)

    def close(self) -> None:
        """Unmap everything."""
        for mapping in self._mapped.values():
            mapping.close()
        self._mapped.clear()

    def _drop_registered(self, rank: int, published: set[int]) -> None:
        for key in [key for key in self._mapped if key[0] == rank and key[1] < 0 and key[1] not in published]:
            self._mapped.pop(key).close()
