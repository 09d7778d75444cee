"""One pass over logs of any size: find the lines that signatures know."""

from __future__ import annotations

import random
import re
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator
from itertools import accumulate

from ncclep_bench.doctor.logs.contract import Family, Readable, Signature
from ncclep_bench.doctor.records import Event
from ncclep_bench.doctor.text import MAX_LINE, untagged
from ncclep_bench.registry import LOGS

CHUNK_BYTES = 1 << 20
MARKED_CHUNKS = 64
"""A log shows what it is in its first 64 MiB, or by its events."""
EVENTS_PER_RANK = 4
"""Of one kind; a fault that repeats a million times is told by its first lines."""
EVENTS_PER_KIND = 8192
FIRST_READ, CHUNK_READ = 20_000, 64
"""Lines with a cue: the first of the log are all read, then so many of each chunk, in turn of each shape. A flood costs
little, and neither a rare line in it nor the next rank's part of the log is lost."""
MAX_SHAPES = 100_000

_NUMBERS = b"0123456789abcdef"
_NCCL_PREFIX = re.compile(r"(?:^|\s)(?P<host>[A-Za-z][\w.-]*):(?P<pid>\d+):\d+ \[-?\d+\] ")
_RANK_WORD = re.compile(r"\[(?:.*?\b)?rank[ :=]?(\d{1,9})\]", re.IGNORECASE)
_RANK_IN_NAME = re.compile(r"rank[-_.]?(\d{1,9})", re.IGNORECASE)
_SYSLOG_HOST = re.compile(r"[A-Z][a-z]{2} +\d+ [\d:]{8} (\S+) ")
_TIME = re.compile(
    r"\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d(?:[.,]\d{1,9})?|\b[A-Z][a-z]{2} +\d{1,2} \d\d:\d\d:\d\d|"
    r"\[[A-Z](?:\d{4}|\d{3}) \d\d:\d\d:\d\d\.\d{1,9}|^\[ *\d+\.\d{6}\]"
)


def scan(stream: Readable, file: str) -> dict[str, list[Event]]:
    """The events of one log by family, in the order of its lines; memory does not grow with the log.

    A family is there if the log is of its kind, and has an empty list if none of its signatures was found.
    """
    families: dict[str, Family] = {name: LOGS.get(name) for name in LOGS}
    by_cue: dict[bytes, list[tuple[str, Signature]]] = defaultdict(list)
    for name, family in families.items():
        for signature in family.signatures:
            by_cue[signature.cue.encode()].append((name, signature))
    unseen = {name: [mark.encode() for mark in family.marks] for name, family in families.items()}
    events: dict[str, list[Event]] = {}
    kept: dict[tuple[str, int | None], int] = defaultdict(int)
    ranks: dict[tuple[str, str], int] = {}
    named = _RANK_IN_NAME.search(file.rpartition("/")[2])
    for number, raw, found in _candidates(stream, by_cue, unseen):
        if raw.startswith(b"#"):
            continue
        text, tag = untagged(raw[:MAX_LINE].decode(errors="replace").rstrip("\r"))
        for name, signature in found:
            match = signature.pattern.search(text)
            if match is None:
                continue
            there = events.setdefault(name, [])
            host, rank = _speaker(match, text, tag, ranks)
            if rank is None and named:
                rank = int(named[1])
            at = f"{file}:{number}"
            # One line may be the same fault in two wordings.
            if kept[signature.kind, rank] < _room(signature.kind, rank) and (
                not there or (there[-1].at, there[-1].kind) != (at, signature.kind)
            ):
                kept[signature.kind, rank] += 1
                there.append(_event(signature, match, at, text, host, rank))
    for name in families:
        if name not in unseen:
            events.setdefault(name, [])
    return events


def _room(kind: str, rank: int | None) -> int:
    return EVENTS_PER_KIND if rank is None or kind in ("p2p_ipc", "xid") else EVENTS_PER_RANK


def _candidates(
    stream: Readable, by_cue: dict[bytes, list[tuple[str, Signature]]], unseen: dict[str, list[bytes]]
) -> Iterator[tuple[int, bytes, list[tuple[str, Signature]]]]:
    """(line number, line, signatures whose cue it holds), in order; lines of endless length are cut.

    Takes out of `unseen`, marks by family, the families of which it meets one.
    """
    cues_of: dict[bytes, tuple[bytes, ...]] = {}
    before, rest, chunks, left = 0, b"", 0, FIRST_READ
    while True:
        block = stream.read(CHUNK_BYTES)
        chunk = rest + block
        if not chunk:
            return
        end = chunk.rfind(b"\n") + 1 if block else len(chunk)
        if end == 0 and len(chunk) >= CHUNK_BYTES:  # no line is that long: take it as it is
            end = len(chunk)
        chunk, rest = chunk[:end], chunk[end:]
        lowered = chunk.lower()
        if chunks < MARKED_CHUNKS:
            chunks += 1
            for name in [name for name, marks in unseen.items() if any(mark in lowered for mark in marks)]:
                del unseen[name]
        lines = lowered.split(b"\n")
        hits = _hits(lines, lowered, by_cue, cues_of, max(left, CHUNK_READ))
        left -= len(hits)
        ends = list(accumulate(map(len, lines))) if hits else []  # without line ends
        for number, cues in sorted(hits.items()):
            stop = ends[number] + number
            wanted = [signature for cue in cues for signature in by_cue[cue]]
            yield before + number + 1, chunk[stop - len(lines[number]) : stop], wanted
        before += len(lines) - 1
        if not block:
            return


def _hits(
    lines: list[bytes],
    lowered: bytes,
    cues: Iterable[bytes],
    cues_of: dict[bytes, tuple[bytes, ...]],
    most: int,
) -> dict[int, tuple[bytes, ...]]:
    """The lines with a cue and which they hold, at most `most`, as many of one shape as of another.

    Lines of one shape differ in numbers only, so that one of them tells which cues all hold; `cues_of` remembers it.
    """
    shapes = lowered.translate(None, _NUMBERS).split(b"\n")
    one_of = dict(zip(shapes, lines, strict=True))
    if len(cues_of) > MAX_SHAPES:
        cues_of.clear()
    new = [shape for shape in one_of if shape not in cues_of]
    cues_of.update(dict.fromkeys(new, ()))
    texts = [one_of[shape] for shape in new]
    text = b"\n".join(texts)
    starts = list(accumulate((len(line) + 1 for line in texts), initial=0))
    step = len(text) // (4 * most)  # where every line has a shape of its own, some stand for all
    for cue in cues:
        position = text.find(cue)
        while position >= 0:
            place = bisect_right(starts, position) - 1
            cues_of[new[place]] += (cue,)
            position = text.find(cue, max(starts[place + 1], position + step))
    some = random.Random(0).sample
    known = [shape for shape in one_of if cues_of[shape]]
    alike: dict[bytes, list[int]] = {shape: [] for shape in some(known, min(most, len(known)))}
    if alike:
        for number, shape in enumerate(shapes):
            if shape in alike:
                alike[shape].append(number)
    groups = sorted(alike.items(), key=lambda group: len(group[1]))
    hits: dict[int, tuple[bytes, ...]] = {}
    for place, (shape, numbers) in enumerate(groups):
        share = (most - len(hits)) // (len(groups) - place)
        hits.update(dict.fromkeys(numbers if len(numbers) <= share else some(numbers, share), cues_of[shape]))
    return hits


def _speaker(
    match: re.Match[str], text: str, tag: int | None, ranks: dict[tuple[str, str], int]
) -> tuple[str, int | None]:
    """Host and rank of a line; a process whose rank its first lines told keeps it."""
    groups = match.groupdict()
    prefix = _NCCL_PREFIX.search(text)
    host = prefix["host"] if prefix else groups.get("host") or ""
    if not host and (syslog := _SYSLOG_HOST.match(text)):
        host = syslog[1]
    if said := groups.get("rank"):
        rank = int(said[:9])
        if prefix:
            ranks.setdefault((host, prefix["pid"]), rank)
        return host, rank
    if tag is not None:
        return host, tag
    if word := _RANK_WORD.search(text):
        return host, int(word[1])
    return host, ranks.get((host, prefix["pid"])) if prefix else None


def _event(signature: Signature, match: re.Match[str], at: str, text: str, host: str, rank: int | None) -> Event:
    time = _TIME.search(text)
    fields = {name: said.strip() for name, said in match.groupdict().items() if said is not None and name != "rank"}
    return Event(
        at=at,
        host=host,
        kind=signature.kind,
        text=" ".join(text.split())[:400],
        rank=rank,
        time=time[0].lstrip("[ ") if time else "",
        effect=signature.effect,
        fields=fields,
    )


def in_order(events: Iterable[Event]) -> list[Event]:
    """Causes before effects; each by its time where the clocks write alike, else by place."""
    listed = list(events)
    shapes = {re.sub(r"\d", "0", event.time) for event in listed if event.time}
    by_time = len(shapes) == 1
    return sorted(
        listed, key=lambda event: (event.effect, (event.time or "~") if by_time else "", _line_number(event.at))
    )


def _line_number(at: str) -> int:
    return int(at.rpartition(":")[2])
