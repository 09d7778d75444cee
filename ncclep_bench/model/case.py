"""One case of a sweep: every axis has one value here."""

from __future__ import annotations

from typing import Annotated, Any, Literal, get_args

import msgspec
from msgspec import Meta

from ncclep_bench.model.ep_config import Count, ExpertCount, Layout, Mode, Positive, TopK, Transport

Share = Annotated[float, Meta(ge=0, le=1)]
RankCount = Annotated[int, Meta(ge=1, le=65536)]

Window = Literal["off", "symmetric", "symmetric_zero_cta"]
WINDOWS: tuple[Window, ...] = get_args(Window)

Cache = Literal["warm", "cold"]

UserMemory = Literal["aligned", "unaligned", "stream_ordered"]
USER_MEMORIES: tuple[UserMemory, ...] = get_args(UserMemory)


class Case(msgspec.Struct, frozen=True, kw_only=True):
    """One point of a sweep. Field names are scenario keys, columns of every report and filter names.

    `tokens` = batch_size × tokens_per_sequence, per rank. Axes that a collective does not use are None.
    `chain`: dispatch + combine pairs per sample. `num_sms`: multiprocessors it may use, None for all.
    `hidden` and `expert_elements` count elements. `window`: how a library of others knows the buffers, None for "off".
    `user_memory`: where buffers of the user's own begin and who gives them, None for "aligned".
    `cache`: whether the device's cache still holds the buffers when an operation begins, None for "warm".
    `empty_ranks`: that many of the last ranks hold no token. `masked_share`: share of choices set to −1.
    """

    scenario: str = ""
    collective: str
    backend: str = "host"
    mode: Mode | None = None
    layout: Layout | None = None
    variant: str | None = None
    ranks: RankCount
    tokens: Count | None = None
    batch_size: Count | None = None
    tokens_per_sequence: Positive | None = None
    hidden: Positive | None = None
    num_experts: ExpertCount
    expert_elements: Positive | None = None
    placement: str = "block"
    top_k: TopK | None = None
    dtype: str = "float32"
    alignment: Positive | None = None
    routing: str | None = None
    routing_param: str | float | None = None
    masked_share: Share | None = None
    empty_ranks: Count | None = None
    active_share: Share | None = None
    mr_cache_size: Count | None = None
    user_memory: UserMemory | None = None
    chain: Positive | None = None
    num_sms: Positive | None = None
    window: Window | None = None
    cache: Cache | None = None
    transport: Transport = "auto"
    topology: str = "off"
    seed: Count = 0

    @property
    def case(self) -> str:
        """A readable identity, unique in a run and the same in every run: key=value of each axis that is set."""
        return ",".join(
            f"{key}={value}" for key, value in self.axes().items() if key != "scenario" and value is not None
        )

    def axes(self) -> dict[str, Any]:
        """Every axis with its value, None where the collective does not use it."""
        return msgspec.structs.asdict(self)
