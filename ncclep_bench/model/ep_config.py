"""What every rank of an expert-parallel group must agree on."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from ncclep_bench.errors import InputError
from ncclep_bench.model.dtype import dtype_named
from ncclep_bench.model.placement import Placement, explicit_placement, placement_of

Mode = Literal["ll", "ht"]
Layout = Literal["flat", "expert_major", "rank_major"]
LAYOUTS: dict[Mode, tuple[Layout, ...]] = {"ht": ("flat", "expert_major"), "ll": ("expert_major", "rank_major")}
"""Layouts of received rows that each mode has, its default first."""

Transport = Literal["auto", "shared", "messages"]
EpBackend = Literal["host", "cuda"]

Count = Annotated[int, Meta(ge=0, le=1 << 40)]
Positive = Annotated[int, Meta(ge=1, le=1 << 40)]
ExpertCount = Annotated[int, Meta(ge=1, le=65536)]
TopK = Annotated[int, Meta(ge=1, le=1024)]


class EpConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Shape and policy of one expert-parallel group; equal on all ranks.

    `experts_per_rank` or `placement` (a list of expert ids per rank, or a spec of `placement_of`) say who holds what;
    without either, equal blocks. `expert_elements`: elements of one expert's parameters. `hidden`: elements of a token.
    `max_tokens_per_rank`: most tokens a rank dispatches, in mode `ll` and on the backend `cuda`. `backend`: where
    buffers lie, in the memory of processes or of GPUs. `ep_mr_cache_size`: registrations kept per rank.
    `init_deadline_s`, `deadline_s`: seconds a rank waits for the others at construction and in a call.
    Raises InputError from `check` for fields that contradict each other.
    """

    num_experts: ExpertCount
    backend: EpBackend = "host"
    experts_per_rank: Positive | None = None
    placement: str | tuple[tuple[Count, ...], ...] | None = None
    top_k: TopK = 1
    hidden: Positive | None = None
    expert_elements: Positive | None = None
    dtype: str = "float32"
    mode: Mode = "ht"
    layout: Layout | None = None
    max_tokens_per_rank: Positive | None = None
    alignment: Positive = 1
    ep_mr_cache_size: Annotated[int, Meta(ge=0, le=1 << 20)] = 64
    topology: str = "auto"
    transport: Transport = "auto"
    init_deadline_s: Annotated[float, Meta(gt=0)] = 30.0
    deadline_s: Annotated[float, Meta(gt=0)] = 60.0

    @property
    def row_layout(self) -> Layout:
        """The layout of received rows: the one given, or the mode's own."""
        return self.layout or LAYOUTS[self.mode][0]

    def check(self, ranks: int) -> Placement:
        """The placement over `ranks` ranks; raises InputError with field, value and what is allowed."""
        dtype_named(self.dtype)
        if self.row_layout not in LAYOUTS[self.mode]:
            raise InputError(
                f"mode {self.mode} has no layout {self.layout}", hint=f"allowed: {', '.join(LAYOUTS[self.mode])}"
            )
        if self.top_k > self.num_experts:
            raise InputError(
                f"top_k {self.top_k} exceeds num_experts {self.num_experts}", hint=f"allowed: 1 to {self.num_experts}"
            )
        per_rank = self.experts_per_rank
        if isinstance(self.placement, tuple):
            placement = explicit_placement(self.num_experts, self.placement)
            if placement.ranks != ranks:
                raise InputError(
                    f"placement lists {placement.ranks} ranks, the group has {ranks}", hint="list every rank's experts"
                )
        elif self.placement is None and per_rank is not None and per_rank * ranks != self.num_experts:
            raise InputError(
                f"experts_per_rank {per_rank} × {ranks} ranks is not num_experts {self.num_experts}",
                hint="leave experts_per_rank out, or give a placement",
            )
        else:
            placement = placement_of(self.placement or "block", self.num_experts, ranks)
        for rank, experts in enumerate(placement.experts_of_rank):
            if per_rank not in (None, len(experts)):
                raise InputError(
                    f"experts_per_rank is {per_rank}, but the placement gives rank {rank} {len(experts)} experts",
                    hint="leave experts_per_rank out",
                )
        return placement
