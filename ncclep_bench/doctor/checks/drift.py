"""How far a machine has drifted from a baseline: what changed, what got lost, what grew."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

from ncclep_bench.doctor.contract import Check, Trouble, Verdict
from ncclep_bench.doctor.records import Drift
from ncclep_bench.model.facts import Facts

_DOTTED = re.compile(r"\d+(?:\.\d+)+(?:[-+.]\w[\w.+-]*)?")
_FATAL = re.compile(r"uncorrectable|remap|parity|sec-ded", re.IGNORECASE)

Words = Callable[[Drift], tuple[str, Verdict | None]]
"""What a drift is called, and its verdict where that is not the check's."""


def _judge(kind: str, words: Words) -> Callable[[Facts], Iterator[Trouble]]:
    def judge(facts: Facts) -> Iterator[Trouble]:
        for drift in facts.read(f"drift.{kind}", list[Drift]):
            what, verdict = words(drift)
            against = f"{drift.machines} healthy machines" if drift.machines > 1 else "the baseline"
            evidence = f"{drift.item}: now {_or_none(drift.now)}, in {against} {' or '.join(drift.healthy) or 'none'}"
            yield Trouble(f"{drift.item} {what}", (evidence,), verdict=verdict)

    return judge


def _or_none(value: str | None) -> str:
    return "none" if value is None else value


def _change(drift: Drift) -> str:
    if drift.now is None:
        return f"is gone; it was {' or '.join(drift.healthy)}"
    if not drift.healthy:
        return f"is new: {drift.now}"
    if drift.machines > 1:
        return f"is {drift.now}; {drift.machines} healthy machines have {' or '.join(drift.healthy)}"
    return f"changed from {drift.healthy[-1]} to {drift.now}"


def _changed(drift: Drift) -> tuple[str, Verdict | None]:
    return _change(drift), None if drift.healthy else "info"


def _version(drift: Drift) -> tuple[str, Verdict | None]:
    if drift.now is None or len(drift.healthy) != 1:
        return _changed(drift)
    if not (_DOTTED.fullmatch(drift.healthy[0]) and _DOTTED.fullmatch(drift.now)):
        return _change(drift), None
    return f"{_change(drift)} ({'up' if _numbers(drift.now) > _numbers(drift.healthy[0]) else 'down'})", None


def _setting(drift: Drift) -> tuple[str, Verdict | None]:
    return _change(drift), None


def _link(drift: Drift) -> tuple[str, Verdict | None]:
    """Less is an error; more, or another name, is worth a look."""
    if not drift.healthy:
        return _change(drift), "info"
    old, new = _numbers(drift.healthy[-1]), _numbers(drift.now or "")
    less = (bool(old) and new < old) or (drift.healthy[-1], drift.now) in (("ACTIVE", "DOWN"), ("True", "False"))
    return _change(drift), "error" if drift.now is None or less else None


def _grew(drift: Drift) -> tuple[str, Verdict | None]:
    return f"grew from {drift.healthy[-1]} to {drift.now}", "error" if _FATAL.search(drift.item) else None


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(number[:9]) for number in re.findall(r"\d+", text))


_COMPARE = "ncclep-doctor baseline compare FILE"
_REFERENCE = "docs/files.md"

CHECKS = (
    Check(
        "EP501",
        "Versions are those of the baseline",
        "warning",
        ("drift.versions",),
        _judge("versions", _version),
        why="A machine that ran well and was upgraded, or one of a fleet that was not, is the first suspect.",
        by_hand="pip list; uname -r; cat /proc/driver/nvidia/version",
        remedy=f"install what the healthy machines have, or save a new baseline   # then: {_COMPARE}",
        reference=_REFERENCE,
    ),
    Check(
        "EP502",
        "Settings are those of the baseline",
        "warning",
        ("drift.settings",),
        _judge("settings", _setting),
        why="One variable or driver option that only one machine has changes how its ranks talk to the others.",
        by_hand="env | grep NCCL; cat /proc/driver/nvidia/params; cat /proc/cmdline",
        remedy="export NAME=VALUE   # as on the healthy machines, or unset NAME",
        reference=_REFERENCE,
    ),
    Check(
        "EP503",
        "Limits and memory are those of the baseline",
        "warning",
        ("drift.limits",),
        _judge("limits", _changed),
        why="Limits come from whoever started the job; another daemon or container gives others.",
        by_hand="ulimit -a; df -h /dev/shm; nproc; free -b",
        remedy="ulimit -l unlimited   # or what the healthy machines have",
        reference=_REFERENCE,
    ),
    Check(
        "EP504",
        "GPUs, links and ports are those of the baseline",
        "warning",
        ("drift.links",),
        _judge("links", _link),
        why="A lost GPU, link or port leaves the job running, slower or over another path.",
        by_hand="nvidia-smi nvlink -s; nvidia-smi topo -m; ibstat; ip -brief link",
        remedy="nvidia-smi nvlink -s; ibstat; sudo dmesg | tail -50   # of what is lost",
        reference=_REFERENCE,
    ),
    Check(
        "EP505",
        "Clocks, power limits and PCIe widths are those of the baseline",
        "warning",
        ("drift.speeds",),
        _judge("speeds", _changed),
        why="A GPU with a lower limit or a narrower slot makes every rank as slow as itself.",
        by_hand="nvidia-smi -q -d CLOCK,POWER,ECC; nvidia-smi --query-gpu=pcie.link.width.current --format=csv",
        remedy="sudo nvidia-smi -rac; sudo nvidia-smi -pl WATTS   # PCIe: reseat the board",
        reference=_REFERENCE,
    ),
    Check(
        "EP506",
        "Error counters have not grown since the baseline",
        "warning",
        ("drift.counters",),
        _judge("counters", _grew),
        why="A total says nothing of when; what grew since the machine was healthy is new.",
        by_hand="nvidia-smi -q -d ECC,ROW_REMAPPER; nvidia-smi nvlink -e; perfquery -x",
        remedy="nvidia-smi -q -d ECC,ROW_REMAPPER   # twice, under load; replace what goes on to count",
        reference=_REFERENCE,
    ),
)
