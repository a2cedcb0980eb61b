"""`Mixed`: heads that are linear combinations of the heads of another basis (talking heads)."""

from __future__ import annotations

import torch
from torch import Tensor

from structconv.bases.base import Basis, value
from structconv.bases.entrywise import SamePattern
from structconv.bases.pairs import Pairs

__all__ = ["Mixed"]


@value
class Mixed(SamePattern):
    """sum_k W_kj a_k for each of J heads: W (K, J) maps over the heads, and no pair meets another.

    A score that is -inf in one of the heads, an absent pair in the log domain, is absent in every mixture.

    Example:

        >>> from structconv import Dense
        >>> heads = Dense(torch.ones(2, 3, 3))
        >>> heads.mix(torch.tensor([[0.5], [2.0]])).dense()[0, 0]
        tensor([2.5000, 2.5000, 2.5000])
    """

    matrix: Tensor

    @property
    def size(self) -> int:
        return self.matrix.shape[1]

    _shown = "{0.child!r}.mix({0.child.size} -> {0.size})"
    #: The heads of the child that are held for one of its own.
    _width = property(lambda self: -(-self.child.size // max(self.size, 1)))
    _terms = property(lambda self: self.child.size)

    def apply(self, r: Tensor) -> Tensor:
        heads, channels = r.shape[-3], r.shape[-1]
        if heads != self.size:
            return self.analysis(r.squeeze(-3))
        y = self.child.analysis(r.movedim(-3, -2).flatten(-2)).unflatten(-1, (heads, channels))
        return torch.einsum("...knjc,kj->...jnc", y, self.matrix.to(y.dtype))

    def analysis(self, x: Tensor) -> Tensor:
        return self._combined(self.child.analysis(x), 2)

    def synthesis(self, r: Tensor) -> Tensor:
        return self.child.synthesis(torch.einsum("...jmc,kj->...kmc", r, self.matrix.to(r.dtype)))

    def dense(self, dtype: torch.dtype | None = None) -> Tensor:
        return self._mixed(self.child.dense(dtype), 2)

    def evaluate(self, pairs: Pairs) -> Tensor:
        return self._mixed(self.child.evaluate(pairs), len(pairs.shape))

    def _transposed(self) -> Basis:
        return Mixed(self.child.transpose(), self.matrix)

    def _mixed(self, entries: Tensor, rank: int) -> Tensor:
        """The combinations of the entries, where scores of -inf stay so."""
        if not self.has_scores:
            return self._combined(entries, rank)
        absent = entries == -torch.inf
        mixed = self._combined(entries.masked_fill(absent, 0), rank)
        return mixed.masked_fill(absent.any(-1 - rank, keepdim=True), -torch.inf)

    def _combined(self, heads: Tensor, rank: int) -> Tensor:
        """(..., K, *rank) -> (..., J, *rank)."""
        flat = heads.flatten(-rank)
        return (self.matrix.to(heads.dtype).mT @ flat).unflatten(-1, heads.shape[heads.dim() - rank:])
