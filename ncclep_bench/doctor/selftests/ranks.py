"""Self-tests in the ranks that mpirun or srun has started: nobody watches them but themselves."""

from __future__ import annotations

import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import msgspec

from ncclep_bench.doctor.contract import Finding
from ncclep_bench.doctor.selftests.command import Done
from ncclep_bench.doctor.selftests.contract import Patience, Result, SelfTest, Trial
from ncclep_bench.doctor.selftests.run import merged
from ncclep_bench.doctor.selftests.worker import all_ranks, backend_named, one_result
from ncclep_bench.errors import RankError
from ncclep_bench.runtime.neighbours import claim
from ncclep_bench.runtime.world import MpiGroup, abort

_TURN_S = 2.0
"""The lowest rank that lives speaks first, and has so long to do it."""
_ABORT_S = 60.0
"""So long another rank of its host may take to speak and end all."""


def run_in_ranks(
    tests: Sequence[SelfTest], backend: str, deadline_s: float | None, on_finding: Callable[[Finding], None]
) -> Done:
    """One finding per self-test, the same on all ranks; collective over all processes of the launcher.

    After a self-test that has lost a rank the others are not run: the first rank that lives reports and ends all.
    """
    patience = Patience.within(deadline_s)
    group = all_ranks(patience)
    job = group.allgather(uuid.uuid4().bytes)[0]
    findings: list[Finding] = []
    for number, test in enumerate(tests):
        trial = Trial(group, backend_named(backend, patience), patience)
        with _deadline(deadline_s or test.deadline_s, test, trial, job):
            own = one_result(test, trial)
            results, lost = _everybody(group, own)
        findings.append(merged(test, results))
        if lost:
            reason = f"the ranks were lost in {test.code}; with --np each self-test gets fresh ones"
            findings += [merged(later, {0: Result(code=later.code, verdict="not_run", summary=reason)})
                         for later in tests[number + 1 :]]  # fmt: skip
            _take_the_floor(group.rank, job)
            on_finding(findings[number])
            return Done(findings, lost=True)
        if group.rank == 0:
            on_finding(findings[-1])
    speaks = group.rank == 0
    group.close()
    return Done(findings, speaks=speaks)


def _everybody(group: MpiGroup, own: Result) -> tuple[dict[int, Result], bool]:
    """Everybody's result, and whether the ranks can no longer meet: then this rank's alone."""
    if own.lost:
        return {group.rank: own}, True
    try:
        results = [msgspec.json.decode(data, type=Result) for data in group.allgather(msgspec.json.encode(own))]
    except RankError as error:
        lost = msgspec.structs.replace(own, verdict="error", summary=error.message, ranks=error.ranks, lost=True)
        return {group.rank: lost}, True
    return dict(enumerate(results)), False


def _take_the_floor(rank: int, job: bytes) -> None:
    """Returns on one rank of each host, which speaks and ends all; the others of the host end here."""
    time.sleep(rank * _TURN_S)
    if not claim(job.hex()):
        time.sleep(_ABORT_S)
        abort(1)


@contextmanager
def _deadline(seconds: float, test: SelfTest, trial: Trial, job: bytes) -> Iterator[None]:
    def give_up() -> None:
        _take_the_floor(trial.rank, job)
        # In one piece: print() may let another rank's words in before the end of the line.
        sys.stderr.write(
            f"ncclep-doctor: {test.code}: not done after {seconds:g} s, rank {trial.rank} is in {trial.operation}\n"
        )
        abort(1)

    timer = threading.Timer(seconds, give_up)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
