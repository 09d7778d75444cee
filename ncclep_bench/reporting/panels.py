"""What the charts of a page show: one panel per EP collective with its traditional partner, over one swept axis."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from ncclep_bench.reporting.tables import IDENTITY, constant, described, families, family_order, label, show, varying
from ncclep_bench.results.frames import RunFrames, saturated

if TYPE_CHECKING:
    import pandas as pd

X_AXES = ("batch_size", "tokens", "num_experts", "active_share", "routing_param", "mr_cache_size", "ranks", "top_k")
"""Axes that a panel can run over; the one with most values is taken, the first of several."""

FIGURES = ("p50_us", "p99_us", "ci_low_us", "ci_high_us", "ece_gbps", "tokens_per_s", "busbw_gbps", "tag")
"""Columns that charts and their tooltips read, beside x, series and the marks that panels add."""

UTILISATIONS = ("gpu_util", "sm_util")
"""Columns whose saturation stands beside that of the throughput."""

MOST_SERIES = 6
MOST_PANELS = 40

# How rows are moved is what a reader compares within one chart, so panels split by shape first.
_KEPT_TOGETHER = ("mode", "layout", "variant", "backend")
_MOVES_WITH = {"batch_size": ("tokens",), "tokens": ("batch_size", "tokens_per_sequence")}

Scale = Literal["log", "linear", "ordinal", "none"]


class Series(NamedTuple):
    """One line of a panel: what its legend says, and whether it is a traditional partner."""

    name: str
    traditional: bool


@dataclass(frozen=True)
class Panel:
    """Rows that share their charts. `points`: x, series and figures of every row; `x` is None without a swept axis.

    `saturation`: per line where the throughput saturates, `utilisation`: where what it uses of the device does.
    `title`: the EP collective, and what sets this panel apart from others of it; `subtitle`: what all rows share.
    """

    scenario: str
    family: str
    title: str
    subtitle: str
    x: str | None
    scale: Scale
    series: tuple[Series, ...]
    points: pd.DataFrame
    saturation: tuple[str, ...]
    utilisation: tuple[str, ...] = ()


def panels(frames: RunFrames) -> list[Panel]:
    """The panels of every scenario, at most MOST_SERIES lines each where the axes allow that."""
    marks = {_mark(name): saturated(frames.cases, name) for name in ("tokens_per_s", *UTILISATIONS)}
    cases = frames.cases.assign(family=families(frames), **marks)
    cases["traditional"] = cases["collective"].isin(set(frames.partners.values()))
    read = ["scenario", "collective", "family", "traditional", *marks, *IDENTITY, *FIGURES, *UTILISATIONS]
    cases = cases.loc[cases["p50_us"].notna(), [name for name in read if name in cases]]
    found: list[Panel] = []
    for scenario, rows in cases.groupby("scenario", dropna=False, sort=False):
        for family in family_order(rows["family"]):
            members = rows[rows["family"] == family]
            members = members.drop(columns=[name for name in IDENTITY if name in rows and members[name].isna().all()])
            found += _split(show("scenario", scenario), family, members, {})
    return found


def _split(scenario: str, family: str, rows: pd.DataFrame, fixed: dict[str, str]) -> Iterator[Panel]:
    compared = rows[~rows["traditional"]] if (~rows["traditional"]).any() else rows
    x = _swept_axis(compared)
    axes = [name for name in varying(compared, IDENTITY) if name not in (x, *_MOVES_WITH.get(x or "", ()))]
    names = _series_names(rows, axes)
    shapes = [name for name in axes if name not in _KEPT_TOGETHER]
    if names.nunique() <= MOST_SERIES or not shapes:
        yield _panel(scenario, family, rows.assign(series=names), x, fixed)
        return
    widest = max(shapes, key=lambda name: compared[name].nunique(dropna=False))
    for value in compared[widest].drop_duplicates():
        shown = show(widest, value)
        same = rows[widest].isna() if not shown else rows[widest] == value
        # A partner that does not know the axis stands beside every value of it.
        part = rows[(same | (rows["traditional"] & rows[widest].isna())).fillna(False)]
        yield from _split(scenario, family, part, {**fixed, widest: shown or "none"})


def _swept_axis(rows: pd.DataFrame) -> str | None:
    counts = {name: rows[name].nunique() for name in X_AXES if name in rows}
    name = max(counts, key=lambda name: counts[name])
    return name if counts[name] > 1 else None


def _series_names(rows: pd.DataFrame, axes: list[str]) -> pd.Series[str]:
    def name(row: pd.Series[Any]) -> str:
        own = [axis for axis in axes if not (row["traditional"] and axis == "variant")]
        bare = ("mode", "layout", "variant", "backend", "routing", "dtype")
        parts = [text if axis in bare else f"{label(axis)} {text}" for axis in own if (text := show(axis, row[axis]))]
        return " · ".join((*((row["collective"],) if row["traditional"] or not parts else ()), *parts))

    return rows.apply(name, axis=1).astype("string")


def _panel(scenario: str, family: str, rows: pd.DataFrame, x: str | None, fixed: dict[str, str]) -> Panel:
    lines = rows[["series", "traditional"]].drop_duplicates("series")
    series = [Series(name, bool(traditional)) for name, traditional in lines.itertuples(index=False)]
    series.sort(key=lambda each: each.traditional)
    compared = rows[~rows["traditional"]] if (~rows["traditional"]).any() else rows
    same = constant(compared, (name for name in IDENTITY if name not in (*_UNSAID, *fixed)))
    scale: Scale = "none"
    if x is None:
        rows = rows.assign(x="")
    else:
        scale, values = _scale(rows[x])
        rows = _spread(rows.assign(x=values), compared.index)
    title = " · ".join([family, *filter(None, [described(fixed)])])
    saturation = tuple(f"{name}: {where}" for name, where in _saturation(rows, x, "tokens_per_s"))
    utilisation = tuple(
        f"{name}, {label(column)}: {where}" for column in UTILISATIONS for name, where in _saturation(rows, x, column)
    )
    return Panel(scenario, family, title, described(same), x, scale, tuple(series), rows, saturation, utilisation)


def _saturation(rows: pd.DataFrame, x: str | None, rate: str) -> Iterator[tuple[str, str]]:
    """Per line that runs over sizes its name, and where a rate of it saturates, or how far it does not."""
    if x not in ("batch_size", "tokens"):
        return
    known = rows[rate].notna()
    if not known.any():
        return
    for name, line in rows.loc[known, ["series", x, _mark(rate)]].groupby("series", sort=False):
        if line[x].nunique() > 1:
            reached = line.loc[line[_mark(rate)], x]
            where = "at" if len(reached) else "not up to"
            yield str(name), f"{where} {label(x)} {show(x, reached.min() if len(reached) else line[x].max())}"


def _mark(rate: str) -> str:
    """The column that marks the saturation points of a rate; charts know the throughput's."""
    return "saturated" if rate == "tokens_per_s" else f"saturated_{rate}"


_UNSAID = ("run", "repeat", "placement", "alignment", "masked_share", "empty_ranks", "transport", "topology", "seed")


def _spread(rows: pd.DataFrame, compared: pd.Index[Any]) -> pd.DataFrame:
    """Rows whose collective does not know the swept axis become a level line over the whole of it."""
    import pandas as pd

    level = rows[rows["x"].isna()]
    if level.empty:
        return rows
    known = rows.loc[compared, "x"].dropna()
    ends = [level.assign(x=end, level=True) for end in (known.min(), known.max())]
    return pd.concat([rows[rows["x"].notna()].assign(level=False), *ends], ignore_index=True)


def _scale(values: pd.Series[Any]) -> tuple[Scale, pd.Series[Any]]:
    import pandas as pd

    numbers = pd.to_numeric(values, errors="coerce").astype("Float64")
    if numbers.notna().sum() < values.notna().sum():
        return "ordinal", values
    low, high = numbers.min(), numbers.max()
    return ("log" if low > 0 and high / low >= 8 else "linear"), numbers
