"""Faults that can be planted in a rank process: in its transport or in what it does, never in what is checked."""

from __future__ import annotations

import functools
import os
import signal
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ncclep_bench.doctor.contract import Described
from ncclep_bench.errors import InputError

Array = npt.NDArray[Any]

MTU_BYTES = 2048
"""Where the planted faults of payloads begin: rows that are no longer pass."""

_SLOW_S = 0.02
_LAUNCHES_BEFORE = 3


class Fault(NamedTuple):
    """One fault: `tests` are the self-tests that must see it; `plant(backend)` changes the process it is called in."""

    name: str
    title: str
    tests: tuple[str, ...]
    plant_here: Callable[[str], None]

    def plant(self, victim: bool, backend: str) -> None:
        """Plant it, if this rank is the victim."""
        if victim:
            self.plant_here(backend)


def fault_named(name: str) -> Fault:
    """The fault called `name`. Raises InputError naming the nearest one."""
    import difflib

    table = {fault.name: fault for fault in FAULTS}
    if fault := table.get(name):
        return fault
    close = difflib.get_close_matches(name, table, n=1)
    hint = (f"did you mean {close[0]!r}? " if close else "") + f"known: {', '.join(table)}"
    raise InputError(f"unknown fault {name!r}", hint=hint)


# ---- where faults are planted ----


def _wrap(owner: Any, name: str, around: Callable[..., Any]) -> None:
    """Replace a method by `around(the method, self, ...)`."""
    once = owner.__dict__[name]

    @functools.wraps(once)
    def wrapper(self: Any, *args: Any, **kwargs: Any) -> Any:
        return around(once, self, *args, **kwargs)

    setattr(owner, name, wrapper)


def _prepared(backend: str, method: str) -> list[Any]:
    """The classes that run the EP collectives of a backend and have a `method` of their own."""
    import importlib

    module = importlib.import_module(f"ncclep_bench.backends.{backend}.backend")
    return [kind for kind in vars(module).values() if isinstance(kind, type) and method in kind.__dict__]


def _every_launch(backend: str, around: Callable[..., Any]) -> None:
    method = {"host": "launch", "cuda": "enqueue"}[backend]
    for kind in _prepared(backend, method):
        if not getattr(kind.__dict__[method], "__isabstractmethod__", False):
            _wrap(kind, method, around)


def _every_copy(spoil: Callable[[Array, str], None]) -> Callable[[str], None]:
    """Plant `spoil(rows, dtype)`, which changes in place what a transport has just brought to or from a peer."""

    def on_host(_: str) -> None:
        from ncclep_bench.backends.host.experts import ExpertHandle
        from ncclep_bench.backends.host.tokens import TokenHandle

        def write_rows(once: Any, self: Any, peer: int, target: Array, source: Array, index: Any) -> None:
            once(self, peer, target, source, index)
            if peer != self.session.rank and index is not None:
                spoil(target, self._dtype.name)

        def read_sums(once: Any, self: Any, windows: Any, returning: Any, out: Array) -> None:
            once(self, windows, returning, out)
            spoil(out, self._dtype.name)

        def copy(once: Any, self: Any, target: Array, source: Array, *, foreign: bool) -> None:
            once(self, target, source, foreign=foreign)
            if foreign:
                spoil(target.reshape(1, -1).view(self._dtype.numpy), self._dtype.name)

        def sum_into(once: Any, self: Any, target: Array, *more: Any) -> None:
            once(self, target, *more)
            spoil(target.reshape(1, -1), self._dtype.name)

        _wrap(TokenHandle, "_write_rows", write_rows)
        _wrap(TokenHandle, "_read_sums", read_sums)
        _wrap(ExpertHandle, "_copy", copy)
        _wrap(ExpertHandle, "_sum_into", sum_into)

    def on_cuda(backend: str) -> None:
        def enqueue(once: Any, self: Any) -> None:
            once(self)
            device = self.session.device
            for name, array in self._outputs.items():
                if array.ndim == 2 and name in ("tokens", "scales", "all_params", "grads", "all_grads"):
                    delivered = np.empty_like(array)
                    device.read(self._output_at[name], delivered)
                    spoil(delivered, self.case.dtype)
                    device.write(self._output_at[name], delivered)

        _every_launch(backend, enqueue)

    return lambda backend: {"host": on_host, "cuda": on_cuda}[backend](backend)


# ---- what goes wrong with rows ----


def _bytes_of(rows: Array) -> Array:
    return rows.view(np.uint8).reshape(len(rows), -1) if rows.size else rows.view(np.uint8)


def _truncate(rows: Array, _: str) -> None:
    _bytes_of(rows)[:, MTU_BYTES:] = 0


def _shift(rows: Array, _: str) -> None:
    first = MTU_BYTES // rows.itemsize
    if rows.shape[1] > first + 1:
        rows[:, first + 1 :] = rows[:, first:-1].copy()


def _swap_dtype(rows: Array, dtype: str) -> None:
    import ml_dtypes

    other = {
        "float32": np.int32,
        "float16": ml_dtypes.bfloat16,
        "bfloat16": np.float16,
        "float8_e4m3fn": ml_dtypes.float8_e5m2,
    }[dtype]
    if rows.itemsize == np.dtype(other).itemsize:
        with np.errstate(all="ignore"):
            rows[...] = rows.view(other).astype(np.float32).astype(rows.dtype)


def _round_scales(rows: Array, dtype: str) -> None:
    if dtype.startswith("float8") and rows.dtype == np.float32:
        rows[...] = np.exp2(np.round(np.log2(rows)))


def _slow(_: Array, __: str) -> None:
    time.sleep(_SLOW_S)


def _stale_rows(backend: str) -> None:
    """Nothing is written: what the peers had before stays."""
    if backend == "cuda":
        _every_launch(backend, _keep_outputs)
        return
    from ncclep_bench.backends.host.experts import ExpertHandle
    from ncclep_bench.backends.host.tokens import TokenHandle

    def write_rows(once: Any, self: Any, peer: int, target: Array, source: Array, index: Any) -> None:
        if peer == self.session.rank or index is None:
            once(self, peer, target, source, index)

    def copy(once: Any, self: Any, target: Array, source: Array, *, foreign: bool) -> None:
        if not foreign:
            once(self, target, source, foreign=foreign)

    _wrap(TokenHandle, "_write_rows", write_rows)
    _wrap(ExpertHandle, "_copy", copy)


def _keep_outputs(once: Any, self: Any) -> None:
    device = self.session.device
    before = {name: np.empty_like(array) for name, array in self._outputs.items()}
    for name, array in before.items():
        device.read(self._output_at[name], array)
    once(self)
    for name, array in before.items():
        device.write(self._output_at[name], array)


# ---- what goes wrong with ranks ----


def _after_some_launches(act: Callable[[], bool]) -> Callable[[str], None]:
    """Plant `act` before a launch that comes after some; the launch takes place if it says True."""

    def plant(backend: str) -> None:
        launches = 0

        def launch(once: Any, self: Any, *args: Any) -> None:
            nonlocal launches
            launches += 1
            if launches != _LAUNCHES_BEFORE or act():
                once(self, *args)

        _every_launch(backend, launch)

    return plant


def _stop_oneself(number: int) -> bool:
    os.kill(os.getpid(), number)
    return True


def _differ_field(_: str) -> None:
    import msgspec

    from ncclep_bench.ep.communicator import EpCommunicator

    def init(once: Any, self: Any, group: object, ep_config: Any) -> None:
        once(self, group, msgspec.structs.replace(ep_config, experts_per_rank=(ep_config.experts_per_rank or 1) + 1))

    _wrap(EpCommunicator, "__init__", init)


def _skip_when_empty(backend: str) -> None:
    def launch(once: Any, self: Any, *args: Any) -> None:
        handle = getattr(self, "handle", None)
        if getattr(handle, "tokens", 1):
            once(self, *args)

    _every_launch(backend, launch)


def _send_one_less(backend: str) -> None:
    """The first choice of every routing is masked behind the caller's back: a row less leaves than it says."""
    import importlib

    handle = importlib.import_module(f"ncclep_bench.backends.{backend}.tokens").TokenHandle

    def route(once: Any, self: Any, topk_idx: Array, topk_weights: Array) -> None:
        topk_idx = topk_idx.copy()
        topk_idx[:1] = -1
        once(self, topk_idx, topk_weights)

    _wrap(handle, {"host": "update", "cuda": "route"}[backend], route)


def _leak(backend: str) -> None:
    import importlib

    session = importlib.import_module(f"ncclep_bench.backends.{backend}.session")
    kind = {"host": "HostSession", "cuda": "CudaSession"}[backend]
    kept: list[Any] = []

    def close(once: Any, self: Any) -> None:
        kept.append(getattr(self, "_blocks", None))

    _wrap(getattr(session, kind), "close", close)


def _no_deadline(backend: str) -> None:
    if backend == "cuda":
        from ncclep_bench.backends.cuda.session import CudaSession

        def start(once: Any, self: Any, *args: Any, **kwargs: Any) -> None:
            once(self, *args, **{**kwargs, "deadline_s": 3600.0})

        _wrap(CudaSession, "__init__", start)
        return
    from ncclep_bench.runtime.shared_memory import LocalBarrier

    def wait(once: Any, self: Any, blocks: Any, epoch: int, deadline_s: float, operation: str) -> None:
        once(self, blocks, epoch, 3600.0, operation)

    _wrap(LocalBarrier, "_wait", wait)


def _accept_any_stream(_: str) -> None:
    from ncclep_bench.ep.communicator import EpCommunicator

    _wrap(EpCommunicator, "_check_stream", lambda once, self, call, stream: None)


def _empty_graph(_: str) -> None:
    from ncclep_bench.runtime.device import CudaDevice

    _wrap(CudaDevice, "capture", lambda once, self, enqueue: lambda: None)


FAULTS: tuple[Fault, ...] = (
    Fault("truncate", "rows are cut off after 2,048 bytes, the rest is zero", ("SELF001",), _every_copy(_truncate)),
    Fault("shift", "rows are shifted by one element after 2,048 bytes", ("SELF001",), _every_copy(_shift)),
    Fault("stale", "nothing new is written: peers keep the rows of the call before", ("SELF001",), _stale_rows),
    Fault(
        "drop-rank",
        "a rank is killed in the middle of its work",
        ("SELF001",),
        _after_some_launches(lambda: _stop_oneself(signal.SIGKILL)),
    ),
    Fault(
        "stop-rank",
        "a rank is stopped (SIGSTOP) in the middle of its work",
        ("SELF001",),
        _after_some_launches(lambda: _stop_oneself(signal.SIGSTOP)),
    ),
    Fault("skip-call", "a rank leaves out one call", ("SELF001",), _after_some_launches(lambda: False)),
    Fault("leak", "a rank frees no communicator", ("SELF002",), _leak),
    Fault("empty-graph", "a captured graph replays nothing", ("SELF003",), _empty_graph),
    Fault("swap-dtype", "bytes of one dtype arrive as another", ("SELF004",), _every_copy(_swap_dtype)),
    Fault("any-stream", "a rank takes a stream that is not its own", ("SELF005",), _accept_any_stream),
    Fault("skip-empty", "a rank without tokens leaves out the call", ("SELF006",), _skip_when_empty),
    Fault("send-less", "a rank sends a row less than it says", ("SELF007",), _send_one_less),
    Fault("round-scales", "float8 scales are rounded to powers of two", ("SELF008",), _every_copy(_round_scales)),
    Fault("slow", "every copy of a rank takes 20 ms longer", ("SELF009",), _every_copy(_slow)),
    Fault("differ-field", "experts_per_rank of the EpConfig differs on a rank", ("SELF010",), _differ_field),
    Fault("no-deadline", "a rank waits without a deadline", ("SELF011",), _no_deadline),
)

INJECTION = Described(
    code="SELF900",
    title="A planted fault is caught",
    severity="error",
    needs=("--inject FAULT",),
    why="Who relies on a doctor wants to see it find something: a fault in the transport or in a rank process must be "
    "caught by a self-test that passes without it, and the rank that has it be named.",
    by_hand="ncclep-doctor selftest --list shows the faults; --inject FAULT exits with 1 when caught, else with 3",
    remedy="ncclep-doctor selftest --inject truncate --format json",
    reference="docs/selftests.md",
)
