"""What carries a communicator's calls out, per backend: whose memory buffers are, and how experts and tokens move."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection
from typing import Any, Protocol

import numpy as np

from ncclep_bench.backends.contract import Stats
from ncclep_bench.backends.host.experts import ExpertHandle
from ncclep_bench.backends.host.registration import Segments
from ncclep_bench.backends.host.session import HostSession
from ncclep_bench.backends.host.tokens import TokenHandle, check_routing
from ncclep_bench.ep.buffers import Array, view_of
from ncclep_bench.errors import UsageError
from ncclep_bench.model.dtype import dtype_named
from ncclep_bench.model.ep_config import EpConfig
from ncclep_bench.model.placement import Placement


class ExpertCalls(Protocol):
    """Parameters and gradients of one size; arrays are what the engine's `view` has given."""

    def activate(self, active: Array) -> None:
        """Take bool [ranks, experts] for the next call."""

    def all_gather(self, params: Array, out: Array, *, in_place: bool = False) -> None: ...

    def reduce_scatter(self, grads: Array, out: Array | None) -> None:
        """`out` None: in place."""

    def close(self) -> None: ...


class TokenCalls(Protocol):
    """One routing at a time; arrays as above."""

    def update(self, topk_idx: Array, topk_weights: Array) -> None: ...

    def dispatch(self, tokens: Array, scales: Array | None = None) -> dict[str, Any]:
        """What has come, as Dispatch names it."""

    def combine_rows(self) -> Any: ...

    def combine(self, rows: Array, out: Array) -> object: ...

    def close(self) -> None: ...


class Engine(Protocol):
    """One rank's part of a communicator; collective to create."""

    local: Collection[int]
    """Ranks whose memory this one reaches, itself included."""

    def view(self, value: object, what: str) -> Array:
        """A buffer of the caller's to be checked like any numpy array; raises UsageError for other memory."""

    def routing_view(self, value: object, what: str) -> Array:
        """The same of a routing, which may lie elsewhere."""

    def check_routing(self, topk_idx: Array, topk_weights: Array) -> None:
        """Raise UsageError for what `update` would refuse."""

    def during(self, stream: object, call: str) -> contextlib.AbstractContextManager[None]:
        """Where a call's work is enqueued; raises UsageError for a stream that cannot be used."""

    def zeros(self, shape: tuple[int, ...], dtype: Any) -> Any:
        """A new array of the caller's."""

    def empty(self, shape: tuple[int, ...], dtype: Any) -> Any:
        """Zeroed memory of the communicator's that peers reach without a copy."""

    def experts(self, elements: int) -> ExpertCalls:
        """Collective."""

    def tokens(self) -> TokenCalls:
        """Collective; raises UsageError, alike on all ranks, for a configuration without what it takes."""

    def stats(self) -> Stats:
        """What this rank has moved so far, beside what the host session has counted."""

    def synchronize(self) -> None:
        """Return when all calls are done here; raises what a device has reported."""

    def close(self) -> None:
        """Give everything back; waits for no other rank."""


class HostEngine:
    """Memory of processes; every call is complete when it returns."""

    def __init__(self, session: HostSession, config: EpConfig, placement: Placement) -> None:
        self._session, self._config, self._placement = session, config, placement
        self._dtype = dtype_named(config.dtype)
        self._segments = Segments(session.stats, config.ep_mr_cache_size)
        self.local: Collection[int] = session.local

    def view(self, value: object, what: str) -> Array:
        return view_of(value, what)

    routing_view = view

    def check_routing(self, topk_idx: Array, topk_weights: Array) -> None:
        config = self._config
        check_routing(
            self._session.rank,
            topk_idx,
            topk_weights,
            top_k=config.top_k,
            num_experts=config.num_experts,
            slots=config.max_tokens_per_rank if config.mode == "ll" else None,
        )

    def during(self, stream: object, call: str) -> contextlib.AbstractContextManager[None]:
        if stream is not None:
            raise UsageError(
                f"rank {self._session.rank}: {call}: stream is a {type(stream).__name__}",
                hint="allowed on the host backend: None, its calls are complete when they return",
            )
        return contextlib.nullcontext()

    def zeros(self, shape: tuple[int, ...], dtype: Any) -> Array:
        return np.zeros(shape, dtype)

    def empty(self, shape: tuple[int, ...], dtype: Any) -> Array:
        return self._segments.empty(shape, dtype)

    def experts(self, elements: int) -> ExpertHandle:
        return ExpertHandle(
            self._session, self._segments, placement=self._placement, elements=elements, dtype=self._dtype
        )

    def tokens(self) -> TokenHandle:
        config = self._config
        assert config.hidden is not None
        if config.mode == "ll" and config.max_tokens_per_rank is None:
            raise UsageError("create_handle in mode ll needs max_tokens_per_rank in the EpConfig")
        return TokenHandle(
            self._session,
            placement=self._placement,
            top_k=config.top_k,
            hidden=config.hidden,
            dtype=self._dtype,
            mode=config.mode,
            layout=config.row_layout,
            max_tokens=config.max_tokens_per_rank or 0,
            alignment=config.alignment,
        )

    def stats(self) -> Stats:
        return Stats()

    def synchronize(self) -> None:
        """They were when they returned."""

    def close(self) -> None:
        self._segments.close()


def _cuda(session: HostSession, config: EpConfig, placement: Placement) -> Engine:
    from ncclep_bench.ep.cuda_engine import CudaEngine

    return CudaEngine(session, config, placement)


ENGINES: dict[str, Callable[[HostSession, EpConfig, Placement], Engine]] = {"host": HostEngine, "cuda": _cuda}
"""By EpConfig.backend."""
