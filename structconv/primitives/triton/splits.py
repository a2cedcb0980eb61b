"""Long rows of a layout, cut into parts of equal length: the balance of load on graphs with hubs.

A program takes one row, or one part of a long row. Parts leave float32 sums behind, which a second pass combines in
the order of the parts. The cut depends on the layout alone; it is made once for a layout and remembered.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from structconv.derived import derived

__all__ = ["LONGEST", "Parts", "parts"]

LONGEST = 1024  # edges of one program; a program of a smaller row ends before, so only hubs are cut


class Parts(NamedTuple):
    """The parts of long rows, int32: part i is the slots from start[i] of row[i]; the long row long[j] has
    the parts from ends[j] to ends[j + 1].

    `length` is the most slots of a part, 0 where no row is long.
    """

    length: int
    row: Tensor
    start: Tensor
    long: Tensor
    ends: Tensor

    @property
    def total(self) -> int:
        """Parts of all long rows."""
        return self.row.shape[0]


def parts(indptr: Tensor) -> Parts:
    """The parts of the rows with more than `LONGEST` slots.

    Args:
        indptr: (rows + 1,) integers.

    Cost: O(rows) and one wait for the device at the first call for a layout; O(1) after it.
    """
    return derived(indptr, ("parts", LONGEST), lambda: _cut(indptr, LONGEST))


def _cut(indptr: Tensor, length: int) -> Parts:
    degrees = indptr.diff()
    if degrees.numel() == 0 or int(degrees.max()) <= length:
        nothing = torch.zeros(1, dtype=torch.int32, device=indptr.device)
        return Parts(0, nothing[:0], nothing[:0], nothing[:0], nothing)
    long = torch.nonzero(degrees > length).squeeze(1)
    counts = (degrees[long] + length - 1).div(length, rounding_mode="floor")
    ends = torch.nn.functional.pad(counts.cumsum(0), (1, 0))
    which = torch.repeat_interleave(counts)
    row = long[which]
    start = indptr[row] + (torch.arange(row.shape[0], device=indptr.device) - ends[which]) * length
    return Parts(length, *(t.to(torch.int32) for t in (row, start, long, ends)))
