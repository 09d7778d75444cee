"""What an EpConfig that contradicts itself is told."""

from __future__ import annotations

import pytest

from ncclep_bench.errors import InputError
from ncclep_bench.model.ep_config import EpConfig, Layout, Mode


@pytest.mark.parametrize("placement", ["uneven", "replicas:2", ((0, 1, 2), (3,))])
def test_experts_per_rank_beside_another_placement_names_the_rank(placement: str | tuple[tuple[int, ...], ...]) -> None:
    ranks = 3 if placement == "uneven" else 2
    with pytest.raises(InputError, match=r"experts_per_rank is 2, but the placement gives rank \d [134] experts"):
        EpConfig(num_experts=4, experts_per_rank=2, placement=placement).check(ranks)


def test_experts_per_rank_may_repeat_what_the_placement_says() -> None:
    placement = EpConfig(num_experts=4, experts_per_rank=2, placement=((3, 1), (0, 2))).check(2)
    assert placement.experts_of_rank == ((3, 1), (0, 2))


@pytest.mark.parametrize(("mode", "layout"), [("ll", "flat"), ("ht", "rank_major")])
def test_a_layout_that_the_mode_lacks_is_refused_and_the_default_fits_the_mode(mode: Mode, layout: Layout) -> None:
    with pytest.raises(InputError, match=f"mode {mode} has no layout {layout}"):
        EpConfig(num_experts=4, mode=mode, layout=layout).check(2)
    config = EpConfig(num_experts=4, mode=mode)
    config.check(2)
    assert config.row_layout == {"ht": "flat", "ll": "expert_major"}[mode]
