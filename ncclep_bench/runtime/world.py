"""The gate to MPI: groups of ranks, meetings with a deadline that names who is absent, persistent messages."""

from __future__ import annotations

import contextlib
import ctypes
import importlib.util
import os
import re
import socket
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, NoReturn, cast

from ncclep_bench.errors import CannotRunError, RankError, UsageError
from ncclep_bench.runtime.group import Group
from ncclep_bench.runtime.place import MPI_LAUNCHERS, place_of
from ncclep_bench.runtime.processes import process_state, unlink_own_segments

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    from mpi4py import MPI

    Array = npt.NDArray[Any]

# MPI guarantees tags up to 32767; this one meets on communicators that are somebody else's.
_MEETING_TAG = 32767
_ROWS_TAG = 32766
_MOST_MESSAGE_BYTES = 1 << 30
# Both MPICH and Open MPI have it so.
_THREAD_MULTIPLE = 3
_TRIES_BEFORE_SLEEP = 200
_NAP_S = 100e-6
_WITHDRAWAL_S = 0.1


class Member(NamedTuple):
    """Where a rank of a group runs."""

    host: str
    pid: int


def environment_rank(environ: Mapping[str, str] = os.environ) -> int | None:
    """A process's rank as the launcher's environment tells it, or None outside of MPI; does not start MPI."""
    return place_of(environ, MPI_LAUNCHERS).rank


def in_mpi_environment() -> bool:
    """Whether a launcher (mpiexec, srun) started this process as one of its ranks."""
    return environment_rank() is not None


def environment_sizes() -> tuple[int | None, int | None]:
    """How many ranks there are, and how many of them on this host, as far as the launcher's environment tells."""
    place = place_of(os.environ, MPI_LAUNCHERS)
    return place.ranks, place.local_ranks


def world(deadline_s: float | None = None) -> MpiGroup:
    """All ranks that were started together; collective, starts MPI, the caller closes it.

    Raises CannotRunError without mpi4py or an MPI library, RankError naming the ranks absent after `deadline_s`.
    """
    group = MpiGroup(_mpi().COMM_WORLD, deadline_s)
    unlink_own_segments()
    return group


def wrap(group: object, deadline_s: float | None = None) -> Group:
    """`group` as a Group: an mpi4py communicator becomes an MpiGroup, any object with a Group's methods stays itself.

    For a communicator this is collective, and the caller closes the MpiGroup.
    Raises UsageError for anything else, RankError as `world` does.
    """
    mpi = sys.modules.get("mpi4py.MPI")
    if mpi is not None and isinstance(group, mpi.Comm):
        if not isinstance(group, mpi.Intracomm) or group == mpi.COMM_NULL:
            raise UsageError("the group must be an MPI intracommunicator that this process belongs to")
        return MpiGroup(group, deadline_s)
    missing = [name for name in ("rank", "size", "allgather", "barrier") if not hasattr(group, name)]
    if missing:
        raise UsageError(
            f"{type(group).__name__} cannot be a group: it has no {', '.join(missing)}",
            hint="pass an mpi4py communicator or an object with rank, size, allgather(bytes) and barrier()",
        )
    return cast(Group, group)


def print_library() -> None:
    """Print what the MPI library that a rank would load says of itself, without starting MPI.

    For a process of its own: which library is loaded cannot be undone.
    """
    import ctypes

    import mpi4py

    mpi4py.rc.initialize = False
    mpi4py.rc.finalize = False
    from mpi4py import MPI

    about = MPI.Get_library_version()
    print(about)
    lines = Path("/proc/self/maps").read_text().splitlines()
    for path in dict.fromkeys(line.split()[-1] for line in lines if re.search(r"/libmpi[\w-]*\.so[^/]*$", line)):
        print(f"library: {path}")
        query = getattr(ctypes.CDLL(path), "MPIX_Query_cuda_support", None)
        if query and "Open MPI" in about:  # MPICH's may not be called before MPI has started
            print(f"mpi_built_with_cuda_support:value:{'true' if query() else 'false'}")


def abort(code: int) -> NoReturn:
    """End every rank of the world, with what this one has printed; without MPI, this process. Does not return."""
    sys.stdout.flush()
    sys.stderr.flush()
    mpi = sys.modules.get("mpi4py.MPI")
    if mpi is not None and mpi.Is_initialized() and not mpi.Is_finalized():
        unlink_own_segments()
        mpi.COMM_WORLD.Abort(code)
    os._exit(code)


class SelfGroup:
    """The group of this process alone, without MPI."""

    rank = 0
    size = 1

    def allgather(self, data: bytes, /) -> list[bytes]:
        return [data]

    def barrier(self) -> None:
        """Return at once."""


class MpiGroup:
    """A Group over a private duplicate of an MPI communicator.

    Waiting is polite: it tries for a moment, then naps, and takes no time from ranks that work on the same cores. With
    a deadline the absent ranks are named; after such an error the group is only good for `close` or `abort`.
    `deadline_s`: of calls without one of their own; None: they wait for ever.
    """

    def __init__(self, comm: MPI.Intracomm, deadline_s: float | None = None) -> None:
        """Collective over `comm`, which is duplicated and stays the caller's. Raises RankError as `world` does."""
        me = Member(socket.gethostname(), os.getpid())
        self.rank: int = comm.rank
        self.size: int = comm.size
        # Duplicating waits for everybody without naming who is absent, so all meet on the given communicator first.
        raw = _exchange(comm, f"{me.pid} {me.host}".encode(), deadline_s, "the start of the group", None)
        fields = [data.decode().partition(" ") for data in raw]
        self.members: tuple[Member, ...] = tuple(Member(host, int(pid)) for pid, _, host in fields)
        self.comm: MPI.Intracomm = comm.Dup()
        self._operations: dict[str, MPI.Op] = {}
        self.deadline_s: float | None = None

    def allgather(self, data: bytes, /, deadline_s: float | None = None, operation: str = "allgather") -> list[bytes]:
        """Everybody's `data`, by rank. Raises RankError naming the ranks from which nothing came in `deadline_s`."""
        return _exchange(self.comm, data, deadline_s or self.deadline_s, operation, self.members)

    def barrier(self, deadline_s: float | None = None, operation: str = "barrier") -> None:
        """Return when all ranks have come here. Raises RankError naming those absent after `deadline_s`."""
        if deadline_s is not None or self.deadline_s is not None:
            self.allgather(b"", deadline_s, operation)
            return
        request = self.comm.Ibarrier()
        _politely(request.Test, None)

    def same_host(self) -> list[int]:
        """The ranks, this one among them, that MPI takes for sharing this one's memory; collective.

        That is the launcher's view: containers and namespaces lie, prove it by reading a nonce through the memory.
        """
        local = self.comm.Split_type(_mpi().COMM_TYPE_SHARED)
        ranks = _ranks_of(local, self.comm)
        local.Free()
        return ranks

    def subgroup(self, ranks: Sequence[int]) -> MpiGroup | None:
        """The group of `ranks`, numbered in that order; collective over them, None on others, which need not call."""
        if self.rank not in ranks:
            return None
        whole = self.comm.Get_group()
        part = whole.Incl(list(ranks))
        comm = self.comm.Create_group(part)
        part.Free()
        whole.Free()
        group = MpiGroup(comm)
        comm.Free()
        return group

    def send_channel(self, peer: int, buffer: Array, tag: int = 0) -> Channel:
        """A persistent message to `peer` from `buffer` (contiguous, any size), sent at every `start`; `tag` < 32767."""
        return Channel(self, "send", peer, buffer, tag)

    def recv_channel(self, peer: int, buffer: Array, tag: int = 0) -> Channel:
        """A persistent message from `peer` into `buffer`, received after every `start`; `tag` < 32767."""
        return Channel(self, "receive", peer, buffer, tag)

    def exchange(
        self,
        sends: Iterable[tuple[int, Array]],
        receives: Iterable[tuple[int, Array]],
        deadline_s: float | None,
        operation: str,
    ) -> None:
        """Messages (peer, buffer) to and from peers at once; those between two ranks pair up in their order.

        `sends` is walked once, and each message is on its way while the next is made. Sizes agree on both sides.
        Raises RankError naming the peers whose messages have not come, or not gone, after `deadline_s`.
        """
        mpi = _mpi()
        under_way: list[tuple[int, MPI.Request, Array]] = []

        def begin(start: Callable[..., MPI.Request], peer: int, buffer: Array) -> None:
            whole = _bytes_of(buffer)
            for first in range(0, len(whole), _MOST_MESSAGE_BYTES):
                piece = whole[first : first + _MOST_MESSAGE_BYTES]
                under_way.append((peer, start([piece, mpi.BYTE], peer, _ROWS_TAG), piece))

        for peer, buffer in receives:
            begin(self.comm.Irecv, peer, buffer)
        for peer, buffer in sends:
            begin(self.comm.Isend, peer, buffer)

        def done() -> bool:
            under_way[:] = [message for message in under_way if not message[1].Test()]
            return not under_way

        if not _politely(done, deadline_s):
            _KEPT_ALIVE.append(under_way)
            late = sorted({peer for peer, _, _ in under_way})
            raise _absent(late, self.members, f"did not take part in {operation} within {deadline_s:.1f} s")

    def describe(self, rank: int) -> str:
        """`rank` with host and pid and, if it should run here, what it is doing."""
        return _describe(rank, self.members)

    def alltoall(self, send: Array, recv: Array) -> None:
        """MPI_Alltoall of equal parts, in rank order; blocking, as users call it."""
        mpi = _mpi()
        self.comm.Alltoall([_bytes_of(send), mpi.BYTE], [_bytes_of(recv), mpi.BYTE])

    def allgather_into(self, send: Array, recv: Array) -> None:
        """MPI_Allgather of equal parts into `recv`, in rank order; blocking."""
        mpi = _mpi()
        self.comm.Allgather([_bytes_of(send), mpi.BYTE], [_bytes_of(recv), mpi.BYTE])

    def allreduce(self, send: Array, recv: Array, dtype: str) -> None:
        """MPI_Allreduce (sum) of `dtype` elements into `recv`; blocking.

        float16 and bfloat16 are added in float32 and rounded at each step, as MPI offers no wider partial sums.
        Raises UsageError for a dtype that cannot be added.
        """
        mpi = _mpi()
        if dtype == "float32":
            datatype, operation = mpi.FLOAT, mpi.SUM
        elif dtype in ("float16", "bfloat16"):
            datatype = mpi.UINT16_T
            operation = self._operations.get(dtype) or self._operations.setdefault(dtype, _half_sum(dtype))
        else:
            raise UsageError(f"MPI_Allreduce of {dtype} has no sum", hint="use float32, float16 or bfloat16")
        self.comm.Allreduce([_bytes_of(send), datatype], [_bytes_of(recv), datatype], operation)

    def close(self) -> None:
        """Free the communicator and its operations; waits for nobody. May be called twice, and after MPI has ended."""
        mpi = _mpi()
        if mpi.Is_finalized() or self.comm == mpi.COMM_NULL:
            return
        for operation in self._operations.values():
            operation.Free()
        self._operations.clear()
        self.comm.Free()


class Post:
    """Short messages between ranks of the world, where nobody waits for anybody: a rank may be stopped or gone.

    Starts MPI, which does wait for every rank; other threads of this process run meanwhile. `close` ends MPI, and is
    for the thread that made this.
    """

    MAX_BYTES = 1024
    """So that a packet on the wire is small too: a path may drop large ones."""

    def __init__(self) -> None:
        if "mpi4py.MPI" not in sys.modules:
            _start_beside_threads()
        self._comm = _mpi().COMM_WORLD
        self.rank: int = self._comm.rank
        self.size: int = self._comm.size
        self._sends: list[tuple[MPI.Request, bytes]] = []

    def send(self, peer: int, data: bytes) -> None:
        """Put at most MAX_BYTES on the way."""
        assert len(data) <= self.MAX_BYTES, f"{len(data)} bytes are no short message"
        self._sends = [send for send in self._sends if not send[0].Test()]
        self._sends.append((self._comm.Isend([data, _mpi().BYTE], peer, _MEETING_TAG), data))

    def receive(self) -> tuple[int, bytes] | None:
        """A message and who sent it, or None when there is none now."""
        mpi = _mpi()
        status = mpi.Status()
        message = self._comm.Improbe(mpi.ANY_SOURCE, _MEETING_TAG, status)
        if message is None:
            return None
        data = bytearray(status.Get_count(mpi.BYTE))
        message.Recv([data, mpi.BYTE])
        return status.Get_source(), bytes(data)

    def wait(self, until: float) -> tuple[int, bytes] | None:
        """The next message, or None when none has come before `until` on time.monotonic's clock; polite."""
        found: list[tuple[int, bytes]] = []

        def done() -> bool:
            message = self.receive()
            found.extend([message] if message else [])
            return message is not None

        _politely(done, max(until - time.monotonic(), 0.0))
        return found[0] if found else None

    def close(self) -> None:
        """End MPI, when what was sent has gone."""
        _politely(lambda: all(request.Test() for request, _ in self._sends), None)
        _mpi().Finalize()


def _start_beside_threads() -> None:
    """Start MPI by itself; mpi4py takes it as it finds it."""
    # It would start MPI with the interpreter locked, and no other thread could see a deadline pass.
    try:
        spec = importlib.util.find_spec("mpi4py.MPI")
    except ImportError:
        spec = None
    if spec is None or spec.origin is None:
        return  # _mpi says what is missing
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(spec.origin).MPI_Init_thread(None, None, _THREAD_MULTIPLE, ctypes.byref(ctypes.c_int()))


class Channel:
    """One persistent MPI request between this rank and `peer`; `free` gives it back.

    `created` and `freed` count the requests of this process.
    """

    created: ClassVar[int] = 0
    freed: ClassVar[int] = 0

    def __init__(self, group: MpiGroup, direction: str, peer: int, buffer: Array, tag: int) -> None:
        if not 0 <= tag < _MEETING_TAG:
            raise UsageError(f"tag {tag} is not in 0..{_MEETING_TAG - 1}")
        self.group = group
        self.direction = direction
        self.peer = peer
        self._buffer = _bytes_of(buffer)
        initialise = group.comm.Send_init if direction == "send" else group.comm.Recv_init
        self._request: MPI.Prequest | None = initialise([self._buffer, _mpi().BYTE], peer, tag)
        Channel.created += 1

    @classmethod
    def live(cls) -> int:
        """Requests created and not freed yet."""
        return cls.created - cls.freed

    def start(self) -> None:
        """Begin one transfer; the buffer is MPI's until `test` says True."""
        self._active().Start()

    def test(self) -> bool:
        """Whether the transfer begun last is complete; makes progress."""
        return self._active().Test()

    def free(self) -> None:
        """Give the request back, also while a peer is missing. May be called twice."""
        if self._request is None:
            return
        if not _mpi().Is_finalized():
            if not self._request.Test():
                if self.direction == "receive":
                    self._request.Cancel()
                # What is half done with a peer that hangs cannot be withdrawn: MPI keeps the buffer, so it must live.
                if not _politely(self._request.Test, _WITHDRAWAL_S):
                    _KEPT_ALIVE.append(self._buffer)
            self._request.Free()
        self._request = None
        Channel.freed += 1

    def _active(self) -> MPI.Prequest:
        if self._request is None:
            raise UsageError("the channel has been freed")
        return self._request


def start_all(channels: Iterable[Channel]) -> None:
    """Begin one transfer on every channel."""
    for channel in channels:
        channel.start()


def wait_all(channels: Iterable[Channel], deadline_s: float | None, operation: str) -> None:
    """Return when every started transfer is complete; polite.

    Raises RankError naming operation and peers whose transfer is not complete after `deadline_s`.
    """
    pending = list(channels)

    def done() -> bool:
        pending[:] = [channel for channel in pending if not channel.test()]
        return not pending

    if not _politely(done, deadline_s):
        late = sorted({channel.peer for channel in pending})
        group = pending[0].group
        raise _absent(late, group.members, f"did not take part in {operation} within {deadline_s:.1f} s")


# Buffers of messages to ranks that never took them: MPI may still read these.
_KEPT_ALIVE: list[object] = []


def _mpi() -> Any:
    """The module mpi4py.MPI; importing it starts MPI."""
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        raise CannotRunError(f"MPI cannot be used: {error}", hint="pip install 'ncclep-bench[mpi]'") from error
    return MPI


def _politely(done: Callable[[], bool], deadline_s: float | None) -> bool:
    """Call `done` until it is True (then True) or the deadline has passed (then False)."""
    start = time.perf_counter()
    tries = 0
    while not done():
        tries += 1
        if tries < _TRIES_BEFORE_SLEEP:
            os.sched_yield()
        elif deadline_s is not None and time.perf_counter() - start > deadline_s:
            return False
        else:
            # Busy polling by waiting ranks makes working ones up to eight times slower when cores are short.
            time.sleep(_NAP_S)
    return True


def _exchange(
    comm: MPI.Intracomm, data: bytes, deadline_s: float | None, operation: str, members: Sequence[Member] | None
) -> list[bytes]:
    """Everybody's `data`: point to point, since a collective that does not end cannot tell who is absent."""
    mpi = _mpi()
    rank = comm.rank
    peers = [peer for peer in range(comm.size) if peer != rank]
    received: dict[int, bytearray] = {rank: bytearray(data)}
    sends: dict[int, MPI.Request] = {peer: comm.Isend([data, mpi.BYTE], peer, _MEETING_TAG) for peer in peers}
    receives: dict[int, MPI.Request] = {}
    status = mpi.Status()

    def done() -> bool:
        for peer in peers:
            if peer in received:
                continue
            message = comm.Improbe(peer, _MEETING_TAG, status)
            if message is not None:
                received[peer] = bytearray(status.Get_count(mpi.BYTE))
                receives[peer] = message.Irecv([received[peer], mpi.BYTE])
        for requests in (receives, sends):
            for peer in [peer for peer, request in requests.items() if request.Test()]:
                del requests[peer]
        return len(received) == comm.size and not receives and not sends

    if not _politely(done, deadline_s):
        _KEPT_ALIVE.append((data, sends, receives, received))
        absent = [peer for peer in peers if peer not in received or peer in receives or peer in sends]
        raise _absent(absent, members, f"did not reach {operation} within {deadline_s:.1f} s")
    return [bytes(received[peer]) for peer in range(comm.size)]


def _absent(ranks: Sequence[int], members: Sequence[Member] | None, what: str) -> RankError:
    return RankError(f"{', '.join(_describe(rank, members) for rank in ranks)} {what}", ranks=tuple(ranks))


def _describe(rank: int, members: Sequence[Member] | None) -> str:
    if members is None:
        return f"rank {rank}"
    host, pid = members[rank]
    state = f", {process_state(pid)}" if host == socket.gethostname() else ""
    return f"rank {rank} (pid {pid} on {host}{state})"


def _ranks_of(part: MPI.Comm, whole: MPI.Comm) -> list[int]:
    inner, outer = part.Get_group(), whole.Get_group()
    ranks = list(inner.Translate_ranks(list(range(part.size)), outer))
    inner.Free()
    outer.Free()
    return ranks


def _bytes_of(array: Array) -> npt.NDArray[np.uint8]:
    """The memory of a contiguous array of any dtype, without a copy. Raises UsageError for another array."""
    import numpy as np

    if not array.flags.c_contiguous:
        raise UsageError("the buffer of a message must be contiguous")
    return array.reshape(-1).view(np.uint8)


def _half_sum(dtype: str) -> MPI.Op:
    import numpy as np

    from ncclep_bench.model.dtype import dtype_named

    element = dtype_named(dtype).numpy

    def add(addend: Any, total: Any, _datatype: MPI.Datatype) -> None:
        left, right = np.frombuffer(addend, element), np.frombuffer(total, element)
        right[:] = left.astype(np.float32) + right.astype(np.float32)

    return cast("MPI.Op", _mpi().Op.Create(add, commute=True))
