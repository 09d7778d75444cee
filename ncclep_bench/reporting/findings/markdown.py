"""Markdown for comments and job summaries; nothing in a finding becomes markup."""

from __future__ import annotations

import re

from ncclep_bench.doctor.render import MARKS, bounded, counted, listed, not_run, problems
from ncclep_bench.model.toml_file import shown
from ncclep_bench.reporting.findings.contract import Diagnosis, FindingFormat

_MARKUP = re.compile(r"([\\`*_\[\]<>&|~#$])")
_BLOCK = re.compile(r"^ *(\d*)([-+=.)])")
"""What makes a rule, a list or a heading of a line that begins so; four blanks would make it code."""


def render(diagnosis: Diagnosis) -> str:
    """A table of problems, each with evidence and remedy below; then what could not run."""
    found = problems(diagnosis.findings, worst_first=diagnosis.worst_first)
    parts = ["# ncclep-doctor" + (f": {_text(diagnosis.host)}" if diagnosis.host else ""), counted(diagnosis.findings)]
    if found:
        several = any(places for _, places in found)
        rows = [("verdict", "code", "what", "where"), ("---",) * 4]
        for finding, places in found:
            mark = f"{MARKS[finding.verdict][0]} {finding.verdict}"
            rows.append((mark, finding.code, _text(finding.summary), _text(listed(places))))
        parts.append("\n".join(f"| {' | '.join(row[: 3 + several])} |" for row in rows))
    for finding, _ in found:
        parts.append(f"## {finding.code}: {_text(finding.title)}")
        parts.append(_text(finding.summary))
        if finding.evidence:
            parts.append("\n".join(f"- {_code(line)}" for line in bounded(finding.evidence)))
        if finding.remedy:
            parts.append(_block(finding.remedy))
    if reasons := not_run(diagnosis.findings):
        parts.append("## Not run")
        parts.append("\n".join(f"- {_text(reason)}: {listed(codes)}" for reason, codes in reasons.items()))
    return "\n\n".join(parts) + "\n"


def _text(text: str) -> str:
    return _BLOCK.sub(r"\1\\\2", _MARKUP.sub(r"\\\1", shown(text))).lstrip(" ")


def _code(line: str) -> str:
    """A code span, whose fence is longer than any run of backticks inside."""
    line = shown(line)
    fence = "`" * (_longest_run(line) + 1)
    pad = " " if line[:1] in ("`", " ", "") or line[-1:] == "`" else ""
    return f"{fence}{pad}{line}{pad}{fence}"


def _block(text: str) -> str:
    fence = "`" * max(3, _longest_run(text) + 1)
    return "\n".join((f"{fence}sh", *map(shown, text.splitlines()), fence))


def _longest_run(text: str) -> int:
    return max(map(len, re.findall("`+", text)), default=0)


MARKDOWN = FindingFormat(render)
