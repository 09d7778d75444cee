"""Payloads arrive whole: every collective, at sizes around those where transports change their ways."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from itertools import chain
from typing import TYPE_CHECKING

from ncclep_bench.doctor.selftests.contract import (
    COLLECTIVES_OF_EXPERTS,
    COLLECTIVES_OF_TOKENS,
    MODES_AND_LAYOUTS,
    SelfTest,
    Suspicion,
    Trial,
)
from ncclep_bench.model.dtype import dtype_named

if TYPE_CHECKING:
    from ncclep_bench.collectives.contract import Problem
    from ncclep_bench.model.case import Case

ROW_BYTES = (256, 1024, 1500, 2048, 4096, 9000, 16384, 65536)
"""Eager limits, and the MTUs of InfiniBand (256 to 4096) and of Ethernet (1500, 9000)."""

_VARIANTS = ("out_of_place", "in_place", "registered")


def payload(trial: Trial) -> list[Suspicion]:
    """Every collective at every size, and at one element less and more."""
    for case in trial.runnable(list(_cases(trial, _grain(trial)))):
        problem = trial.problem(case)
        if any(found := trial.wrong(problem)):
            return [located(trial, problem, found)]
    return []


def located(trial: Trial, problem: Problem, found: list[str | None]) -> Suspicion:
    """Whose rows are wrong: the case again with the rows of one source rank at a time."""
    pairs = [
        (source, rank)
        for source in range(trial.size)
        for rank, wrong in enumerate(trial.wrong(of_one_source(problem, source)))
        if wrong
    ]
    sources, targets = ({pair[side] for pair in pairs} for side in (0, 1))
    suspects = sources if len(sources) == 1 else targets if len(targets) == 1 else set[int]()
    if len(sources) == len(targets) == 1:
        suspects, where = sources, f", sent by rank {min(sources)} to rank {min(targets)}"
    elif suspects:
        where = f", {'sent by' if suspects == sources else 'received by'} rank {min(suspects)}"
    else:
        where = ""
    row_bytes = (problem.case.hidden or problem.case.expert_elements or 0) * problem.dtype.itemsize
    told = "; ".join(wrong for wrong in found if wrong)
    return Suspicion(
        f"{problem.case.collective} of rows of {row_bytes:,} bytes delivers wrong rows{where}",
        (*sorted(suspects), *(rank for rank, wrong in enumerate(found) if wrong and rank not in suspects)),
        (told, *(f"rows from rank {source} are wrong on rank {rank}" for source, rank in pairs), problem.case.case),
    )


def of_one_source(problem: Problem, source: int) -> Problem:
    """The problem in which only the rows of `source` move."""
    if problem.active is not None:
        active = problem.active.copy()
        if problem.case.collective == COLLECTIVES_OF_EXPERTS[0]:
            held = list(problem.placement.experts_of_rank[source])
            active[:, [expert for expert in range(active.shape[1]) if expert not in held]] = False
        else:
            active[[rank for rank in range(len(active)) if rank != source]] = False
        return dataclasses.replace(problem, active=active)
    routing = problem.routing
    assert routing is not None
    topk_idx, topk_weights = routing.topk_idx.copy(), routing.topk_weights.copy()
    first, last = routing.offsets[source], routing.offsets[source + 1]
    for array, nothing in ((topk_idx, -1), (topk_weights, 0)):
        array[:first], array[last:] = nothing, nothing
    return dataclasses.replace(
        problem, routing=dataclasses.replace(routing, topk_idx=topk_idx, topk_weights=topk_weights)
    )


def _grain(trial: Trial) -> int:
    """Elements that a row must be a multiple of on this backend."""
    return next(
        (grain for grain in (1, 8) if not trial.backend.supports(trial.case("dispatch", hidden=128 + grain))), 8
    )


def _cases(trial: Trial, grain: int) -> Iterator[Case]:
    """Every size in some of the modes, layouts and variants, so that each of them meets many sizes."""
    element = dtype_named("bfloat16").itemsize
    sizes = chain.from_iterable(
        (elements - grain, elements, elements + grain)
        for elements in (row_bytes // element // grain * grain for row_bytes in ROW_BYTES)
    )
    for number, elements in enumerate(sizes):
        mode, layout = MODES_AND_LAYOUTS[number % 4]
        for other, way in MODES_AND_LAYOUTS[number % 2 :: 2]:
            yield trial.case("dispatch", hidden=elements, mode=other, layout=way, seed=number)
        yield trial.case("dispatch", hidden=elements, mode=mode, layout=layout, transport="messages", seed=number)
        returning = COLLECTIVES_OF_TOKENS[1 + number // 4 % 2]
        yield trial.case(returning, hidden=elements, mode=mode, layout=layout, seed=number)
        for collective in COLLECTIVES_OF_EXPERTS:
            variant = _VARIANTS[number // 3 % len(_VARIANTS)]
            yield trial.case(collective, expert_elements=elements, variant=variant, seed=number)


SELF_TESTS = (
    SelfTest(
        code="SELF001",
        title="Every collective delivers what was sent",
        severity="error",
        deadline_s=120,
        run=payload,
        why="A link whose MTU is smaller than its ends believe cuts payloads and reports nothing: from some size on "
        "the rest of a row is zero, shifted or left over from the call before.",
        by_hand="ncclep-bench sweep quick --np 2 compares every row as well; ibv_devinfo and ip link show the MTUs",
        remedy="ibv_devinfo | grep mtu   # active_mtu must be equal at both ends, and at the switch between them",
        reference="InfiniBand Architecture Specification, volume 1: packets longer than the path MTU",
    ),
)
