"""Processes of this host as /proc shows them: what they do, how they ended and in which order, and what they leave."""

from __future__ import annotations

import contextlib
import mmap
import os
import re
import select
import signal
import struct
from pathlib import Path
from typing import Literal, NamedTuple

ProcessState = Literal["running", "sleeping", "stopped", "zombie", "dead"]

_STATES: dict[str, ProcessState] = {"R": "running", "T": "stopped", "t": "stopped", "Z": "zombie", "X": "dead"}
_STEP = struct.Struct("<Q248s")


class ProcessStatus(NamedTuple):
    """Some of /proc/PID/stat; `wait_status` means something for zombies only."""

    letter: str
    parent: int
    cpu_ticks: int
    started_ticks: int
    wait_status: int

    @property
    def state(self) -> ProcessState:
        return _STATES.get(self.letter, "sleeping")


def process_status(pid: int, proc: Path = Path("/proc")) -> ProcessStatus | None:
    """The process as /proc shows it, None when there is none."""
    try:
        text = Path(proc, str(pid), "stat").read_text(errors="replace")
    except OSError:
        return None
    # The name in parentheses may itself hold blanks and parentheses.
    fields = text.rpartition(")")[2].split()
    return ProcessStatus(fields[0], int(fields[1]), int(fields[11]) + int(fields[12]), int(fields[19]), int(fields[49]))


def process_state(pid: int) -> ProcessState:
    """What the process `pid` is doing; `dead` when there is none."""
    status = process_status(pid)
    return "dead" if status is None else status.state


def lives(pid: int) -> bool:
    """Whether the process is there, and neither stopped nor about to vanish."""
    return process_state(pid) in ("running", "sleeping")


def end_of(status: ProcessStatus | None) -> str | None:
    """How a process ended, None while it lives; whom its parent was quick to ask for its end is just gone."""
    if status is None:
        return "is gone"
    if status.state not in ("zombie", "dead"):
        return None
    if os.WIFSIGNALED(status.wait_status):
        return f"was killed by {signal.Signals(os.WTERMSIG(status.wait_status)).name}"
    return f"ended with exit code {os.WEXITSTATUS(status.wait_status)}"


class Ends:
    """Tells of processes that end, in the order in which they do.

    MPI may end the other ranks within milliseconds, and once all are gone nobody can tell who was first, or how.
    """

    def __init__(self) -> None:
        self._epoll = select.epoll()
        self._pids: dict[int, int] = {}

    @property
    def watched(self) -> set[int]:
        """Processes that were there when they were to be watched."""
        return set(self._pids.values())

    def watch(self, pid: int) -> None:
        """Tell of the end of this one too."""
        with contextlib.suppress(OSError):
            descriptor = os.pidfd_open(pid)
            self._pids[descriptor] = pid
            self._epoll.register(descriptor, select.EPOLLIN)

    def wait(self, seconds: float) -> list[int]:
        """Wait so long, or until a process ends; those that have ended, each told once."""
        ended = [descriptor for descriptor, _ in self._epoll.poll(seconds)]
        for descriptor in ended:
            self._epoll.unregister(descriptor)
        return [self._pids[descriptor] for descriptor in ended]

    def close(self) -> None:
        """Give descriptors back."""
        self._epoll.close()
        for descriptor in self._pids:
            os.close(descriptor)


class Step:
    """A rank's public step counter in a file: what it does now, readable from outside even when it hangs."""

    def __init__(self, file: Path) -> None:
        file.write_bytes(bytes(_STEP.size))
        with file.open("r+b") as stream:
            # Mapped, because a timed loop must not pay for a write system call per iteration.
            self._map = mmap.mmap(stream.fileno(), _STEP.size)

    def publish(self, count: int, operation: str) -> None:
        """`operation`, the step number `count`, begins."""
        _STEP.pack_into(self._map, 0, count, operation.encode())


def read_step(file: Path) -> tuple[int, str]:
    """How many steps a rank has taken, and what it does now."""
    try:
        count, operation = _STEP.unpack(file.read_bytes()[: _STEP.size])
    except (OSError, struct.error):
        return 0, "the start"
    return count, operation.rstrip(b"\0").decode(errors="ignore")


class Told:
    """What another process appends to a file, in whole lines, each once; nothing while there is no file."""

    def __init__(self, file: Path) -> None:
        self._file, self._read = file, 0

    def new_lines(self) -> list[bytes]:
        """The lines that have come since the last time."""
        try:
            with self._file.open("rb") as stream:
                stream.seek(self._read)
                data = stream.read()
        except FileNotFoundError:
            return []
        whole = data[: data.rfind(b"\n") + 1]
        self._read += len(whole)
        return whole.splitlines()


def segments_of(pid: int) -> set[str]:
    """Files in /dev/shm that MPI made for a rank: it unlinks them on the way out, which a killed rank does not take."""
    try:
        return set(re.findall(r"/dev/shm/mpich_shm_\S+", Path("/proc", str(pid), "maps").read_text()))
    except OSError:
        return set()


def unlink_own_segments() -> None:
    """Remove their names once all ranks have mapped them, or never will: a name would outlive ranks that are killed.

    MPICH removes them in Finalize alone, and does not mind when they are gone.
    """
    for segment in segments_of(os.getpid()):
        Path(segment).unlink(missing_ok=True)
