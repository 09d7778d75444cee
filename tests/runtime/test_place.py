"""A process's place in its job, from the variables of every launcher alike."""

from __future__ import annotations

import pytest

from ncclep_bench.runtime.place import LAUNCHERS, MPI_LAUNCHERS, local_rank_of, place_of

BATCH_SCRIPT = {"SLURM_STEP_ID": "4294967291", "SLURM_PROCID": "0", "SLURM_NTASKS": "16", "SLURM_LOCALID": "0"}


@pytest.mark.parametrize("launcher", [launcher for launcher in LAUNCHERS if launcher.rank])
def test_every_launcher_tells_what_it_knows(launcher):
    environ = {name: str(number) for number, name in enumerate(launcher, 5) if name} | {"SLURM_STEP_ID": "0"}

    place = place_of(environ)

    assert place.launcher == launcher
    assert place[1:] == tuple(number if name else None for number, name in enumerate(launcher, 5))
    assert local_rank_of(environ) == place.local_rank


def test_a_batch_script_is_no_rank_and_knows_how_many_there_will_be():
    assert place_of(BATCH_SCRIPT)[1:] == (None, 16, None, None)


def test_ranks_that_a_launcher_starts_in_a_batch_script_are_ranks():
    assert place_of(BATCH_SCRIPT | {"PMI_RANK": "3", "PMI_SIZE": "8"})[1:3] == (3, 8)


def test_torchrun_tells_which_gpu_and_starts_no_mpi():
    environ = {"OMPI_COMM_WORLD_LOCAL_RANK": "0", "RANK": "9", "LOCAL_RANK": "1"}

    assert local_rank_of(environ) == 1
    assert place_of(environ).rank == 9
    assert place_of(environ, MPI_LAUNCHERS).rank is None


@pytest.mark.parametrize("value", ["", "-1", "x", "9" * 5000])
def test_what_is_no_number_tells_nothing(value: str):
    assert place_of({"PMI_RANK": value, "RANK": value}).rank is None
