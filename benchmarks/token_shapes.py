"""Which shape of dispatch and combine is fastest, every launch compared bit by bit.

    mpirun -n N python -m mpi4py benchmarks/token_shapes.py [--mode ll] [--tokens 128] [--sms 132,16] [--only NAME]

One rank per GPU, or one alone, where nothing crosses; bfloat16, top-8 of 256 experts. Mode ht: 4,096 tokens,
flat rows; mode ll: 128 tokens, expert-major.
Rows and weights alternate between launches; all shapes must deliver what the first does. Exit code 1 when one did not.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from ncclep_bench.backends.cuda import tokens
from ncclep_bench.backends.cuda.session import CudaSession
from ncclep_bench.backends.cuda.timer import GraphTimer
from ncclep_bench.backends.cuda.tokens import COMBINE, DISPATCH, LANES_BYTES, Bulk, Split, TokenHandle
from ncclep_bench.model.dtype import dtype_named
from ncclep_bench.model.placement import placement_of
from ncclep_bench.runtime.device import CudaDevice, cuda_device
from ncclep_bench.runtime.world import MpiGroup, world

Array = np.ndarray[Any, Any]

EXPERTS, TOP_K, DRAWS, LAUNCHES, SAMPLES = 256, 8, 2, 16, 24


class Shape(NamedTuple):
    """What differs from how things are done now."""

    dispatch: Split | None = None
    combine: Split | None = None
    bulk: Bulk | None = None
    stores: bool = False
    """Combine uses no bulk copies, whatever it does now."""
    early: bool = True
    """Launches may begin while the one before still runs, where they may now."""


def bulk(push_share: int, push_warps: int, push_batch: int, take_slots: int, piece_bytes: int) -> Shape:
    return Shape(bulk=Bulk(push_share, push_warps, push_batch, take_slots, piece_bytes))


def splits(mode: str, shares: Sequence[float], lanes: Sequence[int]) -> Iterator[tuple[str, Shape]]:
    for share in shares:
        for vecs in lanes:
            dispatch, combine = (
                usual[mode]._replace(push_share=share, piece_bytes=vecs * LANES_BYTES) for usual in (DISPATCH, COMBINE)
            )
            yield f"{share:.3f} send pieces of {vecs * LANES_BYTES} B", Shape(dispatch, combine, stores=True)


def and_not_early(shapes: dict[str, Shape]) -> dict[str, Shape]:
    """The same and, after them, each without early launches."""
    return shapes | {f"{name}, not early": shape._replace(early=False) for name, shape in shapes.items()}


SHAPES: dict[str, dict[str, Shape]] = {
    "ll": and_not_early(
        {
            "as now": Shape(),
            "dispatch with 16 warps": Shape(DISPATCH["ll"]._replace(threads=1)),
            **dict(splits("ll", (1 / 8, 1 / 4, 3 / 8, 1 / 2, 1), (1, 2, 4, 7, 14))),
        }
    ),
    "ht": {
        **and_not_early({"as now": Shape()}),
        **dict(splits("ht", (1 / 8, 1 / 4, 3 / 8, 1), (4, 7, 14, 28))),
        "fetch, 4 x 3,584 B": bulk(0, 0, 1, 4, 3584),
        "fetch, 6 x 2,048 B": bulk(0, 0, 1, 6, 2048),
        "fetch, 2 x 7,168 B": bulk(0, 0, 1, 2, 7168),
        "push, 4 warps": bulk(8, 4, 4, 4, 3584),
        "a quarter pushed, 3 warps": bulk(2, 3, 4, 4, 3584),
    },
}
LAYOUTS = {"ll": "expert_major", "ht": "flat"}
TOKENS = {"ll": 128, "ht": 4096}


class Bench:
    """Rows and routing of one size on this rank, and what the first shape makes of them."""

    def __init__(
        self, group: MpiGroup, device: CudaDevice, mode: str, layout: str, token_count: int, hidden: int
    ) -> None:
        self.group, self.device, self.mode, self.layout = group, device, mode, layout
        self.token_count, self.hidden = token_count, hidden
        rng = np.random.default_rng(group.rank)
        self.topk_idx = np.argsort(rng.random((token_count, EXPERTS)), axis=1)[:, :TOP_K]
        self.topk_weights = rng.random((token_count, TOP_K), dtype=np.float32)
        bfloat16 = dtype_named("bfloat16").numpy
        self.rows = [
            rng.standard_normal((token_count, hidden), dtype=np.float32).astype(bfloat16) for _ in range(DRAWS)
        ]
        self.right: list[list[bytes]] = []

    def measure(self, num_sms: int, shape: Shape) -> tuple[dict[str, float], int]:
        """Median microseconds of the slowest rank for each operation, and the wrong launches of all ranks."""
        usual = DISPATCH[self.mode], COMBINE[self.mode], tokens.bulk_of
        usually_early = self.device.early_launches
        DISPATCH[self.mode] = shape.dispatch or usual[0]
        COMBINE[self.mode] = shape.combine or usual[1]
        if shape.bulk is not None or shape.stores:
            tokens.bulk_of = lambda session: shape.bulk
        self.device.early_launches = usually_early and shape.early
        try:
            return self._measure(num_sms)
        finally:
            DISPATCH[self.mode], COMBINE[self.mode], tokens.bulk_of = usual
            self.device.early_launches = usually_early

    def _measure(self, num_sms: int) -> tuple[dict[str, float], int]:
        session = CudaSession(self.group, self.device, num_sms=num_sms, deadline_s=5.0)
        handle = TokenHandle(
            session,
            placement=placement_of("block", EXPERTS, self.group.size),
            top_k=TOP_K,
            hidden=self.hidden,
            dtype=dtype_named("bfloat16"),
            mode=self.mode,  # type: ignore[arg-type]
            layout=self.layout,  # type: ignore[arg-type]
            max_tokens=self.token_count,
        )
        handle.route(self.topk_idx, self.topk_weights)
        handle.update()

        def pair() -> None:
            handle.dispatch()
            handle.return_tokens()

        operations: dict[str, Callable[[], None]] = {
            "update": handle.update,
            "dispatch": handle.dispatch,
            "combine": handle.combine,
            "pair": pair,
        }
        try:
            wrong = self._wrong_launches(handle, pair)
            arrived = handle.own["out_rows"] if handle.staged else handle.received_arrays()[1]["tokens"]
            self.device.copy(handle.own["returning"], arrived, handle.received_rows() * handle.row_bytes)
            times = {
                name: GraphTimer(session, self.device, enqueue, None, num_sms).sample_us(SAMPLES)
                for name, enqueue in operations.items()
            }
            wrong += self._wrong_launches(handle, pair)
            session.check()
        finally:
            handle.close()
            session.close()
        told = self.group.allgather(np.array([wrong, *np.concatenate(list(times.values()))]).tobytes())
        slowest = np.max([np.frombuffer(data)[1:] for data in told], axis=0).reshape(len(times), -1)
        p50_us = {name: statistics.median(row.tolist()) for name, row in zip(times, slowest, strict=True)}
        return p50_us, int(sum(np.frombuffer(data)[0] for data in told))

    def _wrong_launches(self, handle: TokenHandle, pair: Callable[[], None]) -> int:
        """What comes back is a weighted sum of what arrived, so one comparison judges both."""
        sums = np.zeros((self.token_count, self.hidden), self.rows[0].dtype)
        counts = np.zeros(handle.local_experts, np.int64)
        wrong = 0
        for launch in range(LAUNCHES):
            self.device.write(handle.own["rows"], self.rows[launch % DRAWS])
            pair()
            self.device.read(handle.own["combined"], sums)
            self.device.read(handle.own["expert_counts"], counts)
            told = [sums.tobytes(), counts.tobytes()]
            if len(self.right) < DRAWS:
                self.right.append(told)
            wrong += told != self.right[launch % DRAWS]
        return wrong


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mode", choices=SHAPES, default="ll")
    parser.add_argument("--sms", type=lambda text: [int(word) for word in text.split(",")], default=[132])
    parser.add_argument("--tokens", type=int)
    parser.add_argument("--layout", choices=("flat", "expert_major"))
    parser.add_argument("--only", default="", help="shapes with this in their names")
    parser.add_argument("--hidden", type=int, default=7168)
    arguments = parser.parse_args()
    group = world()
    token_count = arguments.tokens or TOKENS[arguments.mode]
    layout = arguments.layout or LAYOUTS[arguments.mode]
    bench = Bench(group, cuda_device(group.rank), arguments.mode, layout, token_count, arguments.hidden)
    bad = 0
    for num_sms in arguments.sms:
        for name, shape in SHAPES[arguments.mode].items():
            if arguments.only not in name:
                continue
            p50_us, wrong = bench.measure(num_sms, shape)
            bad += wrong
            if group.rank == 0:
                times = "  ".join(f"{operation} {value:7.2f}" for operation, value in p50_us.items())
                print(f"{num_sms:4} multiprocessors  {name:36} {times} us  {wrong} wrong launches", flush=True)
    group.close()
    sys.exit(1 if bad else 0)


if __name__ == "__main__":
    main()
