"""The layers of `structconv.compat.pyg` against PyTorch Geometric's own, alone and in nets on batches of new graphs."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn

import structconv.compat.pyg as pyg
from benchmarks import peers
from benchmarks.case import Case, Comparison, Entrant, Size, entrant, leaf
from benchmarks.graphs import power_law
from benchmarks.suites.new_graphs import BATCHES, NETWORKS, Batch, Net, comparison, entrant_of, random_batch
from structconv.compat.pyg import pooling
from structconv.data import NeighborLoader

__all__ = ["CASES"]

_CHANNELS, _ATTRIBUTES, _RELATIONS = 64, 8, 4
#: Edges, ten for each node.
_EDGES = (1_000, 10_000, 100_000)
#: The edges of the graph that is sampled, ten for each node; the seeds of a sample, and the neighbors drawn per hop.
_SAMPLED, _SEEDS, _FANOUTS = 1_000_000, 2_048, (10, 10)
#: Types of edges between two types of nodes.
_KINDS = (("a", "to", "b"), ("b", "to", "a"), ("a", "to", "a"))

Make = Callable[[Any, int], nn.Module]


class _Function(nn.Module):
    """A function as a layer."""

    def __init__(self, function: Callable[..., Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *arguments: Tensor) -> Tensor:
        return self.function(*arguments)


def _pooling(kind: str, library: Any, channels: int) -> nn.Module:
    return _Function(getattr(library, f"global_{kind}_pool"))


def _utility(name: str, options: dict[str, Any], library: Any, channels: int) -> nn.Module:
    """A function of `torch_geometric.utils`, or what `patch` puts in its place."""
    home = pooling if library is pyg else import_module("torch_geometric.utils")
    return _Function(partial(getattr(home, name), **options))


def _aggregation(kind: str, library: Any, channels: int) -> nn.Module:
    layer: nn.Module = getattr(library, f"{kind}Aggregation")()
    return layer


#: Each layer: a function that makes it with a number of channels, and the kind of its inputs (see `_called`).
_LAYERS: dict[str, tuple[Make, str]] = {
    "gcn": (lambda library, c: library.GCNConv(c, c), ""),
    "gcn-weighted": (lambda library, c: library.GCNConv(c, c), "weight"),
    "sage": (lambda library, c: library.SAGEConv(c, c), ""),
    "sage-max": (lambda library, c: library.SAGEConv(c, c, "max"), ""),
    "graph": (lambda library, c: library.GraphConv(c, c), "weight"),
    "cluster-gcn": (lambda library, c: library.ClusterGCNConv(c, c), ""),
    "arma": (lambda library, c: library.ARMAConv(c, c, num_stacks=2, num_layers=2), ""),
    "gin": (lambda library, c: library.GINConv(_perceptron(c)), ""),
    "gine": (lambda library, c: library.GINEConv(_perceptron(c), edge_dim=_ATTRIBUTES), "attr"),
    "gat": (lambda library, c: library.GATConv(c, c // 4, 4), ""),
    "gat-attr": (lambda library, c: library.GATConv(c, c // 4, 4, edge_dim=_ATTRIBUTES), "attr"),
    "gatv2": (lambda library, c: library.GATv2Conv(c, c // 4, 4), ""),
    "transformer": (lambda library, c: library.TransformerConv(c, c // 4, 4), ""),
    "transformer-attr": (lambda library, c: library.TransformerConv(c, c // 4, 4, edge_dim=_ATTRIBUTES), "attr"),
    "agnn": (lambda library, c: library.AGNNConv(), ""),
    "feast": (lambda library, c: library.FeaStConv(c, c, heads=4), ""),
    "gmm": (lambda library, c: library.GMMConv(c, c, 2, 5), "coordinates"),
    "fa": (lambda library, c: library.FAConv(c), "first"),
    "cheb": (lambda library, c: library.ChebConv(c, c, 3), ""),
    "tag": (lambda library, c: library.TAGConv(c, c), ""),
    "sg": (lambda library, c: library.SGConv(c, c, 2), ""),
    "ssg": (lambda library, c: library.SSGConv(c, c, 0.1, 2), ""),
    "appnp": (lambda library, c: library.APPNP(4, 0.1), ""),
    "mixhop": (lambda library, c: library.MixHopConv(c, c), ""),
    "nn": (lambda library, c: library.NNConv(c, c, _filters(c)), "attr"),
    "rgcn": (lambda library, c: library.RGCNConv(c, c, _RELATIONS), "kind"),
    "hgt": (lambda library, c: library.HGTConv(c, c, (["a", "b"], list(_KINDS)), 4), "types"),
    "linear": (lambda library, c: library.Linear(c, c), "x"),
    "jumping-cat": (lambda library, c: library.JumpingKnowledge("cat"), "layers"),
    "jumping-max": (lambda library, c: library.JumpingKnowledge("max"), "layers"),
    "jumping-lstm": (lambda library, c: library.JumpingKnowledge("lstm", c, 3), "layers"),
    **{f"global-{kind}-pool": (partial(_pooling, kind), "rows") for kind in ("add", "mean", "max")},
    **{f"aggregate-{kind.lower()}": (partial(_aggregation, kind), "rows")
       for kind in ("Sum", "Mean", "Max", "Min", "Var", "Std", "Softmax", "PowerMean")},
    "norm-graph": (lambda library, c: library.GraphNorm(c), "rows"),
    "norm-instance": (lambda library, c: library.InstanceNorm(c), "rows"),
    "norm-layer": (lambda library, c: library.LayerNorm(c), "rows"),
    "norm-pair": (lambda library, c: library.PairNorm(), "rows"),
    "norm-size": (lambda library, c: library.GraphSizeNorm(), "rows"),
    "norm-means": (lambda library, c: library.MeanSubtractionNorm(), "rows"),
    "norm-groups": (lambda library, c: library.DiffGroupNorm(c, 8), "x"),
    "norm-message": (lambda library, c: library.MessageNorm(learn_scale=True), "messages"),
    **{f"scatter-{kind}": (partial(_utility, "scatter", {"reduce": kind}), "groups")
       for kind in ("sum", "mean", "max")},
    "softmax": (partial(_utility, "softmax", {}), "groups"),
    "aggregate-multi": (lambda library, c: library.MultiAggregation(["mean", "max", "std"]), "rows"),
}
if find_spec("torch_geometric"):  # whose own classes hold our layers; its other classes hold none
    _LAYERS |= {
        "hetero": (lambda library, c: library.HeteroConv(
            {kind: library.SAGEConv((c, c), c) for kind in _KINDS}), "types"),
        "sag-pool": (lambda library, c: library.SAGPooling(c, 0.5, library.GraphConv), "pool"),
    }


def _perceptron(channels: int) -> nn.Module:
    return nn.Sequential(nn.Linear(channels, channels), nn.ReLU(), nn.Linear(channels, channels))


def _filters(channels: int) -> nn.Module:
    return nn.Sequential(nn.Linear(_ATTRIBUTES, 16), nn.ReLU(), nn.Linear(16, channels * channels))


def _called(kind: str, edges: int) -> tuple[Callable[[Any, list[Tensor]], Tensor], list[tuple[int, int]], str]:
    """How a layer is called with its inputs, their shapes, and the size in words."""
    nodes, generator = edges // 10, torch.Generator().manual_seed(4)
    shape, size = (nodes, _CHANNELS), f"{nodes:,} nodes, {edges:,} edges, {_CHANNELS} channels"
    if kind == "rows":
        groups = torch.arange(edges) // 10
        return lambda layer, xs: layer(xs[0], groups), [(edges, _CHANNELS)], f"{edges:,} rows in groups of 10"
    if kind == "groups":
        groups = torch.randint(nodes, (edges,), generator=generator)
        return lambda layer, xs: layer(xs[0], groups), [(edges, _CHANNELS)], f"{edges:,} rows in groups in any order"
    if kind in ("x", "layers"):
        return (lambda layer, xs: layer(xs[0]) if kind == "x" else layer(xs),
                [(nodes, _CHANNELS)] * (1 if kind == "x" else 3), f"{nodes:,} nodes, {_CHANNELS} channels")
    if kind == "types":
        by_type = {types: torch.randint(nodes // 2, (2, edges // 3), generator=generator) for types in _KINDS}
        return (lambda layer, xs: torch.cat(list(layer(dict(zip("ab", xs, strict=True)), by_type).values())),
                [(nodes // 2, _CHANNELS)] * 2, f"{size}, 2 types of nodes, 3 of edges")
    if kind == "messages":
        return lambda layer, xs: layer(*xs), [shape] * 2, size
    index = power_law(edges, nodes).edge_index
    if kind == "first":
        return lambda layer, xs: layer(*xs, index), [shape] * 2, size
    if kind == "pool":  # near-equal scores may change places
        return lambda layer, xs: layer(xs[0], index)[0].sum(0), [shape], size
    more = {"weight": (torch.rand(edges, generator=generator),),
            "attr": (torch.randn(edges, _ATTRIBUTES, generator=generator),),
            "coordinates": (torch.rand(edges, 2, generator=generator),),
            "kind": (torch.randint(_RELATIONS, (edges,), generator=generator),)}.get(kind, ())
    return lambda layer, xs: layer(xs[0], index, *more), [shape], size


def _layer(name: str, edges: int, size: Size) -> Comparison:
    """One layer on a graph that stays, and PyTorch Geometric's with the same parameters."""
    make, kind = _LAYERS[name]
    call, shapes, words = _called(kind, edges)

    def made(who: str, library: Any, needs: float = 0.0) -> Entrant:
        layer, xs = make(library, _CHANNELS), [leaf(*shape, seed=seed) for seed, shape in enumerate(shapes)]
        layer.load_state_dict(state or layer.state_dict())
        state.update(layer.state_dict())
        return entrant(who, layer, lambda: call(layer, xs), *xs, needs=needs)

    state: dict[str, Tensor] = {}
    ours, library = made("ours", pyg), peers.geometric()
    matrices = 16.0 * edges * _CHANNELS ** 2 if name == "nn" else 0.0  # one for each edge
    theirs = () if library is None else (made("pyg", library, matrices),)
    return Comparison(ours=ours, peers=theirs, size=words, edges=edges, tolerance=2e-3)


def _net(name: str, graphs: int, nodes: int, channels: int, size: Size) -> Comparison:
    """Two layers, a readout and a linear layer on mini-batches that come as new tensors in every call."""
    batches = [random_batch(graphs, nodes, seed) for seed in range(BATCHES)]
    return _nets(name, batches, channels, lambda library, x, data: library.global_mean_pool(x, data.batch))


def _sampled(name: str, size: Size) -> Comparison:
    """Two layers and a linear layer for the seeds of sampled subgraphs, which come as new tensors in every call."""
    graph = power_law(_SAMPLED, _SAMPLED // 10)
    loader, batches = NeighborLoader(graph, list(_FANOUTS)), []
    for first in (0, _SEEDS):
        torch.manual_seed(first)
        sample = loader(torch.arange(first, first + _SEEDS)).graph
        batches.append(Batch(sample.edge_index, torch.tensor([sample.num_nodes])))
    return _nets(name, batches, _CHANNELS, lambda library, x, data: x[:_SEEDS])


def _nets(name: str, batches: list[Batch], channels: int, pool: Callable[[Any, Tensor, Any], Tensor]) -> Comparison:
    make, _ = _LAYERS[name]

    def net(library: Any) -> Net:
        return Net(make(library, channels), make(library, channels), nn.Linear(channels, 8), partial(pool, library),
                   lambda data: data.edge_index)

    ours, result = net(pyg), []
    if (library := peers.geometric()) is not None:
        theirs = net(library)
        theirs.load_state_dict(ours.state_dict())
        result.append(entrant_of("pyg", theirs, theirs, batches, channels))
    return comparison(entrant_of("ours", ours, ours, batches, channels), result, batches, f"two layers of {channels}")


CASES = (
    *(Case(suite="compat", name=f"{name}-{edges // 1000}k", build=partial(_layer, name, edges),
           group=f"{edges:,} edges", headline=edges == _EDGES[1] and name in ("gcn", "gat", "sage"))
      for name in _LAYERS for edges in _EDGES),
    *(Case(suite="compat", name=f"net-{name}-{'x'.join(map(str, sizes))}", build=partial(_net, name, *sizes),
           group=f"nets, {sizes[0]} graphs", headline=name == "gcn" and sizes == NETWORKS[0])
      for name in ("gcn", "sage", "gin", "gat", "gatv2", "transformer") for sizes in NETWORKS),
    *(Case(suite="compat", name=f"net-{name}-sampled", build=partial(_sampled, name), group="nets, sampled",
           headline=False) for name in ("gcn", "sage", "gat")),
)
