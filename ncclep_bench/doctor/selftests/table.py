"""Which self-tests there are, and which of them are meant."""

from __future__ import annotations

from ncclep_bench.doctor.selftests.contract import SelfTest
from ncclep_bench.registry import SELF_TESTS


def all_self_tests() -> list[SelfTest]:
    """Every self-test, by code."""
    return sorted((test for family in SELF_TESTS for test in SELF_TESTS.get(family)), key=lambda test: test.code)


def self_test_named(code: str) -> SelfTest:
    """The self-test with exactly this code."""
    return next(test for test in all_self_tests() if test.code == code)
