"""The gate to NCCL and NCCL EP: a group's communicator, whose operations are enqueued in a device's stream.

nccl4py, NVIDIA's own binding of the whole C API, is taken where it is installed; else cupy.cuda.nccl, which came with
cupy and knows neither windows nor a communicator's configuration.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import os
from abc import ABC, abstractmethod
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple, Protocol

from ncclep_bench.errors import BenchError, CannotRunError
from ncclep_bench.model.case import WINDOWS, Window
from ncclep_bench.model.dtype import DType
from ncclep_bench.runtime.device import CudaDevice, cupy_nccl
from ncclep_bench.runtime.device_contract import Device
from ncclep_bench.runtime.group import Group

_UINT8, _SUM = 1, 0
_COLL_SYMMETRIC, _CTA_POLICY_ZERO = 1, 2
_FIRST_VERSION: dict[Window, int] = {"off": 2_00_00, "symmetric": 2_27_00, "symmetric_zero_cta": 2_28_00}


_EP_NCCL = 2_30
"""The NCCL whose structures NCCL EP 0.2 is built and compiles its kernels for; 2.28 lacks them, 2.32 changed them."""
_EP_WAIT_NS = 20_000_000_000


class Part(NamedTuple):
    """Memory that goes to, or comes from, a peer."""

    peer: int
    address: int
    nbytes: int


class Communicator(Protocol):
    """What a backend asks of NCCL. Collective to create and to allocate from; operations only enqueue."""

    def allocate(self, nbytes: int) -> int:
        """Zeroed memory, in a window where the communicator has windows; the same size on all ranks."""

    def all_gather(self, send: int, recv: int, nbytes: int) -> None:
        """Everybody's `nbytes` into `recv`, in rank order."""

    def all_to_all(self, send: int, recv: int, nbytes: int) -> None:
        """`nbytes` to and from each rank, in rank order."""

    def all_reduce(self, send: int, recv: int, count: int, dtype: DType) -> None: ...

    def reduce_scatter(self, send: int, recv: int, count: int, dtype: DType) -> None:
        """Part `rank`, of `count` elements, of the sum of everybody's `send`."""

    def exchange(self, sends: Iterable[Part], receives: Iterable[Part]) -> None:
        """All of these messages at once; those between two ranks pair up in their order."""

    def free(self, address: int) -> None:
        """Give back what `allocate` gave."""

    def close(self) -> None:
        """Free what is left and leave the communicator; no graph may still hold its operations."""

    def abort(self) -> None:
        """End what is under way, without the peers."""


class _NcclCommunicator(ABC):
    """What both bindings share."""

    def __init__(self, device: CudaDevice) -> None:
        self._device = device
        self._owned: dict[int, Any] = {}

    @property
    def _stream(self) -> int:
        return int(self._device.stream.ptr)

    def allocate(self, nbytes: int) -> int:
        address = self._device.allocate(nbytes)
        self._owned[address] = None
        return address

    def free(self, address: int) -> None:
        del self._owned[address]
        self._device.free(address)

    def exchange(self, sends: Iterable[Part], receives: Iterable[Part]) -> None:
        self._group_start()
        for part in sends:
            self._send(part)
        for part in receives:
            self._receive(part)
        self._group_end()

    def close(self) -> None:
        # NCCL waits for the end of every graph that holds its operations: none may be waiting for the collector.
        gc.collect()
        self._device.synchronize()
        for address in [*self._owned]:
            self.free(address)
        self._destroy()

    @abstractmethod
    def _group_start(self) -> None: ...

    @abstractmethod
    def _group_end(self) -> None: ...

    @abstractmethod
    def _send(self, part: Part) -> None: ...

    @abstractmethod
    def _receive(self, part: Part) -> None: ...

    @abstractmethod
    def _destroy(self) -> None: ...


class _Nccl4py(_NcclCommunicator):
    """Through nccl4py."""

    def __init__(self, nccl: Any, group: Group, device: CudaDevice, window: Window, max_ctas: int | None) -> None:
        super().__init__(device)
        self._nccl, self._window = nccl, window
        config = nccl.Config()
        if max_ctas is not None:
            config.max_ctas = max_ctas
            config.min_ctas = 1
        if window == "symmetric_zero_cta":
            config.cta_policy = _CTA_POLICY_ZERO
        unique_id = bytearray(group.allgather(bytes(nccl.get_unique_id()) if group.rank == 0 else b"")[0])
        self.handle = nccl.comm_init_rank_scalable(group.size, group.rank, 1, unique_id, config.ptr)

    def allocate(self, nbytes: int) -> int:
        if self._window == "off":
            return super().allocate(nbytes)
        address = int(self._nccl.mem_alloc(nbytes))
        self._device.fill(address, nbytes, 0)
        self._owned[address] = self._nccl.comm_window_register(self.handle, address, nbytes, _COLL_SYMMETRIC)
        if not self._owned[address].handle:
            raise CannotRunError(
                f"NCCL registered no window of {nbytes} bytes", hint="NCCL_DEBUG=INFO says why; or run without windows"
            )
        return address

    def free(self, address: int) -> None:
        if self._window == "off":
            super().free(address)
            return
        self._device.synchronize()
        window = self._owned.pop(address)
        if window.handle:
            self._nccl.comm_window_deregister(self.handle, window)
        self._nccl.mem_free(address)

    def window(self, address: int) -> Any:
        """The window that begins at `address`."""
        return self._owned[address]

    def all_gather(self, send: int, recv: int, nbytes: int) -> None:
        self._nccl.all_gather(send, recv, nbytes, _UINT8, self.handle, self._stream)

    def all_to_all(self, send: int, recv: int, nbytes: int) -> None:
        self._nccl.allto_all(send, recv, nbytes, _UINT8, self.handle, self._stream)

    def all_reduce(self, send: int, recv: int, count: int, dtype: DType) -> None:
        self._nccl.all_reduce(send, recv, count, dtype.nccl_value, _SUM, self.handle, self._stream)

    def reduce_scatter(self, send: int, recv: int, count: int, dtype: DType) -> None:
        self._nccl.reduce_scatter(send, recv, count, dtype.nccl_value, _SUM, self.handle, self._stream)

    def _group_start(self) -> None:
        self._nccl.group_start()

    def _group_end(self) -> None:
        self._nccl.group_end()

    def _send(self, part: Part) -> None:
        self._nccl.send(part.address, part.nbytes, _UINT8, part.peer, self.handle, self._stream)

    def _receive(self, part: Part) -> None:
        self._nccl.recv(part.address, part.nbytes, _UINT8, part.peer, self.handle, self._stream)

    def _destroy(self) -> None:
        if self.handle is not None:
            self._nccl.comm_destroy(self.handle)
            self.handle = None

    def abort(self) -> None:
        if self.handle is not None:
            self._nccl.comm_abort(self.handle)
            self.handle = None


class _CupyNccl(_NcclCommunicator):
    """Through cupy.cuda.nccl."""

    def __init__(self, nccl: Any, group: Group, device: CudaDevice) -> None:
        super().__init__(device)
        self._nccl, self._size = nccl, group.size
        unique_id = group.allgather(nccl.get_unique_id() if group.rank == 0 else b"")[0]
        self._comm = nccl.NcclCommunicator(group.size, unique_id, group.rank)

    def all_gather(self, send: int, recv: int, nbytes: int) -> None:
        self._comm.allGather(send, recv, nbytes, _UINT8, self._stream)

    def all_to_all(self, send: int, recv: int, nbytes: int) -> None:
        # ncclAlltoAll without windows does the same; this binding does not have it.
        peers = range(self._size)
        self.exchange(
            [Part(peer, send + peer * nbytes, nbytes) for peer in peers],
            [Part(peer, recv + peer * nbytes, nbytes) for peer in peers],
        )

    def all_reduce(self, send: int, recv: int, count: int, dtype: DType) -> None:
        self._comm.allReduce(send, recv, count, dtype.nccl_value, _SUM, self._stream)

    def reduce_scatter(self, send: int, recv: int, count: int, dtype: DType) -> None:
        self._comm.reduceScatter(send, recv, count, dtype.nccl_value, _SUM, self._stream)

    def _group_start(self) -> None:
        self._nccl.groupStart()

    def _group_end(self) -> None:
        self._nccl.groupEnd()

    def _send(self, part: Part) -> None:
        self._comm.send(part.address, part.nbytes, _UINT8, part.peer, self._stream)

    def _receive(self, part: Part) -> None:
        self._comm.recv(part.address, part.nbytes, _UINT8, part.peer, self._stream)

    def _destroy(self) -> None:
        self._comm.destroy()

    def abort(self) -> None:
        self._comm.abort()


class Library(NamedTuple):
    """The libnccl of this process, and how it is reached."""

    version: int
    """As ncclGetVersion gives it: 2_28_09 is 2.28.9."""
    binding: str
    module: Any

    @property
    def name(self) -> str:
        return f"NCCL {self.version // 10000}.{self.version // 100 % 100}.{self.version % 100}"


@functools.cache
def library() -> Library:
    """NCCL as this process has it; there is never more than one. Raises CannotRunError naming what is missing."""
    with contextlib.suppress(ImportError):
        from nccl.bindings import nccl

        try:
            return Library(int(nccl.get_version()), "nccl4py", nccl)
        except RuntimeError as error:
            raise CannotRunError(
                f"nccl4py finds no libnccl: {str(error).splitlines()[0]}", hint="pip install nvidia-nccl-cu13"
            ) from error
    nccl = cupy_nccl()
    if not nccl.available:
        raise CannotRunError(
            "neither nccl4py nor cupy.cuda.nccl finds libnccl", hint="pip install 'ncclep-bench[cuda13]'"
        )
    return Library(int(nccl.get_version()), "cupy.cuda.nccl", nccl)


def missing() -> str | None:
    """Why NCCL cannot be used here, or None."""
    try:
        library()
    except CannotRunError as error:
        return error.message
    return None


def configuration_waiver(window: Window | None, max_ctas: int | None) -> str | None:
    """Why the NCCL of this process takes no such window or number of blocks, or None."""
    found = library()
    wanted = window or "off"
    if found.binding != "nccl4py":
        if wanted != "off":
            return f"window {wanted}: {found.binding} registers none, nccl4py does and is not installed"
        if max_ctas is not None:
            return f"num_sms {max_ctas}: {found.binding} configures no communicator, nccl4py does and is not installed"
        return None
    if found.version < _FIRST_VERSION[wanted]:
        return f"window {wanted}: {found.name} has none, {_FIRST_VERSION[wanted] // 100 / 100:.2f} is the first"
    if wanted != "off" and os.environ.get("NCCL_CUMEM_ENABLE") == "0":
        return f"window {wanted}: NCCL_CUMEM_ENABLE=0 forbids the memory that windows need"
    return None


def communicator(
    group: Group, device: CudaDevice, *, window: Window | None = None, max_ctas: int | None = None
) -> Communicator:
    """A communicator of `group`; collective. Raises BenchError with NCCL's reason.

    `max_ctas`: most blocks of a kernel.
    """
    if (reason := configuration_waiver(window, max_ctas)) is not None:
        raise CannotRunError(reason, hint=f"allowed: {', '.join(WINDOWS)} where NCCL and its binding have them")
    found = library()
    try:
        if found.binding == "nccl4py":
            return _Nccl4py(found.module, group, device, window or "off", max_ctas)
        return _CupyNccl(found.module, group, device)
    except Exception as error:
        raise BenchError(
            f"rank {group.rank}: {found.name} makes no communicator of {group.size} ranks: {error}",
            hint="NCCL_DEBUG=INFO says why",
        ) from error


@functools.cache
def ep_missing() -> str | None:
    """Why NCCL EP cannot run in this process, or None: what it needs, in the order in which it asks for it."""
    if (reason := missing()) is not None:
        return reason
    found = library()
    if found.binding != "nccl4py":
        return "NCCL EP needs nccl4py, which is not installed"
    try:
        from nccl import ep
    except ImportError as error:
        return f"nccl-extensions cannot be imported: {error}"
    if found.version // 100 != _EP_NCCL:
        return f"NCCL EP needs NCCL {_EP_NCCL / 100:.2f}, {found.name} is loaded: pip install nvidia-nccl-cu13==2.30.7"
    if os.environ.get("NCCL_CUMEM_ENABLE") == "0":
        return "NCCL_CUMEM_ENABLE=0 forbids the memory that NCCL EP needs"
    home = Path(os.environ.get("CUDA_HOME", "/usr/local/cuda"))
    nvcc = Path(os.environ.get("NCCL_EP_JIT_NVCC") or os.environ.get("NVCC") or home / "bin" / "nvcc")
    if not nvcc.is_file():
        return f"NCCL EP compiles its kernels when it runs, and {nvcc} does not exist: set CUDA_HOME"
    try:
        ep.get_lib_version()
    except RuntimeError as error:
        return f"NCCL EP cannot be loaded: {str(error).splitlines()[0]}"
    return None


class DeviceArray(NamedTuple):
    """Device memory as NCCL EP is told of it; `in_window`: a window begins there."""

    address: int
    shape: tuple[int, ...]
    nccl_dtype: int
    in_window: bool = False


class EpShape(NamedTuple):
    """What a group of NCCL EP is made for."""

    low_latency: bool
    ranks: int
    num_experts: int
    max_tokens: int
    token_bytes: int
    zero_copy: bool
    max_sms: int | None


class ExpertParallel:
    """A group of NCCL EP with its one handle; collective to create and to call, operations only enqueue."""

    def __init__(self, comm: Communicator, device: Device, shape: EpShape) -> None:
        assert isinstance(comm, _Nccl4py)
        assert isinstance(device, CudaDevice)
        from nccl import ep

        low_latency, ranks, num_experts, max_tokens, token_bytes, zero_copy, max_sms = shape
        self._ep, self._comm, self._device, self._low_latency = ep, comm, device, low_latency
        config = ep.GroupConfig(
            algorithm=ep.Algorithm.LOW_LATENCY if low_latency else ep.Algorithm.HIGH_THROUGHPUT,
            num_experts=num_experts,
            max_dispatch_tokens_per_rank=max_tokens,
            max_recv_tokens_per_rank=0 if low_latency else ranks * max_tokens,
            max_token_bytes=token_bytes,
            num_qp_per_rank=num_experts // ranks if low_latency else 0,
            max_num_sms=max_sms or 0,
            timeout_ns=_EP_WAIT_NS,
            zero_copy=ep.ZeroCopyMode.ON if zero_copy else ep.ZeroCopyMode.OFF,
        )
        self._group = ep.Group.create(SimpleNamespace(ptr=int(comm.handle.handle)), config)
        self._handle: Any = None
        self._kept: dict[str, Any] = {}

    def _tensor(self, array: DeviceArray) -> Any:
        where = {"window": self._comm.window(array.address), "window_offset": 0} if array.in_window else {}
        return self._ep.Tensor(array.address, dtype=array.nccl_dtype, shape=array.shape, **where)

    def _bundle(self, kind: str, arrays: dict[str, DeviceArray]) -> Any:
        # Descriptors are read at every call, so they live as long as this does.
        return getattr(self._ep, kind)(**{name: self._tensor(array) for name, array in arrays.items()})

    def bind(
        self,
        topk_idx: DeviceArray,
        counters: dict[str, DeviceArray],
        dispatch: tuple[dict[str, DeviceArray], dict[str, DeviceArray]],
        combine: tuple[dict[str, DeviceArray], dict[str, DeviceArray]],
    ) -> None:
        """Take buffers of a number of tokens: (inputs, outputs) of both operations, keyed as NCCL EP names them."""
        counts = self._bundle("LayoutInfo", counters)
        self._kept = {
            "topk_idx": self._tensor(topk_idx),
            "routed": None if self._low_latency else counts,
            "dispatched": counts if self._low_latency else None,
            "dispatch": (self._bundle("DispatchInputs", dispatch[0]), self._bundle("DispatchOutputs", dispatch[1])),
            "combine": (self._bundle("CombineInputs", combine[0]), self._bundle("CombineOutputs", combine[1])),
        }
        if self._handle is None:
            layout = self._ep.Layout.EXPERT_MAJOR if self._low_latency else self._ep.Layout.FLAT
            self._handle = self._group.create_handle(
                layout, self._kept["topk_idx"], layout_info=self._kept["routed"], stream=int(self._device.stream.ptr)
            )

    def update(self) -> None:
        """Enqueue what takes the routing that lies in topk_idx."""
        self._handle.update(
            self._kept["topk_idx"], layout_info=self._kept["routed"], stream=int(self._device.stream.ptr)
        )

    def dispatch(self) -> None:
        inputs, outputs = self._kept["dispatch"]
        self._handle.dispatch(
            inputs, outputs, layout_info=self._kept["dispatched"], stream=int(self._device.stream.ptr)
        )

    def combine(self) -> None:
        inputs, outputs = self._kept["combine"]
        self._handle.combine(inputs, outputs, stream=int(self._device.stream.ptr))

    def close(self) -> None:
        """Destroy handle and group; the communicator stays."""
        self._device.synchronize()
        if self._handle is not None:
            self._handle.destroy()
        self._group.destroy()
