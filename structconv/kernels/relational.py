"""Relations by distinct pairs: a sparse product onto the pairs, a matrix product for each relation, a sparse product
back.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor

from structconv.bases.sparse import Sparse
from structconv.bases.tree import itself, materializer, tree_spec
from structconv.bases.typed import Typed
from structconv.kernels.orders import Primitives
from structconv.kernels.sparse_product import Sorted, as_one_node
from structconv.planning.cost import Cost
from structconv.planning.counts import application
from structconv.planning.fitted import CHANNEL_CALLS, IN_FAVOR, NARROW, SPARSE_CALLS
from structconv.planning.kernel import Kernel, register
from structconv.planning.plan import Plan, decide
from structconv.planning.problem import Call, Problem, Run
from structconv.primitives import relations
from structconv.primitives.native.adjacency import Adjacency, build_adjacency, unchanged
from structconv.primitives.native.dispatch import kernels, usable
from structconv.primitives.native.indices import LIMIT
from structconv.primitives.native.layer import convolve
from structconv.primitives.relations import Blocks, Pairs, blocks_of, relational_product, values_by_block
from structconv.shapes import alike
from structconv.weights import Eye, Full, Grouped, LowRank, Separable, Shared, Weight

__all__ = ["BLOCK_BYTES", "MixedFirst", "PerRelation", "Stacked", "counts", "distinct_pairs"]

#: Bytes that the rows of one block's pairs may take, before and after their matrix product. Smaller blocks hold less,
#: stay within the cache, and cost a call for each relation and block.
BLOCK_BYTES = 1 << 26


def counts(basis: Typed) -> relations.Counts:
    """The numbers of distinct pairs. O(E log E) once, then remembered."""
    return basis.derived("numbers of pairs", lambda: relations.counts(_kinds(basis)))


def distinct_pairs(basis: Typed, of_outputs: bool, blocks: int) -> dict[int, Pairs]:
    """The pairs of each block of outputs, or of inputs, by the first entry of the block. O(E log E), remembered."""
    return basis.derived(("pairs", of_outputs, blocks),
                         lambda: relations.distinct_pairs(_kinds(basis), of_outputs, blocks))


def _kinds(basis: Typed) -> relations.Kinds:
    graph = basis.graph
    return relations.Kinds(graph.source, graph.target, basis.kind, basis.count, basis.num_inputs, basis.num_outputs)


class PerRelation(Kernel):
    """r_u = sum of x_m over the edges onto the pair u = (n, k), then r_u Theta_k, then y_n = their sum over k; or, if
    there are fewer, pairs (m, k) the other way round. In blocks of outputs, or of inputs, whose sums r_u the backward
    computes again: at most O(pairs (P + Q)) memory, never (N, K, C) or (E, C). The number of pairs depends on values,
    so that compiled programs take another path."""

    name, types, orders = "distinct pairs", (Typed,), ("per_relation",)

    def match(self, problem: Problem) -> Callable[[Any], Typed] | None:
        whole = isinstance(problem.theta, Full | Separable | Grouped | LowRank)
        return materializer(problem.basis) if whole and not torch.compiler.is_compiling() else None

    def cost(self, match: Any, problem: Problem, path: str) -> Cost:
        basis, theta = cast(Typed, problem.basis), problem.theta
        p, q, edges = theta.in_channels, theta.out_channels, problem.sizes.edges(basis.graph.num_edges)
        pairs = min(_expected(edges, problem.outputs * basis.count), _expected(edges, problem.inputs * basis.count))
        once, peak = problem.bytes(1), min(problem.bytes(pairs * (p + q)), 2 * BLOCK_BYTES)
        onto = Cost(2 * edges * p * problem.sizes.batch, once * (problem.inputs + pairs) * p, once * edges * p)
        off = Cost(2 * pairs * q * problem.sizes.batch, once * (problem.outputs + pairs) * q, once * pairs * q)
        theta_bytes = theta.size * p * q * problem.sizes.itemsize
        groups = theta.theta.shape[1] if isinstance(theta, Grouped) and min(theta.theta.shape[2:]) >= NARROW else 1
        middle = Cost(2 * pairs * p * q // groups * problem.sizes.batch, once * pairs * (p + q) + theta_bytes)
        through = problem.x_grad or problem.theta_grad
        middle = middle + Cost(calls=CHANNEL_CALLS * theta.size)
        return (onto.repeated(1 + problem.x_grad + problem.theta_grad) + off.repeated(1 + through)
                + middle.repeated(1 + problem.x_grad + problem.theta_grad) + Cost(peak_bytes=peak))

    def compile(self, match: Callable[[Any], Typed], problem: Problem, path: str) -> Run:
        def run(call: Call) -> Tensor:
            y = _by_pairs(call.x, match(call.basis), call.theta)
            return y if call.bias is None else y + call.bias

        return run


def _by_pairs(x: Tensor, typed: Typed, theta: Weight) -> Tensor:
    count = counts(typed)
    of_outputs = count.outputs <= IN_FAVOR * count.inputs
    lead, batch = x.shape[:-2], math.prod(x.shape[:-2])
    x_MC = x.movedim(-2, 0).reshape(x.shape[-2], batch * x.shape[-1])
    wide = batch * (theta.in_channels + theta.out_channels) * x.element_size()
    entries = typed.num_outputs if of_outputs else typed.num_inputs
    spans = blocks_of(entries, _power_of_two(min(count) * wide / BLOCK_BYTES))
    values = None if typed.values is None else alike("Typed", x, typed.values)
    pairs = distinct_pairs(typed, of_outputs, len(spans))
    blocks = Blocks(pairs, spans, of_outputs, batch, typed.num_outputs, _fixed_weights(typed, of_outputs, pairs))
    y_NC = relational_product(blocks, x_MC, _matrices(theta).to(x.dtype), values)
    return y_NC.reshape(typed.num_outputs, *lead, theta.out_channels).movedim(0, -2)


def _matrices(theta: Weight) -> Tensor:
    """Theta as (K, G, P / G, Q / G), with G = 1 if products with such narrow blocks are slow."""
    if isinstance(theta, Grouped) and min(theta.theta.shape[2:]) >= NARROW:
        return theta.theta
    return theta.dense().unsqueeze(1)


def _fixed_weights(basis: Typed, of_outputs: bool, pairs: dict[int, Pairs]) -> dict[int, Tensor]:
    values = basis.values
    if values is None or len(pairs) == 1 or values.requires_grad:
        return {}
    return basis.derived(("values", of_outputs, len(pairs)), lambda: values_by_block(values, pairs), of_values=True)


def _power_of_two(ratio: float) -> int:
    """The smallest power of two that is at least `ratio`, and at least 1: few numbers of blocks, few layouts."""
    return 1 << math.ceil(math.log2(ratio)) if ratio > 1 else 1


def _expected(edges: int, cells: int) -> int:
    """Return the expected number of `cells` that randomly spread edges occupy."""
    return math.ceil(-cells * math.expm1(-edges / cells)) if cells else 0


class Stacked(Primitives):
    """The sums of all relations side by side, (N, K P), times all Theta_k as one matrix: one node on a new graph, for
    few relations or entries; O(N K P) memory."""

    name, types, before = "relations, one product", (Typed,), ("primitives",)

    def match(self, problem: Problem) -> Callable[[Any], Typed] | None:  # type: ignore[override]
        values, x = cast(Typed, problem.basis).values, problem.x
        whole = isinstance(problem.theta, Full) and not problem.projected and x.dim() == 2
        fixed = values is None or (not values.requires_grad and values.dtype is torch.float32)
        return materializer(problem.basis) if whole and fixed and usable(x, 0) is not None else None

    def cost(self, match: Any, problem: Problem, path: str) -> Cost:
        cost = super().cost(match, problem, path)
        return dataclasses.replace(cost, calls=SPARSE_CALLS) if path == "structure_first" else cost

    def compile(self, match: Callable[[Any], Typed], problem: Problem, path: str) -> Run:
        otherwise = super().compile(match, problem, path)
        if path != "structure_first":
            return otherwise
        return as_one_node(lambda call: _side_by_side(match(call.basis)), otherwise, convolve, True)

    def label(self, path: str) -> str:
        return self.name if path == "structure_first" else super().label(path)


def _side_by_side(typed: Typed) -> Sorted | None:
    """The edges into entry n K + k, output n of relation k, and the values; remembered until one of them changes."""
    def build() -> Adjacency | None:
        graph, values = typed.graph, typed.values
        outputs, core = graph.num_outputs * typed.count, kernels()
        if core is None or max(outputs, graph.num_inputs, graph.num_edges) >= LIMIT:
            return None
        index = torch.stack([graph.source.long(), graph.target.long() * typed.count + typed.kind])
        return build_adjacency(core, index, graph.num_inputs, outputs, square=False,
                               weights=None if values is None else values.contiguous())

    adjacency = typed.derived("side by side", build, of_values=True)
    return None if adjacency is None else (adjacency, unchanged(typed.graph.edge_index))


class MixedFirst(Kernel):
    """sum_k mix_kh A_k is one matrix over all edges: H matrices and H filters instead of K for a separable Theta, and
    one if all relations share Theta. O(E H) memory beside that of the path over those matrices."""

    name, types, orders = "one matrix a filter", (Typed,), ("mixed_first",)

    def match(self, problem: Problem) -> Problem | None:
        """The problem over the mixed matrices, which hold edges and values."""
        if not isinstance(problem.theta, Separable | Shared | Eye):
            return None
        basis, filters = cast(Typed, problem.basis), _filters(problem.theta)
        values = problem.x.new_zeros(()).expand(filters.size, basis.graph.num_edges)
        return problem.part(tree_spec(Sparse(basis.graph, values), itself), filters)

    def cost(self, match: Problem, problem: Problem, path: str) -> Cost:
        basis, edges = cast(Typed, problem.basis), problem.sizes.edges(cast(Typed, problem.basis).graph.num_edges)
        heads = match.theta.size
        numbers = edges * heads * problem.sizes.itemsize
        mixing = Cost(edges * heads, 3 * numbers).repeated(1 + problem.theta_grad)
        channels = min(problem.theta.in_channels, problem.theta.out_channels)
        learned = isinstance(problem.theta, Separable) and problem.theta_grad
        sampled = application(Sparse(basis.graph), problem.sizes, channels).repeated(heads * learned)
        return decide(match).cost + mixing + sampled + Cost(peak_bytes=numbers)

    def compile(self, match: Problem, problem: Problem, path: str) -> Run:
        run, typed_of = decide(match).run, materializer(problem.basis)

        def mixed(call: Call) -> Tensor:
            basis, filters = _mixed(typed_of(call.basis), call.theta), _filters(call.theta)
            return run(Call(call.x, basis, filters, call.bias))

        return mixed

    def parts(self, match: Problem, problem: Problem) -> tuple[Plan, ...]:
        return (decide(match),)


def _filters(theta: Weight) -> Weight:
    if isinstance(theta, Separable):
        return Full.of(theta.filters)
    return Eye.of(1, theta.in_channels) if isinstance(theta, Eye) else Full.of(
        cast(Shared, theta).theta.unsqueeze(0))


def _mixed(basis: Typed, theta: Weight) -> Sparse:
    """The matrices sum_k mix_kh A_k."""
    if not isinstance(theta, Separable):
        return Sparse(basis.graph, basis.values)
    weights_HE = theta.mix.mT.index_select(1, basis.kind)
    return Sparse(basis.graph, weights_HE if basis.values is None else weights_HE * basis.values)


for _kernel in (PerRelation(), Stacked(), MixedFirst()):
    register(_kernel)
