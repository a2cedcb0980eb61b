"""Graphs that join rows to their groups."""

from __future__ import annotations

import torch
from torch import Tensor

from structconv.derived import derived
from structconv.structures.graph import Graph

__all__ = ["edges_to_receivers", "rows_to_groups"]


def rows_to_groups(group: Tensor, count: int) -> Graph:
    """Return the graph with an edge from each of M rows to its group: `group` (M,) holds numbers below `count`."""
    rows = torch.arange(group.shape[0], dtype=group.dtype, device=group.device)
    return Graph(torch.stack([rows, group]), num_inputs=group.shape[0], num_outputs=count)


def edges_to_receivers(graph: Graph) -> Graph:
    """From the edges of a graph to the nodes that they reach; remembered."""
    return derived(graph.edge_index, ("edges to receivers", graph.num_outputs), lambda: rows_to_groups(
        graph.target, graph.num_outputs))
