"""What the nccl_ep backend refuses before anything runs, and the exact piece that it names."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from ncclep_bench.backends import nccl_ep
from ncclep_bench.backends.nccl_ep import NcclEp, shape_waiver
from ncclep_bench.runtime import nccl
from tests.cases import make_case


def case_of(collective: str, **axes: Any) -> Any:
    defaults = {"backend": "nccl_ep", "ranks": 2, "hidden": 128, "dtype": "bfloat16", "num_experts": 8}
    return make_case(collective, **defaults | axes)


@pytest.mark.parametrize(
    ("collective", "axes", "reason"),
    [
        ("padded_all_to_all", {}, "NCCL EP has no padded_all_to_all"),
        ("all_gather_experts", {}, "NCCL EP has no all_gather_experts"),
        ("dispatch", {"layout": "expert_major"}, "layout expert_major: mode ht is measured in layout flat"),
        (
            "dispatch",
            {"mode": "ll", "layout": "rank_major"},
            "layout rank_major: mode ll is measured in layout expert_major",
        ),
        ("dispatch_combine", {}, "in mode ht the caller weighs rows between NCCL EP's dispatch and combine"),
        ("dispatch", {"dtype": "float32"}, "dtype float32: NCCL EP is measured with bfloat16"),
        ("dispatch", {"placement": "uneven", "num_experts": 9}, "placement uneven"),
        ("dispatch", {"empty_ranks": 1}, "a rank without tokens: NCCL EP is measured with"),
        ("dispatch", {"tokens": 8193}, "8193 tokens: NCCL EP takes 8192 per rank"),
        ("dispatch", {"mode": "ll", "layout": "expert_major", "hidden": 2880}, "hidden 2880: NCCL EP's low latency"),
        ("dispatch", {"hidden": 12}, "hidden 12: rows are no multiple of 16 bytes"),
        ("dispatch", {"num_experts": 6}, "6 experts: no multiple of 4"),
        ("combine", {"window": "symmetric_zero_cta"}, "window symmetric_zero_cta: NCCL EP has off and symmetric"),
    ],
)
def test_what_nccl_ep_cannot_take_is_waived_with_the_reason(collective: str, axes: dict[str, Any], reason: str) -> None:
    assert (shape_waiver(case_of(collective, **axes)) or "").startswith(reason)


@pytest.mark.parametrize(
    ("collective", "axes"),
    [
        ("dispatch", {}),
        ("combine", {"window": "symmetric"}),
        ("dispatch", {"mode": "ll", "layout": "expert_major", "num_experts": 6}),
        ("dispatch_combine", {"mode": "ll", "layout": "expert_major"}),
    ],
)
def test_what_nccl_ep_takes_is_run(collective: str, axes: dict[str, Any]) -> None:
    assert NcclEp(machine_waiver=lambda _: None).supports(case_of(collective, **axes)) is None


@pytest.fixture
def on_a_machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Any]:
    """A machine where NCCL EP runs, or lacks what a test takes away; gives what `ep_missing` says."""
    nccl.ep_missing.cache_clear()

    def there(
        version: int = 2_30_07,
        binding: str = "nccl4py",
        installed: bool = True,
        loads: bool = True,
        cumem: str = "1",
        nvcc: bool = True,
    ) -> str | None:
        def get_lib_version() -> str:
            if not loads:
                raise RuntimeError("Failed to dlopen libnccl_ep\nand more")
            return "0.2.0"

        package, ep = ModuleType("nccl"), ModuleType("nccl.ep")
        ep.get_lib_version = get_lib_version  # type: ignore[attr-defined]
        package.ep = ep  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "nccl", package if installed else None)
        monkeypatch.setitem(sys.modules, "nccl.ep", ep if installed else None)
        monkeypatch.setattr(nccl, "library", lambda: nccl.Library(version, binding, None))
        monkeypatch.setenv("NCCL_CUMEM_ENABLE", cumem)
        monkeypatch.setenv("CUDA_HOME", str(tmp_path))
        for name in ("NVCC", "NCCL_EP_JIT_NVCC"):
            monkeypatch.delenv(name, raising=False)
        (tmp_path / "bin").mkdir()
        if nvcc:
            (tmp_path / "bin" / "nvcc").touch()
        return nccl.ep_missing()

    yield there
    nccl.ep_missing.cache_clear()


def test_nothing_is_missing_where_everything_is_there(on_a_machine: Any) -> None:
    assert on_a_machine() is None


@pytest.mark.parametrize(
    ("lack", "reason"),
    [
        ({"binding": "cupy.cuda.nccl"}, "NCCL EP needs nccl4py, which is not installed"),
        ({"installed": False}, "nccl-extensions cannot be imported: "),
        ({"version": 2_28_09}, "NCCL EP needs NCCL 2.30, NCCL 2.28.9 is loaded: pip install nvidia-nccl-cu13==2.30.7"),
        ({"version": 2_32_03}, "NCCL EP needs NCCL 2.30, NCCL 2.32.3 is loaded"),
        ({"cumem": "0"}, "NCCL_CUMEM_ENABLE=0 forbids the memory that NCCL EP needs"),
        ({"nvcc": False}, "NCCL EP compiles its kernels when it runs, and "),
        ({"loads": False}, "NCCL EP cannot be loaded: Failed to dlopen libnccl_ep"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_the_piece_that_is_missing_is_named(on_a_machine: Any, lack: dict[str, Any], reason: str) -> None:
    assert (on_a_machine(**lack) or "").startswith(reason)


def test_without_a_gpu_everything_is_waived_with_what_is_missing() -> None:
    if nccl_ep.missing() is None:
        pytest.skip("a GPU is here")

    assert NcclEp().supports(case_of("dispatch")) == nccl_ep.missing()
