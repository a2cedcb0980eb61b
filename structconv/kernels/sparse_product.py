"""Sparse matrices by the native product, without what its public function derives anew from shapes at each call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor

from structconv.bases.sparse import Sparse
from structconv.bases.spec import getter
from structconv.kernels.orders import Application, Applied
from structconv.planning.kernel import register
from structconv.planning.problem import Call, Problem
from structconv.primitives.csr import edge_product, spmm
from structconv.primitives.layout import Csr
from structconv.shapes import check_alike
from structconv.structures.graph import Graph

__all__ = ["SparseProduct"]


class Matrices(NamedTuple):
    """K matrices over the edges of one graph: what finds the edges and the values, and whether it is plainly one."""

    graph: Callable[[Any], Graph]
    values: Callable[[Any], Tensor] | None
    single: bool

    def product(self, r: Tensor, call: Call, sum_heads: bool = False) -> Tensor:
        """(..., K or 1, M, C) -> (..., K, N, C), or with the heads summed (..., N, C)."""
        return spmm(*self._found(call), r, sum_heads=sum_heads)

    def one(self, x: Tensor, call: Call) -> Tensor:
        """(..., M, C) -> (..., N, C), of one matrix."""
        ahead, back, values = self._found(call)
        return edge_product(*ahead, *back, values, x, 1) if x.dim() == 2 else spmm(ahead, back, values, x)

    def _found(self, call: Call) -> tuple[Csr, Csr, Tensor | None]:
        """The edges by target and by source, and the values."""
        values = None if self.values is None else self.values(call.basis)
        return *self.graph(call.basis).layouts(), values

    def analysis(self, x: Tensor, call: Call) -> Tensor:
        """(..., M, C) -> (..., K, N, C)."""
        return self.product(x.unsqueeze(-3), call)

    def synthesis(self, r: Tensor, call: Call) -> Tensor:
        """(..., K, M, C) -> (..., N, C)."""
        return self.product(r, call, True)


class SparseProduct(Applied):
    """`structconv::spmm` for matrices over one list of edges."""

    name, types, before = "structconv.spmm", (Sparse,), ("primitives",)

    def match(self, problem: Problem) -> Matrices:
        basis = problem.basis
        assert isinstance(basis, Sparse)
        if basis.values is not None:
            check_alike("Sparse", problem.x, basis.values, other_name="values")
        single = basis.values is None or (basis.values.dim() <= 2 and basis.size == 1)
        return Matrices(getter(basis.graph), None if basis.values is None else getter(basis.values), single)

    def application(self, match: Matrices, problem: Problem) -> Application:
        return Application(match.product, match.analysis, match.synthesis, single=match.one if match.single else None)


register(SparseProduct())
