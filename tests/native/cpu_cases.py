"""A program: random cases of the cuda backend with its kernels on CPUs, verified, bytes counted.

python -m mpi4py cpu_cases.py SEED COUNT            ranks are processes that share memory
python cpu_cases.py SEED COUNT THREADS [FLAG...]    ranks are threads, as ThreadSanitizer (a flag of g++) needs it

NCCLEP_TEST_SOURCES: a folder with other kernels and headers. NCCLEP_TEST_ONLY: draw cases of this collective, layout
or variant, and mode alone, with these axes (name=number), and only where many rows cross. NCCLEP_TEST_BULK: how
combine uses bulk copies, a number in BULK; without it the shapes take turns. NCCLEP_TEST_DELAYS: a seed; kernels dawdle
around every release and acquire, ranks come to launches apart and never meet between them, and every kind of case has
its turn. NCCLEP_TEST_DEADLINE_S: how long kernels wait for each other.
"""

from __future__ import annotations

import os
import sys
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from ncclep_bench.backends.cuda import tokens
from ncclep_bench.backends.cuda.backend import Cuda
from ncclep_bench.backends.cuda.session import CudaSession
from ncclep_bench.backends.cuda.tokens import Bulk
from ncclep_bench.backends.nccl.backend import Nccl
from ncclep_bench.backends.nccl_ep import NcclEp
from ncclep_bench.collectives.contract import BUFFER_VARIANTS, Collective
from ncclep_bench.collectives.verify import first_wrong
from ncclep_bench.errors import BenchError
from ncclep_bench.model.case import USER_MEMORIES, WINDOWS, Case
from ncclep_bench.native.loader import ROOT
from ncclep_bench.registry import COLLECTIVES
from ncclep_bench.runtime.group import Group
from ncclep_bench.runtime.world import world
from tests.cases import make_case, make_problem
from tests.native.cpu_device import CpuDevice, ThreadDevice

SOURCES = Path(os.environ.get("NCCLEP_TEST_SOURCES", ROOT))
BULK = (
    None,
    Bulk(push_share=0, push_warps=0, push_batch=0, take_slots=3, piece_bytes=512),
    Bulk(push_share=8, push_warps=1, push_batch=3, take_slots=4, piece_bytes=1 << 20),
    Bulk(push_share=3, push_warps=1, push_batch=2, take_slots=5, piece_bytes=160),
)
ALWAYS = os.environ.get("NCCLEP_TEST_BULK")
_ONLY = os.environ.get("NCCLEP_TEST_ONLY", "").split()
ONLY = {word for word in _ONLY if "=" not in word}
PINNED: dict[str, Any] = {name: int(value) for name, value in (word.split("=") for word in _ONLY if "=" in word)}
DELAYS = os.environ.get("NCCLEP_TEST_DELAYS")
DEFINES = (f"NCCLEP_DELAYS={DELAYS}",) if DELAYS else ()
LAUNCHES, MOST_TOKENS = (5, 40) if DELAYS else (3, 150)
LATE, MOST_LATE_S = 3, 2.0
"""Launches that one rank comes late to the second one, under delays: more than one, less than any deadline."""
DEADLINE_S = float(os.environ.get("NCCLEP_TEST_DEADLINE_S", 60))
TOKENS = ("dispatch", "combine", "dispatch_combine")
EXPERTS = ("all_gather_experts", "reduce_scatter_expert_grads")
KINDS: list[dict[str, Any]] = [
    *(
        {"collective": collective, "mode": mode, "layout": layout, **more}
        for collective in TOKENS
        for mode, layout, more in [
            ("ht", "flat", {"hidden": 128}),  # One of BULK cuts longer rows into a great many pieces.
            ("ht", "expert_major", {}),
            ("ll", "expert_major", {}),
            ("ll", "rank_major", {}),
        ]
    ),
    # So many that the layout takes several blocks, on two ranks more than it looks at at once.
    {"collective": "dispatch", "mode": "ht", "layout": "flat", "tokens": 600, "batch_size": 600},
    *({"collective": name, "variant": variant} for name in EXPERTS for variant in BUFFER_VARIANTS),
    {
        "collective": "reduce_scatter_expert_grads",
        "variant": "in_place",
        "placement": "replicas:2",
        "num_experts": 4,
        "active_share": 1.0,
    },
]


LAYOUT_THREADS = {1: (128,), 2: (32,), 4: (64,)}
"""By ranks, so that blocks of one warp and of several have their turn."""

turns: Counter[int] = Counter()
meetings: Counter[int] = Counter()


def bulk_of(session: CudaSession) -> Bulk | None:
    """The next shape, the same on all ranks."""
    turns[session.rank] += 1
    return BULK[int(ALWAYS) if ALWAYS else turns[session.rank] % len(BULK)]


class ThreadGroup:
    """One of the ranks that are threads of this process."""

    def __init__(self, rank: int, size: int, meeting: threading.Barrier, board: list[bytes]) -> None:
        self.rank, self.size, self._meeting, self._board = rank, size, meeting, board

    def allgather(self, data: bytes, /) -> list[bytes]:
        self._board[self.rank] = data
        self._meeting.wait()
        everybody = list(self._board)
        self._meeting.wait()
        return everybody

    def barrier(self) -> None:
        self._meeting.wait()


def random_case(rng: np.random.Generator, ranks: int, backend: Cuda | Nccl | NcclEp, **pinned: Any) -> Case:
    """One case that is not waived; the same on all ranks that draw with the same generator.

    `pinned`: axes that are not drawn.
    """

    def one_of(*values: Any) -> Any:
        return values[int(rng.integers(len(values)))]

    reason: str | None = None
    for _ in range(100_000):
        collective = pinned.get("collective") or one_of(*COLLECTIVES)
        definition: Collective = COLLECTIVES.get(collective)
        placement = one_of("block", "uneven", f"replicas:{1 + int(rng.integers(ranks))}")
        num_experts = ranks * int(rng.integers(1, 4)) if placement == "block" else int(rng.integers(1, 11))
        tokens = int(rng.integers(0, MOST_TOKENS))
        case = make_case(
            collective,
            backend=backend.name,
            ranks=ranks,
            mode=one_of("ht", "ll"),
            layout=one_of("flat", "expert_major", "rank_major"),
            variant=one_of(*definition.variants) if definition.variants else None,
            tokens=tokens,
            batch_size=tokens,
            hidden=one_of(8, 40, 128, 2048) if not ONLY else 128,  # several lanes are busy, and soon done
            num_experts=num_experts,
            expert_elements=one_of(8, 1000, 20_000, 1_200_000),
            placement=placement,
            top_k=int(rng.integers(1, min(num_experts, 5) + 1)),
            dtype=one_of("float32", "float16", "bfloat16", "float8_e4m3fn"),
            alignment=one_of(1, 4, 7),
            routing=one_of("uniform", "zipf", "all_to_one"),
            masked_share=one_of(None, 0.3, 1.0),
            empty_ranks=one_of(0, 0, int(rng.integers(ranks + 1))),
            active_share=one_of(0.0, 0.4, 1.0),
            num_sms=one_of(None, 1),
            window=one_of(None, *WINDOWS) if backend.name == "nccl" else None,
            seed=int(rng.integers(1000)),
        )
        case = msgspec.structs.replace(case, **pinned)
        if ONLY and not (is_asked_for(case) and is_busy(case)):
            continue
        if (reason := backend.supports(case)) is not None:
            continue
        if case.variant == "registered":
            memory, kept = one_of(None, *USER_MEMORIES), one_of(0, 1, 64)
            return msgspec.structs.replace(case, user_memory=memory, mr_cache_size=kept)
        return case
    raise BenchError(f"every case is waived: {reason}")


def is_asked_for(case: Case) -> bool:
    """Whether ONLY names the case's collective and layout or variant, and its mode if any."""
    asked = {case.collective, case.layout or case.variant}
    return asked <= ONLY <= asked | {case.mode}


def is_busy(case: Case) -> bool:
    """Whether many rows cross, so that a planted fault has its chance."""
    if case.placement != "block" or case.num_sms is not None:
        return False
    if case.tokens is None:
        return case.active_share == 1.0
    return (
        case.tokens >= PINNED.get("tokens", 64)
        and case.masked_share != 1.0
        and case.empty_ranks == PINNED.get("empty_ranks", 0)
        and case.routing == "uniform"
    )


def random_cases(seed: int, count: int, ranks: int, backend: Cuda | Nccl | NcclEp) -> Iterator[Case]:
    """So many cases; under delays every kind has its turn."""
    rng = np.random.default_rng(seed)
    for number in range(count):
        kind = KINDS[number % len(KINDS)] if DELAYS and not ONLY else {}
        yield random_case(rng, ranks, backend, **kind, **PINNED)


def check(case: Case, group: Group, backend: Cuda | Nccl | NcclEp) -> str | None:
    """Some launches with fresh inputs and one change of routing; what is wrong, or None."""
    definition: Collective = COLLECTIVES.get(case.collective)
    problem = make_problem(case)
    prepared = backend.prepare(problem, group)
    come, moved, delivered = meeting_of(group), [], []
    try:
        for draw in range(LAUNCHES):
            if draw == LAUNCHES - 1:
                prepared.update(problem)
            prepared.poison(group.rank)
            definition.fill(problem, group.rank, draw, prepared.inputs(group.rank))
            come()
            before = prepared.stats().wire_bytes
            prepared.launch()
            moved.append(prepared.stats().wire_bytes - before)
            delivered.append({name: array.copy() for name, array in prepared.outputs(group.rank).items()})
        wrong = (
            first_wrong(definition, problem, group.rank, draw, outputs, prepared.undelivered)
            for draw, outputs in enumerate(delivered)
        )
        everybody = [data.decode() for data in group.allgather(next(filter(None, wrong), "").encode())]
        if any(everybody):
            return next(filter(None, everybody))
        counted = [list(map(int, data.split())) for data in group.allgather(" ".join(map(str, moved)).encode())]
        totals = {sum(launch) // (case.chain or 1) for launch in zip(*counted, strict=True)}
        planned = definition.bytes(problem).planned
        if prepared.wire_source == "counted" and totals != {planned}:
            return f"wire bytes {sorted(totals)}, planned {planned}"
    finally:
        prepared.close()
    return None


def meeting_of(group: Group) -> Callable[[], None]:
    """How a rank comes to a launch: when all others do, or under delays on its own, and in its turn very late."""
    if not DELAYS:
        return group.barrier
    meetings[group.rank] += 1
    late = meetings[group.rank] % group.size == group.rank
    came: list[float] = []

    def come() -> None:
        if len(came) == 1 and late:
            time.sleep(min(LATE * (time.monotonic() - came[0]), MOST_LATE_S))
        came.append(time.monotonic())

    return come


def run(group: Group, backend: Cuda | Nccl | NcclEp, seed: int, count: int) -> str | None:
    """What is wrong with the first wrong case."""
    for case in random_cases(seed, count, group.size, backend):
        try:
            wrong = check(case, group, backend)
        except BenchError as error:
            wrong = error.message
        if wrong is not None:
            return f"{case.case}: {wrong}"
    return None


def as_processes(seed: int, count: int) -> str | None:
    group = world()
    tokens.LAYOUT_THREADS = LAYOUT_THREADS.get(group.size, (128,))
    wrong = run(group, Cuda(lambda _: CpuDevice(SOURCES), lambda: None, DEADLINE_S, defines=DEFINES), seed, count)
    group.close()
    return wrong


def as_threads(seed: int, count: int, ranks: int, flags: list[str]) -> str | None:
    tokens.LAYOUT_THREADS = LAYOUT_THREADS.get(ranks, (128,))
    backend = Cuda(lambda _: ThreadDevice(SOURCES, flags), lambda: None, DEADLINE_S, defines=DEFINES)
    meeting, board = threading.Barrier(ranks), [b""] * ranks
    wrong: list[str | None] = [None] * ranks

    def one(rank: int) -> None:
        try:
            wrong[rank] = run(ThreadGroup(rank, ranks, meeting, board), backend, seed, count)
        except threading.BrokenBarrierError:
            wrong[rank] = "another rank gave up"
        except Exception:
            wrong[rank] = traceback.format_exc()
        if wrong[rank] is not None:
            meeting.abort()

    threads = [threading.Thread(target=one, args=[rank]) for rank in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    # The first cause, not its echo.
    return min(filter(None, wrong), key=lambda message: message == "another rank gave up", default=None)


if __name__ == "__main__":
    tokens.bulk_of = bulk_of
    # A block of two warps becomes one of three, as on a GPU blocks of mode ll have more than others.
    tokens.DISPATCH["ll"] = tokens.DISPATCH["ll"]._replace(threads=3 / 2)
    seed, count, *others = sys.argv[1:]
    turns.update(dict.fromkeys(range(32), int(seed)))
    if others:
        sys.exit(as_threads(int(seed), int(count), int(others[0]), others[1:]))
    sys.exit(as_processes(int(seed), int(count)))
