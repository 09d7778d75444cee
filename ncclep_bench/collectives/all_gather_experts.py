"""All-gather of expert parameters: each rank receives the experts it needs, from whichever rank holds them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np

from ncclep_bench.collectives.contract import (
    ACTIVE_AXES,
    BUFFER_VARIANTS,
    Array,
    Bytes,
    Collective,
    Expected,
    Move,
    Problem,
    crossing_bytes,
)
from ncclep_bench.collectives.reference import copies
from ncclep_bench.collectives.rows import Rows
from ncclep_bench.model.case import Case
from ncclep_bench.model.dtype import dtype_named
from ncclep_bench.model.plan import Entries, Field, IntArray, RowPlan, Stage


class AllGatherExperts(Collective):
    """`needed[rank, expert]` selects what arrives.

    Input `params` [local experts, expert_elements]; output `all_params` [num_experts, expert_elements], where only
    needed rows are written. in_place: input and output are one `all_params`, own rows already in their place.
    """

    name = "all_gather_experts"
    axes = ACTIVE_AXES
    variants = BUFFER_VARIANTS
    partner = "dense_all_gather"

    def waiver(self, case: Case) -> str | None:
        return expert_waiver(case)

    def empty_inputs(self, problem: Problem, rank: int) -> dict[str, Array]:
        if problem.case.variant == "in_place":
            return {"all_params": expert_array(problem, problem.case.num_experts)}
        return {"params": expert_array(problem, len(problem.placement.experts_of_rank[rank]))}

    def fill(self, problem: Problem, rank: int, draw: int, inputs: Mapping[str, Array]) -> None:
        held = np.array(problem.placement.experts_of_rank[rank], dtype=np.int64)
        params = expert_rows(problem, held, draw)
        if problem.case.variant == "in_place":
            params.fill(inputs["all_params"], held)
        else:
            params.fill(inputs["params"])

    def row_plan(self, problem: Problem) -> RowPlan:
        needed = needed_by(problem)
        placement = problem.placement

        def entries() -> Entries:
            dst, expert = np.nonzero(needed)
            src = placement.replica_rank[dst, expert].astype(np.int64)
            return Entries(src, placement.local_id[src, expert].astype(np.int64), dst, expert)

        rows_out = (placement.num_experts,) * placement.ranks
        stage = Stage("gather", "copy", expert_fields(problem), rows_out, entries, lambda: gathered_pairs(problem))
        return RowPlan(placement.ranks, stage, (stage,))

    def moves(self, case: Case) -> tuple[Move, ...]:
        if case.variant == "in_place":
            return (Move("all_params", "all_params", source_held=True),)
        return (Move("params", "all_params"),)

    def expected(self, problem: Problem, rank: int, draw: int) -> Iterator[Expected]:
        wanted = np.flatnonzero(needed_by(problem)[rank])
        if problem.case.variant == "in_place":
            wanted = np.union1d(wanted, problem.placement.experts_of_rank[rank]).astype(np.int64)
        yield from copies("all_params", wanted, expert_rows(problem, wanted, draw))

    def bytes(self, problem: Problem) -> Bytes:
        payload = int(needed_by(problem).sum())
        return expert_bytes(problem, payload, gathered_pairs(problem), self.row_plan(problem))


def needed_by(problem: Problem) -> Array:
    """The activation matrix, bool [ranks, num_experts]."""
    assert problem.active is not None, "a parameter collective has an activation"
    return problem.active


def gathered_pairs(problem: Problem) -> IntArray:
    """Experts that go from each rank to each rank, shape [ranks, ranks]."""
    pairs = np.zeros((problem.placement.ranks,) * 2, dtype=np.int64)
    dst, expert = np.nonzero(needed_by(problem))
    np.add.at(pairs, (problem.placement.replica_rank[dst, expert], dst), 1)
    return pairs


def expert_rows(problem: Problem, keys: IntArray, draw: int) -> Rows:
    """Contents of the expert blocks with `keys`, shape [keys, expert_elements]."""
    return Rows(keys, problem.case.expert_elements or 0, problem.case.seed, draw, problem.dtype)


def expert_array(problem: Problem, count: int) -> Array:
    """Zeros for `count` experts' blocks, shape [count, expert_elements]."""
    return np.zeros((count, problem.case.expert_elements or 0), problem.dtype.numpy)


def expert_fields(problem: Problem) -> tuple[Field, ...]:
    """One expert's block as a row."""
    return (Field("expert", (problem.case.expert_elements or 0) * problem.dtype.itemsize),)


def expert_waiver(case: Case) -> str | None:
    """Why a parameter collective cannot take the case's dtype, or None."""
    if dtype_named(case.dtype).scaled:
        return f"parameters and gradients are float32, float16 or bfloat16; {case.dtype} is for dispatch"
    return None


def expert_bytes(
    problem: Problem, payload_blocks: int, pairs: IntArray, plan: RowPlan, *, busbw_passes: int = 1
) -> Bytes:
    """Byte figures of a parameter collective; S of algbw is the whole vector of experts, as in nccl-tests."""
    row_bytes = expert_fields(problem)[0].row_bytes
    minimal, busiest = crossing_bytes(pairs, row_bytes)
    everything = problem.case.num_experts * row_bytes
    ranks = problem.placement.ranks
    planned = plan.traffic().total_bytes
    factor = busbw_passes * (ranks - 1) / ranks
    return Bytes(payload_blocks * row_bytes, minimal, busiest, planned, everything, everything, factor)


ALL_GATHER_EXPERTS = AllGatherExperts()
