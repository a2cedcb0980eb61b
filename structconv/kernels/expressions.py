"""Functions by which kernels of attention read a spec."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from structconv.bases.base import Basis
from structconv.bases.entrywise import Dropped, Masked, Normalized, Sum
from structconv.bases.linear import Scaled
from structconv.bases.scores import Products
from structconv.bases.tree import Leaf, getter, materializer
from structconv.primitives.functions import finite
from structconv.structures.graph import Graph, listed_edges
from structconv.structures.supports import EdgeSupport, Support

__all__ = ["Dropout", "finite", "listed", "pairs_list", "product_and_bias",
           "scaled_product", "softmax_over_inputs", "undropped", "unmasked"]


class Dropout(NamedTuple):
    """p, and what finds the seed; 0 and none without dropout."""

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


def scaled_product(node: Basis) -> tuple[float, Products | None]:
    """The scale and the scores where the node is a product scaled by numbers, else `None` for the scores."""
    scale = 1.0
    while isinstance(node, Scaled) and not isinstance(node.factor, Tensor | Leaf):
        scale, node = scale * node.factor, unmasked(node.child)
    return scale, node if isinstance(node, Products) else None


def product_and_bias(node: Basis, fits: Callable[[Basis], bool]) -> tuple[Basis, Any]:
    """Return the two terms of a sum, the bias that `fits` last; the node itself if there is no bias."""
    if isinstance(node, Sum):
        for product, bias in ((node.first, node.second), (node.second, node.first)):
            if fits(bias):
                return unmasked(product), bias
    return node, None


# -- which pairs exist --------------------------------------------------------------------------------------------

def listed(basis: Basis) -> bool:
    """Return True if the pairs of a basis's support are given by a list."""
    support = basis.support()
    return support is not None and support.edge_bound(basis.num_inputs, basis.num_outputs) is not None


def pairs_list(support: Support | None) -> Callable[[Any, int, int, torch.device], Graph] | None:
    """(basis, M, N, device) -> the list of exactly the pairs that exist; `None` where there is no such list."""
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
