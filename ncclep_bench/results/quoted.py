"""Rates as other benchmarks quote them: the same time, with the bytes that their authors count."""

from __future__ import annotations

from typing import NamedTuple

from ncclep_bench.model.dtype import SCALE_BLOCK, dtype_named
from ncclep_bench.model.measurement import Measurement
from ncclep_bench.units import gbps

_DEEPEP_MESSAGE_BYTES = 16
"""Of each float8 row in DeepEP's low latency: its source token, in a header."""


class Quoted(NamedTuple):
    """GB/s per rank, the mean over ranks, at the median time; the own rank's rows count everywhere."""

    ep_bench_01_gbps: float
    ep_bench_gbps: float
    deepep_gbps: float


def quoted(record: Measurement, p50_us: float) -> Quoted | None:
    """What others would quote for a dispatch or combine; None for anything else.

    Definitions: NCCL EP's ep_bench of 0.1 (contrib/nccl_ep) and of 0.2 (nccl-extensions 0.1.0), which count a row of
    mode ll once per choice, and since 0.2 in dispatch, and in combine of layout rank_major, once per rank; DeepEP's
    tests/legacy and tests/elastic (`deepseek-ai/DeepEP`), which count once per choice in low latency, else once per
    rank.
    """
    case = record.case
    hidden, payload_bytes = case.hidden or 0, record.payload_bytes or 0
    if case.collective not in ("dispatch", "combine") or not payload_bytes or not record.distinct_ranks_per_token:
        return None
    dtype = dtype_named(case.dtype)
    row = hidden * dtype.itemsize
    scales = -(-hidden // SCALE_BLOCK) * 4 if dtype.scaled else 0
    choices = payload_bytes / (row + scales) / case.ranks
    visits = record.distinct_ranks_per_token * record.tokens_total / case.ranks
    low_latency = case.mode == "ll"
    once_per_rank = case.collective == "dispatch" or case.layout == "rank_major"
    header = _DEEPEP_MESSAGE_BYTES if low_latency and dtype.scaled else 0
    return Quoted(
        gbps((choices if low_latency else visits) * row, p50_us),
        gbps((choices if low_latency and not once_per_rank else visits) * row, p50_us),
        gbps((choices if low_latency else visits) * (row + scales + header), p50_us),
    )
