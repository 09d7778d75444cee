"""Cases, problems and strategies that several test files draw from."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import strategies as st

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


@st.composite
def cases(draw: st.DrawFn, collectives: tuple[str, ...] = TOKEN_COLLECTIVES + EXPERT_COLLECTIVES) -> Case:
    """Random shapes, dtypes, placements, replicas, empty ranks and masked tokens; only cases that are not waived."""
    collective = draw(st.sampled_from(collectives))
    definition: Collective = COLLECTIVES.get(collective)
    ranks = draw(st.integers(1, 5))
    placement = draw(st.sampled_from(["block", "uneven", "replicas"]))
    num_experts = draw(st.integers(1, 4)) * ranks if placement == "block" else draw(st.integers(1, 12))
    if placement == "replicas":
        placement = f"replicas:{draw(st.integers(1, ranks))}"
    mode = draw(st.sampled_from(["ht", "ll"]))
    tokens = draw(st.integers(0, 20))
    dtype = draw(st.sampled_from(["float32", "float16", "bfloat16", "float8_e4m3fn"]))
    scaled = dtype == "float8_e4m3fn"
    if scaled and collective not in ("dispatch", "padded_all_to_all"):
        dtype, scaled = "bfloat16", False
    variants = ("dispatch",) if scaled and definition.variants else definition.variants
    return make_case(
        collective,
        ranks=ranks,
        placement=placement,
        num_experts=num_experts,
        mode=mode,
        layout=draw(st.sampled_from(["flat", "expert_major"] if mode == "ht" else ["expert_major", "rank_major"])),
        variant=draw(st.sampled_from(variants)) if variants else None,
        tokens=tokens,
        batch_size=tokens,
        hidden=128 * draw(st.integers(1, 2)) if scaled else draw(st.integers(1, 33)),
        expert_elements=draw(st.integers(1, 50)),
        top_k=draw(st.integers(1, min(num_experts, 5))),
        dtype=dtype,
        alignment=draw(st.sampled_from([1, 4, 7])),
        routing=draw(st.sampled_from(["uniform", "zipf", "round_robin", "all_to_one"])),
        masked_share=draw(st.sampled_from([None, 0.3, 1.0])),
        empty_ranks=draw(st.integers(0, ranks)),
        active_share=draw(st.sampled_from([0.0, 0.3, 1.0])),
        seed=draw(st.integers(0, 1000)),
    )


def expected_rows(definition: Collective, problem: Problem, rank: int, draw: int) -> int:
    """Number of values the verifier compares for one rank."""
    return sum(int(np.asarray(piece.values).size) for piece in definition.expected(problem, rank, draw))
