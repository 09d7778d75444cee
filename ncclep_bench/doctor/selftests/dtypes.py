"""Every dtype arrives as itself where it is allowed, and is refused by name where it is not."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from ncclep_bench.doctor.selftests.contract import (
    COLLECTIVES_OF_EXPERTS,
    COLLECTIVES_OF_TOKENS,
    NotRunError,
    SelfTest,
    Suspicion,
    Trial,
)
from ncclep_bench.doctor.selftests.payload import located
from ncclep_bench.errors import BenchError
from ncclep_bench.model.dtype import DTYPES
from ncclep_bench.registry import COLLECTIVES

if TYPE_CHECKING:
    from ncclep_bench.model.case import Case


def dtypes(trial: Trial) -> list[Suspicion]:
    """The whole table: dtypes times collectives, then what the communicator must refuse."""
    allowed: list[Case] = []
    refused: list[tuple[Case, str]] = []
    for dtype in DTYPES:
        for collective in (*COLLECTIVES_OF_TOKENS, *COLLECTIVES_OF_EXPERTS):
            case = trial.case(collective, dtype=dtype, seed=len(allowed))
            reason = COLLECTIVES.get(collective).waiver(case)
            if reason is None:
                allowed.append(case)
            else:
                refused.append((case, reason))
    for case, reason in refused:
        if case.dtype not in reason:
            return [Suspicion(f"{case.collective} refuses {case.dtype} without naming it", (), (reason,))]
    for case in trial.runnable(allowed):
        problem = trial.problem(case)
        if any(found := trial.wrong(problem)):
            suspicion = located(trial, problem, found)
            return [suspicion._replace(summary=f"{case.dtype}: {suspicion.summary}")]
    trial.note(f"{len(refused)} refused: " + ", ".join(f"{case.collective} of {case.dtype}" for case, _ in refused))
    return _refusals(trial)


def _refusals(trial: Trial) -> list[Suspicion]:
    """What the public API must refuse, at once and with the name of the dtype."""
    from ncclep_bench.ep.communicator import EpCommunicator

    trial.step("dtypes that the communicator must refuse")
    experts = 2 * trial.size
    config = partial(trial.config, expert_elements=128)
    found = [_not_refused("float64", "an EpConfig", partial(EpCommunicator, trial.group, config(dtype="float64")))]
    for dtype in DTYPES.values():
        with EpCommunicator(trial.group, config(dtype=dtype.name)) as communicator:
            if dtype.scaled:
                grads = np.zeros((experts, 128), dtype.numpy)
                found.append(
                    _not_refused(dtype.name, "a sum", partial(communicator.reduce_scatter_expert_grads, grads))
                )
            other = next(other for other in DTYPES.values() if other.name != dtype.name)
            params = np.zeros((2, 128), other.numpy)
            gather = partial(communicator.all_gather_experts, params)
            found.append(_not_refused(dtype.name, f"{other.name} in a communicator", gather))
    return trial.suspicions([message for message in found if message])


def _not_refused(name: str, what: str, call: Callable[[], object]) -> str | None:
    try:
        call()
    except BenchError as error:
        return None if name in str(error) else f"{what} of {name} is refused without its name: {error}"
    return f"{what} of {name} is not refused"


def scale_format(trial: Trial) -> list[Suspicion]:
    """float8 rows and their scales, one per 128 elements, right behind the wire: bit for bit, no power of two."""
    from ncclep_bench.collectives.contract import Problem

    cases = [
        trial.case("dispatch", dtype="float8_e4m3fn", hidden=hidden, mode=mode, layout=layout, seed=hidden)
        for hidden in (128, 256, 7168)
        for mode, layout in (("ht", "flat"), ("ht", "expert_major"), ("ll", "expert_major"), ("ll", "rank_major"))
    ]
    for case in trial.runnable(cases):
        problem: Problem = trial.problem(case)
        dispatch = COLLECTIVES.get("dispatch")
        inputs = dispatch.empty_inputs(problem, trial.rank)
        dispatch.fill(problem, trial.rank, 0, inputs)
        scales = inputs["scales"]
        if len(scales) and not (np.frexp(scales)[0] != 0.5).any():
            raise NotRunError("the scales to send are powers of two by themselves")
        if any(found := trial.wrong(problem)):
            suspicion = located(trial, problem, found)
            which = "scales" if any("scales" in wrong for wrong in found if wrong) else "rows"
            return [suspicion._replace(summary=f"float8 {which} are changed on their way: {suspicion.summary}")]
    return []


SELF_TESTS = (
    SelfTest(
        code="SELF004",
        title="Every dtype arrives as itself or is refused by name",
        severity="error",
        deadline_s=60,
        run=dtypes,
        why="bfloat16 and float16 have the same size: a library that takes one for the other delivers rows of right "
        "length with wrong values, and one that is too old says NCCL_INVALID_DATATYPE without saying which.",
        by_hand="python -c 'import torch; print(torch.cuda.nccl.version())': bfloat16 needs 2.10, float8 2.24",
        remedy="set dtype in the EpConfig to that of the tensors",
        reference="https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/api/types.html#ncclDataType-t",
    ),
    SelfTest(
        code="SELF008",
        title="float8 scales arrive as they were sent",
        severity="error",
        deadline_s=30,
        run=scale_format,
        why="Kernels that expect powers of two (UE8M0) as scales take the exponent of a float32 alone: values are up "
        "to a quarter wrong and nothing reports it.",
        by_hand="compare dequantised rows before and after dispatch, with scales such as 1.5",
        remedy="requantise with the scale format that the kernels read (float32, or UE8M0 on both sides)",
        reference="https://github.com/deepseek-ai/DeepEP#example-use-in-model-training-or-inference-prefilling",
    ),
)
