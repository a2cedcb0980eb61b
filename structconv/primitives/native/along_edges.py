"""Whole attention layers among the entries x (M, P) of a graph, projections included, each as one node of autograd.

Each takes the edges as kernels sort them, and `layouts`, which returns both layouts of the edges, or raises an error if
these have changed: the same by differentiable operators reads them. The heads lie side by side, (M, K C); biases may be
none. `drop` is that of the weights.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import linear

from structconv.primitives.native.additive import additive_attention
from structconv.primitives.native.adjacency import Adjacency
from structconv.primitives.native.affine import projected_attention
from structconv.primitives.native.bilinear import bilinear_attention
from structconv.primitives.native.dispatch import Drop
from structconv.primitives.native.indices import Csr
from structconv.primitives.native.layer import attend_dots, attend_layer, attend_pairs

__all__ = ["attend_by_dots", "attend_by_pairs", "attend_by_terms"]

Layouts = Callable[[], tuple[Csr, Csr]]


def attend_by_terms(edges: Adjacency, layouts: Layouts, x: Tensor, theta: Tensor, source: Tensor, target: Tensor,
                    bias: Tensor | None, slope: float, drop: Drop) -> Tensor:
    """GAT: values h_k = x Theta_k, Theta (K, P, C), scores leaky_relu(<source_k, h_mk> + <target_k, h_nk>), b (K C)."""
    def composed(x: Tensor, theta: Tensor, source: Tensor, target: Tensor, bias: Tensor | None) -> Tensor:
        by_head = None if bias is None else bias.view(len(theta), -1)
        y = projected_attention(*layouts(), _values(x, theta), source, target, None, by_head, slope=slope,
                                dropout=drop[0], seed=torch.tensor(drop[1]), batch_heads=len(theta))
        return y.flatten(1)

    return attend_layer(edges, composed, x, theta, source, target, bias, slope, *drop)


def attend_by_pairs(edges: Adjacency, layouts: Layouts, x: Tensor, theta: Tensor, weight: Tensor, offset: Tensor,
                    vector: Tensor, bias: Tensor | None, slope: float, drop: Drop) -> Tensor:
    """GATv2: values h_k = x Theta_k, scores vector_k^T leaky_relu(h_mk + q_nk), q = x W^T + offset, W (K C, P)."""
    def composed(x: Tensor, theta: Tensor, weight: Tensor, offset: Tensor, vector: Tensor, bias: Tensor | None
                 ) -> Tensor:
        k, q = _values(x, theta), linear(x, weight, offset).unflatten(-1, (len(theta), -1))
        y = additive_attention(*layouts(), q, k, k, vector, activation="leaky_relu", slope=slope, dropout=drop[0],
                               seed=torch.tensor(drop[1]), batch_heads=len(theta))
        return _plus(y, bias)

    return attend_pairs(edges, composed, x, theta, weight, offset, vector, bias, slope, *drop)


def attend_by_dots(edges: Adjacency, layouts: Layouts, x: Tensor, query: Tensor, query_bias: Tensor | None, key: Tensor,
                   key_bias: Tensor | None, value: Tensor, value_bias: Tensor | None, bias: Tensor | None, heads: int,
                   scale: float, drop: Drop) -> Tensor:
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
