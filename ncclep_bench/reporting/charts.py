"""The Vega-Lite charts of one panel: time with its p99 band, rate with the saturation point, and time saved."""

from __future__ import annotations

import math
from itertools import cycle
from typing import Any, NamedTuple

from ncclep_bench.model.measurement import COLUMNS
from ncclep_bench.reporting.panels import Panel
from ncclep_bench.reporting.tables import label
from ncclep_bench.results.partners import LAYOUT_COUNTS

VEGA_LITE = "6.4"
"""Version of the schema, and of the bundle that draws it."""

# Told apart by colour-blind readers, and legible on white and on near-black.
EP_COLOURS = ("#2f74d0", "#12906f", "#c8591b", "#8d55c7", "#cc4486", "#7d8a15", "#0b8fa8", "#a0623c")
TRADITIONAL_COLOURS = ("#8a919c", "#a08f70", "#6f8794", "#9a7f95")

_DASH = [4, 3]
_POINT = {"type": "point", "filled": True, "size": 36, "opacity": 1}
_SECONDS = "format(datum.value * 1e-6, '~s') + 's'"
_COUNT = "format(datum.value, '~s')"
_PLAIN = "format(datum.value, ',~r')"
_PERCENT = "format(datum.value, '~%')"

CONFIG: dict[str, Any] = {
    "background": None,
    "font": "system-ui, -apple-system, 'Segoe UI', Roboto, sans-serif",
    "view": {"stroke": None},
    "axis": {
        "domain": False, "ticks": False, "labelPadding": 6, "titlePadding": 8, "titleFontWeight": "normal",
        "labelFontSize": 11, "titleFontSize": 11,
    },
}  # fmt: skip
"""What all charts look alike in; text and grid take their colour from the page."""


class Chart(NamedTuple):
    """A chart: heading, what it shows, and its Vega-Lite specification, which lacks only `data`."""

    title: str
    about: str
    spec: dict[str, Any]


_RATES = {
    "ece_gbps": ("Effective bandwidth (ECE)", "GB/s: all experts' bytes / time, whole group; may exceed the link"),
    "tokens_per_s": ("Throughput", "tokens per second, all ranks"),
    "busbw_gbps": ("Bus bandwidth", "GB/s per rank, with the nccl-tests factor"),
}
"""In order of preference: a panel shows the first that it has."""


def charts(panel: Panel) -> list[Chart]:
    """The charts that a panel has figures for."""
    draw = {"none": _bars, "ordinal": _categories}.get(panel.scale, _lines)
    spread = {"none": "tick at p99", "ordinal": "line up to p99"}.get(panel.scale, "band up to p99")
    found = [Chart("Time", f"median of the slowest rank, {spread}", draw(panel, "p50_us"))]
    rate = next((name for name in _RATES if panel.points[name].notna().any()), None)
    if rate is not None:
        title, about = _RATES[rate]
        ring = "; a ring marks the saturation point" if rate == "tokens_per_s" and _saturates(panel) else ""
        found.append(Chart(title, about + ring, draw(panel, rate)))
    if panel.points["tag"].notna().any():
        whole = "; update + launch on both sides" if panel.family in LAYOUT_COUNTS else ""
        found.append(Chart("Time saved (TAG)", "share of the traditional partner's time" + whole, draw(panel, "tag")))
    return found


def _saturates(panel: Panel) -> bool:
    return bool(panel.saturation) and bool(panel.points["saturated"].any())


def colours(panel: Panel) -> dict[str, str]:
    """The colour of each series, the same in all charts of the panel and in its legend."""
    palettes = {False: cycle(EP_COLOURS), True: cycle(TRADITIONAL_COLOURS)}
    return {series.name: next(palettes[series.traditional]) for series in panel.series}


def _lines(panel: Panel, column: str) -> dict[str, Any]:
    y = _y(panel, column)
    layers: list[dict[str, Any]] = []
    if column == "tag":
        zero = {"x": None, "color": None, "tooltip": None, "y": {"datum": 0}}
        layers.append({"mark": {"type": "rule", "strokeDash": _DASH, "color": "#aab0ba"}, "encoding": zero})
    if column == "p50_us":
        layers.append({"mark": {"type": "area", "opacity": 0.15}, "encoding": {"y": y, "y2": {"field": "p99_us"}}})
    scale = {"domain": [False, True], "range": [[1, 0], _DASH]}
    dash = {"field": "traditional", "type": "nominal", "legend": None, "scale": scale}
    line = {"type": "line", "strokeWidth": 2, "strokeJoin": "round"}
    layers.append({"mark": line, "encoding": {"y": y, "strokeDash": dash}})
    layers.append({"mark": _POINT, "encoding": {"y": y}, "transform": [{"filter": "!datum.level"}]})
    if column == "tokens_per_s" and _saturates(panel):
        ring = {"type": "point", "filled": False, "size": 190, "strokeWidth": 2, "opacity": 1}
        layers.append({"mark": ring, "encoding": {"y": y}, "transform": [{"filter": "datum.saturated"}]})
    return _spec(panel, column, layers, {"x": _x(panel)}, height=220)


def _categories(panel: Panel, column: str) -> dict[str, Any]:
    """Values that have no order stand below each other, where their names can be read, and no line joins them."""
    x = _value(column)
    layers: list[dict[str, Any]] = [{"mark": _POINT, "encoding": {"x": x}}]
    if column == "p50_us":
        layers.insert(0, {"mark": {"type": "rule", "opacity": 0.5}, "encoding": {"x": x, "x2": {"field": "p99_us"}}})
    names = panel.points["x"].dropna().drop_duplicates().tolist()
    axis = {"labelLimit": 130, "grid": True}
    y = {"field": "x", "type": "nominal", "title": None, "sort": names, "axis": axis}
    return _spec(panel, column, layers, {"y": y}, height=24 + 18 * len(names))


def _bars(panel: Panel, column: str) -> dict[str, Any]:
    x = _value(column)
    bar = {"type": "bar", "cornerRadiusEnd": 3, "height": {"band": 0.62}}
    layers: list[dict[str, Any]] = [{"mark": bar, "encoding": {"x": x}}]
    if column == "p50_us":
        layers.append(
            {"mark": {"type": "tick", "thickness": 2}, "encoding": {"x": {"field": "p99_us", "type": "quantitative"}}}
        )
    names = [series.name for series in panel.series]
    y = {"field": "series", "type": "nominal", "title": None, "sort": names, "axis": None}
    return _spec(panel, column, layers, {"y": y}, height=24 + 26 * len(names))


def _spec(
    panel: Panel, column: str, layers: list[dict[str, Any]], encoding: dict[str, Any], height: int
) -> dict[str, Any]:
    palette = colours(panel)
    scale = {"domain": list(palette), "range": list(palette.values())}
    return {
        "$schema": f"https://vega.github.io/schema/vega-lite/v{VEGA_LITE}.json",
        "width": "container",
        "height": height,
        "transform": [{"filter": f"datum.{column} != null"}],
        "encoding": {
            **encoding,
            "color": {"field": "series", "type": "nominal", "scale": scale, "legend": None},
            "tooltip": _tooltip(panel, column),
        },
        "layer": layers,
    }


def _x(panel: Panel) -> dict[str, Any]:
    assert panel.x is not None
    values = panel.points["x"].dropna().drop_duplicates().sort_values().tolist()
    kind = {"type": "log", "base": 2} if panel.scale == "log" else {"zero": False}
    # An expression keeps its digits; a plain `format` loses those that Vega finds finer than the ticks (0.25 → 0.3).
    axis = {"values": values, "labelExpr": _PLAIN, "grid": False, "labelOverlap": True}
    scale = {**kind, "nice": False, "padding": 14}
    return {"field": "x", "type": "quantitative", "title": label(panel.x), "axis": axis, "scale": scale}


def _y(panel: Panel, column: str) -> dict[str, Any]:
    y = _value(column)
    if column == "p50_us":
        low, high = panel.points["p50_us"].min(), panel.points["p99_us"].max()
        if low > 0 and high / low >= 8:
            axis = _axis(column) | {"values": _log_ticks(low, high), "labelOverlap": False}
            return y | {"axis": axis, "scale": {"type": "log", "nice": False, "padding": 8}}
    return y


def _value(column: str) -> dict[str, Any]:
    return {"field": column, "type": "quantitative", "title": None, "axis": _axis(column), "scale": {"zero": True}}


def _log_ticks(low: float, high: float) -> list[float]:
    """1, 2 and 5 times powers of ten from `low` to `high`; the powers alone where that would be many."""
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    steps = (1, 2, 5) if high / low < 1e4 else (1,)
    return [step * 10.0**decade for decade in decades for step in steps if low <= step * 10.0**decade <= high]


def _axis(column: str) -> dict[str, Any]:
    # SI prefixes read well on counts and seconds; 500m GB/s would not.
    shown = {"us": _SECONDS, "1/s": _COUNT, "": _PERCENT}
    return {"labelExpr": shown.get(COLUMNS[column].unit, _PLAIN), "tickCount": 5}


def _tooltip(panel: Panel, column: str) -> list[dict[str, Any]]:
    fields: list[dict[str, Any]] = [{"field": "series", "type": "nominal", "title": "series"}]
    if panel.x is not None:
        fields.append({"field": "x", "type": "nominal", "title": label(panel.x)})
    formats = {"us": ",.1f", "1/s": ",.0f", "": ".1%"}
    for name in dict.fromkeys((column, "p50_us", "p99_us", "ci_low_us", "ci_high_us")):
        if panel.points[name].notna().all() or name == column:
            unit = COLUMNS[name].unit
            title = _TITLES.get(name, label(name).removesuffix(" us"))
            title += f" ({unit})" if unit else ""
            fields.append({"field": name, "type": "quantitative", "title": title, "format": formats.get(unit, ".4~g")})
    return fields


_TITLES = {"ece_gbps": "ECE", "busbw_gbps": "bus bandwidth", "tokens_per_s": "tokens", "ci_low_us": "median from",
           "ci_high_us": "median to"}  # fmt: skip
