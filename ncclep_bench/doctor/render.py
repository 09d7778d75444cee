"""Findings as people read them: grouped into problems, summed up, and as text for the console."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from ncclep_bench.doctor.contract import LEVELS, Finding, Rule
from ncclep_bench.model.facts import NOT_COLLECTED
from ncclep_bench.model.toml_file import shown

NOT_READ = "nothing that was read tells what they need"
_READ_BY = {
    "log": "no such log was read: ncclep-doctor logs FILE...",
    "ranks": "no two ranks told what they compare; --np N starts ranks, as mpirun and srun do",
    "drift": "no baseline was read: ncclep-doctor baseline compare FILE",
    "hang": "no job was watched: ncclep-doctor hang",
    "ras": "no job was watched: ncclep-doctor hang",
}
"""What a person does about facts that nobody collected, by section."""

_NEEDED = re.compile(r"needs ([a-z_]+)\.[a-z_]+: (.*)", re.DOTALL)

MARKS = {"error": ("✗", "bold red"), "warning": ("!", "yellow"), "info": ("i", "cyan")}

MOST_REASONS = 5
"""Why checks could not run, on a console that nobody asked for more."""

MOST_LINES = 20
MOST_CHARACTERS = 500


class Problem(NamedTuple):
    """What one check says in the same words of one or several places; `places` is empty where all are one."""

    finding: Finding
    places: tuple[str, ...]


def problems(findings: Sequence[Finding], *, worst_first: bool = True) -> list[Problem]:
    """Findings that say something is amiss, the same ones of several places as one; the worst first or as given."""
    several = len({_place(finding) for finding in findings}) > 1
    groups: dict[tuple[str, str], list[Finding]] = {}
    for finding in findings:
        if finding.verdict in LEVELS:
            groups.setdefault((finding.code, finding.summary), []).append(finding)
    found = [
        Problem(same[0], tuple(place for finding in same if several and (place := _place(finding))))
        for same in groups.values()
    ]
    if worst_first:
        found.sort(key=lambda problem: -LEVELS.index(problem.finding.verdict))
    return found


def not_run(findings: Sequence[Finding]) -> dict[str, list[str]]:
    """Why checks could not run, and their codes, the reason of most first; one cause is one reason."""
    reasons: dict[str, dict[str, None]] = {}
    for finding in findings:
        if finding.verdict == "not_run":
            reasons.setdefault(_reason(finding.summary), {})[finding.code] = None
    return {reason: list(codes) for reason, codes in sorted(reasons.items(), key=lambda told: -len(told[1]))}


def _reason(summary: str) -> str:
    """Why a check did not run, without the fact that it needs, so that one cause is one reason."""
    if not (needed := _NEEDED.fullmatch(summary)):
        return summary
    section, reason = needed.groups()
    return _READ_BY.get(section, NOT_READ) if reason == NOT_COLLECTED else reason


def counts(findings: Sequence[Finding]) -> Counter[str]:
    """How many problems of each verdict, healthy checks, and checks that did not run somewhere."""
    found = Counter[str](problem.finding.verdict for problem in problems(findings))
    found["ok"] = len(healthy(findings))
    found["not_run"] = len({finding.code for finding in findings if finding.verdict == "not_run"})
    return found


def healthy(findings: Sequence[Finding]) -> dict[str, str]:
    """Checks that ran everywhere and found nothing, and their titles."""
    others = {finding.code for finding in findings if finding.verdict != "ok"}
    return {finding.code: finding.title for finding in findings if finding.code not in others}


def counted(findings: Sequence[Finding]) -> str:
    """`30 ok, 1 error, 2 not run`; a check counts once, of however many ranks it is."""
    return summed_up(counts(findings))


def summed_up(found: Mapping[str, int]) -> str:
    """As `counted`, from how many there are of each verdict."""
    counts = Counter(found)
    parts = [f"{counts['ok']} ok"]
    for level in LEVELS:
        noun = "note" if level == "info" else level
        if counts[level]:
            parts.append(f"{counts[level]} {noun}{'s' * (counts[level] > 1)}")
    if counts["not_run"]:
        parts.append(f"{counts['not_run']} not run")
    return ", ".join(parts)


def bounded(evidence: Sequence[str]) -> list[str]:
    """The lines that a page shows of an evidence of any length; JSON has them all."""
    lines = [
        line if len(line) <= MOST_CHARACTERS else f"{line[:MOST_CHARACTERS]}… ({len(line)} characters)"
        for line in evidence[:MOST_LINES]
    ]
    return [*lines, f"… and {len(evidence) - MOST_LINES} lines more"] if len(evidence) > MOST_LINES else lines


def as_console(findings: Sequence[Finding], *, colour: bool, worst_first: bool = True, verbose: bool = False) -> str:
    """A line per problem with evidence and remedy, the worst first or as given; healthy and not run are summed up.

    `verbose`: every reason why checks did not run, with their codes.
    """
    lines = _problem_lines(problems(findings, worst_first=worst_first))
    reasons = list(not_run(findings).items())
    told = len(reasons) if verbose or len(reasons) <= MOST_REASONS + 1 else MOST_REASONS
    for reason, codes in reasons[:told]:
        lines.append([(f"- {len(codes)} not run: {reason}" + f"  ({', '.join(codes)})" * verbose, "dim")])
    if others := reasons[told:]:
        missed = len({code for _, codes in others for code in codes})
        lines.append([(f"- {missed} not run for {len(others)} other reasons: --verbose", "dim")])
    lines.append([(counted(findings), "bold" if any(f.verdict in LEVELS for f in findings) else "bold green")])
    return _painted(lines, colour=colour)


def preflight_as_console(findings: Sequence[Finding], *, colour: bool) -> str:
    """Errors with evidence and remedy, and how much else there is; nothing where nothing is amiss."""
    found = [problem for problem in problems(findings) if problem.finding.verdict != "info"]
    if not found:
        return ""
    lines = _problem_lines([problem for problem in found if problem.finding.verdict == "error"])
    lines.append([("preflight: ", "bold"), (counted(findings), ""), ("  (ncclep-doctor check)", "dim")])
    return _painted(lines, colour=colour)


def _problem_lines(found: Sequence[Problem]) -> list[list[tuple[str, str]]]:
    lines: list[list[tuple[str, str]]] = []
    for finding, places in found:
        mark, style = MARKS[finding.verdict]
        lines.append([(f"{mark} {finding.code}", style), (f"  {finding.summary}", "bold"), (_listed(places), "dim")])
        lines.extend([("      ", ""), (fact, "dim")] for fact in bounded(finding.evidence))
        lines.extend([("      → ", ""), (command, "green")] for command in finding.remedy.splitlines())
    return lines


def listed(places: Sequence[str]) -> str:
    """The first places, and how many more."""
    return ", ".join(places[:4]) + (f" and {len(places) - 4} more" if len(places) > 4 else "")


def _place(finding: Finding) -> str:
    rank = "" if finding.rank is None else f"rank {finding.rank}"
    return " on ".join(filter(None, (rank, finding.host)))


def _listed(places: Sequence[str]) -> str:
    return f"  [{listed(places)}]" if places else ""


def rules_as_console(checks: Sequence[Rule], *, colour: bool) -> str:
    """One line per check or self-test."""
    lines = [
        [(f"{check.code:<8}", "bold"), (f" {check.severity:<8}", MARKS[check.severity][1]), (f" {check.title}", "")]
        for check in checks
    ]
    return _painted(lines, colour=colour)


def explanation(check: Rule, *, colour: bool) -> str:
    """What a check is about, why, how to see it by hand, what to do, and where that is from."""
    parts = (
        ("Why", check.why),
        ("Needs", ", ".join(check.needs)),
        ("By hand", check.by_hand),
        ("Remedy", check.remedy),
        ("Source", check.reference),
    )
    lines = [[(f"{check.code}  {check.title}", "bold"), (f"  [{check.severity}]", MARKS[check.severity][1])]]
    for label, text in parts:
        first, *rest = text.splitlines()
        lines.append([(f"{label:<9}", "bold"), (first, "")])
        lines.extend([(" " * 9, ""), (line, "")] for line in rest)
    return _painted(lines, colour=colour)


def _painted(lines: Sequence[Sequence[tuple[str, str]]], *, colour: bool) -> str:
    """The lines as text, never wrapped, so that commands can be pasted; control characters are spelt out."""
    if not colour:
        return "".join("".join(shown(text) for text, _ in line) + "\n" for line in lines)
    import io

    from rich.console import Console
    from rich.text import Text

    console = Console(file=io.StringIO(), force_terminal=True, highlight=False)
    for line in lines:
        console.print(Text.assemble(*((shown(text), style) for text, style in line)), soft_wrap=True)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()
