"""Neighbor sampling: 1,024 seeds with 15, 10 and 5 neighbors a hop, on graphs of 10 edges a node; steps and epochs.

Samplers draw other edges from other random numbers, so that what is compared is how many edges and nodes they draw.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn

import structconv.compat.pyg as compat
from benchmarks import peers
from benchmarks.case import FORWARD, Case, Comparison, Entrant, Size
from structconv import Adjacency, Conv, Identity
from structconv.data import NeighborLoader, blocks
from structconv.structures import Graph

__all__ = ["CASES"]

_SEEDS, _FANOUTS, _EPOCH_FANOUTS, _DEGREE = 1024, (15, 10, 5), (10, 5), 10
#: Seeds -> how many edges and nodes are sampled.
Counts = Callable[[Tensor], tuple[int, int]]


def _by_sorting(indptr: Tensor, sources: Tensor, seeds: Tensor) -> tuple[int, int]:
    """A sampler as one writes it with torch's operators: all edges of a hop, shuffled by a sort, the first of each."""
    nodes = frontier = seeds
    edges = 0
    for fanout in _FANOUTS:
        degrees = indptr[frontier + 1] - indptr[frontier]
        owner = torch.repeat_interleave(degrees)
        starts = degrees.cumsum(0) - degrees
        slots = torch.arange(len(owner)) - starts[owner] + indptr[frontier][owner]
        order = (owner + torch.rand(len(owner), dtype=torch.float64)).argsort()
        keep = torch.arange(len(owner)) - starts[owner] < fanout
        drawn = sources[slots[order][keep]]
        edges += len(drawn)
        known = nodes
        nodes, _ = torch.cat([nodes, drawn]).unique(return_inverse=True)
        frontier = nodes[~torch.isin(nodes, known)]
    return edges, len(nodes)


def _by_pyg_lib(sampler: Any, inputs: Any, seeds: Tensor) -> tuple[int, int]:
    result = sampler.sample_from_nodes(inputs(None, seeds))
    return len(result.row), len(result.node)


def _entrant(name: str, counts: Counts, region: Tensor) -> Entrant:
    generator = torch.Generator().manual_seed(0)

    def run() -> Tensor:
        seeds = region[torch.randperm(len(region), generator=generator)[:_SEEDS]]
        return torch.tensor(counts(seeds), dtype=torch.float64)

    return Entrant(name=name, run=run, phases=(FORWARD,))


def _sampling(edges: int, region: int | None, size: Size) -> Comparison:
    """Random edges within regions of `region` nodes; one region has the seeds. Nodes are numbered at random."""
    nodes = edges // _DEGREE
    region = nodes if region is None else region
    target = torch.randint(nodes, (edges,), dtype=torch.int32)
    source = target // region * region + torch.randint(region, (edges,), dtype=torch.int32)
    number = torch.randperm(nodes)
    graph = Graph(torch.stack([number[source].int(), number[target].int()]), num_nodes=nodes)
    del target, source
    sampler = NeighborLoader(graph, list(_FANOUTS)).neighbor_sampler
    relation = sampler.relations[None, None, None]
    indptr, sources, members = relation.indptr.long(), relation.sources.long(), number[:region]

    def ours(seeds: Tensor) -> tuple[int, int]:
        result = sampler.sample({None: seeds}, int(seeds.sum()))
        return len(result.edges[None, None, None]), len(result.nodes[None])

    rivals = [_entrant("torch", partial(_by_sorting, indptr, sources), members)]
    if (library := peers.pyg_lib()) is not None:
        data = library.data.Data(edge_index=graph.edge_index.long(), num_nodes=nodes)
        theirs = library.sampler.NeighborSampler(data, list(_FANOUTS))
        rivals.append(_entrant("pyg-lib", partial(_by_pyg_lib, theirs, library.sampler.NodeSamplerInput), members))
    drawn, reached = ours(members[:_SEEDS])
    return Comparison(ours=_entrant("ours", ours, members), peers=tuple(rivals), edges=edges, tolerance=0.02,
                      size=f"{nodes:,} nodes, {edges:,} edges; {drawn:,} edges and {reached:,} nodes sampled")


class _Sage(nn.Module):
    """Three layers, y = mean of neighbors W + x W_0, each over its block of a sample."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        mechanism = Adjacency("row").of("neighbors") | Identity().of("own")
        self.layers = nn.ModuleList(Conv(mechanism, {"neighbors": channels, "own": channels}, channels,
                                         bias=False)
                                    for _ in _FANOUTS)

    def forward(self, batch: Any) -> Tensor:
        x: Tensor = batch.features["x"]
        for layer, block in zip(self.layers, blocks(batch), strict=True):
            x = layer({"neighbors": x, "own": x[:block.num_outputs]}, block).relu()
        return x


class _Net(nn.Module):
    """Layers of PyTorch Geometric or of ours, over "blocks" of a sample, over "all" of it, or over what PyTorch
    Geometric's `trim_to_layer` leaves of it, "trimmed". The first block can read the features of the whole graph."""

    def __init__(self, library: Any, kind: str, over: str, channels: int, layers: int, features: Tensor | None = None,
                 **options: Any) -> None:
        super().__init__()
        self.features = features
        make = {"sage": lambda: library.SAGEConv(channels, channels, **options),
                "gcn": lambda: library.GCNConv(channels, channels, bias=False),
                "gat": lambda: library.GATConv(channels, channels // 4, 4, add_self_loops=False)}[kind]
        self.layers, self.over = nn.ModuleList(make() for _ in range(layers)), over
        self.trim = import_module("torch_geometric.utils").trim_to_layer if over == "trimmed" else None

    def forward(self, batch: Any) -> Tensor:
        if self.over == "blocks":
            if self.features is None:
                graphs, x = blocks(batch), batch.features["x"]
                own = x
            else:
                x = self.features
                graphs = blocks(batch, num_nodes=len(x))
                own = x.index_select(0, batch.n_id[:graphs[0].num_outputs])
            for layer, block in zip(self.layers, graphs, strict=True):
                x = own = layer((x, own[:block.num_outputs]), block.edge_index).relu()
            return x
        x = batch.features["x"]
        edges = batch.graph.edge_index
        for depth, layer in enumerate(self.layers):
            if self.trim is not None:
                x, edges, _ = self.trim(depth, batch.num_sampled_nodes, batch.num_sampled_edges, x, edges)
            x = layer(x, edges).relu()
        return x[:batch.batch_size]

    def gradients(self) -> Tensor:
        return torch.cat([p.grad.flatten() for p in self.parameters() if p.grad is not None])


def _as_pyg(library: Any, over: str, ours: _Sage, channels: int) -> _Net:
    """The same layers by PyTorch Geometric."""
    net = _Net(library, "sage", over, channels, len(_FANOUTS), bias=False)
    for layer, own in zip(net.layers, ours.layers, strict=True):
        neighbors, root = (theta.detach().view(channels, channels).t() for theta in own.parameters())
        layer.load_state_dict({"lin_l.weight": neighbors, "lin_r.weight": root})
    return net


def _step(edges: int, channels: int, size: Size) -> Comparison:
    """A step of an epoch: the neighbors of 1,024 seeds are drawn, features read, and three SAGE layers applied.

    Peers apply their layers to what our loader samples, the same for all.
    """
    nodes = edges // _DEGREE
    graph, x = Graph(torch.randint(nodes, (2, edges)), num_nodes=nodes), torch.randn(nodes, channels)
    ours = _Sage(channels)
    nets: dict[str, nn.Module] = {"ours": ours}
    if (library := peers.geometric()) is not None:
        nets |= {"pyg": _as_pyg(library, "all", ours, channels),
                 "pyg-trimmed": _as_pyg(library, "trimmed", ours, channels)}

    loader = NeighborLoader(graph, list(_FANOUTS), features={"x": x})

    def run(net: nn.Module) -> Tensor:
        torch.manual_seed(0)  # all entrants draw the same
        result: Tensor = net(loader(torch.arange(_SEEDS)))
        return result

    own, *rivals = (Entrant(name=name, run=partial(run, net), parameters=tuple(net.parameters()))
                    for name, net in nets.items())
    return Comparison(ours=own, peers=tuple(rivals), edges=edges,
                      size=f"{nodes:,} nodes, {edges:,} edges, {channels} channels")


class _GCN(_Net):
    """The net of GCN layers over blocks, which PyTorch Geometric's do not take."""

    def __init__(self, net: _Net, channels: int, features: Tensor) -> None:
        nn.Module.__init__(self)
        self.features = features
        self.layers = nn.ModuleList(Conv(Adjacency(None), channels, channels, bias=False) for _ in _EPOCH_FANOUTS)
        for own, theta in zip(net.parameters(), self.parameters(), strict=True):
            theta.data.copy_(own.detach().t().view_as(theta))

    def forward(self, batch: Any) -> Tensor:
        x = self.features
        assert x is not None
        graphs = blocks(batch, normalize="sym", self_loops=True, num_nodes=len(x))
        for layer, block in zip(self.layers, graphs, strict=True):
            x = layer(x, block).relu()
        return x

    def gradients(self) -> Tensor:
        return torch.cat([p.grad.squeeze(0).t().flatten() for p in self.parameters() if p.grad is not None])


def _epoch(kind: str, training: bool, channels: int, size: Size) -> Comparison:
    """All nodes as seeds in batches of 1,024: neighbors are drawn, features read, layers applied and, in training, the
    gradients of the squares added up over the batches.

    Peers apply their layers to what our loader samples, the same for all. Ours compute only what the seeds need, and
    but for GAT, which multiplies features by weights first, read them in the whole graph.
    """
    edges = size.pick(10**5, 10**6)
    nodes = edges // _DEGREE
    source = torch.randint(nodes, (edges,))
    target = (source + torch.randint(1, nodes, (edges,))) % nodes  # no loops, which PyTorch Geometric's GCN replaces
    graph, x = Graph(torch.stack([source, target]), num_nodes=nodes), torch.randn(nodes, channels)
    loader, bare = (NeighborLoader(graph, list(_EPOCH_FANOUTS), batch_size=_SEEDS, shuffle=True, features=features)
                    for features in ({"x": x}, None))
    nets = {"ours": _Net(compat, kind, "blocks", channels, len(_EPOCH_FANOUTS), None if kind == "gat" else x)}
    if (library := peers.geometric()) is not None:
        nets["pyg"] = _Net(library, kind, "all", channels, len(_EPOCH_FANOUTS))
        if kind != "gcn":
            nets["pyg-blocks"] = _Net(library, kind, "blocks", channels, len(_EPOCH_FANOUTS))
    for net in nets.values():
        net.load_state_dict(nets["ours"].state_dict())
    if kind == "gcn":
        nets["ours"] = _GCN(nets["ours"], channels, x)

    def run(net: _Net) -> Tensor:
        torch.manual_seed(0)  # all entrants draw the same
        batches = loader if net.features is None else bare
        if not training:
            return torch.cat([net(batch) for batch in batches])
        net.zero_grad()
        with torch.enable_grad():
            for batch in batches:
                net(batch).square().mean().backward()
        return net.gradients()

    own, *rivals = (Entrant(name=name, run=partial(run, net), phases=(FORWARD,)) for name, net in nets.items())
    return Comparison(ours=own, peers=tuple(rivals), edges=edges,
                      size=f"{nodes:,} nodes and seeds, {edges:,} edges, {channels} channels")


CASES = (
    Case(suite="sampling", name="sage-step-1e6", build=partial(_step, 10**6, 128), headline=False),
    *(Case(suite="sampling", name=f"{kind}-epoch-{phase}", build=partial(_epoch, kind, phase == "training", 128),
           headline=False) for kind in ("sage", "gcn", "gat") for phase in ("inference", "training")),
    Case(suite="sampling", name="uniform-1e6", build=partial(_sampling, 10**6, None)),
    *(Case(suite="sampling", name=f"region-1e{power}", build=partial(_sampling, 10**power, 10**4), headline=power == 5)
      for power in (5, 6, 7, 8)),
)
