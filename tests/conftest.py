"""What many tests need: real MPI ranks, and skips that say what is missing."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Protocol

import pytest


class MpiRun(Protocol):
    def __call__(
        self,
        ranks: int,
        *python_args: str | Path,
        deadline_s: float = 240.0,
        auto_cleanup: bool = True,
        env: Mapping[str, str] | None = None,
        cwd: Path | None = None,
    ) -> subprocess.CompletedProcess[str]: ...


def _mpiexec() -> str | None:
    # The mpich wheel puts mpiexec beside the interpreter, which need not be on PATH.
    return shutil.which("mpiexec", path=str(Path(sys.executable).parent)) or shutil.which("mpiexec")


def _has_namespaces() -> bool:
    return os.geteuid() == 0 and all(shutil.which(command) for command in ("ip", "unshare", "nft"))


_NEEDS: dict[str, tuple[Callable[[], bool], str]] = {
    "mpi": (lambda: _mpiexec() is not None, "no mpiexec: pip install '.[mpi]'"),
    "hosts": (_has_namespaces, "needs root, ip (iproute2), unshare and nft (nftables)"),
    "gpu": (lambda: Path("/dev/nvidiactl").exists(), "no NVIDIA GPU"),
    "browser": (lambda: shutil.which("chromium") is not None, "no chromium"),
}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for marker, (available, reason) in _NEEDS.items():
        marked = [item for item in items if item.get_closest_marker(marker)]
        if marked and not available():
            for item in marked:
                item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(scope="session")
def mpi_command() -> Callable[..., list[str]]:
    """`mpi_command(ranks, *python_args, auto_cleanup=True)`: the command line that runs python on that many ranks."""

    def command(ranks: int, *python_args: str | Path, auto_cleanup: bool = True) -> list[str]:
        mpiexec = _mpiexec()
        if mpiexec is None:
            pytest.skip(_NEEDS["mpi"][1])
        keep_peers = [] if auto_cleanup else ["-disable-auto-cleanup"]
        return [mpiexec, *keep_peers, "-n", str(ranks), sys.executable, *map(str, python_args)]

    return command


def shared_memory() -> set[str]:
    """What MPI has in /dev/shm for processes that are gone: nobody maps it."""
    left = set(map(str, Path("/dev/shm").glob("mpich_shm_*")))
    for maps in Path("/proc").glob("[0-9]*/maps"):
        with contextlib.suppress(OSError):
            text = maps.read_text()
            left = {segment for segment in left if segment not in text}
    return left


def _remove_left_memory(since: float) -> None:
    """Of ranks that were killed or aborted: tests beside this one look whether theirs leave any."""
    left = shared_memory()
    # What a rank elsewhere has just made is mapped a moment later.
    time.sleep(0.2)
    for segment in left & shared_memory():
        with contextlib.suppress(FileNotFoundError):
            if Path(segment).stat().st_mtime >= since:
                Path(segment).unlink()


@pytest.fixture
def mpi_run(mpi_command: Callable[..., list[str]]) -> MpiRun:
    """Run `python *python_args` (a script, or `"-m", module`) on real MPI ranks and wait for all of them.

    Standard output and error are captured as text. With `auto_cleanup=False` the peers of a rank that dies live on.
    Past the deadline every rank is killed and the test fails with what they had printed.
    """

    def run(
        ranks: int,
        *python_args: str | Path,
        deadline_s: float = 240.0,
        auto_cleanup: bool = True,
        env: Mapping[str, str] | None = None,
        cwd: Path | None = None,
    ) -> subprocess.CompletedProcess[str]:
        command = mpi_command(ranks, *python_args, auto_cleanup=auto_cleanup)
        mark, started_at = str(uuid.uuid4()), time.time()
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=cwd,
            # Unbuffered, print() writes a line's end by itself, and another rank's line may come in between.
            env={**os.environ, "PYTHONUNBUFFERED": "", **(env or {}), "NCCLEP_TEST_RUN": mark},
        )
        try:
            stdout, stderr = process.communicate(timeout=deadline_s)
        except subprocess.TimeoutExpired:
            _kill_run(mark)
            stdout, stderr = process.communicate()
            pytest.fail(f"{ranks} ranks did not end within {deadline_s:g} s\n{stdout}\n{stderr}")
        finally:
            _kill_run(mark)
            if process.returncode:
                _remove_left_memory(started_at)
        return subprocess.CompletedProcess(command, process.returncode, stdout, stderr)

    return run


def _kill_run(mark: str) -> None:
    """Kill what still runs under the mark, and return when it is gone."""
    # MPICH's ranks unlink their segment on the way out, which these do not take. All are asked before the first is
    # killed, because the others follow at once.
    segments = {segment for process in _running(mark) for segment in _mpich_segments(process)}
    give_up_at = time.monotonic() + 10
    while (processes := _running(mark)) and time.monotonic() < give_up_at:
        for process in processes:
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(process.name), signal.SIGKILL)
        time.sleep(0.01)
    for segment in segments:
        Path(segment).unlink(missing_ok=True)


def _mpich_segments(process: Path) -> list[str]:
    try:
        return re.findall(r"/dev/shm/mpich_shm_\S+", (process / "maps").read_text())
    except OSError:
        return []


def _running(mark: str) -> list[Path]:
    # Ranks lead sessions of their own and outlive a killed launcher, but all carry the mark in their environment.
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if f"NCCLEP_TEST_RUN={mark}".encode() in (process / "environ").read_bytes().split(b"\0"):
                found.append(process)
    return found
