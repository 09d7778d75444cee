"""Communicators give back what they take: made and dropped many times over, everything stays flat."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from ncclep_bench.doctor.selftests.contract import SelfTest, Suspicion, Trial
from ncclep_bench.units import format_bytes

_WARM = 20
_MIB = 1 << 20
_PAGE = os.sysconf("SC_PAGE_SIZE")


def leaks(trial: Trial) -> list[Suspicion]:
    """Make, use and drop communicators; what grows is named with its rank."""
    count, make = {"host": (1000, _communicator), "cuda": (200, _session)}[trial.backend.name]
    before: dict[str, int] = {}
    for number in range(_WARM + count):
        if number == _WARM:
            before = _held(trial)
        trial.step(f"communicator {number} of {_WARM + count}")
        make(trial, number)
        trial.calls += 1
    after = _held(trial)
    own = [f"{after[name] - value:+,} {name}" for name, value in before.items() if after[name] - value > _ROOM[name]]
    trial.note(f"rank {trial.rank}: {count} communicators, resident memory {format_bytes(after['resident bytes'])}")
    return [
        Suspicion(
            f"rank {rank} keeps what {count} communicators have taken: {', '.join(grown)}",
            (rank,),
            (f"{before} before, {after} after on rank {trial.rank}",),
        )
        for rank, grown in enumerate(trial.everybody(own))
        if grown
    ]


def _communicator(trial: Trial, number: int) -> None:
    """One EpCommunicator; every second is dropped without `destroy`, and every eighth has moved something."""
    from ncclep_bench.ep.communicator import EpCommunicator

    communicator = EpCommunicator(trial.group, trial.config())
    used = number % 8 == 0
    if used:
        communicator.all_gather_experts(np.zeros((2, 64), np.float32))
        trial.moved_bytes += communicator.stats.wire_bytes
    if (number // 8 if used else number) % 2:
        communicator.destroy()
    del communicator


def _session(trial: Trial, number: int) -> None:
    """One prepared case with its device memory, kernels and mappings of the peers'."""
    problem = trial.problem(trial.case("dispatch", tokens=64, batch_size=64, hidden=4096))
    prepared = trial.backend.prepare(problem, trial.group)
    if number % 4 == 0:
        prepared.launch()
    trial.moved_bytes += prepared.stats().wire_bytes
    prepared.close()


def _held(trial: Trial) -> dict[str, int]:
    """What this process holds, by name."""
    gc.collect()
    # Everybody has let go before anybody counts.
    trial.group.barrier()
    meters = {**_METERS, **_METERS_OF.get(trial.backend.name, {})}
    return {name: meter(trial) for name, meter in meters.items()}


def _mappings(_: Trial) -> int:
    return sum(1 for _ in Path("/proc/self/maps").open())


def _resident(_: Trial) -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * _PAGE


def _requests(_: Trial) -> int:
    from ncclep_bench.runtime.world import Channel

    return Channel.live()


def _device_bytes(trial: Trial) -> int:
    from ncclep_bench.runtime.device import cuda_device

    return -cuda_device(trial.rank).free_bytes()


_METERS: dict[str, Callable[[Trial], int]] = {
    "descriptors": lambda _: len(os.listdir("/proc/self/fd")),
    "mappings": _mappings,
    "MPI requests": _requests,
    "resident bytes": _resident,
}
_METERS_OF: dict[str, dict[str, Any]] = {"cuda": {"device bytes": _device_bytes}}
# Python and MPI keep a little for later; a leak of a page per communicator is far above it.
_ROOM = {"descriptors": 4, "mappings": 40, "MPI requests": 0, "resident bytes": 32 * _MIB, "device bytes": 8 * _MIB}

SELF_TESTS = (
    SelfTest(
        code="SELF002",
        title="Communicators give back all they take",
        severity="error",
        deadline_s=120,
        run=leaks,
        why="A communicator that is dropped without having freed its registrations and device contexts leaks until the "
        "job runs out of memory, hours after the mistake.",
        by_hand="ls /proc/PID/fd | wc -l; wc -l /proc/PID/maps; nvidia-smi: all must stay flat while a job runs",
        remedy="pip install --upgrade ncclep-bench mpi4py   # and call EpCommunicator.destroy(), or use `with`",
        reference="https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/usage/communicators.html",
    ),
)
