"""The channel pool (S10): persistent requests to peers elsewhere, rebuilt when placement or activation changes."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import NamedTuple

from ncclep_bench.backends.contract import Array
from ncclep_bench.backends.host.session import HostSession
from ncclep_bench.runtime.world import Channel, start_all, wait_all


class Message(NamedTuple):
    """One buffer to or from a peer; `control` messages (counts) do not count as wire bytes."""

    peer: int
    array: Array
    tag: int
    control: bool = False

    @property
    def signature(self) -> tuple[int, int, int]:
        """What a persistent request is bound to: memory, length, tag."""
        return (self.array.ctypes.data, self.array.nbytes, self.tag)


class _Line(NamedTuple):
    """The open requests to one peer in one direction, and what they were opened for."""

    messages: tuple[Message, ...]
    signature: tuple[tuple[int, int, int], ...]
    channels: tuple[Channel, ...]


class ChannelPool:
    """Persistent sends and receives per peer; `configure` rebuilds only the peers whose buffers changed."""

    def __init__(self, session: HostSession) -> None:
        self._session = session
        self._lines: dict[tuple[str, int], _Line] = {}

    def configure(self, sends: Sequence[Message], receives: Sequence[Message]) -> None:
        """Open what is missing, close what is no longer wanted."""
        wanted: dict[tuple[str, int], list[Message]] = {}
        for direction, messages in (("send", sends), ("receive", receives)):
            for message in messages:
                wanted.setdefault((direction, message.peer), []).append(message)
        for key in set(self._lines) - set(wanted):
            self._close(key)
        for key, messages in wanted.items():
            signature = tuple(message.signature for message in messages)
            if key in self._lines and self._lines[key].signature == signature:
                continue
            start = time.perf_counter_ns()
            self._close(key)
            self._lines[key] = _Line(tuple(messages), signature, tuple(self._open(key[0], m) for m in messages))
            self._count("channel_rebuilds")
            self._count("channel_rebuild_total_us", (time.perf_counter_ns() - start) / 1e3)

    def start_receives(self) -> None:
        """Post every receive."""
        for (direction, _), line in self._lines.items():
            if direction == "receive":
                start_all(line.channels)

    def start_send(self, peer: int) -> None:
        """Start the sends to one peer, and count their bytes."""
        line = self._lines.get(("send", peer))
        if line is None:
            return
        start_all(line.channels)
        stats = self._session.stats
        stats.messages += len(line.messages)
        for message in line.messages:
            if message.control:
                stats.control_bytes += message.array.nbytes
            else:
                stats.wire_bytes += message.array.nbytes

    def finish(self, operation: str) -> None:
        """Wait for everything that was started; raises RankError naming the peer that is late."""
        lines = list(self._lines.values())
        wait_all((channel for line in lines for channel in line.channels), self._session.deadline_s, operation)
        self._count("channels_open", sum(len(line.channels) for line in lines))
        self._count("channels_used", sum(message.array.nbytes > 0 for line in lines for message in line.messages))

    def close(self) -> None:
        """Free every request."""
        for key in list(self._lines):
            self._close(key)

    def _open(self, direction: str, message: Message) -> Channel:
        messenger = self._session.messenger
        assert messenger is not None, "remote peers need a messenger"
        open_channel = messenger.send_channel if direction == "send" else messenger.recv_channel
        return open_channel(message.peer, message.array, message.tag)

    def _close(self, key: tuple[str, int]) -> None:
        line = self._lines.pop(key, None)
        for channel in line.channels if line else ():
            channel.free()

    def _count(self, name: str, amount: float = 1) -> None:
        self._session.stats.count(name, amount)
