"""Layers along edges that a kernel has sorted, each as one node of autograd: one description, a line for each layer.

See `node.as_node` for how they are called.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import linear

from structconv.primitives import products  # noqa: F401  (which C++ calls)
from structconv.primitives.csr import spmm
from structconv.primitives.edge_attention import additive_attention, bilinear_attention, projected_attention
from structconv.primitives.native import dispatch
from structconv.primitives.native.adjacency import Adjacency
from structconv.primitives.native.dispatch import Drop, Loaded
from structconv.primitives.native.indices import LIMIT, Csr
from structconv.primitives.native.node import Gradients, as_node

__all__ = ["attend_additive", "attend_affine", "attend_bilinear", "attend_by_dots", "attend_by_pairs",
           "attend_by_terms", "attend_dots", "attend_entries", "attend_layer", "attend_pairs", "convolve",
           "convolve_linear", "convolve_with_self", "gather_maxima", "gather_messages", "gather_sums", "group_starts",
           "pool_groups", "scatter_rows", "standardize_groups", "weigh_rows"]

#: Pooling in src/api.h.
_POOLINGS = {"sum": 0, "mean": 1, "max": 2, "min": 3, "var": 4, "softmax": 5, "fixed softmax": 6}

# -- sums and products --------------------------------------------------------------------------------------------

#: y = sum_k A_k^T x Theta_k + b of x (M, P), Theta (K, P, Q) and b (Q) or none: (N, Q). Edges lead to N K outputs, of
#: which n K + k is output n of A_k; of one matrix, `structure_first` tells (A^T x) Theta from A^T (x Theta).
convolve = as_node("_Convolve", 3, "convolve", "convolve_backward", takes_training=True, takes_needed=3,
                   readers={2: ()})
#: y = A^T x Theta_(1 - own) + x Theta_own + b of x (N, P) and Theta (2, P, Q): GraphSAGE (Hamilton et al. 2017).
convolve_with_self = as_node("_ConvolveWithSelf", 3, "convolve_with_self", "convolve_with_self_backward",
                             takes_training=True, takes_needed=3, readers={2: ()})
#: y = A^T x W^T + x_root R^T + b of x (M, P), W (Q, P), R (Q, P) or none, x_root (N, P) or none for x itself, and b (Q)
#: or none: (N, Q). Weights lie as in torch's linear layers. `structure_first` tells (A^T x) W^T from A^T (x W^T).
convolve_linear = as_node("_ConvolveLinear", 5, "convolve_linear", "convolve_linear_backward", takes_training=True,
                          takes_needed=5, readers={4: ()})
#: The sums, or the maxima, of x (M, C) over the edges into each output: (N, C), zero without any.
gather_sums = as_node("_Sums", 1, "sums", "sums_backward", readers={0: ()})
gather_maxima = as_node("_Maxima", 1, "maxima", "maxima_backward")
#: y_n = sum over the edges m -> n of relu(x_m + a_e), of x (M, C) and a (E, C), with a `numbered` adjacency: (N, C).
gather_messages = as_node("_Messages", 2, "messages", "messages_backward", readers={}, takes_needed=2)


def _weigh(edges: Adjacency, values: Tensor, rows: Tensor) -> Tensor:
    core: Any = Loaded.core
    y: Tensor = core.spmm(edges.by_target, values, False, _by_head(rows, values), None, 1, len(values), 1.0, 0.0)
    return y.squeeze_(0)  # no view: the result of a node may change in place unless it is one


def _weigh_backward(edges: Adjacency, values: Tensor, rows: Tensor, grad: Tensor, needed: Sequence[bool]) -> Gradients:
    core: Any = Loaded.core
    (by_target, by_source), size, g = edges.sides(), len(values), grad.unsqueeze(0)
    return (core.sddmm(by_target, g, _by_head(rows, values), size) if needed[0] else None,
            core.spmm(by_source, values, False, g, None, size, size, 1.0, 0.0).transpose(0, 1).flatten(1)
            if needed[1] else None)


def _by_head(rows: Tensor, values: Tensor) -> Tensor:
    return rows.view(len(rows), len(values), -1).transpose(0, 1)


_weigh_rows = as_node("_WeighRows", 2, _weigh, _weigh_backward, readers={0: (1,), 1: (0,)})


def weigh_rows(edges: Adjacency, layouts: Callable[[], tuple[Csr, Csr]], values: Tensor, rows: Tensor) -> Tensor:
    """y = sum_k A_k^T x_k, A_k with the values (K, E) of the edges, x (M, K C), with a `numbered` adjacency: (N, C)."""
    return _weigh_rows(edges, lambda values, rows: spmm(*layouts(), values, _by_head(rows, values), sum_heads=True),
                       values, rows)


# -- attention; its options end with p, seed and heads of one batch entry, see `dispatch.drop_of` ------------------

#: `projected_attention` among the inputs, of x (M, K, C), of_source and of_target (K, C), a bias (K, C) or none, and
#: the slope: (M, K, C).
attend_affine = as_node("_AttendAffine", 4, "attend_forward", "attend_backward", takes_training=True)
#: `attend_affine` of x Theta_k instead of x: of x (M, P), Theta (K, P, C), of_source, of_target and a bias (K C) or
#: none: (M, K C).
attend_layer = as_node("_AttendLayer", 5, "attend_layer_forward", "attend_layer_backward", takes_training=True,
                       takes_needed=1)
#: `bilinear_attention` of q, k, v, no bias, and the scale.
attend_bilinear = as_node("_AttendBilinear", 4, "bilinear_forward", "bilinear_backward")
#: `additive_attention` of q, k, x, the vector, and the kind and the parameter of its activation.
attend_additive = as_node("_AttendAdditive", 4, "additive_forward", "additive_backward")
#: GATv2 among the inputs, projections included: (M, K C). Of x (M, P), Theta (K, P, C), the weight (K C, P) and bias of
#: the targets, the vector (K, C), a bias (K C) or none, and the slope.
attend_pairs = as_node("_AttendPairs", 6, "attend_pairs_forward", "attend_pairs_backward", takes_needed=1)
#: Scaled dot-product attention among the entries of x (M, P), projections included: (M, K C). Of x, queries (K D, P)
#: and their bias (K D) or none, keys and theirs, values (K, P, C), or (K C, P) with the number of heads in place of 0,
#: their bias (K C) or none, a bias (K C) of the result or none, 0, and the scale.
attend_dots = as_node("_AttendDots", 8, "attend_dots_forward", "attend_dots_backward", takes_training=True,
                      takes_needed=1)


#: Multi-head attention of x (..., M, P) to itself, without an adjacency. Of x, weight (K D, P) and bias of queries,
#: those of keys, of values (K C, P) or Theta (K, P, C) with a bias (K C) or (K, C), of the output (Q, K C), a mask
#: without a gradient, as of `fused_attention.exact_attention`, or a table (K or 1, 1, L) with the number in it of each
#: pair, (N M), or none; K, the scale, whether it is causal, and whether heads without an output's weight are added up.
attend_entries = as_node("_AttendEntries", 10, "attend_entries_forward", "attend_entries_backward",
                         takes_layouts=False, readers={}, takes_training=True, takes_needed=1)

# -- the same of parameters as layers hold them; the heads lie side by side, (M, K C), and biases may be none. `layouts`
# returns both layouts of the edges for the operators, or raises an error if the edges have changed ----------------

_Layouts = Callable[[], tuple[Csr, Csr]]


def attend_by_terms(edges: Adjacency, layouts: _Layouts, x: Tensor, theta: Tensor, source: Tensor, target: Tensor,
                    bias: Tensor | None, slope: float, drop: Drop) -> Tensor:
    """GAT: values h_k = x Theta_k, Theta (K, P, C), scores leaky_relu(<source_k, h_mk> + <target_k, h_nk>), b (K C)."""
    def composed(x: Tensor, theta: Tensor, source: Tensor, target: Tensor, bias: Tensor | None) -> Tensor:
        by_head = None if bias is None else bias.view(len(theta), -1)
        y = projected_attention(*layouts(), _values(x, theta), source, target, None, by_head, slope=slope,
                                dropout=drop[0], seed=torch.tensor(drop[1]), batch_heads=len(theta))
        return y.flatten(1)

    return attend_layer(edges, composed, x, theta, source, target, bias, slope, *drop)


def attend_by_pairs(edges: Adjacency, layouts: _Layouts, x: Tensor, theta: Tensor, weight: Tensor, offset: Tensor,
                    vector: Tensor, bias: Tensor | None, slope: float, drop: Drop) -> Tensor:
    """GATv2: values h_k = x Theta_k, scores vector_k^T leaky_relu(h_mk + q_nk), q = x W^T + offset, W (K C, P)."""
    def composed(x: Tensor, theta: Tensor, weight: Tensor, offset: Tensor, vector: Tensor, bias: Tensor | None
                 ) -> Tensor:
        k, q = _values(x, theta), linear(x, weight, offset).unflatten(-1, (len(theta), -1))
        y = additive_attention(*layouts(), q, k, k, vector, activation="leaky_relu", slope=slope, dropout=drop[0],
                               seed=torch.tensor(drop[1]), batch_heads=len(theta))
        return _plus(y, bias)

    return attend_pairs(edges, composed, x, theta, weight, offset, vector, bias, slope, *drop)


def attend_by_dots(edges: Adjacency, layouts: _Layouts, x: Tensor, query: Tensor, query_bias: Tensor | None,
                   key: Tensor, key_bias: Tensor | None, value: Tensor, value_bias: Tensor | None, bias: Tensor | None,
                   heads: int, scale: float, drop: Drop) -> Tensor:
    """The transformer's: scores scale <q_nk, k_mk> of q, k = x W^T + b, W (K D, P); values x Theta_k with Theta
    (K, P, C), or x W^T + b with W (K C, P)."""
    def composed(x: Tensor, query: Tensor, query_bias: Tensor | None, key: Tensor, key_bias: Tensor | None,
                 value: Tensor, value_bias: Tensor | None, bias: Tensor | None) -> Tensor:
        by_head = partial(torch.unflatten, dim=-1, sizes=(heads, -1))
        v = _values(x, value) if value.dim() == 3 else by_head(linear(x, value, value_bias))
        y = bilinear_attention(*layouts(), by_head(linear(x, query, query_bias)), by_head(linear(x, key, key_bias)), v,
                               scale=scale, dropout=drop[0], seed=torch.tensor(drop[1]), batch_heads=heads)
        return _plus(y, bias)

    return attend_dots(edges, composed, x, query, query_bias, key, key_bias, value, value_bias, bias,
                       0 if value.dim() == 3 else heads, scale, *drop)


def _values(x: Tensor, theta: Tensor) -> Tensor:
    return torch.einsum("mp,kpc->mkc", x, theta)


def _plus(y: Tensor, bias: Tensor | None) -> Tensor:
    return y.flatten(1) if bias is None else y.flatten(1) + bias


# -- groups of consecutive rows -------------------------------------------------------------------------------------

class _Groups(NamedTuple):
    """The first row of each group and the number of all, in the place of an adjacency."""

    by_target: Tensor

    def sides(self) -> tuple[Tensor]:
        return (self.by_target,)


def _scatter_backward(_: Any, x: Tensor, index: Tensor, y: Tensor, grad: Tensor, needed: Any, groups: int, kind: int
                      ) -> Gradients:
    core: Any = Loaded.core
    return core.scatter_backward(x, index, y, grad, groups, kind), None


def _scatter_evenly_backward(_: Any, x: Tensor, index: Tensor, grad: Tensor, *options: Any) -> Gradients:
    return _scatter_backward(_, x, index, grad, grad, *options)


_pool = as_node("_Pool", 1, "pool", "pool_backward")
_pool_evenly = as_node("_Pool", 1, "pool", "pool_evenly_backward", readers={0: ()})
_scatter = as_node("_Scatter", 2, "scatter", _scatter_backward, takes_layouts=False)
_scatter_evenly = as_node("_Scatter", 2, "scatter", _scatter_evenly_backward, takes_layouts=False, readers={0: ()})
_center = as_node("_Norm", 1, "center", "center_backward", readers={0: ()})
_norm = as_node("_Norm", 4, "norm", "norm_backward", readers={3: ()})
#: Center and Scale in src/api.h.
_CENTERS = {"channel": 0, "all": 1}
_SCALES = {None: 0, "channel": 1, "all": 2}


def pool_groups(x: Tensor, starts: Tensor, kind: str, composed: Callable[[Tensor], Tensor], t: float = 1.0
                ) -> Tensor | None:
    """x (M, C) by groups of rows -> (G, C), zero for a group without rows; `None` where no kernel can read them.

    Args:
        starts: (G + 1,), the first row of each group and the number of all.
        kind: "sum", "mean", "max", "min", "var" (the mean of squared distances from the mean), "softmax" (weights
            softmax(t x) in each channel), or "fixed softmax", whose weights have no gradient.
        t: the factor of the scores of a softmax.
        x, composed: as of every layer here.
    """
    core = _readable(starts)
    if core is None:
        return None
    if not (x.requires_grad and torch.is_grad_enabled()):
        y: Tensor = core.pool(starts, x, _POOLINGS[kind], t)
        return y
    return (_pool_evenly if kind in ("sum", "mean") else _pool)(_Groups(starts), composed, x, _POOLINGS[kind], t)


def scatter_rows(x: Tensor, index: Tensor, groups: int, kind: str, composed: Callable[[Tensor, Tensor], Tensor]
                 ) -> Tensor | None:
    """x (M, C) of groups in any order -> (G, C), zero for a group without rows, or of "softmax" the weights (M, C);
    `None` where no kernel can read them.

    Args:
        index: (M,), the group of each row. groups: G. kind: "sum", "mean", "max", "min" or "softmax".
        composed: the same function of x and index by differentiable operators.
    """
    if _readable(index) is None:
        return None
    node = _scatter_evenly if kind in ("sum", "mean") else _scatter
    return node(None, composed, x, index, groups, _POOLINGS[kind])


def standardize_groups(x: Tensor, starts: Tensor, shift: Tensor | None, weight: Tensor | None, bias: Tensor | None,
                       composed: Callable[..., Tensor], center: str, scale: str | None, eps: float, gain: float
                       ) -> Tensor | None:
    """y = gain weight (x - shift mean) scale + bias of x (M, C) by groups of rows; `None` where no kernel reads them.

    Args:
        starts, x: as of `pool_groups`.
        shift, weight, bias: (C,), or none for 1, 1 and 0.
        composed: the same function of x, shift, weight and bias.
        center: the mean is that of each "channel" of a group, or of "all" its channels.
        scale: 1 / sqrt(mean((x - shift mean)^2) + eps) of each "channel" or of "all", or None for 1.
    """
    if _readable(starts) is None:
        return None
    if scale is shift is weight is bias is None:
        return _center(_Groups(starts), lambda x: composed(x, None, None, None), x, _CENTERS[center], gain)
    return _norm(_Groups(starts), composed, x, shift, weight, bias, _CENTERS[center], _SCALES[scale], eps, gain)


def group_starts(groups: Tensor, count: int | None) -> Tensor | None:
    """The first row of each group, and the number of all: (count + 1,); `None` where no kernel can say.

    Args:
        groups: (M,), the group of each row; `None` is returned if they do not rise, or one is not in [0, count).
        count: of groups, by default the last row's + 1.
    """
    core = _readable(groups) if count is None or 0 <= count < LIMIT else None
    starts = None if core is None else core.starts(groups, count)
    return starts if starts is not None and starts.shape[0] else None


def _readable(index: Tensor) -> Any:
    """The kernels, or `None` if the index has another device, dtype or layout than they read."""
    if not (index.is_cpu and index.dtype is torch.int64 and index.is_contiguous()):
        return None
    return Loaded.core if Loaded.asked else dispatch.kernels()
