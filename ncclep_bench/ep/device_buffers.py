"""Arrays in a GPU's memory: what the caller brings, what a communicator hands out, and the streams they belong to."""

from __future__ import annotations

import functools
import math
import operator
import sys
from typing import Any

import numpy as np

from ncclep_bench.ep.buffers import Array
from ncclep_bench.errors import UsageError
from ncclep_bench.model.dtype import DTYPES

_ALLOWED = "allowed: arrays with __cuda_array_interface__, as cupy's, and CUDA tensors of torch"


class DeviceArray:
    """Contiguous memory of a GPU that other libraries can use: cupy.asarray(array), torch.as_tensor(array).

    The interface has no name for bfloat16 and float8: torch.as_tensor(array.view("int16")).view(torch.bfloat16).
    """

    def __init__(self, address: int, shape: tuple[int, ...], dtype: Any, owner: object = None) -> None:
        """`owner`: kept as long as the array, for what it frees when it goes."""
        self.address, self.shape, self.dtype, self._owner = address, shape, np.dtype(dtype), owner

    @property
    def nbytes(self) -> int:
        """Bytes from its address on."""
        return math.prod(self.shape) * int(self.dtype.itemsize)

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        # No strides: contiguous. An address of an empty array is 0, as the interface wants it.
        at = self.address if self.nbytes else 0
        return {"shape": self.shape, "typestr": self.dtype.str, "data": (at, False), "strides": None, "version": 3}

    def view(self, dtype: Any) -> DeviceArray:
        """The same memory as elements of another type of the same size. Raises UsageError for another size."""
        if np.dtype(dtype).itemsize != self.dtype.itemsize:
            raise UsageError(f"{self!r} as {np.dtype(dtype)}", hint=f"allowed: {self.dtype.itemsize} bytes")
        return DeviceArray(self.address, self.shape, dtype, self)

    def __len__(self) -> int:
        return self.shape[0]

    def __repr__(self) -> str:
        return f"DeviceArray({self.address:#x}, {list(self.shape)}, {self.dtype})"


class DeviceView(np.ndarray[Any, Any]):
    """Shape, strides and dtype of an array at a device's address, to be checked as any other's; never read."""

    def __repr__(self) -> str:
        return f"DeviceView({self.ctypes.data:#x}, {list(self.shape)}, {self.dtype})"

    __str__ = __repr__


def on_device(value: object) -> bool:
    """Whether it says that it lies on a GPU."""
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(value, torch.Tensor):
        return bool(value.device.type == "cuda")
    return hasattr(value, "__cuda_array_interface__")


def view_of_device(value: object, what: str) -> Array:
    """The shape and place of a GPU array, none of its contents.

    Takes arrays with __cuda_array_interface__ and torch tensors; `what` is what errors call it. Raises UsageError for
    memory of the host, and for anything else. Which stream an array belongs to is not asked: a call has its own.
    """
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(value, torch.Tensor):
        return _view_of_tensor(value, what)
    interface: Any = getattr(value, "__cuda_array_interface__", None)
    if interface is None:
        kind = "host memory" if isinstance(value, np.ndarray) else f"a {type(value).__name__}"
        raise UsageError(f"{what} is {kind}, the cuda backend takes a GPU's", hint=_ALLOWED)
    try:
        if interface.get("mask") is not None:
            raise ValueError("a mask")
        address, read_only = interface["data"]
        strides = interface.get("strides")
        return _view(
            operator.index(address),
            tuple(map(operator.index, interface["shape"])),
            interface["typestr"],
            None if strides is None else tuple(map(operator.index, strides)),
            bool(read_only),
        )
    except (AttributeError, KeyError, OverflowError, TypeError, ValueError) as error:
        raise UsageError(
            f"{what}: its __cuda_array_interface__ cannot be used: {type(error).__name__}: {error}",
            hint="allowed: plain arrays, as the interface's version 3 describes them",
        ) from None


def _view_of_tensor(tensor: Any, what: str) -> Array:
    if tensor.device.type != "cuda":
        raise UsageError(f"{what} is a tensor on {tensor.device}, the cuda backend takes a GPU's", hint=_ALLOWED)
    name = str(tensor.dtype).removeprefix("torch.")
    try:
        dtype = DTYPES[name].numpy if name in DTYPES else np.dtype(name)
    except TypeError:
        raise UsageError(f"{what} is {tensor.dtype}", hint=f"allowed: {', '.join(DTYPES)}") from None
    strides = tuple(step * dtype.itemsize for step in tensor.stride())
    return _view(tensor.data_ptr(), tuple(tensor.shape), dtype, strides, False)


class _Described:
    """What numpy makes an array of without looking at the memory."""

    def __init__(self, **interface: Any) -> None:
        self.__array_interface__ = {**interface, "version": 3}


# Buffers come again and again, and views say nothing of what memory holds.
@functools.lru_cache(maxsize=256)
def _view(address: int, shape: tuple[int, ...], dtype: Any, strides: tuple[int, ...] | None, read_only: bool) -> Array:
    kind = np.dtype(dtype)
    if kind.hasobject:
        raise TypeError(f"dtype {kind}")
    described = _Described(data=(address, read_only), shape=shape, typestr=f"|V{kind.itemsize}", strides=strides)
    array: Array = np.asarray(described).view(DeviceView).view(kind)
    return array


def stream_address(stream: object, what: str) -> int:
    """The CUDA stream that cupy, torch, cuda.core or a number name. Raises UsageError for None and anything else."""
    address: object = stream
    for name in ("cuda_stream", "ptr"):
        address = getattr(stream, name, address)
    protocol = getattr(stream, "__cuda_stream__", None)
    try:
        if callable(protocol):
            _, address = protocol()
        if not isinstance(address, bool) and 0 <= (number := operator.index(address)) < 1 << 64:  # type: ignore[arg-type]
            return number
    except (TypeError, ValueError):
        pass
    raise UsageError(
        f"{what}: stream is {'missing' if stream is None else f'a {type(stream).__name__}'}",
        hint="the cuda backend takes a stream of torch, cupy or cuda.core, or the address of one",
    )
