"""Graphs from rows to the groups that they are of."""

from __future__ import annotations

import torch
from torch import Tensor

from structconv.memo import derived
from structconv.structures.graph import Graph

__all__ = ["edges_to_receivers", "rows_to_groups"]


def rows_to_groups(group: Tensor, count: int) -> Graph:
    """From M rows to `count` groups, an edge for each row in order; group (M,) says of which group a row is."""
    rows = torch.arange(group.shape[0], dtype=group.dtype, device=group.device)
    return Graph(torch.stack([rows, group]), num_inputs=group.shape[0], num_outputs=count)


def edges_to_receivers(graph: Graph) -> Graph:
    """From the edges of a graph to the nodes that they reach; remembered."""
    return derived(graph.edge_index, ("edges to receivers", graph.num_outputs), lambda: rows_to_groups(
        graph.target, graph.num_outputs))
