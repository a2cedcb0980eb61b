"""Graphs of the nearest neighbors among points, and coarser graphs, whose nodes are clusters."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from structconv.errors import StructureError, text_of
from structconv.shapes import check_positive
from structconv.structures.graph import Graph, rows_to_groups

__all__ = ["Coarsened", "coarsened", "nearest_neighbors"]


def nearest_neighbors(points: Tensor, neighbors: int) -> Graph:
    """Join each point to its nearest neighbors, in both directions, with weights W_mn = exp(-|p_m - p_n|^2 / s^2).

    s is the mean distance of a point to the furthest of its neighbors, as in the published code of Defferrard et al.
    (2016, section 5.1). Ties go to the lower number. The graph is symmetric, so that a point may have more than
    `neighbors` neighbors.

    Args:
        points: (N, L), floating.
        neighbors: the number of neighbors of each point, below N.

    Returns:
        A symmetric graph of N nodes with weights of the points' dtype; edges come in order of their source, then
        target. No loop. O(N^2) memory, once.

    Raises:
        StructureError: `points` has another shape or dtype, or too few points.
    """
    if points.dim() != 2 or not points.is_floating_point():
        raise StructureError("nearest_neighbors", "points must be floating, (N, L)",
                             f"{points.dtype} {text_of(points.shape)}")
    if not check_positive("nearest_neighbors", "neighbors", neighbors) < len(points):
        raise StructureError("nearest_neighbors", f"neighbors must be less than N={len(points)}", neighbors)
    distances = (points.unsqueeze(1) - points).square().sum(-1).fill_diagonal_(torch.inf)
    near = distances.sort(stable=True)
    joined = torch.zeros_like(distances, dtype=torch.bool).scatter_(1, near.indices[:, :neighbors], True)
    index = (joined | joined.T).nonzero().T.contiguous()
    width = near.values[:, neighbors - 1].sqrt().mean()
    return Graph(index, num_nodes=len(points), edge_weight=torch.exp(-distances[index[0], index[1]] / width.square()))


class Coarsened(NamedTuple):
    """A weighted graph without loops, whose nodes are clusters of the nodes of another graph. `clusters` has an edge
    from each of the M nodes of that graph, in order, to its cluster, as a pool of groups takes it."""

    clusters: Graph
    graph: Graph


def coarsened(graph: Graph, levels: int = 1) -> Coarsened:
    """Pair the nodes `levels` times, so that a cluster has at most 2^levels nodes.

    Each level visits the nodes by ascending degree d. A node without a partner takes the neighbor without a partner
    with the greatest cut W_mn (1 / d_m + 1 / d_n), or stays single. The weight between two clusters is the sum of the
    weights between their nodes (Dhillon et al. 2007, Graclus; Defferrard et al. 2016, section 2.3, whose first order
    is random). Ties go to the lower number, so that equal graphs give equal clusters. Weights within a cluster count
    for its degree at the next level.

    Args:
        graph: symmetric; weights are 1 if it has none.
        levels: 0 gives each node a cluster of its own.

    Raises:
        StructureError: inputs are not the outputs, weights are batched, or a weight is not positive.
    """
    if not graph.is_square:
        raise StructureError("coarsened", "the graph must have as many inputs as outputs", repr(graph))
    weight = torch.ones(graph.num_edges, device=graph.edge_index.device) if graph.edge_weight is None else (
        graph.edge_weight.detach())
    if weight.dim() != 1 or not bool((weight > 0).all()):
        raise StructureError("coarsened", "weights must be positive, one for each edge", f"{text_of(weight.shape)}")
    cluster = torch.arange(graph.num_nodes, device=weight.device)
    index, weight = _merged(graph.edge_index.long(), weight)
    for _ in range(levels):
        paired = _paired(index, weight, int(cluster.max()) + 1 if len(cluster) else 0)
        cluster, (index, weight) = paired[cluster], _merged(paired[index], weight)
    count = int(cluster.max()) + 1 if len(cluster) else 0
    keep = index[0] != index[1]
    return Coarsened(rows_to_groups(cluster, count), Graph(index[:, keep], num_nodes=count, edge_weight=weight[keep]))


def _merged(index: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return each pair once, with the sum of its weights."""
    pairs, position = torch.unique(index, dim=1, return_inverse=True)
    return pairs, weight.new_zeros(pairs.shape[1]).index_add(0, position, weight)


def _paired(index: Tensor, weight: Tensor, nodes: int) -> Tensor:
    """Return the number of the pair that each node belongs to; pairs are numbered by their first node."""
    degree = weight.new_zeros(nodes).index_add(0, index[1], weight)
    cut = weight * (1 / degree[index[0]] + 1 / degree[index[1]])
    near: list[list[tuple[float, int]]] = [[] for _ in range(nodes)]
    for m, n, value in zip(*index.tolist(), (-cut).tolist(), strict=True):
        near[m].append((value, n))
    partner = [-1] * nodes
    for m in degree.argsort(stable=True).tolist():
        if partner[m] < 0:
            partner[m] = min(((value, n) for value, n in near[m] if partner[n] < 0 and n != m), default=(0.0, m))[1]
            partner[partner[m]] = m
    first = torch.tensor([min(m, n) for m, n in enumerate(partner)], device=index.device, dtype=torch.int64)
    return torch.unique(first, return_inverse=True)[1]
