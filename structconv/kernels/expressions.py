"""Functions by which kernels of attention read a spec: its dropout, scale and bias, the pairs that exist, and sums of
scores as lists of terms.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from structconv.bases.base import Basis
from structconv.bases.entrywise import Dropped, Masked, Normalized, Sum
from structconv.bases.linear import Scaled
from structconv.bases.positions import Distance, Lookup, bucket
from structconv.bases.scores import Affine, Bilinear
from structconv.bases.tree import Leaf, getter, materializer
from structconv.derived import derived
from structconv.shapes import broadcast, concatenate
from structconv.structures.graph import Graph, listed_edges
from structconv.structures.masks import joined_by_and
from structconv.structures.supports import Causal, DenseMask, EdgeSupport, Padding, Support

__all__ = ["PRODUCTS", "Dropout", "Existing", "Factor", "Summand", "Term", "all_of", "buckets", "by_head", "diagonal",
           "is_by_offset", "is_listed", "pairs_list", "product_and_bias", "products", "softmax_over_inputs", "summands",
           "table_rows", "tables", "terms_of_calls", "undropped", "unmasked", "unscaled"]


class Dropout(NamedTuple):
    """p, and a function that finds the seed in a basis; 0 and none without dropout."""

    p: float = 0.0
    seed: Callable[[Any], Tensor] | None = None

    def seed_of(self, basis: Any) -> Tensor | None:
        """The seed of a call."""
        return None if self.seed is None else self.seed(basis)


def undropped(basis: Basis) -> tuple[Basis, Dropout]:
    """Return the basis below the dropout, if there is one, and the dropout."""
    if not isinstance(basis, Dropped):
        return basis, Dropout()
    seed, stream = getter(basis.seed), basis.stream
    return basis.child, Dropout(basis.p, seed if not stream else lambda basis: seed(basis) + stream)


def softmax_over_inputs(basis: Basis) -> tuple[Normalized, Dropout] | None:
    """Return the softmax over the inputs below the dropout, and the dropout; `None` if there is no such softmax."""
    weights, dropout = undropped(basis)
    if not isinstance(weights, Normalized) or (weights.kind, weights.over) != ("softmax", "inputs"):
        return None
    return weights, dropout


def unmasked(node: Basis) -> Basis:
    """Return the basis below the masks."""
    while isinstance(node, Masked):
        node = node.child
    return node


def unscaled(node: Basis) -> tuple[float, Basis]:
    """The product of the numbers that scale a node, and the node below them and the masks."""
    scale: Any = 1.0
    while isinstance(node, Masked) or (isinstance(node, Scaled) and not isinstance(node.factor, Tensor | Leaf)):
        scale, node = scale * node.factor if isinstance(node, Scaled) else scale, node.child
    return scale, node


def product_and_bias(node: Basis, fits: Callable[[Basis], bool]) -> tuple[Basis, Any]:
    """Return the two terms of a sum, the bias that `fits` last; the node itself if there is no bias."""
    if isinstance(node, Sum):
        for product, bias in ((node.first, node.second), (node.second, node.first)):
            if fits(bias):
                return unmasked(product), bias
    return node, None


# -- which pairs exist --------------------------------------------------------------------------------------------

def is_listed(basis: Basis) -> bool:
    """Return True if the pairs of a basis's support are given by a list."""
    support = basis.support()
    return support is not None and support.edge_bound(basis.num_inputs, basis.num_outputs) is not None


def pairs_list(support: Support | None) -> Callable[[Any, int, int, torch.device], Graph] | None:
    """(basis, M, N, device) -> the list of exactly the pairs that exist; `None` if there is no such list."""
    if support is None or not support.listed:
        return None
    if isinstance(support, EdgeSupport):
        graph_of = getter(support.graph)

        def graph(basis: Any, inputs: int, outputs: int, device: torch.device) -> Graph:
            edges: Graph = graph_of(basis)
            return edges if listed_edges(edges)[0].device == device else edges.to(device)

        return graph
    fill = materializer(support)

    def pairs(basis: Any, inputs: int, outputs: int, device: torch.device) -> Graph:
        graph, exact = fill(basis).listing(inputs, outputs, device)
        assert graph is not None and exact
        return graph

    return pairs


#: Booleans of a mask above which blocks are preferred to one table, and up to which a table is remembered.
MASK_ELEMENTS, REMEMBERED = 1 << 27, 1 << 22


class Existing(NamedTuple):
    """The parts of a support's spec: whether only pairs m <= n exist (`causal`), and functions that find the booleans
    (..., M) of each padding, and the supports of other kinds."""

    causal: bool
    paddings: tuple[Callable[[Any], Tensor], ...]
    others: tuple[Callable[[Any], Support], ...]

    @classmethod
    def of(cls, support: Support | None, num_inputs: int, num_outputs: int) -> Existing | None:
        """The parts of a support; `None` if a table of its pairs would be too large."""
        parts = joined_by_and(support)
        others = [part for part in parts if not isinstance(part, Causal | Padding)]
        entries = math.prod(broadcast(*(part.batch_shape for part in others))) if others else 0
        if not torch.compiler.is_compiling() and entries * num_inputs * num_outputs > MASK_ELEMENTS:
            return None
        return cls(any(isinstance(part, Causal) for part in parts),
                   tuple(getter(part.keep) for part in parts if isinstance(part, Padding)),
                   tuple(materializer(part) for part in others))

    @property
    def masked(self) -> bool:
        """True if pairs are absent for a reason other than their order."""
        return bool(self.paddings or self.others)

    def batch_shape(self, basis: Any) -> tuple[int, ...]:
        """The leading dimensions of all but the order."""
        return broadcast(*[find(basis).shape[:-1] for find in self.paddings],
                         *[find(basis).batch_shape for find in self.others])

    def padding(self, basis: Any) -> Tensor | None:
        """The inputs that exist by all paddings, (..., M)."""
        return all_of([find(basis) for find in self.paddings])

    def table(self, basis: Any, lead: tuple[int, ...], num_inputs: int, num_outputs: int,
              device: torch.device) -> Tensor | None:
        """Booleans (B or 1, 1, M, N) of all but the order, B = prod(lead); padding alone has stride 0 along N."""
        keep = all_of([_table(find(basis), num_inputs, num_outputs, device) for find in self.others])
        padding = self.padding(basis)
        if padding is None:
            return None if keep is None else _flat(keep, lead)
        rows = _flat(padding.unsqueeze(-1), lead)
        return rows.expand(*rows.shape[:-1], num_outputs) if keep is None else _flat(keep, lead) & rows


def all_of(masks: list[Tensor]) -> Tensor | None:
    """True where all masks are; `None` without any."""
    return functools.reduce(operator.and_, masks) if masks else None


def _table(support: Support, num_inputs: int, num_outputs: int, device: torch.device) -> Tensor:
    if isinstance(support, DenseMask):
        return support.keep

    def build() -> Tensor:
        m, n = (torch.arange(size, device=device) for size in (num_inputs, num_outputs))
        return support.contains(m.unsqueeze(-1), n.unsqueeze(0))

    if torch.compiler.is_compiling() or math.prod(support.batch_shape) * num_inputs * num_outputs > REMEMBERED:
        return build()
    return derived(support, ("table", num_inputs, num_outputs, device), build)


def _flat(keep: Tensor, lead: tuple[int, ...]) -> Tensor:
    """(..., M, N) -> (B or 1, 1, M, N)."""
    shape = keep.shape[-2:]
    if keep.dim() == 2:
        return keep[None, None]
    return keep.expand(*lead, *shape).reshape(math.prod(lead), 1, *shape)


# -- sums of scores as lists of terms with factors ---------------------------------------------------------------

#: Types that are products of vectors.
PRODUCTS = (Bilinear, Affine)

Factor = float | Tensor
Term = tuple[Basis, Factor]
#: A term in a spec, and its factors.
Summand = tuple[Basis, tuple[Any, ...]]


def summands(node: Basis, factors: tuple[Any, ...] = ()) -> tuple[Summand, ...] | None:
    """The terms of a sum, with their factors; `None` if one is neither a product nor a relative term."""
    if isinstance(node, Masked):
        return summands(node.child, factors)
    if isinstance(node, Scaled):
        return summands(node.child, (*factors, node.factor))
    if isinstance(node, Sum):
        first, second = summands(node.first, factors), summands(node.second, factors)
        return None if first is None or second is None else first + second
    relative = isinstance(node, Distance) or (isinstance(node, Lookup) and node.kind != "position")
    return ((node, factors),) if relative or isinstance(node, PRODUCTS) else None


def is_by_offset(leaf: Basis) -> bool:
    """Return True for a term that depends only on the offset m - n."""
    return isinstance(leaf, Distance) or (isinstance(leaf, Lookup) and leaf.kind != "position"
                                          and leaf.table.shape[-2] == 1)


def terms_of_calls(terms: Sequence[Summand]) -> Callable[[Any], tuple[Term, ...]]:
    """(basis) -> the terms of a call, each with its factor."""
    fills = [(materializer(leaf), materializer(factors)) for leaf, factors in terms]
    return lambda basis: tuple((fill(basis), math.prod(factors(basis))) for fill, factors in fills)


def products(terms: Sequence[Term]) -> tuple[Tensor, Tensor, float]:
    """(query, key, c) with c <query_kn, key_km> the sum of the terms that are products, concatenated along D."""
    leaves = [(leaf, factor) for leaf, factor in terms if isinstance(leaf, PRODUCTS)]
    first, factor = leaves[0]
    if len(leaves) == 1 and isinstance(first, Bilinear) and not isinstance(factor, Tensor):
        return first.query, first.key, factor
    queries, keys = zip(*(_vectors(leaf, factor) for leaf, factor in leaves), strict=True)
    return concatenate(queries, -1), concatenate(keys, -1), 1.0


def diagonal(terms: Sequence[Term], inputs: int, outputs: int, like: Tensor) -> Tensor | None:
    """Return the sum of the terms that depend only on the offset m - n, (..., K or 1, N + M - 1), by offset."""
    total: Tensor | None = None
    for leaf, factor in terms:
        if isinstance(leaf, Distance):
            offset = torch.arange(1 - outputs, inputs, device=like.device)
            term = -leaf.slope.to(like.dtype).unsqueeze(-1) * offset.abs()
        elif isinstance(leaf, Lookup) and leaf.table.shape[-2] == 1:
            term = leaf.table.squeeze(-2).index_select(-1, buckets(leaf.kind, leaf.clip, inputs, outputs, like.device))
        else:
            continue
        term = term * by_head(factor, 1)
        total = term if total is None else total + term
    return total


def tables(terms: Sequence[tuple[Basis, Any]]) -> list[Lookup]:
    """The relative terms that depend on the output too."""
    return [leaf for leaf, _ in terms if isinstance(leaf, Lookup) and leaf.table.shape[-2] != 1]


def table_rows(terms: Sequence[Term]) -> Tensor | None:
    """Return the sum of the terms by output and bucket, (..., K or 1, N, L)."""
    leaves = tables(terms)
    rows = [leaf.table * by_head(factor, 2) for leaf, factor in terms if leaf in leaves]
    return torch.stack(torch.broadcast_tensors(*rows)).sum(0) if rows else None


def buckets(kind: str, clip: int, inputs: int, outputs: int, device: torch.device) -> Tensor:
    """Return the bucket of each offset, (N + M - 1,)."""
    return bucket(kind, clip, torch.arange(inputs + outputs - 1, device=device),
                  torch.full((), outputs - 1, device=device))


def by_head(factor: Factor, rank: int) -> Factor:
    """Return the factor of each head, with `rank` axes after the heads."""
    return factor.view(-1, *(1,) * rank) if isinstance(factor, Tensor) else factor


def _vectors(leaf: Basis, factor: Factor) -> tuple[Tensor, Tensor]:
    """(..., K, N, D) and (..., K, M, D) whose products are the term."""
    if isinstance(leaf, Bilinear):
        return leaf.query * by_head(factor, 2), leaf.key
    assert isinstance(leaf, Affine)
    source, target = ((t * by_head(factor, 1)).unsqueeze(-1) for t in (leaf.source, leaf.target))
    return torch.cat([torch.ones_like(target), target], -1), torch.cat([source, torch.ones_like(source)], -1)
