"""Additive attention (Bahdanau, GATv2) by the native operators: along edges, or over all pairs, causal or not."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from structconv import torch_compat as private
from structconv.bases.entrywise import Dropped, Normalized
from structconv.bases.scores import Additive
from structconv.bases.tree import getter, tensor
from structconv.derived import derived, values_known
from structconv.kernels.expressions import Dropout, Existing, is_listed, pairs_list, softmax_over_inputs, unmasked
from structconv.kernels.folding import Folding
from structconv.kernels.orders import Application, Applied
from structconv.kernels.sparse_attention import AttentionEdges
from structconv.planning.cost import Cost
from structconv.planning.counts import fused_application
from structconv.planning.kernel import register
from structconv.planning.problem import Call, Problem
from structconv.primitives.dense_additive import StepInputs, additive_step, dense_additive_attention, factor_of
from structconv.primitives.edge_attention import (
    additive_attention,
    additive_weights,
    as_logistic,
    attend,
    scaled,
)
from structconv.primitives.functions import finite
from structconv.primitives.native.dispatch import drop_of, usable
from structconv.primitives.native.layer import attend_additive
from structconv.shapes import broadcast

__all__ = ["AdditiveAttention", "AdditiveScores", "known"]

#: Inputs for each output from which on their part of the kernel is remembered.
FEW = 8

_NAMED: dict[Callable[..., Tensor], tuple[str, float]] = {
    torch.tanh: ("tanh", 0.0), F.tanh: ("tanh", 0.0), Tensor.tanh: ("tanh", 0.0),
    torch.sigmoid: ("sigmoid", 0.0), F.sigmoid: ("sigmoid", 0.0), Tensor.sigmoid: ("sigmoid", 0.0),
    torch.relu: ("leaky_relu", 0.0), F.relu: ("leaky_relu", 0.0), Tensor.relu: ("leaky_relu", 0.0),
    F.leaky_relu: ("leaky_relu", 0.01),
}


class AdditiveScores(NamedTuple):
    """softmax of <vector, activation(target_n + source_m)>, along edges, or over all m, or those up to n.

    Fields: functions that find the three in a basis; K; the edges, none for all pairs that are `existing`.
    """

    source: Callable[[Any], Any]
    target: Callable[[Any], Any]
    vector: Callable[[Any], Tensor]
    activation: str
    slope: float
    size: int
    dropout: Dropout
    edges: AttentionEdges | None
    existing: Existing

    def apply(self, r: Tensor, call: Call) -> Tensor:
        """(..., K or 1, M, C) -> (..., K, N, C)."""
        if self.existing.paddings:
            return call.materialized().apply(r)
        source, target = tensor(self.source(call.basis)), tensor(self.target(call.basis))
        if self.edges is not None and (y := self._as_one_node(source, target, r, call)) is not None:
            return y
        lead = broadcast(r.shape[:-3], source.shape[:-3], target.shape[:-3])
        batch = self._folded(source, target, lead, call)
        q, k, v = map(batch.rows, (target, source, r))
        vector = batch.by_head(self.vector(call.basis))
        options: dict[str, Any] = {"activation": self.activation, "slope": self.slope, "batch_heads": self.size,
                                   "dropout": self.dropout.p, "seed": self.dropout.seed_of(call.basis)}
        if self.edges is not None:
            y = additive_attention(*batch.layouts, q, k, v, vector, **options)
        elif self.existing.causal and usable(r, target.shape[-2]) is None and not all(map(finite, (source, target, r))):
            return call.materialized().apply(r)  # without native kernels a NaN would pass a causal mask
        else:
            y = dense_additive_attention(q, k, v, vector, causal=self.existing.causal,
                                         factor=self._factor(source, target, lead), **options)
        return batch.heads(y)

    def _as_one_node(self, source: Tensor, target: Tensor, r: Tensor, call: Call) -> Tensor | None:
        """`attend_additive` where a kernel can read the tensors of the call, else `None`."""
        vector, edges = self.vector(call.basis), self.edges
        if edges is None or (edges_of_call := edges.sorted_for(call, r, source, target, vector)) is None:
            return None
        kind, parameter, amplitude = as_logistic(self.activation, self.slope)
        p, seed, options = edges.dropout.p, edges.dropout.seed_of(call.basis), (kind, parameter)

        def operator(*tensors: Any) -> Tensor:
            y: Tensor = attend(*tensors, *options, p, seed, edges.size)[0]
            return y

        return edges.attend(attend_additive, operator, edges_of_call, target, source, r, scaled(vector, amplitude),
                            *options, *drop_of(p, seed, edges.size))

    def _folded(self, source: Tensor, target: Tensor, lead: tuple[int, ...], call: Call) -> Folding:
        if self.edges is None:
            return Folding(lead, self.size)
        return self.edges.folded(call.basis, source.shape[-2], target.shape[-2], source, lead)

    def step(self, r: Tensor, call: Call) -> Tensor:
        """`apply` in one of many calls of a prepared x: what depends only on x is computed once."""
        source, target = tensor(self.source(call.basis)), tensor(self.target(call.basis))
        if call.reused is None or private.watched() or not values_known(r, source, target):
            return self.apply(r, call)
        lead = broadcast(r.shape[:-3], source.shape[:-3], target.shape[:-3])
        keep = self.existing.padding(call.basis)
        inputs_of_call = source, call.x if call.projected is None else call.projected, self.vector(call.basis)
        owners = inputs_of_call if keep is None else (*inputs_of_call, keep)
        batch = Folding(lead, self.size)
        inputs = call.reused.of(owners, (lead, r.shape), lambda: self._step_inputs(r, source, keep, batch, call))
        q = batch.rows(target)
        if inputs is None or not inputs.take(q):
            return self.apply(r, call)
        return batch.heads(additive_step(q, inputs))

    def _step_inputs(self, r: Tensor, source: Tensor, keep: Tensor | None, batch: Folding, call: Call
                     ) -> StepInputs | None:
        """Return the tensors that all steps over a prepared x read."""
        k, x = map(batch.rows, (source, r))
        if keep is not None:
            keep = batch.by_edge(keep.unsqueeze(-2))
        return StepInputs.of(k, x, batch.by_head(self.vector(call.basis)), self.activation, keep)

    def _factor(self, source: Tensor, target: Tensor, lead: tuple[int, ...]) -> Tensor | None:
        """Return the part of the kernel that depends only on the inputs; it is remembered if outputs are few, as in
        decoding."""
        few = target.shape[-2] * FEW <= source.shape[-2] and values_known(source) and source.is_cpu
        if not few:
            return None
        return derived(source, ("factor", self.activation, self.slope, lead), lambda: factor_of(
            Folding(lead, self.size).rows(source.detach()), self.activation, self.slope), numbers=True)

    def weights(self, call: Call) -> Tensor:
        """(..., K, E) in the order of the edges."""
        assert self.edges is not None
        source, target = tensor(self.source(call.basis)), tensor(self.target(call.basis))
        batch = self._folded(source, target, broadcast(source.shape[:-3], target.shape[:-3]), call)
        entries = additive_weights(*batch.layouts, batch.rows(target), batch.rows(source),
                                 batch.by_head(self.vector(call.basis)), activation=self.activation,
                                 slope=self.slope, **self.edges.options(call.basis))
        return batch.weights(entries).to(call.x.dtype)


def known(activation: Callable[[Tensor], Tensor]) -> tuple[str, float] | None:
    """(name, slope) of a function that the operators have, or `None`; it is recognized, never called."""
    if isinstance(activation, partial):
        if activation.func is not F.leaky_relu or activation.args or set(activation.keywords) - {"negative_slope"}:
            return None
        return "leaky_relu", float(activation.keywords.get("negative_slope", 0.01))
    return next((name for fn, name in _NAMED.items() if fn is activation), None)


class AdditiveAttention(Applied):
    """The native kernels of additive scores."""

    name, types = "structconv.additive_attention", (Normalized, Dropped)

    def match(self, problem: Problem) -> AdditiveScores | None:
        softmax = softmax_over_inputs(problem.basis)
        if softmax is None:
            return None
        weights, dropout = softmax
        node = unmasked(weights.child)
        named = known(node.activation) if isinstance(node, Additive) else None
        if not isinstance(node, Additive) or named is None:
            return None
        support = weights.child.support()
        pairs = pairs_list(support)
        existing = Existing.of(None if pairs else support, problem.inputs, problem.outputs)
        steps = problem.reused and not dropout.p
        if existing is None or existing.others or (existing.paddings and (existing.causal or not steps)) or (
                pairs is None and support is not None and is_listed(weights.child)):
            return None
        edges = None if pairs is None else AttentionEdges(pairs, dropout, node.size)
        return AdditiveScores(getter(node.source), getter(node.target), getter(node.vector), *named, node.size, dropout,
                              edges, existing)

    def application_cost(self, match: Any, problem: Problem, channels: int, mode: str) -> Cost:
        return fused_application(problem.basis, problem.sizes, channels, mode)

    def application(self, match: AdditiveScores, problem: Problem) -> Application:
        steps = problem.reused and match.edges is None and not match.existing.causal and not match.dropout.p
        return Application(match.step if steps else match.apply,
                           weights=None if match.edges is None else match.weights)


register(AdditiveAttention())
