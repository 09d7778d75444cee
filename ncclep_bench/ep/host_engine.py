"""Communicators over the memory of processes."""

from __future__ import annotations

import contextlib
from collections.abc import Collection
from typing import Any

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
