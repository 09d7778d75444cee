"""A rank process: `python -m ncclep_bench.doctor.selftests.worker FOLDER` runs self-tests and tells how they ended."""

from __future__ import annotations

import faulthandler
import os
import socket
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from ncclep_bench.doctor.selftests.contract import (
    USUAL,
    NotRunError,
    Patience,
    Result,
    SelfTest,
    Trial,
)
from ncclep_bench.errors import BenchError, RankError
from ncclep_bench.registry import BACKENDS
from ncclep_bench.runtime.shared_memory import NotEnoughSharedMemoryError
from ncclep_bench.runtime.world import MpiGroup, world

if TYPE_CHECKING:
    from ncclep_bench.backends.contract import Backend

START_DEADLINE_S = 30.0

_LAST_WAIT_S = 60.0


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """What the ranks of one start do; `fault` is planted in rank `victim` before the first self-test."""

    codes: list[str]
    backend: str
    ranks: int
    fault: str | None = None
    victim: int = 0
    deadline_s: float | None = None


class Here(msgspec.Struct, frozen=True, tag=True):
    """A rank introduces itself."""

    rank: int
    pid: int
    host: str


class Ended(msgspec.Struct, frozen=True, tag=True):
    """A rank is done with a self-test."""

    result: Result


Record = Here | Ended


class RankGroup(MpiGroup):
    """A group in which no meeting lasts longer than its patience: then it names who is absent."""

    patience = USUAL

    def allgather(self, data: bytes, /, deadline_s: float | None = None, operation: str = "allgather") -> list[bytes]:
        return super().allgather(data, deadline_s or self.patience.meeting_s, operation)

    def barrier(self, deadline_s: float | None = None, operation: str = "barrier") -> None:
        super().barrier(deadline_s or self.patience.meeting_s, operation)


def all_ranks(patience: Patience = USUAL) -> RankGroup:
    """All ranks that were started together; collective, the caller closes it."""
    started = world(START_DEADLINE_S)
    group = RankGroup(started.comm, START_DEADLINE_S)
    group.patience = patience
    started.close()
    return group


def run_tests(
    tests: Sequence[SelfTest], backend: Backend, group: RankGroup, tell: Callable[[Record], None], folder: Path
) -> bool:
    """Run each on this rank and tell; False after one that has lost its group, which ends the run."""
    for test in tests:
        trial = Trial(group, backend, group.patience, folder / f"rank-{group.rank}.step")
        result = one_result(test, trial)
        tell(Ended(result))
        if result.lost:
            return False
    return True


def backend_named(name: str, patience: Patience) -> Backend:
    """The backend, whose ranks wait for each other as long as `patience` says."""
    kind: Any = type(BACKENDS.get(name))
    backend: Backend = kind(deadline_s=patience.call_s)
    return backend


def one_result(test: SelfTest, trial: Trial) -> Result:
    """How one self-test ends on this rank; never raises."""
    start = time.perf_counter()

    def result(**fields: object) -> Result:
        return Result(
            code=test.code,
            moved_bytes=trial.moved_bytes,
            calls=trial.calls,
            seconds=time.perf_counter() - start,
            notes=tuple(trial.notes),
            **fields,  # type: ignore[arg-type]
        )

    if trial.backend.name not in test.backends:
        return result(verdict="not_run", summary=test.elsewhere)
    try:
        trial.step("the start of the self-test")
        trial.runnable([trial.case("dispatch")])
        suspicions = list(test.run(trial))
        trial.step("the meeting after the self-test")
        trial.group.barrier(operation=f"the end of {test.code}")
    except NotRunError as error:
        return result(verdict="not_run", summary=error.message)
    except NotEnoughSharedMemoryError as error:
        return result(verdict="not_run", summary=f"rank {trial.rank}: {error.message}", lost=True)
    except Exception as error:
        # What is no error of ours has a place in the code that somebody will want to know.
        trace = () if isinstance(error, BenchError) else tuple(traceback.format_exc().strip().splitlines()[-5:])
        told = error.message if isinstance(error, BenchError) else f"{type(error).__name__}: {error}"
        remedy = (error.hint or "") if isinstance(error, BenchError) else ""
        ranks = error.ranks if isinstance(error, RankError) else (trial.rank,)
        return result(verdict=test.severity, summary=told, ranks=ranks, evidence=trace, remedy=remedy, lost=True)
    if not suspicions:
        return result(verdict="ok")
    first = suspicions[0]
    more = tuple(f"also: {other.summary}" for other in suspicions[1:])
    return result(verdict=test.severity, summary=first.summary, ranks=first.ranks, evidence=first.evidence + more)


def main() -> None:
    """Run the plan in the folder as one of its ranks; a rank that has lost its group waits for its end."""
    from ncclep_bench.doctor.selftests.faults import fault_named
    from ncclep_bench.doctor.selftests.table import self_test_named

    faulthandler.enable()
    folder = Path(sys.argv[1])
    plan = msgspec.json.decode((folder / "plan.json").read_bytes(), type=Plan)
    # What is slow to import must not count as part of a self-test.
    patience = Patience.within(plan.deadline_s)
    backend = backend_named(plan.backend, patience)
    tests = [self_test_named(code) for code in plan.codes]
    group = all_ranks(patience)
    Trial(group, backend).warm()
    with (folder / f"rank-{group.rank}.jsonl").open("ab", buffering=0) as file:

        def tell(record: Record) -> None:
            # One write per line, at once: whatever happens to this process, nothing told is lost.
            file.write(msgspec.json.encode(record) + b"\n")

        tell(Here(group.rank, os.getpid(), socket.gethostname()))
        group.barrier(operation="the start")
        if plan.fault is not None:
            fault_named(plan.fault).plant(group.rank == plan.victim, plan.backend)
        if not run_tests(tests, backend, group, tell, folder):
            # The dead must not be reaped before they have been seen, as they are when all ranks leave.
            time.sleep(_LAST_WAIT_S)
            os._exit(1)
    group.close()


if __name__ == "__main__":
    main()
