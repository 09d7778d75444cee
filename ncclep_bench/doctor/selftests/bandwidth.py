"""Peers are reached as fast as the machine copies memory, or as its model of GPU does."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ncclep_bench.doctor.profiles import profile_of
from ncclep_bench.doctor.selftests.contract import SelfTest, Suspicion, Trial
from ncclep_bench.doctor.selftests.payload import of_one_source
from ncclep_bench.units import format_bytes

if TYPE_CHECKING:
    from ncclep_bench.backends.contract import Prepared
    from ncclep_bench.collectives.contract import Problem

_ROUNDS, _SECONDS = 60, 3.0
_FEWEST = 5
_BYTES = {"host": 8 << 20, "cuda": 64 << 20}
# Processes that share cores with others are late by chance; a GPU that has lost NVLink reaches a ninth.
_FAR_BELOW = {"host": 0.1, "cuda": 0.4}


class _Rate(NamedTuple):
    """What crossed in one launch, and how long the slowest rank took; `late`: the rank, if it alone was slow."""

    moved_bytes: int
    seconds: float
    late: int | None = None

    @property
    def gb_per_s(self) -> float:
        return self.moved_bytes / self.seconds / 1e9 if self.seconds else 0.0

    def __str__(self) -> str:
        return f"{format_bytes(self.moved_bytes)} in {self.seconds * 1e3:.2f} ms, {self.gb_per_s:.2f} GB/s"


def bandwidth(trial: Trial) -> list[Suspicion]:
    """One rank at a time sends its experts to all others; the best of some rounds against what is to be expected."""
    if trial.size < 2:
        trial.note("one rank has no peers")
        return []
    elements = _BYTES[trial.backend.name] // 4
    case = trial.case("all_gather_experts", num_experts=trial.size, expert_elements=elements, dtype="float32")
    (case,) = trial.runnable([case])
    problem = trial.problem(case)
    prepared = trial.backend.prepare(problem, trial.group)
    found, share = [], _FAR_BELOW[trial.backend.name]
    try:
        for source in range(trial.size):
            expected, what = _expected(trial, source)
            enough = share * (expected or 0)
            rate = _sent_by(trial, prepared, of_one_source(problem, source), source, enough)
            trial.note(f"rank {source} to the others: {rate}; {what}")
            if expected is not None and rate.gb_per_s < share * expected:
                suspect = source if rate.late is None else rate.late
                found.append(
                    Suspicion(
                        f"rank {source} sends {rate.gb_per_s:.2f} GB/s, less than {share:.0%} of {expected:.1f} GB/s",
                        (suspect,),
                        (f"rank {source} to the others: {rate}", what),
                    )
                )
    finally:
        prepared.close()
    return found


def _sent_by(trial: Trial, prepared: Prepared, problem: Problem, source: int, enough: float) -> _Rate:
    """Bytes of one launch in which `source` alone sends, and the seconds of the slowest rank in the best round.

    Rounds go on until one reaches `enough` GB/s: chance makes some of them slow, and a slow path all of them.
    """
    trial.step(f"rank {source} sends")
    prepared.update(problem)
    best, spent = _Rate(0, float("inf")), 0.0
    for number in range(_ROUNDS):
        before = prepared.stats().wire_bytes
        trial.group.barrier()
        start = time.perf_counter()
        prepared.launch()
        _settle(trial, prepared)
        seconds = time.perf_counter() - start
        own = prepared.stats().wire_bytes - before
        everybody = trial.everybody((seconds, own))
        *others, slowest = sorted(each[0] for each in everybody)
        # On a GPU a launch does not wait for the others' ends, so the one that is slow shows.
        late = [each[0] for each in everybody].index(slowest) if slowest > 2 * max(others) else None
        rate = _Rate(sum(each[1] for each in everybody), slowest, late)
        best, spent = min(best, rate, key=lambda each: each.seconds), spent + rate.seconds
        trial.calls += 1
        trial.moved_bytes += own
        if number >= _FEWEST and (best.gb_per_s >= enough or spent > _SECONDS):
            break
    return best


def _settle(trial: Trial, prepared: Any) -> None:
    """Wait for the device, where there is one."""
    if trial.backend.name == "cuda":
        prepared.session.device.synchronize()


def _expected(trial: Trial, source: int) -> tuple[float | None, str]:
    """What `source` should reach, in GB/s, and where that figure is from; the same on all ranks."""
    own = _memcpy(_BYTES["host"]) if trial.backend.name == "host" and trial.rank == source else None
    if trial.backend.name == "host":
        rate = _Rate(*trial.everybody(own)[source])
        return rate.gb_per_s, f"memcpy on rank {source}: {rate}"
    from ncclep_bench.backends.cuda.staging import this_host
    from ncclep_bench.runtime.device import cuda_device

    device = cuda_device(trial.rank)
    gpus = trial.everybody((this_host(), device.bus_id, device.name))
    sharers = [rank for rank, gpu in enumerate(gpus) if gpu == gpus[source] and rank != source]
    name = gpus[source][2]
    if sharers:
        return None, f"{name}: shared with rank {', '.join(map(str, sharers))}, no figure is known for that"
    profile = profile_of(name)
    if profile is None or profile.peer_gbytes is None:
        return None, f"{name}: no figure is known for this model"
    return profile.peer_gbytes, f"{name}: {profile.peer_gbytes:g} GB/s to all peers together"


def _memcpy(nbytes: int) -> _Rate:
    source, target = np.ones(nbytes, np.uint8), np.zeros(nbytes, np.uint8)
    best = float("inf")
    for _ in range(_FEWEST):
        start = time.perf_counter()
        np.copyto(target, source)
        best = min(best, time.perf_counter() - start)
    return _Rate(nbytes, best)


SELF_TESTS = (
    SelfTest(
        code="SELF009",
        title="Peers are reached at the speed of the machine",
        severity="warning",
        deadline_s=60,
        run=bandwidth,
        why="A pair of ranks that falls back to a slower path (PCIe instead of NVLink, a far NUMA node, a throttled "
        "device) works, and makes every all-to-all as slow as itself.",
        by_hand="nvidia-smi topo -m; nvidia-smi nvlink -s; numactl --hardware; nothing else may run beside it",
        remedy="ncclep-doctor check --select NVL --select TOPO --select GPU   # what slows this rank down",
        reference="https://www.nvidia.com/en-us/data-center/nvlink/",
    ),
)
