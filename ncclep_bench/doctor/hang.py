"""A job that stands still, seen from outside: processes, stacks, RAS, logs and GPUs as one facts document."""

from __future__ import annotations

import os
import re
import shutil
import socket
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from ncclep_bench.doctor import ras_client
from ncclep_bench.doctor.collect import FACTS, Machine, collect
from ncclep_bench.doctor.contract import Check
from ncclep_bench.doctor.processes import Rank, find_ranks, look_twice, not_permitted
from ncclep_bench.doctor.recorded import Recorded, read_recorded
from ncclep_bench.doctor.records import RasReport, Stack
from ncclep_bench.doctor.run import all_checks
from ncclep_bench.doctor.text import lines_of
from ncclep_bench.errors import CannotRunError, InputError
from ncclep_bench.model.facts import Fact, Facts, told
from ncclep_bench.registry import LOGS, PARSERS
from ncclep_bench.runtime.child import run_bounded

RAS_DEADLINE_S = 15.0
STACK_DEADLINE_S = 10.0
MAX_STACKS = 16
MAX_FRAMES = 8

_GPU_FACTS = frozenset({"gpus.query", "gpus.unreadable", "gpus.processes"})
OWN_FACTS = frozenset({"hang.sources", "job.processes", "job.meetings", "job.stacks", "ras.reports"})
_WAITS_IN_LOGS = frozenset({"EP201", "NCCL015"})
_LOGS = tuple(f"log.{name}" for name in LOGS)
_NO_LOG = Fact("absent", "--log", reason="no log was given: --log FILE")
_FRAME = re.compile(r" +(\S.* \(.*:\d+\))\s*")
_DENIED = re.compile(r"permission denied|not permitted", re.IGNORECASE)
_THREAD = re.compile(r"Thread .*?(?:: \"(.*)\")?")


class Question(NamedTuple):
    """Where to look: pids (none: the one job here), RAS (none: NCCL_RAS_ADDR or its default port), recorded files."""

    pids: Sequence[int] = ()
    ranks: int | None = None
    ras: str | None = None
    files: Sequence[Path] = ()
    wait_s: float = 5.0


def look(question: Question) -> Recorded:
    """Look twice, `wait_s` apart, at everything there is; a source that is missing says why.

    Raises InputError for a pid, address or file that cannot be used, CannotRunError where there is nothing to look at.
    """
    address = _address(question)
    ranks = find_ranks(question.pids)
    if question.ranks is not None:
        ranks = [rank._replace(ranks=question.ranks) for rank in ranks]
    recorded = read_recorded(question.files) if question.files else Recorded([], [])
    with ThreadPoolExecutor(3) as pool:
        answers = pool.submit(_ras, address, question.wait_s)
        gpus = pool.submit(collect, Machine(), without=FACTS.keys() - _GPU_FACTS)
        processes = look_twice(ranks, question.wait_s)
        stacks = _stacks(ranks)
        seen = {
            "ras.reports": _said(str(address), answers.result()),
            **{f"gpus.{name}": fact for name, fact in gpus.result().sections["gpus"].items()},
            **(_by_name(recorded.documents) if question.files else dict.fromkeys(_LOGS, _NO_LOG)),
            "job.processes": _said("/proc", processes or _no_rank(question.pids)),
            "job.meetings": _said("/proc", [p for p in processes if p.meetings is not None] or _NO_MEETINGS),
            "job.stacks": _said("py-spy dump", stacks),
        }
    answered = [
        name for name in ("job.processes", "ras.reports", *_LOGS) if name in seen and seen[name].state == "value"
    ]
    if not answered:
        raise CannotRunError(
            f"nothing to look at: {seen['job.processes'].missing}; {seen['ras.reports'].missing}",
            hint="--pid LAUNCHER on the machine where the ranks run, --ras HOST:PORT, or --log FILE",
        )
    seen |= {"hang.sources": told("what answered", answered), "hang.window_s": told("--wait", question.wait_s)}
    return Recorded([Facts(host=socket.gethostname(), sections={}).having(seen)], recorded.unknown)


def questions(with_logs: bool) -> list[Check]:
    """The checks that an answer is made of; those of all kinds of logs only where there are logs."""

    def wanted(check: Check) -> bool:
        needs = set(check.needs)
        if any(need.startswith("log.") for need in needs):
            return with_logs or check.code in _WAITS_IN_LOGS
        return bool(needs & OWN_FACTS) or bool(needs & _GPU_FACTS and needs <= _GPU_FACTS)

    return [check for check in all_checks() if wanted(check)]


_NO_MEETINGS = "no rank uses the host backend of ncclep-bench, or this user may not look at it"


def _no_rank(pids: Sequence[int]) -> Fact:
    where = f" at or below {', '.join(map(str, pids))}" if pids else ""
    none = f"no process{where} has a rank of a launcher in its environment"
    if shut := not_permitted(pids):
        others = f"{len(shut)} process{'es' * (len(shut) > 1)}{where} of other users, such as {shut[0]}"
        return Fact("not_permitted", "/proc", reason=f"{others}, at which root may look; of the rest {none}")
    return Fact("absent", "/proc", reason=none)


def _address(question: Question) -> ras_client.Address:
    text = question.ras or os.environ.get("NCCL_RAS_ADDR") or ras_client.DEFAULT_ADDRESS
    try:
        return ras_client.Address.parse(text)
    except ValueError as error:
        source = "--ras" if question.ras else "NCCL_RAS_ADDR"
        raise InputError(f"{source}: {error}", hint=f"for example {ras_client.DEFAULT_ADDRESS}") from error


def _ras(address: ras_client.Address, wait_s: float) -> list[RasReport] | str:
    """Two answers, or why there are none; a second query that fails leaves one."""
    texts = []
    for number in range(2):
        try:
            texts.append(ras_client.status(address, RAS_DEADLINE_S))
        except ras_client.RasError as error:
            if not texts:
                return str(error)
        if number == 0:
            time.sleep(wait_s)
    found: list[RasReport] = []
    for number, text in enumerate(texts, 1):
        found += PARSERS.get("ras")(lines_of(text, f"{address} query {number}")).get("ras.reports", [])
    return found or f"{address} answers nothing that is known"


def _stacks(ranks: Sequence[Rank]) -> list[Stack] | str:
    """Where the ranks are in their Python programs, or why that is not known."""
    beside = Path(sys.executable).parent / "py-spy"
    program = shutil.which("py-spy") or (str(beside) if beside.is_file() else None)
    if program is None:
        return "py-spy is not installed: pip install py-spy"
    if not ranks:
        return "no rank"
    with ThreadPoolExecutor(4) as pool:
        told = list(pool.map(lambda rank: _stack(program, rank), ranks[:MAX_STACKS]))
    return [stack for stack in told if isinstance(stack, Stack)] or next(
        reason for reason in told if isinstance(reason, str)
    )


def _stack(program: str, rank: Rank) -> Stack | str:
    # Without stopping the process, which may be stopped already, or be about to move.
    try:
        answer = run_bounded([program, "dump", "--nonblocking", "--pid", str(rank.pid)], STACK_DEADLINE_S)
    except OSError as error:
        return f"py-spy: {error}"
    frames: list[str] = []
    for line in answer.stdout.splitlines():
        if _THREAD.fullmatch(line):
            if frames:  # the main thread comes first
                break
        elif match := _FRAME.fullmatch(line):
            frames.append(match[1][:200])
    if not frames:
        return f"py-spy: {(answer.stderr.strip() or 'no stack').splitlines()[0][:200]}"
    return Stack(at=f"py-spy dump --pid {rank.pid}", rank=rank.rank, frames=frames[:MAX_FRAMES])


def _said(source: str, value: object) -> Fact:
    """A value, or as text the reason why there is none."""
    if isinstance(value, Fact):
        return value
    if isinstance(value, str):
        return Fact("not_permitted" if _DENIED.search(value) else "absent", source, reason=value)
    return told(source, value)


def _by_name(documents: Sequence[Facts]) -> dict[str, Fact]:
    return {
        f"{section}.{key}": fact
        for facts in documents
        for section, own in facts.sections.items()
        for key, fact in own.items()
    }
