"""A program for MPI ranks with GPUs: random cases of the cuda backend, as if every rank had a host of its own.

python -m mpi4py staged_cases.py STAGING SEED COUNT    STAGING: mpi, or auto: NCCL where it is there
"""

from __future__ import annotations

import sys

from ncclep_bench.backends.cuda.backend import Cuda
from ncclep_bench.backends.cuda.staging import StagingOf, mpi_staging, staging_of
from ncclep_bench.runtime.device import cuda_device, missing
from ncclep_bench.runtime.world import world
from tests.native.cpu_cases import check, random_cases

STAGINGS: dict[str, StagingOf] = {"mpi": mpi_staging, "auto": staging_of}


def main() -> None:
    backend = Cuda(cuda_device, missing, 10.0, str, STAGINGS[sys.argv[1]])
    seed, count = map(int, sys.argv[2:])
    group = world()
    for case in random_cases(seed, count, group.size, backend):
        wrong = check(case, group, backend)
        if wrong is not None:
            sys.exit(f"{case.case}: {wrong}")
    group.close()


if __name__ == "__main__":
    main()
