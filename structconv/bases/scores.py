"""Scores of pairs: the leaves of a content-based expression, as values.

Each holds per-entry tensors (queries, keys, terms, tables) and says how an entry at (m, n) follows from them. What
produced the tensors, a module with parameters, is of no concern here; kernels match on these types.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from structconv.bases.attention import Pairwise, nodes
from structconv.bases.base import Basis, value
from structconv.bases.pairs import Edges, Pairs
from structconv.bases.sizes import OnGraph, QueryKey, Sized, SourceTarget
from structconv.primitives.products import product, split_heads
from structconv.primitives.segments import segment_sum
from structconv.shapes import broadcast
from structconv.structures.graph import Graph
from structconv.structures.supports import EdgeSupport, Support


def _guarded(pairs: Pairs, score: Callable[[Tensor, Tensor], Tensor], source: Tensor, target: Tensor) -> Tensor:
    """score(source, target) of (..., K, M, D) and (..., K, N, D'), NaN at the pairs of an entry that is not finite.

    No gradient passes through such a pair, so that a mask above it keeps the NaN from all other entries.
    """
    known = source.isfinite().all(-1), target.isfinite().all(-1)
    if torch.compiler.is_compiling() or (known[0].all() and known[1].all()):
        return score(source, target)
    zeroed = [t.masked_fill(~finite.unsqueeze(-1), 0) for t, finite in zip((source, target), known, strict=True)]
    return score(*zeroed).masked_fill(~(pairs.source(known[0]) & pairs.target(known[1])), torch.nan)


class Score(Pairwise):
    """A leaf; a softmax over it means something."""

    @property
    def has_scores(self) -> bool:
        return True


class Products(Score):
    """a_kmn = <query_kn, key_km>, with query (..., K, N, D) and key (..., K, M, D)."""

    query: Tensor
    key: Tensor

    @property
    def depth(self) -> int:
        """D, by whose square root `scaled()` divides."""
        return self.query.shape[-1]

    def evaluate(self, pairs: Pairs) -> Tensor:
        return _guarded(pairs, lambda key, query: pairs.bilinear(query, key), self.key, self.query)


@value
class Bilinear(QueryKey, Products):
    """a_kmn = <query_kn, key_km>, with query (..., K, N, D) and key (..., K, M, D)."""

    query: Tensor
    key: Tensor


@value
class ProjectedBilinear(Products):
    """a_kmn = <query_kn, key_km> of query = z of_query^T + query_bias and key = x of_key^T + key_bias, by heads.

    x (..., M, P), z (..., N, P'), of_query (K D, P'), of_key (K D, P), biases (K D) or None, heads K. A kernel that is
    applied to projections of this very x makes them all in one product; for any other, `computed` makes query and key.
    """

    x: Tensor
    z: Tensor
    of_query: Tensor
    of_key: Tensor
    query_bias: Tensor | None
    key_bias: Tensor | None
    heads: int

    @property
    def query(self) -> Tensor:  # type: ignore[override]
        """(..., K, N, D), made at every call."""
        return split_heads(product(self.z, self.of_query.mT, self.query_bias), self.heads, self.depth)

    @property
    def key(self) -> Tensor:  # type: ignore[override]
        """(..., K, M, D), made at every call."""
        return split_heads(product(self.x, self.of_key.mT, self.key_bias), self.heads, self.depth)

    @property
    def depth(self) -> int:
        return self.of_key.shape[0] // self.heads

    @property
    def size(self) -> int:
        return self.heads

    @property
    def num_inputs(self) -> int:
        return self.x.shape[-2]

    @property
    def num_outputs(self) -> int:
        return self.z.shape[-2]

    @property
    def batch_shape(self) -> tuple[int, ...]:
        return tuple(torch.broadcast_shapes(self.x.shape[:-2], self.z.shape[:-2]))


def computed(basis: Basis) -> Basis:
    """The expression with every `ProjectedBilinear` as the `Bilinear` that it stands for; itself without any."""
    if isinstance(basis, ProjectedBilinear):
        return Bilinear(basis.query, basis.key)
    if not any(isinstance(node, ProjectedBilinear) for node in nodes(basis)):
        return basis
    held: Any = basis
    fields = {field.name: getattr(basis, field.name) for field in dataclasses.fields(held)}
    return dataclasses.replace(held, **{name: _computed(field) for name, field in fields.items()})


def _computed(field: Any) -> Any:
    if isinstance(field, tuple):
        return tuple(_computed(part) for part in field)
    return computed(field) if isinstance(field, Basis) else field


class Terms(Score):
    """a_kmn = source_km + target_kn, with source (..., K, M) and target (..., K, N)."""

    source: Tensor
    target: Tensor

    def evaluate(self, pairs: Pairs) -> Tensor:
        return pairs.source(self.source) + pairs.target(self.target)


@value
class Affine(Terms):
    """a_kmn = source_km + target_kn, with source (..., K, M) and target (..., K, N)."""

    source: Tensor
    target: Tensor

    @property
    def size(self) -> int:
        return max(self.source.shape[-2], self.target.shape[-2])

    @property
    def num_inputs(self) -> int:
        return self.source.shape[-1]

    @property
    def num_outputs(self) -> int:
        return self.target.shape[-1]

    @property
    def batch_shape(self) -> tuple[int, ...]:
        return broadcast(self.source.shape[:-2], self.target.shape[:-2])


@value
class ProjectedAffine(Terms):
    """a_kmn = <of_source_k, x_km> + <of_target_k, z_kn>, with x (..., K, M, C), z (..., K, N, C), vectors (K, C).

    A kernel that is applied to this very x computes the terms, and their gradients, as it passes over the rows.
    """

    x: Tensor
    z: Tensor
    of_source: Tensor
    of_target: Tensor

    @property
    def source(self) -> Tensor:  # type: ignore[override]
        """(..., K, M)."""
        return (self.x @ self.of_source.unsqueeze(-1)).squeeze(-1)

    @property
    def target(self) -> Tensor:  # type: ignore[override]
        """(..., K, N)."""
        return (self.z @ self.of_target.unsqueeze(-1)).squeeze(-1)

    @property
    def size(self) -> int:
        return self.of_source.shape[0]

    @property
    def num_inputs(self) -> int:
        return self.x.shape[-2]

    @property
    def num_outputs(self) -> int:
        return self.z.shape[-2]

    @property
    def batch_shape(self) -> tuple[int, ...]:
        return broadcast(self.x.shape[:-3], self.z.shape[:-3])


@value
class Additive(SourceTarget, Score):
    """a_kmn = <vector_k, activation(target_kn + source_km)>, D channels (Bahdanau; GATv2 with a leaky ReLU).

    `source` (..., K, M, D), `target` (..., K, N, D), `vector` (K, D).
    """

    source: Tensor
    target: Tensor
    vector: Tensor
    activation: Callable[[Tensor], Tensor] = torch.tanh

    @property
    def size(self) -> int:
        return self.vector.shape[0]

    @property
    def batch_shape(self) -> tuple[int, ...]:
        return broadcast(self.source.shape[:-3], self.target.shape[:-3])

    @property
    def width(self) -> int:
        return self.vector.shape[-1]

    def evaluate(self, pairs: Pairs) -> Tensor:
        shape = (self.size, self.width, 1) if isinstance(pairs, Edges) else (self.size, 1, self.width, 1)

        def score(source: Tensor, target: Tensor, vector: Tensor) -> Tensor:
            return (self.activation(source + target) @ vector.view(shape)).squeeze(-1)

        return _guarded(pairs, lambda source, target: pairs.combine(score, source, target, [self.vector]),
                        self.source, self.target)


@value
class PairFunction(SourceTarget, Score):
    """a_kmn = fn(source_m, target_n)_k for any function of a pair, with source (..., M, P) and target (..., N, P').

    `fn(parameters, source, target)` maps (..., P) and (..., P'), broadcast against each other, to (..., K); it takes
    its parameters as arguments, so that a recomputed block sends gradients to them.
    """

    fn: Callable[..., Tensor]
    parameters: tuple[Tensor, ...]
    source: Tensor
    target: Tensor
    heads: int
    hidden: int

    @property
    def size(self) -> int:
        return self.heads

    @property
    def batch_shape(self) -> tuple[int, ...]:
        return broadcast(self.source.shape[:-2], self.target.shape[:-2])

    @property
    def width(self) -> int:
        return self.hidden

    def evaluate(self, pairs: Pairs) -> Tensor:
        def score(source: Tensor, target: Tensor, *parameters: Tensor) -> Tensor:
            a = self.fn(parameters, source, target)
            return a.movedim(-1, -2 if isinstance(pairs, Edges) else -3)

        def combine(source: Tensor, target: Tensor) -> Tensor:
            return pairs.combine(score, source.squeeze(-3), target.squeeze(-3), self.parameters)

        return _guarded(pairs, combine, self.source.unsqueeze(-3), self.target.unsqueeze(-3))


@value
class EdgeScore(OnGraph, Score):
    """a_kmn = values_ke at the edge e: m -> n, (..., K, E); pairs without an edge are absent."""

    graph: Graph
    values: Tensor

    @property
    def size(self) -> int:
        return self.values.shape[-2]

    @property
    def batch_shape(self) -> tuple[int, ...]:
        return tuple(self.values.shape[:-2])

    def support(self) -> Support:
        return EdgeSupport(self.graph)

    def evaluate(self, pairs: Pairs) -> Tensor:
        if isinstance(pairs, Edges) and _same_edges(pairs.graph.edge_index, self.graph.edge_index):
            return self.values
        key = self.graph.source.long() * self.num_outputs + self.graph.target.long()
        flat = segment_sum(self.values, key, self.num_inputs * self.num_outputs)
        return pairs.pick(flat.unflatten(-1, (self.num_inputs, self.num_outputs)))


def _same_edges(first: Tensor, second: Tensor) -> bool:
    if first is second or torch.compiler.is_compiling():
        return first is second
    return first.shape == second.shape and torch.equal(first, second)


@value
class Uniform(Sized, Score):
    """a_mn = 1 at every pair: the window and the normalisation do the rest."""

    like: Tensor
    inputs: int
    outputs: int

    @property
    def size(self) -> int:
        return 1

    def evaluate(self, pairs: Pairs) -> Tensor:
        shape = torch.broadcast_shapes(pairs.source_index().shape, pairs.target_index().shape)
        return torch.ones((1, *shape), dtype=pairs.dtype, device=pairs.device)
