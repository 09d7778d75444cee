"""What the nccl backend refuses before anything runs, and how its gate finds NCCL."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from ncclep_bench.backends.contract import window_waiver
from ncclep_bench.backends.nccl import backend as nccl_backend
from ncclep_bench.backends.nccl.backend import Nccl, machine_waiver, shape_waiver
from ncclep_bench.errors import CannotRunError
from ncclep_bench.registry import BACKENDS
from ncclep_bench.runtime import nccl
from tests.cases import make_case

NAME = nccl.Library(2_28_09, "nccl4py", None)


def case_of(collective: str, **axes: Any) -> Any:
    return make_case(collective, **{"backend": "nccl", "ranks": 2, "hidden": 128, "expert_elements": 64} | axes)


@pytest.fixture
def on_a_machine(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A machine as far as waivers ask: so many GPUs, and a libnccl reached in a way."""

    def there(library: nccl.Library = NAME, gpus: int = 2) -> None:
        monkeypatch.delenv("NCCL_CUMEM_ENABLE", raising=False)
        monkeypatch.setattr(nccl_backend, "missing", lambda: None)
        monkeypatch.setattr(nccl_backend, "gpu_count", lambda: gpus)
        monkeypatch.setattr(nccl, "library", lambda: library)

    return there


@pytest.mark.parametrize(
    ("collective", "axes", "reason"),
    [
        ("dispatch", {}, "NCCL has no dispatch: its traditional partner stands beside it"),
        ("combine", {}, "NCCL has no combine: its traditional partner stands beside it"),
        ("padded_all_to_all", {"hidden": 10}, "rows of 40 bytes are not a multiple of 16"),
        ("padded_all_to_all", {"dtype": "float8_e4m3fn"}, "scales of 4 bytes a row are not a multiple of 16"),
        ("dense_all_gather", {"placement": "uneven", "num_experts": 7}, "placement uneven: NCCL puts equal parts"),
        ("reduce_scatter_expert_grads", {"placement": "replicas:2"}, "placement replicas:2: NCCL puts equal parts"),
        ("reduce_scatter_expert_grads", {"active_share": 0.5}, "active_share 0.5: NCCL adds up every rank's"),
        ("all_gather_experts", {"variant": "registered"}, "NCCL binds memory to windows once"),
    ],
)
def test_what_nccl_has_no_operation_for_is_waived_with_the_reason(
    collective: str, axes: dict[str, Any], reason: str
) -> None:
    assert (shape_waiver(case_of(collective, **axes)) or "").startswith(reason)


@pytest.mark.parametrize(
    ("collective", "axes"),
    [
        ("padded_all_to_all", {"variant": "dispatch_combine", "placement": "uneven", "num_experts": 7}),
        ("padded_all_to_all", {"dtype": "float8_e4m3fn", "hidden": 512}),
        ("dense_all_reduce", {}),
        ("all_gather_experts", {"active_share": 0.25, "placement": "replicas:2"}),
        ("reduce_scatter_expert_grads", {"active_share": 1.0}),
    ],
)
def test_what_nccl_has_an_operation_for_is_run(collective: str, axes: dict[str, Any]) -> None:
    assert Nccl(machine_waiver=lambda _: None).supports(case_of(collective, **axes)) is None


def test_without_a_gpu_or_cupy_everything_is_waived_with_what_is_missing() -> None:
    if nccl_backend.missing() is None:
        pytest.skip("a GPU is here")

    assert BACKENDS.get("nccl").supports(case_of("dense_all_reduce")) == nccl_backend.missing()


@pytest.mark.parametrize(
    ("library", "axes", "reason"),
    [
        (NAME, {"ranks": 4}, "NCCL takes one rank per GPU: 4 ranks, 2 GPUs"),
        (NAME, {"ranks": 1, "window": "symmetric"}, "window symmetric: one rank has no peer to share it with"),
        (
            nccl.Library(2_28_09, "cupy.cuda.nccl", None),
            {"window": "symmetric"},
            "window symmetric: cupy.cuda.nccl registers none, nccl4py does and is not installed",
        ),
        (
            nccl.Library(2_27_07, "nccl4py", None),
            {"window": "symmetric_zero_cta"},
            "window symmetric_zero_cta: NCCL 2.27.7 has none, 2.28 is the first",
        ),
    ],
)
def test_a_machine_says_what_its_nccl_lacks(
    on_a_machine: Any, library: nccl.Library, axes: dict[str, Any], reason: str
) -> None:
    on_a_machine(library)

    assert machine_waiver(case_of("dense_all_reduce", **axes)) == reason


def test_a_number_of_blocks_needs_the_binding_that_configures_communicators(on_a_machine: Any) -> None:
    case = case_of("all_gather_experts", num_sms=16)
    on_a_machine(nccl.Library(2_28_09, "cupy.cuda.nccl", None))
    assert (machine_waiver(case) or "").startswith("num_sms 16: cupy.cuda.nccl configures no communicator")
    on_a_machine()
    assert machine_waiver(case) is None


def test_windows_need_the_memory_that_an_environment_can_forbid(
    on_a_machine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_a_machine()
    case = case_of("dense_all_gather", window="symmetric_zero_cta")
    assert machine_waiver(case) is None
    monkeypatch.setenv("NCCL_CUMEM_ENABLE", "0")
    assert "NCCL_CUMEM_ENABLE=0" in (machine_waiver(case) or "")


@pytest.mark.parametrize("backend", ["host", "cuda", "in_memory"])
def test_backends_without_a_library_of_others_waive_windows(backend: str) -> None:
    case = case_of("all_gather_experts", backend=backend, window="symmetric")

    assert BACKENDS.get(backend).supports(case) == window_waiver(case, backend)
    assert window_waiver(case, backend) is not None


@pytest.fixture
def without_bindings(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A process where neither binding is installed, until a test plants one."""
    nccl.library.cache_clear()
    monkeypatch.setitem(sys.modules, "nccl", None)
    yield monkeypatch
    nccl.library.cache_clear()


def plant(monkeypatch: pytest.MonkeyPatch, get_version: Any) -> None:
    package, bindings = ModuleType("nccl"), ModuleType("nccl.bindings")
    bindings.nccl = SimpleNamespace(get_version=get_version)
    for name, module in (("nccl", package), ("nccl.bindings", bindings)):
        monkeypatch.setitem(sys.modules, name, module)


def test_without_nccl4py_the_binding_of_cupy_is_taken(without_bindings: Any) -> None:
    cupy_nccl = SimpleNamespace(available=True, get_version=lambda: 22809)
    without_bindings.setattr(nccl, "cupy_nccl", lambda: cupy_nccl)

    assert nccl.library() == (22809, "cupy.cuda.nccl", cupy_nccl)
    assert nccl.library().name == "NCCL 2.28.9"


def test_nccl4py_is_taken_where_it_is_installed(without_bindings: Any) -> None:
    plant(without_bindings, lambda: 23007)

    assert nccl.library()[:2] == (23007, "nccl4py")


def test_a_binding_without_its_library_says_so(without_bindings: Any) -> None:
    def fail() -> int:
        raise RuntimeError('Failure finding "libnccl.so.2"\nand more')

    plant(without_bindings, fail)

    with pytest.raises(CannotRunError, match=r'nccl4py finds no libnccl: Failure finding "libnccl\.so\.2"\n  pip'):
        nccl.library()


def test_cupy_without_libnccl_is_a_reason_and_no_import_error(without_bindings: Any) -> None:
    without_bindings.setattr(nccl, "cupy_nccl", lambda: SimpleNamespace(available=False))

    assert nccl.missing() == "neither nccl4py nor cupy.cuda.nccl finds libnccl"
