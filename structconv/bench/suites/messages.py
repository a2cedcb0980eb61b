"""Messages along edges: filters that the edges make, on batches of small graphs that are new in each call; and messages
weighed by types of edges, in the decoder of neural relational inference."""

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
from structconv.models.nri import Decoder
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
    own = ours.mechanism.parts()[0].network[0]
    for to, value in ((network[0].weight, own.weight), (network[0].bias, own.bias),
                      (network[2].weight, matrices[1:].flatten(1).mT), (network[2].bias, matrices[0].flatten()),
                      (layer.lin.weight, root[0].mT), (layer.bias, ours.bias)):
        copied(to, value)
    filters = 3.0 * 4 * graph.num_edges * channels * channels
    return [entrant("pyg", layer, partial(layer, x, graph.edge_index, graph.edge_attr), x, needs=filters)]


class _Concatenated(nn.Module):
    """The decoder as its paper computes it: matrices of one-hot rows bring bodies to edges and edges to bodies, and
    what an edge or a body reads is concatenated (Kipf et al. 2018)."""

    def __init__(self, ours: Any, channels: int, hidden: int, graph: Graph) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(2 * channels, hidden), nn.Linear(hidden, hidden)
        self.out, self.rest = nn.Linear(channels + hidden, hidden), copy.deepcopy(ours.rest)
        self.drift = copy.deepcopy(ours.drift)
        message, deeper, update = ours.messages[0], ours.deeper[0][0], ours.update
        for to, value in ((self.first.weight, message.weight.theta.flatten(0, 1).mT), (self.first.bias, message.bias),
                          (self.second.weight, deeper.weight), (self.second.bias, deeper.bias),
                          (self.out.weight, torch.cat([part.theta[0] for part in update.weight.weights]).mT),
                          (self.out.bias, update.bias)):
            copied(to, value)
        self.send, self.receive = (nn.functional.one_hot(end, graph.num_nodes).float()
                                   for end in (graph.source, graph.target))

    def forward(self, x: Tensor, edges: Tensor, horizon: int) -> Tensor:
        weights, states = edges[:, None, :, 1:], []
        for _ in range(horizon):
            ends = torch.cat([self.send @ x, self.receive @ x], -1)
            message = self.second(self.first(ends).relu()).relu() * weights
            reached = (message.mT @ self.receive).mT
            x = x + self.drift(x) + self.rest(self.out(torch.cat([x, reached], -1)))
            states.append(x)
        return torch.stack(states, 2)


def _rollouts(size: Size) -> Comparison:
    """Ten steps from five states of each of many simulations of five bodies: two layers a message, as in the paper."""
    samples, windows, horizon, channels, hidden = size.pick(16, 128), 5, 10, 4, 256
    graph = Graph.complete(5)
    ours: Any = Decoder(channels, 2, hidden=hidden, messages=2)
    nn.init.normal_(ours.rest[-1].weight, std=0.01)
    plain = _Concatenated(ours, channels, hidden, graph)
    x, edges = leaf(samples, windows, 5, channels), torch.rand(samples, graph.num_edges, 2).requires_grad_()
    return Comparison(ours=entrant("ours", ours, lambda: ours(x, graph, edges, horizon), x, edges),
                      peers=(entrant("torch", plain, lambda: plain(x, edges, horizon), x, edges),),
                      edges=graph.num_edges, size=f"{samples} simulations of 5 bodies, {windows} rollouts of {horizon} "
                      f"steps, {hidden} hidden units")


CASES = (*(Case(suite="messages", name=f"edge-conditioned-{name}", build=partial(_conditioned, make, 64))
              for name, make in (("bonds", _bonds), ("lengths", _lengths), ("distances", _distances))),
         Case(suite="messages", name="relational-inference", build=_rollouts))
