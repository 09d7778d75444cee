"""What a report format is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ncclep_bench.results.frames import RunFrames


@dataclass(frozen=True)
class Format:
    """Frames in, bytes out: `render` opens no file, asks no terminal, and measures nothing.

    `file`: name in the run's folder; None for a format that goes to standard output.
    """

    render: Callable[[RunFrames], bytes]
    file: str | None = None

    def __call__(self, frames: RunFrames) -> bytes:
        return self.render(frames)
