"""Windows of rows: one per local rank, mapped by all of them side by side in one address range."""

from __future__ import annotations

import math
import mmap

import msgspec
import numpy as np
import numpy.typing as npt

from ncclep_bench.backends.contract import Array
from ncclep_bench.backends.host.session import HostSession
from ncclep_bench.runtime.shared_memory import Mapping, SharedFile, SharedFileHandle


class RowWindows:
    """`rows` rows of `row_bytes` on this rank, and everybody else's; collective to create.

    Mapped and touched once, here, so that no transfer pays for it. All windows lie in one address range, `stride_rows`
    apart: row j of the p-th local rank is row p * stride_rows + j of `everything`. Behind them lie `private_rows` rows
    that only this rank has.
    """

    def __init__(self, session: HostSession, row_bytes: int, rows: int, label: str, *, private_rows: int = 0) -> None:
        self._local, self._row_bytes = session.local, row_bytes
        own = SharedFile.create(rows * row_bytes, f"{label} of rank {session.rank}")
        offers = [
            msgspec.json.decode(data, type=tuple[SharedFileHandle, int])
            for data in session.allgather(msgspec.json.encode((own.handle, rows)))
        ]
        self._rows = [offers[rank][1] for rank in session.local]
        files = [own if rank == session.rank else SharedFile.open(offers[rank][0]) for rank in session.local]
        if private_rows:
            files.append(SharedFile.create(private_rows * row_bytes, f"rows returned to rank {session.rank}"))
            self._rows.append(private_rows)
        unit = math.lcm(mmap.PAGESIZE, row_bytes)
        stride = -(-max(file.nbytes for file in files) // unit) * unit
        self.stride_rows = stride // row_bytes
        self._mapping = Mapping.reserve(len(files), stride)
        self._views: dict[tuple[int, npt.DTypeLike], Array] = {}
        for position, file in enumerate(files):
            self._mapping.place(position, file)
        self._mapping.touch()
        # Descriptors are needed only until everybody has opened them; the mappings stay.
        session.sync(f"mapping {label}")
        for file in files:
            file.close()

    def of(self, rank: int, dtype: npt.DTypeLike) -> Array:
        """The window of a local rank as a matrix [rows, row_bytes / itemsize]."""
        return self._place(self._local.index(rank), dtype)

    def private(self, dtype: npt.DTypeLike) -> Array:
        """The rows behind the windows that only this rank has."""
        return self._place(len(self._local), dtype)

    def first_row(self, rank: int) -> int:
        """Row of `everything` at which a local rank's window starts."""
        return self._local.index(rank) * self.stride_rows

    @property
    def first_private_row(self) -> int:
        """Row of `everything` at which the private rows start."""
        return len(self._local) * self.stride_rows

    def everything(self, dtype: npt.DTypeLike) -> Array:
        """All windows as one matrix; rows between windows are not mapped and must not be touched."""
        return self._mapping.array.view(dtype).reshape(-1, self._row_bytes // np.dtype(dtype).itemsize)

    def close(self) -> None:
        """Let go of the memory; views that somebody still holds stay readable."""
        self._views.clear()
        self._mapping.close()

    def _place(self, position: int, dtype: npt.DTypeLike) -> Array:
        """The window at `position`, made once: a small launch spends more on views than on its rows."""
        view = self._views.get((position, dtype))
        if view is None:
            first = position * self.stride_rows
            rows = self._rows[position] if position < len(self._rows) else 0
            view = self._views[position, dtype] = self.everything(dtype)[first : first + rows]
        return view
