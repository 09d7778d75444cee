"""EpCommunicator: init, topology, warm-up, calls and destroy of one expert-parallel group."""

from __future__ import annotations

import operator
import weakref
from collections.abc import Sequence
from types import TracebackType
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from ncclep_bench.backends.contract import Stats, sum_of
from ncclep_bench.backends.host.session import HostSession
from ncclep_bench.ep.agreement import CallMismatchError, agreed_config, difference, join, odd_ranks
from ncclep_bench.ep.buffers import Array, checked, checked_rows
from ncclep_bench.ep.device_buffers import on_device
from ncclep_bench.ep.engine import Engine, ExpertCalls
from ncclep_bench.ep.handle import EpHandle, routing_of
from ncclep_bench.ep.held import Held
from ncclep_bench.ep.routes import direct_topology, named_links
from ncclep_bench.errors import UsageError
from ncclep_bench.model.dtype import dtype_named
from ncclep_bench.model.ep_config import EpConfig
from ncclep_bench.registry import ENGINES

_EXPERT_CALLS = ("all_gather_experts", "reduce_scatter_expert_grads")


class EpCommunicator:
    """Expert-parallel communication of one group; collective to create, and every call is collective.

    `group`: an mpi4py communicator (duplicated, it stays the caller's), or any object with rank, size,
    allgather(bytes) and barrier(). All ranks must give an equal `ep_config`: it is compared, within `init_deadline_s`,
    before anything else is collective. Raises ConfigMismatchError naming field, ranks and values, RankError naming who
    is absent, InputError (alike on all ranks) for a configuration that contradicts itself.

    A call that is refused (UsageError) has moved nothing and can be repeated; meanwhile the other ranks wait, and after
    `deadline_s` raise RankError naming this one, after which only `destroy` is left. Ranks that call different expert
    collectives, or the same with other sizes, all raise CallMismatchError.

    `destroy`, the end of a `with` block, or dropping the last reference give back all memory, descriptors and requests;
    none waits for another rank's call, on GPUs for what has been enqueued. (To the MPI standard freeing a communicator
    is collective; MPICH and Open MPI free each rank's part at once.)

    On the backend `host` buffers are numpy arrays, CPU tensors, and objects with DLPack or the buffer protocol;
    contiguous, of the configured dtype. Memory from `empty` is read and written by peers where it lies; any other is
    copied at each call.

    On the backend `cuda` buffers are arrays with __cuda_array_interface__ and CUDA tensors on this rank's GPU: the one
    of its number on the host where a launcher of MPI tells that, else the current one at construction. Every call needs
    a `stream` that is no default one: what it enqueues comes after what the stream holds, and before what the
    stream gets afterwards; the call itself need not wait for the GPU, and communicators of one process take turns. What
    ranks' streams hold before a call may take them `deadline_s` apart at most. What the GPU reports, such as a peer
    that does not come, is raised at a later call, or by `synchronize`, after which only `destroy` is left. Results are
    DeviceArrays; dropping one waits for the GPU, and making one may: `out` saves that.

    There, where ranks reach each other's memory, both expert collectives, a handle's `dispatch` and `combine` and, in
    mode `ll` with a routing on the GPU, its `update` can be captured into a CUDA graph, by all ranks alike: replays
    take what the same buffers then hold. Each call needs its `out`, an expert collective also a size that has been
    called before or is in the EpConfig; `stats`, `synchronize` and the warm-up are for outside. All ranks replay it
    equally often, in the same order among their other calls, and not after the handle's or the communicator's end. Of a
    handle, without `update` it holds for the number of tokens (another is raised as above), in mode `ht` for the very
    routing with which it was captured; with it, the next call outside needs an `update` before. Of expert collectives
    it holds for `needed` and `has_gradient` as they were, and the registrations it needs stay until the communicator's
    end, beside `ep_mr_cache_size`. A replay is its stream's: only streams put it in order with other calls, and
    `synchronize` does not wait for it. While something else is being captured, no array or handle may be dropped, since
    that frees memory.
    """

    def __init__(self, group: object, ep_config: EpConfig) -> None:
        if not isinstance(ep_config, EpConfig):
            raise UsageError(f"ep_config is a {type(ep_config).__name__}", hint="allowed: ncclep_bench.EpConfig")
        # Python lets any value into a field, and the agreement that refuses it must itself end.
        seconds: object = ep_config.init_deadline_s
        if not isinstance(seconds, float | int) or not 0 < seconds < float("inf"):
            raise UsageError(f"init_deadline_s is {seconds!r}", hint="allowed: seconds above 0")
        self._held = Held()
        # The finalizer knows what is to be freed and not the communicator, which otherwise could never be dropped.
        self._finalizer = weakref.finalize(self, self._held.free)
        try:
            self._start(group, ep_config)
        except BaseException:
            self.destroy()
            raise

    def _start(self, group: object, config: EpConfig) -> None:
        held = self._held
        deadline_s = config.init_deadline_s
        held.group = joined = join(group, deadline_s)
        self.config = config = agreed_config(config, joined, deadline_s)
        self.rank, self.size = joined.rank, joined.size
        self.placement = config.check(joined.size)
        self._dtype = dtype_named(config.dtype)
        named_links(config.topology)
        held.session = HostSession(joined, transport=config.transport, deadline_s=deadline_s)
        joined.deadline_s = deadline_s
        engine: Engine = ENGINES.get(config.backend)(held.session, config, self.placement)
        held.engine = engine
        self.topology = direct_topology(config.topology, self.rank, self.size, tuple(engine.local))
        held.session.deadline_s = joined.deadline_s = config.deadline_s
        if config.expert_elements is not None:
            self._expert_handle(config.expert_elements)

    # ---- facts and memory ----

    @property
    def destroyed(self) -> bool:
        """Whether everything has been given back."""
        return not self._finalizer.alive

    @property
    def local_experts(self) -> tuple[int, ...]:
        """The experts that this rank holds, in the order of its rows."""
        return self.placement.experts_of_rank[self.rank]

    @property
    def stats(self) -> Stats:
        """A copy of what this rank has counted so far: bytes moved, hits and misses of the registration cache."""
        return sum_of(self._held.open_session("stats").stats, self._held.open_engine("stats").stats())

    def size_of(self, buffer: object, what: str) -> int:
        """Elements of a buffer; raises UsageError, calling it `what`, for memory that calls do not take."""
        return self._held.open_engine("size_of").view(buffer, what).size

    def empty(self, shape: int | tuple[int, ...], dtype: npt.DTypeLike | None = None) -> Any:
        """Zeroed memory that peers reach without a copy; local; in the configured dtype unless told otherwise.

        It is the communicator's until `destroy`; a numpy array that somebody still holds then stays readable and
        writable, a DeviceArray must not be used any more. Raises NotEnoughSharedMemoryError with the sum, or on GPUs
        BenchError.
        """
        engine = self._held.open_engine("empty")
        try:
            whole = tuple(map(operator.index, shape if isinstance(shape, Sequence) else (shape,)))
            kind = self._dtype.numpy if dtype is None else np.dtype(dtype)
        except TypeError as error:
            raise UsageError(
                f"rank {self.rank}: empty: {error}", hint="allowed: whole numbers, a numpy dtype"
            ) from None
        if min(whole, default=0) < 0 or kind.hasobject:
            raise UsageError(
                f"rank {self.rank}: empty: {list(whole)} of {kind}", hint="allowed: 0 and more, plain numbers"
            )
        return engine.empty(whole, kind)

    # ---- tokens ----

    def create_handle(self, topk_idx: object, topk_weights: object, *, stream: object = None) -> EpHandle:
        """Buffers and layout for one routing at a time: int [tokens, top_k] (−1 masked) and float32; collective.

        Needs `hidden` in the EpConfig, and `max_tokens_per_rank` in mode `ll` and on the backend `cuda`.
        """
        engine, held = self._held.open_engine("create_handle"), self._held
        if self.config.hidden is None:
            raise UsageError("create_handle needs hidden in the EpConfig")
        # Checked before the buffers are made, which is collective: a rank whose routing is refused can try again.
        engine.check_routing(*routing_of(engine, f"rank {self.rank}: create_handle", topk_idx, topk_weights))
        with engine.during(stream, "create_handle"):
            tokens = engine.tokens()
        held.tokens.add(tokens)
        handle = EpHandle(self, held, tokens, self._dtype)
        weakref.finalize(handle, held.close_tokens, tokens)
        handle.update(topk_idx, topk_weights, stream=stream)
        return handle

    # ---- experts ----

    def all_gather_experts(
        self, params: object, needed: object = None, out: object = None, *, stream: object = None
    ) -> Any:
        """Bring every needed expert into its row of `out` [num_experts, expert_elements]; collective.

        `params` [local experts, expert_elements]; both may be flat. `needed`: bool [num_experts], what this rank wants,
        None for all; other rows keep what they hold. In place: `params` is all of `out`, with this rank's experts in
        their rows (then on all ranks), or exactly that part of `out`. Returns `out`, or a new array.
        """
        call, experts, held = _EXPERT_CALLS[0], self.config.num_experts, len(self.local_experts)
        engine = self._held.open_engine(call)
        active = self._active(call, "needed", needed)
        source = self._buffer(call, "params", params)
        target = None if out is None else self._buffer(call, "out", out, writable=True)
        in_place = target is not None and _same_memory(source, target)
        rows = experts if in_place else held
        elements = self._elements(call, "params", source, rows)
        source = checked_rows(source, self._name(call, "params"), rows, elements)
        if target is not None:
            target = checked_rows(target, self._name(call, "out"), experts, elements)
            if not in_place:
                self._check_apart(call, source, "params", target, "out")
        with engine.during(stream, call):
            if target is None:
                out = engine.zeros((experts, elements), self._dtype.numpy)
                target = self._buffer(call, "out", out)
            self._agree(call, elements, active, in_place).all_gather(source, target, in_place=in_place)
        return out

    def reduce_scatter_expert_grads(
        self, grads: object, has_gradient: object = None, out: object = None, *, stream: object = None
    ) -> Any:
        """Sum every expert's gradients over the ranks that have one, on each rank that holds the expert; collective.

        `grads` [num_experts, expert_elements], or flat by expert * expert_elements; only rows with a gradient are read.
        `has_gradient`: bool [num_experts], None for all. `out` [local experts, expert_elements], zero where nobody
        has a gradient. In place: `out` is all of `grads`, whose rows of this rank's experts become the sums, or exactly
        that part of it. Sums are in float32, rounded once. Returns `out`, or a new array.
        """
        call, experts, held = _EXPERT_CALLS[1], self.config.num_experts, len(self.local_experts)
        engine = self._held.open_engine(call)
        if self._dtype.scaled:
            raise UsageError(f"{call} adds float32, float16 or bfloat16, not {self._dtype.name}")
        active = self._active(call, "has_gradient", has_gradient)
        source = self._buffer(call, "grads", grads)
        elements = self._elements(call, "grads", source, experts)
        source = checked_rows(source, self._name(call, "grads"), experts, elements)
        target = None if out is None else self._buffer(call, "out", out, writable=True)
        in_place = target is not None and _same_memory(source, target)
        if target is not None and not in_place:
            target = checked_rows(target, self._name(call, "out"), held, elements)
            in_place = self._check_apart(call, target, "out", source, "grads")
        if in_place and not source.flags.writeable:
            raise UsageError(f"{self._name(call, 'grads')} is read-only", hint="allowed in place: writable memory")
        with engine.during(stream, call):
            if target is None:
                out = engine.zeros((held, elements), self._dtype.numpy)
                target = self._buffer(call, "out", out)
            self._agree(call, elements, active, False).reduce_scatter(source, None if in_place else target)
        return out

    def warmup_all_gather_experts(self, params: object = None, out: object = None, *, stream: object = None) -> None:
        """Do now what a first all_gather_experts would otherwise pay for; collective.

        One expert of each rank travels: from `params` to `out` as in that call, whose memory is thereby registered and
        mapped; None stands for scratch memory, and needs `expert_elements` in the EpConfig.
        """
        if params is None:
            if self.config.expert_elements is None:
                raise UsageError("warmup_all_gather_experts needs params, or expert_elements in the EpConfig")
            shape = (len(self.local_experts), self.config.expert_elements)
            engine = self._held.open_engine(call := "warmup_all_gather_experts")
            with engine.during(stream, call):
                params = engine.zeros(shape, self._dtype.numpy)
        needed = np.zeros(self.config.num_experts, bool)
        needed[[experts[0] for experts in self.placement.experts_of_rank if experts]] = True
        self.all_gather_experts(params, needed, out, stream=stream)

    def synchronize(self) -> None:
        """Return when all that has been called is done on this rank; raises what the GPU has reported."""
        self._held.open_engine("synchronize").synchronize()

    # ---- the end ----

    def destroy(self) -> None:
        """Give everything back, and tell ranks that still wait for this one; waits for nobody. May be called twice."""
        self._finalizer()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.destroy()

    # ---- checks ----

    def _name(self, call: str, buffer: str) -> str:
        return f"rank {self.rank}: {call}: {buffer}"

    def _buffer(self, call: str, name: str, value: object, *, writable: bool = False) -> Array:
        view = self._held.open_engine(call).view
        return checked(value, self._name(call, name), self._dtype.numpy, writable=writable, view=view)

    def _elements(self, call: str, name: str, array: Array, rows: int) -> int:
        """Elements of one expert: configured, or what the buffer holds per row."""
        if self.config.expert_elements is not None:
            return self.config.expert_elements
        if not rows or not array.size or array.size % rows:
            raise UsageError(
                f"{self._name(call, name)} has {array.size} elements for {rows} experts",
                hint="allowed: equally many for each; or set expert_elements in the EpConfig",
            )
        return array.size // rows

    def _active(self, call: str, name: str, value: object) -> Array:
        shape = (self.config.num_experts,)
        if value is None:
            return np.ones(shape, bool)
        if on_device(value):
            raise UsageError(
                f"{self._name(call, name)} is device memory",
                hint="allowed: bool on the host, where ranks agree on calls",
            )
        active = checked(value, self._name(call, name), bool)
        if active.shape != shape:
            raise UsageError(f"{self._name(call, name)} is {list(active.shape)}", hint=f"allowed: bool {list(shape)}")
        return active

    def _check_apart(self, call: str, part: Array, part_name: str, whole: Array, whole_name: str) -> bool:
        """Whether `part` is just the rows of this rank's experts in `whole`; raises UsageError for other overlaps."""
        if not part.size or not np.may_share_memory(part, whole):
            return False
        first = self.local_experts[0]
        consecutive = self.local_experts == tuple(range(first, first + len(part)))
        if not (consecutive and _same_memory(part, whole[first : first + len(part)])):
            raise UsageError(
                f"{self._name(call, part_name)} overlaps {whole_name}",
                hint=f"allowed in place: all of {whole_name}, or exactly the rows of this rank's experts in it",
            )
        return True

    def _agree(self, call: str, elements: int, active: Array, in_place: bool) -> ExpertCalls:
        """Exchange what this rank does; raises CallMismatchError on all ranks when they do different things."""
        header = np.array([_EXPERT_CALLS.index(call), elements, in_place], dtype=np.int64)
        record = np.concatenate([header.view(np.uint8), np.packbits(active)])
        records = np.stack(self._held.open_session(call).exchange(record, call))
        headers = np.ascontiguousarray(records[:, : header.nbytes]).view(np.int64)
        calls = [_EXPERT_CALLS[code] for code in headers[:, 0].tolist()]
        columns = {"the call": calls, "elements": headers[:, 1].tolist(), "in place": (headers[:, 2] != 0).tolist()}
        for name, values in columns.items():
            if len(set(values)) > 1:
                raise CallMismatchError(f"{call}: {difference(name, values)}", ranks=tuple(odd_ranks(values)))
        handle = self._expert_handle(elements)
        bits = np.unpackbits(records[:, header.nbytes :], axis=1, count=len(active))
        handle.activate(bits.astype(bool))
        return handle

    def _expert_handle(self, elements: int) -> ExpertCalls:
        experts = self._held.experts
        if elements not in experts:
            experts[elements] = self._held.open_engine("init").experts(elements)
        return experts[elements]


def _same_memory(one: Array, other: Array) -> bool:
    return one.ctypes.data == other.ctypes.data and one.size == other.size
