"""Messages along edges whose filters the edges make, on batches of small graphs that are new in each call."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks import peers
from benchmarks.case import Case, Comparison, Entrant, Size, entrant
from benchmarks.graphs import molecules
from benchmarks.suites.entities import build_entities
from benchmarks.suites.graph_peers import copied, leaf
from benchmarks.suites.interactions import build_interactions
from benchmarks.suites.message_passing import build_network
from benchmarks.suites.relational_inference import build_rollouts
from structconv.nn import EdgeConditionedConv
from structconv.structures import Graph, batch

__all__ = ["CASES"]

_ATTRIBUTES, _HIDDEN = 6, 128


def _bonds(size: Size) -> Graph:
    """Molecules whose bonds are of eight kinds."""
    graph = molecules(size.pick(16, 64))
    kinds = torch.randn(8, _ATTRIBUTES)
    return Graph(graph.edge_index, num_nodes=graph.num_nodes, edge_attr=kinds[torch.arange(graph.num_edges) % 8])


def _lengths(size: Size) -> Graph:
    """Molecules whose bonds are all different."""
    graph = molecules(size.pick(16, 64))
    return Graph(graph.edge_index, num_nodes=graph.num_nodes, edge_attr=torch.randn(graph.num_edges, _ATTRIBUTES))


def _distances(size: Size) -> Graph:
    """Molecules of 18 atoms, all pairs of which are joined by an edge that has their distance (Gilmer et al. 2017,
    section 5.1)."""
    graph = batch([Graph.complete(18)] * size.pick(4, 16))
    return Graph(graph.edge_index, num_nodes=graph.num_nodes, edge_attr=torch.randn(graph.num_edges, _ATTRIBUTES))


def _conditioned(make: Callable[[Size], Graph], channels: int, size: Size) -> Comparison:
    graph = make(size)
    ours, x = EdgeConditionedConv(channels, channels, _ATTRIBUTES, _HIDDEN), leaf(graph.num_nodes, channels)

    def run() -> Tensor:
        assert graph.edge_attr is not None
        return ours(x, Graph(graph.edge_index.clone(), num_nodes=graph.num_nodes, edge_attr=graph.edge_attr.clone()))

    return Comparison(ours=entrant("ours", ours, run, x), peers=tuple(_geometric(ours, graph, channels)),
                      edges=graph.num_edges, size=f"{graph.num_nodes:,} nodes, {graph.num_edges:,} edges of "
                      f"{_ATTRIBUTES} attributes, {_HIDDEN} hidden units, {channels} to {channels}")


def _geometric(ours: Any, graph: Graph, channels: int) -> list[Entrant]:
    library = peers.geometric()
    if library is None:
        return []
    matrices, root = (weight.theta for weight in ours.weight.weights)
    network: Any = nn.Sequential(nn.Linear(_ATTRIBUTES, _HIDDEN), nn.ReLU(), nn.Linear(_HIDDEN, channels * channels))
    layer, x = library.NNConv(channels, channels, network), leaf(graph.num_nodes, channels)
    own = ours.mechanism.operands[0].network[0]
    for to, value in ((network[0].weight, own.weight), (network[0].bias, own.bias),
                      (network[2].weight, matrices[1:].flatten(1).mT), (network[2].bias, matrices[0].flatten()),
                      (layer.lin.weight, root[0].mT), (layer.bias, ours.bias)):
        copied(to, value)
    filters = 3.0 * 4 * graph.num_edges * channels * channels
    return [entrant("pyg", layer, partial(layer, x, graph.edge_index, graph.edge_attr), x, needs=filters)]


CASES = (
    *(Case(suite="messages", name=f"edge-conditioned-{name}", build=partial(_conditioned, make, 64))
      for name, make in (("bonds", _bonds), ("lengths", _lengths), ("distances", _distances))),
    Case(suite="messages", name="message-passing-network", build=build_network),
    Case(suite="messages", name="rgcn-entities", build=build_entities),
    Case(suite="messages", name="relational-inference", build=build_rollouts),
    Case(suite="messages", name="interaction-network", build=build_interactions),
)
