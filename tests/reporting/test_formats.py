from __future__ import annotations

import csv
import dataclasses
import io
import re
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from ncclep_bench.model.case import Case
from ncclep_bench.model.measurement import COLUMNS, Measurement, RunHeader
from ncclep_bench.registry import FORMATS
from ncclep_bench.reporting.console import print_to
from ncclep_bench.reporting.html import _bundle
from ncclep_bench.reporting.panels import MOST_SERIES, panels
from ncclep_bench.results.frames import RunFrames, load_run
from ncclep_bench.results.store import RunWriter

HOSTILE = "</script><img src=x onerror=alert(1)>[red]{{ 7*7 }}"


def frames_of(directory: Path, *records: Measurement, **header: Any) -> RunFrames:
    fields: dict[str, Any] = {"started_at": "now", "command": [], "scenarios": [], "environment": {}}
    with RunWriter(directory, RunHeader(**(fields | header))) as writer:
        for record in records:
            writer.append(record)
    return load_run(directory)


def hostile(directory: Path) -> RunFrames:
    case = Case(scenario=HOSTILE, collective="dispatch", ranks=2, num_experts=4, tokens=8, routing_param=HOSTILE)
    broken = Case(scenario=HOSTILE, collective="combine", ranks=2, num_experts=4)
    claim = {"where": {"tokens": 8}, "column": "p50_us", "value": 1.0, "source": HOSTILE, "note": HOSTILE}
    return frames_of(
        directory,
        Measurement(case=case, outcome="passed", verified=True, samples_us=[[1.0, 2.0]] * 10, algorithm=HOSTILE),
        Measurement(case=broken, outcome="error", reason=HOSTILE),
        command=[HOSTILE],
        scenarios=[{"name": HOSTILE, "description": HOSTILE, "reference": [claim]}],
        environment={HOSTILE: HOSTILE},
    )


@pytest.mark.parametrize("name", list(FORMATS))
def test_every_format_renders_the_golden_run_the_same_each_time_and_never_prints_nan(
    name: str, golden: RunFrames
) -> None:
    render = FORMATS.get(name)
    page = render(golden)
    assert render(golden) == page
    text = page.decode()
    written = re.sub(r"<script>.*?</script>", "", text, flags=re.S)
    assert not re.search(r"\b(nan|<NA>|None|NaT)\b", written, re.I if name != "html" else 0)
    assert "padded_all_to_all" in text


@pytest.mark.parametrize("name", list(FORMATS))
def test_every_format_renders_a_run_that_measured_nothing(name: str, tmp_path: Path) -> None:
    assert FORMATS.get(name)(frames_of(tmp_path))


@pytest.mark.parametrize("name", list(FORMATS))
def test_every_format_renders_a_run_in_which_no_case_passed(name: str, tmp_path: Path) -> None:
    case = Case(scenario="s", collective="dispatch", ranks=2, num_experts=4)
    text = FORMATS.get(name)(frames_of(tmp_path, Measurement(case=case, outcome="waived", reason="no room"))).decode()
    assert "no room" in text


@pytest.mark.parametrize("name", list(FORMATS))
def test_every_format_renders_several_runs(name: str, golden_run: Path, tmp_path: Path) -> None:
    case = Case(scenario="quick", collective="dispatch", ranks=2, num_experts=4, tokens=8)
    frames_of(tmp_path / "second", Measurement(case=case, outcome="passed", verified=True, samples_us=[[1.0, 2.0]]))
    assert "second" in FORMATS.get(name)(load_run([golden_run, tmp_path / "second"])).decode()


def test_csv_has_every_column_one_row_per_case_and_nothing_for_missing_values(golden: RunFrames) -> None:
    rows = list(csv.DictReader(io.StringIO(FORMATS.get("csv")(golden).decode())))
    assert list(rows[0]) == list(COLUMNS)
    assert len(rows) == len(golden.cases)
    by_outcome = {row["outcome"]: row for row in rows}
    assert by_outcome["failed"]["verified"] == "False"
    assert (by_outcome["waived"]["verified"], by_outcome["waived"]["p50_us"]) == ("", "")
    assert float(rows[0]["p50_us"]) == golden.cases["p50_us"][0]


def test_console_lists_every_collective_every_reason_and_the_totals(golden: RunFrames) -> None:
    text = FORMATS.get("console")(golden).decode()
    for collective in golden.cases["collective"].unique():
        assert re.search(rf"^{collective}  (quick|experts)$", text, re.M), collective
    for reason in golden.cases["reason"].dropna():
        assert reason in text
    assert "inconsistent:" in text
    assert "claim, unverified" in text
    assert text.splitlines()[-1] == "99 cases: 96 passed, 1 failed, 1 error, 1 waived"


def test_console_bytes_carry_no_colour_and_a_terminal_gets_it_unless_no_color_is_set(
    golden: RunFrames, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert b"\x1b" not in FORMATS.get("console")(golden)
    monkeypatch.setenv("TERM", "xterm-256color")
    for name in ("NO_COLOR", "FORCE_COLOR"):
        monkeypatch.delenv(name, raising=False)
    out = io.StringIO()
    print_to(Console(file=out, force_terminal=True, width=120), golden)
    assert "\x1b[32m" in out.getvalue()
    monkeypatch.setenv("NO_COLOR", "1")
    plain = io.StringIO()
    print_to(Console(file=plain, force_terminal=True, width=120), golden)
    assert "\x1b[32m" not in plain.getvalue()


@pytest.mark.parametrize("width", [60, 80, 120, 240])
def test_console_drops_figures_rather_than_cutting_cells_off_on_a_narrow_terminal(
    golden: RunFrames, width: int
) -> None:
    out = io.StringIO()
    print_to(Console(file=out, width=width), golden)
    tables = out.getvalue().partition("reference claims")[0]
    assert "…" not in tables
    assert "expert_major" in tables
    assert ("cold" in tables) is (width > 160)
    if width >= 80:
        assert max(map(len, tables.splitlines())) <= width


def test_console_takes_markup_in_names_as_text(tmp_path: Path) -> None:
    assert "[red]" in FORMATS.get("console")(hostile(tmp_path)).decode()


def test_html_escapes_whatever_a_run_calls_itself(tmp_path: Path) -> None:
    page = FORMATS.get("html")(hostile(tmp_path)).decode().replace(_bundle(), "")
    assert "<img" not in page
    assert "49" not in re.findall(r"<h1>(.*?)</h1>", page)[0]
    assert page.count("&lt;/script&gt;&lt;img src=x") >= 6
    assert page.count("<script") == page.count("</script>")


def test_html_names_every_case_without_a_time_with_its_reason_and_every_claim_with_its_note(golden: RunFrames) -> None:
    page = FORMATS.get("html")(golden).decode()
    for text in (*golden.cases["reason"].dropna(), "claim, unverified", "inconsistent: 12.4 to 4.7 ms"):
        assert text in page
    assert "node-a" in page
    assert "Throughput saturates" in page
    body = page[page.index('<table id="all">') :]
    assert body[: body.index("</table>")].count("<tr>") == 1 + len(golden.cases)


def test_html_is_small_and_asks_nothing_of_the_network(golden: RunFrames) -> None:
    page = FORMATS.get("html")(golden).decode()
    assert len(page) < 3_000_000
    assert "default-src 'none'" in page
    outside_the_bundle = re.sub(r"<script>.*?</script>", "", page, flags=re.S)
    assert not re.search(r"(src|href)=[\"']?(https?:)?//", outside_the_bundle)


def test_the_bundle_is_made_once_and_its_cache_may_be_missing(
    golden: RunFrames, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    page = FORMATS.get("html")(golden)
    (cached,) = (tmp_path / "cache" / "ncclep-bench").iterdir()
    assert cached.read_text(encoding="utf-8") in page.decode()
    cached.write_text("/* from the cache */", encoding="utf-8")
    assert b"/* from the cache */" in FORMATS.get("html")(golden)
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert FORMATS.get("html")(golden) == page


def test_a_panel_holds_one_collective_with_its_partner_over_the_axis_with_most_values(golden: RunFrames) -> None:
    found = {panel.family: panel for panel in panels(golden)}
    assert list(found) == [
        "dispatch", "combine", "dispatch_combine", "all_gather_experts", "reduce_scatter_expert_grads",
    ]  # fmt: skip
    assert (found["dispatch"].x, found["dispatch"].scale) == ("batch_size", "log")
    assert [series.name for series in found["dispatch"].series] == [
        "ht · flat", "ht · expert_major", "ll · expert_major", "padded_all_to_all",
    ]  # fmt: skip
    assert found["all_gather_experts"].x == "num_experts"
    assert [series.name for series in found["all_gather_experts"].series if series.traditional] == ["dense_all_gather"]


def test_a_partner_that_does_not_know_the_swept_axis_is_a_level_line_across_it(tmp_path: Path) -> None:
    axes: dict[str, Any] = {"scenario": "s", "ranks": 2, "num_experts": 4, "expert_elements": 8}
    fields: dict[str, Any] = {"outcome": "passed", "verified": True}
    gathers = [
        Measurement(case=Case(collective="all_gather_experts", active_share=share, **axes),
                    samples_us=[[share, share]], partner="dense_all_gather", **fields)
        for share in (0.25, 0.5, 1.0)
    ]  # fmt: skip
    dense = Measurement(case=Case(collective="dense_all_gather", **axes), samples_us=[[3.0, 3.0]], **fields)
    (panel,) = panels(frames_of(tmp_path, *gathers, dense))
    level = panel.points[panel.points["series"] == "dense_all_gather"]
    assert panel.x == "active_share"
    assert level["x"].tolist() == [0.25, 1.0]
    assert level["p50_us"].tolist() == [3.0, 3.0]


def test_many_combinations_are_split_into_panels_by_shape_not_by_mode_or_layout(tmp_path: Path) -> None:
    records = [
        Measurement(
            case=Case(scenario="s", collective="dispatch", mode=mode, layout="flat", ranks=2, num_experts=4,
                      tokens=tokens, hidden=hidden),
            outcome="passed", verified=True, samples_us=[[1.0, 2.0]],
        )
        for mode in ("ll", "ht")
        for hidden in (1, 2, 3, 4)
        for tokens in (8, 16, 32, 64, 128)
    ]  # fmt: skip
    found = panels(frames_of(tmp_path, *records))
    assert [panel.title for panel in found] == [f"dispatch · hidden {hidden}" for hidden in (1, 2, 3, 4)]
    assert all(len(panel.series) == 2 <= MOST_SERIES for panel in found)


def test_console_and_page_say_that_ranks_shared_cores_and_what_tag_counts(golden: RunFrames) -> None:
    text, page = FORMATS.get("console")(golden).decode(), FORMATS.get("html")(golden).decode()

    assert "timed cases had more ranks than cores" in text
    assert "timed cases had more ranks than cores" in page
    assert "update + p50" in text
    alone = dataclasses.replace(golden, cases=golden.cases.assign(oversubscribed=False))
    assert "more ranks than cores" not in FORMATS.get("console")(alone).decode()


def test_console_and_page_say_where_links_saw_other_bytes_than_kernels_counted(golden: RunFrames) -> None:
    cases = golden.cases
    counted = (cases["wire_bytes"] + cases["control_bytes"]).astype("Float64")
    seen = dataclasses.replace(golden, cases=cases.assign(link_bytes=counted * 1.01))
    assert "links' counters" not in FORMATS.get("console")(seen).decode()

    large = int(((counted >= 1 << 20) & (cases["wire_source"] == "counted")).sum())
    assert large > 0
    off = dataclasses.replace(golden, cases=cases.assign(link_bytes=counted * 1.03))
    for name in ("console", "html"):
        assert f"in {large} cases the links" in FORMATS.get(name)(off).decode()


def test_the_table_of_all_cases_has_no_column_in_which_all_cases_agree_or_that_repeats_tokens(
    golden: RunFrames,
) -> None:
    rows = golden.cases.assign(batch_size=golden.cases["tokens"])

    page = FORMATS.get("html")(dataclasses.replace(golden, cases=rows)).decode()
    heads = re.findall(r"<button type=\"button\">([a-z0-9 ]+)", page.partition('id="cases"')[2])

    assert {"collective", "mode", "tokens", "p50"} <= set(heads)
    assert {"hidden", "top k", "batch size"} & set(heads) == set()
    assert re.search(r"hidden</span> <b>1024<", page)


def test_a_sweep_that_does_not_saturate_says_how_far_it_went(tmp_path: Path) -> None:
    sizes = (8, 16, 32)
    records = [
        Measurement(
            case=Case(scenario="s", collective="dispatch", ranks=2, num_experts=4, tokens=tokens),
            outcome="passed", verified=True, samples_us=[[100.0, 100.0]] * 8, tokens_total=2 * tokens,
        )
        for tokens in sizes
    ]  # fmt: skip

    (panel,) = panels(frames_of(tmp_path, *records))

    assert panel.saturation == ("dispatch: not up to tokens 32",)


def test_utilisation_saturates_apart_from_throughput(tmp_path: Path) -> None:
    used = {8: (0.5, 40.0), 16: (0.9, 20.0), 32: (0.9, 12.0), 64: (0.9, 10.0)}
    records = [
        Measurement(
            case=Case(scenario="s", collective="dispatch", ranks=2, num_experts=4, tokens=tokens),
            outcome="passed", verified=True, samples_us=[[us * tokens] * 2] * 8, tokens_total=2 * tokens,
            counters={"gpu_util": 1.0, "sm_util": share},
        )
        for tokens, (share, us) in used.items()
    ]  # fmt: skip
    frames = frames_of(tmp_path, *records)

    (panel,) = panels(frames)

    assert panel.saturation == ("dispatch: not up to tokens 64",)
    assert panel.utilisation == ("dispatch, gpu util: at tokens 8", "dispatch, sm util: at tokens 16")
    page, text = (FORMATS.get(name)(frames).decode() for name in ("html", "console"))
    assert "dispatch, sm util: at tokens 16" in page
    assert "a kernel that spins counts as used" in page
    assert "a kernel that spins counts as used" in text


def test_texts_of_a_run_cannot_drive_the_terminal_that_shows_it(tmp_path: Path) -> None:
    escape = "\x1b]0;title\x07\x1b[2J\u202e"
    claim = {"where": {"tokens": 8}, "column": "p50_us", "value": 1.0, "source": escape, "note": escape}
    passed = Case(scenario=escape, collective="dispatch", ranks=2, num_experts=4, tokens=8, routing_param=escape)
    broken = Case(scenario=escape, collective="combine", ranks=2, num_experts=4, placement=escape)
    frames = frames_of(
        tmp_path,
        Measurement(case=passed, outcome="passed", verified=True, samples_us=[[1.0, 2.0]] * 10, algorithm=escape),
        Measurement(case=broken, outcome="error", reason=escape),
        scenarios=[{"name": escape, "reference": [claim]}],
    )
    shown = FORMATS.get("console")(frames).decode()
    terminal = Console(file=io.StringIO(), width=160, color_system=None, force_terminal=True)
    print_to(terminal, frames)
    for text in (shown, terminal.file.getvalue()):
        assert not set(escape) & set(text) & set("\x1b\x07\u202e")
        assert r"\x1b]0;title\x07" in text
