"""Ranks agree before they work, and a rank that does not come is named in time."""

from __future__ import annotations

import time
from typing import Any

import numpy as np

from ncclep_bench.doctor.selftests.contract import MODES_AND_LAYOUTS, SelfTest, Suspicion, Trial
from ncclep_bench.errors import RankError

_WAIT_S = 1.5
_SLACK_S = 2.0
"""A rank that wakes late on a busy machine is no fault."""


def agreement(trial: Trial) -> list[Suspicion]:
    """A communicator in every mode and layout, one call of each kind; ranks with other EpConfigs are refused by it."""
    from ncclep_bench.ep.communicator import EpCommunicator

    for mode, layout in MODES_AND_LAYOUTS:
        trial.step(f"a communicator in mode {mode}, layout {layout}")
        config = trial.config(
            experts_per_rank=2, expert_elements=64, hidden=64, mode=mode, layout=layout, max_tokens_per_rank=4
        )
        with EpCommunicator(trial.group, config) as communicator:
            handle = communicator.create_handle(np.zeros((4, 1), np.int32), np.ones((4, 1), np.float32))
            handle.dispatch(np.ones((4, 64), np.float32))
            communicator.all_gather_experts(np.zeros((2, 64), np.float32))
            trial.calls += 2
            trial.moved_bytes += communicator.stats.wire_bytes
    return []


def hang_detection(trial: Trial) -> list[Suspicion]:
    """A rank stays away, from a call and then from the start of a communicator: the others name it in time."""
    if trial.size < 2:
        trial.note("one rank has nobody to wait for")
        return []
    absent = 0
    found: list[str] = []
    for what, meet in (("a call", _call), ("the start of a communicator", _start)):
        trial.step(f"rank {absent} stays away from {what}")
        # Made and agreed upon first, so that nothing but the absence takes time.
        act = meet(trial)
        trial.group.barrier()
        if trial.rank != absent:
            start = time.perf_counter()
            try:
                act()
                found.append(f"{what} ends well though rank {absent} stays away")
            except RankError as error:
                if absent not in error.ranks:
                    found.append(f"{what} without rank {absent} names another: {error.message}")
            seconds = time.perf_counter() - start
            if seconds > _WAIT_S + _SLACK_S:
                found.append(f"{what} without rank {absent} ends after {seconds:.1f} s, its deadline is {_WAIT_S:g} s")
            trial.calls += 1
        trial.group.barrier()
    return trial.suspicions(found)


def _call(trial: Trial) -> Any:
    """A launch on a backend that waits _WAIT_S."""
    problem = trial.problem(trial.case("dispatch"))
    prepared = trial.with_deadline(_WAIT_S).prepare(problem, trial.group)

    def act() -> None:
        try:
            prepared.launch()
            prepared.stats()
        finally:
            prepared.close()

    return act


def _start(trial: Trial) -> Any:
    """A communicator whose ranks wait _WAIT_S for each other."""
    from ncclep_bench.ep.communicator import EpCommunicator

    # Of its own: what was sent to the absent rank stays in it.
    group = trial.group.subgroup(range(trial.size))
    config = trial.config(init_deadline_s=_WAIT_S, deadline_s=_WAIT_S)
    return lambda: EpCommunicator(group, config).destroy()


SELF_TESTS = (
    SelfTest(
        code="SELF010",
        title="Ranks agree on the EpConfig and make communicators",
        severity="error",
        deadline_s=40,
        run=agreement,
        why="Ranks with different experts_per_rank wait for each other in init without a word; here every field is "
        "compared before anything else, and the odd rank is named.",
        by_hand="print the configuration of every rank and compare",
        remedy="give every rank the same EpConfig",
        reference="https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/usage/communicators.html",
    ),
    SelfTest(
        code="SELF011",
        title="A rank that does not come is named in time",
        severity="error",
        deadline_s=40,
        run=hang_detection,
        why="A collective that waits for ever tells nobody for whom: every wait has a deadline and names who is late.",
        by_hand="kill -STOP one rank of a small job: the others must say so within deadline_s, then kill -CONT it",
        remedy="set init_deadline_s and deadline_s in the EpConfig; NCCL_EP_TIMEOUT_MS for NCCL EP",
        reference="https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/troubleshooting.html",
    ),
)
