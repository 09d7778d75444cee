"""A stream or a buffer of another device is refused at the call, and the next call works."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from ncclep_bench.doctor.selftests.contract import SelfTest, Suspicion, Trial
from ncclep_bench.errors import UsageError

_ELEMENTS = 256
_WAIT_S = 4.0
"""What went through against the rules waits so long for the others."""


class _Stream:
    """A stream that is none of the communicator's."""

    ptr = 0x1
    cuda_stream = 0x1


class _DeviceArray:
    """What says of itself that it lies on a GPU."""

    def __init__(self, like: Any) -> None:
        self.__cuda_array_interface__ = {
            "version": 3,
            "shape": like.shape,
            "typestr": like.dtype.str,
            "data": (0, False),
            "strides": None,
        }


def streams(trial: Trial) -> list[Suspicion]:
    """What does not belong to the communicator, on one rank at a time: refused there, and nobody hangs."""
    from ncclep_bench.ep.communicator import EpCommunicator

    config = trial.config(expert_elements=_ELEMENTS, deadline_s=_WAIT_S)
    found: list[str] = []
    with EpCommunicator(trial.group, config) as communicator:
        mine = np.full((2, _ELEMENTS), trial.rank + 1, np.float32)
        wanted = np.repeat(np.arange(trial.size) + 1, 2)
        calls: dict[str, Callable[[], object]] = {
            "a foreign stream": lambda: communicator.all_gather_experts(mine, stream=_Stream()),
            "a buffer of a device": lambda: communicator.all_gather_experts(_DeviceArray(mine)),
        }
        for odd in range(trial.size):
            for what, call in calls.items():
                trial.step(f"{what} at rank {odd}")
                if trial.rank == odd and (wrong := _not_refused(what, call)):
                    found.append(wrong)
                # A call that went through against the rules waits for the others, which know nothing of it.
                if suspicions := trial.suspicions(found):
                    return suspicions
                gathered = communicator.all_gather_experts(mine)
                trial.calls += 1
                if not (gathered[:, 0] == wanted).all():
                    found.append(f"the call after {what} delivers wrong rows")
        trial.moved_bytes += communicator.stats.wire_bytes
    return trial.suspicions(found)


def _not_refused(what: str, call: Callable[[], object]) -> str | None:
    try:
        call()
    except UsageError:
        return None
    except Exception as error:
        return f"{what} is not refused, it leads to: {type(error).__name__}: {str(error).splitlines()[0]}"
    return f"{what} is taken without a word"


SELF_TESTS = (
    SelfTest(
        code="SELF005",
        title="Foreign streams and devices are refused at the call",
        severity="error",
        deadline_s=60,
        run=streams,
        why="A kernel on a stream or in a context that is not the communicator's runs before its inputs are there, or "
        "waits for ever: a mismatch must be an error at the call.",
        by_hand="CUDA_LAUNCH_BLOCKING=1 makes the first wrong call fail where it stands",
        remedy="torch.cuda.set_device(local_rank)   # before the communicator is made, and its stream in every call",
        reference="https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/usage/streams.html",
    ),
)
