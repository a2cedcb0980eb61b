"""Sparse products: y = alpha A x + beta z over CSR rows with several rows of edge values, and sampled products."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from structconv.primitives.native.indices import Csr
from structconv.primitives.triton.combine import add_parts
from structconv.primitives.triton.common import Rows, launch, span, step
from structconv.primitives.triton.splits import power, tile

__all__ = ["sddmm", "spmm"]

_WIDEST = 256  # channels of one program


@triton.jit
def _spmm(indptr: tl.tensor, index: tl.tensor, part_row: tl.tensor, part_start: tl.tensor, parts: tl.tensor,
          order: tl.tensor, values: tl.tensor, x: tl.tensor, z: tl.tensor, y: tl.tensor, sums: tl.tensor,
          value_blocks: tl.tensor, blocks: tl.tensor, num_rows: tl.tensor, x_rows: tl.tensor, channels: tl.tensor,
          outputs: tl.tensor, stride: tl.tensor, repeats_values: tl.tensor, repeats_x: tl.tensor, group: tl.tensor,
          alpha: tl.tensor, beta: tl.tensor, VALUES: tl.constexpr, ADD: tl.constexpr, LENGTH: tl.constexpr,
          BE: tl.constexpr, HB: tl.constexpr, BC: tl.constexpr) -> None:
    """Rows v of values, `group` of them into one y; HB of them at once where they share x."""
    program, block = tl.program_id(0) // blocks, tl.program_id(0) % blocks
    row, start, end, whole = span(program, indptr, part_row, part_start, parts, LENGTH)
    head = tl.arange(0, HB)
    first = (block % value_blocks).to(tl.int64) * HB
    channel = block // value_blocks * BC + tl.arange(0, BC)
    inside, real = channel < channels, first + head < outputs
    acc = tl.zeros([HB, BC], tl.float32)
    for v in range(first * group, first * group + group):
        table = x + v // repeats_x * x_rows * channels
        for at in range(start, end, BE):
            slot, listed, m = step(index, at, end, BE)
            rows = tl.load(table + m[:, None] * channels + channel[None, :], mask=listed[:, None] & inside[None, :],
                           other=0.0).to(tl.float32)
            if VALUES:
                edge = tl.load(order + slot, mask=listed, other=0).to(tl.int64)
                w = tl.load(values + (v // repeats_values + head)[None, :] * stride + edge[:, None],
                            mask=listed[:, None] & real[None, :], other=0.0).to(tl.float32)
                acc += tl.sum(w[:, :, None] * rows[:, None, :], axis=0)
            else:
                acc += tl.sum(rows, axis=0)[None, :]
    stored = real[:, None] & inside[None, :]
    if whole:
        place = ((first + head) * num_rows + row)[:, None] * channels + channel[None, :]
        acc = alpha * acc
        if ADD:
            acc += beta * tl.load(z + place, mask=stored, other=0.0).to(tl.float32)
        tl.store(y + place, acc, mask=stored)
    elif LENGTH > 0:
        if program < parts:
            place = (program.to(tl.int64) * outputs + first + head)[:, None] * channels + channel[None, :]
            tl.store(sums + place, acc, mask=stored)


@triton.jit
def _sddmm(indptr: tl.tensor, index: tl.tensor, part_row: tl.tensor, part_start: tl.tensor, parts: tl.tensor,
           order: tl.tensor, q: tl.tensor, k: tl.tensor, s: tl.tensor, rows: tl.tensor, q_rows: tl.tensor,
           k_rows: tl.tensor, depth: tl.tensor, edges: tl.tensor, repeats_q: tl.tensor, repeats_k: tl.tensor,
           LENGTH: tl.constexpr, BE: tl.constexpr, BD: tl.constexpr) -> None:
    program, v = tl.program_id(0) // rows, (tl.program_id(0) % rows).to(tl.int64)
    row, start, end, _ = span(program, indptr, part_row, part_start, parts, LENGTH)
    query = q + (v // repeats_q * q_rows + row) * depth
    keys = k + v // repeats_k * k_rows * depth
    for at in range(start, end, BE):
        slot, listed, m = step(index, at, end, BE)
        dots = tl.zeros([BE], tl.float32)
        for first in range(0, depth, BD):
            d = first + tl.arange(0, BD)
            inside = d < depth
            left = tl.load(query + d, mask=inside, other=0.0).to(tl.float32)
            right = tl.load(keys + m[:, None] * depth + d[None, :], mask=listed[:, None] & inside[None, :],
                            other=0.0).to(tl.float32)
            dots += tl.sum(left[None, :] * right, axis=1)
        edge = tl.load(order + slot, mask=listed, other=0).to(tl.int64)
        tl.store(s + v * edges + edge, dots, mask=listed)


def spmm(layout: Csr, values: Tensor | None, x: Tensor, z: Tensor | None, rows: int, count: int, alpha: float,
         beta: float) -> Tensor:
    """y[v rows // V] += alpha A x[v X // V] + beta z for V = `count` and A of values[v W // V].

    values (W, E), (E,) for W = 1, or None for ones; x (X, M, C); z and y (Y, N, C) for Y = `rows`. Rows of values that
    share x and go to outputs of their own are taken several at a time: x is gathered once for them. Cost: 2 V E C
    flops; the gathers are V E C numbers, or E C for each group of values that shares x.
    """
    layout_rows, x = Rows(layout), x.contiguous()
    if values is not None:
        values = (values if values.dim() == 2 else values.unsqueeze(0)).to(x.dtype).contiguous()
    z = None if z is None else z.contiguous()
    outputs, inputs, channels = layout_rows.count, x.shape[1], x.shape[2]
    y = x.new_empty((rows, outputs, channels))
    tables = 1 if values is None else values.shape[0]
    several, repeats = tables > 1, count // tables
    shared = several and x.shape[0] == 1 and rows == count and repeats == 1
    size = tile(rows if shared else 1, channels, widest=_WIDEST)
    blocks = size.blocks if shared else rows
    stride = layout_rows.edges if several else 0
    sums = layout_rows.buffer(rows, channels)
    blocks_all = blocks * -(-channels // size.channels)
    launch(_spmm, layout_rows.programs * blocks_all, size.warps, *layout_rows.arguments, layout_rows.order,
           x if values is None else values, x, x if z is None else z, y, sums, blocks, blocks_all, outputs, inputs,
           channels, rows, stride, repeats, count // x.shape[0], count // rows, alpha, beta, VALUES=values is not None,
           ADD=z is not None, LENGTH=layout_rows.parts.length, BE=size.edges, HB=size.heads, BC=size.channels)
    add_parts(layout_rows, sums, y, outer=rows, stride_outer=outputs * channels, z=z, alpha=alpha, beta=beta)
    return y


def sddmm(layout: Csr, q: Tensor, k: Tensor, rows: int) -> Tensor:
    """s[v, e] = <q[v Y // V][n], k[v X // V][m]> for V = `rows`, in the order of the edges.

    q (Y, N, D), k (X, M, D), of which Y and X divide V. Cost: 2 V E D flops.
    """
    layout_rows, q, k = Rows(layout), q.contiguous(), k.contiguous()
    depth = q.shape[2]
    size = tile(1, depth, widest=_WIDEST)
    s = q.new_empty((rows, layout_rows.edges))
    launch(_sddmm, layout_rows.programs * rows, size.warps, *layout_rows.arguments, layout_rows.order, q, k, s, rows,
           q.shape[1], k.shape[1], depth, layout_rows.edges, rows // q.shape[0], rows // k.shape[0],
           LENGTH=layout_rows.parts.length, BE=size.edges, BD=min(power(depth), _WIDEST))
    return s
