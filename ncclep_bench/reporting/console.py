"""The run as compact text tables, one per scenario and collective, in the manner of nccl-tests."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from io import StringIO
from typing import TYPE_CHECKING, Any

from ncclep_bench.model.measurement import COLUMNS
from ncclep_bench.reporting.contract import Format
from ncclep_bench.reporting.tables import (
    IDENTITY,
    cautions,
    claim_texts,
    constant,
    described,
    family_order,
    outcome_counts,
    preflight_texts,
    show,
    tells_apart,
    unmeasured,
    varying,
)
from ncclep_bench.results.claims import claims
from ncclep_bench.results.frames import RunFrames

if TYPE_CHECKING:
    import pandas as pd
    from rich.console import Console, RenderableType
    from rich.table import Table
    from rich.text import Text

_FIGURES = ("p50_us", "p99_us", "update_us", "cold_us", "predicted_us", "tokens_per_s", "busbw_gbps", "ece_gbps",
            "wire_bytes", "tag", "saved_share", "speed_of_light", "gpu_util", "sm_util", "dram_gbps", "nvlink_tx_gbps",
            "nvlink_rx_gbps", "overlap_comm", "overlap_gemm", "times_cuda")  # fmt: skip
_STYLES = {"passed": "green", "failed": "bold red", "error": "bold red", "waived": "yellow"}
_DROPPED_FIRST = ("nvlink_rx_gbps", "cold_us", "update_us", "wire_bytes", "busbw_gbps", "tokens_per_s", "saved_share",
                  "p99_us")  # fmt: skip
"""Figures that a narrow terminal goes without, in this order; CSV and page have them."""

_WIDTH = 160
_MOST_CASES = 10
"""Cases listed under one reason; the page lists them all."""


def render(frames: RunFrames) -> bytes:
    """The tables as plain UTF-8 text, without colour."""
    from rich.console import Console

    out = StringIO()
    print_to(Console(file=out, width=_WIDTH, color_system=None, force_terminal=False, legacy_windows=False), frames)
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines()).encode() + b"\n"


def print_to(console: Console, frames: RunFrames) -> None:
    """Print the tables on a rich console, which knows its width and whether colour is wanted (NO_COLOR)."""
    for part in _parts(console, frames):
        console.print(part, crop=False)


def _parts(console: Console, frames: RunFrames) -> Iterator[RenderableType]:
    from rich.text import Text

    cases = frames.cases
    for scenario, rows in cases[cases["outcome"] == "passed"].groupby("scenario", dropna=False, sort=False):
        for collective in family_order(rows["collective"]):
            yield _fitting_table(
                console, show("scenario", scenario), collective, rows[rows["collective"] == collective]
            )
            yield Text("")
    found = claims(frames)
    if found:
        yield _claims_table([claim_texts(claim) for claim in found])
        yield Text("")
    for group in unmeasured(frames):
        count = len(group.cases)
        yield Text.assemble(
            (f"{group.outcome} ", _STYLES[group.outcome]),
            f"{group.scenario} {group.collective}".strip(),
            f" ({count} cases): " if count > 1 else ": ",
            group.reason or "no reason recorded",
        )
        for case in group.cases[:_MOST_CASES]:
            yield Text(f"    {case}", style="dim")
        if count > _MOST_CASES:
            yield Text(f"    and {count - _MOST_CASES} more", style="dim")
    if cases["p50_us"].notna().any():
        legends = {"speed_of_light": _FLOOR_LEGEND, "gpu_util": _USE_LEGEND, "times_cuda": _PEERS_LEGEND}
        said = [legend for name, legend in legends.items() if cases[name].notna().any()]
        yield Text("".join([_LEGEND, *said]), style="dim")
    for preflight in frames.preflights:
        for line in preflight_texts(preflight):
            yield Text(line, style="yellow" if line.startswith(" ") else "dim")
    for caution in cautions(frames):
        yield Text(caution, style="yellow")
    yield _closing_line(cases)


_LEGEND = (
    "TAG: share of the traditional partner's time that EP saves (dispatch, dispatch_combine: update + p50). "
    "saved: share of its bytes. ci ±: half the 95 % confidence interval of p50. n: timed iterations. "
    "ok: rows verified."
)
_FLOOR_LEGEND = " of floor: the least time that links allow (flag latency, peer copies: this run's) over p50."
_USE_LEGEND = " GPU, SM, dram, link out and in: looped apart from the times; a kernel that spins counts as used."
_PEERS_LEGEND = " × cuda: p50 over that of the cuda backend for the same case and timing, both without update."


def _fitting_table(console: Console, scenario: str, collective: str, rows: pd.DataFrame) -> Table:
    """The table with as many figures as fit; never one with cells cut off."""
    figures = [name for name in _FIGURES if rows[name].notna().any()]
    table = _table(scenario, collective, rows, figures)
    for name in _DROPPED_FIRST:
        if _natural_width(console, table) <= console.width:
            return table
        figures = [figure for figure in figures if figure != name]
        table = _table(scenario, collective, rows, figures)
    table.width = _natural_width(console, table)
    return table


def _natural_width(console: Console, table: Table) -> int:
    return table.__rich_measure__(console, console.options.update(max_width=10_000)).maximum


def _table(scenario: str, collective: str, rows: pd.DataFrame, figures: Sequence[str]) -> Table:
    from rich import box
    from rich.table import Table
    from rich.text import Text

    identity = [name for name in IDENTITY if tells_apart(rows, name)]
    axes = varying(rows, identity)
    title = Text(collective, style="bold")
    title.append(f"  {scenario}" if scenario else "", style="cyan")
    same = constant(rows, ("backend", "algorithm", "timing", "oversubscribed", *identity, "wire_source"))
    same = {name: text for name, text in same.items() if (name, text) not in _UNREMARKABLE}
    title.append(f"\n{described(same)}", style="dim")
    table = Table(box=box.SIMPLE_HEAD, title=title, title_justify="left", title_style="", pad_edge=False)
    for name in axes:
        table.add_column(name.replace("_", "\n"), justify="left" if rows[name].dtype == "string" else "right")
    for name in figures:
        table.add_column(_heading(name), justify="right", no_wrap=True)
    table.add_column("ci\n±", justify="right", no_wrap=True)
    table.add_column("n", justify="right")
    table.add_column("ok", justify="center")
    for _, row in rows.iterrows():
        table.add_row(
            *(Text(show(name, row[name])) for name in (*axes, *figures)),
            _ci_text(row),
            show("samples", row["samples"]),
            _check_mark(row["verified"]),
        )
    return table


_UNREMARKABLE = {("oversubscribed", "no"), ("placement", "block"), ("topology", "off"), ("repeat", "0"), ("seed", "0"),
                 ("alignment", "1"), ("masked_share", "0.0"), ("empty_ranks", "0"), ("tokens_per_sequence", "1"),
                 ("transport", "auto"), ("cache", "warm")}  # fmt: skip
"""Values that go without saying in a heading; CSV and page have them."""


def _heading(name: str) -> str:
    unit = COLUMNS[name].unit
    title = name.removesuffix("_us").removesuffix("_gbps").removesuffix("_bytes").replace("_per_s", "")
    title = {
        "ece": "ECE",
        "tag": "TAG",
        "saved_share": "saved",
        "times_cuda": "× cuda",
        "speed_of_light": "of floor",
        "gpu_util": "GPU",
        "sm_util": "SM",
        "overlap_comm": "beside\nGEMM ×",
        "overlap_gemm": "GEMM\nbeside ×",
        "nvlink_tx": "link out",
        "nvlink_rx": "link in",
    }.get(title, title)
    return f"{title}\n{unit}" if unit and unit != "B" else title


def _ci_text(row: pd.Series[Any]) -> str:
    import pandas as pd

    low, high, median = row["ci_low_us"], row["ci_high_us"], row["p50_us"]
    return "" if pd.isna(low) or pd.isna(median) else f"{(high - low) / 2 / median:.1%}"


def _check_mark(verified: Any) -> Text:
    import pandas as pd
    from rich.text import Text

    if pd.isna(verified):
        return Text("")
    return Text("✓", style="green") if verified else Text("✗", style="bold red")


def _claims_table(cells: list[dict[str, str]]) -> RenderableType:
    from rich import box
    from rich.table import Table
    from rich.text import Text

    title = Text.assemble(("reference claims", "bold"), ("  published elsewhere, not measured here", "dim"))
    table = Table(box=box.SIMPLE_HEAD, title=title, title_justify="left", title_style="", pad_edge=False)
    for name in cells[0]:
        table.add_column(name, justify="right" if name in ("claimed", "measured") else "left")
    for row in cells:
        table.add_row(*(Text(text) for text in row.values()))
    return table


def _closing_line(cases: pd.DataFrame) -> Text:
    from rich.text import Text

    counts = outcome_counts(cases)
    line = Text(f"{len(cases)} cases: " if len(cases) != 1 else "1 case: ", style="bold")
    said = [(f"{count} {outcome}", _STYLES[outcome]) for outcome, count in counts.items() if count] or [("none", "")]
    for index, part in enumerate(said):
        line.append(", " if index else "").append(*part)
    return line


CONSOLE = Format(render)
