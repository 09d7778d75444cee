"""Which objects are taken as buffers; a view is the same memory."""

from __future__ import annotations

import array
from typing import Any

import numpy as np
import pytest

from ncclep_bench.ep.buffers import checked, view_of
from ncclep_bench.errors import UsageError


class Exported:
    """An array of another library that offers DLPack and nothing else."""

    def __init__(self, data: Any, device: int = 1) -> None:
        self.data, self.device = data, device

    def __dlpack__(self, **wishes: Any) -> Any:
        return self.data.__dlpack__(**wishes)

    def __dlpack_device__(self) -> tuple[int, int]:
        return (self.device, 0)


def test_dlpack_is_viewed_where_it_lies():
    data = np.arange(6, dtype=np.float32)

    view = view_of(Exported(data), "grads")
    view[0] = 9

    assert data[0] == 9


def test_the_buffer_protocol_is_viewed_where_it_lies():
    data = array.array("f", [1, 2, 3])

    checked(data, "grads", np.float32, writable=True)[1] = 7

    assert data[1] == 7


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "float8_e4m3fn"])
def test_a_torch_tensor_is_viewed_where_it_lies(dtype: str):
    torch = pytest.importorskip("torch")
    from ncclep_bench.model.dtype import dtype_named

    tensor = torch.zeros(4, dtype=getattr(torch, dtype))
    view = checked(tensor, "grads", dtype_named(dtype).numpy, writable=True)
    view[2] = 1.5

    assert tensor.to(torch.float32).tolist() == [0, 0, 1.5, 0]


def test_device_memory_is_refused_with_what_it_would_need():
    with pytest.raises(UsageError, match="grads is device memory") as caught:
        view_of(Exported(np.zeros(1, np.float32), device=2), "grads")

    assert 'backend="cuda"' in str(caught.value)


@pytest.mark.parametrize("value", [None, 3, "text", [1.0], object()], ids=lambda value: type(value).__name__)
def test_what_is_no_buffer_is_named_by_its_type(value: object):
    with pytest.raises(UsageError, match=f"grads is a {type(value).__name__}"):
        view_of(value, "grads")


def test_bytes_are_read_only():
    with pytest.raises(UsageError, match="out is read-only"):
        checked(b"abc", "out", np.uint8, writable=True)
