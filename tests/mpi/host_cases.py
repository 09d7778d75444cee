"""A program for MPI ranks: random cases of every collective on the host backend, verified, bytes counted.

python -m mpi4py host_cases.py SEED COUNT
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

from ncclep_bench.backends.host.backend import HOST
from ncclep_bench.collectives.contract import Collective
from ncclep_bench.collectives.verify import first_wrong
from ncclep_bench.model.case import Case
from ncclep_bench.registry import COLLECTIVES
from ncclep_bench.runtime.world import MpiGroup, world
from tests.cases import make_case, make_problem


def random_case(rng: np.random.Generator, ranks: int) -> Case:
    """One case that is not waived; the same on all ranks that draw with the same generator."""

    def one_of(*values: Any) -> Any:
        return values[int(rng.integers(len(values)))]

    while True:
        collective = one_of(*COLLECTIVES)
        definition: Collective = COLLECTIVES.get(collective)
        mode = one_of("ht", "ll")
        placement = one_of("block", "uneven", f"replicas:{1 + int(rng.integers(ranks))}")
        num_experts = ranks * int(rng.integers(1, 4)) if placement == "block" else int(rng.integers(1, 11))
        tokens = int(rng.integers(0, 40))
        case = make_case(
            collective,
            backend="host",
            ranks=ranks,
            mode=mode,
            layout=one_of("flat", "expert_major", "rank_major"),
            variant=one_of(*definition.variants) if definition.variants else None,
            tokens=tokens,
            batch_size=tokens,
            hidden=one_of(1, 7, 33, 128, 256),
            num_experts=num_experts,
            expert_elements=one_of(1, 5, 1000, 70_000),
            placement=placement,
            top_k=int(rng.integers(1, min(num_experts, 5) + 1)),
            dtype=one_of("float32", "float16", "bfloat16", "float8_e4m3fn"),
            alignment=one_of(1, 4, 7),
            routing=one_of("uniform", "zipf", "all_to_one"),
            masked_share=one_of(None, 0.3, 1.0),
            empty_ranks=one_of(0, 0, int(rng.integers(ranks + 1))),
            active_share=one_of(0.0, 0.4, 1.0),
            mr_cache_size=one_of(0, 1, 64),
            transport=one_of("auto", "messages"),
            seed=int(rng.integers(1000)),
        )
        if HOST.supports(case) is None:
            return case


def check(case: Case, group: MpiGroup) -> str | None:
    """Three launches with fresh inputs and one change of routing; what is wrong, or None."""
    definition: Collective = COLLECTIVES.get(case.collective)
    problem = make_problem(case)
    prepared = HOST.prepare(problem, group)
    try:
        for draw in range(3):
            if draw == 2:
                prepared.update(problem)
            prepared.poison(group.rank)
            definition.fill(problem, group.rank, draw, prepared.inputs(group.rank))
            group.barrier()
            before = prepared.stats().wire_bytes
            prepared.launch()
            moved = prepared.stats().wire_bytes - before
            wrong = first_wrong(definition, problem, group.rank, draw, prepared.outputs(group.rank))
            if wrong is not None:
                return wrong
            total = sum(int(data) for data in group.allgather(str(moved).encode())) // (case.chain or 1)
            planned = definition.bytes(problem).planned
            if prepared.wire_source == "counted" and total != planned:
                return f"wire bytes {total}, planned {planned}"
    finally:
        prepared.close()
    return None


def main() -> None:
    seed, count = map(int, sys.argv[1:])
    group = world()
    rng = np.random.default_rng(seed)
    for _ in range(count):
        case = random_case(rng, group.size)
        wrong = check(case, group)
        if wrong is not None:
            sys.exit(f"{case.case}: {wrong}")
    group.close()


if __name__ == "__main__":
    main()
