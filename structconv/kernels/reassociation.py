"""Products of queries and keys that nothing acts on column by column: Q (K^T X) instead of (Q K^T) X.

A_k = K_k Q_k^T has rank D, and so has what remains of it after a division of rows or columns: by a constant (Wang et
al. 2018, eq. 4 with the dot product) or by sums, which are products with a column of ones (Katharopoulos et al. 2020,
eq. 5, where a positive feature map has been applied to both sides). Then the M N pairs are never visited.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from structconv.bases.base import Basis, value
from structconv.bases.linear import Scaled
from structconv.bases.pairs import listed_graph
from structconv.bases.pairwise import Normalised
from structconv.bases.scores import Bilinear
from structconv.bases.sizes import QueryKey
from structconv.kernels.dense_attention import Existing, finite
from structconv.kernels.forms import register_form
from structconv.kernels.terms import products, sum_terms
from structconv.planning.cost import Cost, lost_flops
from structconv.planning.counts import DENSE_CALLS, Sizes, application_cost

#: Consecutive outputs whose pairs among themselves are visited where an output sees what came before.
CHUNK = 128


@value
class Reassociated(QueryKey):
    """a_kmn = scale <query_kn, key_km> at existing pairs, divided as `kind` and `over` say; `child` is the same."""

    query: Tensor
    key: Tensor
    child: Basis
    scale: float
    kind: str
    over: str
    existing: Existing

    def dense(self, dtype: torch.dtype | None = None) -> Tensor:
        return self.child.dense(dtype)

    def apply(self, r: Tensor) -> Tensor:
        query, key = self._divided()
        present = self._present(r)
        if not self.existing.causal:
            return query @ (key.mT @ present)
        y = causal_product(query, key, present)
        return y if torch.compiler.is_compiling() or finite(y) else self.child.apply(r)

    def analysis(self, x: Tensor) -> Tensor:
        return self.apply(x.unsqueeze(-3))

    def synthesis(self, r: Tensor) -> Tensor:
        if self.existing.causal:
            return self.apply(r).sum(-3)
        query, key = self._divided()
        inner = key.mT @ self._present(r)
        lead = torch.broadcast_shapes(query.shape[:-2], inner.shape[:-2])
        folded = query.expand(*lead, *query.shape[-2:]).movedim(-3, -2).flatten(-2)
        return folded @ inner.expand(*lead, *inner.shape[-2:]).flatten(-3, -2)

    def _present(self, t: Tensor) -> Tensor:
        """(..., K, M, C) with zeros where there is padding."""
        padding = self.existing.padding
        return t if padding is None else t.masked_fill(~padding[..., None, :, None], 0)

    def _divided(self) -> tuple[Tensor, Tensor]:
        """Query and key, the one or the other divided by what its row's weights are to be divided by."""
        query, key = self.query if self.scale == 1.0 else self.query * self.scale, self._present(self.key)
        if self.kind == "none":
            return query, key
        if self.over == "outputs":
            total = self._count(key) if self.kind == "count" else (key * query.sum(-2, keepdim=True)).sum(-1, True)
            return query, key / torch.where(total == 0, 1, total)
        total = self._count(query) if self.kind == "count" else (query * self._seen(key)).sum(-1, keepdim=True)
        return query / torch.where(total == 0, 1, total), key

    def _seen(self, key: Tensor) -> Tensor:
        """The sum of the keys that each output sees, (..., N or 1, D)."""
        if not self.existing.causal:
            return key.sum(-2, keepdim=True)
        last = torch.arange(self.num_outputs, device=key.device).clamp(max=self.num_inputs - 1)
        return key.cumsum(-2).index_select(-2, last)

    def _count(self, like: Tensor) -> Tensor:
        """How many pairs each row has."""
        if self.over == "outputs":
            return like.new_full((1, 1), self.num_outputs)
        return self._seen(self._present(like.new_ones((1, self.num_inputs, 1))))


def causal_product(query: Tensor, key: Tensor, values: Tensor) -> Tensor:
    """y_n = sum over m <= n of <query_n, key_m> values_m, from (..., N, D), (..., M, D) and (..., M, C).

    Chunks of outputs: what came before a chunk as a running sum of key^T value, what is in it by its pairs
    (Katharopoulos et al. 2020, section 3.3, chunk by chunk). O(N (C D + CHUNK (C + D))) flops, O(N C D / CHUNK) memory.
    """
    outputs, inputs = query.shape[-2], min(query.shape[-2], key.shape[-2])
    padded = -(-outputs // CHUNK) * CHUNK
    q, k, v = (F.pad(t[..., :size, :], (0, 0, 0, padded - size)).unflatten(-2, (-1, CHUNK))
               for t, size in ((query, outputs), (key, inputs), (values, inputs)))
    before = F.pad((k.mT @ v)[..., :-1, :, :].cumsum(-3), (0, 0, 0, 0, 1, 0))
    y = q @ before + (q @ k.mT).tril() @ v
    return y.flatten(-3, -2)[..., :outputs, :]


def recognise(basis: Basis) -> Reassociated | None:
    """The basis as a product of low rank; `None` where something acts on its entries, or its pairs are listed."""
    kind, over, scores = (basis.kind, basis.over, basis.child) if isinstance(basis, Normalised) else (
        "none", "inputs", basis)
    terms = sum_terms(scores) if kind in ("none", "count", "sum") else None
    if terms is None or not all(isinstance(leaf, Bilinear) for leaf, _ in terms) or listed_graph(scores) is not None:
        return None
    existing = Existing.of(scores.support(), scores.num_inputs, scores.num_outputs)
    if existing is None or existing.others or (existing.causal and over == "outputs"):
        return None
    query, key, scale = products(terms)
    return Reassociated(query, key, basis, scale, kind, over, existing)


def suits(form: Basis, r: Tensor) -> bool:
    """Whether it takes fewer operations than the pairs do."""
    assert isinstance(form, Reassociated)
    if torch.compiler.is_compiling():
        return True
    depth, channels, (inputs, outputs) = form.query.shape[-1], r.shape[-1], (form.num_inputs, form.num_outputs)
    around = (inputs + outputs) * depth * channels
    if form.existing.causal:
        return around + CHUNK * outputs * (depth + channels) < inputs * outputs * (depth + channels) / 2
    return around < inputs * outputs * (depth + channels)


@application_cost(Reassociated)
def _application(basis: Reassociated, sizes: Sizes, channels: int, mode: str) -> Cost:
    """Two products that run through the D channels, and the rows and columns divided."""
    (inputs, outputs), depth = sizes.entries(basis), basis.query.shape[-1]
    heads = sizes.batch * basis.size
    flops = 2 * heads * depth * channels * (inputs + outputs)
    if basis.existing.causal:
        flops += 2 * heads * CHUNK * outputs * (depth + channels)
    moved = heads * ((inputs + outputs) * (channels + 2 * depth) + 2 * depth * channels) * sizes.itemsize
    calls = 2 * DENSE_CALLS + (0 if basis.kind == "none" else 4) + (8 if basis.existing.causal else 0)
    return Cost(flops, moved, wasted=lost_flops(flops, channels), calls=calls)


register_form("structconv.reassociated", recognise, Normalised, Bilinear, Scaled, suits=suits, priced=True)
