"""One JSON object with every finding, nothing left out."""

from __future__ import annotations

import json
import re
from collections import Counter

from ncclep_bench.reporting.findings.contract import Diagnosis, FindingFormat


def render(diagnosis: Diagnosis) -> str:
    """One object: `version` of its form, `host`, how many findings of each verdict, and `findings`."""
    import msgspec

    counts = Counter(finding.verdict for finding in diagnosis.findings)
    document = {"version": 1, "host": diagnosis.host, "counts": counts, "findings": diagnosis.findings}
    text = json.dumps(msgspec.to_builtins(document), indent=2, ensure_ascii=False)
    return re.sub(r"[^ -~\n]", _readable, text) + "\n"


def _readable(character: re.Match[str]) -> str:
    """A character as it is, or its escape where a terminal would obey it or UTF-8 does not have it."""
    return character[0] if character[0].isprintable() else json.dumps(character[0])[1:-1]


JSON = FindingFormat(render)
