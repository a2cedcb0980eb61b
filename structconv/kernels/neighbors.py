"""Neighbors and the node itself, `Adjacency(...) | Identity()`, as one node of autograd that sorts the edges too."""

from __future__ import annotations

from typing import NamedTuple, cast

from structconv.bases.dense import Identity
from structconv.bases.linear import Concat
from structconv.bases.sparse import Sparse
from structconv.kernels.composite import Part, PerPart
from structconv.kernels.sparse_product import Matrices, as_one_node, is_lazy, matrices
from structconv.planning.cost import Cost
from structconv.planning.kernel import register
from structconv.planning.plan import Plan
from structconv.planning.problem import Problem, Run
from structconv.primitives.native.layer import convolve_with_self
from structconv.weights import Full

__all__ = ["WithSelf"]


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
