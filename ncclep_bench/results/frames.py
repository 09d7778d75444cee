"""The tidy frames that every report is made from: one row per case, one row per raw sample."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from ncclep_bench.errors import InputError
from ncclep_bench.model.case import Case
from ncclep_bench.model.measurement import COLUMNS, Measurement, Preflight, RunHeader
from ncclep_bench.model.placement import placement_of
from ncclep_bench.results.partners import Timed, gains, times_ours
from ncclep_bench.results.quoted import quoted
from ncclep_bench.results.store import Run, read_run
from ncclep_bench.units import gbps

if TYPE_CHECKING:
    import pandas as pd

AXES = tuple(name for name in Case.__struct_fields__ if name in COLUMNS)
"""Columns that are axes of a sweep."""

_TIMED_UNITS = ("us", "GB/s", "1/s")


@dataclass(frozen=True)
class RunFrames:
    """One run, or several, as frames.

    `cases`: a row per (case, repeat), the columns of COLUMNS in their order, missing values NA; rows that did not pass
    have no times. `samples`: scenario, case, repeat, iteration, rank, elapsed_us. With several runs both start with a
    column `run`: the name of the run's folder, or its path where names repeat. `headers`: one per run.
    `partners`: EP collective → traditional partner. `preflights`: what the doctor said before each run and resumption,
    the same only once.
    """

    cases: pd.DataFrame
    samples: pd.DataFrame
    headers: tuple[RunHeader, ...]
    partners: Mapping[str, str]
    preflights: tuple[Preflight, ...] = ()
    warnings: tuple[str, ...] = ()


def load_run(path: Path | str | Sequence[Path | str]) -> RunFrames:
    """Frames of the run in a folder (or its run.jsonl), or of several.

    Raises InputError for what is not a run, and for one that is given twice.
    """
    paths = [path] if isinstance(path, (str, Path)) else list(path)
    if not paths:
        raise InputError("no run given", hint="give a run's folder, or its run.jsonl")
    runs: list[Run] = []
    for each in paths:
        run = read_run(each)
        if any(run.path.samefile(other.path) for other in runs):
            raise InputError(f"{each}: the run is given twice", hint="give each run once: its cases would count double")
        runs.append(run)
    rows = _case_rows(runs)
    folders = [run.path.resolve().parent for run in runs]
    short = len({folder.name for folder in folders}) == len(folders)
    named = [(folder.name if short else str(folder), run) for folder, run in zip(folders, runs, strict=True)]
    names = [name for name, run in named for _ in run.measurements] if len(runs) > 1 else None
    return RunFrames(
        _case_frame(rows, names),
        _sample_frame([record for run in runs for record in run.measurements], names),
        tuple(run.header for run in runs),
        {record.case.collective: record.partner for run in runs for record in run.measurements if record.partner},
        _preflights([header for run in runs for header in (run.header, *run.resumed)]),
        tuple(warning for run in runs for warning in run.warnings),
    )


def _preflights(headers: Sequence[RunHeader]) -> tuple[Preflight, ...]:
    found: list[Preflight] = []
    for header in headers:
        if header.preflight is not None and header.preflight not in found:
            found.append(header.preflight)
    return tuple(found)


def saturated(cases: pd.DataFrame, rate: str = "tokens_per_s") -> pd.Series[bool]:
    """True where a row is the saturation point of its batch sweep: a rate or a utilisation, all else alike."""
    import pandas as pd

    from ncclep_bench.results.statistics import saturation_point

    found = pd.Series(False, index=cases.index, dtype=bool)
    swept = cases[cases[rate].notna() & cases["tokens"].notna()]
    alike = [name for name in _identity(cases) if name not in ("tokens", "batch_size")]
    for _, series in swept.groupby(alike, dropna=False, sort=False):
        series = series.sort_values("tokens").drop_duplicates("tokens")
        point = saturation_point(series["tokens"].tolist(), series[rate].tolist())
        if point is not None:
            found[series.index[series["tokens"] == point]] = True
    return found


def _identity(cases: pd.DataFrame) -> list[str]:
    """Columns that tell rows apart: a sweep's axes, and what a backend says about how it ran."""
    how = ("run", "repeat", "algorithm", "timing", "cache", "hosts", "num_sms")
    return [name for name in (*how, *AXES) if name in cases]


def is_timed(record: Measurement) -> bool:
    """Whether a measurement's times may be shown: only right rows have a time."""
    return record.outcome == "passed" and record.verified is not False


def _case_rows(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """The rows of all runs; what is compared stands in one run, or in runs of one machine."""
    rows = [[_case_row(run.path, record) for record in run.measurements] for run in runs]
    timed = [
        [
            Timed(record, row.get("p50_us"), row.get("update_us"))
            for record, row in zip(run.measurements, of_run, strict=True)
        ]
        for run, of_run in zip(runs, rows, strict=True)
    ]
    for index, (run, of_run) in enumerate(zip(runs, rows, strict=True)):
        beside = [other for other in range(len(runs)) if other != index and _same_machine(run, runs[other])]
        elsewhere = [row for other in beside for row in timed[other]]
        compared = zip(of_run, gains(timed[index], elsewhere), times_ours(timed[index], elsewhere), strict=True)
        for row, gain, ratio in compared:
            row |= ({} if gain is None else gain._asdict()) | {"times_cuda": ratio}
    return [row for of_run in rows for row in of_run]


def _same_machine(one: Run, other: Run) -> bool:
    host = one.header.environment.get("host")
    return host is not None and host == other.header.environment.get("host")


def _case_row(path: Path, record: Measurement) -> dict[str, Any]:
    from ncclep_bench.results.statistics import summarise

    row = {**record.case.axes(), **msgspec.structs.asdict(record), **record.counters}
    row["case"] = record.case.case
    row["experts_per_rank"] = _experts_per_rank(record.case.placement, record.case.num_experts, record.case.ranks)
    row["cold_us"] = max(record.cold_us, default=None)
    row["update_us"] = _median(record.update_us)
    if not is_timed(record):
        timed = {name for name, column in COLUMNS.items() if column.unit in _TIMED_UNITS}
        return {name: value for name, value in row.items() if name not in timed}
    if record.samples_us:
        try:
            row |= summarise(record.samples_us)._asdict()
        except ValueError:
            raise InputError(f"{path}: samples_us of {row['case']} has iterations of different length") from None
        row["warmed_us"] = max(record.samples_us[0])
        p50_us = row["p50_us"]
        if not p50_us:
            return row
        if (flag_us := row.get("flag_us")) and (rate := row.get("copy_gbps")) and record.minimal_bytes_max_rank:
            row["speed_of_light"] = (flag_us + record.minimal_bytes_max_rank / rate / 1e3) / p50_us
        if record.ece_bytes:
            row["ece_gbps"] = gbps(record.ece_bytes, p50_us)
        if record.algbw_bytes:
            row["algbw_gbps"] = gbps(record.algbw_bytes, p50_us)
            row["busbw_gbps"] = row["algbw_gbps"] * record.busbw_factor
        if (by_others := quoted(record, p50_us)) is not None:
            row |= by_others._asdict()
        if record.tokens_total:
            row["tokens_per_s"] = record.tokens_total / p50_us * 1e6
    return row


def _median(values: Sequence[float]) -> float | None:
    from statistics import median

    return median(values) if values else None


@lru_cache(maxsize=1024)
def _experts_per_rank(spec: str, num_experts: int, ranks: int) -> int | None:
    try:
        return max(len(experts) for experts in placement_of(spec, num_experts, ranks).experts_of_rank)
    except InputError:
        return None


@lru_cache(maxsize=1)
def _dtypes() -> dict[str, str]:
    """The pandas dtype of every column, read from the records' own types."""
    from msgspec import inspect

    by_type = {inspect.IntType: "Int64", inspect.BoolType: "boolean", inspect.FloatType: "Float64"}
    dtypes = {name: "string" if column.show is str else "Float64" for name, column in COLUMNS.items()}
    for struct in (Measurement, Case):
        described = inspect.type_info(struct)
        assert isinstance(described, inspect.StructType)
        for each in described.fields:
            members = each.type.types if isinstance(each.type, inspect.UnionType) else (each.type,)
            kinds = [type(member) for member in members if not isinstance(member, inspect.NoneType)]
            if each.name in dtypes and len(kinds) == 1 and kinds[0] is not inspect.ListType:
                dtypes[each.name] = by_type.get(kinds[0], "string")
    return dtypes | dict.fromkeys(("experts_per_rank", "samples", "slowest_rank"), "Int64") | {"case": "string"}


def _case_frame(rows: Sequence[Mapping[str, Any]], runs: Sequence[str] | None) -> pd.DataFrame:
    import pandas as pd

    columns: dict[str, Any] = {} if runs is None else {"run": pd.Series(runs, dtype="string")}
    for name, dtype in _dtypes().items():
        values = [_cell(row.get(name)) for row in rows]
        if dtype == "string":
            values = [value if value is None else _text(value) for value in values]
        columns[name] = pd.Series(values, dtype=dtype)
    return pd.DataFrame(columns)


def _cell(value: Any) -> Any:
    """None for whatever means "missing"."""
    missing = value is None or value == "" or (isinstance(value, float) and not math.isfinite(value))
    return None if missing else value


def _text(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def _sample_frame(records: Sequence[Measurement], runs: Sequence[str] | None) -> pd.DataFrame:
    import numpy as np
    import pandas as pd

    timed = [index for index, record in enumerate(records) if is_timed(record) and record.samples_us]
    shapes = [(len(records[index].samples_us), len(records[index].samples_us[0])) for index in timed]
    counts = [iterations * ranks for iterations, ranks in shapes]

    def repeated(values: Sequence[Any]) -> Any:
        return np.repeat(np.array(values, dtype=object), counts)

    def concatenated(parts: list[Any], dtype: str) -> Any:
        return np.concatenate([np.empty(0, dtype), *parts]).astype(dtype, copy=False)

    columns: dict[str, Any] = {}
    if runs is not None:
        columns["run"] = pd.Categorical(repeated([runs[index] for index in timed]))
    columns["scenario"] = pd.Categorical(repeated([records[index].case.scenario for index in timed]))
    columns["case"] = pd.Categorical(repeated([records[index].case.case for index in timed]))
    columns["repeat"] = np.repeat(np.array([records[index].repeat for index in timed], dtype=np.int64), counts)
    columns["iteration"] = concatenated([np.repeat(np.arange(rows), ranks) for rows, ranks in shapes], "int64")
    columns["rank"] = concatenated([np.tile(np.arange(ranks), rows) for rows, ranks in shapes], "int64")
    columns["elapsed_us"] = concatenated([np.array(records[index].samples_us).ravel() for index in timed], "float64")
    return pd.DataFrame(columns)
