"""What verifying costs a rank: seconds for filling its inputs and for comparing its outputs, and memory beside both.

    python benchmarks/verify_speed.py [--elements 44040192] [--tokens 4096] [--only dispatch]

Rank 0 of 2, bfloat16: 16 experts of so many elements, and so many tokens a rank of 7,168 elements, top-8 of 256. A
sweep fills four times and compares twice per case. Seconds are those of the CPU; beside them stands how many plain
copies of the same bytes take as long. Exit code 1 when comparing is above the limit, or finds something wrong.
"""

from __future__ import annotations

import argparse
import os
import resource
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from ncclep_bench.collectives.contract import Collective, Problem, problem_of
from ncclep_bench.collectives.verify import first_wrong
from ncclep_bench.model.case import Case
from ncclep_bench.registry import COLLECTIVES
from ncclep_bench.routing.token_routing import token_routing

LIMITS: dict[str, float] = {
    "all_gather_experts": 8,
    "dense_all_gather": 8,
    "reduce_scatter_expert_grads": 30,
    "dense_all_reduce": 30,
    "dispatch flat": 10,
    "dispatch expert_major": 10,
    "combine flat": 120,
    "combine expert_major": 120,
    "dispatch_combine flat": 30,
}
"""Copies of its bytes that comparing may take: 8-byte sums of up to eight 2-byte terms beside plain rows."""

Arrays = dict[str, npt.NDArray[Any]]


def problem_named(name: str, elements: int, tokens: int) -> Problem:
    """The problem of a line of LIMITS."""
    collective, _, layout = name.partition(" ")
    axes: dict[str, Any] = {"num_experts": 16, "expert_elements": elements, "active_share": 1.0}
    if layout:
        axes = {"mode": "ht", "layout": layout, "tokens": tokens, "hidden": 7168, "num_experts": 256, "top_k": 8,
                "routing": "uniform", "alignment": 1}  # fmt: skip
    definition: Collective = COLLECTIVES.get(collective)
    wanted = {key: value for key, value in axes.items() if key in definition.axes}
    case = Case(collective=collective, ranks=2, dtype="bfloat16", **wanted)
    return problem_of(case, token_routing(case) if layout else None)


def right_outputs(collective: Collective, problem: Problem) -> Arrays:
    """What rank 0 should find."""
    outputs: Arrays = {}
    for fits in (False, True):
        for expected in collective.expected(problem, 0, 1):
            values = np.asarray(expected.values)
            end = int(expected.rows.max()) + 1, *(expected.column + width for width in values.shape[1:])
            if not fits:
                dtype = problem.dtype.numpy if values.dtype == np.float64 else values.dtype
                before = outputs.get(expected.name, np.zeros(0 * np.array(end), dtype))
                outputs[expected.name] = np.zeros(np.maximum(before.shape, end), dtype)
            elif values.ndim == 1:
                outputs[expected.name][expected.rows] = values
            else:
                outputs[expected.name][expected.rows, expected.column : end[1]] = values
    return outputs


def seconds(action: Callable[[], object]) -> float:
    start = time.process_time()
    action()
    return time.process_time() - start


def copy_s(arrays: Arrays) -> float:
    """Seconds of a plain copy of the arrays into memory that has been used before."""
    targets = [np.ones_like(array.view(np.uint8)) for array in arrays.values()]
    return min(
        sum(
            seconds(partial(np.copyto, target, array.view(np.uint8)))
            for target, array in zip(targets, arrays.values(), strict=True)
        )
        for _ in range(2)
    )


def measure(name: str, elements: int, tokens: int) -> bool:
    """Print one line; whether it is within the limit."""
    problem = problem_named(name, elements, tokens)
    collective: Collective = COLLECTIVES.get(problem.case.collective)
    inputs = collective.empty_inputs(problem, 0)
    for array in inputs.values():
        array.view(np.uint8)[...] = 1
    outputs = right_outputs(collective, problem)
    fill_s = min(seconds(lambda: collective.fill(problem, 0, 1, inputs)) for _ in range(2))
    wrong: list[str | None] = []
    compare_s = min(seconds(lambda: wrong.append(first_wrong(collective, problem, 0, 1, outputs))) for _ in range(2))
    peak_gb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
    copies_s = copy_s(inputs), copy_s(outputs)
    gigabytes = [sum(array.nbytes for array in arrays.values()) / 1e9 for arrays in (inputs, outputs)]
    print(
        f"{name:<28} inputs {gigabytes[0]:5.2f} GB, filled in {fill_s:6.2f} s = {fill_s / copies_s[0]:5.1f} copies   "
        f"outputs {gigabytes[1]:5.2f} GB, compared in {compare_s:6.2f} s = {compare_s / copies_s[1]:5.1f} copies "
        f"(at most {LIMITS[name]:g})   peak {peak_gb:.2f} GB {wrong[0] or ''}",
        flush=True,
    )
    return not any(wrong) and compare_s <= LIMITS[name] * copies_s[1]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--elements", type=int, default=44_040_192)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--only", choices=LIMITS, nargs="*", default=list(LIMITS))
    arguments = parser.parse_args()
    late = False
    for name in arguments.only:
        # In a process of its own, since the system keeps the most memory that one has had.
        if (child := os.fork()) == 0:
            os._exit(0 if measure(name, arguments.elements, arguments.tokens) else 1)
        late |= os.waitpid(child, 0)[1] != 0
    sys.exit(late)


if __name__ == "__main__":
    main()
