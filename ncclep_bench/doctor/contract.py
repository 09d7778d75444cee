"""What a check is, and what it finds."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol

import msgspec

from ncclep_bench.model.facts import Facts

Verdict = Literal["ok", "info", "warning", "error", "not_run"]

LEVELS: tuple[Verdict, ...] = ("info", "warning", "error")
"""Verdicts that say something is amiss, the mildest first."""


class Trouble(NamedTuple):
    """One thing a check objects to: what, the facts that show it, and what to paste.

    `remedy` and `verdict` default to those of the check.
    """

    summary: str
    evidence: tuple[str, ...]
    remedy: str | None = None
    verdict: Verdict | None = None


class Rule(Protocol):
    """What `rules` and `explain` print of a check or a self-test."""

    @property
    def code(self) -> str: ...
    @property
    def title(self) -> str: ...
    @property
    def severity(self) -> Verdict: ...
    @property
    def needs(self) -> tuple[str, ...]: ...
    @property
    def why(self) -> str: ...
    @property
    def by_hand(self) -> str: ...
    @property
    def remedy(self) -> str: ...
    @property
    def reference(self) -> str: ...


@dataclass(frozen=True)
class Described:
    """A code that no check and no self-test has as its own."""

    code: str
    title: str
    severity: Verdict
    needs: tuple[str, ...]
    why: str
    by_hand: str
    remedy: str
    reference: str


@dataclass(frozen=True)
class Check:
    """One rule: `judge` turns facts into troubles, reads nothing else, and runs only where all `needs` have values.

    `severity` is the verdict of its troubles unless they say otherwise. `why`, `by_hand` (how to see it without the
    doctor), `remedy` and `reference` are what `explain` prints. `joins`: it has more to say when it gets the records of
    several hosts at once.
    """

    code: str
    title: str
    severity: Verdict
    needs: tuple[str, ...]
    judge: Callable[[Facts], Iterable[Trouble]]
    why: str
    by_hand: str
    remedy: str
    reference: str
    joins: bool = False


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """What one check says about one rank; `not_run` gives the reason in `summary`."""

    code: str
    verdict: Verdict
    title: str
    summary: str
    evidence: tuple[str, ...] = ()
    remedy: str = ""
    rank: int | None = None
    host: str = ""

    @classmethod
    def of(
        cls,
        rule: Rule,
        verdict: Verdict,
        summary: str,
        evidence: Iterable[str] = (),
        remedy: str = "",
        *,
        rank: int | None,
        host: str,
    ) -> Finding:
        """What `rule` says."""
        return cls(
            code=rule.code,
            verdict=verdict,
            title=rule.title,
            summary=summary,
            evidence=tuple(evidence),
            remedy=remedy,
            rank=rank,
            host=host,
        )
