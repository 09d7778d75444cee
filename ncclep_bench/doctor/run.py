"""Run checks over facts; no check can end the doctor."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TypeVar

from ncclep_bench.doctor.contract import Check, Finding, Rule, Trouble, Verdict
from ncclep_bench.errors import InputError
from ncclep_bench.model.facts import Facts
from ncclep_bench.registry import CHECKS

AnyRule = TypeVar("AnyRule", bound=Rule)


def all_checks() -> list[Check]:
    """Every check, by family in the order of the registry."""
    return [check for family in CHECKS for check in CHECKS.get(family)]


def chosen_checks(select: Sequence[str] = (), ignore: Sequence[str] = ()) -> list[Check]:
    """Checks whose code starts with one of `select` (all when empty) and none of `ignore`.

    Raises InputError for a prefix that no code has, and where none is left.
    """
    return chosen(all_checks(), select, ignore, "check")


def chosen(rules: Sequence[AnyRule], select: Sequence[str], ignore: Sequence[str], kind: str) -> list[AnyRule]:
    """The same of any rules, which an error calls `kind`."""
    for prefix in (*select, *ignore):
        if not any(rule.code.startswith(prefix.upper()) for rule in rules):
            families = sorted({rule.code.rstrip("0123456789") for rule in rules})
            raise InputError(
                f"no {kind} has a code that starts with {prefix!r}",
                hint=f"codes start with {', '.join(families)}; `ncclep-doctor rules` lists them",
            )
    wanted = tuple(prefix.upper() for prefix in select) or ("",)
    unwanted = tuple(prefix.upper() for prefix in ignore)
    left = [rule for rule in rules if rule.code.startswith(wanted) and not rule.code.startswith(unwanted)]
    if not left:
        raise InputError(f"no {kind} is left to run", hint=f"--ignore {' '.join(ignore)} takes all that are selected")
    return left


def all_rules() -> list[Rule]:
    """Everything that has a code: checks, self-tests, and the verdict on a planted fault."""
    from ncclep_bench.doctor.selftests.faults import INJECTION
    from ncclep_bench.doctor.selftests.table import all_self_tests

    return [*all_checks(), *all_self_tests(), INJECTION]


def rule_named(code: str) -> Rule:
    """The rule with this code. Raises InputError naming the nearest one."""
    import difflib

    table = {rule.code: rule for rule in all_rules()}
    if rule := table.get(code.upper()):
        return rule
    close = difflib.get_close_matches(code.upper(), table, n=1)
    hint = (f"did you mean {close[0]}? " if close else "") + "`ncclep-doctor rules` lists them"
    raise InputError(f"no check has the code {code!r}", hint=hint)


def run_checks(checks: Sequence[Check], facts: Facts) -> list[Finding]:
    """What each check says about `facts`: its troubles, or one finding that it is ok or could not run."""
    return [finding for check in checks for finding in _findings(check, facts)]


def worst(findings: Sequence[Finding], levels: Sequence[Verdict]) -> Verdict | None:
    """The last of `levels` (mildest first) that any finding has."""
    return next((level for level in reversed(levels) if any(finding.verdict == level for finding in findings)), None)


def _findings(check: Check, facts: Facts) -> Iterator[Finding]:
    def finding(verdict: Verdict, summary: str, evidence: tuple[str, ...] = (), remedy: str = "") -> Finding:
        return Finding.of(check, verdict, summary, evidence, remedy, rank=facts.rank, host=facts.host)

    for name in check.needs:
        fact = facts.fact(name)
        if fact.state != "value":
            yield finding("not_run", f"needs {name}: {fact.missing}", (fact.source,))
            return
    try:
        troubles: list[Trouble] = list(check.judge(facts))
    except Exception as error:
        yield finding(
            "warning",
            f"the check itself failed: {type(error).__name__}: {error}",
            tuple(f"{name}: {facts.fact(name).source}" for name in check.needs),
            "ncclep-doctor collect -o facts.json   # and report it with this file",
        )
        return
    for trouble in troubles:
        remedy = check.remedy if trouble.remedy is None else trouble.remedy
        yield finding(trouble.verdict or check.severity, trouble.summary, trouble.evidence, remedy)
    if not troubles:
        yield finding("ok", "")
