"""Run self-tests in rank processes of their own: start them, watch them, name who died or hangs, leave nothing."""

from __future__ import annotations

import contextlib
import socket
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from ncclep_bench.doctor.contract import Finding, Verdict
from ncclep_bench.doctor.selftests.contract import Patience, Result, SelfTest
from ncclep_bench.doctor.selftests.faults import INJECTION, Fault
from ncclep_bench.doctor.selftests.worker import START_DEADLINE_S, Ended, Here, Plan, Record
from ncclep_bench.errors import CannotRunError
from ncclep_bench.runtime.launch import launcher_command, launcher_says, rank_processes, require_room_for_mpi
from ncclep_bench.runtime.processes import Ends, Told, end_of, lives, process_state, process_status, read_step
from ncclep_bench.units import format_bytes

WORKER = "ncclep_bench.doctor.selftests.worker"

_POLL_S = 0.05
# The first who waits in vain is soon followed by others, as soon as a meeting lasts longer than a call.
_GRACE_S = 2.0
_END_S = 10.0
_LAST_WORDS_S = 0.5
_LOG_LINES = 8
_LOST_REMEDY = "dmesg -T | grep -i -e killed -e segfault   # why a rank ended; py-spy dump --pid PID: where it is"

OnFinding = Callable[[Finding], None]


def run_self_tests(
    tests: Sequence[SelfTest],
    *,
    ranks: int,
    backend: str,
    deadline_s: float | None = None,
    fault: Fault | None = None,
    on_finding: OnFinding = lambda _: None,
) -> list[Finding]:
    """One finding per self-test, from `ranks` fresh processes on this host, started anew after one that lost them.

    `deadline_s` replaces the deadline of every self-test. `fault` is planted in the last rank.
    Raises CannotRunError when no ranks can be started.
    """
    launcher = launcher_command(None)
    left, findings = list(tests), list[Finding]()
    while left:
        require_room_for_mpi(ranks)
        plan = Plan(
            codes=[test.code for test in left],
            backend=backend,
            ranks=ranks,
            fault=fault.name if fault else None,
            victim=ranks - 1,
            deadline_s=deadline_s,
        )
        with tempfile.TemporaryDirectory(prefix="ncclep-selftest-") as name:
            folder = Path(name)
            (folder / "plan.json").write_bytes(msgspec.json.encode(plan))
            with (
                (folder / "ranks.log").open("wb") as log,
                rank_processes(launcher, ranks, WORKER, [name], name, log, log) as process,
                contextlib.closing(_Watch(folder, ranks, left, deadline_s, process.poll)) as watch,
            ):
                for finding in watch.findings():
                    findings.append(finding)
                    on_finding(finding)
        left = left[len(findings) + len(left) - len(tests) :]
    return findings


class _Watch:
    """One start of rank processes while it runs."""

    def __init__(
        self,
        folder: Path,
        ranks: int,
        tests: Sequence[SelfTest],
        deadline_s: float | None,
        exit_code: Callable[[], int | None],
    ) -> None:
        self._folder, self._size, self._tests = folder, ranks, tests
        self._deadline_s, self._exit_code = deadline_s, exit_code
        self._patience = Patience.within(deadline_s)
        self._grace_s = self._patience.meeting_s - self._patience.call_s + _GRACE_S
        self._here: dict[int, Here] = {}
        self._results: dict[str, dict[int, Result]] = {}
        self._told = [Told(folder / f"rank-{rank}.jsonl") for rank in range(ranks)]
        self._first_dead: dict[int, str] = {}
        self._late = ""
        self._ends = Ends()

    def close(self) -> None:
        """Give descriptors back."""
        self._ends.close()

    def findings(self) -> Iterator[Finding]:
        """A finding per self-test that ended or failed; ends early after one that lost its ranks."""
        self._await_start()
        for test in self._tests:
            whole = self._await(test)
            yield self._finding(test)
            if not whole:
                return
        give_up_at = time.monotonic() + _END_S
        while self._exit_code() is None and time.monotonic() < give_up_at:
            time.sleep(_POLL_S)

    def _await_start(self) -> None:
        give_up_at = time.monotonic() + START_DEADLINE_S
        while len(self._here) < self._size:
            ended = self._exit_code()
            self._follow()
            if len(self._here) < self._size and (ended is not None or time.monotonic() > give_up_at):
                absent = ", ".join(str(rank) for rank in range(self._size) if rank not in self._here)
                log = (self._folder / "ranks.log").read_text(errors="replace").splitlines()
                raise CannotRunError(
                    f"rank {absent} never started: "
                    + (
                        f"the launcher ended with {ended}"
                        if ended is not None
                        else f"{START_DEADLINE_S:g} s have passed"
                    ),
                    hint="\n  ".join(log[-_LOG_LINES:]) or "start it by hand: mpiexec -n 2 hostname",
                )
            self._wait()

    def _wait(self) -> None:
        """Wait a moment, or until a rank ends."""
        ended = self._ends.wait(_POLL_S)
        if ended and not self._first_dead:
            rank = next(rank for rank, here in self._here.items() if here.pid == ended[0])
            self._first_dead = {rank: end_of(process_status(ended[0])) or "is gone"}

    def _await(self, test: SelfTest) -> bool:
        """Return when all ranks are done with a test, or it cannot be done; whether the ranks can go on."""
        start = time.monotonic()
        deadline_s = self._deadline_s or test.deadline_s
        trouble_at = stopped_at = None
        while True:
            ended = self._exit_code()
            self._follow()
            results = self._results.get(test.code, {})
            if len(results) == self._size:
                return not any(result.lost for result in results.values())
            now = time.monotonic()
            lost = ended is not None or any(result.lost for result in results.values()) or bool(self._first_dead)
            trouble_at = trouble_at or (now if lost else None)
            # Ranks that live have something to say of those that do not.
            waited_for = [rank for rank in range(self._size) if rank not in results and lives(self._here[rank].pid)]
            if trouble_at and (not waited_for or ended is not None or now - trouble_at > self._grace_s):
                return False
            # Some of MPI's own calls wait for ever for a rank that is stopped; a debugger stops one for a moment.
            stopped = any(self._is_stopped(rank) for rank in range(self._size))
            stopped_at = (stopped_at or now) if stopped else None
            if stopped_at and now - stopped_at > self._patience.meeting_s:
                return False
            if now - start > deadline_s:
                self._late = f"not done after {deadline_s:g} s"
                return False
            self._wait()

    def _follow(self) -> None:
        """Take in what ranks have told since the last time."""
        for rank, told in enumerate(self._told):
            for line in told.new_lines():
                record: Record = msgspec.json.decode(line, type=Record)
                match record:
                    case Here():
                        self._here[rank] = record
                        self._ends.watch(record.pid)
                    case Ended():
                        self._results.setdefault(record.result.code, {})[rank] = record.result

    def _finding(self, test: SelfTest) -> Finding:
        results = self._results.get(test.code, {})
        silent = [rank for rank in range(self._size) if rank not in results]
        dead = self._first_dead
        stopped = {rank: "is stopped" for rank in silent if self._is_stopped(rank)}
        told_by_ranks = any(result.lost for result in results.values())
        late = {} if dead or stopped or told_by_ranks else dict.fromkeys(self._slowest(silent), "makes no progress")
        verdicts = {**dead, **stopped, **late} if silent else {}
        told = tuple(
            f"{self._name(rank)} {verdict} in {self._step(rank)[1]}" for rank, verdict in sorted(verdicts.items())
        )
        seen = [self._late] if self._late else []
        if dead:
            # Who is gone already can no longer be asked, but MPICH's launcher may tell, as it ends itself.
            give_up_at = time.monotonic() + _LAST_WORDS_S
            while "is gone" in dead.values() and self._exit_code() is None and time.monotonic() < give_up_at:
                time.sleep(_POLL_S)
            log = (self._folder / "ranks.log").read_text(errors="replace")
            seen += launcher_says(log)
            seen += log.splitlines()[-_LOG_LINES:] if any("exit code" in verdict for verdict in dead.values()) else []
        return merged(test, results, Sight(told, tuple(sorted(verdicts)), tuple(seen)))

    def _slowest(self, silent: Sequence[int]) -> list[int]:
        steps = {rank: self._step(rank)[0] for rank in silent}
        return [rank for rank in silent if steps[rank] == min(steps.values())]

    def _is_stopped(self, rank: int) -> bool:
        return process_state(self._here[rank].pid) == "stopped"

    def _name(self, rank: int) -> str:
        here = self._here[rank]
        return f"rank {rank} (pid {here.pid} on {here.host})"

    def _step(self, rank: int) -> tuple[int, str]:
        return read_step(self._folder / f"rank-{rank}.step")


class Sight(NamedTuple):
    """What the watcher of the ranks says of some of them, and what shows it."""

    told: tuple[str, ...] = ()
    ranks: tuple[int, ...] = ()
    evidence: tuple[str, ...] = ()


_NOTHING_SEEN = Sight()


def merged(test: SelfTest, results: dict[int, Result], sight: Sight = _NOTHING_SEEN) -> Finding:
    """What the ranks have found together, and what was seen of them."""
    bad = {rank: result for rank, result in results.items() if result.verdict not in ("ok", "not_run")}
    # Who waits for a rank in vain soon keeps others waiting: of two that accuse each other the first is right.
    first = sorted(bad.values(), key=lambda result: result.seconds)
    votes = Counter(result.ranks[0] for result in first if result.ranks)

    def finding(
        verdict: Verdict, summary: str, evidence: Sequence[str] = (), rank: int | None = None, remedy: str = ""
    ) -> Finding:
        return Finding.of(test, verdict, summary, dict.fromkeys(evidence), remedy, rank=rank, host=socket.gethostname())

    not_run = [result for result in results.values() if result.verdict == "not_run"]
    if not_run and (not (sight.told or bad) or any(result.lost for result in not_run)):
        return finding("not_run", not_run[0].summary)
    if sight.told or bad:
        suspect = sight.ranks[0] if sight.ranks else votes.most_common(1)[0][0] if votes else None
        chosen = [result for result in first if result.ranks[:1] == (suspect,)] or first
        summary = "; ".join(sight.told) or chosen[0].summary
        said = [f"rank {rank}: {result.summary}" for rank, result in sorted(bad.items()) if result.summary != summary]
        shown = [line for result in chosen[:1] for line in result.evidence]
        remedy = chosen[0].remedy if chosen and not sight.told else ""
        remedy = remedy or (_LOST_REMEDY if sight.told or chosen[0].lost else test.remedy)
        return finding(test.severity, summary, (*sight.evidence, *said[:8], *shown), suspect, remedy)
    moved, calls = sum(result.moved_bytes for result in results.values()), max(r.calls for r in results.values())
    seconds = max(result.seconds for result in results.values())
    notes = [note for result in results.values() for note in result.notes]
    return finding(
        "ok", f"{len(results)} ranks, {calls} calls, {format_bytes(moved)} between ranks, {seconds:.1f} s", notes
    )


class Proof(NamedTuple):
    """What came of a planted fault: all findings, and whether it was caught."""

    findings: list[Finding]
    caught: bool


def run_with_fault(
    fault: Fault,
    tests: Sequence[SelfTest],
    *,
    ranks: int,
    backend: str,
    deadline_s: float | None = None,
    on_finding: OnFinding = lambda _: None,
) -> Proof:
    """The self-tests first as they are, then, in fresh ranks, with `fault` in the last one.

    Whatever they find then is an error. Raises as run_self_tests does.
    """
    victim = ranks - 1
    planted = f"{fault.name} at rank {victim}"

    def run(planted_fault: Fault | None, on_each: OnFinding) -> list[Finding]:
        return run_self_tests(
            tests, ranks=ranks, backend=backend, deadline_s=deadline_s, fault=planted_fault, on_finding=on_each
        )

    def verdict(level: Verdict, summary: str) -> Finding:
        said = f"{planted}: {summary}"
        return Finding.of(INJECTION, level, said, rank=victim, host=socket.gethostname())

    healthy = run(None, on_finding)
    if unfit := [finding for finding in healthy if finding.verdict not in ("ok", "not_run")]:
        codes = ", ".join(finding.code for finding in unfit)
        return Proof([*healthy, verdict("error", f"cannot be judged, {codes} fails without it too")], False)
    if not any(finding.verdict == "ok" for finding in healthy):
        reasons = dict.fromkeys(f"{finding.code}: {finding.summary}" for finding in healthy)
        return Proof([*healthy, verdict("not_run", "; ".join(reasons))], False)

    def as_error(finding: Finding) -> Finding:
        if finding.verdict in ("ok", "not_run"):
            return finding
        return msgspec.structs.replace(finding, verdict="error", summary=f"{planted}: {finding.summary}")

    faulty = [as_error(finding) for finding in run(fault, lambda finding: on_finding(as_error(finding)))]
    passed = {finding.code for finding in healthy if finding.verdict == "ok"}
    caught = [finding for finding in faulty if finding.verdict == "error" and finding.code in passed]
    if not caught:
        return Proof([*healthy, *faulty, verdict("error", f"NOT caught by {', '.join(sorted(passed))}")], False)
    by = ", ".join(f"{finding.code}, which names rank {finding.rank}" for finding in caught)
    named = any(finding.rank == victim for finding in caught)
    return Proof([*healthy, *faulty, verdict("info" if named else "warning", f"caught by {by}")], True)
