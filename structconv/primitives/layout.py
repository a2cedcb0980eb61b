"""`Csr`: pairs (row, column) grouped by row, and the stable sort that groups them."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Csr(NamedTuple):
    """Pairs grouped by row: row r owns the slots indptr[r] to indptr[r + 1].

    `indptr` (rows + 1,) and `indices` (E,) have the dtype of the pairs they were made from, int32 or int64, as
    torch's CSR tensors want it; `order` (E,), always int64, says where in the input each slot came from:
    `values[..., order]` brings edge values into slot order. Pairs of one row keep their input order, and
    duplicates are kept.
    """

    indptr: Tensor
    indices: Tensor
    order: Tensor


def compress(rows: Tensor, cols: Tensor, num_rows: int) -> Csr:
    """Group the pairs (rows[e], cols[e]) by row.

    Args:
        rows, cols: (E,) integers of one dtype, 0 <= rows < num_rows.
        num_rows: how many rows there are, empty ones included.

    Stable: O(E log E) time and O(E) memory. Shapes depend on E and `num_rows` alone, never on values, so that
    the sort can be traced by `torch.compile` and `torch.export`.
    """
    order = torch.argsort(rows, stable=True)
    starts = torch.arange(num_rows + 1, dtype=rows.dtype, device=rows.device)
    indptr = torch.searchsorted(rows[order], starts, out_int32=rows.dtype == torch.int32)
    return Csr(indptr, cols[order], order)
