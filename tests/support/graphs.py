"""Graphs as dense matrices."""

import torch
from torch import Tensor

from structconv.structures import Graph


def matrix(graph: Graph) -> Tensor:
    """The weights (M, N) of all pairs in float64, filled edge by edge; repeated edges add up."""
    a = torch.zeros(graph.num_inputs, graph.num_outputs, dtype=torch.float64)
    weights = torch.ones(graph.num_edges) if graph.edge_weight is None else graph.edge_weight
    for m, n, weight in zip(*graph.edge_index.tolist(), weights.double(), strict=True):
        a[m, n] += weight
    return a
