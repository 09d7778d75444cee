"""Read what was recorded elsewhere: facts documents, root folders, raw output and logs; nothing of this machine."""

from __future__ import annotations

import contextlib
import io
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from ncclep_bench.doctor.collect import Machine, collect
from ncclep_bench.doctor.logs.contract import Readable
from ncclep_bench.doctor.logs.scan import scan
from ncclep_bench.doctor.text import lines_of
from ncclep_bench.errors import InputError
from ncclep_bench.model.facts import Fact, Facts, facts_from_json, told
from ncclep_bench.registry import PARSERS

MAX_OUTPUT_BYTES = 8 << 20
"""Of a file that is read as command output; the log of a job may be longer, and is then read as a log only."""

STANDARD_INPUT = Path("-")

_ROOT_FOLDERS = ("proc", "sys", "etc", "dev")


class Recorded(NamedTuple):
    """Facts documents, and the files in which nothing was known."""

    documents: list[Facts]
    unknown: list[str]


def read_recorded(paths: Sequence[Path], *, config: Path | None = None, ranks: int | None = None) -> Recorded:
    """The facts in `paths`: one per facts document and captured root folder, and one for all raw output together.

    The path `-` is standard input. Raises InputError for a path that cannot be read, or a configuration that cannot be
    used.
    """
    documents: list[Facts] = []
    unknown: list[str] = []
    raw = _Merged()
    for path in paths:
        if path != STANDARD_INPUT and any((path / name).is_dir() for name in _ROOT_FOLDERS):
            documents.append(_captured(path))
            continue
        for name, stream in _opened(path):
            head = stream.read(MAX_OUTPUT_BYTES + 1)
            if _is_facts(head):
                documents.append(facts_from_json(head, file=name))
            elif not raw.add({**_output(head, name), **_events(_Again(head, stream), name)}, name):
                unknown.append(name)
    if raw.values or not documents:
        documents.append(raw.facts())
    given = _given(config, ranks)
    return Recorded([facts.having(given) for facts in documents], unknown)


def read_logs(paths: Sequence[Path]) -> Recorded:
    """The events in logs of any length; the path `-` is standard input.

    Raises InputError for a file that cannot be read, and for a folder without any.
    """
    raw = _Merged()
    unknown: list[str] = []
    for path in paths:
        read = 0
        for read, (name, stream) in enumerate(_opened(path), start=1):
            if not raw.add(_events(stream, name), name):
                unknown.append(name)
        if not read:
            raise InputError(f"{path}: no file lies right in this folder", hint="give log files, or their folder")
    return Recorded([raw.facts()], unknown)


def _output(head: bytes, file: str) -> dict[str, Any]:
    """What the parsers know in a file that is short enough to be the output of commands."""
    if len(head) > MAX_OUTPUT_BYTES:
        return {}
    lines = lines_of(head.decode(errors="replace"), file)
    return {name: value for parser in PARSERS for name, value in PARSERS.get(parser)(lines).items()}


class _Merged:
    """Facts of several files: lists are laid end to end, of single values the last counts."""

    def __init__(self) -> None:
        self.values: dict[str, Any] = {}
        self.sources: dict[str, list[str]] = {}

    def add(self, parsed: dict[str, Any], file: str) -> bool:
        """Take in what one file says; whether that was anything."""
        for name, value in parsed.items():
            if isinstance(value, list):
                self.values.setdefault(name, []).extend(value)
            else:
                self.values[name] = value
            self.sources.setdefault(name, [])
            if file not in self.sources[name]:
                self.sources[name].append(file)
        return bool(parsed)

    def facts(self) -> Facts:
        return Facts(host="", sections={}).having(
            {name: told(", ".join(self.sources[name]), value) for name, value in self.values.items()}
        )


def _given(config: Path | None, ranks: int | None) -> dict[str, Fact]:
    """What the command line says of the job."""
    given: dict[str, Fact] = {}
    if ranks is not None:
        given["ep.ranks"] = told("--ranks", ranks)
    if config is not None:
        from ncclep_bench.model.ep_config_file import load_ep_config

        given["ep.config"] = told(str(config), load_ep_config(config))
    return given


class _Again:
    """A stream from its beginning, of which the head has been read: a pipe cannot be rewound."""

    def __init__(self, head: bytes, rest: Readable) -> None:
        self._head, self._rest = io.BytesIO(head), rest

    def read(self, size: int, /) -> bytes:
        return self._head.read(size) or self._rest.read(size)


def _events(stream: Readable, file: str) -> dict[str, Any]:
    return {f"log.{family}": events for family, events in scan(stream, file).items()}


def _captured(root: Path) -> Facts:
    """The facts of a root folder, whose name stands for the host where no file tells it."""
    machine = Machine(root, {}, home="/root")
    host = root.resolve().name
    for file in ("/proc/sys/kernel/hostname", "/etc/hostname"):
        try:
            host = machine.text(file).strip() or host
            break
        except OSError:
            continue
    return msgspec.structs.replace(collect(machine), host=host)


def _opened(path: Path) -> Iterator[tuple[str, Readable]]:
    """Name and bytes of standard input, of the file, or of the plain files right in a folder."""
    if path == STANDARD_INPUT:
        if sys.stdin is None:
            raise InputError("standard input is closed", hint="kubectl logs POD | ncclep-doctor logs -")
        yield "(standard input)", sys.stdin.buffer
        return
    for file in sorted(filter(_plain, path.iterdir())) if path.is_dir() else [path]:
        with contextlib.ExitStack() as held:
            try:
                if not file.is_file() and file.exists():
                    raise InputError(f"{file}: is not a plain file", hint="save it to a file, or pipe it into -")
                stream = held.enter_context(file.open("rb"))
            except OSError as error:
                raise InputError(f"{file}: cannot be read: {error.strerror}", hint="give files that exist") from error
            yield str(file), stream


def _plain(file: Path) -> bool:
    return file.is_file() and not file.is_symlink()


def _is_facts(head: bytes) -> bool:
    start = head[:4096].lstrip()
    # A baseline holds documents, and is none.
    return (
        start.startswith(b"{") and b'"schema"' in start and b'"sections"' in head and b'"baseline_schema"' not in start
    )
