"""Messages along edges whose filters the edges make, on batches of small graphs that are new in each call; and R-GCN of
entities without features."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from structconv.bench import peers
from structconv.bench.case import Case, Comparison, Entrant, Size, entrant
from structconv.bench.graphs import knowledge, molecules
from structconv.bench.suites.graph_peers import copied, leaf
from structconv.models.rgcn import EntityClassifier
from structconv.nn import EdgeConditionedConv
from structconv.structures import Graph, KnowledgeGraph, batch

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


def _entities(size: Size) -> Comparison:
    """Two layers of R-GCN and all their gradients, an epoch without the optimiser, on a graph of AIFB's size."""
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


CASES = (*(Case(suite="messages", name=f"edge-conditioned-{name}", build=partial(_conditioned, make, 64))
           for name, make in (("bonds", _bonds), ("lengths", _lengths), ("distances", _distances))),
         Case(suite="messages", name="rgcn-entities", build=_entities))
