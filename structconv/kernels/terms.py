"""Sums of scores as lists of terms with factors: products as one query and one key, and other terms by their dependence
only on the offset m - n, or on the output too.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from structconv.bases.base import Basis
from structconv.bases.entrywise import Masked, Sum
from structconv.bases.linear import Scaled
from structconv.bases.positions import Distance, Lookup, bucket
from structconv.bases.scores import Affine, Bilinear
from structconv.bases.tree import materializer
from structconv.shapes import concatenate

__all__ = ["PRODUCTS", "Factor", "Summand", "Term", "buckets", "by_head", "diagonal", "filled", "is_by_offset",
           "products", "summands", "table_rows", "tables"]

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


def filled(terms: Sequence[Summand]) -> Callable[[Any], tuple[Term, ...]]:
    """(basis) -> the terms of a call, each with its factor."""
    fills = [(materializer(leaf), materializer(factors)) for leaf, factors in terms]
    return lambda basis: tuple((fill(basis), math.prod(factors(basis))) for fill, factors in fills)


def products(terms: Sequence[Term]) -> tuple[Tensor, Tensor, float]:
    """(query, key, c) with c <query_kn, key_km> the sum of the terms that are products: one after the other in D."""
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
