"""Published figures of a scenario beside what this run measured; a claim is never a measurement."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from ncclep_bench.errors import InputError
from ncclep_bench.model.scenario import Reference
from ncclep_bench.results.frames import RunFrames

if TYPE_CHECKING:
    import pandas as pd


class Claim(NamedTuple):
    """One claim, and the range of its column over the `rows` passed rows that it speaks of (None: not measured)."""

    scenario: str
    reference: Reference
    rows: int
    low: float | None
    high: float | None


def claims(frames: RunFrames) -> list[Claim]:
    """Every reference claim of the runs' scenarios, in file order.

    Raises InputError for a claim that is not in the form of a scenario's `reference`.
    """
    found: dict[Any, Claim] = {}
    for header in frames.headers:
        for scenario in header.scenarios:
            name = str(scenario.get("name", ""))
            try:
                references = msgspec.convert(scenario.get("reference", []), list[Reference])
            except msgspec.ValidationError as error:
                raise InputError(f"reference of scenario {name!r} in the run's header: {error}") from None
            for reference in references:
                found.setdefault((name, repr(reference)), _claim(frames, name, reference))
    return list(found.values())


def _claim(frames: RunFrames, scenario: str, reference: Reference) -> Claim:
    cases = frames.cases
    mask = (cases["scenario"] == scenario) & (cases["outcome"] == "passed")
    if "collective" not in reference.where:
        traditional = cases["collective"].isin(set(frames.partners.values()))
        mask &= traditional if reference.role == "traditional" else ~traditional
    for column, wanted in reference.where.items():
        mask &= _equals(cases, column, wanted)
    if reference.column not in cases:
        return Claim(scenario, reference, 0, None, None)
    values = cases.loc[mask.fillna(False), reference.column].dropna()
    if values.empty:
        return Claim(scenario, reference, 0, None, None)
    return Claim(scenario, reference, len(values), float(values.min()), float(values.max()))


def _equals(cases: pd.DataFrame, column: str, wanted: Any) -> Any:
    if column not in cases:
        return False
    if cases[column].dtype == "string":
        wanted = f"{wanted:g}" if isinstance(wanted, float) else str(wanted)
    return cases[column] == wanted
