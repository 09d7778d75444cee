"""A sweep over real ranks: what it leaves on disk, and what becomes of it when a rank is killed, stopped or fails."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ncclep_bench.errors import InputError
from ncclep_bench.model.measurement import Measurement
from ncclep_bench.results.frames import load_run
from ncclep_bench.results.store import read_run

pytestmark = pytest.mark.mpi

SCENARIO = """
collective = ["dispatch", "combine", "dense_all_gather"]
tokens = [8, 16]
hidden = 32
num_experts = 4
top_k = 2

[timing]
budget_s = 0.4
ci_share = 0.0001
max_samples = 1_000_000
"""
CASES = 5


class Sweep:
    """A sweep as a process of its own, with what it may leave behind."""

    def __init__(self, folder: Path, *arguments: str | Path, launcher: tuple[str, ...] = ()) -> None:
        self.out = folder / "run"
        scenario = folder / "small.toml"
        scenario.write_text(SCENARIO)
        self.segments: set[str] = set()
        command = [
            *launcher,
            sys.executable,
            "-m",
            "ncclep_bench.cli",
            "sweep",
            scenario,
            "--format",
            "csv",
            *arguments,
        ]
        self.process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )

    def wait_for_case(self, index: int) -> None:
        """Return when the ranks are at work on the case, or, on a busy machine, on one after it."""
        self._wait(lambda: len(self.records()) >= index)
        time.sleep(0.2)

    def rank_pid(self, rank: int) -> int:
        """The pid of a rank, whose shared memory files are remembered."""
        pid = int(json.loads((self.out / ".job" / f"rank-{rank}.json").read_text())["pid"])
        self.segments |= set(re.findall(r"/dev/shm/mpich_shm_\S+", Path("/proc", str(pid), "maps").read_text()))
        assert self.segments
        return pid

    def end(self, timeout_s: float = 240) -> tuple[int, str]:
        """Exit code and standard error."""
        try:
            _, stderr = self.process.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            self.process.kill()
            _, stderr = self.process.communicate()
            pytest.fail(f"the sweep did not end within {timeout_s:g} s\n{stderr}")
        return self.process.returncode, stderr

    def records(self) -> list[Measurement]:
        return list(read_run(self.out).measurements)

    def left_running(self) -> list[str]:
        """Command lines of processes that have the run's folder on them."""
        return [line for line in _command_lines() if str(self.out) in line]

    def wait_until_nothing_runs(self, timeout_s: float = 60) -> None:
        """Ranks that nobody waits for take a moment to end."""
        end = time.monotonic() + timeout_s
        while self.left_running() and time.monotonic() < end:
            time.sleep(0.05)
        assert self.left_running() == []

    def left_in_shared_memory(self) -> set[str]:
        return {segment for segment in self.segments if Path(segment).exists()}

    def _wait(self, condition: Callable[[], bool], timeout_s: float = 120) -> None:
        end = time.monotonic() + timeout_s
        while time.monotonic() < end:
            try:
                if condition():
                    return
            except (OSError, InputError):
                pass
            if self.process.poll() is not None:
                pytest.fail(f"the sweep ended too early\n{self.end()}")
            time.sleep(0.02)
        pytest.fail("the ranks did not come to work")


def _ranks(mpi_command: Callable[..., list[str]]) -> tuple[str, ...]:
    """A launcher of two ranks."""
    return tuple(mpi_command(2)[:-1])


def _command_lines() -> Iterator[str]:
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            yield file.read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Sweep]]:
    begun: list[Sweep] = []

    def start_sweep(*arguments: str | Path, launcher: tuple[str, ...] = ()) -> Sweep:
        begun.append(Sweep(tmp_path, *arguments, launcher=launcher))
        return begun[-1]

    yield start_sweep
    for sweep in begun:
        if sweep.process.poll() is None:
            sweep.process.kill()
        with contextlib.suppress(ValueError):
            sweep.process.communicate()


def test_every_case_of_a_sweep_is_verified_and_reported(start: Callable[..., Sweep], tmp_path: Path) -> None:
    sweep = start("--np", "2", "--out", tmp_path / "run", "--format", "html", "--set", "budget_s=0.05")

    code, stderr = sweep.end()

    assert code == 0, stderr
    assert {path.name for path in sweep.out.iterdir()} == {"run.jsonl", "summary.csv", "report.html"}
    records = sweep.records()
    assert [(record.outcome, record.verified) for record in records] == [("passed", True)] * CASES
    assert all(len(sample) == 2 and min(sample) > 0 for record in records for sample in record.samples_us)
    assert all(record.wire_bytes == record.planned_bytes for record in records)
    frames = load_run(sweep.out)
    assert frames.cases["p50_us"].notna().all()
    assert (frames.cases["ranks"] == 2).all()


@pytest.mark.parametrize(
    ("sent", "words"),
    [(signal.SIGKILL, r"was killed by SIGKILL|is gone .*Killed \(signal 9\)"), (signal.SIGSTOP, "is stopped")],
    ids=["killed", "stopped"],
)
def test_a_lost_rank_is_named_and_costs_its_case_alone(
    start: Callable[..., Sweep], tmp_path: Path, sent: signal.Signals, words: str
) -> None:
    sweep = start("--np", "2", "--out", tmp_path / "run", "--deadline", "3")
    sweep.wait_for_case(2)
    pid = sweep.rank_pid(1)
    on_disk = len(sweep.records())
    os.kill(pid, sent)

    code, stderr = sweep.end()

    assert code == 1, stderr
    assert on_disk >= 2
    records = sweep.records()
    assert sorted(record.outcome for record in records) == ["error", *["passed"] * (CASES - 1)]
    lost = next(record for record in records if record.outcome == "error")
    assert f"rank 1 (pid {pid} on " in lost.reason
    assert re.search(words, lost.reason), lost.reason
    # The next one when the signal was sent, or one after it.
    assert records.index(lost) in (on_disk, on_disk + 1)
    assert "rank 0" not in lost.reason
    assert not Path("/proc", str(pid)).exists()
    assert sweep.left_running() == []
    assert sweep.left_in_shared_memory() == set()
    assert (lost.samples_us, lost.verified) == ([], None)

    code, stderr = start("--np", "2", "--resume", tmp_path / "run").end()

    assert code == 0, stderr
    assert [record.outcome for record in sweep.records()] == ["passed"] * CASES
    assert "[1/1]" in stderr


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP], ids=lambda sent: sent.name)
def test_an_interrupted_sweep_keeps_what_it_has_and_leaves_nothing_running(
    start: Callable[..., Sweep], tmp_path: Path, sent: signal.Signals
) -> None:
    sweep = start("--np", "2", "--out", tmp_path / "run")
    sweep.wait_for_case(1)
    sweep.rank_pid(1)
    sweep.process.send_signal(sent)

    code, stderr = sweep.end()

    assert (code, "Traceback" in stderr) == (130, False), stderr
    assert f"--resume {sweep.out}" in stderr
    outcomes = [record.outcome for record in sweep.records()]
    assert 1 <= len(outcomes) < CASES
    assert set(outcomes) == {"passed"}
    assert not (sweep.out / ".job").exists()
    assert sweep.left_running() == []
    assert sweep.left_in_shared_memory() == set()


def test_an_impatient_second_interrupt_does_not_cut_the_clean_up_short(
    start: Callable[..., Sweep], tmp_path: Path
) -> None:
    sweep = start("--np", "2", "--out", tmp_path / "run")
    sweep.wait_for_case(1)
    launcher = int(Path("/proc", str(sweep.rank_pid(0)), "stat").read_text().rpartition(")")[2].split()[1])
    launcher = int(Path("/proc", str(launcher), "stat").read_text().rpartition(")")[2].split()[1])
    # A stopped launcher does not end by itself, so that the clean-up has to wait before it kills.
    os.kill(launcher, signal.SIGSTOP)
    for _ in range(3):
        sweep.process.send_signal(signal.SIGINT)
        time.sleep(0.3)

    code, stderr = sweep.end()

    assert code != 0
    assert "Traceback" not in stderr
    assert sweep.left_running() == []
    assert not (sweep.out / ".job").exists()


def test_a_killed_supervisor_takes_its_ranks_along(start: Callable[..., Sweep], tmp_path: Path) -> None:
    sweep = start("--np", "2", "--out", tmp_path / "run")
    sweep.wait_for_case(1)
    ranks = [sweep.rank_pid(0), sweep.rank_pid(1)]
    sweep.process.kill()
    sweep.process.wait()

    sweep.wait_until_nothing_runs()

    assert [pid for pid in ranks if Path("/proc", str(pid)).exists()] == []
    assert sweep.left_in_shared_memory() == set()


def test_a_folder_that_a_sweep_writes_is_not_taken_by_another(
    start: Callable[..., Sweep], tmp_path: Path, mpi_command: Callable[..., list[str]]
) -> None:
    first = start("--np", "2", "--out", tmp_path / "run")
    first.wait_for_case(1)
    # It is still at work when the others have started, however long that takes them.
    first.process.send_signal(signal.SIGSTOP)

    for others in (
        start("--np", "2", "--resume", first.out),
        start("--resume", first.out, launcher=_ranks(mpi_command)),
    ):
        code, stderr = others.end()
        assert code == 2
        assert stderr.count("another sweep writes there now") == 1

    first.process.send_signal(signal.SIGCONT)
    code, stderr = first.end()
    assert code == 0, stderr
    assert len((first.out / "run.jsonl").read_text().splitlines()) == 1 + CASES


def test_a_folder_that_is_taken_away_ends_the_sweep_without_a_traceback(
    start: Callable[..., Sweep], tmp_path: Path
) -> None:
    sweep = start("--np", "2", "--out", tmp_path / "run")
    sweep.wait_for_case(1)
    (tmp_path / "run").rename(tmp_path / "elsewhere")

    code, stderr = sweep.end()

    assert code == 2
    assert f"{tmp_path / 'run'}" in stderr
    assert "internal error" not in stderr
    sweep.wait_until_nothing_runs()


def test_ranks_with_different_cases_are_told_so_and_do_not_wait_for_each_other(
    start: Callable[..., Sweep], tmp_path: Path, mpi_command: Callable[..., list[str]]
) -> None:
    launcher = tuple(mpi_command(1)[:-1])
    command = [sys.executable, "-m", "ncclep_bench.cli", "sweep", str(tmp_path / "small.toml")]
    sweep = start("--out", tmp_path / "run", "--set", "tokens=8", ":", "-n", "1", *command, launcher=launcher)

    code, stderr = sweep.end()

    assert code == 2, stderr
    assert stderr.count("rank 1 has other cases than rank 0") == 1
    assert not sweep.out.exists()


def test_a_rank_that_alone_meets_an_unforeseen_error_ends_all(
    start: Callable[..., Sweep], tmp_path: Path, mpi_command: Callable[..., list[str]]
) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / ".job").write_text("in the way of rank 0")
    sweep = start("--out", tmp_path / "run", launcher=_ranks(mpi_command))

    code, stderr = sweep.end()

    assert code != 0
    assert str(tmp_path / "run" / ".job") in stderr
    sweep.wait_until_nothing_runs()


def test_repeats_are_measured_in_processes_of_their_own(start: Callable[..., Sweep], tmp_path: Path) -> None:
    sweep = start("--np", "2", "--out", tmp_path / "run", "--repeats", "2", "--set", "budget_s=0.05")

    code, stderr = sweep.end()

    assert code == 0, stderr
    assert [record.repeat for record in sweep.records()] == [0] * CASES + [1] * CASES


def test_a_sweep_under_mpiexec_uses_its_ranks_and_rank_zero_alone_reports(
    start: Callable[..., Sweep], tmp_path: Path, mpi_command: Callable[..., list[str]]
) -> None:
    launcher = _ranks(mpi_command)
    sweep = start("--out", tmp_path / "run", "--set", "budget_s=0.05", launcher=launcher)

    code, stderr = sweep.end()

    assert code == 0, stderr
    assert [record.outcome for record in sweep.records()] == ["passed"] * CASES
    assert stderr.count("results:") == 1
    assert stderr.count(f"[{CASES}/{CASES}]") == 1
    assert stderr.count(f"--resume {sweep.out} goes on") == 1


def test_under_mpiexec_rank_zero_alone_asks_the_doctor(
    start: Callable[..., Sweep], tmp_path: Path, mpi_command: Callable[..., list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NCCL_P2P_DISABLE", "1")
    monkeypatch.setenv("NCCL_P2P_LEVEL", "NVL")
    sweep = start("--out", tmp_path / "run", "--set", "budget_s=0.05", launcher=_ranks(mpi_command))

    code, stderr = sweep.end()

    assert code == 0, stderr
    assert stderr.count("NCCL006") == stderr.count("preflight: ") == 1
    preflight = read_run(tmp_path / "run").header.preflight
    assert preflight is not None
    assert "NCCL006" in [remark.code for remark in preflight.findings]


def test_what_a_lost_rank_says_of_its_host_is_anonymised_with_the_run(
    start: Callable[..., Sweep], tmp_path: Path
) -> None:
    sweep = start("--out", tmp_path / "run", "--np", "2", "--anonymise")
    sweep.wait_for_case(2)
    os.kill(sweep.rank_pid(1), signal.SIGKILL)

    code, stderr = sweep.end()

    assert code == 1, stderr
    reasons = " ".join(record.reason for record in sweep.records())
    assert "on host-1" in reasons
    assert f"on {socket.gethostname()}" not in reasons


def test_wrong_input_under_mpiexec_is_told_once_and_hangs_nobody(
    start: Callable[..., Sweep], tmp_path: Path, mpi_command: Callable[..., list[str]]
) -> None:
    sweep = start("--out", tmp_path / "run", "--set", "num_experts=3", launcher=_ranks(mpi_command))

    code, stderr = sweep.end()

    assert code == 2, stderr
    assert stderr.count("error: ") == 1
    assert "num_experts 3 is not divisible by 2 ranks" in stderr
    assert not (tmp_path / "run").exists()


def test_a_stopped_rank_under_mpiexec_is_named_and_resume_goes_on(
    start: Callable[..., Sweep], tmp_path: Path, mpi_command: Callable[..., list[str]]
) -> None:
    launcher = _ranks(mpi_command)
    sweep = start("--out", tmp_path / "run", "--deadline", "3", launcher=launcher)
    sweep.wait_for_case(1)
    pid = sweep.rank_pid(1)
    os.kill(pid, signal.SIGSTOP)

    code, stderr = sweep.end()

    assert code != 0
    assert f"rank 1 (pid {pid} on " in stderr
    assert "is stopped" in stderr
    outcomes = [record.outcome for record in sweep.records()]
    assert set(outcomes[: outcomes.index("error")]) == {"passed"}
    sweep.wait_until_nothing_runs()

    code, stderr = start("--resume", tmp_path / "run", launcher=launcher).end()

    assert code == 0, stderr
    assert [record.outcome for record in sweep.records()] == ["passed"] * CASES
