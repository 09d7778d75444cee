"""Every example runs, and checks its own result."""

from __future__ import annotations

from pathlib import Path

import pytest

EXAMPLES = sorted((Path(__file__).parents[1] / "examples").glob("*.py"))


@pytest.mark.mpi
@pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: example.stem)
def test_an_example_runs_on_two_ranks_and_says_what_it_did(mpi_run, example: Path):
    done = mpi_run(2, "-m", "mpi4py", example)

    assert (done.returncode, len(done.stdout.splitlines())) == (0, 1), done.stderr
