"""Rates with other people's bytes come out as these people published them."""

from __future__ import annotations

from typing import Any

import pytest

from ncclep_bench.model.case import Case
from ncclep_bench.model.measurement import Measurement
from ncclep_bench.results.quoted import quoted

CHOICES = 1014
"""Of 128 tokens x top-8, ten of them masked, as both benchmarks do."""


def record(collective: str, *, visits: float, row_bytes: int, choices: int = CHOICES, **axes: Any) -> Measurement:
    ranks, tokens = 8, axes.pop("tokens", 128)
    case = Case(collective=collective, ranks=ranks, tokens=tokens, hidden=7168, num_experts=256, top_k=8, **axes)
    return Measurement(
        case=case,
        outcome="passed",
        payload_bytes=choices * row_bytes * ranks,
        tokens_total=tokens * ranks,
        distinct_ranks_per_token=visits,
    )


def test_deepep_counts_scales_and_a_header_with_each_choice_of_low_latency():
    # 77 us and 98 GB/s on 8 x H800: README of DeepEP V1.
    shown = quoted(record("dispatch", visits=5.3, row_bytes=7168 + 224, mode="ll", dtype="float8_e4m3fn"), 77)

    assert shown is not None
    assert shown.deepep_gbps == pytest.approx(98, abs=0.5)


def test_ep_bench_counted_choices_in_0_1_and_counts_ranks_since():
    # 224.3 GB/s on 8 x H100 in 64.8 us: contrib/nccl_ep/README.md of NCCL 2.30.7.
    shown = quoted(record("dispatch", visits=5.295, row_bytes=14336, mode="ll", dtype="bfloat16"), 64.8)

    assert shown is not None
    assert shown.ep_bench_01_gbps == pytest.approx(224.3, abs=0.1)
    assert shown.ep_bench_01_gbps / shown.ep_bench_gbps == pytest.approx(CHOICES / (5.295 * 128))


@pytest.mark.parametrize(("layout", "factor"), [("expert_major", 1.0), ("rank_major", CHOICES / (5.295 * 128))])
def test_combine_of_low_latency_counts_ranks_in_rank_major_alone(layout: str, factor: float):
    shown = quoted(record("combine", visits=5.295, row_bytes=14336, mode="ll", layout=layout, dtype="bfloat16"), 78.5)

    assert shown is not None
    assert shown.ep_bench_01_gbps == pytest.approx(185.2, abs=0.1)
    assert shown.ep_bench_01_gbps / shown.ep_bench_gbps == pytest.approx(factor)


@pytest.mark.parametrize("collective", ["dispatch", "combine"])
def test_high_throughput_counts_a_row_per_rank_everywhere(collective: str):
    prefill = record(
        collective,
        visits=1.993,
        row_bytes=14336,
        choices=32768,
        mode="ht",
        dtype="bfloat16",
        tokens=4096,
        layout="flat",
    )

    shown = quoted(prefill, 100)

    assert shown is not None
    assert [*shown] == pytest.approx([1.993 * 4096 * 14336 / 100e3] * 3)


def test_what_nobody_quotes_has_no_such_rate():
    assert quoted(record("dispatch_combine", visits=2, row_bytes=14336, mode="ll", dtype="bfloat16"), 100) is None
    assert quoted(record("dispatch", visits=0, row_bytes=14336, mode="ll", dtype="bfloat16", choices=0), 100) is None
