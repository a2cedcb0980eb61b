"""`packed_attention`: attention along edges whose queries, keys and values are columns of one table."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from structconv.errors import ShapeError
from structconv.primitives.functions import sum_dtype
from structconv.primitives.memory import new_empty
from structconv.primitives.native import bilinear, dispatch
from structconv.primitives.native.checks import check_dropout
from structconv.primitives.native.indices import Csr
from structconv.primitives.native.operator import differentiable_operator

__all__ = ["packed_attention"]


def packed_attention(by_target: Csr, by_source: Csr, table: Tensor, q: Tensor | None = None, bias: Tensor | None = None,
                    *, heads: int, depth: int, scale: float = 1.0, dropout: float = 0.0, seed: Tensor | None = None,
                    batch_heads: int | None = None) -> Tensor:
    """`bilinear_attention` of the queries, keys and values in the columns of one table, [q | k | v] or [k | v].

    One product x [W^q W^k W^v] makes the table, and one its gradient in x: neither tables nor their gradients are
    joined or added up. Scaled dot-product attention (Vaswani et al., 2017, equation 1) along edges.

    Args:
        by_target, by_source: the two layouts of the edges.
        table: (M, K (2 D + C)) with M = N outputs; or (M, K (D + C)) where `q` is given. Columns are contiguous.
        q: (N, K, D), or None for the first K D columns.
        bias: (K, E) in the order of the edges, or None.
        heads, depth: K and D.
        scale, dropout, seed, batch_heads: as for `bilinear_attention`.

    Returns:
        (N, K, C) of the dtype of the table.

    Cost: that of `bilinear_attention`; its gradient is one more table.

    Raises:
        ShapeError: if sizes or dtypes do not fit the edges or each other.
        ConfigError: for a p outside [0, 1), or dropout without a seed.
    """
    _check(by_target, by_source, table, q, bias, heads, depth, scale, dropout, seed, batch_heads)
    return _packed_attention(*by_target, *by_source, table, q, bias, heads, depth, scale, dropout, seed,
                            heads if batch_heads is None else batch_heads)[0]


def _check(by_target: Csr, by_source: Csr, table: Tensor, q: Tensor | None, bias: Tensor | None, heads: int, depth: int,
           scale: float, dropout: float, seed: Tensor | None, batch_heads: int | None) -> None:
    inputs, outputs = by_source.indptr.shape[0] - 1, by_target.indptr.shape[0] - 1
    if heads < 1 or depth < 0:
        raise ShapeError("packed_attention", "there must be at least one head, of at least no channels", (heads, depth))
    given = heads * depth * (2 if q is None else 1)
    if table.dim() != 2 or table.shape[0] != inputs or table.shape[1] < given or table.shape[1] % heads:
        raise ShapeError("packed_attention", f"table must have shape (M={inputs}, {given} + K={heads} times C)",
                         tuple(table.shape))
    if q is None and inputs != outputs:
        raise ShapeError("packed_attention", "q must be given where inputs are not the outputs", f"{inputs}, {outputs}")
    if q is not None and (q.shape != (outputs, heads, depth) or q.dtype != table.dtype):
        raise ShapeError("packed_attention", f"q must have shape {(outputs, heads, depth)} and dtype {table.dtype}",
                         f"{tuple(q.shape)} and {q.dtype}")
    edges = by_target.indices.shape[0]
    if bias is not None and bias.shape != (heads, edges):
        raise ShapeError("packed_attention", f"bias must have shape (K={heads}, E={edges})", tuple(bias.shape))
    check_dropout("packed_attention", dropout, seed, batch_heads)


def _parts(table: Tensor, q: Tensor | None, heads: int, depth: int) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v, views of the table where they are its columns."""
    width, at = heads * depth, 0 if q is not None else heads * depth
    key, value = table[:, at:at + width], table[:, at + width:]
    query = table[:, :width].unflatten(-1, (heads, depth)) if q is None else q
    return query, key.unflatten(-1, (heads, depth)), value.unflatten(-1, (heads, value.shape[1] // heads))


# -- kernels ------------------------------------------------------------------------------------------------------

def _forward(indptr: Tensor, indices: Tensor, order: Tensor, indptr_T: Tensor, indices_T: Tensor, order_T: Tensor,
             table: Tensor, q: Tensor | None, bias: Tensor | None, heads: int, depth: int, scale: float, p: float,
             seed: Tensor | None, batch_heads: int) -> tuple[Tensor, Tensor]:
    return bilinear.forward(indptr, indices, order, indptr_T, indices_T, order_T, *_parts(table, q, heads, depth), bias,
                            scale, p, seed, batch_heads)


def _backward(indptr: Tensor, indices: Tensor, order: Tensor, indptr_T: Tensor, indices_T: Tensor, order_T: Tensor,
              table: Tensor, q: Tensor | None, bias: Tensor | None, y: Tensor, lse: Tensor, grad: Tensor, heads: int,
              depth: int, scale: float, p: float, seed: Tensor | None, batch_heads: int) -> tuple[Tensor | None, ...]:
    edges, parts = (indptr, indices, order, indptr_T, indices_T, order_T), _parts(table, q, heads, depth)
    kernels = dispatch.usable(table, indices.shape[0])
    if kernels is None:
        *grads, grad_bias = bilinear.backward(*edges, *parts, bias, y, lse, grad, scale, p, seed, batch_heads)
        joined = torch.cat([t.flatten(1) for t in (grads if q is None else grads[1:]) if t is not None], 1)
        return joined, None if q is None else grads[0], grad_bias
    grad_table = new_empty(table, table.shape)
    grad_q = None if q is None else new_empty(q, q.shape)
    found = bilinear.bilinear_backward(
        kernels, Csr(*edges[:3]), Csr(*edges[3:]), *parts, bias, (y, lse), grad, scale,
        dispatch.drop_of(p, seed, batch_heads), _parts(grad_table, grad_q, heads, depth))[3]
    return grad_table, grad_q, None if found is None or bias is None else found.to(bias.dtype)


# -- registration -------------------------------------------------------------------------------------------------

def _composed(by_target: Csr, by_source: Csr, table: Tensor, q: Tensor | None, bias: Tensor | None, heads: int,
              depth: int, scale: float, p: float, seed: Tensor | None, batch_heads: int) -> Tensor:
    """Compute the result by differentiable operators, for second derivatives."""
    return bilinear.composed(by_target, by_source, *_parts(table, q, heads, depth), bias, scale, p, seed, batch_heads)


def _fake(*args: Any) -> tuple[Tensor, Tensor]:
    table, q, _, heads, depth = args[6:11]
    outputs, channels = (table if q is None else q).shape[0], table.shape[1] // heads - (2 if q is None else 1) * depth
    return table.new_empty((outputs, heads, channels)), table.new_empty((outputs, heads), dtype=sum_dtype(table.dtype))


_packed_attention = differentiable_operator(
    "packed_attention", "Tensor table, Tensor? q, Tensor? bias",
    "SymInt heads, SymInt depth, float scale, float p, Tensor? seed, SymInt batch_heads", "y, lse",
    forward=_forward, fake=_fake, backward=_backward, composed=_composed, check=_check)
