"""The floor under every figure: how fast a word, and how fast many bytes, get from one device to the next."""

from __future__ import annotations

from statistics import median
from typing import Any

from ncclep_bench.backends.contract import Floor
from ncclep_bench.backends.cuda.session import CudaSession, Heap
from ncclep_bench.runtime.device import CudaDevice
from ncclep_bench.units import gbps

COPY_BYTES = 256 << 20
COPIES, ROUNDS, PINGS = 5, 200, 5

_measured: dict[tuple[int, int], Floor] = {}
"""By device and number of ranks: measured once in a process."""


def floor_of(session: CudaSession, device: CudaDevice) -> Floor | None:
    """The floor among the ranks of a session, the slowest rank's; collective the first time. None for one rank,
    and where peer memory does not reach everybody."""
    if session.size == 1 or session.staging is not None:
        return None
    key = device.index, session.size
    if key not in _measured:
        flags_us, copy_us = _ping_us(session, device), _copy_us(session, device)
        own = f"{flags_us} {copy_us}".encode()
        everybody = [tuple(map(float, data.split())) for data in session.group.allgather(own)]
        slowest_flag, slowest_copy = (max(column) for column in zip(*everybody, strict=True))
        _measured[key] = Floor(slowest_flag, gbps(COPY_BYTES, slowest_copy))
    return _measured[key]


def _ping_us(session: CudaSession, device: CudaDevice) -> float:
    """Ranks 0 and 1, 2 and 3 and so on throw a word to and fro; 0 for the last of an odd number."""
    heap = Heap(device, session.group, {"flags": 8})
    peer = session.rank ^ 1
    launch = session.launch(
        "ping", ping_arguments(session, heap, peer if peer < session.size else -1), blocks=1, threads=32
    )
    times = []
    for _ in range(PINGS):
        session.meet()
        before = device.record()
        launch()
        after = device.record()
        device.synchronize()
        times.append(device.elapsed_us(before, after) / (2 * ROUNDS))
    session.check()
    session.group.barrier()
    heap.close()
    return median(times) if peer < session.size else 0.0


def ping_arguments(session: CudaSession, heap: Heap, peer: int) -> dict[str, Any]:
    """Arguments of the kernel ping over a heap with a part `flags`."""
    return {
        "heaps": heap.addresses,
        "rank": session.rank,
        "peer": peer,
        "rounds": ROUNDS,
        "flags_at": heap.offset["flags"],
        "state": session.new_state(),
        "fault": session.fault,
        "deadline_ns": int(session.deadline_s * 1e9),
    }


def _copy_us(session: CudaSession, device: CudaDevice) -> float:
    heap = Heap(device, session.group, {"source": COPY_BYTES, "target": COPY_BYTES})
    target, source = heap.address("target", (session.rank + 1) % session.size), heap.address("source")
    times = []
    for _ in range(COPIES):
        session.meet()
        before = device.record()
        device.copy(target, source, COPY_BYTES)
        after = device.record()
        device.synchronize()
        times.append(device.elapsed_us(before, after))
    session.check()
    session.group.barrier()
    heap.close()
    return median(times)
