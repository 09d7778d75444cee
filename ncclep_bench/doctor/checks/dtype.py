"""Element types: names that other libraries use, and what NCCL and the GPU have to offer for them."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from ncclep_bench.doctor.checks.config import at, config_of, dtype_in
from ncclep_bench.doctor.contract import Check, Trouble
from ncclep_bench.errors import InputError
from ncclep_bench.model.dtype import DTYPES, SCALE_BLOCK, dtype_named
from ncclep_bench.model.facts import Facts

NEAREST = {
    "float8_e4m3fnuz": (
        "float8_e4m3fn",
        "the fnuz variant is AMD's: another bias, so every value reads as half or double",
    ),
    "float8_e4m3": ("float8_e4m3fn", "ml_dtypes' float8_e4m3 has infinities and a smaller range"),
    "float8_e5m2": ("float8_e4m3fn", "dispatch takes activations, whose format is e4m3"),
    "float64": ("float32", "no expert-parallel collective moves doubles"),
    "int8": ("float8_e4m3fn", "the one-byte format of dispatch is a float"),
}
"""Types that exist elsewhere: the one to use here, and why they are not the same."""


class Library(msgspec.Struct):
    """One libnccl that was found; `version` is None where the file does not tell."""

    path: str
    version: str | None


class Gpu(msgspec.Struct):
    """One GPU as nvidia-smi lists it; `compute_capability` is major.minor."""

    index: str
    uuid: str
    name: str
    compute_capability: str
    driver: str

    @property
    def sm(self) -> int:
        return int(self.compute_capability.replace(".", ""))


def version_key(version: str) -> tuple[int, ...]:
    """`2.27.3` as numbers that compare."""
    return tuple(int(part) for part in version.split("."))


def _known(facts: Facts) -> Iterator[Trouble]:
    name = config_of(facts).dtype
    try:
        dtype_named(name)
    except InputError:
        stem = name.removeprefix("torch.").removeprefix("np.").removeprefix("numpy.").lower()
        nearest, reason = NEAREST.get(stem, (stem if stem in DTYPES else None, ""))
        yield Trouble(
            f"{name!r} is no dtype of an expert-parallel collective" + (f": {reason}" if reason else ""),
            at(facts, "dtype"),
            f'dtype = "{nearest}"' if nearest else f"dtype = one of {', '.join(DTYPES)}",
        )


def _canonical(facts: Facts) -> Iterator[Trouble]:
    dtype, name = dtype_in(facts), config_of(facts).dtype
    if dtype is not None and name != dtype.name:
        yield Trouble(
            f"{name!r} is read as {dtype.name} ({dtype.torch_name} in torch, {dtype.nccl_name} in NCCL)",
            at(facts, "dtype"),
            f'dtype = "{dtype.name}"',
        )


def _nccl_has_it(facts: Facts) -> Iterator[Trouble]:
    dtype = dtype_in(facts)
    if dtype is None:
        return
    for library in facts.read("libraries.nccl", list[Library]):
        if library.version and version_key(library.version) < version_key(dtype.first_nccl):
            yield Trouble(
                f"{dtype.nccl_name} came with NCCL {dtype.first_nccl}; this NCCL is {library.version} and answers "
                "ncclInvalidArgument",
                (*at(facts, "dtype"), f"{library.path}: {library.version}"),
            )


def _gpu_has_it(facts: Facts) -> Iterator[Trouble]:
    dtype = dtype_in(facts)
    if dtype is None:
        return
    for gpu in facts.read("gpus.list", list[Gpu]):
        if gpu.sm < dtype.first_sm:
            yield Trouble(
                f"GPU {gpu.index} ({gpu.name}) computes {dtype.name} only in software, if at all: "
                f"it needs sm_{dtype.first_sm}",
                (*at(facts, "dtype"), f"GPU {gpu.index}: compute capability {gpu.compute_capability}"),
                'dtype = "float16"',
            )


def _scale_blocks(facts: Facts) -> Iterator[Trouble]:
    dtype, hidden = dtype_in(facts), config_of(facts).hidden
    if dtype is not None and dtype.scaled and hidden is not None and hidden % SCALE_BLOCK:
        yield Trouble(
            f"hidden {hidden} is no multiple of {SCALE_BLOCK}: each token would end in part of a scale block",
            at(facts, "dtype", "hidden"),
            f'hidden = {-(-hidden // SCALE_BLOCK) * SCALE_BLOCK}   # padded; or dtype = "bfloat16"',
        )


def _sums(facts: Facts) -> Iterator[Trouble]:
    dtype, config = dtype_in(facts), config_of(facts)
    if dtype is not None and dtype.scaled and config.expert_elements is not None:
        yield Trouble(
            f"{dtype.name} is a format to dispatch in; combine and gradients add up, and with 3 bits of mantissa "
            "a sum of a few dozen terms stops growing",
            at(facts, "dtype", "expert_elements"),
        )


CHECKS = (
    Check(
        code="EP101",
        title="The dtype exists",
        severity="error",
        needs=("ep.config",),
        judge=_known,
        why="A dtype that one library knows and the next does not ends as ncclInvalidArgument, or as rows of garbage "
        "where two formats share a size.",
        by_hand="look the name up in `ncclep-doctor explain EP101` and in the model's configuration",
        remedy='dtype = "bfloat16"',
        reference="https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/api/types.html",
    ),
    Check(
        code="EP102",
        title="The dtype is called by its own name",
        severity="info",
        needs=("ep.config",),
        judge=_canonical,
        why="torch.bfloat16, ncclBfloat16, bf16 and bfloat16 are one type. Ranks compare configurations as text, and "
        "reports join rows by name.",
        by_hand="read dtype in the configuration",
        remedy='dtype = "bfloat16"',
        reference="ncclep_bench.model.dtype",
    ),
    Check(
        code="EP103",
        title="This NCCL has the dtype",
        severity="error",
        needs=("ep.config", "libraries.nccl"),
        judge=_nccl_has_it,
        why="bfloat16 is in nccl.h from 2.10 (some articles say 2.28) and float8 from 2.24; older ones refuse it.",
        by_hand="strings libnccl.so.2 | grep 'NCCL version'",
        remedy="pip install -U nvidia-nccl-cu13   # nvidia-nccl-cu12 on CUDA 12",
        reference="https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/api/types.html",
    ),
    Check(
        code="EP104",
        title="The GPUs compute the dtype",
        severity="warning",
        needs=("ep.config", "gpus.list"),
        judge=_gpu_has_it,
        why="bfloat16 arithmetic is in hardware from sm_80, float8 conversion from sm_89; before that each element is "
        "converted in software, and combine becomes compute bound.",
        by_hand="nvidia-smi --query-gpu=name,compute_cap --format=csv",
        remedy='dtype = "float16"',
        reference="https://docs.nvidia.com/cuda/cuda-c-programming-guide/#compute-capabilities",
    ),
    Check(
        code="EP105",
        title="float8 tokens divide into scale blocks",
        severity="error",
        needs=("ep.config",),
        judge=_scale_blocks,
        why=f"float8 tokens carry one float32 scale per {SCALE_BLOCK} elements.",
        by_hand=f"hidden modulo {SCALE_BLOCK}",
        remedy='dtype = "bfloat16"',
        reference="DeepSeek-V3 technical report (arXiv:2412.19437), fine-grained quantisation",
    ),
    Check(
        code="EP106",
        title="Sums are not kept in float8",
        severity="warning",
        needs=("ep.config",),
        judge=_sums,
        why="Kernels that combine take bfloat16; a float8 payload there is refused, or loses what it adds.",
        by_hand="read dtype in the configuration of parameters and gradients",
        remedy='dtype = "bfloat16"   # and float8_e4m3fn for dispatch alone',
        reference="failure report: sgl-project/sglang#33669",
    ),
)
