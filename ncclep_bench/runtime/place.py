"""A process's place in its job, as the variables of its launcher tell it; nothing here starts MPI."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple


class Launcher(NamedTuple):
    """What one launcher calls them; empty where it does not tell."""

    rank: str
    ranks: str = ""
    local_rank: str = ""
    local_ranks: str = ""


_TORCHRUN = Launcher("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
_SLURM = Launcher("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID")
LAUNCHERS = (
    Launcher(*(f"OMPI_COMM_WORLD_{what}" for what in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE"))),
    Launcher("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    Launcher(*(f"MV2_COMM_WORLD_{what}" for what in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE"))),
    _TORCHRUN,
    _SLURM,
    Launcher("PMIX_RANK"),
    # What a batch script is told, which is no rank itself.
    Launcher("", "SLURM_NTASKS"),
)
"""The first that tells a process its rank counts: launchers that others may have started come before those."""
MPI_LAUNCHERS = tuple(launcher for launcher in LAUNCHERS if launcher is not _TORCHRUN)

VARIABLES = frozenset(name for launcher in LAUNCHERS for name in launcher if name)
OWN_VARIABLES = frozenset(name for launcher in LAUNCHERS for name in (launcher.rank, launcher.local_rank) if name)
"""Those that each rank has to itself."""

# Slurm numbers its own steps (the batch script, the shell of salloc) from here: they are no ranks.
_FIRST_SPECIAL_SLURM_STEP = 0xFFFFFFF0


class Place(NamedTuple):
    """Rank and number of ranks, of the job and on this host; None where it is not told."""

    launcher: Launcher
    rank: int | None = None
    ranks: int | None = None
    local_rank: int | None = None
    local_ranks: int | None = None


def place_of(environ: Mapping[str, str], launchers: Iterable[Launcher] = LAUNCHERS) -> Place:
    """The place of the process that was started with these variables."""
    step = number(environ, "SLURM_STEP_ID")
    in_step = step is not None and step < _FIRST_SPECIAL_SLURM_STEP
    told = [
        Place(launcher, *(number(environ, name) for name in launcher))
        for launcher in launchers
        if launcher is not _SLURM or in_step
    ]
    ranks = (place for place in told if place.rank is not None)
    return next(ranks, None) or next((place for place in told if place.ranks is not None), Place(Launcher("")))


def local_rank_of(environ: Mapping[str, str], launchers: Iterable[Launcher] = LAUNCHERS) -> int | None:
    """The number of a process on its host; torchrun's goes first, whose ranks are those that use the GPUs."""
    names = [launcher.local_rank for launcher in sorted(launchers, key=lambda launcher: launcher is not _TORCHRUN)]
    return next((found for name in names if (found := number(environ, name)) is not None), None)


def number(environ: Mapping[str, str], name: str) -> int | None:
    """The number in a variable, None where it is anything else; of a stranger's process it may be of any length."""
    value = environ.get(name, "")
    return int(value) if value.isdecimal() and len(value) < 16 else None
