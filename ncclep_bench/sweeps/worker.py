"""A rank process: `python -m ncclep_bench.sweeps.worker --out DIR --job FILE` measures the job's cases one by one."""

from __future__ import annotations

import argparse
import faulthandler
import os
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn

import msgspec

from ncclep_bench.errors import BenchError, CannotRunError
from ncclep_bench.results.store import RunWriter
from ncclep_bench.runtime.shared_memory import PeerAbortedError
from ncclep_bench.runtime.world import MpiGroup, SelfGroup, in_mpi_environment, world
from ncclep_bench.sweeps.execute import Routings, measure
from ncclep_bench.sweeps.job import LOG_FILE, Event, Failure, Job, JobFolder, Step

_LAST_WAIT_S = 10.0

Ranks = MpiGroup | SelfGroup


def main() -> None:
    """Run a job as one of its ranks. A rank that fails says so in the job's folder and waits for its end."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--job", type=Path, required=True)
    arguments = parser.parse_args()
    faulthandler.enable()
    job = msgspec.json.decode(arguments.job.read_bytes(), type=Job)
    folder = JobFolder(arguments.out)
    try:
        group: Ranks = world() if in_mpi_environment() else SelfGroup()
        _check_size(group, job)
    except BenchError as error:
        folder.fail(0, Failure(str(error), cannot_run=True))
        os._exit(1)
    run_job(job, arguments.out, group, lambda event: _append(folder.progress, event), _wait_for_the_end)
    if isinstance(group, MpiGroup):
        group.close()


def run_job(
    job: Job,
    directory: Path,
    group: Ranks,
    on_event: Callable[[Event], None],
    on_failure: Callable[[int], NoReturn],
    on_late: Callable[[int], object] | None = None,
) -> None:
    """Measure every case of `job`; rank 0 appends to the run in `directory` and tells `on_event`.

    A rank that meets an exception writes it into the job's folder and calls `on_failure` with the index of the case.
    `on_late` is called in a thread of its own with the index of a case that is past its deadline.
    """
    folder = JobFolder(directory)
    own = folder.introduce(group.rank)
    step = Step(folder, group.rank)
    subgroups: dict[int, Ranks | None] = {}
    routings = Routings()
    writer = RunWriter.resume(directory) if group.rank == 0 else None
    index = 0
    try:
        for index, case in enumerate(job.cases):
            with _deadline(job.source(case).timing.deadline_s, on_late, index):
                step.idle("waiting for the next case")
                group.barrier()
                step.begin(index)
                if writer is not None:
                    on_event(Event(index))
                step("making the group of the case's ranks")
                part = _first_ranks(group, min(case.ranks, group.size), subgroups)
                if part is not None:
                    result = measure(case, job.source(case), part, routings, step, repeat=job.repeat)
                    if writer is not None:
                        writer.append(result)
                        on_event(Event(index, result.outcome, result.reason))
        step.idle("waiting for the end")
        group.barrier()
    except Exception as error:
        with (directory / LOG_FILE).open("a") as log:
            traceback.print_exc(file=log)
        message = f"{own}, {step.operation}: {_told(error)}"
        folder.fail(group.rank, Failure(message, echo=isinstance(error, PeerAbortedError)))
        on_failure(index)
    finally:
        if writer is not None:
            writer.close()
    for part in subgroups.values():
        if isinstance(part, MpiGroup) and part is not group:
            part.close()


def _wait_for_the_end(_: int) -> NoReturn:
    # The supervisor kills a job that has failed. Until it has seen who died first, the dead must not be reaped, as they
    # are when all ranks leave.
    time.sleep(_LAST_WAIT_S)
    os._exit(1)


@contextmanager
def _deadline(seconds: float, on_late: Callable[[int], object] | None, index: int) -> Iterator[None]:
    if on_late is None:
        yield
        return
    timer = threading.Timer(seconds, on_late, [index])
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _first_ranks(group: Ranks, count: int, made: dict[int, Ranks | None]) -> Ranks | None:
    """The group of the first `count` ranks, None for the others; made once, since MPI has few communicators."""
    if count not in made:
        made[count] = group.subgroup(range(count)) if isinstance(group, MpiGroup) and count < group.size else group
    return made[count]


def _check_size(group: Ranks, job: Job) -> None:
    if group.size != job.processes:
        raise CannotRunError(
            f"the launcher started {job.processes} ranks, but MPI sees {group.size}: the launcher and mpi4py's MPI "
            "are of different makes",
            hint="give the launcher of mpi4py's MPI with --launcher",
        )


def _told(error: Exception) -> str:
    return error.message if isinstance(error, BenchError) else f"{type(error).__name__}: {error}"


def _append(file: Path, event: Event) -> None:
    with file.open("ab") as stream:
        stream.write(msgspec.json.encode(event) + b"\n")


if __name__ == "__main__":
    main()
