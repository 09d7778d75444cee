"""Recorded text as lines: without comments, colours and the tags that launchers put before each line."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

MAX_LINE = 4000

_ESCAPE = re.compile(r"\x1b(?:\[[0-9;?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|[@-Z\\^_])")
_MPI_TAG = re.compile(r"\[\d{1,9},(\d{1,9})\]<std(?:out|err|diag)>: ?")
_RANK_TAG = re.compile(r"\[rank ?(\d{1,9})\]: ?", re.IGNORECASE)
_SRUN_TAG = re.compile(r" *(\d{1,7}): ")
_HOST_TAG = re.compile(r"([A-Za-z][\w.-]*): ")
_HOST_HEADER = re.compile(
    r"(?:={2,}>?|-{2,}|\[)\s*(?:host(?:name)?|node)?[ :=]*([\w.-]*[A-Za-z][\w.-]*)\s*:?\s*(?:<?={2,}|-{2,}|\])"
    r"|(?:host|hostname|node)(?: *[:=] *| +)([\w.-]*[A-Za-z][\w.-]*):?"
    r"|((?:host|node|worker|compute|dgx|hgx|server)[\w.-]*\d[\w.-]*|(?:host|node|worker|gpu)-[\w.-]+):"
    r"|((?:host|node|worker|gpu)-\w[\w.-]*)"
    r"|\[?\w+@([\w.-]*[A-Za-z][\w.-]*)(?:[: ][~/][\w/.-]*\]?)?[$#] ?\S.*"
    r"|([\w.-]*[A-Za-z][\w.-]*)\$ \S.*",
    re.IGNORECASE,
)


class Line(NamedTuple):
    """One line: where it is, its text, and the rank and host that a tag or a heading names."""

    at: str
    text: str
    rank: int | None = None
    host: str = ""

    @property
    def shown(self) -> str:
        """Place and text, for evidence."""
        return quoted(self.at, self.text)


def quoted(at: str, text: str) -> str:
    """A line as evidence: where it is and what it says, cut to a readable length."""
    text = " ".join(text.split())
    return f"{at}: {text if len(text) <= 240 else text[:237] + '...'}"


def untagged(text: str) -> tuple[str, int | None]:
    """`text` without colours and launcher tags, and the rank that a tag names."""
    if "\x1b" in text:
        text = _ESCAPE.sub("", text)
    rank = None
    for tag in (_MPI_TAG, _RANK_TAG):
        if match := tag.match(text):
            text, rank = text[match.end() :], int(match[1])
    return text, rank


def lines_of(text: str, file: str) -> list[Line]:
    """The lines of a recorded `file`, with comments left out."""
    found: list[Line] = []
    for number, raw in enumerate(text.replace("\r\n", "\n").replace("\r", "\n").split("\n"), 1):
        plain, rank = untagged(raw[:MAX_LINE])
        if plain.strip() and not plain.startswith("#"):
            found.append(Line(f"{file}:{number}", plain, rank))
    return _under_headings(_without_columns(found))


def _without_columns(lines: Sequence[Line]) -> list[Line]:
    """Lines without a first column that all of them have: the task number of srun, or the host of pdsh and clush."""
    if lines and all(line.text.startswith(">") for line in lines):  # quoted in a mail or an issue
        return [line._replace(text=line.text.lstrip(">").removeprefix(" ")) for line in lines]
    if len(lines) > 1 and all(_SRUN_TAG.match(line.text) for line in lines):
        return [
            line._replace(text=line.text[match.end() :], rank=int(match[1]))
            for line in lines
            if (match := _SRUN_TAG.match(line.text))
        ]
    tags = [_HOST_TAG.match(line.text) for line in lines]
    if len(lines) > 7 and all(tags) and min(Counter(tag[1] for tag in tags if tag).values()) > 3:
        return [
            line._replace(text=line.text[tag.end() :], host=tag[1])
            for line, tag in zip(lines, tags, strict=True)
            if tag
        ]
    return list(lines)


def _under_headings(lines: Sequence[Line]) -> list[Line]:
    host, result = "", []
    for line in lines:
        text = line.text.strip()
        if len(text) < 200 and (heading := _HOST_HEADER.fullmatch(text)):
            host = next(name for name in heading.groups() if name)
        result.append(line if line.host or not host else line._replace(host=host))
    return result
