"""Events of logs as checks take them: by kind, with the lines that show them and who said them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from ncclep_bench.doctor.contract import Check, Trouble, Verdict
from ncclep_bench.doctor.records import Event
from ncclep_bench.doctor.text import quoted
from ncclep_bench.model.facts import Facts

GUIDE = "https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/troubleshooting.html"
NCCL_LOG = ("log.nccl",)
SHOWN = 6


def events_of(facts: Facts, *kinds: str) -> list[Event]:
    """Events of these kinds from whichever logs there are, in their order."""
    logs = facts.sections.get("log", {})
    return [event for name in logs for event in facts.get(f"log.{name}", list[Event]) or [] if event.kind in kinds]


def lines(events: Sequence[Event]) -> tuple[str, ...]:
    """The first of the events' lines, as evidence."""
    return tuple(quoted(event.at, event.text) for event in events[:SHOWN])


def who(events: Sequence[Event]) -> str:
    """ " on ranks 1, 3" or " on node-a", where the lines tell."""
    ranks = sorted({event.rank for event in events if event.rank is not None})
    hosts = sorted({event.host for event in events if event.host})
    if ranks:
        return f" on rank{'s' * (len(ranks) > 1)} {listed(ranks)}"
    return f" on {listed(hosts)}" if hosts else ""


def listed(items: Sequence[object]) -> str:
    """The first of the items, and how many more there are."""
    return ", ".join(map(str, items[:8])) + (f" and {len(items) - 8} more" if len(items) > 8 else "")


def said(summary: str, *kinds: str, verdict: Verdict | None = None) -> Callable[[Facts], Iterator[Trouble]]:
    """A judge that gives one trouble where any of `kinds` was logged; `{who}` is where."""

    def judge(facts: Facts) -> Iterator[Trouble]:
        if events := events_of(facts, *kinds):
            yield Trouble(summary.format(who=who(events)), lines(events), verdict=verdict)

    return judge


def log_check(
    code: str,
    title: str,
    judge: Callable[[Facts], Iterator[Trouble]],
    *,
    why: str,
    by_hand: str,
    remedy: str,
    reference: str,
    severity: Verdict = "error",
    needs: tuple[str, ...] = NCCL_LOG,
) -> Check:
    """A Check of what logs say, by default of those of NCCL."""
    return Check(code, title, severity, needs, judge, why, by_hand, remedy, reference)
