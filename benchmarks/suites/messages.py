"""Messages along edges: filters computed from the edges, relations, and networks of messages."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks import peers
from benchmarks.case import Case, Comparison, Entrant, Size, copied, entrant, in_torch, leaf
from benchmarks.graphs import knowledge, molecules
from benchmarks.rates import products
from structconv.nn import EdgeConditionedConv, GraphNetwork
from structconv.structures import Graph, KnowledgeGraph, Samples, batch, membership
from structconv_systems.models.molecules import MessagePassing
from structconv_systems.models.nri import Decoder
from structconv_systems.models.rgcn import EntityClassifier

__all__ = ["CASES"]

#: Attributes of a bond, and hidden units of what makes filters of them.
_ATTRIBUTES, _HIDDEN = 6, 128
#: Channels of an edge and of a body of the interaction network.
_EDGE, _NODE = 10, 2


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

    return Comparison(ours=entrant("ours", ours, run, x), peers=tuple(_geometric_filters(ours, graph, channels)),
                      edges=graph.num_edges, size=f"{graph.num_nodes:,} nodes, {graph.num_edges:,} edges of "
                      f"{_ATTRIBUTES} attributes, {_HIDDEN} hidden units, {channels} to {channels}")


def _geometric_filters(ours: Any, graph: Graph, channels: int) -> list[Entrant]:
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
                      size=f"4 batches of {count} graphs, {nodes:,} nodes, {edges:,} edges of {_ATTRIBUTES} "
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


def _entities(size: Size) -> Comparison:
    """Two layers of R-GCN and all their gradients, an epoch without the optimizer, on a graph of AIFB's size."""
    entities, relations, hidden, classes = size.pick(1_000, 8_285), 45, 16, 4
    graph = knowledge(size.pick(3_500, 29_043), relations, entities).with_inverses()
    ours = EntityClassifier(graph, hidden, classes)
    return Comparison(ours=entrant("ours", ours, partial(ours, graph)),
                      peers=tuple(_geometric_entities(ours, graph, hidden, classes)), edges=graph.num_triples,
                      size=f"{entities:,} entities, {graph.num_triples:,} triples, {2 * relations} relations, one-hot "
                      f"to {hidden} to {classes}")


def _geometric_entities(ours: Any, graph: KnowledgeGraph, hidden: int, classes: int) -> list[Entrant]:
    library = peers.geometric()
    if library is None:
        return []
    edges, kinds = graph.triples[:, ::2].T.contiguous(), graph.triples[:, 1].contiguous()
    entities, relations = graph.num_entities, graph.num_relations
    first, second = library.RGCNConv(entities, hidden, relations), library.RGCNConv(hidden, classes, relations)
    table, (matrices, root) = ours.first, ours.second.weight.weights
    rows = torch.zeros(relations, entities, hidden)
    rows[table.pairs % relations, table.pairs // relations] = table.rows.detach()
    for to, value in ((first.weight, rows), (first.root, table.own), (first.bias, table.conv.bias),
                      (second.weight, matrices.theta), (second.root, root.theta[0]), (second.bias, ours.second.bias)):
        copied(to, value)

    def run() -> Tensor:
        return second(first(None, edges, kinds).relu(), edges, kinds)

    return [entrant("pyg", nn.ModuleList([first, second]), run, needs=3.0 * 4 * relations * entities * hidden)]


class _ConcatenatedDecoder(nn.Module):
    """The decoder as its paper computes it: matrices of one-hot rows bring bodies to edges and edges to bodies, and
    what an edge or a body reads is concatenated (Kipf et al. 2018)."""

    def __init__(self, ours: Any, channels: int, hidden: int, graph: Graph) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(2 * channels, hidden), nn.Linear(hidden, hidden)
        self.out, self.rest = nn.Linear(channels + hidden, hidden), in_torch(ours.rest)
        self.drift = in_torch(ours.drift)
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
    plain = _ConcatenatedDecoder(ours, channels, hidden, graph)
    x, edges = leaf(samples, windows, 5, channels), torch.rand(samples, graph.num_edges, 2).requires_grad_()
    at_nodes = 2 * channels * hidden + (channels + hidden) * hidden + hidden * hidden + hidden * channels
    once = samples * windows * horizon * (graph.num_edges * hidden * hidden + 5 * at_nodes)
    return Comparison(ours=entrant("ours", ours, lambda: ours(x, graph, edges, horizon), x, edges),
                      peers=(entrant("torch", plain, lambda: plain(x, edges, horizon), x, edges),),
                      edges=graph.num_edges, least=products(2.0 * once), size=f"{samples} simulations of 5 bodies, "
                      f"{windows} rollouts of {horizon} steps, {hidden} hidden units")


class _ConcatenatedNetwork(nn.Module):
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


class _PlainNetwork(nn.Module):
    """Bodies brought to edges by an index, and effects to bodies by a sum over it."""

    def __init__(self, network: _ConcatenatedNetwork, graph: Graph) -> None:
        super().__init__()
        self.network, self.graph = network, graph

    def forward(self, nodes: Tensor, edges: Tensor) -> Tensor:
        source, target = self.graph.source.long(), self.graph.target.long()
        effects = self.network.effect(edges, nodes[:, source], nodes[:, target])
        reached = effects.new_zeros(len(nodes), self.graph.num_nodes, effects.shape[-1]).index_add(1, target, effects)
        return self.network.update(reached, nodes)


def _geometric_interactions(network: _ConcatenatedNetwork, graph: Graph, nodes: Tensor, edges: Tensor) -> list[Entrant]:
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


def _interactions(size: Size) -> Comparison:
    """The network of the paper's size on many states of six bodies, all pairs of which act on one another."""
    samples, hidden, effects = size.pick(16, 100), 150, 50
    graph = Graph.complete(6)
    ours: Any = GraphNetwork.interaction(_NODE, _EDGE, edge=(hidden,) * 4 + (effects,), node=(hidden, 2))
    network = _ConcatenatedNetwork(ours, hidden, effects)
    plain = _PlainNetwork(network, graph)
    nodes, edges = leaf(samples, 6, _NODE), leaf(samples, graph.num_edges, _EDGE)
    at_edges = _EDGE * hidden + 3 * hidden * hidden + hidden * effects
    at_nodes = (3 * _NODE + effects) * hidden + hidden * _NODE
    flops = 2.0 * samples * (graph.num_edges * at_edges + 6 * at_nodes)
    torch_peer = entrant("torch", plain, lambda: plain(nodes, edges), nodes, edges)
    return Comparison(ours=entrant("ours", ours, lambda: ours(nodes, graph, edges).nodes, nodes, edges),
                      peers=(torch_peer, *_geometric_interactions(copy.deepcopy(network), graph, nodes, edges)),
                      edges=graph.num_edges, least=products(flops),
                      size=f"{samples} states of 6 bodies, {graph.num_edges} edges, {hidden} "
                      f"hidden units in five layers, {effects} channels of an effect")


CASES = (
    *(Case(suite="messages", name=f"edge-conditioned-{name}", build=partial(_conditioned, make, 64))
      for name, make in (("bonds", _bonds), ("lengths", _lengths), ("distances", _distances))),
    Case(suite="messages", name="message-passing-network", build=_network),
    Case(suite="messages", name="rgcn-entities", build=_entities),
    Case(suite="messages", name="relational-inference", build=_rollouts),
    Case(suite="messages", name="interaction-network", build=_interactions),
)
