"""A program for one of two ranks, without MPI, which would end the other: rank 1 is killed while kernels run.

python killed.py cpu|cuda RANK FOLDER

Rank 0 prints what it is told then. FOLDER, empty at first, is where the two meet.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

from ncclep_bench.backends.cuda.backend import Cuda
from ncclep_bench.errors import BenchError
from ncclep_bench.runtime.device import cuda_device
from ncclep_bench.runtime.device_contract import Device
from tests.cases import make_case, make_problem
from tests.ep.file_group_ranks import FileGroup
from tests.native.cpu_device import CpuDevice

RANKS, DEADLINE_S, KILLED_AFTER_S = 2, 8.0, 0.5
DEVICES: dict[str, Callable[[int], Device]] = {"cpu": lambda rank: CpuDevice(), "cuda": cuda_device}


def told_to_survivor(kind: str, folder: Path, deadline_s: float) -> str:
    """What rank 0 prints, after both have ended: one by SIGKILL, the other by itself."""
    root = Path(__file__).parents[2]
    ranks = [
        subprocess.Popen(
            [sys.executable, __file__, kind, str(rank), str(folder)],
            env={**os.environ, "PYTHONPATH": str(root)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(RANKS)
    ]
    try:
        told = [rank.communicate(timeout=deadline_s)[0] for rank in ranks]
        assert [rank.returncode for rank in ranks] == [0, -signal.SIGKILL], told
        return told[0]
    finally:
        for rank in ranks:
            rank.kill()


def main() -> None:
    kind, rank, folder = sys.argv[1], int(sys.argv[2]), Path(sys.argv[3])
    group = FileGroup(rank, RANKS, folder)
    backend = Cuda(DEVICES[kind], lambda: None, DEADLINE_S)
    case = make_case("dispatch", backend="cuda", ranks=2, layout="expert_major", tokens=64, batch_size=64)
    prepared = backend.prepare(make_problem(case), group)
    group.barrier()
    if rank == 1:
        threading.Timer(KILLED_AFTER_S, os.kill, (os.getpid(), signal.SIGKILL)).start()
    try:
        while True:
            prepared.launch()
            prepared.stats()
    except BenchError as error:
        print(f"{type(error).__name__}: {error.message}", flush=True)


if __name__ == "__main__":
    main()
