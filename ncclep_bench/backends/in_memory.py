"""Numpy ranks in one process: the row plan executed literally, for tests and dry runs."""

from __future__ import annotations

from typing import Any

import numpy as np

from ncclep_bench.backends.contract import Prepared, Stats, device_waiver, window_waiver
from ncclep_bench.collectives.contract import Array, Collective, Problem
from ncclep_bench.collectives.verify import poison
from ncclep_bench.model.case import Case
from ncclep_bench.model.plan import RowPlan
from ncclep_bench.registry import COLLECTIVES
from ncclep_bench.runtime.group import Group


class InMemoryPrepared:
    """All ranks of a problem in this process."""

    algorithm = "plan"
    undelivered: frozenset[str] = frozenset()
    wire_source = "counted"
    timer = None

    def __init__(self, problem: Problem) -> None:
        self.collective: Collective = COLLECTIVES.get(problem.case.collective)
        self.local_ranks = tuple(range(problem.case.ranks))
        self._stats = Stats()
        self.update(problem)

    def update(self, problem: Problem) -> None:
        self.problem = problem
        self.plan: RowPlan = self.collective.row_plan(problem)
        self._inputs = [self.collective.empty_inputs(problem, rank) for rank in self.local_ranks]
        self._handed_on = [self.collective.handed_on(problem, rank) for rank in self.local_ranks]
        self._outputs = [self._empty_outputs(rank) for rank in self.local_ranks]

    def inputs(self, rank: int) -> dict[str, Array]:
        return self._inputs[rank]

    def poison(self, rank: int) -> None:
        poison(self._outputs[rank])

    def outputs(self, rank: int) -> dict[str, Array]:
        return self._outputs[rank]

    def launch(self, stream: Any = None) -> None:
        for _ in range(self.problem.case.chain or 1):
            self._run_once()

    def _run_once(self) -> None:
        """Run the plan once per array that it carries, and count the rows that cross as they do."""
        for move in self.collective.moves(self.problem.case):
            sources = [
                self._inputs[rank][move.source][self._held(rank)]
                if move.source_held
                else self._inputs[rank][move.source]
                for rank in self.local_ranks
            ]
            written = self.plan.run(sources)
            entries = self.plan.whole.entries()
            for rank, rows in enumerate(written):
                target = self._outputs[rank][move.target]
                if self.plan.whole.reduce == "copy":
                    reached = np.unique(entries.dst_row[entries.dst_rank == rank])
                    target[reached] = rows[reached]
                else:
                    target[self._held(rank) if move.target_held else slice(None)] = rows
        for rank, handed_on in enumerate(self._handed_on):
            for name, array in handed_on.items():
                self._outputs[rank][name][...] = array
        self._stats.wire_bytes += self._crossed_bytes()

    def stats(self) -> Stats:
        return self._stats

    def close(self) -> None:
        self._inputs, self._outputs, self._handed_on = [], [], []

    def _held(self, rank: int) -> list[int]:
        return list(self.problem.placement.experts_of_rank[rank])

    def _empty_outputs(self, rank: int) -> dict[str, Array]:
        outputs = {name: np.zeros_like(array) for name, array in self._handed_on[rank].items()}
        for move in self.collective.moves(self.problem.case):
            source = self._inputs[rank][move.source]
            if move.source == move.target and (move.source_held or move.target_held):
                outputs[move.target] = source
            else:
                outputs[move.target] = np.zeros((self.plan.whole.rows_out[rank], source.shape[1]), source.dtype)
        return outputs

    def _crossed_bytes(self) -> int:
        total = 0
        for stage in self.plan.stages:
            rows = stage.entries().pair_rows(self.plan.ranks)
            np.fill_diagonal(rows, 0)
            total += int(rows.sum()) * stage.row_bytes
        return total


class InMemory:
    """One process plays every rank; its times say nothing about communication."""

    name = "in_memory"
    one_process = True

    def supports(self, case: Case) -> str | None:
        collective: Collective = COLLECTIVES.get(case.collective)
        return collective.waiver(case) or window_waiver(case, self.name) or device_waiver(case, self.name)

    def memory_of(self, case: Case) -> tuple[int, int] | None:
        return None

    def prepare(self, problem: Problem, group: Group) -> Prepared:
        return InMemoryPrepared(problem)


IN_MEMORY = InMemory()
