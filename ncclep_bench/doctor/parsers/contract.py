"""What a parser is: lines of recorded output in, facts out."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ncclep_bench.doctor.text import Line

Parsed = Mapping[str, Any]
"""Fact name → a list of records, which lists of other files extend, or one value."""

Parser = Callable[[Sequence[Line]], Parsed]
"""A pure function that takes what it knows out of any text and leaves the rest; text it does not know gives nothing."""
