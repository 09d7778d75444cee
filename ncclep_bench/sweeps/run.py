"""A whole sweep: planned and checked before any rank works, then measured in rank processes of its own."""

from __future__ import annotations

import hashlib
import itertools
import shlex
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Protocol

import msgspec

from ncclep_bench.backends.contract import Backend
from ncclep_bench.errors import CannotRunError, InputError
from ncclep_bench.model.case import Case
from ncclep_bench.model.measurement import Measurement, Preflight, RunHeader
from ncclep_bench.model.scenario import Scenario
from ncclep_bench.registry import BACKENDS
from ncclep_bench.results.store import RunWriter, new_folder, read_run, sole_writer
from ncclep_bench.runtime.launch import launcher_command, require_room_for_mpi
from ncclep_bench.sweeps.environment import environment
from ncclep_bench.sweeps.expand import expand
from ncclep_bench.sweeps.filter import case_filter
from ncclep_bench.sweeps.job import LOG_FILE, Event, Job, JobFolder, Source
from ncclep_bench.sweeps.supervise import Ended, supervise

_LOG_LINES = 15


class Watcher(Protocol):
    """Somebody who follows a sweep: a progress bar, a log."""

    def begin(self, total: int) -> None:
        """So many measurements are to come."""

    def started(self, case: Case) -> None: ...

    def finished(self, case: Case, outcome: str, reason: str) -> None: ...

    def close(self) -> None: ...


@dataclass(frozen=True)
class Plan:
    """Scenarios and the cases to measure, all of them valid, in order."""

    scenarios: tuple[Scenario, ...]
    cases: tuple[Case, ...]

    @property
    def identity(self) -> str:
        """A digest of the cases: the same for a run and its continuation."""
        return hashlib.sha256(msgspec.json.encode(self.cases)).hexdigest()

    def sources(self) -> dict[str, Source]:
        return {
            scenario.name: Source(scenario.timing, scenario.expert_load, str(Path(scenario.file).absolute().parent))
            for scenario in self.scenarios
        }


def plan_sweep(
    scenarios: Sequence[Scenario],
    *,
    ranks: int | None = None,
    backends: Sequence[str] = (),
    expression: str | None = None,
) -> Plan:
    """Every case of `scenarios` that the filter `expression` leaves.

    `ranks`: how many there are; by default the most that each scenario asks for. Raises InputError for what cannot run.
    """
    names = [scenario.name for scenario in scenarios]
    for scenario in scenarios:
        if names.count(scenario.name) > 1:
            raise InputError(f"two scenarios are called {scenario.name!r}", hint="sweep them one after the other")
    keep: Callable[[Case], bool] = case_filter(expression) if expression else lambda case: True
    cases: list[Case] = []
    for scenario in scenarios:
        if ranks is None and "ranks" not in scenario.axes:
            raise InputError(f"{scenario.file}: names no ranks", hint="give their number with --np")
        cases += expand(scenario, backends=backends or None, ranks_available=ranks)
    kept = tuple(case for case in cases if keep(case))
    if not kept:
        raise InputError(f"--filter {expression!r} leaves none of {len(cases)} cases", hint="--dry-run lists them")
    return Plan(tuple(scenarios), kept)


def run_supervised(
    plan: Plan,
    folder: Path | None,
    *,
    command: Sequence[str],
    watcher: Watcher,
    repeats: int = 1,
    launcher: str | None = None,
    resume: bool = False,
    preflight: Preflight | None = None,
) -> Path:
    """Measure `plan` into `folder`, in fresh rank processes for each backend and each repeat, which this one starts.

    Gives the folder back, which is reports/SCENARIO-TIME where there is none.
    A case that fails its ranks gets the outcome error and the sweep goes on in new ones. With `resume` only what has no
    result, or an error, is measured. Raises InputError when the folder cannot take the run, CannotRunError when ranks
    do not even start, KeyboardInterrupt with the folder once it holds the run.
    """
    several = [case for case in plan.cases if not backend_of(case).one_process]
    started_by = launcher_command(launcher) if several else None
    if several and launcher is None:
        require_room_for_mpi(max(case.ranks for case in several))
    folder = folder or default_directory(plan)
    directory = folder.absolute()
    header = run_header(plan, command, " ".join(started_by or ["none"]), preflight)
    with open_run(plan, directory, header, repeats, resume) as todo:
        watcher.begin(sum(map(len, todo)))
        try:
            for repeat, remaining in enumerate(todo):
                for _, group in itertools.groupby(remaining, key=lambda case: case.backend):
                    _run_in_fresh_ranks(plan, directory, list(group), repeat, started_by, watcher)
        except KeyboardInterrupt as error:
            raise KeyboardInterrupt(str(folder)) from error
        except BrokenPipeError:
            raise  # The watcher's, who has nobody to tell.
        except OSError as error:
            raise InputError(
                f"cannot use {error.filename or directory}: {error.strerror}",
                hint="choose another --out, or free the disk; what was measured is kept",
            ) from error
        finally:
            _tidy(directory)
    return folder


def _tidy(directory: Path) -> None:
    log = directory / LOG_FILE
    # Somebody may have taken the folder away meanwhile.
    with suppress(FileNotFoundError):
        JobFolder(directory).remove()
        if not log.stat().st_size:
            log.unlink()


def _run_in_fresh_ranks(
    plan: Plan, directory: Path, cases: list[Case], repeat: int, launcher: list[str] | None, watcher: Watcher
) -> None:
    """Measure cases of one backend; ranks that fail are replaced for those that are left."""
    one_process = backend_of(cases[0]).one_process
    start_failed = False
    while cases:
        processes = 1 if one_process else max(case.ranks for case in cases)
        job = Job(cases, plan.sources(), processes, repeat)
        done: list[int] = []

        def on_event(event: Event, job: Job = job, done: list[int] = done) -> None:
            case = job.cases[event.case]
            if event.outcome is None:
                watcher.started(case)
            else:
                done.append(event.case)
                watcher.finished(case, event.outcome, event.reason)

        ended = supervise(job, directory, None if one_process else launcher, on_event)
        if ended.reason is None:
            return
        _check_start(ended, start_failed and not done, directory)
        start_failed = ended.case is None
        if ended.case is not None:
            failed = Measurement(case=cases[ended.case], outcome="error", reason=ended.reason, repeat=repeat)
            with RunWriter.resume(directory) as writer:
                writer.append(failed)
            watcher.finished(failed.case, failed.outcome, failed.reason)
        cases = cases[len(done) + (ended.case is not None) :]


def _check_start(ended: Ended, twice: bool, directory: Path) -> None:
    if ended.case is not None or not (twice or ended.cannot_run):
        return
    raise CannotRunError(f"the ranks do not start: {ended.reason}", hint=last_words(directory) or None)


def last_words(directory: Path) -> str:
    """The last lines that ranks wrote to standard error."""
    log = directory / LOG_FILE
    lines = log.read_text(errors="replace").splitlines() if log.exists() else []
    return "\n  ".join([f"{log}:", *lines[-_LOG_LINES:]]) if lines else ""


def exit_code(directory: Path) -> int:
    """0 when every final row passed or was waived, 1 when one failed or errored, 3 when none could run."""
    outcomes = {record.outcome for record in read_run(directory).measurements}
    if outcomes & {"failed", "error"}:
        return 1
    return 0 if "passed" in outcomes else CannotRunError.exit_code


def default_directory(plan: Plan) -> Path:
    """reports/SCENARIO-TIME, made here."""
    return new_folder(scenario.name for scenario in plan.scenarios)


@contextmanager
def open_run(plan: Plan, directory: Path, header: RunHeader, repeats: int, resume: bool) -> Iterator[list[list[Case]]]:
    """Make the run's file, or open it again; per repeat the cases that are to be measured.

    Until the end of the block nobody else writes there. Raises InputError when the folder cannot be written, holds a
    run already, or with `resume` a run of other cases.
    """
    if not resume:
        RunWriter(directory, header).close()
    else:
        read_run(directory)
    with sole_writer(directory):
        yield _remaining(plan, directory, header, repeats) if resume else [list(plan.cases) for _ in range(repeats)]


def _remaining(plan: Plan, directory: Path, header: RunHeader, repeats: int) -> list[list[Case]]:
    """Per repeat the cases that a run does not have yet; `header` is written behind what it has."""
    run = read_run(directory)
    recorded = [scenario.get("cases") for scenario in run.header.scenarios]
    if recorded != [scenario["cases"] for scenario in header.scenarios]:
        raise InputError(
            f"{directory} holds a run of other cases",
            hint=f"it goes on with ncclep-bench sweep --resume {shlex.quote(str(directory))}, without scenarios",
        )
    RunWriter.resume(directory, header).close()
    settled = {(record.case, record.repeat) for record in run.measurements if record.outcome != "error"}
    return [[case for case in plan.cases if (case, repeat) not in settled] for repeat in range(repeats)]


def run_header(plan: Plan, command: Sequence[str], launcher: str, preflight: Preflight | None) -> RunHeader:
    """What a run says of itself: command, scenarios, machine."""
    scenarios: list[dict[str, Any]] = []
    for scenario in plan.scenarios:
        cases = [case for case in plan.cases if case.scenario == scenario.name]
        scenarios.append(
            msgspec.to_builtins(scenario) | {"cases": Plan((scenario,), tuple(cases)).identity, "count": len(cases)}
        )
    return RunHeader(
        started_at=datetime.now(UTC).isoformat(timespec="seconds"),
        command=list(command),
        scenarios=scenarios,
        environment=environment(launcher),
        preflight=preflight,
    )


def backend_of(case: Case) -> Backend:
    """Who moves the rows of a case."""
    backend: Backend = BACKENDS.get(case.backend)
    return backend
