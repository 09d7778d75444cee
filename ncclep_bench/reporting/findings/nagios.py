"""One line and an exit code, as Nagios, Icinga and Naemon expect of a plugin."""

from __future__ import annotations

from collections.abc import Mapping

from ncclep_bench.doctor.render import counted, counts, listed, problems
from ncclep_bench.model.toml_file import shown
from ncclep_bench.reporting.findings.contract import Diagnosis, FindingFormat

_STATES = ("OK", "WARNING", "CRITICAL", "UNKNOWN")
_MOST_CHARACTERS = 1000
"""Of the text before the figures: what agents pass on is short."""


def render(diagnosis: Diagnosis) -> str:
    """State, counts and problems, then the counts as performance data; no findings at all are an unknown state."""
    state = _STATES[NAGIOS.exit_code(diagnosis.findings) or 0]
    if not diagnosis.findings:
        return f"NCCLEP {state} - {_text(diagnosis.failure or 'nothing was checked')}\n"
    said = "; ".join(
        f"{finding.code} {finding.summary}" + (f" [{listed(places)}]" if places else "")
        for finding, places in problems(diagnosis.findings, worst_first=diagnosis.worst_first)
        if finding.verdict != "info"
    )
    text = _text(counted(diagnosis.findings) + (f": {said}" if said else ""))
    return f"NCCLEP {state} - {text} | {_figures(counts(diagnosis.findings))}\n"


def _text(text: str) -> str:
    # A bar would begin the figures.
    line = shown(text.replace("\n", " ")).replace("|", "/")
    return line if len(line) <= _MOST_CHARACTERS else f"{line[:_MOST_CHARACTERS]}…"


def _figures(found: Mapping[str, int]) -> str:
    """label=value;warning;critical;least: more than none of a kind is what the limit says."""
    return (
        f"errors={found['error']};;0;0 warnings={found['warning']};0;;0 notes={found['info']};;;0 "
        f"ok={found['ok']};;;0 not_run={found['not_run']};;;0"
    )


NAGIOS = FindingFormat(render, exit_codes={"error": 2, "warning": 1, "ok": 0, "info": 0, "not_run": 3})
