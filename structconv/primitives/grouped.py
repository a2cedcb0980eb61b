"""Products of groups of consecutive rows with one matrix each, and their adjoint, as registered operators."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from structconv.errors import ShapeError, text_of
from structconv.primitives.native.checks import check_numbers
from structconv.primitives.operator import define

__all__ = ["add_group_outer", "group_outer", "group_products", "write_group_products"]


def group_products(x: Tensor, theta: Tensor, bounds: Sequence[int]) -> Tensor:
    """y[u] = x[u] theta[k] for bounds[k] <= u < bounds[k + 1].

    Args:
        x: (U, P), the rows of one k consecutive.
        theta: (K, P, Q), or (K, G, P / G, Q / G) for matrices of G blocks on the diagonal.
        bounds: K + 1 integers from 0 to U that do not fall.

    Returns:
        (U, Q). One matrix product for each k with rows, and each of its blocks; 2 U P Q / G flops, no memory beyond
        the result. Differentiable any number of times.

    Raises:
        ShapeError: if the sizes do not fit.
    """
    theta_KGPQ = theta.unsqueeze(1) if theta.dim() == 3 else theta
    _check_products(x, theta_KGPQ, bounds)
    return _group_products(x, theta_KGPQ, list(bounds))


def group_outer(x: Tensor, y: Tensor, bounds: Sequence[int], blocks: int = 1) -> Tensor:
    """z[k, g] = sum of x[u, g]^T y[u, g] over bounds[k] <= u < bounds[k + 1]: the adjoint in theta.

    x (U, P), y (U, Q) -> (K, G, P / G, Q / G) for G blocks, zero where there are no rows. Cost and errors are those
    of `group_products`.
    """
    _check_outer(x, y, bounds, blocks)
    return _group_outer(x, y, list(bounds), blocks)


def write_group_products(y: Tensor, x: Tensor, theta: Tensor, bounds: Sequence[int]) -> None:
    """`group_products` into y (U, Q), for theta (K, G, P / G, Q / G): nothing is allocated, no gradient recorded."""
    _, blocks, p, q = theta.shape
    for k, start, stop in _groups(bounds):
        for g in range(blocks):
            torch.mm(x[start:stop, g * p:(g + 1) * p], theta[k, g], out=y[start:stop, g * q:(g + 1) * q])


def add_group_outer(z: Tensor, x: Tensor, y: Tensor, bounds: Sequence[int]) -> None:
    """`group_outer`, added to z (K, G, P / G, Q / G): nothing is allocated, no gradient recorded."""
    _, blocks, p, q = z.shape
    for k, start, stop in _groups(bounds):
        for g in range(blocks):
            z[k, g].addmm_(x[start:stop, g * p:(g + 1) * p].t(), y[start:stop, g * q:(g + 1) * q])


def _check(owner: str, x: Tensor, bounds: Sequence[int], count: int) -> None:
    if x.dim() != 2 or len(bounds) != count + 1 or not bounds or bounds[0] != 0 or bounds[-1] != x.shape[0]:
        raise ShapeError(owner, f"rows must have shape (U={bounds[-1] if bounds else 0}, C), in K={count} groups",
                         f"{text_of(x.shape)} in {len(bounds) - 1}")
    if any(stop < start for start, stop in pairwise(bounds)):
        raise ShapeError(owner, "bounds must not fall", list(bounds))


def _check_products(x: Tensor, theta: Tensor, bounds: Sequence[int]) -> None:
    if theta.dim() != 4 or x.dim() != 2 or theta.shape[1] * theta.shape[2] != x.shape[1]:
        raise ShapeError("group_products", "x (U, P) must have the channels of theta (K, P, Q) or (K, G, P/G, Q/G)",
                         f"{text_of(x.shape)} and {text_of(theta.shape)}")
    _check("group_products", x, bounds, theta.shape[0])


def _check_outer(x: Tensor, y: Tensor, bounds: Sequence[int], blocks: int) -> None:
    for rows in (x, y):
        _check("group_outer", rows, bounds, len(bounds) - 1)
        if blocks < 1 or rows.shape[1] % blocks:
            raise ShapeError("group_outer", f"channels must be a multiple of the blocks G={blocks}", rows.shape[1])


def _checked(owner: str, check: Callable[..., None]) -> Callable[..., None]:
    """Return the check that a raw call runs."""
    def of(a: Tensor, b: Tensor, *more: Any) -> None:
        check_numbers(owner, a, b)
        check(a, b, *more)
        if a.dtype != b.dtype:
            raise ShapeError(owner, "both tensors must have one dtype", f"{a.dtype} and {b.dtype}")

    return of


def _groups(bounds: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """(k, start, stop) of the groups that have rows."""
    for k, (start, stop) in enumerate(pairwise(bounds)):
        if start < stop:
            yield k, start, stop


def _products_kernel(x: Tensor, theta: Tensor, bounds: Sequence[int]) -> Tensor:
    y = x.new_empty((x.shape[0], theta.shape[1] * theta.shape[3]))
    write_group_products(y, x, theta, bounds)
    return y


def _outer_kernel(x: Tensor, y: Tensor, bounds: Sequence[int], blocks: int) -> Tensor:
    z = x.new_zeros((len(bounds) - 1, blocks, x.shape[1] // blocks, y.shape[1] // blocks))
    add_group_outer(z, x, y, bounds)
    return z


def _products_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    (x, theta), (bounds,) = ctx.saved_tensors, ctx.options
    return (group_products(grad, theta.mT, bounds) if ctx.needs_input_grad[0] else None,
            group_outer(x, grad, bounds, theta.shape[1]) if ctx.needs_input_grad[1] else None, None)


def _outer_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    (x, y), (bounds, _) = ctx.saved_tensors, ctx.options
    return (group_products(y, grad.mT, bounds) if ctx.needs_input_grad[0] else None,
            group_products(x, grad, bounds) if ctx.needs_input_grad[1] else None, None, None)


_group_products = define(
    "group_products", "Tensor x, Tensor theta, int[] bounds", _products_kernel,
    lambda x, theta, bounds: x.new_empty((x.shape[0], theta.shape[1] * theta.shape[3])),
    _checked("group_products", _check_products), backward=_products_backward, linear_in=(0, 1))
_group_outer = define(
    "group_outer", "Tensor x, Tensor y, int[] bounds, int blocks", _outer_kernel,
    lambda x, y, bounds, blocks: x.new_empty((len(bounds) - 1, blocks, x.shape[1] // blocks, y.shape[1] // blocks)),
    _checked("group_outer", _check_outer), backward=_outer_backward, linear_in=(0, 1))
