"""Drawing distinct experts for many tokens at once."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

_REDRAW_FROM = 32.0
"""From here redrawing is faster, measured: its rounds go with 1 / (popularity left for the last choice), a race's time
with the number of experts, so their ratio is the product of the two."""
_RACE_ENTRIES = 1 << 20
"""Entries of the tokens × experts scratch array, at most."""


class DistinctDraw:
    """Draws `top_k` distinct experts per token, one after the other, each in proportion to popularity among those left.

    `popularity`: shape [experts], at least top_k of them positive. Inclusion is thus a little flatter than popularity.
    """

    def __init__(self, popularity: npt.NDArray[np.float64], top_k: int) -> None:
        self._popularity = popularity / popularity.sum()
        self._top_k = top_k
        self._cumulative = np.cumsum(self._popularity)
        self._cumulative /= self._cumulative[-1]
        most_popular = np.sort(self._popularity)[::-1][: top_k - 1]
        self._redraw = (1 - float(most_popular.sum())) * len(popularity) >= _REDRAW_FROM

    def draw(self, count: int, rng: np.random.Generator) -> npt.NDArray[np.int64]:
        """Experts of `count` tokens, shape [count, top_k]."""
        return self._redrawn(count, rng) if self._redraw else self._raced(count, rng)

    def _experts(self, count: int, rng: np.random.Generator) -> npt.NDArray[np.int64]:
        return np.searchsorted(self._cumulative, rng.random(count), side="right")

    def _redrawn(self, count: int, rng: np.random.Generator) -> npt.NDArray[np.int64]:
        """Every choice equal to an earlier one of its token is drawn again until none is.

        This is the law of sequential draws: a value once held by a token's first choices stays held by one of them,
        so a choice is only ever refused for a value that the final choices before it contain.
        """
        chosen = self._experts(count * self._top_k, rng).reshape(count, self._top_k)
        rows: npt.NDArray[Any] = np.arange(count)
        while len(rows):
            part = chosen[rows]
            repeated = _repeated(part)
            part[repeated] = self._experts(int(repeated.sum()), rng)
            chosen[rows] = part
            rows = rows[repeated.any(axis=1)]
        return chosen

    def _raced(self, count: int, rng: np.random.Generator) -> npt.NDArray[np.int64]:
        """The same law as an exponential race (Gumbel top-k), for few experts or strong skew."""
        experts = len(self._popularity)
        chosen = np.empty((count, self._top_k), dtype=np.int64)
        step = max(1, _RACE_ENTRIES // experts)
        with np.errstate(divide="ignore"):
            mean_arrival = 1.0 / self._popularity
        for first in range(0, count, step):
            arrival = rng.exponential(size=(min(step, count - first), experts)) * mean_arrival
            winners = np.argpartition(arrival, self._top_k - 1, axis=1)[:, : self._top_k]
            order = np.argsort(np.take_along_axis(arrival, winners, axis=1), axis=1)
            chosen[first : first + step] = np.take_along_axis(winners, order, axis=1)
        return chosen


def _repeated(chosen: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
    """True where a choice equals an earlier one of its row."""
    order = np.argsort(chosen, axis=1, kind="stable")
    ascending = np.take_along_axis(chosen, order, axis=1)
    repeated = np.zeros(chosen.shape, dtype=bool)
    np.put_along_axis(repeated, order[:, 1:], ascending[:, 1:] == ascending[:, :-1], axis=1)
    return repeated
