"""The seven ncclEp* functions by name, over EpCommunicator, with NVIDIA's enumerations and result codes.

A function returns an ncclResult_t, or a tuple of it and what C would return through a pointer, and does not raise for
what the contract forbids: `ncclGetLastError` has the text. Codes are those of nccl.h, and follow NCCL's own use:

    ncclInvalidArgument  one argument alone is wrong: NULL, a datatype or reduction that is not offered, a count below 1
    ncclInvalidUsage     arguments do not go together: buffers of another size, stride or dtype than count, datatype and
                         configuration say, memory of a device, a stream, ranks that do or configure different things
    ncclRemoteError      another rank is absent, has ended, given up, or does not answer within the deadline
    ncclSystemError      memory, a descriptor or a library that this machine does not give
    ncclInternalError    anything else that failed

An `NCCL_INVALID_DATATYPE` does not exist in nccl.h: a wrong dtype is ncclInvalidUsage where it differs from the
parameters', ncclInvalidArgument where it is none that the operation offers.

Ownership: the caller's buffers stay the caller's, are read and written during the call alone (the backend host is done
when a call returns, cuda when the stream has come past it), and a communicator lives until ncclEpCommDestroy, or until
its last reference is dropped.
"""

# Names are those of nccl.h and of its expert-parallel extension.
# ruff: noqa: N801, N802, N815

from __future__ import annotations

from collections.abc import Callable
from enum import IntEnum

from ncclep_bench.ep.agreement import CallMismatchError
from ncclep_bench.ep.communicator import EpCommunicator
from ncclep_bench.ep.routes import Route
from ncclep_bench.errors import BenchError, CannotRunError, ConfigMismatchError, InputError, RankError, UsageError
from ncclep_bench.model.dtype import DTYPES, dtype_named
from ncclep_bench.model.ep_config import EpConfig
from ncclep_bench.runtime.shared_memory import NotEnoughSharedMemoryError


class ncclDataType_t(IntEnum):
    """Values of nccl.h 2.24 and later."""

    ncclInt8 = 0
    ncclChar = 0
    ncclUint8 = 1
    ncclInt32 = 2
    ncclInt = 2
    ncclUint32 = 3
    ncclInt64 = 4
    ncclUint64 = 5
    ncclFloat16 = 6
    ncclHalf = 6
    ncclFloat32 = 7
    ncclFloat = 7
    ncclFloat64 = 8
    ncclDouble = 8
    ncclBfloat16 = 9
    ncclFloat8e4m3 = 10
    ncclFloat8e5m2 = 11


class ncclRedOp_t(IntEnum):
    """Values of nccl.h; only ncclSum is offered here."""

    ncclSum = 0
    ncclProd = 1
    ncclMax = 2
    ncclMin = 3
    ncclAvg = 4


class ncclResult_t(IntEnum):
    """Values of nccl.h; ncclTimeout is of its newest versions and never returned here."""

    ncclSuccess = 0
    ncclUnhandledCudaError = 1
    ncclSystemError = 2
    ncclInternalError = 3
    ncclInvalidArgument = 4
    ncclInvalidUsage = 5
    ncclRemoteError = 6
    ncclInProgress = 7
    ncclTimeout = 8


def ncclEpInit(group: object, config: EpConfig) -> tuple[ncclResult_t, EpCommunicator | None]:
    """Make the communicator of `group`; collective. Returns (result, comm), comm None unless ncclSuccess.

    `group`: an mpi4py communicator, or an object with rank, size, allgather(bytes), barrier(). Different configurations
    are ncclInvalidUsage on all ranks, an absent rank ncclRemoteError after `init_deadline_s`.
    """
    made: list[EpCommunicator] = []

    def start() -> None:
        for name, argument in (("group", group), ("config", config)):
            if argument is None:
                raise _InvalidArgumentError(f"{name} is NULL")
        made.append(EpCommunicator(group, config))

    result = _result_of(start)
    return result, made[0] if made else None


def ncclEpInitTopology(comm: EpCommunicator | None) -> ncclResult_t:
    """Find out how ranks reach each other, for `comm.topology`. On the host backend ncclEpInit has done so already."""
    return _result_of(lambda: _check_communicator(comm))


def ncclEpTopologyAwareRoute(comm: EpCommunicator | None) -> tuple[ncclResult_t, tuple[Route, ...]]:
    """The routes from this rank: source, target, path, link, latency in ns, GB/s; local. Returns (result, routes).

    On the host backend every route is direct, and latency and bandwidth are None: nothing has been measured.
    """
    routes: list[Route] = []
    result = _result_of(lambda: routes.extend(_check_communicator(comm).topology.routes))
    return result, tuple(routes)


def ncclEpAllGatherExperts(
    sendbuff: object,
    recvbuff: object,
    count: int,
    datatype: int,
    comm: EpCommunicator | None,
    stream: object = None,
    needed: object = None,
) -> ncclResult_t:
    """Gather expert parameters; collective.

    `sendbuff` [local experts * count], `recvbuff` [num_experts * count], flat by expert * count or with one row per
    expert; `count`: elements of one expert. In place: sendbuff is recvbuff, or its part with this rank's experts.
    `needed`: bool [num_experts], NULL for all; other parts of recvbuff are left alone.
    `stream`: NULL on the backend host, on cuda a stream that is no default one.
    """

    def run() -> None:
        alive = _check_communicator(comm)
        _check_buffers(sendbuff, recvbuff)
        _check_numbers(count, datatype, alive)
        experts = alive.config.num_experts
        _check_size(alive, "sendbuff", sendbuff, count, len(alive.local_experts), experts)
        _check_size(alive, "recvbuff", recvbuff, count, experts)
        alive.all_gather_experts(sendbuff, needed, recvbuff, stream=stream)

    return _result_of(run)


def ncclEpReduceScatterExpertGrads(
    sendbuff: object,
    recvbuff: object,
    count: int,
    datatype: int,
    op: int,
    comm: EpCommunicator | None,
    stream: object = None,
    has_gradient: object = None,
) -> ncclResult_t:
    """Sum expert gradients for the ranks that hold the experts; collective.

    `sendbuff` [num_experts * count], flat by expert * count or with one row per expert; `recvbuff`
    [local experts * count]; `count`: elements of one expert; `datatype`: the parameters'; `op`: ncclSum. In place:
    recvbuff is sendbuff, or its part with this rank's experts. `has_gradient`: bool [num_experts], NULL for all; other
    parts of sendbuff are not read. Every replica of an expert gets the same sum. `stream`: as above.
    """

    def run() -> None:
        alive = _check_communicator(comm)
        _check_buffers(sendbuff, recvbuff)
        if op not in list(ncclRedOp_t):
            raise _InvalidArgumentError(f"op {op!r} is no ncclRedOp_t", hint="allowed: ncclSum")
        if op != ncclRedOp_t.ncclSum:
            raise _InvalidArgumentError(f"op {ncclRedOp_t(op).name} is not offered", hint="allowed: ncclSum")
        _check_numbers(count, datatype, alive)
        experts = alive.config.num_experts
        _check_size(alive, "sendbuff", sendbuff, count, experts)
        _check_size(alive, "recvbuff", recvbuff, count, len(alive.local_experts), experts)
        alive.reduce_scatter_expert_grads(sendbuff, has_gradient, recvbuff, stream=stream)

    return _result_of(run)


def ncclEpWarmupAllGatherExperts(
    comm: EpCommunicator | None, sendbuff: object = None, recvbuff: object = None, stream: object = None
) -> ncclResult_t:
    """Do what the first ncclEpAllGatherExperts with these buffers would pay for; collective.

    One expert of each rank travels into recvbuff. NULL: scratch memory of `expert_elements` per expert.
    """
    return _result_of(lambda: _check_communicator(comm).warmup_all_gather_experts(sendbuff, recvbuff, stream=stream))


def ncclEpCommDestroy(comm: EpCommunicator | None) -> ncclResult_t:
    """Free everything of this rank; waits for nobody. NULL and a destroyed communicator are fine, as in NCCL."""
    return _result_of(lambda: None if comm is None else comm.destroy())


def ncclGetLastError(comm: EpCommunicator | None = None) -> str:
    """What went wrong last in this process, "" when nothing has; as in NCCL the communicator does not matter."""
    return _last_error


_last_error = ""


class _InvalidArgumentError(InputError):
    """One argument alone is wrong."""


# The first match counts, so children stand before their parents.
_RESULTS: tuple[tuple[type[Exception], ncclResult_t], ...] = (
    (_InvalidArgumentError, ncclResult_t.ncclInvalidArgument),
    (ConfigMismatchError, ncclResult_t.ncclInvalidUsage),
    (CallMismatchError, ncclResult_t.ncclInvalidUsage),
    (InputError, ncclResult_t.ncclInvalidUsage),
    (RankError, ncclResult_t.ncclRemoteError),
    (NotEnoughSharedMemoryError, ncclResult_t.ncclSystemError),
    (CannotRunError, ncclResult_t.ncclSystemError),
    (OSError, ncclResult_t.ncclSystemError),
    (MemoryError, ncclResult_t.ncclSystemError),
    (BenchError, ncclResult_t.ncclInternalError),
)


def _result_of(call: Callable[[], object]) -> ncclResult_t:
    global _last_error
    try:
        call()
    except tuple(kind for kind, _ in _RESULTS) as error:
        _last_error = str(error)
        return next(result for kind, result in _RESULTS if isinstance(error, kind))
    return ncclResult_t.ncclSuccess


def _check_communicator(comm: object) -> EpCommunicator:
    if not isinstance(comm, EpCommunicator):
        raise _InvalidArgumentError(f"comm is {'NULL' if comm is None else type(comm).__name__}")
    if comm.destroyed:
        raise _InvalidArgumentError("comm has been destroyed")
    return comm


def _check_buffers(sendbuff: object, recvbuff: object) -> None:
    for name, buffer in (("sendbuff", sendbuff), ("recvbuff", recvbuff)):
        if buffer is None:
            raise _InvalidArgumentError(f"{name} is NULL")


def _check_numbers(count: object, datatype: int, comm: EpCommunicator) -> None:
    if not isinstance(count, int) or count < 1:
        raise _InvalidArgumentError(f"count is {count!r}", hint="allowed: elements of one expert, at least 1")
    if datatype not in [dtype.nccl_value for dtype in DTYPES.values()]:
        known = (
            f"ncclDataType_t {ncclDataType_t(datatype).name}" if datatype in list(ncclDataType_t) else repr(datatype)
        )
        allowed = ", ".join(dtype.nccl_name for dtype in DTYPES.values())
        raise _InvalidArgumentError(f"datatype {known} is not offered", hint=f"allowed: {allowed}")
    parameters = dtype_named(comm.config.dtype)
    if datatype != parameters.nccl_value:
        raise UsageError(
            f"rank {comm.rank}: datatype is {ncclDataType_t(datatype).name}, the parameters are {parameters.nccl_name}",
            hint="pass the dtype of the EpConfig",
        )
    if comm.config.expert_elements not in (None, count):
        raise UsageError(
            f"rank {comm.rank}: count is {count}, the EpConfig says expert_elements {comm.config.expert_elements}"
        )


def _check_size(comm: EpCommunicator, name: str, buffer: object, count: int, *experts: int) -> None:
    elements = comm.size_of(buffer, name)
    if elements not in [count * rows for rows in experts]:
        raise UsageError(
            f"{name} has {elements} elements",
            hint=f"allowed: count {count} × {' or '.join(str(rows) for rows in dict.fromkeys(experts))} experts",
        )
