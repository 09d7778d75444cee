"""A client of NCCL's RAS: one status query over its text protocol, with a deadline and a size limit."""

from __future__ import annotations

import contextlib
import socket
import time
from typing import NamedTuple

DEFAULT_ADDRESS = "localhost:28028"
MAX_ANSWER_BYTES = 64 << 20

_MAX_LINE_BYTES = 4096
_PROTOCOL = 2


class RasError(Exception):
    """No usable answer, and why."""


class Address(NamedTuple):
    """Where RAS listens."""

    host: str
    port: int

    @classmethod
    def parse(cls, text: str) -> Address:
        """HOST:PORT, or [IPV6]:PORT. Raises ValueError for anything else."""
        host, colon, port = text.rpartition(":")
        host = host.removeprefix("[").removesuffix("]")
        if not colon or not host or not port.isdecimal() or not 0 < int(port) < 65536:
            raise ValueError(f"{text!r} is no HOST:PORT")
        return cls(host, int(port))

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def status(address: Address, deadline_s: float) -> str:
    """The verbose status of the job, as JSON where this NCCL can, else as text.

    Raises RasError when nobody answers, not as RAS does, or not to the end within `deadline_s`.
    """
    give_up_at = time.monotonic() + deadline_s
    try:
        with socket.create_connection(address, timeout=deadline_s) as connection:
            talk = _Talk(connection, give_up_at)
            answer = talk.ask(f"CLIENT PROTOCOL {_PROTOCOL}")
            if not answer.upper().startswith("SERVER PROTOCOL "):
                raise RasError(f"{address} does not answer as RAS does: {answer[:80]!r}")
            # RAS itself waits for its peers, and must tell before this side gives up.
            talk.ask(f"TIMEOUT {max(1, int(deadline_s / 2))}")
            talk.ask("SET FORMAT json")  # NCCL before 2.28.7 refuses, and goes on with text
            talk.say("VERBOSE STATUS")
            return talk.rest().decode(errors="replace")
    except TimeoutError as error:
        raise RasError(f"{address} did not answer within {deadline_s:g} s") from error
    except (OSError, UnicodeError) as error:  # the latter of a name that no host can have
        raise RasError(f"nothing answers at {address}: {getattr(error, 'strerror', None) or error}") from error


class _Talk:
    def __init__(self, connection: socket.socket, give_up_at: float) -> None:
        self._connection = connection
        self._give_up_at = give_up_at
        self._pending = b""

    def say(self, line: str) -> None:
        self._connection.settimeout(self._left_s())
        self._connection.sendall(f"{line}\n".encode())

    def ask(self, line: str) -> str:
        """The one line that answers."""
        self.say(line)
        while b"\n" not in self._pending:
            if len(self._pending) > _MAX_LINE_BYTES:
                raise RasError("an answer without end to a command of one line")
            if not self._receive():
                raise RasError(f"the connection was closed after {line!r}")
        answer, _, self._pending = self._pending.partition(b"\n")
        return answer.decode(errors="replace").strip()

    def rest(self) -> bytes:
        """All until the other side closes."""
        parts = [self._pending]
        size = len(self._pending)
        self._pending = b""
        while self._receive():
            parts.append(self._pending)
            size += len(self._pending)
            self._pending = b""
            if size > MAX_ANSWER_BYTES:
                raise RasError(f"an answer of more than {MAX_ANSWER_BYTES >> 20} MiB")
        return b"".join(parts)

    def _receive(self) -> bool:
        self._connection.settimeout(self._left_s())
        data = b""
        with contextlib.suppress(ConnectionResetError):
            data = self._connection.recv(1 << 16)
        self._pending += data
        return bool(data)

    def _left_s(self) -> float:
        left_s = self._give_up_at - time.monotonic()
        if left_s <= 0:
            raise TimeoutError
        return left_s
