"""One Mixture-of-Experts layer over MPI ranks: route, dispatch, run the experts, combine.

mpiexec -n 2 python examples/dispatch_combine.py
"""

from __future__ import annotations

import numpy as np
from mpi4py import MPI

from ncclep_bench import EpCommunicator, EpConfig

TOKENS, HIDDEN, EXPERTS, TOP_K = 64, 32, 8, 2


def main() -> None:
    # Everybody draws the same weights, and a rank uses those of the experts that it holds.
    weights = np.random.default_rng(0).standard_normal((EXPERTS, HIDDEN, HIDDEN), np.float32)
    rng = np.random.default_rng(MPI.COMM_WORLD.rank)
    tokens = rng.standard_normal((TOKENS, HIDDEN), np.float32)
    scores = rng.random((TOKENS, EXPERTS), np.float32)
    topk_idx = np.argsort(-scores, axis=1)[:, :TOP_K]
    topk_weights = np.take_along_axis(scores, topk_idx, axis=1)

    config = EpConfig(num_experts=EXPERTS, top_k=TOP_K, hidden=HIDDEN, layout="expert_major")
    with EpCommunicator(MPI.COMM_WORLD, config) as comm:
        handle = comm.create_handle(topk_idx, topk_weights)
        received = handle.dispatch(tokens)
        blocks = np.split(received.tokens, np.cumsum(received.expert_counts)[:-1])
        rows = [block @ weights[expert] for expert, block in zip(comm.local_experts, blocks, strict=True)]
        combined = handle.combine(np.concatenate(rows))

    outputs = np.einsum("th,tkho->tko", tokens, weights[topk_idx])
    expected = np.einsum("tko,tk->to", outputs, topk_weights)
    np.testing.assert_allclose(combined, expected, rtol=1e-4, atol=1e-4)
    if comm.rank == 0:
        print(f"{TOKENS} tokens per rank went through {EXPERTS} experts on {comm.size} ranks and came back right")


if __name__ == "__main__":
    main()
