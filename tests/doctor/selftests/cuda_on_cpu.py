"""A program: self-tests on the cuda backend with its kernels on CPUs; prints a JSON line per result of rank 0.

python -m mpi4py cuda_on_cpu.py FAULT|none CODE...    the fault is planted in the last rank
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import msgspec

from ncclep_bench.backends.cuda.backend import Cuda
from ncclep_bench.doctor.selftests.contract import Trial
from ncclep_bench.doctor.selftests.faults import fault_named
from ncclep_bench.doctor.selftests.run import merged
from ncclep_bench.doctor.selftests.table import self_test_named
from ncclep_bench.doctor.selftests.worker import all_ranks, one_result
from ncclep_bench.runtime import device
from ncclep_bench.runtime.world import abort
from tests.native.cpu_device import CpuDevice


class CpuCuda(Cuda):
    """The cuda backend on CPUs, which has all the real one has but the GPU."""

    def __init__(self, deadline_s: float = 10.0) -> None:
        super().__init__(lambda _: CpuDevice(), lambda: None, deadline_s)


class Gpu:
    """What the self-tests ask of a GPU itself: one whose speed is known, and which all ranks share."""

    name, bus_id = "NVIDIA H200", "0000:01:00.0"

    def free_bytes(self) -> int:
        return 0

    def capture(self, enqueue: Callable[[], None]) -> Callable[[], None]:
        return enqueue


def main() -> None:
    fault, *codes = sys.argv[1:]
    replaced: Any = device
    replaced.cuda_device = lambda _: Gpu()
    replaced.CudaDevice = Gpu
    group = all_ranks()
    if fault != "none":
        fault_named(fault).plant(group.rank == group.size - 1, "cuda")
    for code in codes:
        result = one_result(self_test_named(code), Trial(group, CpuCuda()))
        if group.rank == 0:
            print(msgspec.json.encode(merged(self_test_named(code), {0: result})).decode(), flush=True)
        if result.lost:
            abort(1)
    group.close()


if __name__ == "__main__":
    main()
