"""How the work of a kernel is split among programs: tiles, and parts of long rows.

A program takes one row, or one part of a long row, and a tile of edges x heads x channels at a time. Rows are cut into
parts of equal length to balance the load on graphs with hubs. Parts leave float32 sums behind, which a second pass
combines in the order of the parts. The cut depends on the layout alone; it is made once for a layout and remembered.

A warp reads a row of up to 128 numbers in one sweep of its lanes, with several edges in flight; sums over edges then
stay inside a lane. A row costs four loads that wait for each other (pointer, index, score, entry), so many small
programs are wanted on a processor at once, hence few registers in each. By the compiler's count every kernel fits the
registers of compute capability 8.0 and 9.0; the sizes have not been measured on a GPU.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from structconv.derived import derived

__all__ = ["LONGEST", "Parts", "Tile", "parts", "power", "tile"]

LONGEST = 1024  # edges of one program; a program of a smaller row ends before, so only hubs are cut
_WARP_ROW = 128  # numbers of a row that one warp holds
_WARP_TILE = 1024  # numbers of a tile that one warp holds: 32 in a lane
_MOST_EDGES = 32


class Tile(NamedTuple):
    """Powers of two: `edges` x `heads` x `channels` numbers by `warps` warps; `blocks` programs cover all heads."""

    edges: int
    heads: int
    channels: int
    warps: int
    blocks: int


def tile(heads: int, channels: int, tables: int = 1, widest: int = 1024) -> Tile:
    """The tile for rows of `heads` x `channels` numbers, gathered from `tables` tables at once.

    Channels beyond `widest` are left to other programs.
    """
    wide = min(power(channels), widest)
    group = min(power(heads), max(1, _WARP_ROW // wide))
    warps = max(1, group * wide // _WARP_ROW)
    edges = _WARP_TILE * warps // (group * wide * tables)
    return Tile(max(2, min(_MOST_EDGES, edges)), group, wide, warps, -(-heads // group))


def power(size: int) -> int:
    """The smallest power of two that is at least `size`."""
    return 1 << max(0, size - 1).bit_length()


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
