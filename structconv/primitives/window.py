"""`window_attention`: attention within a window of a grid, without a list of pairs and without pair-sized tensors."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from structconv.derived import derived, is_plain
from structconv.errors import ConfigError, ShapeError, text_of
from structconv.primitives.hashing import Drop, drop_factors
from structconv.primitives.operator import DROPOUT, differentiable_operator
from structconv.primitives.segments import masked_softmax
from structconv.primitives.sorting import rows_of

__all__ = ["MAX_WINDOW_CHANNELS", "window_attention"]

#: Channels of queries and of values that the native kernel holds.
MAX_WINDOW_CHANNELS = 256


def window_attention(q: Tensor, k: Tensor, v: Tensor, table: Tensor | None = None, *, shape: Sequence[int],
                     below: Sequence[int], above: Sequence[int], dilation: Sequence[int],
                     outputs: Tensor | None = None, inputs: Tensor | None = None, scale: float = 1.0,
                     dropout: float = 0.0, seed: Tensor | None = None, batch_heads: int | None = None) -> Tensor:
    """y_nh = sum_o p_noh v_(n + o)h, p = softmax over the offsets o of scale <q_nh, k_(n + o)h> + table_ho.

    Neighborhood attention (Hassani et al. 2023) with windows that shrink at the border, on a sequence the sliding
    window of Longformer (Beltagy et al. 2020, section 3.1), dilated or not. Offsets off the grid do not exist, nor do
    those whose number in the table is -inf: what the entries there hold, NaN included, reaches nothing.

    Args:
        q, k: (N, K, D), v (N, K, C), any strides, of one dtype. Entries are the points of the grid, row-major.
            float32 and bfloat16 (sums in float32), up to `MAX_WINDOW_CHANNELS` of D and C, run natively on a CPU;
            anything else by one torch operator after the other an offset, with (N, K) numbers for each.
        table: (K or 1, B_1 + A_1 + 1, ...) a bias for each offset, with a gradient; `None` for zeros.
        shape: of the grid, (S_1, ..., S_L).
        below, above: B and A: offsets -B_l d_l, ..., A_l d_l along axis l, A = 0 on a sequence being a causal window.
        dilation: d.
        outputs, inputs: (B + 1,) int64, where the outputs and the inputs of each of B sequences begin, and the number
            of all: q then has the outputs of all, k and v the inputs, and `shape` is the length of the longest. Offsets
            are those of positions in the sequence. `None` for one grid.
        scale: of the products.
        dropout, seed, batch_heads: as for `affine_attention`.

    Returns:
        (N, K, C) of the dtype of v.

    Cost: 2 N W K (D + C) flops for W offsets, those on the last axis counted as 15 more, without those that leave the
    grid, or the sequence; memory O(N K (D + C)). Derivatives of higher order hold (W, N, K) tensors.

    Raises:
        ShapeError: if the sizes do not fit each other or the grid.
        ConfigError: for a p outside [0, 1), dropout without a seed, or offsets that are not one each axis.
    """
    y: Tensor = _attend(q, k, v, table, tuple(shape), tuple(below), tuple(above), tuple(dilation), outputs, inputs,
                        scale, dropout, seed, batch_heads)[0]
    return y


def _check(q: Tensor, k: Tensor, v: Tensor, table: Tensor | None, *options: Any) -> None:
    grid = _Grid.of(options)
    grid.check()
    counts = grid.counts(q, k)
    if (q.shape[0], k.shape[0]) != counts:
        raise ShapeError("window_attention", f"q must have shape (N={counts[0]}, K, D), and k (M={counts[1]}, K, D)",
                         f"{text_of(q.shape)} and {text_of(k.shape)}")
    if table is not None and (table.dim() < 1 or table.shape[0] not in (1, q.shape[1])
                              or tuple(table.shape[1:]) != grid.widths):
        raise ShapeError("window_attention", f"table must have shape (K={q.shape[1]} or 1, {grid.widths})",
                         tuple(table.shape))


class _Grid(NamedTuple):
    """The offsets of a window on a grid."""

    shape: tuple[int, ...]
    below: tuple[int, ...]
    above: tuple[int, ...]
    dilation: tuple[int, ...]
    outputs: Tensor | None = None
    inputs: Tensor | None = None

    @classmethod
    def of(cls, options: Sequence[Any]) -> _Grid:
        """Return that of the operator's options."""
        shape, below, above, dilation = map(tuple, options[:4])
        return cls(shape, below, above, dilation, *options[4:6])

    @property
    def widths(self) -> tuple[int, ...]:
        """How many offsets there are on each axis."""
        return tuple(b + a + 1 for b, a in zip(self.below, self.above, strict=True))

    def check(self) -> None:
        """Raise `ConfigError` unless each axis has its offsets."""
        for name, numbers, least in (("below", self.below, 0), ("above", self.above, 0),
                                     ("dilation", self.dilation, 1)):
            if len(numbers) != len(self.shape) or not self.shape or min(numbers) < least:
                raise ConfigError("window_attention", f"{name} must have a number of at least {least} for each of the "
                                  f"{len(self.shape)} axes", numbers)
        if (self.outputs is None) != (self.inputs is None):
            raise ConfigError("window_attention", "outputs and inputs must be given both", "one of them")
        for starts in (self.outputs, self.inputs):
            if starts is not None:
                self._check_starts(starts)

    def _check_starts(self, starts: Tensor) -> None:
        plain = starts.dtype == torch.int64 and starts.dim() == 1 and starts.device.type == "cpu"
        if len(self.shape) > 1 or self.dilation != (1,) or not plain or not starts.is_contiguous():
            raise ConfigError("window_attention", "outputs and inputs must be contiguous int64 (B + 1,) in main "
                              "memory, of sequences without dilation", f"{starts.dtype} {text_of(starts.shape)}")
        if is_plain(starts):
            first, least, most, _ = _known(starts)
            if first or least < 0 or most > self.shape[0]:
                raise ShapeError("window_attention", "outputs and inputs must rise from 0 by at most "
                                 f"{self.shape[0]} a step", starts.tolist())

    def counts(self, q: Tensor, k: Tensor) -> tuple[int, int]:
        """N and M; of sequences, while a program is traced, those of q and k."""
        if self.outputs is None or self.inputs is None:
            return (math.prod(self.shape),) * 2
        if torch.compiler.is_compiling() or not (is_plain(self.outputs) and is_plain(self.inputs)):
            return q.shape[0], k.shape[0]
        return _known(self.outputs)[3], _known(self.inputs)[3]

    def offsets(self) -> Iterator[tuple[int, ...]]:
        """In entries along each axis, in the order of a flattened table."""
        axes = [[d * i for i in range(-b, a + 1)]
                for b, a, d in zip(self.below, self.above, self.dilation, strict=True)]
        return itertools.product(*axes)

    def shifted(self, x: Tensor, offset: Sequence[int], count: int) -> Tensor:
        """y_n = x_(n + offset) of the inputs (M, ...) at `count` outputs, zero where there is none."""
        if self.outputs is not None and self.inputs is not None:
            return _shifted(x, offset[0], self.outputs, self.inputs, count)
        if any(abs(o) >= size for o, size in zip(offset, self.shape, strict=True)):
            return torch.zeros_like(x)
        y, padding = x.unflatten(0, self.shape), [0, 0] * (x.dim() - 1)
        for axis, (o, size) in reversed(list(enumerate(zip(offset, self.shape, strict=True)))):
            y = y.narrow(axis, max(o, 0), size - abs(o))
            padding += [max(-o, 0), max(o, 0)]
        return F.pad(y, padding).flatten(0, len(self.shape) - 1)


def _shifted(x: Tensor, offset: int, to: Tensor, of: Tensor, count: int) -> Tensor:
    """y at each place of sequences that begin at `to` of what is `offset` further in those that begin at `of`."""
    sequence = rows_of(to[1:], count)  # a program that is decomposed has operators of ONNX only
    position = torch.arange(count) - to[sequence] + offset
    there = (position >= 0) & (position < of.diff()[sequence])
    index = torch.where(there, of[sequence] + position, 0).to(x.device)
    rows = x.index_select(0, index) if x.shape[0] else x.new_zeros(count, *x.shape[1:])
    return torch.where(there.to(x.device).view(-1, *(1,) * (x.dim() - 1)), rows, torch.zeros((), dtype=x.dtype))


# -- one operator after the other, an offset at a time -------------------------------------------------------------

def _keep(grid: _Grid, q: Tensor, k: Tensor, table: Tensor) -> Tensor:
    """Which pairs exist: (W, N, K)."""
    ones = q.new_ones(k.shape[0])
    inside = torch.stack([grid.shifted(ones, offset, q.shape[0]) for offset in grid.offsets()]) > 0
    return inside.unsqueeze(-1) & (table.flatten(1) != -torch.inf).t().unsqueeze(1).expand(-1, -1, q.shape[1])


def _scores(grid: _Grid, q: Tensor, k: Tensor, table: Tensor, keep: Tensor, scale: float) -> Tensor:
    """scale <q_n, k_(n + o)> + table_o of the pairs that exist, -inf at the others: (W, N, K)."""
    scores = []
    for o, kept, bias in zip(grid.offsets(), keep, table.flatten(1).unbind(1), strict=True):
        near = torch.where(kept.unsqueeze(-1), grid.shifted(k, o, q.shape[0]), 0)
        scores.append(torch.where(kept, scale * (q * near).sum(-1) + bias, -torch.inf))
    return torch.stack(scores)


def _composed(q: Tensor, k: Tensor, v: Tensor, table: Tensor | None, *options: Any) -> Tensor:
    """y by differentiable operators, an offset at a time."""
    grid, (scale, p, seed, batch_heads) = _Grid.of(options), options[6:]
    table = q.new_zeros((1, *grid.widths)) if table is None else table
    keep = _keep(grid, q, k, table)
    weights = masked_softmax(_scores(grid, q, k, table, keep, scale), keep, 0)
    if p > 0 and seed is not None:
        n, head = torch.arange(q.shape[0], device=q.device), torch.arange(q.shape[1], device=q.device)
        m = torch.arange(k.shape[0], device=q.device)
        pairs = torch.stack([grid.shifted(m, offset, q.shape[0]) * q.shape[0] + n
                             for offset in grid.offsets()]).unsqueeze(-1)
        weights = weights * drop_factors(Drop(p, seed, batch_heads), head, pairs, q.dtype)
    parts = (w.unsqueeze(-1) * torch.where(kept.unsqueeze(-1), grid.shifted(v, o, q.shape[0]), 0)
             for o, w, kept in zip(grid.offsets(), weights, keep, strict=True))
    return sum(parts, v.new_zeros(()))


# -- the operator -------------------------------------------------------------------------------------------------

def _takes(q: Tensor, k: Tensor, v: Tensor, table: Tensor | None) -> bool:
    return 0 < q.shape[-1] <= MAX_WINDOW_CHANNELS and 0 < v.shape[-1] <= MAX_WINDOW_CHANNELS and q.numel() > 0


def _known(starts: Tensor) -> tuple[int, int, int, int]:
    """The first start of a sequence, the least and the greatest step, -1 if there is none, and the last start."""
    def extremes() -> tuple[int, int, int, int]:
        numbers = starts.tolist() or [0]
        steps = [after - before for before, after in itertools.pairwise(numbers)] or [-1]
        return numbers[0], min(steps), max(steps), numbers[-1]

    return derived(starts, "extremes", extremes)


_attend = differentiable_operator(
    "window_attention", "q N K D, k M K D, v M K C, any table?",
    "SymInt[] shape, int[] below, int[] above, int[] dilation, Tensor? outputs, Tensor? inputs, float scale, "
    + DROPOUT, "y N K C, wide peaks N 2 K", kernel="window", composed=_composed, check=_check, takes=_takes,
    edges=False, needs="table")
