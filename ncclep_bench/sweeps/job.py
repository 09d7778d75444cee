"""What those who start ranks and the ranks themselves tell each other: small files in the folder .job of a run."""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import msgspec

from ncclep_bench.model.case import Case
from ncclep_bench.model.scenario import ExpertLoad, Timing
from ncclep_bench.runtime import processes
from ncclep_bench.runtime.processes import end_of, process_state, process_status, read_step, segments_of

LOG_FILE = "ranks.log"
"""What ranks write to standard error, in the run's folder."""

_IDLE = (1 << 64) - 1


class Source(msgspec.Struct, frozen=True):
    """What a case needs of its scenario: timing rules, measured loads, and the folder that traces lie in."""

    timing: Timing
    expert_load: dict[str, ExpertLoad]
    directory: str


class Job(msgspec.Struct, frozen=True):
    """Cases for one set of rank processes, in order; `sources` by name of the scenario."""

    cases: list[Case]
    sources: dict[str, Source]
    processes: int
    repeat: int = 0

    def source(self, case: Case) -> Source:
        return self.sources[case.scenario]


class RankFile(msgspec.Struct, frozen=True):
    """A rank process as it introduces itself; `started_ticks` tells it from a later process with the same pid.

    `segments`: files in /dev/shm that MPI will not remove should the rank be killed.
    """

    rank: int
    pid: int
    started_ticks: int
    host: str
    segments: list[str] = []

    def __str__(self) -> str:
        return f"rank {self.rank} (pid {self.pid} on {self.host})"


class Failure(msgspec.Struct, frozen=True):
    """An exception of a rank; `echo`: it only repeats that another rank gave up."""

    message: str
    echo: bool = False
    cannot_run: bool = False


class Event(msgspec.Struct, frozen=True):
    """Progress of rank 0: the case with this index began, or ended with `outcome`."""

    case: int
    outcome: str | None = None
    reason: str = ""


class JobFolder:
    """The files of one job; file names are known here alone."""

    def __init__(self, run_directory: Path) -> None:
        self.path = run_directory / ".job"
        self.job = self.path / "job.json"
        self.progress = self.path / "progress.jsonl"

    def clear(self) -> None:
        """Make the folder, without files of an earlier job."""
        self.path.mkdir(exist_ok=True)
        self._empty()

    def remove(self) -> None:
        """Delete the folder and what is in it."""
        self._empty()
        self.path.rmdir()

    def _empty(self) -> None:
        for file in self.path.iterdir():
            file.unlink()

    def write(self, name: str, record: msgspec.Struct) -> None:
        """Publish `record` so that no reader ever sees half of it."""
        partial = self.path / f"{name}.partial"
        partial.write_bytes(msgspec.json.encode(record))
        partial.rename(self.path / name)

    def ranks(self) -> list[RankFile]:
        """Every rank that has introduced itself, by number."""
        files = [file for file in self.path.glob("rank-*.json") if re.fullmatch(r"rank-\d+\.json", file.name)]
        found = [msgspec.json.decode(file.read_bytes(), type=RankFile) for file in files]
        return sorted(found, key=lambda rank: rank.rank)

    def failures(self) -> list[Failure]:
        """What ranks have raised, oldest first, mere echoes last."""
        files = sorted(self.path.glob("rank-*.error"), key=lambda file: file.stat().st_mtime_ns)
        found = [msgspec.json.decode(file.read_bytes(), type=Failure) for file in files]
        return sorted(found, key=lambda failure: failure.echo)

    def introduce(self, rank: int) -> RankFile:
        """Write this process's own file."""
        status = process_status(os.getpid())
        assert status is not None, "/proc is there and has this process"
        segments = sorted(segments_of(os.getpid()))
        own = RankFile(rank, os.getpid(), status.started_ticks, socket.gethostname(), segments)
        self.write(f"rank-{rank}.json", own)
        return own

    def fail(self, rank: int, failure: Failure) -> None:
        """Publish why this rank leaves."""
        self.write(f"rank-{rank}.error", failure)

    def step_file(self, rank: int) -> Path:
        """Where a rank publishes what it does."""
        return self.path / f"rank-{rank}.step"

    def step(self, rank: int) -> tuple[int, str]:
        """How many steps a rank has taken, and what it does now."""
        return read_step(self.step_file(rank))

    def late_ranks(self, size: int) -> str:
        """Who keeps the others waiting, in words: ranks that are dead, else stopped, else the least advanced."""
        known = {rank.rank: rank for rank in self.ranks()}
        absent = sorted(set(range(size)) - set(known))
        for judge in (death_of, _stop_of):
            if verdicts := self.verdicts(known.values(), judge):
                return "; ".join(verdicts)
        if absent:
            return f"rank {_listed(absent)} never started"
        steps = {rank: self.step(rank) for rank in known}
        slowest = min(count for count, _ in steps.values())
        late = [rank for rank, (count, _) in steps.items() if count == slowest]
        if len(late) == len(known) > 1:
            return f"all {size} ranks are in {steps[late[0]][1]}"
        return "; ".join(f"{known[rank]} makes no progress in {steps[rank][1]}" for rank in late)

    def verdicts(self, ranks: Iterable[RankFile], judge: Callable[[RankFile], str | None]) -> list[str]:
        """What `judge` has to say of ranks, each with what it was doing."""
        judged = ((rank, judge(rank)) for rank in ranks)
        return [f"{rank} {verdict} in {self.step(rank.rank)[1]}" for rank, verdict in judged if verdict is not None]


class Step:
    """What a rank of a job does now, counted alike on all ranks."""

    def __init__(self, folder: JobFolder, rank: int) -> None:
        self._step = processes.Step(folder.step_file(rank))
        self._count = 0
        self.operation = "the start"

    def __call__(self, operation: str) -> None:
        """Note that `operation` begins."""
        self._count += 1
        self._publish(self._count, operation)

    def begin(self, case: int) -> None:
        """Count from the same number on all ranks of a case, whatever they did before."""
        self._count = case << 32

    def idle(self, operation: str) -> None:
        """Note that this rank has nothing to do but wait, so that nobody waits for it."""
        self._publish(_IDLE, operation)

    def _publish(self, count: int, operation: str) -> None:
        self.operation = operation
        self._step.publish(count, operation)


def death_of(rank: RankFile) -> str | None:
    """How a rank of this host ended, None while it lives or when it runs elsewhere."""
    if rank.host != socket.gethostname():
        return None
    status = process_status(rank.pid)
    return end_of(status if status is not None and status.started_ticks == rank.started_ticks else None)


def _stop_of(rank: RankFile) -> str | None:
    return "is stopped" if rank.host == socket.gethostname() and process_state(rank.pid) == "stopped" else None


def _listed(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks))
