"""From a scenario to its cases, each of them validated before anything runs."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from ncclep_bench.collectives.contract import Collective
from ncclep_bench.errors import InputError
from ncclep_bench.model.case import Case
from ncclep_bench.model.placement import placement_of
from ncclep_bench.model.scenario import Scenario
from ncclep_bench.model.toml_file import convert, shown
from ncclep_bench.registry import BACKENDS, COLLECTIVES, ROUTINGS

MOST_CASES = 100_000
"""Cases that one scenario may have."""

_DEFAULTS: dict[str, Any] = {
    "mode": "ht",
    "tokens_per_sequence": 1,
    "alignment": 1,
    "routing": "uniform",
    "masked_share": 0.0,
    "empty_ranks": 0,
    "active_share": 1.0,
    "mr_cache_size": 64,
    "chain": 4,
}
"""Values of axes that a collective uses and a scenario leaves out; what is not here has its default in Case."""

_LAYOUT_OF_MODE = {"ht": "flat", "ll": "expert_major"}

_VARIANT_THAT_USES = {"mr_cache_size": "registered", "user_memory": "registered"}
"""Axes that make a difference for one variant alone."""

_ALWAYS = {"backend", "experts_per_rank"}
"""Axes that no collective needs to name."""

# Last come the axes that traditional partners do not have, so that a partner follows what it is compared with.
_LAST = (
    "mode",
    "layout",
    "alignment",
    "transport",
    "num_sms",
    "active_share",
    "collective",
    "variant",
    "mr_cache_size",
    "user_memory",
    "chain",
)
_ORDER = (
    *("backend", "ranks", "experts_per_rank"),
    *(key for key in Case.__struct_fields__ if key not in ("scenario", "backend", "ranks", *_LAST)),
    *_LAST,
)


def expand(scenario: Scenario, *, backends: Sequence[str] | None, ranks_available: int | None) -> list[Case]:
    """Every case of `scenario`: the cross product of the axes that each collective uses, without duplicates.

    `backends` replaces the axis `backend` (host by default), `ranks_available` is the axis `ranks` where there is none.
    Order: backend, ranks, sizes; traditional partners follow the EP cases of the same sizes. Left out,
    `expert_elements` is hidden × hidden (one square matrix), `num_experts` is experts_per_rank × ranks; with routing
    "measured", `num_experts` and `top_k` are the load's. A padded_all_to_all stands beside each EP token collective of
    the scenario, or beside all of them where it has none.
    Raises InputError with file, key, value and what is allowed.
    """
    axes = {key: [value] for key, value in _DEFAULTS.items()} | scenario.axes
    for backend in backends or ():
        if backend not in BACKENDS:
            BACKENDS.get(backend)  # raises; a known one is not imported before ranks need it
    axes["backend"] = list(backends or axes.get("backend", ["host"]))
    if "ranks" not in axes:
        if ranks_available is None:
            raise _wrong(scenario, "ranks", "is missing", "a number of ranks, here or as --np")
        axes["ranks"] = [ranks_available]
    if "collective" not in axes:
        raise _wrong(scenario, "collective", "is required and missing", ", ".join(COLLECTIVES))
    _check_variants(scenario)
    products = [
        (keys, [axes[key] for key in keys], fixed)
        for name in axes["collective"]
        for keys, fixed in _axes_of(COLLECTIVES.get(name), axes)
    ]
    count = sum(math.prod(map(len, lists)) for _, lists, _ in products)
    if count > MOST_CASES:
        raise InputError(
            f"{shown(scenario.where)}: expands to {count:,} cases", hint=f"allowed: {MOST_CASES:,}; shorten the lists"
        )
    check = _Check(scenario, ranks_available)
    order: dict[Case, tuple[int, ...]] = {}
    for keys, lists, fixed in products:
        variants = COLLECTIVES.get(fixed["collective"]).variants
        for positions in itertools.product(*(range(len(values)) for values in lists)):
            chosen = dict(zip(keys, positions, strict=True))
            values = fixed | {key: axes[key][position] for key, position in chosen.items()}
            case = convert(_complete(scenario, values), Case, file=scenario.where)
            check(case)
            chosen["collective"] = axes["collective"].index(case.collective)
            chosen["variant"] = variants.index(case.variant) if case.variant else 0
            order.setdefault(case, tuple(chosen.get(key, MOST_CASES) for key in _ORDER))
    return sorted(order, key=order.__getitem__)


def _axes_of(collective: Collective, axes: dict[str, list[Any]]) -> Iterator[tuple[list[str], dict[str, Any]]]:
    """For each variant that the scenario asks of `collective`: the keys that make a difference, and what is fixed."""
    for variant in _variants(collective, axes):
        used = set(collective.axes) - {"variant"}
        if variant in COLLECTIVES:
            used &= COLLECTIVES.get(variant).axes
        used -= {key for key, needed in _VARIANT_THAT_USES.items() if variant != needed}
        if "expert_elements" in used and "expert_elements" not in axes:
            used.add("hidden")
        fixed = {"collective": collective.name} | ({"variant": variant} if variant else {})
        yield [key for key in _ORDER if key in axes and key in used | _ALWAYS], fixed


def _variants(collective: Collective, axes: dict[str, list[Any]]) -> list[str]:
    """Variants to run, [""] where the collective has none: those given, else those beside what the scenario has."""
    given = [variant for variant in axes.get("variant", ()) if variant in collective.variants]
    beside = [variant for variant in collective.variants if variant in COLLECTIVES]
    present = [variant for variant in beside if variant in axes["collective"]]
    return given or present or beside or list(collective.variants[:1]) or [""]


def _check_variants(scenario: Scenario) -> None:
    given = scenario.axes.get("variant", [])
    known = {variant: None for name in COLLECTIVES for variant in COLLECTIVES.get(name).variants} if given else {}
    for variant in given:
        if variant not in known:
            raise _wrong(scenario, "variant", f"value {variant!r} is not usable", ", ".join(known))


def _complete(scenario: Scenario, values: dict[str, Any]) -> dict[str, Any]:
    """`values` with everything that follows from them, as fields of Case; raises InputError for contradictions."""
    axes = COLLECTIVES.get(values["collective"]).axes
    values = {"scenario": scenario.name} | values
    if "layout" in axes:
        values.setdefault("layout", _LAYOUT_OF_MODE[values["mode"]])
    if values.get("routing") == "measured" and (load := scenario.expert_load.get(values.get("routing_param", ""))):
        values.setdefault("top_k", load.top_k)
        if "experts_per_rank" not in values:
            values.setdefault("num_experts", len(load.counts))
    if "experts_per_rank" in values:
        _agree(
            scenario,
            values,
            "num_experts",
            values.pop("experts_per_rank") * values["ranks"],
            "experts_per_rank × ranks",
        )
    if "tokens" in axes:
        per_sequence = values["tokens_per_sequence"]
        if "batch_size" in values:
            _agree(scenario, values, "tokens", values["batch_size"] * per_sequence, "batch_size × tokens_per_sequence")
        elif "tokens" in values:
            if values["tokens"] % per_sequence:
                allowed = f"multiples of tokens_per_sequence {per_sequence}"
                raise _wrong(scenario, "tokens", f"value {values['tokens']} is not usable", allowed)
            values["batch_size"] = values["tokens"] // per_sequence
    if "expert_elements" in axes and "expert_elements" not in values and "hidden" in values:
        values["expert_elements"] = values["hidden"] ** 2
    if "hidden" not in axes:
        values.pop("hidden", None)
    for key, allowed in _REQUIRED.items():
        if key in axes and values.get(key) is None:
            raise _wrong(scenario, key, f"is required for {values['collective']} and missing", allowed)
    return values


_REQUIRED = {
    "num_experts": "a whole number, or experts_per_rank",
    "tokens": "a whole number, or batch_size",
    "hidden": "a whole number of elements",
    "top_k": "a whole number from 1 to num_experts",
    "expert_elements": "a whole number, or hidden, of which it is the square",
}


def _agree(scenario: Scenario, values: dict[str, Any], key: str, implied: int, formula: str) -> None:
    if values.setdefault(key, implied) != implied:
        raise _wrong(
            scenario, key, f"value {values[key]} contradicts {formula} = {implied}", f"{implied}, or leave one out"
        )


class _Check:
    """Refuses cases that no rank could run; remembers what it has found right, since cases differ in few axes."""

    def __init__(self, scenario: Scenario, ranks_available: int | None) -> None:
        self._scenario = scenario
        self._file = shown(scenario.where)
        self._ranks_available = ranks_available
        self._placement = cache(placement_of)
        self._seen_routings: set[tuple[Any, ...]] = set()

    def __call__(self, case: Case) -> None:
        available = self._ranks_available
        if available is not None and case.ranks > available:
            raise self._wrong("ranks", f"value {case.ranks} exceeds the {available} there are", f"1 to {available}")
        try:
            self._placement(case.placement, case.num_experts, case.ranks)
        except InputError as error:
            key = "num_experts" if case.placement == "block" else "placement"
            raise InputError(f"{self._file}: key `{key}`: {error.message}", hint=error.hint) from error
        if case.top_k is not None and case.top_k > case.num_experts:
            allowed = f"1 to {case.num_experts}"
            raise self._wrong("top_k", f"value {case.top_k} exceeds num_experts {case.num_experts}", allowed)
        if case.empty_ranks is not None and case.empty_ranks > case.ranks:
            raise self._wrong(
                "empty_ranks", f"value {case.empty_ranks} exceeds ranks {case.ranks}", f"0 to {case.ranks}"
            )
        if case.routing is not None:
            self._check_routing(case)

    def _check_routing(self, case: Case) -> None:
        routing = (case.routing, case.routing_param, case.num_experts, case.top_k)
        if routing in self._seen_routings:
            return
        self._seen_routings.add(routing)
        try:
            ROUTINGS.get(case.routing or "")(
                case, expert_load=self._scenario.expert_load, directory=Path(self._scenario.file).parent
            )
        except InputError as error:
            raise InputError(f"{self._file}: {error.message}", hint=error.hint) from error

    def _wrong(self, key: str, problem: str, allowed: str) -> InputError:
        return _wrong(self._scenario, key, problem, allowed)


def _wrong(scenario: Scenario, key: str, problem: str, allowed: str) -> InputError:
    return InputError(f"{shown(scenario.where)}: key `{key}`: {problem}", hint=f"allowed: {allowed}")
