"""A training step of the interaction network, against the way in which its paper computes it and PyTorch Geometric."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks import peers
from benchmarks.case import Comparison, Entrant, Size, entrant
from benchmarks.suites.graph_peers import copied, in_torch, layers_least, leaf
from structconv.nn import GraphNetwork
from structconv.structures import Graph

__all__ = ["build_interactions"]

_EDGE, _NODE = 10, 2


class _Concatenated(nn.Module):
    """Concatenate the inputs of an edge and of a body: [o_s, o_r, r] and [sum of effects, o], as in the paper.

    Args:
        ours: whose numbers it has. hidden, effects: its widths.
    """

    def __init__(self, ours: Any, hidden: int, effects: int) -> None:
        super().__init__()
        self.first, self.deeper = nn.Linear(_EDGE + 2 * _NODE, hidden), in_torch(ours.edge.rest)
        self.node, self.rest = nn.Linear(effects + _NODE, hidden), in_torch(ours.node.rest)
        for layer, update in ((self.first, ours.edge.first), (self.node, ours.node.first)):
            copied(layer.weight, torch.cat([part.theta[0] for part in update.weight.weights]).mT)
            copied(layer.bias, update.bias)

    def effect(self, edges: Tensor, senders: Tensor, receivers: Tensor) -> Tensor:
        result: Tensor = self.deeper(self.first(torch.cat([edges, senders, receivers], -1)))
        return result

    def update(self, reached: Tensor, nodes: Tensor) -> Tensor:
        result: Tensor = self.rest(self.node(torch.cat([reached, nodes], -1)))
        return result


class _Plain(nn.Module):
    """Bodies brought to edges by an index, and effects to bodies by a sum over it."""

    def __init__(self, network: _Concatenated, graph: Graph) -> None:
        super().__init__()
        self.network, self.graph = network, graph

    def forward(self, nodes: Tensor, edges: Tensor) -> Tensor:
        source, target = self.graph.source.long(), self.graph.target.long()
        effects = self.network.effect(edges, nodes[:, source], nodes[:, target])
        reached = effects.new_zeros(len(nodes), self.graph.num_nodes, effects.shape[-1]).index_add(1, target, effects)
        return self.network.update(reached, nodes)


def _geometric(network: _Concatenated, graph: Graph, nodes: Tensor, edges: Tensor) -> list[Entrant]:
    """The network by `MessagePassing`."""
    library = peers.geometric()
    if library is None:
        return []

    class Passing(library.MessagePassing):  # type: ignore[name-defined]
        def __init__(self) -> None:
            super().__init__(aggr="add", node_dim=-2)
            self.network = network

        def forward(self, x: Tensor, edge_index: Tensor, edge_attr: Tensor) -> Tensor:
            return network.update(self.propagate(edge_index, x=x, edge_attr=edge_attr), x)

        def message(self, x_i: Tensor, x_j: Tensor, edge_attr: Tensor) -> Tensor:
            return network.effect(edge_attr, x_j, x_i)

    layer = Passing()
    return [entrant("pyg", layer, lambda: layer(nodes, graph.edge_index, edges), nodes, edges)]


def build_interactions(size: Size) -> Comparison:
    """The network of the paper's size on many states of six bodies, all pairs of which act on one another."""
    samples, hidden, effects = size.pick(16, 100), 150, 50
    graph = Graph.complete(6)
    ours: Any = GraphNetwork.interaction(_NODE, _EDGE, edge=(hidden,) * 4 + (effects,), node=(hidden, 2))
    network = _Concatenated(ours, hidden, effects)
    plain = _Plain(network, graph)
    nodes, edges = leaf(samples, 6, _NODE), leaf(samples, graph.num_edges, _EDGE)
    at_edges = _EDGE * hidden + 3 * hidden * hidden + hidden * effects
    at_nodes = (3 * _NODE + effects) * hidden + hidden * _NODE
    torch_peer = entrant("torch", plain, lambda: plain(nodes, edges), nodes, edges)
    return Comparison(ours=entrant("ours", ours, lambda: ours(nodes, graph, edges).nodes, nodes, edges),
                      peers=(torch_peer, *_geometric(copy.deepcopy(network), graph, nodes, edges)),
                      edges=graph.num_edges, least=layers_least(samples * (graph.num_edges * at_edges + 6 * at_nodes)),
                      size=f"{samples} states of 6 bodies, {graph.num_edges} edges, {hidden} "
                      f"hidden units in five layers, {effects} channels of an effect")
