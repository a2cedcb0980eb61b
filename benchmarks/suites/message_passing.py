"""The message passing network of the recipe `molecules`, against the same of another library's layers."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from benchmarks import peers
from benchmarks.case import Comparison, Size, entrant
from benchmarks.graphs import molecules
from benchmarks.suites.graph_peers import copied, in_torch, leaf
from structconv.structures import Graph, Samples, batch, membership
from structconv_systems.models.molecules import MessagePassing

__all__ = ["build_network"]

_BONDS = 6


def build_network(size: Size) -> Comparison:
    """The message passing network of the recipe `molecules`, on batches that are new in each call."""
    atoms, channels, count = 35, 64, size.pick(8, 32)
    parts = [[molecules(1, seed) for seed in range(count * number, count * number + count)] for number in range(4)]
    graphs, kinds = [batch(part) for part in parts], torch.randn(8, _BONDS)
    attributes = [kinds[torch.arange(graph.num_edges) % 8] for graph in graphs]
    ours = MessagePassing(atoms, _BONDS, channels=channels, edge_hidden=channels)
    xs = [leaf(graph.num_nodes, atoms) for graph in graphs]

    def run() -> Tensor:
        return torch.cat([ours(x, Graph(graph.edge_index.clone(), num_nodes=graph.num_nodes, edge_attr=kind.clone(),
                                        samples=Samples([one.num_nodes for one in part])))
                          for x, graph, kind, part in zip(xs, graphs, attributes, parts, strict=True)])

    result = []
    if (library := peers.geometric()) is not None:
        peer = _GeometricNetwork(library, ours, channels)
        own = [leaf(graph.num_nodes, atoms) for graph in graphs]
        members = [membership(part) for part in parts]

        def run_peer() -> Tensor:
            return torch.cat([peer(x, graph.edge_index.clone(), kind.clone(), member)
                              for x, graph, kind, member in zip(own, graphs, attributes, members, strict=True)])

        result.append(entrant("pyg", peer, run_peer, *own))
    nodes, edges = sum(graph.num_nodes for graph in graphs), sum(graph.num_edges for graph in graphs)
    return Comparison(ours=entrant("ours", ours, run, *xs), peers=tuple(result), edges=edges,
                      size=f"4 batches of {count} graphs, {nodes:,} nodes, {edges:,} edges of {_BONDS} "
                           f"attributes, {channels} channels and hidden units, 3 messages, set2set")


class _GeometricNetwork(nn.Module):
    """The network of PyTorch Geometric's layers, with our weights."""

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
        self.embed, self.update, self.join, self.predict = map(in_torch, (ours.embed, ours.update, ours.join,
                                                                          ours.predict))

    def forward(self, x: Tensor, edge_index: Tensor, edge_attr: Tensor, member: Tensor) -> Tensor:
        h = self.embed(x).relu()
        for _ in range(self.steps):
            h = self.update(self.messages(h, edge_index, edge_attr), h)
        y: Tensor = self.predict(self.pool(self.join(torch.cat([h, x], -1)), member))
        return y.squeeze(-1)
