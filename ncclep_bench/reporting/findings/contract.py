"""What a format of findings is."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from ncclep_bench.doctor.contract import Finding, Verdict


@dataclass(frozen=True)
class Diagnosis:
    """What is to be shown: the findings, `host` where they are of one, and why there are none (`failure`).

    `fail_on`: the mildest verdict that counts as failed. `worst_first`: False where the order of `findings` says
    something. `colour` is for a terminal. `verbose`: by name, too, what a format else only sums up.
    """

    findings: Sequence[Finding]
    host: str = ""
    fail_on: Verdict = "error"
    worst_first: bool = True
    colour: bool = False
    verbose: bool = False
    failure: str = ""


@dataclass(frozen=True)
class FindingFormat:
    """A diagnosis in, text out: `render` opens no file, asks no terminal, and judges nothing.

    `exit_codes`: where the readers of a format expect their own, the code of each verdict, the first that any finding
    has decides; that of `not_run` stands for no findings at all, and such a format says on standard output why.
    """

    render: Callable[[Diagnosis], str]
    exit_codes: Mapping[Verdict, int] | None = None

    def exit_code(self, findings: Sequence[Finding]) -> int | None:
        """The format's own exit code; None for one that has none."""
        if self.exit_codes is None:
            return None
        said = {finding.verdict for finding in findings}
        return next((code for verdict, code in self.exit_codes.items() if verdict in said), self.exit_codes["not_run"])
