from __future__ import annotations

from pathlib import Path

import pytest

from ncclep_bench.registry import FORMATS
from ncclep_bench.results.frames import load_run

REFERENCE = Path(__file__).parents[2] / "reports" / "reference"
RUNS = sorted(file.parent for file in REFERENCE.glob("**/run.jsonl"))


def test_there_is_a_recorded_run_to_hold_the_reports_to() -> None:
    assert RUNS


@pytest.mark.parametrize("run", RUNS, ids=lambda run: str(run.relative_to(REFERENCE)))
def test_a_recorded_run_renders_to_the_summary_that_lies_beside_it(run: Path) -> None:
    frames = load_run(run)
    assert [warning for warning in frames.warnings if "was not finished" not in warning] == []
    assert FORMATS.get("csv")(frames).decode() == (run / "summary.csv").read_text()


@pytest.mark.parametrize("run", RUNS, ids=lambda run: str(run.relative_to(REFERENCE)))
def test_every_row_of_a_recorded_run_is_verified_or_says_why_not(run: Path) -> None:
    cases = load_run(run).cases
    passed = cases["outcome"] == "passed"
    assert passed.any()
    assert cases.loc[passed, "verified"].all()
    assert cases.loc[~passed, "reason"].str.len().gt(0).all()
