"""One group's shared ground on the host: who shares memory, how small things are exchanged, how ranks meet."""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence

import msgspec
import numpy as np

from ncclep_bench.backends.contract import Array, Stats
from ncclep_bench.errors import RankError, UsageError
from ncclep_bench.runtime.group import Group
from ncclep_bench.runtime.shared_memory import ControlBlock, ControlHandle, LocalBarrier
from ncclep_bench.runtime.world import MpiGroup


class _Introduction(msgspec.Struct, frozen=True):
    """What a rank tells the others at init: which machine it is on and how its control block can be opened."""

    boot_id: str
    control: ControlHandle


class HostSession:
    """Peers, barrier and small exchanges of one group; collective to create.

    `local`: ranks whose memory this one has proved to reach, itself included; the others are sent messages.
    Proof is a nonce read through the mapping: MPI's and the machine's idea of a host are only candidates, since
    containers and namespaces share less than they seem to. Raises RankError naming ranks that do not answer.
    """

    def __init__(self, group: Group, *, transport: str = "auto", deadline_s: float = 60.0) -> None:
        self.group = group
        self.rank, self.size = group.rank, group.size
        self.deadline_s = deadline_s
        self.stats = Stats()
        self._control = ControlBlock.create(group.rank)
        mine = msgspec.json.encode(_Introduction(_boot_id(), self._control.handle))
        introductions = [msgspec.json.decode(data, type=_Introduction) for data in self.allgather(mine)]
        self._blocks: dict[int, ControlBlock] = {self.rank: self._control}
        if transport != "messages":
            self._open_peers(introductions)
        reached = msgspec.json.encode(sorted(self._blocks))
        tables = [set(msgspec.json.decode(data, type=list[int])) for data in self.allgather(reached)]
        # Sharing counts only between ranks that agree on the whole circle, else a barrier would wait for a stranger.
        self.local = tuple(sorted(tables[self.rank])) if self._circle_agrees(tables) else (self.rank,)
        if transport == "shared" and len(self.local) != self.size:
            missing = sorted(set(range(self.size)) - set(self.local))
            self.close()
            raise RankError(
                f"rank {self.rank} on {socket.gethostname()} cannot reach the memory of ranks {missing}",
                ranks=tuple(missing),
                hint='use transport = "auto" or "messages"',
            )
        for rank in set(self._blocks) - set(self.local):
            self._blocks.pop(rank).close()
        self.remote = tuple(rank for rank in range(self.size) if rank not in self.local)
        self.messenger = self._messenger()
        self._barrier = LocalBarrier([self._blocks[rank] for rank in self.local], self.local.index(self.rank))
        self.sync("init")

    @property
    def algorithm(self) -> str:
        """How rows reach the peers, as reports name it."""
        if not self.remote:
            return "shared_windows"
        return "messages" if len(self.local) == 1 else "shared_windows+messages"

    def rotation(self) -> Sequence[int]:
        """Local peers, starting behind this rank and ending with it, so that not all ranks visit one peer at once."""
        at = self.local.index(self.rank)
        return self.local[at + 1 :] + self.local[: at + 1]

    def sync(self, operation: str) -> None:
        """All local ranks meet; raises RankError naming those that are late, gone, or have given up."""
        self._barrier.wait(self.deadline_s, operation)

    def allgather(self, data: bytes) -> list[bytes]:
        """Everybody's bytes, by rank; set-up and updates only."""
        if isinstance(self.group, MpiGroup):
            return self.group.allgather(data, self.deadline_s)
        return self.group.allgather(data)

    def exchange(self, array: Array, operation: str) -> list[Array]:
        """Everybody's small array, by rank, flattened; same shape and dtype everywhere.

        Through the control blocks where all ranks are local and it fits.
        """
        data = np.ascontiguousarray(array)
        self.stats.control_bytes += data.nbytes * (self.size - 1)
        if self.remote or data.nbytes > self._control.scratch.nbytes:
            return [np.frombuffer(item, dtype=data.dtype) for item in self.allgather(data.tobytes())]
        self._control.publish(data)
        self.sync(operation)
        everybody = [self._blocks[rank].peek(data.dtype, data.size).copy() for rank in range(self.size)]
        self.sync(operation)
        return everybody

    def abort(self, message: str) -> None:
        """Tell local peers that this rank has given up, so that they stop waiting for it."""
        self._barrier.abort(message)

    def close(self) -> None:
        """Unmap and close the control blocks."""
        for block in self._blocks.values():
            block.close()
        self._blocks = {}

    def _open_peers(self, introductions: Sequence[_Introduction]) -> None:
        candidates = self.group.same_host() if isinstance(self.group, MpiGroup) else range(self.size)
        for rank in candidates:
            other = introductions[rank]
            if rank == self.rank or other.boot_id != introductions[self.rank].boot_id:
                continue
            try:
                self._blocks[rank] = ControlBlock.open(other.control)
            except OSError:
                continue

    def _circle_agrees(self, tables: list[set[int]]) -> bool:
        mine = tables[self.rank]
        return all(tables[rank] == mine for rank in mine)

    def _messenger(self) -> MpiGroup | None:
        if self.remote and not isinstance(self.group, MpiGroup):
            raise UsageError(
                f"rank {self.rank} cannot reach the memory of ranks {list(self.remote)}",
                hint="a group that spans hosts must be an MPI communicator",
            )
        return self.group if isinstance(self.group, MpiGroup) else None


def _boot_id() -> str:
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            return file.read().strip()
    except OSError:
        return f"unknown-{os.uname().nodename}"
