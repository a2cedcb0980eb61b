"""Softmax attention over given queries, keys and values, as torch and Hugging Face pass them, by the one operator."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.compiler import is_compiling

from structconv import torch_compat as private
from structconv.bases.algebra import draw_seed
from structconv.bases.base import OPERATORS, Basis
from structconv.bases.dense import Dense
from structconv.bases.entrywise import Dropped, Masked, Normalized, Sum
from structconv.bases.linear import Scaled
from structconv.bases.scores import Additive, Bilinear
from structconv.errors import ConfigError, ShapeError
from structconv.nn.direct import must_be_planned
from structconv.ops import apply
from structconv.primitives.blocked_attention import Maps, Options, blocked_attention
from structconv.primitives.functions import finite
from structconv.primitives.fused_attention import exact_attention, fused_attention
from structconv.primitives.native.dispatch import NO_DROP, Drop, drop_of
from structconv.shapes import broadcast
from structconv.structures.supports import Causal, DenseMask, Padding, Support

__all__ = ["CAUSAL", "Mask", "attend", "attend_plainly", "drop_weights", "table_of"]


#: Outputs up to which heads that share keys become outputs of one head, in float32 and in other types; up to the last
#: an operator of torch computes them without a plan under a mask, too.
_FEW_OUTPUTS, _FEW_IN_16_BITS = 16, 32
#: One object, whose part of a plan's key is known.
CAUSAL: Support = Causal()


def table_of(support: Support, outputs: int, inputs: int, device: Any) -> Tensor:
    """The booleans (N, M) of a structure, True where a pair exists."""
    m, n = torch.arange(inputs, device=device), torch.arange(outputs, device=device)
    return support.contains(m.unsqueeze(0), n.unsqueeze(-1))


class Mask(NamedTuple):
    """Which pairs exist, and what is added to their scores.

    Args:
        keep: booleans that broadcast to (..., K, N, M), True where a pair exists; or `None` for all.
        bias: numbers that broadcast to (..., K, N, M), -inf where a pair does not exist; or `None`.
        support: a structure without a batch, outside which no pair exists either; or `None`.
    """

    keep: Tensor | None = None
    bias: Tensor | None = None
    support: Support | None = None

    @classmethod
    def of(cls, mask: Tensor | Support | None, causal: bool = False) -> Mask:
        """The mask of a structure, of a boolean tensor (True keeps) or of a floating tensor."""
        support = CAUSAL if causal else None
        if mask is None:
            return cls(support=support)
        if isinstance(mask, Support):
            return cls(support=mask if support is None else support & mask)
        mask = mask if mask.dim() > 1 else torch.atleast_2d(mask)
        if mask.dtype == torch.bool:
            return cls(mask, None, support)
        if not mask.is_floating_point():
            raise ConfigError("attention", "a mask must be boolean or floating", mask.dtype,
                              "Convert it with .bool(); True leaves a pair out in torch's layers.")
        return cls(None, mask, support)

    def joined(self, keep: Tensor | None = None, bias: Tensor | None = None) -> Mask:
        """The pairs that exist here and by `keep`, with `bias` added."""
        if self.keep is not None:
            keep = self.keep if keep is None else self.keep & keep
        if self.bias is not None:
            bias = self.bias if bias is None else self.bias + bias
        return Mask(keep, bias, self.support)

    def in_one_table(self, outputs: int, inputs: int) -> Mask:
        """The mask with the structure in its table, if it has a table."""
        table = self.bias if self.keep is None else self.keep
        if self.support is None or table is None:
            return self
        return self._replace(support=None).joined(table_of(self.support, outputs, inputs, table.device))


_NONE = Mask()


def attend(query: Tensor, key: Tensor, value: Tensor, mask: Mask | None = None, *, scale: float | None = None,
           dropout: float = 0.0, softcap: float | None = None, sink: Tensor | None = None, weights: bool = False,
           vector: Tensor | None = None, term: Basis | None = None) -> tuple[Tensor, Tensor | None]:
    """y_kn = sum_m softmax_m(softcap(scale <query_kn, key_km>) + bias_knm) value_km, and the weights if requested.

    Args:
        query, key, value: (..., K, N, D), (..., K', M, D), (..., K', M, C); K / K' consecutive heads share a key.
        mask: which pairs exist. An output without any is zero, and so are its gradients.
        scale: 1 / sqrt(D) by default, for D > 0. dropout: p, applied to the weights.
        sink: (K), one more score of each head, whose weight is thrown away; or (..., K, N, 1), of each output, which
            has no soft cap.
        vector: v (K, D) of additive scores v_k^T tanh(query_kn + key_km) in the place of the scaled product.
        term: a basis that is added to the scores; not with `weights`.

    Returns:
        (..., K, N, C), and (..., K, N, M) or `None`.
    """
    (heads, outputs, depth), inputs = query.shape[-3:], key.shape[-2]
    keep, bias, support = mask = _NONE if mask is None else mask
    scale, seed = (depth or 1) ** -0.5 if scale is None else scale, draw_seed() if dropout else None
    plain = softcap is sink is vector is term is None and 0 <= dropout < 1
    if plain and not is_compiling() and (support is None or support is CAUSAL):
        table, causal = keep if bias is None else bias, support is not None
        if keep is not None and bias is not None:
            table = bias.masked_fill(~keep, -torch.inf)
        drop = drop_of(dropout, seed, heads)
        if weights and not must_be_planned(Dropped if dropout else Normalized):
            pair: tuple[Tensor, Tensor] | None = exact_attention(query, key, value, table, causal, scale, drop, True)
            if pair is not None:
                return pair
        y = None if weights else attend_plainly(query, key, value, table, causal, scale, drop)
        if y is not None:
            return y, None
    shared = key.shape[-3] != heads
    if key.dim() != query.dim() or (shared and heads % key.shape[-3]):
        raise ShapeError("attention", f"key must have as many axes as query, and heads that divide K={heads}",
                         tuple(key.shape))
    if value.dim() != key.dim() or value.shape[-3] not in (key.shape[-3], heads):
        raise ShapeError("attention", f"value must have as many axes as key, and its heads or K={heads}",
                         tuple(value.shape))
    mask = mask.in_one_table(outputs, inputs)
    keep, bias, support = mask
    if sink is not None and softcap is None and (support is None or support is CAUSAL or sink.dim() > 1):
        return _with_sink(query, key, value, mask, sink, scale=scale, dropout=dropout, weights=weights)
    by_head = keep is not None and keep.dim() > 2 and keep.shape[-3] > 1
    if shared and outputs == 1 and support is None and sink is vector is term is None and not by_head:
        return _one_output(query, key, value, Mask(keep, bias), scale=scale, dropout=dropout, softcap=softcap,
                           weights=weights)
    if shared:
        key, value = (t.unsqueeze(-3).expand(*t.shape[:-2], heads // t.shape[-3], *t.shape[-2:]).flatten(-4, -3)
                      for t in (key, value))
    table = keep if bias is None else bias
    if (plain and is_compiling() and not weights and (support is None or support is CAUSAL)
            and (keep is None or bias is None) and _is_traced(query, key, value, table)):
        return _traced(query, key, value, table, support is not None, scale, dropout, seed), None
    lead = broadcast(*(t.shape[:-3] for t in (query, key, value, keep, bias) if t is not None))
    if lead != query.shape[:-3]:
        query = query.expand(*lead, *query.shape[-3:])
    bias = None if bias is None else bias.expand(*bias.shape[:-2], outputs, inputs)
    if by_head:  # each head is an element of the batch, with its own pairs
        if sink is not None:
            raise ConfigError("attention", "a mask must be the same for all heads where they have sinks", "one by head")
        query, key, value = (t.unsqueeze(-3) for t in (query, key, value))
        bias = bias if bias is None or bias.dim() == 2 else bias.unsqueeze(-3)
    if keep is not None:
        keep = keep if by_head or keep.dim() == 2 else keep.squeeze(-3)
        support = (Padding(keep.squeeze(-2).expand(*keep.shape[:-2], inputs)) if keep.shape[-2] == 1 else
                   DenseMask(keep.expand(*keep.shape[:-2], outputs, inputs).mT))
    if weights:  # the transposed basis is laid out as the weights are
        if vector is None and not is_compiling() and depth < inputs:  # fewer numbers than the scores
            query, scale = query * scale, 1.0
        scores = _scores(key, query, bias, None if support is None else support.transpose(), scale, softcap, vector)
        table = _weights(scores, "outputs", sink, dropout, seed).dense(query.dtype)
        dense: Basis = Dense(table.mT)
        if support is not None and not finite(value):  # which weights of zero do not hide
            dense = Masked(dense, support)
        y, table = dense.apply(value), table.reshape(*lead, heads, outputs, inputs)
    else:
        scores = _scores(query, key, None if bias is None else bias.mT, support, scale, softcap, vector, term)
        y, table = apply(_weights(scores, "inputs", sink, dropout, seed), value), None
    return y.squeeze(-3) if by_head else y, table


def attend_plainly(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, causal: bool, scale: float | None,
                   drop: Drop = NO_DROP) -> Tensor | None:
    """`attend` with a table of booleans or numbers by the kernel of the plan, without the search for it, which takes
    longer than few pairs; `None` if the kernel is not known without a plan."""
    if must_be_planned(Dropped if drop[0] else Normalized):
        return None
    scale = (query.shape[-1] or 1) ** -0.5 if scale is None else scale
    few = query.shape[-2] <= (_FEW_OUTPUTS if query.dtype is torch.float32 else _FEW_IN_16_BITS)
    regrouped = few and not (causal or drop[0]) and _share_keys(query, key, value, mask)
    if regrouped:
        (samples, heads, outputs, depth), groups = query.shape, key.shape[1]
        query = query.reshape(samples, groups, heads // groups * outputs, depth)
        mask = None if mask is None else _of_groups(mask, heads // groups, outputs)
    y: Tensor | None = exact_attention(query, key, value, mask, causal, scale, drop)
    if y is None and not drop[0] and (few or mask is None) and _is_step(query, key, value, mask):
        y, _ = fused_attention(query, key, value, mask, causal, scale)
        y = y if (mask is None and not causal) or finite(y) else None
    return y if y is None or not regrouped else y.reshape(samples, heads, outputs, y.shape[-1])


def _share_keys(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> bool:
    """Return True for outputs, without gradients, of heads (B, K, N, D) that share keys: as outputs of one head they
    read each key once."""
    if not _without_gradients(query, key, value):
        return False
    heads, groups = query.shape[1], key.shape[1]
    if not (query.shape[2] > 1 and 0 < groups < heads and heads % groups == 0 and key.shape[1:3] == value.shape[1:3]):
        return False
    return mask is None or (type(mask) is Tensor and 1 < mask.dim() <= 4 and mask.shape[-2] in (1, query.shape[2])
                            and (mask.dim() == 2 or mask.shape[-3] in (1, heads)))


def _of_groups(mask: Tensor, shared: int, outputs: int) -> Tensor:
    """Regroup a mask (..., K or 1, N or 1, M) of K heads, each `shared` of which share keys, as one of K' = K / shared
    heads with shared * N outputs: (..., K' or 1, shared * N or 1, M)."""
    table = mask if mask.dim() > 2 else mask.unsqueeze(0)
    *lead, heads, rows, inputs = table.shape
    if heads == rows == 1:
        return mask
    groups = max(heads // shared, 1)
    return table.expand(*lead, groups * shared, outputs, inputs).reshape(*lead, groups, shared * outputs, inputs)


def _without_gradients(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Return True for plain tensors (B, K, N, D) in a call that records and compiles nothing."""
    return (not (torch.is_grad_enabled() or is_compiling()) and type(query) is type(key) is type(value) is Tensor
            and query.dim() == key.dim() == value.dim() == 4)


def _is_traced(query: Tensor, key: Tensor, value: Tensor, table: Tensor | None) -> bool:
    """Return True for (B, K, N, D) and a table that a plan hands to one operator, too, but takes ten times as long to
    trace."""
    if not query.dim() == key.dim() == value.dim() == 4 or not query.dtype == key.dtype == value.dtype:
        return False
    samples, heads, outputs, _ = query.shape
    if table is not None:
        if table.dim() != 4 or table.requires_grad:
            return False
        of_table, heads_of_table, rows, columns = table.shape
        if not (rows in (1, outputs) and columns == key.shape[2] and of_table in (1, samples)
                and heads_of_table in (1, heads) and table.dtype in (torch.bool, query.dtype)):
            return False
    return (key.shape[:2] == value.shape[:2] == (samples, heads) and key.shape[2] == value.shape[2] > 0
            and query.is_floating_point() and not must_be_planned(Normalized))


def _traced(query: Tensor, key: Tensor, value: Tensor, table: Tensor | None, causal: bool, scale: float,
            dropout: float, seed: Tensor | None) -> Tensor:
    """Attention of a compiled program by one operator: with dropout on a CPU by ours, torch's would hold all pairs."""
    if table is not None and table.shape[-2] == 1:  # a padding, whose keys and values may be anything
        absent = (~table if table.dtype == torch.bool else table == -torch.inf).mT
        key, value = key.masked_fill(absent, 0), value.masked_fill(absent, 0)
    if not dropout or not query.is_cpu or (table is not None and table.dtype != torch.bool):
        return F.scaled_dot_product_attention(query, key, value, table, dropout, causal, scale=scale)
    maps, options = Maps(None, None, None, None if table is None else table.mT, seed), Options(
        "softmax", "identity", 1.0, causal, scale, dropout, query.shape[1])
    y, _ = blocked_attention(query.flatten(0, 1), key.flatten(0, 1), value.flatten(0, 1), maps, options)
    return y.unflatten(0, query.shape[:2])


def _is_step(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> bool:
    """Return True for tensors (B, K, N, D) that torch's fused attention takes, without gradients: decoding in 16 or 64
    bits, whose steps are many and small."""
    if not _without_gradients(query, key, value) or not query.is_cpu or private.watched():
        return False
    fits = key.shape[:3] == value.shape[:3] and key.shape[0] == query.shape[0] and key.shape[3] == query.shape[3]
    return (fits and query.dtype is key.dtype is value.dtype and key.numel() > 0
            and query.shape[1] % key.shape[1] == 0 and (mask is None or mask.dtype in (torch.bool, query.dtype)))


def _one_output(query: Tensor, key: Tensor, value: Tensor, mask: Mask, **options: Any) -> tuple[Tensor, Tensor | None]:
    """`attend` for one output of heads that share keys: the heads that share a key become its outputs."""
    *lead, heads, _, depth = query.shape
    groups, bias = key.shape[-3], mask.bias
    shared = heads // groups
    bias = None if bias is None else _of_groups(bias, shared, 1)
    y, weights = attend(query.reshape(*lead, groups, shared, depth), key, value, mask._replace(bias=bias), **options)
    y = y.reshape(*y.shape[:-3], heads, 1, y.shape[-1])
    return y, None if weights is None else weights.reshape(*y.shape[:-1], weights.shape[-1])


def _with_sink(query: Tensor, key: Tensor, value: Tensor, mask: Mask, sink: Tensor, *, scale: float,
               **options: Any) -> tuple[Tensor, Tensor | None]:
    """`attend` with a sink as one more key, which all outputs read, and whose value is zero.

    One more channel, which is zero in all other keys, gives its score. So torch's fused attention takes it.
    """
    own = sink.to(query.dtype) / scale
    own = own.view(-1, 1, 1) if own.dim() == 1 else own
    query = torch.cat([query, own.expand(*query.shape[:-1], 1)], -1)
    last = F.pad(key.new_ones(()).view(1, 1), (key.shape[-1], 0))
    key = torch.cat([F.pad(key, (0, 1)), last.expand(*key.shape[:-2], *last.shape)], -2)
    if mask.support is not None:
        mask = Mask(table_of(mask.support, query.shape[-2], value.shape[-2], query.device))
    keep, bias = (None if t is None else F.pad(t.expand(*t.shape[:-1], value.shape[-2]), (0, 1), value=fill)
                  for t, fill in ((mask.keep, True), (mask.bias, 0.0)))
    y, weights = attend(query, key, F.pad(value, (0, 0, 0, 1)), Mask(keep, bias), scale=scale, **options)
    return y, None if weights is None else weights[..., :-1]


def _scores(query: Tensor, key: Tensor, bias: Tensor | None, support: Support | None, scale: float,
            softcap: float | None, vector: Tensor | None = None, term: Basis | None = None) -> Basis:
    """softcap(scale <query_kn, key_km>) + bias_kmn, at the pairs of the support; additive with a vector."""
    scores: Basis = Bilinear(query, key) if vector is None else Additive(key, query, vector)
    if vector is None and scale != 1.0:
        scores = Scaled(scores, scale)
    scores = scores if softcap is None else scores.softcap(softcap)
    scores = scores if term is None else Sum(scores, term)
    scores = scores if bias is None else Sum(scores, Dense(bias.unsqueeze(0) if bias.dim() == 2 else bias))
    return scores if support is None else Masked(scores, support)


def _weights(scores: Basis, over: str, sink: Tensor | None, dropout: float, seed: Tensor | None) -> Basis:
    weights = Normalized(scores, "softmax", over) if sink is None else scores.softmax(over, sink=sink)
    return drop_weights(weights, dropout, seed) if dropout else weights


def drop_weights(weights: Basis, p: float, seed: Tensor | None = None) -> Basis:
    """Zero each weight with probability p, which may be 1, as in torch."""
    return OPERATORS["multiply"](weights, 0.0) if p == 1 else OPERATORS["dropout"](weights, p, seed)
