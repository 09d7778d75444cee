"""How a sweep is followed on standard error: a bar with the time left on a terminal, plain lines elsewhere."""

from __future__ import annotations

from typing import TYPE_CHECKING, TextIO

from ncclep_bench.model.case import Case
from ncclep_bench.model.toml_file import shown

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

_SHOWN = ("variant", "mode", "layout", "backend", "ranks", "tokens", "num_experts", "top_k", "routing_param",
          "expert_elements", "active_share", "mr_cache_size", "user_memory", "dtype")  # fmt: skip


def short(case: Case) -> str:
    """The axes that tell cases apart in most sweeps; the report has them all."""
    axes = case.axes()
    return shown(" ".join([case.collective, *(f"{key}={axes[key]}" for key in _SHOWN if axes[key] is not None)]))


class Lines:
    """One line per case that is done."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._total = self._done = 0

    def begin(self, total: int) -> None:
        self._total = total

    def started(self, case: Case) -> None:
        """Nothing is printed before the outcome is known."""

    def finished(self, case: Case, outcome: str, reason: str) -> None:
        self._done += 1
        why = f": {shown(reason)}" if reason else ""
        print(f"[{self._done}/{self._total}] {short(case)} {outcome}{why}", file=self._stream, flush=True)

    def close(self) -> None:
        """Nothing is held."""


class Bar:
    """A progress bar; what did not pass stays above it."""

    def __init__(self) -> None:
        self._progress: Progress | None = None
        self._task: TaskID | None = None

    def begin(self, total: int) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        self._progress = Progress(
            MofNCompleteColumn(),
            BarColumn(bar_width=24),
            TimeRemainingColumn(),
            TextColumn("{task.description}", markup=False),
            console=Console(stderr=True),
            transient=True,
        )
        self._progress.start()
        self._task = self._progress.add_task("starting ranks", total=total)

    def started(self, case: Case) -> None:
        if self._progress is not None and self._task is not None:
            self._progress.update(self._task, description=short(case))

    def finished(self, case: Case, outcome: str, reason: str) -> None:
        if self._progress is None or self._task is None:
            return
        if outcome != "passed":
            self._progress.console.print(f"{short(case)} {outcome}: {shown(reason)}", markup=False, highlight=False)
        self._progress.advance(self._task)

    def close(self) -> None:
        """Take the bar away."""
        if self._progress is not None:
            self._progress.stop()
            self._progress = None
