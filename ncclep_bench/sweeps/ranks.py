"""A sweep in ranks that mpirun or srun has started: each executes the command line, and they agree before they work."""

from __future__ import annotations

import contextlib
import hashlib
import os
import shlex
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple, NoReturn

import msgspec

from ncclep_bench.errors import BenchError, InputError
from ncclep_bench.model.measurement import Measurement, Preflight
from ncclep_bench.model.toml_file import shown
from ncclep_bench.results.store import RunWriter
from ncclep_bench.runtime.world import MpiGroup, abort, world
from ncclep_bench.sweeps.job import Event, Job, JobFolder
from ncclep_bench.sweeps.run import Plan, Watcher, backend_of, default_directory, exit_code, open_run, run_header
from ncclep_bench.sweeps.worker import run_job

_GRACE_S = 0.25
_ABORT_S = 5.0


class Done(NamedTuple):
    """What a rank knows at the end: only rank 0 reports, all leave with the same exit code."""

    rank: int
    directory: Path
    exit_code: int


class _Start(msgspec.Struct, frozen=True):
    """What a rank says before work begins: what it has planned, where rank 0 writes and what is left, or an error."""

    plan: str = ""
    directory: str = ""
    todo: list[int] = []
    error: str = ""
    hint: str | None = None
    exit_code: int = 0


def run_in_ranks(
    plan: Callable[[int], Plan],
    directory: Path | None,
    watcher: Watcher,
    *,
    command: Sequence[str],
    repeats: int,
    resume: bool,
    preflight: Preflight | None = None,
) -> Done:
    """Measure the plan for as many ranks as there are; collective over all processes of the launcher.

    Raises the same BenchError on all ranks when one of them cannot begin. A case that fails its ranks is recorded and
    ends all of them.
    """
    group = world()
    with contextlib.ExitStack() as held:
        job, out = _begin(plan, directory, group, command, repeats, resume, preflight, held)
        code = _run(job, out, group, watcher)
    rank = group.rank
    group.close()
    return Done(rank, out, code)


def _run(job: Job, out: Path, group: MpiGroup, watcher: Watcher) -> int:
    """Measure the job; the exit code that all ranks leave with."""
    if group.rank == 0:
        # Whoever ends the ranks from outside leaves nobody to say it.
        told = f"results go to {out}; if this is cut short, --resume {shlex.quote(str(out))} goes on"
        print(shown(told), file=sys.stderr)
        watcher.begin(len(job.cases))

    def on_event(event: Event) -> None:
        case = job.cases[event.case]
        if event.outcome is None:
            watcher.started(case)
        else:
            watcher.finished(case, event.outcome, event.reason)

    def on_failure(index: int) -> NoReturn:
        time.sleep(_GRACE_S)
        _give_up(job, out, index, JobFolder(out).failures()[0].message)

    def on_late(index: int) -> None:
        # The lowest rank that lives is heard first; a rank that is stopped cannot speak at all.
        time.sleep(group.rank * _GRACE_S)
        deadline_s = job.source(job.cases[index]).timing.deadline_s
        late = JobFolder(out).late_ranks(group.size)
        _give_up(job, out, index, f"not finished after {deadline_s:g} s: {late}")

    run_job(job, out, group, on_event, on_failure, on_late)
    code = int(group.allgather(str(exit_code(out) if group.rank == 0 else 0).encode())[0])
    if group.rank == 0:
        watcher.close()
        JobFolder(out).remove()
    return code


def _begin(
    plan: Callable[[int], Plan],
    directory: Path | None,
    group: MpiGroup,
    command: Sequence[str],
    repeats: int,
    resume: bool,
    preflight: Preflight | None,
    held: contextlib.ExitStack,
) -> tuple[Job, Path]:
    """What all ranks are about to do, and where; rank 0 holds the run in `held`."""
    planned: list[Plan] = []

    def prepare() -> _Start:
        if repeats > 1:
            raise InputError(
                "--repeats needs fresh processes, which only --np starts",
                hint="start it without mpirun, with --np; or leave out --repeats",
            )
        own = plan(group.size)
        backends = sorted({case.backend for case in own.cases})
        if len(backends) > 1:
            raise InputError(f"several backends in one set of ranks: {', '.join(backends)}", hint="give one --backend")
        if backend_of(own.cases[0]).one_process:
            raise InputError(f"backend {backends[0]} runs in one process", hint="start it without mpirun, with --np")
        planned.append(own)
        return _Start(plan=_digest(own))

    def open_folder() -> _Start:
        if group.rank:
            return _Start()
        out = (directory or default_directory(planned[0])).absolute()
        header = run_header(planned[0], command, "mpirun or srun", preflight)
        todo = held.enter_context(open_run(planned[0], out, header, 1, resume))[0]
        JobFolder(out).clear()
        return _Start(directory=str(out), todo=[planned[0].cases.index(case) for case in todo])

    plans = [start.plan for start in _on_all(group, prepare)]
    for rank, other in enumerate(plans):
        if other != plans[0]:
            raise InputError(
                f"rank {rank} has other cases than rank 0",
                hint="give all ranks the same command line, and the same scenario files on every host",
            )
    start = _on_all(group, open_folder)[0]
    cases = [planned[0].cases[index] for index in start.todo]
    return Job(cases, planned[0].sources(), group.size), Path(start.directory)


def _on_all(group: MpiGroup, call: Callable[[], _Start]) -> list[_Start]:
    """What `call` gives on each rank; raises on all ranks the error of the first that has one."""
    try:
        start = call()
    except BenchError as error:
        start = _Start(error=error.message, hint=error.hint, exit_code=error.exit_code)
    starts = [msgspec.json.decode(data, type=_Start) for data in group.allgather(msgspec.json.encode(start))]
    for other in starts:
        if other.error:
            refusal = BenchError(other.error, hint=other.hint)
            refusal.exit_code = other.exit_code
            raise refusal
    return starts


def _digest(plan: Plan) -> str:
    """The same on two ranks only if both would measure the same cases in the same way."""
    rules = [(scenario.timing, scenario.expert_load) for scenario in plan.scenarios]
    return hashlib.sha256(msgspec.json.encode((plan.cases, rules))).hexdigest()


def _give_up(job: Job, out: Path, index: int, reason: str) -> NoReturn:
    """Record the error of a case and end all ranks; the first that comes here does it, the others wait for the end."""
    folder = JobFolder(out)
    try:
        os.close(os.open(folder.path / "given_up", os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        time.sleep(_ABORT_S)
        abort(1)
    with RunWriter.resume(out) as writer:
        writer.append(Measurement(case=job.cases[index], outcome="error", reason=reason))
    sys.stderr.write(f"error: {reason}\n  what was measured is kept; go on with --resume {out}\n")
    abort(1)
