"""Random cases for hypothesis, whose import ranks are spared."""

from __future__ import annotations

from hypothesis import strategies as st

from ncclep_bench.collectives.contract import Collective
from ncclep_bench.model.case import Case
from ncclep_bench.registry import COLLECTIVES
from tests.cases import EXPERT_COLLECTIVES, TOKEN_COLLECTIVES, make_case


@st.composite
def cases(draw: st.DrawFn, collectives: tuple[str, ...] = TOKEN_COLLECTIVES + EXPERT_COLLECTIVES) -> Case:
    """Random shapes, dtypes, placements, replicas, empty ranks and masked tokens; only cases that are not waived."""
    collective = draw(st.sampled_from(collectives))
    definition: Collective = COLLECTIVES.get(collective)
    ranks = draw(st.integers(1, 5))
    placement = draw(st.sampled_from(["block", "uneven", "replicas"]))
    num_experts = draw(st.integers(1, 4)) * ranks if placement == "block" else draw(st.integers(1, 12))
    if placement == "replicas":
        placement = f"replicas:{draw(st.integers(1, ranks))}"
    mode = draw(st.sampled_from(["ht", "ll"]))
    tokens = draw(st.integers(0, 20))
    dtype = draw(st.sampled_from(["float32", "float16", "bfloat16", "float8_e4m3fn"]))
    scaled = dtype == "float8_e4m3fn"
    if scaled and collective not in ("dispatch", "padded_all_to_all"):
        dtype, scaled = "bfloat16", False
    variants = ("dispatch",) if scaled and definition.variants else definition.variants
    return make_case(
        collective,
        ranks=ranks,
        placement=placement,
        num_experts=num_experts,
        mode=mode,
        layout=draw(st.sampled_from(["flat", "expert_major"] if mode == "ht" else ["expert_major", "rank_major"])),
        variant=draw(st.sampled_from(variants)) if variants else None,
        tokens=tokens,
        batch_size=tokens,
        hidden=128 * draw(st.integers(1, 2)) if scaled else draw(st.integers(1, 33)),
        expert_elements=draw(st.integers(1, 50)),
        top_k=draw(st.integers(1, min(num_experts, 5))),
        dtype=dtype,
        alignment=draw(st.sampled_from([1, 4, 7])),
        routing=draw(st.sampled_from(["uniform", "zipf", "round_robin", "all_to_one"])),
        masked_share=draw(st.sampled_from([None, 0.3, 1.0])),
        empty_ranks=draw(st.integers(0, ranks)),
        active_share=draw(st.sampled_from([0.0, 0.3, 1.0])),
        seed=draw(st.integers(0, 1000)),
    )
