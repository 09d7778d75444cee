"""A job that stands still: which rank, since when, why; every source that was asked, joined into one answer."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from ncclep_bench.doctor.checks.log_events import SHOWN, events_of, lines, listed
from ncclep_bench.doctor.checks.logged_collectives import (
    missing_by_ras,
    standing_by_ras,
    suspects_by_timeouts,
)
from ncclep_bench.doctor.contract import Check, Trouble, Verdict
from ncclep_bench.doctor.records import RankProcess, RasReport, Stack
from ncclep_bench.model.facts import Facts

STATES = {
    "R": "running",
    "S": "sleeping",
    "D": "waiting in the kernel",
    "T": "stopped",
    "t": "held by a debugger",
    "Z": "dead, not yet collected",
    "X": "gone",
    "I": "idle",
}
BUSY_SHARE = 0.5
"""Of the time between two looks: a process that used more of a processor is at work, or polls."""
IDLE_SHARE = 0.05


class Cause(NamedTuple):
    """Who holds the job up, in words that follow "rank 2 (pid 4711)"; `ranks` may be named by RAS or logs only."""

    who: str
    text: str
    ranks: tuple[int, ...] = ()
    verdict: Verdict = "error"
    evidence: tuple[str, ...] = ()


def _processes(facts: Facts) -> list[RankProcess]:
    return facts.get("job.processes", list[RankProcess]) or []


def _window_s(facts: Facts) -> float:
    return facts.get("hang.window_s", float) or 1.0


def _named(processes: Sequence[RankProcess]) -> str:
    return listed([f"rank {process.rank} (pid {process.pid})" for process in processes])


def _shown(process: RankProcess, window_s: float) -> str:
    state = process.states[-1]
    where = f", in {process.wchan}" if process.wchan else ""
    waits = f"; waits in {process.waits_in} since {process.waits_s:g} s" if process.waits_in else ""
    met = "" if process.meetings is None else f", {process.meetings} meetings"
    return (
        f"{process.at}: rank {process.rank} is {STATES.get(state, state)} (state {state}){where}, "
        f"{process.cpu_s:g} s of CPU{met} in {window_s:g} s{waits}"
    )


def _ended(processes: Sequence[RankProcess]) -> bool:
    return bool(processes) and all(process.states[-1] == "X" for process in processes)


def _busy(process: RankProcess, window_s: float) -> bool:
    # On a crowded machine a rank that computes gets less of a processor, but is ready for one whenever it is looked at.
    return process.states == ["R", "R"] or process.cpu_s >= BUSY_SHARE * window_s


def _stack_shown(stack: Stack) -> str:
    return f"{stack.at}: rank {stack.rank} in {' < '.join(stack.frames[:4])}"


def _absent_ranks(processes: Sequence[RankProcess]) -> list[int]:
    """Ranks without a process although all should run here, as far as the launcher tells."""
    for process in processes:
        if process.ranks and process.ranks == process.local_ranks and process.ranks <= 65536:
            return sorted(set(range(process.ranks)) - {other.rank for other in processes})
    return []


def _waiting(processes: Sequence[RankProcess]) -> dict[int, list[RankProcess]]:
    """Late rank → those that wait for it, which are not waited for themselves unless all are."""
    by_late: dict[int, list[RankProcess]] = defaultdict(list)
    for process in processes:
        for rank in process.waits_for:
            by_late[rank].append(process)
    waiters = {process.rank for process in processes if process.waits_for}
    return {rank: who for rank, who in by_late.items() if rank not in waiters} or dict(by_late)


def _not_running(facts: Facts) -> Iterator[Cause]:
    """Ranks that cannot go on, whatever they do: gone, stopped, or held in the kernel."""
    processes = _processes(facts)
    if _ended(processes):
        return
    if absent := _absent_ranks(processes):
        yield Cause(f"rank {listed(absent)}", "has no process any more: it died", tuple(absent))
    dead = [process for process in processes if process.states[-1] in "ZX"]
    if dead:
        yield Cause(_named(dead), "died", tuple(process.rank for process in dead))
    for state, text in (("T", "is stopped (state T: SIGSTOP, or Ctrl-Z)"), ("t", "is held by a debugger (state t)")):
        if stopped := [process for process in processes if process.states == [state, state]]:
            yield Cause(_named(stopped), text, tuple(process.rank for process in stopped))
    stuck = [p for p in processes if p.states == ["D", "D"] and p.wchan and p.cpu_s < IDLE_SHARE * _window_s(facts)]
    if stuck:
        yield Cause(
            _named(stuck),
            f"waits in the kernel (state D, {stuck[0].wchan}): for a disk, a network file system or a driver",
            tuple(process.rank for process in stuck),
        )


def _late(facts: Facts) -> Iterator[Cause]:
    """Ranks that run, but not to the meeting in which others stand."""
    processes, window_s = _processes(facts), _window_s(facts)
    by_rank = {process.rank: process for process in processes}
    late = _waiting(processes)
    for rank in sorted(late):
        process = by_rank.get(rank)
        if process is None:
            yield Cause(f"rank {rank}", "has no process here any more", (rank,))
        elif _busy(process, window_s):
            yield Cause(
                _named([process]),
                f"is at work elsewhere ({process.cpu_s:g} s of CPU in {window_s:g} s)",
                (rank,),
                "warning",
            )
        else:
            state = STATES.get(process.states[-1], "somewhere")
            where = f", in {process.wchan}" if process.wchan else ""
            yield Cause(_named([process]), f"is elsewhere ({state}{where})", (rank,))


def _alone(facts: Facts) -> Iterator[Cause]:
    """The one rank that sleeps while all others poll: most libraries wait for a message by polling."""
    processes, window_s = _processes(facts), _window_s(facts)
    idle = [p for p in processes if p.states == ["S", "S"] and p.cpu_s < IDLE_SHARE * window_s]
    busy = [p for p in processes if _busy(p, window_s)]
    if len(idle) == 1 and len(busy) == len(processes) - 1 >= 2:
        where = f" in {idle[0].wchan}" if idle[0].wchan else ""
        yield Cause(_named(idle), f"alone sleeps{where} while all others use the processor", (idle[0].rank,), "warning")


def _by_ras(facts: Facts) -> Iterator[Cause]:
    answers = facts.get("ras.reports", list[RasReport]) or []
    if not answers:
        return
    if len(answers) > 1 and (missing := missing_by_ras(answers)):
        who = listed(list(missing))
        yield Cause(who, f"does not answer RAS: {next(iter(missing.values()))}", evidence=(f"{answers[-1].at}: {who}",))
    standing = standing_by_ras(answers)
    if standing and not standing.moved and standing.behind:
        yield Cause(
            listed(standing.behind),
            f"is behind: it launched {standing.low} collectives, others {standing.high}, and no count moved",
            evidence=(f"{answers[0].at}, {answers[-1].at}: the same counts",),
        )


def _by_logs(facts: Facts) -> Iterator[Cause]:
    if suspects := suspects_by_timeouts(facts):
        yield Cause(
            f"rank {listed(suspects)}",
            "is whom the time-out lines accuse",
            evidence=lines(events_of(facts, "ep_timeout"))[:2],
        )
    if stalls := events_of(facts, "watchdog"):
        reached = {event.rank: int(event.fields["sequence"]) for event in stalls if event.rank is not None}
        low = min(reached.values(), default=0)
        behind = sorted(rank for rank, number in reached.items() if number == low < max(reached.values()))
        if behind:
            yield Cause(
                f"rank {listed(behind)}", f"stands at collective {low}, others further", evidence=lines(stalls)[:2]
            )


_HINTS = (_by_ras, _alone, _by_logs)
_SOURCES = (_not_running, _late, *_HINTS)
"""The surest first."""


def _causes(facts: Facts) -> list[Cause]:
    """All that is known to hold the job up, the surest first."""
    sure = [*_not_running(facts), *_late(facts)]
    # Old lines of a log, and a rank that sleeps between two steps, are no hang.
    return [] if _moves(facts) and not sure else [cause for source in _SOURCES for cause in source(facts)]


def _answered(facts: Facts) -> set[int]:
    """The ranks that the answer names."""
    return {rank for cause in _causes(facts)[:1] for rank in cause.ranks}


def _further(source: Callable[[Facts], Iterator[Cause]], facts: Facts) -> Iterator[tuple[Cause, Trouble]]:
    """What `source` says of others than those whom the answer names: one cause is told once."""
    answered = _answered(facts)
    by_rank = {process.rank: process for process in _processes(facts)}
    for cause in source(facts):
        if not answered.issuperset(cause.ranks):
            suspects = [by_rank[rank] for rank in cause.ranks if rank in by_rank]
            shown = tuple(_shown(process, _window_s(facts)) for process in (suspects or list(by_rank.values()))[:SHOWN])
            yield cause, Trouble(f"{cause.who} {cause.text}", shown, _remedy(suspects), cause.verdict)


def _answer(facts: Facts) -> Iterator[Trouble]:
    processes, window_s = _processes(facts), _window_s(facts)
    causes = _causes(facts)
    if not causes and (moved := _moves(facts)):
        yield Trouble(f"the job moves: {moved}", (), "", "info")
        return
    if _ended(processes):
        yield Trouble("all ranks ended between two looks: the job is over, or goes on in new ranks", (), "", "info")
        return
    if not causes:
        standing = standing_by_ras(facts.get("ras.reports", list[RasReport]) or [])
        summary = (
            f"RAS counts did not move in {window_s:g} s, and all ranks are equally far: inside a collective, or idle"
            if standing
            else "nothing shows whether the job moves: no rank is stopped or gone, but neither RAS nor the host "
            "backend tells its progress"
        )
        yield Trouble(summary, tuple(_shown(p, window_s) for p in processes[:SHOWN]), verdict="warning")
        return
    first = causes[0]
    by_rank = {process.rank: process for process in processes}
    suspects = [by_rank[rank] for rank in first.ranks if rank in by_rank]
    waiters = [p for p in processes if p.waits_in and p.rank not in first.ranks]
    summary = f"{first.who} {first.text}"
    if waiters:
        since = max(process.waits_s for process in waiters)
        summary += (
            f"; rank{'s' * (len(waiters) > 1)} {listed([p.rank for p in waiters])} "
            f"wait{'s' * (len(waiters) == 1)} for it in {waiters[0].waits_in} since {since:g} s"
        )
    elif suspects:
        summary += f", for at least the {window_s:g} s between two looks"
    stacks = {stack.rank: stack for stack in facts.get("job.stacks", list[Stack]) or []}
    hints = [
        hint for source in _HINTS for hint in source(facts) if hint != first and not {*hint.ranks} & {*first.ranks}
    ]
    yield Trouble(
        summary,
        (
            *(_shown(process, window_s) for process in suspects[:SHOWN]),
            *(_stack_shown(stacks[process.rank]) for process in suspects if process.rank in stacks),
            *first.evidence,
            *(f"also: {hint.who} {hint.text}" for hint in hints[:3]),
            *(_shown(process, window_s) for process in (waiters or ([] if suspects else processes))[:3]),
        ),
        _remedy(suspects),
        first.verdict,
    )


def _remedy(processes: Sequence[RankProcess]) -> str | None:
    """What to paste, or None where there is no process to look at."""
    alive = [process for process in processes if process.states[-1] not in "ZX"]
    if not alive:
        return None
    stopped = " ".join(str(process.pid) for process in alive if process.states[-1] == "T")
    if stopped:
        return f"kill -CONT {stopped}   # and look for who stopped it"
    pid = alive[0].pid
    return f"ps -o pid,stat,wchan:30,etime,args -p {pid}; py-spy dump --pid {pid}"


def _moves(facts: Facts) -> str:
    """What moved between the looks, or nothing."""
    met = [process for process in _processes(facts) if process.meetings]
    if met:
        return (
            f"{len(met)} rank{'s' * (len(met) > 1)} came to {sum(process.meetings or 0 for process in met)} meetings "
            f"in {_window_s(facts):g} s"
        )
    standing = standing_by_ras(facts.get("ras.reports", list[RasReport]) or [])
    return "RAS counts more collectives in the second answer than in the first" if standing and standing.moved else ""


def _runs(facts: Facts) -> Iterator[Trouble]:
    yield from (trouble for _, trouble in _further(_not_running, facts))


def _meets(facts: Facts) -> Iterator[Trouble]:
    late = _waiting(_processes(facts))
    for cause, trouble in _further(_late, facts):
        waiters = listed(sorted(process.rank for rank in cause.ranks for process in late[rank]))
        yield trouble._replace(summary=f"{trouble.summary}; {waiters} wait for it")


def _places(facts: Facts) -> Iterator[Trouble]:
    by_place: dict[str, list[Stack]] = defaultdict(list)
    stacks = facts.read("job.stacks", list[Stack])
    for stack in stacks:
        by_place[stack.frames[0].partition(" (")[0]].append(stack)
    odd = [same[0] for same in by_place.values() if len(same) == 1]
    if len(stacks) > 2 and len(by_place) == 2 and len(odd) == 1 and odd[0].rank not in _answered(facts):
        yield Trouble(
            f"rank {odd[0].rank} alone is in {odd[0].frames[0]}",
            tuple(_stack_shown(stack) for stack in [*odd, *(other for other in stacks if other not in odd)][:SHOWN]),
        )


_LOOK = "ps -o pid,stat,wchan:30,etime,args -p PID; py-spy dump --pid PID"

CHECKS = (
    Check(
        "EP401",
        "The job moves",
        "error",
        ("hang.sources",),
        _answer,
        why="A job that stands still shows it nowhere by itself: whoever waits looks alike. One rank is the cause.",
        by_hand="ncclras -v twice; ps -eo pid,stat,wchan:30,args | grep RANK_PROGRAM",
        remedy=f"{_LOOK}   # of the rank that is named",
        reference="reports: NVIDIA/nccl#1730, pytorch/pytorch#140879",
    ),
    Check(
        "EP402",
        "No further rank is stopped, stuck or gone",
        "error",
        ("job.processes",),
        _runs,
        why="A rank that was killed, stopped or is held in the kernel never comes, and the others wait for it.",
        by_hand="ps -eo pid,stat,wchan:30,args   # T stopped, D in the kernel, Z dead",
        remedy="kill -CONT PID   # if it is stopped; else dmesg: out of memory, Xid, hung task; restart the job",
        reference="https://man7.org/linux/man-pages/man5/proc_pid_stat.5.html",
    ),
    Check(
        "EP403",
        "No further rank keeps others waiting",
        "error",
        ("job.meetings",),
        _meets,
        why="Ranks of the host backend tell for whom they wait; one that is late for long left the common path.",
        by_hand="ncclep-doctor hang --pid LAUNCHER",
        remedy=f"{_LOOK}   # of the rank that is late",
        reference="docs/method.md",
    ),
    Check(
        "EP404",
        "No further rank is at a place of its own in the program",
        "info",
        ("job.stacks",),
        _places,
        why="Ranks that wait are in the same call; the one that is elsewhere is the one they wait for.",
        by_hand="py-spy dump --pid PID   # of every rank",
        remedy="py-spy dump --locals --pid PID   # of the odd one",
        reference="https://github.com/benfred/py-spy",
    ),
)
