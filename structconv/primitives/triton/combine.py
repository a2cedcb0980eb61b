"""The second pass over long rows: combine the results of their parts, in the order of the parts."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from structconv.primitives.triton.common import Rows, launch, raised, write_softmax
from structconv.primitives.triton.splits import Tile, power

__all__ = ["add_parts", "combine_softmax"]

_COLUMNS = 256
_TILE = 16


@triton.jit
def _add(long: tl.tensor, ends: tl.tensor, sums: tl.tensor, z: tl.tensor, y: tl.tensor, blocks: tl.tensor,
         outer: tl.tensor, inner: tl.tensor, stride_outer: tl.tensor, alpha: tl.tensor, beta: tl.tensor,
         ADD: tl.constexpr, BP: tl.constexpr, BW: tl.constexpr) -> None:
    program, block = tl.program_id(0) // blocks, tl.program_id(0) % blocks
    row = tl.load(long + program).to(tl.int64)
    first, last = tl.load(ends + program), tl.load(ends + program + 1)
    column = block.to(tl.int64) * BW + tl.arange(0, BW)
    inside = column < outer * inner
    acc = tl.zeros([BW], tl.float32)
    for at in range(first, last, BP):
        part = (at + tl.arange(0, BP)).to(tl.int64)
        acc += tl.sum(tl.load(sums + part[:, None] * (outer * inner) + column[None, :],
                              mask=(part < last)[:, None] & inside[None, :], other=0.0), axis=0)
    place = column // inner * stride_outer + row * inner + column % inner
    acc = alpha * acc
    if ADD:
        acc += beta * tl.load(z + place, mask=inside, other=0.0).to(tl.float32)
    tl.store(y + place, acc, mask=inside)


@triton.jit
def _softmax(long: tl.tensor, ends: tl.tensor, stats: tl.tensor, sums: tl.tensor, y: tl.tensor, y2: tl.tensor,
             peaks: tl.tensor, mass: tl.tensor, blocks: tl.tensor, heads: tl.tensor, channels: tl.tensor,
             AFFINE: tl.constexpr, TRAIN: tl.constexpr, BE: tl.constexpr, HB: tl.constexpr, BC: tl.constexpr) -> None:
    program, block = tl.program_id(0) // blocks, tl.program_id(0) % blocks
    row = tl.load(long + program).to(tl.int64)
    first, last = tl.load(ends + program), tl.load(ends + program + 1)
    head, channel = block * HB + tl.arange(0, HB), tl.arange(0, BC)
    peak, total = tl.full([HB], -float("inf"), tl.float32), tl.zeros([HB], tl.float32)
    share = tl.zeros([HB], tl.float32)
    acc, acc2 = tl.zeros([HB, BC], tl.float32), tl.zeros([HB, BC], tl.float32)
    for at in range(first, last, BE):
        part = (at + tl.arange(0, BE)).to(tl.int64)
        listed = part < last
        read = listed[:, None] & (head < heads)[None, :]
        place = part[:, None] * 3 * heads + head[None, :]
        peak, scale, w = raised(peak, tl.load(stats + place, mask=read, other=-float("inf")))
        total = total * scale + tl.sum(w * tl.load(stats + place + heads, mask=read, other=0.0), axis=0)
        if AFFINE:
            share = share * scale + tl.sum(w * tl.load(stats + place + 2 * heads, mask=read, other=0.0), axis=0)
        inside = listed[:, None, None] & (head < heads)[None, :, None] & (channel < channels)[None, None, :]
        table = sums + part[:, None, None] * ((1 + TRAIN) * heads * channels) + head[None, :, None] * channels
        acc = acc * scale[:, None] + tl.sum(
            w[:, :, None] * tl.load(table + channel[None, None, :], mask=inside, other=0.0), axis=0)
        if TRAIN:
            acc2 = acc2 * scale[:, None] + tl.sum(w[:, :, None] * tl.load(
                table + heads * channels + channel[None, None, :], mask=inside, other=0.0), axis=0)
    write_softmax(row, head, channel, heads, channels, peak, total, share, acc, acc2, y, y2, peaks, mass, AFFINE, TRAIN)


def add_parts(rows: Rows, sums: Tensor, y: Tensor, *, outer: int = 1, stride_outer: int = 0, z: Tensor | None = None,
              alpha: float = 1.0, beta: float = 0.0) -> None:
    """y[o, n] = alpha sum of sums[i, o] over the parts i of a long row n, + beta z[o, n].

    Args:
        rows: the layout with its parts.
        sums: (parts, outer, ...) float32.
        y: contiguous (outer, rows, ...), or (rows, ...) where outer is 1; z likewise.
    """
    if rows.parts.total and sums.numel():
        width = sums.shape[1:].numel()
        columns = min(_COLUMNS, power(width))
        blocks = -(-width // columns)
        launch(_add, rows.parts.long.shape[0] * blocks, 1, rows.parts.long, rows.parts.ends, sums,
               y if z is None else z, y, blocks, outer, width // outer, stride_outer, alpha, beta, ADD=z is not None,
               BP=_TILE, BW=columns)


def combine_softmax(rows: Rows, stats: Tensor, sums: Tensor, y: Tensor, y2: Tensor, peaks: Tensor, mass: Tensor,
                    size: Tile, *, affine: bool, train: bool) -> None:
    """The end of the long rows, from the (peak, total, share) of their parts (parts, 3, K) and their sums."""
    launch(_softmax, rows.parts.long.shape[0] * size.blocks, size.warps, rows.parts.long, rows.parts.ends, stats, sums,
           y, y2, peaks, mass, size.blocks, y.shape[1], y.shape[2], AFFINE=affine, TRAIN=train, BE=size.edges,
           HB=size.heads, BC=size.channels)
