"""Attention that torch's fused scaled dot product attention can express, recognised from its tree of values."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from structconv.bases.base import Basis, value
from structconv.bases.linear import Scaled
from structconv.bases.pairs import listed_graph
from structconv.bases.pairwise import Masked, Normalised
from structconv.bases.scores import Bilinear, QueryKey
from structconv.kernels.forms import register_form
from structconv.structures.supports import Causal, Support

#: Booleans of a mask above which blocks are preferred to one table.
MASK_ELEMENTS = 1 << 27


@value
class ScaledDotProduct(QueryKey):
    """softmax_m(scale <query_kn, key_km>) with a causal mask, a table of booleans, or none."""

    query: Tensor
    key: Tensor
    scale: float
    causal: bool
    keep: Tensor | None

    def dense(self, dtype: torch.dtype | None = None) -> Tensor:
        scores = self.scale * self.key @ self.query.mT
        keep = self.keep
        if self.causal:
            keep = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu()
        if keep is not None:
            scores = scores.masked_fill(~keep, -torch.inf)
        return scores.softmax(-2).nan_to_num(0.0).to(dtype or scores.dtype)

    def apply(self, r: Tensor) -> Tensor:
        lead = torch.broadcast_shapes(r.shape[:-3], self.batch_shape)
        count = math.prod(lead)
        query, key, values = (t.expand(*lead, self.size, *t.shape[-2:]) for t in (self.query, self.key, r))
        width = max(query.shape[-1], values.shape[-1])
        channels = values.shape[-1]
        query, key, values = (F.pad(t, (0, width - t.shape[-1])) if t.shape[-1] < width else t
                              for t in (query, key, values))
        query, key, values = (t.reshape(count, *t.shape[-3:]) for t in (query, key, values))
        mask = None
        if self.keep is not None:
            mask = self.keep.mT
            mask = mask.expand(*lead, *mask.shape[-3:]).reshape(count, *mask.shape[-3:])
        y = F.scaled_dot_product_attention(query, key, values, mask, is_causal=self.causal, scale=self.scale)
        return y.reshape(*lead, *y.shape[-3:])[..., :channels]


def recognise(basis: Basis) -> ScaledDotProduct | None:
    """The basis as a scaled dot product, or `None` where it is something else or its mask is a list of edges."""
    if not isinstance(basis, Normalised) or basis.kind != "softmax" or basis.over != "inputs":
        return None
    support, scale, node = basis.child.support(), 1.0, basis.child
    while isinstance(node, Masked | Scaled):
        if isinstance(node, Scaled):
            if isinstance(node.factor, Tensor):
                return None
            scale *= node.factor
        node = node.child
    if not isinstance(node, Bilinear) or listed_graph(basis.child) is not None:
        return None
    if support is None or isinstance(support, Causal):
        return ScaledDotProduct(node.query, node.key, scale, support is not None, None)
    keep = _table(support, node)
    return None if keep is None else ScaledDotProduct(node.query, node.key, scale, False, keep)


def _table(support: Support, scores: Bilinear) -> Tensor | None:
    kept = support.kept_inputs()
    device = scores.key.device
    m, n = (torch.arange(size, device=device) for size in (scores.num_inputs, scores.num_outputs))
    pairs = m.unsqueeze(-1), n.unsqueeze(0)
    batch = 1 if kept is None else math.prod(kept.shape[:-1])
    if not torch.compiler.is_compiling() and batch * m.numel() * n.numel() > MASK_ELEMENTS:
        return None
    return support.contains(*pairs).unsqueeze(-3)


def suits(form: Basis, r: Tensor) -> bool:
    """Whether the fused kernel is right for r: it multiplies absent pairs by zero, through which NaN would leak.

    With a mask it is used on finite tensors only. Compiled programs read no values; there masked-out entries are the
    layer's care.
    """
    assert isinstance(form, ScaledDotProduct)
    if torch.compiler.is_compiling() or not (form.causal or form.keep is not None):
        return True
    return all(bool(t.isfinite().all()) for t in (form.query, form.key, r))


register_form("torch.sdpa", recognise, Normalised, suits=suits)
