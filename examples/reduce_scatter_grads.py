"""Expert gradients after a backward pass: every rank has some, each goes to the rank that holds the expert.

mpiexec -n 2 python examples/reduce_scatter_grads.py
"""

from __future__ import annotations

import numpy as np
from mpi4py import MPI

from ncclep_bench import EpCommunicator, EpConfig

EXPERTS, EXPERT_ELEMENTS = 64, 4096


def main() -> None:
    expert_group = MPI.COMM_WORLD
    config = EpConfig(
        num_experts=EXPERTS,
        experts_per_rank=EXPERTS // expert_group.size,
        expert_elements=EXPERT_ELEMENTS,
        topology="auto",
        ep_mr_cache_size=256,
    )
    with EpCommunicator(expert_group, ep_config=config) as comm:
        # Memory from empty() is read by the other ranks where it lies.
        grads = comm.empty(EXPERTS * EXPERT_ELEMENTS)
        has_gradient = np.random.default_rng(comm.rank).random(EXPERTS) < 0.25
        grads.reshape(EXPERTS, -1)[has_gradient] = comm.rank + 1
        mine = comm.reduce_scatter_expert_grads(grads, has_gradient)
        wire_bytes = comm.stats.wire_bytes

    everybody = [np.random.default_rng(rank).random(EXPERTS) < 0.25 for rank in range(comm.size)]
    total = sum((rank + 1) * bitmap for rank, bitmap in enumerate(everybody))
    np.testing.assert_array_equal(mine, np.repeat(total[list(comm.local_experts), None], EXPERT_ELEMENTS, axis=1))
    if comm.rank == 0:
        print(f"summed the gradients of {len(mine)} of {EXPERTS} experts, read {wire_bytes} bytes of other ranks")


if __name__ == "__main__":
    main()
