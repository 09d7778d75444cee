"""Programs for MPI ranks that test_host.py runs: python -m mpi4py host_programs.py NAME; each asserts on every rank."""

from __future__ import annotations

import dataclasses
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ncclep_bench.backends.host import experts, tokens
from ncclep_bench.backends.host.backend import HOST
from ncclep_bench.backends.host.registration import Segments
from ncclep_bench.collectives.contract import Problem
from ncclep_bench.model.scenario import Timing
from ncclep_bench.routing.token_routing import TokenRouting
from ncclep_bench.runtime.shared_memory import NotEnoughSharedMemoryError
from ncclep_bench.runtime.world import Channel, MpiGroup, world
from ncclep_bench.sweeps.execute import Routings, measure
from ncclep_bench.sweeps.job import Source
from tests.cases import make_case, make_problem
from tests.mpi.host_cases import check


def shared_mappings() -> int:
    """Mappings of shared memory that the kernel lists for this process, MPI's own left out."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    return sum("/dev/shm/" in line and "mpich" not in line and "vader" not in line for line in lines)


def registration(group: MpiGroup) -> None:
    """Misses, hits and evictions are what an LRU cache of that capacity gives, and mappings really come and go."""
    for capacity in (0, 3, 64):
        case = make_case(
            "all_gather_experts",
            backend="host",
            ranks=group.size,
            num_experts=8 * group.size,
            variant="registered",
            mr_cache_size=capacity,
            active_share=1.0,
        )
        problem = make_problem(case)
        before = shared_mappings()
        prepared = HOST.prepare(problem, group)
        fixed = shared_mappings()
        prepared.launch()
        counters = dict(prepared.stats().counters)
        assert counters["mr_misses"] == 8, counters
        assert counters.get("mr_hits", 0) == 0, counters
        assert counters.get("mr_evictions", 0) == max(0, 8 - capacity), counters
        assert counters["mr_miss_total_us"] > 0, counters
        group.barrier()
        own, peers = min(8, capacity), 8 * (group.size - 1)
        assert shared_mappings() == fixed + own + peers, (shared_mappings(), fixed, own, peers)
        prepared.launch()
        again = prepared.stats().counters
        assert again["mr_misses"] - counters["mr_misses"] == max(0, 8 - capacity), again
        assert again.get("mr_hits", 0) == min(8, capacity), again
        group.barrier()
        # What the owners dropped, peers let go as they map what is new: never more than two launches' worth.
        assert fixed + own <= shared_mappings() <= fixed + own + 2 * peers
        prepared.close()
        del prepared
        assert shared_mappings() == before, (shared_mappings(), before)


def channels(group: MpiGroup) -> None:
    """New counts rebuild real requests, the same counts none, and closing leaves none."""
    case = make_case("dispatch", backend="host", ranks=group.size, num_experts=9, transport="messages")
    problem = make_problem(case)
    prepared = HOST.prepare(problem, group)
    created, live = Channel.created, Channel.live()
    assert live > 0
    prepared.update(problem)
    prepared.launch()
    assert (Channel.created, Channel.live()) == (created, live), "the same routing needs no new requests"
    assert problem.routing is not None
    fewer = dataclasses.replace(problem, routing=half_masked(problem))
    prepared.update(fewer)
    prepared.launch()
    counters = prepared.stats().counters
    assert Channel.created > created, "another routing needs other requests"
    assert counters["channel_rebuilds"] > 0
    assert counters["channel_rebuild_total_us"] > 0
    prepared.close()
    assert Channel.live() == 0


def half_masked(problem: Problem) -> TokenRouting:
    """The problem's routing with the second half of every rank's tokens masked."""
    assert problem.routing is not None
    topk_idx, topk_weights = problem.routing.topk_idx.copy(), problem.routing.topk_weights.copy()
    topk_idx[1::2], topk_weights[1::2] = -1, 0
    return dataclasses.replace(problem.routing, topk_idx=topk_idx, topk_weights=topk_weights)


def extra_copies(group: MpiGroup) -> None:
    """A copy that is made twice shows in wire_bytes, for every collective of ours."""
    plant(tokens.TokenHandle, "_write_rows", lambda once, self, *args: (once(self, *args), once(self, *args)))
    plant(tokens.TokenHandle, "_read_sums", lambda once, self, *args: (once(self, *args), once(self, *args)))
    plant(
        experts.ExpertHandle,
        "_copy",
        lambda once, self, *args, **kw: (once(self, *args, **kw), once(self, *args, **kw)),
    )
    plant(experts.ExpertHandle, "_sum_into", lambda once, self, *args: (once(self, *args), once(self, *args)))
    for collective in ("dispatch", "combine", "all_gather_experts", "reduce_scatter_expert_grads"):
        wrong = check(make_case(collective, backend="host", ranks=group.size, num_experts=9, active_share=1.0), group)
        assert wrong is not None, f"{collective}: a doubled copy goes unnoticed"
        assert wrong.startswith("wire bytes"), wrong


def corrupted_copies(group: MpiGroup) -> None:
    """One element of one copy changed on one rank: the verifier names row and column there."""

    def corrupt(once: Any, self: Any, *args: Any, **kw: Any) -> None:
        once(self, *args, **kw)
        target = next(arg for arg in args if isinstance(arg, np.ndarray))
        if group.rank == 0 and target.size and target.dtype.kind != "i":
            target.reshape(-1).view(np.uint8)[-1] ^= 0x7F

    plant(tokens.TokenHandle, "_write_rows", corrupt)
    plant(experts.ExpertHandle, "_copy", corrupt)
    for collective in ("dispatch", "all_gather_experts"):
        wrong = check(make_case(collective, backend="host", ranks=group.size, num_experts=9, active_share=1.0), group)
        seen = [data for data in group.allgather((wrong or "").encode()) if b"expected" in data]
        assert seen, f"{collective}: a corrupted copy goes unnoticed"


def skewed_padding(group: MpiGroup) -> None:
    """Padding that only the routing reveals to be too large is refused with the sum, not left to the system to kill."""
    case = make_case(
        "padded_all_to_all",
        backend="host",
        ranks=group.size,
        tokens=4096,
        hidden=1024,
        num_experts=2048 * group.size,
        top_k=1,
        routing="all_to_one",
    )
    assert HOST.supports(case) is None
    with pytest.raises(NotEnoughSharedMemoryError, match="padding to 4096 rows"):
        HOST.prepare(make_problem(case), group)


def shortage_on_one_rank(group: MpiGroup) -> None:
    """Where one rank alone finds too little shared memory, none waits for it and all waive the case for its reason."""

    def refuse(once: Any, self: Any, *args: Any) -> Any:
        if group.rank == 1:
            raise NotEnoughSharedMemoryError("nothing is free")
        return once(self, *args)

    plant(Segments, "empty", refuse)
    for collective in ("all_gather_experts", "reduce_scatter_expert_grads"):
        case = make_case(collective, backend="host", ranks=group.size, num_experts=9)
        begin, before = time.monotonic(), shared_mappings()
        record = measure(case, Source(Timing(), {}, "."), group, Routings(), lambda step: None)
        assert (record.outcome, record.reason) == ("waived", "nothing is free"), record
        assert time.monotonic() - begin < 200
        assert shared_mappings() == before, "the attempt left memory behind"


def plant(owner: type, name: str, fault: Any) -> None:
    once = getattr(owner, name)
    setattr(owner, name, lambda self, *args, **kw: fault(once, self, *args, **kw))


PROGRAMS = {
    "registration": registration,
    "channels": channels,
    "extra_copies": extra_copies,
    "corrupted_copies": corrupted_copies,
    "skewed_padding": skewed_padding,
    "shortage_on_one_rank": shortage_on_one_rank,
}


def main() -> None:
    group = world()
    PROGRAMS[sys.argv[1]](group)
    group.close()


if __name__ == "__main__":
    main()
