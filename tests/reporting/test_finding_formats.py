"""Findings in every format: complete, the same each time, and text of a stranger stays text."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Sequence
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from markdown_it import MarkdownIt

from ncclep_bench.doctor.contract import Finding, Verdict
from ncclep_bench.doctor.render import MOST_CHARACTERS, MOST_LINES
from ncclep_bench.registry import FINDING_FORMATS
from ncclep_bench.reporting.findings.contract import Diagnosis

HOSTILE = "</code></failure>]]><script>alert(1)</script>\x1b[2J\x00\ufffe\ud800\n::error::x`` | [a](b) ```{{ 7*7 }}%0A"

FINDINGS = [
    Finding(code="EP001", verdict="ok", title="Experts divide", summary="", rank=0, host="a"),
    Finding(
        code="NCCL001",
        verdict="warning",
        title="InfiniBand is in use",
        summary="InfiniBand is off",
        evidence=("NCCL_IB_DISABLE=1 (environment)",),
        remedy="unset NCCL_IB_DISABLE",
        rank=0,
        host="a",
    ),
    Finding(
        code="LIM001",
        verdict="error",
        title="Memory can be locked",
        summary="only 64 KiB: 100 % of ranks, all",
        evidence=("/proc/self/limits: 65536",),
        remedy="ulimit -l unlimited\nsystemctl restart x",
        rank=0,
        host="a",
    ),
    Finding(
        code="LIM001",
        verdict="error",
        title="Memory can be locked",
        summary="only 64 KiB: 100 % of ranks, all",
        evidence=("/proc/self/limits: 65536",),
        remedy="ulimit -l unlimited\nsystemctl restart x",
        rank=1,
        host="b",
    ),
    Finding(code="GPU001", verdict="info", title="GPUs are known", summary="a new model", rank=1, host="b"),
    Finding(code="IB001", verdict="not_run", title="Ports are up", summary="needs rdma.ports: no such folder"),
]


def shown(name: str, findings: Sequence[Finding] = FINDINGS, fail_on: Verdict = "error", failure: str = "") -> str:
    return FINDING_FORMATS.get(name).render(Diagnosis(findings, fail_on=fail_on, failure=failure))  # type: ignore[no-any-return]


def finding(text: str, verdict: Verdict) -> Finding:
    return Finding(code="EP001", verdict=verdict, title=text, summary=text, evidence=(text,), remedy=text, host=text)


@pytest.mark.parametrize("name", list(FINDING_FORMATS))
def test_every_format_names_every_problem_and_is_the_same_each_time(name: str) -> None:
    text = shown(name)

    assert text == shown(name)
    for code in ("LIM001", "NCCL001"):
        assert code in text
    assert text.endswith("\n")


@pytest.mark.parametrize("name", list(FINDING_FORMATS))
@pytest.mark.parametrize("verdict", ["ok", "not_run"])
def test_every_format_renders_what_is_healthy_what_could_not_run_and_nothing_at_all(name: str, verdict: Verdict):
    assert shown(name, [Finding(code="EP001", verdict=verdict, title="t", summary="s")])
    assert shown(name, [])


@pytest.mark.parametrize("name", [name for name in FINDING_FORMATS if name != "json"])
def test_evidence_of_any_length_stays_readable_on_a_page(name: str) -> None:
    long = Finding(
        code="EP001", verdict="error", title="t", summary="s", evidence=tuple(f"{n} " + "x" * 9000 for n in range(3000))
    )

    assert len(shown(name, [long])) < 2 * MOST_LINES * MOST_CHARACTERS
    assert len(json.loads(shown("json", [long]))["findings"][0]["evidence"]) == 3000


@pytest.mark.parametrize("name", list(FINDING_FORMATS))
def test_no_text_of_a_finding_drives_a_terminal(name: str) -> None:
    text = shown(name, [finding(HOSTILE, verdict) for verdict in ("error", "warning", "info", "not_run", "ok")])

    assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f\ufffe\ud800]", text)


def test_a_check_counts_once_however_many_ranks_it_ran_on() -> None:
    ranks = [Finding(code="EP001", verdict="ok", title="t", summary="", rank=rank, host="a") for rank in range(4)]
    odd = Finding(code="EP002", verdict="not_run", title="t", summary="s", rank=3, host="a")
    others = [Finding(code="EP002", verdict="ok", title="t", summary="", rank=rank, host="a") for rank in range(3)]

    assert shown("console", [*ranks, *others, odd]).splitlines()[-1] == "1 ok, 1 not run"
    assert {finding["rank"] for finding in json.loads(shown("json", ranks))["findings"]} == {0, 1, 2, 3}


def test_the_console_sums_up_what_did_not_run_and_says_all_of_it_when_asked() -> None:
    findings = [
        Finding(code=f"GPU{number:03}", verdict="not_run", title="t", summary=f"needs gpus.x{'y' * number}: {reason}")
        for number, reason in enumerate(["no driver"] * 30 + [f"no tool {letter}" for letter in "abcdefgh"])
    ]
    diagnosis = Diagnosis(findings)
    render = FINDING_FORMATS.get("console").render

    *lines, last = render(diagnosis).splitlines()
    assert lines[0] == "- 30 not run: no driver"
    assert lines[-1] == "- 4 not run for 4 other reasons: --verbose"
    assert (len(lines), last) == (6, "0 ok, 38 not run")
    full = render(replace(diagnosis, verbose=True))
    assert all(finding.code in full for finding in findings)


def test_junit_is_a_suite_per_place_with_a_failure_for_what_fails_the_command() -> None:
    root = ElementTree.fromstring(shown("junit"))

    assert root.tag == "testsuites"
    assert [(suite.get("name"), suite.get("hostname")) for suite in root] == [
        ("ncclep-doctor rank 0 on a", "a"),
        ("ncclep-doctor rank 1 on b", "b"),
        ("ncclep-doctor", None),
    ]
    assert {name: root.get(name) for name in ("tests", "failures", "errors")} == {
        "tests": "6", "failures": "2", "errors": "0",
    }  # fmt: skip
    assert [suite.get("skipped") for suite in root] == ["0", "0", "1"]
    tests = {test.get("name"): test for test in root.iter("testcase")}
    (failure,) = tests["LIM001 Memory can be locked"]
    assert (failure.tag, failure.get("type")) == ("failure", "error")
    assert failure.text is not None
    assert failure.text.splitlines()[1:] == [
        "/proc/self/limits: 65536", "→ ulimit -l unlimited", "→ systemctl restart x",
    ]  # fmt: skip
    assert [child.tag for child in tests["NCCL001 InfiniBand is in use"]] == ["system-out"]
    assert tests["IB001 Ports are up"][0].get("message") == "needs rdma.ports: no such folder"
    assert len(tests["EP001 Experts divide"]) == 0
    strict = ElementTree.fromstring(shown("junit", fail_on="warning"))
    assert strict.get("failures") == "3"


def test_junit_has_only_elements_and_attributes_that_the_schema_of_jenkins_has() -> None:
    allowed = {
        "testsuites": {"name", "time", "tests", "failures", "errors"},
        "testsuite": {"name", "time", "tests", "failures", "errors", "skipped", "hostname"},
        "testcase": {"name", "time", "classname"},
        "failure": {"type", "message"},
        "skipped": {"type", "message"},
        "system-out": set(),
    }
    for element in ElementTree.fromstring(shown("junit")).iter():
        assert set(element.keys()) <= allowed[element.tag]


def test_github_annotations_are_escaped_as_the_runner_reads_them() -> None:
    assert shown("github").splitlines() == [
        "::error title=LIM001 Memory can be locked::only 64 KiB: 100 %25 of ranks, all [rank 0 on a, rank 1 on b]"
        "%0A/proc/self/limits: 65536%0A→ ulimit -l unlimited%0A→ systemctl restart x",
        "::warning title=NCCL001 InfiniBand is in use::InfiniBand is off [rank 0 on a]"
        "%0ANCCL_IB_DISABLE=1 (environment)%0A→ unset NCCL_IB_DISABLE",
        "::notice title=GPU001 GPUs are known::a new model [rank 1 on b]",
        "ncclep-doctor: 1 ok, 1 note, 1 warning, 1 error, 1 not run",
    ]


def test_nagios_is_one_line_with_figures_behind_its_only_bar() -> None:
    assert shown("nagios") == (
        "NCCLEP CRITICAL - 1 ok, 1 note, 1 warning, 1 error, 1 not run: LIM001 only 64 KiB: 100 % of ranks, all "
        "[rank 0 on a, rank 1 on b]; NCCL001 InfiniBand is off [rank 0 on a] "
        "| errors=1;;0;0 warnings=1;0;;0 notes=1;;;0 ok=1;;;0 not_run=1;;;0\n"
    )


@pytest.mark.parametrize(
    ("verdicts", "code", "word"),
    [
        (["ok", "not_run"], 0, "OK"),
        (["ok", "info"], 0, "OK"),
        (["ok", "warning"], 1, "WARNING"),
        (["warning", "error", "not_run"], 2, "CRITICAL"),
        (["not_run"], 3, "UNKNOWN"),
        ([], 3, "UNKNOWN"),
    ],
)
def test_nagios_tells_ok_warning_critical_and_unknown_apart(verdicts: list[Verdict], code: int, word: str) -> None:
    findings = [finding("text", verdict) for verdict in verdicts]

    assert FINDING_FORMATS.get("nagios").exit_code(findings) == code
    assert shown("nagios", findings).startswith(f"NCCLEP {word} - ")


def test_nagios_says_why_nothing_could_be_checked() -> None:
    assert shown("nagios", [], failure="a: no | such\n  file") == "NCCLEP UNKNOWN - a: no / such   file\n"


TEXTS = st.text(st.characters(exclude_categories=()), max_size=60) | st.lists(
    st.sampled_from(
        [
            "`",
            "``",
            "|",
            "<b>",
            "&lt;",
            "\n",
            "%0A",
            "::error::",
            "](x)",
            "*",
            "_",
            "\\",
            "- ",
            "~~",
            "a ",
            "---",
            "+ ",
            "1. ",
            "2) ",
            "===",
            "    ",
        ]
    ),
    max_size=12,
).map("".join)
VERDICTS = st.sampled_from(["ok", "info", "warning", "error", "not_run"])


@given(st.lists(st.builds(finding, TEXTS, VERDICTS), max_size=4))
@settings(max_examples=150, deadline=None)
def test_any_text_gives_well_formed_xml_and_one_line_per_problem(findings: list[Finding]) -> None:
    root = ElementTree.fromstring(shown("junit", findings))
    tests = list(root.iter("testcase"))
    assert int(root.get("tests", "")) == len(tests)
    assert int(root.get("failures", "")) == sum(test.find("failure") is not None for test in tests)

    assert shown("nagios", findings).count("\n") == 1
    assert shown("nagios", findings).count("|") == (len(findings) > 0)
    *commands, last = shown("github", findings).split("\n")[:-1]
    assert all(re.match(r"::(error|warning|notice) title=EP001 [^:,]*::[^\n]*$", line) for line in commands)
    assert not last.startswith("::")


@given(st.builds(finding, TEXTS, VERDICTS))
@settings(max_examples=150, deadline=None)
def test_any_text_stays_text_in_markdown(one: Finding) -> None:
    tokens = MarkdownIt("commonmark", {"html": True}).enable(["table", "strikethrough"]).parse(shown("markdown", [one]))
    kinds = {token.type for token in tokens} | {child.type for token in tokens for child in token.children or ()}

    assert kinds <= {
        "heading_open", "heading_close", "inline", "paragraph_open", "paragraph_close", "text", "text_special", "fence",
        "code_inline", "bullet_list_open", "bullet_list_close", "list_item_open", "list_item_close", "table_open",
        "table_close", "thead_open", "thead_close", "tbody_open", "tbody_close", "tr_open", "tr_close", "th_open",
        "th_close", "td_open", "td_close",
    }  # fmt: skip
    assert sum(token.type == "td_open" for token in tokens) in (0, 3)


class Tags(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.seen: set[str] = set()
        self.text = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.add(tag)

    def handle_data(self, data: str) -> None:
        self.text += data


def test_the_page_has_no_script_asks_nothing_of_the_network_and_shows_hostile_text_as_text() -> None:
    page = shown("html", [finding(HOSTILE, "error"), finding(HOSTILE, "not_run")])
    tags = Tags()
    tags.feed(page)

    assert not tags.seen & {"script", "link", "img", "iframe", "object"}
    assert "default-src 'none'" in page
    assert not re.search(r"(src|href)=", page)
    assert "<script>alert(1)</script>\\x1b[2J" in tags.text
    assert "{{ 7*7 }}" in tags.text


_PHONE = """\
<!doctype html><iframe id="page" style="width: 390px; height: 900px; border: 0"></iframe><p id="wide"></p><script>
const frame = document.getElementById("page");
frame.onload = () => {
  const all = [...frame.contentDocument.querySelectorAll("body, body *")];
  const style = (element) => frame.contentWindow.getComputedStyle(element).display;
  const wide = all.filter((e) => style(e) !== "inline" && e.scrollWidth > e.clientWidth + 1);
  document.getElementById("wide").textContent =
    `${all.length > 20 ? "looked" : "blank"}: ${wide.map((e) => e.tagName + " " + e.className).join(" | ")};`;
};
frame.srcdoc = PAGE;
</script>
"""


@pytest.mark.browser
def test_on_a_telephone_nothing_of_the_page_is_cut_off_or_scrolls_sideways(tmp_path: Path) -> None:
    """Long commands, evidence and lists of codes are wrapped."""
    remedy = "sed -i '/^NCCL_P2P_DISABLE=/d' /a/long/path/of/a/file.conf   # " + "why " * 30
    long = msgspec.structs.replace(FINDINGS[1], remedy=remedy)
    reason = "needs what a sentence of some length tells, and what to paste: ncclep-doctor check --from FILE"
    unrun = [Finding(code=f"EP{n:03}", verdict="not_run", title="x", summary=reason) for n in range(60)]
    page = shown("html", [*FINDINGS, long, *unrun])
    outer = tmp_path / "phone.html"
    outer.write_text(_PHONE.replace("PAGE", json.dumps(page).replace("</", "<\\/")))
    done = subprocess.run(
        ["chromium", "--headless=new", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'profile'}",
         "--virtual-time-budget=20000", "--dump-dom", outer.as_uri()],
        capture_output=True, text=True, timeout=300, check=True,
    )  # fmt: skip
    (wide,) = re.findall(r'<p id="wide">(.*?)</p>', done.stdout, re.DOTALL)

    assert wide == "looked: ;"
