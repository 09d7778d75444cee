"""What a self-test is, and what it has at hand on a rank."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import msgspec

from ncclep_bench.doctor.contract import Verdict
from ncclep_bench.errors import BenchError
from ncclep_bench.runtime.processes import Step

if TYPE_CHECKING:
    from ncclep_bench.backends.contract import Backend, Prepared
    from ncclep_bench.collectives.contract import Problem
    from ncclep_bench.model.case import Case
    from ncclep_bench.model.ep_config import EpConfig
    from ncclep_bench.routing.token_routing import TokenRouting
    from ncclep_bench.runtime.world import MpiGroup

CALL_DEADLINE_S = 10.0
"""Seconds a rank waits for another in a call before it names it."""


class Patience(NamedTuple):
    """Seconds that a rank waits for another, in a call and between calls, before it names it.

    Longer between calls, so that who waits in a call is heard before the one that has left it out.
    """

    call_s: float = CALL_DEADLINE_S
    meeting_s: float = 1.2 * CALL_DEADLINE_S

    @classmethod
    def within(cls, deadline_s: float | None) -> Patience:
        """As long as usual, and short enough for a self-test that must end after `deadline_s`."""
        call_s = min(CALL_DEADLINE_S, (deadline_s or 3 * CALL_DEADLINE_S) / 3)
        return cls(call_s, 1.2 * call_s)


USUAL = Patience()


class Suspicion(NamedTuple):
    """One thing that went wrong: what, the ranks that it points at (the likeliest first), and what shows it."""

    summary: str
    ranks: tuple[int, ...] = ()
    evidence: tuple[str, ...] = ()


class NotRunError(BenchError):
    """A self-test that makes no sense here; raised alike on all ranks, with the reason."""


@dataclass(frozen=True)
class SelfTest:
    """One try-out on real ranks: `run` gives what went wrong, the same on all ranks, or raises what a call raised.

    `deadline_s`: all of it on all ranks must end within so many seconds. `backends`: those on which it makes sense, and
    `elsewhere` why not on others. The other fields are those of a check.
    """

    code: str
    title: str
    severity: Verdict
    deadline_s: float
    run: Callable[[Trial], Sequence[Suspicion]]
    why: str
    by_hand: str
    remedy: str
    reference: str
    backends: tuple[str, ...] = ("host", "cuda")
    elsewhere: str = ""

    @property
    def needs(self) -> tuple[str, ...]:
        """As a check says it: what must be there."""
        return (f"ranks on {' or '.join(self.backends)}, {self.deadline_s:g} s at most",)


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """What one rank has to say of one self-test; `remedy`, where it is not the self-test's.

    `lost`: it met an exception, so its group is of no more use.
    """

    code: str
    verdict: Verdict
    summary: str = ""
    ranks: tuple[int, ...] = ()
    evidence: tuple[str, ...] = ()
    remedy: str = ""
    moved_bytes: int = 0
    calls: int = 0
    seconds: float = 0.0
    notes: tuple[str, ...] = ()
    lost: bool = False


@dataclass
class Trial:
    """One rank in one self-test: its group, the backend, and what it has moved so far."""

    group: MpiGroup
    backend: Backend
    patience: Patience = USUAL
    step_file: Path | None = None
    moved_bytes: int = 0
    calls: int = 0
    notes: list[str] = field(default_factory=list)
    operation: str = "the start"
    _count: int = 0

    def __post_init__(self) -> None:
        self._step = Step(self.step_file) if self.step_file else None

    @property
    def rank(self) -> int:
        return self.group.rank

    @property
    def size(self) -> int:
        return self.group.size

    def step(self, operation: str) -> None:
        """Note what this rank does now, readable from outside even when it hangs."""
        self._count += 1
        self.operation = operation
        if self._step is not None:
            self._step.publish(self._count, operation)

    def warm(self) -> None:
        """Import what the self-tests use."""
        import ncclep_bench.collectives.verify
        import ncclep_bench.ep.communicator  # noqa: F401

        self.problem(self.case("dispatch"))

    def note(self, text: str) -> None:
        """Something that readers should know though nothing is wrong."""
        if text not in self.notes:
            self.notes.append(text)

    def everybody(self, value: Any) -> list[Any]:
        """Everybody's `value` (anything that JSON holds), by rank. Raises RankError naming who is absent."""
        return [msgspec.json.decode(data) for data in self.group.allgather(msgspec.json.encode(value))]

    def suspicions(self, found: Sequence[str]) -> list[Suspicion]:
        """What every rank has found wrong with itself, one suspicion per rank; collective."""
        everybody = enumerate(self.everybody(list(found)))
        return [Suspicion(f"rank {rank}: {own[0]}", (rank,), tuple(own[1:])) for rank, own in everybody if own]

    def with_deadline(self, seconds: float) -> Backend:
        """The backend, whose ranks wait `seconds` for each other."""
        return cast("Backend", cast(Any, type(self.backend))(deadline_s=seconds))

    def case(self, collective: str, **axes: Any) -> Case:
        """A small case of `collective`; `axes` replace the defaults, and axes that it does not use are dropped."""
        return small_case(collective, backend=self.backend.name, ranks=self.size, **axes)

    def config(self, **fields: Any) -> EpConfig:
        """An EpConfig with two experts per rank, whose ranks wait for each other as long as the others do."""
        from ncclep_bench.model.ep_config import EpConfig

        waits = {"init_deadline_s": self.patience.meeting_s, "deadline_s": self.patience.call_s}
        return EpConfig(**{"num_experts": 2 * self.size, **waits, **fields})

    def runnable(self, cases: Sequence[Case]) -> list[Case]:
        """Those that no rank waives, noting why others are left out. Raises NotRunError when none is left."""
        from ncclep_bench.registry import COLLECTIVES

        self.step("asking which cases can run here")
        own = [COLLECTIVES.get(case.collective).waiver(case) or self.backend.supports(case) or "" for case in cases]
        reasons = [next(filter(None, each), None) for each in zip(*self.everybody(own), strict=True)]
        for reason, count in Counter(filter(None, reasons)).items():
            self.note(f"{count} of {len(cases)} cases waived: {reason}")
        left = [case for case, reason in zip(cases, reasons, strict=True) if reason is None]
        if not left:
            raise NotRunError(f"no case can run here: {next(iter(reasons), 'there are none')}")
        return left

    def problem(self, case: Case, routing: TokenRouting | None = None) -> Problem:
        """The problem of a case, with a routing of its own where it moves tokens and none is given."""
        from ncclep_bench.collectives.contract import problem_of
        from ncclep_bench.routing.token_routing import token_routing

        return problem_of(case, routing or (None if case.routing is None else token_routing(case)))

    def wrong(self, problem: Problem, draws: int = 2) -> list[str | None]:
        """What each rank finds wrong with `draws` launches on fresh inputs and poisoned outputs, None where nothing."""
        self.step(f"the preparation of {brief(problem.case)}")
        prepared = self.backend.prepare(problem, self.group)
        try:
            found: list[str | None] = [None] * self.size
            for draw in range(draws):
                found = self.everybody(self.launch(problem, prepared, draw))
                if any(found):
                    break
            return found
        finally:
            self.moved_bytes += prepared.stats().wire_bytes
            prepared.close()

    def launch(self, problem: Problem, prepared: Prepared, draw: int, run: Callable[[], object] | None = None) -> Any:
        """One launch (or `run`) on fresh inputs; what this rank finds wrong with its outputs, or None."""
        from ncclep_bench.collectives.verify import first_wrong
        from ncclep_bench.registry import COLLECTIVES

        collective = COLLECTIVES.get(problem.case.collective)
        prepared.poison(self.rank)
        collective.fill(problem, self.rank, draw, prepared.inputs(self.rank))
        self.group.barrier()
        self.step(brief(problem.case))
        (run or prepared.launch)()
        self.calls += problem.case.chain or 1
        return first_wrong(collective, problem, self.rank, draw, prepared.outputs(self.rank))


def small_case(collective: str, **axes: Any) -> Case:
    """A small case of `collective`; `axes` replace the defaults, and axes that it does not use are dropped."""
    from ncclep_bench.model.case import Case
    from ncclep_bench.registry import COLLECTIVES

    definition = COLLECTIVES.get(collective)
    wanted: dict[str, Any] = {
        "mode": "ht",
        "layout": "flat",
        "variant": definition.variants[0] if definition.variants else None,
        "tokens": 6,
        "batch_size": 6,
        "tokens_per_sequence": 1,
        "hidden": 1024,
        "num_experts": 2 * axes["ranks"],
        "expert_elements": 1024,
        "top_k": 2,
        "dtype": "bfloat16",
        "alignment": 1,
        "routing": "uniform",
        "active_share": 1.0,
        "chain": 1,
        **axes,
    }
    fixed = {name: wanted.pop(name) for name in ("backend",)}
    return Case(
        collective=collective, **fixed, **{name: value for name, value in wanted.items() if name in definition.axes}
    )


def brief(case: Case) -> str:
    """A case in a few words."""
    axes = (case.mode, case.layout, case.variant, case.dtype, case.transport if case.transport != "auto" else None)
    row = f"{case.hidden or case.expert_elements} elements"
    return f"{case.collective} ({', '.join(filter(None, axes))}, rows of {row})"


COLLECTIVES_OF_TOKENS = ("dispatch", "combine", "dispatch_combine")
COLLECTIVES_OF_EXPERTS = ("all_gather_experts", "reduce_scatter_expert_grads")
MODES_AND_LAYOUTS = (("ht", "flat"), ("ht", "expert_major"), ("ll", "expert_major"), ("ll", "rank_major"))
