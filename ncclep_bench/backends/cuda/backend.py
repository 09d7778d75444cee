"""The cuda backend: every EP collective as a Prepared over one GPU per rank."""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from ncclep_bench.backends.contract import DeviceTimer, Stats, window_waiver
from ncclep_bench.backends.cuda.distant import DistantTokenHandle
from ncclep_bench.backends.cuda.experts import ExpertHandle, RegisteredExpertHandle
from ncclep_bench.backends.cuda.registration import Registrations
from ncclep_bench.backends.cuda.session import CudaSession
from ncclep_bench.backends.cuda.staging import StagingOf, staging_of, this_host
from ncclep_bench.backends.cuda.timer import GraphTimer
from ncclep_bench.backends.cuda.tokens import VEC_BYTES, TokenHandle, layout_block
from ncclep_bench.backends.cuda.user_memory import USER_MEMORY
from ncclep_bench.collectives.contract import Collective, Problem
from ncclep_bench.collectives.verify import POISON, poison
from ncclep_bench.model.case import Case
from ncclep_bench.model.dtype import dtype_named
from ncclep_bench.model.placement import Placement, placement_of
from ncclep_bench.native.loader import USUAL_SHARED_BYTES
from ncclep_bench.registry import COLLECTIVES
from ncclep_bench.runtime.device import CudaDevice, cuda_device, missing
from ncclep_bench.runtime.device_contract import Device
from ncclep_bench.runtime.group import Group

Array = npt.NDArray[Any]

MOST_RANKS = 32


class CudaPrepared(ABC):
    """What all cases share: host arrays beside the device's, moved when the host has had them in its hands."""

    wire_source = "counted"
    algorithm = "peer_memory"
    undelivered: frozenset[str] = frozenset()
    may_refuse_capture = False
    """Whether what is enqueued may be of a kind that no graph holds."""
    needs_host = False
    """Whether `enqueue` waits for other ranks on the host, so that no graph holds it."""

    def __init__(self, problem: Problem, session: CudaSession) -> None:
        self.case, self.session = problem.case, session
        if session.staging is not None:
            self.algorithm = session.staging.name
        self.local_ranks: tuple[int, ...] = (session.rank,)
        self._inputs: dict[str, Array] = {}
        self._outputs: dict[str, Array] = {}
        self._input_at: dict[str, int] = {}
        self._output_at: dict[str, int] = {}
        self._handed_out: dict[int, Array] = {}

    @property
    def timer(self) -> DeviceTimer | None:
        device = self.session.device
        if not isinstance(device, CudaDevice):
            return None
        return GraphTimer(
            self.session,
            device,
            self.enqueue,
            self.layout,
            self.num_sms,
            cold=self.case.cache == "cold",
            may_refuse_capture=self.may_refuse_capture,
            needs_host=self.session.staging is not None or self.needs_host,
        )

    @property
    def num_sms(self) -> int | None:
        """Multiprocessors that an operation may use."""
        return self.session.blocks

    @property
    def layout(self) -> Callable[[], None] | None:
        """What `update` enqueues, for a routing that is on the device; None where it enqueues nothing."""
        return None

    def inputs(self, rank: int) -> dict[str, Array]:
        for name, array in self._inputs.items():
            self._handed_out |= dict(self._places(name, self._input_at, array))
        return self._inputs

    def outputs(self, rank: int) -> dict[str, Array]:
        for name, array in self._outputs.items():
            for address, part in self._places(name, self._output_at, array):
                self.session.device.read(address, part)
        self.session.check()
        return self._outputs

    def poison(self, rank: int) -> None:
        for name, array in self._outputs.items():
            for address, part in self._places(name, self._output_at, array):
                self.session.device.fill(address, part.nbytes, POISON)
            if self._output_at[name] in self._input_at.values():
                # The host's array will be uploaded over it.
                poison({name: array})

    def _places(self, name: str, addresses: dict[str, int], array: Array) -> Iterator[tuple[int, Array]]:
        """An array, or all its parts, with the addresses on the device."""
        yield addresses[name], array

    def upload(self) -> None:
        """Bring to the device what the host has had in its hands."""
        for address, array in self._handed_out.items():
            self.session.device.write(address, array)
        self._handed_out = {}

    def launch(self, stream: Any = None) -> None:
        self.upload()
        for _ in range(self.case.chain or 1):
            self.enqueue()

    @abstractmethod
    def enqueue(self) -> None:
        """One operation into the device's stream; no synchronisation, so a graph can hold it."""

    @abstractmethod
    def update(self, problem: Problem) -> None: ...

    @abstractmethod
    def moved(self) -> tuple[int, int]:
        """Wire and control bytes."""

    def stats(self) -> Stats:
        self.session.check()
        wire_bytes, control_bytes = self.moved()
        return Stats(wire_bytes=wire_bytes, control_bytes=control_bytes, counters=self.counters())

    def counters(self) -> dict[str, float]:
        """What else has been counted, by column."""
        return {}

    def close(self) -> None:
        self.session.close()


class _PreparedTokens(CudaPrepared):
    """Dispatch, combine or the chained pair over a TokenHandle."""

    def __init__(self, problem: Problem, session: CudaSession) -> None:
        super().__init__(problem, session)
        case, routing = problem.case, problem.routing
        assert routing is not None
        assert case.mode is not None
        assert case.layout is not None
        assert case.hidden is not None
        handle = TokenHandle if session.staging is None else DistantTokenHandle
        self.handle = handle(
            session,
            placement=problem.placement,
            top_k=routing.top_k,
            hidden=case.hidden,
            dtype=problem.dtype,
            mode=case.mode,
            layout=case.layout,
            max_tokens=max(routing.tokens_per_rank),
            alignment=case.alignment or 1,
        )
        self.update(problem)

    @property
    def layout(self) -> Callable[[], None] | None:
        return self.handle.update if self.session.staging is None else None

    def update(self, problem: Problem) -> None:
        assert problem.routing is not None
        self.handle.route(*problem.routing.of_rank(self.session.rank))
        self.handle.update()
        self._fit()
        self.session.check()

    @abstractmethod
    def _fit(self) -> None:
        """Host arrays for the routing that was just taken."""

    def _fit_tokens(self) -> None:
        if len(self._inputs.get("tokens", ())) != self.handle.tokens or not self._inputs:
            self._inputs = self.handle.token_arrays(self.handle.tokens)
            self._input_at = {"tokens": self.handle.own["rows"], "scales": self.handle.own["scales"]}

    def moved(self) -> tuple[int, int]:
        return self.handle.moved()

    def close(self) -> None:
        self.handle.close()
        super().close()


class PreparedDispatch(_PreparedTokens):
    """One launch is one dispatch."""

    def _fit(self) -> None:
        self._fit_tokens()
        self._outputs, self._output_at = self.handle.received_arrays()

    def enqueue(self) -> None:
        self.handle.dispatch()


class PreparedCombine(_PreparedTokens):
    """One launch is one combine of rows that lie as dispatch laid them out."""

    def _fit(self) -> None:
        # Combine goes back the way that rows have come, so some must have come.
        self.handle.dispatch()
        rows, handle = self.handle.received_rows(), self.handle
        self._inputs = {"rows": handle.token_arrays(rows)["tokens"]}
        self._outputs = {"tokens": handle.token_arrays(handle.tokens)["tokens"]}
        self._input_at, self._output_at = {"rows": handle.own["returning"]}, {"tokens": handle.own["combined"]}

    def enqueue(self) -> None:
        self.handle.combine()


class PreparedPair(_PreparedTokens):
    """One launch is `chain` pairs."""

    def _fit(self) -> None:
        self._fit_tokens()
        self._outputs = {"tokens": np.zeros_like(self._inputs["tokens"])}
        self._output_at = {"tokens": self.handle.own["combined"]}

    def enqueue(self) -> None:
        self.handle.dispatch()
        self.handle.return_tokens()


class _PreparedExperts(CudaPrepared):
    """All-gather or reduce-scatter over an ExpertHandle; the variant says where the rows lie."""

    whole: str
    """Name of the array over all experts, and of the one over the experts that this rank holds."""
    part: str
    handle: ExpertHandle

    def __init__(self, problem: Problem, session: CudaSession) -> None:
        super().__init__(problem, session)
        case, dtype = problem.case, problem.dtype
        elements = case.expert_elements or 1
        block_bytes = elements * dtype.itemsize
        in_place = case.variant == "in_place"
        held = len(problem.placement.experts_of_rank[session.rank])
        self._whole = {self.whole: np.zeros((case.num_experts, elements), dtype.numpy)}
        self._part = self._whole if in_place else {self.part: np.zeros((held, elements), dtype.numpy)}
        self._rows: dict[str, list[int]] = {}
        self.handle: ExpertHandle
        self.registrations: Registrations | None = None
        if case.variant == "registered":
            self.needs_host = True
            self._rows = {
                name: [self._user_row(block_bytes) for _ in range(rows)]
                for name, rows in ((self.whole, case.num_experts), (self.part, held))
            }
            self.registrations = Registrations(session, case.num_experts, case.mr_cache_size or 0)
            self.handle = RegisteredExpertHandle(
                session,
                placement=problem.placement,
                block_bytes=block_bytes,
                registrations=self.registrations,
                whole=self._rows[self.whole],
                part=self._rows[self.part],
            )
            if session.staging is None and not self.registrations.opens(self._rows[self.whole][0]):
                self.algorithm = "staged_heap"
        else:
            self.handle = ExpertHandle(session, placement=problem.placement, block_bytes=block_bytes, in_place=in_place)
        self._whole_at = {self.whole: self.handle.all}
        self._part_at = self._whole_at if in_place else {self.part: self.handle.held}
        self.update(problem)

    def _places(self, name: str, addresses: dict[str, int], array: Array) -> Iterator[tuple[int, Array]]:
        if name in self._rows:
            return zip(self._rows[name], array, strict=True)
        return super()._places(name, addresses, array)

    def _user_row(self, nbytes: int) -> int:
        """One expert's row in an allocation of its own, as a model holds its parameters."""
        return USER_MEMORY[self.case.user_memory or "aligned"](self.session, nbytes)

    def counters(self) -> dict[str, float]:
        return dict(self.registrations.stats.counters) if self.registrations else {}

    def enqueue(self) -> None:
        self.handle.run()

    def moved(self) -> tuple[int, int]:
        return self.handle.moved()

    def close(self) -> None:
        with contextlib.ExitStack() as stack:
            stack.callback(super().close)
            if self.registrations:
                stack.callback(self.registrations.close)
            self.handle.close()


class PreparedGather(_PreparedExperts):
    """One launch is one all-gather of parameters."""

    whole, part = "all_params", "params"

    def update(self, problem: Problem) -> None:
        assert problem.active is not None
        self._inputs, self._outputs = self._part, self._whole
        self._input_at, self._output_at = self._part_at, self._whole_at
        self.handle.gather(self.handle.exchange(problem.active[self.session.rank]))
        if self.algorithm == CudaPrepared.algorithm and self.handle.copies_by_engine:
            self.algorithm = "copy_engine"


class PreparedReduce(_PreparedExperts):
    """One launch is one reduce-scatter of gradients."""

    whole, part = "all_grads", "grads"

    def update(self, problem: Problem) -> None:
        assert problem.active is not None
        self._inputs, self._outputs = self._whole, self._part
        self._input_at, self._output_at = self._whole_at, self._part_at
        self.handle.reduce(self.handle.exchange(problem.active[self.session.rank]), problem.dtype.name)


_PREPARE: dict[str, type[CudaPrepared]] = {
    "dispatch": PreparedDispatch,
    "combine": PreparedCombine,
    "dispatch_combine": PreparedPair,
    "all_gather_experts": PreparedGather,
    "reduce_scatter_expert_grads": PreparedReduce,
}
"""Which Prepared runs a collective; a collective without an entry is waived."""


def shape_waiver(case: Case) -> str | None:
    """Why the cuda backend cannot take a case whatever the machine, or None."""
    if case.collective not in _PREPARE:
        return f"the cuda backend does not run {case.collective}"
    return kernel_waiver(case) or window_waiver(case, "cuda")


def kernel_waiver(case: Case) -> str | None:
    """Why the kernels cannot take a case's ranks, rows or routing, or None."""
    definition: Collective = COLLECTIVES.get(case.collective)
    if (reason := definition.waiver(case)) is not None:
        return reason
    elements = case.hidden or case.expert_elements or 0
    row_bytes = elements * dtype_named(case.dtype).itemsize
    if case.hidden is None:
        return row_waiver(case.ranks, row_bytes)
    return token_waiver(placement_of(case.placement, case.num_experts, case.ranks), row_bytes, case.top_k or 0)


def row_waiver(ranks: int, row_bytes: int) -> str | None:
    """Why the kernels cannot take rows of tokens or of experts on so many ranks, or None."""
    if ranks > MOST_RANKS:
        return f"{ranks} ranks: the kernels take {MOST_RANKS}"
    if row_bytes % VEC_BYTES:
        return f"rows of {row_bytes} bytes are not a multiple of {VEC_BYTES}, what a lane moves at once"
    return None


def token_waiver(placement: Placement, row_bytes: int, top_k: int) -> str | None:
    """Why the kernels cannot take tokens with so many choices each, or None."""
    if (reason := row_waiver(placement.ranks, row_bytes)) is not None:
        return reason
    if top_k > 32:
        return f"top_k {top_k}: the kernels take 32, one lane per choice"
    held = int(placement.local_counts.max())
    _, shared = layout_block(placement.ranks, held, top_k)
    if shared > USUAL_SHARED_BYTES:
        return (
            f"{placement.ranks} ranks x {held} experts and top_k {top_k} take {shared} bytes of shared memory, "
            f"{USUAL_SHARED_BYTES} are there"
        )
    return None


class Cuda:
    """One GPU per rank; peers through mapped memory, those out of its reach through NCCL or MPI."""

    name = "cuda"
    one_process = False

    def __init__(
        self,
        device_of: Callable[[int], Device] = cuda_device,
        missing: Callable[[], str | None] = missing,
        deadline_s: float = 10.0,
        host_of: Callable[[int], str] = lambda _: this_host(),
        staging_of: StagingOf = staging_of,
        defines: Sequence[str] = (),
    ) -> None:
        """`device_of(rank)`: what runs this rank's kernels; a device waits `deadline_s` for a peer.

        `host_of(rank)`: ranks of different ones do not try each other's memory; `staging_of` makes what serves them.
        `defines`: macros that kernels are compiled with, as Launcher takes them.
        """
        self._device_of, self._missing, self._deadline_s = device_of, missing, deadline_s
        self._host_of, self._staging_of, self._defines = host_of, staging_of, defines

    def supports(self, case: Case) -> str | None:
        return shape_waiver(case) or self._missing()

    def memory_of(self, case: Case) -> tuple[int, int] | None:
        return None

    def prepare(self, problem: Problem, group: Group) -> CudaPrepared:
        session = CudaSession(
            group,
            self._device_of(group.rank),
            num_sms=problem.case.num_sms,
            deadline_s=self._deadline_s,
            transport=problem.case.transport,
            host=self._host_of(group.rank),
            staging_of=self._staging_of,
            defines=self._defines,
        )
        try:
            return _PREPARE[problem.case.collective](problem, session)
        except BaseException:
            session.close()
            raise


CUDA = Cuda()
