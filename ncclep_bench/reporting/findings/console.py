"""Text for people, which is plain where it does not go to a terminal."""

from __future__ import annotations

from ncclep_bench.doctor.render import as_console
from ncclep_bench.reporting.findings.contract import Diagnosis, FindingFormat


def render(diagnosis: Diagnosis) -> str:
    """A line per problem with evidence and remedy; healthy and not run are summed up, the latter in full if asked."""
    return as_console(
        diagnosis.findings, colour=diagnosis.colour, worst_first=diagnosis.worst_first, verbose=diagnosis.verbose
    )


CONSOLE = FindingFormat(render)
