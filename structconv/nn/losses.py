"""torch's cross entropy without one of its tables of class scores."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from structconv.derived import values_known
from structconv.primitives.functions import apply, transformed

__all__ = ["cross_entropy"]

#: Numbers of the gradient that are written at once, 1 MB, which the caches hold; fewer in all are left to torch.
_BLOCK = 1 << 18


def cross_entropy(input: Tensor, target: Tensor, weight: Tensor | None = None, size_average: bool | None = None,
                  ignore_index: int = -100, reduce: bool | None = None, reduction: str = "mean",
                  label_smoothing: float = 0.0) -> Tensor:
    """Sum or mean over i of -(1 - s) log p_i,t - s/V sum_v log p_iv, p = softmax(input), t = target_i, s the smoothing:
    a drop-in for `torch.nn.functional.cross_entropy`.

    Of large scores (M, V), float32 or float64 on a CPU, and classes (M) the backward pass holds two tables of M V
    numbers, log p and the gradient, where torch's holds three. Everything else is torch's: a weight, other shapes,
    dtypes and devices, no reduction, functional transforms, compiled programs.

    Args:
        input, target, weight, size_average, ignore_index, reduce, reduction, label_smoothing: as torch's.

    Differentiable any number of times. Raises what torch raises. 7 M V flops.

    Example:

        >>> from structconv.nn import cross_entropy
        >>> logits, target = torch.randn(5, 7), torch.randint(7, (5,))
        >>> torch.allclose(cross_entropy(logits, target), torch.nn.functional.cross_entropy(logits, target))
        True
    """
    common = (weight is None and size_average is None and reduce is None and reduction in ("mean", "sum")
              and type(ignore_index) is int and type(label_smoothing) in (int, float) and 0 <= label_smoothing <= 1)
    if common and _large(input, target) and not transformed(input):
        result = _own(input, target, ignore_index, reduction, label_smoothing)
        if result is not None:
            return result
    return F.cross_entropy(input, target, weight, size_average, ignore_index, reduce, reduction, label_smoothing)


def _large(input: Tensor, target: Tensor) -> bool:
    """Return True for a large table of contiguous scores with one class for each row."""
    return (values_known(input, target) and input.dim() == 2 and input.numel() >= _BLOCK
            and input.dtype in (torch.float32, torch.float64) and input.is_cpu and target.is_cpu
            and target.dtype is torch.int64 and target.shape == input.shape[:1])


def _own(input: Tensor, target: Tensor, ignore_index: int, reduction: str, smoothing: float) -> Tensor | None:
    """The loss; `None` if a class does not exist, for which torch has an error."""
    counts = target != ignore_index
    share = 1 / counts.sum(dtype=input.dtype) if reduction == "mean" else input.new_ones(())
    place = target.where(counts, 0).unsqueeze(1)
    try:
        loss: Tensor = apply(_CrossEntropy, input, place, counts.unsqueeze(1), share, smoothing)[0]
    except RuntimeError:
        return None
    return loss


class _CrossEntropy(torch.autograd.Function):
    """The sum of the losses of the rows that count, times a share, and log p, which the backward pass reads."""

    @staticmethod
    def forward(ctx: Any, input: Tensor, place_M1: Tensor, counts_M1: Tensor, share: Tensor, smoothing: float
                ) -> tuple[Tensor, Tensor]:
        log_p = input.log_softmax(1)
        log_likelihood = log_p.gather(1, place_M1)
        if smoothing:
            log_likelihood = (1 - smoothing) * log_likelihood + smoothing * log_p.mean(1, keepdim=True)
        ctx.smoothing = smoothing
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(log_p, place_M1, counts_M1, share)
        return -log_likelihood.masked_fill(~counts_M1, 0).sum() * share, log_p

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, grad_log_p: Tensor | None) -> tuple[Tensor | None, ...]:
        log_p, place_M1, counts_M1, share = ctx.saved_tensors
        result = None
        if grad is not None:
            scale = torch.where(counts_M1, share * grad, 0)
            slope = _slope if torch.is_grad_enabled() or transformed(grad) else _slope_in_place
            result = slope(log_p, place_M1, scale, ctx.smoothing)
        if grad_log_p is not None:  # of a derivative that is differentiated
            more = grad_log_p - log_p.exp() * grad_log_p.sum(1, keepdim=True)
            result = more if result is None else result + more
        return result, None, None, None, None


def _slope(log_p: Tensor, place_M1: Tensor, scale: Tensor, smoothing: float) -> Tensor:
    """The gradient in the scores: (p - (1 - s) [v = t] - s/V) times the scale of the row."""
    even = log_p.exp() - smoothing / log_p.shape[1]
    return (even * scale).scatter_add(1, place_M1, (smoothing - 1) * scale)


def _slope_in_place(log_p: Tensor, place_M1: Tensor, scale: Tensor, smoothing: float) -> Tensor:
    """Compute the gradient in one table, in blocks that fit the caches."""
    slope = torch.empty_like(log_p)
    rows = max(1, _BLOCK // log_p.shape[1])
    for out, own, place, by in zip(*(t.split(rows) for t in (slope, log_p, place_M1, scale)), strict=True):
        torch.exp(own, out=out)
        if smoothing:
            out -= smoothing / log_p.shape[1]
        out *= by
        out.scatter_add_(1, place, (smoothing - 1) * by)
    return slope
