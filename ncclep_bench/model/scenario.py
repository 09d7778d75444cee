"""A scenario file: axes (a scalar or a list each), timing rules, reference claims and measured loads."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import Meta

from ncclep_bench.model.ep_config import TopK


class Timing(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """When a case has been measured long enough.

    After `warmup` launches, at least `min_samples`, then until the 95 % confidence interval of the median is within
    ± `ci_share` of it, `max_samples` are there, or `budget_s` seconds are spent. `deadline_s` bounds the whole case.
    `utilisation`: on GPUs, loop each case two seconds more and ask how much of them it uses. `overlap`: run it beside
    matrix products as well.
    """

    warmup: Annotated[int, Meta(ge=0, le=100_000)] = 3
    min_samples: Annotated[int, Meta(ge=1, le=1_000_000)] = 10
    max_samples: Annotated[int, Meta(ge=1, le=1_000_000)] = 1000
    ci_share: Annotated[float, Meta(gt=0, le=1)] = 0.025
    budget_s: Annotated[float, Meta(gt=0, le=86_400)] = 2.0
    deadline_s: Annotated[float, Meta(gt=0, le=86_400)] = 60.0
    utilisation: bool = False
    overlap: bool = False


class Reference(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Somebody's published figure: `value` of `column` for the rows that `where` selects; never a measurement.

    `role`: "ep" or "traditional". `note` starts with "inconsistent: " where the source contradicts itself.
    """

    where: dict[str, str | int | float | bool]
    column: str
    value: float
    source: str
    role: str = "ep"
    note: str = ""
    verified: bool = False


class ExpertLoad(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Measured tokens per expert of a real model, for routing = "measured"; `source` and `licence` are required.

    `top_k`: the model's, for a scenario that names none.
    """

    counts: Annotated[list[Annotated[int, Meta(ge=0)]], Meta(min_length=1)]
    source: str
    licence: str
    top_k: TopK | None = None


class Scenario(msgspec.Struct, frozen=True, kw_only=True):
    """A loaded scenario. `axes[key]` is the list of values of one scenario key; `file` where it came from.

    `settings`: what `--set` has changed since.
    """

    name: str
    file: str
    text: str
    description: str = ""
    axes: dict[str, list[Any]]
    timing: Timing = Timing()
    reference: list[Reference] = []
    expert_load: dict[str, ExpertLoad] = {}
    settings: tuple[str, ...] = ()

    @property
    def where(self) -> str:
        """What errors about its values name."""
        return " ".join([self.file, *(f"--set {setting}" for setting in self.settings)])
