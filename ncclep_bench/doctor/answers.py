"""What is known of one rank: the facts it reads itself or has left for others, and how it answers."""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from pathlib import Path

import msgspec

from ncclep_bench.doctor.collect import Machine, collect
from ncclep_bench.doctor.records import Answer
from ncclep_bench.errors import InputError
from ncclep_bench.model.facts import Fact, Facts, facts_from_json, told
from ncclep_bench.runtime.neighbours import Neighbour
from ncclep_bench.runtime.processes import ProcessState, process_state
from ncclep_bench.runtime.world import environment_rank


def facts_of_rank(config: Path | None, ranks: int | None) -> Facts:
    """The facts of this process, which a launcher has started; a configuration that cannot be used is one of them.

    `%r` in the name of the configuration stands for the rank.
    """
    rank = environment_rank()
    own = of_rank(config)
    error = ""
    try:
        facts = collect(Machine(config=own, ranks=ranks))
    except InputError as unusable:
        facts = collect(Machine(ranks=ranks))
        error = unusable.message
        facts.sections["ep"]["config"] = Fact("failed", str(own), reason=error)
    answer = Answer(True, os.getpid(), doing=error)
    return answering(msgspec.structs.replace(facts, rank=rank), answer)


def of_rank(path: Path | None) -> Path | None:
    """`path` with this process's rank in place of `%r`; as it is outside of a job."""
    rank = environment_rank()
    return path if path is None or rank is None else Path(str(path).replace("%r", str(rank)))


def documents_of(found: Sequence[Neighbour], size: int | None, seconds: float) -> list[Facts]:
    """What the ranks of one host have left, and who is silent: stopped, gone, or without facts.

    `size`: how many there should be, None where others are on other hosts.
    """
    documents: dict[int, Facts] = {}
    for rank, pid, left in found:
        facts = left_by(rank, left)
        state = process_state(pid)
        if left is None or state not in ("running", "sleeping"):
            doing = doing_of(state) + ("" if left is not None else ", and has read no facts")
            facts = answering(facts, Answer(False, pid, seconds, doing))
        documents[rank] = facts
    for rank in range(size or 0):
        if rank not in documents:
            gone = Answer(False, None, seconds, f"has no process on {socket.gethostname()}")
            documents[rank] = answering(left_by(rank, None), gone)
    return [documents[rank] for rank in sorted(documents)]


def left_by(rank: int, left: bytes | None) -> Facts:
    """The facts that a rank of this host has left for others; of one that has left nothing, whose they are."""
    if left is None:
        return Facts(host=socket.gethostname(), rank=rank, sections={})
    return facts_from_json(left, file=f"rank {rank}")


def doing_of(state: ProcessState) -> str:
    """What a process in this state does, in words that follow "it"."""
    return {"dead": "is gone", "zombie": "has ended"}.get(state, f"is {state}")


def answering(facts: Facts, answer: Answer) -> Facts:
    """`facts` of a rank, and how it answers."""
    return facts.having({"job.answer": told("the ranks' exchange", answer)})
