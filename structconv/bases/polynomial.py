"""Polynomials of one square matrix, applied by recurrence."""

from __future__ import annotations

import torch
from torch import Tensor

from structconv.bases.base import Basis, value
from structconv.bases.dense import check_heads
from structconv.bases.pairs import Pairs
from structconv.bases.sparse import Sparse
from structconv.errors import ConfigError, ShapeError, text_of
from structconv.primitives.layout import Csr
from structconv.primitives.polynomials import polynomial_analysis, polynomial_synthesis
from structconv.shapes import alike, check_choice

__all__ = ["Polynomial"]

KINDS = ("chebyshev", "monomial")


@value
class Polynomial(Basis):
    """A_k = T_(first + k)(L) for a square matrix L, 0 <= k <= order - first.

    "chebyshev": T_0 = I, T_1 = L, T_j = 2 L T_(j-1) - T_(j-2) (Defferrard et al. 2016, equation 4); "monomial":
    T_j = L^j. No power of L is ever formed: analysis runs the recurrence on x, synthesis runs Clenshaw's (Chebyshev)
    or Horner's (monomial) on the output side. Each costs `order` products with L, and only analysis holds K results.

    Args:
        operator: L, a basis with K = 1 and M = N.
        order: the highest degree.
        kind: which polynomials.
        first: the lowest degree; 1 leaves the identity out.

    Raises:
        ShapeError: if the operator has another K or is not square.
        ConfigError: unless 0 <= first <= order.

    Example:

        >>> from structconv import Graph
        >>> from structconv.bases import Polynomial, Sparse
        >>> ring = Sparse(Graph(torch.tensor([[0, 1, 2], [1, 2, 0]]), num_nodes=3), torch.ones(3))
        >>> Polynomial(ring, 2).size
        3
    """

    operator: Basis
    order: int
    kind: str = "chebyshev"
    first: int = 0
    _shown = "Polynomial({0.operator!r}, order={0.order}, kind={0.kind!r}, first={0.first})"

    def __post_init__(self) -> None:
        if not isinstance(self.operator, Basis):
            return
        sizes = (self.operator.size, self.operator.num_inputs, self.operator.num_outputs)
        if sizes[0] != 1 or sizes[1] != sizes[2]:
            raise ShapeError("Polynomial", "operator must have K=1 and M=N", f"(K, M, N) = {text_of(sizes)}")
        if not 0 <= self.first <= self.order:
            raise ConfigError("Polynomial", "degrees must satisfy 0 <= first <= order",
                              f"first={self.first}, order={self.order}")
        check_choice("Polynomial", "kind", self.kind, KINDS)

    @property
    def size(self) -> int:
        return self.order - self.first + 1

    @property
    def num_inputs(self) -> int:
        return self.operator.num_inputs

    @property
    def num_outputs(self) -> int:
        return self.operator.num_inputs

    @property
    def batch_shape(self) -> tuple[int, ...]:
        return self.operator.batch_shape

    @property
    def dtype(self) -> torch.dtype | None:
        """The operator's dtype."""
        return getattr(self.operator, "dtype", None)

    @property
    def device(self) -> torch.device:
        return self.operator.device

    def dense(self, dtype: torch.dtype | None = None) -> Tensor:
        a = self.operator.dense(dtype)
        terms = [torch.eye(self.num_inputs, dtype=a.dtype, device=a.device).expand_as(a), a]
        while len(terms) <= self.order:
            terms.append(2 * a @ terms[-1] - terms[-2] if self.kind == "chebyshev" else a @ terms[-1])
        return torch.cat(terms[self.first:self.order + 1], dim=-3)

    def analysis(self, x: Tensor) -> Tensor:
        self.check_input(x, "Polynomial")
        edges = self.constant_edges(x)
        if edges is not None:
            return polynomial_analysis(*edges, x, order=self.order, first=self.first,
                                       chebyshev=self.kind == "chebyshev")
        terms = [x]
        while len(terms) <= self.order:
            terms.append(self._next(terms[-1], terms[-2] if len(terms) > 1 else None))
        return torch.stack(torch.broadcast_tensors(*terms)[self.first:], dim=-3)

    def synthesis(self, r: Tensor) -> Tensor:
        check_heads(self, r)
        r, edges = r.expand(*r.shape[:-3], self.size, *r.shape[-2:]), self.constant_edges(r)
        if edges is not None:
            return polynomial_synthesis(*edges, r, first=self.first, chebyshev=self.kind == "chebyshev")
        return self._summed(r.unbind(-3))

    def apply(self, r: Tensor) -> Tensor:
        check_heads(self, r)
        now, before, done = r.expand(*r.shape[:-3], self.size, *r.shape[-2:]), None, []
        for degree in range(self.order + 1):
            if degree >= self.first:
                done.append(now[..., 0, :, :])
                now, before = now[..., 1:, :, :], None if before is None else before[..., 1:, :, :]
            if degree < self.order:
                now, before = self._fold(now, before), now
        return torch.stack(torch.broadcast_tensors(*done), dim=-3)

    def evaluate(self, pairs: Pairs) -> Tensor:
        return pairs.pick(self.dense(pairs.dtype))

    def _transposed(self) -> Basis:
        return Polynomial(self.operator.transpose(), self.order, self.kind, self.first)

    def constant_edges(self, x: Tensor) -> tuple[Csr, Csr, Tensor | None] | None:
        """Both layouts of a `Sparse` operator's edges and its values (E,), if these are constants and not batched."""
        operator = self.operator
        if type(operator) is not Sparse or operator.batch_shape:
            return None
        graph, values = operator.graph, operator.values
        if values is not None:
            if values.requires_grad and torch.is_grad_enabled():
                return None
            values = alike("Sparse", x, values).flatten()
        return graph.by_target(), graph.by_source(), values

    def _times(self, x: Tensor) -> Tensor:
        """L^T x."""
        return self.operator.analysis(x).squeeze(-3)

    def _next(self, now: Tensor, before: Tensor | None) -> Tensor:
        """T_(j+1)^T x from T_j^T x and T_(j-1)^T x."""
        product = self._times(now)
        return product if self.kind == "monomial" or before is None else 2 * product - before

    def _fold(self, now: Tensor, before: Tensor | None) -> Tensor:
        """`_next` for all remaining heads at once, (..., K, M, C), as channels of one product."""
        heads, channels = now.shape[-3], now.shape[-1]
        flat = [None if t is None else t.movedim(-3, -2).flatten(-2) for t in (now, before)]
        assert flat[0] is not None
        return self._next(flat[0], flat[1]).unflatten(-1, (heads, channels)).movedim(-2, -3)

    def _summed(self, heads: tuple[Tensor, ...]) -> Tensor:
        """b_j = r_j + 2 L^T b_(j+1) - b_(j+2), and y = r_0 + L^T b_1 - b_2, with r_j = 0 below `first` (Clenshaw); of
        monomials b_j = r_j + L^T b_(j+1) (Horner)."""
        now, before, chebyshev = heads[-1], None, self.kind == "chebyshev"
        for degree in range(self.order - 1, -1, -1):
            product = self._times(now)
            following = 2 * product if chebyshev and degree else product
            if chebyshev and before is not None:
                following = following - before
            if degree >= self.first:
                following = following + heads[degree - self.first]
            now, before = following, now
        return now
