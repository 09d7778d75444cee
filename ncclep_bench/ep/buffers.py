"""Other libraries' arrays as numpy views of the same memory, checked before anything moves."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from ncclep_bench.errors import UsageError
from ncclep_bench.model.dtype import DTYPES

Array = npt.NDArray[Any]

_CPU = 1
"""kDLCPU, the device of DLPack that is this process's memory."""


def view_of(value: object, what: str) -> Array:
    """The memory of `value` as a numpy array, never a copy.

    Takes numpy arrays, torch tensors on the CPU (bfloat16 and float8 too), DLPack and the buffer protocol; `what` is
    what errors call it. Raises UsageError for device memory, which needs a GPU backend, and for anything else.
    """
    if isinstance(value, np.ndarray):
        return value
    if hasattr(value, "__cuda_array_interface__"):
        raise _device_memory(what)
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(value, torch.Tensor):
        return _view_of_tensor(torch, value, what)
    if hasattr(value, "__dlpack__") and hasattr(value, "__dlpack_device__"):
        if value.__dlpack_device__()[0] != _CPU:
            raise _device_memory(what)
        return np.from_dlpack(value)
    try:
        return np.asarray(memoryview(value))  # type: ignore[arg-type]
    except TypeError:
        raise UsageError(
            f"{what} is a {type(value).__name__}",
            hint="allowed: numpy arrays, CPU tensors, and objects with DLPack or the buffer protocol",
        ) from None


def checked(
    value: object,
    what: str,
    dtype: npt.DTypeLike,
    *,
    writable: bool = False,
    view: Callable[[object, str], Array] = view_of,
) -> Array:
    """`view(value)`, contiguous, of `dtype` and, if asked, writable; raises UsageError saying what is allowed."""
    array, wanted = view(value, what), np.dtype(dtype)
    if array.dtype != wanted:
        raise UsageError(f"{what} is {array.dtype}{list(array.shape)}", hint=f"allowed: dtype {wanted}")
    if not array.flags.c_contiguous:
        raise UsageError(
            f"{what} has strides {array.strides} over shape {list(array.shape)}", hint="allowed: contiguous rows"
        )
    if writable and not array.flags.writeable:
        raise UsageError(f"{what} is read-only", hint="allowed: memory that may be written")
    return array


def checked_rows(array: Array, what: str, rows: int, elements: int) -> Array:
    """A contiguous array, [rows, elements] or flat, as [rows, elements]. Raises UsageError for other shapes."""
    if array.shape not in ((rows, elements), (rows * elements,)):
        raise UsageError(
            f"{what} is {array.dtype}{list(array.shape)}",
            hint=f"allowed: [{rows}, {elements}], or flat [{rows * elements}]",
        )
    return array.reshape(rows, elements)


def _view_of_tensor(torch: Any, tensor: Any, what: str) -> Array:
    if tensor.device.type != "cpu":
        raise _device_memory(what)
    for dtype in DTYPES.values():
        if str(tensor.dtype) == dtype.torch_name:
            # numpy has no bfloat16 of its own, so the bits cross as integers of the same size.
            bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[dtype.itemsize]
            view: Array = tensor.detach().view(bits).numpy()
            return view.view(dtype.numpy)
    plain: Array = tensor.detach().numpy()
    return plain


def _device_memory(what: str) -> UsageError:
    return UsageError(
        f"{what} is device memory, which the host backend cannot reach",
        hint='copy it to the CPU, or set backend="cuda" in the EpConfig',
    )
