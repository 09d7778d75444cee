"""How long planning takes: 65,536 tokens in total, top-8 of 256 experts over 64 ranks; exit code 1 above the limit."""

from __future__ import annotations

import sys
import time

from ncclep_bench.collectives.contract import Collective, problem_of
from ncclep_bench.model.case import Case
from ncclep_bench.model.ep_config import Layout
from ncclep_bench.registry import COLLECTIVES
from ncclep_bench.routing.token_routing import token_routing

LIMIT_S = 0.5
LAYOUTS: tuple[Layout, ...] = ("flat", "expert_major")


def plan_s(collective: str, layout: Layout) -> float:
    """Seconds for routing, row plan, traffic, and the rows of every stage."""
    case = Case(
        collective=collective,
        mode="ht",
        layout=layout,
        ranks=64,
        tokens=1024,
        hidden=7168,
        num_experts=256,
        top_k=8,
        routing="uniform",
        dtype="bfloat16",
    )
    start = time.perf_counter()
    definition: Collective = COLLECTIVES.get(collective)
    plan = definition.row_plan(problem_of(case, token_routing(case)))
    plan.traffic()
    for stage in plan.stages:
        stage.entries()
    return time.perf_counter() - start


def main() -> None:
    worst = 0.0
    for collective in ("dispatch", "combine", "dispatch_combine"):
        for layout in LAYOUTS:
            best = min(plan_s(collective, layout) for _ in range(3))
            worst = max(worst, best)
            print(f"{collective} {layout}: {best:.2f} s (limit {LIMIT_S} s)")
    sys.exit(worst > LIMIT_S)


if __name__ == "__main__":
    main()
