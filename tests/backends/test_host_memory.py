"""Memory that a case of the host backend is said to take, against the buffers it then makes."""

from __future__ import annotations

import numpy as np
import pytest

from ncclep_bench.backends.host.backend import HOST
from tests.cases import make_case, make_problem


class Alone:
    """A group of one rank."""

    rank, size = 0, 1

    def allgather(self, data: bytes, /) -> list[bytes]:
        return [data]

    def barrier(self) -> None:
        pass


@pytest.mark.parametrize(
    ("collective", "axes"),
    [
        ("dispatch", {"mode": "ht", "layout": "flat"}),
        ("dispatch", {"mode": "ht", "layout": "flat", "hidden": 128, "dtype": "float8_e4m3fn"}),
        ("dispatch", {"mode": "ht", "layout": "expert_major", "alignment": 64}),
        ("dispatch", {"mode": "ll", "layout": "rank_major"}),
        ("dispatch", {"mode": "ll", "layout": "expert_major"}),
        ("combine", {"mode": "ht", "layout": "flat"}),
        ("combine", {"mode": "ht", "layout": "expert_major", "alignment": 64}),
        ("combine", {"mode": "ll", "layout": "expert_major"}),
        ("dispatch_combine", {"mode": "ll", "layout": "expert_major"}),
        ("all_gather_experts", {"variant": "out_of_place"}),
        ("all_gather_experts", {"variant": "in_place"}),
        ("all_gather_experts", {"variant": "registered"}),
        ("reduce_scatter_expert_grads", {"variant": "out_of_place"}),
        ("reduce_scatter_expert_grads", {"variant": "in_place"}),
        ("reduce_scatter_expert_grads", {"variant": "registered"}),
    ],
)
def test_inputs_and_outputs_fit_into_the_memory_foreseen(collective: str, axes: dict[str, object]) -> None:
    case = make_case(collective, **{"backend": "host", "ranks": 1, "tokens": 64, "num_experts": 32, **axes})
    foreseen = HOST.memory_of(case)
    assert foreseen is not None
    prepared = HOST.prepare(make_problem(case), Alone())
    try:
        prepared.launch()
        buffers = {
            array.ctypes.data: array.nbytes
            for array in (*prepared.inputs(0).values(), *prepared.outputs(0).values())
            if array.dtype != np.int64  # counts
        }
    finally:
        prepared.close()
    assert sum(buffers.values()) <= sum(foreseen)
