"""A program for MPI ranks: buffers of the user's own on the cuda backend, its kernels on CPUs.

python -m mpi4py cpu_registration.py sequences SEED COUNT [FAULT]   random buffers, freed and made anew between calls
python -m mpi4py cpu_registration.py refusals                      what a row that cannot be used is told
python -m mpi4py cpu_registration.py beside_host                   cases of the scenarios, on both backends

FAULT: one of FAULTS, planted on rank 1, which the sequences must notice.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ncclep_bench.backends.cuda import experts
from ncclep_bench.backends.cuda.backend import Cuda
from ncclep_bench.backends.cuda.experts import RegisteredExpertHandle
from ncclep_bench.backends.cuda.registration import Registrations
from ncclep_bench.backends.cuda.session import CudaSession
from ncclep_bench.errors import BenchError
from ncclep_bench.model.placement import Placement, placement_of
from ncclep_bench.model.scenario import Timing
from ncclep_bench.registry import BACKENDS
from ncclep_bench.runtime.device_contract import Allocation, Device
from ncclep_bench.runtime.world import MpiGroup, world
from ncclep_bench.sweeps.execute import Routings, measure
from ncclep_bench.sweeps.expand import expand
from ncclep_bench.sweeps.job import Source
from ncclep_bench.sweeps.load import load_scenario
from tests.native.cpu_device import CpuDevice

DEADLINE_S = 60.0
STEPS = 12
CPU_CUDA = Cuda(lambda _: CpuDevice(), lambda: None, DEADLINE_S)


def shared_mappings() -> int:
    """Mappings of shared memory that the kernel lists for this process, MPI's own left out."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    return sum("/dev/shm/" in line and "mpich" not in line and "vader" not in line for line in lines)


# ---- random sequences ----


@dataclass(eq=False)
class Block:
    """An allocation of the user's, with so many rows in it."""

    address: int
    nbytes: int
    stream_ordered: bool
    rows: int = 0


class Buffers:
    """Rows of the user's: each has its own allocation, or shares one, and is now and then replaced."""

    def __init__(self, device: Device, rng: np.random.Generator, count: int, row_bytes: int) -> None:
        self._device, self._rng, self._row_bytes = device, rng, row_bytes
        self._freed: set[int] = set()
        self.reused = 0
        self.rows: list[tuple[int, Block]] = []
        while len(self.rows) < count:
            self.rows += self._new(count - len(self.rows))

    @property
    def addresses(self) -> list[int]:
        return [address for address, _ in self.rows]

    def change(self) -> None:
        """Free some rows, and put others in their place."""
        gone = [place for place in range(len(self.rows)) if self._rng.random() < 0.4]
        for place in gone:
            self._leave(self.rows[place][1])
        new: list[tuple[int, Block]] = []
        while len(new) < len(gone):
            new += self._new(len(gone) - len(new))
        for place, row in zip(gone, new, strict=True):
            self.rows[place] = row

    def fill(self, values: list[np.ndarray[Any, Any]]) -> None:
        for (address, _), row in zip(self.rows, values, strict=True):
            self._device.write(address, row)

    def read(self) -> np.ndarray[Any, Any]:
        rows = np.zeros((len(self.rows), self._row_bytes // 4), np.float32)
        for (address, _), row in zip(self.rows, rows, strict=True):
            self._device.read(address, row)
        return rows

    def close(self) -> None:
        for _, block in self.rows:
            self._leave(block)
        self.rows = []

    def _new(self, most: int) -> list[tuple[int, Block]]:
        """Rows of one new allocation, `most` of them at most."""
        count = int(self._rng.integers(1, min(most, 3) + 1))
        offset = 16 * int(self._rng.integers(0, 4))
        stream_ordered = self._rng.random() < 0.2
        nbytes = offset + count * self._row_bytes
        address = (self._device.allocate_stream_ordered if stream_ordered else self._device.allocate)(nbytes)
        self.reused += address in self._freed
        block = Block(address, nbytes, stream_ordered, count)
        return [(address + offset + row * self._row_bytes, block) for row in range(count)]

    def _leave(self, block: Block) -> None:
        block.rows -= 1
        if not block.rows:
            self._device.free(block.address)
            self._freed.add(block.address)


class Model:
    """What a cache of that capacity counts, told in the plainest way."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._held: list[tuple[Block, int]] = []
        self.counts = Counter(mr_hits=0, mr_misses=0, mr_evictions=0, mr_staged=0)

    def call(self, rows: list[tuple[int, Block]]) -> None:
        for address, block in rows:
            key = (block, address)
            if block.stream_ordered:
                self.counts["mr_staged"] += 1
                continue
            if key in self._held:
                self.counts["mr_hits"] += 1
                self._held.remove(key)
            else:
                self.counts["mr_misses"] += 1
                for other in [other for other in self._held if overlap(other[0], block)]:
                    self._evict(other)
            self._held.append(key)
        while len(self._held) > self._capacity:
            self._evict(self._held[0])

    def _evict(self, key: tuple[Block, int]) -> None:
        self._held.remove(key)
        self.counts["mr_evictions"] += 1


def overlap(one: Block, other: Block) -> bool:
    return one is not other and one.address < other.address + other.nbytes and other.address < one.address + one.nbytes


def contents(rank: int, expert: int, step: int, elements: int) -> np.ndarray[Any, Any]:
    """A row, of small integers so that sums are exact."""
    return ((np.arange(elements) * 7 + rank * 31 + expert * 13 + step * 5) % 97).astype(np.float32)


class Sequence:
    """One handle, and what it is used for; `rng` is the same on all ranks, `own` is not."""

    def __init__(self, group: MpiGroup, device: Device, rng: np.random.Generator, own: np.random.Generator) -> None:
        self.group, self.device, self.rng, self.own = group, device, rng, own
        num_experts = int(rng.integers(1, 9))
        kinds = ["uneven", f"replicas:{1 + int(rng.integers(group.size))}"]
        self.placement: Placement = placement_of(str(rng.choice(kinds)), num_experts, group.size)
        self.elements = 4 * int(rng.integers(1, 500))
        capacity = int(rng.choice([0, 1, 3, 64]))
        experts.COPY_ENGINE_BYTES = int(rng.choice([16, 2 << 20]))
        self.session = CudaSession(group, device, deadline_s=DEADLINE_S)
        self.held = self.placement.experts_of_rank[group.rank]
        self.whole = Buffers(self.device, own, num_experts, 4 * self.elements)
        self.part = Buffers(self.device, own, len(self.held), 4 * self.elements)
        self.handle = RegisteredExpertHandle(
            self.session,
            placement=self.placement,
            block_bytes=4 * self.elements,
            registrations=Registrations(self.session, num_experts, capacity),
            whole=self.whole.addresses,
            part=self.part.addresses,
        )
        self.model = Model(capacity)
        self.step = 0

    def check(self) -> str | None:
        """What is wrong on this rank with the next call, or None."""
        self.step += 1
        if self.own.random() < 0.7:
            self.whole.change()
            self.part.change()
            self.handle.place(self.whole.addresses, self.part.addresses)
        active = self.rng.random((self.group.size, self.placement.num_experts)) < self.rng.choice([0.3, 1.0])
        call = self._gather if self.rng.random() < 0.5 else self._reduce
        before = self.handle.moved()[0]
        wrong, planned = call(active)
        moved = sum(int(data) for data in self.group.allgather(str(self.handle.moved()[0] - before).encode()))
        if wrong is None and moved != planned:
            wrong = f"{moved} bytes crossed, {planned} were planned"
        counted = {name: int(self.handle.registrations.stats.counters.get(name, 0)) for name in self.model.counts}
        if wrong is None and counted != dict(self.model.counts):
            wrong = f"counted {counted}, a cache of that size counts {dict(self.model.counts)}"
        return wrong

    def _gather(self, needed: np.ndarray[Any, Any]) -> tuple[str | None, int]:
        rank, replica = self.group.rank, self.placement.replica_rank
        self.part.fill([contents(rank, expert, self.step, self.elements) for expert in self.held])
        poison = np.full(self.elements, -1.0, np.float32)
        self.whole.fill([poison] * self.placement.num_experts)
        self.handle.gather(needed)
        self.handle.run()
        others = [peer for peer in range(self.group.size) if peer != rank]
        self.model.call(
            [
                self.part.rows[local]
                for local, expert in enumerate(self.held)
                if any(needed[peer, expert] and replica[peer, expert] == rank for peer in others)
            ]
        )
        expected = [
            contents(int(replica[rank, expert]), expert, self.step, self.elements) if wanted else poison
            for expert, wanted in enumerate(needed[rank])
        ]
        crossing = (needed & (replica != np.arange(self.group.size)[:, None])).sum()
        return self._differs(self.whole.read(), expected), int(crossing) * 4 * self.elements

    def _reduce(self, has_gradient: np.ndarray[Any, Any]) -> tuple[str | None, int]:
        rank, owners = self.group.rank, self.placement.owners
        every = range(self.placement.num_experts)
        self.whole.fill([contents(rank, expert, self.step, self.elements) for expert in every])
        self.part.fill([np.full(self.elements, -1.0, np.float32)] * len(self.held))
        self.handle.reduce(has_gradient, "float32")
        self.handle.run()
        self.model.call(
            [self.whole.rows[expert] for expert in every if has_gradient[rank, expert] and {*owners[expert]} - {rank}]
        )
        expected = [
            sum(
                (contents(int(peer), expert, self.step, self.elements) for peer in np.flatnonzero(having)),
                np.zeros(self.elements, np.float32),
            )
            for expert, having in ((expert, has_gradient[:, expert]) for expert in self.held)
        ]
        crossing = sum(
            len({*owners[expert]} - {int(peer)}) for expert in every for peer in np.flatnonzero(has_gradient[:, expert])
        )
        return self._differs(self.part.read(), expected), crossing * 4 * self.elements

    @staticmethod
    def _differs(got: np.ndarray[Any, Any], expected: list[np.ndarray[Any, Any]]) -> str | None:
        wrong = [row for row, values in enumerate(expected) if not np.array_equal(got[row], values)]
        return f"rows {wrong} are wrong" if wrong else None

    def hear(self) -> str | None:
        """A call in which nothing moves, after which peers map nothing that its owner has dropped."""
        self.handle.gather(np.zeros((self.group.size, self.placement.num_experts), bool))
        self.handle.run()
        registrations = self.handle.registrations
        own = " ".join(map(str, registrations._live)).encode()
        live = [set(map(int, data.split())) for data in self.group.allgather(own)]
        stray = {(rank, identity) for rank, identity in registrations._mapped if identity not in live[rank]}
        return f"still mapped: {sorted(stray)}" if stray else None

    def close(self) -> str | None:
        self.handle.close()
        self.handle.registrations.close()
        self.session.close()
        self.whole.close()
        self.part.close()
        if isinstance(self.device, CpuDevice) and self.device.allocations:
            return f"left are {self.device.mapped} and {self.device.allocations}"
        return None


def in_a_recycled_place(registrations: Registrations) -> None:
    """An allocation is known by its address alone."""
    device: Any = registrations._device
    once = device.allocation_of
    device.allocation_of = lambda address: Allocation(once(address).base, *once(address)[1:])


def deaf(registrations: Registrations) -> None:
    """What owners have dropped stays mapped."""
    registrations._let_go = lambda: None  # type: ignore[method-assign]


FAULTS = {"in_a_recycled_place": in_a_recycled_place, "deaf": deaf}


def run(group: MpiGroup, device_of: Callable[[], Device], seed: int, count: int, fault: str = "") -> str | None:
    """What is wrong with the first wrong sequence."""
    rng, own = np.random.default_rng(seed), np.random.default_rng([seed, group.rank])
    reused = 0
    for _ in range(count):
        sequence = Sequence(group, device_of(), rng, own)
        if fault and group.rank == 1:
            FAULTS[fault](sequence.handle.registrations)
        for step in (*[sequence.check] * STEPS, sequence.hear, sequence.close):
            # All ranks agree before the next call, which a rank that has stopped would hold up.
            told = [data.decode() for data in group.allgather((step() or "").encode())]
            if wrong := next(filter(None, told), None):
                return f"{step.__name__} {sequence.step}: {wrong}"
        reused += sequence.whole.reused + sequence.part.reused
    return None if reused else "no buffer came to lie where another had been"


def sequences(group: MpiGroup, seed: str, count: str, fault: str = "") -> None:
    mappings = shared_mappings()
    if wrong := run(group, CpuDevice, int(seed), int(count), fault):
        sys.exit(wrong)
    if shared_mappings() != mappings:
        sys.exit(f"{shared_mappings()} mappings of shared memory, {mappings} at first")


# ---- refusals ----


def refusals(group: MpiGroup) -> None:
    """A row that cannot be used is refused before anything moves, and the same call goes on with a right one."""
    device = CpuDevice()
    session = CudaSession(group, device, deadline_s=DEADLINE_S)
    registrations = Registrations(session, 2, 4)
    row = device.allocate(4096)
    host = np.zeros(64, np.uint8)
    for address, nbytes in ((row + 8, 64), (host.ctypes.data & ~15, 64), (row + 4032, 128)):
        try:
            registrations.publish([(0, address)], nbytes, "a call")
        except BenchError as error:
            if group.rank == 0:
                print(f"{type(error).__name__}: {error.message.replace(hex(address), 'there')}", flush=True)
    device.write(row, np.full(64, group.rank, np.uint8))
    group.barrier()
    registrations.publish([(1, row)], 64, "a call")
    peer = (group.rank + 1) % group.size
    device.read(registrations.address_of(peer, 1), host)
    assert (host == peer).all(), host
    group.barrier()
    registrations.close()
    device.free(row)
    session.close()


# ---- both backends ----


def beside_host(group: MpiGroup) -> None:
    """Cases of the scenarios count the same registrations on both backends, and are right on both."""
    BACKENDS.table["cuda"] = "tests.native.cpu_registration:CPU_CUDA"
    timing = Timing(warmup=1, min_samples=2, max_samples=2)
    for name, kept in (("binding", (8,)), ("registration-cache", (32,))):
        for case in expand(load_scenario(name), backends=["host", "cuda"], ranks_available=group.size):
            if case.num_experts not in kept or case.mr_cache_size not in (None, 0, 16):
                continue
            row = measure(case, Source(timing, {}, "."), group, Routings(), lambda operation: None)
            if group.rank == 0:
                counted = {key: row.counters.get(key) for key in ("mr_hits", "mr_misses", "mr_evictions", "mr_staged")}
                cost = row.counters.get("mr_miss_us", 0) > 0
                print(case.collective, case.variant, case.mr_cache_size, case.backend, row.outcome, row.reason,
                      counted, cost, sep="|", flush=True)  # fmt: skip


def main() -> None:
    task, *arguments = sys.argv[1:]
    group = world()
    {"sequences": sequences, "refusals": refusals, "beside_host": beside_host}[task](group, *arguments)
    group.close()


if __name__ == "__main__":
    main()
