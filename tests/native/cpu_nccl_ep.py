"""A program: random cases of the nccl_ep backend around a stand-in that delivers rows in an order of its own.

python -m mpi4py cpu_nccl_ep.py SEED COUNT

What is tested is everything but NCCL EP: shapes, bindings, and the way from its order of rows to ours and back.
"""

from __future__ import annotations

import pickle
import sys
from typing import Any

import numpy as np
import numpy.typing as npt

from ncclep_bench.backends.nccl_ep import NcclEp
from ncclep_bench.model.dtype import DTYPES
from ncclep_bench.runtime.nccl import DeviceArray, EpShape
from ncclep_bench.runtime.world import world
from tests.native.cpu_cases import run
from tests.native.cpu_device import CpuDevice
from tests.native.cpu_nccl import CpuCommunicator, memory

Array = npt.NDArray[Any]
Bundles = tuple[dict[str, DeviceArray], dict[str, DeviceArray]]

NUMPY = {2: np.dtype(np.int32), 4: np.dtype(np.int64), **{dtype.nccl_value: dtype.numpy for dtype in DTYPES.values()}}


def view(array: DeviceArray) -> Array:
    dtype = NUMPY[array.nccl_dtype]
    nbytes = int(np.prod(array.shape)) * dtype.itemsize
    return memory(array.address, nbytes).view(dtype).reshape(array.shape)


class CpuExpertParallel:
    """Dispatch and combine in the shapes that nccl_ep.h states; slots are handed out at random, anew each time."""

    def __init__(self, group: Any, shape: EpShape) -> None:
        self._group, self._shape = group, shape
        self._rng = np.random.default_rng(group.rank)

    def bind(
        self, topk_idx: DeviceArray, counters: dict[str, DeviceArray], dispatch: Bundles, combine: Bundles
    ) -> None:
        self._topk_idx, self._counters, self._dispatch, self._combine = topk_idx, counters, dispatch, combine

    def _share(self, value: Any) -> list[Any]:
        return [pickle.loads(data) for data in self._group.allgather(pickle.dumps(value))]

    def update(self) -> None:
        self._routing = self._share(view(self._topk_idx).copy())
        self._per_rank = self._shape.num_experts // self._shape.ranks
        first = self._group.rank * self._per_rank
        self._mine = range(first, first + self._per_rank)
        # (source, token) pairs that come here, in an order that is not ours.
        self._flat = [
            (source, token)
            for source, choices in reversed(list(enumerate(self._routing)))
            for token, row in enumerate(choices)
            if any(expert in self._mine for expert in row)
        ]
        if not self._shape.low_latency:
            view(self._counters["recv_total_counter"])[0] = len(self._flat)
            view(self._counters["expert_counters"])[:] = self._counts()

    def _counts(self) -> list[int]:
        return [sum(int((choices == expert).sum()) for choices in self._routing) for expert in self._mine]

    def dispatch(self) -> None:
        inputs, outputs = self._dispatch
        tokens = self._share(view(inputs["tokens"]).copy())
        received = view(outputs["tokens"])
        if self._shape.low_latency:
            view(self._counters["expert_counters"])[:] = self._counts()
            self._slots = {}
            for local, expert in enumerate(self._mine):
                pairs = [(s, int(t)) for s, c in enumerate(self._routing) for t in np.flatnonzero((c == expert).any(1))]
                for slot, number in enumerate(self._rng.permutation(len(pairs))):
                    received[local, slot] = tokens[pairs[number][0]][pairs[number][1]]
                    self._slots[local, *pairs[number]] = slot
            return
        weights = self._share(view(inputs["topk_weights"]).copy())
        for row, (source, token) in enumerate(self._flat):
            received[row] = tokens[source][token]
            idx = self._routing[source][token]
            # Choices come in the order of the experts, those that are here first.
            order = sorted(range(len(idx)), key=lambda choice: (idx[choice] not in self._mine, idx[choice]))
            local = np.where((idx >= self._mine.start) & (idx < self._mine.stop), idx - self._mine.start, -1)
            view(outputs["topk_weights"])[row] = np.where(local >= 0, weights[source][token], 0)[order]
            view(outputs["topk_idx"])[row] = local[order]

    def combine(self) -> None:
        inputs, outputs = self._combine
        rows, combined = view(inputs["tokens"]), view(outputs["tokens"])
        sent: list[dict[Any, Array]] = [{} for _ in range(self._shape.ranks)]
        if self._shape.low_latency:
            for (local, source, token), slot in self._slots.items():
                sent[source][self._mine[local], token] = rows[local, slot].astype(np.float32)
        else:
            assert len(rows) == max(len(self._flat), 1)
            for row, (source, token) in enumerate(self._flat):
                sent[source][self._group.rank, token] = rows[row].astype(np.float32)
        back = [data[self._group.rank] for data in self._share(sent)]
        total = np.zeros(combined.shape, np.float32)
        for part in back:
            for (expert, token), row in part.items():
                weight = 1.0
                if self._shape.low_latency:
                    chosen = self._routing[self._group.rank][token] == expert
                    weight = float(view(outputs["topk_weights"])[token][chosen].sum())
                total[token] += np.float32(weight) * row
        combined[:] = total.astype(combined.dtype)

    def close(self) -> None:
        """Nothing is held."""


if __name__ == "__main__":
    group = world()
    backend = NcclEp(
        lambda _: CpuDevice(),
        lambda group, device, _window, _blocks: CpuCommunicator(group, device),
        lambda _comm, _device, shape: CpuExpertParallel(group, shape),
        lambda _: None,
    )
    wrong = run(group, backend, *map(int, sys.argv[1:]))
    group.close()
    sys.exit(wrong)
