"""Ranks without tokens take part, and what one rank says that it sends is what the other receives."""

from __future__ import annotations

import dataclasses

import numpy as np

from ncclep_bench.doctor.selftests.contract import MODES_AND_LAYOUTS, SelfTest, Suspicion, Trial
from ncclep_bench.doctor.selftests.payload import located
from ncclep_bench.routing.token_routing import TokenRouting, token_routing


def zero_tokens(trial: Trial) -> list[Suspicion]:
    """Each rank in turn has none, then all have none."""
    empty_sets = [{rank} for rank in range(min(trial.size, 8))] + [set(range(trial.size))]
    cases = [
        trial.case(collective, mode=mode, layout=layout)
        for collective in ("dispatch", "dispatch_combine")
        for mode, layout in MODES_AND_LAYOUTS
    ]
    for case in trial.runnable(cases):
        routing = token_routing(case)
        for empty in empty_sets:
            problem = trial.problem(case, _without(routing, empty))
            if any(found := trial.wrong(problem, draws=1)):
                who = ", ".join(map(str, sorted(empty)))
                suspicion = located(trial, problem, found)
                return [suspicion._replace(summary=f"rank {who} has no tokens: {suspicion.summary}")]
    return []


def _without(routing: TokenRouting, empty: set[int]) -> TokenRouting:
    """The routing in which the ranks of `empty` have no token at all."""
    left = [rank for rank in range(len(routing.tokens_per_rank)) if rank not in empty]
    index, weights = zip(*(routing.of_rank(rank) for rank in left), strict=True) if left else ((), ())
    none = routing.topk_idx[:0], routing.topk_weights[:0]
    return dataclasses.replace(
        routing,
        topk_idx=np.concatenate([none[0], *index]),
        topk_weights=np.concatenate([none[1], *weights]),
        tokens_per_rank=tuple(0 if rank in empty else count for rank, count in enumerate(routing.tokens_per_rank)),
    )


def split_symmetry(trial: Trial) -> list[Suspicion]:
    """Rows that i says it sends to j, and rows that j says it has received from i, for all pairs."""
    cases = [
        trial.case("dispatch", mode=mode, layout=layout, hidden=64, tokens=tokens, seed=tokens)
        for tokens in (1, 8, 33)
        for mode, layout in MODES_AND_LAYOUTS
    ]
    for case in trial.runnable(cases):
        problem = trial.problem(case)
        trial.step(f"the split of {case.case}")
        prepared = trial.backend.prepare(problem, trial.group)
        try:
            # What is delivered is another self-test's affair: here only the counts are looked at.
            trial.launch(problem, prepared, 0)
            received = trial.everybody(prepared.outputs(trial.rank)["source_counts"].tolist())
            sent = trial.everybody(problem.layout.pair_rows[trial.rank].tolist())
        finally:
            trial.moved_bytes += prepared.stats().wire_bytes
            prepared.close()
        pairs = [
            (i, j, sent[i][j], received[j][i])
            for i in range(trial.size)
            for j in range(trial.size)
            if sent[i][j] != received[j][i]
        ]
        if pairs:
            i, j, said, got = pairs[0]
            senders = sorted({pair[0] for pair in pairs})
            receivers = sorted({pair[1] for pair in pairs})
            return [
                Suspicion(
                    f"rank {i} says it sends {said} rows to rank {j}, which receives {got}",
                    tuple(senders if len(senders) <= len(receivers) else receivers),
                    (*(f"{i} → {j}: {said} sent, {got} received" for i, j, said, got in pairs[:8]), case.case),
                )
            ]
    return []


SELF_TESTS = (
    SelfTest(
        code="SELF006",
        title="A rank without tokens takes part",
        severity="error",
        deadline_s=40,
        run=zero_tokens,
        why="An idle rank that skips the layer leaves the others waiting for it in the all-to-all: every call is "
        "collective, whatever a rank has to send.",
        by_hand="log the calls of every rank: all must make equally many",
        remedy="run a dummy forward pass on ranks without requests",
        reference="https://docs.vllm.ai/en/latest/serving/data_parallel_deployment/",
    ),
    SelfTest(
        code="SELF007",
        title="What one rank sends, the other receives",
        severity="error",
        deadline_s=40,
        run=split_symmetry,
        why="Counts that two ranks see differently make an all-to-all wait for rows that nobody sends, or read rows "
        "that nobody has written; totals do not show it, the matrix of pairs does.",
        by_hand="gather every rank's send and receive counts, and compare S[i][j] with R[j][i]",
        remedy="compute the counts of a call from the same routing on both sides",
        reference="https://docs.pytorch.org/docs/stable/distributed.html#torch.distributed.all_to_all_single",
    ),
)
