"""What real ranks run for the tests of this folder: `ranks.py PROGRAM [ARGUMENT]`; an assertion fails the run."""

from __future__ import annotations

import contextlib
import gc
import os
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

from ncclep_bench import EpCommunicator, EpConfig
from ncclep_bench.ep.agreement import CallMismatchError
from ncclep_bench.ep.c_api import (
    ncclDataType_t,
    ncclEpAllGatherExperts,
    ncclEpCommDestroy,
    ncclEpInit,
    ncclEpInitTopology,
    ncclEpReduceScatterExpertGrads,
    ncclEpTopologyAwareRoute,
    ncclEpWarmupAllGatherExperts,
    ncclGetLastError,
    ncclRedOp_t,
    ncclResult_t,
)
from ncclep_bench.errors import BenchError, ConfigMismatchError, InputError, RankError, UsageError
from ncclep_bench.model.dtype import dtype_named
from ncclep_bench.runtime.world import Channel

WORLD = MPI.COMM_WORLD
RANK, RANKS = WORLD.rank, WORLD.size
EXPERTS, ELEMENTS = 4 * RANKS, 96


def config(**fields: Any) -> EpConfig:
    return EpConfig(**{"num_experts": EXPERTS, "init_deadline_s": 120.0, "deadline_s": 120.0, **fields})


@contextlib.contextmanager
def refused(kind: type[BenchError], *words: str) -> Iterator[None]:
    with pytest.raises(kind) as caught:
        yield
    assert [word for word in words if word not in str(caught.value)] == [], str(caught.value)


def gradient(rank: int, dtype: np.dtype[Any]) -> Any:
    """Small integers, whose sums are exact in every dtype."""
    return np.random.default_rng(rank).integers(-3, 4, (EXPERTS, ELEMENTS)).astype(dtype)


def masks(share: float = 0.5) -> Any:
    return np.stack([np.random.default_rng(100 + rank).random(EXPERTS) < share for rank in range(RANKS)])


# ---- calls ----


def layer(mode: str, layout: str, dtype: str) -> None:
    """Three routings through one handle: experts double what they get, and its weighted sum comes back."""
    kind = dtype_named(dtype).numpy
    settings = config(top_k=3, hidden=40, dtype=dtype, mode=mode, layout=layout, max_tokens_per_rank=20, alignment=2)
    rng = np.random.default_rng(RANK)
    with EpCommunicator(WORLD, settings) as comm:
        handle = None
        for tokens in (12, 0 if RANK == 0 else 20, 7):
            topk_idx = np.argsort(rng.random((tokens, EXPERTS)), axis=1)[:, :3]
            topk_idx[rng.random(topk_idx.shape) < 0.2] = -1
            weights = rng.integers(1, 4, topk_idx.shape).astype(np.float32) / 4
            rows = rng.integers(-8, 9, (tokens, 40)).astype(kind)
            if handle is None:
                handle = comm.create_handle(topk_idx, weights)
            else:
                handle.update(topk_idx, weights)
            received = handle.dispatch(rows)
            assert len(received.expert_counts) == len(comm.local_experts)
            if layout == "expert_major":
                # Rows that nobody filled hold anything, and must not come back.
                with np.errstate(all="ignore"):
                    outputs = received.tokens * kind.type(2)
                combined = handle.combine(outputs)
            else:
                total = np.where(received.topk_idx >= 0, received.topk_weights, 0).sum(axis=1, keepdims=True)
                mine = handle.combine_rows()
                mine[...] = (received.tokens.astype(np.float32) * total * 2).astype(kind)
                combined = handle.combine(mine, np.empty_like(rows))
            expected = rows.astype(np.float32) * (2 * np.where(topk_idx >= 0, weights, 0).sum(axis=1, keepdims=True))
            np.testing.assert_allclose(combined.astype(np.float32), expected, rtol=0.02, atol=0.05)
        second = comm.create_handle(topk_idx, weights)
        second.dispatch(rows)
        second.destroy()
        second.destroy()
        with refused(UsageError, "dispatch: the handle has been destroyed"):
            second.dispatch(rows)
        handle.dispatch(rows)
        with refused(UsageError, "combine needs a dispatch after the last update"):
            handle.update(topk_idx, weights)
            handle.combine(rows)


def layers() -> None:
    for mode, layout in (("ht", "flat"), ("ht", "expert_major"), ("ll", "rank_major"), ("ll", "expert_major")):
        for dtype in ("float32", "bfloat16"):
            layer(mode, layout, dtype)


def experts() -> None:
    """Both parameter collectives, every dtype, all ways to give buffers."""
    for dtype, placement in (("float32", None), ("float16", "replicas:2"), ("bfloat16", "uneven")):
        kind = dtype_named(dtype).numpy
        spec = placement if RANKS > 1 else None
        with EpCommunicator(WORLD, config(dtype=dtype, placement=spec, expert_elements=ELEMENTS)) as comm:
            comm.warmup_all_gather_experts()
            held = list(comm.local_experts)
            has, everybody = masks(), np.stack([gradient(rank, kind) for rank in range(RANKS)]).astype(np.float32)
            sums = (everybody * has[:, :, None]).sum(axis=0)[held].astype(kind)
            needed = masks()[RANK]
            consecutive = held == list(range(held[0], held[0] + len(held)))
            for empty in (comm.empty, np.zeros):
                grads = empty((EXPERTS, ELEMENTS), kind)
                grads[...] = gradient(RANK, kind)
                np.testing.assert_array_equal(comm.reduce_scatter_expert_grads(grads, has[RANK]), sums)
                out = empty(len(held) * ELEMENTS, kind)
                assert comm.reduce_scatter_expert_grads(grads.reshape(-1), has[RANK], out) is out
                np.testing.assert_array_equal(out.reshape(sums.shape), sums)
                in_place = empty((EXPERTS, ELEMENTS), kind)
                in_place[...] = grads
                comm.reduce_scatter_expert_grads(in_place, has[RANK], in_place)
                np.testing.assert_array_equal(in_place[held], sums)
                others = np.setdiff1d(np.arange(EXPERTS), held)
                np.testing.assert_array_equal(in_place[others], grads[others])
                in_place[...] = grads
                part = in_place[held[0] : held[-1] + 1] if consecutive else in_place
                comm.reduce_scatter_expert_grads(in_place, has[RANK], part)
                np.testing.assert_array_equal(in_place[held], sums)

                truth = gradient(77, kind)
                params = empty((len(held), ELEMENTS), kind)
                params[...] = truth[held]
                np.testing.assert_array_equal(comm.all_gather_experts(params), truth)
                target = empty((EXPERTS, ELEMENTS), kind)
                target[...] = 99
                comm.all_gather_experts(params.reshape(-1), needed, target)
                np.testing.assert_array_equal(target[needed], truth[needed])
                np.testing.assert_array_equal(target[~needed], np.full_like(target[~needed], 99))
                target[...] = 0
                target[held] = truth[held]
                comm.all_gather_experts(target, None, target)
                np.testing.assert_array_equal(target, truth)
                WORLD.Barrier()


def sizes_from_the_buffers() -> None:
    """The article's call: nobody has said how large an expert is."""
    with EpCommunicator(WORLD, ep_config=config(experts_per_rank=4, topology="nvlink_ib")) as comm:
        assert comm.topology.unavailable == ("nvlink", "ib")
        for elements in (ELEMENTS, 5):
            grads = np.full(EXPERTS * elements, RANK + 1, np.float32)
            mine = comm.reduce_scatter_expert_grads(grads, stream=None)
            np.testing.assert_array_equal(mine, np.full((4, elements), sum(range(1, RANKS + 1)), np.float32))
        with refused(CallMismatchError, "elements differs: 7 on rank 0; 8 on rank"):
            comm.reduce_scatter_expert_grads(np.zeros(EXPERTS * (7 if RANK == 0 else 8), np.float32))
        with refused(CallMismatchError, "the call differs: all_gather_experts on rank 0; reduce_scatter_expert_grads"):
            if RANK == 0:
                comm.all_gather_experts(np.zeros((4, 7), np.float32))
            else:
                comm.reduce_scatter_expert_grads(np.zeros((EXPERTS, 7), np.float32))
        np.testing.assert_array_equal(comm.all_gather_experts(np.ones((4, 7), np.float32)), np.ones((EXPERTS, 7)))


def refusals() -> None:
    """What is refused is refused before anything moves: the next call is right on every rank."""
    comm = EpCommunicator(WORLD, config(top_k=2, hidden=8, expert_elements=ELEMENTS, dtype="bfloat16"))
    kind = dtype_named("bfloat16").numpy
    store = np.ones(EXPERTS * ELEMENTS + 1, kind)
    grads = store[:-1].reshape(EXPERTS, ELEMENTS)
    read_only = np.zeros((4, ELEMENTS), kind)
    read_only.flags.writeable = False
    here = f"rank {RANK}: reduce_scatter_expert_grads: "
    if RANK == RANKS - 1:
        reduce = comm.reduce_scatter_expert_grads
        for other in ("float16", "float32"):
            with refused(UsageError, f"{here}grads is {other}[{EXPERTS}, {ELEMENTS}]", "allowed: dtype bfloat16"):
                reduce(np.ones((EXPERTS, ELEMENTS), other))
        with refused(UsageError, f"{here}grads is bfloat16[3]", f"allowed: [{EXPERTS}, {ELEMENTS}], or flat"):
            reduce(grads.reshape(-1)[:3])
        with refused(UsageError, f"{here}grads has strides", "allowed: contiguous rows"):
            reduce(np.asfortranarray(grads))
        with refused(UsageError, f"{here}out is read-only"):
            reduce(grads, None, read_only)
        with refused(UsageError, f"{here}out overlaps grads"):
            reduce(grads, None, store[1 : 1 + 4 * ELEMENTS])
        with refused(UsageError, f"{here}has_gradient is [3]", f"allowed: bool [{EXPERTS}]"):
            reduce(grads, np.ones(3, bool))
        with refused(UsageError, f"{here}has_gradient is int64", "allowed: dtype bool"):
            reduce(grads, np.arange(EXPERTS))
        with refused(UsageError, "stream is a int", "allowed on the host backend: None"):
            reduce(grads, stream=1)
        with refused(UsageError, f"{here}grads is device memory", 'backend="cuda"'):
            reduce(OnDevice())
        with refused(UsageError, f"{here}grads is a list"):
            reduce([1.0])
        with refused(UsageError, "topk_weights is float64", "allowed: dtype float32"):
            comm.create_handle(np.zeros((3, 2), np.int64), np.zeros((3, 2)))
        with refused(UsageError, f"topk_idx names expert {EXPERTS}"):
            comm.create_handle(np.full((3, 2), EXPERTS), np.zeros((3, 2), np.float32))
    np.testing.assert_array_equal(comm.reduce_scatter_expert_grads(grads), np.full((4, ELEMENTS), RANKS, kind))
    handle = comm.create_handle(np.tile([0, EXPERTS - 1], (3, 1)), np.ones((3, 2), np.float32))
    rows = np.ones((3, 8), kind)
    if RANK == RANKS - 1:
        with refused(UsageError, f"rank {RANK}: dispatch: tokens is float16[3, 8]", "allowed: dtype bfloat16"):
            handle.dispatch(rows.astype(np.float16))
        with refused(UsageError, "scales were given", "dtype bfloat16 has no scales"):
            handle.dispatch(rows, np.ones((3, 1), np.float32))
        with refused(UsageError, "tokens is bfloat16[2, 8]"):
            handle.dispatch(rows[:2])
    assert handle.dispatch(rows).expert_counts.sum() == (6 if RANKS == 1 else 3 * RANKS * (RANK in (0, RANKS - 1)))
    comm.destroy()
    comm.destroy()
    for call in (lambda: comm.empty(3), lambda: comm.reduce_scatter_expert_grads(grads), lambda: handle.dispatch(rows)):
        with refused(UsageError, "the communicator has been destroyed"):
            call()


class OnDevice:
    __cuda_array_interface__ = {"shape": (1,), "typestr": "<f4", "data": (0, False), "version": 3}  # noqa: RUF012


# ---- the C names ----


def c_names() -> None:
    result, comm = ncclEpInit(WORLD, config(dtype="float16"))
    assert (result, ncclGetLastError()) == (ncclResult_t.ncclSuccess, "")
    assert comm is not None
    assert ncclEpInitTopology(comm) == ncclResult_t.ncclSuccess
    result, routes = ncclEpTopologyAwareRoute(comm)
    assert (result, [route.target for route in routes]) == (0, [rank for rank in range(RANKS) if rank != RANK])
    half, add = ncclDataType_t.ncclFloat16, ncclRedOp_t.ncclSum
    params = np.full(4 * ELEMENTS, RANK, np.float16)
    everything = np.zeros(EXPERTS * ELEMENTS, np.float16)
    assert ncclEpWarmupAllGatherExperts(comm, params, everything) == ncclResult_t.ncclSuccess, ncclGetLastError(comm)
    assert ncclEpAllGatherExperts(params, everything, ELEMENTS, half, comm) == ncclResult_t.ncclSuccess
    np.testing.assert_array_equal(everything, np.repeat(np.arange(RANKS), 4 * ELEMENTS))

    send = np.full(EXPERTS * ELEMENTS, 2, np.float16)
    receive = np.full(4 * ELEMENTS, -1, np.float16)
    good: dict[str, Any] = {"sendbuff": send, "recvbuff": receive, "count": ELEMENTS, "datatype": half, "op": add}
    argument, usage = ncclResult_t.ncclInvalidArgument, ncclResult_t.ncclInvalidUsage
    violations = [
        ({"sendbuff": None}, argument, "sendbuff is NULL"),
        ({"recvbuff": None}, argument, "recvbuff is NULL"),
        ({"op": ncclRedOp_t.ncclMax}, argument, "op ncclMax is not offered\n  allowed: ncclSum"),
        ({"op": 17}, argument, "op 17 is no ncclRedOp_t"),
        ({"datatype": ncclDataType_t.ncclInt8}, argument, "datatype ncclDataType_t ncclInt8 is not offered"),
        ({"datatype": 99}, argument, "datatype 99 is not offered"),
        ({"datatype": ncclDataType_t.ncclBfloat16}, usage, "datatype is ncclBfloat16, the parameters are ncclFloat16"),
        ({"count": 0}, argument, "count is 0"),
        ({"count": ELEMENTS + 1}, usage, f"sendbuff has {send.size} elements"),
        ({"sendbuff": send[:-1]}, usage, f"sendbuff has {send.size - 1} elements"),
        ({"recvbuff": receive[:-1]}, usage, f"recvbuff has {receive.size - 1} elements"),
        ({"sendbuff": send.astype(np.float32)}, usage, "grads is float32"),
        ({"sendbuff": np.repeat(send, 2)[::2]}, usage, "grads has strides"),
        ({"sendbuff": OnDevice()}, usage, "sendbuff is device memory"),
        ({"stream": 3}, usage, "stream is a int"),
        ({"comm": None}, argument, "comm is NULL"),
        ({"comm": "no"}, argument, "comm is str"),
    ]
    texts = set()
    for wrong, expected, words in violations:
        result = ncclEpReduceScatterExpertGrads(**{**good, "comm": comm, **wrong})
        assert (result, words in ncclGetLastError(comm)) == (expected, True), (wrong, result, ncclGetLastError(comm))
        texts.add(ncclGetLastError(comm))
    assert len(texts) == len(violations)
    assert (receive == -1).all()
    assert ncclEpReduceScatterExpertGrads(**good, comm=comm) == ncclResult_t.ncclSuccess
    assert (receive == 2 * RANKS).all()
    assert [ncclEpCommDestroy(gone) for gone in (comm, comm, None)] == [0, 0, 0]
    assert ncclEpReduceScatterExpertGrads(**good, comm=comm) == argument
    if RANKS > 1:
        assert ncclEpInit(WORLD, config(hidden=1 + RANK)) == (usage, None)
        assert "hidden differs: 1 on rank 0; 2 on rank 1" in ncclGetLastError()


# ---- agreement ----


def mismatch(field: str) -> None:
    odd = {"experts_per_rank": 3, "dtype": "bfloat16", "deadline_s": 7.5, "placement": ((0,),)}[field]
    start = time.monotonic()
    usual = config(experts_per_rank=4, init_deadline_s=600.0, deadline_s=600.0)
    values = {name: getattr(usual, name) for name in EpConfig.__struct_fields__}
    shown = "[[0]]" if field == "placement" else str(odd)
    with refused(ConfigMismatchError, f"{field} differs: {values[field]} on ranks 0, 2; {shown} on rank 1"):
        EpCommunicator(WORLD, EpConfig(**{**values, field: odd}) if RANK == 1 else usual)
    assert time.monotonic() - start < usual.init_deadline_s / 2, "nobody waits for a deadline"
    with EpCommunicator(WORLD, usual) as comm:
        assert comm.config == usual


def absent() -> None:
    """Rank 1 never comes; it stays alive until the others have said so."""
    marks = Path(sys.argv[2])
    if RANK != 1:
        with refused(RankError, "rank 1 did not reach", "within 1.5 s"):
            EpCommunicator(WORLD, config(init_deadline_s=1.5))
        (marks / str(RANK)).touch()
    give_up_at = time.monotonic() + 20
    while len(list(marks.iterdir())) < RANKS - 1 and time.monotonic() < give_up_at:
        time.sleep(0.01)
    # MPI would wait at its end for what the absent rank has never received.
    sys.stdout.flush()
    os._exit(0)


def late_to_a_call() -> None:
    comm = EpCommunicator(WORLD, config(deadline_s=1.0))
    if RANK == 1:
        WORLD.Barrier()
        return
    with refused(RankError, "rank 1 ", "did not reach all_gather_experts within 1.0 s"):
        comm.all_gather_experts(np.zeros((4, 3), np.float32))
    WORLD.Barrier()


def destroyed_by_another() -> None:
    comm = EpCommunicator(WORLD, config(deadline_s=50.0))
    if RANK == 1:
        comm.destroy()
    else:
        with refused(RankError, "rank 1 ", "has destroyed the communicator"):
            comm.all_gather_experts(np.zeros((4, 3), np.float32))


def nonsense() -> None:
    """Values that Python lets into the fields are refused alike on all ranks."""
    for fields, words in (
        ({"num_experts": "8"}, "num_experts"),
        ({"top_k": 0}, "top_k"),
        ({"dtype": "int8"}, "unknown dtype 'int8'"),
        ({"top_k": EXPERTS + 1}, f"exceeds num_experts {EXPERTS}"),
        ({"num_experts": EXPERTS + 1} if RANKS > 1 else {"experts_per_rank": 5}, ""),
        ({"topology": "carrier_pigeon"}, "topology 'carrier_pigeon' names 'carrier'"),
        ({"init_deadline_s": "soon"}, "init_deadline_s is 'soon'"),
    ):
        with refused(InputError, words):
            EpCommunicator(WORLD, config(**fields))
    with refused(UsageError, "it has no rank, size, allgather, barrier"):
        EpCommunicator(object(), config())
    with EpCommunicator(WORLD, config(placement=[list(range(rank, EXPERTS, RANKS)) for rank in range(RANKS)])) as comm:
        assert comm.local_experts == tuple(range(RANK, EXPERTS, RANKS))


# ---- leaks ----


def belongings() -> dict[str, int]:
    """What a process holds that Python's memory does not show."""
    maps = Path("/proc/self/maps").read_text().splitlines()
    return {
        "descriptors": len(os.listdir("/proc/self/fd")),
        "shared mappings": sum("/dev/shm" in line and "mpich" not in line for line in maps),
        "mappings of deleted files": sum("(deleted)" in line for line in maps),
        "threads": threading.active_count(),
        "tasks": len(os.listdir("/proc/self/task")),
        "requests": Channel.live(),
    }


def thousand() -> None:
    """A third is destroyed, a third is left in a cycle for the garbage collector, a third loses its last reference.

    MPICH has 2,046 communicators: with 1,200 of them taken, a thousand that leak do not fit.
    """
    settings = config(top_k=1, hidden=4, transport=sys.argv[2], init_deadline_s=60.0, deadline_s=60.0)
    topk_idx, weights = np.array([[0], [EXPERTS - 1]]), np.ones((2, 1), np.float32)

    def one(turn: int) -> None:
        comm = EpCommunicator(WORLD, settings)
        # Every twentieth uses all there is, so that every kind of memory and of request is among what must go.
        if turn % 20 < 3:
            comm.reduce_scatter_expert_grads(comm.empty(EXPERTS * 4))
            comm.reduce_scatter_expert_grads(np.zeros(EXPERTS * 5, np.float32))
            handle = comm.create_handle(topk_idx, weights)
            handle.combine(handle.dispatch(np.ones((2, 4), np.float32)).tokens)
        if turn % 3 == 0:
            comm.destroy()
        elif turn % 3 == 1:
            cycle: list[Any] = [comm]
            cycle.append(cycle)
        # Ranks collect at different moments.
        if turn % (7 + RANK) == 0:
            gc.collect()

    taken = [WORLD.Dup() for _ in range(1200)]
    for turn in range(24):
        one(turn)
    gc.collect()
    before = belongings()
    for turn in range(1000):
        one(turn)
    gc.collect()
    assert belongings() == before, f"before {before}, after {belongings()}"
    for communicator in taken:
        communicator.Free()


PROGRAMS = {
    "layers": layers,
    "experts": experts,
    "sizes_from_the_buffers": sizes_from_the_buffers,
    "refusals": refusals,
    "c_names": c_names,
    "mismatch": lambda: mismatch(sys.argv[2]),
    "absent": absent,
    "late_to_a_call": late_to_a_call,
    "destroyed_by_another": destroyed_by_another,
    "nonsense": nonsense,
    "thousand": thousand,
}

if __name__ == "__main__":
    PROGRAMS[sys.argv[1]]()
