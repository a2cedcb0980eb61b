"""Messages along edges whose filters the edges make, on batches of small graphs that are new in each call."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from structconv.bench import peers
from structconv.bench.case import Case, Comparison, Entrant, Size, entrant
from structconv.bench.graphs import molecules
from structconv.bench.suites.graph_peers import copied, leaf
from structconv.models.molecules import MessagePassing
from structconv.nn import EdgeConditionedConv
from structconv.structures import Graph, Samples, batch, membership

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
    own = ours.mechanism.parts()[0].network[0]
    for to, value in ((network[0].weight, own.weight), (network[0].bias, own.bias),
                      (network[2].weight, matrices[1:].flatten(1).mT), (network[2].bias, matrices[0].flatten()),
                      (layer.lin.weight, root[0].mT), (layer.bias, ours.bias)):
        copied(to, value)
    filters = 3.0 * 4 * graph.num_edges * channels * channels
    return [entrant("pyg", layer, partial(layer, x, graph.edge_index, graph.edge_attr), x, needs=filters)]


def _network(size: Size) -> Comparison:
    """The message passing network of the recipe `molecules`, on batches that are new in each call."""
    atoms, channels, count = 35, 64, size.pick(8, 32)
    parts = [[molecules(1, seed) for seed in range(count * number, count * number + count)] for number in range(4)]
    graphs, kinds = [batch(part) for part in parts], torch.randn(8, _ATTRIBUTES)
    attributes = [kinds[torch.arange(graph.num_edges) % 8] for graph in graphs]
    ours = MessagePassing(atoms, _ATTRIBUTES, channels=channels, edge_hidden=channels)
    xs = [leaf(graph.num_nodes, atoms) for graph in graphs]

    def run() -> Tensor:
        return torch.cat([ours(x, Graph(graph.edge_index.clone(), num_nodes=graph.num_nodes, edge_attr=kind.clone(),
                                        samples=Samples([one.num_nodes for one in part])))
                          for x, graph, kind, part in zip(xs, graphs, attributes, parts, strict=True)])

    found = []
    if (library := peers.geometric()) is not None:
        peer = _GeometricNetwork(library, ours, channels)
        own = [leaf(graph.num_nodes, atoms) for graph in graphs]
        members = [membership(part) for part in parts]

        def run_peer() -> Tensor:
            return torch.cat([peer(x, graph.edge_index.clone(), kind.clone(), member)
                              for x, graph, kind, member in zip(own, graphs, attributes, members, strict=True)])

        found.append(entrant("pyg", peer, run_peer, *own))
    nodes, edges = sum(graph.num_nodes for graph in graphs), sum(graph.num_edges for graph in graphs)
    return Comparison(ours=entrant("ours", ours, run, *xs), peers=tuple(found), edges=edges,
                      size=f"4 batches of {count} graphs, {nodes:,} nodes, {edges:,} edges of {_ATTRIBUTES} "
                           f"attributes, {channels} channels and hidden units, 3 messages, set2set")


class _GeometricNetwork(nn.Module):
    """The same of PyTorch Geometric's layers, with our numbers."""

    def __init__(self, library: Any, ours: MessagePassing, channels: int) -> None:
        super().__init__()
        conv: Any = ours.messages
        gates: Any = ours.pool.cell.gates
        first, theta = conv.mechanism.network[0], conv.weight().dense()
        network: Any = nn.Sequential(nn.Linear(first.in_features, channels), nn.ReLU(),
                                     nn.Linear(channels, channels**2))
        self.messages = library.NNConv(channels, channels, network, root_weight=False)  # draws the network's numbers
        copied(network[0].weight, first.weight)
        copied(network[0].bias, first.bias)
        copied(network[2].weight, theta[1:].flatten(1).mT)
        copied(network[2].bias, theta[0].flatten())
        copied(self.messages.bias, conv.bias)
        self.pool = library.Set2Set(channels, ours.pool.steps)
        of_x, of_h = gates.weight().dense()[0].split((2 * channels, channels))
        copied(self.pool.lstm.weight_ih_l0, of_x.mT)
        copied(self.pool.lstm.weight_hh_l0, of_h.mT)
        copied(self.pool.lstm.bias_ih_l0, gates.bias, self.pool.lstm.bias_hh_l0)
        self.steps = ours.message_steps
        self.embed, self.update, self.join, self.predict = map(copy.deepcopy, (ours.embed, ours.update, ours.join,
                                                                               ours.predict))

    def forward(self, x: Tensor, edge_index: Tensor, edge_attr: Tensor, member: Tensor) -> Tensor:
        h = self.embed(x).relu()
        for _ in range(self.steps):
            h = self.update(self.messages(h, edge_index, edge_attr), h)
        y: Tensor = self.predict(self.pool(self.join(torch.cat([h, x], -1)), member))
        return y.squeeze(-1)


CASES = (*(Case(suite="messages", name=f"edge-conditioned-{name}", build=partial(_conditioned, make, 64))
           for name, make in (("bonds", _bonds), ("lengths", _lengths), ("distances", _distances))),
         Case(suite="messages", name="message-passing-network", build=_network))
