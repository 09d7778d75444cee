"""A recorded run without personal details."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec

from ncclep_bench.errors import InputError
from ncclep_bench.model.anonymous import Anonymous
from ncclep_bench.model.case import Case
from ncclep_bench.model.measurement import Measurement, RunHeader
from ncclep_bench.results.store import rewrite_run
from ncclep_bench.sweeps.job import LOG_FILE


def refuse_personal(cases: Sequence[Case], knows: Anonymous) -> None:
    """Raise InputError for a case that names a person or machine: a case is its own identity, and is kept as it is."""
    for case in cases:
        for key, value in case.axes().items():
            if isinstance(value, str) and knows.text(value) != value:
                raise InputError(
                    f"{key} {value!r} names a person or a machine, and cases are recorded as they are",
                    hint="give a path relative to the scenario's folder, or leave out --anonymise",
                )


def anonymise_run(directory: Path, knows: Anonymous) -> None:
    """Replace every personal detail in the run's file and in what its ranks said; outcomes and figures stay."""

    def plain(record: Measurement | RunHeader) -> object:
        return msgspec.to_builtins(record) if isinstance(record, RunHeader) else record.reason

    def neutral(record: Measurement | RunHeader) -> Measurement | RunHeader:
        if isinstance(record, Measurement):
            return msgspec.structs.replace(record, reason=knows.text(record.reason))
        header = msgspec.to_builtins(record)
        knows.keep_keys(header)
        header["environment"] = knows.value(header["environment"], versions=True)
        return msgspec.convert(knows.value(header), RunHeader)

    rewrite_run(directory, lambda record: knows.learn(plain(record)), neutral)
    log = directory / LOG_FILE
    if log.exists():
        text = log.read_text(errors="replace")
        knows.learn(text)
        log.write_text(knows.text(text))
