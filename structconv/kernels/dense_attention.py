"""Attention that torch's fused scaled dot product attention can express, recognised from its tree of values."""

from __future__ import annotations

import math
from typing import NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from structconv.bases.base import Basis, value
from structconv.bases.chain import altered
from structconv.bases.linear import Scaled
from structconv.bases.pairs import listed_graph
from structconv.bases.pairwise import Masked, Normalised
from structconv.bases.positions import GridLookup
from structconv.bases.scores import Bilinear
from structconv.bases.sizes import QueryKey
from structconv.kernels import window_attention
from structconv.kernels.forms import register_form
from structconv.kernels.fused import Follow, product_and_bias
from structconv.shapes import broadcast
from structconv.structures.supports import And, Causal, Padding, Support

#: Booleans of a mask above which blocks are preferred to one table.
MASK_ELEMENTS = 1 << 27


class Existing(NamedTuple):
    """Which pairs exist, in the parts that kernels know: in order, by input, and by what else there is."""

    causal: bool
    padding: Tensor | None
    others: tuple[Support, ...]

    @classmethod
    def of(cls, support: Support | None, num_inputs: int, num_outputs: int) -> Existing | None:
        """The parts of a support; `None` where a table of its pairs would be too large."""
        parts = _parts(support)
        others = tuple(part for part in parts if not isinstance(part, Causal | Padding))
        if not torch.compiler.is_compiling() and _entries(others) * num_inputs * num_outputs > MASK_ELEMENTS:
            return None
        padding: Tensor | None = None
        for part in parts:
            if isinstance(part, Padding):
                padding = part.keep if padding is None else padding & part.keep
        return cls(any(isinstance(part, Causal) for part in parts), padding, others)

    @property
    def masked(self) -> bool:
        """Whether pairs are absent for another reason than their order."""
        return self.padding is not None or bool(self.others)

    def table(self, lead: tuple[int, ...], num_inputs: int, num_outputs: int, device: torch.device) -> Tensor | None:
        """Booleans (B or 1, 1, M, N) of all but the order, B = prod(lead); padding alone has stride 0 along N."""
        keep: Tensor | None = None
        if self.others:
            m, n = (torch.arange(size, device=device) for size in (num_inputs, num_outputs))
            for part in self.others:
                found = part.contains(m.unsqueeze(-1), n.unsqueeze(0))
                keep = found if keep is None else keep & found
        if self.padding is not None:
            rows = _flat(self.padding.unsqueeze(-1), lead)
            if keep is None:
                return rows.expand(*rows.shape[:-1], num_outputs)
            return _flat(keep, lead) & rows
        return None if keep is None else _flat(keep, lead)


def _flat(keep: Tensor, lead: tuple[int, ...]) -> Tensor:
    """(..., M, N) -> (B or 1, 1, M, N)."""
    shape = keep.shape[-2:]
    if keep.dim() == 2:
        return keep[None, None]
    return keep.expand(*lead, *shape).reshape(math.prod(lead), 1, *shape)


def _entries(supports: tuple[Support, ...]) -> int:
    """Entries of the batch for which these have different pairs; none without supports."""
    shapes = [() if kept is None else kept.shape[:-1] for kept in (part.kept_inputs() for part in supports)]
    return math.prod(broadcast(*shapes)) if shapes else 0


def _parts(support: Support | None) -> tuple[Support, ...]:
    if isinstance(support, And):
        return _parts(support.first) + _parts(support.second)
    return () if support is None else (support,)


def finite(t: Tensor) -> bool:
    """Whether all numbers are finite: their sum tells in one pass, unless it overflows."""
    return math.isfinite(float(t.detach().sum())) or bool(t.isfinite().all())


@value
class ScaledDotProduct(QueryKey):
    """softmax_m(scale <query_kn, key_km>) with a causal mask, a table of booleans, or none; `child` is the same.

    A `bias`, which is added to the scores, is held whole; it goes with no mask.
    """

    query: Tensor
    key: Tensor
    child: Basis
    scale: float
    existing: Existing
    bias: GridLookup | None = None

    def dense(self, dtype: torch.dtype | None = None) -> Tensor:
        return self.child.dense(dtype)

    def apply(self, r: Tensor) -> Tensor:
        y = self._attend(r)
        ordered = self.existing.causal and not torch.compiler.is_compiling()
        return self.child.apply(r) if ordered and not self._sound(y, r) else y

    def _sound(self, y: Tensor, r: Tensor) -> bool:
        """Whether nothing that is not finite can have reached an output that comes before it.

        torch's fused kernel on a CPU fills the scores of such pairs before it weighs them, so that only r can leak,
        by weights of zero; the last output then shows it, which has a share of all inputs.
        """
        unit = all(t.stride(-1) == 1 for t in (self.query, self.key, r))
        return finite(y[..., -1:, :] if unit and r.is_cpu and torch.backends.cuda.flash_sdp_enabled() else y)

    def _attend(self, r: Tensor) -> Tensor:
        lead, size = broadcast(r.shape[:-3], self.batch_shape), self.size
        outputs, inputs = self.query.shape[-2], self.key.shape[-2]
        existing = self.existing
        mask = existing.table(lead, inputs, outputs, r.device) if existing.masked else None
        query, key, values = (_batch(t, lead, size) for t in (self.query, self.key, r))
        if existing.causal and inputs > outputs:
            key, values = key[..., :outputs, :], values[..., :outputs, :]
        depth, channels = query.shape[-1], values.shape[-1]
        if depth != channels:
            query, key, values = (F.pad(t, (0, max(depth, channels) - t.shape[-1])) for t in (query, key, values))
        added = None if mask is None else mask.mT
        if self.bias is not None:
            held = self.bias.dense(query.dtype).mT
            added = held.expand(*lead, *held.shape[-3:]).flatten(0, -4) if self.bias.batch_shape else held
        y = F.scaled_dot_product_attention(query, key, values, added, is_causal=existing.causal, scale=self.scale)
        y = y if depth <= channels else y[..., :channels]
        return y if len(lead) == 1 else y.reshape(*lead, *y.shape[-3:])


def _batch(t: Tensor, lead: tuple[int, ...], size: int) -> Tensor:
    """(..., K or 1, M, C) -> (B, K, M, C)."""
    if t.dim() == 4 and t.shape[:2] == (*lead, size):
        return t
    return t.expand(*lead, size, *t.shape[-2:]).reshape(math.prod(lead), size, *t.shape[-2:])


def recognise(basis: Basis) -> ScaledDotProduct | None:
    """The basis as a scaled dot product, or `None` where it is something else or its mask is a list of edges."""
    if not isinstance(basis, Normalised) or basis.kind != "softmax" or basis.over != "inputs":
        return None
    bias = window_attention.held_bias(basis)
    scale, node = 1.0, basis.child if bias is None else product_and_bias(basis.child, lambda part: part is bias)[0]
    while isinstance(node, Masked | Scaled):
        if isinstance(node, Scaled):
            if isinstance(node.factor, Tensor):
                return None
            scale *= node.factor
        node = node.child
    if not isinstance(node, Bilinear) or window_attention.recognise(basis) or listed_graph(basis.child) is not None:
        return None
    existing = Existing.of(basis.child.support(), node.num_inputs, node.num_outputs)
    if existing is not None and existing.causal and existing.masked:
        return None  # torch would take a table of numbers
    return None if existing is None else ScaledDotProduct(node.query, node.key, basis, scale, existing, bias)


def suits(form: Basis, r: Tensor) -> bool:
    """Whether what a mask leaves out is finite: the fused kernel multiplies absent pairs by zero, through which NaN
    would leak. Where only the order leaves pairs out, this shows in the result.

    Compiled programs read no values; there masked-out entries are the layer's care.
    """
    assert isinstance(form, ScaledDotProduct)
    if torch.compiler.is_compiling() or not form.existing.masked:
        return True
    return all(finite(t) for t in (form.query, form.key, r))


def follow_query_key(form: Basis, leaf: Basis) -> Follow | None:
    """Of a form that holds the query and the key of a leaf as they are."""
    if not (isinstance(form, QueryKey) and isinstance(leaf, Bilinear) and form.query is leaf.query
            and form.key is leaf.key):
        return None
    bare = altered(form, query=None, key=None, child=None)

    def follow(leaf: Basis, child: Basis, _: Tensor | None) -> Basis:
        return altered(bare, query=cast(Bilinear, leaf).query, key=cast(Bilinear, leaf).key, child=child)

    return follow


register_form("torch.sdpa", recognise, Normalised, suits=suits, follow=follow_query_key)
