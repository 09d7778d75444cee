"""Ranks that the doctor starts itself, for `check --np`: watched from outside, and none is left."""

from __future__ import annotations

import os
import tempfile
import time
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import IO

import msgspec

from ncclep_bench.doctor.answers import answering, documents_of, left_by
from ncclep_bench.doctor.ranks import MODULE
from ncclep_bench.doctor.records import Answer
from ncclep_bench.errors import CannotRunError
from ncclep_bench.model.facts import Facts
from ncclep_bench.runtime import launch
from ncclep_bench.runtime.neighbours import Neighbour, ranks_of
from ncclep_bench.runtime.processes import Ends, segments_of

_START_S = 20.0
_POLL_S = 0.02


def documents_of_started_ranks(
    ranks: int, *, launcher: str | None, config: Path | None, deadline_s: float
) -> list[Facts]:
    """Start `ranks` ranks through `launcher`, gather their facts, and leave no rank behind.

    Raises CannotRunError when there is no launcher, or no rank has anything to say.
    """
    command = launch.launcher_command(launcher)
    if launcher is None:
        launch.require_room_for_mpi(ranks)
    mark = uuid.uuid4().hex
    worker = ["--mark", mark, "--deadline", str(deadline_s), *([] if config is None else ["--config", str(config)])]
    watch = _Watch(ranks, all_here=launcher is None)
    with (
        launch.ended_as_at_the_keyboard(),
        tempfile.TemporaryFile() as out,
        tempfile.TemporaryFile() as log,
        watch,
        launch.rank_processes(command, ranks, MODULE, worker, mark, out, log, lambda: watch.segments) as process,
    ):
        begin = time.monotonic()
        while process.poll() is None and not _said(out, mark):
            if time.monotonic() > begin + deadline_s + _START_S:
                break
            watch.look(launch.marked_processes(MODULE, mark))
        if text := _said(out, mark):
            return msgspec.json.decode(text, type=list[Facts])
        # Not even the first rank of this host could speak.
        if watch.seen:
            return watch.documents(round(time.monotonic() - begin, 1))
        raise CannotRunError("the ranks do not start", hint=_last_words(log) or None)


class _Watch:
    """Ranks of this host while they live: what they leave, and who ends first, since a launcher may then end all."""

    def __init__(self, ranks: int, all_here: bool) -> None:
        self.ranks, self.all_here = ranks, all_here
        self.seen: dict[int, Neighbour] = {}
        self.segments: set[str] = set()
        self._first: int | None = None
        self._ends = Ends()

    def __enter__(self) -> _Watch:
        return self

    def __exit__(self, *_: object) -> None:
        self._ends.close()

    def look(self, alive: Sequence[int]) -> None:
        """Look at ranks that live and have not left anything yet, and wait a moment, or until one ends."""
        if self._first is None and sum(rank.left is not None for rank in self.seen.values()) < self.ranks:
            for rank in ranks_of(alive):
                self.seen[rank.rank] = rank
                if rank.pid not in self._ends.watched:
                    self._ends.watch(rank.pid)
        if not self.segments:
            self.segments = {segment for rank in self.seen.values() for segment in segments_of(rank.pid)}
        for pid in self._ends.wait(_POLL_S):
            if self._first is None:
                self._first = next(rank.rank for rank in self.seen.values() if rank.pid == pid)

    def documents(self, seconds: float) -> list[Facts]:
        """What they have left; silent are those that ended first, or else those that are not well now."""
        size = self.ranks if self.all_here else None
        watched = {rank.rank for rank in self.seen.values() if rank.pid in self._ends.watched}
        # One that was gone before anybody could watch it was first, too.
        first = [rank for rank in range(size or 0) if rank not in watched]
        first = first or [rank for rank in (self._first,) if rank is not None]
        if not first:
            return documents_of(list(self.seen.values()), size, seconds)
        documents = []
        for rank in sorted({*self.seen, *first}):
            _, pid, left = self.seen.get(rank, (rank, None, None))
            facts = left_by(rank, left)
            if rank in first or left is None:
                answer = Answer(rank not in first, pid, seconds, "ended before the others" if rank in first else "")
                facts = answering(facts, answer)
            documents.append(facts)
        return documents


def _said(file: IO[bytes], mark: str) -> bytes:
    """The line with the facts; launchers write lines of their own around it when a rank has died."""
    lines = _written(file).split(b"\n")[:-1]
    return next((line.removeprefix(mark.encode()) for line in lines if line.startswith(mark.encode())), b"")


def _last_words(file: IO[bytes]) -> str:
    return "\n  ".join(_written(file).decode(errors="replace").splitlines()[-15:])


def _written(file: IO[bytes]) -> bytes:
    # The launcher writes where this process reads: to seek would move its place too.
    return os.pread(file.fileno(), os.fstat(file.fileno()).st_size, 0)
