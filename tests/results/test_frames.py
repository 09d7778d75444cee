from __future__ import annotations

from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from ncclep_bench import load_run
from ncclep_bench.errors import InputError
from ncclep_bench.model.case import Case
from ncclep_bench.model.measurement import COLUMNS, Measurement, RunHeader
from ncclep_bench.results.claims import claims
from ncclep_bench.results.frames import RunFrames, saturated
from ncclep_bench.results.store import RunWriter


def dispatch(*, us: float = 100.0, case: dict[str, Any] | None = None, **fields: Any) -> Measurement:
    axes: dict[str, Any] = {
        "scenario": "s", "collective": "dispatch", "mode": "ht", "layout": "flat", "ranks": 2, "num_experts": 4,
        "tokens": 64, "hidden": 32, "top_k": 2, "alignment": 1, "routing": "uniform",
    }  # fmt: skip
    return _measurement(axes | (case or {}), us, {"partner": "padded_all_to_all", "wire_bytes": 600} | fields)


def padded(*, us: float = 300.0, case: dict[str, Any] | None = None, **fields: Any) -> Measurement:
    axes: dict[str, Any] = {
        "scenario": "s", "collective": "padded_all_to_all", "variant": "dispatch", "ranks": 2, "num_experts": 4,
        "tokens": 64, "hidden": 32, "top_k": 2, "routing": "uniform",
    }  # fmt: skip
    return _measurement(axes | (case or {}), us, {"wire_bytes": 1000} | fields)


def gather(*, us: float = 100.0, case: dict[str, Any] | None = None, **fields: Any) -> Measurement:
    axes: dict[str, Any] = {
        "scenario": "s", "collective": "all_gather_experts", "variant": "in_place", "ranks": 2, "num_experts": 4,
        "expert_elements": 1024, "active_share": 0.5,
    }  # fmt: skip
    return _measurement(axes | (case or {}), us, {"partner": "dense_all_gather", "update_us": []} | fields)


def _measurement(axes: dict[str, Any], us: float, fields: dict[str, Any]) -> Measurement:
    defaults: dict[str, Any] = {
        "outcome": "passed", "verified": True, "samples_us": [[us, us / 2]] * 10, "update_us": [20.0, 10.0, 30.0],
    }  # fmt: skip
    return Measurement(case=Case(**axes), **(defaults | fields))


@pytest.fixture
def load(tmp_path: Path) -> Any:
    def build(*records: Measurement, name: str = "run", **header: Any) -> RunFrames:
        fields: dict[str, Any] = {"started_at": "now", "command": [], "scenarios": [], "environment": {}}
        with RunWriter(tmp_path / name, RunHeader(**(fields | header))) as writer:
            for record in records:
                writer.append(record)
        return load_run(tmp_path / name)

    return build


def test_cases_have_exactly_the_declared_columns_in_order_with_one_dtype_each(load: Any) -> None:
    cases = load(dispatch(), gather()).cases
    assert list(cases.columns) == list(COLUMNS)
    dtypes = {name: str(dtype) for name, dtype in cases.dtypes.items()}
    assert set(dtypes.values()) == {"string", "Int64", "Float64", "boolean"}
    assert dtypes == {name: str(dtype) for name, dtype in load(name="empty").cases.dtypes.items()}
    assert (dtypes["tokens"], dtypes["verified"], dtypes["p50_us"], dtypes["wire_bytes"], dtypes["routing_param"]) == (
        "Int64", "boolean", "Float64", "Int64", "string",
    )  # fmt: skip


def test_what_is_missing_is_na_and_never_nan_or_an_empty_text(load: Any) -> None:
    cases = load(dispatch(imbalance=float("nan"), algorithm="")).cases
    for name in ("imbalance", "algorithm", "num_sms", "predicted_us", "active_share", "cold_us"):
        assert cases[name][0] is pd.NA, name


def test_samples_are_one_row_per_iteration_and_rank(load: Any) -> None:
    samples = load(dispatch(samples_us=[[1.0, 2.0], [3.0, 4.0]]), padded(samples_us=[[5.0, 6.0]])).samples
    assert samples["elapsed_us"].tolist() == [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]
    assert samples["iteration"].tolist() == [0, 0, 1, 1, 0, 0]
    assert samples["rank"].tolist() == [0, 1, 0, 1, 0, 1]
    assert samples["case"].tolist() == [dispatch().case.case] * 4 + [padded().case.case] * 2


def test_rates_divide_the_declared_bytes_by_the_median(load: Any) -> None:
    row = load(
        dispatch(us=200.0, algbw_bytes=1_000_000, busbw_factor=0.5, ece_bytes=4_000_000, tokens_total=128)
    ).cases.iloc[0]
    assert (row["algbw_gbps"], row["busbw_gbps"], row["ece_gbps"]) == (5.0, 2.5, 20.0)
    assert row["tokens_per_s"] == 128 / 200e-6


def test_times_below_the_clocks_resolution_give_no_rate(load: Any) -> None:
    frames = load(dispatch(us=0.0, tokens_total=128, algbw_bytes=4096, ece_bytes=1))
    assert frames.cases["p50_us"].tolist() == [0.0]
    assert frames.cases[["tokens_per_s", "algbw_gbps", "ece_gbps"]].isna().all(axis=None)


def test_times_of_first_call_and_update_are_the_slowest_ranks_and_the_median(load: Any) -> None:
    row = load(dispatch(cold_us=[5.0, 9.0], setup_us=70.0, counters={"mr_hits": 3.0, "unheard_of": 1.0})).cases.iloc[0]
    assert (row["cold_us"], row["update_us"], row["setup_us"], row["mr_hits"]) == (9.0, 20.0, 70.0, 3.0)


def test_the_first_timed_call_is_the_slowest_ranks(load: Any) -> None:
    row = load(dispatch(samples_us=[[40.0, 70.0], [10.0, 20.0]])).cases.iloc[0]
    assert row["warmed_us"] == 70.0


@pytest.mark.parametrize("outcome", ["failed", "error", "waived"])
def test_a_row_that_did_not_pass_has_no_time_rate_or_ratio_even_where_samples_exist(load: Any, outcome: str) -> None:
    bad = dispatch(
        outcome=outcome, verified=False, cold_us=[1.0], setup_us=1.0, ece_bytes=9, counters={"mr_miss_us": 1.0}
    )
    frames = load(bad, padded())
    row = frames.cases.iloc[0]
    timed = [name for name, column in COLUMNS.items() if column.unit in ("us", "GB/s", "1/s")]
    assert row[[*timed, "tag", "saved_share", "samples"]].isna().all()
    assert row["wire_bytes"] == 600
    assert frames.samples["case"].unique().tolist() == [padded().case.case]


def test_a_row_that_passed_but_failed_verification_has_no_time_either(load: Any) -> None:
    assert load(dispatch(verified=False)).cases["p50_us"].isna().all()


def test_a_simulated_row_keeps_its_prediction_and_has_no_measured_time(load: Any) -> None:
    frames = load(dispatch(samples_us=[], update_us=[], verified=None, predicted_us=12.0, model_error=0.1))
    row = frames.cases.iloc[0]
    assert (row["predicted_us"], row["model_error"]) == (12.0, 0.1)
    assert row[[name for name in COLUMNS if name.endswith("_us") and name != "predicted_us"]].isna().all()
    assert frames.samples.empty


def test_experts_per_rank_is_the_most_any_rank_holds(load: Any) -> None:
    uneven = dispatch(case={"placement": "uneven", "num_experts": 5})
    replicas = dispatch(case={"placement": "replicas:2"})
    impossible = dispatch(case={"num_experts": 5}, outcome="waived", verified=None)
    assert load(dispatch(), uneven, replicas, impossible).cases["experts_per_rank"].tolist() == [2, 3, 4, pd.NA]


def test_tag_counts_the_layout_of_dispatch_on_both_sides(load: Any) -> None:
    cases = load(dispatch(us=100.0, update_us=[50.0]), padded(us=300.0, update_us=[200.0])).cases
    assert cases["tag"].tolist() == [(500.0 - 150.0) / 500.0, pd.NA]
    assert cases["saved_share"].tolist() == [pytest.approx(0.4), pd.NA]


def test_tag_of_combine_and_of_parameter_collectives_compares_medians_alone(load: Any) -> None:
    combine = dispatch(us=100.0, update_us=[50.0], case={"collective": "combine"})
    beside = padded(us=400.0, update_us=[200.0], case={"variant": "combine"})
    dense = gather(us=200.0, partner="", case={"collective": "dense_all_gather", "variant": None, "active_share": None})
    assert load(combine, beside, gather(us=50.0), dense).cases["tag"].tolist() == [0.75, pd.NA, 0.75, pd.NA]


@pytest.mark.parametrize(
    "partner",
    [
        padded(case={"variant": "combine"}),
        padded(case={"tokens": 128}),
        padded(case={"backend": "in_memory"}),
        padded(case={"routing": "zipf", "routing_param": 1.0}),
        padded(case={"scenario": "other"}),
        padded(repeat=1),
        padded(outcome="failed", verified=False),
        padded(verified=None),
        padded(update_us=[]),
    ],
    ids=["variant", "axis", "backend", "routing", "scenario", "repeat", "failed", "unverified", "no update"],
)
def test_tag_joins_only_a_verified_row_alike_in_all_but_what_is_compared(load: Any, partner: Measurement) -> None:
    assert load(dispatch(), partner).cases["tag"].isna().all()


def test_two_partners_that_fit_equally_give_no_ratio(load: Any) -> None:
    assert load(dispatch(), padded(), padded(case={"chain": 2})).cases["tag"].isna().all()


def test_each_routing_parameter_meets_its_own_partner(load: Any) -> None:
    axes = [{}, {"routing": "zipf", "routing_param": 0.5}, {"routing": "zipf", "routing_param": 1.5}]
    records = [dispatch(case=case, update_us=[0.0]) for case in axes]
    records += [
        padded(case=case, us=200.0 * factor, update_us=[0.0]) for factor, case in zip((1, 2, 4), axes, strict=True)
    ]
    assert load(*records).cases["tag"].tolist()[:3] == [0.5, 0.75, 0.875]


def test_modes_layouts_and_transports_share_one_partner(load: Any) -> None:
    ways = [{"mode": "ll", "layout": "expert_major"}, {"layout": "rank_major"}, {"transport": "messages"}]
    assert load(*[dispatch(case=way) for way in ways], padded()).cases["tag"].notna().tolist() == [True] * 3 + [False]


def test_repeats_keep_their_own_rows_and_partners(load: Any) -> None:
    records = [dispatch(repeat=repeat, update_us=[0.0]) for repeat in (0, 1)]
    records += [padded(repeat=repeat, us=us, update_us=[0.0]) for repeat, us in ((0, 200.0), (1, 400.0))]
    cases = load(*records).cases
    assert cases["repeat"].tolist() == [0, 1, 0, 1]
    assert cases["tag"].tolist()[:2] == [0.5, 0.75]


CUDA, NCCL = {"backend": "cuda"}, {"backend": "nccl"}


@pytest.fixture
def join(load: Any, tmp_path: Path) -> Any:
    """The cases of several runs, each on a host and with some records, reported together."""

    def build(*runs: tuple[str, list[Measurement]]) -> pd.DataFrame:
        for index, (host, records) in enumerate(runs):
            load(*records, name=str(index), environment={"host": host})
        return load_run([tmp_path / str(index) for index in range(len(runs))]).cases

    return build


def test_a_partner_on_another_backend_may_stand_in_another_run_of_the_same_machine(join: Any) -> None:
    ours, partner = dispatch(case=CUDA, timing="graph"), padded(case=NCCL, timing="graph")
    assert join(("a", [ours]), ("a", [partner]))["tag"].notna().tolist() == [True, False]


def test_a_run_of_another_machine_has_no_partners(join: Any) -> None:
    runs = ("a", [dispatch(case=CUDA, timing="graph")]), ("b", [padded(case=NCCL, timing="graph")])
    assert join(*runs)["tag"].isna().all()


def test_tag_joins_no_rows_that_were_timed_in_different_ways(join: Any) -> None:
    runs = ("a", [dispatch(case=CUDA, timing="graph")]), ("a", [padded(case=NCCL, timing="eager")])
    assert join(*runs)["tag"].isna().all()


@pytest.mark.parametrize(("cache", "alike"), [("cold", True), ("warm", False)])
def test_tag_joins_cold_rows_with_cold_ones(join: Any, cache: str, alike: bool) -> None:
    ours = dispatch(case=CUDA | {"cache": "cold"}, cache="cold")
    theirs = padded(case=NCCL | ({"cache": "cold"} if cache == "cold" else {}), cache=cache)
    assert join(("a", [ours]), ("a", [theirs]))["tag"].notna().tolist() == [alike, False]


def test_tag_is_against_nccl_without_windows(join: Any) -> None:
    ways = [padded(case=NCCL | {"window": window}, us=us) for window, us in (("symmetric", 110.0), ("off", 300.0))]
    cases = join(("a", [dispatch(case=CUDA, update_us=[0.0])]), ("a", ways))
    assert cases["tag"].tolist()[0] == pytest.approx((320.0 - 100.0) / 320.0)


def test_a_peers_row_tells_its_time_over_ours(join: Any) -> None:
    ways = [gather(case=NCCL | {"window": window}, us=us) for window, us in ((None, 150.0), ("symmetric", 120.0))]
    cases = join(("a", [gather(case=CUDA)]), ("a", ways))
    assert cases["times_cuda"].tolist() == [pd.NA, 1.5, 1.2]


@pytest.mark.parametrize(
    "other",
    [
        gather(case=CUDA | {"active_share": 1.0}),
        gather(case=CUDA, timing="eager"),
        gather(case=CUDA, cache="cold"),
        gather(case=CUDA, verified=False),
        gather(case={"backend": "host"}),
    ],
    ids=["axis", "timing", "cache", "wrong", "backend"],
)
def test_a_peers_row_is_compared_only_with_a_right_one_of_ours_alike_in_everything_else(
    join: Any, other: Measurement
) -> None:
    assert join(("a", [other]), ("a", [gather(case=NCCL)]))["times_cuda"].isna().all()


def test_the_speed_of_light_is_what_links_allow_over_the_median(load: Any) -> None:
    floor = {"counters": {"flag_us": 1.0, "copy_gbps": 400.0}, "minimal_bytes_max_rank": 40_000_000}
    cases = load(gather(us=202.0, **floor), gather(minimal_bytes_max_rank=4, case={"seed": 1})).cases
    assert cases["speed_of_light"].tolist() == [pytest.approx(0.5), pd.NA]


def test_several_runs_say_which_row_is_whose_and_never_share_a_partner(load: Any, tmp_path: Path) -> None:
    load(dispatch(), name="a")
    load(padded(), name="b")
    frames = load_run([tmp_path / "a", tmp_path / "b"])
    assert frames.cases.columns[0] == "run"
    assert frames.cases["run"].tolist() == ["a", "b"]
    assert frames.samples["run"].nunique() == 2
    assert frames.cases["tag"].isna().all()
    assert len(frames.headers) == 2


def test_runs_of_the_same_name_are_told_apart_by_their_paths(load: Any, tmp_path: Path) -> None:
    load(dispatch(), name="a/run")
    load(dispatch(), name="b/run")
    runs = load_run([tmp_path / "a" / "run", tmp_path / "b" / "run"]).cases["run"]
    assert runs.tolist() == [str(tmp_path / "a" / "run"), str(tmp_path / "b" / "run")]


def test_a_run_that_is_given_twice_is_an_input_error(load: Any, tmp_path: Path) -> None:
    load(dispatch(), name="run")
    (tmp_path / "other").symlink_to(tmp_path / "run")
    for again in (tmp_path / "run", tmp_path / "run" / "run.jsonl", tmp_path / "other"):
        with pytest.raises(InputError, match=f"{again}: the run is given twice"):
            load_run([tmp_path / "run", again])


def test_no_run_at_all_is_an_input_error() -> None:
    with pytest.raises(InputError, match="no run given"):
        load_run([])


def test_iterations_of_different_length_are_an_input_error_naming_the_case(load: Any) -> None:
    with pytest.raises(InputError, match=r"collective=dispatch.*different length"):
        load(dispatch(samples_us=[[1.0, 2.0], [1.0]]))


def test_the_saturation_row_is_found_per_series(load: Any) -> None:
    def row(layout: str, tokens: int, rate: float) -> Measurement:
        return dispatch(us=tokens / rate * 1e6, tokens_total=tokens, case={"layout": layout, "tokens": tokens})

    rates = {"flat": (100.0, 200.0, 201.0), "expert_major": (100.0, 200.0, 400.0)}
    frames = load(*[
        row(layout, tokens, rate)
        for layout, values in rates.items()
        for tokens, rate in zip((16, 32, 64), values, strict=True)
    ])  # fmt: skip
    found = frames.cases[saturated(frames.cases)]
    assert list(zip(found["layout"], found["tokens"], strict=True)) == [("flat", 32)]


def test_a_claim_stands_beside_the_range_that_was_measured_and_never_among_it(load: Any) -> None:
    reference = [
        {"where": {"tokens": 64}, "column": "p50_us", "value": 4700.0, "source": "article", "note": "inconsistent: x"},
        {"where": {"tokens": 64}, "column": "p50_us", "value": 12400.0, "source": "article", "role": "traditional"},
        {"where": {"tokens": 65}, "column": "p50_us", "value": 1.0, "source": "article"},
        {"where": {"unheard_of": 1}, "column": "gpu_util", "value": 89.0, "source": "article"},
    ]
    frames = load(
        dispatch(us=100.0), dispatch(us=120.0, case={"layout": "expert_major"}), padded(us=300.0),
        scenarios=[{"name": "s", "reference": reference}],
    )  # fmt: skip
    found = claims(frames)
    assert [(claim.rows, claim.low, claim.high) for claim in found] == [
        (2, 100.0, 120.0), (1, 300.0, 300.0), (0, None, None), (0, None, None),
    ]  # fmt: skip
    assert found[0].reference.note == "inconsistent: x"


@pytest.mark.parametrize("wanted", [[64], {"at": 64}])
def test_a_claim_about_several_values_at_once_is_refused(tmp_path: Path, wanted: Any) -> None:
    reference = {"where": {"tokens": wanted}, "column": "p50_us", "value": 1.0, "source": "a paper"}
    header = RunHeader(started_at="", command=[], scenarios=[{"name": "s", "reference": [reference]}], environment={})
    RunWriter(tmp_path, header).close()
    with pytest.raises(InputError, match=r"reference of scenario 's' in the run's header: .*where"):
        claims(load_run(tmp_path))
