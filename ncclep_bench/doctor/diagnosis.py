"""Findings of logs, told in the order of causes."""

from __future__ import annotations

from ncclep_bench.doctor.contract import Finding
from ncclep_bench.doctor.logs.scan import in_order
from ncclep_bench.doctor.records import Event
from ncclep_bench.doctor.run import all_checks, run_checks
from ncclep_bench.model.facts import Facts


def causes_first(facts: Facts) -> list[Finding]:
    """What the logs in `facts` say, each cause before its effects and the earliest first."""
    logs = facts.sections.get("log", {})
    events = in_order(event for name in logs for event in facts.read(f"log.{name}", list[Event]))
    place = {event.at: number for number, event in reversed(list(enumerate(events)))}
    checks = [check for check in all_checks() if any(need.startswith("log.") for need in check.needs)]

    def first_line(finding: Finding) -> int:
        return min((place.get(line.partition(": ")[0], len(place)) for line in finding.evidence), default=len(place))

    return sorted(run_checks(checks, facts), key=first_line)
