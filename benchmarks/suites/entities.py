"""Classes of entities by two layers of R-GCN, against the same of another library's layers."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks import peers
from benchmarks.case import Comparison, Entrant, Size, entrant
from benchmarks.graphs import knowledge
from benchmarks.suites.graph_peers import copied
from structconv.structures import KnowledgeGraph
from structconv_systems.models.rgcn import EntityClassifier

__all__ = ["build_entities"]


def build_entities(size: Size) -> Comparison:
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
