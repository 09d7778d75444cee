"""JUnit XML as Jenkins and GitLab read it: a suite per rank and host, a test per check."""

from __future__ import annotations

from collections.abc import Iterable
from xml.etree import ElementTree

from ncclep_bench.doctor.contract import LEVELS, Finding
from ncclep_bench.doctor.render import bounded
from ncclep_bench.model.toml_file import shown
from ncclep_bench.reporting.findings.contract import Diagnosis, FindingFormat


def render(diagnosis: Diagnosis) -> str:
    """Verdicts at or over `fail_on` are failures, milder ones are output of a test that passed, not_run is skipped."""
    failing = LEVELS[LEVELS.index(diagnosis.fail_on) :]
    suites: dict[tuple[str, int | None], dict[str, list[Finding]]] = {}
    for finding in diagnosis.findings:
        suites.setdefault((finding.host, finding.rank), {}).setdefault(finding.code, []).append(finding)
    root = ElementTree.Element("testsuites", name="ncclep-doctor")
    for (host, rank), tests in suites.items():
        place = "" if rank is None else f" rank {rank}"
        suite = ElementTree.SubElement(
            root, "testsuite", name=f"ncclep-doctor{place}{f' on {shown(host)}' * bool(host)}"
        )
        for code, findings in tests.items():
            _test(suite, code, findings, failing)
        _count(suite, [suite])
        suite.set("skipped", str(sum(test.find("skipped") is not None for test in suite)))
        if host:
            suite.set("hostname", shown(host))
    _count(root, root)
    ElementTree.indent(root)
    return ElementTree.tostring(root, encoding="unicode", xml_declaration=False).join(
        ('<?xml version="1.0" encoding="UTF-8"?>\n', "\n")
    )


def _test(suite: ElementTree.Element, code: str, findings: list[Finding], failing: tuple[str, ...]) -> None:
    # GitLab shows the first failure of a test alone, so that those of one check are one.
    family = code.rstrip("0123456789")
    name = f"{code} {shown(findings[0].title)}"
    test = ElementTree.SubElement(suite, "testcase", classname=f"ncclep-doctor.{family}", name=name, time="0")
    failed = [finding for finding in findings if finding.verdict in failing]
    if failed:
        worst = max(failed, key=lambda finding: LEVELS.index(finding.verdict))
        ElementTree.SubElement(test, "failure", type=worst.verdict, message=shown(worst.summary)).text = _text(failed)
    elif skipped := [finding for finding in findings if finding.verdict == "not_run"]:
        ElementTree.SubElement(test, "skipped", message=shown(skipped[0].summary))
    if milder := [finding for finding in findings if finding.verdict in LEVELS and finding not in failed]:
        ElementTree.SubElement(test, "system-out").text = _text(milder)


def _text(findings: Iterable[Finding]) -> str:
    lines: list[str] = []
    for finding in findings:
        lines += [f"{finding.verdict}: {finding.summary}", *bounded(finding.evidence)]
        lines += [f"→ {line}" for line in finding.remedy.splitlines()]
    return "\n".join(map(shown, lines))


def _count(element: ElementTree.Element, suites: Iterable[ElementTree.Element]) -> None:
    tests = [test for suite in suites for test in suite]
    failures = sum(test.find("failure") is not None for test in tests)
    element.attrib |= {"tests": str(len(tests)), "failures": str(failures), "errors": "0", "time": "0"}


JUNIT = FindingFormat(render)
