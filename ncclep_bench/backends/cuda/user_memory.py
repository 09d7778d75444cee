"""Memory as users bring it: at the start of a large page or anywhere, from the device or from a pool of its."""

from __future__ import annotations

from collections.abc import Callable

from ncclep_bench.backends.cuda.session import CudaSession
from ncclep_bench.model.case import UserMemory

LARGE_PAGE_BYTES = 2 << 20
_BEHIND_A_PAGE = 4096 + 16
"""As little aligned as the kernels take."""


def _aligned(session: CudaSession, nbytes: int) -> int:
    address = session.allocate(nbytes)
    if address % LARGE_PAGE_BYTES == 0:
        return address
    address = session.allocate(nbytes + LARGE_PAGE_BYTES)
    return -(-address // LARGE_PAGE_BYTES) * LARGE_PAGE_BYTES


def _unaligned(session: CudaSession, nbytes: int) -> int:
    return session.allocate(nbytes + _BEHIND_A_PAGE) + _BEHIND_A_PAGE


def _stream_ordered(session: CudaSession, nbytes: int) -> int:
    return session.own(session.device.allocate_stream_ordered(nbytes))


USER_MEMORY: dict[UserMemory, Callable[[CudaSession, int], int]] = {
    "aligned": _aligned,
    "unaligned": _unaligned,
    "stream_ordered": _stream_ordered,
}
"""What gives the address of a zeroed buffer of so many bytes, freed with the session."""
