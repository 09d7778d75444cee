"""A run on disk: one header line, then one JSON line per measured case, appended as soon as it is there."""

from __future__ import annotations

import fcntl
import itertools
import os
import shlex
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import NoReturn

import msgspec

from ncclep_bench.errors import BenchError, InputError
from ncclep_bench.model.case import Case
from ncclep_bench.model.measurement import SCHEMA_VERSION, Measurement, RunHeader

RUN_FILE = "run.jsonl"

_DECODER = msgspec.json.Decoder(Measurement | RunHeader)
_ENCODER = msgspec.json.Encoder()


class _Version(msgspec.Struct):
    """The one thing that every schema version has."""

    kind: str = ""
    schema_version: int = 0


@dataclass(frozen=True)
class Run:
    """A run as read: its first header, the final measurement of every (case, repeat), and what was odd.

    `resumed`: headers of later resumptions, oldest first. `size`: bytes of the file up to its last whole line.
    """

    path: Path
    header: RunHeader
    measurements: tuple[Measurement, ...]
    resumed: tuple[RunHeader, ...] = ()
    warnings: tuple[str, ...] = ()
    size: int = field(default=0, repr=False)


class RunWriter:
    """Appends measurements to DIRECTORY/run.jsonl; each is on disk when `append` returns.

    The file is opened before anything is measured. Raises InputError when the folder cannot be written, or already
    holds a run (which `resume` continues).
    """

    def __init__(self, directory: Path | str, header: RunHeader) -> None:
        self.directory = Path(directory)
        self.path = self.directory / RUN_FILE
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            self._descriptor = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_EXCL, 0o644)
        except FileExistsError:
            if self.path.exists():
                hint = f"choose another --out, or continue it: --resume {directory}"
                raise InputError(f"{self.path} holds a run already", hint=hint) from None
            raise InputError(f"{self.directory} is not a folder", hint="choose another --out") from None
        except OSError as error:
            _unwritable(self.path, error)
        self._write(header)

    @classmethod
    def resume(cls, directory: Path | str, header: RunHeader | None = None) -> RunWriter:
        """Continue the run in `directory`; `header` says with what. A cut-off last line is removed first.

        Raises InputError when there is no readable run.
        """
        run = read_run(directory)
        writer = cls.__new__(cls)
        writer.directory, writer.path = run.path.parent, run.path
        try:
            writer._descriptor = os.open(run.path, os.O_WRONLY | os.O_APPEND)
            os.ftruncate(writer._descriptor, run.size)
        except OSError as error:
            _unwritable(run.path, error)
        if header is not None:
            writer._write(header)
        return writer

    def append(self, measurement: Measurement) -> None:
        """Write one line through to the disk. Raises InputError when the disk refuses."""
        self._write(measurement)

    def close(self) -> None:
        """Close the file; a second call does nothing."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def __enter__(self) -> RunWriter:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _write(self, record: Measurement | RunHeader) -> None:
        line = _ENCODER.encode(record)
        try:
            # JSON has no NaN and structs are not checked when built: a line that cannot be read must not be written.
            _DECODER.decode(line)
        except msgspec.ValidationError as error:
            raise BenchError(f"cannot store a result in {self.path}: {error}", hint=line[:200].decode()) from None
        remaining = memoryview(line + b"\n")
        try:
            while remaining:
                remaining = remaining[os.write(self._descriptor, remaining) :]
            os.fsync(self._descriptor)
        except OSError as error:
            _unwritable(self.path, error)


@contextmanager
def sole_writer(directory: Path | str) -> Iterator[None]:
    """Hold the run in `directory` until the end of the block; raises InputError while another process holds it."""
    try:
        descriptor = os.open(directory, os.O_RDONLY)
    except OSError as error:
        _unwritable(Path(directory), error)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise InputError(f"{directory}: another sweep writes there now", hint="wait for its end") from None
        except OSError:
            pass  # Some network file systems have no locks on folders; a run there is not worth less.
        yield
    finally:
        os.close(descriptor)


def rewrite_run(
    directory: Path | str,
    look: Callable[[Measurement | RunHeader], None],
    change: Callable[[Measurement | RunHeader], Measurement | RunHeader],
) -> None:
    """Put what `change` makes of every record in its place, once `look` has seen them all.

    The file is whole throughout. Raises InputError for what is not a run, and when the disk refuses.
    """
    file = read_run(directory).path
    with sole_writer(file.parent):
        lines = file.read_bytes().split(b"\n")[:-1]
        records = [_decode(file, number, line) for number, line in enumerate(lines, 1) if line.strip()]
        for record in records:
            look(record)
        draft = file.with_name(f".{file.name}.partial")
        try:
            try:
                draft.write_bytes(b"".join(_ENCODER.encode(change(record)) + b"\n" for record in records))
                draft.replace(file)
            finally:
                draft.unlink(missing_ok=True)
        except OSError as error:
            _unwritable(file, error)


def new_folder(names: Iterable[str]) -> Path:
    """reports/NAMES-TIME, made here, with a number behind where one of the same second has it."""
    name = f"{'+'.join(names)[:80]}-{datetime.now():%Y%m%d-%H%M%S}"
    for suffix in itertools.chain([""], (f"-{number}" for number in itertools.count(2))):
        directory = Path("reports", name + suffix)
        try:
            directory.mkdir(parents=True)
        except FileExistsError:
            if directory.exists():
                continue
        except OSError:
            pass  # Whoever writes there says why it cannot.
        return directory
    raise AssertionError("numbers do not end")


def folder_of(path: Path) -> Path:
    """The folder of the run that `path` names as read_run takes it."""
    return path.parent if path.is_file() else path


def read_run(path: Path | str) -> Run:
    """The run in folder `path`, or in the run.jsonl that `path` names.

    Raises InputError, with file and line, for what is not a run or was written by a newer version. A last line that was
    cut off while it was written is left out and reported in `warnings`, as are a run that was not finished and one that
    went on with other timing.
    """
    file = Path(path)
    if file.is_dir():
        file = file / RUN_FILE
    try:
        if file.exists() and not file.is_file():
            raise InputError(
                f"{file}: is a folder or a device, not a file", hint=f"give a run's folder, or its {RUN_FILE}"
            )
        data = file.read_bytes()
    except OSError as error:
        raise InputError(
            f"cannot read {file}: {error.strerror}", hint=f"give a run's folder, or its {RUN_FILE}"
        ) from None
    *lines, tail = data.split(b"\n")
    headers: list[RunHeader] = []
    final: dict[tuple[Case, int], Measurement] = {}
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        record = _decode(file, number, line, first=not headers)
        if isinstance(record, RunHeader):
            headers.append(record)
        elif headers:
            final[record.case, record.repeat] = record
        else:
            break
    if not headers:
        raise InputError(f"{file}: no header in the first line", hint=f"give a run's folder, or its {RUN_FILE}")
    # Every line is written with its end in one call: what has no end was cut off.
    warnings = [f"{file}:{len(lines) + 1}: the last line is cut off and was left out"] if tail.strip() else []
    planned = sum(scenario.get("count", 0) for scenario in headers[0].scenarios)
    if (present := len({case for case, _ in final})) < planned:
        warnings.append(
            f"{file}: {present} of {planned} cases, the run was not finished: ncclep-bench sweep --resume "
            f"{shlex.quote(str(file.parent))} goes on with it"
        )
    for header in headers[1:]:
        warnings += [f"{file}: went on at {header.started_at} with {change}" for change in _retimed(headers[0], header)]
    return Run(file, headers[0], tuple(final.values()), tuple(headers[1:]), tuple(warnings), len(data) - len(tail))


def _retimed(first: RunHeader, then: RunHeader) -> Iterator[str]:
    """What a resumed run measures otherwise than it began: its cases are compared all the same."""
    for begun, resumed in zip(first.scenarios, then.scenarios, strict=False):
        before, after = begun.get("timing", {}), resumed.get("timing", {})
        for key, value in before.items():
            if key != "deadline_s" and after.get(key, value) != value:
                yield f"{key} {after[key]} in place of {value}"


def _decode(file: Path, number: int, line: bytes, *, first: bool = False) -> Measurement | RunHeader:
    try:
        record = _DECODER.decode(line)
    except msgspec.MsgspecError as error:
        _refuse_newer(file, number, line)
        if first:
            hint = f"give a run's folder, or its {RUN_FILE}"
            raise InputError(f"{file}: not the record of a run: line {number}: {error}", hint=hint) from None
        hint = "remove the line to use the rest"
        raise InputError(f"{file}:{number}: not a result line: {error}", hint=hint) from None
    if isinstance(record, RunHeader) and record.schema_version > SCHEMA_VERSION:
        _refuse_newer(file, number, line)
    return record


def _refuse_newer(file: Path, number: int, line: bytes) -> None:
    try:
        version = msgspec.json.decode(line, type=_Version).schema_version
    except msgspec.MsgspecError:
        return
    if version > SCHEMA_VERSION:
        raise InputError(
            f"{file}:{number}: schema version {version} is newer than {SCHEMA_VERSION}, the newest known here",
            hint="pip install --upgrade ncclep-bench",
        )


def _unwritable(path: Path, error: OSError) -> NoReturn:
    raise InputError(f"cannot write {path}: {error.strerror}", hint="choose another --out, or free the disk") from None
