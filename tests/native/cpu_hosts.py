"""A program: the cuda backend, its kernels on CPUs, among ranks of several hosts.

python -m mpi4py cpu_hosts.py HOSTS STAGING SEED COUNT    random cases, verified, bytes counted
python -m mpi4py cpu_hosts.py HOSTS STAGING FAULT         one of FAULTS; who notices prints what it is told

HOSTS: each rank's pretended host, a letter each, in capitals where only ranks next to each other have peer access; or
`real`. STAGING: mpi, or nccl, whose operations MPI then plays. NCCLEP_TEST_DELAYS: as cpu_cases.py says.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Collection
from typing import Any

from ncclep_bench.backends.cuda.backend import Cuda
from ncclep_bench.backends.cuda.staging import (
    MpiStaging,
    NcclStaging,
    Staging,
    StagingOf,
    mpi_staging,
    staging_of,
    this_host,
)
from ncclep_bench.errors import BenchError
from ncclep_bench.runtime.device_contract import Device
from ncclep_bench.runtime.group import Group
from ncclep_bench.runtime.world import MpiGroup, world
from tests.cases import make_case, make_problem
from tests.native.cpu_cases import DEFINES, SOURCES, check, run
from tests.native.cpu_device import CpuDevice
from tests.native.cpu_nccl import CpuCommunicator

DEADLINE_S, FAULT_DEADLINE_S = 60.0, 2.0
EXCHANGING = ("dispatch", "combine", "all_gather_experts", "reduce_scatter_expert_grads")


def nccl_staging(group: Group, device: Device, deadline_s: float) -> Staging:
    return NcclStaging(CpuCommunicator(group, device), group, device, deadline_s)


STAGINGS: dict[str, StagingOf] = {"mpi": mpi_staging, "nccl": nccl_staging}


class ChainDevice(CpuDevice):
    """One that reaches the devices of the ranks next to its own, and no other."""

    def reachable(self, candidates: Collection[int], group: Group) -> set[int]:
        return {rank for rank in candidates if abs(rank - group.rank) == 1}


class StuckDevice(CpuDevice):
    """One on which nothing that has been enqueued ever ends."""

    def wait(self, deadline_s: float) -> bool:
        time.sleep(deadline_s)
        return False


class IdleCommunicator(CpuCommunicator):
    """One whose messages stay where they are, as NCCL's do while a peer is missing."""

    def exchange(self, *_: Any) -> None:
        """Nothing is sent."""


def lost_rank(group: MpiGroup, backend: Cuda) -> None:
    """The last rank does not launch; whoever shares a host with it, or does not, names it and nobody else."""
    problem = make_problem(make_case("dispatch", backend="cuda", ranks=group.size, layout="expert_major"))
    prepared = backend.prepare(problem, group)
    if group.rank < group.size - 1:
        prepared.launch()
        prepared.stats()


def lost_in_nccl(group: MpiGroup, backend: Cuda) -> None:
    """The same in NCCL, which tells nobody who is absent."""
    staging = NcclStaging(IdleCommunicator(group, CpuDevice()), group, StuckDevice(), FAULT_DEADLINE_S)
    if group.rank < group.size - 1:
        staging.exchange([], [], "dispatch")


def twice(group: MpiGroup, backend: Cuda) -> None:
    """What is exchanged twice shows in the bytes, for every collective."""
    once = MpiStaging.exchange

    def exchange(self: MpiStaging, *args: Any) -> int:
        return once(self, *args) + once(self, *args)

    MpiStaging.exchange = exchange  # type: ignore[method-assign]
    for collective in EXCHANGING:
        wrong = check(make_case(collective, backend="cuda", ranks=group.size, active_share=1.0), group, backend)
        print(f"{group.rank}: {collective}: {(wrong or 'nothing')[: len('wire bytes')]}", flush=True)


def shared_only(group: MpiGroup, backend: Cuda) -> None:
    """With transport = "shared" no rank falls back to anything."""
    case = make_case("dispatch", backend="cuda", ranks=group.size, num_experts=12, transport="shared")
    backend.prepare(make_problem(case), group)


def no_messages(group: MpiGroup, backend: Cuda) -> None:
    """A group that only gathers cannot reach other hosts."""

    class Gathering:
        rank, size, allgather, barrier = group.rank, group.size, group.allgather, group.barrier

    gathering: Any = Gathering()
    staging_of(gathering, CpuDevice(), FAULT_DEADLINE_S)


FAULTS = {fault.__name__: fault for fault in (lost_rank, lost_in_nccl, twice, shared_only, no_messages)}


def main() -> None:
    hosts, staging, *task = sys.argv[1:]
    group = world()
    host = this_host() if hosts == "real" else hosts[group.rank]
    deadline_s = FAULT_DEADLINE_S if task[0] in FAULTS else DEADLINE_S
    kind = ChainDevice if hosts.isupper() else CpuDevice
    backend = Cuda(
        lambda _: kind(SOURCES), lambda: None, deadline_s, lambda _: host, STAGINGS[staging], defines=DEFINES
    )
    wrong = None
    if task[0] in FAULTS:
        try:
            FAULTS[task[0]](group, backend)
        except BenchError as error:
            print(f"{group.rank}: {type(error).__name__}: {error.message}", flush=True)
        group.barrier()
    else:
        wrong = run(group, backend, *map(int, task))
    group.close()
    sys.exit(wrong)


if __name__ == "__main__":
    main()
