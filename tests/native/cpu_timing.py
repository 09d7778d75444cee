"""A program for MPI ranks: a case measured as on GPUs, kernels and clock on CPUs; rank 0 prints the row as JSON.

python -m mpi4py cpu_timing.py warm|cold [USER_MEMORY]

A dispatch; with USER_MEMORY an all-gather of parameters in such memory, registered at every call.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np

from ncclep_bench.backends.cuda import backend as cuda_backend
from ncclep_bench.backends.cuda import floor, timer, utilisation
from ncclep_bench.backends.cuda.backend import Cuda
from ncclep_bench.backends.cuda.timer import CACHES_FLUSHED
from ncclep_bench.model.scenario import Timing
from ncclep_bench.registry import BACKENDS
from ncclep_bench.runtime.world import world
from ncclep_bench.sweeps import execute
from ncclep_bench.sweeps.execute import Routings, measure
from ncclep_bench.sweeps.job import Source
from tests.cases import make_case
from tests.native.cpu_device import CpuDevice


class TimedCpu(CpuDevice):
    """What timers ask of a GPU, of one that does everything when it is enqueued."""

    l2_bytes, index, bus_id = 48 << 10, 0, "none"

    def __init__(self) -> None:
        super().__init__()
        self.flushes: list[int] = []
        self._capturing = False

    def allocate(self, nbytes: int) -> int:
        assert not self._capturing, "no GPU allocates while it captures"
        address = super().allocate(nbytes)
        if nbytes == CACHES_FLUSHED * self.l2_bytes:
            self.flushes.append(address)
        return address

    def free(self, address: int) -> None:
        if address in self.flushes:
            words = np.zeros(CACHES_FLUSHED * self.l2_bytes // 16, np.dtype("4u4"))
            self.read(address, words)
            assert (words[:, 0] == np.arange(len(words))).all(), "a flush leaves no memory as it was"
        super().free(address)

    def capture(self, enqueue: Callable[[], object]) -> Callable[[], object]:
        self._capturing = True
        try:
            enqueue()
        finally:
            self._capturing = False
        return enqueue

    def record(self, *, aside: bool = False) -> float:
        return time.perf_counter() * 1e6

    def elapsed_us(self, first: float, last: float) -> float:
        return last - first

    def matrix_product(self, size: int, most_sms: int | None) -> Callable[[], None]:
        return lambda: time.sleep(1e-3)

    def hold_aside(self, event: float) -> None:
        """Nothing is ever under way."""


DEVICE = TimedCpu()
CPU_CUDA = Cuda(lambda _: DEVICE, lambda: None, 60.0)


def main() -> None:
    from tests.native import cpu_timing as own

    replaced: Any = cuda_backend
    replaced.CudaDevice = own.TimedCpu
    BACKENDS.table["cuda"] = "tests.native.cpu_timing:CPU_CUDA"
    # Threads of a CPU are slow; less of everything is as good.
    floor.COPY_BYTES, floor.COPIES, floor.PINGS, floor.ROUNDS = 1 << 16, 1, 1, 4
    execute.CALLS, execute.LINK_LAUNCHES, execute.UPDATES = 3, 3, 1
    timer.OPERATIONS_PER_GRAPH, utilisation.LOOP_S = 2, 0.1
    group = world()
    timing = Timing(warmup=1, min_samples=2, max_samples=2, utilisation=True, overlap=True)
    cache, *user_memory = sys.argv[1:]
    axes: dict[str, Any] = {"backend": "cuda", "ranks": group.size, "cache": cache}
    case = make_case("dispatch", hidden=64, **axes)
    if user_memory:
        axes |= {"variant": "registered", "user_memory": user_memory[0], "mr_cache_size": 1, "active_share": 1.0}
        case = make_case("all_gather_experts", **axes)
    row = measure(case, Source(timing, {}, "."), group, Routings(), lambda operation: None)
    if group.rank == 0:
        print(json.dumps(msgspec.to_builtins(row) | {"flushed": bool(own.DEVICE.flushes)}), flush=True)
    group.close()


if __name__ == "__main__":
    main()
