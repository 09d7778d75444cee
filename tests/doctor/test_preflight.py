"""The checks before a sweep: fast, and nothing that is stuck or wrong keeps the sweep."""

from __future__ import annotations

import pytest

from ncclep_bench.doctor.contract import Finding
from ncclep_bench.doctor.preflight import look, record
from ncclep_bench.doctor.run import all_checks
from ncclep_bench.errors import CannotRunError


def test_every_check_says_something_before_a_sweep() -> None:
    assert {finding.code for finding in look(4)} == {check.code for check in all_checks()}


def test_a_machine_that_does_not_answer_in_time_is_not_waited_for() -> None:
    with pytest.raises(CannotRunError, match=r"not finished after 1e-05 s"):
        look(4, deadline_s=1e-5)


def test_the_record_keeps_warnings_and_errors_the_worst_first_and_counts_the_rest() -> None:
    verdicts = ["ok", "warning", "info", "error", "not_run", "ok"]
    findings = [
        Finding(code=f"EP00{n}", verdict=verdict, title="t", summary=f"s{n}", evidence=("e",) * 1000, host="secret")  # type: ignore[arg-type]
        for n, verdict in enumerate(verdicts)
    ]

    preflight = record(findings)

    assert preflight.counts == {"ok": 2, "warning": 1, "info": 1, "error": 1, "not_run": 1}
    assert [(remark.code, remark.verdict) for remark in preflight.findings] == [
        ("EP003", "error"),
        ("EP001", "warning"),
    ]
    assert len(preflight.findings[0].evidence) < 50
