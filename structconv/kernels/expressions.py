"""Functions by which kernels of attention read a spec."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from structconv.bases.base import Basis
from structconv.bases.entrywise import Dropped, Masked, Normalized, Sum
from structconv.bases.linear import Scaled
from structconv.bases.tree import Leaf, getter, materializer
from structconv.primitives.functions import finite
from structconv.structures.graph import Graph, listed_edges
from structconv.structures.supports import EdgeSupport, Support

__all__ = ["Dropout", "finite", "listed", "pairs_list", "product_and_bias",
           "softmax_over_inputs", "undropped", "unmasked", "unscaled"]


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
