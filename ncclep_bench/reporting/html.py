"""report.html: one self-contained page that opens offline: charts, claims, every case, every reason."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ncclep_bench.doctor.render import bounded, listed, summed_up
from ncclep_bench.model.measurement import COLUMNS
from ncclep_bench.reporting.charts import CONFIG, VEGA_LITE, charts, colours
from ncclep_bench.reporting.contract import Format
from ncclep_bench.reporting.panels import FIGURES, MOST_PANELS, Panel, panels
from ncclep_bench.reporting.tables import (
    cautions,
    claim_texts,
    family_order,
    label,
    outcome_counts,
    show,
    tells_apart,
    unmeasured,
)
from ncclep_bench.results.claims import claims
from ncclep_bench.results.frames import AXES, RunFrames

if TYPE_CHECKING:
    import pandas as pd

MOST_ROWS = 1500
"""Rows of the table of all cases; the page stays below 3 MB, and summary.csv has them all."""

_POINT_FIELDS = ("series", "traditional", "x", "level", "saturated", *FIGURES)


def render(frames: RunFrames) -> bytes:
    """The page as UTF-8. It asks nothing of the network and runs under a policy that forbids eval."""
    import jinja2

    every_panel = panels(frames)
    shown = every_panel[:MOST_PANELS]
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("ncclep_bench.reporting"), autoescape=True, trim_blocks=True, lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )  # fmt: skip
    environment.filters |= {"label": label, "bounded": bounded, "listed": listed, "summed_up": summed_up}
    sections, specs = _sections(shown)
    page = environment.get_template("report.html.j2").render(
        headers=frames.headers,
        warnings=cautions(frames),
        scenarios=_scenarios(frames),
        counts=outcome_counts(frames.cases),
        overview=_overview(frames),
        overview_columns=[name for name in _OVERVIEW if frames.cases[name].notna().any()],
        sections=sections,
        panels_left_out=len(every_panel) - len(shown),
        claims=[claim_texts(claim) for claim in claims(frames)],
        unmeasured=unmeasured(frames),
        table=_table(frames.cases),
        preflights=frames.preflights,
        facts=[_facts(header.environment) for header in frames.headers],
        columns=COLUMNS,
        data=_script_json({"config": CONFIG, "specs": specs, "fields": _POINT_FIELDS, "points": _points(shown)}),
        bundle=_bundle() if specs else "",
    )
    return page.encode()


def _scenarios(frames: RunFrames) -> list[dict[str, str]]:
    """Name and description of every scenario that the run has cases of."""
    described = {
        str(scenario.get("name", "")): str(scenario.get("description", ""))
        for header in frames.headers
        for scenario in header.scenarios
    }
    names = [show("scenario", name) for name in frames.cases["scenario"].drop_duplicates()]
    return [{"name": name, "description": described.get(name, "")} for name in names]


def _sections(shown: Sequence[Panel]) -> tuple[dict[str, list[dict[str, Any]]], list[dict[str, Any]]]:
    """Panels by scenario as the template reads them, and the specifications that they refer to by number."""
    sections: dict[str, list[dict[str, Any]]] = {}
    specs: list[dict[str, Any]] = []
    for index, panel in enumerate(shown):
        palette = colours(panel)
        drawn = []
        for chart in charts(panel):
            drawn.append(
                {"title": chart.title, "about": chart.about, "spec": len(specs), "height": chart.spec["height"]}
            )
            specs.append({"panel": index, "spec": chart.spec})
        sections.setdefault(panel.scenario, []).append({
            "title": panel.title,
            "subtitle": panel.subtitle,
            "series": [(series.name, series.traditional, palette[series.name]) for series in panel.series],
            "saturation": panel.saturation,
            "utilisation": panel.utilisation,
            "charts": drawn,
        })  # fmt: skip
    return sections, specs


def _points(shown: Sequence[Panel]) -> list[list[list[Any]]]:
    """The one data set: per panel its points, values in the order of _POINT_FIELDS."""
    return [
        [
            [_json_value(value) for value in row]
            for row in panel.points.reindex(columns=list(_POINT_FIELDS)).itertuples(index=False)
        ]
        for panel in shown
    ]


def _json_value(value: Any) -> Any:
    import pandas as pd

    if pd.isna(value):
        return None
    if isinstance(value, float):
        return float(f"{value:.6g}")
    return value.item() if hasattr(value, "item") else value


def _overview(frames: RunFrames) -> list[dict[str, str]]:
    """One line per scenario and collective: how fast, how much saved."""
    cases = frames.cases
    lines = []
    for scenario, rows in cases.groupby("scenario", dropna=False, sort=False):
        for collective in family_order(rows["collective"]):
            own = rows[rows["collective"] == collective]
            lines.append({
                "scenario": show("scenario", scenario),
                "collective": collective,
                "passed": f"{int((own['outcome'] == 'passed').sum())} of {len(own)}",
                **{name: _range(own[name], name) for name in _OVERVIEW},
            })  # fmt: skip
    return lines


_OVERVIEW = ("p50_us", "busbw_gbps", "ece_gbps", "tag", "saved_share")


def _range(values: pd.Series[Any], name: str) -> str:
    known = values.dropna()
    if known.empty:
        return ""
    low, high = show(name, known.min()), show(name, known.max())
    return low if low == high else f"{low} – {high}"


def _table(cases: pd.DataFrame) -> dict[str, Any]:
    """All cases: columns that differ as a table, those that do not as one list above it.

    An axis with one value is in the list even where some cases have none of it: collectives differ in their axes.
    """
    names = [name for name in ("run", *COLUMNS) if name in cases and name not in ("case", "reason")]
    names = [name for name in names if name in _ALWAYS or _differs(cases, name)]
    same = [name for name in COLUMNS if name in cases and name not in (*names, "case", "reason")]
    same = [name for name in same if tells_apart(cases, name)]
    rows = cases.head(MOST_ROWS)
    cells = [[show(name, value) for value in rows[name]] for name in names]
    return {
        "same": {name: show(name, known.iloc[0]) for name in same if not (known := cases[name].dropna()).empty},
        "names": names,
        "numeric": [cases[name].dtype != "string" and cases[name].dtype != "boolean" for name in names],
        "rows": list(zip(*cells, strict=True)),
        "left_out": max(0, len(cases) - MOST_ROWS),
    }


def _differs(cases: pd.DataFrame, name: str) -> bool:
    return cases[name].nunique(dropna=name in AXES) > 1 and tells_apart(cases, name)


_ALWAYS = ("collective", "outcome", "verified", "p50_us", "p99_us")


def _facts(environment: Mapping[str, Any]) -> list[tuple[str, str]]:
    return [
        (name, value if isinstance(value, str) else json.dumps(value))
        for name, value in environment.items()
        if value is not None
    ]


def _script_json(value: Any) -> str:
    """JSON that stays inside its script element whatever the run calls its scenarios."""
    return json.dumps(value, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")


def _bundle() -> str:
    """Vega, Vega-Lite and Vega-Embed as one script; made by vl-convert once, then read from the user's cache."""
    from importlib.metadata import version

    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path("~/.cache").expanduser()) / "ncclep-bench"
    cache = folder / f"vega-lite-{VEGA_LITE}-vl-convert-{version('vl-convert-python')}.js"
    try:
        return cache.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        pass
    import vl_convert

    # The stub calls `snippet` required; the function does not.
    script: str = vl_convert.javascript_bundle(vl_version=VEGA_LITE)  # type: ignore[call-arg]
    script = script.replace("</script", "<\\/script")
    draft = cache.with_suffix(f".{os.getpid()}")
    try:
        cache.parent.mkdir(parents=True, exist_ok=True)
        draft.write_text(script, encoding="utf-8")
        draft.replace(cache)
    except OSError:
        with contextlib.suppress(OSError):
            draft.unlink()
    return script


HTML = Format(render, file="report.html")
