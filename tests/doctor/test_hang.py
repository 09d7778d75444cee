"""A job that stands still is looked at from outside: real ranks, real sockets, and one answer that names the rank."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import socketserver
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from ncclep_bench.doctor import ras_client
from ncclep_bench.doctor.processes import find_ranks, not_permitted
from ncclep_bench.doctor_cli import main
from ncclep_bench.errors import InputError
from tests.doctor.recorded_texts import RAS

PROGRAM = Path(__file__).with_name("hang_ranks.py")
NOBODY = "127.0.0.1:9"
NO_RANKS = ("--pid", os.getpid())
"""Nothing at or below this process is a rank, whatever else runs here."""


def doctor(*arguments: object) -> Result:
    return CliRunner().invoke(main, ["hang", *map(str, arguments), "--format", "json"])


def findings(done: Result) -> dict[str, dict[str, Any]]:
    assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
    return {finding["code"]: finding for finding in json.loads(done.stdout)["findings"]}


@contextlib.contextmanager
def job(mpi_command: Callable[..., list[str]], fault: str, ranks: int = 4) -> Iterator[int]:
    """The pid of a launcher whose ranks have come to the place where rank 2 has its fault."""
    command = mpi_command(ranks, PROGRAM, fault, auto_cleanup=False)
    launcher = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True)
    try:
        assert launcher.stdout is not None
        for _ in range(ranks):
            assert launcher.stdout.readline() == "ready\n"
        yield launcher.pid
    finally:
        for rank in find_ranks([launcher.pid]):
            with contextlib.suppress(ProcessLookupError):
                os.kill(rank.pid, signal.SIGKILL)
        launcher.communicate(timeout=240)


@pytest.mark.mpi
@pytest.mark.parametrize(
    ("fault", "said", "verdict"),
    [
        (
            "is stopped",
            "is stopped (state T: SIGSTOP, or Ctrl-Z); ranks 0, 1, 3 wait for it in dispatch of case 7",
            "error",
        ),
        ("sleeps", "is elsewhere (sleeping", "error"),
        ("computes", "is at work elsewhere", "warning"),
    ],
)
def test_the_rank_that_holds_up_a_job_is_named(
    fault: str, said: str, verdict: str, mpi_command: Callable[..., list[str]]
):
    with job(mpi_command, fault) as launcher:
        time.sleep(0.5)
        (suspect,) = [rank.pid for rank in find_ranks([launcher]) if rank.rank == 2]
        done = doctor("--pid", launcher, "--wait", 1.5, "--ras", NOBODY)
    found = findings(done)

    answer = found["EP401"]
    assert answer["summary"].startswith(f"rank 2 (pid {suspect}) {said}")
    assert "ranks 0, 1, 3 wait for it in dispatch of case 7 since " in answer["summary"]
    assert answer["verdict"] == verdict
    # One cause is told once.
    assert found["EP402"]["verdict"] == found["EP403"]["verdict"] == "ok"
    assert answer["remedy"].startswith(f"kill -CONT {suspect}" if fault == "is stopped" else "ps -o ")
    assert done.exit_code == (verdict == "error")
    assert found["NCCL016"]["verdict"] == "not_run"
    assert f"nothing answers at {NOBODY}" in found["NCCL016"]["summary"]
    assert "no log was given" in found["EP201"]["summary"]


@pytest.mark.mpi
def test_a_rank_that_died_is_missed_by_its_number(mpi_command: Callable[..., list[str]]):
    with job(mpi_command, "dies") as launcher:
        time.sleep(0.5)
        done = doctor("--pid", launcher, "--wait", 0.5, "--ras", NOBODY)
    answer = findings(done)["EP401"]

    assert answer["verdict"] == "error"
    assert answer["summary"].startswith("rank 2 has no process any more: it died")
    assert done.exit_code == 1


@pytest.mark.mpi
def test_a_job_that_moves_is_said_to_move(mpi_command: Callable[..., list[str]]):
    with job(mpi_command, "none") as launcher:
        done = doctor("--pid", launcher, "--wait", 1, "--ras", NOBODY)
    found = findings(done)

    assert done.exit_code == 0
    assert found["EP401"]["verdict"] == "info"
    assert found["EP401"]["summary"].startswith("the job moves: 4 ranks came to ")
    assert found["EP402"]["verdict"] == found["EP403"]["verdict"] == "ok"


@pytest.mark.mpi
@pytest.mark.skipif(shutil.which("py-spy") is None, reason="py-spy is not installed")
def test_stacks_show_where_the_rank_is(mpi_command: Callable[..., list[str]]):
    with job(mpi_command, "sleeps") as launcher:
        time.sleep(0.5)
        found = findings(doctor("--pid", launcher, "--wait", 0.5, "--ras", NOBODY))

    assert any("rank 2 in main (hang_ranks.py" in line for line in found["EP401"]["evidence"])
    assert found["EP404"]["verdict"] == "ok"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may become another user")
def test_a_process_of_another_user_is_not_permitted_which_is_not_absent():
    with subprocess.Popen(["sleep", "60"]) as process:
        try:
            assert not_permitted([process.pid]) == []
            os.seteuid(65534)
            assert not_permitted([process.pid]) == [process.pid]
            assert process.pid in not_permitted()
        finally:
            os.seteuid(0)
            process.kill()


class RasServer(socketserver.ThreadingTCPServer):
    """Speaks as NCCL's RAS does on a real socket; gives one answer after the other, the last one again and again."""

    allow_reuse_address = True
    daemon_threads = True

    def __init__(self, answers: list[str], *, json: bool = True, pause_s: float = 0.0) -> None:
        self.answers, self.json, self.pause_s = answers, json, pause_s
        self.asked: list[str] = []
        super().__init__(("127.0.0.1", 0), RasDialogue)

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.server_address[1]}"


class RasDialogue(socketserver.StreamRequestHandler):
    server: RasServer

    def handle(self) -> None:
        for line in self.rfile:
            command = line.decode().strip()
            self.server.asked.append(command)
            if command.startswith("CLIENT PROTOCOL"):
                self.wfile.write(b"SERVER PROTOCOL 2\n")
            elif command.startswith("SET FORMAT") and not self.server.json:
                self.wfile.write(b"ERROR: Unknown command\n")
            elif command == "VERBOSE STATUS":
                answers = self.server.answers
                time.sleep(self.server.pause_s)
                with contextlib.suppress(OSError):
                    self.wfile.write((answers.pop(0) if len(answers) > 1 else answers[0]).encode())
                return
            else:
                self.wfile.write(b"OK\n")


@contextlib.contextmanager
def ras(answers: list[str], **how: Any) -> Iterator[RasServer]:
    with RasServer(answers, **how) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()


def counts(*of_ranks: int, missing: str = "") -> str:
    """What `ncclras -f json -v` prints of one communicator."""
    ranks = ", ".join(
        f'{{"rank": {rank}, "host": "10.0.0.1", "pid": {900 + rank}, "status": {{"init_state": 0, "async_error": 0}}, '
        f'"collective_counts": {{"AllReduce": {count}, "AllGather": 3}}}}'
        for rank, count in enumerate(of_ranks)
    )
    return (
        f'{{"nccl_version": "2.28.9", "communicators_count": 1, "communicators": [{{"hash": "0xab", "size": '
        f'{len(of_ranks)}, "ranks": [{ranks}], "missing_ranks": [{missing}]}}], "ras": {{"timeouts_count": 0}}}}\n'
    )


GONE = '{"rank": 2, "host": "10.0.0.1", "pid": 902, "status": {"unresponsive": true, "considered_dead": true}}'
INCOMPLETE = (
    RAS
    + """
Errors
======

INCOMPLETE
  Missing communicator data from 1 job process
  Process 902 on node 10.0.0.1 managing GPU 2

#0-0 (27a079b828ff1a75) INCOMPLETE
  Missing communicator data from 1 rank
  Rank 2 -- GPU 2 managed by process 902 on node 10.0.0.1
"""
)


@pytest.mark.parametrize(
    ("answers", "verdict", "said"),
    [
        ([counts(40, 40, 40), counts(45, 45, 44)], "info", "the job moves: RAS counts more collectives"),
        ([counts(40, 39, 40)], "error", "rank 1 is behind: it launched 42 collectives, others 43"),
        ([counts(40, 40, 40)], "warning", "RAS counts did not move"),
        (
            [counts(40, 40, missing=GONE)],
            "error",
            "rank 2 does not answer RAS: considered dead; process 902 on node 10.0",
        ),
        ([INCOMPLETE], "error", "rank 2 does not answer RAS: does not answer; GPU 2 managed by process 902"),
    ],
    ids=["progress", "one behind", "all equal", "dead", "text of an old NCCL"],
)
def test_two_answers_of_ras_tell_progress(answers: list[str], verdict: str, said: str):
    with ras(answers, json=answers != [INCOMPLETE]) as server:
        done = doctor(*NO_RANKS, "--ras", server.address, "--wait", 0.2)
        asked = server.asked
    found = findings(done)

    assert found["EP401"]["summary"].startswith(said)
    assert found["EP401"]["verdict"] == verdict
    assert done.exit_code == (verdict == "error")
    assert found["NCCL020"]["verdict"] == ("error" if "does not answer" in said else "ok")
    assert [command for command in asked if not command.startswith("TIMEOUT")] == 2 * [
        "CLIENT PROTOCOL 2",
        "SET FORMAT json",
        "VERBOSE STATUS",
    ]


def test_ras_that_does_not_answer_in_time_is_given_up():
    with ras(["late"], pause_s=20) as server, pytest.raises(ras_client.RasError, match=r"not answer within 0\.5 s"):
        ras_client.status(ras_client.Address.parse(server.address), 0.5)


def test_an_answer_of_ras_has_a_largest_size(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(ras_client, "MAX_ANSWER_BYTES", 100_000)

    with ras(["x" * 300_000]) as server, pytest.raises(ras_client.RasError, match="an answer of more than"):
        ras_client.status(ras_client.Address.parse(server.address), 10)


@pytest.mark.parametrize("said", [b"HTTP/1.1 400 Bad Request\r\n\r\n", b"", b"z" * 9000])
def test_a_server_that_is_no_ras_is_said_to_be_none(said: bytes):
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def serve() -> None:
            connection, _ = listening.accept()
            with connection:
                connection.recv(100)
                connection.sendall(said)

        threading.Thread(target=serve, daemon=True).start()
        with pytest.raises(ras_client.RasError, match=r"as RAS does|closed|without end"):
            ras_client.status(ras_client.Address("127.0.0.1", listening.getsockname()[1]), 10)


@pytest.mark.parametrize("name", ["x" * 300, "a." + "x" * 70, "a..b", "\x1b[31m"])
def test_a_name_that_no_host_can_have_is_no_ras(name: str):
    with pytest.raises(ras_client.RasError, match="nothing answers"):
        ras_client.status(ras_client.Address(name, 28028), 10)


@pytest.mark.parametrize("address", ["", "localhost", "host:", ":28028", "host:99999", "host:port"])
def test_an_address_that_is_none_is_wrong_usage(address: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("NCCL_RAS_ADDR", address or "x")

    assert doctor().exit_code == 2


def test_without_anything_to_look_at_nothing_could_run():
    done = doctor(*NO_RANKS, "--ras", NOBODY, "--wait", 0.2)

    assert done.exit_code == 3
    assert "nothing to look at: no process" in done.stderr


def test_logs_alone_name_the_rank_that_the_others_accuse(tmp_path: Path):
    log = tmp_path / "job.log"
    log.write_text("".join(f"Warning: NCCL EP timeout for combine receive, rank {r}, src_rank 4\n" for r in range(4)))
    found = findings(doctor(*NO_RANKS, "--log", log, "--ras", NOBODY, "--wait", 0.2))

    assert found["EP401"]["summary"] == "rank 4 is whom the time-out lines accuse"
    assert found["EP401"]["verdict"] == "error"
    assert found["EP402"]["verdict"] == "not_run"


def test_a_pid_that_does_not_exist_is_wrong_usage():
    with pytest.raises(InputError, match="there is no process 4194999"):
        find_ranks([4194999])


def proc(root: Path, pid: int, parent: int, maps: str = "", **variables: object) -> None:
    folder = root / str(pid)
    folder.mkdir()
    (folder / "stat").write_text(f"{pid} (a ) name) S {parent}{' 1' * 50}")
    (folder / "environ").write_bytes(b"\0".join(f"{name}={value}".encode() for name, value in variables.items()))
    (folder / "maps").write_text(maps)


@pytest.mark.parametrize(
    ("rank", "ranks", "here"),
    [
        ("PMI_RANK", "PMI_SIZE", "MPI_LOCALNRANKS"),
        ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE"),
        ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"),
        ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "ELSE"),
    ],
)
def test_ranks_are_found_by_what_their_launcher_tells_them(rank: str, ranks: str, here: str, tmp_path: Path):
    proc(tmp_path, 10, 1)
    for number in range(2):
        wrapper, worker = 20 + number, 30 + number
        told = {rank: number, ranks: 4, here: 2, "SLURM_STEP_ID": 0}
        proc(tmp_path, wrapper, 10, **told)
        proc(tmp_path, worker, wrapper, "7f /usr/lib/libmpi.so.12", **told)
        proc(tmp_path, 40 + number, worker, **told)  # a helper of the worker
    proc(tmp_path, 50, 1, SLURM_PROCID=0, SLURM_STEP_ID=0xFFFFFFFB)  # a batch script is no rank

    found = find_ranks(root=tmp_path)

    assert [(each.pid, each.rank, each.ranks, each.local_ranks) for each in found] == [
        (30, 0, 4, None if here == "ELSE" else 2),
        (31, 1, 4, None if here == "ELSE" else 2),
    ]
    proc(tmp_path, 60, 1)
    proc(tmp_path, 61, 60, **{rank: 0, ranks: 1, "SLURM_STEP_ID": 0})
    with pytest.raises(InputError, match=r"2 jobs run on this machine\n.*--pid 10 \(2 ranks\); --pid 60 \(1 ranks\)"):
        find_ranks(root=tmp_path)
    assert [each.pid for each in find_ranks([60], tmp_path)] == [61]
