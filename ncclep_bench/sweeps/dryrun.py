"""What a sweep would do: its cases, the bytes they move and the memory they take; no rank is started."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from ncclep_bench.backends.contract import Backend
from ncclep_bench.collectives.contract import Collective, problem_of
from ncclep_bench.model.case import Case
from ncclep_bench.registry import BACKENDS, COLLECTIVES
from ncclep_bench.sweeps.execute import Routings
from ncclep_bench.sweeps.run import Plan


class Foreseen(NamedTuple):
    """One case before it runs; bytes are sums over ranks. `waiver`: why it will not run here, empty when it will."""

    case: Case
    payload_bytes: int | None
    planned_bytes: int | None
    memory_bytes: int | None
    waiver: str

    @property
    def memory_per_rank_bytes(self) -> int | None:
        return None if self.memory_bytes is None else -(-self.memory_bytes // self.case.ranks)


def foresee(plan: Plan) -> Iterator[Foreseen]:
    """Every case of `plan` in order; builds routings and plans of those that will run, never their rows."""
    sources, routings = plan.sources(), Routings()
    for case in plan.cases:
        collective: Collective = COLLECTIVES.get(case.collective)
        backend: Backend = BACKENDS.get(case.backend)
        waiver = collective.waiver(case) or backend.supports(case)
        memory = backend.memory_of(case)
        total = None if memory is None else sum(memory)
        if waiver:
            yield Foreseen(case, None, None, total, waiver)
            continue
        figures = collective.bytes(problem_of(case, routings.of(case, sources[case.scenario])))
        yield Foreseen(case, figures.payload, figures.planned, total, "")
