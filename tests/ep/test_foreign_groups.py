"""Groups that are no MPI communicators."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from ncclep_bench import EpCommunicator, EpConfig
from ncclep_bench.errors import UsageError

RANKS = Path(__file__).with_name("file_group_ranks.py")


@pytest.mark.parametrize("program", ["works", "differs", "lacks_one", "fails"])
def test_processes_that_meet_through_files_are_a_group(program: str, tmp_path: Path):
    command = [sys.executable, str(RANKS), program]
    ranks = [
        subprocess.Popen([*command, str(rank), "3", str(tmp_path)], stderr=subprocess.PIPE, text=True)
        for rank in range(3)
    ]
    try:
        errors = [process.communicate(timeout=240)[1] for process in ranks]
    finally:
        for process in ranks:
            process.kill()

    assert [process.returncode for process in ranks] == [0, 0, 0], "\n".join(errors)


@pytest.mark.parametrize(
    ("group", "words"),
    [
        (SimpleNamespace(rank=0, size=1), "it has no allgather, barrier"),
        (SimpleNamespace(rank=1, size=1, allgather=list, barrier=list), "says rank 1 of size 1"),
        (SimpleNamespace(rank=lambda: 0, size=lambda: 1, allgather=list, barrier=list), "says rank <function"),
        (
            SimpleNamespace(rank=0, size=1, allgather=lambda data: [data, data], barrier=list),
            "returned 2 items of bytes",
        ),
        (SimpleNamespace(rank=0, size=1, allgather=lambda data: ["text"], barrier=list), "returned 1 items of str"),
    ],
    ids=["no-methods", "rank-too-large", "methods", "too-many", "no-bytes"],
)
def test_an_object_that_breaks_the_contract_of_a_group_is_told_how(group: object, words: str):
    with pytest.raises(UsageError) as caught:
        EpCommunicator(group, EpConfig(num_experts=1))

    assert words in str(caught.value)
