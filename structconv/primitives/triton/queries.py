"""Attention along edges with scores of queries and keys: scale <q_n, k_m> + bias_e, or <v, act(q_n + k_m)>.

The activation is a leaky ReLU, or the logistic r(t) = 1 / (1 + exp(-rate t)), to which tanh and sigmoid come down; its
mathematics is that of native/src/edge_attention.cpp. The backward has two passes, by target for grad q and by source
for grad k and grad x. Both compute the weights again from q, k, x, g, peaks and D_n = <g_n, y_n>: the pass by source
gathers q_n and g_n in any case, so that no tensor of the size of the edges is needed. With the gradient of a score
ds = p (<g_n, x_m> - D_n), grad x_m = sum p g_n, and for products
    grad q_n = scale sum ds k_m,   grad k_m = scale sum ds q_n,   grad bias_e = ds,
for activations
    grad q_n = sum ds v act'(q_n + k_m),   grad k_m likewise,   grad v = sum ds act(q_n + k_m).
The last is a sum over all edges: every program of the pass by target leaves its part behind, (programs, K, D) numbers,
which torch adds up. Where k is x (GATv2), the passes by target gather each row once.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from structconv.primitives.hashing import Drop
from structconv.primitives.native.dispatch import floats, parts_of_table, unit
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
from structconv.primitives.triton.splits import power, tile

__all__ = ["additive_backward", "additive_forward", "bilinear_backward", "bilinear_forward", "packed_backward",
           "packed_forward"]


@triton.jit
def _scores(mine: tl.tensor, table: tl.tensor, weight: tl.tensor, parameter: tl.tensor, ADDITIVE: tl.constexpr,
            LOGISTIC: tl.constexpr) -> Any:
    """(scores, act', act) of entries (edges, heads, depth) with those of the row; `parameter` is the scale of products,
    the rate of the logistic, or the slope of the leaky ReLU below zero. Products have `table` for act' and act."""
    if ADDITIVE:
        raw = mine[None, :, :] + table
        if LOGISTIC:
            value = 1.0 / (1.0 + tl.exp(-parameter * raw))
            rate = parameter * value * (1.0 - value)
        else:
            rate = tl.where(raw > 0, 1.0, parameter)
            value = raw * rate
        score = tl.sum(weight[None, :, :] * value, axis=2)
    else:
        score, rate, value = parameter * tl.sum(mine[None, :, :] * table, axis=2), table, table
    return score, rate, value


@triton.jit
def _forward(indptr: tl.tensor, index: tl.tensor, part_row: tl.tensor, part_start: tl.tensor, parts: tl.tensor,
             order: tl.tensor, q: tl.tensor, k: tl.tensor, x: tl.tensor, extra: tl.tensor, seed: tl.tensor,
             y: tl.tensor, peaks: tl.tensor, stats: tl.tensor, sums: tl.tensor, blocks: tl.tensor, outputs: tl.tensor,
             edges: tl.tensor, heads: tl.tensor, depth: tl.tensor, channels: tl.tensor, q_row: tl.tensor,
             q_head: tl.tensor, k_row: tl.tensor, k_head: tl.tensor, x_row: tl.tensor, x_head: tl.tensor,
             parameter: tl.tensor, p: tl.tensor, factor: tl.tensor, batch_heads: tl.tensor, ADDITIVE: tl.constexpr,
             LOGISTIC: tl.constexpr, SHARED: tl.constexpr, BIAS: tl.constexpr, DROP: tl.constexpr, LENGTH: tl.constexpr,
             BE: tl.constexpr, HB: tl.constexpr, BD: tl.constexpr, BC: tl.constexpr) -> None:
    """`extra` is the vector (1, heads, depth) of additive scores, or the bias (heads, edges)."""
    program, head, row, start, end, whole = begin(indptr, part_row, part_start, parts, blocks, LENGTH, HB)
    deep, channel = tl.arange(0, BD), tl.arange(0, BC)
    query = load_row(q, row, head, deep, heads, depth, q_row, q_head)
    weight = load_row(extra, 0, head, deep, heads, depth, 0, depth) if ADDITIVE else query
    peak, total = tl.full([HB], -float("inf"), tl.float32), tl.zeros([HB], tl.float32)
    acc = tl.zeros([HB, BC], tl.float32)
    if DROP:
        state, key = generator(seed, head, batch_heads)
    for at in range(start, end, BE):
        slot, listed, m = step(index, at, end, BE)
        keys = load_rows(k, m, listed, head, deep, heads, depth, k_row, k_head)
        rows = keys if SHARED else load_rows(x, m, listed, head, channel, heads, channels, x_row, x_head)
        score, _, _ = _scores(query, keys, weight, parameter, ADDITIVE, LOGISTIC)
        if BIAS:
            edge = tl.load(order + slot, mask=listed, other=0).to(tl.int64)
            score += tl.load(extra + head[None, :].to(tl.int64) * edges + edge[:, None],
                             mask=listed[:, None] & (head < heads)[None, :], other=0.0)
        score = tl.where(listed[:, None], score, -float("inf"))
        peak, fade, w = raised(peak, score)
        total = total * fade + tl.sum(w, axis=0)
        if DROP:
            w = w * kept(state, key, m * outputs + row, p, factor)
        acc = acc * fade[:, None] + tl.sum(w[:, :, None] * rows, axis=0)
    end_softmax(program, parts, row, whole, head, channel, heads, channels, peak, total, total, acc, acc, y, y, peaks,
                peaks, stats, sums, False, False, LENGTH)


@triton.jit
def _backward(indptr: tl.tensor, index: tl.tensor, part_row: tl.tensor, part_start: tl.tensor, parts: tl.tensor,
              order: tl.tensor, own_a: tl.tensor, own_b: tl.tensor, far_a: tl.tensor, far_b: tl.tensor,
              extra: tl.tensor, packed: tl.tensor, seed: tl.tensor, grad_a: tl.tensor, grad_b: tl.tensor,
              grad_extra: tl.tensor, sums_a: tl.tensor, sums_b: tl.tensor, blocks: tl.tensor, outputs: tl.tensor,
              edges: tl.tensor, heads: tl.tensor, depth: tl.tensor, channels: tl.tensor, own_a_row: tl.tensor,
              own_a_head: tl.tensor, own_b_row: tl.tensor, own_b_head: tl.tensor, far_a_row: tl.tensor,
              far_a_head: tl.tensor, far_b_row: tl.tensor, far_b_head: tl.tensor, parameter: tl.tensor, p: tl.tensor,
              factor: tl.tensor, batch_heads: tl.tensor, BY_SOURCE: tl.constexpr, ADDITIVE: tl.constexpr,
              LOGISTIC: tl.constexpr, SHARED: tl.constexpr, BIAS: tl.constexpr, DROP: tl.constexpr,
              LENGTH: tl.constexpr, BE: tl.constexpr, HB: tl.constexpr, BD: tl.constexpr, BC: tl.constexpr) -> None:
    """By target own is (q_n, g_n) and far (k_m, x_m); by source the other way round. a is q or k, b is g or x."""
    program, head, row, start, end, whole = begin(indptr, part_row, part_start, parts, blocks, LENGTH, HB)
    deep, channel = tl.arange(0, BD), tl.arange(0, BC)
    mine_a = load_row(own_a, row, head, deep, heads, depth, own_a_row, own_a_head)
    mine_b = load_row(own_b, row, head, channel, heads, channels, own_b_row, own_b_head)
    weight = load_row(extra, 0, head, deep, heads, depth, 0, depth) if ADDITIVE else mine_a
    acc_a, acc_b, acc_v = (tl.zeros([HB, BD], tl.float32), tl.zeros([HB, BC], tl.float32),
                           tl.zeros([HB, BD], tl.float32))
    if DROP:
        state, key = generator(seed, head, batch_heads)
    for at in range(start, end, BE):
        slot, listed, other = step(index, at, end, BE)
        read = listed[:, None] & (head < heads)[None, :]
        if BIAS:
            edge = tl.load(order + slot, mask=listed, other=0).to(tl.int64)
            edge = edge[:, None] + head[None, :].to(tl.int64) * edges
        n = other if BY_SOURCE else tl.zeros([BE], tl.int64) + row
        place = packed + n[:, None] * 3 * heads + head[None, :]
        table_a = load_rows(far_a, other, listed, head, deep, heads, depth, far_a_row, far_a_head)
        table_b = table_a if SHARED else load_rows(far_b, other, listed, head, channel, heads, channels, far_b_row,
                                                   far_b_head)
        score, rate, value = _scores(mine_a, table_a, weight, parameter, ADDITIVE, LOGISTIC)
        if BIAS:
            score += tl.load(extra + edge, mask=read, other=0.0)
        score -= tl.load(place, mask=read, other=0.0)
        w = recalled(score - tl.load(place + heads, mask=read, other=0.0), read)
        dropped = w
        if DROP:
            dropped = w * kept(state, key, other * outputs + row if not BY_SOURCE else row * outputs + other, p, factor)
        d = tl.load(place + 2 * heads, mask=read, other=0.0)
        ds = dropped * tl.sum(mine_b[None, :, :] * table_b, axis=2) - w * d
        ds = tl.where(read, ds, 0.0)
        acc_a += tl.sum((ds if ADDITIVE else parameter * ds)[:, :, None] * rate, axis=0)
        if BY_SOURCE:
            acc_b += tl.sum(dropped[:, :, None] * table_b, axis=0)
        elif ADDITIVE:
            acc_v += tl.sum(tl.where(listed[:, None, None], ds[:, :, None] * value, 0.0), axis=0)
        elif BIAS:
            tl.store(grad_extra + edge, ds, mask=read)
    if ADDITIVE:
        acc_a = tl.where(start < end, acc_a * weight, 0.0)
    write_sums(program, parts, row, whole, head, deep, heads, depth, acc_a, grad_a, sums_a, LENGTH)
    if BY_SOURCE:
        write_sums(program, parts, row, whole, head, channel, heads, channels, acc_b, grad_b, sums_b, LENGTH)
    elif ADDITIVE:
        place_v = (program.to(tl.int64) * heads + head)[:, None] * depth + deep[None, :]
        tl.store(grad_extra + place_v, acc_v, mask=(head < heads)[:, None] & (deep < depth)[None, :])


def _attend(by_target: Csr, q: Tensor, k: Tensor, x: Tensor, extra: Tensor | None, parameter: float, drop: Drop,
            kind: int | None = None) -> tuple[Tensor, Tensor]:
    """(y, peaks) of scores: additive of this kind of activation, or products. One pass by target."""
    rows, additive, (outputs, heads, depth), channels = Rows(by_target), kind is not None, q.shape, x.shape[2]
    shared = additive and _same(k, x)
    q, k, x = unit(q), unit(k), unit(x)
    y, peaks = x.new_empty((outputs, heads, channels)), q.new_empty((outputs, 2, heads), dtype=torch.float32)
    size = tile(heads, max(depth, channels), tables=1 if shared else 2)
    stats, sums = rows.buffer(3, heads), rows.buffer(1, heads, channels)
    seed, *chosen, dropped = drop_arguments(drop, q.device)
    launch(_forward, rows.programs * size.blocks, size.warps, *rows.arguments, rows.order, q, k, x,
           peaks if extra is None else floats(extra), seed, y, peaks, stats, sums, size.blocks, outputs, rows.edges,
           heads, depth, channels, *strides(q, k, x), parameter, *chosen, ADDITIVE=additive, LOGISTIC=kind == 1,
           SHARED=shared, BIAS=not additive and extra is not None, DROP=dropped, LENGTH=rows.parts.length,
           BE=size.edges, HB=size.heads, BD=power(depth), BC=power(channels))
    combine_softmax(rows, stats, sums, y, y, peaks, peaks, size._replace(channels=power(channels)), affine=False,
                    train=False)
    return y, peaks


def _gradients(by_target: Csr, by_source: Csr, q: Tensor, k: Tensor, x: Tensor, extra: Tensor | None, y: Tensor,
               peaks: Tensor, grad: Tensor, parameter: float, drop: Drop,
               kind: int | None = None) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Gradients of q, k, x and of the vector or bias (float32, or None without one). One pass by target, one by
    source."""
    additive, (outputs, heads, depth), channels = kind is not None, q.shape, x.shape[2]
    shared = additive and _same(k, x)
    q, k, x, grad = unit(q), unit(k), unit(x), unit(grad)
    y, peaks = y.contiguous(), peaks.contiguous()
    grad_q, grad_k, grad_x = (t.new_empty(t.shape) for t in (q, k, x))
    packed = dot_rows(by_target, grad, y, peaks)
    seed, *chosen, dropped = drop_arguments(drop, q.device)
    read = peaks if extra is None else floats(extra)
    written = read if extra is None else read.new_empty(
        (Rows(by_target).programs, heads, depth) if additive else read.shape)
    size = tile(heads, max(depth, channels), tables=2)
    for by_source_now, layout, own, far, grads in (
            (False, by_target, (q, grad), (k, x), (grad_q, grad_q)),
            (True, by_source, (k, x), (q, grad), (grad_k, grad_x))):
        rows = Rows(layout)
        sums_a = rows.buffer(heads, depth)
        sums_b = rows.buffer(heads, channels) if by_source_now else sums_a
        launch(_backward, rows.programs * size.blocks, size.warps, *rows.arguments, rows.order, *own, *far, read,
               packed, seed, *grads, written, sums_a, sums_b, size.blocks, outputs, rows.edges, heads, depth, channels,
               *strides(*own, *far), parameter, *chosen, BY_SOURCE=by_source_now, ADDITIVE=additive,
               LOGISTIC=kind == 1, SHARED=shared and not by_source_now, BIAS=not additive and extra is not None,
               DROP=dropped, LENGTH=rows.parts.length, BE=size.edges, HB=size.heads, BD=power(depth),
               BC=power(channels))
        add_parts(rows, sums_a, grads[0])
        if by_source_now:
            add_parts(rows, sums_b, grads[1])
    grad_extra = None if extra is None else written.sum(0) if additive else written
    return grad_q, grad_k, grad_x, grad_extra


def _same(k: Tensor, x: Tensor) -> bool:
    """Return True if both tensors share their memory and layout."""
    return k.data_ptr() == x.data_ptr() and k.shape == x.shape and k.stride() == x.stride()


def additive_forward(by_target: Csr, q: Tensor, k: Tensor, x: Tensor, vector: Tensor, kind: int,
                     parameter: float, drop: Drop) -> tuple[Tensor, Tensor]:
    """(y, peaks) of the scores <vector, act(q_n + k_m)>."""
    return _attend(by_target, q, k, x, vector, parameter, drop, kind)


def additive_backward(by_target: Csr, by_source: Csr, q: Tensor, k: Tensor, x: Tensor, vector: Tensor,
                      y: Tensor, peaks: Tensor, grad: Tensor, kind: int, parameter: float, drop: Drop
                      ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Gradients of q, k, x and of the vector."""
    return _gradients(by_target, by_source, q, k, x, vector, y, peaks, grad, parameter, drop, kind)


def bilinear_forward(by_target: Csr, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, scale: float,
                     drop: Drop) -> tuple[Tensor, Tensor]:
    """(y, peaks)."""
    return _attend(by_target, q, k, v, bias, scale, drop)


def bilinear_backward(by_target: Csr, by_source: Csr, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None,
                      y: Tensor, peaks: Tensor, grad: Tensor, scale: float,
                      drop: Drop) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Gradients of q, k, v and bias."""
    return _gradients(by_target, by_source, q, k, v, bias, y, peaks, grad, scale, drop)


def packed_forward(by_target: Csr, table: Tensor, q: Tensor | None, bias: Tensor | None, heads: int, depth: int,
                   scale: float, drop: Drop) -> tuple[Tensor, Tensor]:
    """(y, peaks) of queries, keys and values that are columns of a table."""
    return _attend(by_target, *parts_of_table(table, q, heads, depth), bias, scale, drop)


def packed_backward(by_target: Csr, by_source: Csr, table: Tensor, q: Tensor | None, bias: Tensor | None, y: Tensor,
                    peaks: Tensor, grad: Tensor, heads: int, depth: int, scale: float,
                    drop: Drop) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Gradients of the table, q and bias."""
    *grads, grad_bias = _gradients(by_target, by_source, *parts_of_table(table, q, heads, depth), bias, y, peaks, grad,
                                   scale, drop)
    joined = torch.cat([t.flatten(1) for t in (grads if q is None else grads[1:])], 1)
    return joined, None if q is None else grads[0], grad_bias
