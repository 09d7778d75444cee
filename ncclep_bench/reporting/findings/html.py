"""One self-contained page without scripts: problems with evidence and remedy, what could not run, what is healthy."""

from __future__ import annotations

from ncclep_bench.doctor.render import bounded, counts, healthy, listed, not_run, problems
from ncclep_bench.model.toml_file import shown
from ncclep_bench.reporting.findings.contract import Diagnosis, FindingFormat


def render(diagnosis: Diagnosis) -> str:
    """The page; it asks nothing of the network."""
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("ncclep_bench.reporting"), autoescape=True, trim_blocks=True, lstrip_blocks=True,
        undefined=jinja2.StrictUndefined, finalize=lambda value: shown(value) if isinstance(value, str) else value,
    )  # fmt: skip
    environment.filters |= {"bounded": bounded, "listed": listed}
    found = counts(diagnosis.findings)
    page = environment.get_template("findings.html.j2").render(
        host=diagnosis.host,
        counts={label: found[verdict] for verdict, label in _LABELS.items()},
        problems=problems(diagnosis.findings, worst_first=diagnosis.worst_first),
        not_run=not_run(diagnosis.findings),
        healthy=healthy(diagnosis.findings),
    )
    return f"{page}\n"


_LABELS = {"error": "errors", "warning": "warnings", "info": "notes", "ok": "ok", "not_run": "not run"}

HTML = FindingFormat(render)
