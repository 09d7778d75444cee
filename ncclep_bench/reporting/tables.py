"""What console and page share: how values are shown, which columns tell rows apart, and who stands beside whom."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, get_args

from ncclep_bench.doctor.render import summed_up
from ncclep_bench.model.measurement import COLUMNS, Outcome, Preflight
from ncclep_bench.model.toml_file import shown
from ncclep_bench.registry import COLLECTIVES
from ncclep_bench.results.claims import Claim
from ncclep_bench.results.frames import AXES, RunFrames

if TYPE_CHECKING:
    import pandas as pd

IDENTITY = ("run", "repeat", *(name for name in AXES if name not in ("scenario", "collective")))
"""Columns that tell the rows of one collective in one scenario apart."""

LINK_TOLERANCE = 0.02
"""Share of the bytes by which links may have seen more or less than was counted."""

LINK_LEAST_BYTES = 1 << 20
"""Below this many bytes flags, which links pad, weigh too much for that."""

OUTCOMES: tuple[str, ...] = get_args(Outcome)


def show(name: str, value: Any) -> str:
    """`value` as its column shows it, without control characters; nothing for a missing one."""
    import pandas as pd

    if value is None or pd.isna(value):
        return ""
    column = COLUMNS.get(name)
    text = shown(str(value) if column is None else column.show(value))
    return {"True": "yes", "False": "no"}.get(text, text)


def label(name: str) -> str:
    """A column's name as people write it."""
    return {"tag": "TAG", "ece": "ECE"}.get(name, name.replace("_", " "))


def varying(cases: pd.DataFrame, names: Iterable[str]) -> list[str]:
    """Those of `names` with more than one value in `cases`; missing counts as one."""
    return [name for name in names if name in cases and cases[name].nunique(dropna=False) > 1]


def constant(cases: pd.DataFrame, names: Iterable[str]) -> dict[str, str]:
    """Those of `names` with one value everywhere, as shown; missing ones left out."""
    same = [name for name in names if name in cases and cases[name].nunique(dropna=False) == 1]
    return {name: text for name in same if (text := show(name, cases[name].iloc[0]))}


def described(pairs: dict[str, str]) -> str:
    """`ranks 4 · dtype float32` from {"ranks": "4", "dtype": "float32"}."""
    return " · ".join(f"{label(name)} {text}" for name, text in pairs.items())


def tells_apart(cases: pd.DataFrame, name: str) -> bool:
    """Whether axis `name` says something of its own: batch_size does not where it is the number of tokens."""
    return name != "batch_size" or not cases["batch_size"].equals(cases["tokens"])


def cautions(frames: RunFrames) -> list[str]:
    """What a reader must know before trusting a figure of this run."""
    cases = frames.cases
    crowded = int((cases["oversubscribed"].fillna(False) & cases["p50_us"].notna()).sum())
    timed = int(cases["p50_us"].notna().sum())
    said = [
        f"oversubscribed: {crowded} of {timed} timed cases had more ranks than cores. Ranks took turns and waited for "
        "each other, so these times compare algorithms here and do not foretell a cluster's."
    ]
    return [*frames.warnings, *(said if crowded else ()), *_miscounted(cases)]


def _miscounted(cases: pd.DataFrame) -> list[str]:
    """Our rows whose links have seen other bytes than were counted."""
    counted = cases["wire_bytes"] + cases["control_bytes"]
    off = ((cases["link_bytes"] / counted - 1).abs() > LINK_TOLERANCE) & (cases["wire_source"] == "counted")
    count = int((off & (counted >= LINK_LEAST_BYTES)).fillna(False).sum())
    if not count:
        return []
    return [
        f"bytes: in {count} cases the links' counters differ by over {LINK_TOLERANCE:.0%} from what kernels counted."
    ]


def preflight_texts(preflight: Preflight) -> list[str]:
    """What the doctor said before the first case: the counts, then a line per warning and error."""
    if preflight.failure:
        return [f"preflight: {shown(preflight.failure)}"]
    remarks = [f"  {remark.verdict} {remark.code}: {remark.summary}" for remark in preflight.findings]
    return [f"preflight: {summed_up(preflight.counts)}", *map(shown, remarks)]


def outcome_counts(cases: pd.DataFrame) -> dict[str, int]:
    """How many cases had each outcome, every outcome named."""
    counts = cases["outcome"].value_counts()
    return {outcome: int(counts.get(outcome, 0)) for outcome in OUTCOMES}


def families(frames: RunFrames) -> pd.Series[str]:
    """Per row the EP collective that it is, or that it stands beside as its traditional partner."""
    beside = {partner: collective for collective, partner in frames.partners.items()}
    cases = frames.cases
    own = cases["collective"].map(lambda collective: beside.get(collective, collective)).astype("string")
    return cases["variant"].where(cases["variant"].isin(set(frames.partners)), own).rename("family")


def family_order(names: Iterable[str]) -> list[str]:
    """`names` in the order in which collectives are declared, unknown ones last."""
    known = list(COLLECTIVES)
    return sorted(set(names), key=lambda name: (known.index(name) if name in known else len(known), name))


class Unmeasured(NamedTuple):
    """Cases that have no time for the same reason."""

    scenario: str
    collective: str
    outcome: str
    reason: str
    cases: list[str]


def unmeasured(frames: RunFrames) -> list[Unmeasured]:
    """Every case that did not pass, grouped by reason; failures first."""
    bad = frames.cases[frames.cases["outcome"] != "passed"]
    groups = []
    for key, rows in bad.groupby(["scenario", "collective", "outcome", "reason"], dropna=False, sort=False):
        scenario, collective, outcome, reason = (show("", value) for value in key)
        names = [name for name in IDENTITY if name in rows and rows[name].notna().any()]
        names = varying(frames.cases[frames.cases["collective"].isin([collective])], names)
        texts = [_case_text(row, names) for _, row in rows.iterrows()]
        groups.append(Unmeasured(scenario, collective, outcome, reason, texts))
    return sorted(groups, key=lambda group: OUTCOMES.index(group.outcome))


def _case_text(row: pd.Series[Any], names: Sequence[str]) -> str:
    return described({name: text for name in names if (text := show(name, row[name]))}) or show("case", row["case"])


def claim_texts(claim: Claim) -> dict[str, str]:
    """A claim's cells: what it is about, what it says, what was measured here, where it comes from."""
    reference = claim.reference
    low, high = show(reference.column, claim.low), show(reference.column, claim.high)
    column = COLUMNS.get(reference.column)
    texts = {
        "scenario": claim.scenario,
        "about": described({name: str(value) for name, value in reference.where.items()}) or "all cases",
        "side": reference.role,
        "column": label(reference.column),
        "claimed": show(reference.column, reference.value) if column else f"{reference.value:g}",
        "measured": "not measured" if not low else low if low == high else f"{low} to {high}",
        "status": "claim" if reference.verified else "claim, unverified",
        "source": reference.source,
        "note": reference.note,
    }
    return {name: shown(text) for name, text in texts.items()}
