"""Communicators over GPUs: calls are enqueued into the caller's stream, kernels read and write its buffers."""

from __future__ import annotations

import contextlib
import functools
import math
import weakref
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any, Generic, TypeVar, cast

import numpy as np

from ncclep_bench.backends.contract import Stats, sum_of
from ncclep_bench.backends.cuda.backend import row_waiver, token_waiver
from ncclep_bench.backends.cuda.distant import DistantTokenHandle
from ncclep_bench.backends.cuda.experts import RegisteredExpertHandle
from ncclep_bench.backends.cuda.registration import Registrations
from ncclep_bench.backends.cuda.session import CudaSession
from ncclep_bench.backends.cuda.tokens import VEC_BYTES, TokenHandle
from ncclep_bench.backends.host.session import HostSession
from ncclep_bench.backends.host.tokens import check_routing
from ncclep_bench.ep.agreement import CallMismatchError
from ncclep_bench.ep.buffers import Array, view_of
from ncclep_bench.ep.device_buffers import DeviceArray, DeviceView, on_device, stream_address, view_of_device
from ncclep_bench.errors import CannotRunError, RankError, UsageError
from ncclep_bench.model.dtype import DType, dtype_named
from ncclep_bench.model.ep_config import EpConfig
from ncclep_bench.model.placement import Placement
from ncclep_bench.native.loader import Launches
from ncclep_bench.runtime.device import callers_device
from ncclep_bench.runtime.device_contract import Device

device_of: Callable[[int], Device] = callers_device
"""What runs a rank's kernels: a GPU, in tests a CPU."""
_PUT_OFF: defaultdict[Device, list[Callable[[], None]]] = defaultdict(list)
"""What would break a capture, of whichever communicator, and is done at the first call after it."""
Method = TypeVar("Method", bound=Callable[..., Any])
Handle = TypeVar("Handle", bound=TokenHandle | RegisteredExpertHandle)
_CAPTURED = ("update", "dispatch", "combine", "all_gather_experts", "reduce_scatter_expert_grads")
"""Calls that a graph can hold, of `update` those in which the host takes no part."""


def _on_device(method: Method) -> Method:
    """The same with the rank's device current, which the caller's thread need not have."""

    @functools.wraps(method)
    def on_device(self: Any, *args: Any, **named: Any) -> Any:
        with self.device.current():
            return method(self, *args, **named)

    return cast(Method, on_device)


class CudaEngine:
    """A session on this rank's GPU, beside the one on the host through which calls are agreed on."""

    def __init__(self, session: HostSession, config: EpConfig, placement: Placement) -> None:
        self._config, self._placement, self._dtype = config, placement, dtype_named(config.dtype)
        self.device = _device_of_each(session)
        with self.device.current():
            self._session = CudaSession(
                session.group, self.device, deadline_s=config.deadline_s, transport=config.transport
            )
        self.local: Collection[int] = sorted(set(range(session.size)) - self._session.out_of_reach)
        self._given: list[int] = []
        self._broken: RankError | None = None
        self._open: set[_Calls[Any]] = set()
        self._registrations: Registrations | None = None
        self._moved = Stats()

    # ---- buffers and streams ----

    @_on_device
    def view(self, value: object, what: str) -> Array:
        """Raises UsageError for what is not memory of this rank's device to its end, or not aligned."""
        array = view_of_device(value, what)
        if array.dtype.type is np.void and self._dtype.numpy.kind == "V" and array.itemsize == self._dtype.itemsize:
            # The interface has no name for bfloat16 and float8.
            array = array.view(self._dtype.numpy)
        if not array.size:
            return array
        address = array.ctypes.data
        end = address + array.nbytes
        allocation = self.device.allocation_of(address)
        behind = end - allocation.base - allocation.nbytes
        if behind > 0:
            if self.device.export(allocation):
                raise UsageError(f"{what} ends {behind} bytes behind its allocation", hint="allowed: to its end")
            # Memory that is mapped page by page may be many allocations.
            self.device.allocation_of(end - 1)
        if address % VEC_BYTES:
            raise UsageError(f"{what} lies at {address:#x}", hint=f"allowed: multiples of {VEC_BYTES}")
        return array

    def routing_view(self, value: object, what: str) -> Array:
        """A routing may lie on the host too; `update` then waits for the device."""
        return self.view(value, what) if on_device(value) else view_of(value, what)

    def check_routing(self, topk_idx: Array, topk_weights: Array) -> None:
        rank, config = self._session.rank, self._config
        there = isinstance(topk_idx, DeviceView)
        if there and (topk_idx.dtype != np.int32 or not topk_idx.flags.c_contiguous):
            raise UsageError(
                f"rank {rank}: topk_idx on the device is {topk_idx.dtype}{list(topk_idx.shape)}, "
                f"strides {topk_idx.strides}",
                hint="allowed: contiguous int32; or any integers in a numpy array",
            )
        check_routing(
            rank,
            topk_idx,
            topk_weights,
            top_k=config.top_k,
            # Only the kernels look at those on the device.
            num_experts=None if there else config.num_experts,
            slots=config.max_tokens_per_rank,
        )

    @contextlib.contextmanager
    def during(self, stream: object, call: str) -> Iterator[None]:
        """Raises what the device has reported since, too, and again what has left only the end."""
        if self._broken is not None:
            raise RankError(self._broken.message, ranks=self._broken.ranks, hint="only destroy is left")
        address = stream_address(stream, f"rank {self._session.rank}: {call}")
        self._session.check_told()
        try:
            with self.device.within(address):
                if self.device.capturing():
                    self._check_captured(call)
                else:
                    _do_put_off(self.device)
                yield
        except CallMismatchError:
            raise
        except RankError as error:
            self._broken = error
            raise

    def _check_captured(self, call: str) -> None:
        if call not in _CAPTURED:
            self._refuse_capture(call, ", ".join(_CAPTURED))
        if self._session.staging is not None:
            self._refuse_capture(f"{call} with ranks out of reach", "calls outside of a capture")

    def _refuse_capture(self, call: str, allowed: str) -> None:
        if self.device.capturing():
            raise UsageError(
                f"rank {self._session.rank}: {call} in a stream that is being captured", hint=f"allowed: {allowed}"
            )

    @_on_device
    def zeros(self, shape: tuple[int, ...], dtype: Any) -> DeviceArray:
        address = self._allocate(shape, dtype)
        array = DeviceArray(address, shape, dtype)
        # Freeing waits for all that the GPU still does, the caller's kernels too.
        free = functools.partial(self.device.free, address)
        weakref.finalize(array, _after_capture, self.device, free)
        return array

    @_on_device
    def empty(self, shape: tuple[int, ...], dtype: Any) -> DeviceArray:
        self._given.append(address := self._allocate(shape, dtype))
        return DeviceArray(address, shape, dtype)

    def _allocate(self, shape: tuple[int, ...], dtype: Any) -> int:
        self._refuse_capture("a new array", "buffers of one's own, as out")
        return self.device.allocate(max(math.prod(shape) * np.dtype(dtype).itemsize, VEC_BYTES))

    # ---- calls ----

    @_on_device
    def experts(self, elements: int) -> CudaExpertCalls:
        self._refuse_capture("the first call of this size", "sizes called before, or in the EpConfig")
        block_bytes = elements * self._dtype.itemsize
        self._refuse(row_waiver(self._session.size, block_bytes))
        if self._registrations is None:
            # Of all sizes: what one has dropped may lie where another is to be mapped.
            capacity = self._config.ep_mr_cache_size
            self._registrations = Registrations(self._session, self._placement.num_experts, capacity)
        make = functools.partial(
            RegisteredExpertHandle,
            placement=self._placement,
            block_bytes=block_bytes,
            registrations=self._registrations,
            whole=(),
            part=(),
        )
        calls = CudaExpertCalls(self._made(make), self, self._dtype)
        self._open.add(calls)
        return calls

    @_on_device
    def tokens(self) -> CudaTokenCalls:
        config = self._config
        assert config.hidden is not None
        if config.max_tokens_per_rank is None:
            raise UsageError("create_handle on the cuda backend needs max_tokens_per_rank in the EpConfig")
        self._refuse(token_waiver(self._placement, config.hidden * self._dtype.itemsize, config.top_k))
        make = functools.partial(
            TokenHandle if self._session.staging is None else DistantTokenHandle,
            placement=self._placement,
            top_k=config.top_k,
            hidden=config.hidden,
            dtype=self._dtype,
            mode=config.mode,
            layout=config.row_layout,
            max_tokens=config.max_tokens_per_rank,
            alignment=config.alignment,
        )
        calls = CudaTokenCalls(self._made(make), self)
        self._open.add(calls)
        return calls

    def _made(self, make: Callable[[CudaSession], Handle]) -> Handle:
        scope = self._session.scope()
        try:
            return make(scope)
        except BaseException:
            scope.release()
            raise

    def _refuse(self, reason: str | None) -> None:
        if reason is not None:
            raise UsageError(f"the cuda backend cannot run this: {reason}", hint="backend host can, on CPU memory")

    def leave(self, calls: _Calls[Any]) -> None:
        """Hear of the end of calls whose `stats` can still be asked."""
        self._open.remove(calls)
        self._moved = sum_of(self._moved, calls.stats())

    @_on_device
    def stats(self) -> Stats:
        self._refuse_capture("stats", "outside of a capture")
        registered = Stats(counters=dict(self._registrations.stats.counters)) if self._registrations else Stats()
        return sum_of(self._moved, registered, *(calls.stats() for calls in self._open))

    @_on_device
    def synchronize(self) -> None:
        self._refuse_capture("synchronize", "outside of a capture")
        _do_put_off(self.device)
        self._session.check()

    @_on_device
    def close(self) -> None:
        """Waits for this rank's device."""
        _after_capture(self.device, self._close)

    def _close(self) -> None:
        _do_put_off(self.device)
        with contextlib.ExitStack() as stack:
            while self._given:
                stack.callback(self.device.free, self._given.pop())
            stack.callback(self._session.close)
            if self._registrations is not None:
                stack.callback(self._registrations.close)


class _Calls(Generic[Handle]):
    """One handle's calls, and what it has moved."""

    def __init__(self, handle: Handle, engine: CudaEngine) -> None:
        self._handle, self._engine = handle, engine
        self.device = handle.session.device

    def stats(self) -> Stats:
        """What has been moved so far; waits for the device."""
        wire_bytes, control_bytes = self._handle.moved()
        return Stats(wire_bytes=wire_bytes, control_bytes=control_bytes)

    @_on_device
    def close(self) -> None:
        _after_capture(self.device, self._close)

    def _close(self) -> None:
        with contextlib.ExitStack() as stack:
            stack.callback(self._handle.session.release)
            stack.callback(self._handle.close)
            stack.callback(self._engine.leave, self)


class CudaExpertCalls(_Calls[RegisteredExpertHandle]):
    """Rows are registered where the caller has them, those that no peer can open copied into this rank's heap."""

    def __init__(self, handle: RegisteredExpertHandle, engine: CudaEngine, dtype: DType) -> None:
        super().__init__(handle, engine)
        self._dtype = dtype
        self._held = handle.placement.experts_of_rank[handle.session.rank]

    def activate(self, active: Array) -> None:
        self._active = active

    def all_gather(self, params: Array, out: Array, *, in_place: bool = False) -> None:
        whole = self._rows(out)
        self._handle.place(whole, [whole[expert] for expert in self._held] if in_place else self._rows(params))
        self._handle.gather(self._active)
        self._handle.run()

    def reduce_scatter(self, grads: Array, out: Array | None) -> None:
        whole = self._rows(grads)
        self._handle.place(whole, [whole[expert] for expert in self._held] if out is None else self._rows(out))
        self._handle.reduce(self._active, self._dtype.name)
        self._handle.run()

    def _rows(self, array: Array) -> list[int]:
        first, step = array.ctypes.data, self._handle.block_bytes
        return list(range(first, first + len(array) * step, step))


class CudaTokenCalls(_Calls[TokenHandle]):
    """Kernels read the caller's rows where they lie; what has come is handed out where it came to."""

    def __init__(self, handle: TokenHandle, engine: CudaEngine) -> None:
        super().__init__(handle, engine)
        self._received: dict[str, DeviceArray] = {}
        self._launches = Launches()

    def update(self, topk_idx: Array, topk_weights: Array) -> None:
        """In mode ht it returns when all ranks' counts have come.

        Of a routing on the device an expert that does not exist counts as masked, and is reported.
        """
        self._engine.check_routing(topk_idx, topk_weights)
        handle = self._handle
        if self.device.capturing():
            where = f"rank {handle.session.rank}: update in a stream that is being captured"
            if handle.mode == "ht":
                raise UsageError(f"{where} in mode ht, which waits for counts", hint="allowed: mode ll")
            if not isinstance(topk_idx, DeviceView) or not isinstance(topk_weights, DeviceView):
                raise UsageError(f"{where} of a routing on the host", hint="allowed: int32 and float32 on the GPU")
        for name, array, dtype in (("topk_idx", topk_idx, np.int32), ("topk_weights", topk_weights, np.float32)):
            if isinstance(array, DeviceView):
                self.device.copy(handle.own[name], array.ctypes.data, array.nbytes)
            else:
                self.device.write(handle.own[name], np.ascontiguousarray(array, dtype))
        if len(topk_idx) != handle.tokens:
            self._launches.clear()
            handle.expect(len(topk_idx))
        handle.update()
        if handle.mode == "ht" or not self._received:
            self._received = {name: DeviceArray(*place) for name, place in handle.received().items()}
        if handle.mode == "ht":
            handle.session.check()

    def dispatch(self, tokens: Array, scales: Array | None = None) -> Mapping[str, DeviceArray]:
        handle = self._handle
        _check_rows(handle, "tokens", tokens, (handle.tokens, handle.hidden))
        if scales is not None:
            _check_rows(handle, "scales", scales, (handle.tokens, handle.scale_words))
        place, rows = self._received["tokens"], tokens.ctypes.data
        if tokens.nbytes and rows < place.address + place.nbytes and place.address < rows + tokens.nbytes:
            raise UsageError(f"rank {handle.session.rank}: tokens lie where what comes in is written")
        factors = handle.own["scales"] if scales is None else scales.ctypes.data
        key = ("dispatch", rows, factors)
        self._launches.get(key, lambda: handle.dispatching(rows=rows, scales=factors))()
        return self._received

    def combine_rows(self) -> DeviceArray:
        handle = self._handle
        if handle.staged:
            raise UsageError("combine_rows: layout expert_major brings back the experts' outputs where they lie")
        place = self._received["tokens"]
        return DeviceArray(handle.own["returning"], place.shape, place.dtype)

    def combine(self, rows: Array, out: Array) -> None:
        handle = self._handle
        if handle.dtype.scaled:
            raise UsageError(f"combine adds float32, float16 or bfloat16, not {handle.dtype.name}")
        _check_rows(handle, "rows", rows, self._received["tokens"].shape)
        _check_rows(handle, "out", out, (handle.tokens, handle.hidden))
        if np.may_share_memory(rows, out):
            raise UsageError(f"rank {handle.session.rank}: out overlaps rows", hint="allowed: memory of its own")
        source, target = rows.ctypes.data, out.ctypes.data
        if handle.bulk is not None and source != handle.own["returning"]:
            # Their owners fetch them, so they must lie where these reach.
            self.device.copy(handle.own["returning"], source, rows.nbytes)
            source = handle.own["returning"]
        key = ("combine", source, target)
        self._launches.get(key, lambda: handle.combining(source, combined=target))()


def _after_capture(device: Device, free: Callable[[], None]) -> None:
    """Now, or where something is being captured later."""
    if device.capturing():
        _PUT_OFF[device].append(free)
    else:
        free()


def _do_put_off(device: Device) -> None:
    while _PUT_OFF[device]:
        _PUT_OFF[device].pop(0)()


def _device_of_each(session: HostSession) -> Device:
    """This rank's; raises CannotRunError on all ranks when one has none."""
    device, reason = None, ""
    try:
        device = device_of(session.rank)
    except CannotRunError as error:
        reason = f"{error.message} ({error.hint})"
    reasons = [data.decode() for data in session.allgather(reason.encode())]
    if device is None or any(reasons):
        raise CannotRunError("; ".join(filter(None, reasons)), hint='backend="host" needs no GPU')
    return device


def _check_rows(handle: TokenHandle, name: str, array: Array, shape: tuple[int, ...]) -> None:
    if array.shape != shape:
        raise UsageError(
            f"rank {handle.session.rank}: {name} is {array.dtype}{list(array.shape)}", hint=f"allowed: {list(shape)}"
        )
