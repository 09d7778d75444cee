"""The parent of rank processes: starts them, watches them, names who died or hangs, and leaves nothing behind."""

from __future__ import annotations

import socket
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from ncclep_bench.runtime.launch import launcher_says, rank_processes
from ncclep_bench.runtime.processes import Ends, Told
from ncclep_bench.sweeps.job import LOG_FILE, Event, Job, JobFolder, RankFile, death_of

WORKER = "ncclep_bench.sweeps.worker"

_START_DEADLINE_S = 60.0
_END_DEADLINE_S = 20.0
_POLL_S = 0.05
# A rank that raises is soon followed by others that miss it; the cause is wanted, not what came first.
_GRACE_S = 0.25


class Ended(NamedTuple):
    """How a job ended. `reason`: None when all cases are done; `case`: index of the one it stopped in, None between."""

    reason: str | None
    case: int | None = None
    cannot_run: bool = False


def supervise(job: Job, directory: Path, launcher: Sequence[str] | None, on_event: Callable[[Event], None]) -> Ended:
    """Run `job` in fresh rank processes until its cases are done or one of them fails; nothing of it is left then.

    `directory` is the run's, absolute. Without `launcher` one process, which plays all ranks. Events are passed on.
    Raises OSError when the folder cannot be written, or is taken away.
    """
    folder = JobFolder(directory)
    folder.clear()
    folder.job.write_bytes(msgspec.json.encode(job))
    mark = str(folder.job)
    arguments = ["--out", str(directory), "--job", mark]

    def segments() -> set[str]:
        # A rank that is gone already can no longer be asked; one that has not introduced itself yet can.
        here = (rank for rank in folder.ranks() if rank.host == socket.gethostname())
        return {segment for rank in here for segment in rank.segments}

    with (
        (directory / LOG_FILE).open("ab") as log,
        rank_processes(launcher, job.processes, WORKER, arguments, mark, log, log, segments) as process,
    ):
        return _Watch(job, directory, process, on_event).run()


class _Watch:
    """One job while it runs."""

    def __init__(
        self, job: Job, directory: Path, process: subprocess.Popen[bytes], on_event: Callable[[Event], None]
    ) -> None:
        self.job, self.folder, self.process, self.on_event = job, JobFolder(directory), process, on_event
        self.under_way: int | None = None
        self.done = 0
        self.log = directory / LOG_FILE
        self._log_begin = self.log.stat().st_size
        self._told = Told(self.folder.progress)
        self._since = time.monotonic()
        self._ranks: list[RankFile] = []
        self._deaths: list[str] = []
        self._ends = Ends()

    def run(self) -> Ended:
        try:
            return self._watch()
        finally:
            self._ends.close()

    def _watch(self) -> Ended:
        while True:
            # Whether it lives is asked before what it wrote is read, else its last words could be missed.
            exit_code = self.process.poll()
            self.folder.job.stat()  # Who takes the folder away takes the results along: no rank need go on.
            self._follow()
            finished = self.done == len(self.job.cases)
            if finished and (exit_code is not None or self._waited_s() > _END_DEADLINE_S):
                return Ended(None)
            if not finished and (reason := self._trouble(exit_code)) is not None:
                return self._ended(reason)
            self._sleep()

    def _sleep(self) -> None:
        """Wait a moment, or until a rank ends."""
        if len(self._ranks) < self.job.processes:
            known = {rank.rank for rank in self._ranks}
            for rank in self.folder.ranks():
                if rank.rank not in known:
                    self._ranks.append(rank)
                    if rank.host == socket.gethostname():
                        self._ends.watch(rank.pid)
        ended, watched = self._ends.wait(_POLL_S), self._ends.watched
        first = [rank for rank in self._ranks if rank.pid in ended[:1]]
        unwatched = [rank for rank in self._ranks if rank.pid not in watched]
        self._deaths = self._deaths or self.folder.verdicts(first or unwatched, death_of)

    def _follow(self) -> None:
        """Pass on what rank 0 has told since the last time."""
        for line in self._told.new_lines():
            event = msgspec.json.decode(line, type=Event)
            self._since = time.monotonic()
            self.under_way = event.case if event.outcome is None else None
            self.done = event.case + (event.outcome is not None)
            self.on_event(event)

    def _trouble(self, exit_code: int | None) -> str | None:
        """Why the job cannot go on, None while it can."""
        deaths = self._deaths
        if deaths or exit_code is not None or self.folder.failures():
            time.sleep(_GRACE_S)
            self._follow()
            if self.done == len(self.job.cases):
                return None
            failures = self.folder.failures()
            # A rank that raises leaves with an exit code; a signal is always the cause and never the consequence.
            if failures and not any("was killed" in death for death in deaths):
                return failures[0].message
            return "; ".join([*deaths, *self._launcher_says()]) or f"the ranks ended: exit code {exit_code}"
        if self._waited_s() > self._deadline_s():
            return f"not finished after {self._deadline_s():g} s: {self.folder.late_ranks(self.job.processes)}"
        return None

    def _launcher_says(self) -> list[str]:
        if any("was killed" in death for death in self._deaths):
            return []
        return launcher_says(self.log.read_bytes()[self._log_begin :].decode(errors="replace"))

    def _deadline_s(self) -> float:
        if self.under_way is None and self.done == 0:
            return _START_DEADLINE_S
        return self.job.source(self.job.cases[self.done]).timing.deadline_s

    def _waited_s(self) -> float:
        return time.monotonic() - self._since

    def _ended(self, reason: str) -> Ended:
        return Ended(reason, self.under_way, any(failure.cannot_run for failure in self.folder.failures()))
