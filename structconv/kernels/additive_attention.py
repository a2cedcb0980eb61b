"""Additive attention (Bahdanau, GATv2) by the native operators: along edges, or over all pairs, causal or not."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from structconv.bases.base import Basis, value
from structconv.bases.pairs import exact_graph, listed_graph
from structconv.bases.pairwise import Dropped, Normalised
from structconv.bases.scores import Additive
from structconv.kernels.forms import register_form
from structconv.kernels.fused import FusedAttention, entries_first, softmax_over_inputs, unmasked
from structconv.kernels.sparse_attention import EdgeAttention, follow_edges
from structconv.primitives.native.additive import additive_attention
from structconv.primitives.native.additive_dense import dense_additive_attention
from structconv.primitives.native.calls import usable
from structconv.primitives.native.weights import additive_weights
from structconv.structures.graph import Graph
from structconv.structures.supports import Causal

_NAMED: dict[Callable[..., Tensor], tuple[str, float]] = {
    torch.tanh: ("tanh", 0.0), F.tanh: ("tanh", 0.0), Tensor.tanh: ("tanh", 0.0),
    torch.sigmoid: ("sigmoid", 0.0), F.sigmoid: ("sigmoid", 0.0), Tensor.sigmoid: ("sigmoid", 0.0),
    torch.relu: ("leaky_relu", 0.0), F.relu: ("leaky_relu", 0.0), Tensor.relu: ("leaky_relu", 0.0),
    F.leaky_relu: ("leaky_relu", 0.01),
}


@value
class AdditiveEdges(EdgeAttention):
    """softmax over edges of <vector, activation(target_n + source_m)>."""

    child: Basis
    graph: Graph
    p: float
    seed: Tensor | None
    scores: Additive
    activation: str
    slope: float

    def attend(self, lead: tuple[int, ...], v: Tensor) -> Tensor:
        q, k, vector = _operands(self.scores, lead, v.dtype)
        return additive_attention(*self.layouts(), q, k, v.to(q.dtype), vector,
                                  activation=self.activation, slope=self.slope, dropout=self.p, seed=self.seed,
                                  batch_heads=self.size).to(v.dtype)

    def weigh(self, lead: tuple[int, ...]) -> Tensor:
        return additive_weights(*self.layouts(), *_operands(self.scores, lead),
                                activation=self.activation, slope=self.slope, dropout=self.p, seed=self.seed,
                                batch_heads=self.size)


@value
class AdditivePairs(FusedAttention):
    """softmax over all m, or those up to n, of <vector, activation(target_n + source_m)>."""

    child: Basis
    p: float
    seed: Tensor | None
    scores: Additive
    activation: str
    slope: float
    causal: bool

    def attend(self, lead: tuple[int, ...], v: Tensor) -> Tensor:
        q, k, vector = _operands(self.scores, lead, v.dtype)
        return dense_additive_attention(q, k, v.to(q.dtype), vector, activation=self.activation, slope=self.slope,
                                        causal=self.causal, dropout=self.p, seed=self.seed,
                                        batch_heads=self.size).to(v.dtype)


def _operands(scores: Additive, lead: tuple[int, ...],
              other: torch.dtype | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """q (N, B K, D) and k (M, B K, D) of one dtype, which autocast may not have given them, and vector (B K, D)."""
    q, k = (entries_first(t, lead, scores.size) for t in (scores.target, scores.source))
    dtype = torch.promote_types(q.dtype, k.dtype)
    dtype = dtype if other is None else torch.promote_types(dtype, other)
    vector = scores.vector.expand(*lead, *scores.vector.shape).reshape(-1, scores.vector.shape[-1])
    return q.to(dtype), k.to(dtype), vector


def known(activation: Callable[[Tensor], Tensor]) -> tuple[str, float] | None:
    """(name, slope) of an activation that the operators have, or `None`; it is recognised, never called."""
    if isinstance(activation, partial):
        if activation.func is not F.leaky_relu or activation.args or set(activation.keywords) - {"negative_slope"}:
            return None
        return "leaky_relu", float(activation.keywords.get("negative_slope", 0.01))
    if type(activation) is nn.LeakyReLU:
        return "leaky_relu", float(activation.negative_slope)
    modules = {nn.Tanh: ("tanh", 0.0), nn.Sigmoid: ("sigmoid", 0.0), nn.ReLU: ("leaky_relu", 0.0),
               nn.Identity: ("leaky_relu", 1.0)}
    if isinstance(activation, nn.Module):
        return modules.get(type(activation))
    return next((found for fn, found in _NAMED.items() if fn is activation), None)


def recognise(basis: Basis) -> FusedAttention | None:
    """The basis as additive attention, or `None` where it is something else or its mask is one of another kind."""
    softmax = softmax_over_inputs(basis)
    if softmax is None:
        return None
    weights, p, seed = softmax
    node = unmasked(weights.child)
    found = known(node.activation) if isinstance(node, Additive) else None
    if not isinstance(node, Additive) or found is None:
        return None
    graph, support = exact_graph(weights.child), weights.child.support()
    if graph is not None:
        return AdditiveEdges(basis, graph, p, seed, node, *found)
    if support is not None and (not isinstance(support, Causal) or listed_graph(weights.child) is not None):
        return None
    return AdditivePairs(basis, p, seed, node, *found, support is not None)


def suits(form: Basis, r: Tensor) -> bool:
    """Whether the operator is right for r: without native kernels a NaN would pass a causal mask.

    Compiled programs read no values; there masked-out entries are the layer's care.
    """
    if torch.compiler.is_compiling() or not (isinstance(form, AdditivePairs) and form.causal):
        return True
    if usable(r, form.num_outputs) is not None:
        return True
    return all(bool(t.isfinite().all()) for t in (form.scores.source, form.scores.target, r))


register_form("structconv.additive_attention", recognise, Normalised, Dropped, suits=suits, follow=follow_edges)
