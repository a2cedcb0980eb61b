"""Mini-batches of nodes drawn at random or by clusters, with all edges between them: GraphSAINT, Cluster-GCN, HGT."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from structconv.arguments import checked, plain
from structconv.data.checks import check_counts, check_edges, check_indices, check_range
from structconv.data.loaders import Loader, input_nodes_of
from structconv.data.sources import PLAIN_EDGE, PLAIN_NODE, Source, source_of
from structconv.data.subgraphs import NodeType, Sampler, Subgraph, in_edges
from structconv.errors import ConfigError, ShapeError, StructconvError, StructureError
from structconv.primitives.hashing import hash_bits
from structconv.primitives.sampling import InEdges, draw_neighbors, random_below
from structconv.shapes import check_natural, check_positive, check_seed

__all__ = ["ClusterData", "ClusterLoader", "GraphSAINTEdgeSampler", "GraphSAINTNodeSampler",
           "GraphSAINTRandomWalkSampler", "HGTLoader", "partition", "random_walk"]

_MOST_NEIGHBORS = 520  # HGT: of a node with more, this number of random ones
_ROUNDS = 40  # of `partition`


class _InducedLoader(Loader):
    """Batches of nodes with all edges between them, drawn from `length` positions."""

    def __init__(self, source: Source, length: int, *, is_sorted: bool = False,
                 transform_sampler_output: Callable[[Any], Any] | None = None, **options: Any) -> None:
        sampler = Sampler(source.relations(None, None, is_sorted),
                          {kind: source.num_nodes(kind) for kind in source.node_types}, [], subgraph_type="induced")
        super().__init__(source, sampler, length, transform_sampler_output=transform_sampler_output, **options)

    def _subgraph(self, index: Tensor, seed: int) -> Subgraph:
        return self.neighbor_sampler.sample(self._nodes(index, seed), seed)

    def _nodes(self, index: Tensor, seed: int) -> dict[NodeType, Tensor]:
        raise NotImplementedError

    def _add_inputs(self, batch: Any, inputs: dict[str, Any]) -> None:
        for name, value in inputs.items():
            setattr(batch, name, value)


def _untyped(owner: str, data: Any, features: Mapping[str, Tensor] | None) -> Source:
    try:
        source = source_of(data, features)
    except StructconvError as error:
        error.rename(owner)
        raise
    if source.typed:
        raise ConfigError(owner, "data must have one type of nodes", type(data).__name__)
    return source


# -- GraphSAINT ---------------------------------------------------------------------------------------------------

class _GraphSAINT(_InducedLoader):

    def __init__(self, data: Any, batch_size: int, num_steps: int = 1, sample_coverage: int = 0, *,
                 features: Mapping[str, Tensor] | None = None, transform: Callable[[Any], Any] | None = None,
                 filter_per_worker: bool | None = None, seed: int | None = None, **options: Any) -> None:
        owner = type(self).__name__
        source = _untyped(owner, data, features)
        check_positive(owner, "batch_size", batch_size)
        check_positive(owner, "num_steps", num_steps)
        check_natural(owner, "sample_coverage", sample_coverage)
        self.edge_index, self.num_nodes = source.edge_index(PLAIN_EDGE).cpu().long(), source.num_nodes(PLAIN_NODE)
        if not self.num_nodes:
            raise StructureError(owner, "data must have nodes", 0)
        self.num_drawn = batch_size
        super().__init__(source, num_steps, transform=transform, filter_per_worker=filter_per_worker, seed=seed,
                         **options)
        self.norms: tuple[Tensor, Tensor] | None = None
        if sample_coverage:
            self.norms = self._norms(sample_coverage, seed or 0)

    def _draw(self, seed: int) -> Tensor:
        """Nodes, some more than once."""
        raise NotImplementedError

    def _nodes(self, index: Tensor, seed: int) -> dict[NodeType, Tensor]:
        return {PLAIN_NODE: self._draw(seed).unique()}

    def _subgraph(self, index: Tensor, seed: int) -> Subgraph:
        result = super()._subgraph(index, seed)
        if self.norms is not None:
            result.inputs = {"node_norm": self.norms[0][result.nodes[PLAIN_NODE]],
                             "edge_norm": self.norms[1][result.edges[PLAIN_EDGE]]}
        return result

    def _norms(self, coverage: int, seed: int) -> tuple[Tensor, Tensor]:
        node_counts, edge_counts = torch.zeros(self.num_nodes), torch.zeros(self.edge_index.shape[1])
        batches = total = 0
        while total < self.num_nodes * coverage:
            sample = self._subgraph(torch.tensor([0]), int(hash_bits(torch.tensor(seed), torch.tensor(batches))))
            node_counts[sample.nodes[PLAIN_NODE]] += 1
            edge_counts[sample.edges[PLAIN_EDGE]] += 1
            batches, total = batches + 1, total + len(sample.nodes[PLAIN_NODE])
        ratio = node_counts[self.edge_index[1]] / edge_counts  # a message is added up at its target
        return (batches / node_counts.clamp(min=0.1) / self.num_nodes,
                ratio.clamp(max=1e4).masked_fill(ratio.isnan(), 0.1))


class GraphSAINTNodeSampler(_GraphSAINT):
    """Batches of nodes drawn in proportion to their numbers of outgoing edges, with all edges between them.

    Args:
        data: PyTorch Geometric's `Data`, or a `Graph`.
        batch_size: draws for each batch; a node may be drawn more than once.
        num_steps: batches of an epoch.
        sample_coverage: if positive, batches have `node_norm` (N,), a weight for the loss of each node, and `edge_norm`
            (E,), a factor for each message, which correct the bias of the draws. They are measured over so many draws
            of each node on average. `edge_norm` is the number of batches with the target of the edge, divided by the
            number of batches with the edge: the sum of the weighted messages at a node then has the expectation of the
            sum over the whole graph. A mean is such a sum with edge weights of 1 / (edges into the target in the whole
            graph). PyTorch Geometric counts the batches with the source instead, which leaves a bias unless both ends
            are equally likely.
        features, transform, seed, options: those of `NeighborLoader`.

    Yields:
        `Data`, or a `NeighborBatch`, with `n_id` and `e_id`.

    Raises:
        ConfigError: for a graph with types, or counts below 1.
        StructureError: for a graph without nodes, or without edges to draw from.

    Example:

        >>> from structconv import Graph
        >>> from structconv.data import GraphSAINTNodeSampler
        >>> graph = Graph(torch.tensor([[0, 1, 2, 3], [1, 2, 3, 0]]), num_nodes=4)
        >>> batch = next(iter(GraphSAINTNodeSampler(graph, batch_size=50, seed=0)))
        >>> batch.n_id, batch.e_id
        (tensor([0, 1, 2, 3]), tensor([3, 0, 1, 2]))

    Reference: Zeng et al., *GraphSAINT: graph sampling based inductive learning method*, 2020, sections 3.2 and 3.4.
    """

    def _draw(self, seed: int) -> Tensor:
        count = self.edge_index.shape[1]
        if not count:
            raise StructureError(type(self).__name__, "data must have edges", 0)
        return self.edge_index[0, random_below(count, seed, torch.arange(self.num_drawn))]


class GraphSAINTEdgeSampler(_GraphSAINT):
    """Batches of the ends of random edges, with all edges between them.

    An edge is drawn in proportion to 1 / (edges out of its source) + 1 / (edges into its target), without replacement.
    Arguments and batches are those of `GraphSAINTNodeSampler`; `batch_size` is the number of edges. A batch costs O(E).

    Example:

        >>> from structconv import Graph
        >>> from structconv.data import GraphSAINTEdgeSampler
        >>> graph = Graph(torch.tensor([[0, 1, 2, 3], [1, 2, 3, 0]]), num_nodes=4)
        >>> next(iter(GraphSAINTEdgeSampler(graph, batch_size=1, seed=0))).n_id.shape
        torch.Size([2])
    """

    def __init__(self, data: Any, batch_size: int, num_steps: int = 1, sample_coverage: int = 0, **options: Any
                 ) -> None:
        source, target = _untyped(type(self).__name__, data, options.get("features")).edge_index(PLAIN_EDGE).cpu()
        self.chances = 1 / source.bincount()[source.long()].double() + 1 / target.bincount()[target.long()]
        super().__init__(data, batch_size, num_steps, sample_coverage, **options)

    def _draw(self, seed: int) -> Tensor:
        drawn = _without_replacement(self.chances, self.num_drawn, seed, torch.arange(len(self.chances)))
        return self.edge_index[:, drawn].flatten()


class GraphSAINTRandomWalkSampler(_GraphSAINT):
    """Batches of the nodes that random walks visit, with all edges between them.

    Walks follow the edges; each starts at a random node. Arguments and batches are those of `GraphSAINTNodeSampler`.

    Args:
        batch_size: the number of walks.
        walk_length: the number of steps of each.

    Example:

        >>> from structconv import Graph
        >>> from structconv.data import GraphSAINTRandomWalkSampler
        >>> graph = Graph(torch.tensor([[0, 1, 2, 3], [1, 2, 3, 0]]), num_nodes=4)
        >>> loader = GraphSAINTRandomWalkSampler(graph, batch_size=1, walk_length=2, num_steps=5, seed=0)
        >>> [batch.graph.edge_index.shape[1] for batch in loader]
        [2, 2, 2, 2, 2]
    """

    def __init__(self, data: Any, batch_size: int, walk_length: int, num_steps: int = 1, sample_coverage: int = 0,
                 **options: Any) -> None:
        self.walk_length = check_natural(type(self).__name__, "walk_length", walk_length)
        super().__init__(data, batch_size, num_steps, sample_coverage, **options)

    @cached_property
    def out_edges(self) -> InEdges:
        """The edges by source, whose targets a walk draws."""
        return in_edges(self.edge_index.flip(0), (self.num_nodes, self.num_nodes))

    def __getstate__(self) -> dict[str, Any]:
        """Leave out the edges by source, which each worker makes."""
        return {name: value for name, value in super().__getstate__().items() if name != "out_edges"}

    def _draw(self, seed: int) -> Tensor:
        start = random_below(self.num_nodes, seed, torch.arange(self.num_drawn))
        return _walks(self.out_edges, start, self.walk_length, seed).flatten()


def random_walk(edge_index: Tensor, start: Tensor, length: int, *, num_nodes: int, seed: int = 0) -> Tensor:
    """Return walks along edges, each step to one of the neighbors with equal chances; a node without one is not left.

    Args:
        edge_index: (2, E) integers, from `edge_index[0]` to `edge_index[1]`.
        start: (W,) integers, where each walk begins.
        length: the number of steps.
        num_nodes: N.
        seed: equal seeds give equal walks.

    Returns:
        (W, length + 1) int64, the nodes of each walk.

    Cost: O(E + W length).

    Raises:
        StructureError: a start or an edge is out of range.
        ConfigError: an argument is of another type, or `length` is negative.

    Example:

        >>> from structconv.data import random_walk
        >>> random_walk(torch.tensor([[0, 1, 2], [1, 2, 3]]), torch.tensor([0, 2]), 3, num_nodes=4)
        tensor([[0, 1, 2, 3],
                [2, 3, 3, 3]])
    """
    owner, (length, num_nodes, seed) = "random_walk", map(plain, (length, num_nodes, seed))
    check_natural(owner, "length", length)
    check_seed(owner, seed)
    edges = check_edges(owner, edge_index, num_nodes)
    first = check_indices(owner, "start", start).cpu().long()
    if first.dim() != 1:
        raise ShapeError(owner, "start must have the shape (W,)", tuple(first.shape))
    check_range(owner, "start", first, num_nodes)
    return _walks(in_edges(edges.flip(0), (num_nodes, num_nodes)), first, length, seed)


def _walks(out_edges: InEdges, start: Tensor, length: int, seed: int) -> Tensor:
    visited, walks = [start.contiguous()], torch.arange(len(start))
    for step in range(length):
        neighbors, _, at = draw_neighbors(out_edges, visited[-1], 1, seed=seed, relation=step, groups=walks,
                                          replace=True)
        visited.append(visited[-1].index_put((at,), neighbors))
    return torch.stack(visited, 1)


def _without_replacement(chances: Tensor, count: int, seed: int, *indices: Tensor) -> Tensor:
    """Positions of `count` entries, each next one drawn in proportion to the chances that are left. The smallest of
    exponential variables with rates c_i is that of i with the probability c_i / sum c."""
    uniform = (hash_bits(torch.tensor(seed), *indices).double() + 0.5) * 2.0**-32
    arrival = -uniform.log() / chances
    return arrival.topk(min(count, int((chances > 0).sum())), largest=False).indices


# -- clusters -----------------------------------------------------------------------------------------------------

def partition(edge_index: Tensor, num_nodes: int, num_parts: int, *, slack: float = 0.1, seed: int = 0) -> Tensor:
    """Return parts of nearly equal size with few edges between them.

    Parts grow from random nodes; then nodes move to the part of most of their neighbors while it has room. METIS finds
    better parts of graphs without a clear order; give its result to `ClusterData` where you have it.

    Args:
        edge_index: (2, E) integers; directions do not count.
        slack: a part has at most ceil((1 + slack) N / num_parts) nodes.

    Returns:
        (N,) int64, the part of each node.

    Cost: O(E log E) a round, 80 rounds at most.

    Raises:
        ConfigError: there are not between 1 and N parts, or slack is negative.

    Example:

        >>> from structconv.data import partition
        >>> ring = torch.stack([torch.arange(12), torch.arange(1, 13) % 12])
        >>> part = partition(ring, 12, 3, slack=0.25)
        >>> bool(part.bincount().max() <= 5), bool((part[ring[0]] != part[ring[1]]).sum() <= 5)
        (True, True)
    """
    owner, (num_nodes, num_parts, slack, seed) = "partition", map(plain, (num_nodes, num_parts, slack, seed))
    edges = check_edges(owner, edge_index, num_nodes)
    if type(num_parts) is not int or not 1 <= num_parts <= max(num_nodes, 1):
        raise ConfigError(owner, f"num_parts must be in [1, N={num_nodes}]", repr(num_parts))
    if type(slack) not in (int, float) or not 0 <= slack < math.inf:
        raise ConfigError(owner, "slack must be a finite number >= 0", repr(slack))
    check_seed(owner, seed)
    room = min(-int(-(1 + slack) * num_nodes // num_parts), num_nodes)
    both = torch.cat([edges, edges.flip(0)], 1)
    part = torch.full((num_nodes,), -1)
    random = hash_bits(torch.tensor(seed), torch.arange(num_nodes)).argsort()
    part[random[:num_parts]] = torch.arange(num_parts)
    for grown in (False, True):
        for round_ in range(_ROUNDS):
            if not _moved(part, both, room, num_parts, grown, seed + round_):
                break
        if not grown:
            _fill(part, room, num_parts)
    return part


def _moved(part: Tensor, both: Tensor, room: int, num_parts: int, grown: bool, seed: int) -> bool:
    """Move nodes to parts where they have more neighbors, those without a part first; False if none moved."""
    source, target = both
    known = part[source] >= 0
    pairs, count = (target[known] * num_parts + part[source[known]]).unique(return_counts=True)
    node, label = pairs // num_parts, pairs % num_parts
    here = torch.zeros_like(part).index_add(0, node, count * (label == part[node]))
    gain = count - here[node]
    moving = (gain > 0) & (label != part[node])
    if grown:  # neighbors that move at once would trade places: half of the nodes rest
        moving &= hash_bits(torch.tensor(seed), node) % 2 == 0
    else:
        moving &= part[node] < 0
    node, label, gain = node[moving], label[moving], gain[moving]
    rising = gain.argsort(stable=True)
    best = torch.full((len(part),), -1).scatter_reduce(0, node[rising], torch.arange(len(node)), "amax")
    best = rising[best[best >= 0].sort(descending=True).values]  # the best move of each node, the best of all first
    order = label[best].argsort(stable=True)
    movers, arriving = node[best][order], label[best][order]
    free = room - part[part >= 0].bincount(minlength=num_parts)
    first = torch.searchsorted(arriving, torch.arange(num_parts))
    fits = torch.arange(len(movers)) - first[arriving] < free[arriving]
    part[movers[fits]] = arriving[fits]
    return bool(fits.any())


def _fill(part: Tensor, room: int, num_parts: int) -> None:
    """Give nodes that no part has reached to those with room, in order."""
    free = room - part[part >= 0].bincount(minlength=num_parts)
    left = (part < 0).nonzero().flatten()
    part[left] = torch.repeat_interleave(free)[:len(left)]


class ClusterData:
    """A graph in clusters, the parts of `partition`. Item i is the graph of cluster i, without edges to the others.

    Args:
        data: PyTorch Geometric's `Data`, or a `Graph`.
        num_parts: the number of clusters.
        cluster: (N,) integers, the cluster of each node; by default that of `partition`.
        features: of the nodes of a `Graph`, by name.
        seed: of the partition.

    Raises:
        ConfigError: for a graph with types, or a number of parts that does not fit.
        ShapeError: if `cluster` is not (N,).
        StructureError: if `cluster` is not in [0, num_parts).

    Example:

        >>> from structconv import Graph
        >>> from structconv.data import ClusterData
        >>> graph = Graph(torch.tensor([[0, 1, 2, 3, 1], [1, 0, 3, 2, 2]]), num_nodes=4)
        >>> clusters = ClusterData(graph, 2, cluster=torch.tensor([0, 0, 1, 1]))
        >>> clusters[1].n_id, clusters[1].e_id
        (tensor([2, 3]), tensor([3, 2]))

    Reference: Chiang et al., *Cluster-GCN*, 2019, algorithm 1.
    """

    @checked
    def __init__(self, data: Any, num_parts: int, *, cluster: Tensor | None = None,
                 features: Mapping[str, Tensor] | None = None, seed: int = 0) -> None:
        check_seed("ClusterData", seed)
        check_positive("ClusterData", "num_parts", num_parts)
        self.source, self.num_parts = _untyped("ClusterData", data, features), num_parts
        size = self.source.num_nodes(PLAIN_NODE)
        if cluster is None:
            cluster = partition(self.source.edge_index(PLAIN_EDGE), size, num_parts, seed=seed)
        if cluster.shape != (size,):
            raise ShapeError("ClusterData", f"cluster must have the shape (N,)=({size},)", tuple(cluster.shape))
        self.cluster = check_indices("ClusterData", "cluster", cluster).cpu().long()
        check_range("ClusterData", "cluster", self.cluster, num_parts)
        self.nodes = self.cluster.argsort(stable=True).split(self.cluster.bincount(minlength=num_parts).tolist())

    def __len__(self) -> int:
        return self.num_parts

    @cached_property
    def _single(self) -> ClusterLoader:
        """The loader of single clusters, whose sorted edges only items need."""
        return ClusterLoader(self, seed=0)

    def __getitem__(self, index: int) -> Any:
        index = plain(index)
        if type(index) is not int:
            raise ConfigError("ClusterData", "index must be an integer, the number of a cluster",
                              type(index).__name__, "Batches of several clusters are those of ClusterLoader.")
        if not -self.num_parts <= index < self.num_parts:
            raise IndexError(f"cluster must be in [0, {self.num_parts}); got {index}")
        return self._single([index % self.num_parts])


class ClusterLoader(_InducedLoader):
    """Batches of clusters with all edges within and between them.

    Args:
        cluster_data: a `ClusterData`.
        transform, seed, options: those of `NeighborLoader`; `batch_size` is the number of clusters.

    Yields:
        `Data`, or a `NeighborBatch`, with `n_id` and `e_id`.

    Example:

        >>> from structconv import Graph
        >>> from structconv.data import ClusterData, ClusterLoader
        >>> graph = Graph(torch.tensor([[0, 1, 2, 3], [1, 0, 3, 2]]), num_nodes=4)
        >>> clusters = ClusterData(graph, 2, cluster=torch.tensor([0, 0, 1, 1]))
        >>> [batch.e_id.shape[0] for batch in ClusterLoader(clusters, batch_size=2)]
        [4]
    """

    def __init__(self, cluster_data: ClusterData, *, transform: Callable[[Any], Any] | None = None,
                 filter_per_worker: bool | None = None, seed: int | None = None, **options: Any) -> None:
        if not isinstance(cluster_data, ClusterData):
            raise ConfigError("ClusterLoader", "cluster_data must be a ClusterData", type(cluster_data).__name__)
        self.members, self.sizes = torch.cat(cluster_data.nodes), list(map(len, cluster_data.nodes))
        super().__init__(cluster_data.source, len(cluster_data), transform=transform,
                         filter_per_worker=filter_per_worker, seed=seed, **options)

    def _nodes(self, index: Tensor, seed: int) -> dict[NodeType, Tensor]:
        clusters = self.members.split(self.sizes)
        return {PLAIN_NODE: torch.cat([clusters[i] for i in index.tolist()])}


# -- HGT ----------------------------------------------------------------------------------------------------------

class HGTLoader(_InducedLoader):
    """Batches of a typed graph with as many nodes of each type, drawn where many sampled nodes lead.

    Each round draws `num_samples` nodes of each type without replacement, in proportion to the square of their budget:
    the sum, over sampled nodes that the node has an edge to and over relations, of 1 / (edges of the relation into the
    sampled node). The batch has all edges between its nodes.

    Args:
        data: PyTorch Geometric's `HeteroData`.
        num_samples: nodes of each type for each round; or a mapping from types to such lists.
        input_nodes: the seeds: a type, or a pair of a type and indices or a mask.
        is_sorted, transform, transform_sampler_output, filter_per_worker, seed, options: those of `NeighborLoader`.

    Yields:
        `HeteroData` with `n_id`, `e_id`, and `batch_size` and `input_id` of the type of the seeds, which come first.

    Raises:
        ConfigError: for unknown types, or counts that are negative.

    Example:

        >>> from structconv.data import HGTLoader
        >>> from torch_geometric.data import HeteroData
        >>> data = HeteroData(author={"x": torch.randn(5, 8)}, paper={"x": torch.randn(3, 8)})
        >>> data["author", "writes", "paper"].edge_index = torch.tensor([[0, 1, 4], [0, 0, 2]])
        >>> batch = next(iter(HGTLoader(data, [2, 2], ("paper", None), batch_size=1)))

    Reference: Hu et al., *Heterogeneous graph transformer*, 2020, algorithms 1 and 2. Of a node with more than 520
    edges of a relation this number of random ones count.
    """

    def __init__(self, data: Any, num_samples: Sequence[int] | Mapping[str, Sequence[int]], input_nodes: Any,
                 is_sorted: bool = False, transform: Callable[[Any], Any] | None = None,
                 transform_sampler_output: Callable[[Any], Any] | None = None,
                 filter_per_worker: bool | None = None, *, seed: int | None = None, **options: Any) -> None:
        source = source_of(data, None)
        expected = f"counts for types out of {source.node_types}"
        samples = num_samples if isinstance(num_samples, Mapping) else dict.fromkeys(source.node_types, num_samples)
        self.num_samples: dict[NodeType, list[int]] = {
            kind: check_counts("HGTLoader", "num_samples", counts, expected, 0) for kind, counts in samples.items()}
        if {*self.num_samples} - {*source.node_types}:
            raise ConfigError("HGTLoader", f"num_samples must be {expected}", num_samples)
        self.input_type, self.seeds, self.input_id = input_nodes_of(source, input_nodes, None)
        super().__init__(source, len(self.seeds), is_sorted=is_sorted, transform=transform,
                         transform_sampler_output=transform_sampler_output, filter_per_worker=filter_per_worker,
                         seed=seed, **options)

    def _subgraph(self, index: Tensor, seed: int) -> Subgraph:
        result = super()._subgraph(index, seed)
        result.inputs = {"input_id": index if self.input_id is None else self.input_id[index],
                         "batch_size": len(index)}
        return result

    def _add_inputs(self, batch: Any, inputs: dict[str, Any]) -> None:
        super()._add_inputs(self.source.store(batch, self.input_type), inputs)

    def _nodes(self, index: Tensor, seed: int) -> dict[NodeType, Tensor]:
        empty = torch.empty(0, dtype=torch.int64)
        nodes = dict.fromkeys(self.source.node_types, empty)
        nodes[self.input_type] = self.seeds[index]
        budget = {kind: (empty, empty.double()) for kind in nodes}
        fresh = dict(nodes)
        for round_ in range(max(map(len, self.num_samples.values()), default=0)):
            self._spend(budget, fresh, nodes, seed + round_)
            fresh = dict.fromkeys(nodes, empty)
            for number, (kind, counts) in enumerate(self.num_samples.items()):
                known, values = budget[kind]
                drawn = _without_replacement(values.square(), counts[round_] if round_ < len(counts) else 0, seed,
                                             torch.tensor(round_ * len(nodes) + number), known)
                fresh[kind] = known[drawn]
                nodes[kind] = torch.cat([nodes[kind], fresh[kind]])
        return nodes

    def _spend(self, budget: dict[NodeType, tuple[Tensor, Tensor]], fresh: Mapping[NodeType, Tensor],
               nodes: Mapping[NodeType, Tensor], seed: int) -> None:
        """Add what nodes that came last give to the sources of their edges; sampled nodes have no budget."""
        for number, (relation, edges) in enumerate(self.neighbor_sampler.relations.items()):
            source, _, target = relation
            ends = fresh[target].unique()
            neighbors, _, at = draw_neighbors(edges, ends, _MOST_NEIGHBORS, seed=seed, relation=number)
            share = 1 / at.bincount(minlength=len(ends)).double()
            known, inverse = torch.cat([budget[source][0], neighbors]).unique(return_inverse=True)
            sums = torch.zeros(len(known), dtype=torch.float64).index_add(
                0, inverse, torch.cat([budget[source][1], share[at]]))
            budget[source] = known, sums
        for kind, (known, sums) in budget.items():
            left = ~torch.isin(known, nodes[kind])
            budget[kind] = known[left], sums[left]
