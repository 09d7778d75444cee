from __future__ import annotations

import json
from pathlib import Path

import pytest

RANKS = Path(__file__).with_name("ranks.py")

pytestmark = pytest.mark.mpi


def words_of_survivors(folder: Path) -> dict[int, tuple[str, list[int], str]]:
    return {int(path.stem): tuple(json.loads(path.read_text())) for path in folder.glob("*.json")}


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_a_thousand_rounds_show_every_rank_what_the_others_wrote_before_the_barrier(mpi_run, ranks: int):
    done = mpi_run(ranks, "-m", "mpi4py", RANKS, "barrier_rounds")

    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_rank_can_wait_for_one_other_alone(mpi_run, ranks: int):
    done = mpi_run(ranks, "-m", "mpi4py", RANKS, "one_waits_for_another")

    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("program", "state", "what"),
    [
        ("stopped", "stopped", "did not reach dispatch of case 7 within 1.0 s"),
        ("never_calls", "sleeping", "did not reach dispatch of case 7 within 1.0 s"),
        # The deadline is 30 s, the test's own patience 20 s: the death itself was noticed.
        ("killed", "zombie", "ended before dispatch of case 7"),
    ],
)
def test_a_rank_that_does_not_come_is_named_with_what_it_is_doing(mpi_run, tmp_path, program, state, what):
    done = mpi_run(3, "-m", "mpi4py", RANKS, program, tmp_path, auto_cleanup=False, deadline_s=240)

    assert done.returncode != 0
    words = words_of_survivors(tmp_path)
    assert sorted(words) == [0, 2]
    for kind, ranks, message in words.values():
        assert (kind, ranks) == ("RankError", [1])
        assert message.startswith("rank 1 (pid ")
        assert f", {state}) {what}" in message


def test_a_rank_that_gives_up_tells_the_others_why(mpi_run, tmp_path):
    mpi_run(3, "-m", "mpi4py", RANKS, "give_up", tmp_path, deadline_s=240)

    words = words_of_survivors(tmp_path)
    assert sorted(words) == [0, 2]
    for kind, ranks, message in words.values():
        assert (kind, ranks) == ("PeerAbortedError", [1])
        assert message.endswith("gave up: expert 7 is missing: größer")
