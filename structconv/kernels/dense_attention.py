"""Scaled dot-product attention of all pairs in one operator."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple, cast

import torch
from torch import Tensor
from torch.compiler import is_compiling

from structconv import torch_compat as private
from structconv.bases.dense import Dense
from structconv.bases.entrywise import Dropped, Normalized
from structconv.bases.placed import Moved
from structconv.bases.positions import Distance, GridLookup, Lookup
from structconv.bases.scores import Bilinear
from structconv.bases.tree import LAZY, getter, materializer
from structconv.derived import Owner
from structconv.kernels.expressions import (
    Dropout,
    Existing,
    is_listed,
    product_and_bias,
    softmax_over_inputs,
    unmasked,
    unscaled,
)
from structconv.kernels.orders import Application, Applied
from structconv.planning.cost import Cost
from structconv.planning.counts import application
from structconv.planning.fitted import FUSED_SHARE, PADDED
from structconv.planning.kernel import register
from structconv.planning.problem import Call, Problem
from structconv.primitives.functions import finite
from structconv.primitives.fused_attention import exact_attention, fused_attention
from structconv.primitives.native.dispatch import drop_of, kernels
from structconv.shapes import broadcast
from structconv.structures.values import class_volume

__all__ = ["Attended", "Held", "ScaledDotProduct", "bias_of", "whole_bias"]

Held = Dense | GridLookup | Lookup | Distance
#: Weights of all pairs up to which a bias is held whole for torch's operator.
HELD_WEIGHTS, HELD_RELATIVE = 1 << 22, 1 << 16


class Attended(NamedTuple):
    """softmax_m(scale <query_kn, key_km> + bias) where pairs exist; a bias is held whole.

    Fields: functions that find query, key and bias in a basis; K and D; the owner of indices that depend on sizes only.
    """

    query: Callable[[Any], Any]
    key: Callable[[Any], Any]
    size: int
    depth: int
    scale: float
    existing: Existing
    bias: Callable[[Any], Held | Moved] | None
    owner: Owner
    dropout: Dropout = Dropout()

    def attend(self, r: Tensor, call: Call) -> Tensor:
        """(..., K or 1, M, C) -> (..., K, N, C)."""
        basis = call.basis
        if not is_compiling() and (private.transforms_active() or private.forward_level() >= 0):
            # torch's fused operators have no forward or second derivative, and no batches
            return call.materialized().apply(r)
        query, key = self.query(basis), self.key(basis)
        query = query.tensor() if type(query) in LAZY else query
        key = key.tensor() if type(key) in LAZY else key
        causal, paddings, others = existing = self.existing
        lead: tuple[int, ...] = r.shape[:-3]
        masked = bool(paddings or others)
        own = existing.batch_shape(basis) if masked else ()
        drop = drop_of(self.dropout.p, self.dropout.seed_of(basis), self.size)
        if drop[0] and lead != broadcast(query.shape[:-3], key.shape[:-3], own):
            return call.materialized().apply(r)  # dropout that a batch of r shares
        outputs, inputs, values = query.shape[-2], key.shape[-2], r
        if not (len(lead) == 1 and r.shape[-3] == self.size and query.shape[:-2] == key.shape[:-2] == r.shape[:-2]
                and own in ((), (1,), lead)):
            lead = broadcast(lead, query.shape[:-3], key.shape[:-3], own)
            query, key, values = [_batch(t, lead, self.size) for t in (query, key, r)]
        mask = existing.table(basis, lead, inputs, outputs, r.device) if masked else None
        if causal and inputs > outputs and not (masked or drop[0]) and self.bias is None:
            key, values = key[..., :outputs, :], values[..., :outputs, :]
        added = None if mask is None else mask.mT
        if self.bias is not None:
            bias = self.bias(basis).by_outputs(inputs, outputs, query.dtype, self.owner)
            if bias.shape[:-3] != (1,):
                bias = bias.expand(*lead, *bias.shape[-3:]).flatten(0, -4)
            added = bias if added is None else bias.masked_fill(~added, -torch.inf)
        if drop[0]:
            dropped = exact_attention(query, key, values, added, causal, self.scale, drop)
            if dropped is None:
                return call.materialized().apply(r)
            y, exact = dropped, True
        else:
            y, exact = fused_attention(query, key, values, added, causal, self.scale)
        y = y if len(lead) == 1 else y.reshape(*lead, *y.shape[-3:])
        leaks = not exact and (not finite(y) if masked else causal and not _is_causal(y, query, key, r))
        return call.materialized().apply(r) if leaks else y  # NaN passes through absent pairs, whose weight is zero


def _is_causal(y: Tensor, query: Tensor, key: Tensor, r: Tensor) -> bool:
    """Return True if no value that is not finite can have reached an earlier output. torch's fused kernel on a CPU
    masks the scores first, so that only values of r can, multiplied by weights of zero. The last output then shows it,
    because it reads all inputs."""
    if is_compiling():
        return True
    unit = all(t.stride(-1) == 1 for t in (query, key, r))
    return finite(y[..., -1:, :] if unit and r.is_cpu and torch.backends.cuda.flash_sdp_enabled() else y)


def _batch(t: Tensor, lead: tuple[int, ...], size: int) -> Tensor:
    """(..., K or 1, M, C) -> (B, K, M, C)."""
    if not lead and t.shape[0] == size and t.dim() == 3:
        return t.unsqueeze(0)
    return t.expand(*lead, size, *t.shape[-2:]).reshape(math.prod(lead), size, *t.shape[-2:])


class ScaledDotProduct(Applied):
    """One operator: its pairs by order, by padding, by a table of booleans, or with a bias that is held whole."""

    name = "structconv.dense_attention"
    types: ClassVar[tuple[type, ...]] = (Normalized, Dropped)
    before: ClassVar[tuple[str, ...]] = ("torch.flex", "structconv.blocked_attention")

    def match(self, problem: Problem) -> Attended | None:
        softmax = softmax_over_inputs(problem.basis)
        if problem.relative is not None or softmax is None:
            return None  # relative values need the weights too
        basis, dropout = softmax
        match = matched(basis, self.held_bias(basis, problem))
        if match is None or not (dropout.p or (match.existing.causal and (match.existing.masked or match.bias))):
            return match
        native = problem.x.dtype is torch.float32 and problem.x.device.type == "cpu" and kernels() is not None
        return match._replace(dropout=dropout) if native and not is_compiling() else None

    def held_bias(self, basis: Normalized, problem: Problem) -> Held | None:
        """The bias of the scores that the operator holds whole."""
        return whole_bias(basis, problem.sizes.nominal)

    def application_cost(self, match: Attended, problem: Problem, channels: int, mode: str) -> Cost:
        fused = application(problem.basis, problem.sizes, channels, mode).repeated(FUSED_SHARE)
        if channels == match.depth:
            return fused
        rows = match.size * (2 * problem.inputs + problem.outputs)
        return fused + Cost(bytes=problem.bytes(2 * rows * max(channels, match.depth)), calls=PADDED)

    def application(self, match: Attended, problem: Problem) -> Application:
        return Application(match.attend)


def matched(basis: Normalized, bias: Held | Moved | None) -> Attended | None:
    """Return the operands of the operator in a basis with this term of the scores; `None` if the basis is something
    else, or its mask is a list of edges."""
    if basis.kind != "softmax" or basis.over != "inputs":
        return None
    node = basis.child if bias is None else product_and_bias(unmasked(basis.child), lambda part: part is bias)[0]
    scale, node = unscaled(node)
    if not isinstance(node, Bilinear) or is_listed(basis.child):
        return None
    existing = Existing.of(basis.child.support(), node.num_inputs, node.num_outputs)
    if existing is None:
        return None
    return Attended(getter(node.query), getter(node.key), basis.size, node.query.shape[-1], scale, existing,
                    None if bias is None else materializer(bias), Owner())


def bias_of(weights: Normalized) -> Held | None:
    """The term beside the product that has a number for each pair."""
    return cast("Held | None", product_and_bias(unmasked(weights.child), lambda part: isinstance(part, Held))[1])


def whole_bias(weights: Normalized, nominal: bool = False) -> Held | None:
    """The bias that is a table of all pairs, or that is small enough to hold at all pairs where no mask is."""
    bias = bias_of(weights)
    if bias is None or isinstance(bias, Dense):
        return bias
    if weights.child.support() is not None or (isinstance(bias, Lookup) and bias.kind == "position"):
        return None
    if nominal and not isinstance(bias, GridLookup):  # of any number of entries
        return None
    sizes = *(() if nominal else weights.batch_shape), weights.num_inputs, weights.num_outputs
    most = HELD_WEIGHTS if isinstance(bias, GridLookup) else HELD_RELATIVE
    return bias if weights.size * class_volume(sizes) <= most else None


register(ScaledDotProduct())
