"""`projected_attention`: attention along edges whose affine scores are linear in the very rows that it sums (GAT)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from structconv.errors import ConfigError, ShapeError
from structconv.primitives.functions import sum_dtype
from structconv.primitives.native import affine, dispatch
from structconv.primitives.native.checks import check_dropout
from structconv.primitives.native.dispatch import edges_of
from structconv.primitives.native.indices import Csr
from structconv.primitives.native.operator import differentiable_operator, trains

__all__ = ["projected_attention"]


def projected_attention(by_target: Csr, by_source: Csr, x: Tensor, of_source: Tensor, of_target: Tensor,
                        z: Tensor | None = None, bias: Tensor | None = None, *, slope: float = 0.2,
                        dropout: float = 0.0, seed: Tensor | None = None, batch_heads: int | None = None) -> Tensor:
    """`affine_attention` with the terms s_mk = <of_source_k, x_mk> and t_nk = <of_target_k, z_nk> of its scores.

    GAT's layer after its projection (Velickovic et al., 2018, equations 1 to 6). The terms are one pass over the rows,
    and their gradients are added to those of x and z, and to the vectors', while a row is at hand.

    Args:
        by_target, by_source: the two layouts of the edges.
        x: (M, K, C), any strides; natively float32 and bfloat16 on a CPU, as in `affine_attention`.
        of_source, of_target: (K, C).
        z: (N, K, C), or None for x.
        bias: (K, C), added to every output; x of 32 bits or more. A gradient then knows y as exactly as y + bias does.
        slope, dropout, seed, batch_heads: as in `affine_attention`.

    Returns:
        (N, K, C) of the dtype of x.

    Cost: that of `affine_attention`, and 4 (M + N) K C flops. The gradients of the vectors do not depend on threads.

    Raises:
        ShapeError: if sizes do not fit the edges or each other.
        ConfigError: for a negative slope, a p outside [0, 1), or dropout without a seed.
    """
    _check(by_target, by_source, x, z, of_source, of_target, bias, slope, dropout, seed, batch_heads)
    return _projected_attention(*by_target, *by_source, x, z, of_source, of_target, bias, slope, dropout, seed,
                                x.shape[1] if batch_heads is None else batch_heads,
                                trains(x, z, of_source, of_target, bias))[0]


def _check(by_target: Csr, by_source: Csr, x: Tensor, z: Tensor | None, of_source: Tensor, of_target: Tensor,
           bias: Tensor | None, slope: float, dropout: float, seed: Tensor | None, batch_heads: int | None) -> None:
    inputs, outputs = by_source.indptr.shape[0] - 1, by_target.indptr.shape[0] - 1
    if x.dim() != 3 or x.shape[0] != inputs:
        raise ShapeError("projected_attention", f"x must have shape (M={inputs}, K, C)", tuple(x.shape))
    heads = (x.shape[1], x.shape[2])
    entries = x if z is None else z
    if entries.shape != (outputs, *heads):
        expected = f"{'x' if z is None else 'z'} must have shape (N={outputs}, K={heads[0]}, C={heads[1]})"
        raise ShapeError("projected_attention", expected, tuple(entries.shape))
    if entries.dtype != x.dtype:
        raise ShapeError("projected_attention", f"z must have the dtype of x, {x.dtype}", entries.dtype)
    for name, vector in (("of_source", of_source), ("of_target", of_target), ("bias", bias)):
        if vector is not None and vector.shape != heads:
            raise ShapeError("projected_attention", f"{name} must have shape (K={heads[0]}, C={heads[1]})",
                             tuple(vector.shape))
    if bias is not None and sum_dtype(x.dtype) != x.dtype:
        raise ConfigError("projected_attention", "bias must be absent where x has 16 bits", x.dtype, "Add it to y.")
    if slope < 0:
        raise ConfigError("projected_attention", "slope must be at least 0", slope)
    check_dropout("projected_attention", dropout, seed, batch_heads)


# -- kernels ------------------------------------------------------------------------------------------------------

def _forward(indptr: Tensor, indices: Tensor, order: Tensor, indptr_T: Tensor, indices_T: Tensor, order_T: Tensor,
             x: Tensor, z: Tensor | None, of_source: Tensor, of_target: Tensor, bias: Tensor | None, slope: float,
             p: float, seed: Tensor | None, batch_heads: int, train: bool) -> tuple[Tensor, ...]:
    kernels = dispatch.usable(x, indices.shape[0])
    if kernels is not None:
        results: tuple[Tensor, ...] = kernels.projected_forward(
            edges_of(Csr(indptr, indices, order), x.shape[0]), x, z, of_source, of_target, bias, slope,
            *dispatch.drop_of(p, seed, batch_heads), train)
        return results
    source, target = terms(x, z, of_source, of_target)
    y, *saved = affine.forward(indptr, indices, order, indptr_T, indices_T, order_T, source, target, x, slope, p, seed,
                               batch_heads, train)
    return y if bias is None else y + bias, *saved, source, target


def _backward(indptr: Tensor, indices: Tensor, order: Tensor, indptr_T: Tensor, indices_T: Tensor, order_T: Tensor,
              x: Tensor, z: Tensor | None, of_source: Tensor, of_target: Tensor, bias: Tensor | None, y: Tensor,
              y2: Tensor, lse: Tensor, mass: Tensor, source: Tensor, target: Tensor, grad: Tensor, slope: float,
              p: float, seed: Tensor | None, batch_heads: int) -> tuple[Tensor | None, ...]:
    edges = (indptr, indices, order, indptr_T, indices_T, order_T)
    kernels, inputs = dispatch.usable(x, indices.shape[0]), (x, z, of_source, of_target, bias)
    if kernels is not None:
        found = kernels.projected_backward(
            edges_of(Csr(*edges[:3]), x.shape[0]), edges_of(Csr(*edges[3:]), y.shape[0]), *inputs, y, y2, lse, mass,
            source, target, grad, slope, *dispatch.drop_of(p, seed, batch_heads))
        return _typed(found, inputs)
    y = y if bias is None else y - bias
    grad_source, grad_target, grad_x = affine.backward(*edges, source, target, x, y, y2, lse, mass, grad, slope, p,
                                                       seed, batch_heads)
    dtype = sum_dtype(x.dtype)
    more_x, more_z = grad_source.unsqueeze(-1) * of_source.to(dtype), grad_target.unsqueeze(-1) * of_target.to(dtype)
    vectors = (_used(layout, rows.to(dtype), term) for layout, rows, term in (
        (indptr_T, x, grad_source), (indptr, x if z is None else z, grad_target)))
    grad_x = grad_x + (more_x + more_z if z is None else more_x)
    return _typed((grad_x, None if z is None else more_z, *vectors, None if bias is None else grad.sum(0)), inputs)


def _typed(found: Iterable[Tensor | None], inputs: Iterable[Tensor | None]) -> tuple[Tensor | None, ...]:
    """Gradients in the dtypes of what they are of."""
    return tuple(None if g is None or t is None else g.to(t.dtype) for g, t in zip(found, inputs, strict=True))


def terms(x: Tensor, z: Tensor | None, of_source: Tensor, of_target: Tensor) -> tuple[Tensor, Tensor]:
    """<of_source_k, x_mk> (M, K) and <of_target_k, z_nk> (N, K), in a type that sums well."""
    dtype = sum_dtype(x.dtype)
    return tuple((rows.to(dtype) * vector.to(dtype)).sum(-1)  # type: ignore[return-value]
                 for rows, vector in ((x, of_source), (x if z is None else z, of_target)))


def _used(indptr: Tensor, rows: Tensor, term: Tensor) -> Tensor:
    """sum over the rows that have edges of rows_mk term_mk: (M, K, C), (M, K) -> (K, C)."""
    filled = (indptr.diff() > 0).view(-1, 1, 1)
    return (torch.where(filled, rows, 0) * term.unsqueeze(-1)).sum(0)


def _composed(by_target: Csr, by_source: Csr, x: Tensor, z: Tensor | None, of_source: Tensor, of_target: Tensor,
              bias: Tensor | None, *options: Any) -> Tensor:
    """Compute the result by differentiable operators, for second derivatives."""
    source, target = ((rows * vector).sum(-1)
                      for rows, vector in ((x, of_source), (x if z is None else z, of_target)))
    y = affine.composed(by_target, by_source, source, target, x, *options)
    return y if bias is None else y + bias


# -- registration -------------------------------------------------------------------------------------------------

def _fake(*args: Any) -> tuple[Tensor, ...]:
    indptr, x, z, train = args[0], args[6], args[7], args[15]
    rows, dtype = (indptr.shape[0] - 1 if z is None else z.shape[0]), sum_dtype(x.dtype)
    y, y2 = (x.new_empty((size, *x.shape[1:])) for size in (rows, rows if train else 0))
    lse, mass, target = (x.new_empty((rows, x.shape[1]), dtype=dtype) for _ in range(3))
    return y, y2, lse, mass, x.new_empty(x.shape[:2], dtype=dtype), target


_projected_attention = differentiable_operator(
    "projected_attention", "Tensor x, Tensor? z, Tensor of_source, Tensor of_target, Tensor? bias",
    "float slope, float p, Tensor? seed, SymInt batch_heads", "y, y2, lse, mass, source, target", flags="bool train",
    forward=_forward, fake=_fake, backward=_backward, composed=_composed, check=_check)
