"""Attention along edges with scores scale <q_n, k_m> + bias_e.

The backward has two passes, by target for grad q and by source for grad k and grad v. Both compute the weights again
from q, k, v, g, lse and D_n = <g_n, y_n>: the pass by source gathers q_n and g_n in any case, so that no tensor of
the size of the edges is needed. With the gradient of a score ds = p (<g_n, v_m> - D_n),
    grad q_n = scale sum ds k_m,   grad k_m = scale sum ds q_n,   grad v_m = sum p g_n,   grad bias_e = ds.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from structconv.primitives.hashing import Drop
from structconv.primitives.native.dispatch import parts_of_table
from structconv.primitives.native.indices import Csr
from structconv.primitives.triton.combine import add_parts, combine_softmax
from structconv.primitives.triton.common import (
    Rows,
    begin,
    end_softmax,
    floats,
    generator,
    kept,
    launch,
    load_row,
    load_rows,
    raised,
    recalled,
    step,
    strides,
    unit,
    write_sums,
)
from structconv.primitives.triton.dots import dot_rows, drop_arguments
from structconv.primitives.triton.tiles import power, tile

__all__ = ["bilinear_backward", "bilinear_forward", "packed_backward", "packed_forward"]


@triton.jit
def _forward(indptr: tl.tensor, index: tl.tensor, part_row: tl.tensor, part_start: tl.tensor, parts: tl.tensor,
             order: tl.tensor, q: tl.tensor, k: tl.tensor, v: tl.tensor, bias: tl.tensor, seed: tl.tensor, y: tl.tensor,
             lse: tl.tensor, stats: tl.tensor, sums: tl.tensor, blocks: tl.tensor, outputs: tl.tensor, edges: tl.tensor,
             heads: tl.tensor, depth: tl.tensor, channels: tl.tensor, q_row: tl.tensor, q_head: tl.tensor,
             k_row: tl.tensor, k_head: tl.tensor, v_row: tl.tensor, v_head: tl.tensor, scale: tl.tensor, p: tl.tensor,
             factor: tl.tensor, batch_heads: tl.tensor, BIAS: tl.constexpr, DROP: tl.constexpr, LENGTH: tl.constexpr,
             BE: tl.constexpr, HB: tl.constexpr, BD: tl.constexpr, BC: tl.constexpr) -> None:
    program, head, row, start, end, whole = begin(indptr, part_row, part_start, parts, blocks, LENGTH, HB)
    deep, channel = tl.arange(0, BD), tl.arange(0, BC)
    query = load_row(q, row, head, deep, heads, depth, q_row, q_head)
    peak, total = tl.full([HB], -float("inf"), tl.float32), tl.zeros([HB], tl.float32)
    acc = tl.zeros([HB, BC], tl.float32)
    if DROP:
        state, key = generator(seed, head, batch_heads)
    for at in range(start, end, BE):
        slot, listed, m = step(index, at, end, BE)
        keys = load_rows(k, m, listed, head, deep, heads, depth, k_row, k_head)
        rows = load_rows(v, m, listed, head, channel, heads, channels, v_row, v_head)
        score = scale * tl.sum(query[None, :, :] * keys, axis=2)
        if BIAS:
            edge = tl.load(order + slot, mask=listed, other=0).to(tl.int64)
            score += tl.load(bias + head[None, :].to(tl.int64) * edges + edge[:, None],
                             mask=listed[:, None] & (head < heads)[None, :], other=0.0)
        score = tl.where(listed[:, None], score, -float("inf"))
        peak, fade, w = raised(peak, score)
        total = total * fade + tl.sum(w, axis=0)
        if DROP:
            w = w * kept(state, key, m * outputs + row, p, factor)
        acc = acc * fade[:, None] + tl.sum(w[:, :, None] * rows, axis=0)
    end_softmax(program, parts, row, whole, head, channel, heads, channels, peak, total, total, acc, acc, y, y, lse,
                lse, stats, sums, False, False, LENGTH)


@triton.jit
def _backward(indptr: tl.tensor, index: tl.tensor, part_row: tl.tensor, part_start: tl.tensor, parts: tl.tensor,
              order: tl.tensor, own_a: tl.tensor, own_b: tl.tensor, far_a: tl.tensor, far_b: tl.tensor, bias: tl.tensor,
              packed: tl.tensor, seed: tl.tensor, grad_a: tl.tensor, grad_b: tl.tensor, grad_bias: tl.tensor,
              sums_a: tl.tensor, sums_b: tl.tensor, blocks: tl.tensor, outputs: tl.tensor, edges: tl.tensor,
              heads: tl.tensor, depth: tl.tensor, channels: tl.tensor, own_a_row: tl.tensor, own_a_head: tl.tensor,
              own_b_row: tl.tensor, own_b_head: tl.tensor, far_a_row: tl.tensor, far_a_head: tl.tensor,
              far_b_row: tl.tensor, far_b_head: tl.tensor, scale: tl.tensor, p: tl.tensor, factor: tl.tensor,
              batch_heads: tl.tensor, BY_SOURCE: tl.constexpr, BIAS: tl.constexpr, DROP: tl.constexpr,
              LENGTH: tl.constexpr, BE: tl.constexpr, HB: tl.constexpr, BD: tl.constexpr, BC: tl.constexpr) -> None:
    """By target own is (q_n, g_n) and far (k_m, v_m); by source the other way round, and grad v as well."""
    program, head, row, start, end, whole = begin(indptr, part_row, part_start, parts, blocks, LENGTH, HB)
    deep, channel = tl.arange(0, BD), tl.arange(0, BC)
    mine_a = load_row(own_a, row, head, deep, heads, depth, own_a_row, own_a_head)
    mine_b = load_row(own_b, row, head, channel, heads, channels, own_b_row, own_b_head)
    acc_a, acc_b = tl.zeros([HB, BD], tl.float32), tl.zeros([HB, BC], tl.float32)
    if DROP:
        state, key = generator(seed, head, batch_heads)
    for at in range(start, end, BE):
        slot, listed, other = step(index, at, end, BE)
        read = listed[:, None] & (head < heads)[None, :]
        edge = tl.load(order + slot, mask=listed, other=0).to(tl.int64)[:, None] + head[None, :].to(tl.int64) * edges
        n = other if BY_SOURCE else tl.zeros([BE], tl.int64) + row
        place = packed + n[:, None] * 2 * heads + head[None, :]
        table_a = load_rows(far_a, other, listed, head, deep, heads, depth, far_a_row, far_a_head)
        table_b = load_rows(far_b, other, listed, head, channel, heads, channels, far_b_row, far_b_head)
        score = scale * tl.sum(mine_a[None, :, :] * table_a, axis=2) - tl.load(place, mask=read, other=0.0)
        if BIAS:
            score += tl.load(bias + edge, mask=read, other=0.0)
        w = recalled(score, read)
        dropped = w
        if DROP:
            dropped = w * kept(state, key, other * outputs + row if not BY_SOURCE else row * outputs + other, p, factor)
        ds = dropped * tl.sum(mine_b[None, :, :] * table_b, axis=2) - w * tl.load(place + heads, mask=read, other=0.0)
        ds = tl.where(read, ds, 0.0)
        acc_a += tl.sum((scale * ds)[:, :, None] * table_a, axis=0)
        if BY_SOURCE:
            acc_b += tl.sum(dropped[:, :, None] * table_b, axis=0)
        elif BIAS:
            tl.store(grad_bias + edge, ds, mask=read)
    write_sums(program, parts, row, whole, head, deep, heads, depth, acc_a, grad_a, sums_a, LENGTH)
    if BY_SOURCE:
        write_sums(program, parts, row, whole, head, channel, heads, channels, acc_b, grad_b, sums_b, LENGTH)


def bilinear_forward(by_target: Csr, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, scale: float,
                     drop: Drop) -> tuple[Tensor, Tensor]:
    """(y, lse). One pass over the edges by target."""
    rows, q, k, v = Rows(by_target), unit(q), unit(k), unit(v)
    (outputs, heads, depth), channels = q.shape, v.shape[2]
    y = v.new_empty((outputs, heads, channels))
    lse = torch.empty((outputs, heads), dtype=torch.float32, device=q.device)
    size = tile(heads, max(depth, channels), tables=2)
    stats, sums = rows.buffer(3, heads), rows.buffer(1, heads, channels)
    seed, *chosen, dropped = drop_arguments(drop, q.device)
    launch(_forward, rows.programs * size.blocks, size.warps, *rows.arguments, rows.order, q, k, v,
           lse if bias is None else floats(bias), seed, y, lse, stats, sums, size.blocks, outputs, rows.edges, heads,
           depth, channels, *strides(q, k, v), scale, *chosen, BIAS=bias is not None, DROP=dropped,
           LENGTH=rows.parts.length, BE=size.edges, HB=size.heads, BD=power(depth), BC=power(channels))
    combine_softmax(rows, stats, sums, y, y, lse, lse, size._replace(channels=power(channels)), affine=False,
                    train=False)
    return y, lse


def bilinear_backward(by_target: Csr, by_source: Csr, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None,
                      y: Tensor, lse: Tensor, grad: Tensor, scale: float,
                      drop: Drop) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Gradients of q, k, v and bias (float32, or None without one). One pass by target, one by source."""
    q, k, v, grad = unit(q), unit(k), unit(v), unit(grad)
    y, lse = y.contiguous(), lse.contiguous()
    (outputs, heads, depth), channels = q.shape, v.shape[2]
    size = tile(heads, max(depth, channels), tables=2)
    wide_bias = None if bias is None else floats(bias)
    grad_q, grad_k, grad_v = (t.new_empty(t.shape) for t in (q, k, v))
    grad_bias = None if wide_bias is None else torch.empty_like(wide_bias)
    packed = dot_rows(by_target, grad, y, lse)
    seed, *chosen, dropped = drop_arguments(drop, q.device)
    for by_source_now, layout, own, far, grads in (
            (False, by_target, (q, grad), (k, v), (grad_q, grad_q)),
            (True, by_source, (k, v), (q, grad), (grad_k, grad_v))):
        rows = Rows(layout)
        sums_a = rows.buffer(heads, depth)
        sums_b = rows.buffer(heads, channels) if by_source_now else sums_a
        launch(_backward, rows.programs * size.blocks, size.warps, *rows.arguments, rows.order, *own, *far,
               lse if wide_bias is None else wide_bias, packed, seed, *grads,
               lse if grad_bias is None else grad_bias, sums_a, sums_b, size.blocks, outputs, rows.edges, heads,
               depth, channels, *strides(*own, *far), scale, *chosen, BY_SOURCE=by_source_now, BIAS=bias is not None,
               DROP=dropped, LENGTH=rows.parts.length, BE=size.edges, HB=size.heads, BD=power(depth),
               BC=power(channels))
        add_parts(rows, sums_a, grads[0])
        if by_source_now:
            add_parts(rows, sums_b, grads[1])
    return grad_q, grad_k, grad_v, grad_bias


def packed_forward(by_target: Csr, table: Tensor, q: Tensor | None, bias: Tensor | None, heads: int, depth: int,
                   scale: float, drop: Drop) -> tuple[Tensor, Tensor]:
    """(y, lse) of queries, keys and values that are columns of a table."""
    return bilinear_forward(by_target, *parts_of_table(table, q, heads, depth), bias, scale, drop)


def packed_backward(by_target: Csr, by_source: Csr, table: Tensor, q: Tensor | None, bias: Tensor | None, y: Tensor,
                    lse: Tensor, grad: Tensor, heads: int, depth: int, scale: float,
                    drop: Drop) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Gradients of the table, q and bias."""
    *grads, grad_bias = bilinear_backward(by_target, by_source, *parts_of_table(table, q, heads, depth), bias, y, lse,
                                          grad, scale, drop)
    joined = torch.cat([t.flatten(1) for t in (grads if q is None else grads[1:])], 1)
    return joined, None if q is None else grads[0], grad_bias
