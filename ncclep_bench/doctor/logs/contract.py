"""What a signature is: a line that is known to mean something."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import NamedTuple, Protocol


class Readable(Protocol):
    """A stream of bytes that is read once, from its beginning to its end."""

    def read(self, size: int, /) -> bytes: ...


@dataclass(frozen=True)
class Signature:
    """Lines that hold `cue` and match `pattern`, whose named groups become the event's fields.

    The cue is lower case and holds no number, as lines that differ in numbers only are looked at once.
    A group called `rank` tells whose line it is. `effect`: such a line follows from some other fault.
    """

    kind: str
    cue: str
    pattern: re.Pattern[str]
    effect: bool = False


def signature(kind: str, cue: str, pattern: str, *, effect: bool = False) -> Signature:
    """A Signature whose pattern ignores case."""
    return Signature(kind, cue, re.compile(pattern, re.IGNORECASE), effect)


class Family(NamedTuple):
    """Logs of one origin: words (lower case) by which they are known, whatever they say, and their signatures."""

    marks: tuple[str, ...]
    signatures: tuple[Signature, ...]
