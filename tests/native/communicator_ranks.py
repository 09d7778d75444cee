"""A program for MPI ranks: EpCommunicator on the cuda backend, on CPUs or on GPUs.

python -m mpi4py communicator_ranks.py cpu|gpu PROGRAM [TRANSPORT]    one of the functions below; what is wrong fails it
"""

from __future__ import annotations

import contextlib
import gc
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

from ncclep_bench import EpCommunicator, EpConfig
from ncclep_bench.backends.cuda import experts as expert_calls
from ncclep_bench.backends.cuda import registration
from ncclep_bench.ep import cuda_engine
from ncclep_bench.ep.device_buffers import DeviceArray
from ncclep_bench.errors import BenchError, CannotRunError, RankError, UsageError
from ncclep_bench.model.dtype import dtype_named
from ncclep_bench.runtime.device import cuda_device
from tests.native.cpu_device import CpuDevice

Array = np.ndarray[Any, Any]


def cupy_stream() -> Any:
    import cupy

    return cupy.cuda.Stream(non_blocking=True)


WORLD = MPI.COMM_WORLD
RANK, RANKS = WORLD.rank, WORLD.size
EXPERTS, ELEMENTS, HIDDEN, TOP_K, TOKENS = 4 * RANKS, 96, 128, 3, 20
DEVICE: Any = CpuDevice() if sys.argv[1] == "cpu" else cuda_device(RANK)
TRANSPORT = sys.argv[3] if len(sys.argv) > 3 else "auto"
STREAM = 7 if sys.argv[1] == "cpu" else cupy_stream()


def config(**fields: Any) -> EpConfig:
    shared = {"num_experts": EXPERTS, "backend": "cuda", "init_deadline_s": 120.0, "deadline_s": 120.0}
    shared["transport"] = TRANSPORT
    return EpConfig(**{**shared, **fields})


class Interface:
    """An array of another library in the device's memory, as cupy's are."""

    def __init__(self, array: Array, *, stream_ordered: bool = False, strides: Any = None, offset: int = 0) -> None:
        allocate = DEVICE.allocate_stream_ordered if stream_ordered else DEVICE.allocate
        self.address = allocate(max(array.nbytes, 16) + offset) + offset
        self.like = array
        DEVICE.write(self.address, np.ascontiguousarray(array))
        self.__cuda_array_interface__ = {
            "shape": array.shape,
            "typestr": array.dtype.str,
            "data": (self.address, False),
            "strides": strides,
            "version": 3,
        }


def contents(array: DeviceArray | Interface) -> Array:
    """What the device's memory holds."""
    shape, dtype = (
        (array.shape, array.dtype) if isinstance(array, DeviceArray) else (array.like.shape, array.like.dtype)
    )
    found = np.zeros(shape, dtype)
    DEVICE.read(array.address, found)
    return found


@contextlib.contextmanager
def refused(kind: type[BenchError], *words: str) -> Iterator[None]:
    with pytest.raises(kind) as caught:
        yield
    assert [word for word in words if word not in str(caught.value)] == [], str(caught.value)


def integers(seed: int, shape: tuple[int, ...], dtype: Any) -> Array:
    """Small ones, whose sums are exact in every dtype."""
    return np.random.default_rng(seed).integers(-3, 4, shape).astype(dtype)


def masks(share: float = 0.5) -> Array:
    return np.stack([np.random.default_rng(100 + rank).random(EXPERTS) < share for rank in range(RANKS)])


# ---- programs ----


def experts() -> None:
    """Both parameter collectives, every dtype, all ways to give buffers."""
    for dtype, placement in (("float32", None), ("float16", "replicas:2"), ("bfloat16", "uneven")):
        kind = dtype_named(dtype).numpy
        spec = placement if RANKS > 1 else None
        with EpCommunicator(WORLD, config(dtype=dtype, placement=spec, expert_elements=ELEMENTS)) as comm:
            comm.warmup_all_gather_experts(stream=STREAM)
            held, has = list(comm.local_experts), masks()
            everybody = np.stack([integers(rank, (EXPERTS, ELEMENTS), kind) for rank in range(RANKS)])
            sums = (everybody.astype(np.float32) * has[:, :, None]).sum(axis=0)[held].astype(kind)
            truth, needed = integers(77, (EXPERTS, ELEMENTS), kind), masks()[RANK]
            for stream_ordered in (False, True):

                def put(array: Array, ordered: bool = stream_ordered) -> Interface:
                    return Interface(array, stream_ordered=ordered)

                grads = put(everybody[RANK])
                np.testing.assert_array_equal(
                    contents(comm.reduce_scatter_expert_grads(grads, has[RANK], stream=STREAM)), sums
                )
                out = put(np.full(len(held) * ELEMENTS, 99, kind))
                assert comm.reduce_scatter_expert_grads(grads, has[RANK], out, stream=STREAM) is out
                np.testing.assert_array_equal(contents(out).reshape(sums.shape), sums)
                np.testing.assert_array_equal(contents(grads), everybody[RANK])
                run = range(held[0], held[-1] + 1)
                for rows in (range(EXPERTS), run if held == list(run) else range(EXPERTS)):
                    where = comm.empty((EXPERTS, ELEMENTS))
                    DEVICE.write(where.address, everybody[RANK])
                    at = where.address + rows[0] * ELEMENTS * kind.itemsize
                    target = DeviceArray(at, (len(rows), ELEMENTS), kind)
                    comm.reduce_scatter_expert_grads(where, has[RANK], target, stream=STREAM)
                    expected = everybody[RANK].copy()
                    expected[held] = sums
                    np.testing.assert_array_equal(contents(where), expected)

                params = put(truth[held])
                np.testing.assert_array_equal(contents(comm.all_gather_experts(params, stream=STREAM)), truth)
                target = put(np.full((EXPERTS, ELEMENTS), 99, kind))
                comm.all_gather_experts(params, needed, target, stream=STREAM)
                expected = np.where(needed[:, None], truth, np.full_like(truth, 99))
                np.testing.assert_array_equal(contents(target), expected)
                whole = np.zeros_like(truth)
                whole[held] = truth[held]
                in_place = put(whole)
                comm.all_gather_experts(in_place, None, in_place, stream=STREAM)
                np.testing.assert_array_equal(contents(in_place), truth)
            assert (comm.stats.wire_bytes > 0) == (RANKS > 1)
            assert (comm.stats.counters.get("mr_misses", 0) > 0) == (RANKS > 1 and TRANSPORT == "auto")


def layer(mode: str, layout: str, dtype: str) -> None:
    """Three routings through one handle: experts double what they get, and its weighted sum comes back."""
    kind = dtype_named(dtype).numpy
    fields = {"top_k": TOP_K, "hidden": HIDDEN, "dtype": dtype, "mode": mode, "layout": layout, "alignment": 2}
    rng = np.random.default_rng(RANK)
    with EpCommunicator(WORLD, config(**fields, max_tokens_per_rank=TOKENS)) as comm:
        handle = None
        for tokens in (12, 0 if RANK == 0 else TOKENS, 7):
            topk_idx = np.argsort(rng.random((tokens, EXPERTS)), axis=1)[:, :TOP_K]
            topk_idx[rng.random(topk_idx.shape) < 0.2] = -1
            weights = rng.integers(1, 4, topk_idx.shape).astype(np.float32) / 4
            rows = rng.integers(-8, 9, (tokens, HIDDEN)).astype(kind)
            if handle is None:
                handle = comm.create_handle(topk_idx, weights, stream=STREAM)
            else:
                handle.update(Interface(topk_idx.astype(np.int32)), Interface(weights), stream=STREAM)
            for _ in range(2):
                received = handle.dispatch(Interface(rows), stream=STREAM)
                assert contents(received.expert_counts).shape == (len(comm.local_experts),)
                came = contents(received.tokens)
                if layout == "expert_major":
                    # Rows that nobody filled hold anything, and must not come back.
                    with np.errstate(all="ignore"):
                        doubled = came * kind.type(2)
                    combined = handle.combine(Interface(doubled), stream=STREAM)
                else:
                    share = np.where(contents(received.topk_idx) >= 0, contents(received.topk_weights), 0)
                    with np.errstate(all="ignore"):
                        mine = (came.astype(np.float32) * share.sum(axis=1, keepdims=True) * 2).astype(kind)
                    elsewhere = Interface(np.full_like(rows, 99))
                    combined = handle.combine(Interface(mine), elsewhere, stream=STREAM)
                    assert combined is elsewhere
                    own = handle.combine_rows()
                    DEVICE.write(own.address, mine)
                    again = contents(handle.combine(own, stream=STREAM))
                    np.testing.assert_array_equal(again, contents(combined))
                total = 2 * np.where(topk_idx >= 0, weights, 0).sum(axis=1, keepdims=True)
                expected = rows.astype(np.float32) * total
                np.testing.assert_allclose(contents(combined).astype(np.float32), expected, rtol=0.02, atol=0.05)
        comm.synchronize()
        second = comm.create_handle(topk_idx, weights, stream=STREAM)
        second.dispatch(Interface(rows), stream=STREAM)
        second.destroy()
        second.destroy()
        with refused(UsageError, "dispatch: the handle has been destroyed"):
            second.dispatch(Interface(rows), stream=STREAM)


def layers() -> None:
    for mode, layout in (("ht", "flat"), ("ht", "expert_major"), ("ll", "rank_major"), ("ll", "expert_major")):
        layer(mode, layout, "float32" if (mode == "ht") == (layout == "flat") else "bfloat16")


def scaled() -> None:
    """float8 tokens bring scales, and are not combined."""
    kind = dtype_named("float8_e4m3fn").numpy
    fields = {"top_k": 2, "hidden": 256, "dtype": "float8_e4m3fn", "max_tokens_per_rank": 5}
    with EpCommunicator(WORLD, config(**fields)) as comm:
        topk_idx = (np.arange(10).reshape(5, 2) + RANK) % EXPERTS
        handle = comm.create_handle(topk_idx, np.ones((5, 2), np.float32), stream=STREAM)
        rows, scales = integers(RANK, (5, 256), kind), integers(9 + RANK, (5, 2), np.float32)
        received = handle.dispatch(Interface(rows), Interface(scales), stream=STREAM)
        sent = {rank: (integers(rank, (5, 256), kind), integers(9 + rank, (5, 2), np.float32)) for rank in range(RANKS)}
        counts = contents(received.source_counts).tolist()
        places = (np.arange(10).reshape(1, 5, 2) + np.arange(RANKS)[:, None, None]) % EXPERTS // 4
        here = [np.flatnonzero((places[rank] == RANK).any(axis=1)) for rank in range(RANKS)]
        assert counts == [len(tokens) for tokens in here]
        for number, array in enumerate((received.tokens, received.scales)):
            expected = np.concatenate([sent[rank][number][tokens] for rank, tokens in enumerate(here)])
            np.testing.assert_array_equal(contents(array).astype(np.float32), expected.astype(np.float32))
        with refused(UsageError, "combine adds float32, float16 or bfloat16, not float8_e4m3fn"):
            handle.combine(Interface(rows), Interface(rows), stream=STREAM)


class Graph:
    """What is enqueued inside of it; `replay` runs it, and waits."""

    def __enter__(self) -> Graph:
        if isinstance(DEVICE, CpuDevice):
            self._recording = DEVICE.recording()
            self._run = self._recording.__enter__()
        else:
            STREAM.begin_capture()
        return self

    def __exit__(self, *error: Any) -> None:
        if isinstance(DEVICE, CpuDevice):
            self._recording.__exit__(*error)
        else:
            graph = STREAM.end_capture()
            self._run = lambda: graph.launch(STREAM)

    def replay(self) -> None:
        self._run()
        if not isinstance(DEVICE, CpuDevice):
            STREAM.synchronize()


def captured() -> None:
    """A graph of a handle's calls takes what the same buffers hold when it is replayed, also between other calls."""
    for mode, layout in (("ht", "flat"), ("ht", "expert_major"), ("ll", "rank_major"), ("ll", "expert_major")):
        fields = {"top_k": TOP_K, "hidden": HIDDEN, "mode": mode, "layout": layout, "max_tokens_per_rank": TOKENS}
        rng = np.random.default_rng(RANK)
        with EpCommunicator(WORLD, config(**fields, expert_elements=ELEMENTS)) as comm:
            topk_idx = np.argsort(rng.random((TOKENS, EXPERTS)), axis=1)[:, :TOP_K].astype(np.int32)
            weights = rng.integers(1, 4, topk_idx.shape).astype(np.float32) / 4
            idx, factors = Interface(topk_idx), Interface(weights)
            rows = Interface(np.zeros((TOKENS, HIDDEN), np.float32))
            out = Interface(np.zeros((TOKENS, HIDDEN), np.float32))
            handle = comm.create_handle(topk_idx, weights, stream=STREAM)
            dropped = handle.combine(handle.dispatch(rows, stream=STREAM).tokens, stream=STREAM)
            other = comm.create_handle(topk_idx, weights, stream=STREAM)
            with Graph() as graph:
                with refused(UsageError, "all_gather_experts in a stream that is being captured", "allowed: update, "):
                    comm.warmup_all_gather_experts(stream=STREAM)
                with refused(UsageError, "create_handle in a stream that is being captured"):
                    comm.create_handle(topk_idx, weights, stream=STREAM)
                with refused(UsageError, "in mode ht" if mode == "ht" else "of a routing on the host"):
                    handle.update(topk_idx, weights, stream=STREAM)
                if mode == "ll":
                    handle.update(idx, factors, stream=STREAM)
                received = handle.dispatch(rows, stream=STREAM)
                with refused(UsageError, "a new array in a stream that is being captured", "as out"):
                    handle.combine(received.tokens, stream=STREAM)
                handle.combine(received.tokens, out, stream=STREAM)
                for what in (comm.synchronize, lambda: comm.empty(4), lambda: comm.stats):
                    with refused(UsageError, "in a stream that is being captured"):
                        what()
                del dropped, other
                gc.collect()
            allocations = len(DEVICE.allocations) if isinstance(DEVICE, CpuDevice) else 1
            comm.synchronize()
            left = len(DEVICE.allocations) if isinstance(DEVICE, CpuDevice) else 0
            assert left < allocations  # what was dropped during the capture
            for draw in range(4):
                if mode == "ll":
                    topk_idx = np.argsort(rng.random((TOKENS, EXPERTS)), axis=1)[:, :TOP_K].astype(np.int32)
                    topk_idx[rng.random(topk_idx.shape) < 0.2] = -1
                DEVICE.write(idx.address, topk_idx)
                for replays in (True, draw != 2):
                    sent = integers(10 * draw + replays, (TOKENS, HIDDEN), np.float32)
                    DEVICE.write(rows.address, sent)
                    DEVICE.write(out.address, np.full_like(sent, 99))
                    if replays:
                        graph.replay()
                    else:
                        handle.combine(handle.dispatch(rows, stream=STREAM).tokens, out, stream=STREAM)
                    here = np.where(topk_idx >= 0, topk_idx // 4, -1)
                    ranks = np.stack([(here == rank).any(axis=1) for rank in range(RANKS)]).sum(axis=0)
                    share = np.where(topk_idx >= 0, weights, 0).sum(axis=1) if layout == "expert_major" else ranks
                    np.testing.assert_array_equal(contents(out), sent * share[:, None])
            handle.update(topk_idx[:5], weights[:5], stream=STREAM)
            if mode == "ht":
                # Every rank's graph is for more tokens than there are now.
                graph.replay()
                with refused(UsageError, "for another number of tokens than the last update, 5", "a graph holds"):
                    comm.synchronize()


def expert_graphs(dtype: str, placement: str | None, stream_ordered: bool) -> None:
    kind = dtype_named(dtype).numpy
    fields = {"dtype": dtype, "placement": placement if RANKS > 1 else None, "expert_elements": ELEMENTS}
    with EpCommunicator(WORLD, config(**fields, ep_mr_cache_size=1)) as comm:
        held, has, needed = list(comm.local_experts), masks(), masks()[RANK]
        part = np.zeros((len(held), ELEMENTS), kind)
        everything = np.zeros((EXPERTS, ELEMENTS), kind)
        params, sums = (Interface(part, stream_ordered=stream_ordered) for _ in range(2))
        grads, out, both = (Interface(everything, stream_ordered=stream_ordered) for _ in range(3))
        # What peers are told to let go of during the capture, some of which it then needs.
        for at in (params, Interface(part)):
            comm.all_gather_experts(at, needed, out, stream=STREAM)
        with Graph() as gathering:
            with refused(UsageError, "a new array in a stream that is being captured", "as out"):
                comm.all_gather_experts(params, needed, stream=STREAM)
            comm.all_gather_experts(params, needed, out, stream=STREAM)
        with Graph() as reducing:
            comm.reduce_scatter_expert_grads(grads, has[RANK], sums, stream=STREAM)
            comm.reduce_scatter_expert_grads(both, has[RANK], both, stream=STREAM)

        def gathered(truth: Array, replays: bool) -> int:
            """Wire bytes of a call with these contents, or of the graph, whose result is right."""
            at, target = (params, out) if replays else (Interface(part), Interface(everything))
            before = comm.stats.wire_bytes
            DEVICE.write(at.address, truth[held])
            DEVICE.write(target.address, np.full_like(truth, 99))
            if replays:
                gathering.replay()
            else:
                comm.all_gather_experts(at, needed, target, stream=STREAM)
            expected = np.where(needed[:, None], truth, np.full_like(truth, 99))
            np.testing.assert_array_equal(contents(target), expected)
            return comm.stats.wire_bytes - before

        def reduced(everybody: Array, replays: bool) -> int:
            at, target, inside = (grads, sums, both) if replays else map(Interface, (everything, part, everything))
            before = comm.stats.wire_bytes
            for address in (at.address, inside.address):
                DEVICE.write(address, everybody[RANK])
            DEVICE.write(target.address, np.full_like(part, 99))
            if replays:
                reducing.replay()
            else:
                comm.reduce_scatter_expert_grads(at, has[RANK], target, stream=STREAM)
                comm.reduce_scatter_expert_grads(inside, has[RANK], inside, stream=STREAM)
            total = (everybody.astype(np.float32) * has[:, :, None]).sum(axis=0)[held].astype(kind)
            np.testing.assert_array_equal(contents(target), total)
            expected = everybody[RANK].copy()
            expected[held] = total
            np.testing.assert_array_equal(contents(inside), expected)
            return comm.stats.wire_bytes - before

        moved = set()
        for draw in range(4):
            truth = integers(7 + draw, (EXPERTS, ELEMENTS), kind)
            everybody = np.stack([integers(100 * draw + rank, (EXPERTS, ELEMENTS), kind) for rank in range(RANKS)])
            for replays in (True, draw % 2 == 0):
                moved.add((gathered(truth, replays), reduced(everybody, replays)))
        comm.synchronize()
        assert len(moved) == 1
        with Graph(), refused(UsageError, "in a stream that is being captured"):
            comm.warmup_all_gather_experts(stream=STREAM)


def captured_experts() -> None:
    """The same of expert calls: their graphs outlast other calls with other buffers, through a cache that forgets."""
    usual = expert_calls.COPY_ENGINE_BYTES
    expert_graphs("float32", None, False)
    expert_graphs("bfloat16", "replicas:2", True)
    expert_calls.COPY_ENGINE_BYTES = 16
    expert_graphs("float32", "uneven", False)
    expert_graphs("float32", "replicas:2", True)
    expert_calls.COPY_ENGINE_BYTES = usual
    with EpCommunicator(WORLD, config()) as comm:
        params = Interface(np.zeros((len(comm.local_experts), ELEMENTS), np.float32))
        out = Interface(np.zeros((EXPERTS, ELEMENTS), np.float32))
        with Graph(), refused(UsageError, "the first call of this size in a stream that is being captured"):
            comm.all_gather_experts(params, out=out, stream=STREAM)
        np.testing.assert_array_equal(contents(comm.all_gather_experts(params, out=out, stream=STREAM)), 0)


def forgotten() -> None:
    """What a graph holds stays where peers map it, whatever owners drop, and nothing is mapped over something else."""
    with EpCommunicator(WORLD, config(expert_elements=ELEMENTS, ep_mr_cache_size=1000)) as comm:
        held = list(comm.local_experts)
        out = Interface(np.zeros((EXPERTS, ELEMENTS), np.float32))
        draws = iter(range(1000))

        def params() -> tuple[Interface, Array]:
            """A buffer of its own, and what then comes of all ranks' buffers."""
            truth = integers(next(draws), (EXPERTS, ELEMENTS), np.float32)
            return Interface(truth[held]), truth

        def call(buffer: Interface) -> None:
            comm.all_gather_experts(buffer, None, out, stream=STREAM)

        def right(truth: Array) -> None:
            np.testing.assert_array_equal(contents(out), truth)
            DEVICE.write(out.address, np.full_like(truth, 99))

        def called() -> Interface:
            buffer, truth = params()
            call(buffer)
            right(truth)
            return buffer

        kept, truth = params()
        with Graph() as graph:
            call(kept)
        # More at once than a directory has lines for.
        for _ in range(2 * EXPERTS):
            called()
        one, replaces = DEVICE.allocation_of(kept.address).identity, registration._replaces
        registration._replaces = lambda new, other: other.identity not in (one, new.identity)
        called()
        registration._replaces = replaces
        for _ in range(3):
            called()
            graph.replay()
            right(truth)

        # In a capture peers cannot let go of what has been freed.
        freed = called()
        if RANK == 0:
            DEVICE.free(freed.address)
        again, truth = params()
        reused = WORLD.allgather(again.address == freed.address and RANKS > 1)
        words = (
            ("where another buffer was", "before the capture") if reused[RANK] else ("rank 0 has refused its buffers",)
        )
        with Graph(), refused(UsageError, *words) if any(reused) else contextlib.nullcontext():
            call(again)
        for _ in range(2):
            call(again)
            right(truth)
            with Graph() as graph:
                call(again)
            graph.replay()
            right(truth)


def recycled() -> None:
    """What lies where another buffer was is right, also if that was one of another size or communicator's."""
    with EpCommunicator(WORLD, config()) as comm, EpCommunicator(WORLD, config()) as other:
        for number, (user, elements) in enumerate(
            ((comm, ELEMENTS), (comm, ELEMENTS // 2), (other, ELEMENTS // 2)) * 2
        ):
            truth = integers(number, (EXPERTS, elements), np.float32)
            params = Interface(truth[list(comm.local_experts)])
            out = Interface(np.zeros_like(truth))
            user.all_gather_experts(params, None, out, stream=STREAM)
            np.testing.assert_array_equal(contents(out), truth)
            # Its registrations stay until somebody hears of it.
            DEVICE.free(out.address)
            DEVICE.free(params.address)
            WORLD.Barrier()


def outlived() -> None:
    """A graph for more tokens than the last update writes nothing where the older routing would have had it."""
    fields = {"top_k": 1, "hidden": HIDDEN, "layout": "expert_major", "max_tokens_per_rank": TOKENS}
    with EpCommunicator(WORLD, config(**fields)) as comm:
        # All to one rank, filling its output; ranks but the first to its last expert, then all to its first.
        first, last = EXPERTS - 4, EXPERTS - 1
        weights, rows = np.ones((TOKENS, 1), np.float32), Interface(np.ones((TOKENS, HIDDEN), np.float32))
        before = np.full((TOKENS, 1), first if RANK == 0 else last, np.int32)
        handle = comm.create_handle(before, weights, stream=STREAM)
        with Graph() as graph:
            handle.dispatch(rows, stream=STREAM)
        graph.replay()
        comm.synchronize()
        tokens = TOKENS if RANK == 0 else TOKENS // 2
        handle.update(np.full((tokens, 1), first, np.int32), weights[:tokens], stream=STREAM)
        graph.replay()
        with refused(UsageError, f"than the last update, {tokens}") if RANK else contextlib.nullcontext():
            comm.synchronize()
        WORLD.Barrier()


def refusals() -> None:
    """What cannot be used is told before anything moves, and the call can be repeated."""
    fields = {"expert_elements": ELEMENTS, "top_k": TOP_K, "hidden": HIDDEN, "max_tokens_per_rank": TOKENS}
    with EpCommunicator(WORLD, config(**fields)) as comm:
        held = len(comm.local_experts)
        good = np.ones((held, ELEMENTS), np.float32)
        for value, *words in (
            (good, "is host memory, the cuda backend takes a GPU's", "__cuda_array_interface__"),
            ([1.0], "is a list"),
            (Interface(good.astype(np.float16)), "float16", "allowed: dtype float32"),
            (Interface(good.view("V4")), "V4", "allowed: dtype float32"),
            (Interface(good[:, :8]), "allowed: ["),
            (Interface(good, offset=8), "allowed: multiples of 16"),
            (Interface(good, strides=(8 * ELEMENTS, 8)), "strides"),
            (DeviceArray(DEVICE.allocate(64), (held, ELEMENTS), np.float32), "behind its allocation"),
            (DeviceArray(64, (held, ELEMENTS), np.float32), "is no memory of"),
        ):
            with refused(UsageError, *words):
                comm.all_gather_experts(value, stream=STREAM)
        liar = Interface(good)
        for lie in (
            {"data": None},
            {"data": (1 << 70, False)},
            {"typestr": "|O"},
            {"shape": (-1, 4)},
            {"strides": (4,)},
        ):
            liar.__cuda_array_interface__ = Interface(good).__cuda_array_interface__ | lie
            with refused(UsageError, "its __cuda_array_interface__ cannot be used"):
                comm.all_gather_experts(liar, stream=STREAM)
        with refused(UsageError, "needed is device memory", "allowed: bool on the host"):
            comm.all_gather_experts(Interface(good), Interface(np.ones(EXPERTS, bool)), stream=STREAM)
        for shape, dtype in ((-1, None), ((2.5,), None), ("ab", None), (4, object), (4, "no dtype")):
            with refused(UsageError, "empty: "):
                comm.empty(shape, dtype)
        for stream, word in (
            (None, "is missing"),
            (0, "default"),
            ("7", "is a str"),
            (1 << 64, "is a int"),
            (True, "bool"),
        ):
            with refused(UsageError, word):
                comm.all_gather_experts(Interface(good), stream=stream)
        whole = Interface(np.ones((EXPERTS, ELEMENTS), np.float32))
        if held < EXPERTS:
            overlapping = DeviceArray(whole.address + 16, (held, ELEMENTS), np.float32)
            with refused(UsageError, "params overlaps out"):
                comm.all_gather_experts(overlapping, None, whole, stream=STREAM)
        np.testing.assert_array_equal(contents(comm.all_gather_experts(Interface(good), stream=STREAM)), 1)

        idx, weights = np.zeros((4, TOP_K), np.int64), np.ones((4, TOP_K), np.float32)
        for topk_idx, word in (
            (Interface(idx), "allowed: contiguous int32"),
            (idx + EXPERTS, f"names expert {EXPERTS}"),
            (np.zeros((TOKENS + 1, TOP_K), int), f"max_tokens_per_rank, {TOKENS}"),
            (idx[:, :1], "allowed: integers [tokens, 3]"),
        ):
            with refused(UsageError, word):
                comm.create_handle(
                    topk_idx, np.ones(np.shape(getattr(topk_idx, "like", topk_idx)), np.float32), stream=STREAM
                )
        handle = comm.create_handle(idx, weights, stream=STREAM)
        with refused(UsageError, "tokens is float32[3, 128]", "allowed: [4, 128]"):
            handle.dispatch(Interface(np.ones((3, HIDDEN), np.float32)), stream=STREAM)
        received = handle.dispatch(Interface(np.ones((4, HIDDEN), np.float32)), stream=STREAM)
        if len(received.tokens):
            same = DeviceArray(received.tokens.address, (4, HIDDEN), np.float32)
            with refused(UsageError, "out overlaps rows"):
                handle.combine(received.tokens, same, stream=STREAM)
            with refused(UsageError, "tokens lie where what comes in is written"):
                handle.dispatch(same, stream=STREAM)
        with refused(UsageError, "names expert 99"):
            handle.update(Interface(np.full((4, TOP_K), 99, np.int32)), Interface(weights), stream=STREAM)
    for elements in (3, 6):
        with refused(UsageError, f"rows of {4 * elements} bytes are not a multiple of 16"):
            EpCommunicator(WORLD, config(expert_elements=elements))
    with EpCommunicator(WORLD, config(hidden=HIDDEN)) as comm, refused(UsageError, "needs max_tokens_per_rank"):
        comm.create_handle(np.zeros((1, 1), int), np.ones((1, 1), np.float32), stream=STREAM)


def absent() -> None:
    """A rank without a device is told to all; one that does not come to a collective call is named."""

    def none(rank: int) -> Any:
        raise CannotRunError(f"rank {rank}: no GPU is visible", hint="buy one")

    last = RANKS - 1
    cuda_engine.device_of = none if last == RANK else lambda _: DEVICE
    with refused(CannotRunError, f"rank {last}: no GPU is visible (buy one)"):
        EpCommunicator(WORLD, config())
    cuda_engine.device_of = lambda _: DEVICE
    comm = EpCommunicator(WORLD, config(top_k=1, hidden=HIDDEN, max_tokens_per_rank=4, deadline_s=5.0))
    if last != RANK:
        with refused(RankError, f"rank {last}", "5.0 s"):
            comm.create_handle(np.zeros((4, 1), int), np.ones((4, 1), np.float32), stream=STREAM)
    WORLD.Barrier()
    comm.destroy()


def gone() -> None:
    """A rank that has destroyed its communicator is named by the others, at a call and by their devices."""
    fields = {"top_k": 1, "hidden": HIDDEN, "max_tokens_per_rank": 4, "expert_elements": ELEMENTS, "deadline_s": 5.0}
    comm = EpCommunicator(WORLD, config(**fields))
    rows, ones = Interface(np.ones((4, HIDDEN), np.float32)), np.ones((4, 1), np.float32)
    handle = comm.create_handle(np.arange(4)[:, None] % EXPERTS, ones, stream=STREAM)
    handle.dispatch(rows, stream=STREAM)
    WORLD.Barrier()
    if RANK == 0:
        WORLD.Barrier()
        comm.destroy()
        return
    handle.dispatch(rows, stream=STREAM)
    with refused(RankError, "rank 0 did not reach launch"):
        comm.synchronize()
    for _ in range(2):
        with refused(RankError, "rank 0 did not reach launch"):
            handle.dispatch(rows, stream=STREAM)
    WORLD.Barrier()
    comm.destroy()


def many() -> None:
    """Communicators come and go, dropped or destroyed, and leave no memory of the device."""
    left = []
    for number in range(12):
        comm = EpCommunicator(WORLD, config(expert_elements=ELEMENTS, top_k=1, hidden=HIDDEN, max_tokens_per_rank=4))
        comm.empty((8,))
        params = DEVICE.allocate(4 * ELEMENTS * len(comm.local_experts))
        shape = (len(comm.local_experts), ELEMENTS)
        out = comm.all_gather_experts(DeviceArray(params, shape, np.float32), stream=STREAM)
        handle = comm.create_handle(np.zeros((4, 1), int), np.ones((4, 1), np.float32), stream=STREAM)
        handle.dispatch(DeviceArray(comm.empty((4, HIDDEN)).address, (4, HIDDEN), np.float32), stream=STREAM)
        # Nobody is still at work in what is about to go.
        WORLD.Barrier()
        if number % 2:
            comm.destroy()
        del comm, handle, out
        gc.collect()
        DEVICE.free(params)
        # Ranks may share a GPU.
        WORLD.Barrier()
        left.append(len(DEVICE.allocations) if isinstance(DEVICE, CpuDevice) else DEVICE.free_bytes())
        WORLD.Barrier()
    # A GPU keeps what its first kernels needed.
    assert len(set(left[4:])) == 1, left
    assert left[-1] == 0 or not isinstance(DEVICE, CpuDevice)


def handles() -> None:
    """Handles come and go on one communicator, and so do those that do not fit: they leave no memory of the device."""
    fields = {"top_k": 1, "hidden": HIDDEN, "max_tokens_per_rank": 4}
    routing, allocate = (np.zeros((4, 1), int), np.ones((4, 1), np.float32)), DEVICE.allocate
    for layout in ("flat", "expert_major"):
        with EpCommunicator(WORLD, config(layout=layout, **fields)) as comm:
            before = len(DEVICE.allocations)
            for number in range(4):
                handle = comm.create_handle(*routing, stream=STREAM)
                if number % 2:
                    handle.destroy()
                del handle
                gc.collect()
                assert len(DEVICE.allocations) == before
            for place in range(0, 24, 3):
                left = iter(range(place))

                def scarce(nbytes: int, left: Iterator[int] = left) -> int:
                    if next(left, None) is None:
                        raise BenchError("does not fit")
                    return int(allocate(nbytes))

                DEVICE.allocate = scarce
                with refused(BenchError, "does not fit"):
                    comm.create_handle(*routing, stream=STREAM)
                DEVICE.allocate = allocate
                assert len(DEVICE.allocations) == before, place
            comm.create_handle(*routing, stream=STREAM).destroy()
        assert len(DEVICE.allocations) == 0


# ---- programs for GPUs alone ----


def ordered() -> None:
    """Calls return while the caller's stream is busy, and come between what it holds and what it gets afterwards."""
    import cupy

    busy = cupy.RawKernel(
        'extern "C" __global__ void busy(long long ns) {'
        'long long start, now; asm volatile("mov.u64 %0, %globaltimer;" : "=l"(start));'
        'do asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now)); while (now - start < ns); }',
        "busy",
    )
    busy.compile()
    for mode, layout in (("ht", "flat"), ("ll", "expert_major")):
        fields = {"top_k": TOP_K, "hidden": HIDDEN, "mode": mode, "layout": layout, "max_tokens_per_rank": TOKENS}
        with EpCommunicator(WORLD, config(**fields, expert_elements=ELEMENTS)) as comm, STREAM:
            topk_idx = np.argsort(np.random.default_rng(RANK).random((TOKENS, EXPERTS)), axis=1)[:, :TOP_K]
            ranks = np.stack([(topk_idx // 4 == rank).any(axis=1) for rank in range(RANKS)]).sum(axis=0)
            handle = comm.create_handle(topk_idx, np.ones(topk_idx.shape, np.float32), stream=STREAM)
            rows = cupy.zeros((TOKENS, HIDDEN), np.float32)
            out = cupy.empty_like(rows)
            params = cupy.empty((len(comm.local_experts), ELEMENTS), np.float32)
            whole = cupy.empty((EXPERTS, ELEMENTS), np.float32)
            handle.combine(handle.dispatch(rows, stream=STREAM).tokens, out, stream=STREAM)
            # cupy compiles what fills and copies at its first use.
            out.copy().fill(1)
            for value in (3, 5):
                WORLD.Barrier()
                busy((1,), (1,), (np.int64(300_000_000),))
                rows.fill(value)
                received = handle.dispatch(rows, stream=STREAM)
                rows.fill(99)
                handle.combine(cupy.asarray(received.tokens), out, stream=STREAM)
                assert not STREAM.done
                kept = out.copy()
                out.fill(99)
                params.fill(value + RANK)
                comm.all_gather_experts(params, None, whole, stream=STREAM)
                params.fill(99)
                gathered = whole.copy()
                STREAM.synchronize()
                share = TOP_K if layout == "expert_major" else ranks[:, None]
                np.testing.assert_array_equal(kept.get(), np.broadcast_to(value * share, kept.shape))
                truth = np.repeat(value + np.arange(EXPERTS) // 4, ELEMENTS).reshape(EXPERTS, ELEMENTS)
                np.testing.assert_array_equal(gathered.get(), truth)


def tensors() -> None:
    """Tensors of torch in, what it makes of the results out, launched and in its graphs."""
    import torch

    torch.cuda.set_device(DEVICE.index)
    stream, bfloat16 = torch.cuda.Stream(), torch.bfloat16
    shape = (TOKENS, HIDDEN)
    fields = {"top_k": TOP_K, "hidden": HIDDEN, "mode": "ll", "layout": "expert_major", "dtype": "bfloat16"}
    fields |= {"max_tokens_per_rank": TOKENS, "expert_elements": ELEMENTS}
    with EpCommunicator(WORLD, config(**fields)) as comm, torch.cuda.stream(stream):
        generator = torch.Generator("cuda").manual_seed(RANK)
        scores = torch.rand((TOKENS, EXPERTS), device="cuda", generator=generator)
        weights, topk_idx = (part.contiguous() for part in scores.topk(TOP_K))
        idx = topk_idx.to(torch.int32)
        rows, out = torch.ones(shape, device="cuda", dtype=bfloat16), torch.zeros(shape, device="cuda", dtype=bfloat16)
        with refused(UsageError, "topk_idx on the device is int64"):
            comm.create_handle(topk_idx, weights, stream=stream)
        handle = comm.create_handle(idx, weights, stream=stream)
        graph = torch.cuda.CUDAGraph()

        def pair() -> None:
            handle.update(idx, weights, stream=stream)
            came = torch.as_tensor(handle.dispatch(rows, stream=stream).tokens.view("int16"), device="cuda")
            handle.combine(came.view(bfloat16) * 2, out, stream=stream)

        params = torch.zeros((len(comm.local_experts), ELEMENTS), device="cuda", dtype=bfloat16)
        whole = torch.zeros((EXPERTS, ELEMENTS), device="cuda", dtype=bfloat16)
        numbers = torch.arange(EXPERTS, device="cuda")[:, None].to(bfloat16)
        pair()
        stream.synchronize()
        # Capturing, torch forbids what is not to be part of a graph; nothing of these buffers has been called before.
        with torch.cuda.graph(graph, stream=stream):
            pair()
            comm.all_gather_experts(params, None, whole, stream=stream)
        for draw in range(4):
            scores = torch.rand((TOKENS, EXPERTS), device="cuda", generator=generator)
            weights.copy_(scores.topk(TOP_K).values)
            idx.copy_(scores.topk(TOP_K).indices)
            rows.copy_(torch.randint(-8, 9, shape, device="cuda", generator=generator))
            out.fill_(99)
            params.copy_(numbers[list(comm.local_experts)] + draw)
            if draw == 2:
                pair()
                comm.all_gather_experts(params, None, whole, stream=stream)
            else:
                graph.replay()
            torch.testing.assert_close(whole, (numbers + draw).expand_as(whole), rtol=0, atol=0)
            expected = rows.float() * weights.sum(dim=1, keepdim=True) * 2
            torch.testing.assert_close(out.float(), expected, rtol=0.02, atol=0.05)
        comm.synchronize()
        with refused(UsageError, "is a default one"):
            handle.dispatch(rows, stream=torch.cuda.default_stream())
        del graph


if __name__ == "__main__":
    cuda_engine.device_of = lambda _: DEVICE
    globals()[sys.argv[2]]()
