"""Sums, maxima and softmax over groups: the edges of an entry (segments), or a masked dense dimension.

An empty group, or one whose entries are all masked, gives exact zeros and zero gradients.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from structconv import torch_compat as private
from structconv.derived import values_known
from structconv.errors import ShapeError, text_of
from structconv.primitives.functions import apply, finite, sum_dtype, transformed

__all__ = ["is_few_rows", "masked_softmax", "segment_max", "segment_softmax", "segment_sum", "sum_of_rows"]

#: Numbers up to which torch's node, in C++, takes less time than a faster kernel in a node of Python.
_FEW_NUMBERS = 1 << 16


def segment_sum(values: Tensor, index: Tensor, num: int, *, rows: bool = False) -> Tensor:
    """s_n = sum of values_e over the entries e with index_e = n.

    Args:
        values: (..., E); 16-bit types are summed in float32.
        index: (E,) int32 or int64 in [0, num), in any order.
        num: number of segments, empty ones included (they sum to zero).
        rows: if True, values are rows of channels, (..., E, C), and the result is (..., num, C).

    Returns:
        (..., num), of the dtype of `values`.

    Raises:
        ShapeError: the number of values, or of rows, is not the length of `index`.
    """
    _check_segments("segment_sum", values.mT if rows else values, index)
    wide = values.to(sum_dtype(values.dtype))
    axis, shape = -2 if rows else -1, [*values.shape]
    shape[axis] = num
    return wide.new_zeros(shape).index_add(axis, index, wide).to(values.dtype)


def is_few_rows(x: Tensor) -> bool:
    """Return True for rows (M, C) whose sums need a gradient, and that `sum_of_rows` should add up."""
    return (type(x) in (Tensor, torch.nn.Parameter) and x.requires_grad and x.dim() == 2 and x.numel() <= _FEW_NUMBERS
            and x.dtype is torch.float32 and x.is_cpu and torch.is_grad_enabled())


def sum_of_rows(x: Tensor, index: Tensor, num: int) -> Tensor:
    """The sums (num, C) of the rows of x (M, C) of each group; `index` (M,) int64 in [0, num). Keeps no x."""
    return x.new_zeros(num, x.shape[1]).scatter_add_(0, index.as_strided(x.shape, (index.stride(0), 0)), x)


def segment_max(values: Tensor, index: Tensor, num: int, *, empty: float = 0.0, rows: bool = False) -> Tensor:
    """s_n = max of values_e over the entries e with index_e = n; `empty` if there is none.

    Args:
        values: (..., E), floating point.
        index: (E,) int32 or int64 in [0, num), in any order.
        num: number of segments.
        empty: value of a segment without entries.
        rows: if True, values are rows of channels, (..., E, C), and the result is (..., num, C).

    Returns:
        (..., num). Equal maxima share the gradient evenly, as in `torch.amax`.

    Raises:
        ShapeError: the number of values, or of rows, is not the length of `index`.
    """
    _check_segments("segment_max", values.mT if rows else values, index)
    positions = index.long()
    absent = torch.ones(num, dtype=torch.bool, device=index.device).index_fill(0, positions, 0)
    axis, shape = -1, (*values.shape[:-1], num)
    if rows:  # without a transpose: torch scatters whole rows several times faster
        axis, shape = -2, (*values.shape[:-2], num, values.shape[-1])
        positions, absent = positions.unsqueeze(-1), absent.unsqueeze(-1)
    # NaN equals nothing: torch shares the gradient with what was there before, left out or not, if that is a maximum
    start = values.new_full(shape, torch.nan)
    result = start.scatter_reduce(axis, positions.expand(values.shape), values, "amax", include_self=False)
    return result.masked_fill(absent, empty)


def segment_softmax(scores: Tensor, index: Tensor, num: int, *, keep: Tensor | None = None, rows: bool = False
                    ) -> Tensor:
    """p_e = exp(s_e) / sum of exp(s_f) over the entries f of the same segment, whose maximum is subtracted first.

    Args:
        scores: (..., E); 16-bit types are computed in float32.
        index: (E,) int32 or int64 in [0, num), in any order.
        num: number of segments.
        keep: boolean, broadcast against `scores`. Entries that are not kept have weight zero and gradient zero, even
            if their score, or that of one that is kept, is NaN; so do scores of -inf.
        rows: if True, scores are rows of channels, (..., E, C).

    Returns:
        The shape of `scores`: sums to one over every segment that has an entry left, zero elsewhere.

    Memory: the backward keeps the weights and nothing else of size E.

    Raises:
        ShapeError: if the sizes do not fit.
    """
    _check_segments("segment_softmax", scores.mT if rows else scores, index)
    scores, keep = _broadcast("segment_softmax", scores, keep)
    if transformed(scores):
        axis = -2 if rows else -1
        return _spelled(scores, keep, lambda t: segment_max(t, index, num, rows=rows).index_select(axis, index),
                        lambda t: segment_sum(t, index, num, rows=rows).index_select(axis, index))
    return apply(_SegmentSoftmax, scores, keep, index, num, rows)


def masked_softmax(scores: Tensor, keep: Tensor | None, dim: int) -> Tensor:
    """Softmax of a dense tensor along `dim` over the entries that `keep` marks.

    Args:
        scores: any shape; 16-bit types are computed in float32.
        keep: boolean, broadcast against `scores`; None keeps everything. Entries that are not kept have weight zero
            and gradient zero, even if their score, or that of one that is kept, is NaN; so do scores of -inf.
        dim: the dimension that sums to one, wherever an entry is left in it; elsewhere the weights are exactly zero.

    Returns:
        The broadcast shape. Memory: the backward keeps the weights and nothing else of that size.

    Raises:
        ShapeError: if `keep` does not broadcast against `scores`.
    """
    scores, keep = _broadcast("masked_softmax", scores, keep)
    if transformed(scores):
        return scores if scores.numel() == 0 else _spelled(
            scores, keep, lambda t: t.amax(dim, keepdim=True), lambda t: t.sum(dim, keepdim=True))
    return apply(_MaskedSoftmax, scores, keep, dim)


def _check_segments(owner: str, values: Tensor, index: Tensor) -> None:
    if index.dim() != 1 or values.dim() < 1 or values.shape[-1] != index.shape[0]:
        raise ShapeError(owner, "values must have shape (..., E) and index (E,)",
                         f"{text_of(values.shape)} and {text_of(index.shape)}")


def _broadcast(owner: str, scores: Tensor, keep: Tensor | None) -> tuple[Tensor, Tensor | None]:
    if keep is None:
        return scores, None
    sizes = list(zip(reversed(scores.shape), reversed(keep.shape), strict=False))
    if any(a != b and a != 1 and b != 1 for a, b in sizes):
        raise ShapeError(owner, f"keep must broadcast against scores {text_of(scores.shape)}", tuple(keep.shape))
    scores, keep = torch.broadcast_tensors(scores, keep)
    return scores, keep


def _known_finite(t: Tensor) -> bool:
    """Return True if all numbers are known to be finite, without waiting for a GPU."""
    return t.is_cpu and values_known(t) and finite(t)


def _softmax_grad(weights: Tensor, grad: Tensor, total: Any) -> Tensor:
    """p (g - <p, g>), zero wherever p is zero whatever g is there; `total` sums over a group and repeats the sum."""
    dtype = sum_dtype(weights.dtype)
    alive = weights != 0
    p, g = weights.to(dtype), torch.where(alive, grad, 0).to(dtype)
    return torch.where(alive, p * (g - total(p * g)), 0).to(weights.dtype)


def _spelled(scores: Tensor, keep: Tensor | None, peak: Callable[[Tensor], Tensor],
             total: Callable[[Tensor], Tensor]) -> Tensor:
    """A softmax in differentiable operators, for transforms and forward derivatives; `peak` and `total` repeat what
    they find in a group."""
    wide = scores.to(sum_dtype(scores.dtype))
    wide = wide if keep is None else wide.masked_fill(~keep, -torch.inf)
    top = peak(wide.detach())
    powers = torch.exp(torch.where(wide == -torch.inf, -torch.inf, wide - top.masked_fill(top == -torch.inf, 0)))
    totals = total(powers)
    weights = powers / totals.masked_fill(totals == 0, 1)
    # no derivative, be it not finite, passes where a weight is zero
    alive = weights != 0 if keep is None else (weights != 0) & keep
    return torch.where(alive, weights, 0).to(scores.dtype)


class _SegmentSoftmax(torch.autograd.Function):
    """Softmax over segments; its backward is made of differentiable operations on the weights."""

    @staticmethod
    def forward(scores: Tensor, keep: Tensor | None, index: Tensor, num: int, rows: bool) -> Tensor:
        axis = -2 if rows else -1
        wide = scores.to(sum_dtype(scores.dtype))
        absent = None if keep is None else ~keep
        if absent is not None:
            wide = wide.masked_fill(absent, -torch.inf)
        peak = segment_max(wide, index, num, rows=rows)
        peak = peak.masked_fill(peak == -torch.inf, 0).index_select(axis, index)
        powers = torch.exp(wide - peak)
        totals = segment_sum(powers, index, num, rows=rows)
        totals = totals.masked_fill(totals == 0, 1)
        weights = powers / totals.index_select(axis, index)
        # a NaN among those that are kept is no affair of the others
        return (weights if absent is None else weights.masked_fill(absent, 0)).to(scores.dtype)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        _, _, index, ctx.num, ctx.rows = inputs
        ctx.save_for_backward(output, index)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        weights, index = ctx.saved_tensors

        def total(values: Tensor) -> Tensor:
            return segment_sum(values, index, ctx.num, rows=ctx.rows).index_select(-2 if ctx.rows else -1, index)

        return _softmax_grad(weights, grad, total), None, None, None, None


class _MaskedSoftmax(torch.autograd.Function):
    """Softmax along a dimension; its backward is made of differentiable operations on the weights."""

    @staticmethod
    def forward(scores: Tensor, keep: Tensor | None, dim: int) -> Tensor:
        wide = scores.to(sum_dtype(scores.dtype))
        absent = None if keep is None else ~keep
        if absent is not None:
            wide = wide.masked_fill(absent, -torch.inf)
        if wide.numel() == 0:
            return torch.empty_like(scores)
        if absent is None and _known_finite(weights := torch.softmax(wide, dim)):
            return weights.to(scores.dtype)
        dead = wide.amax(dim, keepdim=True) == -torch.inf
        dead = dead if absent is None else dead | absent
        return torch.softmax(wide, dim).masked_fill(dead, 0).to(scores.dtype)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        *_, ctx.dim = inputs
        ctx.save_for_backward(output)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (weights,) = ctx.saved_tensors
        wide = weights.dtype is sum_dtype(weights.dtype)
        if private.softmax_backward is not None and wide and _known_finite(grad):  # one pass instead of several
            return private.softmax_backward(grad, weights, ctx.dim, weights.dtype), None, None

        def total(values: Tensor) -> Tensor:
            return values.sum(ctx.dim, keepdim=True)

        return _softmax_grad(weights, grad, total), None, None
