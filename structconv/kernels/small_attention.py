"""Self-attention of few entries: projections, softmax and output projection as one node of autograd."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor

from structconv.bases.entrywise import Normalized
from structconv.bases.positions import Lookup
from structconv.bases.tree import Projected
from structconv.derived import Owner
from structconv.kernels.dense_attention import Attended, Held, ScaledDotProduct, bias_of
from structconv.planning.kernel import register
from structconv.planning.problem import Call, Problem, Run
from structconv.primitives.fused_attention import all_pairs
from structconv.primitives.native.dispatch import kernels
from structconv.primitives.native.layer import attend_entries
from structconv.primitives.native.node import is_direct
from structconv.primitives.products import linear
from structconv.weights import Full, HeadBlocks, LowRank
from structconv.weights.base import plus

__all__ = ["SmallAttention", "composed_attention", "few_attended", "is_first", "is_small", "position_table"]

#: Entries up to which one node is faster than torch's products with attention between them, in batches of any size.
_MOST_ENTRIES = 128
#: Values of all heads up to which they are added up after the attention.
_MOST_SUMMED = 1 << 16
#: Channels of a head that the kernel holds: kAttentionChannels in native/src/api.h.
_MOST_CHANNELS = 256


def is_small(entries: int, *channels: int) -> bool:
    """Return True if attention among `entries`, whose heads have these numbers of channels, is to be one kernel."""
    return entries <= _MOST_ENTRIES and max(channels) <= _MOST_CHANNELS


class SmallAttention(ScaledDotProduct):
    """All pairs of the entries of x (..., M, P), or those m <= n, of few entries, with a bias of positions or without;
    Theta_k = V_k O_k, or a matrix of each head."""

    name = "structconv.small_attention"
    types: ClassVar[tuple[type, ...]] = (Normalized,)
    before: ClassVar[tuple[str, ...]] = ("structconv.dense_attention", *ScaledDotProduct.before)

    def match(self, problem: Problem) -> Attended | None:
        x, theta = problem.x, problem.theta
        if problem.projected or problem.pending or x.dtype is not torch.float32 or x.device.type != "cpu":
            return None
        if x.dim() not in (2, 3) or kernels() is None or problem.sizes.nominal or problem.inputs != problem.outputs:
            return None
        value, _ = _matrices(theta, x)
        match = None if value is None else super().match(problem)
        if match is None or match.existing.masked or match.size != theta.size:
            return None
        channels = value.shape[2] if value.dim() == 3 else len(value) // theta.size
        return match if is_small(problem.inputs, match.depth, channels) else None

    def held_bias(self, basis: Normalized, problem: Problem) -> Held | None:
        return bias_of(basis)

    def paths(self, match: Attended, problem: Problem) -> tuple[str, ...]:
        return ("between" if isinstance(problem.theta, LowRank) else "channels_first",)

    def compile(self, match: Attended, problem: Problem, path: str) -> Run:
        otherwise = super().compile(match, problem, path)
        heads, scale, causal, summed = match.size, match.scale, match.existing.causal, type(problem.theta) is Full

        def run(call: Call) -> Tensor:
            query, key, x = match.query(call.basis), match.key(call.basis), call.x
            value, output = _matrices(call.theta, x)
            if value is None or not (type(query) is type(key) is Projected and query.x is key.x is x
                                     and key.heads == heads):
                return otherwise(call)
            bias = None if match.bias is None else match.bias(call.basis)
            table, index = (None, None) if bias is None else position_table(bias, x, match.owner)
            tensors = x, query.weight, query.bias, key.weight, key.bias, value, None, output, call.bias, table
            y = few_attended(tensors, index, heads, scale, causal, summed) if is_direct(*tensors) else None
            return otherwise(call) if y is None else y

        return run


def _matrices(theta: Any, x: Tensor) -> tuple[Any, Tensor | None]:
    """V (K C, P), or Theta (K, P, C), and O (Q, K C) or none; two times `None` for another kind of Theta."""
    if type(theta) is LowRank and theta.groups == theta.size:
        return theta.value.mT.flatten(0, 1), theta.output.flatten(0, 1).mT
    fits = type(theta) in (Full, HeadBlocks) and is_first(theta.theta, x, type(theta) is Full)
    return theta.theta if fits else None, None


def is_first(theta: Tensor, x: Tensor, summed: bool) -> bool:
    """Return True if x (..., P) is best multiplied by Theta (K, P, C) before the attention."""
    heads, channels, after = theta.shape
    return after <= 2 * channels and (not summed or x.numel() * heads * after <= _MOST_SUMMED * channels)


def position_table(bias: Any, x: Tensor, owner: Owner) -> tuple[Tensor, Tensor | None]:
    """A bias of x (..., M, P) as `attend_entries` takes it: all its entries, or its table and the index of pairs."""
    entries = x.shape[-2]
    if type(bias) is Lookup and bias.table.dim() == 3 and bias.table.shape[1] == 1:
        return bias.table, bias.index(entries, entries, owner)
    return bias.by_outputs(entries, entries, x.dtype, owner), None


def few_attended(tensors: tuple[Tensor | None, ...], index: Tensor | None, heads: int, scale: float, causal: bool,
                 summed: bool) -> Tensor | None:
    """`attend_entries` of tensors that `is_direct` accepts, the last of them the mask or table; `None` if a mask needs
    a gradient, or shapes do not fit, so that other operators must compute it, or raise their error."""
    table = tensors[-1]
    if index is None and table is not None and table.requires_grad:
        return None
    try:
        return attend_entries(None, composed_attention(heads, scale, causal, index, summed), *tensors, index, heads,
                              scale, causal, summed)
    except (RuntimeError, ValueError):  # from the check of shapes
        return None


def composed_attention(heads: int, scale: float, causal: bool, index: Tensor | None = None, summed: bool = False
                       ) -> Any:
    """The function of `attend_entries` by differentiable operators."""
    def composed(x: Tensor, query: Tensor, query_bias: Tensor | None, key: Tensor, key_bias: Tensor | None,
                 value: Tensor, value_bias: Tensor | None, output: Tensor | None, bias: Tensor | None,
                 mask: Tensor | None) -> Tensor:
        value_bias = None if value_bias is None else value_bias.flatten()
        rows, value = x.view(-1, *x.shape[-2:]), value.mT.flatten(0, 1) if value.dim() == 3 else value
        q, k, v = [linear(rows, weight, b).unflatten(-1, (heads, -1)).transpose(-2, -3)
                   for weight, b in ((query, query_bias), (key, key_bias), (value, value_bias))]
        if mask is not None and index is not None:
            mask = mask.index_select(-1, index).view(1, -1, *[x.shape[-2]] * 2)
        y = all_pairs(q, k, v, mask, causal=causal, scale=scale)
        y = (y.sum(-3) if summed else y.transpose(-2, -3).flatten(-2)).view(*x.shape[:-1], -1)
        return plus(y, bias) if output is None else linear(y, output, bias)

    return composed


register(SmallAttention())
