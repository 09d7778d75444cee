"""Every collective can be captured into a CUDA graph, and a replay moves what lies in the buffers then."""

from __future__ import annotations

from typing import Any

from ncclep_bench.doctor.selftests.contract import (
    COLLECTIVES_OF_EXPERTS,
    COLLECTIVES_OF_TOKENS,
    MODES_AND_LAYOUTS,
    SelfTest,
    Suspicion,
    Trial,
)

_REPLAYS = 3


def graphs(trial: Trial) -> list[Suspicion]:
    """Capture each once, replay it with other contents in the same buffers."""
    from ncclep_bench.runtime.device import cuda_device

    cases = [
        trial.case(collective, mode=mode, layout=layout)
        for collective in COLLECTIVES_OF_TOKENS
        for mode, layout in MODES_AND_LAYOUTS
    ]
    cases += [trial.case(collective, variant="in_place") for collective in COLLECTIVES_OF_EXPERTS]
    for case in trial.runnable(cases):
        problem = trial.problem(case)
        prepared: Any = trial.backend.prepare(problem, trial.group)
        try:
            replay = cuda_device(trial.rank).capture(prepared.enqueue)

            def run(prepared: Any = prepared, replay: Any = replay) -> None:
                prepared.upload()
                # Kernels wait for the peers': all must have uploaded before the first one starts.
                trial.group.barrier()
                replay()

            for draw in range(_REPLAYS):
                found = trial.everybody(trial.launch(problem, prepared, draw, run))
                if any(found):
                    ranks = tuple(rank for rank, wrong in enumerate(found) if wrong)
                    return [
                        Suspicion(
                            f"replay {draw} of a captured {case.collective} delivers wrong rows",
                            _odd(ranks, trial.size),
                            (*filter(None, found), case.case),
                        )
                    ]
        finally:
            trial.moved_bytes += prepared.stats().wire_bytes
            prepared.close()
    return []


def _odd(ranks: tuple[int, ...], size: int) -> tuple[int, ...]:
    """The one rank that gets nothing wrong has moved nothing itself, where it is alone."""
    right = tuple(rank for rank in range(size) if rank not in ranks)
    return (*right, *ranks) if len(right) == 1 and size > 2 else ranks


SELF_TESTS = (
    SelfTest(
        code="SELF003",
        title="Captured graphs replay every collective",
        severity="error",
        deadline_s=60,
        run=graphs,
        backends=("cuda",),
        elsewhere="CUDA graphs need the cuda backend",
        why="A graph keeps the addresses of its buffers: one captured before a buffer moved, or before the first "
        "call had set everything up, replays stale rows or fails.",
        by_hand="NCCL_DEBUG=INFO shows allocations during the capture, of which there must be none",
        remedy="allocate buffers once and call once before the capture",
        reference="https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/usage/cudagraph.html",
    ),
)
