"""Products with sparse matrices by the native kernel, without the checks of its public function in each call; and such
a matrix beside the identity, `Adjacency(...) | Identity()`, as one node of autograd that sorts the edges too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, cast

from torch import Tensor

from structconv.bases.dense import Identity
from structconv.bases.linear import Concat
from structconv.bases.sparse import Sparse
from structconv.bases.tree import NormalizedWeights, getter, tensor
from structconv.kernels.composite import Part, PerPart
from structconv.kernels.orders import Application, Applied
from structconv.planning.cost import Cost
from structconv.planning.kernel import register
from structconv.planning.plan import Plan
from structconv.planning.problem import Call, Problem, Run
from structconv.primitives.csr import edge_product, spmm
from structconv.primitives.layout import Csr
from structconv.primitives.native.adjacency import Adjacency, adjacency_of, unchanged
from structconv.primitives.native.layer import convolve, convolve_with_self, gather_sums
from structconv.primitives.native.node import is_direct
from structconv.shapes import check_alike
from structconv.structures.graph import Graph, listed_edges
from structconv.weights import Eye, Full
from structconv.weights.base import plus

__all__ = ["Matrices", "Sorted", "SparseProduct", "WithSelf", "as_one_node", "is_lazy", "matrices", "sorted_matrix"]

#: Edges as a native kernel reads them, and a function that raises an error if they changed after that.
Sorted = tuple[Adjacency, Callable[[], None]]


class Matrices(NamedTuple):
    """K matrices over the edges of one graph: functions that find the edges and the values, and whether K = 1."""

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
        """One matrix of ones or of normalized weights, as a native kernel reads it; `None` if no kernel can."""
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
        if not is_direct(x, theta, bias) or (edges := sort(call)) is None or edges[0].columns != x.size(0):
            return otherwise(call)
        adjacency, check = edges

        def composed(x: Tensor, theta: Tensor, bias: Tensor | None) -> Tensor:
            check()
            return otherwise(call._replace(x=x, theta=Full.of(theta), bias=bias))

        return node(adjacency, composed, x, theta, bias, *options)

    return run


def _sums_as_one_node(match: Matrices, otherwise: Run) -> Run:
    """`as_one_node` without Theta."""
    def run(call: Call) -> Tensor:
        if not is_direct(call.x) or (edges := match.sorted(call)) is None or edges[0].columns != call.x.size(0):
            return otherwise(call)
        adjacency, check = edges

        def composed(x: Tensor) -> Tensor:
            check()
            return otherwise(call._replace(x=x, bias=None))

        return plus(gather_sums(adjacency, composed, call.x), call.bias)

    return run


register(SparseProduct())


class _Match(NamedTuple):
    """The plans of both parts, the matrix, and which part is the identity."""

    both: tuple[Part, ...]
    matrix: Matrices
    own: int


class WithSelf(PerPart):
    """GraphSAGE's layer: one matrix of ones or of normalized weights, and the identity."""

    name, before = "neighbors and self", ("parts, summed",)

    def match(self, problem: Problem) -> _Match | None:  # type: ignore[override]
        parts = cast(Concat, problem.basis).parts
        own = next((i for i, part in enumerate(parts) if type(part) is Identity and part.size == 1), None)
        usual = own is not None and len(parts) == 2 and isinstance(problem.theta, Full) and problem.x.dim() == 2
        if own is None or not usual or problem.projected or not isinstance(near := parts[1 - own], Sparse):
            return None
        adjacency, both = matrices(near, problem.x), super().match(problem)
        if both is None or not adjacency.single or not is_lazy(near) or both[1 - own].plan.path != "structure_first":
            return None
        return _Match(both, adjacency, own)

    def cost(self, match: _Match, problem: Problem, path: str) -> Cost:  # type: ignore[override]
        return super().cost(match.both, problem, path)

    def parts(self, match: _Match, problem: Problem) -> tuple[Plan, ...]:  # type: ignore[override]
        return super().parts(match.both, problem)

    def compile(self, match: _Match, problem: Problem, path: str) -> Run:  # type: ignore[override]
        otherwise = super().compile(match.both, problem, path)
        return as_one_node(match.matrix.sorted, otherwise, convolve_with_self, match.own)


register(WithSelf())
