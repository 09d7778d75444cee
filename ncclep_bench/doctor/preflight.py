"""The fast checks that a sweep runs before its first case."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import msgspec

from ncclep_bench.doctor.collect import SLOW, Machine, collect
from ncclep_bench.doctor.contract import Finding
from ncclep_bench.doctor.render import bounded, problems
from ncclep_bench.doctor.run import all_checks, run_checks
from ncclep_bench.errors import CannotRunError
from ncclep_bench.model.measurement import Preflight, Remark

DEADLINE_S = 5.0


def look(ranks: int | None, deadline_s: float = DEADLINE_S) -> list[Finding]:
    """What all checks say of this machine, but for facts that may take seconds to read.

    Raises CannotRunError when that is not known in time: a driver may be stuck.
    """
    found: list[list[Finding]] = []
    failed: list[Exception] = []

    def work() -> None:
        try:
            # A driver that does not answer costs the facts of GPUs, not those of the rest.
            machine = Machine(ranks=ranks, deadline_s=deadline_s / 2)
            found.append(run_checks(all_checks(), collect(machine, without=SLOW)))
        except Exception as error:
            failed.append(error)

    # A read of a stuck driver never returns, and must not keep this process from ending either.
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(deadline_s)
    if failed:
        raise CannotRunError(f"{type(failed[0]).__name__}: {failed[0]}") from failed[0]
    if not found:
        raise CannotRunError(f"not finished after {deadline_s:g} s", hint="ncclep-doctor check")
    return found[0]


def record(findings: Sequence[Finding]) -> Preflight:
    """Warnings and errors for the run's header, the worst first; of the others how many there are."""
    counts: dict[str, int] = {}
    for finding in findings:
        counts[finding.verdict] = counts.get(finding.verdict, 0) + 1
    wanted = [finding for finding, _ in problems(findings) if finding.verdict != "info"]
    remarks = [msgspec.structs.replace(finding, evidence=tuple(bounded(finding.evidence))) for finding in wanted]
    return Preflight(counts=counts, findings=msgspec.convert(msgspec.to_builtins(remarks), list[Remark]))
