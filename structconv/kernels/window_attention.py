"""Attention within a window of a sequence or a grid: no list of pairs is made.

`window_attention` computes 16 neighbouring outputs at once, which see W + 15 offsets on the last axis for W that count.
A narrow window without a bias may cost less by its list of pairs, which is remembered; the planner weighs both.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from structconv.bases.base import Basis
from structconv.bases.entrywise import Dropped, Normalised
from structconv.bases.positions import Distance, GridLookup, Lookup, bucket
from structconv.bases.scores import Bilinear
from structconv.bases.spec import Leaves, filler, getter, tensor
from structconv.kernels.dense_attention import held_bias
from structconv.kernels.expressions import (
    Dropout,
    entries_first,
    heads_first,
    product_and_bias,
    scaled_product,
    softmax_over_inputs,
    unmasked,
)
from structconv.kernels.orders import Application, Applied
from structconv.planning.cost import Cost
from structconv.planning.counts import application
from structconv.planning.fitted import FUSED_SHARE, SPARSE_CALLS, WINDOW_ENTRY
from structconv.planning.kernel import register
from structconv.planning.problem import Call, Problem
from structconv.primitives.native.window import MAX_WINDOW_CHANNELS, window_attention
from structconv.shapes import broadcast
from structconv.structures.supports import And, Causal, Support, Window

__all__ = ["WindowAttention", "Windowed"]

#: What the native kernel takes; anything else is computed from lists, with the same numbers.
STORED = (torch.float32, torch.bfloat16)


class Offsets(NamedTuple):
    """The offsets of a window on a grid of this shape, on each axis, as for `window_attention`."""

    shape: tuple[int, ...]
    below: tuple[int, ...]
    above: tuple[int, ...]
    dilation: tuple[int, ...]

    @classmethod
    def of(cls, window: Window, causal: bool, entries: int) -> Offsets:
        """Those of a window over so many entries."""
        shape = (entries,) if window.grid is None else window.grid.shape
        below = tuple(min(radius, max(size - 1, 0) // step)
                      for (radius, step), size in zip(window.axes(), shape, strict=True))
        return cls(shape, below, (0,) if causal else below, tuple(step for _, step in window.axes()))

    def work(self) -> float:
        """Pairs that are computed, 16 outputs of a line at once, full or not, and what each output takes beside."""
        *others, (last, line) = self._widths()
        lanes = -(-line // 16) * 16 / max(line, 1)
        near = math.prod(min(width, size) for width, size in others) * min(last + 15, line)
        return math.prod(self.shape) * (near * lanes + WINDOW_ENTRY)

    def _widths(self) -> list[tuple[int, int]]:
        """Of each axis, how many offsets it has, and how many entries that are as far apart as these."""
        return [(below + above + 1, -(-size // step))
                for below, above, size, step in zip(self.below, self.above, self.shape, self.dilation, strict=True)]


class Windowed(NamedTuple):
    """softmax over the offsets of a window of scale <query_n, key_m> + table[m - n].

    Args:
        query, key, bias: what finds them. size, depth: K and D.
        window, causal: the offsets.
    """

    query: Callable[[Leaves], Any]
    key: Callable[[Leaves], Any]
    bias: Callable[[Leaves], Basis] | None
    dropout: Dropout
    scale: float
    size: int
    depth: int
    window: Window
    causal: bool

    def attend(self, r: Tensor, call: Call) -> Tensor:
        """(..., K or 1, M, C) -> (..., K, N, C)."""
        query, key, size = tensor(self.query(call.leaves)), tensor(self.key(call.leaves)), self.size
        entries, channels = query.shape[-2], r.shape[-1]
        if key.shape[-2] != entries or not 0 < channels <= MAX_WINDOW_CHANNELS or not _native(query, key, r):
            return call.basis().apply(r)
        lead = broadcast(r.shape[:-3], query.shape[:-3], key.shape[:-3])
        offsets = Offsets.of(self.window, self.causal, entries)
        table = None if self.bias is None else _table(self.bias(call.leaves), offsets)
        axes = len(offsets.shape)
        if table is not None and math.prod(table.shape[:-axes]) > 1:
            table = table.expand(*lead, size, *table.shape[-axes:])
        table = None if table is None else table.reshape(math.prod(table.shape[:-axes]), *table.shape[-axes:])
        q, k, v = (entries_first(t, lead, size) for t in (query, key, r))
        seed = self.dropout.seed_of(call.leaves)
        y = window_attention(q, k, v, table, shape=offsets.shape, below=offsets.below, above=offsets.above,
                             dilation=offsets.dilation, scale=self.scale, dropout=self.dropout.p, seed=seed,
                             batch_heads=size)
        return heads_first(y, lead, size)


class WindowAttention(Applied):
    """The native kernel for windows."""

    name, types = "structconv.window_attention", (Normalised, Dropped)
    before = ("torch.sdpa", "torch.flex", "structconv.blocked_attention", "primitives")

    def match(self, problem: Problem) -> Windowed | None:
        softmax = softmax_over_inputs(problem.basis)
        if softmax is None:
            return None
        weights, dropout = softmax
        product, bias = product_and_bias(unmasked(weights.child), _by_offset)
        found = _window(weights.child.support(), bias)
        if found is None or weights.num_inputs != weights.num_outputs:
            return None
        window, causal = found
        if isinstance(bias, GridLookup) and (window.grid is None or window.grid.shape != bias.grid.shape
                                             or (dropout.p == 0 and held_bias(weights) is not None)):
            return None
        scale, scores = scaled_product(product)
        if not isinstance(scores, Bilinear) or not _stored(scores):
            return None
        return Windowed(getter(scores.query), getter(scores.key), None if bias is None else filler(bias), dropout,
                        scale, scores.size, scores.depth, window, causal)

    def application_cost(self, match: Windowed, problem: Problem, channels: int, mode: str) -> Cost:
        """Products of all pairs that the kernel computes, and the rows of both sides; in a program for any number of
        entries what a list of edges costs, except that nothing is gathered."""
        (inputs, outputs), sizes = problem.sizes.entries(problem.basis), problem.sizes
        if sizes.nominal:
            listed = application(problem.basis, sizes, channels, mode).repeated(FUSED_SHARE)
            return dataclasses.replace(listed, gathered=0.0)
        heads, pairs = sizes.batch * match.size, Offsets.of(match.window, match.causal, inputs).work()
        moved = heads * (inputs + outputs) * (match.depth + channels) * sizes.itemsize
        return Cost(2 * heads * pairs * (match.depth + channels), moved, calls=SPARSE_CALLS)

    def application(self, match: Windowed, problem: Problem) -> Application:
        return Application(match.attend)


def _window(support: Support | None, bias: Basis | None) -> tuple[Window, bool] | None:
    """The window of a support that is one, and whether it is causal too; all of a grid that only a bias is on."""
    if support is None and isinstance(bias, GridLookup):
        return Window(tuple(max(2 * size - 1, 1) for size in bias.grid.shape), grid=bias.grid), False
    if isinstance(support, And):
        for window, other in ((support.first, support.second), (support.second, support.first)):
            if isinstance(window, Window) and isinstance(other, Causal) and len(window.axes()) == 1:
                found = _window(window, None)
                return None if found is None else (window, True)
        return None
    if not isinstance(support, Window) or support.centre is not None:
        return None
    return None if support.grid is not None and support.grid.periodic else (support, False)


def _stored(scores: Bilinear) -> bool:
    """Whether the native kernel may compute these."""
    q, k = scores.query, scores.key
    return q.device.type == "cpu" and q.dtype == k.dtype and q.dtype in STORED and (
        0 < q.shape[-1] <= MAX_WINDOW_CHANNELS)


def _native(*tensors: Tensor) -> bool:
    return len({t.dtype for t in tensors}) == 1 and tensors[0].dtype in STORED


def _by_offset(bias: Basis) -> bool:
    """Whether a bias is a function of the offset."""
    return isinstance(bias, Distance | GridLookup) or (isinstance(bias, Lookup) and bias.kind != "position"
                                                       and bias.table.shape[-2] == 1)


def _table(bias: Basis, offsets: Offsets) -> Tensor:
    """The bias at each offset: (..., K, *offsets). On a grid m - n is that of the entries' numbers."""
    shape = offsets.shape
    if isinstance(bias, GridLookup):
        table = bias.table
        for axis, (before, after, step) in enumerate(zip(*offsets[1:], strict=True)):
            radius = table.shape[axis - len(shape)] // 2
            index = (torch.arange(-before, after + 1) * step).clamp(-radius, radius) + radius
            table = table.index_select(axis - len(shape), index)
        return table
    offset, stride = torch.zeros((), dtype=torch.int64), 1
    for axis in range(len(shape) - 1, -1, -1):
        steps = torch.arange(-offsets.below[axis], offsets.above[axis] + 1) * (offsets.dilation[axis] * stride)
        offset = steps.view(-1, *(1,) * (len(shape) - 1 - axis)) + offset
        stride *= shape[axis]
    if isinstance(bias, Distance):
        return -bias.slope.view(-1, *(1,) * len(shape)) * offset.abs()
    assert isinstance(bias, Lookup)
    index = bucket(bias.kind, bias.clip, offset.flatten(), torch.zeros((), dtype=torch.int64))
    return bias.table.squeeze(-2).index_select(-1, index).unflatten(-1, offset.shape)


register(WindowAttention())
