"""The supervisor with real processes: one that plays all ranks, and launchers that do not start any."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from ncclep_bench.errors import CannotRunError
from ncclep_bench.model.measurement import RunHeader
from ncclep_bench.model.scenario import Timing
from ncclep_bench.results.store import RunWriter, read_run
from ncclep_bench.runtime.launch import launcher_command, require_room_for_mpi
from ncclep_bench.sweeps.job import LOG_FILE, Event, Job, Source
from ncclep_bench.sweeps.supervise import Ended, supervise
from tests.cases import make_case


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    RunWriter(tmp_path, RunHeader(started_at="", command=[], scenarios=[], environment={})).close()
    return tmp_path


def job(*collectives: str, deadline_s: float = 20.0, processes: int = 1) -> Job:
    timing = Timing(max_samples=10, deadline_s=deadline_s)
    return Job([make_case(name) for name in collectives], {"": Source(timing, {}, ".")}, processes)


def test_a_job_runs_in_a_process_of_its_own_and_tells_of_every_case(directory: Path) -> None:
    events: list[Event] = []

    ended = supervise(job("dispatch", "dense_all_gather"), directory, None, events.append)

    assert ended == Ended(None)
    assert events == [Event(0), Event(0, "passed"), Event(1), Event(1, "passed")]
    assert [record.outcome for record in read_run(directory).measurements] == ["passed", "passed"]


def test_a_case_past_its_deadline_ends_the_job_and_names_the_rank(directory: Path) -> None:
    slow = job("dispatch", deadline_s=0.2)
    timing = Timing(min_samples=100_000, max_samples=100_000, deadline_s=0.2)

    ended = supervise(Job(slow.cases, {"": Source(timing, {}, ".")}, 1), directory, None, lambda event: None)

    assert ended.case == 0
    assert ended.reason is not None
    assert ended.reason.startswith("not finished after 0.2 s: rank 0 (pid ")
    assert " makes no progress in " in ended.reason


def test_an_exception_in_a_rank_names_rank_host_and_operation(directory: Path) -> None:
    broken = Job([make_case("dispatch", routing="measured", routing_param="no such load")], job().sources, 1)

    ended = supervise(broken, directory, None, lambda event: None)

    assert ended.case == 0
    assert ended.reason is not None
    assert f"on {os.uname().nodename}), building the routing: " in ended.reason
    assert "no such load" in ended.reason
    assert "Traceback" in (directory / LOG_FILE).read_text()


def test_a_launcher_that_fails_ends_the_job_before_any_case(directory: Path) -> None:
    ended = supervise(job("dispatch"), directory, [sys.executable, "-c", "raise SystemExit(7)"], lambda event: None)

    assert ended == Ended("the ranks ended: exit code 7", None)


def test_a_launcher_of_another_mpi_is_told_from_a_failing_case(directory: Path) -> None:
    # It starts one process of the two, and that one knows nothing of a group, as under another MPI's launcher.
    alone = [sys.executable, "-c", "import os, sys; os.execv(sys.argv[3], sys.argv[3:])"]

    ended = supervise(job("dispatch", processes=2), directory, alone, lambda event: None)

    assert (ended.case, ended.cannot_run) == (None, True)
    assert ended.reason is not None
    assert "the launcher started 2 ranks, but MPI sees 1" in ended.reason


def test_a_missing_launcher_says_what_to_install() -> None:
    with pytest.raises(CannotRunError, match="no-such-mpiexec: no such command") as caught:
        launcher_command("no-such-mpiexec --oversubscribe")

    assert "pip install 'ncclep-bench[mpi]'" in str(caught.value)
    assert caught.value.exit_code == 3


def test_a_given_launcher_keeps_its_words() -> None:
    assert launcher_command("env MPI=yes")[1:] == ["MPI=yes"]


@pytest.mark.parametrize(
    ("own", "seen"), [({}, ":oversubscribe"), ({"PRTE_MCA_rmaps_default_mapping_policy": "x"}, "x")]
)
def test_a_launcher_may_start_more_ranks_than_cores_unless_the_user_says_otherwise(
    directory: Path, monkeypatch: pytest.MonkeyPatch, own: dict[str, str], seen: str
) -> None:
    for name, value in own.items():
        monkeypatch.setenv(name, value)
    tell = "import os; print(os.environ['PRTE_MCA_rmaps_default_mapping_policy'])"

    supervise(job("dispatch"), directory, [sys.executable, "-c", tell], lambda event: None)

    assert (directory / LOG_FILE).read_text() == f"{seen}\n"


def test_ranks_that_would_not_fit_into_shared_memory_are_not_started() -> None:
    require_room_for_mpi(1)
    with pytest.raises(CannotRunError, match=r"has .* free, MPI needs .* to start 1000000000 ranks"):
        require_room_for_mpi(1_000_000_000)
