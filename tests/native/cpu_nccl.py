"""A program: random cases of the nccl backend, its kernels on CPUs and every operation of NCCL as an exchange by MPI.

python -m mpi4py cpu_nccl.py SEED COUNT
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Iterable
from typing import Any

import numpy as np
import numpy.typing as npt

from ncclep_bench.backends.nccl.backend import Nccl
from ncclep_bench.model.dtype import DType
from ncclep_bench.runtime.device_contract import Device
from ncclep_bench.runtime.group import Group
from ncclep_bench.runtime.nccl import Part
from ncclep_bench.runtime.world import world
from tests.native.cpu_cases import run
from tests.native.cpu_device import CpuDevice

Array = npt.NDArray[Any]


def memory(address: int, nbytes: int) -> npt.NDArray[np.uint8]:
    """The bytes at an address of this process."""
    return np.ctypeslib.as_array((ctypes.c_uint8 * nbytes).from_address(address))


class CpuCommunicator:
    """What the backend asks of NCCL, over memory of this process."""

    def __init__(self, group: Group, device: Device) -> None:
        self._group, self._device = group, device
        self._owned: list[int] = []

    def allocate(self, nbytes: int) -> int:
        sizes = self._group.allgather(str(nbytes).encode())
        assert len(set(sizes)) == 1, f"windows of unequal sizes: {sizes}"
        address = self._device.allocate(nbytes)
        self._owned.append(address)
        return address

    def free(self, address: int) -> None:
        self._owned.remove(address)
        self._device.free(address)

    def _everybody(self, address: int, nbytes: int) -> list[npt.NDArray[np.uint8]]:
        own = memory(address, nbytes).tobytes()
        return [np.frombuffer(data, np.uint8) for data in self._group.allgather(own)]

    def all_gather(self, send: int, recv: int, nbytes: int) -> None:
        memory(recv, nbytes * self._group.size)[:] = np.concatenate(self._everybody(send, nbytes))

    def all_to_all(self, send: int, recv: int, nbytes: int) -> None:
        ranks, mine = self._group.size, slice(self._group.rank * nbytes, (self._group.rank + 1) * nbytes)
        parts = [sent[mine] for sent in self._everybody(send, nbytes * ranks)]
        memory(recv, nbytes * ranks)[:] = np.concatenate(parts)

    def _sum(self, send: int, count: int, dtype: DType) -> Array:
        parts = [sent.view(dtype.numpy) for sent in self._everybody(send, count * dtype.itemsize)]
        return np.sum([part.astype(np.float32) for part in parts], axis=0).astype(dtype.numpy)

    def all_reduce(self, send: int, recv: int, count: int, dtype: DType) -> None:
        memory(recv, count * dtype.itemsize)[:] = self._sum(send, count, dtype).view(np.uint8)

    def reduce_scatter(self, send: int, recv: int, count: int, dtype: DType) -> None:
        total = self._sum(send, count * self._group.size, dtype)[self._group.rank * count :][:count]
        memory(recv, count * dtype.itemsize)[:] = total.view(np.uint8)

    def exchange(self, sends: Iterable[Part], receives: Iterable[Part]) -> None:
        sent = [b""] * self._group.size
        for part in sends:
            assert part.peer != self._group.rank
            sent[part.peer] += memory(part.address, part.nbytes).tobytes()
        by_target = [self._group.allgather(data) for data in sent]
        left = dict(enumerate(by_target[self._group.rank]))
        for part in receives:
            memory(part.address, part.nbytes)[:] = np.frombuffer(left[part.peer][: part.nbytes], np.uint8)
            left[part.peer] = left[part.peer][part.nbytes :]
        assert not any(left.values()), "more was sent than is received"

    def close(self) -> None:
        for address in [*self._owned]:
            self.free(address)

    def abort(self) -> None:
        self.close()


if __name__ == "__main__":
    group = world()
    backend = Nccl(
        lambda _: CpuDevice(), lambda group, device, _window, _blocks: CpuCommunicator(group, device), lambda _: None
    )
    wrong = run(group, backend, *map(int, sys.argv[1:]))
    group.close()
    sys.exit(wrong)
