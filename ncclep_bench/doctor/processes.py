"""The ranks of a job as processes of this machine: found by their launcher's variables, looked at without touching."""

from __future__ import annotations

import os
import re
import time
from collections import defaultdict
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import NamedTuple

from ncclep_bench.doctor.records import RankProcess
from ncclep_bench.errors import InputError
from ncclep_bench.runtime.place import place_of
from ncclep_bench.runtime.processes import process_status
from ncclep_bench.runtime.shared_memory import Status, read_statuses

MAX_RANKS = 1024
MAX_VARIABLES_BYTES = 1 << 20

_LIBRARIES = re.compile(rb"/lib(?:mpi|nccl|cuda)[\w.-]*\.so")


class Rank(NamedTuple):
    """One rank: the process that does its work, and what its launcher says of the job, None where it does not."""

    pid: int
    rank: int
    ranks: int | None
    local_ranks: int | None


def find_ranks(pids: Sequence[int] = (), root: Path = Path("/proc")) -> list[Rank]:
    """The ranks of the one job on this machine, or those among and below `pids`, by rank.

    Raises InputError where there are several jobs, and for a pid that does not exist; no rank gives an empty list.
    """
    parents = _parents(root)
    if unknown := [pid for pid in pids if pid not in parents]:
        raise InputError(f"there is no process {unknown[0]}", hint="give the pid of the launcher or of a rank")
    ancestors = {pid: _ancestors(pid, parents) for pid in parents}
    found = {pid: rank for pid in parents.keys() - {os.getpid()} if (rank := _rank_of(pid, root)) is not None}
    # Ranks of one job have one launcher: the nearest process above them that is no rank itself.
    of_job: dict[int, dict[int, list[Rank]]] = defaultdict(lambda: defaultdict(list))
    for pid, rank in found.items():
        if not pids or {pid, *ancestors[pid]} & set(pids):
            launcher = next((parent for parent in ancestors[pid] if parent not in found), 0)
            of_job[launcher][rank.rank].append(rank)
    if len(of_job) > 1 and not pids:
        listed = "; ".join(f"--pid {launcher} ({len(ranks)} ranks)" for launcher, ranks in sorted(of_job.items()))
        raise InputError(f"{len(of_job)} jobs run on this machine", hint=f"choose one by its launcher: {listed}")
    # A rank's wrappers and helpers carry its variables too: the worker has the libraries, or else stands above.
    workers = (
        min(same, key=lambda rank: (not _works(rank.pid, root), len(ancestors[rank.pid]), rank.pid))
        for ranks in of_job.values()
        for same in ranks.values()
    )
    return sorted(workers, key=lambda rank: rank.rank)[:MAX_RANKS]


def not_permitted(pids: Sequence[int] = (), root: Path = Path("/proc")) -> list[int]:
    """Processes among and below `pids`, of all without them, that may be ranks but that this user may not look at."""
    parents = _parents(root)
    return [
        pid
        for pid in sorted(parents)
        if (not pids or {pid, *_ancestors(pid, parents)} & set(pids)) and _is_shut(root / str(pid) / "environ")
    ]


def look_twice(ranks: Sequence[Rank], wait_s: float) -> list[RankProcess]:
    """What every process does, by two looks `wait_s` apart; one that is gone at the second look is dead."""
    first = [_Look.at(rank.pid) for rank in ranks]
    time.sleep(wait_s)
    second = [_Look.at(rank.pid) for rank in ranks]
    now_ns = time.monotonic_ns()
    return [_compared(rank, *looks, now_ns) for rank, looks in zip(ranks, zip(first, second, strict=True), strict=True)]


class _Look(NamedTuple):
    """A process at one moment; `statuses` are its own control blocks, None where it may not be looked at."""

    state: str
    cpu_s: float
    wchan: str
    syscall: str
    command: str
    statuses: list[Status] | None
    started_ticks: int

    @classmethod
    def at(cls, pid: int) -> _Look:
        status = process_status(pid)
        if status is None:
            return cls("X", 0.0, "", "", "", None, 0)
        own = {pid, *(int(number) for number in _row(_text(f"/proc/{pid}/status"), "NSpid").split())}
        try:
            statuses = [status for status in read_statuses(pid) if status.pid in own]
        except OSError:
            statuses = None
        return cls(
            status.letter,
            status.cpu_ticks / os.sysconf("SC_CLK_TCK"),
            _text(f"/proc/{pid}/wchan").strip().removeprefix("0"),
            _text(f"/proc/{pid}/syscall").partition(" ")[0].strip(),
            " ".join(_text(f"/proc/{pid}/cmdline").replace("\0", " ").split())[:200],
            statuses,
            status.started_ticks,
        )


def _compared(rank: Rank, first: _Look, second: _Look, now_ns: int) -> RankProcess:
    if second.started_ticks != first.started_ticks:  # the number belongs to another process by now
        second = second._replace(state="X")
    before = {(status.inode, status.since_ns) for status in first.statuses or ()}
    waits = [s for s in second.statuses or () if s.since_ns and (s.inode, s.since_ns) in before]
    wait = min(waits, key=lambda status: status.since_ns, default=None)
    return RankProcess(
        at=f"/proc/{rank.pid}",
        pid=rank.pid,
        rank=rank.rank,
        ranks=rank.ranks,
        local_ranks=rank.local_ranks,
        command=second.command or first.command,
        states=[first.state, second.state],
        cpu_s=round(max(0.0, second.cpu_s - first.cpu_s), 3),
        wchan=second.wchan if second.wchan == first.wchan else "",
        syscall=second.syscall if second.syscall == first.syscall else "",
        meetings=None if not first.statuses or second.statuses is None else _moved(first.statuses, second.statuses),
        waits_in=wait.operation if wait else "",
        waits_for=list(wait.ranks) if wait else [],
        waits_s=round((now_ns - wait.since_ns) / 1e9, 1) if wait else 0.0,
    )


def _moved(first: Collection[Status], second: Collection[Status]) -> int:
    """How often a rank came to a meeting between two looks; a group made or left counts too."""
    before = {status.inode: status.epoch for status in first}
    after = {status.inode: status.epoch for status in second}
    steps = sum((after[inode] - before[inode]) & 0xFFFFFFFF for inode in before.keys() & after.keys())
    return steps + len(before.keys() ^ after.keys())


def _parents(root: Path) -> dict[int, int]:
    pids = [int(name) for name in os.listdir(root) if name.isdecimal()]
    return {pid: status.parent for pid in pids if (status := process_status(pid, root))}


def _ancestors(pid: int, parents: dict[int, int]) -> list[int]:
    found: list[int] = []
    while (pid := parents.get(pid, 0)) and pid not in found:
        found.append(pid)
    return found


def _rank_of(pid: int, root: Path) -> Rank | None:
    entries = (entry.partition("=") for entry in _text(root / str(pid) / "environ").split("\0"))
    place = place_of({name: value for name, _, value in entries})
    return None if place.rank is None else Rank(pid, place.rank, place.ranks, place.local_ranks)


def _works(pid: int, root: Path) -> bool:
    return _LIBRARIES.search(_text(root / str(pid) / "maps").encode()) is not None


def _is_shut(file: Path) -> bool:
    try:
        file.open("rb").close()
    except PermissionError:
        return True
    except OSError:
        pass
    return False


def _row(text: str, name: str) -> str:
    match = re.search(rf"^{name}:(.*)$", text, re.MULTILINE)
    return match[1] if match else ""


def _text(path: str | Path) -> str:
    """The file's text, or nothing where it cannot be read: processes end, and others' are not everybody's to see."""
    try:
        with open(path, "rb") as stream:
            return stream.read(MAX_VARIABLES_BYTES).decode(errors="replace")
    except OSError:
        return ""
