"""The machine that facts are read of: this one, or a captured folder in its place."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any, NamedTuple

from ncclep_bench.model.facts import State

if TYPE_CHECKING:
    from ncclep_bench.runtime.nvml import Driver, Missing

MAX_TEXT_BYTES = 1 << 20

DEADLINE_S = 20.0
"""Without persistence mode a driver wakes its GPUs one by one, a second or two each."""


class AbsentError(Exception):
    """There is no value, by default because this machine has no such thing; `source` is where it was looked for."""

    def __init__(self, reason: str, source: str, state: State = "absent") -> None:
        super().__init__(reason)
        self.source = source
        self.state = state


class Reading(NamedTuple):
    """A value and where it was read."""

    value: Any
    source: str


def _home() -> str:
    import pwd

    try:
        return pwd.getpwuid(os.getuid()).pw_dir
    except KeyError:  # containers run users that no passwd file knows
        return os.environ.get("HOME", "/")


@dataclass(frozen=True)
class Machine:
    """Where to read: a root folder, variables, and what the command line gave.

    `deadline_s` is the time that each other process has to answer: driver, commands, MPI.
    """

    root: Path = Path("/")
    environ: Mapping[str, str] = field(default_factory=lambda: os.environ)
    home: str = field(default_factory=_home)
    config: Path | None = None
    ranks: int | None = None
    deadline_s: float = DEADLINE_S
    _asking: Lock = field(default_factory=Lock, init=False, repr=False, compare=False)

    def path(self, absolute: str) -> Path:
        """Where `absolute` is; a link that leads out of a captured folder leads nowhere."""
        path = self.root / absolute.lstrip("/")
        if self.captured and not path.resolve().is_relative_to(self.root.resolve()):
            raise FileNotFoundError(errno.ENOENT, "leads out of the captured folder", absolute)
        return path

    @property
    def captured(self) -> bool:
        """Whether this is a copy of another machine's files."""
        return self.root != Path("/")

    def data(self, absolute: str) -> bytes:
        """At most 1 MiB of a file."""
        path = self.path(absolute)
        if not path.is_file() and path.exists():  # a pipe in a stranger's folder, or that a variable names, never ends
            raise FileNotFoundError(errno.ENOENT, "is no plain file", absolute)
        with path.open("rb") as stream:
            return stream.read(MAX_TEXT_BYTES)

    def text(self, absolute: str) -> str:
        """At most 1 MiB of a text file."""
        return self.data(absolute).decode(errors="replace")

    def words(self, absolute: str, default: str = "") -> str:
        """The text of a small file without blanks around it, `default` where it cannot be read."""
        try:
            return self.text(absolute).strip()
        except OSError:
            return default

    def names(self, folder: str) -> list[str]:
        """What is in a folder, in order."""
        return sorted(os.listdir(self.path(folder)))

    @property
    def driver(self) -> Driver:
        """What the NVIDIA driver says, asked once. Raises AbsentError with the reason why it says nothing."""
        from ncclep_bench.runtime import nvml

        if self.captured:
            raise AbsentError("a captured folder has no driver", "NVML")
        with self._asking:
            answer = self._answer
        if isinstance(answer, nvml.Missing):
            raise AbsentError(answer.reason, "NVML", answer.state)
        return answer

    @cached_property
    def _answer(self) -> Driver | Missing:
        from ncclep_bench.runtime import nvml

        return nvml.ask(self.deadline_s)


Reader = Callable[[Machine], Reading]
"""Reads one fact. What it raises becomes a fact without a value: AbsentError, missing files, permissions, the rest."""


def printed_by(command: list[str], parser: str, fact: str, source: str = "") -> Reader:
    """What a parser of recorded output makes of what a command prints here."""

    def read(machine: Machine) -> Reading:
        import shutil

        from ncclep_bench.runtime.child import run_bounded

        shown = source or " ".join(command)
        if machine.captured:
            raise AbsentError("a captured folder runs no commands", shown)
        if shutil.which(command[0]) is None:
            raise AbsentError(f"{command[0]} is not installed", shown)
        try:
            answer = run_bounded(command, machine.deadline_s)
        except TimeoutError as error:
            raise AbsentError(str(error), shown, "failed") from error
        records = parsed(parser, fact, answer.stdout, shown)
        if not records:
            said = (answer.stderr or answer.stdout).strip().splitlines() or ["nothing"]
            line = said[-1 if said[0].startswith("Traceback") else 0]
            raise AbsentError(f"{shown} says {line[:200]}", shown)
        return Reading(records, shown)

    return read


def parsed(parser: str, fact: str, text: str, source: str) -> Any:
    import msgspec

    from ncclep_bench.doctor.text import lines_of
    from ncclep_bench.registry import PARSERS

    return msgspec.to_builtins(PARSERS.get(parser)(lines_of(text, source)).get(fact, []))
