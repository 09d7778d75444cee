"""The one table of element types: numpy, torch and NCCL names, sizes, first versions (S17)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from ncclep_bench.errors import InputError

if TYPE_CHECKING:
    import numpy as np

SCALE_BLOCK = 128
"""Elements that share one float32 scale in float8 dispatch (DeepSeek-V3's activation format)."""


class DType(NamedTuple):
    """One element type. `nccl_value` is ncclDataType_t of nccl.h; versions are the first that has it."""

    name: str
    itemsize: int
    nccl_name: str
    nccl_value: int
    first_nccl: str
    first_sm: int
    scaled: bool
    epsilon: float
    """Distance from 1 to the next value, the unit of every tolerance."""

    @property
    def torch_name(self) -> str:
        return f"torch.{self.name}"

    @property
    def numpy(self) -> np.dtype[Any]:
        """The numpy dtype; bfloat16 and float8 come from ml_dtypes."""
        import numpy

        if self.name in ("float32", "float16"):
            return numpy.dtype(self.name)
        import ml_dtypes

        dtype: np.dtype[Any] = numpy.dtype(getattr(ml_dtypes, self.name))
        return dtype


# nccl.h of 2.10 has ncclBfloat16 and 2.24 adds ncclFloat8e4m3 / ncclFloat8e5m2 (reductions from sm_90).
# The article's "2.28.0 for bfloat16" is not what NVIDIA ships.
DTYPES: dict[str, DType] = {
    dtype.name: dtype
    for dtype in (
        DType("float32", 4, "ncclFloat32", 7, "2.0", 30, False, 2.0**-23),
        DType("float16", 2, "ncclFloat16", 6, "2.0", 53, False, 2.0**-10),
        DType("bfloat16", 2, "ncclBfloat16", 9, "2.10", 80, False, 2.0**-7),
        DType("float8_e4m3fn", 1, "ncclFloat8e4m3", 10, "2.24", 89, True, 2.0**-3),
    )
}


def dtype_named(name: str) -> DType:
    """The entry called `name`, also as torch, NCCL or short name. Raises InputError listing the known ones."""
    aliases = {"fp32": "float32", "fp16": "float16", "half": "float16", "bf16": "bfloat16", "fp8": "float8_e4m3fn"}
    wanted = aliases.get(name, name)
    for dtype in DTYPES.values():
        if wanted in (dtype.name, dtype.torch_name, dtype.nccl_name):
            return dtype
    raise InputError(f"unknown dtype {name!r}", hint=f"known: {', '.join(DTYPES)}")
