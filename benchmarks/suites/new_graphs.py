"""Graph learning as it mostly is: every batch of small graphs is seen for the first time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from benchmarks import peers
from benchmarks.case import Comparison, Entrant, entrant
from benchmarks.graphs import molecules
from benchmarks.suites.graph_peers import copied, heads_to_rows, leaf
from structconv import nn as layers
from structconv.structures import Graph

__all__ = ["build_new_graphs"]

_BATCHES, _GRAPHS = 4, 32


def build_new_graphs(kind: str, in_channels: int, channels: int, *heads: int) -> Comparison:
    """A layer on batches of molecules that come as new tensors in every call, nothing of them known."""
    batches = [molecules(_GRAPHS, seed) for seed in range(_BATCHES)]
    options = {"add_self_loops": False} if heads else {}
    ours: Any = getattr(layers, kind)(in_channels, channels, *heads, **options)
    found = []
    if (library := peers.geometric()) is not None:
        pyg = getattr(library, kind)(in_channels, channels, *heads, **options)
        _copy(pyg, ours)
        found.append(_entrant("pyg", pyg, batches, lambda x, edges: pyg(x, edges)))
    nodes, edges = (sum(counts) for counts in zip(*((g.num_nodes, g.num_edges) for g in batches), strict=True))
    own = _entrant("ours", ours, batches, lambda x, edges: ours(x, Graph(edges, num_nodes=x.shape[0])))
    return Comparison(ours=own, peers=tuple(found), edges=edges,
                      size=f"{_BATCHES} batches of {_GRAPHS} graphs, {nodes:,} nodes, {edges:,} edges, "
                           f"{in_channels} to {'x'.join(map(str, (*heads, channels)))}")


def _entrant(name: str, layer: Any, batches: list[Graph], call: Callable[[Tensor, Tensor], Tensor]) -> Entrant:
    xs = [leaf(graph.num_nodes, layer.in_channels) for graph in batches]

    def run() -> Tensor:
        return torch.cat([call(x, graph.edge_index.clone()) for x, graph in zip(xs, batches, strict=True)])

    return entrant(name, layer, run, *xs)


def _copy(peer: Any, ours: Any) -> None:
    """Our parameters into PyTorch Geometric's layer."""
    score = next((part for part in ours.modules() if getattr(part, "vector_source", None) is not None), None)
    if score is None:
        copied(peer.lin.weight, ours.weight.theta[0].mT)
        return
    copied(peer.lin.weight, heads_to_rows(ours.weight.theta))
    copied(peer.att_src, score.vector_source[None])
    copied(peer.att_dst, score.vector_target[None])
