"""Attention along edges by affine, bilinear and additive scores, without tensors of edges and channels; its weights.

    y_nk = sum over the edges m -> n of p_ke x_mk,  p = softmax over the edges into n of the scores s_ke

Duplicate edges count twice; an output without edges, or whose scores are all -inf, is exactly zero. `_declare` makes
both operators of a score, the attention and its weights. In plain torch they go through `Ends` and (K, E) tensors.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import leaky_relu

from structconv.errors import ConfigError, ShapeError
from structconv.primitives.blocks import recompute_blocks
from structconv.primitives.csr import sddmm, spmm
from structconv.primitives.functions import sum_dtype
from structconv.primitives.hashing import Drop, drop_factors
from structconv.primitives.native.dispatch import parts_of_table
from structconv.primitives.native.indices import Csr
from structconv.primitives.operator import DROPOUT, differentiable_operator, trains
from structconv.primitives.segments import segment_softmax
from structconv.primitives.sorting import rows_of
from structconv.shapes import check_choice

__all__ = ["ACTIVATIONS", "Ends", "activate", "additive_attention", "additive_weights", "affine_attention",
           "affine_weights", "as_logistic", "attend", "bilinear_attention", "bilinear_weights", "blocks_of",
           "check_kind", "ends_of", "packed_attention", "projected_attention", "scaled"]

PIECEWISE, LOGISTIC = 0, 1  # see Activation in src/api.h
ACTIVATIONS = ("leaky_relu", "tanh", "sigmoid")
#: Numbers of a temporary where torch's operators stand in: 16 MB in float32.
_BLOCK = 1 << 22


def affine_attention(by_target: Csr, by_source: Csr, source: Tensor, target: Tensor, x: Tensor, *, slope: float = 0.2,
                     dropout: float = 0.0, seed: Tensor | None = None, batch_heads: int | None = None) -> Tensor:
    """y_nk = sum over the edges m -> n of p_ke x_mk, p = softmax over the edges into n of leaky_relu(s_mk + t_nk).

    The attention of GAT (Velickovic et al., 2018, equations 3 to 6) for any pair of vectors s, t; slope 1 is a plain
    affine score, slope 0 a ReLU.

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
    weights: Tensor = _affine_weights(by_target, by_source, source, target, slope, dropout, seed, batch_heads)
    return weights.t()


def bilinear_attention(by_target: Csr, by_source: Csr, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None = None, *,
                       scale: float = 1.0, dropout: float = 0.0, seed: Tensor | None = None,
                       batch_heads: int | None = None) -> Tensor:
    """y_nh = sum over the edges m -> n of p_he v_mh, p = softmax over the edges into n of scale <q_nh, k_mh> + b_he.

    Scaled dot-product attention (Vaswani et al., 2017, equation 1) restricted to the edges; the bias may hold edge
    features or relative positions.

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
    weights: Tensor = _bilinear_weights(by_target, by_source, q, k, bias, scale, dropout, seed, batch_heads)
    return weights.t()


def additive_attention(by_target: Csr, by_source: Csr, q: Tensor, k: Tensor, x: Tensor, vector: Tensor, *,
                       activation: str = "leaky_relu", slope: float = 0.2, dropout: float = 0.0,
                       seed: Tensor | None = None, batch_heads: int | None = None) -> Tensor:
    """y_nh = sum over the edges m -> n of p_he x_mh, p = softmax over the edges into n of <v_h, act(q_nh + k_mh)>.

    With tanh Bahdanau et al. (2015, appendix A.1.2) restricted to the edges, with a leaky ReLU GATv2 (Brody et al.
    2022, equation 7); there k is x, and each row is gathered once.

    Args:
        by_target, by_source: the two layouts of the edges.
        q: (N, K, D), with k (M, K, D) and x (M, K, C), any strides, of one dtype; float32 and bfloat16 (sums in
            float32) run natively on a CPU, anything else by torch's operators with (K, E) tensors.
        vector: v, (K, D), of any floating dtype.
        activation: "leaky_relu" (with slope 0 ReLU, with slope 1 none), "tanh" or "sigmoid".
        slope: of the leaky ReLU below zero.
        dropout, seed, batch_heads: as for `affine_attention`.

    Returns:
        (N, K, C) of the dtype of x.

    Cost: E K (3 D + 2 C) flops, and an exponential for each of E K D activations but the leaky ReLU's. Memory
    O((M + N) K (D + C)): the backward computes the scores again by target and by source and holds nothing of the
    size of the edges. Derivatives of higher order go through (K, E) tensors and one block of (K, E, D).

    Raises:
        ShapeError: if sizes or dtypes do not fit the edges or each other.
        ConfigError: for an unknown activation, a p outside [0, 1), or dropout without a seed.
    """
    kind, parameter, amplitude = as_logistic(activation, slope)
    y: Tensor = attend(by_target, by_source, q, k, x, scaled(vector, amplitude), kind, parameter, dropout, seed,
                       batch_heads)[0]
    return y


def additive_weights(by_target: Csr, by_source: Csr, q: Tensor, k: Tensor, vector: Tensor, *,
                     activation: str = "leaky_relu", slope: float = 0.2, dropout: float = 0.0,
                     seed: Tensor | None = None, batch_heads: int | None = None) -> Tensor:
    """p_he of `additive_attention`: softmax over the edges into n of <v_h, act(q_nh + k_mh)>, after its dropout.

    Returns, cost: as for `affine_weights`. Args and Raises: as for `additive_attention`.
    """
    kind, parameter, amplitude = as_logistic(activation, slope)
    weights: Tensor = _additive_weights(by_target, by_source, q, k, scaled(vector, amplitude), kind, parameter, dropout,
                                        seed, batch_heads)
    return weights.t()


def as_logistic(activation: str, slope: float) -> tuple[int, float, float]:
    """(kind, parameter, amplitude): act(x) is amplitude r(x) and a constant, which no softmax depends on.

    r is the leaky ReLU of slope `parameter`, or 1 / (1 + exp(-parameter x)): tanh(x) = 2 / (1 + exp(-2 x)) - 1.

    Raises:
        ConfigError: for an unknown activation.
    """
    if activation == "leaky_relu":
        return PIECEWISE, slope, 1.0
    check_choice("additive_attention", "activation", activation, ACTIVATIONS)
    return (LOGISTIC, 2.0, 2.0) if activation == "tanh" else (LOGISTIC, 1.0, 1.0)


def scaled(vector: Tensor, amplitude: float) -> Tensor:
    """The vector times the amplitude of `as_logistic`."""
    return vector if amplitude == 1.0 else vector * amplitude


def check_kind(kind: int) -> None:
    """Raise `ConfigError` unless a kind of activation is one of `as_logistic`."""
    if kind not in (PIECEWISE, LOGISTIC):
        raise ConfigError("additive_attention", f"kind must be {PIECEWISE} or {LOGISTIC}", kind)


def activate(t: Tensor, kind: int, parameter: float) -> Tensor:
    """r of `as_logistic`."""
    return torch.nn.functional.leaky_relu(t, parameter) if kind == PIECEWISE else torch.sigmoid(parameter * t)


def _check_affine(*arguments: Any) -> None:
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
    _check_affine(*options)


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

class Ends:
    """The two ends of every edge, and the two layouts."""

    def __init__(self, by_target: Csr, by_source: Csr) -> None:
        self.by_target, self.by_source = by_target, by_source
        self.num_outputs, self.num_inputs = by_target.indptr.shape[0] - 1, by_source.indptr.shape[0] - 1
        self.source, self.target = ends_of(by_target)

    def softmax(self, scores: Tensor, p: float, seed: Tensor | None, batch_heads: int) -> Tensor:
        """The softmax of (K, E) over the edges into an output, after its dropout."""
        weights = segment_softmax(scores, self.target, self.num_outputs)
        if p == 0 or seed is None:
            return weights
        head = torch.arange(len(scores), device=self.source.device).unsqueeze(-1)
        pair = self.source * self.num_outputs + self.target
        return weights * drop_factors(Drop(p, seed, batch_heads), head, pair, torch.float64).to(weights.dtype)

    def collect(self, weights: Tensor, x: Tensor) -> Tensor:
        """sum_e w_ke x_mk for every output: (K, E), (M, K, C) -> (N, K, C)."""
        return spmm(self.by_target, self.by_source, weights, x.transpose(0, 1)).transpose(0, 1)


def ends_of(layout: Csr) -> tuple[Tensor, Tensor]:
    """(source, target) of every edge, in the order of the edges."""
    row = rows_of(layout.indptr[1:], layout.indices.shape[0])
    order = layout.order.long()  # a permutation, so that scatter leaves nothing of what was there
    return row.scatter(0, order, layout.indices.long()), row.scatter(0, order, row)


def _affine_scores(ends: Ends, source: Tensor, target: Tensor, slope: float) -> Tensor:
    return leaky_relu(source.t()[:, ends.source] + target.t()[:, ends.target], slope)


def _bilinear_scores(ends: Ends, q: Tensor, k: Tensor, bias: Tensor | None, scale: float) -> Tensor:
    scores = sddmm(ends.by_target, ends.by_source, q.transpose(0, 1), k.transpose(0, 1)) * scale
    return scores if bias is None else scores + bias.to(scores.dtype)


def _additive_scores(ends: Ends, q: Tensor, k: Tensor, vector: Tensor, kind: int, parameter: float) -> Tensor:
    """Block by block of edges."""
    def of(block: slice, q: Tensor, k: Tensor, vector: Tensor) -> Tensor:
        raw = q.index_select(0, ends.target[block]) + k.index_select(0, ends.source[block])
        return torch.einsum("ehd,hd->he", activate(raw, kind, parameter), vector.to(raw.dtype))

    blocks = blocks_of(ends.source.shape[0], q.shape[1] * q.shape[2])
    return recompute_blocks(of, [q, k, vector], blocks, reduce="cat", dim=-1)


def blocks_of(count: int, width: int) -> list[slice]:
    """Cut `count` rows, whose temporaries have `width` numbers each, into blocks of at most `_BLOCK` numbers."""
    if isinstance(count, torch.SymInt) or isinstance(width, torch.SymInt):  # a program for any sizes has no loop
        return [slice(0, count)]
    step = max(1, _BLOCK // max(1, width))
    return [slice(start, min(start + step, count)) for start in range(0, count, step)] or [slice(0, 0)]


def _terms(by_target: Csr, by_source: Csr, x: Tensor, z: Tensor | None, of_source: Tensor, of_target: Tensor
           ) -> tuple[Tensor, Tensor]:
    """The terms of the scores; rows without edges, whose numbers reach nothing, have zeros."""
    source, target = ((torch.where((layout.indptr.diff() > 0).view(-1, 1, 1), rows, 0) * vector).sum(-1)
                      for layout, rows, vector in ((by_source, x, of_source),
                                                   (by_target, x if z is None else z, of_target)))
    return source, target


def _composed_projected(by_target: Csr, by_source: Csr, x: Tensor, z: Tensor | None, of_source: Tensor,
                        of_target: Tensor, bias: Tensor | None, *options: Any) -> Tensor:
    y: Tensor = _composed_affine(by_target, by_source, *_terms(by_target, by_source, x, z, of_source, of_target), x,
                                 *options)
    return y if bias is None else y + bias


def _composed_packed(by_target: Csr, by_source: Csr, table: Tensor, q: Tensor | None, bias: Tensor | None, heads: int,
                     depth: int, *options: Any) -> Tensor:
    y: Tensor = _composed_bilinear(by_target, by_source, *parts_of_table(table, q, heads, depth), bias, *options)
    return y


def _fake_packed(*args: Any) -> tuple[Tensor, Tensor]:
    table, q, _, heads, depth = args[6:11]
    outputs, channels = (table if q is None else q).shape[0], table.shape[1] // heads - (2 if q is None else 1) * depth
    return (table.new_empty((outputs, heads, channels)),
            table.new_empty((outputs, 2, heads), dtype=sum_dtype(table.dtype)))


# -- the operators -------------------------------------------------------------------------------------------------

def _declare(name: str, inputs: str, options: str, scores: Callable[..., Tensor],
             results: str = "y N K C, wide peaks N 2 K", **others: Any) -> tuple[Callable[..., Any], ...]:
    """Define NAME_attention of inputs, the third of which are the values, and NAME_weights without these.

    Returns:
        Both, and the form of the first that is composed of `scores`, which are (K, E).
    """
    first, second, _, *last = inputs.split(", ")
    of_weights = ", ".join((first.removeprefix("any "), second.removeprefix("any "), *last))

    def weights(ends: Ends, *arguments: Any) -> Tensor:
        return ends.softmax(scores(ends, *arguments[:-3]), *arguments[-3:])

    def composed(by_target: Csr, by_source: Csr, a: Tensor, b: Tensor, x: Tensor, *others: Any) -> Tensor:
        ends = Ends(by_target, by_source)
        return ends.collect(weights(ends, a, b, *others), x)

    options = f"{options}, {DROPOUT}"
    attention = differentiable_operator(f"{name}_attention", inputs, options, results, kernel=name, composed=composed,
                                        **others)
    others.pop("flags", None)
    return attention, differentiable_operator(
        f"{name}_weights", of_weights, options, "wide weights E K", kernel=f"{name}_weights", with_backward=False,
        composed=lambda by_target, by_source, *others: weights(Ends(by_target, by_source), *others).t(),
        **others), composed


_affine, _affine_weights, _composed_affine = _declare(
    "affine", "any source M K, any target N K, x M K C", "float slope", _affine_scores,
    "y N K C, y2 T K C, wide peaks N 2 K, wide mass N K", flags="bool train", check=_check_affine)
_bilinear, _bilinear_weights, _composed_bilinear = _declare(
    "bilinear", "q N K D, k M K D, v M K C, any bias? K E", "float scale", _bilinear_scores)
#: (Csr, Csr, q, k, x, amplitude times v, kind, parameter, dropout, seed, batch_heads) -> y and peaks.
attend, _additive_weights, _ = _declare(
    "additive", "q N K D, k M K D, x M K C, any vector K D", "int kind, float parameter", _additive_scores,
    check=lambda *arguments: check_kind(arguments[-5]))
_projected = differentiable_operator(
    "projected_attention", "x M K C, z? N K C, any of_source K C, any of_target K C, any bias? K C",
    f"float slope, {DROPOUT}", "y N K C, y2 T K C, wide peaks N 2 K, wide mass N K, wide source M K, wide target N K",
    flags="bool train", kernel="projected", composed=_composed_projected, check=_check_projected)
_packed = differentiable_operator(
    "packed_attention", "table M W, q? N K D, any bias? K E", f"SymInt heads, SymInt depth, float scale, {DROPOUT}",
    "y N K C, wide peaks N 2 K", kernel="packed", composed=_composed_packed, fake=_fake_packed, check=_check_packed)
