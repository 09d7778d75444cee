"""How long the command lines take to start, in bare starts of Python; exit code 1 above the limit."""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from pathlib import Path

ROUNDS = 15
LIMIT = 12.0
"""`--help` may cost this many times `python -c pass`."""


def start_us(command: list[str]) -> float:
    begin = time.perf_counter()
    subprocess.run(command, stdout=subprocess.DEVNULL, check=True)
    return (time.perf_counter() - begin) * 1e6


def main() -> None:
    """Interleave bare starts with starts of each command line and print the ratios of their medians."""
    beside_python = Path(sys.executable).parent
    programs = ["ncclep-bench", "ncclep-doctor"]
    commands = [[sys.executable, "-c", "pass"], *([str(beside_python / name), "--help"] for name in programs)]
    for command in commands:
        start_us(command)  # the first start compiles and fills the page cache
    rounds = [[start_us(command) for command in commands] for _ in range(ROUNDS)]
    bare_us, *program_us = (statistics.median(times) for times in zip(*rounds, strict=True))
    print(f"python -c pass: {bare_us / 1e3:.1f} ms, median of {ROUNDS}")
    for name, elapsed_us in zip(programs, program_us, strict=True):
        print(f"{name} --help: {elapsed_us / 1e3:.1f} ms, {elapsed_us / bare_us:.1f} bare starts (limit {LIMIT:g})")
    sys.exit(max(program_us) > LIMIT * bare_us)


if __name__ == "__main__":
    main()
