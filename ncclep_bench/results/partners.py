"""Which rows are compared: an EP row with its traditional partner (TAG, saved share), a peer's row with ours."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any, NamedTuple

from ncclep_bench.model.measurement import Measurement

LAYOUT_COUNTS = frozenset({"dispatch", "dispatch_combine"})
"""EP collectives that lay rows out anew for each routing: `update` is part of their time, and of their partner's."""

PARTNER_BACKENDS = {"cuda": "nccl", "nccl_ep": "nccl"}
"""Who runs the traditional partner of a backend's row, where it is not that backend itself."""

OURS = "cuda"
PEERS = ("nccl", "nccl_ep")
"""Backends of others, whose rows are compared with ours."""

# How EP moves rows is what is compared, so these differ between the two by design.
_COMPARED = frozenset({"collective", "backend", "mode", "layout", "variant", "alignment", "transport", "topology",
                       "window", "cache"})  # fmt: skip


class Timed(NamedTuple):
    """One measured row: the record, and its times in microseconds."""

    measurement: Measurement
    p50_us: float | None
    update_us: float | None


class Gain(NamedTuple):
    """What an EP row gains over its partner; None where a part is missing."""

    tag: float | None
    saved_share: float | None


def gains(rows: Sequence[Timed], elsewhere: Sequence[Timed] = ()) -> list[Gain | None]:
    """The gain of each of a run's rows, None where there is no partner, or not exactly one.

    A partner agrees in every axis that both use, in timing and in cache, passed verification, and belongs to the same
    repeat. `elsewhere`: rows of other runs on the same machine, where partners on another backend may be.
    """
    candidates: dict[tuple[Any, ...], list[Timed]] = defaultdict(list)
    others = [row for row in elsewhere if row.measurement.case.backend in PARTNER_BACKENDS.values()]
    own = {row.measurement.case.backend for row in rows}
    for row in (*rows, *(row for row in others if row.measurement.case.backend not in own)):
        case = row.measurement.case
        # The partner is NCCL as it comes; its other ways stand in rows of their own.
        if _is_right(row) and case.window in (None, "off"):
            candidates[case.collective, case.backend, row.measurement.repeat].append(row)
    indexes: dict[tuple[Any, ...], dict[tuple[Any, ...], list[Timed]]] = {}
    results: list[Gain | None] = []
    for row in rows:
        record, case = row.measurement, row.measurement.case
        bucket = (record.partner, PARTNER_BACKENDS.get(case.backend, case.backend), record.repeat)
        if not (record.partner and _is_right(row) and candidates[bucket]):
            results.append(None)
            continue
        used = {name for partner in candidates[bucket] for name, value in _axes(partner).items() if value is not None}
        names = tuple(name for name, value in _axes(row).items() if value is not None and name in used)
        index = indexes.get((*bucket, names))
        if index is None:
            index = indexes[(*bucket, names)] = defaultdict(list)
            for partner in candidates[bucket]:
                index[_key(partner, names, partner.measurement.case.variant)].append(partner)
        # A variant of a partner names the EP collective that it stands beside; other partners have none.
        alike = [
            partner
            for variant in (case.collective, None)
            for partner in index.get(_key(row, names, variant), ())
            if (partner.measurement.timing, partner.measurement.cache) == (record.timing, record.cache)
        ]
        results.append(_gain(row, alike[0]) if len(alike) == 1 else None)
    return results


def times_ours(rows: Sequence[Timed], elsewhere: Sequence[Timed] = ()) -> list[float | None]:
    """The time of each row of a peer over that of our row alike, None where there is not exactly one.

    Alike: every axis but the backend and its windows, timing, cache, hosts and repeat. `elsewhere` as in `gains`.
    """
    ours: dict[tuple[Any, ...], list[float]] = defaultdict(list)
    for row in (*rows, *elsewhere):
        if row.measurement.case.backend == OURS and _is_right(row) and row.p50_us:
            ours[_contract(row)].append(row.p50_us)
    results: list[float | None] = []
    for row in rows:
        compared = row.measurement.case.backend in PEERS and _is_right(row) and row.p50_us is not None
        times = ours.get(_contract(row), []) if compared else []
        results.append(row.p50_us / times[0] if row.p50_us is not None and len(times) == 1 else None)
    return results


def _is_right(row: Timed) -> bool:
    return row.measurement.outcome == "passed" and bool(row.measurement.verified)


def _contract(row: Timed) -> tuple[Any, ...]:
    record = row.measurement
    axes = tuple(value for name, value in record.case.axes().items() if name not in ("backend", "window", "cache"))
    return (*axes, record.timing, record.cache, record.hosts, record.repeat)


def _axes(row: Timed) -> dict[str, Any]:
    return {name: value for name, value in row.measurement.case.axes().items() if name not in _COMPARED}


def _key(row: Timed, names: tuple[str, ...], variant: str | None) -> tuple[Any, ...]:
    return (variant, *(getattr(row.measurement.case, name) for name in names))


def _gain(row: Timed, partner: Timed) -> Gain:
    counts = row.measurement.case.collective in LAYOUT_COUNTS
    own, other = _total_us(row, counts), _total_us(partner, counts)
    own_bytes, other_bytes = row.measurement.wire_bytes, partner.measurement.wire_bytes
    return Gain(
        (other - own) / other if own is not None and other else None,
        1 - own_bytes / other_bytes if own_bytes is not None and other_bytes else None,
    )


def _total_us(row: Timed, layout_counts: bool) -> float | None:
    if row.p50_us is None or not layout_counts:
        return row.p50_us
    return None if row.update_us is None else row.update_us + row.p50_us
