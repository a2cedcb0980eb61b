"""Attention along edges with scores leaky_relu(source_m + target_n), without edge-sized tensors: `affine_attention`.

`projected_attention` computes the terms of the scores from the rows that it sums (GAT), `affine_weights` the weights.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import leaky_relu

from structconv.errors import ConfigError, ShapeError
from structconv.primitives.functions import sum_dtype
from structconv.primitives.native.edges import Ends
from structconv.primitives.native.indices import Csr
from structconv.primitives.native.operator import DROPOUT, differentiable_operator, trains

__all__ = ["affine_attention", "affine_weights", "projected_attention"]


def affine_attention(by_target: Csr, by_source: Csr, source: Tensor, target: Tensor, x: Tensor, *, slope: float = 0.2,
                     dropout: float = 0.0, seed: Tensor | None = None, batch_heads: int | None = None) -> Tensor:
    """y_nk = sum over the edges m -> n of p_ke x_mk, p = softmax over the edges into n of leaky_relu(s_mk + t_nk).

    The attention of GAT (Velickovic et al., 2018, equations 3 to 6) for any pair of vectors s, t; slope 1 is a plain
    affine score, slope 0 a ReLU. Duplicate edges count twice; an output without edges, or whose scores are all -inf,
    is exactly zero.

    Args:
        by_target, by_source: the two layouts of the edges.
        source: (M, K), one number an input and head. target: (N, K).
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
    y: Tensor = _affine(by_target, by_source, source, target, x, slope, dropout, seed, batch_heads,
                        trains(source, target, x))[0]
    return y


def projected_attention(by_target: Csr, by_source: Csr, x: Tensor, of_source: Tensor, of_target: Tensor,
                        z: Tensor | None = None, bias: Tensor | None = None, *, slope: float = 0.2,
                        dropout: float = 0.0, seed: Tensor | None = None, batch_heads: int | None = None) -> Tensor:
    """`affine_attention` with the terms s_mk = <of_source_k, x_mk> and t_nk = <of_target_k, z_nk> of its scores.

    GAT's layer after its projection (Velickovic et al., 2018, equations 1 to 6). The terms are one pass over the rows,
    and their gradients are added to those of x and z, and to the vectors', while a row is at hand.

    Args:
        x: (M, K, C), any strides. of_source, of_target: (K, C).
        z: (N, K, C), or None for x.
        bias: (K, C), added to every output; x of 32 bits or more. A gradient then knows y as exactly as y + bias does.
        by_target, by_source, slope, dropout, seed, batch_heads: as in `affine_attention`.

    Returns:
        (N, K, C) of the dtype of x.

    Cost: that of `affine_attention`, and 4 (M + N) K C flops. The gradients of the vectors do not depend on threads.

    Raises:
        ShapeError, ConfigError: as `affine_attention` does.
    """
    if not x.is_cpu:  # the kernels of a GPU take terms
        source, target = _terms(by_target, by_source, x, z, of_source, of_target)
        y = affine_attention(by_target, by_source, source, target, x, slope=slope, dropout=dropout, seed=seed,
                             batch_heads=batch_heads)
        return y if bias is None else y + bias
    result: Tensor = _projected(by_target, by_source, x, z, of_source, of_target, bias, slope, dropout, seed,
                               batch_heads, trains(x, z, of_source, of_target, bias))[0]
    return result


def affine_weights(by_target: Csr, by_source: Csr, source: Tensor, target: Tensor, *, slope: float = 0.2,
                   dropout: float = 0.0, seed: Tensor | None = None, batch_heads: int | None = None) -> Tensor:
    """p_ke of `affine_attention`: softmax over the edges into n of leaky_relu(s_mk + t_nk), after its dropout.

    Returns:
        (K, E) in the order of the edges, of the dtype that 16-bit numbers are summed in. Natively its memory is (E, K).

    Cost: natively an exponential and one read and write for each of E K numbers, and what the scores take. Derivatives
    of any order are taken of torch's operators with (K, E) tensors, and only where they are asked for.

    Args and Raises: as for `affine_attention`.
    """
    weights: Tensor = _weights(by_target, by_source, source, target, slope, dropout, seed, batch_heads)
    return weights.t()


def _check(*arguments: Any) -> None:
    slope = arguments[-4]
    if slope < 0:
        raise ConfigError("affine_attention", "slope must be at least 0", slope)


def _check_projected(by_target: Csr, by_source: Csr, x: Tensor, z: Tensor | None, of_source: Tensor, of_target: Tensor,
                     bias: Tensor | None, *options: Any) -> None:
    if z is None and x.shape[0] != by_target.indptr.shape[0] - 1:
        raise ShapeError("projected_attention", f"x must have shape (N={by_target.indptr.shape[0] - 1}, K, C), as z is "
                         "None", tuple(x.shape))
    if bias is not None and sum_dtype(x.dtype) != x.dtype:
        raise ConfigError("projected_attention", "bias must be absent where x has 16 bits", x.dtype, "Add it to y.")
    _check(*options)


# -- by torch's operators ------------------------------------------------------------------------------------------

def _scores(ends: Ends, source: Tensor, target: Tensor, slope: float) -> Tensor:
    """(K, E)."""
    return leaky_relu(source.t()[:, ends.source] + target.t()[:, ends.target], slope)


def _composed(by_target: Csr, by_source: Csr, source: Tensor, target: Tensor, x: Tensor, slope: float,
              *dropout: Any) -> Tensor:
    ends = Ends(by_target, by_source)
    return ends.collect(ends.softmax(_scores(ends, source, target, slope), *dropout), x)


def _terms(by_target: Csr, by_source: Csr, x: Tensor, z: Tensor | None, of_source: Tensor, of_target: Tensor
           ) -> tuple[Tensor, Tensor]:
    """The terms of the scores; rows without edges, whose numbers reach nothing, have zeros."""
    source, target = ((torch.where((layout.indptr.diff() > 0).view(-1, 1, 1), rows, 0) * vector).sum(-1)
                      for layout, rows, vector in ((by_source, x, of_source),
                                                   (by_target, x if z is None else z, of_target)))
    return source, target


def _composed_projected(by_target: Csr, by_source: Csr, x: Tensor, z: Tensor | None, of_source: Tensor,
                        of_target: Tensor, bias: Tensor | None, *options: Any) -> Tensor:
    y = _composed(by_target, by_source, *_terms(by_target, by_source, x, z, of_source, of_target), x, *options)
    return y if bias is None else y + bias


def _composed_weights(by_target: Csr, by_source: Csr, source: Tensor, target: Tensor, slope: float, *dropout: Any
                      ) -> Tensor:
    ends = Ends(by_target, by_source)
    return ends.softmax(_scores(ends, source, target, slope), *dropout).t()


_OPTIONS = f"float slope, {DROPOUT}"
_affine = differentiable_operator(
    "affine_attention", "any source M K, any target N K, x M K C", _OPTIONS,
    "y N K C, y2 T K C, wide lse N K, wide mass N K", flags="bool train", kernel="affine", composed=_composed,
    check=_check)
_projected = differentiable_operator(
    "projected_attention", "x M K C, z? N K C, any of_source K C, any of_target K C, any bias? K C", _OPTIONS,
    "y N K C, y2 T K C, wide lse N K, wide mass N K, wide source M K, wide target N K",
    flags="bool train", kernel="projected", composed=_composed_projected, check=_check_projected)
_weights = differentiable_operator(
    "affine_weights", "source M K, target N K", _OPTIONS, "wide weights E K", kernel="affine_weights",
    with_backward=False, composed=_composed_weights, check=_check)
