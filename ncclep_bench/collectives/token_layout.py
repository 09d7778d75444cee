"""Where every token goes and where its rows lie on arrival: the layouts that dispatch and combine plans share."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import numpy.typing as npt

from ncclep_bench.model.case import Case
from ncclep_bench.model.placement import Placement
from ncclep_bench.model.plan import Entries, Field, IntArray, Reduce, Rows, Stage, ranges
from ncclep_bench.routing.assignment import destinations
from ncclep_bench.routing.token_routing import TokenRouting


@dataclass(frozen=True)
class Arrivals:
    """Valid choices, ordered by destination rank, local expert, source rank, token; equally long arrays."""

    source: IntArray
    token: IntArray
    slot: IntArray
    rank: IntArray
    local: IntArray


@dataclass(frozen=True)
class TokenLayout:
    """The global picture of one routing over one placement; computed from the routing alone."""

    case: Case
    placement: Placement
    routing: TokenRouting

    @property
    def ranks(self) -> int:
        return self.placement.ranks

    @cached_property
    def destination(self) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]]:
        """Destination rank and local expert of every choice, int32 [tokens of all ranks, top_k], −1 where masked."""
        return destinations(self.routing.topk_idx, self.source_of_token[:, None], self.placement)

    @cached_property
    def source_of_token(self) -> IntArray:
        return np.repeat(np.arange(self.ranks), self.routing.tokens_per_rank)

    @cached_property
    def pair_rows(self) -> IntArray:
        """Distinct (token, destination rank) pairs per (source, destination), shape [ranks, ranks]."""
        ranked = np.sort(self.destination[0], axis=1)
        distinct = ranked >= 0
        distinct[:, 1:] &= ranked[:, 1:] != ranked[:, :-1]
        pair = self.source_of_token[:, None] * self.ranks + ranked
        return np.bincount(pair[distinct], minlength=self.ranks**2).reshape(self.ranks, self.ranks)

    @cached_property
    def arrivals(self) -> Arrivals:
        rank, local = self.destination
        token, slot = np.nonzero(rank >= 0)
        rank_of, local_of = rank[token, slot].astype(np.int64), local[token, slot].astype(np.int64)
        # Tokens are numbered by source rank and in order already, and a stable sort of narrow keys is much faster.
        keys = self.ranks * self.case.num_experts
        order = np.argsort((rank_of * self.case.num_experts + local_of).astype(np.min_scalar_type(keys)), kind="stable")
        token, slot = token[order], slot[order]
        source = self.source_of_token[token]
        return Arrivals(source, token - self.routing.offsets[source], slot, rank_of[order], local_of[order])

    @cached_property
    def expert_counts(self) -> list[IntArray]:
        """Rows per local expert of each rank."""
        arrivals = self.arrivals
        return [
            np.bincount(arrivals.local[arrivals.rank == rank], minlength=count)
            for rank, count in enumerate(self.placement.local_counts)
        ]

    @cached_property
    def slots_per_source(self) -> int:
        """Slots a source has on each rank in mode ll: the most tokens of any rank."""
        return max(self.routing.tokens_per_rank, default=0)

    @cached_property
    def expert_starts(self) -> list[IntArray]:
        """First row of each local expert's block and one past the last, per rank (length local experts + 1).

        Mode ht: exact blocks, padded to the alignment; mode ll: ranks × slots_per_source rows each.
        """
        if self.case.mode == "ll":
            block = self.ranks * self.slots_per_source
            return [np.arange(count + 1) * block for count in self.placement.local_counts]
        alignment = self.case.alignment or 1
        return [np.concatenate([[0], np.cumsum(-(-counts // alignment) * alignment)]) for counts in self.expert_counts]

    @cached_property
    def received_rows(self) -> tuple[int, ...]:
        """Rows of each rank's receive buffer in the case's layout."""
        if self.case.layout == "expert_major":
            return tuple(int(starts[-1]) for starts in self.expert_starts)
        if self.case.layout == "rank_major":
            return (self.ranks * self.slots_per_source,) * self.ranks
        return tuple(int(rows) for rows in self.pair_rows.sum(axis=0))

    @cached_property
    def entries(self) -> Entries:
        """Token rows to received rows in the case's layout, with the routing weight of each choice it stands for."""
        arrivals = self.arrivals
        weight = self.routing.topk_weights[self.routing.offsets[arrivals.source] + arrivals.token, arrivals.slot]
        if self.case.layout == "expert_major":
            block = np.concatenate([starts[:-1] for starts in self.expert_starts])
            row = ranges(block, np.concatenate(self.expert_counts))
            return Entries(arrivals.source, arrivals.token, arrivals.rank, row, weight)
        token = self.routing.offsets[arrivals.source] + arrivals.token
        key = arrivals.rank * self.routing.tokens_total + token
        order = np.argsort(key, kind="stable")
        ordered = key[order]
        starts = np.flatnonzero(np.concatenate([[True], ordered[1:] != ordered[:-1]])) if len(order) else order
        pick = order[starts]
        pairs = self.pair_rows.T
        if self.case.layout == "rank_major":
            first = np.broadcast_to(np.arange(self.ranks) * self.slots_per_source, pairs.shape)
        else:
            first = np.cumsum(pairs, axis=1) - pairs
        row = ranges(first.ravel(), pairs.ravel())
        total = np.add.reduceat(weight[order], starts) if len(starts) else weight
        return Entries(arrivals.source[pick], arrivals.token[pick], arrivals.rank[pick], row, total)

    def handed_on(self, rank: int) -> dict[str, Rows]:
        """Weights, local ids and counts that a rank receives beside the rows; see Dispatch."""
        entries, rows = self.entries, self.received_rows[rank]
        counts = {"expert_counts": self.expert_counts[rank], "source_counts": self.pair_rows[:, rank]}
        here = entries.where(entries.dst_rank == rank)
        if self.case.layout == "expert_major":
            weights = np.zeros(rows, dtype=np.float32)
            assert here.weight is not None
            weights[here.dst_row] = here.weight
            return {"topk_weights": weights, **counts}
        token = self.routing.offsets[here.src_rank] + here.src_row
        elsewhere = self.destination[0][token] != rank
        shape = (rows, self.routing.top_k)
        topk_weights, topk_idx = np.zeros(shape, dtype=np.float32), np.full(shape, -1, dtype=np.int32)
        topk_weights[here.dst_row] = np.where(elsewhere, 0, self.routing.topk_weights[token])
        topk_idx[here.dst_row] = np.where(elsewhere, -1, self.destination[1][token])
        return {"topk_weights": topk_weights, "topk_idx": topk_idx, **counts}

    def dispatch_stage(self, fields: tuple[Field, ...]) -> Stage:
        """The whole of dispatch as one copying stage."""

        return Stage(
            "dispatch",
            "copy",
            fields,
            self.received_rows,
            lambda: replace(self.entries, weight=None),
            lambda: self.pair_rows,
        )

    def combine_stage(self, fields: tuple[Field, ...], reduce: Reduce) -> Stage:
        """The whole of combine as one summing stage: dispatch transposed, weighted or not."""

        def transposed() -> Entries:
            entries = self.entries.transposed()
            return entries if reduce == "weighted_sum" else replace(entries, weight=None)

        return Stage("combine", reduce, fields, self.routing.tokens_per_rank, transposed, lambda: self.pair_rows.T)

    def pair_stage(self) -> Stage:
        """The whole of dispatch and combine with identity experts: every token onto itself, times its weights' sum."""
        routing = self.routing

        def entries() -> Entries:
            rank = self.source_of_token
            token = np.arange(len(rank)) - routing.offsets[rank]
            weight = np.where(routing.topk_idx >= 0, routing.topk_weights, 0).sum(axis=1)
            return Entries(rank, token, rank, token, weight)

        stays = np.diag(np.array(routing.tokens_per_rank, dtype=np.int64))
        return Stage("dispatch_combine", "weighted_sum", (), routing.tokens_per_rank, entries, lambda: stays)
