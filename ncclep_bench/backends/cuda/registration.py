"""Buffers of the user's own where peers read them: registered over CUDA IPC, through a cache that forgets (S2)."""

from __future__ import annotations

import contextlib
import time
import weakref
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ncclep_bench.backends.contract import Stats
from ncclep_bench.backends.cuda.session import CudaSession
from ncclep_bench.backends.cuda.tokens import VEC_BYTES
from ncclep_bench.backends.host.session import HostSession
from ncclep_bench.backends.host.windows import RowWindows
from ncclep_bench.errors import CannotRunError, RankError, UsageError
from ncclep_bench.runtime.device_contract import HANDLE_BYTES, Allocation
from ncclep_bench.runtime.registration import RegistrationCache

_ENTRY = np.dtype(
    [
        ("identity", "<i8"),
        ("offset", "<i8"),
        ("dropped", "<i8"),
        ("handle", "u1", HANDLE_BYTES),
    ]
)
"""One line of a rank's directory: the allocation in which a row lies, and where in it.

Identity 0: the row is staged. `dropped` belongs to no row: identities of allocations that peers must let go
of, 0 where the list ends. Where it would not fit it begins with `_EVERYTHING`, and holds those that graphs have used:
of these nothing else is let go of then. `_REFUSED`: the call is none.
"""

_EVERYTHING, _REFUSED = -1, -2
_HALVES = 2


_OPEN = weakref.WeakSet["Registrations"]()
"""Of this process."""


class _NoHandleError(Exception):
    """No peer can open the memory."""


class _Registration(NamedTuple):
    allocation: Allocation
    handle: bytes


class Registrations:
    """Rows of user buffers that peers read, made known anew at every call; collective to create and to `publish`.

    Owners keep their registrations in a cache and write into a directory, which the ranks of a host share, where the
    rows of a call lie and what they have dropped; peers map what they have not mapped yet when they come to read it,
    and let go of what has been dropped. Memory that no peer can open stays unregistered: `publish` names those rows,
    and whoever calls copies them to where peers look instead.

    A handle names a whole allocation, so peers map each allocation once, whatever the rows in it. One that has been
    freed is told by its identity, also when another has got its address: the user need not say that memory is freed.
    """

    def __init__(self, session: CudaSession, rows: int, capacity: int) -> None:
        """`rows`: of a call; `capacity`: registrations kept between calls."""
        self._session, self._device = session, session.device
        self._meeting = HostSession(session.group, deadline_s=session.deadline_s)
        self.stats: Stats = self._meeting.stats
        self._near = [rank for rank in range(session.size) if rank not in session.out_of_reach | {session.rank}]
        if strangers := set(self._near) - set(self._meeting.local):
            self._meeting.close()
            raise CannotRunError(
                f"rank {session.rank} maps the GPU memory of ranks {sorted(strangers)}, but shares none on the host",
                hint="start the ranks in one container, or use memory that is bound once",
            )
        self._directories = RowWindows(self._meeting, _ENTRY.itemsize, _HALVES * rows, "the call directory")
        self._halves = {
            rank: self._directories.of(rank, np.uint8).reshape(-1).view(_ENTRY).reshape(_HALVES, rows)
            for rank in self._meeting.local
        }
        self._cache: RegistrationCache[_Registration] = RegistrationCache(capacity, self.stats.count)
        _OPEN.add(self)
        self._calls = 0
        self._live: Counter[int] = Counter()
        self._dropped: list[Allocation] = []
        """What peers have not been told to let go of."""
        self._mapped: dict[tuple[int, int], int] = {}
        self._in_graphs: set[tuple[int, int]] = set()
        self._columns: dict[int, tuple[list[int], list[int]]] = {}
        """Of the ranks of which the call has asked something."""
        self._given_to_graphs: set[int] = set()

    # ---- the owner ----

    def publish(self, rows: Iterable[tuple[int, int]], nbytes: int, operation: str) -> list[int]:
        """Tell peers where this rank's rows lie, (number, address) of `nbytes` each; the numbers that are not mapped.

        Returns when all ranks of the host have published. What is registered stays so until `release`. Raises
        UsageError, on all of them, for a row that is no memory of this device, ends behind its allocation, is not
        aligned, or in a capture lies where peers have mapped something else.
        """
        lines = self._lines(self._session.rank, self._calls + 1)
        refused: UsageError | None = None
        try:
            staged = self._register_rows(lines, rows, nbytes)
            self._tell_dropped(lines["dropped"])
        except UsageError as error:
            refused, lines["dropped"][0] = error, _REFUSED
        self._calls += 1
        self._columns.clear()
        self._meeting.sync(operation)
        if refused is not None:
            raise refused
        for rank in self._near:
            if self._lines(rank, self._calls)["dropped"][0] == _REFUSED:
                raise UsageError(
                    f"rank {self._session.rank}: {operation}: rank {rank} has refused its buffers",
                    hint="its own error says why; all can call again",
                )
        self.stats.count("mr_staged", len(staged))
        self._let_go()
        return staged

    def _register_rows(self, lines: npt.NDArray[Any], rows: Iterable[tuple[int, int]], nbytes: int) -> list[int]:
        """Fill this rank's lines; the numbers of those that stay unregistered."""
        identities, offsets, handles = lines["identity"], lines["offset"], lines["handle"]
        staged = []
        allocation = None
        for number, address in rows:
            if allocation is None or not 0 <= address - allocation.base < allocation.nbytes:
                allocation = self._device.allocation_of(address)
            registration = self._acquire(allocation, address, nbytes)
            if registration is None:
                staged.append(number)
                identities[number] = 0
                continue
            identities[number], offsets[number] = allocation.identity, address - allocation.base
            handles[number, : len(registration.handle)] = np.frombuffer(registration.handle, np.uint8)
            if self._device.capturing():
                self._given_to_graphs.add(allocation.identity)
        return staged

    def release(self) -> None:
        """Drop the least recently used registrations beyond the capacity; peers hear of it at the next call."""
        self._forget(self._cache.release())

    def opens(self, address: int) -> bool:
        """Whether peers can map the memory at an address."""
        return bool(self._device.export(self._device.allocation_of(address)))

    def _acquire(self, allocation: Allocation, address: int, nbytes: int) -> _Registration | None:
        """None where no peer can open the memory. Raises UsageError where the row is not aligned."""
        if address % VEC_BYTES:
            raise UsageError(
                f"rank {self._session.rank}: a row lies at {address:#x}", hint=f"allowed: multiples of {VEC_BYTES}"
            )
        with contextlib.suppress(_NoHandleError):
            # With the identity: what has been freed is never found again, whatever lies there now.
            key = (allocation.identity, address, nbytes)
            return self._cache.acquire(
                key, lambda: self._register(allocation, address, nbytes), for_good=self._device.capturing()
            )
        return None

    def _register(self, allocation: Allocation, address: int, nbytes: int) -> _Registration:
        handle = self._device.export(allocation)
        if not handle:
            raise _NoHandleError
        if address + nbytes > allocation.base + allocation.nbytes:
            raise UsageError(
                f"rank {self._session.rank}: a row of {nbytes} bytes at {address:#x} ends behind its allocation",
                hint=f"allowed: to {allocation.base + allocation.nbytes:#x}",
            )
        # Peers must not open what lies where they still have mapped something else.
        self._forget(self._cache.drop(lambda other: _replaces(allocation, other.allocation)))
        if self._device.capturing() and any(_replaces(allocation, other) for other in self._dropped):
            raise UsageError(
                f"rank {self._session.rank}: a row at {address:#x}, first used in a capture, lies where another buffer "
                "was, which peers cannot let go of now",
                hint="call this once with the same buffers before the capture",
            )
        self._live[allocation.identity] += 1
        return _Registration(allocation, handle)

    def _forget(self, registrations: Sequence[_Registration]) -> None:
        for registration in registrations:
            identity = registration.allocation.identity
            self._live[identity] -= 1
            if not self._live[identity]:
                # Peers map an allocation once: other rows in it would still need that.
                del self._live[identity]
                self._dropped.append(registration.allocation)

    def _tell_dropped(self, told: npt.NDArray[Any]) -> None:
        told[...] = 0
        # Letting go waits for the device, which nobody can in a capture.
        if self._device.capturing():
            return
        # What has come back since is still mapped.
        dropped = [
            identity
            for identity in dict.fromkeys(gone.identity for gone in self._dropped)
            if identity not in self._live
        ]
        self._dropped = []
        if len(dropped) > len(told):
            dropped = [_EVERYTHING, *self._given_to_graphs.intersection(dropped)][: len(told)]
        told[: len(dropped)] = dropped

    # ---- the peers ----

    def address_of(self, rank: int, number: int) -> int:
        """Where this rank sees a row that a peer in reach has published in the call; 0 where it has been staged."""
        identities, offsets = self._published(rank)
        key = (rank, identities[number])
        if not key[1]:
            return 0
        if self._device.capturing():
            self._in_graphs.add(key)
        base = self._mapped.get(key)
        if base is None:
            start = time.perf_counter_ns()
            handle = self._lines(rank, self._calls)[number]["handle"]
            base = self._mapped[key] = self._map(handle.tobytes(), rank)
            self.stats.count("mr_miss_total_us", (time.perf_counter_ns() - start) / 1e3)
        return base + offsets[number]

    def _published(self, rank: int) -> tuple[list[int], list[int]]:
        """Identity and offset of each row that a rank has published in the call."""
        if rank not in self._columns:
            lines = self._lines(rank, self._calls)
            self._columns[rank] = lines["identity"].tolist(), lines["offset"].tolist()
        return self._columns[rank]

    def _map(self, handle: bytes, rank: int) -> int:
        try:
            return self._device.map(handle, rank)
        except RankError as error:
            if self._device.capturing():
                hint = "call this once with the same buffers before the capture"
                raise RankError(error.message, ranks=error.ranks, hint=hint) from error
            # Another communicator's may still map what lay there before; what they need they map again.
            for other in set(_OPEN) - {self}:
                with other._device.current():
                    other._unmap(other._mapped.keys() - other._in_graphs)
            return self._device.map(handle, rank)

    def _unmap(self, keys: Collection[tuple[int, int]]) -> None:
        self._in_graphs -= set(keys)
        self._device.unshare([self._mapped.pop(key) for key in keys])

    def _let_go(self) -> None:
        gone: list[tuple[int, int]] = []
        for rank in self._near:
            told = self._lines(rank, self._calls)["dropped"]
            listed = {(rank, int(identity)) for identity in told[: np.count_nonzero(told)]} & self._mapped.keys()
            if told[0] == _EVERYTHING:
                listed |= {key for key in self._mapped.keys() - self._in_graphs if key[0] == rank}
            gone += listed
        if gone:
            start = time.perf_counter_ns()
            self._unmap(gone)
            self.stats.count("mr_miss_total_us", (time.perf_counter_ns() - start) / 1e3)

    def _lines(self, rank: int, call: int) -> npt.NDArray[Any]:
        """A rank's lines of a call. Calls take turns with two halves: a slow peer may still read those of the last."""
        lines: npt.NDArray[Any] = self._halves[rank][call % _HALVES]
        return lines

    def close(self) -> None:
        """Let go of everything that is mapped; waits for this rank's device alone."""
        _OPEN.discard(self)
        with contextlib.ExitStack() as stack:
            stack.callback(self._meeting.close)
            stack.callback(self._directories.close)
            stack.callback(self._halves.clear)
            stack.callback(self._cache.clear)
            self._unmap(list(self._mapped))


def _replaces(one: Allocation, other: Allocation) -> bool:
    """Whether an allocation lies, in part at least, where another has been."""
    apart = one.base + one.nbytes <= other.base or other.base + other.nbytes <= one.base
    return one.identity != other.identity and not apart
