"""Dense attention beyond the fused dot product: relative terms, maps, dropout and other normalisations, in blocks."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from structconv.bases.base import Basis, value
from structconv.bases.chain import altered
from structconv.bases.linear import Scaled
from structconv.bases.pairs import listed_graph
from structconv.bases.pairwise import Dropped, Mapped, Masked, Normalised
from structconv.bases.positions import bucket_count
from structconv.bases.scores import Affine, Bilinear
from structconv.kernels import dense_attention, window_attention
from structconv.kernels.dense_attention import Existing, finite
from structconv.kernels.forms import register_form
from structconv.kernels.fused import Follow, Fused, undropped
from structconv.kernels.terms import PRODUCTS, Term, buckets, diagonal, products, sum_terms, table_rows, tables
from structconv.primitives.blocked_attention import blocked_attention
from structconv.primitives.dense_blocks import Maps, Options
from structconv.shapes import broadcast

_MAPS: tuple[tuple[Callable[[Tensor], Tensor], str], ...] = (
    (torch.relu, "relu"), (torch.nn.functional.relu, "relu"), (torch.tanh, "tanh"), (torch.sigmoid, "sigmoid"),
    (torch.exp, "exp"))


class Weighing(NamedTuple):
    """w = normalised(gain map(terms)), dropped with probability p."""

    weights: str
    map: str
    gain: float
    p: float


@value
class BlockedAttention(Fused):
    """The expression `child` computed in blocks of scores."""

    child: Basis
    terms: tuple[Term, ...]
    weighing: Weighing
    existing: Existing
    seed: Tensor | None

    def analysis(self, x: Tensor) -> Tensor:
        return self.apply(x.unsqueeze(-3))

    def apply(self, r: Tensor) -> Tensor:
        lead = broadcast(r.shape[:-3], self.batch_shape)
        if self._elsewhere(lead):
            return self.child.apply(r)
        y = self._attend(r, lead, None)[0]
        return y if self._sound(y) else self.child.apply(r)

    def with_shares(self, r: Tensor, kind: str, clip: int) -> tuple[Tensor, Tensor] | None:
        """`apply(r)` and the sums of the weights over each bucket, (..., K, N, L), in one pass over the scores.

        `None` where terms have other buckets, or the expression is not to be computed in blocks.
        """
        lead = broadcast(r.shape[:-3], self.batch_shape)
        others = [leaf for leaf in tables(self.terms) if (leaf.kind, leaf.clip) != (kind, clip)]
        if others or self._elsewhere(lead):
            return None
        found = self._attend(r, lead, (kind, clip))
        return found if all(map(self._sound, found)) else None

    def _elsewhere(self, lead: tuple[int, ...]) -> bool:
        """Whether there is nothing to cut into blocks, or dropout that a batch of r shares."""
        return self.num_inputs * self.num_outputs == 0 or (self.weighing.p > 0 and tuple(lead) != self.batch_shape)

    def _sound(self, y: Tensor) -> bool:
        """Whether no number that is not finite can have come through a pair that does not exist."""
        return torch.compiler.is_compiling() or not (self.existing.causal or self.existing.masked) or finite(y)

    def _attend(self, r: Tensor, lead: tuple[int, ...], counted: tuple[str, int] | None) -> tuple[Tensor, Tensor]:
        def flat(t: Tensor) -> Tensor:
            return t.expand(*lead, self.size, *t.shape[-2:]).reshape(math.prod(lead) * self.size, *t.shape[-2:])

        query, key, scale = products(self.terms)
        kinds = counted or next(((leaf.kind, leaf.clip) for leaf in tables(self.terms)), None)
        inputs, outputs = self.num_inputs, self.num_outputs
        along, rows = diagonal(self.terms, inputs, outputs, r), table_rows(self.terms)
        terms = Maps(None if along is None else flat(along.unsqueeze(-2)).squeeze(-2),
                     None if rows is None else flat(rows),
                     None if kinds is None else buckets(*kinds, inputs, outputs, r.device),
                     self.existing.table(lead, inputs, outputs, r.device), self.seed)
        weighing = self.weighing
        options = Options(weighing.weights, weighing.map, weighing.gain, self.existing.causal, scale, weighing.p,
                          self.size)
        y, shares = blocked_attention(flat(query), flat(key), flat(r), terms, options,
                                      buckets=0 if counted is None else bucket_count(*counted))
        return tuple(t.view(*lead, self.size, *t.shape[-2:]) for t in (y, shares))  # type: ignore[return-value]


def recognise(basis: Basis) -> BlockedAttention | None:
    """The basis as attention in blocks; `None` where it is something else, is fused by torch, or lists its pairs."""
    weights, p, seed = undropped(basis)
    if not isinstance(weights, Normalised) or (weights.over != "inputs" and weights.kind != "sigmoid"):
        return None
    found = mapped(weights)
    terms = None if found is None else sum_terms(found[3])
    if found is None or terms is None or window_attention.recognise(basis) is not None:
        return None
    if listed_graph(weights.child) is not None:
        return None
    kind, name, gain, _ = found
    existing = Existing.of(weights.child.support(), weights.num_inputs, weights.num_outputs)
    if existing is None or not fitting(terms) or dense_attention.recognise(basis) is not None:
        return None
    return BlockedAttention(basis, terms, Weighing(kind, name, gain, p), existing, seed)


def mapped(weights: Normalised) -> tuple[str, str, float, Basis] | None:
    """(normalisation, map, gain, scores) of weights = normalised(gain map(scores))."""
    kind, node, gain = weights.kind, weights.child, 1.0
    while isinstance(node, Masked | Scaled):
        if isinstance(node, Scaled):
            if isinstance(node.factor, Tensor):
                break
            gain *= node.factor
        node = node.child
    if isinstance(node, Mapped):
        name = next((name for fn, name in _MAPS if fn is node.fn), None)
        return None if name is None or kind == "sigmoid" or gain == 0 else (kind, name, gain, node.child)
    return ("none", "sigmoid", 1.0, weights.child) if kind == "sigmoid" else (kind, "identity", 1.0, weights.child)


def fitting(terms: tuple[Term, ...]) -> bool:
    """Whether some term is a product, and those that depend on output and offset have the same buckets."""
    kinds = {(leaf.kind, leaf.clip) for leaf in tables(terms)}
    return len(kinds) <= 1 and any(isinstance(leaf, PRODUCTS) for leaf, _ in terms)


def suits(form: Basis, r: Tensor) -> bool:
    """Whether what a mask leaves out is finite, so that it cannot leak; what order leaves out is found out later."""
    assert isinstance(form, BlockedAttention)
    if torch.compiler.is_compiling() or not form.existing.masked:
        return True
    held = [t for leaf, _ in form.terms
            for t in ((leaf.query, leaf.key) if isinstance(leaf, Bilinear) else
                      (leaf.source, leaf.target) if isinstance(leaf, Affine) else ())]
    return all(finite(t) for t in (*held, r))


def with_shares(basis: Basis, r: Tensor, kind: str, clip: int) -> tuple[Tensor, Tensor] | None:
    """(A^T r, s) with s_knl the sum of the weights of n's pairs in the bucket l, (..., K, N, L).

    s is what Shaw's values are multiplied by; `None` where the basis is not one for blocks.
    """
    found = recognise(basis) or _dot_product(basis)
    return None if found is None or not suits(found, r) else found.with_shares(r, kind, clip)


def _dot_product(basis: Basis) -> BlockedAttention | None:
    """What torch would fuse, in blocks."""
    form = dense_attention.recognise(basis)
    if form is None:
        return None
    terms: tuple[Term, ...] = ((Bilinear(form.query, form.key), form.scale),)
    return BlockedAttention(basis, terms, Weighing("softmax", "identity", 1.0, 0.0), form.existing, None)


def _follow(form: Basis, leaf: Basis) -> Follow | None:
    assert isinstance(form, BlockedAttention)
    first, factor = form.terms[0]
    if len(form.terms) > 1 or first is not leaf or isinstance(factor, Tensor):
        return None
    bare = altered(form, terms=(), child=None, seed=None)
    return lambda leaf, child, seed: altered(bare, terms=((leaf, factor),), child=child, seed=seed)


register_form("structconv.blocked_attention", recognise, Normalised, Dropped, suits=suits, follow=_follow)
