"""Self-tests on real ranks: healthy ones pass, planted faults are caught and their rank named, nothing stays behind."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from click.testing import CliRunner

from ncclep_bench.doctor.contract import Finding
from ncclep_bench.doctor.profiles import profile_of
from ncclep_bench.doctor.run import all_rules
from ncclep_bench.doctor.selftests.contract import Result
from ncclep_bench.doctor.selftests.faults import FAULTS, Fault, fault_named
from ncclep_bench.doctor.selftests.run import WORKER, Sight, merged, run_self_tests
from ncclep_bench.doctor.selftests.table import all_self_tests, self_test_named
from ncclep_bench.doctor_cli import main
from ncclep_bench.errors import InputError
from ncclep_bench.runtime.device import missing
from ncclep_bench.runtime.launch import marked_processes
from tests.conftest import MpiRun, shared_memory
from tests.native.cpu_device import COMPILER

ROOT = {"PYTHONPATH": str(Path(__file__).parents[3])}
ON_HOST = [test for test in all_self_tests() if "host" in test.backends]
HOST_FAULTS = [fault for fault in FAULTS if all("host" in self_test_named(code).backends for code in fault.tests)]


def leftovers() -> tuple[set[str], list[str], list[int]]:
    """Abandoned shared memory, folders of runs, and rank processes of this test's runs."""
    folders = [str(folder) for folder in Path(tempfile.gettempdir()).glob("ncclep-selftest-*")]
    return shared_memory(), folders, [pid for folder in folders for pid in marked_processes(WORKER, folder)]


@pytest.fixture
def nothing_stays_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    before = shared_memory()
    yield
    abandoned, folders, processes = leftovers()
    assert (folders, processes) == ([], [])
    # Ranks of tests beside this one begin and end; what they leave for a moment is gone soon.
    give_up_at = time.monotonic() + 20
    while abandoned := (abandoned - before) & shared_memory():
        assert time.monotonic() < give_up_at, abandoned
        time.sleep(0.1)


def doctor(*arguments: object) -> tuple[int, dict[str, Any], str]:
    """Exit code, the JSON document and standard error of `selftest`."""
    done = CliRunner().invoke(main, ["selftest", "--format", "json", *map(str, arguments)], prog_name="ncclep-doctor")
    return done.exit_code, json.loads(done.stdout) if done.stdout else {}, done.stderr


def verdicts(document: dict[str, Any]) -> list[tuple[str, str]]:
    return [(finding["code"], finding["verdict"]) for finding in document["findings"]]


# ---- the tables ----


def test_every_self_test_has_a_fault_that_it_must_catch():
    assert {code for fault in FAULTS for code in fault.tests} == {test.code for test in all_self_tests()}


def test_codes_and_names_are_unique_and_a_self_test_is_complete():
    rules = all_rules()
    assert [code for code, count in Counter(rule.code for rule in rules).items() if count > 1] == []
    assert len({fault.name for fault in FAULTS}) == len(FAULTS)
    for test in all_self_tests():
        assert all((test.title, test.why, test.by_hand, test.remedy, test.reference)), test.code
        assert test.elsewhere or set(test.backends) == {"host", "cuda"}, test.code


def test_a_misspelt_fault_gets_the_close_one():
    with pytest.raises(InputError, match="did you mean 'truncate'"):
        fault_named("trunkate")


def test_the_list_shows_self_tests_and_faults_and_starts_nothing():
    done = CliRunner().invoke(main, ["selftest", "--list"])

    assert done.exit_code == 0
    for name in (*(test.code for test in all_self_tests()), *(fault.name for fault in FAULTS)):
        assert name in done.stdout


@pytest.mark.parametrize("arguments", [["--inject", "nothing"], ["--select", "EP"], ["--np", "1"], ["--deadline", "0"]])
def test_wrong_usage_leaves_with_two(arguments: list[str]):
    assert CliRunner().invoke(main, ["selftest", *arguments]).exit_code == 2


@pytest.mark.parametrize(
    ("name", "gb_per_s"),
    [
        ("NVIDIA H100 NVL", 300),
        ("NVIDIA H100 PCIe", 25),
        ("NVIDIA H100 80GB HBM3", 450),
        ("NVIDIA H800", 200),
        ("NVIDIA GB200", 900),
        ("NVIDIA A100-SXM4-80GB", 300),
        ("Tesla V100-SXM2-32GB", 150),
        ("NVIDIA L4", None),
    ],
)
def test_what_a_gpu_sends_to_its_peers_follows_from_its_profile(name: str, gb_per_s: float | None):
    profile = profile_of(name)

    assert profile is not None
    assert profile.peer_gbytes == gb_per_s


# ---- what ranks say, put together ----


def result(seconds: float, *ranks: int, **fields: Any) -> Result:
    return Result(
        code="SELF001", verdict="error", summary=f"accuses {ranks}", ranks=ranks, seconds=seconds, lost=True, **fields
    )


def test_most_ranks_decide_whom_to_suspect_and_of_two_the_first():
    test = self_test_named("SELF001")

    assert merged(test, {0: result(1, 2), 1: result(3, 2), 2: result(2, 0)}).rank == 2
    assert merged(test, {0: result(1.1, 1), 1: result(1.0, 0)}).rank == 0
    assert merged(test, {0: result(1, 1)}, Sight(("rank 2 is stopped",), (2,))).rank == 2


def test_memory_that_is_too_small_on_one_rank_is_no_fault_of_the_others():
    short = Result(code="SELF001", verdict="not_run", summary="rank 1: needs 4 MiB, 1 MiB is free", lost=True)
    finding = merged(self_test_named("SELF001"), {0: result(1, 1), 1: short})

    assert (finding.verdict, finding.summary) == ("not_run", "rank 1: needs 4 MiB, 1 MiB is free")


# ---- real ranks ----


@pytest.mark.mpi
@pytest.mark.usefixtures("nothing_stays_behind")
@pytest.mark.parametrize("ranks", [3])
def test_a_healthy_machine_passes_and_every_self_test_says_what_it_moved(ranks: int):
    # Bandwidth is a timing, which a busy machine may spoil, and leaks take long: planting faults runs both.
    code, document, told = doctor("--np", ranks, "--ignore", "SELF002", "--ignore", "SELF009")

    assert [(found, verdict) for found, verdict in verdicts(document) if verdict not in ("ok", "not_run")] == []
    assert code == 0
    for finding in document["findings"]:
        if finding["verdict"] == "ok":
            assert f"{ranks} ranks, " in finding["summary"]
            assert finding["code"] in told
    assert ("SELF003", "not_run") in verdicts(document)


@pytest.mark.mpi
@pytest.mark.usefixtures("nothing_stays_behind")
@pytest.mark.parametrize("fault", [pytest.param(fault, id=fault.name) for fault in HOST_FAULTS])
def test_a_planted_fault_is_found_and_its_rank_is_named(fault: Fault):
    tests = [self_test_named(code) for code in fault.tests]
    # Who is waited for in vain is named after a third of the deadline; a thousand communicators take their time.
    deadline_s = None if fault.name == "leak" else 18.0
    findings = run_self_tests(tests, ranks=2, backend="host", deadline_s=deadline_s, fault=fault)

    assert [finding.code for finding in findings] == list(fault.tests)
    for finding, test in zip(findings, tests, strict=True):
        assert (finding.verdict, finding.rank) == (test.severity, 1), finding
        assert finding.summary
        assert finding.remedy


@pytest.mark.mpi
@pytest.mark.usefixtures("nothing_stays_behind")
@pytest.mark.parametrize("name", ["swap-dtype", "differ-field"])
def test_inject_shows_the_self_test_pass_without_the_fault_and_catch_it(name: str):
    code, document, _ = doctor("--inject", name)
    healthy, faulty, verdict = document["findings"]

    assert code == 1
    assert (healthy["verdict"], faulty["verdict"], faulty["rank"]) == ("ok", "error", 1)
    assert healthy["code"] == faulty["code"]
    assert (verdict["code"], verdict["verdict"]) == ("SELF900", "info")
    assert verdict["summary"] == f"{name} at rank 1: caught by {faulty['code']}, which names rank 1"


@pytest.mark.mpi
@pytest.mark.usefixtures("nothing_stays_behind")
@pytest.mark.parametrize(
    ("arguments", "verdict", "said"),
    [
        (["leak", "--select", "SELF010"], "error", "leak at rank 1: NOT caught by SELF010"),
        (["empty-graph"], "not_run", "CUDA graphs need the cuda backend"),
    ],
)
def test_a_fault_that_is_not_caught_is_said_and_has_an_exit_code_of_its_own(
    arguments: list[str], verdict: str, said: str
):
    code, document, _ = doctor("--inject", *arguments)

    assert code == 3
    assert document["findings"][-1]["code"] == "SELF900"
    assert document["findings"][-1]["verdict"] == verdict
    assert said in document["findings"][-1]["summary"]


@pytest.mark.mpi
@pytest.mark.usefixtures("nothing_stays_behind")
@pytest.mark.parametrize(
    ("number", "said"),
    # Whose parent, the launcher's, was quicker to ask for its end is gone, and nobody can tell how.
    [(signal.SIGKILL, "killed by SIGKILL|is gone"), (signal.SIGSTOP, "is stopped")],
)
def test_a_rank_that_somebody_kills_or_stops_is_named_and_the_next_self_test_gets_fresh_ranks(
    number: signal.Signals, said: str, tmp_path: Path
):
    arguments = ["-m", "ncclep_bench.doctor_cli", "selftest", "--select", "SELF001", "--select", "SELF010"]
    with subprocess.Popen(
        [sys.executable, *arguments, "--format", "json"],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env={**os.environ, **ROOT},
    ) as process:
        victim = rank_at_work(tmp_path)
        os.kill(victim, number)
        document = json.loads(process.communicate(timeout=240)[0])

    assert process.returncode == 1
    assert verdicts(document) == [("SELF001", "error"), ("SELF010", "ok")]
    finding = document["findings"][0]
    assert f"rank 1 (pid {victim}" in finding["summary"]
    assert finding["rank"] == 1
    assert re.search(said, "\n".join((finding["summary"], *finding["evidence"])))


def rank_at_work(directory: Path) -> int:
    """The pid of rank 1, once it moves rows."""
    give_up_at = time.monotonic() + 30
    while time.monotonic() < give_up_at:
        for file in directory.glob("ncclep-selftest-*/rank-1.step"):
            if b"dispatch" in file.read_bytes():
                return int(json.loads(file.with_suffix(".jsonl").read_text().splitlines()[0])["pid"])
        time.sleep(0.02)
    raise AssertionError("rank 1 has not begun")


@pytest.mark.mpi
@pytest.mark.usefixtures("nothing_stays_behind")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_whoever_ends_the_doctor_ends_its_ranks(number: signal.Signals, tmp_path: Path):
    command = [sys.executable, "-m", "ncclep_bench.doctor_cli", "selftest", "--select", "SELF001"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, env={**os.environ, **ROOT}) as process:
        rank_at_work(tmp_path)
        process.send_signal(number)
        assert process.communicate(timeout=240)[0] == b""

    assert process.returncode == 130


@pytest.mark.mpi
@pytest.mark.usefixtures("nothing_stays_behind")
def test_a_self_test_past_its_deadline_is_ended_and_says_where_it_was():
    code, document, _ = doctor("--select", "SELF002", "--deadline", "1.5")

    assert (code, verdicts(document)) == (1, [("SELF002", "error")])
    assert "makes no progress in communicator" in document["findings"][0]["summary"]
    assert document["findings"][0]["evidence"][0] == "not done after 1.5 s"


@pytest.mark.mpi
@pytest.mark.skipif(missing() is None, reason="there is a GPU")
def test_without_a_gpu_nothing_runs_on_cuda_and_the_reason_is_given():
    code, document, _ = doctor("--backend", "cuda", "--np", 2)

    assert code == 3
    assert {verdict for _, verdict in verdicts(document)} == {"not_run"}
    assert all(missing() in finding["summary"] for finding in document["findings"])


# ---- the cuda backend, its kernels on CPUs ----


def on_cpus(mpi_run: MpiRun, *arguments: str) -> list[Finding]:
    program = Path(__file__).parent / "cuda_on_cpu.py"
    done = mpi_run(2, "-m", "mpi4py", program, *arguments, env=ROOT, deadline_s=240)
    assert done.stdout, done.stderr
    return [msgspec.json.decode(line, type=Finding) for line in done.stdout.splitlines()]


@pytest.mark.mpi
@pytest.mark.skipif(COMPILER is None, reason="no g++: kernels cannot be built for the CPU")
def test_self_tests_pass_on_the_cuda_backend(mpi_run: MpiRun):
    codes = ["SELF003", "SELF004", "SELF006", "SELF007", "SELF008", "SELF009", "SELF011"]
    findings = on_cpus(mpi_run, "none", *codes)

    assert [(finding.code, finding.verdict) for finding in findings] == [(code, "ok") for code in codes]


@pytest.mark.mpi
@pytest.mark.skipif(COMPILER is None, reason="no g++: kernels cannot be built for the CPU")
@pytest.mark.parametrize("name", ["truncate", "stale", "empty-graph", "swap-dtype", "send-less", "round-scales"])
def test_a_planted_fault_is_found_on_the_cuda_backend(mpi_run: MpiRun, name: str):
    (finding,) = on_cpus(mpi_run, name, *fault_named(name).tests)

    assert (finding.verdict, finding.rank) == ("error", 1), finding


# ---- in ranks of a launcher ----

PROGRAM = """
import sys
from ncclep_bench.doctor.selftests.faults import fault_named
from ncclep_bench.doctor_cli import main
from ncclep_bench.runtime.world import environment_rank

fault, victim, *arguments = sys.argv[1:]
if fault != "none":
    fault_named(fault).plant(environment_rank() == int(victim), "host")
main(["selftest", "--format", "json", *arguments])
"""


@pytest.mark.mpi
def test_in_ranks_of_a_launcher_one_of_them_reports(mpi_run: MpiRun):
    done = mpi_run(3, "-c", PROGRAM, "none", "0", "--select", "SELF004", "--select", "SELF010", env=ROOT)

    assert done.returncode == 0, done.stderr
    assert verdicts(json.loads(done.stdout)) == [("SELF004", "ok"), ("SELF010", "ok")]


@pytest.mark.mpi
@pytest.mark.parametrize(
    ("fault", "victim", "deadline_s"), [("stop-rank", 0, 18), ("skip-call", 2, 18), ("swap-dtype", 1, 120)]
)
def test_in_ranks_of_a_launcher_the_first_rank_that_lives_reports_a_fault(
    mpi_run: MpiRun, fault: str, victim: int, deadline_s: int
):
    arguments = ["--select", "SELF001", "--select", "SELF010", "--deadline", str(deadline_s)]
    done = mpi_run(3, "-c", PROGRAM, fault, str(victim), *arguments, env=ROOT, deadline_s=240)
    document = json.loads(done.stdout)

    assert done.returncode != 0
    assert document["findings"][0]["verdict"] == "error"
    assert document["findings"][0]["rank"] == victim
    assert document["findings"][1]["verdict"] == ("ok" if fault == "swap-dtype" else "not_run")


@pytest.mark.mpi
@pytest.mark.hosts
@pytest.mark.parametrize(("size", "said"), [("1m", "/dev/shm has"), ("24m", "are free")])
def test_a_small_shared_memory_is_said(size: str, said: str):
    command = f'mount -t tmpfs -o size={size} tmpfs /dev/shm && exec "$@"'
    done = subprocess.run(
        ["unshare", "--mount", "sh", "-c", command, "sh", sys.executable, "-m", "ncclep_bench.doctor_cli", "selftest",
         "--select", "SELF009", "--format", "json"],
        capture_output=True, text=True, check=False, timeout=240, env={**os.environ, **ROOT},
    )  # fmt: skip

    assert done.returncode == 3, done.stderr
    assert said in done.stdout + done.stderr
