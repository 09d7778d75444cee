"""Annotations of a GitHub workflow: commands on standard output that its runner reads."""

from __future__ import annotations

from ncclep_bench.doctor.render import bounded, counted, listed, problems
from ncclep_bench.model.toml_file import shown
from ncclep_bench.reporting.findings.contract import Diagnosis, FindingFormat

_COMMANDS = {"error": "error", "warning": "warning", "info": "notice"}


def render(diagnosis: Diagnosis) -> str:
    """One command per problem, the worst first since GitHub shows ten of a kind, and a line that sums up."""
    lines = []
    for finding, places in problems(diagnosis.findings, worst_first=diagnosis.worst_first):
        summary = finding.summary + (f" [{listed(places)}]" if places else "")
        message = [summary, *bounded(finding.evidence), *(f"→ {line}" for line in finding.remedy.splitlines())]
        title = _property(f"{finding.code} {finding.title}")
        lines.append(f"::{_COMMANDS[finding.verdict]} title={title}::{_data(message)}\n")
    return "".join(lines) + f"ncclep-doctor: {counted(diagnosis.findings)}\n"


def _data(lines: list[str]) -> str:
    return "%0A".join(shown(line).replace("%", "%25") for line in lines)


def _property(text: str) -> str:
    return _data([text]).replace(":", "%3A").replace(",", "%2C")


GITHUB = FindingFormat(render)
