from __future__ import annotations

import json
from pathlib import Path

import pytest

from ncclep_bench.errors import UsageError
from ncclep_bench.runtime.world import SelfGroup, environment_rank, in_mpi_environment, wrap

RANKS = Path(__file__).with_name("ranks.py")
LAUNCHER_VARIABLES = (
    "PMI_RANK",
    "PMIX_RANK",
    "OMPI_COMM_WORLD_RANK",
    "MPI_LOCALRANKID",
    "MV2_COMM_WORLD_RANK",
    "SLURM_PROCID",
    "SLURM_STEP_ID",
)


@pytest.mark.mpi
@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("program", ["groups", "vectors", "channels_again_and_again"])
def test_real_ranks_exchange(mpi_run, ranks: int, program: str):
    done = mpi_run(ranks, "-m", "mpi4py", RANKS, program)

    assert done.returncode == 0, done.stderr


@pytest.mark.mpi
def test_more_groups_than_mpi_has_communicators_come_and_go(mpi_run):
    done = mpi_run(2, "-m", "mpi4py", RANKS, "many_groups")

    assert done.returncode == 0, done.stderr


@pytest.mark.mpi
def test_an_abort_ends_all_ranks_and_leaves_nothing_of_mpi_in_shared_memory(mpi_run, tmp_path):
    done = mpi_run(3, "-m", "mpi4py", RANKS, "abort_at_once", tmp_path, deadline_s=240)

    assert done.returncode == 5
    segments = [segment for path in tmp_path.glob("*.json") for segment in json.loads(path.read_text())]
    assert len(list(tmp_path.glob("*.json"))) == 3
    assert [segment for segment in segments if Path(segment).exists()] == []


OPERATIONS = {
    "start": "the start of the group",
    "allgather": "agreement on the configuration",
    "barrier": "barrier of case 3",
    "channels": "dispatch across hosts",
}


@pytest.mark.mpi
@pytest.mark.parametrize("meeting", OPERATIONS)
@pytest.mark.parametrize("how", ["stopped", "killed", "absent"])
def test_every_survivor_names_the_rank_that_is_missing(mpi_run, tmp_path, how: str, meeting: str):
    program = f"{how}_before_{meeting}"
    done = mpi_run(3, "-m", "mpi4py", RANKS, program, tmp_path, auto_cleanup=False, deadline_s=240)

    assert done.returncode != 0
    words = {path.stem: json.loads(path.read_text()) for path in tmp_path.glob("*.json")}
    assert sorted(words) == ["0", "2"]
    for _, ranks, message in words.values():
        assert ranks == [1]
        assert message.startswith("rank 1 ")
        assert f"{OPERATIONS[meeting]} within 1.0 s" in message


@pytest.fixture
def no_launcher(monkeypatch):
    for variable in LAUNCHER_VARIABLES:
        monkeypatch.delenv(variable, raising=False)


@pytest.mark.parametrize(
    ("environment", "rank"),
    [
        ({}, None),
        ({"PMI_RANK": "3"}, 3),
        ({"PMIX_RANK": "0"}, 0),
        ({"OMPI_COMM_WORLD_RANK": "5"}, 5),
        ({"SLURM_PROCID": "2", "SLURM_STEP_ID": "0"}, 2),
        ({"SLURM_PROCID": "0"}, None),
        ({"SLURM_PROCID": "0", "SLURM_STEP_ID": "4294967291"}, None),
        ({"SLURM_PROCID": "0", "SLURM_STEP_ID": "4294967290"}, None),
        ({"PMI_RANK": ""}, None),
    ],
)
def test_the_launchers_environment_tells_the_rank_and_a_batch_script_has_none(
    no_launcher, monkeypatch, environment, rank
):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)

    assert environment_rank() == rank
    assert in_mpi_environment() == (rank is not None)


def test_any_object_with_the_four_names_is_a_group_and_others_are_refused_by_what_they_lack():
    group = SelfGroup()

    assert wrap(group) is group
    assert group.allgather(b"x") == [b"x"]
    with pytest.raises(UsageError, match=r"list cannot be a group: it has no rank, size, allgather, barrier"):
        wrap([])
