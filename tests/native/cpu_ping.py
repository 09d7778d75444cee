"""A program for MPI ranks: two rounds of the kernel ping on CPUs; every rank with a peer prints what its flag holds."""

from __future__ import annotations

import numpy as np

from ncclep_bench.backends.cuda.floor import ROUNDS, ping_arguments
from ncclep_bench.backends.cuda.session import CudaSession, Heap
from ncclep_bench.runtime.world import world
from tests.native.cpu_device import CpuDevice


def main() -> None:
    group = world()
    device = CpuDevice()
    session = CudaSession(group, device)
    heap = Heap(device, group, {"flags": 8})
    peer = group.rank ^ 1
    launch = session.launch(
        "ping", ping_arguments(session, heap, peer if peer < group.size else -1), blocks=1, threads=32
    )
    for _ in range(2):
        session.meet()
        launch()
    session.check()
    flag = np.zeros(1, np.uint64)
    device.read(heap.address("flags"), flag)
    print(f"{group.rank}: {int(flag[0]) / ROUNDS:g} rounds", flush=True)
    group.barrier()
    heap.close()
    session.close()
    group.close()


if __name__ == "__main__":
    main()
