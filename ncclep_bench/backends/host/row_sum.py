"""Weighted sums of rows, accumulated in float32: out[i] = Σ weight · rows[index]."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from scipy.sparse import csr_array

CHUNK_BYTES = 4 << 20
"""Output rows are produced in pieces of about this size, which stay in a core's cache while terms are added."""


@dataclass(frozen=True)
class RowSum:
    """A sparse matrix in compressed rows: the terms of output row i are `starts[i]` to `starts[i + 1]`.

    `index`: row of the source per term; `weight`: float32 per term.
    """

    starts: npt.NDArray[np.int64]
    index: npt.NDArray[np.int64]
    weight: npt.NDArray[np.float32]

    @staticmethod
    def of(
        out_row: npt.NDArray[np.int64], index: npt.NDArray[np.int64], weight: npt.NDArray[np.float32], rows: int
    ) -> RowSum:
        """From one (output row, source row, weight) per term, in any order; `rows` output rows."""
        order = np.argsort(out_row, kind="stable")
        starts = np.concatenate([[0], np.cumsum(np.bincount(out_row, minlength=rows))])
        return RowSum(starts, index[order], weight[order])

    def run(self, source: npt.NDArray[Any], out: npt.NDArray[Any]) -> None:
        """Write the sums into `out` [rows, width]; `source` [any, width] has the same dtype.

        Rows of `source` that no term names are never touched, so it may span memory that is not mapped.
        """
        width = out.shape[1]
        step = max(1, CHUNK_BYTES // max(1, width * 4))
        for first in range(0, len(out), step):
            starts = self.starts[first : first + step + 1]
            terms = slice(starts[0], starts[-1])
            if out.dtype == np.float32:
                columns, operand = self.index[terms], source
            else:
                # Sixteen-bit rows are widened first: sparse products exist for float32 and wider only.
                operand = np.take(source, self.index[terms], axis=0).astype(np.float32)
                columns = np.arange(len(operand))
            matrix = csr_array((self.weight[terms], columns, starts - starts[0]), shape=(len(starts) - 1, len(operand)))
            out[first : first + step] = matrix @ operand
