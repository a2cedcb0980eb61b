"""Products of queries and keys without a normalization by softmax: Q (K^T X) instead of (Q K^T) X.

A_k = K_k Q_k^T has rank D, and so has what remains of it after a division of rows or columns: by a constant (Wang et
al. 2018, eq. 4 with the dot product) or by sums, which are products with a column of ones (Katharopoulos et al. 2020,
eq. 5, where a positive feature map has been applied to both sides). Then the M N pairs are never visited.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from structconv.bases.entrywise import Masked, Normalized
from structconv.bases.linear import Scaled
from structconv.bases.scores import Bilinear
from structconv.kernels.expressions import Existing, Term, is_listed, products, summands, terms_of_calls
from structconv.kernels.orders import Application, Applied
from structconv.planning.cost import Cost, lost_flops
from structconv.planning.fitted import CAUSAL_CALLS, DENSE_CALLS, DIVIDED_CALLS
from structconv.planning.kernel import register
from structconv.planning.problem import Call, Problem
from structconv.primitives.functions import finite, sum_dtype

__all__ = ["CHUNK", "Reassociation", "causal_product"]

#: Consecutive outputs of a causal product whose pairs among themselves are visited.
CHUNK = 128


class Reassociated(NamedTuple):
    """a_kmn = scale <query_kn, key_km> at existing pairs, normalized by `kind` and `over`, with D = `depth` of all
    `terms`. 16-bit types are computed in float32: key^T x sums over all inputs, which float16 cannot hold for positive
    keys."""

    terms: Callable[[Any], tuple[Term, ...]]
    depth: int
    size: int
    kind: str
    over: str
    existing: Existing

    def apply(self, r: Tensor, call: Call) -> Tensor:
        """(..., K or 1, M, C) -> (..., K, N, C)."""
        factors = _Factors.of(self, call)
        query, key = factors.divided()
        present = factors.present(_wide(r))
        if not self.existing.causal:
            return (query @ (key.mT @ present)).to(r.dtype)
        y = causal_product(query, key, present).to(r.dtype)
        return y if finite(y) else call.materialized().apply(r)

    def synthesis(self, r: Tensor, call: Call) -> Tensor:
        """(..., K, M, C) -> (..., N, C)."""
        if self.existing.causal:
            return self.apply(r, call).sum(-3)
        factors = _Factors.of(self, call)
        query, key = factors.divided()
        inner = key.mT @ factors.present(_wide(r))
        lead = torch.broadcast_shapes(query.shape[:-2], inner.shape[:-2])
        folded = query.expand(*lead, *query.shape[-2:]).movedim(-3, -2).flatten(-2)
        return (folded @ inner.expand(*lead, *inner.shape[-2:]).flatten(-3, -2)).to(r.dtype)


class _Factors(NamedTuple):
    """Query and key of a call, and the inputs that exist."""

    query: Tensor
    key: Tensor
    padding: Tensor | None
    kind: str
    over: str
    causal: bool

    @classmethod
    def of(cls, match: Reassociated, call: Call) -> _Factors:
        """Return the factors of this call, with the scale in the query."""
        query, key, scale = products(match.terms(call.basis))
        query, key = _wide(query), _wide(key)
        query = query if scale == 1.0 else query * scale
        return cls(query, key, match.existing.padding(call.basis), match.kind, match.over, match.existing.causal)

    def present(self, t: Tensor) -> Tensor:
        """(..., K, M, C) with zeros where there is padding."""
        return t if self.padding is None else t.masked_fill(~self.padding[..., None, :, None], 0)

    def divided(self) -> tuple[Tensor, Tensor]:
        """Query and key, one of them divided by the number or the sum of each row's weights."""
        query, key = self.query, self.present(self.key)
        if self.kind == "none":
            return query, key
        if self.over == "outputs":
            total = self._count(key) if self.kind == "count" else (key * query.sum(-2, keepdim=True)).sum(-1, True)
            return query, key / torch.where(total == 0, 1, total)
        total = self._count(query) if self.kind == "count" else (query * self._key_sum(key)).sum(-1, keepdim=True)
        return query / torch.where(total == 0, 1, total), key

    def _key_sum(self, key: Tensor) -> Tensor:
        """The sum of the keys that each output reads, (..., N or 1, D)."""
        if not self.causal:
            return key.sum(-2, keepdim=True)
        last = torch.arange(self.query.shape[-2], device=key.device).clamp(max=key.shape[-2] - 1)
        return key.cumsum(-2).index_select(-2, last)

    def _count(self, like: Tensor) -> Tensor:
        """Return the number of pairs in each row."""
        if self.over == "outputs":
            return like.new_full((1, 1), self.query.shape[-2])
        return self._key_sum(self.present(like.new_ones((1, self.key.shape[-2], 1))))


def _wide(t: Tensor) -> Tensor:
    return t.to(sum_dtype(t.dtype))


def causal_product(query: Tensor, key: Tensor, values: Tensor) -> Tensor:
    """y_n = sum over m <= n of <query_n, key_m> values_m, from (..., N, D), (..., M, D) and (..., M, C), by chunks of
    outputs: the pairs within a chunk directly, earlier ones by a running sum of key^T value (Katharopoulos et al. 2020,
    section 3.3, by chunks). O(N (C D + CHUNK (C + D))) flops, O(N C D / CHUNK) memory."""
    outputs, inputs = query.shape[-2], min(query.shape[-2], key.shape[-2])
    padded = -(-outputs // CHUNK) * CHUNK
    q, k, v = (F.pad(t[..., :size, :], (0, 0, 0, padded - size)).unflatten(-2, (-1, CHUNK))
               for t, size in ((query, outputs), (key, inputs), (values, inputs)))
    before = F.pad((k.mT @ v)[..., :-1, :, :].cumsum(-3), (0, 0, 0, 0, 1, 0))
    y = q @ before + (q @ k.mT).tril() @ v
    return y.flatten(-3, -2)[..., :outputs, :]


class Reassociation(Applied):
    """Two products over the D channels, instead of one over all pairs."""

    name, types = "structconv.reassociated", (Normalized, Bilinear, Scaled, Masked)

    def match(self, problem: Problem) -> Reassociated | None:
        basis = problem.basis
        kind, over, scores = (basis.kind, basis.over, basis.child) if isinstance(basis, Normalized) else (
            "none", "inputs", basis)
        terms = summands(scores) if kind in ("none", "count", "sum") else None
        if terms is None or not all(isinstance(leaf, Bilinear) for leaf, _ in terms) or is_listed(scores):
            return None
        existing = Existing.of(scores.support(), scores.num_inputs, scores.num_outputs)
        if existing is None or existing.others or (existing.causal and over == "outputs"):
            return None
        depth = sum(leaf.depth for leaf, _ in terms if isinstance(leaf, Bilinear))
        return Reassociated(terms_of_calls(terms), depth, basis.size, kind, over, existing)

    def application_cost(self, match: Reassociated, problem: Problem, channels: int, mode: str) -> Cost:
        """Two products that run through the D channels, and the rows and columns divided."""
        (inputs, outputs), depth, sizes = problem.sizes.entries(problem.basis), match.depth, problem.sizes
        heads, causal = sizes.batch * match.size, match.existing.causal
        flops = 2 * heads * depth * channels * (inputs + outputs)
        if causal:
            flops += 2 * heads * CHUNK * outputs * (depth + channels)
        moved = heads * ((inputs + outputs) * (channels + 2 * depth) + 2 * depth * channels) * sizes.itemsize
        calls = 2 * DENSE_CALLS + (0 if match.kind == "none" else DIVIDED_CALLS) + (CAUSAL_CALLS if causal else 0)
        return Cost(flops, moved, wasted=lost_flops(flops, channels), calls=calls)

    def application(self, match: Reassociated, problem: Problem) -> Application:
        return Application(match.apply, synthesis=match.synthesis)


register(Reassociation())
