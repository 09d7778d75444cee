"""Tokens to experts and back through an all-to-all of equal blocks, capacity without drops."""

from __future__ import annotations

from typing import Any

import numpy as np

from ncclep_bench.backends.cuda.session import CudaSession
from ncclep_bench.backends.cuda.tokens import TokenHandle
from ncclep_bench.model.dtype import DType
from ncclep_bench.model.placement import Placement
from ncclep_bench.native.loader import Launch
from ncclep_bench.runtime.nccl import Communicator

_PEER_MEMORY = ("stage_rows", "stage_scales", "stage_records", "stage_flags", "return_rows", "return_flags")
"""Parts of a TokenHandle's heap that rows cross through; here they cross in NCCL."""


class PaddedHandle(TokenHandle):
    """Buffers, layout and launches around NCCL's all-to-all; collective to create, to update, to fit and to call.

    The layout of a routing, counts exchanged, is the cuda backend's; `fit` agrees on the capacity that it needs.
    """

    def __init__(
        self,
        session: CudaSession,
        comm: Communicator,
        *,
        placement: Placement,
        top_k: int,
        hidden: int,
        dtype: DType,
        max_tokens: int,
    ) -> None:
        super().__init__(
            session,
            placement=placement,
            top_k=top_k,
            hidden=hidden,
            dtype=dtype,
            mode="ht",
            layout="expert_major",
            max_tokens=max_tokens,
        )
        self._comm = comm
        self.capacity = 0
        self._blocks: dict[str, tuple[int, int]] = {}

    def _parts(self) -> dict[str, int]:
        return super()._parts() | dict.fromkeys(_PEER_MEMORY, 0)

    def fit(self) -> None:
        """Make room for the routing of the last update, and the launches for it; waits for the device."""
        ranks, experts = self.session.size, self.most_experts
        counts = np.zeros(ranks * experts, np.int32)
        self.session.device.read(self._arguments["own_counts"], counts)
        most = [int(data) for data in self.session.group.allgather(str(counts.max(initial=1)).encode())]
        if self.capacity < max(most) or self.capacity > 2 * max(most):
            self.capacity = max(most)
            self._allocate_blocks()
        self._prepare_launches()

    def _allocate_blocks(self) -> None:
        for addresses in self._blocks.values():
            for address in addresses:
                self._comm.free(address)
        rows = self.session.size * self.most_experts * self.capacity
        sizes = {"rows": self.row_bytes} | ({"scales": 4 * self.scale_words} if self.scale_words else {})
        self._blocks = {
            name: (self._comm.allocate(rows * nbytes), self._comm.allocate(rows * nbytes))
            for name, nbytes in sizes.items()
        }

    def _prepare_launches(self) -> None:
        places = self.session.size * self.local_experts
        out = {"rows": self.own["out_rows"], "scales": self.own["out_scales"]}
        self._there = [
            (
                self._launch("pad_tokens", name, self.own[name], sent),
                (sent, received),
                self._launch("unpad_rows", name, received, out[name], shared_bytes=12 * places),
            )
            for name, (sent, received) in self._blocks.items()
        ]
        if self.dtype.scaled:
            return
        sent, received = self._blocks["rows"]
        self._sum = self._launch(f"sum_padded_{self.dtype.name}", "rows", received, self.own["combined"])
        self._back = {
            name: self._launch("pad_rows", "rows", self.own[name], sent, shared_bytes=12 * places)
            for name in ("returning", "out_rows")
        }

    def _launch(self, kernel: str, field: str, source: int, target: int, *, shared_bytes: int = 8) -> Launch:
        arguments: dict[str, Any] = self._arguments | {
            "capacity": self.capacity,
            "row_vecs": self._field_bytes(field) // 16,
            "counts": self._heap.address("counts"),
            "from": source,
            "to": target,
        }
        return self.session.launch(kernel, arguments, shared_bytes=max(shared_bytes, 8))

    def _field_bytes(self, field: str) -> int:
        return self.row_bytes if field == "rows" else 4 * self.scale_words

    def _exchange(self, blocks: tuple[int, int], field: str) -> None:
        self._comm.all_to_all(*blocks, self.most_experts * self.capacity * self._field_bytes(field))

    def to_experts(self) -> None:
        """Enqueue packing, exchange and layout of this rank's tokens."""
        for (pad, blocks, unpad), field in zip(self._there, self._blocks, strict=True):
            pad()
            self._exchange(blocks, field)
            unpad()

    def to_tokens(self, rows: str) -> None:
        """Enqueue packing, exchange and weighted sum of expert-major rows: `returning`, or the received `out_rows`."""
        self._back[rows]()
        self._exchange(self._blocks["rows"], "rows")
        self._sum()
