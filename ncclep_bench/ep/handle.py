"""EpHandle: dispatch and combine for one routing at a time."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ncclep_bench.ep.buffers import Array, checked
from ncclep_bench.ep.engine import Engine, TokenCalls
from ncclep_bench.ep.held import Held
from ncclep_bench.errors import UsageError
from ncclep_bench.model.dtype import DType

if TYPE_CHECKING:
    from ncclep_bench.ep.communicator import EpCommunicator


class DispatchOutputs(NamedTuple):
    """What a dispatch delivers to this rank: views, valid until the next call on the handle.

    On GPUs they are DeviceArrays, which do not keep the handle: its memory goes with it.

    Layouts `flat` and `rank_major`: one row per token that has an expert here, by source rank, then token:
    `tokens` [rows, hidden], `scales` [rows, hidden / 128] (float8 only), `topk_weights` float32 and `topk_idx` int32
    [rows, top_k], local expert numbers, −1 for choices that live elsewhere. Layout `expert_major`: one row per choice,
    by local expert, then source rank, then token; `topk_weights` [rows], no `topk_idx`. In mode `ll` rows are fixed
    slots, of which the counts say how many are filled. `expert_counts` [local experts], `source_counts` [ranks].
    """

    tokens: Any
    scales: Any
    topk_weights: Any
    topk_idx: Any
    expert_counts: Any
    source_counts: Any


class EpHandle:
    """Made by EpCommunicator.create_handle; every call is collective but `destroy`.

    Dropping it, or destroying the communicator, frees it. Calls raise as those of the communicator do.
    """

    def __init__(self, communicator: EpCommunicator, held: Held, tokens: TokenCalls, dtype: DType) -> None:
        # Keeps the communicator alive, whose end would be the handle's.
        self._communicator = communicator
        self._held = held
        self._tokens: TokenCalls | None = tokens
        self._dtype = dtype
        self._count, self._dispatched = 0, False

    def update(self, topk_idx: object, topk_weights: object, *, stream: object = None) -> None:
        """Take a new routing, int [tokens, top_k] (−1 masked) and float32, into the same buffers.

        On the backend `cuda` it may lie on either side: numpy arrays, or int32 and float32 on the GPU. There an expert
        that does not exist counts as masked; the UsageError about it comes at this call or a later one, and leaves only
        `destroy`.
        """
        tokens, engine = self._open("update")
        indices, weights = routing_of(engine, f"rank {self._communicator.rank}: update", topk_idx, topk_weights)
        with engine.during(stream, "update"):
            tokens.update(indices, weights)
        self._count, self._dispatched = len(indices), False

    def dispatch(self, tokens: object, scales: object = None, *, stream: object = None) -> DispatchOutputs:
        """Send each token [tokens, hidden] once to every rank that holds one of its experts.

        float8 tokens bring `scales`, float32 [tokens, hidden / 128].
        """
        handle, engine = self._open("dispatch")
        rows = checked(tokens, self._name("dispatch", "tokens"), self._dtype.numpy, view=engine.view)
        if (scales is not None) != self._dtype.scaled:
            raise UsageError(
                f"{self._name('dispatch', 'scales')} {'are missing' if scales is None else 'were given'}",
                hint=f"dtype {self._dtype.name} {'needs' if self._dtype.scaled else 'has no'} scales",
            )
        factors = (
            None if scales is None else checked(scales, self._name("dispatch", "scales"), np.float32, view=engine.view)
        )
        with engine.during(stream, "dispatch"):
            outputs = handle.dispatch(rows, factors)
        self._dispatched = True
        return DispatchOutputs(
            outputs["tokens"],
            outputs.get("scales"),
            outputs["topk_weights"],
            outputs.get("topk_idx"),
            outputs["expert_counts"],
            outputs["source_counts"],
        )

    def combine(self, rows: object, out: object = None, *, stream: object = None) -> Any:
        """Bring rows back and add them up to one per token, [tokens, hidden]; into `out`, or a new array.

        `rows` are shaped as dispatch delivered its tokens. Layout `expert_major`: plain outputs of the experts,
        weighted here in float32. Other layouts: one row per received token, which the caller has weighted and summed
        over its local experts; written into `combine_rows()` they are not copied. On GPUs `out` is apart from `rows`.
        """
        handle, engine = self._ready("combine")
        array = checked(rows, self._name("combine", "rows"), self._dtype.numpy, view=engine.view)
        with engine.during(stream, "combine"):
            if out is None:
                assert self._communicator.config.hidden is not None
                out = engine.zeros((self._count, self._communicator.config.hidden), self._dtype.numpy)
            target = checked(out, self._name("combine", "out"), self._dtype.numpy, writable=True, view=engine.view)
            handle.combine(array, target)
        return out

    def combine_rows(self) -> Any:
        """Memory for combine's rows without a copy, in layouts `flat` and `rank_major`.

        On the host collective on first use.
        """
        return self._ready("combine_rows")[0].combine_rows()

    def destroy(self) -> None:
        """Free buffers and requests now; waits for nobody. May be called twice."""
        if self._tokens is not None:
            self._held.close_tokens(self._tokens)
            self._tokens = None

    def _open(self, call: str) -> tuple[TokenCalls, Engine]:
        engine = self._held.open_engine(call)
        if self._tokens is None:
            raise UsageError(f"{call}: the handle has been destroyed")
        return self._tokens, engine

    def _ready(self, call: str) -> tuple[TokenCalls, Engine]:
        opened = self._open(call)
        if not self._dispatched:
            raise UsageError(f"{call} needs a dispatch after the last update")
        return opened

    def _name(self, call: str, buffer: str) -> str:
        return f"rank {self._communicator.rank}: {call}: {buffer}"


def routing_of(engine: Engine, where: str, topk_idx: object, topk_weights: object) -> tuple[Array, Array]:
    """The two arrays of a routing, in whatever memory the engine takes them from."""
    indices = engine.routing_view(topk_idx, f"{where}: topk_idx")
    return indices, checked(topk_weights, f"{where}: topk_weights", np.float32, view=engine.routing_view)
