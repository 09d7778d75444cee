"""Starting rank processes through MPI's launcher, finding them on this host, and leaving nothing of them behind."""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import IO

from ncclep_bench.errors import CannotRunError, InputError
from ncclep_bench.runtime.processes import segments_of
from ncclep_bench.runtime.shared_memory import free_shm_bytes
from ncclep_bench.units import format_bytes

# Measured with MPICH 5.0, which does not look before it writes: its ranks die of SIGBUS.
_MPI_BYTES_PER_RANK = 1_100_000
_FOR_RANKS = {
    # Open MPI starts more ranks than cores only when told so; other launchers do not read these.
    "OMPI_MCA_rmaps_base_oversubscribe": "true",
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
    # The C library writes around the caches only from its idea of their size on, tens to hundreds of MiB; below that
    # a store first reads its line. With this all large copies do, those inside MPI as well as those of our windows.
    "GLIBC_TUNABLES": "glibc.cpu.x86_non_temporal_threshold=0x40000",
}
_PR_SET_PDEATHSIG = 1
_IMPORTED_FROM = Path(__file__).parents[2]


def rank_environment() -> dict[str, str]:
    """Variables of rank processes that we start; what the user has set goes first."""
    return _FOR_RANKS | os.environ


def launcher_command(given: str | None) -> list[str]:
    """The command that starts ranks: as given, or mpiexec beside this Python, or on PATH.

    Raises CannotRunError when there is none, InputError for quotes that do not close.
    """
    try:
        words = shlex.split(given) if given else ["mpiexec"]
    except ValueError as error:
        raise InputError(f"--launcher {given}: {error}", hint='as in --launcher "srun --mpi=pmix"') from None
    beside_python = shutil.which(words[0], path=str(Path(sys.executable).parent)) if not given else None
    found = beside_python or (shutil.which(words[0]) if words else None)
    if found is None:
        raise CannotRunError(
            f"{words[0] if words else 'an empty --launcher'}: no such command, so no ranks can be started",
            hint="pip install 'ncclep-bench[mpi]' brings mpiexec; or give --launcher",
        )
    # MPICH's launcher kills every rank when one dies, before anybody could say which.
    keep_peers = ["-disable-auto-cleanup"] if len(words) == 1 and _is_hydra(found) else []
    return [found, *words[1:], *keep_peers]


def require_room_for_mpi(ranks: int) -> None:
    """Raises CannotRunError when this host's /dev/shm is too small for MPI to start `ranks`."""
    needed, free = ranks * _MPI_BYTES_PER_RANK, free_shm_bytes(Path("/dev/shm"))
    if free < needed:
        raise CannotRunError(
            f"/dev/shm has {format_bytes(free)} free, MPI needs {format_bytes(needed)} to start {ranks} ranks",
            hint="remove what dead jobs left there, start fewer ranks, or give a container --shm-size=1g",
        )


@contextlib.contextmanager
def rank_processes(
    launcher: Sequence[str] | None,
    ranks: int,
    module: str,
    arguments: Sequence[str],
    mark: str,
    stdout: IO[bytes],
    stderr: IO[bytes],
    segments: Callable[[], set[str]] = set,
) -> Iterator[subprocess.Popen[bytes]]:
    """`python -m module arguments` in `ranks` processes of `launcher`, or without one in a process by itself.

    Nothing of them is left afterwards, whatever happens. `mark` is one of the arguments, and nobody else's. `segments`:
    shared memory of ranks that may be gone before they can be asked.
    """
    # Ranks run what this process runs, not a folder of its name in the current one. Where that is the same folder,
    # it may be the only way to import it.
    safe = [] if os.path.samefile(os.curdir, _IMPORTED_FROM) else ["-P"]
    starter = [] if launcher is None else [*launcher, "-n", str(ranks)]
    command = [*starter, sys.executable, *safe, "-m", module, *arguments]
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=stdout,
        stderr=stderr,
        env=rank_environment(),
        start_new_session=True,
        preexec_fn=_die_with_parent,
    )
    try:
        yield process
    finally:
        _end(process, lambda: marked_processes(module, mark), segments)


def marked_processes(module: str, mark: str) -> list[int]:
    """Processes of this host that run `python -m module`, with -P or without, and `mark` on their command line.

    Nobody else's, if it is unique.
    """
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            words = (entry / "cmdline").read_bytes().split(b"\0")
            if os.fsencode(mark) in words and [b"-m", module.encode()] in (words[1:3], words[2:4]):
                found.append(int(entry.name))
    return found


def _end(
    process: subprocess.Popen[bytes], ranks: Callable[[], Sequence[int]], segments: Callable[[], set[str]]
) -> None:
    """Kill a launcher and what is left of its `ranks` on this host; remove their shared memory and `segments`."""
    with _undisturbed():
        left = segments()
        if process.poll() is None:
            left |= _kill(ranks())
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout=2)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        # Ranks that the launcher had lost, or that started while the others were killed.
        left |= _kill(ranks())
        for segment in left:
            Path(segment).unlink(missing_ok=True)


@contextlib.contextmanager
def ended_as_at_the_keyboard() -> Iterator[None]:
    """Whoever asks this process to end gets the same clean-up as with Ctrl-C; under nohup nobody asks."""
    asked = [number for number in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(number) != signal.SIG_IGN]
    before = {number: signal.signal(number, signal.default_int_handler) for number in asked}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def _undisturbed() -> Iterator[None]:
    """Somebody impatient presses Ctrl-C again: the clean-up, which takes moments, comes first."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT, signal.SIGTERM, signal.SIGHUP))
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _kill(pids: Sequence[int]) -> set[str]:
    """Kill processes; the shared memory they leave."""
    segments: set[str] = set()
    for pid in pids:
        segments |= segments_of(pid)
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    return segments


def launcher_says(log: str) -> list[str]:
    """What MPICH's launcher tells in its log of the rank that ended first: all there is when it was quicker to ask."""
    return [f"the launcher says: {said}" for said in re.findall(r"EXIT STRING: (.+)", log)]


def _is_hydra(mpiexec: str) -> bool:
    told = subprocess.run([mpiexec, "--version"], capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL)
    return "HYDRA" in told.stdout


def _die_with_parent() -> None:
    # A supervisor that is killed outright must not leave ranks behind: MPI's launcher takes them along.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
