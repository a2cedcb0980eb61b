"""The graph of the nearest neighbors among points."""

from __future__ import annotations

import torch
from torch import Tensor

from structconv.errors import StructureError, text_of
from structconv.shapes import check_positive
from structconv.structures.graph import Graph

__all__ = ["nearest_neighbors"]


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
