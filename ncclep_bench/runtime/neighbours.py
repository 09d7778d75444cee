"""Ranks of the same job on this host, as /proc shows them: also those that are stopped, or never start MPI."""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from ncclep_bench.runtime.processes import process_status
from ncclep_bench.runtime.world import environment_rank

_NAME = "ncclep-left"
_kept: list[int] = []
_claims: list[socket.socket] = []


class Neighbour(NamedTuple):
    """A rank process of this host; `left`: what it has left for others, None while nothing."""

    rank: int
    pid: int
    left: bytes | None


def leave(data: bytes) -> None:
    """Let processes of this user on this host read `data` for as long as this process is there, even if it is stopped.

    It is a file without a name, so nothing has to be removed. What was left before is replaced.
    """
    fd = os.memfd_create(_NAME)
    with os.fdopen(os.dup(fd), "wb") as file:
        file.write(data)
    while _kept:
        os.close(_kept.pop())
    _kept.append(fd)


def claim(name: str) -> bool:
    """Whether this process is the first of its host to claim `name`, which it then has until its end."""
    # The kernel lets one socket have a name, and forgets it with the process.
    claimed = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    try:
        claimed.bind(b"\0ncclep-doctor-" + name.encode())
    except OSError as error:
        # Where such names are not permitted, nobody can be first.
        claimed.close()
        return error.errno != errno.EADDRINUSE
    _claims.append(claimed)
    return True


def job_here() -> str:
    """A name for the ranks that the launcher of this one started on this host, the same for all of them."""
    return f"{os.stat('/proc/self/ns/pid').st_ino}-{_launcher(os.getpid()) or os.getpid()}"


def neighbours() -> list[Neighbour]:
    """The ranks that the launcher of this one started on this host, by number; none where no launcher did."""
    launcher = _launcher(os.getpid())
    return [] if launcher is None else ranks_of(pid for pid in _processes() if _launcher(pid) == launcher)


def ranks_of(pids: Iterable[int]) -> list[Neighbour]:
    """Those of `pids` that are ranks; of a script and the program that it runs, the one that has left something."""
    found: dict[int, Neighbour] = {}
    for pid in pids:
        rank = environment_rank(_environ(pid))
        if rank is not None and (rank not in found or found[rank].left is None):
            left = _left_by(pid)
            if rank not in found or left is not None:
                found[rank] = Neighbour(rank, pid, left)
    return [found[rank] for rank in sorted(found)]


def _processes() -> Iterator[int]:
    return (int(entry.name) for entry in Path("/proc").glob("[0-9]*"))


def _launcher(pid: int) -> int | None:
    """The nearest ancestor of a rank that is no rank itself: the launcher, or its daemon on this host."""
    while environment_rank(_environ(pid)) is not None:
        status = process_status(pid)
        if status is None or status.parent == 0:
            return None
        pid = status.parent
        if environment_rank(_environ(pid)) is None:
            return pid
    return None


def _environ(pid: int) -> Mapping[str, str]:
    """The variables that a process was started with; none of a stranger's."""
    try:
        words = Path("/proc", str(pid), "environ").read_bytes().split(b"\0")
    except OSError:
        return {}
    return {os.fsdecode(name): os.fsdecode(value) for name, _, value in (word.partition(b"=") for word in words)}


def _left_by(pid: int) -> bytes | None:
    try:
        for entry in Path("/proc", str(pid), "fd").iterdir():
            if os.readlink(entry).startswith(f"/memfd:{_NAME} "):
                return entry.read_bytes()
    except OSError:  # it ends, or is somebody else's
        pass
    return None
