from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ncclep_bench.backends.cuda.backend import Cuda
from ncclep_bench.collectives.verify import first_wrong
from ncclep_bench.errors import BenchError
from ncclep_bench.native.loader import ROOT, Launcher, digest, kernels, pack
from ncclep_bench.registry import COLLECTIVES
from ncclep_bench.runtime.world import SelfGroup
from tests.cases import make_case, make_problem
from tests.conftest import MpiRun
from tests.native.cpu_device import COMPILER, CpuDevice
from tests.native.killed import told_to_survivor

HERE = Path(__file__).parent
PYTHONPATH = str(HERE.parents[1])

MOST_SPILLED_BYTES = 128
MOST_DRAWS = 12

needs_compiler = pytest.mark.skipif(COMPILER is None, reason="no g++: kernels cannot be built for the CPU")
needs_nvcc = pytest.mark.skipif(shutil.which("nvcc") is None, reason="no nvcc")


def thread_sanitizer() -> str | None:
    """The library that must be loaded before Python, None where there is none."""
    if COMPILER is None:
        return None
    found = subprocess.run([COMPILER, "-print-file-name=libtsan.so"], capture_output=True, text=True).stdout.strip()
    return found if Path(found).is_absolute() else None


def on_threads(
    count: int, ranks: int, root: Path = ROOT, only: str = "", *, races: bool, seed: int = 7, **more: str
) -> subprocess.CompletedProcess[str]:
    """cpu_cases.py with ranks as threads; `races`: under ThreadSanitizer, whose first report ends it."""
    env = {**os.environ, "PYTHONPATH": PYTHONPATH, "NCCLEP_TEST_SOURCES": str(root), "NCCLEP_TEST_ONLY": only, **more}
    flags = []
    if races:
        env |= {"LD_PRELOAD": str(thread_sanitizer()), "TSAN_OPTIONS": "halt_on_error=1 exitcode=66"}
        # Words look blank as often as in a build with delays.
        flags = ["-fsanitize=thread", "-g", "-DNCCLEP_BLANK_BITS=0x7fu"]
    command = [sys.executable, str(HERE / "cpu_cases.py"), str(seed), str(count), str(ranks), *flags]
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=240)


@needs_compiler
@pytest.mark.mpi
@pytest.mark.parametrize(("ranks", "count"), [(1, 15), (2, 25), (4, 8)])
def test_random_cases_are_right_when_ranks_share_memory(mpi_run: MpiRun, ranks: int, count: int) -> None:
    program = HERE / "cpu_cases.py"
    done = mpi_run(ranks, "-m", "mpi4py", program, ranks, count, env={"PYTHONPATH": PYTHONPATH}, deadline_s=240)

    assert done.returncode == 0, done.stdout + done.stderr


@needs_compiler
@pytest.mark.mpi
@pytest.mark.parametrize(("ranks", "count"), [(1, 6), (2, 14), (4, 5)])
def test_random_cases_of_the_nccl_backend_are_right_around_its_operations(
    mpi_run: MpiRun, ranks: int, count: int
) -> None:
    program = HERE / "cpu_nccl.py"
    done = mpi_run(ranks, "-m", "mpi4py", program, ranks, count, env={"PYTHONPATH": PYTHONPATH}, deadline_s=240)

    assert done.returncode == 0, done.stdout + done.stderr


@needs_compiler
@pytest.mark.mpi
@pytest.mark.parametrize(("ranks", "count"), [(2, 12), (4, 4)])
def test_rows_that_nccl_ep_delivers_in_an_order_of_its_own_are_put_into_ours(
    mpi_run: MpiRun, ranks: int, count: int
) -> None:
    program = HERE / "cpu_nccl_ep.py"
    done = mpi_run(ranks, "-m", "mpi4py", program, ranks, count, env={"PYTHONPATH": PYTHONPATH}, deadline_s=240)

    assert done.returncode == 0, done.stdout + done.stderr


@needs_compiler
@pytest.mark.mpi
@pytest.mark.parametrize(("ranks", "count"), [(2, 20), (4, 8)])  # on four ranks the first kinds: dispatch and combine
def test_every_kind_of_case_is_right_when_each_release_and_acquire_dawdles(
    mpi_run: MpiRun, ranks: int, count: int
) -> None:
    env = {"PYTHONPATH": PYTHONPATH, "NCCLEP_TEST_DELAYS": str(ranks)}
    done = mpi_run(ranks, "-m", "mpi4py", HERE / "cpu_cases.py", ranks, count, env=env, deadline_s=600)

    assert done.returncode == 0, done.stdout + done.stderr


@needs_compiler
@pytest.mark.parametrize("side", [[], ["-D__CUDACC__"]], ids=["cpu", "cuda"])
def test_delays_stand_around_every_release_and_are_in_no_other_build(side: list[str]) -> None:
    command = [str(COMPILER), "-E", "-P", "-std=c++17", "-x", "c++", f"-I{ROOT / 'include'}", *side]

    def preprocessed(source: Path, *defines: str) -> str:
        done = subprocess.run([*command, *defines, str(source)], capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr
        return done.stdout

    for source in sorted((ROOT / "kernels").glob("*.cu")):
        assert re.findall(r"\w*(?:delay|NCCLEP_DELAY|sleep_ns)\w*", preprocessed(source)) == []
        delayed = preprocessed(source, "-DNCCLEP_DELAYS=7")
        for name in ("store_release", "store_word"):
            body = re.search(rf"inline void {name}\(u64\* address, u64 value\) {{(.*?)}}\n", delayed, re.DOTALL)
            assert body is not None
            assert body[1].count("ncclep::delay(") == 2 or "store_release(" in body[1]


@pytest.mark.skipif(thread_sanitizer() is None, reason="no ThreadSanitizer")
@pytest.mark.parametrize(("ranks", "count"), [(2, 2), (4, 1)])
def test_no_kernel_races(ranks: int, count: int) -> None:
    done = on_threads(count, ranks, races=True)

    assert done.returncode == 0, done.stdout + done.stderr[-4000:]


ALWAYS, RACES, DELAYED = "always", "under ThreadSanitizer", "when each release and acquire dawdles"
OVERTAKEN = "likewise, or as a word that another has taken the place of is awaited in vain"
FEW_TOKENS = "tokens=16 batch_size=16"
# And not once more behind its data, which would hide the fault from who comes later.
FLAG_FIRST = (
    "    if (lane_id() == 0)\n"
    "        store_release(at<u64>(a.heaps, source, a.return_flags_at) + row * a.return_pieces + piece, epoch + 1);\n"
    "    const auto store_release = [](u64*, u64) {};\n"
    "    if (!a.staged) {\n        copy_piece"
)
FAULTS = {
    "a row lands one slot too far": (
        "dispatch_flat.cu",
        "dispatch flat",
        "first_row[lane_id()] + slot)",
        "first_row[lane_id()] + slot + 1)",
        ALWAYS,
    ),
    "a choice is ranked among the wrong tokens": (
        "layout.cu",
        "dispatch expert_major",
        "number_of(choice / top_k, bin)",
        "number_of(choice / top_k & ~1, bin)",
        ALWAYS,
    ),
    "counts are read before everybody has counted": (
        "layout.cu",
        "dispatch flat",
        "    }\n    __syncthreads();\n    for (int bin = threadIdx.x; bin < bins; bin += threads) {\n        u32",
        "    }\n    for (int bin = threadIdx.x; bin < bins; bin += threads) {\n        u32",
        RACES,
    ),
    "a block does not wait for what earlier ones have counted": (
        "layout.cu",
        "dispatch flat ht tokens=600 batch_size=600",
        "count += is_of(held[i], epoch)",
        "count += held[i] >> 63 == 0",
        DELAYED,
    ),
    "a flag is written before its data": (
        "combine.cu",
        "combine flat",
        "    if (!a.staged) {\n        copy_piece",
        FLAG_FIRST,
        RACES,
    ),
    "a flag is a plain store": (
        "dispatch_expert.cu",
        "dispatch expert_major ht",
        "store_release(at<u64>(a.heaps, lane_id(), a.stage_flags_at) + row * a.pieces + piece, epoch + 1);",
        "at<u64>(a.heaps, lane_id(), a.stage_flags_at)[row * a.pieces + piece] = epoch + 1;",
        RACES,
    ),
    "a warp does not wait for its other lanes": (
        "combine.cu",
        "combine flat",
        "    __syncwarp();\n    if (lane_id() == 0)\n        store_release",
        "    if (lane_id() == 0)\n        store_release",
        RACES,
    ),
    "flags follow bulk stores that have only been read": (
        "combine_bulk.cu",
        "combine flat",
        "        await_stores();\n",
        "        await_stores_read();\n",
        ALWAYS,
    ),
    "a bulk load lands where a bulk store still reads": (
        "combine_bulk.cu",
        "combine flat",
        "            await_stores_read();\n",
        "",
        ALWAYS,
    ),
    "a piece is added before it has landed": (
        "combine_bulk.cu",
        "combine flat",
        "n = asked.pieces_taken; n != past; ++n) await",
        "n = asked.pieces_taken + 1; n < past; ++n) await",
        ALWAYS,
    ),
    "rows are fetched from behind those of this rank": (
        "combine_bulk.cu",
        "combine flat",
        "source < a.rank; ++source)\n            there",
        "source + 1 < a.rank; ++source)\n            there",
        ALWAYS,
    ),
    "a flag goes ahead of its data": (
        "combine.cu",
        f"combine flat {FEW_TOKENS}",
        "    if (!a.staged) {\n        copy_piece",
        FLAG_FIRST,
        DELAYED,
    ),
    "rows are pushed over those that their reader still has": (
        "dispatch_flat.cu",
        f"dispatch flat {FEW_TOKENS}",
        "    if (await_all(a, a.ready_flags_at, epoch, word)) {",
        "    __syncthreads();\n    {",
        DELAYED,
    ),
    "a dispatch is over before its rows have come": (
        "dispatch_flat.cu",
        f"dispatch flat {FEW_TOKENS}",
        "    exchange_done(a.heaps, a.rank, a.ranks, a.done_flags_at, epoch, waiting_of(a), word);\n",
        "",
        DELAYED,
    ),
    "words that have been taken are not blanked": (
        "stage.cuh",
        "dispatch expert_major ll",
        "came = await(address, words) && came;\n        blank(address);\n",
        "came = await(address, words) && came;\n",
        ALWAYS,
    ),
    "a vector is taken when its last word is there": (
        "stage.cuh",
        f"dispatch expert_major ll hidden=4096 {FEW_TOKENS}",
        "return is_blank(v.x) || is_blank(v.y) || is_blank(v.z) || is_blank(v.w);",
        "return is_blank(v.w);",
        DELAYED,
    ),
    "a piece with blank words is announced too soon": (
        "dispatch_expert.cu",
        f"dispatch expert_major ll hidden=4096 {FEW_TOKENS}",
        "    Lying from;\n    copy_piece<kLoads<kLow>>(",
        "    Lying from;\n"
        "    if (lane_id() < a.ranks)\n"
        "        store_release(at<u64>(a.heaps, lane_id(), a.stage_flags_at) +\n"
        "                      stage_row(a, epoch, a.rank, token) * a.pieces + piece, epoch + 1);\n"
        "    copy_piece<kLoads<kLow>>(",
        DELAYED,
    ),
    "a word that several read is not awaited": (
        "stage.cuh",
        f"dispatch expert_major ll hidden=4096 {FEW_TOKENS}",
        "return is_of(value, epoch);",
        "return true;",
        DELAYED,
    ),
    "a stage has one half": (
        "dispatch_expert.cu",
        f"dispatch expert_major {FEW_TOKENS}",
        "return ((epoch & 1) * a.ranks + source) * a.slots + slot;",
        "return source * a.slots + slot;",
        OVERTAKEN,
    ),
    "a stage's half is used again before its reader has left it": (
        "dispatch_expert.cu",
        f"dispatch expert_major ht empty_ranks=1 {FEW_TOKENS}",
        "    if (closes && !kLow) await_all(a, a.header_flags_at, epoch, word);\n",
        "",
        OVERTAKEN,
    ),
    "a stage's half is used again one launch too early": (
        "dispatch_expert.cu",
        f"dispatch expert_major ht empty_ranks=1 {FEW_TOKENS}",
        "await_all(a, a.header_flags_at, epoch, word);",
        "await_all(a, a.header_flags_at, epoch - 1, word);",
        OVERTAKEN,
    ),
    "a return stage's half is used again before its reader has left it": (
        "combine.cu",
        f"combine flat empty_ranks=1 {FEW_TOKENS}",
        "    if (blockIdx.x == gridDim.x - 1) await_all(a, a.return_headers_at, epoch, word);\n",
        "",
        DELAYED,
    ),
    "rows are fetched before their rank has them": (
        "combine_bulk.cu",
        f"combine flat {FEW_TOKENS}",
        "    const bool together = await_all(a, a.return_headers_at, epoch, s.word);\n",
        "    const bool together = true;\n    __syncthreads();\n",
        DELAYED,
    ),
    "gradients are read before the launch that has them": (
        "blocks.cu",
        "reduce_scatter_expert_grads out_of_place expert_elements=1000",
        "    return await_ranks(a.heaps, a.rank, a.ranks, a.ready_flags_at, epoch, waiting_of(a), word);",
        "    return await_ranks(a.heaps, a.rank, a.ranks, a.ready_flags_at, epoch - 1, waiting_of(a), word);",
        DELAYED,
    ),
    "gradients are given back while others read them": (
        "blocks.cu",
        "reduce_scatter_expert_grads out_of_place expert_elements=1000",
        "    finish(a, epoch, word);\n}\n\nextern",
        "    leave(a.state, epoch);\n}\n\nextern",
        DELAYED,
    ),
    "a gather is over before its parameters have come": (
        "blocks.cu",
        "all_gather_experts out_of_place expert_elements=1000",
        "    finish(a, epoch, word);\n}\nNCCLEP_EXPORT(copy_blocks)",
        "    leave(a.state, epoch);\n}\nNCCLEP_EXPORT(copy_blocks)",
        DELAYED,
    ),
}


@needs_compiler
@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_caught(fault: str, tmp_path: Path) -> None:
    file, only, right, wrong, caught = FAULTS[fault]
    if caught == RACES and thread_sanitizer() is None:
        pytest.skip("no ThreadSanitizer")
    shutil.copytree(ROOT, tmp_path / "native")
    source = tmp_path / "native" / ("kernels" if file.endswith(".cu") else "include/ncclep") / file
    text = source.read_text()
    assert text.count(right) == 1
    source.write_text(text.replace(right, wrong))

    more = {"NCCLEP_TEST_BULK": "3" if "bulk" in file else "0"}
    if caught in (DELAYED, OVERTAKEN):
        # Where rows are pushed too, who fetches waits for these first.
        more = {"NCCLEP_TEST_BULK": "1" if "bulk" in file else "0", "NCCLEP_TEST_DELAYS": "7"}
        more["NCCLEP_TEST_DEADLINE_S"] = "6" if caught == OVERTAKEN else "60"
    # What the order of threads decides is likely in each draw, not certain: they run as the machine lets them.
    for seed in range(1 if caught == ALWAYS else MOST_DRAWS):
        done = on_threads(3, 2, tmp_path / "native", only, races=caught == RACES, seed=7 + seed, **more)
        if done.returncode != 0:
            break

    told = {RACES: "data race", OVERTAKEN: "rows wrong|did not reach launch"}.get(caught, "rows wrong")
    assert done.returncode != 0
    assert re.search(told, done.stdout + done.stderr), done.stderr[-2000:]


@needs_compiler
@pytest.mark.mpi
@pytest.mark.parametrize(
    ("fault", "told"),
    [
        ("late_peer", "RankError: rank 0: rank 1 did not reach launch 1 within 2 s"),
        ("unknown_expert", "UsageError: rank 0: topk_idx names expert 99"),
    ],
)
def test_a_fault_ends_the_kernels_and_names_who_and_what(mpi_run: MpiRun, fault: str, told: str) -> None:
    done = mpi_run(2, "-m", "mpi4py", HERE / "cpu_faults.py", fault, env={"PYTHONPATH": PYTHONPATH}, deadline_s=240)

    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [told]


@needs_compiler
def test_a_rank_killed_while_kernels_run_ends_those_of_the_others_and_is_named(tmp_path: Path) -> None:
    told = told_to_survivor("cpu", tmp_path, deadline_s=120)

    assert re.fullmatch(r"RankError: rank 0: rank 1 did not reach launch \d+ within 8 s\n", told)


@needs_compiler
@pytest.mark.mpi
def test_a_word_goes_to_and_fro_between_neighbours_as_often_as_asked(mpi_run: MpiRun) -> None:
    done = mpi_run(3, "-m", "mpi4py", HERE / "cpu_ping.py", env={"PYTHONPATH": PYTHONPATH}, deadline_s=240)

    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.split("\n")) == ["", "0: 2 rounds", "1: 2 rounds", "2: 0 rounds"]


@needs_compiler
@pytest.mark.mpi
@pytest.mark.parametrize("cache", ["warm", "cold"])
def test_ranks_agree_on_all_that_is_timed_on_a_device(mpi_run: MpiRun, cache: str) -> None:
    done = mpi_run(2, "-m", "mpi4py", HERE / "cpu_timing.py", cache, env={"PYTHONPATH": PYTHONPATH}, deadline_s=240)

    assert done.returncode == 0, done.stdout + done.stderr
    row = json.loads(done.stdout)
    timing = "graph" if cache == "warm" else "eager"
    assert (row["outcome"], row["reason"], row["timing"], row["cache"]) == ("passed", "", timing, cache)
    assert len(row["samples_us"]) == 2
    assert all(us > 0 for us in row["cold_us"])
    beside = {"overlap_comm", "overlap_gemm"}
    assert set(row["counters"]) & beside == (beside if cache == "warm" else set())
    # Each flush filled its memory, on both ranks.
    assert row["flushed"] == (cache == "cold")


@needs_compiler
@pytest.mark.mpi
@pytest.mark.parametrize(
    ("memory", "algorithm", "counted"),
    [("unaligned", "peer_memory", (2, 6, 6, 0)), ("stream_ordered", "staged_heap", (0, 0, 0, 8))],
)
def test_what_is_bound_at_every_call_is_timed_with_the_host_and_says_how_rows_are_reached(
    mpi_run: MpiRun, memory: str, algorithm: str, counted: tuple[int, ...]
) -> None:
    program = HERE / "cpu_timing.py"
    done = mpi_run(2, "-m", "mpi4py", program, "warm", memory, env={"PYTHONPATH": PYTHONPATH}, deadline_s=240)

    assert done.returncode == 0, done.stdout + done.stderr
    row = json.loads(done.stdout)
    assert (row["outcome"], row["reason"], row["timing"], row["algorithm"]) == ("passed", "", "eager", algorithm)
    # Of four rows on each rank, a cache of one entry keeps the last.
    counters = row["counters"]
    assert tuple(counters.get(f"mr_{name}", 0) for name in ("hits", "misses", "evictions", "staged")) == counted
    assert (counters.get("mr_miss_us", 0) > 0) == (counted[1] > 0)


@needs_compiler
def test_a_flush_writes_all_of_its_memory_and_nothing_behind_it() -> None:
    device = CpuDevice()
    nbytes = 5 * 1000 * 16
    target = device.allocate(nbytes + 16)
    poison = np.full(nbytes + 16, 0xAB, np.uint8)
    device.write(target, poison)

    Launcher(device).prepare("flush", {"target": target, "vecs": nbytes // 16}, 2, 64, 8)()

    written = np.zeros(nbytes + 16, np.uint8)
    device.read(target, written)
    assert (written[:nbytes].view(np.uint64) != poison[:nbytes].view(np.uint64)).all()
    assert (written[nbytes:] == 0xAB).all()
    device.free(target)


@needs_compiler
@pytest.mark.parametrize(
    ("collective", "axes"),
    [
        ("dispatch", {"layout": "flat"}),
        ("dispatch", {"layout": "expert_major"}),
        ("combine", {}),
        ("dispatch_combine", {}),
        ("all_gather_experts", {}),
        ("reduce_scatter_expert_grads", {}),
    ],
)
def test_without_a_launch_nothing_right_is_left_of_the_last_one(collective: str, axes: dict[str, Any]) -> None:
    case = make_case(collective, backend="cuda", ranks=1, active_share=1.0, **axes)
    definition, problem = COLLECTIVES.get(collective), make_problem(case)
    prepared = Cuda(lambda _: CpuDevice(), lambda: None).prepare(problem, SelfGroup())
    try:
        for launch in (prepared.launch, prepared.upload):
            prepared.poison(0)
            definition.fill(problem, 0, 1, prepared.inputs(0))
            launch()
            wrong = first_wrong(definition, problem, 0, 1, prepared.outputs(0))
            assert (wrong is None) == (launch == prepared.launch)
    finally:
        prepared.close()


@needs_nvcc
@pytest.mark.parametrize("source", sorted((ROOT / "kernels").glob("*.cu")), ids=lambda path: path.stem)
def test_kernels_compile_for_every_chip_and_spill_next_to_nothing(source: Path, tmp_path: Path) -> None:
    chips = [f"-gencode=arch=compute_{chip},code=sm_{chip}" for chip in (80, 90, 100)]
    command = ["nvcc", *chips, "--threads", "0", "-std=c++17", "-fatbin", "-Xptxas", "-v", f"-I{ROOT / 'include'}"]
    done = subprocess.run(
        [*command, str(source), "-o", str(tmp_path / "kernel.fatbin")], capture_output=True, text=True, timeout=240
    )

    assert done.returncode == 0, done.stderr
    # Spills differ from one compiler to the next, so a bound and no equality.
    spilled = [int(count) for count in re.findall(r"(\d+) bytes spill stores", done.stderr)]
    assert len(spilled) >= len(chips)
    assert max(spilled) <= MOST_SPILLED_BYTES


def test_every_kernel_takes_one_struct_whose_fields_are_known() -> None:
    known = kernels()

    assert {"route_layout", "dispatch_flat", "dispatch_expert", "combine_bfloat16", "meet"} <= set(known)
    assert known["hold"].fields == (("hold_ns", 1),)
    assert known["meet"].fields[0] == ("heaps", 32)


def test_every_kernel_first_waits_for_what_was_enqueued_before_it() -> None:
    """One that did not would read what the kernel before still writes, where launches are early."""
    hasty = []
    for kernel in kernels().values():
        text = kernel.source.read_text()
        body = re.search(rf"\b{kernel.name}\(const \w+ a\) \{{\s*(.*?;)", text)
        assert body is not None, kernel.name
        first = body[1]
        if shared := re.fullmatch(r"(\w+)<\w+>\(a\);", first):
            first = re.search(rf"inline void {shared[1]}\(const \w+& a\) \{{\s*(.*?;)", text)[1]  # type: ignore[index]
        hasty += [] if first == "await_previous();" else [kernel.name]
    assert hasty == []


def test_arguments_are_packed_in_the_order_of_the_struct_with_64_bits_each() -> None:
    kernel = kernels()["meet"]
    values = {field.name: index for index, field in enumerate(kernel.fields)}

    words = pack(kernel, {**values, "heaps": [1 << 40, 5], "rank": -1, "block_vecs": 3 << 31})

    assert words.dtype == np.uint64
    assert words[:3].tolist() == [1 << 40, 5, 0]
    assert words[32] == 2**64 - 1
    assert 3 << 31 in words.tolist()


def test_a_missing_argument_is_named() -> None:
    with pytest.raises(BenchError, match="kernel hold: argument hold_ns is missing"):
        pack(kernels()["hold"], {})


def test_an_argument_that_needs_more_than_64_bits_is_refused() -> None:
    with pytest.raises(BenchError, match="hold_ns cannot be 18446744073709551616"):
        pack(kernels()["hold"], {"hold_ns": 1 << 64})


def test_macros_of_a_build_reach_every_kernel_beside_the_digest() -> None:
    builds = []

    class Recording(CpuDevice):
        def function(self, source: Path, include: Path, name: str, defines: Sequence[str]) -> Any:
            builds.append((name, defines))

    Launcher(Recording(), ("NCCLEP_DELAYS=7",))

    assert builds == [(name, (f"NCCLEP_DIGEST=0x{digest()}", "NCCLEP_DELAYS=7")) for name in kernels()]


def test_an_edited_header_changes_the_digest(tmp_path: Path) -> None:
    shutil.copytree(ROOT, tmp_path / "native")
    header = tmp_path / "native" / "include" / "ncclep" / "sync.cuh"
    header.write_text(header.read_text() + "\n")

    assert digest(tmp_path / "native") != digest()
