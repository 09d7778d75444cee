"""How fast the host backend is against the best plain MPI: paired medians of the slowest rank, A and B in turn.

    mpiexec -n 4 python -m mpi4py benchmarks/host_speed.py [--tokens 4096] [--hidden 4096] [--expert-mib 4] [--pairs 15]

A and B move the same rows in one set of processes; their results are compared before anything is timed. Every line
shows A's and B's medians and the median of the ratios B / A pair by pair. Exit code 1 when a ratio is below its bound.

Both sides copy with the C library of the environment that mpiexec is started in. A sweep starts its ranks with
GLIBC_TUNABLES=glibc.cpu.x86_non_temporal_threshold=0x40000, which speeds up both; the first line says what is set.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable
from typing import Any

import mpi4py.MPI as MPI
import numpy as np
import numpy.typing as npt

from ncclep_bench.backends.host.experts import ExpertHandle
from ncclep_bench.backends.host.registration import Segments
from ncclep_bench.backends.host.row_sum import RowSum
from ncclep_bench.backends.host.session import HostSession
from ncclep_bench.backends.host.tokens import TokenHandle
from ncclep_bench.model.case import Case
from ncclep_bench.model.dtype import dtype_named
from ncclep_bench.model.placement import placement_of
from ncclep_bench.routing.assignment import destinations
from ncclep_bench.routing.token_routing import TokenRouting, token_routing
from ncclep_bench.runtime.world import MpiGroup, world

Array = npt.NDArray[Any]
FLOAT32 = dtype_named("float32")


class HandPacked:
    """Dispatch and combine as a careful MPI programmer writes them: one take per peer, MPI_Alltoallv, one sum back."""

    def __init__(self, comm: MPI.Intracomm, routing: TokenRouting, num_experts: int, hidden: int) -> None:
        self.comm = comm
        topk_idx = routing.of_rank(comm.rank)[0]
        rank_of, _ = destinations(topk_idx, comm.rank, placement_of("block", num_experts, comm.size))
        self.sent = [np.flatnonzero((rank_of == rank).any(axis=1)) for rank in range(comm.size)]
        counts = np.array([len(sent) for sent in self.sent])
        received = np.empty_like(counts)
        comm.Alltoall(counts, received)
        self.send_counts, self.receive_counts = counts * hidden, received * hidden
        self.send_buffer = np.zeros((int(counts.sum()), hidden), np.float32)
        self.received = np.zeros((int(received.sum()), hidden), np.float32)
        self.rows = np.zeros_like(self.received)
        index = np.arange(len(self.send_buffer))
        ones = np.ones(len(index), np.float32)
        self.sums = RowSum.of(np.concatenate(self.sent), index, ones, len(topk_idx))

    def dispatch(self, tokens: Array) -> Array:
        done = 0
        for sent in self.sent:
            np.take(tokens, sent, axis=0, out=self.send_buffer[done : done + len(sent)], mode="clip")
            done += len(sent)
        self.comm.Alltoallv([self.send_buffer, self.send_counts], [self.received, self.receive_counts])
        return self.received

    def combine(self, rows: Array, out: Array) -> None:
        self.comm.Alltoallv([rows, self.receive_counts], [self.send_buffer, self.send_counts])
        self.sums.run(self.send_buffer, out)


def paired(
    group: MpiGroup, pairs: int, ours: Callable[[], object], theirs: Callable[[], object]
) -> tuple[Array, Array]:
    """Slowest rank's milliseconds of `pairs` runs of each, in turn, after two of each that are not counted."""
    times = np.zeros((pairs + 2, 2))
    for pair in range(pairs + 2):
        order = (0, 1) if pair % 2 == 0 else (1, 0)
        for which in order:
            group.comm.Barrier()
            start = time.perf_counter()
            (ours, theirs)[which]()
            times[pair, which] = (time.perf_counter() - start) * 1e3
    slowest = np.empty_like(times)
    group.comm.Allreduce(times, slowest, MPI.MAX)
    return slowest[2:, 0], slowest[2:, 1]


def report(group: MpiGroup, what: str, times: tuple[Array, Array], names: tuple[str, str], bound: float) -> bool:
    """Print one comparison on rank 0; whether its ratio reaches the bound."""
    ours, theirs = times
    ratio = float(np.median(theirs / ours))
    if group.rank == 0:
        print(
            f"{group.size} ranks  {what:<42} {names[0]} {np.median(ours):8.2f} ms  "
            f"{names[1]} {np.median(theirs):8.2f} ms  ratio {ratio:.2f} (at least {bound:.2f})",
            flush=True,
        )
    return ratio >= bound


def tokens(group: MpiGroup, arguments: argparse.Namespace) -> bool:
    """dispatch + combine, float32, flat, top-8 of 64 experts, against hand-packed MPI_Alltoallv."""
    hidden, num_experts = arguments.hidden, 64
    case = Case(
        collective="dispatch",
        ranks=group.size,
        tokens=arguments.tokens,
        hidden=hidden,
        num_experts=num_experts,
        top_k=8,
        routing="uniform",
    )
    routing = token_routing(case)
    session = HostSession(group)
    handle = TokenHandle(
        session,
        placement=placement_of("block", num_experts, group.size),
        top_k=8,
        hidden=hidden,
        dtype=FLOAT32,
        mode="ht",
        layout="flat",
        max_tokens=arguments.tokens,
    )
    handle.update(*routing.of_rank(group.rank))
    plain = HandPacked(group.comm, routing, num_experts, hidden)
    rng = np.random.default_rng(group.rank)
    x = rng.standard_normal((arguments.tokens, hidden), dtype=np.float32)
    outs = np.zeros_like(x), np.zeros_like(x)
    assert (handle.dispatch(x)["tokens"] == plain.dispatch(x)).all(), "both dispatch the same rows"
    rows = handle.combine_rows()
    rows[...] = plain.rows[...] = rng.standard_normal(rows.shape, dtype=np.float32)
    handle.combine(rows, outs[0])
    plain.combine(plain.rows, outs[1])
    assert np.allclose(*outs, rtol=1e-5, atol=1e-5), "both combine to the same rows"

    def ours() -> None:
        handle.dispatch(x)
        handle.combine(rows, outs[0])

    def theirs() -> None:
        plain.dispatch(x)
        plain.combine(plain.rows, outs[1])

    names = ("windows", "Alltoallv")
    good = report(
        group,
        f"dispatch + combine, {arguments.tokens} x {hidden}",
        paired(group, arguments.pairs, ours, theirs),
        names,
        1.5,
    )
    report(
        group,
        "  dispatch",
        paired(group, arguments.pairs, lambda: handle.dispatch(x), lambda: plain.dispatch(x)),
        names,
        0,
    )
    report(
        group,
        "  combine",
        paired(
            group, arguments.pairs, lambda: handle.combine(rows, outs[0]), lambda: plain.combine(plain.rows, outs[1])
        ),
        names,
        0,
    )
    handle.close()
    session.close()
    return good


def experts(group: MpiGroup, arguments: argparse.Namespace) -> bool:
    """all_gather_experts against MPI_Allgather, and a quarter of the experts against all of them."""
    num_experts, elements = 16 * group.size, arguments.expert_mib << 18
    session = HostSession(group)
    segments = Segments(session.stats, 0)
    placement = placement_of("block", num_experts, group.size)
    handle = ExpertHandle(session, segments, placement=placement, elements=elements, dtype=FLOAT32)
    params = np.random.default_rng(group.rank).standard_normal((16, elements), dtype=np.float32)
    plain = params.copy()
    outs = segments.empty((num_experts, elements), np.float32), np.zeros((num_experts, elements), np.float32)
    handle.bind(out=outs[0])
    everything = np.ones(num_experts, dtype=bool)
    handle.update(everything)
    handle.all_gather(params, outs[0])
    group.comm.Allgather(plain, outs[1])
    assert (outs[0] == outs[1]).all(), "both gather the same experts"
    good = report(
        group,
        f"all_gather_experts, 16 x {arguments.expert_mib} MiB per rank",
        paired(
            group,
            arguments.pairs,
            lambda: handle.all_gather(params, outs[0]),
            lambda: group.comm.Allgather(plain, outs[1]),
        ),
        ("windows", "Allgather"),
        1.2,
    )
    quarter = np.zeros(num_experts, dtype=bool)
    quarter[np.random.default_rng(7 + group.rank).permutation(num_experts)[: num_experts // 4]] = True
    some = ExpertHandle(session, segments, placement=placement, elements=elements, dtype=FLOAT32)
    some.update(quarter)
    good &= report(
        group,
        "active_share 0.25 against 1",
        paired(
            group, arguments.pairs, lambda: some.all_gather(params, outs[0]), lambda: handle.all_gather(params, outs[0])
        ),
        ("quarter", "all"),
        1 / 0.35,
    )
    for closing in (handle, some, segments, session):
        closing.close()
    return good


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, default in (("tokens", 4096), ("hidden", 4096), ("pairs", 15), ("expert-mib", 4)):
        parser.add_argument(f"--{name}", type=int, default=default)
    arguments = parser.parse_args()
    group = world()
    if group.rank == 0:
        print(f"GLIBC_TUNABLES={os.environ.get('GLIBC_TUNABLES', '')}", flush=True)
    good = [tokens(group, arguments), experts(group, arguments)]
    group.close()
    sys.exit(0 if all(good) else 1)


if __name__ == "__main__":
    main()
