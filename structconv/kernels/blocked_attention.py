"""Dense attention beyond the fused dot product: relative terms, maps, dropout and other normalizations, in blocks."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from structconv.bases.base import Basis
from structconv.bases.entrywise import Dropped, Mapped, Normalized
from structconv.bases.positions import bucket_count
from structconv.kernels.expressions import (
    PRODUCTS,
    Dropout,
    Existing,
    Summand,
    Term,
    buckets,
    diagonal,
    is_listed,
    products,
    summands,
    table_rows,
    tables,
    terms_of_calls,
    undropped,
    unscaled,
)
from structconv.kernels.orders import Application, Applied, shares_of
from structconv.planning.cost import Cost
from structconv.planning.counts import application
from structconv.planning.fitted import FUSED_SHARE
from structconv.planning.kernel import register
from structconv.planning.problem import Call, Problem
from structconv.primitives.blocked_attention import Maps, Options, blocked_attention
from structconv.primitives.functions import finite
from structconv.shapes import broadcast

__all__ = ["Blocked", "BlockedAttention", "fits_blocks", "mapped"]

_MAPS: tuple[tuple[Callable[[Tensor], Tensor], str], ...] = (
    (torch.relu, "relu"), (torch.nn.functional.relu, "relu"), (torch.tanh, "tanh"), (torch.sigmoid, "sigmoid"),
    (torch.exp, "exp"))


class Blocked(NamedTuple):
    """w = normalized(gain map(terms)) at the pairs that exist, with dropout; `terms` finds the terms in a basis."""

    terms: Callable[[Any], tuple[Term, ...]]
    normalization: str
    map: str
    gain: float
    dropout: Dropout
    existing: Existing
    size: int

    def apply(self, r: Tensor, call: Call) -> Tensor:
        """(..., K or 1, M, C) -> (..., K, N, C)."""
        attended = self._attend(r, call, None)
        return call.materialized().apply(r) if attended is None else attended[0]

    def shares(self, r: Tensor, clip: int, call: Call) -> tuple[Tensor, Tensor]:
        """A^T r and s_knl, the sum of the weights of n's pairs at the relative position l, in one pass if it can be."""
        attended = self._attend(r, call, clip)
        if attended is not None:
            return attended
        return self.apply(r, call), shares_of(call, clip)

    def _attend(self, r: Tensor, call: Call, clip: int | None) -> tuple[Tensor, Tensor] | None:
        """The result and the shares; `None` if blocks cannot compute the call."""
        terms = self.terms(call.basis)
        query, key, scale = products(terms)
        inputs, outputs = key.shape[-2], query.shape[-2]
        own = self.existing.batch_shape(call.basis) if self.existing.masked else ()
        lead = broadcast(r.shape[:-3], query.shape[:-3], key.shape[:-3], own)
        kinds = [(leaf.kind, leaf.clip) for leaf in tables(terms)]
        counted = None if clip is None else ("clip", clip)
        if inputs * outputs == 0 or (counted is not None and any(kind != counted for kind in kinds)):
            return None
        if self.dropout.p > 0 and lead != broadcast(query.shape[:-3], key.shape[:-3], own):
            return None  # dropout that a batch of r shares
        if self.existing.masked and not all(map(finite, (r, query, key))):
            return None
        size = self.size

        def flat(t: Tensor) -> Tensor:
            return t.expand(*lead, size, *t.shape[-2:]).reshape(math.prod(lead) * size, *t.shape[-2:])

        along, rows = diagonal(terms, inputs, outputs, r), table_rows(terms)
        bucketed = counted or (kinds[0] if kinds else None)
        maps = Maps(None if along is None else _repeated(along, lead, size),
                    None if rows is None else flat(rows),
                    None if bucketed is None else buckets(*bucketed, inputs, outputs, r.device),
                    self.existing.table(call.basis, lead, inputs, outputs, r.device),
                    self.dropout.seed_of(call.basis))
        options = Options(self.normalization, self.map, self.gain, self.existing.causal, scale, self.dropout.p, size)
        y, shares = blocked_attention(flat(query), flat(key), flat(r), maps, options,
                                      buckets=0 if counted is None else bucket_count(*counted))
        ordered = self.existing.causal or self.existing.masked
        if ordered and not (finite(y) and finite(shares)):
            return None  # something may have come through a pair that does not exist
        return y.view(*lead, size, *y.shape[-2:]), shares.view(*lead, size, *shares.shape[-2:])


def _repeated(along: Tensor, lead: tuple[int, ...], size: int) -> Tensor:
    """(..., K or 1, L) repeated for each element of the batch and each head: (G, L)."""
    if along.dim() == 2:  # reshaped, it would fix the number of entries in an exported program
        return along.expand(size, -1).repeat(math.prod(lead), 1)
    return along.expand(*lead, size, -1).reshape(math.prod(lead) * size, -1)


class BlockedAttention(Applied):
    """Blocks of scores, each weighed and multiplied before the next."""

    name, types = "structconv.blocked_attention", (Normalized, Dropped)

    def match(self, problem: Problem) -> Blocked | None:
        weights, dropout = undropped(problem.basis)
        if not isinstance(weights, Normalized) or (weights.over != "inputs" and weights.kind != "sigmoid"):
            return None
        parts = mapped(weights)
        terms = None if parts is None else summands(parts[3])
        if parts is None or terms is None or not fits_blocks(terms) or is_listed(weights.child):
            return None
        existing = Existing.of(weights.child.support(), weights.num_inputs, weights.num_outputs)
        return None if existing is None else Blocked(terms_of_calls(terms), *parts[:3], dropout, existing, weights.size)

    def application_cost(self, match: Any, problem: Problem, channels: int, mode: str) -> Cost:
        return application(problem.basis, problem.sizes, channels, mode).repeated(FUSED_SHARE)

    def application(self, match: Blocked, problem: Problem) -> Application:
        return Application(match.apply, shares=match.shares)


def mapped(weights: Normalized) -> tuple[str, str, float, Basis] | None:
    """(normalization, map, gain, scores) of weights = normalized(gain map(scores))."""
    kind, (gain, node) = weights.kind, unscaled(weights.child)
    if isinstance(node, Mapped):
        name = next((name for fn, name in _MAPS if fn is node.fn), None)
        return None if name is None or kind == "sigmoid" or gain == 0 else (kind, name, gain, node.child)
    return ("none", "sigmoid", 1.0, weights.child) if kind == "sigmoid" else (kind, "identity", 1.0, weights.child)


def fits_blocks(terms: tuple[Summand, ...]) -> bool:
    """Return True if a term is a product, and the terms that depend on output and offset share their buckets."""
    kinds = {(leaf.kind, leaf.clip) for leaf in tables(terms)}
    return len(kinds) <= 1 and any(isinstance(leaf, PRODUCTS) for leaf, _ in terms)


register(BlockedAttention())
