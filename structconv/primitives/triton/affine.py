"""Attention along edges with scores leaky_relu(source_m + target_n): the mathematics of native/src/affine.cpp.

With c the slope of the activation at an edge, the forward keeps y2_n = sum c p x_m and mass_n = sum c p; then, with
D_n = <g_n, y_n>, grad target_n = <g_n, y2_n> - D_n mass_n needs no edges, and one pass by source gives
grad x_m = sum p g_n and grad source_m = <sum c p g_n, x_m> - sum c p D_n.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from structconv.primitives.hashing import Drop
from structconv.primitives.native.dispatch import floats, unit
from structconv.primitives.native.indices import Csr
from structconv.primitives.triton.combine import add_parts, combine_softmax
from structconv.primitives.triton.common import (
    Rows,
    begin,
    dot_rows,
    drop_arguments,
    end_softmax,
    generator,
    kept,
    launch,
    load_row,
    load_rows,
    raised,
    recalled,
    step,
    strides,
    write_sums,
)
from structconv.primitives.triton.splits import tile

__all__ = ["affine_backward", "affine_forward"]


@triton.jit
def _forward(indptr: tl.tensor, index: tl.tensor, part_row: tl.tensor, part_start: tl.tensor, parts: tl.tensor,
             source: tl.tensor, target: tl.tensor, x: tl.tensor, seed: tl.tensor, y: tl.tensor, y2: tl.tensor,
             peaks: tl.tensor, mass: tl.tensor, stats: tl.tensor, sums: tl.tensor, blocks: tl.tensor,
             num_rows: tl.tensor, heads: tl.tensor, channels: tl.tensor, x_row: tl.tensor, x_head: tl.tensor,
             slope: tl.tensor, p: tl.tensor, factor: tl.tensor, batch_heads: tl.tensor, TRAIN: tl.constexpr,
             DROP: tl.constexpr, LENGTH: tl.constexpr, BE: tl.constexpr, HB: tl.constexpr, BC: tl.constexpr) -> None:
    program, head, row, start, end, whole = begin(indptr, part_row, part_start, parts, blocks, LENGTH, HB)
    channel = tl.arange(0, BC)
    mine = tl.load(target + row * heads + head, mask=head < heads, other=0.0)
    peak, total = tl.full([HB], -float("inf"), tl.float32), tl.zeros([HB], tl.float32)
    share = tl.zeros([HB], tl.float32)
    acc, acc2 = tl.zeros([HB, BC], tl.float32), tl.zeros([HB, BC], tl.float32)
    if DROP:
        state, key = generator(seed, head, batch_heads)
    for at in range(start, end, BE):
        _, listed, m = step(index, at, end, BE)
        rows = load_rows(x, m, listed, head, channel, heads, channels, x_row, x_head)
        raw = mine[None, :] + tl.load(source + m[:, None] * heads + head[None, :],
                                      mask=listed[:, None] & (head < heads)[None, :], other=0.0)
        c = tl.where(raw > 0, 1.0, slope)
        score = tl.where(listed[:, None], tl.where(raw > 0, raw, raw * slope), -float("inf"))
        peak, scale, w = raised(peak, score)
        total = total * scale + tl.sum(w, axis=0)
        share = share * scale + tl.sum(c * w, axis=0)
        if DROP:
            w = w * kept(state, key, m * num_rows + row, p, factor)
        acc = acc * scale[:, None] + tl.sum(w[:, :, None] * rows, axis=0)
        if TRAIN:
            acc2 = acc2 * scale[:, None] + tl.sum((c * w)[:, :, None] * rows, axis=0)
    end_softmax(program, parts, row, whole, head, channel, heads, channels, peak, total, share, acc, acc2, y, y2, peaks,
                mass, stats, sums, True, TRAIN, LENGTH)


@triton.jit
def _backward(indptr: tl.tensor, index: tl.tensor, part_row: tl.tensor, part_start: tl.tensor, parts: tl.tensor,
              source: tl.tensor, packed: tl.tensor, x: tl.tensor, grad: tl.tensor, seed: tl.tensor,
              grad_source: tl.tensor, grad_x: tl.tensor, source_sums: tl.tensor, x_sums: tl.tensor, blocks: tl.tensor,
              outputs: tl.tensor, heads: tl.tensor, channels: tl.tensor, x_row: tl.tensor, x_head: tl.tensor,
              g_row: tl.tensor, g_head: tl.tensor, slope: tl.tensor, p: tl.tensor, factor: tl.tensor,
              batch_heads: tl.tensor, DROP: tl.constexpr, LENGTH: tl.constexpr, BE: tl.constexpr, HB: tl.constexpr,
              BC: tl.constexpr) -> None:
    """One row by source; `packed` holds target, both peaks and D of every output, (N, 4, K)."""
    program, head, row, start, end, whole = begin(indptr, part_row, part_start, parts, blocks, LENGTH, HB)
    channel = tl.arange(0, BC)
    mine = tl.load(source + row * heads + head, mask=head < heads, other=0.0)
    shift = tl.zeros([HB], tl.float32)
    acc, acc2 = tl.zeros([HB, BC], tl.float32), tl.zeros([HB, BC], tl.float32)
    if DROP:
        state, key = generator(seed, head, batch_heads)
    for at in range(start, end, BE):
        _, listed, n = step(index, at, end, BE)
        rows = load_rows(grad, n, listed, head, channel, heads, channels, g_row, g_head)
        read = listed[:, None] & (head < heads)[None, :]
        place = packed + n[:, None] * 4 * heads + head[None, :]
        raw = mine[None, :] + tl.load(place, mask=read, other=0.0)
        c = tl.where(raw > 0, 1.0, slope)
        score = tl.where(raw > 0, raw, raw * slope) - tl.load(place + heads, mask=read, other=0.0)
        w = recalled(score - tl.load(place + 2 * heads, mask=read, other=0.0), read)
        shift += tl.sum(c * w * tl.load(place + 3 * heads, mask=read, other=0.0), axis=0)
        if DROP:
            w = w * kept(state, key, row * outputs + n, p, factor)
        acc += tl.sum(w[:, :, None] * rows, axis=0)
        acc2 += tl.sum((c * w)[:, :, None] * rows, axis=0)
    own = load_row(x, row, head, channel, heads, channels, x_row, x_head)
    result = tl.where(start < end, tl.sum(acc2 * own, axis=1) - shift, 0.0)
    write_sums(program, parts, row, whole, head, channel, heads, channels, acc, grad_x, x_sums, LENGTH)
    write_sums(program, parts, row, whole, head, tl.arange(0, 1), heads, 1, result[:, None], grad_source, source_sums,
               LENGTH)


def affine_forward(by_target: Csr, source: Tensor, target: Tensor, x: Tensor, slope: float, drop: Drop,
                   train: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(y, y2, peaks, mass); y2 is empty unless `train`. One pass over the edges by target."""
    rows, x, source, target = Rows(by_target), unit(x), floats(source), floats(target)
    heads, channels = x.shape[1:]
    y = x.new_empty((rows.count, heads, channels))
    y2 = x.new_empty((rows.count if train else 0, heads, channels))
    peaks, mass = target.new_empty((rows.count, 2, heads)), torch.empty_like(target)
    size = tile(heads, channels)
    stats, sums = rows.buffer(3, heads), rows.buffer(1 + train, heads, channels)
    seed, *chosen, dropped = drop_arguments(drop, x.device)
    launch(_forward, rows.programs * size.blocks, size.warps, *rows.arguments, source, target, x, seed, y, y2, peaks,
           mass, stats, sums, size.blocks, rows.count, heads, channels, *strides(x), slope, *chosen, TRAIN=train,
           DROP=dropped, LENGTH=rows.parts.length, BE=size.edges, HB=size.heads, BC=size.channels)
    combine_softmax(rows, stats, sums, y, y2, peaks, mass, size, affine=True, train=train)
    return y, y2, peaks, mass


def affine_backward(by_target: Csr, by_source: Csr, source: Tensor, target: Tensor, x: Tensor, y: Tensor,
                    y2: Tensor, peaks: Tensor, mass: Tensor, grad: Tensor, slope: float,
                    drop: Drop) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of source, target (float32) and x. One pass by source."""
    x, grad, source, target = unit(x), unit(grad), floats(source), floats(target)
    y, y2, peaks, mass = (t.contiguous() for t in (y, y2, peaks, mass))
    rows, outputs, (heads, channels) = Rows(by_source), target.shape[0], x.shape[1:]
    grad_x = x.new_empty(x.shape)
    grad_source, grad_target = torch.empty_like(source), torch.empty_like(target)
    packed = dot_rows(by_target, grad, y, peaks, affine=(y2, target, mass, grad_target))
    size = tile(heads, channels)
    source_sums, x_sums = rows.buffer(heads), rows.buffer(heads, channels)
    seed, *chosen, dropped = drop_arguments(drop, x.device)
    launch(_backward, rows.programs * size.blocks, size.warps, *rows.arguments, source, packed, x, grad, seed,
           grad_source, grad_x, source_sums, x_sums, size.blocks, outputs, heads, channels, *strides(x, grad), slope,
           *chosen, DROP=dropped, LENGTH=rows.parts.length, BE=size.edges, HB=size.heads, BC=size.channels)
    add_parts(rows, source_sums, grad_source)
    add_parts(rows, x_sums, grad_x)
    return grad_source, grad_target, grad_x
