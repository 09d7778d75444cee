"""A program for MPI ranks with GPUs: random cases of a backend, launched and replayed from a graph.

python -m mpi4py gpu_cases.py BACKEND SEED COUNT [early]

early: launches begin while the one before still runs. NCCLEP_TEST_DELAYS: a seed; the kernels of the cuda backend
dawdle, and ranks run apart, as cpu_cases.py says.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from ncclep_bench.backends.cuda.backend import Cuda
from ncclep_bench.collectives.contract import Collective
from ncclep_bench.collectives.verify import first_wrong
from ncclep_bench.model.case import Case
from ncclep_bench.registry import BACKENDS, COLLECTIVES
from ncclep_bench.runtime.device import cuda_device
from ncclep_bench.runtime.world import MpiGroup, world
from tests.cases import make_problem
from tests.native.cpu_cases import DEFINES, LAUNCHES, check, meeting_of, random_cases


def check_graph(case: Case, group: MpiGroup, backend: Any) -> str | None:
    """Some replays of one graph, each with other contents in the same buffers; what is wrong, or None."""
    definition: Collective = COLLECTIVES.get(case.collective)
    problem = make_problem(case)
    prepared = backend.prepare(problem, group)
    replay: Callable[[], None] | None = None
    if getattr(prepared, "needs_host", False):
        prepared.close()
        return None
    come, wrong = meeting_of(group), ""
    try:
        try:
            replay = cuda_device(group.rank).capture(prepared.enqueue)
        except Exception:
            if not prepared.may_refuse_capture:
                raise
        if b"" in group.allgather(b"" if replay is None else b"captured") or replay is None:
            return None
        for draw in range(LAUNCHES):
            prepared.poison(group.rank)
            definition.fill(problem, group.rank, draw, prepared.inputs(group.rank))
            prepared.upload()
            come()
            replay()
            outputs = prepared.outputs(group.rank)
            wrong = wrong or first_wrong(definition, problem, group.rank, draw, outputs, prepared.undelivered) or ""
        everybody = [data.decode() for data in group.allgather(wrong.encode())]
        if any(everybody):
            return f"replayed: {next(filter(None, everybody))}"
    finally:
        # NCCL waits for graphs that hold its operations.
        replay = None
        prepared.close()
    return None


def main() -> None:
    backend = Cuda(defines=DEFINES) if DEFINES else BACKENDS.get(sys.argv[1])
    seed, count = map(int, sys.argv[2:4])
    group = world()
    cuda_device(group.rank).early_launches &= "early" in sys.argv[4:]
    for case in random_cases(seed, count, group.size, backend):
        wrong = check(case, group, backend) or check_graph(case, group, backend)
        if wrong is not None:
            sys.exit(f"{case.case}: {wrong}")
    group.close()


if __name__ == "__main__":
    main()
