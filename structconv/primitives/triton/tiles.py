"""Choose the tile of a program: edges x heads x channels, and the number of warps.

A warp reads a row of up to 128 numbers in one sweep of its lanes, with several edges in flight; sums over edges then
stay inside a lane. A row costs four loads that wait for each other (pointer, index, score, entry), so many small
programs are wanted on a processor at once, hence few registers in each. By the compiler's count every kernel fits the
registers of compute capability 8.0 and 9.0; the sizes have not been measured on a GPU.
"""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["Tile", "power", "tile"]

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
