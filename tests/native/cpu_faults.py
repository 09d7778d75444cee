"""A program for two MPI ranks: what the cuda backend, its kernels on CPUs, tells of a fault.

python -m mpi4py cpu_faults.py FAULT

late_peer: rank 1 does not launch. unknown_expert: rank 0's routing on the device names an expert that does not exist.
Who notices prints the error.
"""

from __future__ import annotations

import dataclasses
import sys

from ncclep_bench.backends.cuda.backend import Cuda
from ncclep_bench.errors import BenchError
from ncclep_bench.runtime.world import MpiGroup, world
from tests.cases import make_case, make_problem
from tests.native.cpu_device import CpuDevice

DEADLINE_S = 2.0


def late_peer(group: MpiGroup, backend: Cuda) -> None:
    problem = make_problem(make_case("dispatch", backend="cuda", ranks=2, layout="expert_major"))
    prepared = backend.prepare(problem, group)
    if group.rank == 0:
        prepared.launch()
        prepared.stats()


def unknown_expert(group: MpiGroup, backend: Cuda) -> None:
    problem = make_problem(make_case("dispatch", backend="cuda", ranks=2))
    assert problem.routing is not None
    topk_idx = problem.routing.topk_idx.copy()
    topk_idx[3, 1] = 99
    routing = dataclasses.replace(problem.routing, topk_idx=topk_idx)
    backend.prepare(dataclasses.replace(problem, routing=routing), group)


def main() -> None:
    group = world()
    backend = Cuda(lambda _: CpuDevice(), lambda: None, DEADLINE_S)
    try:
        {"late_peer": late_peer, "unknown_expert": unknown_expert}[sys.argv[1]](group, backend)
    except BenchError as error:
        print(f"{type(error).__name__}: {error.message}", flush=True)
    group.barrier()
    group.close()


if __name__ == "__main__":
    main()
