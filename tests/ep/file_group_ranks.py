"""Ranks without MPI: processes that meet through files. `file_group_ranks.py PROGRAM RANK SIZE FOLDER`."""

from __future__ import annotations

import os
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from ncclep_bench import EpCommunicator, EpConfig
from ncclep_bench.errors import ConfigMismatchError, RankError


class FileGroup:
    """The least that can be a group."""

    def __init__(self, rank: int, size: int, folder: Path) -> None:
        self.rank, self.size, self.folder, self.turn = rank, size, folder, 0

    def allgather(self, data: bytes) -> list[bytes]:
        self.turn += 1
        part = self.folder / f"{self.turn}-{self.rank}.part"
        part.write_bytes(data)
        part.rename(part.with_suffix(""))
        files = [self.folder / f"{self.turn}-{rank}" for rank in range(self.size)]
        while not all(file.exists() for file in files):
            time.sleep(0.002)
        return [file.read_bytes() for file in files]

    def barrier(self) -> None:
        self.allgather(b"")


def works(group: FileGroup) -> None:
    config = EpConfig(num_experts=2 * group.size, top_k=1, hidden=3, expert_elements=5)
    with EpCommunicator(group, config) as comm:
        assert comm.topology.local == tuple(range(group.size))
        sums = comm.reduce_scatter_expert_grads(np.full((2 * group.size, 5), group.rank + 1, np.float32))
        np.testing.assert_array_equal(sums, np.full((2, 5), sum(range(1, group.size + 1)), np.float32))
        tokens = np.full((2, 3), group.rank, np.float32)
        handle = comm.create_handle(np.array([[0], [2 * group.size - 1]]), np.ones((2, 1), np.float32))
        rows = handle.dispatch(tokens).tokens
        np.testing.assert_array_equal(handle.combine(rows * 2), tokens * 2)
    assert threading.active_count() == 1


def differs(group: FileGroup) -> None:
    with pytest.raises(ConfigMismatchError, match="top_k differs: 1 on ranks 0, 1; 2 on rank 2"):
        EpCommunicator(group, EpConfig(num_experts=6, top_k=1 + (group.rank == 2)))


def lacks_one(group: FileGroup) -> None:
    if group.rank == 2:
        return
    with pytest.raises(RankError, match=r"FileGroup.allgather did not return within 1.0 s, at the agreement"):
        EpCommunicator(group, EpConfig(num_experts=6, init_deadline_s=1.0))
    # The call that nothing can end is still there, in its own thread.
    os._exit(0)


def fails(group: FileGroup) -> None:
    group.folder /= "no such folder"
    with pytest.raises(FileNotFoundError):
        EpCommunicator(group, EpConfig(num_experts=6))


PROGRAMS = {"works": works, "differs": differs, "lacks_one": lacks_one, "fails": fails}

if __name__ == "__main__":
    PROGRAMS[sys.argv[1]](FileGroup(int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4])))
