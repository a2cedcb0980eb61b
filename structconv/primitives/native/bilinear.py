"""Attention along edges with scores scale <q_n, k_m> + bias_e, without (E, K, C) tensors: `bilinear_attention`.

`packed_attention` reads queries, keys and values from one table, `bilinear_weights` computes the weights.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from structconv.errors import ShapeError
from structconv.primitives.functions import sum_dtype
from structconv.primitives.native.dispatch import parts_of_table
from structconv.primitives.native.edges import Ends
from structconv.primitives.native.indices import Csr
from structconv.primitives.native.operator import DROPOUT, differentiable_operator

__all__ = ["bilinear_attention", "bilinear_weights", "packed_attention"]


def bilinear_attention(by_target: Csr, by_source: Csr, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None = None, *,
                       scale: float = 1.0, dropout: float = 0.0, seed: Tensor | None = None,
                       batch_heads: int | None = None) -> Tensor:
    """y_nh = sum over the edges m -> n of p_he v_mh, p = softmax over the edges into n of scale <q_nh, k_mh> + b_he.

    Scaled dot-product attention (Vaswani et al., 2017, equation 1) restricted to the edges; the bias may hold edge
    features or relative positions. Duplicate edges count twice; an output without edges, or whose scores are all
    -inf, is exactly zero.

    Args:
        by_target, by_source: the two layouts of the edges.
        q: (N, K, D), with k (M, K, D) and v (M, K, C), any strides, of one dtype; float32 and bfloat16 (sums in
            float32) run natively on a CPU, anything else by torch's operators with (K, E) tensors.
        bias: (K, E) in the order of the edges, or None; it gets a gradient.
        scale: of the products.
        dropout, seed, batch_heads: as for `affine_attention`.

    Returns:
        (N, K, C) of the dtype of v.

    Cost: 2 E K (D + C) flops, backward E K (8 D + 6 C); memory O((M + N) K (D + C)), nothing of the size of the edges.
    Derivatives of higher order go through (K, E) tensors.

    Raises:
        ShapeError: if sizes or dtypes do not fit the edges or each other.
        ConfigError: for a p outside [0, 1), or dropout without a seed.
    """
    y: Tensor = _bilinear(by_target, by_source, q, k, v, bias, scale, dropout, seed, batch_heads)[0]
    return y


def packed_attention(by_target: Csr, by_source: Csr, table: Tensor, q: Tensor | None = None, bias: Tensor | None = None,
                    *, heads: int, depth: int, scale: float = 1.0, dropout: float = 0.0, seed: Tensor | None = None,
                    batch_heads: int | None = None) -> Tensor:
    """`bilinear_attention` of the queries, keys and values in the columns of one table, [q | k | v] or [k | v].

    One product x [W^q W^k W^v] makes the table, and one its gradient in x: neither tables nor their gradients are
    joined or added up.

    Args:
        table: (M, K (2 D + C)) with M = N outputs; or (M, K (D + C)) where `q` is given.
        q: (N, K, D), or None for the first K D columns.
        heads, depth: K and D.
        by_target, by_source, bias, scale, dropout, seed, batch_heads: as for `bilinear_attention`.

    Returns:
        (N, K, C) of the dtype of the table.

    Cost: that of `bilinear_attention`; its gradient is one more table.

    Raises:
        ShapeError, ConfigError: as `bilinear_attention` does.
    """
    y: Tensor = _packed(by_target, by_source, table, q, bias, heads, depth, scale, dropout, seed,
                        heads if batch_heads is None else batch_heads)[0]
    return y


def bilinear_weights(by_target: Csr, by_source: Csr, q: Tensor, k: Tensor, bias: Tensor | None = None, *,
                     scale: float = 1.0, dropout: float = 0.0, seed: Tensor | None = None,
                     batch_heads: int | None = None) -> Tensor:
    """p_he of `bilinear_attention`: softmax over the edges into n of scale <q_nh, k_mh> + b_he, after its dropout.

    Returns, cost: as for `affine_weights`. Args and Raises: as for `bilinear_attention`.
    """
    weights: Tensor = _weights(by_target, by_source, q, k, bias, scale, dropout, seed, batch_heads)
    return weights.t()


def _check_packed(by_target: Csr, by_source: Csr, table: Tensor, q: Tensor | None, bias: Tensor | None, heads: int,
                  depth: int, *options: Any) -> None:
    inputs, outputs = by_source.indptr.shape[0] - 1, by_target.indptr.shape[0] - 1
    if heads < 1 or depth < 0:
        raise ShapeError("packed_attention", "there must be at least one head, of at least no channels", (heads, depth))
    own = heads * depth * (2 if q is None else 1)
    if table.shape[1] < own or table.shape[1] % heads:
        raise ShapeError("packed_attention", f"table must have shape (M={inputs}, {own} + K={heads} times C)",
                         tuple(table.shape))
    if q is None and inputs != outputs:
        raise ShapeError("packed_attention", "q must be given where inputs are not the outputs", f"{inputs}, {outputs}")
    if q is not None and q.shape[1:] != (heads, depth):
        raise ShapeError("packed_attention", f"q must have shape {(outputs, heads, depth)}", tuple(q.shape))
    if bias is not None and bias.shape[0] != heads:
        raise ShapeError("packed_attention", f"bias must have shape (K={heads}, E)", tuple(bias.shape))


# -- by torch's operators ------------------------------------------------------------------------------------------

def _scores(ends: Ends, q: Tensor, k: Tensor, bias: Tensor | None, scale: float) -> Tensor:
    """(K, E)."""
    scores = ends.dots(q, k) * scale
    return scores if bias is None else scores + bias.to(scores.dtype)


def _composed(by_target: Csr, by_source: Csr, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, scale: float,
              *dropout: Any) -> Tensor:
    ends = Ends(by_target, by_source)
    return ends.collect(ends.softmax(_scores(ends, q, k, bias, scale), *dropout), v)


def _composed_packed(by_target: Csr, by_source: Csr, table: Tensor, q: Tensor | None, bias: Tensor | None, heads: int,
                     depth: int, *options: Any) -> Tensor:
    return _composed(by_target, by_source, *parts_of_table(table, q, heads, depth), bias, *options)


def _composed_weights(by_target: Csr, by_source: Csr, q: Tensor, k: Tensor, bias: Tensor | None, scale: float,
                      *dropout: Any) -> Tensor:
    ends = Ends(by_target, by_source)
    return ends.softmax(_scores(ends, q, k, bias, scale), *dropout).t()


def _fake_packed(*args: Any) -> tuple[Tensor, Tensor]:
    table, q, _, heads, depth = args[6:11]
    outputs, channels = (table if q is None else q).shape[0], table.shape[1] // heads - (2 if q is None else 1) * depth
    return table.new_empty((outputs, heads, channels)), table.new_empty((outputs, heads), dtype=sum_dtype(table.dtype))


_OPTIONS = f"float scale, {DROPOUT}"
_bilinear = differentiable_operator(
    "bilinear_attention", "q N K D, k M K D, v M K C, any bias? K E", _OPTIONS, "y N K C, wide lse N K",
    kernel="bilinear", composed=_composed)
_packed = differentiable_operator(
    "packed_attention", "table M W, q? N K D, any bias? K E", f"SymInt heads, SymInt depth, {_OPTIONS}",
    "y N K C, wide lse N K", kernel="packed", composed=_composed_packed, fake=_fake_packed, check=_check_packed)
_weights = differentiable_operator(
    "bilinear_weights", "q N K D, k M K D, any bias? K E", _OPTIONS, "wide weights E K", kernel="bilinear_weights",
    with_backward=False, composed=_composed_weights)
