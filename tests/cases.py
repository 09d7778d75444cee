"""Cases and problems of several test files and of the ranks they start."""

from __future__ import annotations

from typing import Any

import numpy as np

from ncclep_bench.collectives.contract import Collective, Problem, problem_of
from ncclep_bench.model.case import Case
from ncclep_bench.registry import COLLECTIVES
from ncclep_bench.routing.token_routing import token_routing

TOKEN_COLLECTIVES = ("dispatch", "combine", "dispatch_combine", "padded_all_to_all")
EXPERT_COLLECTIVES = ("all_gather_experts", "reduce_scatter_expert_grads", "dense_all_gather", "dense_all_reduce")


def make_case(collective: str, **axes: Any) -> Case:
    """A small case of `collective`; `axes` replace the defaults, and axes it does not use are dropped."""
    defaults: dict[str, Any] = {
        "backend": "in_memory",
        "mode": "ht",
        "layout": "flat",
        "ranks": 4,
        "tokens": 24,
        "batch_size": 24,
        "tokens_per_sequence": 1,
        "hidden": 16,
        "num_experts": 8,
        "expert_elements": 40,
        "placement": "block",
        "top_k": 3,
        "dtype": "float32",
        "alignment": 1,
        "routing": "uniform",
        "active_share": 0.6,
        "chain": 2,
    }
    definition: Collective = COLLECTIVES.get(collective)
    if definition.variants:
        defaults["variant"] = definition.variants[0]
    wanted = {**defaults, **axes}
    return Case(
        collective=collective,
        backend=wanted.pop("backend"),
        **{key: value for key, value in wanted.items() if key in definition.axes},
    )


def make_problem(case: Case) -> Problem:
    """The case's problem, with its routing where it has one."""
    return problem_of(case, None if case.routing is None else token_routing(case))


def expected_rows(definition: Collective, problem: Problem, rank: int, draw: int) -> int:
    """Number of values the verifier compares for one rank."""
    return sum(int(np.asarray(piece.values).size) for piece in definition.expected(problem, rank, draw))
