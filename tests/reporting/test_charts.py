"""Every chart is compiled by the very library that draws it, and the page is opened in a browser."""

from __future__ import annotations

import dataclasses
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import vl_convert

from ncclep_bench.model.case import Case
from ncclep_bench.model.measurement import Measurement, RunHeader
from ncclep_bench.registry import FORMATS
from ncclep_bench.reporting.charts import VEGA_LITE, charts, colours
from ncclep_bench.reporting.html import _POINT_FIELDS, _points
from ncclep_bench.reporting.panels import Panel, panels
from ncclep_bench.results.frames import RunFrames, load_run
from ncclep_bench.results.store import RunWriter


def swept(directory: Path, axis: str | None, values: list[Any]) -> list[Panel]:
    with RunWriter(directory, RunHeader(started_at="now", command=[], scenarios=[], environment={})) as writer:
        for index, value in enumerate(values):
            axes: dict[str, Any] = {
                "scenario": "s",
                "collective": "dispatch",
                "ranks": 2,
                "num_experts": 4,
                "tokens": 8,
            }
            writer.append(
                Measurement(
                    case=Case(**(axes | ({axis: value} if axis else {}))),
                    outcome="passed",
                    verified=True,
                    samples_us=[[1.0 + index, 2.0]] * 8,
                    tokens_total=16,
                )
            )
    return panels(load_run(directory))


def svgs(panel: Panel) -> list[str]:
    values = [dict(zip(_POINT_FIELDS, row, strict=True)) for row in _points([panel])[0]]
    return [
        vl_convert.vegalite_to_svg({**chart.spec, "width": 300, "data": {"values": values}}, vl_version=VEGA_LITE)
        for chart in charts(panel)
    ]


def test_every_chart_of_the_golden_run_draws_its_series_in_their_colours(golden: RunFrames) -> None:
    for panel in panels(golden):
        pictures = svgs(panel)
        assert [chart.title for chart in charts(panel)][::2] == ["Time", "Time saved (TAG)"]
        for series in panel.series:
            assert colours(panel)[series.name] in pictures[0]
            assert (colours(panel)[series.name] in pictures[2]) is not series.traditional


def test_saturation_is_ringed_in_the_throughput_chart(golden: RunFrames) -> None:
    panel = panels(golden)[0]
    rings = re.findall(r'aria-roledescription="point"[^>]* stroke="#', svgs(panel)[1])
    assert len(panel.saturation) == 4
    assert len(rings) == 4


@pytest.mark.parametrize(
    ("axis", "values", "scale"),
    [
        ("batch_size", [8, 64, 512], "log"),
        ("tokens", [0, 8, 64], "linear"),
        ("active_share", [0.25, 0.5, 1.0], "linear"),
        ("num_experts", [8, 16, 64], "log"),
        ("routing_param", [0.0, 0.5, 1.5], "linear"),
        ("routing_param", ["mixtral/c4/0", "olmoe/c4/0"], "ordinal"),
        ("mr_cache_size", [16, 512], "log"),
        (None, [None], "none"),
    ],
)
def test_a_chart_runs_over_whichever_axis_was_swept(
    tmp_path: Path, axis: str | None, values: list[Any], scale: str
) -> None:
    (panel,) = swept(tmp_path, axis, values)
    assert (panel.x, panel.scale) == (axis, scale)
    for picture in svgs(panel):
        assert "nan" not in picture.lower()
        assert picture.count("<path") > len(values)


def test_an_axis_shows_the_values_that_were_swept_not_rounded_ones(tmp_path: Path) -> None:
    (panel,) = swept(tmp_path, "active_share", [0.25, 1.0])
    assert all(">0.25</text>" in picture for picture in svgs(panel))


def test_rates_below_one_are_plain_numbers(tmp_path: Path) -> None:
    (panel,) = swept(tmp_path, "tokens", [8, 16])
    low = dataclasses.replace(panel, points=panel.points.assign(ece_gbps=0.5))
    assert ">0.5</text>" in svgs(low)[1]
    assert "500m" not in svgs(low)[1]


@pytest.mark.browser
def test_the_page_draws_every_chart_offline_under_its_policy(golden: RunFrames, tmp_path: Path) -> None:
    page = tmp_path / "report.html"
    page.write_bytes(FORMATS.get("html")(golden))
    wanted = sum(len(charts(panel)) for panel in panels(golden))
    done = subprocess.run(
        ["chromium", "--headless=new", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'profile'}",
         "--enable-logging=stderr", "--virtual-time-budget=20000", "--dump-dom", page.as_uri()],
        capture_output=True, text=True, timeout=240, check=True,
    )  # fmt: skip
    assert done.stdout.count('<svg xmlns="http://www.w3.org/2000/svg"') == wanted
    assert "could not be drawn" not in re.sub(r"<script.*?</script>", "", done.stdout, flags=re.S)
    assert "CONSOLE" not in done.stderr
