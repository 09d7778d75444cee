"""summary.csv: every declared column, one row per case, missing values empty."""

from __future__ import annotations

from ncclep_bench.reporting.contract import Format
from ncclep_bench.results.frames import RunFrames


def render(frames: RunFrames) -> bytes:
    """The cases as UTF-8 CSV with full precision; a first column `run` where there are several runs."""
    return frames.cases.to_csv(index=False, lineterminator="\n").encode()


CSV = Format(render, file="summary.csv")
