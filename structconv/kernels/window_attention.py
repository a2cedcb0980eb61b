"""Attention within a window of a sequence or a grid, and within the samples of a batch: no list of pairs is made.

`window_attention` computes 16 neighboring outputs at once, which read W + 15 offsets on the last axis for a window of
W. For a narrow window without a bias the remembered list of pairs may cost less; the planner compares both.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from structconv.bases.base import Basis
from structconv.bases.entrywise import Dropped, Normalized
from structconv.bases.positions import Distance, GridLookup, Lookup, bucket
from structconv.bases.scores import Bilinear
from structconv.bases.tree import getter, materializer, tensor
from structconv.kernels.dense_attention import whole_bias
from structconv.kernels.expressions import (
    Dropout,
    is_by_offset,
    product_and_bias,
    softmax_over_inputs,
    unmasked,
    unscaled,
)
from structconv.kernels.folding import Folding
from structconv.kernels.orders import Application, Applied
from structconv.planning.cost import Cost
from structconv.planning.counts import fused_application, samples_in
from structconv.planning.fitted import SPARSE_CALLS, WINDOW_ENTRY
from structconv.planning.kernel import register
from structconv.planning.problem import Call, Problem
from structconv.primitives.window import MAX_WINDOW_CHANNELS, window_attention
from structconv.shapes import broadcast
from structconv.structures.enumeration import at_most
from structconv.structures.masks import joined_by_and
from structconv.structures.samples import Samples
from structconv.structures.supports import Causal, Support, Window

__all__ = ["WindowAttention", "Windowed"]

#: The types that the native kernel supports; others are computed from lists, with equal results.
STORED = (torch.float32, torch.bfloat16)


class Offsets(NamedTuple):
    """The offsets of a window on a grid of this shape, on each axis, as for `window_attention`."""

    shape: tuple[int, ...]
    below: tuple[int, ...]
    above: tuple[int, ...]
    dilation: tuple[int, ...]

    @classmethod
    def of(cls, window: Window, causal: bool, entries: int) -> Offsets:
        """Return the offsets of a window over a sequence of entries, or on its grid. In a program for any number of
        entries they are all offsets of the window, and the kernel skips those off the grid."""
        shape = (entries,) if window.grid is None else window.grid.shape
        below = tuple(at_most(radius, max(size - 1, 0) // step)
                      for (radius, step), size in zip(window.axes(), shape, strict=True))
        return cls(shape, below, (0,) if causal else below, tuple(step for _, step in window.axes()))

    def work(self) -> float:
        """Pairs that the kernel computes, 16 outputs of a line at once, plus the fixed cost of each output in pairs."""
        *others, (last, line) = [  # for each axis the number of offsets, and of entries at this distance
            (below + above + 1, -(-size // step))
            for below, above, size, step in zip(self.below, self.above, self.shape, self.dilation, strict=True)]
        lanes = -(-line // 16) * 16 / max(line, 1)
        near = math.prod(min(width, size) for width, size in others) * min(last + 15, line)
        return math.prod(self.shape) * (near * lanes + WINDOW_ENTRY)


class Windowed(NamedTuple):
    """softmax over the offsets of a window, or of a whole sample, of scale <query_n, key_m> + table[m - n].

    Fields: functions that find query, key and table in a basis; K and D; the window; a function that finds the samples,
    or none.
    """

    query: Callable[[Any], Any]
    key: Callable[[Any], Any]
    bias: Callable[[Any], Basis] | None
    dropout: Dropout
    scale: float
    size: int
    depth: int
    window: Window | None
    causal: bool
    samples: Callable[[Any], Samples] | None

    def attend(self, r: Tensor, call: Call) -> Tensor:
        """(..., K or 1, M, C) -> (..., K, N, C)."""
        query, key, size = tensor(self.query(call.basis)), tensor(self.key(call.basis)), self.size
        entries, channels = query.shape[-2], r.shape[-1]
        samples = None if self.samples is None else self.samples(call.basis)
        counts = (entries, entries) if samples is None else (samples.num_outputs, samples.num_inputs)
        sizes = entries, key.shape[-2]
        if sizes != counts or not 0 < channels <= MAX_WINDOW_CHANNELS or not (
                query.dtype == key.dtype == r.dtype and r.dtype in STORED):
            return call.materialized().apply(r)
        lead = broadcast(r.shape[:-3], query.shape[:-3], key.shape[:-3])
        offsets = self.offsets(entries, samples)
        starts = (None, None) if samples is None else (samples.output_starts, samples.input_starts)
        table = None if self.bias is None else _table(self.bias(call.basis), offsets)
        axes = len(offsets.shape)
        if table is not None and math.prod(table.shape[:-axes]) > 1:
            table = table.expand(*lead, size, *table.shape[-axes:])
        table = None if table is None else table.reshape(math.prod(table.shape[:-axes]), *table.shape[-axes:])
        batch = Folding(lead, size)
        q, k, v = map(batch.rows, (query, key, r))
        seed = self.dropout.seed_of(call.basis)
        y = window_attention(q, k, v, table, shape=offsets.shape, below=offsets.below, above=offsets.above,
                             dilation=offsets.dilation, outputs=starts[0], inputs=starts[1], scale=self.scale,
                             dropout=self.dropout.p, seed=seed, batch_heads=size)
        return batch.heads(y)

    def offsets(self, entries: int, samples: Samples | None) -> Offsets:
        """Return the offsets for a sequence of entries, or for the longest sample."""
        longest = entries if samples is None else samples.longest
        return Offsets.of(Window(max(longest - 1, 0)) if self.window is None else self.window, self.causal, longest)


class WindowAttention(Applied):
    """The native kernel for windows."""

    name, types = "structconv.window_attention", (Normalized, Dropped)
    before = ("structconv.dense_attention", "torch.flex", "structconv.blocked_attention", "primitives")

    def match(self, problem: Problem) -> Windowed | None:
        softmax = softmax_over_inputs(problem.basis)
        if softmax is None:
            return None
        weights, dropout = softmax
        product, bias = product_and_bias(
            unmasked(weights.child), lambda term: isinstance(term, GridLookup) or is_by_offset(term))
        parts = _window(weights.child.support(), bias)
        if parts is None or (parts[2] is None and weights.num_inputs != weights.num_outputs):
            return None
        window, causal, samples = parts
        grid = None if window is None else window.grid
        if isinstance(bias, GridLookup) and (grid is None or grid.shape != bias.grid.shape
                                             or (dropout.p == 0 and whole_bias(weights) is not None)):
            return None
        scale, scores = unscaled(product)
        if not isinstance(scores, Bilinear) or not _stored(scores):
            return None
        return Windowed(getter(scores.query), getter(scores.key), None if bias is None else materializer(bias), dropout,
                        scale, weights.size, scores.depth, window, causal,
                        None if samples is None else getter(samples))

    def application_cost(self, match: Windowed, problem: Problem, channels: int, mode: str) -> Cost:
        """Products of all pairs that the kernel computes, and the rows of both sides; in a program for any number of
        entries the cost of a list of edges without its gathered rows."""
        (inputs, outputs), sizes = problem.sizes.entries(problem.basis), problem.sizes
        if sizes.nominal:
            return dataclasses.replace(fused_application(problem.basis, sizes, channels, mode), gathered=0.0)
        heads, pairs = sizes.batch * match.size, _work(match, samples_in(problem.basis), outputs)
        moved = heads * (inputs + outputs) * (match.depth + channels) * sizes.itemsize
        return Cost(2 * heads * pairs * (match.depth + channels), moved, calls=SPARSE_CALLS)

    def application(self, match: Windowed, problem: Problem) -> Application:
        return Application(match.attend)


def _window(support: Support | None, bias: Basis | None) -> tuple[Window | None, bool, Samples | None] | None:
    """The window of a support that is one, whether it is causal too, and within which samples; all of a grid that only
    a bias is on."""
    if support is None and isinstance(bias, GridLookup):
        return Window(tuple(max(2 * size - 1, 1) for size in bias.grid.shape), grid=bias.grid), False, None
    terms = joined_by_and(support)
    kinds = [type(term) for term in terms]
    if not kinds or len(set(kinds)) < len(kinds) or not {Window, Causal, Samples}.issuperset(kinds):
        return None
    window: Any = next((term for term in terms if isinstance(term, Window)), None)
    samples = next((term for term in terms if isinstance(term, Samples)), None)
    if window is None:
        return None if samples is None else (None, Causal in kinds, samples)
    plain = window.center is None and not (window.grid is not None and window.grid.periodic)
    single = len(kinds) == 1 or (len(window.axes()) == 1 and (samples is None or window.axes()[0][1] == 1))
    return (window, Causal in kinds, samples) if plain and single else None


def _work(match: Windowed, samples: Samples | None, outputs: int) -> float:
    """`Offsets.work` of a problem; samples count as equal ones."""
    if samples is None:
        return match.offsets(outputs, None).work()
    return samples.num_samples * match.offsets(-(-outputs // samples.num_samples), None).work()


def _stored(scores: Bilinear) -> bool:
    """Return True if the native kernel supports these scores."""
    q, k = scores.query, scores.key
    return q.device.type == "cpu" and q.dtype == k.dtype and q.dtype in STORED and (
        0 < q.shape[-1] <= MAX_WINDOW_CHANNELS)


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
