"""What real ranks run for the tests of this folder: `ranks.py PROGRAM [FOLDER]`, an assertion fails the run."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import time
from pathlib import Path

import numpy as np

from ncclep_bench.errors import RankError
from ncclep_bench.runtime.shared_memory import ControlBlock, ControlHandle, LocalBarrier
from ncclep_bench.runtime.world import Channel, MpiGroup, abort, start_all, wait_all, world, wrap

ROUNDS = 1000


def local_blocks(group: MpiGroup) -> list[ControlBlock]:
    own = ControlBlock.create(group.rank)
    handles = [ControlHandle(*json.loads(data)) for data in group.allgather(json.dumps(own.handle).encode(), 20)]
    return [own if rank == group.rank else ControlBlock.open(handle) for rank, handle in enumerate(handles)]


def report_and_abort(error: RankError, survivors: list[int], rank: int) -> None:
    """Every survivor's words are on disk before the first of them ends the run."""
    folder = Path(sys.argv[2])
    (folder / f"{rank}.part").write_text(json.dumps([type(error).__name__, list(error.ranks), str(error)]))
    (folder / f"{rank}.part").rename(folder / f"{rank}.json")
    give_up_at = time.monotonic() + 20
    while len(list(folder.glob("*.json"))) < len(survivors) and time.monotonic() < give_up_at:
        time.sleep(0.01)
    abort(7)


def outlive_the_rank() -> None:
    """Go on in a child, before MPI starts; its parent stays whatever becomes of it.

    Hydra often kills the peers of a rank that dies of a signal, in spite of -disable-auto-cleanup. Behind a parent that
    holds the launcher's socket open it does not notice, as little as on another host whose network is gone.
    """
    child = os.fork()
    if child:
        os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)
        time.sleep(600)
        os._exit(1)


def barrier_rounds() -> None:
    group = world()
    blocks = local_blocks(group)
    barrier = LocalBarrier(blocks, group.rank)
    late = np.random.default_rng(group.rank).random(ROUNDS) < 0.02
    for turn in range(ROUNDS):
        blocks[group.rank].publish(np.array([turn, group.rank]))
        if late[turn]:
            time.sleep(0.001)
        barrier.wait(30, f"round {turn}")
        seen = [block.peek(np.int64, 2).tolist() for block in blocks]
        assert seen == [[turn, rank] for rank in range(group.size)]
        barrier.wait(30, f"the end of round {turn}")
    assert {block.epoch for block in blocks} == {2 * ROUNDS}


def one_waits_for_another() -> None:
    group = world()
    blocks = local_blocks(group)
    barrier = LocalBarrier(blocks, group.rank)
    for turn in range(ROUNDS):
        # A ring: rank r goes after rank r - 1, and rank 0 after the last one's previous turn.
        before = (group.rank - 1) % group.size
        barrier.wait_for(before, turn + (group.rank != 0), 30, f"turn {turn}")
        assert blocks[before].epoch in (turn, turn + 1, turn + 2)
        assert blocks[before].epoch > turn or group.rank == 0
        assert barrier.arrive() == turn + 1


def stop_or_die(how: int | None, deadline_s: float) -> None:
    if how == signal.SIGKILL:
        outlive_the_rank()
    group = world()
    barrier = LocalBarrier(local_blocks(group), group.rank)
    barrier.wait(20, "the start")
    if group.rank == 1:
        if how is None:
            time.sleep(600)
        else:
            os.kill(os.getpid(), how)
    try:
        barrier.wait(deadline_s, "dispatch of case 7")
    except RankError as error:
        report_and_abort(error, [0, 2], group.rank)


def give_up() -> None:
    group = world()
    barrier = LocalBarrier(local_blocks(group), group.rank)
    barrier.wait(20, "the start")
    if group.rank == 1:
        barrier.abort("expert 7 is missing: größer")
        time.sleep(600)
    try:
        barrier.wait(50, "dispatch")
    except RankError as error:
        report_and_abort(error, [0, 2], group.rank)


def absent_from_mpi(how: int | None, meeting: str) -> None:
    if how == signal.SIGKILL:
        outlive_the_rank()
    from mpi4py import MPI

    rank = MPI.COMM_WORLD.rank
    MPI.COMM_WORLD.Barrier()  # nobody is still starting MPI
    group = None if meeting == "start" else world()
    if rank == 1:
        if how is None:
            time.sleep(600)
        else:
            os.kill(os.getpid(), how)
    try:
        if group is None:
            wrap(MPI.COMM_WORLD, deadline_s=1.0)
        elif meeting == "allgather":
            group.allgather(b"config", 1.0, "agreement on the configuration")
        elif meeting == "barrier":
            group.barrier(1.0, "barrier of case 3")
        else:
            peers = [peer for peer in range(group.size) if peer != rank]
            channels = [group.recv_channel(peer, np.zeros(1 << 20, np.uint8), 5) for peer in peers]
            channels += [group.send_channel(peer, np.zeros(1 << 20, np.uint8), 5) for peer in peers]
            start_all(channels)
            wait_all(channels, 1.0, "dispatch across hosts")
    except RankError as error:
        if group is not None and meeting == "channels":
            for channel in channels:
                channel.free()
            assert Channel.live() == 0
        report_and_abort(error, [0, 2], rank)


def groups() -> None:
    with_everybody = world(20)
    rank, size = with_everybody.rank, with_everybody.size
    parts = with_everybody.allgather(bytes([rank]) * (rank * 100_000))
    assert parts == [bytes([peer]) * (peer * 100_000) for peer in range(size)]
    assert with_everybody.same_host() == list(range(size))
    assert [member.pid for member in with_everybody.members][rank] == os.getpid()
    backwards = with_everybody.subgroup(list(reversed(range(1, size))))
    assert (backwards is None) == (rank == 0)
    if backwards is not None:
        assert backwards.rank == size - 1 - rank
        assert backwards.allgather(bytes([rank]), 20) == [bytes([peer]) for peer in reversed(range(1, size))]
        backwards.close()
    with_everybody.barrier()
    with_everybody.close()
    with_everybody.close()


def vectors() -> None:
    from ncclep_bench.model.dtype import dtype_named

    group = world()
    ranks = np.arange(group.size)
    received = np.zeros((group.size, 3), np.int32)
    group.alltoall(np.full((group.size, 3), group.rank, np.int32) * 10 + ranks[:, None].astype(np.int32), received)
    assert (received == ranks[:, None] * 10 + group.rank).all()
    gathered = np.zeros((group.size, 5), np.float32)
    group.allgather_into(np.full(5, group.rank, np.float32), gathered)
    assert (gathered == ranks[:, None]).all()
    for name in ("float32", "float16", "bfloat16"):
        element = dtype_named(name).numpy
        total = np.zeros(70_000, element)
        group.allreduce((np.arange(70_000) % 50 * (group.rank + 1)).astype(element), total, name)
        if name == "bfloat16":  # 8 bits of mantissa
            expected = np.arange(70_000) % 50 * (group.size * (group.size + 1) // 2)
            assert (abs(total.astype(np.float64) - expected) <= expected * 2.0**-7).all()
        else:
            assert (total.astype(np.int64) == np.arange(70_000) % 50 * (group.size * (group.size + 1) // 2)).all()
    group.close()


def channels_again_and_again() -> None:
    group = world()
    peers = [peer for peer in range(group.size) if peer != group.rank]
    outgoing = np.zeros(50_000, np.float32)
    incoming = {peer: np.zeros(50_000, np.float32) for peer in peers}
    channels = [group.recv_channel(peer, incoming[peer], 3) for peer in peers]
    channels += [group.send_channel(peer, outgoing, 3) for peer in peers]
    for turn in range(100):
        outgoing[:] = group.rank + turn
        start_all(channels)
        wait_all(channels, 20, f"turn {turn}")
        assert all((incoming[peer] == peer + turn).all() for peer in peers)
    assert (Channel.created, Channel.live()) == (len(channels), len(channels))
    for channel in channels:
        channel.free()
        channel.free()
    assert (Channel.freed, Channel.live()) == (len(channels), 0)
    group.close()


def abort_at_once() -> None:
    group = world()
    segments = set(re.findall(r"/dev/shm/mpich_shm_\w+", Path("/proc/self/maps").read_text()))
    (Path(sys.argv[2]) / f"{group.rank}.json").write_text(json.dumps(sorted(segments)))
    group.barrier()
    if group.rank == 1:
        abort(5)
    time.sleep(600)


def many_groups() -> None:
    from mpi4py import MPI

    # MPICH has 2,046 communicators: one forgotten per group ends here.
    for _ in range(2100):
        group = wrap(MPI.COMM_WORLD)
        assert isinstance(group, MpiGroup)
        group.close()


PROGRAMS = {
    "barrier_rounds": barrier_rounds,
    "one_waits_for_another": one_waits_for_another,
    "stopped": lambda: stop_or_die(signal.SIGSTOP, 1.0),
    "killed": lambda: stop_or_die(signal.SIGKILL, 30.0),
    "never_calls": lambda: stop_or_die(None, 1.0),
    "give_up": give_up,
    "groups": groups,
    "vectors": vectors,
    "channels_again_and_again": channels_again_and_again,
    "many_groups": many_groups,
    "abort_at_once": abort_at_once,
    **{
        f"{how}_before_{meeting}": lambda signal_number=number, meeting=meeting: absent_from_mpi(signal_number, meeting)
        for how, number in {"stopped": signal.SIGSTOP, "killed": signal.SIGKILL, "absent": None}.items()
        for meeting in ("start", "allgather", "barrier", "channels")
    },
}

if __name__ == "__main__":
    PROGRAMS[sys.argv[1]]()
