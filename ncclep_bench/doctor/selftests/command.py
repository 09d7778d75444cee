"""`ncclep-doctor selftest`: which self-tests, in which ranks, and how to leave."""

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ncclep_bench.doctor.contract import Finding
from ncclep_bench.doctor.recorded import Recorded
from ncclep_bench.doctor.run import chosen
from ncclep_bench.doctor.selftests.faults import FAULTS, fault_named
from ncclep_bench.doctor.selftests.table import all_self_tests, self_test_named
from ncclep_bench.errors import CannotRunError, InputError
from ncclep_bench.model.facts import Facts
from ncclep_bench.runtime.launch import ended_as_at_the_keyboard
from ncclep_bench.runtime.world import abort, in_mpi_environment

_RANKS = 2
_NOT_CAUGHT = CannotRunError.exit_code


@dataclass(frozen=True)
class Done:
    """What a run has found. `speaks`: this process reports; `exit_code`: how to leave where findings do not say it."""

    findings: list[Finding]
    speaks: bool = True
    exit_code: int | None = None
    lost: bool = False

    @property
    def read(self) -> Recorded:
        """What a report says of where it is from."""
        return Recorded([Facts(host=socket.gethostname(), sections={})], [])

    def leave(self, code: int) -> None:
        """End all ranks of a launcher when some of them would never end by themselves; returns where there are none."""
        if self.lost:
            abort(code)


def run(
    ranks: int | None,
    backend: str,
    select: Sequence[str],
    ignore: Sequence[str],
    deadline_s: float | None,
    inject: str | None,
    say: Callable[[str], None],
) -> Done:
    """Run the chosen self-tests, in `ranks` fresh ranks or in those of the launcher; `say` hears each that is done.

    With `inject`, by default those that the fault is meant for, without and with it.
    Raises InputError for an unknown prefix or fault, CannotRunError when no rank can be started.
    """
    tests = chosen(all_self_tests(), select, ignore, "self-test")
    fault = None if inject is None else fault_named(inject)
    if fault is not None and not (select or ignore):
        tests = [self_test_named(code) for code in fault.tests]

    def on_finding(finding: Finding) -> None:
        say(f"{finding.code}  {finding.verdict:<8} {finding.title}: {finding.summary}")
        for line in finding.evidence if finding.verdict == "ok" else ():
            say(f"         {line}")

    if ranks is None and in_mpi_environment():
        from ncclep_bench.doctor.selftests.ranks import run_in_ranks

        if fault is not None:
            raise InputError(
                "--inject needs fresh processes, which only --np starts", hint="give --np N, without mpirun"
            )
        return run_in_ranks(tests, backend, deadline_s, on_finding)
    from ncclep_bench.doctor.selftests.run import run_self_tests, run_with_fault

    count = ranks or _RANKS
    with ended_as_at_the_keyboard():
        if fault is None:
            findings = run_self_tests(tests, ranks=count, backend=backend, deadline_s=deadline_s, on_finding=on_finding)
            return Done(findings)
        proof = run_with_fault(fault, tests, ranks=count, backend=backend, deadline_s=deadline_s, on_finding=on_finding)
    return Done(proof.findings, exit_code=None if proof.caught else _NOT_CAUGHT)


def listing() -> str:
    """Self-tests and faults, a line each."""
    lines = ["Self-tests"]
    for test in all_self_tests():
        where = "" if len(test.backends) > 1 else f" ({test.backends[0]} only)"
        lines.append(f"  {test.code}  {test.severity:<8} {test.deadline_s:>4g} s  {test.title}{where}")
    lines.append("Faults (--inject)")
    for fault in FAULTS:
        lines.append(f"  {fault.name:<13} {', '.join(fault.tests)}  {fault.title}")
    return "\n".join(lines) + "\n"
