"""The smallest thing that can be a group of ranks."""

from __future__ import annotations

from typing import Protocol


class Group(Protocol):
    """Ranks that can exchange bytes at set-up: an MPI communicator wrapped by `world`, or anybody's own object."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def allgather(self, data: bytes, /) -> list[bytes]:
        """Everybody's `data`, by rank."""

    def barrier(self) -> None: ...
