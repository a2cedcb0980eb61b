"""Attention along edges by the native operators: affine scores (GAT) and scaled dot products, with or without bias."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from structconv.bases.base import Basis
from structconv.bases.entrywise import Dropped, LeakyReLU, Normalized
from structconv.bases.pairs import Edges
from structconv.bases.pairwise import complete, entries, weights_at
from structconv.bases.scores import Affine, Bilinear, EdgeScore
from structconv.bases.tree import Projected, Term, getter, materializer, tensor
from structconv.kernels.expressions import (
    Dropout,
    pairs_list,
    product_and_bias,
    softmax_over_inputs,
    unmasked,
    unscaled,
)
from structconv.kernels.folding import Folding, folded
from structconv.kernels.orders import Application, Applied
from structconv.planning.cost import Cost
from structconv.planning.counts import fused_application, nonzeros
from structconv.planning.fitted import SPARSE_CALLS
from structconv.planning.kernel import register
from structconv.planning.problem import Call, Problem, Run
from structconv.primitives.edge_attention import (
    affine_attention,
    affine_weights,
    bilinear_attention,
    bilinear_weights,
    packed_attention,
    projected_attention,
)
from structconv.primitives.native.adjacency import Adjacency, adjacency_of, unchanged
from structconv.primitives.native.dispatch import MAX_CHANNELS, NO_DROP, Drop, drop_of, usable
from structconv.primitives.native.indices import Csr
from structconv.primitives.native.layer import attend_affine, attend_bilinear, attend_by_dots
from structconv.primitives.native.node import is_direct
from structconv.primitives.products import product
from structconv.shapes import broadcast
from structconv.structures.graph import Graph, listed_edges
from structconv.structures.supports import EdgeSupport, Support
from structconv.weights import EyeBlocks, HeadBlocks, LowRank

__all__ = ["AffineEdges", "AttentionEdges", "BilinearEdges", "EdgeAttention"]


#: Multiplications of projections up to which torch's product makes them, within a node of the whole layer.
FEW_PRODUCTS = 1 << 26


class AttentionEdges(NamedTuple):
    """The edges of attention, its dropout, and its sizes; `pairs` finds the list of the pairs, `graph` the graph where
    it is a graph's."""

    pairs: Callable[[Any, int, int, torch.device], Graph]
    dropout: Dropout
    size: int
    graph: Callable[[Any], Graph] | None = None

    def folded(self, basis: Any, inputs: int, outputs: int, r: Tensor, lead: tuple[int, ...]) -> Folding:
        """Return the folding of a batch."""
        return folded(self.pairs(basis, inputs, outputs, r.device), lead, self.size, dropout=self.dropout.p)

    def options(self, basis: Any) -> dict[str, Any]:
        """Return the arguments of dropout, which all operators share."""
        return {"dropout": self.dropout.p, "seed": self.dropout.seed_of(basis), "batch_heads": self.size}

    def drop(self, basis: Any) -> Drop:
        """The same as numbers."""
        return drop_of(self.dropout.p, self.dropout.seed_of(basis), self.size) if self.dropout.p else NO_DROP

    def attend(self, node: Callable[..., Tensor], operator: Callable[..., Tensor], edges: SortedEdges, q: Tensor,
               k: Tensor, r: Tensor, *others: Any) -> Tensor:
        """(K, N, C) by a node, of q (K, N, D), k (K, M, D), r and others; `operator` is the same over layouts."""
        v = r.expand(self.size, -1, -1)
        y = node(edges.adjacency, partial(edges.apply, operator), q.transpose(0, 1), k.transpose(0, 1),
                 v.transpose(0, 1), *others)
        return y.transpose(0, 1)

    def sorted_for(self, call: Call, r: Tensor, source: Tensor, target: Tensor, vector: Tensor | None = None
                   ) -> SortedEdges | None:
        """`sorted_edges`, if a kernel can read r (K or 1, M, C) and the operands of scores, (K, M, ...) and
        (K, N, ...); else `None`."""
        size = self.size
        if (r.dim() != 3 or source.dim() != 3 or target.dim() != 3 or source.shape[0] != size
                or target.shape[0] != size or not is_direct(r, source, target, vector)):
            return None
        inputs, outputs = source.shape[1], target.shape[1]
        return sorted_edges(self.pairs(call.basis, inputs, outputs, r.device), inputs, outputs)


class SortedEdges(NamedTuple):
    """A graph, its edges as a kernel sorts them for one call, and a function that raises an error if they change."""

    graph: Graph
    adjacency: Adjacency
    check: Callable[[], None]

    def layouts(self) -> tuple[Csr, Csr]:
        """Both layouts, if the edges did not change."""
        self.check()
        return self.graph.layouts()

    def apply(self, operator: Callable[..., Tensor], *tensors: Any) -> Tensor:
        """An operator over both layouts, of these tensors."""
        return operator(*self.layouts(), *tensors)


def sorted_edges(graph: Graph, inputs: int, outputs: int, numbered: bool = False) -> SortedEdges | None:
    """Sort the edges of a graph with these entries for a kernel; `None` if no kernel can read them. `numbered`: values
    of edges are read, too."""
    index, loops = listed_edges(graph)
    if graph.num_inputs != inputs or graph.num_outputs != outputs:
        return None
    adjacency = adjacency_of(index, inputs, outputs, loops=loops, numbered=numbered)
    return None if adjacency is None else SortedEdges(graph, adjacency, unchanged(index))


class AffineEdges(NamedTuple):
    """softmax over edges of leaky_relu(source_m + target_n)."""

    edges: AttentionEdges
    source: Callable[[Any], Any]
    target: Callable[[Any], Any]
    slope: float

    def apply(self, r: Tensor, call: Call) -> Tensor:
        """A_k^T r_k; if the terms of the scores are linear in r itself, the kernel computes them too."""
        source, target = self.source(call.basis), self.target(call.basis)
        if type(source) is Term and type(target) is Term and source.x is r:
            return self._projected(source, target, None, call)
        return self._attend(tensor(source), tensor(target), r, call)

    def biased(self, r: Tensor, bias: Tensor, call: Call) -> Tensor:
        """Return the result plus b_k (K, C); kernels of 32 bits and more add it themselves."""
        source, target = self.source(call.basis), self.target(call.basis)
        passing = type(source) is Term and type(target) is Term and source.x is r
        if passing and r.dtype in (torch.float32, torch.float64):
            return self._projected(source, target, bias, call)
        return self.apply(r, call) + bias.unsqueeze(-2)

    def weights(self, call: Call) -> Tensor:
        """(..., K, E) in the order of the edges."""
        source, target = tensor(self.source(call.basis)), tensor(self.target(call.basis))
        lead = broadcast(source.shape[:-2], target.shape[:-2])
        batch = self.edges.folded(call.basis, source.shape[-1], target.shape[-1], source, lead)
        entries = affine_weights(*batch.layouts, *_terms(source, target, batch), slope=self.slope,
                               **self.edges.options(call.basis))
        return batch.weights(entries).to(call.x.dtype)

    def _attend(self, source: Tensor, target: Tensor, r: Tensor, call: Call) -> Tensor:
        lead = broadcast(r.shape[:-3], source.shape[:-2], target.shape[:-2])
        batch = self.edges.folded(call.basis, source.shape[-1], target.shape[-1], r, lead)
        y = affine_attention(*batch.layouts, *_terms(source, target, batch), batch.rows(r), slope=self.slope,
                             **self.edges.options(call.basis))
        return batch.heads(y)

    def _projected(self, source: Term, target: Term, bias: Tensor | None, call: Call) -> Tensor:
        x, z, edges = source.x, target.x, self.edges
        lead = tuple(x.shape[:-3]) if z is x else broadcast(x.shape[:-3], z.shape[:-3])
        batch = edges.folded(call.basis, x.shape[-2], z.shape[-2], x, lead)
        y = projected_attention(*batch.layouts, batch.rows(x), batch.by_head(source.vector),
                                batch.by_head(target.vector), None if z is x else batch.rows(z),
                                None if bias is None else batch.by_head(bias), slope=self.slope,
                                **edges.options(call.basis))
        return batch.heads(y)

    def as_one_node(self, otherwise: Run, graph_of: Callable[[Any], Graph]) -> Run:
        """The heads side by side, (N, K C) of x (M, P), where a kernel that sorts the edges itself can read the tensors
        and the scores are of x Theta_k; else `otherwise`."""
        slope, size, (p, seed) = self.slope, self.edges.size, self.edges.dropout

        def run(call: Call) -> Tensor:
            basis, r, bias = call.basis, call.projected, call.bias
            source, target = self.source(basis), self.target(basis)
            if type(source) is not Term or type(target) is not Term or not (source.x is target.x is r):
                return otherwise(call)
            x, of_source, of_target = r.transpose(0, 1), source.vector, target.vector
            rows, heads = x.shape[0], x.shape[1:]
            if heads[0] != size or of_source.shape != heads or of_target.shape != heads or not is_direct(
                    x, of_source, of_target, bias):
                return otherwise(call)
            edges = sorted_edges(graph_of(basis), rows, rows)
            if edges is None:
                return otherwise(call)
            graph, adjacency, check = edges
            number = seed if seed is None else seed(basis)

            def composed(x: Tensor, of_source: Tensor, of_target: Tensor, bias: Tensor | None) -> Tensor:
                check()
                return projected_attention(*graph.layouts(), x, of_source, of_target, None, bias, slope=slope,
                                           dropout=p, seed=number, batch_heads=size)

            by_head = bias if bias is None else bias.view(heads)
            y = attend_affine(adjacency, composed, x, of_source, of_target, by_head, slope,
                              *(drop_of(p, number, size) if p else NO_DROP))
            return y.flatten(1)

        return run


def _terms(source: Tensor, target: Tensor, batch: Folding) -> tuple[Tensor, Tensor]:
    """(..., K, M) and (..., K, N) as rows of the batch."""
    return batch.rows(source.unsqueeze(-1)).squeeze(-1), batch.rows(target.unsqueeze(-1)).squeeze(-1)


class BilinearEdges(NamedTuple):
    """softmax over edges of scale <query_n, key_m> + bias_e."""

    edges: AttentionEdges
    query: Callable[[Any], Any]
    key: Callable[[Any], Any]
    bias: Callable[[Any], Tensor] | None
    scale: float

    def apply(self, r: Tensor, call: Call) -> Tensor:
        """A_k^T r_k."""
        query, key = tensor(self.query(call.basis)), tensor(self.key(call.basis))
        edges, scale = self.edges, self.scale
        if self.bias is None and (edges_of_call := edges.sorted_for(call, r, key, query)) is not None:
            operator = partial(bilinear_attention, scale=scale, **edges.options(call.basis))
            return edges.attend(attend_bilinear, operator, edges_of_call, query, key, r, None, scale,
                                *edges.drop(call.basis))
        lead = broadcast(r.shape[:-3], query.shape[:-3], key.shape[:-3])
        batch = edges.folded(call.basis, key.shape[-2], query.shape[-2], r, lead)
        q, k, v = map(batch.rows, (query, key, r))
        y = bilinear_attention(*batch.layouts, q, k, v, self._bias(batch, call), scale=scale,
                               **edges.options(call.basis))
        return batch.heads(y)

    def weights(self, call: Call) -> Tensor:
        """(..., K, E) in the order of the edges."""
        query, key = tensor(self.query(call.basis)), tensor(self.key(call.basis))
        batch = self.edges.folded(call.basis, key.shape[-2], query.shape[-2], query,
                                  broadcast(query.shape[:-3], key.shape[:-3]))
        entries = bilinear_weights(*batch.layouts, batch.rows(query), batch.rows(key), self._bias(batch, call),
                                 scale=self.scale, **self.edges.options(call.basis))
        return batch.weights(entries).to(call.x.dtype)

    def in_one_product(self, otherwise: Run, problem: Problem) -> Run:
        """`between` with queries, keys and values in one product, where all are projections of one x (M, P)."""
        if not isinstance(problem.theta, HeadBlocks | LowRank) or problem.projected:
            return otherwise
        whole = self._is_whole(problem)

        def run(call: Call) -> Tensor:
            query, key, x = self.query(call.basis), self.key(call.basis), call.x
            values = call.theta.inner  # type: ignore[attr-defined]
            ready = type(query) is Projected and type(key) is Projected and key.x is x
            if not ready or x.dim() > 2 or query.x.dim() > 2 or not key.heads == values.shape[0] == self.edges.size:
                return otherwise(call)
            square = query.x is x
            if square and whole and (y := self._as_one_node(query, key, call)) is not None:
                return y
            parts = [(query.weight.mT, query.bias)] if square else []
            parts += [(key.weight.mT, key.bias), (values.transpose(0, 1).flatten(1), None)]
            table, q = _one_product(x, parts), None if square else query.tensor().transpose(0, 1)
            outputs = query.x.shape[-2]
            batch = self.edges.folded(call.basis, x.shape[-2], outputs, x, ())
            y = packed_attention(*batch.layouts, table, q, self._bias(batch, call), heads=self.edges.size,
                                 depth=key.weight.shape[0] // key.heads, scale=self.scale, dropout=self.edges.dropout.p,
                                 seed=self.edges.dropout.seed_of(call.basis))
            return call.theta.join(y.transpose(0, 1), call.bias)

        return run

    def _is_whole(self, problem: Problem) -> bool:
        """Return True if one node may compute the values and the scores too."""
        return isinstance(problem.theta, HeadBlocks) and self.bias is None

    def is_one_node(self, problem: Problem) -> bool:
        """Return True if calls of such a problem may be one node, if their queries and keys are projections of x."""
        x = problem.x
        few = x.dim() == 2 and not problem.sizes.nominal and x.numel() * 3 * problem.theta.out_channels <= FEW_PRODUCTS
        return few and self._is_whole(problem) and not problem.projected and usable(x, 0) is not None

    def _as_one_node(self, query: Projected, key: Projected, call: Call) -> Tensor | None:
        """`attend_by_dots` of few x (M, P) where a kernel can read the tensors of the call; else `None`."""
        theta: Any = call.theta
        x, bias = call.x, call.bias
        value, nodes = theta.theta, x.shape[0]
        width = 2 * query.weight.shape[0] + value.shape[0] * value.shape[2]
        fitting = query.weight.shape == key.weight.shape and query.heads == key.heads and width <= MAX_CHANNELS
        tensors = x, query.weight, query.bias, key.weight, key.bias, value, None, bias
        if not fitting or nodes * x.shape[1] * width > FEW_PRODUCTS or not is_direct(*tensors):
            return None
        edges = sorted_edges(self.edges.pairs(call.basis, nodes, nodes, x.device), nodes, nodes)
        return None if edges is None else attend_by_dots(
            edges.adjacency, edges.layouts, *tensors, value.shape[0], self.scale, self.edges.drop(call.basis))

    def _bias(self, batch: Folding, call: Call) -> Tensor | None:
        return None if self.bias is None else batch.by_edge(self.bias(call.basis))


class ScoredEdges(NamedTuple):
    """softmax over edges of any scores, which are evaluated at the edges first."""

    edges: AttentionEdges
    scores: Callable[[Any], Any]

    def apply(self, r: Tensor, call: Call) -> Tensor:
        """A_k^T r_k."""
        basis, edges = self.scores(call.basis), self.edges
        graph = edges.pairs(call.basis, basis.num_inputs, basis.num_outputs, call.x.device)
        scores = entries(basis, Edges(graph, call.x.dtype))
        size, options = edges.size, edges.options(call.basis)
        direct = r.dim() == 3 and scores.dim() == 2 and scores.shape[0] == size and is_direct(r, scores)
        edges_of_call = sorted_edges(graph, r.shape[1], graph.num_outputs, numbered=True) if direct else None
        none = r.new_zeros(())
        if edges_of_call is not None:
            q, k = none.expand(size, graph.num_outputs, 1), none.expand(size, r.shape[1], 1)
            return edges.attend(attend_bilinear, partial(bilinear_attention, **options), edges_of_call, q, k, r, scores,
                                1.0, *edges.drop(call.basis))
        batch = edges.folded(call.basis, graph.num_inputs, graph.num_outputs, r,
                             broadcast(r.shape[:-3], scores.shape[:-2]))
        q, k = (none.expand(*r.shape[:-3], size, rows, 1) for rows in (graph.num_outputs, graph.num_inputs))
        y = bilinear_attention(*batch.layouts, batch.rows(q), batch.rows(k), batch.rows(r),
                               batch.by_edge(scores.to(r.dtype)), **options)
        return batch.heads(y)

    def weights(self, call: Call) -> Tensor:
        """(..., K, E) in the order of the edges."""
        return weights_at(call.materialized(), call.x.dtype)


def _scored(node: Basis, edges: AttentionEdges, support: Support | None) -> ScoredEdges | None:
    """The match of scores in which nothing is normalized, and nothing masked but by the support."""
    own = node.support()
    same = own is None or (isinstance(own, EdgeSupport) and isinstance(support, EdgeSupport)
                           and own.graph.edge_index is support.graph.edge_index)
    return ScoredEdges(edges, materializer(node)) if same and edges.graph is not None and not complete(node) else None


def _one_product(x: Tensor, parts: Sequence[tuple[Tensor, Tensor | None]]) -> Tensor:
    """x w + b for every (w, b), concatenated along the channels; b is zero where it is None."""
    bias = None
    if any(b is not None for _, b in parts):
        bias = torch.cat([w.new_zeros(w.shape[1]) if b is None else b for w, b in parts])
    return product(x, torch.cat([w for w, _ in parts], 1), bias)


Matched = AffineEdges | BilinearEdges | ScoredEdges


class EdgeAttention(Applied):
    """The native kernels along a list of edges."""

    name, types = "structconv.edge_attention", (Normalized, Dropped)

    def match(self, problem: Problem) -> Matched | None:
        parts = softmax_over_inputs(problem.basis)
        if parts is None:
            return None
        weights, dropout = parts
        support = weights.child.support()
        pairs = pairs_list(support)
        if pairs is None:
            return None
        edges = AttentionEdges(pairs, dropout, weights.size,
                               getter(support.graph) if isinstance(support, EdgeSupport) else None)
        node = unmasked(weights.child)
        slope, inner = (node.negative_slope, unmasked(node.child)) if isinstance(node, LeakyReLU) else (1.0, node)
        if isinstance(inner, Affine) and slope >= 0:
            return AffineEdges(edges, getter(inner.source), getter(inner.target), slope)
        bilinear = None if isinstance(node, LeakyReLU) else _bilinear(node, edges, support)
        return _scored(node, edges, support) if bilinear is None else bilinear

    def application_cost(self, match: Any, problem: Problem, channels: int, mode: str) -> Cost:
        fused = fused_application(problem.basis, problem.sizes, channels, mode)
        if not isinstance(match, ScoredEdges):
            return fused
        numbers = match.edges.size * (nonzeros(problem.basis, problem.sizes) or 0)
        return fused + Cost(bytes=problem.bytes(4 * numbers), calls=SPARSE_CALLS)

    def cost(self, match: Matched, problem: Problem, path: str) -> Cost:
        cost = super().cost(match, problem, path)
        if path != "between" or not isinstance(match, BilinearEdges) or not match.is_one_node(problem):
            return cost
        return dataclasses.replace(cost, calls=min(cost.calls, SPARSE_CALLS))  # products with Theta are part of it

    def application(self, match: Matched, problem: Problem) -> Application:
        return Application(match.apply, biased=match.biased if isinstance(match, AffineEdges) else None,
                           weights=match.weights)

    def compile(self, match: Matched, problem: Problem, path: str) -> Run:
        run = super().compile(match, problem, path)
        if path != "between":
            return run
        if isinstance(match, BilinearEdges):
            return match.in_one_product(run, problem)
        graph = match.edges.graph
        if not isinstance(match, AffineEdges) or graph is None or problem.x.dim() != 2:
            return run
        whole = isinstance(problem.theta, HeadBlocks | EyeBlocks) and problem.projected and problem.relative is None
        return match.as_one_node(run, graph) if whole else run


def _bilinear(node: Basis, edges: AttentionEdges, support: Support | None) -> BilinearEdges | None:
    """The match of scaled dot products; a bias must be over the edges of the support."""
    own = support.graph.edge_index if isinstance(support, EdgeSupport) else None
    product, bias = product_and_bias(node, lambda part: isinstance(part, EdgeScore) and part.graph.edge_index is own)
    scale, scores = unscaled(product)
    if not isinstance(scores, Bilinear):
        return None
    return BilinearEdges(edges, getter(scores.query), getter(scores.key), None if bias is None else getter(bias.values),
                         scale)


register(EdgeAttention())
