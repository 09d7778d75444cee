"""The nccl backend: NCCL's collectives over one GPU per rank, in the stream and under the timer of the cuda backend."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from typing import Protocol

import numpy as np

from ncclep_bench.backends.contract import Array
from ncclep_bench.backends.cuda.backend import CudaPrepared, kernel_waiver
from ncclep_bench.backends.cuda.session import CudaSession
from ncclep_bench.backends.cuda.tokens import VEC_BYTES
from ncclep_bench.backends.nccl.padded import PaddedHandle
from ncclep_bench.collectives.contract import Problem
from ncclep_bench.model.case import Case, Window
from ncclep_bench.model.dtype import SCALE_BLOCK, dtype_named
from ncclep_bench.model.placement import placement_of
from ncclep_bench.runtime import nccl
from ncclep_bench.runtime.device import CudaDevice, cuda_device, gpu_count, missing
from ncclep_bench.runtime.device_contract import Device
from ncclep_bench.runtime.group import Group
from ncclep_bench.runtime.nccl import Communicator, Part


class NcclPrepared(CudaPrepared):
    """What all cases share: a communicator beside the session, and bytes that move where nobody counts them."""

    wire_source = "nominal"
    operation: str
    """NCCL's name of what moves the rows."""

    def __init__(self, problem: Problem, session: CudaSession, comm: Communicator) -> None:
        super().__init__(problem, session)
        self.comm = comm

    @property
    def num_sms(self) -> int | None:
        return self.case.num_sms

    def moved(self) -> tuple[int, int]:
        return 0, 0

    def close(self) -> None:
        self.comm.close()
        super().close()


class PreparedPadded(NcclPrepared):
    """The padded all-to-all in one of its three variants."""

    algorithm = "ncclAlltoAll"

    def __init__(self, problem: Problem, session: CudaSession, comm: Communicator) -> None:
        super().__init__(problem, session, comm)
        case, routing = problem.case, problem.routing
        assert routing is not None
        assert case.hidden is not None
        self.handle = PaddedHandle(
            session,
            comm,
            placement=problem.placement,
            top_k=routing.top_k,
            hidden=case.hidden,
            dtype=problem.dtype,
            max_tokens=max(routing.tokens_per_rank),
        )
        self._run: Callable[[], None]
        self.update(problem)

    @property
    def layout(self) -> Callable[[], None] | None:
        return self.handle.update

    def update(self, problem: Problem) -> None:
        assert problem.routing is not None
        handle = self.handle
        handle.route(*problem.routing.of_rank(self.session.rank))
        handle.update()
        self.session.check()
        handle.fit()
        {"dispatch": self._fit_dispatch, "combine": self._fit_combine, "dispatch_combine": self._fit_pair}[
            self.case.variant or "dispatch"
        ]()

    def _fit_dispatch(self) -> None:
        handle = self.handle
        self._fit_tokens()
        received, self._output_at = handle.received_arrays()
        self._outputs = {name: received[name] for name in ("tokens", "scales", "expert_counts") if name in received}
        self._run = handle.to_experts

    def _fit_combine(self) -> None:
        handle = self.handle
        self._inputs = {"rows": handle.token_arrays(handle.received_rows())["tokens"]}
        self._outputs = handle.token_arrays(handle.tokens)
        self._input_at, self._output_at = {"rows": handle.own["returning"]}, {"tokens": handle.own["combined"]}
        self._run = lambda: handle.to_tokens("returning")

    def _fit_pair(self) -> None:
        handle = self.handle
        self._fit_tokens()
        self._outputs = handle.token_arrays(handle.tokens)
        self._output_at = {"tokens": handle.own["combined"]}

        def pair() -> None:
            handle.to_experts()
            handle.to_tokens("out_rows")

        self._run = pair

    def _fit_tokens(self) -> None:
        self._inputs = self.handle.token_arrays(self.handle.tokens)
        self._input_at = {"tokens": self.handle.own["rows"], "scales": self.handle.own["scales"]}

    def enqueue(self) -> None:
        self._run()

    def close(self) -> None:
        self.handle.close()
        super().close()


class _PreparedExperts(NcclPrepared):
    """An operation over all experts' blocks; sizes are in elements."""

    def __init__(self, problem: Problem, session: CudaSession, comm: Communicator) -> None:
        super().__init__(problem, session, comm)
        self.elements = problem.case.expert_elements or 1
        self.block_bytes = self.elements * problem.dtype.itemsize
        self.held = problem.placement.experts_of_rank[session.rank]
        self._most_held = int(problem.placement.local_counts.max())
        self._fit(problem)
        self.update(problem)

    def _buffer(self, name: str, problem: Problem, experts: int, room: int) -> tuple[dict[str, Array], dict[str, int]]:
        """A host array over so many experts, and device memory with room for so many, the same on all ranks."""
        array = np.zeros((experts, self.elements), problem.dtype.numpy)
        return {name: array}, {name: self.comm.allocate(max(room, 1) * self.block_bytes)}

    @abstractmethod
    def _fit(self, problem: Problem) -> None:
        """Inputs and outputs."""

    def update(self, problem: Problem) -> None:
        """Take a new activation; an operation over everything has none."""


class PreparedDenseGather(_PreparedExperts):
    """Every expert to every rank."""

    algorithm = "ncclAllGather"

    def _fit(self, problem: Problem) -> None:
        experts = problem.case.num_experts
        self._inputs, self._input_at = self._buffer("params", problem, len(self.held), self._most_held)
        self._outputs, self._output_at = self._buffer("all_params", problem, experts, experts)

    def enqueue(self) -> None:
        nbytes = len(self.held) * self.block_bytes
        self.comm.all_gather(self._input_at["params"], self._output_at["all_params"], nbytes)


class PreparedDenseReduce(_PreparedExperts):
    """The sum of all gradients on every rank."""

    algorithm = "ncclAllReduce"

    def _fit(self, problem: Problem) -> None:
        experts = problem.case.num_experts
        self._dtype = problem.dtype
        self._inputs, self._input_at = self._buffer("all_grads", problem, experts, experts)
        self._outputs, self._output_at = self._buffer("all_grads", problem, experts, experts)

    def enqueue(self) -> None:
        count = self.case.num_experts * self.elements
        self.comm.all_reduce(self._input_at["all_grads"], self._output_at["all_grads"], count, self._dtype)


class PreparedGather(_PreparedExperts):
    """Parameters to whom needs them: one all-gather where everybody needs everything, else a group of messages."""

    def _fit(self, problem: Problem) -> None:
        experts = problem.case.num_experts
        self._outputs, self._output_at = self._buffer("all_params", problem, experts, experts)
        self._inputs, self._input_at = (
            (self._outputs, self._output_at)
            if self.case.variant == "in_place"
            else self._buffer("params", problem, len(self.held), self._most_held)
        )

    def update(self, problem: Problem) -> None:
        assert problem.active is not None
        own = np.packbits(problem.active[self.session.rank])
        bits = [np.frombuffer(data, np.uint8) for data in self.session.group.allgather(own.tobytes())]
        needed = np.unpackbits(np.stack(bits), axis=1, count=self.case.num_experts).astype(bool)
        if needed.all() and problem.placement.in_equal_blocks:
            self.algorithm, self._run = "ncclAllGather", self._gather
            return
        self.algorithm, self._run = "ncclSend, ncclRecv", self._exchange
        me, served_by = self.session.rank, problem.placement.replica_rank
        everywhere = range(self.session.size)
        self._sends = [
            Part(peer, self._source(expert), self.block_bytes)
            for peer in everywhere
            for expert in np.flatnonzero(needed[peer] & (served_by[peer] == me)).tolist()
            if peer != me
        ]
        wanted = np.flatnonzero(needed[me]).tolist()
        self._receives = [
            Part(int(served_by[me, expert]), self._target(expert), self.block_bytes)
            for expert in wanted
            if served_by[me, expert] != me
        ]
        self._copies = [
            (self._target(expert), self._source(expert))
            for expert in wanted
            if served_by[me, expert] == me and self._target(expert) != self._source(expert)
        ]

    def _target(self, expert: int) -> int:
        return self._output_at["all_params"] + expert * self.block_bytes

    def _source(self, expert: int) -> int:
        if self.case.variant == "in_place":
            return self._target(expert)
        return self._input_at["params"] + self.held.index(expert) * self.block_bytes

    def _gather(self) -> None:
        nbytes = len(self.held) * self.block_bytes
        self.comm.all_gather(self._source(self.held[0]), self._output_at["all_params"], nbytes)

    def _exchange(self) -> None:
        for target, source in self._copies:
            self.session.device.copy(target, source, self.block_bytes)
        self.comm.exchange(self._sends, self._receives)

    def enqueue(self) -> None:
        self._run()


class PreparedReduce(_PreparedExperts):
    """Sums of all ranks' gradients at their owners."""

    algorithm = "ncclReduceScatter"

    def _fit(self, problem: Problem) -> None:
        experts = problem.case.num_experts
        self._dtype = problem.dtype
        self._inputs, self._input_at = self._buffer("all_grads", problem, experts, experts)
        if self.case.variant == "in_place":
            self._outputs, self._output_at = self._inputs, self._input_at
            self._sum_at = self._input_at["all_grads"] + self.held[0] * self.block_bytes
            return
        self._outputs, self._output_at = self._buffer("grads", problem, len(self.held), self._most_held)
        self._sum_at = self._output_at["grads"]

    def enqueue(self) -> None:
        count = len(self.held) * self.elements
        self.comm.reduce_scatter(self._input_at["all_grads"], self._sum_at, count, self._dtype)


class _Prepare(Protocol):
    def __call__(self, problem: Problem, session: CudaSession, comm: Communicator) -> NcclPrepared: ...


_PREPARE: dict[str, _Prepare] = {
    "padded_all_to_all": PreparedPadded,
    "dense_all_gather": PreparedDenseGather,
    "dense_all_reduce": PreparedDenseReduce,
    "all_gather_experts": PreparedGather,
    "reduce_scatter_expert_grads": PreparedReduce,
}
"""Which Prepared runs a collective; a collective without an entry is waived."""


def shape_waiver(case: Case) -> str | None:
    """Why NCCL has no operation for a case whatever the machine, or None."""
    if case.collective not in _PREPARE:
        return f"NCCL has no {case.collective}: its traditional partner stands beside it"
    if (reason := kernel_waiver(case)) is not None:
        return reason
    if case.variant == "registered":
        return "NCCL binds memory to windows once: window = symmetric"
    scale_bytes = 4 * ((case.hidden or 0) // SCALE_BLOCK)
    if dtype_named(case.dtype).scaled and scale_bytes % VEC_BYTES:
        return f"scales of {scale_bytes} bytes a row are not a multiple of {VEC_BYTES}, what a lane moves at once"
    if case.collective in ("padded_all_to_all", "all_gather_experts"):
        return None
    if not placement_of(case.placement, case.num_experts, case.ranks).in_equal_blocks:
        return f"placement {case.placement}: NCCL puts equal parts in rank order"
    if case.collective == "reduce_scatter_expert_grads" and case.active_share != 1.0:
        return f"active_share {case.active_share}: NCCL adds up every rank's gradients"
    return None


def nccl_communicator(group: Group, device: Device, window: Window | None, max_ctas: int | None) -> Communicator:
    """NCCL's own communicator over a GPU."""
    assert isinstance(device, CudaDevice)
    return nccl.communicator(group, device, window=window, max_ctas=max_ctas)


def machine_waiver(case: Case) -> str | None:
    """Why no NCCL of this machine and process runs a case, or None."""
    if (reason := missing() or nccl.missing()) is not None:
        return reason
    if case.ranks > (gpus := gpu_count()):
        return f"NCCL takes one rank per GPU: {case.ranks} ranks, {gpus} GPUs"
    if case.ranks == 1 and case.window not in (None, "off"):
        return f"window {case.window}: one rank has no peer to share it with"
    return nccl.configuration_waiver(case.window, case.num_sms)


class Nccl:
    """One GPU per rank, everything through NCCL."""

    name = "nccl"
    one_process = False

    def __init__(
        self,
        device_of: Callable[[int], Device] = cuda_device,
        communicator_of: Callable[[Group, Device, Window | None, int | None], Communicator] = nccl_communicator,
        machine_waiver: Callable[[Case], str | None] = machine_waiver,
    ) -> None:
        self._device_of, self._communicator_of, self._machine_waiver = device_of, communicator_of, machine_waiver

    def supports(self, case: Case) -> str | None:
        return shape_waiver(case) or self._machine_waiver(case)

    def memory_of(self, case: Case) -> tuple[int, int] | None:
        return None

    def prepare(self, problem: Problem, group: Group) -> NcclPrepared:
        case, device = problem.case, self._device_of(group.rank)
        session = CudaSession(group, device)
        try:
            comm = self._communicator_of(group, device, case.window, case.num_sms)
            try:
                return _PREPARE[case.collective](problem, session, comm)
            except BaseException:
                comm.abort()
                raise
        except BaseException:
            session.close()
            raise


NCCL = Nccl()
