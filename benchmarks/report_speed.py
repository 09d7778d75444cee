"""How long a large run takes to read and to render: 1,000 cases with 100,000 samples; exit code 1 above the limit."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from ncclep_bench.model.case import Case
from ncclep_bench.model.measurement import Measurement, RunHeader
from ncclep_bench.results.store import RunWriter

CASES, ITERATIONS, RANKS = 1000, 25, 4
LIMIT_S = 5.0


def write_run(directory: Path) -> None:
    """A run of CASES dispatch cases over batch sizes, with log-normal times as a stand-in for measured ones."""
    rng = np.random.default_rng(0)
    header = RunHeader(started_at="2000-01-01T00:00:00", command=["synthetic"], scenarios=[], environment={})
    with RunWriter(directory, header) as writer:
        for index in range(CASES):
            batch = 1 << (index % 10)
            case = Case(
                collective="dispatch",
                mode="ht",
                layout="flat",
                ranks=RANKS,
                tokens=batch,
                batch_size=batch,
                tokens_per_sequence=1,
                hidden=128 * (1 + index // 10),
                num_experts=8,
                top_k=2,
                routing="uniform",
            )
            writer.append(
                Measurement(
                    case=case,
                    outcome="passed",
                    verified=True,
                    timing="host",
                    samples_us=rng.lognormal(3, 0.2, (ITERATIONS, RANKS)).round(3).tolist(),
                    payload_bytes=1 << 20,
                    algbw_bytes=1 << 18,
                    busbw_factor=0.75,
                    tokens_total=batch * RANKS,
                )
            )


def main() -> None:
    """Time `ncclep-bench report` as a whole process, every format, first with and then without a cold chart bundle."""
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        write_run(run)
        command = [
            str(Path(sys.executable).parent / "ncclep-bench"),
            "report",
            str(run),
            "--format",
            "csv",
            "--format",
            "html",
        ]
        seconds = []
        for _ in range(3):
            start = time.perf_counter()
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
            seconds.append(time.perf_counter() - start)
        size = (run / "report.html").stat().st_size
    print(
        f"{CASES * ITERATIONS * RANKS:,} samples read and rendered in {min(seconds):.1f} s (limit {LIMIT_S:g} s), "
        f"report.html {size / 1e6:.2f} MB"
    )
    sys.exit(min(seconds) > LIMIT_S)


if __name__ == "__main__":
    main()
