"""The gate to the GPU (cupy): memory that peers can map, kernels, one stream, graphs, events."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ncclep_bench.errors import BenchError, CannotRunError, RankError, UsageError
from ncclep_bench.runtime.device_contract import Allocation
from ncclep_bench.runtime.group import Group
from ncclep_bench.runtime.place import MPI_LAUNCHERS, local_rank_of, number, place_of
from ncclep_bench.units import format_bytes

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    Array = npt.NDArray[Any]
    Words = npt.NDArray[np.uint64]

OLDEST_SM = 80
_HOPPER_SM = 90
_DYNAMIC_SHARED_BYTES = 8
_LAZY_PEER_ACCESS = 1
_PROBE_BYTES = 256
_NOT_READY = 600
_DEFAULT_STREAMS = (0, 1, 2)
"""None at all, the legacy one, and the one of each thread."""
_SPIN_S = 1e-3
_TO_DEVICE, _FROM_DEVICE, _BY_ADDRESS = 1, 2, 4
_BUFFER_ID, _DEVICE_ORDINAL = 7, 9
_CAPTURE_RELAXED = 2


@functools.cache
def missing() -> str | None:
    """Why no kernel can run here, or None: cupy, driver, device, in the order they are needed."""
    try:
        cupy = _cupy()
    except CannotRunError as error:
        return f"{error.message} ({error.hint})"
    try:
        count = cupy.cuda.runtime.getDeviceCount()
    except cupy.cuda.runtime.CUDARuntimeError as error:
        # Without any driver CUDA finds it too old.
        no_driver = "" if Path("/dev/nvidiactl").exists() else ": no NVIDIA driver is installed, or visible here"
        return f"no usable GPU{no_driver}: {error}"
    if count == 0:
        return "no GPU is visible"
    for index in range(count):
        capability = int(cupy.cuda.Device(index).compute_capability)
        if capability < OLDEST_SM:
            return f"GPU {index} has compute capability {capability}, the kernels need {OLDEST_SM} or newer"
    return None


def local_rank(rank: int) -> int:
    """Number of this process on its host, from the launcher's environment; `rank` where that says nothing."""
    told = local_rank_of(os.environ, MPI_LAUNCHERS)
    return rank if told is None else told


class CudaDevice:
    """One GPU, one non-blocking stream; ranks beyond the number of GPUs share them."""

    threads = 512

    def __init__(self, rank: int, index: int | None = None) -> None:
        """`index`: which GPU, else that of the rank's number. Raises CannotRunError when `missing` has a reason."""
        if (reason := missing()) is not None:
            raise CannotRunError(f"rank {rank}: {reason}", hint="ncclep-doctor check shows what this machine has")
        self._cupy = _cupy()
        self._runtime = self._cupy.cuda.runtime
        self.rank = rank
        self.index = local_rank(rank) % self._runtime.getDeviceCount() if index is None else index
        self._device = self._cupy.cuda.Device(self.index)
        self._device.use()
        self.stream = self._cupy.cuda.Stream(non_blocking=True)
        self._context = _current_context().value
        self._setup = self._cupy.cuda.Stream(non_blocking=True)
        """What has no part in any order, nor in a capture: contents of new memory."""
        self._handover = self._cupy.cuda.Event(disable_timing=True)
        self._handing_over = threading.Lock()
        sharers = -(-_ranks_here() // self._runtime.getDeviceCount())
        # Blocks of ranks that share a GPU wait for each other, so all of them must fit at once.
        self.blocks = max(1, int(self._device.attributes["MultiProcessorCount"]) // sharers)
        attributes = self._device.attributes
        self.bulk_bytes = int(attributes["MaxSharedMemoryPerBlockOptin"]) if self._is_hopper() else 0
        self.early_launches = self._is_hopper() and sharers == 1
        """Blocks that came early would take the place of another rank's that they wait for."""
        self._modules: dict[tuple[Path, tuple[str, ...]], Any] = {}
        self._functions: dict[tuple[Path, str, tuple[str, ...]], int] = {}
        self._aside: Any = None
        self._operands: dict[int, tuple[Any, Any]] = {}

    def _is_hopper(self) -> bool:
        return int(self._device.compute_capability) >= _HOPPER_SM

    @property
    def name(self) -> str:
        name: bytes = self._runtime.getDeviceProperties(self.index)["name"]
        return name.decode()

    @property
    def l2_bytes(self) -> int:
        """Its last cache."""
        return int(self._runtime.getDeviceProperties(self.index)["l2CacheSize"])

    def free_bytes(self) -> int:
        """Memory of the GPU that nobody has allocated."""
        free, _ = self._runtime.memGetInfo()
        return int(free)

    @property
    def bus_id(self) -> str:
        """Its PCI address."""
        return str(self._runtime.deviceGetPCIBusId(self.index))

    def allocate(self, nbytes: int) -> int:
        return self._allocated(nbytes, self._runtime.malloc)

    def allocate_stream_ordered(self, nbytes: int) -> int:
        def allocate(nbytes: int) -> int:
            address: int = self._runtime.mallocAsync(nbytes, self.stream.ptr)
            self.stream.synchronize()
            return address

        return self._allocated(nbytes, allocate)

    def _allocated(self, nbytes: int, allocate: Callable[[int], int]) -> int:
        try:
            address = allocate(nbytes)
        except self._runtime.CUDARuntimeError as error:
            free, total = self._runtime.memGetInfo()
            raise BenchError(
                f"rank {self.rank}, GPU {self.index}: {format_bytes(nbytes)} do not fit, {format_bytes(free)} of "
                f"{format_bytes(total)} are free",
                hint="use fewer tokens, experts or elements",
            ) from error
        self._runtime.memsetAsync(address, 0, nbytes, self._setup.ptr)
        self._setup.synchronize()
        return address

    def fill(self, address: int, nbytes: int, byte: int) -> None:
        self.synchronize()
        self._runtime.memset(address, byte, nbytes)
        self._runtime.deviceSynchronize()

    def free(self, address: int) -> None:
        self.synchronize()
        self._runtime.free(address)

    def reachable(self, candidates: Collection[int], group: Group) -> set[int]:
        own = self.allocate(_PROBE_BYTES)
        own_handle, reached = b"", set()
        # Peer access, one namespace, one driver: only trying tells.
        with contextlib.suppress(self._runtime.CUDARuntimeError):
            own_handle = self._runtime.ipcGetMemHandle(own)
        for rank, handle in enumerate(group.allgather(own_handle)):
            if rank not in candidates or not handle:
                continue
            with contextlib.suppress(self._runtime.CUDARuntimeError):
                self._runtime.ipcCloseMemHandle(self._runtime.ipcOpenMemHandle(handle, _LAZY_PEER_ACCESS))
                reached.add(rank)
        group.barrier()
        self.free(own)
        return reached

    def share(self, address: int, nbytes: int, group: Group, peers: Collection[int]) -> list[int]:
        """Raises RankError when a peer's memory cannot be mapped."""
        # Without peers nobody maps this memory either, and it may be of a kind that has no handle.
        handles = group.allgather(self._runtime.ipcGetMemHandle(address) if peers else b"")
        addresses = [self.map(handle, rank) if rank in peers else 0 for rank, handle in enumerate(handles)]
        addresses[group.rank] = address
        # Nobody frees what another rank is still opening.
        group.barrier()
        return addresses

    def unshare(self, addresses: Sequence[int]) -> None:
        # Graphs of the user's may still run in streams of theirs.
        self._runtime.deviceSynchronize()
        for address in addresses:
            self._runtime.ipcCloseMemHandle(address)

    def allocation_of(self, address: int) -> Allocation:
        driver = _driver()
        base, nbytes, identity = ctypes.c_uint64(), ctypes.c_size_t(), ctypes.c_uint64()
        ordinal = ctypes.c_int(-1)
        at = ctypes.c_uint64(address)
        failed = (
            driver.cuPointerGetAttribute(ctypes.byref(ordinal), _DEVICE_ORDINAL, at)
            or driver.cuPointerGetAttribute(ctypes.byref(identity), _BUFFER_ID, at)
            or driver.cuMemGetAddressRange_v2(ctypes.byref(base), ctypes.byref(nbytes), at)
        )
        if failed or ordinal.value != self.index:
            where = "no memory of a GPU" if failed else f"memory of GPU {ordinal.value}"
            raise UsageError(
                f"rank {self.rank}, GPU {self.index}: address {address:#x} is {where}",
                hint=f"allowed: memory of GPU {self.index}, this rank's",
            )
        return Allocation(identity.value, base.value, nbytes.value)

    def export(self, allocation: Allocation) -> bytes:
        # Memory of a pool, or mapped page by page, has none; only asking tells.
        with contextlib.suppress(self._runtime.CUDARuntimeError):
            return bytes(self._runtime.ipcGetMemHandle(allocation.base))
        return b""

    def map(self, handle: bytes, rank: int) -> int:
        try:
            return int(self._runtime.ipcOpenMemHandle(handle, _LAZY_PEER_ACCESS))
        except self._runtime.CUDARuntimeError as error:
            raise RankError(
                f"rank {self.rank}, GPU {self.index}: the memory of rank {rank} cannot be mapped: {error}",
                ranks=(rank,),
                hint="the ranks' GPUs need peer access: nvidia-smi topo -p2p w shows it",
            ) from error

    def write(self, address: int, array: Array) -> None:
        self.synchronize()
        if array.nbytes:
            self._runtime.memcpy(address, array.ctypes.data, array.nbytes, _TO_DEVICE)
            # From pageable memory the copy may still be on its way when the call returns.
            self._runtime.deviceSynchronize()

    def write_unused(self, address: int, array: Array) -> None:
        self._runtime.memcpyAsync(address, array.ctypes.data, array.nbytes, _TO_DEVICE, self._setup.ptr)
        self._setup.synchronize()

    def read(self, address: int, array: Array) -> None:
        self.synchronize()
        if array.nbytes:
            self._runtime.memcpy(array.ctypes.data, address, array.nbytes, _FROM_DEVICE)

    def copy(self, target: int, source: int, nbytes: int) -> None:
        self._runtime.memcpyAsync(target, source, nbytes, _BY_ADDRESS, self.stream.ptr)

    def function(self, source: Path, include: Path, name: str, defines: Sequence[str]) -> int:
        key = (source, tuple(defines))
        if key not in self._modules:
            options = ("-std=c++17", f"-I{include}", *(f"-D{define}" for define in defines))
            self._modules[key] = self._cupy.RawModule(code=source.read_text(), options=options, backend="nvrtc")
        if (source, name, key[1]) not in self._functions:
            self._functions[source, name, key[1]] = self._modules[key].get_function(name).kernel.ptr
        return self._functions[source, name, key[1]]

    def allow_shared(self, function: int, nbytes: int) -> None:
        self._cupy.cuda.driver.funcSetAttribute(function, _DYNAMIC_SHARED_BYTES, nbytes)

    def prepare(
        self, function: int, blocks: int, threads: int, shared_bytes: int, arguments: Words, *, early: bool
    ) -> Callable[[], None]:
        attributes = (_EARLY, len(_EARLY)) if early and self.early_launches else (None, 0)
        config = _LaunchConfig((blocks, 1, 1), (threads, 1, 1), shared_bytes, self.stream.ptr, *attributes)
        # Each of these keeps what it points to.
        struct = arguments.ctypes.data_as(ctypes.c_void_p)
        call = ctypes.byref(config), ctypes.c_void_p(function), ctypes.byref(struct), None
        launch, failed = _driver().cuLaunchKernelEx, self._cupy.cuda.driver.CUDADriverError

        def enqueue() -> None:
            if status := launch(*call):
                raise failed(status)

        return enqueue

    def current(self) -> AbstractContextManager[None]:
        # Asked by every call of a communicator, whose caller mostly has it current.
        return contextlib.nullcontext() if _current_context().value == self._context else self._made_current()

    @contextlib.contextmanager
    def _made_current(self) -> Iterator[None]:
        before = _current_context()
        self._device.use()
        try:
            yield
        finally:
            # Going back by the device's number would make a context on one that this process has not touched.
            _driver().cuCtxSetCurrent(before)

    @contextlib.contextmanager
    def within(self, stream: int) -> Iterator[None]:
        with self.current():
            self._check_stream(stream)
            if self.capturing() and not self._is_captured(stream):
                raise UsageError(
                    f"rank {self.rank}, GPU {self.index}: stream {stream:#x} while calls in another are being captured",
                    hint="allowed: after the end of that capture",
                )
            self._order(stream, self.stream.ptr)
            try:
                with self._relaxed() if self.capturing() else contextlib.nullcontext():
                    yield
            finally:
                self._order(self.stream.ptr, stream)

    @contextlib.contextmanager
    def _relaxed(self) -> Iterator[None]:
        """Inside, this thread may call what does not belong into a capture, which is not part of it then."""
        mode = ctypes.c_int(_CAPTURE_RELAXED)
        exchange = _driver().cuThreadExchangeStreamCaptureMode
        if status := exchange(ctypes.byref(mode)):
            raise self._cupy.cuda.driver.CUDADriverError(status)
        try:
            yield
        finally:
            exchange(ctypes.byref(mode))

    def _order(self, first: int, then: int) -> None:
        """What one stream holds now comes before what another gets from now on."""
        # Whoever waits for an event waits for its last record before, so one serves all that do not come in between.
        with self._handing_over:
            self._runtime.eventRecord(self._handover.ptr, first)
            self._runtime.streamWaitEvent(then, self._handover.ptr)

    def _check_stream(self, stream: int) -> None:
        where = f"rank {self.rank}, GPU {self.index}: stream {stream:#x}"
        allowed = f"allowed: a stream made on GPU {self.index}, such as torch.cuda.Stream() or cupy.cuda.Stream()"
        if stream in _DEFAULT_STREAMS:
            raise UsageError(f"{where} is a default one, for which all others wait", hint=allowed)
        context = ctypes.c_void_p()
        if status := _driver().cuStreamGetCtx(ctypes.c_void_p(stream), ctypes.byref(context)):
            raise UsageError(f"{where} cannot be asked for its context: CUresult {status}", hint=allowed)
        if context.value != self._context:
            raise UsageError(f"{where} belongs to another GPU or context", hint=allowed)

    def capturing(self) -> bool:
        return self._is_captured(self.stream.ptr)

    def _is_captured(self, stream: int) -> bool:
        try:
            return bool(self._runtime.streamIsCapturing(stream))
        except RuntimeError:  # a capture that something has broken, and that has not ended
            return True

    def synchronize(self) -> None:
        self.stream.synchronize()
        if self._aside is not None:
            self._aside.synchronize()

    def host_array(self, nbytes: int) -> Array:
        import numpy

        # Never paged out, so the copy engines reach it without a detour.
        return numpy.frombuffer(self._cupy.cuda.alloc_pinned_memory(nbytes), numpy.uint8, nbytes)

    def wait(self, deadline_s: float) -> bool:
        """Raises CUDARuntimeError in a capture, where nobody can wait."""
        event, start = self.record(), time.monotonic()
        while (status := self._runtime.eventQuery(event.ptr)) == _NOT_READY:
            waited_s = time.monotonic() - start
            if waited_s > deadline_s:
                return False
            if waited_s > _SPIN_S:
                time.sleep(_SPIN_S)
        if status:
            raise self._runtime.CUDARuntimeError(status)
        return True

    def capture(self, enqueue: Callable[[], object]) -> Callable[[], None]:
        """What `enqueue` enqueues, as a graph: calling the result enqueues it again."""
        self.synchronize()
        self.stream.begin_capture()
        try:
            enqueue()
        except BaseException:
            with contextlib.suppress(Exception):
                self.stream.end_capture()
            raise
        graph = self.stream.end_capture()
        graph.upload(self.stream)
        return lambda: graph.launch(self.stream)

    def record(self, *, aside: bool = False) -> Any:
        """An event at this place in the stream, or in the one of `matrix_product`."""
        event = self._cupy.cuda.Event()
        event.record(self._aside if aside else self.stream)
        return event

    def matrix_product(self, size: int, most_sms: int | None) -> Callable[[], None]:
        """What enqueues a float16 product of two square matrices into a second stream, through cuBLAS.

        `most_sms`: multiprocessors that cuBLAS shall plan with; None for all. Raises CannotRunError without cuBLAS.
        """
        import numpy

        if self._aside is None:
            self._aside = self._cupy.cuda.Stream(non_blocking=True)
        if size not in self._operands:
            # Zeros would need less power than anything real, and run faster.
            values = numpy.random.default_rng(0).standard_normal((size, size), dtype=numpy.float32)
            operand = self._cupy.asarray(values.astype(numpy.float16))
            self._operands[size] = operand, self._cupy.zeros_like(operand)
            self._runtime.deviceSynchronize()
        operand, product = self._operands[size]
        try:
            handle = self._cupy.cuda.device.get_cublas_handle()
        except Exception as error:
            raise CannotRunError(
                f"rank {self.rank}, GPU {self.index}: cuBLAS cannot be used: {error}",
                hint="pip install nvidia-cublas, or leave `overlap` out",
            ) from error
        plan_with = _cublas_sm_target()

        def enqueue() -> None:
            plan_with(handle, most_sms or 0)
            with self._aside:
                self._cupy.dot(operand, operand, out=product)

        return enqueue

    def hold_aside(self, event: Any) -> None:
        """What is enqueued into the second stream from here on waits for an event."""
        self._aside.wait_event(event)

    def elapsed_us(self, first: Any, last: Any) -> float:
        """Device time between two events, after `synchronize`."""
        return float(self._cupy.cuda.get_elapsed_time(first, last)) * 1e3


@functools.cache
def cuda_device(rank: int, index: int | None = None) -> CudaDevice:
    """This process's GPU as `rank`; one object, so that kernels are compiled once. `index`: as CudaDevice takes it."""
    return CudaDevice(rank, index)


def callers_device(rank: int) -> CudaDevice:
    """The GPU of this process's number on the host where a launcher of MPI tells that, else the current one.

    Which one is current stays. Raises CannotRunError as CudaDevice does.
    """
    if missing() is not None:
        return cuda_device(rank)
    before = _current_context()
    told = local_rank_of(os.environ, MPI_LAUNCHERS) is not None
    try:
        return cuda_device(rank, None if told else int(_cupy().cuda.runtime.getDevice()))
    finally:
        _driver().cuCtxSetCurrent(before)


def gpu_count() -> int:
    """GPUs that this process sees; 0 where `missing` has a reason."""
    return 0 if missing() is not None else int(_cupy().cuda.runtime.getDeviceCount())


def cupy_nccl() -> Any:
    """The binding of NCCL that comes with cupy. Raises CannotRunError without cupy."""
    _cupy()
    from cupy.cuda import nccl

    return nccl


class _LaunchAttribute(ctypes.Structure):
    _fields_ = (("id", ctypes.c_uint64), ("value", ctypes.c_uint64 * 8))


class _LaunchConfig(ctypes.Structure):
    """CUlaunchConfig of the driver, which cupy does not bind."""

    _fields_ = (
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared_bytes", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_LaunchAttribute)),
        ("attribute_count", ctypes.c_uint),
    )


_PROGRAMMATIC_STREAM_SERIALIZATION = 6
_EARLY = (_LaunchAttribute * 1)(_LaunchAttribute(_PROGRAMMATIC_STREAM_SERIALIZATION, (1,)))


def _current_context() -> ctypes.c_void_p:
    """What the driver takes this thread's calls for; NULL before the first."""
    context = ctypes.c_void_p()
    _driver().cuCtxGetCurrent(ctypes.byref(context))
    return context


@functools.cache
def _driver() -> Any:
    """The driver's own library, for what cupy does not bind."""
    return ctypes.CDLL("libcuda.so.1")


@functools.cache
def _cublas_sm_target() -> Callable[[int, int], object]:
    """cuBLAS's own way to leave multiprocessors to others, which cupy does not bind; the library that cupy has loaded.

    Does nothing where there is none: the products then spread as they like.
    """
    with contextlib.suppress(OSError, AttributeError), open("/proc/self/maps", encoding="utf-8") as maps:
        loaded = {line.split()[-1] for line in maps if "/libcublas.so" in line}
        for path in sorted(loaded):
            set_target = ctypes.CDLL(path).cublasSetSmCountTarget
            set_target.argtypes = [ctypes.c_void_p, ctypes.c_int]
            return set_target
    return lambda handle, sms: None


def _ranks_here() -> int:
    """Ranks on this host, as the launcher tells; 1 where it says nothing."""
    return place_of(os.environ, MPI_LAUNCHERS).local_ranks or number(os.environ, "SLURM_NTASKS_PER_NODE") or 1


def _cupy() -> Any:
    try:
        import cupy
    except ImportError as error:
        raise CannotRunError(f"cupy cannot be used: {error}", hint="pip install 'ncclep-bench[cuda13]'") from error
    return cupy
