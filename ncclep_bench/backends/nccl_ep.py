"""The nccl_ep backend: NVIDIA's NCCL EP, verified by and compared under the contract of our own kernels.

Mode ll is its low-latency algorithm, ht its high-throughput one; window = symmetric asks for zero copy.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from typing import Any

import numpy as np

from ncclep_bench.backends.contract import Array
from ncclep_bench.backends.cuda.session import CudaSession
from ncclep_bench.backends.nccl.backend import NcclPrepared, nccl_communicator
from ncclep_bench.collectives.contract import Collective, Problem
from ncclep_bench.collectives.verify import POISON, poison
from ncclep_bench.model.case import Case, Window
from ncclep_bench.model.dtype import dtype_named
from ncclep_bench.model.plan import IntArray
from ncclep_bench.registry import COLLECTIVES
from ncclep_bench.runtime import nccl
from ncclep_bench.runtime.device import cuda_device, gpu_count, missing
from ncclep_bench.runtime.device_contract import Device
from ncclep_bench.runtime.group import Group
from ncclep_bench.runtime.nccl import Communicator, DeviceArray, EpShape, ExpertParallel

MOST_TOKENS, MOST_TOP_K, MOST_HIDDEN = 8192, 32, 16384

_INT32, _INT64, _FLOAT32 = 2, 4, 7
_WINDOWED = ("received", "returning")
"""Buffers that zero copy wants in windows: what dispatch writes and what combine reads."""


class _EpPrepared(NcclPrepared):
    """Buffers in NCCL EP's shapes beside arrays in ours.

    The order in which its rows arrive is its own, so `outputs` puts them into ours: a row's origin is known by its
    contents, which ranks show each other after the launch.
    """

    may_refuse_capture = True
    result = "combined"
    """Buffer that a launch writes."""

    def __init__(
        self, problem: Problem, session: CudaSession, comm: Communicator, ep_of: Callable[..., ExpertParallel]
    ) -> None:
        super().__init__(problem, session, comm)
        case, routing = problem.case, problem.routing
        assert routing is not None
        assert case.hidden is not None
        self.low_latency, self.hidden, self.top_k = case.mode == "ll", case.hidden, routing.top_k
        self.dtype = problem.dtype
        self.slots = max(routing.tokens_per_rank)
        self.local_experts = case.num_experts // session.size
        self.arrivals = session.size * self.slots
        self.zero_copy = case.window == "symmetric"
        shape = EpShape(
            low_latency=self.low_latency,
            ranks=session.size,
            num_experts=case.num_experts,
            max_tokens=self.slots,
            token_bytes=self.hidden * self.dtype.itemsize,
            zero_copy=self.zero_copy,
            max_sms=case.num_sms,
        )
        self.ep = ep_of(comm, session.device, shape)
        self._allocate()
        self._touched = False
        self.update(problem)

    def _allocate(self) -> None:
        rows = self.arrivals * (self.local_experts if self.low_latency else 1)
        row_bytes = self.hidden * self.dtype.itemsize
        sizes = {
            "tokens": self.slots * row_bytes,
            "combined": self.slots * row_bytes,
            "topk_idx": self.slots * self.top_k * 8,
            "topk_weights": self.slots * self.top_k * 4,
            "received": rows * row_bytes,
            "returning": rows * row_bytes,
            "received_weights": self.arrivals * self.top_k * 4,
            "received_idx": self.arrivals * self.top_k * 8,
            "expert_counts": self.local_experts * 4,
            "total": 4,
        }
        self.rows, self._nbytes = rows, sizes
        self._at = {
            name: self.comm.allocate(nbytes) if self.zero_copy and name in _WINDOWED else self.session.allocate(nbytes)
            for name, nbytes in sizes.items()
        }

    # ---- routing ----

    @property
    def layout(self) -> Callable[[], None] | None:
        return self.ep.update

    def update(self, problem: Problem) -> None:
        assert problem.routing is not None
        topk_idx, topk_weights = problem.routing.of_rank(self.session.rank)
        self.tokens = len(topk_idx)
        self._chosen = self._choices(problem)
        self.session.device.write(self._at["topk_idx"], np.ascontiguousarray(topk_idx, np.int64))
        self.session.device.write(self._at["topk_weights"], np.ascontiguousarray(topk_weights, np.float32))
        self._bind(self.arrivals)
        self.ep.update()
        self._learn_order()
        self._fit()

    def _choices(self, problem: Problem) -> IntArray:
        """Local expert ids of all rows that come here, in our order and the columns of their choices, -1 elsewhere."""
        assert problem.routing is not None
        everybody = [problem.routing.of_rank(rank)[0].astype(np.int64) for rank in range(self.session.size)]
        local = np.concatenate(everybody) - self.session.rank * self.local_experts
        local[(local < 0) | (local >= self.local_experts)] = -1
        return local[(local >= 0).any(axis=1)]

    def _array(self, name: str, shape: tuple[int, ...], nccl_dtype: int) -> DeviceArray:
        return DeviceArray(self._at[name], shape, nccl_dtype, self.zero_copy and name in _WINDOWED)

    def _bind(self, received: int) -> None:
        """Tell NCCL EP of the buffers; `received`: rows that its high-throughput combine takes back."""
        token, value = self.dtype.nccl_value, _FLOAT32
        own, choices = (self.tokens, self.hidden), (self.tokens, self.top_k)
        topk_idx = self._array("topk_idx", choices, _INT64)
        tokens, combined = self._array("tokens", own, token), self._array("combined", own, token)
        weights = self._array("topk_weights", choices, value)
        counts = {"expert_counters": self._array("expert_counts", (self.local_experts,), _INT32)}
        if self.low_latency:
            shape = (self.local_experts, self.arrivals, self.hidden)
            there = {"tokens": tokens}, {"tokens": self._array("received", shape, token)}
            back_from = "received" if self.returns_what_it_received else "returning"
            back = {"tokens": self._array(back_from, shape, token)}, {"tokens": combined, "topk_weights": weights}
        else:
            arriving = (self.arrivals, self.top_k)
            counts["recv_total_counter"] = self._array("total", (1,), _INT32)
            there = (
                {"tokens": tokens, "topk_weights": weights},
                {
                    "tokens": self._array("received", (self.arrivals, self.hidden), token),
                    "topk_weights": self._array("received_weights", arriving, value),
                    "topk_idx": self._array("received_idx", arriving, _INT64),
                },
            )
            back = {"tokens": self._array("returning", (received, self.hidden), token)}, {"tokens": combined}
        self.ep.bind(topk_idx, counts, there, back)

    returns_what_it_received = False
    combines_after_dispatch = True

    def _read(self, name: str, shape: tuple[int, ...], dtype: Any) -> Array:
        array = np.zeros(shape, dtype)
        self.session.device.read(self._at[name], array)
        return array

    def _received(self) -> tuple[Array, list[IntArray]]:
        """All rows of the receive buffer, and which of them hold a token, by block: one per expert, or one."""
        received = self._read("received", (self.rows, self.hidden), self.dtype.numpy)
        if not self.low_latency:
            return received, [np.arange(int(self._read("total", (1,), np.int32)[0]))]
        counts = self._read("expert_counts", (self.local_experts,), np.int32)
        return received, [expert * self.arrivals + np.arange(count) for expert, count in enumerate(counts)]

    def _in_our_order(self, tokens: Array) -> tuple[Array, IntArray]:
        """Received rows, and for each row of ours its number among them, −1 for none; `tokens` were dispatched.

        Collective. A row that is no rank's token keeps a place, the first of its block.
        """
        known = {
            row.tobytes(): source * self.slots + token
            for source, data in enumerate(self.session.group.allgather(tokens.tobytes()))
            for token, row in enumerate(np.frombuffer(data, tokens.dtype).reshape(-1, self.hidden))
        }
        received, blocks = self._received()
        theirs = np.full(self.rows, -1, dtype=np.int64)
        for rows in blocks:
            origins = [known.get(received[row].tobytes(), -1) for row in rows]
            theirs[rows] = rows[np.argsort(origins, kind="stable")]
        return received, theirs

    def _learn_order(self) -> None:
        """Dispatch known tokens: combine goes back the way that rows have come, and its rows must lie as these do."""
        rng = np.random.default_rng(self.session.rank)
        tokens = rng.uniform(-1, 1, (self.tokens, self.hidden)).astype(self.dtype.numpy)
        self.session.device.write(self._at["tokens"], tokens)
        self.ep.dispatch()
        _, self._theirs = self._in_our_order(tokens)
        if not self.low_latency:
            self._bind(max(int((self._theirs >= 0).sum()), 1))
        if self.combines_after_dispatch:
            # Low latency takes its two operations in turns.
            self.ep.combine()

    # ---- arrays in our shapes ----

    @abstractmethod
    def _fit(self) -> None:
        """Inputs and outputs for the routing that was just taken."""

    def inputs(self, rank: int) -> dict[str, Array]:
        self._touched = True
        return self._inputs

    def upload(self) -> None:
        if self._touched:
            self._upload()
            self._touched = False

    @abstractmethod
    def _upload(self) -> None:
        """Inputs to the device."""

    def poison(self, rank: int) -> None:
        poison(self._outputs)
        self.session.device.fill(self._at[self.result], self._nbytes[self.result], POISON)

    def _tokens(self, rows: int) -> Array:
        return np.zeros((rows, self.hidden), self.dtype.numpy)

    def close(self) -> None:
        self.ep.close()
        super().close()


def as_chosen(chosen: IntArray, local: IntArray, values: Array) -> tuple[IntArray, Array]:
    """Local expert ids and values of received rows, [rows, top_k], with each in the column where its token chose it.

    `chosen`: local ids in the order of the choices, -1 elsewhere; `local`: the same in another order. What was not
    chosen stays wrong.
    """
    ours, theirs = (
        np.argsort(np.where(ids < 0, np.iinfo(np.int64).max, ids), kind="stable") for ids in (chosen, local)
    )
    ordered = np.full_like(local, -1), np.zeros_like(values)
    for target, source in zip(ordered, (local, values), strict=True):
        np.put_along_axis(target, ours, np.take_along_axis(source, theirs, axis=1), axis=1)
    # A weight of an expert elsewhere is nobody's business here, and says nothing.
    return ordered[0], np.where(ordered[0] >= 0, ordered[1], 0)


class EpDispatch(_EpPrepared):
    """One launch is one dispatch."""

    result = "received"

    @property
    def algorithm(self) -> str:  # type: ignore[override]
        return "ncclEpDispatch without weights" if self.low_latency else "ncclEpDispatch"

    @property
    def undelivered(self) -> frozenset[str]:  # type: ignore[override]
        return frozenset({"topk_weights", "source_counts"}) if self.low_latency else frozenset({"source_counts"})

    def _fit(self) -> None:
        self._inputs = {"tokens": self._tokens(self.tokens)}
        rows = self.rows if self.low_latency else int((self._theirs >= 0).sum())
        self._outputs = {"tokens": self._tokens(rows), "expert_counts": np.zeros(self.local_experts, np.int64)}
        if not self.low_latency:
            self._outputs["topk_weights"] = np.zeros((rows, self.top_k), np.float32)
            self._outputs["topk_idx"] = np.zeros((rows, self.top_k), np.int32)

    def _upload(self) -> None:
        self.session.device.write(self._at["tokens"], self._inputs["tokens"])

    def outputs(self, rank: int) -> dict[str, Array]:
        received, theirs = self._in_our_order(self._inputs["tokens"])
        here = np.flatnonzero(theirs >= 0)[: len(self._outputs["tokens"])]
        self._outputs["tokens"][here] = received[theirs[here]]
        self._outputs["expert_counts"][:] = self._read("expert_counts", (self.local_experts,), np.int32)
        if not self.low_latency:
            shape = (self.arrivals, self.top_k)
            weights = self._read("received_weights", shape, np.float32)[theirs[here]]
            local = self._read("received_idx", shape, np.int64)[theirs[here]]
            local, weights = as_chosen(self._chosen[: len(here)], local, weights)
            self._outputs["topk_weights"][here], self._outputs["topk_idx"][here] = weights, local
        return self._outputs

    def enqueue(self) -> None:
        self.ep.dispatch()


class EpCombine(_EpPrepared):
    """One launch is one combine of rows that lie as the last dispatch laid them."""

    algorithm = "ncclEpCombine"
    combines_after_dispatch = False

    def _fit(self) -> None:
        rows = self.rows if self.low_latency else int((self._theirs >= 0).sum())
        self._inputs = {"rows": self._tokens(rows)}
        self._outputs = {"tokens": self._tokens(self.tokens)}

    def _upload(self) -> None:
        rows = np.zeros((self.rows, self.hidden), self.dtype.numpy)
        here = np.flatnonzero(self._theirs >= 0)
        rows[self._theirs[here]] = self._inputs["rows"][here]
        self.session.device.write(self._at["returning"], rows)

    def outputs(self, rank: int) -> dict[str, Array]:
        self.session.device.read(self._at["combined"], self._outputs["tokens"])
        return self._outputs

    def enqueue(self) -> None:
        self.ep.combine()


class EpPair(_EpPrepared):
    """One launch is `chain` pairs."""

    algorithm = "ncclEpDispatch, ncclEpCombine"
    returns_what_it_received = True

    def _fit(self) -> None:
        self._inputs = {"tokens": self._tokens(self.tokens)}
        self._outputs = {"tokens": self._tokens(self.tokens)}

    def _upload(self) -> None:
        self.session.device.write(self._at["tokens"], self._inputs["tokens"])

    def outputs(self, rank: int) -> dict[str, Array]:
        self.session.device.read(self._at["combined"], self._outputs["tokens"])
        return self._outputs

    def enqueue(self) -> None:
        self.ep.dispatch()
        self.ep.combine()


_PREPARE: dict[str, type[_EpPrepared]] = {
    "dispatch": EpDispatch,
    "combine": EpCombine,
    "dispatch_combine": EpPair,
}
"""Which Prepared runs a collective; a collective without an entry is waived."""

_LAYOUT = {"ll": "expert_major", "ht": "flat"}
"""Layouts of NCCL EP that deliver what ours do."""


def shape_waiver(case: Case) -> str | None:
    """Why NCCL EP cannot take a case whatever the machine, or None; its limits are those of 0.2.0."""
    definition: Collective = COLLECTIVES.get(case.collective)
    if case.collective not in _PREPARE:
        return f"NCCL EP has no {case.collective}"
    if (reason := definition.waiver(case)) is not None:
        return reason
    assert case.mode is not None
    hidden, most = case.hidden or 0, (case.tokens or 0)
    refusals = (
        (case.layout != _LAYOUT[case.mode],
         f"layout {case.layout}: mode {case.mode} is measured in layout {_LAYOUT[case.mode]}"),
        (case.collective == "dispatch_combine" and case.mode == "ht",
         "in mode ht the caller weighs rows between NCCL EP's dispatch and combine: see the cases of each alone"),
        (case.dtype != "bfloat16", f"dtype {case.dtype}: NCCL EP is measured with bfloat16"),
        (case.placement != "block", f"placement {case.placement}: NCCL EP numbers experts in equal blocks"),
        (bool(case.empty_ranks) or most == 0, "a rank without tokens: NCCL EP is measured with tokens on every rank"),
        (most > MOST_TOKENS, f"{most} tokens: NCCL EP takes {MOST_TOKENS} per rank"),
        ((case.top_k or 0) > MOST_TOP_K, f"top_k {case.top_k}: NCCL EP takes {MOST_TOP_K}"),
        (hidden > MOST_HIDDEN, f"hidden {hidden}: NCCL EP takes {MOST_HIDDEN}"),
        (case.mode == "ll" and hidden % 128 != 0, f"hidden {hidden}: NCCL EP's low latency takes multiples of 128"),
        (hidden * dtype_named(case.dtype).itemsize % 16 != 0, f"hidden {hidden}: rows are no multiple of 16 bytes"),
        (case.mode == "ht" and 4 * case.num_experts % 16 != 0, f"{case.num_experts} experts: no multiple of 4"),
        (case.alignment not in (None, 1), f"alignment {case.alignment}: flat rows and fixed slots have none"),
        (case.mode == "ll" and case.window == "symmetric",
         "window symmetric: in mode ll NCCL EP has zero copy in layout rank_major alone"),
        (case.window == "symmetric_zero_cta", "window symmetric_zero_cta: NCCL EP has off and symmetric (zero copy)"),
    )  # fmt: skip
    return next((reason for refused, reason in refusals if refused), None)


def machine_waiver(case: Case) -> str | None:
    """The exact piece that NCCL EP lacks here, or None."""
    if (reason := missing() or nccl.ep_missing()) is not None:
        return reason
    if case.ranks > (gpus := gpu_count()):
        return f"NCCL EP takes one rank per GPU: {case.ranks} ranks, {gpus} GPUs"
    return "NCCL EP needs a peer" if case.ranks == 1 else None


class NcclEp:
    """One GPU per rank, everything through NCCL EP."""

    name = "nccl_ep"
    one_process = False

    def __init__(
        self,
        device_of: Callable[[int], Device] = cuda_device,
        communicator_of: Callable[[Group, Device, Window | None, int | None], Communicator] = nccl_communicator,
        ep_of: Callable[[Communicator, Device, EpShape], ExpertParallel] = ExpertParallel,
        machine_waiver: Callable[[Case], str | None] = machine_waiver,
    ) -> None:
        self._device_of, self._communicator_of, self._ep_of = device_of, communicator_of, ep_of
        self._machine_waiver = machine_waiver

    def supports(self, case: Case) -> str | None:
        return shape_waiver(case) or self._machine_waiver(case)

    def memory_of(self, case: Case) -> tuple[int, int] | None:
        return None

    def prepare(self, problem: Problem, group: Group) -> _EpPrepared:
        device = self._device_of(group.rank)
        session = CudaSession(group, device)
        try:
            comm = self._communicator_of(group, device, problem.case.window, None)
            try:
                return _PREPARE[problem.case.collective](problem, session, comm, self._ep_of)
            except BaseException:
                comm.abort()
                raise
        except BaseException:
            session.close()
            raise


NCCL_EP = NcclEp()
