"""The layers of `structconv.compat.pyg` against PyTorch Geometric's own, alone and in nets on batches of new graphs."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

import structconv.compat.pyg as pyg
from benchmarks import peers
from benchmarks.case import Case, Comparison, Entrant, Size, entrant
from benchmarks.graphs import power_law
from benchmarks.suites.graph_peers import leaf
from benchmarks.suites.new_graphs import BATCHES, NETWORKS, Net, comparison, entrant_of, random_batch

__all__ = ["CASES"]

_CHANNELS, _ATTRIBUTES, _RELATIONS = 64, 8, 4
#: Edges, ten for each node.
_EDGES = (1_000, 10_000, 100_000)

Make = Callable[[Any, int], nn.Module]
#: How each layer is made of so many channels, and what it is called with beside x and the edges.
_LAYERS: dict[str, tuple[Make, str]] = {
    "gcn": (lambda library, c: library.GCNConv(c, c), ""),
    "gcn-weighted": (lambda library, c: library.GCNConv(c, c), "weight"),
    "sage": (lambda library, c: library.SAGEConv(c, c), ""),
    "sage-max": (lambda library, c: library.SAGEConv(c, c, "max"), ""),
    "graph": (lambda library, c: library.GraphConv(c, c), "weight"),
    "gin": (lambda library, c: library.GINConv(_perceptron(c)), ""),
    "gine": (lambda library, c: library.GINEConv(_perceptron(c), edge_dim=_ATTRIBUTES), "attr"),
    "gat": (lambda library, c: library.GATConv(c, c // 4, 4), ""),
    "gat-attr": (lambda library, c: library.GATConv(c, c // 4, 4, edge_dim=_ATTRIBUTES), "attr"),
    "gatv2": (lambda library, c: library.GATv2Conv(c, c // 4, 4), ""),
    "transformer": (lambda library, c: library.TransformerConv(c, c // 4, 4), ""),
    "transformer-attr": (lambda library, c: library.TransformerConv(c, c // 4, 4, edge_dim=_ATTRIBUTES), "attr"),
    "agnn": (lambda library, c: library.AGNNConv(), ""),
    "cheb": (lambda library, c: library.ChebConv(c, c, 3), ""),
    "tag": (lambda library, c: library.TAGConv(c, c), ""),
    "sg": (lambda library, c: library.SGConv(c, c, 2), ""),
    "ssg": (lambda library, c: library.SSGConv(c, c, 0.1, 2), ""),
    "appnp": (lambda library, c: library.APPNP(4, 0.1), ""),
    "mixhop": (lambda library, c: library.MixHopConv(c, c), ""),
    "nn": (lambda library, c: library.NNConv(c, c, _filters(c)), "attr"),
    "rgcn": (lambda library, c: library.RGCNConv(c, c, _RELATIONS), "kind"),
}


def _perceptron(channels: int) -> nn.Module:
    return nn.Sequential(nn.Linear(channels, channels), nn.ReLU(), nn.Linear(channels, channels))


def _filters(channels: int) -> nn.Module:
    return nn.Sequential(nn.Linear(_ATTRIBUTES, 16), nn.ReLU(), nn.Linear(16, channels * channels))


def _more(kind: str, edges: int) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(4)
    if kind == "weight":
        return (torch.rand(edges, generator=generator),)
    if kind == "attr":
        return (torch.randn(edges, _ATTRIBUTES, generator=generator),)
    return (torch.randint(_RELATIONS, (edges,), generator=generator),) if kind == "kind" else ()


def _compared(make: Callable[[Any], nn.Module], run: Callable[[nn.Module, list[Tensor]], Tensor],
              inputs: Callable[[], list[Tensor]], size: str, edges: int, needs: float = 0.0) -> Comparison:
    """Our module and theirs, which `needs` so many bytes, with the same parameters; `run` calls one with its inputs."""
    ours, result = make(pyg), []
    xs = inputs()
    if (library := peers.geometric()) is not None:
        theirs, others = make(library), inputs()
        theirs.load_state_dict(ours.state_dict())
        result.append(entrant("pyg", theirs, lambda: run(theirs, others), *others, needs=needs))
    own: Entrant = entrant("ours", ours, lambda: run(ours, xs), *xs)
    return Comparison(ours=own, peers=tuple(result), size=size, edges=edges, tolerance=2e-3)


def _layer(name: str, edges: int, size: Size) -> Comparison:
    """One layer on a graph that stays."""
    make, kind = _LAYERS[name]
    graph, more = power_law(edges, edges // 10), _more(kind, edges)
    return _compared(lambda library: make(library, _CHANNELS),
                     lambda layer, xs: layer(xs[0], graph.edge_index, *more),
                     lambda: [leaf(graph.num_nodes, _CHANNELS)],
                     f"{graph.num_nodes:,} nodes, {edges:,} edges, {_CHANNELS} channels", edges,
                     16.0 * edges * _CHANNELS ** 2 if name == "nn" else 0.0)  # a matrix for each edge


def _net(name: str, graphs: int, nodes: int, channels: int, size: Size) -> Comparison:
    """Two layers, a readout and a linear layer on mini-batches that come as new tensors in every call."""
    make, _ = _LAYERS[name]
    batches = [random_batch(graphs, nodes, seed) for seed in range(BATCHES)]

    def net(library: Any) -> Net:
        return Net(make(library, channels), make(library, channels), nn.Linear(channels, 8),
                   lambda x, data: library.global_mean_pool(x, data.batch), lambda data: data.edge_index)

    ours, result = net(pyg), []
    if (library := peers.geometric()) is not None:
        theirs = net(library)
        theirs.load_state_dict(ours.state_dict())
        result.append(entrant_of("pyg", theirs, theirs, batches, channels))
    return comparison(entrant_of("ours", ours, ours, batches, channels), result, batches, f"two layers of {channels}")


CASES = (
    *(Case(suite="compat", name=f"{name}-{edges // 1000}k", build=partial(_layer, name, edges),
           headline=edges == _EDGES[1] and name in ("gcn", "gat", "sage")) for name in _LAYERS for edges in _EDGES),
    *(Case(suite="compat", name=f"net-{name}-{'x'.join(map(str, sizes))}", build=partial(_net, name, *sizes),
           headline=name == "gcn" and sizes == NETWORKS[0])
      for name in ("gcn", "sage", "gin", "gat", "gatv2", "transformer") for sizes in NETWORKS),
)
