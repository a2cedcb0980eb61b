"""Graph learning as it mostly is: every batch of small graphs is new.

Each call gets new tensors of the edges, and what a library makes of them counts: `Graph.from_data` for ours, nothing
for PyTorch Geometric, whose layers take the tensors of its `Batch` as they are. The "parts" of a net are the same net
without edges, torch's linear layers alone: what remains of it for any library.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import elu

from benchmarks import peers
from benchmarks.case import Case, Comparison, Entrant, Size, copied, entrant, heads_to_rows, leaf
from benchmarks.graphs import molecules
from benchmarks.suites.graph import geometric_gat, geometric_gatv2, geometric_gcn
from structconv import nn as layers
from structconv.mechanisms import Adjacency, DotProduct, Identity
from structconv.mechanisms.masks import STRUCTURE
from structconv.structures import Graph
from structconv.weights import Full, HeadBlocks

__all__ = ["BATCHES", "CASES", "NETWORKS", "Batch", "Net", "build_new_graphs", "comparison", "entrant_of",
           "random_batch"]

#: New batches in each timed call, and molecules of a batch.
BATCHES, _GRAPHS = 4, 32
#: Graphs of a batch, nodes of each, channels.
NETWORKS = ((16, 15, 32), (64, 25, 64), (128, 30, 128))
#: A layer of ours or of a peer, called with x and a batch.
Call = Callable[[Tensor, Any], Tensor]


class Batch:
    """A batch of graphs whose tensors are new in every call."""

    def __init__(self, edges: Tensor, sizes: Tensor) -> None:
        self.edges, self.sizes, self.nodes = edges, sizes, int(sizes.sum())
        self.starts = torch.cat([sizes.new_zeros(1), sizes.cumsum(0)])
        self.owner = torch.repeat_interleave(sizes)

    def fresh(self) -> SimpleNamespace:
        """The attributes of PyTorch Geometric's `Batch`."""
        return SimpleNamespace(edge_index=self.edges.clone(), ptr=self.starts.clone(), batch=self.owner.clone(),
                               num_nodes=self.nodes, num_graphs=len(self.sizes))


def random_batch(count: int, nodes: int, seed: int) -> Batch:
    """`count` graphs of `nodes` nodes, with a random edge out of each node, and its reverse."""
    generator = torch.Generator().manual_seed(seed)
    source = torch.arange(count * nodes)
    step = torch.randint(1, nodes, (count * nodes,), generator=generator)  # no loops: libraries differ about theirs
    target = (source % nodes + step) % nodes + source // nodes * nodes
    half = torch.stack([source, target])
    return Batch(torch.cat([half, half.flip(0)], 1), torch.full((count,), nodes))


def _of_molecules(count: int, seed: int) -> Batch:
    graph = molecules(count, seed)
    return Batch(graph.edge_index, torch.tensor([graph.num_nodes]))


class _Max(nn.Module):
    """max over the neighbors x_m, times W, plus x_n V + b (Hamilton et al. 2017, without the layer before the maximum).
    """

    def __init__(self, channels: int, outputs: int) -> None:
        super().__init__()
        self.pool = layers.GroupPool(channels, "max")
        self.near, self.own = nn.Linear(channels, outputs), nn.Linear(channels, outputs, bias=False)

    def forward(self, x: Tensor, graph: Graph) -> Tensor:
        return self.near(self.pool(x, graph)) + self.own(x)


class _Gin(nn.Module):
    """An MLP of the sum over neighbors and the node itself (Xu et al. 2019), whose first layer is that of the sum."""

    def __init__(self, channels: int, outputs: int) -> None:
        super().__init__()
        self.first = layers.Conv(Adjacency(None, self_loops=True), channels, outputs)
        self.second = nn.Linear(outputs, outputs)

    def forward(self, x: Tensor, graph: Graph) -> Tensor:
        y: Tensor = self.second(torch.relu(self.first(x, graph)))
        return y


def _mlp(channels: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(channels, outputs), nn.ReLU(), nn.Linear(outputs, outputs))


def _ours(kind: str, channels: int, outputs: int) -> Any:
    if kind == "gcn":
        return layers.GCNConv(channels, outputs)
    if kind == "gat":
        return layers.GATConv(channels, outputs // 4, 4)
    if kind == "gatv2":
        return layers.GATv2Conv(channels, outputs // 4, 4)
    if kind == "transformer":  # PyTorch Geometric's TransformerConv
        attention = DotProduct(4, outputs // 4).scaled().masked(keep=STRUCTURE).softmax()
        return layers.Conv(attention | Identity(), channels, outputs, weight=[HeadBlocks(), Full()], bias=False)
    if kind == "sage":
        return layers.Conv(Adjacency("row") | Identity(), channels, outputs)
    return _Gin(channels, outputs) if kind == "gin" else _Max(channels, outputs)


def _peer(library: Any, kind: str, ours: Any, channels: int, outputs: int) -> Any:
    """PyTorch Geometric's layer with our numbers."""
    if kind == "gcn":
        layer = geometric_gcn(library, ours.weight.theta[0])
    elif kind == "gat":
        layer = geometric_gat(library, ours)
    elif kind == "gatv2":
        nn.init.zeros_(ours.attention.target.bias)
        layer = geometric_gatv2(library, ours)
    elif kind == "transformer":
        layer, score = library.TransformerConv(channels, outputs // 4, 4, bias=False), ours.attention
        for part, weight in ((layer.lin_query, score.query.weight), (layer.lin_key, score.key.weight),
                             (layer.lin_value, heads_to_rows(ours.get_parameter("weight.0.theta"))),
                             (layer.lin_skip, ours.get_parameter("weight.1.theta")[0].mT)):
            copied(part.weight, weight)
    elif kind == "gin":
        layer = library.GINConv(_mlp(channels, outputs))
        copied(layer.nn[0].weight, ours.first.weight.theta[0].mT)
        copied(layer.nn[0].bias, ours.first.bias)
        layer.nn[2].load_state_dict(ours.second.state_dict())
    else:
        layer = library.SAGEConv(channels, outputs, aggr="max" if kind == "max" else "mean")
        near, own = ((ours.near.weight, ours.own.weight) if kind == "max"
                     else (ours.weight.theta[0].mT, ours.weight.theta[1].mT))
        copied(layer.lin_l.weight, near)
        copied(layer.lin_l.bias, ours.near.bias if kind == "max" else ours.bias)
        copied(layer.lin_r.weight, own)
    return layer


class Net(nn.Module):
    """Two layers with ELUs, whose derivative has no jump that rounding could decide, a pooling of each graph, and a
    linear layer."""

    def __init__(self, first: nn.Module, second: nn.Module, head: nn.Module, pool: Call, arguments: Callable[[Any], Any]
                 ) -> None:
        super().__init__()
        self.first, self.second, self.head, self.pool, self.arguments = first, second, head, pool, arguments

    def forward(self, x: Tensor, data: Any) -> Tensor:
        edges = self.arguments(data)
        x = elu(self.first(x, edges))
        x = elu(self.second(x, edges))
        y: Tensor = self.head(self.pool(x, edges if isinstance(edges, Graph) else data))
        return y


class _Linear(nn.Module):
    """The linear layers of a layer, without its graph: an MLP, or the sum of several of x."""

    def __init__(self, kind: str, channels: int) -> None:
        super().__init__()
        self.mlp = _mlp(channels, channels) if kind == "gin" else None
        self.linear = nn.ModuleList(nn.Linear(channels, channels) for _ in range(_LINEAR.get(kind, 0)))

    def forward(self, x: Tensor, data: Any) -> Tensor:
        return sum(linear(x) for linear in self.linear) if self.mlp is None else self.mlp(x)


def _mean(x: Tensor, data: Any) -> Tensor:
    """The mean of each graph's nodes by torch alone, for graphs of one size."""
    index = data.batch.unsqueeze(1).expand_as(x)
    return x.new_zeros(data.num_graphs, x.shape[1]).scatter_add(0, index, x) * (data.num_graphs / x.shape[0])


def _network(kind: str, count: int, nodes: int, channels: int, size: Size) -> Comparison:
    """A whole network on batches of `count` graphs of `nodes` nodes."""
    batches = [random_batch(count, nodes, seed) for seed in range(BATCHES)]
    first, second, head = _ours(kind, channels, channels), _ours(kind, channels, channels), nn.Linear(channels, 8)
    ours = Net(first, second, head, layers.GraphPool(channels, "mean"), Graph.from_data)
    result = []
    if (library := peers.geometric()) is not None:
        twin = nn.Linear(channels, 8)
        twin.load_state_dict(head.state_dict())
        both = [_peer(library, kind, layer, channels, channels) for layer in (first, second)]
        peer = Net(both[0], both[1], twin, lambda x, data: library.global_mean_pool(x, data.batch),
                    lambda data: data.edge_index)
        result.append(entrant_of("pyg", peer, peer, batches, channels))
    floor = Net(_Linear(kind, channels), _Linear(kind, channels), nn.Linear(channels, 8), _mean, lambda data: data)
    own = entrant_of("ours", ours, ours, batches, channels)
    found = comparison(own, result, batches, f"two layers of {channels}")
    return replace(found, parts=(entrant_of("linear layers", floor, floor, batches, channels),))


def _layer(kind: str, count: int, channels: int, size: Size) -> Comparison:
    """One layer on batches of `count` molecules."""
    batches = [_of_molecules(count, seed) for seed in range(BATCHES)]
    ours = _ours(kind, channels, channels)
    result = []
    if (library := peers.geometric()) is not None:
        peer = _peer(library, kind, ours, channels, channels)
        result.append(entrant_of("pyg", peer, lambda x, data: peer(x, data.edge_index), batches, channels))
    own = entrant_of("ours", ours, lambda x, data: ours(x, Graph.from_data(data)), batches, channels)
    return comparison(own, result, batches, f"{channels} to {channels}")


def _pool(kind: str, count: int, nodes: int, channels: int, size: Size) -> Comparison:
    """The pooling of each graph of a new batch."""
    batches = [random_batch(count, nodes, seed) for seed in range(BATCHES)]
    ours = layers.GraphPool(channels, kind)
    result = []
    if (library := peers.geometric()) is not None:
        pool = getattr(library, f"global_{'add' if kind == 'sum' else kind}_pool")
        result.append(entrant_of("pyg", nn.Module(), lambda x, data: pool(x, data.batch), batches, channels))
    own = entrant_of("ours", ours, lambda x, data: ours(x, Graph.from_data(data)), batches, channels)
    return comparison(own, result, batches, f"{channels} channels")


def entrant_of(name: str, layer: nn.Module, call: Call, batches: Sequence[Batch], channels: int) -> Entrant:
    """An entrant that calls a layer or net once on each batch."""
    xs = [leaf(batch.nodes, channels) for batch in batches]

    def run() -> Tensor:
        return torch.cat([call(x, batch.fresh()) for x, batch in zip(xs, batches, strict=True)])

    return entrant(name, layer, run, *xs)


def comparison(ours: Entrant, result: Sequence[Entrant], batches: Sequence[Batch], channels: str) -> Comparison:
    """The entrants on the same batches, with the sizes in words."""
    graphs, nodes, edges = (sum(counts) for counts in zip(*(
        (len(batch.sizes), batch.nodes, batch.edges.shape[1]) for batch in batches), strict=True))
    return Comparison(ours=ours, peers=tuple(result), edges=edges,
                      size=f"{len(batches)} batches, {graphs} graphs, {nodes:,} nodes, {edges:,} edges, {channels}")


def build_new_graphs(kind: str, channels: int) -> Comparison:
    """A layer on batches of 32 molecules, nothing of them known."""
    return _layer(kind, _GRAPHS, channels, Size())


#: Linear layers of x in a layer.
_LINEAR = {"gcn": 1, "gat": 1, "gatv2": 2, "transformer": 4, "sage": 2, "max": 2}
_KINDS = ("gcn", "gat", "gatv2", "transformer", "sage", "gin", "max")
#: Molecules for about 300, 1,600, 6,000 and 100,000 edges.
_COUNTS = {300: 6, 1600: 32, 6000: 120, 100000: 2000}

CASES = (
    *(Case(suite="new-graphs", name=f"{kind}-{edges}", build=partial(_layer, kind, count, 64), headline=edges == 1600)
      for kind in _KINDS for edges, count in _COUNTS.items()),
    *(Case(suite="new-graphs", name=f"net-{kind}-{count}x{nodes}x{channels}",
           build=partial(_network, kind, count, nodes, channels), headline=count == 16)
      for kind in _KINDS for count, nodes, channels in NETWORKS),
    *(Case(suite="new-graphs", name=f"pool-{kind}-{count}x{nodes}x{channels}",
           build=partial(_pool, kind, count, nodes, channels), headline=count == 16)
      for kind in ("sum", "mean", "max") for count, nodes, channels in NETWORKS),
)
