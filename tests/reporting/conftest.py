"""A small run with everything a report must show, built from the real records and written by the real writer."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ncclep_bench.model.case import Case
from ncclep_bench.model.measurement import Measurement, RunHeader
from ncclep_bench.results.frames import RunFrames, load_run
from ncclep_bench.results.store import RunWriter

HEADER = RunHeader(
    started_at="2026-11-29T12:00:00Z",
    command=["ncclep-bench", "sweep", "quick", "--np", "4"],
    scenarios=[
        {
            "name": "quick",
            "description": "Every collective, small sizes.",
            "reference": [
                {
                    "where": {"collective": "dispatch_combine", "batch_size": 64},
                    "column": "p99_us",
                    "value": 4700.0,
                    "source": "NCCL EP article (unverified)",
                    "note": "inconsistent: 12.4 to 4.7 ms is 62.1 %, not the 63.2 % it states",
                },
                {
                    "where": {"batch_size": 64},
                    "column": "p50_us",
                    "value": 12400.0,
                    "source": "NCCL EP article (unverified)",
                    "role": "traditional",
                },
                {"where": {"collective": "dispatch"}, "column": "gpu_util", "value": 89.0, "source": "article"},
            ],
        },
        {"name": "experts", "description": "Parameters of 8 to 64 experts."},
    ],
    environment={"host": "node-a", "cores": 2, "mpi": "MPICH 5.0.2", "python": "3.11.7"},
)

Samples = Callable[[float, int], list[list[float]]]


def _samples(draw: np.random.Generator, count: int = 40) -> Samples:
    def sample(median_us: float, ranks: int) -> list[list[float]]:
        return (median_us * draw.lognormal(0.0, 0.12, (count, ranks))).round(3).tolist()  # type: ignore[no-any-return]

    return sample


def _token_rows(sample: Samples) -> Iterator[Measurement]:
    shape: dict[str, Any] = {"scenario": "quick", "ranks": 4, "hidden": 1024, "num_experts": 8, "top_k": 2}
    factors = {"dispatch": 1.0, "combine": 1.3, "dispatch_combine": 2.2}
    for batch, (collective, factor) in itertools.product((8, 16, 32, 64, 128, 256), factors.items()):
        tokens = batch * 8
        base = factor * (60 + tokens * 0.4 + tokens * tokens * 2e-4)
        common = shape | {
            "tokens": tokens, "batch_size": batch, "tokens_per_sequence": 8, "routing": "zipf", "routing_param": 1.0,
        }  # fmt: skip
        figures: dict[str, Any] = {
            "outcome": "passed", "verified": True, "timing": "host", "cache": "warm", "setup_us": 5200.0,
            "oversubscribed": True, "payload_bytes": tokens * 2 * 4096 * 4, "minimal_bytes": tokens * 5 * 4096,
            "minimal_bytes_max_rank": tokens * 2 * 4096, "control_bytes": 512, "tokens_total": tokens * 4,
            "algbw_bytes": tokens * 2 * 4096, "busbw_factor": 0.75, "imbalance": 1.4, "wire_source": "counted",
        }  # fmt: skip
        for mode, layout in (("ht", "flat"), ("ht", "expert_major"), ("ll", "expert_major")):
            speed = {"flat": 1.0, "expert_major": 1.15}[layout] * {"ht": 1.0, "ll": 0.9}[mode]
            yield Measurement(
                case=Case(collective=collective, mode=mode, layout=layout, alignment=1, **common),  # type: ignore[arg-type]
                algorithm="shared windows", samples_us=sample(base * speed, 4), cold_us=[base * 4] * 4,
                update_us=[base * 0.2] * 3, wire_bytes=tokens * 5 * 4096, planned_bytes=tokens * 5 * 4096,
                partner="padded_all_to_all", **figures,
            )  # fmt: skip
        yield Measurement(
            case=Case(collective="padded_all_to_all", variant=collective, **common),
            algorithm="MPI_Alltoall", samples_us=sample(base * 2.3, 4), cold_us=[base * 6] * 4,
            update_us=[base * 0.3] * 3, wire_bytes=tokens * 12 * 4096, planned_bytes=tokens * 12 * 4096, **figures,
        )  # fmt: skip


def _parameter_rows(sample: Samples) -> Iterator[Measurement]:
    partners = {"all_gather_experts": "dense_all_gather", "reduce_scatter_expert_grads": "dense_all_reduce"}
    for experts, (collective, partner) in itertools.product((8, 16, 32, 64), partners.items()):
        shape: dict[str, Any] = {
            "scenario": "experts", "ranks": 4, "num_experts": experts, "expert_elements": 1 << 18, "dtype": "bfloat16",
        }  # fmt: skip
        block = experts << 19
        figures: dict[str, Any] = {
            "outcome": "passed", "verified": True, "timing": "host", "cache": "warm", "ece_bytes": block,
            "algbw_bytes": block, "busbw_factor": 0.75, "wire_source": "counted", "payload_bytes": block * 4,
        }  # fmt: skip
        for share in (0.25, 1.0):
            yield Measurement(
                case=Case(collective=collective, variant="registered", active_share=share, mr_cache_size=64, **shape),
                algorithm="shared windows", samples_us=sample(40 + share * block / 5e3, 4), partner=partner,
                wire_bytes=int(3 * block * share), counters={"mr_hits": 12.0, "mr_miss_us": 310.5}, **figures,
            )  # fmt: skip
        yield Measurement(
            case=Case(collective=partner, **shape),
            algorithm="MPI", samples_us=sample(60 + block / 4e3, 4), wire_bytes=3 * block, **figures,
        )  # fmt: skip


def _rows_without_a_time() -> Iterator[Measurement]:
    shape: dict[str, Any] = {"scenario": "quick", "ranks": 4, "hidden": 1024, "num_experts": 8, "top_k": 2}
    yield Measurement(
        case=Case(collective="dispatch", mode="ht", layout="flat", tokens=1 << 20, batch_size=1 << 17, **shape),
        outcome="waived", reason="needs 34.4 GiB of shared memory, /dev/shm has 12 GiB free",
    )  # fmt: skip
    yield Measurement(
        case=Case(collective="combine", mode="ht", layout="flat", tokens=96, batch_size=12, **shape),
        outcome="failed", verified=False, samples_us=[[1.0, 2.0, 3.0, 4.0]] * 10, partner="padded_all_to_all",
        reason="rank 2, row 17 of tokens: expected 0.25, got 0.5", cold_us=[9.0], update_us=[1.0],
    )  # fmt: skip
    yield Measurement(
        case=Case(collective="dispatch", mode="ll", layout="flat", tokens=96, batch_size=12, **shape),
        outcome="error", reason="rank 1 (pid 4711 on node-a, stopped) did not reach dispatch within 60.0 s",
    )  # fmt: skip


@pytest.fixture(scope="session")
def golden_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the small run."""
    directory = tmp_path_factory.mktemp("golden")
    sample = _samples(np.random.default_rng(7))
    with RunWriter(directory, HEADER) as writer:
        for record in (*_token_rows(sample), *_parameter_rows(sample), *_rows_without_a_time()):
            writer.append(record)
    return directory


@pytest.fixture(scope="session")
def golden(golden_run: Path) -> RunFrames:
    return load_run(golden_run)
