"""Run a command that may never end: after a deadline it is killed, or left behind where the kernel keeps it."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Sequence


def run_bounded(command: Sequence[str], deadline_s: float) -> subprocess.CompletedProcess[str]:
    """What the command printed. Raises TimeoutError after `deadline_s`, and OSError where it cannot be started.

    `subprocess.run` waits for a killed child; one that hangs in a driver cannot die, and would take the caller along.
    """
    child = subprocess.Popen(
        list(command),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    try:
        out, err = child.communicate(timeout=deadline_s)
    except BaseException as error:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(1)
        for stream in (child.stdout, child.stderr):
            if stream:
                stream.close()
        if isinstance(error, subprocess.TimeoutExpired):
            raise TimeoutError(f"no answer within {deadline_s:g} s") from None
        raise
    return subprocess.CompletedProcess(child.args, child.returncode, out, err)
