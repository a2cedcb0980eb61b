"""Self-attention of few entries: projections, softmax and output projection as one node of autograd."""

from __future__ import annotations

from typing import Any, ClassVar, cast

import torch
from torch import Tensor

from structconv.bases.entrywise import Normalized
from structconv.bases.tree import Projected
from structconv.kernels.dense_attention import Attended, ScaledDotProduct
from structconv.planning.kernel import register
from structconv.planning.problem import Call, Problem, Run
from structconv.primitives.fused_attention import all_pairs
from structconv.primitives.native.dispatch import kernels
from structconv.primitives.native.layer import attend_entries
from structconv.primitives.native.node import is_direct
from structconv.primitives.products import linear
from structconv.weights import LowRank
from structconv.weights.base import plus

__all__ = ["SmallAttention", "composed_attention", "is_small"]

#: Entries up to which one node is faster than torch's products with attention between them, in batches of any size.
_MOST_ENTRIES = 128
#: Channels of a head that the kernel holds: kAttentionChannels in native/src/api.h.
_MOST_CHANNELS = 256


def is_small(entries: int, *channels: int) -> bool:
    """Return True if one kernel should compute attention of so many entries with so many channels of a head."""
    return entries <= _MOST_ENTRIES and max(channels) <= _MOST_CHANNELS


class SmallAttention(ScaledDotProduct):
    """All pairs of the entries of x (..., M, P), or those m <= n, of few entries; Theta_k = V_k O_k."""

    name = "structconv.small_attention"
    types: ClassVar[tuple[type, ...]] = (Normalized,)
    before: ClassVar[tuple[str, ...]] = ("structconv.dense_attention", *ScaledDotProduct.before)

    def match(self, problem: Problem) -> Attended | None:
        x, theta = problem.x, problem.theta
        if problem.projected or problem.pending or not isinstance(theta, LowRank) or theta.groups != theta.size:
            return None
        if x.dtype is not torch.float32 or x.device.type != "cpu" or x.dim() not in (2, 3) or kernels() is None:
            return None
        if problem.sizes.nominal or problem.inputs != problem.outputs:
            return None
        match = super().match(problem)
        fits = (match is not None and is_small(problem.inputs, match.depth, theta.value.shape[2])
                and match.bias is None and not match.existing.masked and match.size == theta.size)
        return match if fits else None

    def paths(self, match: Attended, problem: Problem) -> tuple[str, ...]:
        return ("between",)

    def compile(self, match: Attended, problem: Problem, path: str) -> Run:
        otherwise = super().compile(match, problem, path)
        heads, scale, causal = match.size, match.scale, match.existing.causal

        def run(call: Call) -> Tensor:
            query, key, x = match.query(call.basis), match.key(call.basis), call.x
            if not (type(query) is type(key) is Projected and query.x is key.x is x and key.heads == heads):
                return otherwise(call)
            theta = cast(LowRank, call.theta)
            value, output = theta.value.mT.flatten(0, 1), theta.output.flatten(0, 1).mT
            tensors = x, query.weight, query.bias, key.weight, key.bias, value, None, output, call.bias
            if not is_direct(*tensors):
                return otherwise(call)
            return attend_entries(None, composed_attention(heads, scale, causal), *tensors, None, None, heads, scale,
                                  causal, False)

        return run


def composed_attention(heads: int, scale: float, causal: bool, places: Tensor | None = None, summed: bool = False
                       ) -> Any:
    """The function of `attend_entries` by differentiable operators."""
    def composed(x: Tensor, query: Tensor, query_bias: Tensor | None, key: Tensor, key_bias: Tensor | None,
                 value: Tensor, value_bias: Tensor | None, output: Tensor | None, bias: Tensor | None,
                 mask: Tensor | None) -> Tensor:
        value_bias = None if value_bias is None else value_bias.flatten()
        rows, value = x.view(-1, *x.shape[-2:]), value.mT.flatten(0, 1) if value.dim() == 3 else value
        q, k, v = [linear(rows, weight, b).unflatten(-1, (heads, -1)).transpose(-2, -3)
                   for weight, b in ((query, query_bias), (key, key_bias), (value, value_bias))]
        if mask is not None and places is not None:
            mask = mask.index_select(-1, places).view(1, -1, *[x.shape[-2]] * 2)
        y = all_pairs(q, k, v, mask, causal=causal, scale=scale)
        y = (y.sum(-3) if summed else y.transpose(-2, -3).flatten(-2)).view(*x.shape[:-1], -1)
        return plus(y, bias) if output is None else linear(y, output, bias)

    return composed


register(SmallAttention())
