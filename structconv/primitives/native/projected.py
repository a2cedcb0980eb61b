"""`projected_attention`: attention along edges whose affine scores are linear in the very rows that it sums (GAT)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from structconv.errors import ConfigError, ShapeError
from structconv.primitives.layout import Csr
from structconv.primitives.native import affine, calls
from structconv.primitives.native.edges import Drop, wide
from structconv.primitives.native.registry import check_dropout, register, register_gradient, twice_differentiable

__all__ = ["projected_attention"]

_Edges = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]


def projected_attention(by_target: Csr, by_source: Csr, x: Tensor, of_source: Tensor, of_target: Tensor,
                        z: Tensor | None = None, *, slope: float = 0.2, dropout: float = 0.0,
                        seed: Tensor | None = None, batch_heads: int | None = None) -> Tensor:
    """`affine_attention` with the terms s_mk = <of_source_k, x_mk> and t_nk = <of_target_k, z_nk> of its scores.

    GAT's layer after its projection (Velickovic et al., 2018, equations 1 to 6). The terms are one pass over the rows,
    and their gradients are added to those of x and z, and to the vectors', while a row is at hand.

    Args:
        by_target, by_source: the two layouts of the edges.
        x: (M, K, C), any strides; natively float32 and bfloat16 on a CPU, as in `affine_attention`.
        of_source, of_target: (K, C).
        z: (N, K, C), or None for x.
        slope, dropout, seed, batch_heads: as in `affine_attention`.

    Returns:
        (N, K, C) of the dtype of x.

    Cost: that of `affine_attention`, and 4 (M + N) K C flops. The gradients of the vectors do not depend on threads.

    Raises:
        ShapeError: if sizes do not fit the edges or each other.
        ConfigError: for a negative slope, a p outside [0, 1), or dropout without a seed.
    """
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
    for name, vector in (("of_source", of_source), ("of_target", of_target)):
        if vector.shape != heads:
            raise ShapeError("projected_attention", f"{name} must have shape (K={heads[0]}, C={heads[1]})",
                             tuple(vector.shape))
    if slope < 0:
        raise ConfigError("projected_attention", "slope must be at least 0", slope)
    check_dropout("projected_attention", dropout, seed)
    train = torch.is_grad_enabled() and any(t.requires_grad for t in (x, entries, of_source, of_target))
    return torch.ops.structconv.projected_attention(*by_target, *by_source, x, z, of_source, of_target, slope, dropout,
                                                    seed, heads[0] if batch_heads is None else batch_heads, train)[0]


# -- kernels ------------------------------------------------------------------------------------------------------

def _forward(indptr: Tensor, indices: Tensor, order: Tensor, indptr_T: Tensor, indices_T: Tensor, order_T: Tensor,
             x: Tensor, z: Tensor | None, of_source: Tensor, of_target: Tensor, slope: float, p: float,
             seed: Tensor | None, batch_heads: int, train: bool) -> tuple[Tensor, ...]:
    kernels = calls.usable(x, indices.shape[0])
    if kernels is not None:
        return calls.projected_forward(kernels, Csr(indptr, indices, order), x, calls.Vectors(of_source, of_target, z),
                                       slope, Drop(p, seed, batch_heads).plain(), train)
    source, target = _terms(x, z, of_source, of_target)
    return *affine.forward(indptr, indices, order, indptr_T, indices_T, order_T, source, target, x, slope, p, seed,
                           batch_heads, train), source, target


def _backward(indptr: Tensor, indices: Tensor, order: Tensor, indptr_T: Tensor, indices_T: Tensor, order_T: Tensor,
              x: Tensor, z: Tensor | None, of_source: Tensor, of_target: Tensor, y: Tensor, y2: Tensor, lse: Tensor,
              mass: Tensor, source: Tensor, target: Tensor, grad: Tensor, slope: float, p: float, seed: Tensor | None,
              batch_heads: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    edges = (indptr, indices, order, indptr_T, indices_T, order_T)
    kernels = calls.usable(x, indices.shape[0])
    if kernels is not None:
        grad_x, grad_z, grad_u, grad_v = calls.projected_backward(
            kernels, Csr(*edges[:3]), Csr(*edges[3:]), x, calls.Vectors(of_source, of_target, z),
            (y, y2, lse, mass, source, target), grad, slope, Drop(p, seed, batch_heads).plain())
        grad_z = x.new_empty((0, *x.shape[1:])) if grad_z is None else grad_z
        return grad_x, grad_z, grad_u.to(of_source.dtype), grad_v.to(of_target.dtype)
    grad_source, grad_target, grad_x = affine.backward(*edges, source, target, x, y, y2, lse, mass, grad, slope, p, seed,
                                                       batch_heads)
    dtype = wide(x.dtype)
    entries = (x if z is None else z).to(dtype)
    more_x, more_z = grad_source.unsqueeze(-1) * of_source.to(dtype), grad_target.unsqueeze(-1) * of_target.to(dtype)
    grad_u, grad_v = (_used(layout, rows, term) for layout, rows, term in (
        (indptr_T, x.to(dtype), grad_source), (indptr, entries, grad_target)))
    grad_z = x.new_empty((0, *x.shape[1:])) if z is None else more_z.to(x.dtype)
    grad_x = (grad_x + (more_x + more_z if z is None else more_x)).to(x.dtype)
    return grad_x, grad_z, grad_u.to(of_source.dtype), grad_v.to(of_target.dtype)


def _terms(x: Tensor, z: Tensor | None, of_source: Tensor, of_target: Tensor) -> tuple[Tensor, Tensor]:
    """<of_source_k, x_mk> (M, K) and <of_target_k, z_nk> (N, K), in a type that sums well."""
    dtype = wide(x.dtype)
    return tuple((rows.to(dtype) * vector.to(dtype)).sum(-1)  # type: ignore[return-value]
                 for rows, vector in ((x, of_source), (x if z is None else z, of_target)))


def _used(indptr: Tensor, rows: Tensor, term: Tensor) -> Tensor:
    """sum over the rows that have edges of rows_mk term_mk: (M, K, C), (M, K) -> (K, C)."""
    filled = (indptr.diff() > 0).view(-1, 1, 1)
    return (torch.where(filled, rows, 0) * term.unsqueeze(-1)).sum(0)


def _composed(edges: _Edges, x: Tensor, z: Tensor | None, of_source: Tensor, of_target: Tensor, slope: float,
              drop: Drop) -> Tensor:
    """The same numbers by differentiable operators: what a second derivative is taken of."""
    source, target = ((rows * vector).sum(-1)
                      for rows, vector in ((x, of_source), (x if z is None else z, of_target)))
    return affine.composed(Csr(*edges[:3]), Csr(*edges[3:]), source, target, x, slope, drop)


# -- registration -------------------------------------------------------------------------------------------------

def _forward_fake(*args: Any) -> tuple[Tensor, ...]:
    indptr, x, z, train = args[0], args[6], args[7], args[14]
    rows, dtype = (indptr.shape[0] - 1 if z is None else z.shape[0]), wide(x.dtype)
    y, y2 = (x.new_empty((size, *x.shape[1:])) for size in (rows, rows if train else 0))
    lse, mass, target = (x.new_empty((rows, x.shape[1]), dtype=dtype) for _ in range(3))
    return y, y2, lse, mass, x.new_empty(x.shape[:2], dtype=dtype), target


def _backward_fake(*args: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    x, z, of_source, of_target = args[6:10]
    grad_z = x.new_empty((0, *x.shape[1:])) if z is None else z.new_empty(z.shape)
    return x.new_empty(x.shape), grad_z, of_source.new_empty(of_source.shape), of_target.new_empty(of_target.shape)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.slope, ctx.p, seed, ctx.batch_heads = inputs[10:14]
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*inputs[:10], seed, *output)


def _differentiate(ctx: Any, grad: Tensor | None, *_: Tensor | None) -> tuple[Tensor | None, ...]:
    nothing = (None,) * 15
    if grad is None:
        return nothing
    tensors, seed, saved = ctx.saved_tensors[:10], ctx.saved_tensors[10], ctx.saved_tensors[11:]
    needed = ctx.needs_input_grad[6:10]
    if torch.is_grad_enabled():
        drop = Drop(ctx.p, seed, ctx.batch_heads)
        found = twice_differentiable(lambda *t: _composed(tensors[:6], *t, ctx.slope, drop), tensors[6:], needed, grad)
    else:
        found = torch.ops.structconv.projected_attention_backward(*tensors, *saved, grad, ctx.slope, ctx.p, seed,
                                                                  ctx.batch_heads)
    return *nothing[:6], *(g if need else None for g, need in zip(found, needed, strict=True)), *nothing[10:]


register("projected_attention", "Tensor x, Tensor? z, Tensor of_source, Tensor of_target, float slope, float p, "
         "Tensor? seed, SymInt batch_heads, bool train) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)", _forward,
         _forward_fake)
register("projected_attention_backward", "Tensor x, Tensor? z, Tensor of_source, Tensor of_target, Tensor y, Tensor y2, "
         "Tensor lse, Tensor mass, Tensor source, Tensor target, Tensor grad, float slope, float p, Tensor? seed, "
         "SymInt batch_heads) -> (Tensor, Tensor, Tensor, Tensor)", _backward, _backward_fake)
register_gradient("projected_attention", _differentiate, _save)
