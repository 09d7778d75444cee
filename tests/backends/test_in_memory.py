from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import example, given, settings

from ncclep_bench.backends.in_memory import IN_MEMORY, InMemoryPrepared
from ncclep_bench.collectives.contract import Collective, Problem
from ncclep_bench.collectives.verify import first_wrong
from ncclep_bench.model.case import Case
from ncclep_bench.model.plan import Entries, RowPlan
from ncclep_bench.registry import COLLECTIVES
from tests.cases import EXPERT_COLLECTIVES, TOKEN_COLLECTIVES, make_case, make_problem
from tests.strategies import cases


def run(prepared: InMemoryPrepared, problem: Problem, draw: int) -> list[str]:
    definition: Collective = COLLECTIVES.get(problem.case.collective)
    for rank in prepared.local_ranks:
        prepared.poison(rank)
        definition.fill(problem, rank, draw, prepared.inputs(rank))
    prepared.launch()
    wrong = (first_wrong(definition, problem, rank, draw, prepared.outputs(rank)) for rank in prepared.local_ranks)
    return [message for message in wrong if message is not None]


@settings(max_examples=300, deadline=None)
@given(case=cases())
def test_every_collective_equals_the_plain_reference(case: Case) -> None:
    assert IN_MEMORY.supports(case) is None
    problem = make_problem(case)
    assert run(InMemoryPrepared(problem), problem, draw=1) == []


@settings(max_examples=200, deadline=None)
@given(case=cases())
def test_traffic_equals_counting_the_rows_that_cross_and_what_in_memory_counts(case: Case) -> None:
    problem = make_problem(case)
    plan: RowPlan = COLLECTIVES.get(case.collective).row_plan(problem)
    counted = np.zeros((case.ranks, case.ranks), dtype=np.int64)
    for stage in plan.stages:
        rows = stage.entries().pair_rows(case.ranks)
        counted += rows * stage.row_bytes
    np.fill_diagonal(counted, 0)
    assert (plan.traffic().wire_bytes == counted).all()
    prepared = InMemoryPrepared(problem)
    prepared.launch()
    moves = len(COLLECTIVES.get(case.collective).moves(case))
    assert prepared.stats().wire_bytes == plan.traffic().total_bytes * (case.chain or 1)
    assert moves >= 1


@settings(max_examples=200, deadline=None)
@given(case=cases())
@example(case=make_case("padded_all_to_all", variant="dispatch_combine", ranks=1, tokens=4, num_experts=2, top_k=1))
def test_running_the_stages_gives_the_rows_of_the_whole_plan(case: Case) -> None:
    problem = make_problem(case)
    plan: RowPlan = COLLECTIVES.get(case.collective).row_plan(problem)
    sizes = [
        max(
            [
                int(stage.src_row[stage.src_rank == rank].max(initial=-1)) + 1
                for stage in (plan.whole.entries(), plan.stages[0].entries())
            ]
        )
        for rank in range(case.ranks)
    ]
    rng = np.random.default_rng(case.seed)
    inputs = [rng.integers(-8, 8, (size, 3)).astype(np.float32) for size in sizes]
    for staged, direct in zip(plan.run(inputs), plan.whole.run(inputs), strict=True):
        np.testing.assert_allclose(staged, direct, rtol=1e-5, atol=1e-5)


@settings(max_examples=100, deadline=None)
@given(case=cases())
def test_slices_of_a_stage_run_in_any_order_give_its_rows(case: Case) -> None:
    plan: RowPlan = COLLECTIVES.get(case.collective).row_plan(make_problem(case))
    for stage in plan.stages:
        parts = stage.slices(3)
        assert sum(map(len, parts)) == len(stage.entries())
        whole = sorted(zip(*(stage.entries().__dict__[k] for k in KEYS), strict=True))
        assert sorted(row for part in parts for row in zip(*(part.__dict__[k] for k in KEYS), strict=True)) == whole


KEYS = ("src_rank", "src_row", "dst_rank", "dst_row")


@pytest.mark.parametrize("collective", TOKEN_COLLECTIVES + EXPERT_COLLECTIVES)
@pytest.mark.parametrize("field", KEYS)
def test_one_corrupted_plan_entry_is_caught(collective: str, field: str) -> None:
    case = make_case(collective)
    problem = make_problem(case)
    prepared = InMemoryPrepared(problem)
    assert run(prepared, problem, draw=1) == []
    stage = prepared.plan.stages[0]
    entries = stage.entries()
    limit = {"src_rank": case.ranks, "dst_rank": case.ranks}.get(field, 1 << 60)
    changed = entries.__dict__[field].copy()
    changed[0] = changed[0] - 1 if changed[0] else (1 if limit > 1 else 0)
    corrupted = Entries(**{k: entries.__dict__[k] for k in KEYS} | {field: changed}, weight=entries.weight)
    prepared.plan = replace(
        prepared.plan, stages=(replace(stage, entries=lambda: corrupted), *prepared.plan.stages[1:])
    )
    assert run(prepared, problem, draw=2) != []
