"""What logs and RAS say of collectives that failed or stand still: the rank behind a wait."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from ncclep_bench.doctor.checks.log_events import SHOWN, events_of, lines, listed, log_check, who
from ncclep_bench.doctor.contract import Trouble
from ncclep_bench.doctor.records import Event, RasReport
from ncclep_bench.model.facts import Facts


def _capture(facts: Facts) -> Iterator[Trouble]:
    events = events_of(facts, "capture")
    if events:
        after = events_of(facts, "poisoned")
        yield Trouble(
            f"a collective was issued inside a CUDA graph capture that had failed{who(events[:1])}: the first "
            f"error is in "
            "the capture" + (", the communicator is poisoned, and later calls only show that" if after else ""),
            lines([*events, *after]),
        )


class _Votes(NamedTuple):
    """Who waits for whom: the ranks that most wait for, how many do, and how many wait at all."""

    suspects: list[str]
    most: int
    waiting: int


def _votes(events: Sequence[Event]) -> _Votes | None:
    votes: dict[str, set[object]] = defaultdict(set)
    for number, event in enumerate(events):
        waiting = event.rank if event.rank is not None else event.fields.get("local", f"line {number}")
        if source := _source(event):
            votes[source].add(waiting)
    if not votes:
        return None
    waiters = {str(event.rank) for event in events if event.rank is not None}
    ranked = sorted(votes.items(), key=lambda item: (-len(item[1]), item[0] in waiters))
    most = len(ranked[0][1])
    # A rank that waits itself is a victim unless it is the only one accused most.
    suspects = [source for source, names in ranked if len(names) == most and source not in waiters] or [
        source for source, names in ranked if len(names) == most
    ]
    return _Votes(suspects, most, len(set().union(*votes.values())))


def suspects_by_timeouts(facts: Facts) -> list[str]:
    """The ranks for which most others wait, by their time-out lines."""
    votes = _votes(events_of(facts, "ep_timeout"))
    return votes.suspects if votes else []


def _ep_timeouts(facts: Facts) -> Iterator[Trouble]:
    events = events_of(facts, "ep_timeout")
    if not events:
        return
    operation = "/".join(sorted({e.fields["operation"] for e in events if "operation" in e.fields})) or "a collective"
    votes = _votes(events)
    if votes is None:
        yield Trouble(f"{operation} timed out{who(events)}; the lines do not say on whom", lines(events))
        return
    yield Trouble(
        f"{operation} timed out: suspect rank {listed(votes.suspects)}, for which {votes.most} of "
        f"{votes.waiting} waiting ranks wait",
        lines([event for event in events if _source(event) in votes.suspects]),
    )


def _source(event: Event) -> str:
    fields = event.fields
    if "source" in fields:
        return fields["source"]
    parts = [
        f"{name} {fields[key]}" for name, key in (("RDMA", "source_node"), ("NVL", "source_local")) if key in fields
    ]
    return "/".join(parts)


def _watchdog(facts: Facts) -> Iterator[Trouble]:
    events = events_of(facts, "watchdog")
    if not events:
        return
    reached: dict[int, int] = {}
    for event in events:
        if event.rank is not None:
            reached[event.rank] = min(int(event.fields["sequence"]), reached.get(event.rank, 1 << 62))
    furthest = max(reached.values(), default=0)
    behind = {rank: sequence for rank, sequence in reached.items() if sequence < furthest}
    if behind:
        last = min(behind.values())
        ranks = sorted(rank for rank, sequence in behind.items() if sequence == last)
        summary = (
            f"ranks stand at different collectives: rank {listed(ranks)} still at {last}, others wait at {furthest}: "
            f"rank {listed(ranks)} is behind, or issued another collective"
        )
    else:
        summary = (
            f"collective {furthest} ({events[0].fields['operation']}) timed out{who(events)}; who is missing is among "
            "the ranks that did not report"
        )
    yield Trouble(summary, lines(events))


class Standing(NamedTuple):
    """What two answers of RAS tell together: whether any count moved, and who is behind the furthest of its peers."""

    moved: bool
    behind: list[str]
    low: int
    high: int


def standing_by_ras(answers: Sequence[RasReport]) -> Standing | None:
    """None where there is one answer only, or none with counts."""
    if len(answers) < 2 or not (answers[0].progress and answers[-1].progress):
        return None
    first, last = answers[0], answers[-1]
    peers: dict[str, dict[str, int]] = defaultdict(dict)
    for name, count in last.progress.items():
        peers[name.partition(" of ")[2]][name] = count
    # A communicator that is used no more is as far as it will get: only one whose ranks differ has somebody behind.
    counts = max(peers.values(), key=lambda counts: max(counts.values()) - min(counts.values()))
    low, high = min(counts.values()), max(counts.values())
    behind = [name for name, count in counts.items() if count == low] if low < high else []
    return Standing(
        any(count != first.progress.get(name) for name, count in last.progress.items()),
        [name for name in behind if name.startswith("rank ")] or behind,
        low,
        high,
    )


def missing_by_ras(answers: Sequence[RasReport]) -> dict[str, str]:
    """Who is missing in every answer; in one alone it may just be on its way."""
    return {name: said for name, said in answers[-1].missing.items() if all(name in a.missing for a in answers)}


def _unreached(facts: Facts) -> Iterator[Trouble]:
    answers = facts.read("ras.reports", list[RasReport])
    if missing := missing_by_ras(answers):
        sure = len(answers) > 1 or any("dead" in said for said in missing.values())
        yield Trouble(
            f"RAS does not reach {listed(list(missing))}"
            + ("" if sure else " (one answer only: it may be on its way)"),
            tuple(f"{answers[-1].at}: {name} {said}" for name, said in list(missing.items())[:SHOWN]),
            verdict="error" if sure else "info",
        )


def _ras(facts: Facts) -> Iterator[Trouble]:
    answers = facts.read("ras.reports", list[RasReport])
    hung = events_of(facts, "watchdog", "ep_timeout")
    evidence = tuple(
        f"{a.at}: status {', '.join(a.states) or 'none'}, errors {', '.join(a.errors) or 'none'}" for a in answers
    )
    last = answers[-1]
    if standing := standing_by_ras(answers):
        if standing.behind and not standing.moved:
            yield Trouble(
                f"no rank moved between two answers; {listed(standing.behind)} is behind at {standing.low} of "
                f"{standing.high}",
                evidence[:SHOWN],
                verdict="error",
            )
    elif hung:
        yield Trouble(
            f"RAS says {', '.join(last.states) or 'nothing'}/{', '.join(last.errors) or 'nothing'} although a "
            f"collective timed "
            "out: one snapshot proves nothing, compare the counts of two queries",
            (*evidence[:SHOWN], *lines(hung[:2])),
            verdict="warning",
        )
    else:
        yield Trouble("one RAS answer is a snapshot, no sign of progress", evidence[:SHOWN])


CHECKS = (
    log_check(
        "NCCL014",
        "No collective was issued in a failing graph capture",
        _capture,
        why="Errors in a capture surface at its end or later; the communicator is unusable from then on.",
        by_hand="grep -n capture LOG | head -1",
        remedy="run the first step outside the capture, create communicators and handles before it, capture only "
        "updates and launches",
        reference="report: pie-project/pie#499",
    ),
    log_check(
        "NCCL015",
        "No collective timed out",
        _watchdog,
        needs=("log.frameworks",),
        why="The watchdog names who waits. Who is behind, or silent, is the cause.",
        by_hand="grep -o 'SeqNum=[0-9]*' LOG | sort | uniq -c",
        remedy="export TORCH_NCCL_DUMP_ON_TIMEOUT=1 TORCH_FR_BUFFER_SIZE=2000   # and look at the stack of the rank "
        "that is behind",
        reference="report: vllm-project/vllm#23448",
    ),
    log_check(
        "NCCL016",
        "Progress is judged by two queries",
        _ras,
        severity="info",
        why="RAS reports states, not progress: a job that hangs is RUNNING and OK, and a mismatch of one moment is "
        "normal.",
        by_hand="ncclras -v; sleep 10; ncclras -v",
        remedy="ncclras -f json > a; sleep 10; ncclras -f json > b   # and compare the counts per rank",
        reference="report: NVIDIA/nccl#1730",
        needs=("ras.reports",),
    ),
    log_check(
        "NCCL020",
        "RAS reaches every rank",
        _unreached,
        why="A process that has died or hangs as a whole does not answer its peers' RAS threads either.",
        by_hand="ncclras -v   # sections INCOMPLETE and DEAD",
        remedy="ps -o pid,stat,wchan:30,args -p PID   # on that node; and its messages, dmesg for out of memory",
        reference="https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/troubleshooting/ras.html",
        needs=("ras.reports",),
    ),
    log_check(
        "EP201",
        "No rank is waited for in vain",
        _ep_timeouts,
        needs=("log.expert_parallel",),
        why="Every receiver names the sender it waits for; the rank most of them name is the one to look at.",
        by_hand="grep -o 'src_rank [0-9]*' LOGS | sort | uniq -c | sort -n",
        remedy="sudo dmesg | grep Xid; nvidia-smi -q -d PERFORMANCE   # on the suspect's node, and read its log",
        reference="NCCL EP device code; report: deepseek-ai/DeepEP#274",
    ),
)
