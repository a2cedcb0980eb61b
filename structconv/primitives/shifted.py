"""Products of shifted slices: sum_k x[m + s_k] Theta_k over contiguous ranges of rows, without copies.

The two operators are closed under differentiation: the backward of each calls the other or itself, with the shifts'
signs turned. Both are opaque to `torch.compile` and `torch.export`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from structconv.errors import ShapeError, text_of
from structconv.primitives.native.checks import check_numbers
from structconv.primitives.operator import define

__all__ = ["shift_products"]


def shift_products(x: Tensor, theta: Tensor, shifts: Sequence[int], rows: int | None = None) -> Tensor:
    """y[b, m] = sum over k of x[b, m + s_k] Theta_k, where a row m + s_k outside [0, M) adds nothing.

    Args:
        x: (B, M, P).
        theta: (K, P, Q), in x's dtype.
        shifts: s_k, one integer for each k.
        rows: N, how many rows m are computed, from 0 on; by default M.

    Returns:
        (B, N, Q). Differentiable any number of times. 16-bit types are summed over k in float32.

    Cost: 2 K B N P Q flops, less where ranges are cut; no memory beyond the result.

    Raises:
        ShapeError: if sizes do not fit.
    """
    rows = x.shape[1] if rows is None and x.dim() > 1 else rows or 0
    _check(x, theta, shifts, rows)
    return _products(x, theta, list(shifts), rows)


def _check(x: Tensor, theta: Tensor, shifts: Sequence[int], rows: int) -> None:
    if x.dim() != 3 or theta.dim() != 3 or theta.shape[1] != x.shape[2]:
        raise ShapeError("shift_products", "x and theta must have shapes (B, M, P) and (K, P, Q)",
                         f"{text_of(x.shape)} and {text_of(theta.shape)}")
    if len(shifts) != theta.shape[0]:
        raise ShapeError("shift_products", f"shifts must be K={theta.shape[0]} integers", len(shifts))
    if rows < 0:
        raise ShapeError("shift_products", "rows must be at least 0", rows)


def _ranges(read: int, written: int, shifts: Sequence[int]) -> Iterator[tuple[int, slice, slice]]:
    """For each shift that hits a row: its number, the rows that are written, and those that are read."""
    for k, shift in enumerate(shifts):
        low, high = max(0, -shift), min(written, read - shift)
        if low < high:
            yield k, slice(low, high), slice(low + shift, high + shift)


def _products_kernel(x: Tensor, theta: Tensor, shifts: Sequence[int], rows: int) -> Tensor:
    narrow = x.dtype in (torch.bfloat16, torch.float16)
    y = x.new_zeros((x.shape[0], rows, theta.shape[2]), dtype=torch.float32 if narrow else x.dtype)
    matrices = theta.unsqueeze(1).expand(-1, x.shape[0], -1, -1)
    for k, written, read in _ranges(x.shape[1], rows, shifts):
        if narrow:
            y[:, written].add_(torch.bmm(x[:, read], matrices[k]))
        else:
            y[:, written].baddbmm_(x[:, read], matrices[k])
    return y.to(x.dtype)


def _correlation_kernel(x: Tensor, g: Tensor, shifts: Sequence[int]) -> Tensor:
    """theta[k] = sum over b and m of x[b, m + s_k]^T g[b, m]."""
    theta = x.new_zeros((len(shifts), x.shape[2], g.shape[2]))
    for k, written, read in _ranges(x.shape[1], g.shape[1], shifts):
        torch.sum(torch.bmm(x[:, read].mT, g[:, written]), 0, out=theta[k])
    return theta


def _check_products(x: Tensor, theta: Tensor, shifts: Sequence[int], rows: int) -> None:
    check_numbers("shift_products", x, theta)
    _check(x, theta, shifts, rows)
    _check_dtypes("shift_products", x, theta)


def _check_correlation(x: Tensor, g: Tensor, shifts: Sequence[int]) -> None:
    check_numbers("shift_correlation", x, g)
    if x.dim() != 3 or g.dim() != 3 or g.shape[0] != x.shape[0]:
        raise ShapeError("shift_correlation", "x and g must have shapes (B, M, P) and (B, N, Q)",
                         f"{text_of(x.shape)} and {text_of(g.shape)}")
    _check_dtypes("shift_correlation", x, g)


def _check_dtypes(owner: str, x: Tensor, other: Tensor) -> None:
    if x.dtype != other.dtype:
        raise ShapeError(owner, "both tensors must have one dtype", f"{x.dtype} and {other.dtype}")


def _products_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    (x, theta), (shifts, _) = ctx.saved_tensors, ctx.options
    needs_x, needs_theta = ctx.needs_input_grad[:2]
    back = [-shift for shift in shifts]
    return (_products(grad, theta.mT, back, x.shape[1]) if needs_x else None,
            _correlation(x, grad, shifts) if needs_theta else None, None, None)


def _correlation_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    (x, g), (shifts,) = ctx.saved_tensors, ctx.options
    needs_x, needs_g = ctx.needs_input_grad[:2]
    back = [-shift for shift in shifts]
    return (_products(g, grad.mT, back, x.shape[1]) if needs_x else None,
            _products(x, grad, shifts, g.shape[1]) if needs_g else None, None)


_products = define(
    "shift_products", "Tensor x, Tensor theta, SymInt[] shifts, SymInt rows", _products_kernel,
    lambda x, theta, shifts, rows: x.new_empty((x.shape[0], rows, theta.shape[2])), _check_products,
    backward=_products_backward, linear_in=(0, 1))
_correlation = define(
    "shift_correlation", "Tensor x, Tensor g, SymInt[] shifts", _correlation_kernel,
    lambda x, g, shifts: x.new_empty((len(shifts), x.shape[2], g.shape[2])), _check_correlation,
    backward=_correlation_backward, linear_in=(0, 1))
