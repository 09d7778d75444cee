"""Rows between ranks that cannot map each other's memory: through NCCL, or through host memory and MPI."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import numpy.typing as npt

from ncclep_bench.errors import CannotRunError, RankError
from ncclep_bench.runtime import nccl
from ncclep_bench.runtime.device import CudaDevice
from ncclep_bench.runtime.device_contract import Device
from ncclep_bench.runtime.group import Group
from ncclep_bench.runtime.nccl import Communicator, Part
from ncclep_bench.runtime.world import MpiGroup

Array = npt.NDArray[Any]

_PATIENCE = 2.0
"""Deadlines of a device, that an exchange waits: a rank that waits for a lost neighbour of its own comes one late."""


class Staging(Protocol):
    """What carries device memory to and from ranks whose memory is out of reach."""

    name: str
    """As `algorithm` it is in the rows."""

    def exchange(self, sends: Sequence[Part], receives: Sequence[Part], operation: str) -> int:
        """All these messages at once, in the stream's order; the bytes that this rank has sent.

        All ranks call alike, also those with nothing to send; messages between two ranks pair up in their order. The
        host waits for the end, so no graph holds it. Raises RankError naming who did not take part in `operation`.
        """

    def close(self) -> None:
        """Free everything; waits for nobody."""


class MpiStaging:
    """Through host memory: MPI never sees a device's address, which only some MPI libraries can take."""

    name = "staged_mpi"

    def __init__(self, group: MpiGroup, device: Device, deadline_s: float) -> None:
        self._group, self._device, self._deadline_s = group, device, _PATIENCE * deadline_s
        self._buffers: dict[tuple[str, int], Array] = {}

    def exchange(self, sends: Sequence[Part], receives: Sequence[Part], operation: str) -> int:
        sent = 0

        def outgoing() -> Iterator[tuple[int, Array]]:
            nonlocal sent
            for peer, parts in _by_peer(sends).items():
                buffer = self._buffer("out", peer, parts)
                for part, place in _places(parts, buffer):
                    self._device.read(part.address, place)
                    sent += place.nbytes
                yield peer, buffer

        incoming = {peer: (parts, self._buffer("in", peer, parts)) for peer, parts in _by_peer(receives).items()}
        self._group.exchange(
            outgoing(), [(peer, buffer) for peer, (_, buffer) in incoming.items()], self._deadline_s, operation
        )
        for parts, buffer in incoming.values():
            for part, place in _places(parts, buffer):
                self._device.write(part.address, place)
        return sent

    def _buffer(self, direction: str, peer: int, parts: Sequence[Part]) -> Array:
        """Host memory for all parts of one peer, which make one message; kept for the next."""
        nbytes = sum(part.nbytes for part in parts)
        kept = self._buffers.get((direction, peer))
        if kept is None or kept.nbytes < nbytes:
            kept = self._buffers[direction, peer] = self._device.host_array(nbytes)
        return kept[:nbytes]

    def close(self) -> None:
        self._buffers.clear()


class NcclStaging:
    """Through NCCL's send and receive, from device to device."""

    name = "staged_nccl"

    def __init__(self, comm: Communicator, group: Group, device: Device, deadline_s: float) -> None:
        self._comm: Communicator | None = comm
        self._group, self._device, self._deadline_s = group, device, deadline_s

    def exchange(self, sends: Sequence[Part], receives: Sequence[Part], operation: str) -> int:
        if self._comm is None:
            raise RankError(f"rank {self._group.rank}: NCCL was given up, nothing can be exchanged in {operation}")
        self._comm.exchange(sends, receives)
        if not self._device.wait(_PATIENCE * self._deadline_s):
            self._give_up(operation)
        return sum(part.nbytes for part in sends)

    def _give_up(self, operation: str) -> None:
        """NCCL cannot tell who is absent; whoever is there comes here, so MPI can."""
        assert self._comm is not None
        self._comm.abort()
        self._comm = None
        if isinstance(self._group, MpiGroup):
            self._group.allgather(b"", self._deadline_s, operation)
        raise RankError(
            f"rank {self._group.rank}: {operation} did not end within {_PATIENCE * self._deadline_s:g} s in NCCL",
            hint="NCCL_DEBUG=INFO says what it waits for",
        )

    def close(self) -> None:
        if self._comm is not None:
            self._comm.close()
            self._comm = None


StagingOf = Callable[[Group, Device, float], Staging]
"""What makes the staging of a group, from its device and its deadline; collective."""


def staging_of(group: Group, device: Device, deadline_s: float) -> Staging:
    """NCCL where every rank has it and a GPU of its own, else MPI; collective.

    Raises CannotRunError, alike on all ranks, where there is neither.
    """
    gpu = nccl_reason = ""
    if not isinstance(device, CudaDevice):
        nccl_reason = "no GPU"
    elif (found := nccl.missing()) is not None:
        nccl_reason = found
    else:
        gpu = f"{this_host()} {device.bus_id}"
    everybody = [data.decode().partition("\n")[::2] for data in group.allgather(f"{gpu}\n{nccl_reason}".encode())]
    reasons = [f"rank {rank}: {reason}" for rank, (_, reason) in enumerate(everybody) if reason]
    if not reasons and len({gpu for gpu, _ in everybody}) < group.size:
        reasons = ["NCCL takes one rank per GPU, and ranks share one"]
    if not reasons:
        assert isinstance(device, CudaDevice)
        return NcclStaging(nccl.communicator(group, device), group, device, deadline_s)
    return mpi_staging(group, device, deadline_s, reasons[0])


def mpi_staging(group: Group, device: Device, deadline_s: float, instead_of: str = "") -> Staging:
    """MPI, whatever else there is. Raises CannotRunError for a group that is none of MPI's."""
    if not isinstance(group, MpiGroup):
        raise CannotRunError(
            f"ranks cannot map each other's memory, {type(group).__name__} sends no messages"
            + (f", and NCCL is not there: {instead_of}" if instead_of else ""),
            hint="make the group from an MPI communicator",
        )
    return MpiStaging(group, device, deadline_s)


def this_host() -> str:
    """What tells this host from others, also from one of the same name."""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            boot_id = file.read().strip()
    except OSError:
        boot_id = os.uname().nodename
    return f"{socket.gethostname()} {boot_id}"


def _by_peer(parts: Sequence[Part]) -> dict[int, list[Part]]:
    grouped: dict[int, list[Part]] = {}
    for part in parts:
        grouped.setdefault(part.peer, []).append(part)
    return grouped


def _places(parts: Sequence[Part], buffer: Array) -> Iterator[tuple[Part, Array]]:
    """Each part with its place in the message."""
    first = 0
    for part in parts:
        yield part, buffer[first : first + part.nbytes]
        first += part.nbytes
