"""The host backend: every collective as a Prepared over one MPI process per rank."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import numpy as np

from ncclep_bench.backends.contract import Array, Prepared, Stats, device_waiver, window_waiver
from ncclep_bench.backends.host.experts import ExpertHandle
from ncclep_bench.backends.host.partners import DenseExperts, PaddedExchange
from ncclep_bench.backends.host.registration import Segments
from ncclep_bench.backends.host.session import HostSession
from ncclep_bench.backends.host.tokens import TokenHandle
from ncclep_bench.collectives.contract import Collective, Problem
from ncclep_bench.collectives.verify import poison
from ncclep_bench.model.case import Case
from ncclep_bench.model.dtype import SCALE_BLOCK, dtype_named
from ncclep_bench.model.placement import placement_of
from ncclep_bench.registry import COLLECTIVES
from ncclep_bench.runtime.group import Group
from ncclep_bench.runtime.shared_memory import free_memory_bytes, free_shm_bytes, shm_directory
from ncclep_bench.units import format_bytes

RANK_BYTES = 300 << 20
"""Memory of a rank beside its buffers: interpreter, libraries, MPI, and what checking a piece of the result takes."""


class _HostPrepared(ABC):
    """What all host cases share: the session, its counts, and one rank's arrays."""

    undelivered: frozenset[str] = frozenset()
    wire_source = "counted"
    timer = None

    def __init__(self, problem: Problem, session: HostSession) -> None:
        self.case = problem.case
        self.session = session
        self.local_ranks: tuple[int, ...] = (session.rank,)
        self.algorithm = session.algorithm
        self._inputs: dict[str, Array] = {}
        self._outputs: dict[str, Array] = {}

    def inputs(self, rank: int) -> dict[str, Array]:
        return self._inputs

    @staticmethod
    @abstractmethod
    def memory_of(case: Case) -> tuple[int, int]:
        """Bytes of shared and of private memory that all ranks of a case take together, at worst."""

    @abstractmethod
    def update(self, problem: Problem) -> None: ...

    @abstractmethod
    def launch(self, stream: Any = None) -> None: ...

    def poison(self, rank: int) -> None:
        poison(self._outputs)

    def outputs(self, rank: int) -> dict[str, Array]:
        return self._outputs

    def stats(self) -> Stats:
        return self.session.stats

    def close(self) -> None:
        self._inputs, self._outputs = {}, {}
        self.session.close()


class _PreparedTokens(_HostPrepared):
    """Dispatch, combine or the chained pair over a TokenHandle."""

    def __init__(self, problem: Problem, session: HostSession) -> None:
        super().__init__(problem, session)
        case, routing = problem.case, problem.routing
        assert routing is not None
        assert case.mode is not None
        assert case.layout is not None
        assert case.hidden is not None
        self.handle = TokenHandle(
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

    @staticmethod
    def memory_of(case: Case) -> tuple[int, int]:
        """Windows for what arrives and for the partial sums that go back; tokens in and out, rows laid out by expert.

        A token has at most min(top_k, ranks) rows elsewhere. In mode ll every source has slots on every rank, or with
        every expert there, and the verification fills them all.
        """
        tokens, choices = (case.tokens or 0) * case.ranks, (case.tokens or 0) * case.ranks * (case.top_k or 1)
        arriving = tokens * (case.ranks if case.mode == "ll" else min(case.top_k or 1, case.ranks))
        private = 2 * tokens
        if case.layout == "expert_major":
            experts = int(placement_of(case.placement, case.num_experts, case.ranks).local_counts.sum())
            laid_out = experts * tokens if case.mode == "ll" else choices + experts * ((case.alignment or 1) - 1)
            private += laid_out + choices
        return 2 * arriving * _token_bytes(case), private * _token_bytes(case)

    def update(self, problem: Problem) -> None:
        assert problem.routing is not None
        self.handle.update(*problem.routing.of_rank(self.session.rank))

    def _fit_tokens(self, problem: Problem) -> None:
        """Input tokens for the routing: those of the last one where their number is the same."""
        if not self._inputs or len(self._inputs["tokens"]) != self.handle.tokens:
            self._inputs = token_arrays(problem, self.handle.tokens)

    def close(self) -> None:
        self.handle.close()
        super().close()


class PreparedDispatch(_PreparedTokens):
    """One launch is one dispatch."""

    def update(self, problem: Problem) -> None:
        super().update(problem)
        self._fit_tokens(problem)

    def launch(self, stream: Any = None) -> None:
        self._outputs = self.handle.dispatch(**self._inputs)


class PreparedCombine(_PreparedTokens):
    """One launch is one combine, of rows that lie where peers can read them."""

    def update(self, problem: Problem) -> None:
        super().update(problem)
        self.handle.prime()
        if self.case.layout == "expert_major":
            rows = len(self.handle.outputs()["topk_weights"])
            self._inputs = {"rows": np.zeros((rows, self.case.hidden or 0), problem.dtype.numpy)}
            self.handle.combine_rows()
        else:
            self._inputs = {"rows": self.handle.combine_rows()}
        self._outputs = {"tokens": np.zeros((self.handle.tokens, self.case.hidden or 0), problem.dtype.numpy)}

    def launch(self, stream: Any = None) -> None:
        self.handle.combine(self._inputs["rows"], self._outputs["tokens"])


class PreparedPair(_PreparedTokens):
    """One launch is `chain` pairs."""

    def update(self, problem: Problem) -> None:
        super().update(problem)
        self._fit_tokens(problem)
        self._outputs = {"tokens": np.zeros_like(self._inputs["tokens"])}

    def launch(self, stream: Any = None) -> None:
        for _ in range(self.case.chain or 1):
            self.handle.dispatch(**self._inputs)
            self.handle.return_tokens(self._outputs["tokens"])


class PreparedPadded(_HostPrepared):
    """The padded all-to-all in one of its three variants."""

    wire_source = "nominal"

    def __init__(self, problem: Problem, session: HostSession) -> None:
        super().__init__(problem, session)
        self.algorithm = "MPI_Alltoall"
        self._exchange = PaddedExchange(session, problem.placement, problem.case.hidden or 0, problem.dtype.numpy)
        self._fits: tuple[int, int] | None = None
        self.update(problem)

    @staticmethod
    def memory_of(case: Case) -> tuple[int, int]:
        """Padding depends on the routing; twice the choices is what a mild skew takes."""
        tokens = (case.tokens or 0) * case.ranks
        return 0, tokens * (2 + 2 * 2 * (case.top_k or 1)) * _token_bytes(case)

    def update(self, problem: Problem) -> None:
        assert problem.routing is not None
        exchange = self._exchange
        exchange.update(*problem.routing.of_rank(self.session.rank))
        fits = (exchange.tokens, exchange.received_rows)
        if fits == self._fits:
            return
        self._fits = fits
        tokens = token_arrays(problem, exchange.tokens)
        received = token_arrays(problem, exchange.received_rows)
        counts = {"expert_counts": exchange.expert_counts.copy()}
        self._received = received["tokens"]
        self._run, self._inputs, self._outputs = {
            "dispatch": (self._dispatch, tokens, {**received, **counts}),
            "combine": (self._combine, {"rows": received["tokens"]}, {"tokens": tokens["tokens"]}),
            "dispatch_combine": (self._pair, tokens, {"tokens": np.zeros_like(tokens["tokens"])}),
        }[problem.case.variant or "dispatch"]

    def launch(self, stream: Any = None) -> None:
        for _ in range(self.case.chain or 1):
            self._run()

    def _dispatch(self) -> None:
        for name, array in self._inputs.items():
            self._exchange.dispatch(array, self._outputs[name])
        if "expert_counts" in self._outputs:
            self._outputs["expert_counts"][...] = self._exchange.expert_counts

    def _combine(self) -> None:
        self._exchange.combine(self._inputs["rows"], self._outputs["tokens"])

    def _pair(self) -> None:
        self._exchange.dispatch(self._inputs["tokens"], self._received)
        self._exchange.combine(self._received, self._outputs["tokens"])


class _PreparedExperts(_HostPrepared):
    """All-gather or reduce-scatter over an ExpertHandle; the variant says where the rows lie."""

    def __init__(self, problem: Problem, session: HostSession) -> None:
        super().__init__(problem, session)
        case = problem.case
        self.elements = case.expert_elements or 1
        self.segments = Segments(session.stats, case.mr_cache_size or 0)
        self.handle = ExpertHandle(
            session, self.segments, placement=problem.placement, elements=self.elements, dtype=problem.dtype
        )
        self.in_place = case.variant == "in_place"
        held = len(problem.placement.experts_of_rank[session.rank])
        self._allocate(problem, held, self._zeros if case.variant == "registered" else self.segments.empty)
        self.update(problem)

    def update(self, problem: Problem) -> None:
        assert problem.active is not None
        self.handle.update(problem.active[self.session.rank])

    @abstractmethod
    def _allocate(self, problem: Problem, held: int, empty: Callable[[tuple[int, ...], Any], Array]) -> None:
        """Inputs and outputs in memory from `empty`, published at once unless each call is to register them."""

    @staticmethod
    def _zeros(shape: tuple[int, ...], dtype: Any) -> Array:
        array = np.empty(shape, dtype)
        array.view(np.uint8)[...] = 0
        return array

    def close(self) -> None:
        self.handle.close()
        self.segments.close()
        super().close()


class PreparedGather(_PreparedExperts):
    """One launch is one all-gather of parameters."""

    @staticmethod
    def memory_of(case: Case) -> tuple[int, int]:
        """Everybody's result, and parameters apart from it, which are copied where results cannot be reached."""
        layer = _layer_bytes(case)
        if case.variant == "registered":
            return layer, layer + case.ranks * layer
        return case.ranks * layer, 0 if case.variant == "in_place" else layer

    def _allocate(self, problem: Problem, held: int, empty: Callable[[tuple[int, ...], Any], Array]) -> None:
        dtype, experts = problem.dtype.numpy, problem.case.num_experts
        if self.in_place:
            self._inputs = self._outputs = {"all_params": empty((experts, self.elements), dtype)}
        else:
            # Owners push, so parameters may lie anywhere; only what they push into must be reachable.
            self._inputs = {"params": self._zeros((held, self.elements), dtype)}
            self._outputs = {"all_params": empty((experts, self.elements), dtype)}
        if problem.case.variant != "registered":
            self.handle.bind(out=self._outputs["all_params"])

    def launch(self, stream: Any = None) -> None:
        params = next(iter(self._inputs.values()))
        self.handle.all_gather(params, self._outputs["all_params"], in_place=self.in_place)


class PreparedReduce(_PreparedExperts):
    """One launch is one reduce-scatter of gradients."""

    @staticmethod
    def memory_of(case: Case) -> tuple[int, int]:
        """Everybody's gradients, a copy of them where they cannot be reached, and sums apart from them."""
        layer = _layer_bytes(case)
        if case.variant == "registered":
            return case.ranks * layer, layer + case.ranks * layer
        return case.ranks * layer, 0 if case.variant == "in_place" else layer

    def _allocate(self, problem: Problem, held: int, empty: Callable[[tuple[int, ...], Any], Array]) -> None:
        dtype, experts = problem.dtype.numpy, problem.case.num_experts
        self._inputs = {"all_grads": empty((experts, self.elements), dtype)}
        self._outputs = self._inputs if self.in_place else {"grads": self._zeros((held, self.elements), dtype)}
        if problem.case.variant != "registered":
            self.handle.bind(grads=self._inputs["all_grads"])

    def launch(self, stream: Any = None) -> None:
        self.handle.reduce_scatter(self._inputs["all_grads"], None if self.in_place else self._outputs["grads"])


class _PreparedDense(_HostPrepared):
    """What the dense partners share; every byte moves inside MPI."""

    wire_source = "nominal"

    def __init__(self, problem: Problem, session: HostSession) -> None:
        super().__init__(problem, session)
        self.elements = problem.case.expert_elements or 1
        self.dense = DenseExperts(session, problem.placement, self.elements, problem.dtype.numpy)

    @staticmethod
    def memory_of(case: Case) -> tuple[int, int]:
        """Two buffers of all experts on every rank."""
        return 0, 2 * case.ranks * _layer_bytes(case)

    def update(self, problem: Problem) -> None:
        """Nothing depends on an activation."""


class PreparedDenseGather(_PreparedDense):
    """One launch is one all-gather of all parameters."""

    def __init__(self, problem: Problem, session: HostSession) -> None:
        super().__init__(problem, session)
        held = len(problem.placement.experts_of_rank[session.rank])
        self._inputs = {"params": np.zeros((held, self.elements), problem.dtype.numpy)}
        self._outputs = {"all_params": np.zeros((problem.case.num_experts, self.elements), problem.dtype.numpy)}
        self.algorithm = "MPI_Allgather"

    def launch(self, stream: Any = None) -> None:
        self.dense.all_gather(self._inputs["params"], self._outputs["all_params"])


class PreparedDenseReduce(_PreparedDense):
    """One launch is one all-reduce of all gradients."""

    def __init__(self, problem: Problem, session: HostSession) -> None:
        super().__init__(problem, session)
        self._outputs = {"all_grads": np.zeros((problem.case.num_experts, self.elements), problem.dtype.numpy)}
        self._inputs = {"all_grads": np.zeros_like(self._outputs["all_grads"])}
        self.algorithm = "MPI_Allreduce"

    def launch(self, stream: Any = None) -> None:
        self.dense.all_reduce(self._inputs["all_grads"], self._outputs["all_grads"], self.case.dtype)


_PREPARE: dict[str, type[_HostPrepared]] = {
    "dispatch": PreparedDispatch,
    "combine": PreparedCombine,
    "dispatch_combine": PreparedPair,
    "padded_all_to_all": PreparedPadded,
    "all_gather_experts": PreparedGather,
    "reduce_scatter_expert_grads": PreparedReduce,
    "dense_all_gather": PreparedDenseGather,
    "dense_all_reduce": PreparedDenseReduce,
}
"""Which Prepared runs a collective; a collective without an entry is waived."""


def token_arrays(problem: Problem, rows: int) -> dict[str, Array]:
    """Zeroed rows of tokens, with scales in float8."""
    hidden = problem.case.hidden or 0
    arrays = {"tokens": np.zeros((rows, hidden), problem.dtype.numpy)}
    if problem.dtype.scaled:
        arrays["scales"] = np.zeros((rows, -(-hidden // SCALE_BLOCK)), np.float32)
    return arrays


def _token_bytes(case: Case) -> int:
    """Bytes of one token: its elements, its scales in float8, weights and ids of its choices."""
    dtype, hidden = dtype_named(case.dtype), case.hidden or 0
    scales = -(-hidden // SCALE_BLOCK) * 4 if dtype.scaled else 0
    return hidden * dtype.itemsize + scales + 8 * (case.top_k or 1)


def _layer_bytes(case: Case) -> int:
    """Bytes of all experts, each once."""
    return case.num_experts * (case.expert_elements or 0) * dtype_named(case.dtype).itemsize


class Host:
    """One MPI process per rank; peers on this host through shared windows, others through messages."""

    name = "host"
    one_process = False

    def __init__(self, deadline_s: float = 60.0) -> None:
        """A rank waits `deadline_s` for a peer."""
        self._deadline_s = deadline_s

    def supports(self, case: Case) -> str | None:
        definition: Collective = COLLECTIVES.get(case.collective)
        if case.collective not in _PREPARE:
            return f"the host backend does not run {case.collective}"
        refused = definition.waiver(case) or window_waiver(case, self.name) or device_waiver(case, self.name)
        return refused or self._too_large(case)

    def memory_of(self, case: Case) -> tuple[int, int] | None:
        return _PREPARE[case.collective].memory_of(case) if case.collective in _PREPARE else None

    def prepare(self, problem: Problem, group: Group) -> Prepared:
        case = problem.case
        session = HostSession(group, transport=case.transport, deadline_s=self._deadline_s)
        try:
            return _PREPARE[case.collective](problem, session)
        except BaseException as error:
            session.abort(str(error))
            session.close()
            raise

    def _too_large(self, case: Case) -> str | None:
        shared, private = _PREPARE[case.collective].memory_of(case)
        rooms = (
            (shared, free_shm_bytes(), str(shm_directory())),
            (shared + private + case.ranks * RANK_BYTES, free_memory_bytes(), "memory"),
        )
        for needed, free, where in rooms:
            if needed > free:
                return (
                    f"{case.ranks} ranks need {format_bytes(needed)} of {where} "
                    f"({format_bytes(shared)} shared + {format_bytes(private)} private buffers), "
                    f"{format_bytes(free)} are free"
                )
        return None


HOST = Host()
