"""R-GCN over 50 relations, with a matrix a relation, shared bases, or blocks."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks import peers
from benchmarks.case import Case, Comparison, Entrant, Size, copied, entrant, leaf
from benchmarks.graphs import knowledge
from benchmarks.rates import gathers
from structconv.nn import RelationalConv
from structconv.structures import KnowledgeGraph

__all__ = ["CASES"]

_RELATIONS = 50


def _rgcn(channels: int, options: dict[str, int], size: Size) -> Comparison:
    """Means under each relation, and the term of the entity itself."""
    graph = knowledge(size.pick(50_000, 1_000_000), _RELATIONS)
    ours: Any = RelationalConv(channels, channels, _RELATIONS, **options)  # type: ignore[arg-type]
    nn.init.normal_(ours.bias)
    x = leaf(graph.num_entities, channels)
    result = [*_geometric(ours, graph, channels, options), *([] if options else _dgl(ours, graph, channels))]
    return Comparison(ours=entrant("ours", ours, lambda: ours(x, graph), x), peers=tuple(result),
                      edges=graph.num_triples,
                      size=f"{graph.num_entities:,} entities, {graph.num_triples:,} triples, {_RELATIONS} relations, "
                           f"{channels} to {channels}",
                      least=gathers(graph.num_triples, graph.num_entities, channels, channels * channels))


def _geometric(ours: Any, graph: KnowledgeGraph, channels: int, options: dict[str, int]) -> list[Entrant]:
    """Both of the library's layers: one product a relation, and one gathered product an edge."""
    library = peers.geometric()
    if library is None:
        return []
    edges, kinds = graph.triples[:, ::2].T.contiguous(), graph.triples[:, 1].contiguous()
    result = []
    for name, kind, gathered in (("pyg", "RGCNConv", 4.0), ("pyg fast", "FastRGCNConv", 2.0 * channels)):
        if gathered > 8 and "num_blocks" in options:
            continue
        layer, x = getattr(library, kind)(channels, channels, _RELATIONS, **options), leaf(graph.num_entities, channels)
        _fill(layer, ours)
        result.append(entrant(name, layer, partial(layer, x, edges, kinds), x,
                             full_only=gathered > 8, needs=gathered * 4 * graph.num_triples * channels))
    return result


def _fill(layer: Any, ours: Any) -> None:
    relations, own = ours.weight.weights
    named = dict(relations.named_parameters())
    copied(layer.root, own.theta[0])
    copied(layer.bias, ours.bias)
    if layer.num_bases is not None:
        copied(layer.weight, named["filters"])
        copied(layer.comp, named["mix"])
    else:
        copied(layer.weight, named["theta"])


def _dgl(ours: Any, graph: KnowledgeGraph, channels: int) -> list[Entrant]:
    library = peers.dgl()
    if library is None:
        return []
    source, kinds, target = (graph.triples[:, column].contiguous() for column in range(3))
    pair = target * _RELATIONS + kinds
    norm = torch.bincount(pair).float().clamp(min=1).reciprocal()[pair, None]
    order = torch.argsort(kinds, stable=True)
    g = library.graph((source[order], target[order]), num_nodes=graph.num_entities).int()
    layer, x = library.nn.pytorch.RelGraphConv(channels, channels, _RELATIONS), leaf(graph.num_entities, channels)
    relations, own = ours.weight.weights
    copied(layer.linear_r.W, relations.theta)
    copied(layer.loop_weight, own.theta[0])
    copied(layer.h_bias, ours.bias)
    kinds, norm = kinds[order], norm[order]

    def run() -> Tensor:
        return layer(g, x, kinds, norm, presorted=True)

    return [entrant("dgl", layer, run, x, needs=6.0 * 4 * graph.num_triples * channels)]


CASES = (
    Case(suite="relational", name="rgcn-64", build=partial(_rgcn, 64, {})),
    Case(suite="relational", name="rgcn-64-bases", build=partial(_rgcn, 64, {"num_bases": 8}), headline=False),
    Case(suite="relational", name="rgcn-64-blocks", build=partial(_rgcn, 64, {"num_blocks": 8}), headline=False),
)
