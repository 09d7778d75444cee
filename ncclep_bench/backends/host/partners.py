"""The traditional partners on plain MPI collectives, packing, layout and weighted sums included."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from ncclep_bench.backends.contract import Array
from ncclep_bench.backends.host.row_sum import RowSum
from ncclep_bench.backends.host.session import HostSession
from ncclep_bench.errors import UsageError
from ncclep_bench.model.placement import Placement
from ncclep_bench.model.plan import IntArray, ranges
from ncclep_bench.routing.assignment import destinations
from ncclep_bench.runtime.shared_memory import require_memory
from ncclep_bench.runtime.world import MpiGroup


def mpi_of(session: HostSession) -> MpiGroup:
    """The MPI group that the partners run on. Raises UsageError for a group that is none."""
    if session.messenger is None:
        raise UsageError("the traditional partners are MPI collectives", hint="use an MPI communicator as group")
    return session.messenger


class PaddedExchange:
    """Tokens to experts and back through MPI_Alltoall of equal blocks: per rank the most experts × the largest count.

    Collective to update and to call; `update` agrees on the capacity, so nothing is dropped.
    """

    def __init__(self, session: HostSession, placement: Placement, hidden: int, dtype: npt.DTypeLike) -> None:
        self._mpi = mpi_of(session)
        self._session, self._placement = session, placement
        self._hidden, self._dtype = hidden, np.dtype(dtype)
        self._experts = int(placement.local_counts.max())
        self._slots = 0
        self._buffers: dict[tuple[str, int, str], Array] = {}

    def update(self, topk_idx: Array, topk_weights: Array) -> None:
        """Take this rank's routing; exchanges how many tokens go to each expert."""
        session = self._session
        ranks, experts = session.size, self._experts
        rank_of, local = destinations(topk_idx.astype(np.int32, copy=False), session.rank, self._placement)
        token, slot = np.nonzero(rank_of >= 0)
        block = rank_of[token, slot].astype(np.int64) * experts + local[token, slot]
        order = np.argsort(block, kind="stable")
        counts = np.bincount(block, minlength=ranks * experts)
        everybody = np.stack(session.exchange(counts, "update")).reshape(ranks, ranks, experts)
        capacity = int(everybody.max())
        self.tokens = len(topk_idx)
        blocks = np.arange(ranks * experts) * capacity
        place = ranges(blocks, counts)
        self._sent_tokens = token[order]
        self._sent_blocks = _filled(blocks, counts)
        self._sums = RowSum.of(token[order], place, topk_weights[token, slot][order], self.tokens)
        arrived = everybody[:, session.rank]
        self.expert_counts = arrived.sum(axis=0)[: int(self._placement.local_counts[session.rank])]
        # Expert-major order: local expert, source rank, token.
        first = blocks.reshape(ranks, experts).T.ravel()
        self._arrived_slots = ranges(first, arrived.T.ravel())
        self._arrived_blocks = _filled(first, arrived.T.ravel())
        slots = ranks * experts * capacity
        if slots == self._slots:
            return
        # What the last routing took must not stand in the way of what this one needs.
        self._buffers.clear()
        self._slots = slots
        # Padding grows with the skew, which only the routing tells: all ranks' send and receive buffers together.
        padded_bytes = 2 * ranks * slots * self._hidden * self._dtype.itemsize
        require_memory(padded_bytes, f"padding to {capacity} rows per expert and source on {ranks} ranks")

    @property
    def received_rows(self) -> int:
        """Rows that arrive here, one per choice."""
        return len(self._arrived_slots)

    def dispatch(self, tokens: Array, out: Array) -> None:
        """Pack, exchange, and lay out `tokens` [tokens, any] into `out` [received_rows, any], expert-major."""
        send, received = self._buffer("send", tokens), self._buffer("receive", tokens)
        done = 0
        for start, count in self._sent_blocks:
            picked = self._sent_tokens[done : done + count]
            np.take(tokens, picked, axis=0, out=send[start : start + count], mode="clip")
            done += count
        self._mpi.alltoall(send, received)
        np.take(received, self._arrived_slots, axis=0, out=out, mode="clip")

    def combine(self, rows: Array, out: Array) -> None:
        """Pack `rows`, which lie as `dispatch` laid them, send them back, and sum them weighted into `out`."""
        send, received = self._buffer("send", rows), self._buffer("receive", rows)
        done = 0
        for start, count in self._arrived_blocks:
            send[start : start + count] = rows[done : done + count]
            done += count
        self._mpi.alltoall(send, received)
        self._sums.run(received, out)

    def _buffer(self, use: str, like: Array) -> Array:
        """Padded rows for MPI, kept from call to call; slots nobody fills stay as they are, as nobody reads them."""
        key = (use, like.shape[1], like.dtype.name)
        if key not in self._buffers:
            self._buffers[key] = np.zeros((self._slots, like.shape[1]), like.dtype)
        return self._buffers[key]


class DenseExperts:
    """All parameters to all ranks through MPI_Allgather, all gradients summed everywhere through MPI_Allreduce."""

    def __init__(self, session: HostSession, placement: Placement, elements: int, dtype: npt.DTypeLike) -> None:
        self._mpi = mpi_of(session)
        most = int(placement.local_counts.max())
        self._direct = placement.in_equal_blocks
        shape = (placement.ranks, most, elements)
        self._send = np.zeros(shape[1:] if not self._direct else (0, elements), dtype)
        self._received = np.zeros(shape if not self._direct else (0, 0, elements), dtype)
        self._owner = [owners[0] for owners in placement.owners]
        self._local = [int(placement.local_id[owner, expert]) for expert, owner in enumerate(self._owner)]

    def all_gather(self, params: Array, out: Array) -> None:
        """Every expert into `out` [num_experts, elements]; uneven or replicated placements travel in padded parts."""
        if self._direct:
            self._mpi.allgather_into(params, out)
            return
        self._send[: len(params)] = params
        self._mpi.allgather_into(self._send, self._received)
        for expert, (owner, local) in enumerate(zip(self._owner, self._local, strict=True)):
            out[expert] = self._received[owner, local]

    def all_reduce(self, grads: Array, out: Array, dtype: str) -> None:
        """The sum of everybody's `grads` [num_experts, elements]."""
        self._mpi.allreduce(grads, out, dtype)


def _filled(first: IntArray, counts: IntArray) -> list[tuple[int, int]]:
    """(first slot, rows) of the blocks that hold anything."""
    return [(start, count) for start, count in zip(first.tolist(), counts.tolist(), strict=True) if count]
