"""What runs kernels for one rank, as backends see it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from ncclep_bench.runtime.group import Group

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    Array = npt.NDArray[Any]
    Words = npt.NDArray[np.uint64]

HANDLE_BYTES = 64
"""The most that a handle of an allocation takes."""


class Allocation(NamedTuple):
    """What one call has allocated; a handle names all of it. `identity` belongs to no other of this process, ever."""

    identity: int
    base: int
    nbytes: int


class Device(Protocol):
    """What runs kernels for one rank: a GPU, or in tests a CPU. Work is enqueued in one order; reads wait for it."""

    blocks: int
    """Blocks of a kernel that uses the whole device; all of them run at once."""
    threads: int
    """Threads of such a block."""
    bulk_bytes: int
    """Shared memory of a block for bulk copies between it and global memory; 0 where the device has none."""

    def allocate(self, nbytes: int) -> int:
        """The address of zeroed memory."""

    def allocate_stream_ordered(self, nbytes: int) -> int:
        """The same from the device's memory pool, whose memory has no handle that `export` could give."""

    def free(self, address: int) -> None: ...

    def reachable(self, candidates: Collection[int], group: Group) -> set[int]:
        """Those of the candidates whose memory this rank can map; collective, whatever the candidates."""

    def share(self, address: int, nbytes: int, group: Group, peers: Collection[int]) -> list[int]:
        """Where this rank sees memory that everybody has allocated alike: its own and the `peers`'; collective.

        0 for the others.
        """

    def unshare(self, addresses: Sequence[int]) -> None:
        """Let go of peers' memory, which `share` or `map` gave."""

    def allocation_of(self, address: int) -> Allocation:
        """The allocation in which an address lies. Raises UsageError where it is no memory of this device."""

    def export(self, allocation: Allocation) -> bytes:
        """How a peer can `map` it, HANDLE_BYTES at most; b"" where no peer can."""

    def map(self, handle: bytes, rank: int) -> int:
        """Where this rank sees the first byte of an allocation that `rank` has exported, and has not been mapped yet.

        Raises RankError when it cannot be mapped.
        """

    def write(self, address: int, array: Array) -> None:
        """Copy a host array to the device, after what is enqueued."""

    def write_unused(self, address: int, array: Array) -> None:
        """The same at once, to memory that nothing enqueued uses."""

    def read(self, address: int, array: Array) -> None:
        """Copy from the device into a host array, after what is enqueued."""

    def fill(self, address: int, nbytes: int, byte: int) -> None:
        """Write the same byte everywhere, after what is enqueued."""

    def copy(self, target: int, source: int, nbytes: int) -> None:
        """Enqueue a copy between addresses of this or a peer's device."""

    def function(self, source: Path, include: Path, name: str, defines: Sequence[str]) -> Any:
        """The kernel `name` of a source file, compiled for this device."""

    def allow_shared(self, function: Any, nbytes: int) -> None:
        """Let a kernel's blocks have so much shared memory, up to `bulk_bytes`."""

    def prepare(
        self, function: Any, blocks: int, threads: int, shared_bytes: int, arguments: Words, *, early: bool
    ) -> Callable[[], None]:
        """What enqueues a kernel whose one parameter is the struct in `arguments`, any number of times.

        `early`: its blocks may come while the kernel before still runs, to wait there for its end.
        """

    def current(self) -> AbstractContextManager[None]:
        """Inside, this process's calls go to this device; afterwards to whichever they went to before."""

    def within(self, stream: int) -> AbstractContextManager[None]:
        """What is enqueued inside comes after what a stream of the user's holds, and before what it gets afterwards.

        While it is being captured, memory can be allocated, written as yet unused and mapped inside.
        The device is current inside. Raises UsageError for a default stream, and one of another device or context; an
        address that is no stream's cannot be told.
        """

    def capturing(self) -> bool:
        """Whether what is enqueued becomes part of a graph of the user's, which runs later and any number of times."""

    def synchronize(self) -> None:
        """Return when everything enqueued is done."""

    def host_array(self, nbytes: int) -> Array:
        """Bytes on the host that are quick to `read` into and `write` from."""

    def wait(self, deadline_s: float) -> bool:
        """The same, but False when it is not done after `deadline_s`."""
