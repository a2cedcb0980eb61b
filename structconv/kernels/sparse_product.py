"""Sparse matrices by the native product, without the checks of its public function in each call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, cast

from torch import Tensor

from structconv.bases.sparse import Sparse
from structconv.bases.tree import NormalizedWeights, getter, tensor
from structconv.kernels.orders import Application, Applied
from structconv.planning.kernel import register
from structconv.planning.problem import Call, Problem, Run
from structconv.primitives.csr import edge_product, spmm
from structconv.primitives.layout import Csr
from structconv.primitives.native.adjacency import Adjacency, adjacency_of, unchanged
from structconv.primitives.native.layer import convolve, gather_sums
from structconv.primitives.native.node import is_direct
from structconv.shapes import check_alike
from structconv.structures.graph import Graph, listed_edges
from structconv.weights import Eye, Full
from structconv.weights.base import plus

__all__ = ["Matrices", "Sorted", "SparseProduct", "as_one_node", "is_lazy", "matrices", "sorted_matrix"]

#: Edges as a native kernel reads them, and a function that raises an error if they changed after that.
Sorted = tuple[Adjacency, Callable[[], None]]


class Matrices(NamedTuple):
    """K matrices over the edges of one graph: what finds the edges and the values, and whether it is plainly one."""

    graph: Callable[[Any], Graph]
    values: Callable[[Any], Tensor] | None
    single: bool

    def product(self, r: Tensor, call: Call, sum_heads: bool = False) -> Tensor:
        """(..., K or 1, M, C) -> (..., K, N, C), or with the heads summed (..., N, C)."""
        return spmm(*self._operands(call), r, sum_heads=sum_heads)

    def one(self, x: Tensor, call: Call) -> Tensor:
        """(..., M, C) -> (..., N, C), of one matrix."""
        ahead, back, values = self._operands(call)
        return edge_product(*ahead, *back, values, x, 1) if x.dim() == 2 else spmm(ahead, back, values, x)

    def sorted(self, call: Call) -> Sorted | None:
        """One matrix of ones or of normalized weights, as a native kernel reads it; `None` where no kernel can."""
        return sorted_matrix(self.graph(call.basis), None if self.values is None else self.values(call.basis))

    def _operands(self, call: Call) -> tuple[Csr, Csr, Tensor | None]:
        """The edges by target and by source, and the values."""
        values = None if self.values is None else tensor(self.values(call.basis))
        return *self.graph(call.basis).layouts(), values

    def analysis(self, x: Tensor, call: Call) -> Tensor:
        """(..., M, C) -> (..., K, N, C)."""
        return self.product(x.unsqueeze(-3), call)

    def synthesis(self, r: Tensor, call: Call) -> Tensor:
        """(..., K, M, C) -> (..., N, C)."""
        return self.product(r, call, True)


def matrices(basis: Sparse, x: Tensor) -> Matrices:
    """The matrices of a spec, of the dtype and on the device of x."""
    if basis.values is not None:
        check_alike("Sparse", x, basis.values, other_name="values")
    single = basis.values is None or (basis.values.dim() <= 2 and basis.size == 1)
    return Matrices(getter(basis.graph), None if basis.values is None else getter(basis.values), single)


def is_lazy(basis: Sparse) -> bool:
    """Return True if the values of a spec are ones, or normalized weights that a kernel may compute itself."""
    return basis.values is None or bool(getattr(basis.values, "lazy", False))


def sorted_matrix(graph: Graph, values: Any) -> Sorted | None:
    """The edges with ones or `NormalizedWeights` as values, as a native kernel reads them, or `None`."""
    index, loops = listed_edges(graph)
    if values is None:
        adjacency = adjacency_of(index, graph.num_inputs, graph.num_outputs, loops=loops)
    elif type(values) is not NormalizedWeights or values.graph is not graph:
        return None
    else:
        adjacency = adjacency_of(index, graph.num_inputs, graph.num_outputs, loops=loops, square=graph.is_square,
                                 normalize=values.normalize, weights=graph.edge_weight if values.weighted else None)
    return None if adjacency is None else (adjacency, unchanged(index))


class SparseProduct(Applied):
    """`structconv::spmm` for matrices over one list of edges."""

    name, types, before = "structconv.spmm", (Sparse,), ("primitives",)

    def match(self, problem: Problem) -> Matrices:
        assert isinstance(problem.basis, Sparse)
        return matrices(problem.basis, problem.x)

    def application(self, match: Matrices, problem: Problem) -> Application:
        return Application(match.product, match.analysis, match.synthesis, single=match.one if match.single else None)

    def compile(self, match: Matrices, problem: Problem, path: str) -> Run:
        """The whole layer as one node where it has one matrix and one Theta."""
        run = super().compile(match, problem, path)
        theta, direct = problem.theta, match.single and is_lazy(cast(Sparse, problem.basis)) and problem.x.dim() == 2
        if not direct or problem.projected or theta.size != 1:
            return run
        if type(theta) is Eye:
            return _sums_as_one_node(match, run)
        if not isinstance(theta, Full):
            return run
        return as_one_node(match.sorted, run, convolve, path == "structure_first")


def as_one_node(sort: Callable[[Call], Sorted | None], otherwise: Run, node: Callable[..., Tensor], *options: Any
                ) -> Run:
    """The run of a layer with a `Full` Theta as one node of autograd, (adjacency, composed, x, theta, bias, *options)
    -> y such as `convolve`, where `sort` finds the edges of a call in an order that a kernel can read; else
    `otherwise`, the same by differentiable operators."""
    def run(call: Call) -> Tensor:
        x, theta, bias = call.x, cast(Full, call.theta).theta, call.bias
        if not is_direct(x, theta, bias) or (edges := sort(call)) is None:
            return otherwise(call)
        adjacency, check = edges

        def composed(x: Tensor, theta: Tensor, bias: Tensor | None) -> Tensor:
            check()
            return otherwise(call._replace(x=x, theta=Full.of(theta), bias=bias))

        return node(adjacency, composed, x, theta, bias, *options)

    return run


def _sums_as_one_node(match: Matrices, otherwise: Run) -> Run:
    """Return the run without Theta."""
    def run(call: Call) -> Tensor:
        if not is_direct(call.x) or (edges := match.sorted(call)) is None:
            return otherwise(call)
        adjacency, check = edges

        def composed(x: Tensor) -> Tensor:
            check()
            return otherwise(call._replace(x=x, bias=None))

        return plus(gather_sums(adjacency, composed, call.x), call.bias)

    return run


register(SparseProduct())
