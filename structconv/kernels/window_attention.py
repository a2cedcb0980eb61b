"""Attention within a window of a sequence or a grid, recognised from its tree of values: no list of pairs is made.

`window_attention` computes 16 neighbouring outputs at once, which see W + 15 offsets on the last axis for W that count.
Narrow windows without a bias stay with the list of pairs and its kernel where that costs less, and is remembered.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from structconv.bases.base import Basis, value
from structconv.bases.pairwise import Dropped, Normalised
from structconv.bases.positions import Distance, GridLookup, Lookup, bucket
from structconv.bases.scores import Bilinear
from structconv.kernels.forms import register_form
from structconv.kernels.fused import (
    FusedAttention,
    entries_first,
    follow_scores,
    product_and_bias,
    scaled_product,
    softmax_over_inputs,
    unmasked,
)
from structconv.planning.cost import Cost
from structconv.planning.counts import SPARSE_CALLS, Sizes, application_cost
from structconv.primitives.native.window import MAX_WINDOW_CHANNELS, window_attention
from structconv.structures.supports import And, Causal, Support, Window

#: From timings, in the time of one pair in the kernel: what an output takes beside its pairs (its row is turned into a
#: lane and back), what it takes along a list, and what a pair of a list takes.
WINDOW_ENTRY, LISTED_ENTRY, LISTED_PAIR = 110.0, 48.0, 2.4
#: Weights of a whole grid up to which they are cheaper held, for torch's operator, where there is no dropout.
HELD_WEIGHTS = 1 << 22
#: What the native kernel takes; anything else is computed from lists, with the same numbers.
STORED = (torch.float32, torch.bfloat16)


@value
class WindowAttention(FusedAttention):
    """softmax over the offsets of a window of scale <query_n, key_m> + table[m - n]; `child` is the expression.

    Args:
        p, seed: of the dropout.
        shape, below, above, dilation: the grid and the offsets on each axis, as for `window_attention`.
        table: (..., K or 1, *offsets), or `None`.
    """

    child: Basis
    p: float
    seed: Tensor | None
    scores: Bilinear
    table: Tensor | None
    scale: float
    shape: tuple[int, ...]
    below: tuple[int, ...]
    above: tuple[int, ...]
    dilation: tuple[int, ...]

    def attend(self, lead: tuple[int, ...], v: Tensor) -> Tensor:
        query, key = (entries_first(t, lead, self.size) for t in (self.scores.query, self.scores.key))
        table, axes = self.table, len(self.shape)
        if table is not None and math.prod(table.shape[:-axes]) > 1:
            table = table.expand(*lead, self.size, *table.shape[-axes:])
        table = None if table is None else table.reshape(-1, *table.shape[-axes:])
        return window_attention(query, key, v, table, shape=self.shape, below=self.below, above=self.above,
                                dilation=self.dilation, scale=self.scale, dropout=self.p, seed=self.seed,
                                batch_heads=self.size)

    def work(self, sizes: Sizes) -> float:
        """Pairs that are computed, 16 outputs of a line at once, full or not, and what each output takes beside."""
        *others, (last, line) = self._widths()
        lanes = -(-line // 16) * 16 / max(line, 1)
        near = math.prod(min(width, size) for width, size in others) * min(last + 15, line)
        return sizes.entries(self)[1] * (near * lanes + WINDOW_ENTRY)

    def listed_work(self, sizes: Sizes) -> float:
        """The same of a list of the pairs."""
        pairs = math.prod(min(width, size) for width, size in self._widths())
        return sizes.entries(self)[1] * (pairs * LISTED_PAIR + LISTED_ENTRY)

    def _widths(self) -> list[tuple[int, int]]:
        """Of each axis, how many offsets it has, and how many entries that are as far apart as these."""
        return [(below + above + 1, -(-size // step))
                for below, above, size, step in zip(self.below, self.above, self.shape, self.dilation, strict=True)]

    def beats_list(self) -> bool:
        """Whether this takes no longer than the kernel along a list; while a program is traced none is remembered."""
        sizes = Sizes(1, self.scores.query.dtype.itemsize)
        return torch.compiler.is_compiling() or self.work(sizes) <= self.listed_work(sizes)


def recognise(basis: Basis) -> WindowAttention | None:
    """The basis as attention within a window, or `None` where it is something else or lists are faster."""
    softmax = softmax_over_inputs(basis)
    if softmax is None:
        return None
    weights, p, seed = softmax
    product, bias = product_and_bias(unmasked(weights.child), _by_offset)
    found = _window(weights.child.support(), bias)
    if found is None or weights.num_inputs != weights.num_outputs:
        return None
    window, causal = found
    if isinstance(bias, GridLookup) and (window.grid is None or window.grid.shape != bias.grid.shape
                                         or (p == 0 and held_bias(weights) is not None)):
        return None
    scale, scores = scaled_product(product)
    if not isinstance(scores, Bilinear) or not _native(scores):
        return None
    shape = (weights.num_inputs,) if window.grid is None else window.grid.shape
    dilation = tuple(step for _, step in window.axes())
    below = tuple(min(radius, max(size - 1, 0) // step)
                  for (radius, step), size in zip(window.axes(), shape, strict=True))
    above = (0,) if causal else below
    table = None if bias is None else _table(bias, shape, below, above, dilation)
    form = WindowAttention(basis, p, seed, scores, table, scale, shape, below, above, dilation)
    return form if bias is not None or form.beats_list() else None


def held_bias(weights: Normalised) -> GridLookup | None:
    """The bias on all of a grid that is small enough to hold the weights of all its pairs."""
    if weights.child.support() is not None:
        return None
    bias = product_and_bias(weights.child, lambda part: isinstance(part, GridLookup))[1]
    if not isinstance(bias, GridLookup):
        return None
    batch = 1 if torch.compiler.is_compiling() else math.prod(weights.batch_shape)
    return bias if batch * weights.size * bias.num_inputs**2 <= HELD_WEIGHTS else None


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


def _native(scores: Bilinear) -> bool:
    """Whether the native kernel computes these."""
    q, k = scores.query, scores.key
    stored = q.device.type == "cpu" and q.dtype == k.dtype and q.dtype in STORED
    return stored and 0 < q.shape[-1] <= MAX_WINDOW_CHANNELS


def _by_offset(bias: Basis) -> bool:
    """Whether a bias is a function of the offset."""
    return isinstance(bias, Distance | GridLookup) or (isinstance(bias, Lookup) and bias.kind != "position"
                                                       and bias.table.shape[-2] == 1)


def _table(bias: Basis, shape: tuple[int, ...], below: tuple[int, ...], above: tuple[int, ...],
           dilation: tuple[int, ...]) -> Tensor:
    """The bias at each offset: (..., K, *offsets). On a grid m - n is that of the entries' numbers."""
    if isinstance(bias, GridLookup):
        table = bias.table
        for axis, (before, after, step) in enumerate(zip(below, above, dilation, strict=True)):
            radius = table.shape[axis - len(shape)] // 2
            index = (torch.arange(-before, after + 1) * step).clamp(-radius, radius) + radius
            table = table.index_select(axis - len(shape), index)
        return table
    offset, stride = torch.zeros((), dtype=torch.int64), 1
    for axis in range(len(shape) - 1, -1, -1):
        steps = torch.arange(-below[axis], above[axis] + 1) * (dilation[axis] * stride)
        offset = steps.view(-1, *(1,) * (len(shape) - 1 - axis)) + offset
        stride *= shape[axis]
    if isinstance(bias, Distance):
        return -bias.slope.view(-1, *(1,) * len(shape)) * offset.abs()
    assert isinstance(bias, Lookup)
    index = bucket(bias.kind, bias.clip, offset.flatten(), torch.zeros((), dtype=torch.int64))
    return bias.table.squeeze(-2).index_select(-1, index).unflatten(-1, offset.shape)


def suits(form: Basis, r: Tensor) -> bool:
    """Whether the kernel takes the values, too."""
    assert isinstance(form, WindowAttention)
    return r.dtype == form.scores.query.dtype and 0 < r.shape[-1] <= MAX_WINDOW_CHANNELS


@application_cost(WindowAttention)
def _application(basis: WindowAttention, sizes: Sizes, channels: int, mode: str) -> Cost:
    """Products of all pairs that the kernel computes, and the rows of both sides."""
    inputs, outputs = sizes.entries(basis)
    heads, depth = sizes.batch * basis.size, basis.scores.depth
    moved = heads * (inputs + outputs) * (depth + channels) * sizes.itemsize
    return Cost(2 * heads * basis.work(sizes) * (depth + channels), moved, calls=SPARSE_CALLS)


register_form("structconv.window_attention", recognise, Normalised, Dropped, suits=suits, priced=True,
              follow=follow_scores)
