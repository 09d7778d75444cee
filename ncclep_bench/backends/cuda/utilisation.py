"""How much of a device is in use while operations follow each other, apart from their times."""

from __future__ import annotations

import time
from collections.abc import Callable

from ncclep_bench.backends.cuda.session import CudaSession
from ncclep_bench.runtime import nvml
from ncclep_bench.runtime.device import CudaDevice

LOOP_S = 2.0
_BATCH_S = 0.1
_GLANCES_FROM_S = 1.0
"""The driver averages over up to a second; before that its answer is about what was before the loop."""


def utilisation(session: CudaSession, device: CudaDevice, several: Callable[[], object]) -> dict[str, float]:
    """What the driver tells of `several` run over and over, by column; collective, every rank runs as many."""
    count = 1
    while _batch_s(session, device, several, count) < _BATCH_S:
        count *= 2
    with nvml.meter(device.bus_id) as meter:
        if meter is not None:
            meter.start()
        spent_s = 0.0
        while spent_s < LOOP_S:
            look = meter.glance if meter is not None and spent_s >= _GLANCES_FROM_S else None
            spent_s += _batch_s(session, device, several, count, look)
        return {} if meter is None else meter.stop()


def _batch_s(
    session: CudaSession,
    device: CudaDevice,
    several: Callable[[], object],
    count: int,
    look: Callable[[], None] | None = None,
) -> float:
    """Seconds of the slowest rank's batch, the same on all ranks; `look` is called while the device works."""
    start = time.perf_counter()
    for _ in range(count):
        several()
    if look is not None:
        look()
    device.synchronize()
    own_s = time.perf_counter() - start
    session.check()
    return max(float(data) for data in session.group.allgather(repr(own_s).encode()))
