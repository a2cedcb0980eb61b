"""Filters of edges as combinations of K common ones: sums over edges in blocks of heads, or a filter for each kind of
edge.
"""

from __future__ import annotations

import dataclasses
from typing import cast

from torch import Tensor

from structconv.bases.linear import Mixed
from structconv.bases.sparse import Sparse
from structconv.bases.tree import getter, materializer
from structconv.kernels.sparse_product import Matrices
from structconv.planning.cost import Cost
from structconv.planning.kernel import Kernel, register
from structconv.planning.plan import Plan, decide
from structconv.planning.problem import Call, Problem, Run
from structconv.primitives.conditioned import conditioned_product, heads_of_block
from structconv.weights import Full
from structconv.weights.base import plus

__all__ = ["BlocksOfHeads", "MixedFilters"]


class BlocksOfHeads(Kernel):
    """A_k^T x for as many k at a time as fit into the cache, each block times its filters; the backward computes it
    again, so that (N, K, P) is never stored."""

    name, types, orders = "blocks of heads", (Sparse,), ("structure_first",)

    def match(self, problem: Problem) -> Matrices | None:
        basis, values = cast(Sparse, problem.basis), cast(Sparse, problem.basis).values
        plain = (isinstance(problem.theta, Full) and problem.x.dim() == 2 and values is not None
                 and values.dim() == 2 and basis.size > 1 and values.dtype == problem.x.dtype)
        return Matrices(getter(basis.graph), getter(values), False) if plain else None

    def cost(self, match: Matrices, problem: Problem, path: str) -> Cost:
        theta, edges = problem.theta, problem.sizes.edges(cast(Sparse, problem.basis).graph.num_edges)
        heads, inner, itemsize = theta.size, theta.in_channels, problem.sizes.itemsize
        step = heads_of_block(problem.outputs, heads, inner, itemsize)
        peak = problem.outputs * step * inner * itemsize
        along = Cost(2 * heads * edges * inner, itemsize * (heads * edges + problem.outputs * inner))
        across = Cost(2 * problem.outputs * heads * inner * theta.out_channels,
                      itemsize * (heads * inner * theta.out_channels + problem.outputs * theta.out_channels))
        calls = Cost(calls=2 * -(-heads // step))
        backward = problem.x_grad + problem.theta_grad
        return ((along + calls).repeated(1 + 2 * bool(backward)) + across.repeated(1 + backward)
                + Cost(peak_bytes=peak))

    def compile(self, match: Matrices, problem: Problem, path: str) -> Run:
        graph, values = match.graph, match.values
        assert values is not None

        def run(call: Call) -> Tensor:
            theta = cast(Full, call.theta).theta
            return plus(conditioned_product(*graph(call.basis).layouts(), values(call.basis).mT, call.x, theta),
                        call.bias)

        return run


class MixedFilters(Kernel):
    """(sum_k W_kj A_k) with Theta_j is A_k with sum_j W_kj Theta_j: mix the filters, and not the matrices."""

    name, types, orders = "mixed filters", (Mixed,), ("filters_first",)

    def match(self, problem: Problem) -> Problem | None:
        """The problem over the matrices that are mixed."""
        basis, theta = cast(Mixed, problem.basis), problem.theta
        if not isinstance(theta, Full) or basis.has_scores:
            return None
        filters = theta.theta.new_zeros(()).expand(basis.child.size, *theta.theta.shape[1:])
        grad = problem.theta_grad or basis.matrix.requires_grad
        return dataclasses.replace(problem.part(basis.child, Full.of(filters)), theta_grad=grad)

    def cost(self, match: Problem, problem: Problem, path: str) -> Cost:
        numbers = problem.theta.size * problem.theta.in_channels * problem.theta.out_channels
        mixed = match.theta.size * problem.theta.in_channels * problem.theta.out_channels * problem.sizes.itemsize
        mixing = Cost(2 * match.theta.size * numbers, 2 * mixed + numbers * problem.sizes.itemsize, calls=2)
        return decide(match).cost + mixing.repeated(1 + 2 * match.theta_grad) + Cost(peak_bytes=mixed)

    def compile(self, match: Problem, problem: Problem, path: str) -> Run:
        basis = cast(Mixed, problem.basis)
        inner, child, matrix = decide(match), materializer(basis.child), getter(basis.matrix)

        def mixed(call: Call) -> Tensor:
            theta = cast(Full, call.theta).theta
            filters = (matrix(call.basis).to(theta.dtype) @ theta.flatten(1)).unflatten(1, theta.shape[1:])
            return inner.run(call._replace(theta=Full.of(filters), part=child))

        return mixed

    def parts(self, match: Problem, problem: Problem) -> tuple[Plan, ...]:
        return (decide(match),)


for _kernel in (BlocksOfHeads(), MixedFilters()):
    register(_kernel)
