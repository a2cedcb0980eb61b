"""`affine_attention`: attention along edges with scores leaky_relu(source_m + target_n), without edge-sized tensors."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from structconv.errors import ConfigError, ShapeError
from structconv.primitives import triton
from structconv.primitives.functions import sum_dtype
from structconv.primitives.hashing import Drop
from structconv.primitives.native import dispatch
from structconv.primitives.native.checks import check_dropout
from structconv.primitives.native.dispatch import edges_of
from structconv.primitives.native.edges import Ends
from structconv.primitives.native.indices import Csr
from structconv.primitives.native.operator import differentiable_operator, trains
from structconv.primitives.segments import segment_softmax, segment_sum

__all__ = ["affine_attention"]


def affine_attention(by_target: Csr, by_source: Csr, source: Tensor, target: Tensor, x: Tensor, *, slope: float = 0.2,
                     dropout: float = 0.0, seed: Tensor | None = None, batch_heads: int | None = None) -> Tensor:
    """y_nk = sum over the edges m -> n of p_ke x_mk, p = softmax over the edges into n of leaky_relu(s_mk + t_nk).

    The attention of GAT (Velickovic et al., 2018, equations 3 to 6) for any pair of vectors s, t; slope 1 is a plain
    affine score, slope 0 a ReLU. Duplicate edges count twice; an output without edges, or whose scores are all -inf,
    is exactly zero.

    Args:
        by_target, by_source: the two layouts of the edges.
        source: (M, K), one number an input and head.
        target: (N, K).
        x: (M, K, C), any strides; float32 and bfloat16 (sums in float32) run natively on a CPU, anything else by
            torch's operators with (K, E) tensors.
        slope: of the activation below zero, at least 0.
        dropout: probability p that a weight falls; the others are divided by 1 - p. Which of them is a function of
            seed, head and pair, as `structconv.primitives.hashing.hash_uniform(seed, batch, head, m N + n) >= p`.
        seed: integer scalar tensor; needed where dropout > 0.
        batch_heads: where a batch is folded into the heads, heads of one of its entries; by default K.

    Returns:
        (N, K, C) of the dtype of x.

    Cost: 2 E K C flops and as many bytes as x_m has, an edge; forward and backward hold O((M + N) K C) and, natively,
    nothing of size E. Derivatives of higher order go through (K, E) tensors.

    Raises:
        ShapeError: if sizes do not fit the edges or each other.
        ConfigError: for a negative slope, a p outside [0, 1), or dropout without a seed.
    """
    _check(by_target, by_source, source, target, x, slope, dropout, seed, batch_heads)
    return _affine_attention(*by_target, *by_source, source, target, x, slope, dropout, seed,
                             x.shape[1] if batch_heads is None else batch_heads, trains(source, target, x))[0]


def _check(by_target: Csr, by_source: Csr, source: Tensor, target: Tensor, x: Tensor, slope: float, dropout: float,
           seed: Tensor | None, batch_heads: int | None) -> None:
    inputs, outputs = by_source.indptr.shape[0] - 1, by_target.indptr.shape[0] - 1
    if x.dim() != 3 or x.shape[0] != inputs:
        raise ShapeError("affine_attention", f"x must have shape (M={inputs}, K, C)", tuple(x.shape))
    for name, tensor, count in (("source", source, inputs), ("target", target, outputs)):
        if tensor.dim() != 2 or tensor.shape[0] != count or tensor.shape[1] != x.shape[1]:
            expected = f"{name} must have shape ({count}, K={x.shape[1]})"
            raise ShapeError("affine_attention", expected, tuple(tensor.shape))
    if slope < 0:
        raise ConfigError("affine_attention", "slope must be at least 0", slope)
    check_dropout("affine_attention", dropout, seed, batch_heads)


# -- the operator -------------------------------------------------------------------------------------------------

def forward(indptr: Tensor, indices: Tensor, order: Tensor, indptr_T: Tensor, indices_T: Tensor, order_T: Tensor,
             source: Tensor, target: Tensor, x: Tensor, slope: float, p: float, seed: Tensor | None, batch_heads: int,
             train: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    by_target = Csr(indptr, indices, order)
    kernels = dispatch.usable(x, indices.shape[0])
    if kernels is not None:
        found: tuple[Tensor, Tensor, Tensor, Tensor] = kernels.affine_forward(
            edges_of(by_target, x.shape[0]), source, target, x, slope, *dispatch.drop_of(p, seed, batch_heads), train)
        return found
    if (gpu := triton.usable(x, indices.shape[0])) is not None:
        return gpu.affine_forward(by_target, source, target, x, slope, Drop(p, seed, batch_heads), train)
    dtype = sum_dtype(x.dtype)
    ends, x_wide = Ends(by_target, Csr(indptr_T, indices_T, order_T)), x.to(dtype)
    scores, slopes = _scores(ends, source.to(dtype), target.to(dtype), slope)
    p_KE, lse = ends.softmax_parts(scores)
    mass = segment_sum(slopes * p_KE, ends.target, ends.num_outputs).t().contiguous()
    kept = ends.kept(Drop(p, seed, batch_heads), x.shape[1])
    w_KE = p_KE if kept is None else p_KE * kept.to(dtype)
    y = ends.collect(w_KE, x_wide).to(x.dtype).contiguous()
    y2 = ends.collect(slopes * w_KE, x_wide).to(x.dtype).contiguous() if train else x.new_empty((0, *x.shape[1:]))
    return y, y2, lse, mass


def backward(indptr: Tensor, indices: Tensor, order: Tensor, indptr_T: Tensor, indices_T: Tensor, order_T: Tensor,
              source: Tensor, target: Tensor, x: Tensor, y: Tensor, y2: Tensor, lse: Tensor, mass: Tensor, grad: Tensor,
              slope: float, p: float, seed: Tensor | None, batch_heads: int) -> tuple[Tensor, Tensor, Tensor]:
    by_target, by_source = Csr(indptr, indices, order), Csr(indptr_T, indices_T, order_T)
    kernels = dispatch.usable(x, indices.shape[0])
    if kernels is not None:
        found = kernels.affine_backward(
            edges_of(by_target, x.shape[0]), edges_of(by_source, y.shape[0]), source, target, x, y, y2, lse, mass, grad,
            slope, *dispatch.drop_of(p, seed, batch_heads))
        return found[0].to(source.dtype), found[1].to(target.dtype), found[2]
    if (gpu := triton.usable(x, indices.shape[0])) is not None:
        found = gpu.affine_backward(by_target, by_source, source, target, x, (y, y2, lse, mass), grad, slope,
                                    Drop(p, seed, batch_heads))
        return found[0].to(source.dtype), found[1].to(target.dtype), found[2]
    dtype = sum_dtype(x.dtype)
    ends = Ends(by_target, by_source)
    g, x_wide = grad.to(dtype), x.to(dtype)
    scores, slopes = _scores(ends, source.to(dtype), target.to(dtype), slope)
    p_KE, kept = ends.weights(scores, lse), ends.kept(Drop(p, seed, batch_heads), x.shape[1])
    w_KE = p_KE if kept is None else p_KE * kept.to(dtype)
    filled = by_target.indptr.diff().unsqueeze(-1) > 0
    d_NK = torch.where(filled, (g * y).sum(-1), 0)
    grad_target = torch.where(filled, (g * y2).sum(-1) - d_NK * mass, 0)
    shift = segment_sum(slopes * p_KE * d_NK.t()[:, ends.target], ends.source, ends.num_inputs).t()
    sums = (ends.spread(slopes * w_KE, g) * x_wide).sum(-1)
    used = by_source.indptr.diff().unsqueeze(-1) > 0
    grad_source = torch.where(used, sums - shift, 0)
    grad_x = ends.spread(w_KE, g).to(x.dtype).contiguous()
    return grad_source.to(source.dtype).contiguous(), grad_target.to(target.dtype).contiguous(), grad_x


def _scores(ends: Ends, source: Tensor, target: Tensor, slope: float) -> tuple[Tensor, Tensor]:
    """Scores (K, E) and the slope of the activation at each of them."""
    raw = source.t()[:, ends.source] + target.t()[:, ends.target]
    above = raw > 0
    return torch.where(above, raw, raw * slope), torch.full_like(raw, slope).masked_fill(above, 1.0)


def composed(by_target: Csr, by_source: Csr, source: Tensor, target: Tensor, x: Tensor, slope: float, p: float,
             seed: Tensor | None, batch_heads: int) -> Tensor:
    """Compute the result by differentiable operators, for second derivatives."""
    ends = Ends(by_target, by_source)
    scores = torch.nn.functional.leaky_relu(source.t()[:, ends.source] + target.t()[:, ends.target], slope)
    weights = segment_softmax(scores, ends.target, ends.num_outputs)
    kept = ends.kept(Drop(p, seed, batch_heads), x.shape[1])
    return ends.collect(weights if kept is None else weights * kept.to(weights.dtype), x)


# -- registration -------------------------------------------------------------------------------------------------

def _fake(*args: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    source, target, x, train = args[6], args[7], args[8], args[13]
    rows, heads = target.shape
    y = x.new_empty((rows, heads, x.shape[2]))
    y2 = x.new_empty((rows if train else 0, heads, x.shape[2]))
    dtype = sum_dtype(x.dtype)
    return y, y2, source.new_empty((rows, heads), dtype=dtype), source.new_empty((rows, heads), dtype=dtype)


_affine_attention = differentiable_operator(
    "affine_attention", "Tensor source, Tensor target, Tensor x",
    "float slope, float p, Tensor? seed, SymInt batch_heads", "y, y2, lse, mass", flags="bool train",
    forward=forward, fake=_fake, backward=backward, composed=composed, check=_check)
