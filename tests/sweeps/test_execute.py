from __future__ import annotations

from typing import Any

import msgspec
import pytest

from ncclep_bench.collectives.contract import Collective
from ncclep_bench.model.measurement import COLUMNS, Measurement
from ncclep_bench.model.scenario import Timing
from ncclep_bench.registry import BACKENDS, COLLECTIVES
from ncclep_bench.runtime.world import SelfGroup
from ncclep_bench.sweeps.execute import UPDATES, Routings, measure
from ncclep_bench.sweeps.job import Source
from tests.cases import make_case, make_problem

SOURCE = Source(Timing(warmup=1, min_samples=6, max_samples=6), {}, ".")


@pytest.fixture(autouse=True)
def faulty_backends(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("wrong_value", "wrong_later", "extra_copy", "full", "choosy", "on_device"):
        monkeypatch.setitem(BACKENDS.table, name, f"tests.sweeps.faulty:{name.upper()}")


def measured(collective: str, backend: str = "in_memory", **axes: Any) -> Measurement:
    return measure(
        make_case(collective, backend=backend, **axes), SOURCE, SelfGroup(), Routings(), lambda operation: None
    )


@pytest.mark.parametrize("collective", list(COLLECTIVES))
def test_every_collective_is_verified_timed_and_counted(collective: str) -> None:
    record = measured(collective)

    definition: Collective = COLLECTIVES.get(collective)
    figures = definition.bytes(make_problem(record.case))
    assert (record.outcome, record.reason, record.verified) == ("passed", "", True)
    assert len(record.samples_us) == 6
    assert all(sample[0] > 0 for sample in record.samples_us)
    assert len(record.cold_us) == 1
    assert len(record.update_us) == UPDATES
    assert record.wire_bytes == record.planned_bytes == figures.planned > 0
    assert record.payload_bytes == figures.payload
    assert (record.partner or None) == definition.partner
    assert (record.imbalance is not None) == (record.case.routing is not None)
    assert set(record.counters) <= set(COLUMNS)


@pytest.mark.parametrize(("backend", "when"), [("wrong_value", "before timing"), ("wrong_later", "after timing")])
def test_wrong_rows_fail_a_case_and_leave_it_without_times(backend: str, when: str) -> None:
    record = measured("dispatch", backend)

    assert (record.outcome, record.verified) == ("failed", False)
    assert "rank 3: topk_weights row 0 column 0 is " in record.reason
    assert when in record.reason
    assert (record.samples_us, record.cold_us, record.update_us, record.setup_us) == ([], [], [], None)


def test_a_device_times_its_launches_and_says_what_links_counted_and_allow() -> None:
    record = measured("dispatch", "on_device")

    assert (record.outcome, record.reason, record.timing, record.num_sms) == ("passed", "", "eager", None)
    assert record.samples_us == [[7.0]] * 6
    assert (record.update_us, record.cold_us) == ([3.0] * UPDATES, [11.0])
    assert record.counters == {
        "eager_us": 9.0,
        "call_us": 5.0,
        "link_bytes": 640.0,
        "flag_us": 0.75,
        "copy_gbps": 390.0,
    }
    assert set(record.counters) <= set(COLUMNS)


def test_use_of_a_device_and_overlap_are_asked_for_by_the_scenario() -> None:
    asking = Source(msgspec.structs.replace(SOURCE.timing, utilisation=True, overlap=True), {}, ".")
    case = make_case("dispatch", backend="on_device")

    record = measure(case, asking, SelfGroup(), Routings(), lambda operation: None)

    assert record.counters["gpu_util"] == 1.0
    assert record.counters["dram_gbps"] == 1500.0
    assert record.counters["overlap_comm"] == 1.25
    assert set(record.counters) <= set(COLUMNS)


@pytest.mark.parametrize("cache", [None, "warm"])
def test_a_row_says_that_its_cache_was_warm(cache: str | None) -> None:
    assert measured("dispatch", cache=cache).cache == "warm"


@pytest.mark.parametrize("collective", list(COLLECTIVES))
def test_a_backend_that_can_flush_no_cache_waives_cold_cases_of_every_collective(collective: str) -> None:
    record = measured(collective, cache="cold")

    assert (record.outcome, record.cache) == ("waived", "cold")
    assert record.reason == "cache cold: the in_memory backend flushes no cache, those on GPUs do"


def test_an_extra_copy_fails_a_case_with_both_figures() -> None:
    record = measured("dispatch", "extra_copy")

    assert (record.outcome, record.verified) == ("failed", False)
    assert record.planned_bytes is not None
    assert f"{record.planned_bytes + 64:,} wire_bytes were counted" in record.reason
    assert f"says {record.planned_bytes:,}" in record.reason
    assert record.samples_us == []


@pytest.mark.parametrize(
    ("backend", "reason"), [("choosy", "4 ranks are too many"), ("full", "9 GiB asked, 1 GiB free in /dev/shm")]
)
def test_what_does_not_fit_here_is_waived_with_the_reason(backend: str, reason: str) -> None:
    record = measured("dispatch", backend)

    assert (record.outcome, record.reason, record.verified) == ("waived", reason, None)


def test_what_a_collective_cannot_do_is_waived_before_anything_is_built() -> None:
    case = make_case("dispatch_combine", dtype="float8_e4m3fn", hidden=128)

    record = measure(case, SOURCE, SelfGroup(), Routings(), lambda operation: None)

    assert record.outcome == "waived"
    assert "float8_e4m3fn" in record.reason


def test_chained_pairs_are_reported_per_pair() -> None:
    record = measured("dispatch_combine")

    assert record.case.chain == 2
    assert record.wire_bytes == record.planned_bytes
    assert len(record.samples_us) == 6


def test_neighbouring_cases_share_one_routing_and_others_do_not() -> None:
    routings = Routings()
    dispatch = routings.of(make_case("dispatch"), SOURCE)

    assert routings.of(make_case("combine"), SOURCE) is dispatch
    assert routings.of(make_case("combine", seed=1), SOURCE) is not dispatch
    assert routings.of(make_case("dense_all_gather"), SOURCE) is None
