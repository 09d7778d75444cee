"""Host time of a communicator's calls on GPU arrays: mode ll, 128 tokens of 7,168 float16 elements, top-8 of 256.

mpirun -n N python -m mpi4py benchmarks/call_time.py    the quickest of several batches, in microseconds, of rank 0
"""

from __future__ import annotations

import time
from collections.abc import Callable

import cupy
import numpy as np
from mpi4py import MPI

from ncclep_bench import EpCommunicator, EpConfig

TOKENS, HIDDEN, EXPERTS, TOP_K, ELEMENTS = 128, 7168, 256, 8, 4096
BATCHES, CALLS = 8, 100
"""The device keeps up with a batch: a full queue would be what is timed."""


def call_us(call: Callable[[], object], stream: cupy.cuda.Stream) -> float:
    times = []
    for _ in range(BATCHES):
        MPI.COMM_WORLD.Barrier()
        start = time.perf_counter()
        for _ in range(CALLS):
            call()
        times.append((time.perf_counter() - start) / CALLS * 1e6)
        stream.synchronize()
    return min(times)


def main() -> None:
    world, stream = MPI.COMM_WORLD, cupy.cuda.Stream(non_blocking=True)
    config = EpConfig(
        num_experts=EXPERTS,
        backend="cuda",
        top_k=TOP_K,
        hidden=HIDDEN,
        dtype="float16",
        mode="ll",
        layout="expert_major",
        max_tokens_per_rank=TOKENS,
        expert_elements=ELEMENTS,
    )
    with EpCommunicator(world, config) as comm, stream:
        choices = np.argsort(np.random.default_rng(world.rank).random((TOKENS, EXPERTS)), axis=1)[:, :TOP_K]
        idx, weights = cupy.asarray(choices.astype(np.int32)), cupy.full((TOKENS, TOP_K), 1 / TOP_K, np.float32)
        rows, out = cupy.ones((TOKENS, HIDDEN), np.float16), cupy.zeros((TOKENS, HIDDEN), np.float16)
        params = cupy.ones((len(comm.local_experts), ELEMENTS), np.float16)
        whole = cupy.zeros((EXPERTS, ELEMENTS), np.float16)
        handle = comm.create_handle(idx, weights, stream=stream)
        received = handle.dispatch(rows, stream=stream)
        calls: dict[str, Callable[[], object]] = {
            "update": lambda: handle.update(idx, weights, stream=stream),
            "dispatch": lambda: handle.dispatch(rows, stream=stream),
            "combine": lambda: handle.combine(received.tokens, out, stream=stream),
            "all_gather_experts": lambda: comm.all_gather_experts(params, None, whole, stream=stream),
        }
        for name, call in calls.items():
            call()
            stream.synchronize()
            us = call_us(call, stream)
            if world.rank == 0:
                print(f"{name:20} {us:7.1f} us", flush=True)
        comm.synchronize()


if __name__ == "__main__":
    main()
