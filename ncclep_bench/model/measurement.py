"""One case's result as it lies in run.jsonl, and the one table of report columns."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, Literal, NamedTuple

import msgspec
from msgspec import Meta

from ncclep_bench import units
from ncclep_bench.model.case import Case

SCHEMA_VERSION = 1

Outcome = Literal["passed", "failed", "error", "waived"]

# A file may come from anywhere, and frames hold 64 bits.
_Whole = Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]
_Elapsed = Annotated[float, Meta(ge=0)]


class Measurement(msgspec.Struct, frozen=True, kw_only=True, tag="case", tag_field="kind"):
    """Everything that was measured of one case; raw samples, from which statistics are derived on reading.

    `samples_us[i][r]`: microseconds of iteration i on rank r, `cold_us[r]`: first call, `update_us[i]`: slowest rank's
    `update`. `verified`: True, False, or None when the case was waived or did not finish. Byte counts are sums over
    ranks of one launch. `ece_bytes` (0: no ECE), `algbw_bytes` and `busbw_factor` are what a rate divides by the time.
    `counters`: what the transport reports beside (cache hits, rebuilds), keyed by column name.
    `repeat`: number of the process set under --repeats.
    """

    case: Case
    outcome: Outcome
    reason: str = ""
    verified: bool | None = None
    repeat: _Whole = 0
    started_at: str = ""
    hosts: _Whole = 1
    oversubscribed: bool = False
    algorithm: str = ""
    timing: str = ""
    cache: str = ""
    num_sms: _Whole | None = None
    samples_us: list[list[_Elapsed]] = []
    cold_us: list[_Elapsed] = []
    setup_us: _Elapsed | None = None
    update_us: list[_Elapsed] = []
    payload_bytes: _Whole | None = None
    wire_bytes: _Whole | None = None
    wire_source: str = ""
    planned_bytes: _Whole | None = None
    minimal_bytes: _Whole | None = None
    minimal_bytes_max_rank: _Whole | None = None
    control_bytes: _Whole | None = None
    ece_bytes: _Whole = 0
    algbw_bytes: _Whole = 0
    busbw_factor: float = 0.0
    partner: str = ""
    tokens_total: _Whole = 0
    imbalance: float | None = None
    distinct_ranks_per_token: float | None = None
    hottest_expert: float | None = None
    load_cv: float | None = None
    predicted_us: float | None = None
    model_error: float | None = None
    counters: dict[str, float] = {}


class Remark(msgspec.Struct, frozen=True, kw_only=True):
    """A finding of the doctor as a run keeps it."""

    code: str
    verdict: str
    title: str
    summary: str
    evidence: list[str] = []
    remedy: str = ""


class Preflight(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What the doctor said before the first case: `counts` per verdict, warnings and errors, or why it said nothing."""

    counts: dict[str, _Whole] = {}
    findings: list[Remark] = []
    failure: str = ""


class RunHeader(msgspec.Struct, frozen=True, kw_only=True, tag="run", tag_field="kind"):
    """First line of run.jsonl: what ran where. `scenarios`: their text and references; `environment`: flat facts.

    `preflight`: what the doctor said before the first case, None where it was not asked.
    """

    schema_version: int = SCHEMA_VERSION
    started_at: str
    command: list[str]
    scenarios: list[dict[str, Any]]
    environment: dict[str, Any]
    preflight: Preflight | None = None


class Column(NamedTuple):
    """A report column: name, unit, how a value is shown, and what it means."""

    name: str
    unit: str
    show: Callable[[Any], str]
    meaning: str


def _number(value: float) -> str:
    return f"{value:.4g}"


def _count(value: float) -> str:
    return f"{value:,.0f}"


def _us(value: float) -> str:
    return f"{value:,.1f}" if value < 1e4 else f"{value:,.0f}"


def _share(value: float) -> str:
    return f"{value:.1%}"


def _columns(*groups: tuple[str, Callable[[Any], str], dict[str, str]]) -> dict[str, Column]:
    return {name: Column(name, unit, show, meaning) for unit, show, group in groups for name, meaning in group.items()}


# fmt: off
COLUMNS: dict[str, Column] = _columns(
    ("", str, {
        "scenario": "scenario file the case comes from",
        "case": "identity of the case: every axis that is set",
        "collective": "operation measured",
        "backend": "who moved the rows",
        "mode": "ll: fixed-capacity slots, no exchange of counts; ht: counts first, exact sizes",
        "layout": "order of received rows: flat, expert_major, rank_major",
        "algorithm": "how rows reached the peers",
        "variant": "kind of buffers of a parameter collective, or the EP operation a padded_all_to_all stands beside",
        "timing": "host, eager or graph",
        "cache": "warm: as the last operation left it; cold: the device's cache is flushed before each operation",
        "ranks": "ranks of the group",
        "hosts": "hosts these ranks ran on",
        "oversubscribed": "more ranks than cores",
        "tokens": "tokens per rank",
        "batch_size": "sequences per rank",
        "hidden": "elements of one token",
        "num_experts": "experts of the layer",
        "experts_per_rank": "most experts on one rank",
        "expert_elements": "elements of one expert's parameters",
        "placement": "which rank holds which expert",
        "top_k": "experts per token",
        "dtype": "element type of the rows",
        "alignment": "rows an expert's block is padded to",
        "routing": "how tokens choose experts",
        "routing_param": "parameter of the routing",
        "masked_share": "share of choices set to -1",
        "empty_ranks": "ranks without tokens",
        "active_share": "mean of needed[rank, expert] or has_gradient[rank, expert]",
        "mr_cache_size": "registrations kept per rank",
        "user_memory": "the user's own buffers: 2 MiB aligned (empty too), unaligned, or from a stream-ordered pool",
        "tokens_per_sequence": "tokens of one sequence",
        "chain": "dispatch + combine pairs per sample",
        "transport": "shared windows, messages, or chosen per peer",
        "seed": "seed of routing, activation and inputs",
        "topology": "topology-aware routing: off, or what was used",
        "num_sms": "streaming multiprocessors given to the operation",
        "window": "buffers registered with NCCL or NCCL EP: off, symmetric windows, or these without blocks of its own",
        "repeat": "number of the process set",
        "outcome": "passed, failed (wrong rows), error (did not finish), waived (not applicable here)",
        "reason": "why the outcome is not passed",
        "verified": "whether the rows were right; empty when waived",
        "samples": "timed iterations",
    }),
    ("us", _us, {
        "p50_us": "median of the slowest rank's times",
        "p90_us": "90th percentile of the slowest rank's times",
        "p95_us": "95th percentile of the slowest rank's times",
        "p99_us": "99th percentile of the slowest rank's times",
        "min_us": "fastest iteration",
        "max_us": "slowest iteration",
        "ci_low_us": "lower end of the 95 % confidence interval of the median",
        "ci_high_us": "upper end of the 95 % confidence interval of the median",
        "cold_us": "first call of the slowest rank; on GPUs from the call until the device is done",
        "eager_us": "timing graph: median of single launches, from event to event, of the slowest rank",
        "call_us": "on GPUs: median of the host's time for a call, which only enqueues, of the slowest rank",
        "warmed_us": "first timed call of the slowest rank, after warm-up calls",
        "setup_us": "slowest rank's preparation: buffers, windows, mappings",
        "update_us": "median of the slowest rank's update: new routing into the same buffers",
    }),
    ("", str, {"slowest_rank": "rank that was slowest most often"}),
    ("B", units.format_bytes, {
        "payload_bytes": "every valid (token, expert) choice x row, or delivered parameter blocks",
        "wire_bytes": "bytes moved to or from another rank, once, by the rank that moves them",
    }),
    ("", str, {"wire_source": "counted by our transports as they copy, or nominal inside MPI or NCCL"}),
    ("B", units.format_bytes, {
        "planned_bytes": "wire bytes that the row plan predicts",
        "link_bytes": "data that NVLink's own counters saw sent per launch, control bytes among them",
        "minimal_bytes": "distinct (row, remote rank) pairs x row: the least any algorithm moves",
        "minimal_bytes_max_rank": "largest of what one rank must send or receive",
        "control_bytes": "counts, bitmaps, flags, and what goes with the weights",
    }),
    ("us", _us, {"flag_us": "one way of a word through peer memory, measured in this run"}),
    ("GB/s", _number, {"copy_gbps": "peer copies of 256 MiB, pushed by copy engines, all ranks at once, in this run"}),
    ("", _share, {
        "speed_of_light": "(flag_us + minimal_bytes_max_rank / copy_gbps) / p50: 1 is as fast as can be",
        "gpu_util": "looped for 2 s, mean of all ranks: share of time with a kernel at work, one that spins too",
        "sm_util": "in that loop: share of multiprocessors at work, those that spin too",
    }),
    ("GB/s", _number, {
        "dram_gbps": "in that loop: memory traffic, read and written, of one GPU",
        "nvlink_tx_gbps": "in that loop: data that the links of one GPU sent",
        "nvlink_rx_gbps": "in that loop: data that the links of one GPU received",
    }),
    ("", _number, {
        "overlap_comm": "time of an operation beside matrix products on its GPU / alone, of the slowest rank",
        "overlap_gemm": "time of a matrix product beside operations, on what num_sms leaves / alone on the whole GPU",
    }),
    ("GB/s", _number, {
        "ece_gbps": "num_experts x bytes of one expert / p50, whole group; an effective rate, may exceed the link's",
    }),
    ("", _share, {
        "tag": "(T_traditional - T_ep) / T_traditional, same case, same run or runs of one machine reported together",
        "saved_share": "1 - wire_bytes / wire_bytes of the traditional partner",
    }),
    ("", _number, {
        "times_cuda": "p50 / p50 of the cuda backend, same case, timing and machine: above 1, cuda is faster",
    }),
    ("GB/s", _number, {
        "algbw_gbps": "per-rank payload (token collectives) or nccl-tests size / p50",
        "busbw_gbps": "algbw x the nccl-tests factor",
        "ep_bench_01_gbps": "p50 with the bytes of NCCL EP's ep_bench 0.1: mode ll choices x row, ht a row per rank",
        "ep_bench_gbps": "the same with those of 0.2: dispatch of mode ll a row per rank as well",
        "deepep_gbps": "the same with DeepEP's logical bytes: mode ll choices x row with scales, ht a row per rank",
    }),
    ("1/s", _count, {"tokens_per_s": "tokens of all ranks / p50"}),
    ("", _number, {
        "imbalance": "largest rank load / mean rank load",
        "distinct_ranks_per_token": "mean number of ranks a token goes to",
        "hottest_expert": "tokens of the hottest expert / mean",
        "load_cv": "coefficient of variation of tokens per expert",
    }),
    ("us", _us, {"predicted_us": "time a model predicts; measured and simulated never share a column"}),
    ("", _share, {"model_error": "error the model states for its prediction"}),
    ("", _number, {
        "mr_hits": "registration cache hits per launch, all ranks",
        "mr_misses": "registration cache misses per launch, all ranks",
        "mr_evictions": "registrations dropped per launch, all ranks",
        "mr_staged": "rows that peers read per launch, copied from memory that cannot be registered, all ranks",
    }),
    ("us", _us, {
        "mr_miss_us": "mean cost of a miss: create, touch and map at every peer",
        "channel_rebuild_us": "mean cost of rebuilding the channels to one peer",
    }),
    ("", _number, {"channel_rebuilds": "channel rebuilds of the case, all ranks"}),
    ("", _share, {"channel_utilisation": "share of open channels that carried bytes in the last launch"}),
)
# fmt: on
"""Every column, in report order; CSV header, HTML, console and filters read it from here."""
