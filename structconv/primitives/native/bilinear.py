"""`bilinear_attention`: attention along edges with scores scale <q_n, k_m> + bias_e, without (E, K, C) tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from structconv.errors import ShapeError
from structconv.primitives import triton
from structconv.primitives.functions import sum_dtype
from structconv.primitives.hashing import Drop
from structconv.primitives.native import dispatch
from structconv.primitives.native.checks import check_dropout
from structconv.primitives.native.dispatch import edges_of
from structconv.primitives.native.edges import Ends
from structconv.primitives.native.indices import Csr
from structconv.primitives.native.loader import Core
from structconv.primitives.native.operator import differentiable_operator
from structconv.primitives.segments import segment_softmax

__all__ = ["bilinear_attention", "bilinear_backward"]


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
    _check(by_target, by_source, q, k, v, bias, scale, dropout, seed, batch_heads)
    return _bilinear_attention(*by_target, *by_source, q, k, v, bias, scale, dropout, seed,
                               q.shape[1] if batch_heads is None else batch_heads)[0]


def _check(by_target: Csr, by_source: Csr, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, scale: float,
           dropout: float, seed: Tensor | None, batch_heads: int | None) -> None:
    inputs, outputs = by_source.indptr.shape[0] - 1, by_target.indptr.shape[0] - 1
    if q.dim() != 3 or q.shape[0] != outputs:
        raise ShapeError("bilinear_attention", f"q must have shape (N={outputs}, K, D)", tuple(q.shape))
    if k.shape != (inputs, *q.shape[1:]):
        raise ShapeError("bilinear_attention", f"k must have shape {(inputs, *q.shape[1:])}", tuple(k.shape))
    if v.dim() != 3 or v.shape[:2] != k.shape[:2]:
        raise ShapeError("bilinear_attention", f"v must have shape (M={inputs}, K={q.shape[1]}, C)", tuple(v.shape))
    if not q.dtype == k.dtype == v.dtype:
        raise ShapeError("bilinear_attention", "q, k and v must share one dtype", f"{q.dtype}, {k.dtype} and {v.dtype}")
    edges = by_target.indices.shape[0]
    if bias is not None and bias.shape != (q.shape[1], edges):
        raise ShapeError("bilinear_attention", f"bias must have shape (K={q.shape[1]}, E={edges})", tuple(bias.shape))
    check_dropout("bilinear_attention", dropout, seed, batch_heads)


# -- the native kernels -------------------------------------------------------------------------------------------

def bilinear_backward(kernels: Core, by_target: Csr, by_source: Csr, q: Tensor, k: Tensor, v: Tensor,
                      bias: Tensor | None, saved: Sequence[Tensor], grad: Tensor, scale: float, drop: dispatch.Drop,
                      into: Sequence[Tensor] | None = None) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Gradients of q, k, v, written `into` tensors of their shapes where given, and bias (float32; None without)."""
    grads = [dispatch.empty(t, t.shape) for t in (q, k, v)] if into is None else into
    layouts = edges_of(by_target, k.shape[0]), edges_of(by_source, q.shape[0])
    grad_bias = kernels.bilinear_backward(*layouts, q, k, v, bias, *saved, grad, scale, *drop, *grads)
    return grads[0], grads[1], grads[2], grad_bias


# -- the operator -------------------------------------------------------------------------------------------------

def _usable(q: Tensor, v: Tensor, edges: int) -> Any:
    return dispatch.usable(v, edges) and dispatch.usable(q, edges)


def _usable_gpu(q: Tensor, v: Tensor, edges: int) -> Any:
    return triton.usable(v, edges) and triton.usable(q, edges)


def forward(indptr: Tensor, indices: Tensor, order: Tensor, indptr_T: Tensor, indices_T: Tensor, order_T: Tensor,
             q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, scale: float, p: float, seed: Tensor | None,
             batch_heads: int) -> tuple[Tensor, Tensor]:
    by_target = Csr(indptr, indices, order)
    kernels = _usable(q, v, indices.shape[0])
    if kernels is not None:
        found: tuple[Tensor, Tensor] = kernels.bilinear_forward(
            edges_of(by_target, k.shape[0]), q, k, v, bias, scale, *dispatch.drop_of(p, seed, batch_heads))
        return found
    if (gpu := _usable_gpu(q, v, indices.shape[0])) is not None:
        return gpu.bilinear_forward(by_target, q, k, v, bias, scale, Drop(p, seed, batch_heads))
    dtype = sum_dtype(q.dtype)
    ends = Ends(by_target, Csr(indptr_T, indices_T, order_T))
    p_KE, lse = ends.softmax_parts(edge_scores(ends, q.to(dtype), k.to(dtype), bias, scale))
    kept = ends.kept(Drop(p, seed, batch_heads), q.shape[1])
    w_KE = p_KE if kept is None else p_KE * kept.to(dtype)
    return ends.collect(w_KE, v.to(dtype)).to(v.dtype).contiguous(), lse


def backward(indptr: Tensor, indices: Tensor, order: Tensor, indptr_T: Tensor, indices_T: Tensor, order_T: Tensor,
              q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, y: Tensor, lse: Tensor, grad: Tensor, scale: float,
              p: float, seed: Tensor | None, batch_heads: int) -> tuple[Tensor | None, ...]:
    by_target, by_source = Csr(indptr, indices, order), Csr(indptr_T, indices_T, order_T)
    kernels = _usable(q, v, indices.shape[0])
    if kernels is not None:
        grad_q, grad_k, grad_v, grad_bias = bilinear_backward(
            kernels, by_target, by_source, q, k, v, bias, (y, lse), grad, scale, dispatch.drop_of(p, seed, batch_heads))
        return grad_q, grad_k, grad_v, None if grad_bias is None or bias is None else grad_bias.to(bias.dtype)
    if (gpu := _usable_gpu(q, v, indices.shape[0])) is not None:
        *grads, grad_bias = gpu.bilinear_backward(by_target, by_source, q, k, v, bias, (y, lse), grad, scale,
                                                   Drop(p, seed, batch_heads))
        return *grads, None if bias is None else grad_bias.to(bias.dtype)
    dtype = sum_dtype(q.dtype)
    ends, g = Ends(by_target, by_source), grad.to(dtype)
    q_wide, k_wide = q.to(dtype), k.to(dtype)
    p_KE = ends.weights(edge_scores(ends, q_wide, k_wide, bias, scale), lse)
    kept = ends.kept(Drop(p, seed, batch_heads), q.shape[1])
    w_KE = p_KE if kept is None else p_KE * kept.to(dtype)
    filled = by_target.indptr.diff().unsqueeze(-1) > 0
    d_NK = torch.where(filled, (g * y).sum(-1), 0)
    ds_KE = w_KE * ends.dots(g, v.to(dtype)) - p_KE * d_NK.t()[:, ends.target]
    grad_q, grad_k = (scale * t for t in (ends.collect(ds_KE, k_wide), ends.spread(ds_KE, q_wide)))
    grad_bias = None if bias is None else ds_KE.to(bias.dtype)
    return (grad_q.to(q.dtype).contiguous(), grad_k.to(k.dtype).contiguous(),
            ends.spread(w_KE, g).to(v.dtype).contiguous(), grad_bias)


def edge_scores(ends: Ends, q: Tensor, k: Tensor, bias: Tensor | None, scale: float) -> Tensor:
    """(K, E)."""
    scores = ends.dots(q, k) * scale
    return scores if bias is None else scores + bias.to(scores.dtype)


def composed(by_target: Csr, by_source: Csr, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, scale: float,
              p: float, seed: Tensor | None, batch_heads: int) -> Tensor:
    """Compute the result by differentiable operators, for second derivatives."""
    ends = Ends(by_target, by_source)
    weights = segment_softmax(edge_scores(ends, q, k, bias, scale), ends.target, ends.num_outputs)
    kept = ends.kept(Drop(p, seed, batch_heads), q.shape[1])
    return ends.collect(weights if kept is None else weights * kept.to(weights.dtype), v)


# -- registration -------------------------------------------------------------------------------------------------

def _fake(*args: Any) -> tuple[Tensor, Tensor]:
    q, _, v = args[6:9]
    return v.new_empty((*q.shape[:2], v.shape[2])), q.new_empty(q.shape[:2], dtype=sum_dtype(q.dtype))


_bilinear_attention = differentiable_operator(
    "bilinear_attention", "Tensor q, Tensor k, Tensor v, Tensor? bias",
    "float scale, float p, Tensor? seed, SymInt batch_heads", "y, lse",
    forward=forward, fake=_fake, backward=backward, composed=composed, check=_check)
