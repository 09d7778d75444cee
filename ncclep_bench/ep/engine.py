"""What carries a communicator's calls out, per backend: whose memory buffers are, and how experts and tokens move."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Mapping
from typing import Any, Protocol

from ncclep_bench.backends.contract import Stats
from ncclep_bench.ep.buffers import Array


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

    def dispatch(self, tokens: Array, scales: Array | None = None) -> Mapping[str, Any]:
        """What has come, as Dispatch names it."""

    def combine_rows(self) -> Any: ...

    def combine(self, rows: Array, out: Array) -> object: ...

    def close(self) -> None: ...


class Engine(Protocol):
    """One rank's part of a communicator; made, collectively, of HostSession, EpConfig and Placement."""

    local: Collection[int]
    """Ranks whose memory this one reaches, itself included."""

    def view(self, value: object, what: str) -> Array:
        """A buffer of the caller's to be checked like any numpy array; raises UsageError for other memory."""

    def routing_view(self, value: object, what: str) -> Array:
        """The same of a routing, which may lie elsewhere."""

    def check_routing(self, topk_idx: Array, topk_weights: Array) -> None:
        """Raise UsageError for what `update` would refuse."""

    def during(self, stream: object, call: str) -> contextlib.AbstractContextManager[None]:
        """Where a call's work is enqueued and new arrays are made; raises UsageError for a stream of another kind."""

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
