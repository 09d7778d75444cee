"""A program for MPI ranks with GPUs: buffers of the user's own, freed and made anew between calls.

python -m mpi4py registered_cases.py SEED COUNT
"""

from __future__ import annotations

import sys

from ncclep_bench.runtime.device import cuda_device
from ncclep_bench.runtime.world import world
from tests.native.cpu_registration import run

MOST_LEFT_BYTES = 64 << 20
"""What a context may have kept for itself; a sequence that gave nothing back would leave more."""


def main() -> None:
    group = world()
    seed, count = map(int, sys.argv[1:])
    device = cuda_device(group.rank)
    # The first has kernels loaded and pools made.
    wrong = run(group, lambda: device, seed, 2)
    group.barrier()
    before = device.free_bytes()
    group.barrier()
    wrong = wrong or run(group, lambda: device, seed + 1, count)
    group.barrier()
    left = before - device.free_bytes()
    group.barrier()
    if wrong is None and left > MOST_LEFT_BYTES:
        wrong = f"{left} bytes of the GPU were not given back"
    group.close()
    sys.exit(wrong)


if __name__ == "__main__":
    main()
