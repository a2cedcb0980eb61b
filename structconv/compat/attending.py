"""Softmax attention over given queries, keys and values, as torch and Hugging Face pass them, by the one operator."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from structconv.bases.base import Basis
from structconv.bases.dense import Dense
from structconv.bases.scores import Bilinear
from structconv.errors import ConfigError, ShapeError
from structconv.ops import apply
from structconv.structures.supports import Causal, DenseMask, Padding, Support

__all__ = ["Mask", "attend"]


class Mask(NamedTuple):
    """Which pairs exist, and what is added to their scores.

    Args:
        keep: booleans that broadcast to (..., K, N, M), True where a pair exists; or `None` for all.
        bias: numbers that broadcast to (..., K, N, M), -inf where a pair does not exist; or `None`.
        causal: only pairs m <= n exist.
    """

    keep: Tensor | None = None
    bias: Tensor | None = None
    causal: bool = False

    @classmethod
    def of(cls, mask: Tensor | None, causal: bool = False) -> Mask:
        """The mask that a boolean (True keeps) or floating tensor is."""
        if mask is None or mask.dtype == torch.bool:
            return cls(mask, None, causal)
        if not mask.is_floating_point():
            raise ConfigError("attention", "a mask must be boolean or floating", mask.dtype)
        return cls(None, mask, causal)

    def joined(self, other: Mask) -> Mask:
        """The pairs that exist in both, with both biases added."""
        keep = other.keep if self.keep is None else self.keep if other.keep is None else self.keep & other.keep
        bias = other.bias if self.bias is None else self.bias if other.bias is None else self.bias + other.bias
        return Mask(keep, bias, self.causal or other.causal)

    @property
    def by_head(self) -> bool:
        """Whether the pairs that exist differ between heads."""
        return self.keep is not None and self.keep.dim() > 2 and self.keep.shape[-3] > 1

    def in_one_table(self, outputs: int, inputs: int) -> Mask:
        """The order as booleans, where there is a table anyway."""
        given = self.bias if self.keep is None else self.keep
        if not self.causal or given is None:
            return self
        order = torch.ones(outputs, inputs, dtype=torch.bool, device=given.device).tril()
        return self._replace(keep=order if self.keep is None else self.keep & order, causal=False)


def attend(query: Tensor, key: Tensor, value: Tensor, mask: Mask | None = None, *, scale: float | None = None,
           dropout: float = 0.0, softcap: float | None = None, sink: Tensor | None = None, weights: bool = False
           ) -> tuple[Tensor, Tensor | None]:
    """y_kn = sum_m softmax_m(softcap(scale <query_kn, key_km>) + bias_knm) value_km, and the weights if asked for.

    Args:
        query, key, value: (..., K, N, D), (..., K', M, D), (..., K', M, C); K / K' consecutive heads share a key.
        mask: which pairs exist. An output without any is zero, and so are its gradients.
        scale: 1 / sqrt(D) by default. dropout: p, applied to the weights.
        sink: (K), one more score of each head, whose weight is thrown away.

    Returns:
        (..., K, N, C), and (..., K, N, M) or `None`.
    """
    heads, outputs, inputs = query.shape[-3], query.shape[-2], key.shape[-2]
    if key.dim() != query.dim() or heads % key.shape[-3]:
        raise ShapeError("attention", f"key must have as many axes as query, and heads that divide K={heads}",
                         tuple(key.shape))
    mask = (Mask() if mask is None else mask).in_one_table(outputs, inputs)
    keep, bias = mask.keep, mask.bias
    lead = torch.broadcast_shapes(*(t.shape[:-3] for t in (query, key, value, keep, bias) if t is not None))
    if lead != query.shape[:-3]:
        query = query.expand(*lead, *query.shape[-3:])
    by_head = mask.by_head
    if by_head and sink is not None:
        raise ConfigError("attention", "a mask must be the same for all heads where they have sinks", "one by head")
    if by_head or sink is not None:
        key, value = (t if t.shape[-3] == heads else t.repeat_interleave(heads // t.shape[-3], -3)
                      for t in (key, value))
    groups = 0 if key.shape[-3] == heads else key.shape[-3]
    if by_head:  # each head is an element of the batch, with its own pairs
        query, key, value = (t.unsqueeze(-3) for t in (query, key, value))
    elif groups:  # so is each group of heads, with one key
        query, key, value = query.unflatten(-3, (groups, -1)), key.unsqueeze(-3), value.unsqueeze(-3)
    table = None if bias is None else _by_heads(bias.expand(*bias.shape[:-2], outputs, inputs), groups, by_head)
    support: Support | None = Causal() if mask.causal else None
    if keep is not None:
        keep = keep if by_head or groups or keep.dim() == 2 else keep.squeeze(-3)
        support = (Padding(keep.squeeze(-2).expand(*keep.shape[:-2], inputs)) if keep.shape[-2] == 1 else
                   DenseMask(keep.expand(*keep.shape[:-2], outputs, inputs).mT))
    if not weights:
        scores = _scores(query, key, None if table is None else table.mT, support, scale, softcap)
        basis = scores.softmax(sink=sink)
        y, found = apply(basis.dropout(dropout) if dropout else basis, value), None
    else:  # the transposed basis is laid out as the weights are
        scores = _scores(key, query, table, None if support is None else support.transpose(), scale, softcap)
        basis = scores.softmax("outputs", sink=sink)
        found = (basis.dropout(dropout) if dropout else basis).dense(query.dtype)
        y, found = apply(Dense(found.mT), value), found.reshape(*lead, heads, outputs, inputs)
    return y.reshape(*lead, heads, outputs, value.shape[-1]) if by_head or groups else y, found


def _scores(query: Tensor, key: Tensor, table: Tensor | None, support: Support | None, scale: float | None,
            softcap: float | None) -> Basis:
    """softcap(scale <query_kn, key_km>) + table_kmn, at the pairs of the support."""
    scores: Basis = Bilinear(query, key).scaled(scale)
    scores = scores if softcap is None else scores.softcap(softcap)
    scores = scores if table is None else scores + Dense(table)
    return scores if support is None else scores.masked(keep=support)


def _by_heads(bias: Tensor, groups: int, by_head: bool) -> Tensor:
    """A bias (..., K or 1, N, M) with the axes of the basis."""
    bias = bias.unsqueeze(0) if bias.dim() == 2 else bias
    if by_head:
        return bias.unsqueeze(-3)
    if groups:
        return bias.unsqueeze(-3) if bias.shape[-3] == 1 else bias.unflatten(-3, (groups, -1))
    return bias
