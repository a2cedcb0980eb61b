"""`Sampler`: the subgraph of nodes and edges that lead to some seeds within a number of hops."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from structconv.data.checks import check_counts, check_times
from structconv.errors import ConfigError, ShapeError, StructureError
from structconv.primitives.layout import check_bounds, layouts
from structconv.primitives.sampling import InEdges, Numbers, draw_neighbors
from structconv.shapes import check_choice

__all__ = ["EdgeType", "NodeType", "Sampler", "Subgraph", "in_edges"]

#: `None` where there is one kind of nodes.
NodeType = str | None
#: Kind of the source, name of the relation, kind of the target.
EdgeType = tuple[NodeType, str | None, NodeType]


@dataclass
class Subgraph:
    """Sampled nodes and edges by type.

    Args:
        nodes: the sampled nodes, seeds first, then those of each hop.
        rows, cols: positions in `nodes` where each edge begins and ends.
        edges: the numbers of the edges; `None` if some are those of another type, reversed.
        groups: with disjoint subgraphs, the position of the seed of each node among all seeds.
        num_sampled_nodes, num_sampled_edges: the numbers of nodes, seeds first, and of edges in each hop.
        inputs: attributes of the seeds that the loader adds.
    """

    nodes: dict[NodeType, Tensor]
    rows: dict[EdgeType, Tensor]
    cols: dict[EdgeType, Tensor]
    edges: dict[EdgeType, Any]
    groups: dict[NodeType, Tensor] | None
    num_sampled_nodes: dict[NodeType, list[int]] | None
    num_sampled_edges: dict[EdgeType, list[int]] | None
    inputs: dict[str, Any] = field(default_factory=dict)


def in_edges(edge_index: Tensor, sizes: tuple[int, int], *, edge_times: Tensor | None = None,
             node_times: Tensor | None = None, weights: Tensor | None = None, is_sorted: bool = False) -> InEdges:
    """Edges (2, E) of M sources and N targets as the sampler reads them, with weights (E,) and the times (E,) of the
    edges, or (M,) of the nodes where they begin. With `is_sorted` they are in the order of their targets, those of a
    target in the order of times, and are not copied. O(E), or O(E log E) with times."""
    edge_index = torch.Tensor.as_subclass(edge_index.detach(), Tensor).cpu()
    edge_times, node_times = (check_times("NeighborLoader", "times", times) for times in (edge_times, node_times))
    source, target = edge_index
    if is_sorted or edge_times is not None or node_times is not None:
        check_bounds("NeighborLoader", "edge_index", "edge", edge_index, (("num_sources", sizes[0]),
                                                                         ("num_targets", sizes[1])))
    if is_sorted:
        if bool((target[1:] < target[:-1]).any()):
            raise StructureError("NeighborLoader", "with is_sorted=True the targets edge_index[1] must not fall",
                                 int((target[1:] < target[:-1]).nonzero()[0]) + 1)
        starts = torch.arange(sizes[1] + 1, dtype=target.dtype)
        order = None
        indptr = torch.searchsorted(target.contiguous(), starts, out_int32=source.dtype is torch.int32)
        index = source.contiguous()
    elif edge_times is None and node_times is None:
        try:
            indptr, index, order = layouts(edge_index, *sizes)[0]
        except (ShapeError, StructureError) as error:
            error.rename("NeighborLoader")
            raise
        order = order.to(index.dtype)
    else:
        times = edge_times if edge_times is not None else node_times[source]  # type: ignore[index]
        by_time = times.argsort(stable=True)
        order = by_time[target[by_time].argsort(stable=True)]
        starts = torch.arange(sizes[1] + 1)
        indptr, index = torch.searchsorted(target[order].long(), starts), source[order].long()
    if order is not None and edge_times is not None:
        edge_times = edge_times[order]
    if weights is not None:
        weights = weights.detach().cpu().double().flatten()
        if weights.shape != target.shape:
            raise ShapeError("NeighborLoader", f"weights of edges must have the shape (E={len(target)},)",
                             tuple(weights.shape))
        weights = weights.contiguous() if order is None else weights[order.long()]
        if not bool((torch.isfinite(weights) & (weights >= 0)).all()):
            raise StructureError("NeighborLoader", "weights of edges must be finite and not negative",
                                 float(weights.min()))
    return InEdges(indptr, index, order, edge_times, node_times, weights)


class Sampler:
    """Draw neighbors of seeds, then neighbors of these, hop by hop: `num_neighbors` for each hop, -1 for all, or such a
    list for each type of edges. The other options are those of `NeighborLoader`."""

    def __init__(self, relations: Mapping[EdgeType, InEdges], num_nodes: Mapping[NodeType, int],
                 num_neighbors: Sequence[int] | Mapping[EdgeType, Sequence[int]], *, replace: bool = False,
                 disjoint: bool = False, subgraph_type: str = "directional", temporal_strategy: str = "uniform"
                 ) -> None:
        self.relations, self.num_nodes = dict(relations), dict(num_nodes)
        self.fanouts = _fanouts(num_neighbors, self.relations)
        self.hops = max(map(len, self.fanouts.values()), default=0)
        self.replace = replace
        self.subgraph_type = str(getattr(subgraph_type, "value", subgraph_type))
        check_choice("NeighborLoader", "subgraph_type", self.subgraph_type,
                     ("directional", "bidirectional", "induced"))
        check_choice("NeighborLoader", "temporal_strategy", temporal_strategy, ("uniform", "last"))
        self.last = temporal_strategy == "last"
        self.node_times = {source: edges.node_times for (source, _, _), edges in self.relations.items()
                           if edges.node_times is not None}
        self.temporal = bool(self.node_times) or any(e.edge_times is not None for e in self.relations.values())
        self.disjoint = disjoint or self.temporal
        self.reverses = _reverses([*self.relations]) if self.subgraph_type == "bidirectional" else {}

    def own_storages(self) -> None:
        """Copy the edges, so that each tensor has a storage of its own."""
        self.relations = {kind: InEdges(*(None if part is None else part.clone() for part in edges))  # type: ignore[arg-type]
                          for kind, edges in self.relations.items()}
        self.node_times = {kind[0]: edges.node_times for kind, edges in self.relations.items()
                           if edges.node_times is not None}

    def sample(self, seeds: Mapping[NodeType, Tensor], seed: int, times: Mapping[NodeType, Tensor] | None = None
               ) -> Subgraph:
        """Sample the subgraph of some seeds, nodes by type, the same for the same `seed`; `times` are by default those
        of the nodes. O(1) a sampled edge."""
        run = _Run(self, seeds, seed, times)
        for hop in range(self.hops):
            run.draw(hop)
        result = run.subgraph()
        if self.subgraph_type == "induced":
            run.induce(result)
        elif self.subgraph_type == "bidirectional":
            _make_bidirectional(result, self.reverses)
        return result

    def limits(self, seeds: Mapping[NodeType, Tensor], times: Mapping[NodeType, Tensor] | None) -> Tensor | None:
        """Return the time of each seed, over all types in order; no edge is later. `None` without times."""
        if not self.temporal:
            return None
        result = []
        for kind, nodes in seeds.items():
            if times is not None and kind in times:
                result.append(times[kind].long())
            elif kind in self.node_times:
                result.append(self.node_times[kind][nodes])
            else:
                raise ConfigError("NeighborLoader", "seeds must have times, in input_time or edge_label_time",
                                  None, "The times of the graph are those of its edges, or of other nodes.")
        return torch.cat(result)


class _Run:
    """The nodes and edges of one sample, hop by hop."""

    def __init__(self, sampler: Sampler, seeds: Mapping[NodeType, Tensor], seed: int,
                 times: Mapping[NodeType, Tensor] | None) -> None:
        self.sampler, self.seed = sampler, seed
        for kind, nodes in seeds.items():
            size = sampler.num_nodes[kind]
            if len(nodes) and not 0 <= int(nodes.min()) <= int(nodes.max()) < size:
                raise StructureError("NeighborLoader", f"seeds must be in [0, {size})",
                                     (int(nodes.min()), int(nodes.max())))
        self.limits = sampler.limits(seeds, times)
        count = sum(map(len, seeds.values())) if sampler.disjoint else 1
        self.numbers = {kind: Numbers(size * count) for kind, size in sampler.num_nodes.items()}
        empty = torch.empty(0, dtype=torch.int64)
        self.nodes: dict[NodeType, list[Tensor]] = {kind: [empty] for kind in sampler.num_nodes}
        self.groups: dict[NodeType, list[Tensor]] = {kind: [empty] for kind in sampler.num_nodes}
        self.rows: dict[EdgeType, list[Tensor]] = {kind: [empty] for kind in sampler.relations}
        self.cols: dict[EdgeType, list[Tensor]] = {kind: [empty] for kind in sampler.relations}
        self.edges: dict[EdgeType, list[Tensor]] = {kind: [empty] for kind in sampler.relations}
        first = 0
        for kind, nodes in seeds.items():
            groups = torch.arange(first, first + len(nodes)) if sampler.disjoint else empty
            first += len(nodes)
            self.numbers[kind].enter(self._keys(kind, nodes.contiguous(), groups))
            self.nodes[kind], self.groups[kind] = [nodes.contiguous()], [groups]

    def _keys(self, kind: NodeType, nodes: Tensor, groups: Tensor) -> Tensor:
        return groups * self.sampler.num_nodes[kind] + nodes if self.sampler.disjoint else nodes

    def _neighbors(self, relation: EdgeType, nodes: Tensor, groups: Tensor, fanout: int, base: int
                   ) -> tuple[Tensor, Tensor, Tensor]:
        """Keys of the sources, edges, positions of the targets."""
        sampler = self.sampler
        edges, disjoint = sampler.relations[relation], sampler.disjoint
        timed = self.limits is not None and (edges.edge_times is not None or edges.node_times is not None)
        sources, chosen, targets = draw_neighbors(
            edges, nodes, fanout, seed=self.seed, relation=list(sampler.relations).index(relation), base=base,
            groups=groups if disjoint else None, limits=self.limits[groups] if timed else None,  # type: ignore[index]
            replace=sampler.replace, last=timed and sampler.last)
        return self._keys(relation[0], sources, groups[targets - base] if disjoint else groups), chosen, targets

    def draw(self, hop: int) -> None:
        """One more hop."""
        sampler = self.sampler
        base = {kind: sum(map(len, parts[:-1])) for kind, parts in self.nodes.items()}
        fresh: dict[NodeType, list[Tensor]] = {kind: [] for kind in sampler.num_nodes}
        for relation, fanouts in sampler.fanouts.items():
            source, _, target = relation
            nodes, groups = self.nodes[target][-1], self.groups[target][-1]
            fanout = fanouts[hop] if hop < len(fanouts) else 0
            keys, chosen, targets = self._neighbors(relation, nodes, groups, fanout, base[target])
            rows, new = self.numbers[source].add(keys)
            self.rows[relation].append(rows)
            self.cols[relation].append(targets)
            self.edges[relation].append(chosen)
            fresh[source].append(new)
        for kind, parts in fresh.items():
            keys = torch.cat(parts) if parts else torch.empty(0, dtype=torch.int64)
            size = sampler.num_nodes[kind]
            self.nodes[kind].append(keys % size if sampler.disjoint and size else keys)
            self.groups[kind].append(keys // size if sampler.disjoint and size else keys[:0])

    def subgraph(self) -> Subgraph:
        """All that was drawn."""
        def joined(parts: Mapping[Any, list[Tensor]]) -> dict[Any, Tensor]:
            return {kind: torch.cat(tensors) for kind, tensors in parts.items()}

        return Subgraph(joined(self.nodes), joined(self.rows), joined(self.cols), joined(self.edges),
                        joined(self.groups) if self.sampler.disjoint else None,
                        {kind: [len(part) for part in parts] for kind, parts in self.nodes.items()},
                        {kind: [len(part) for part in parts[1:]] for kind, parts in self.rows.items()})

    def induce(self, subgraph: Subgraph) -> None:
        """All edges between the sampled nodes in place of those drawn."""
        for relation in self.sampler.relations:
            source, _, target = relation
            groups = subgraph.nodes[target][:0] if subgraph.groups is None else subgraph.groups[target]
            keys, chosen, targets = self._neighbors(relation, subgraph.nodes[target], groups, -1, 0)
            rows = self.numbers[source].find(keys)
            inside = rows >= 0
            subgraph.rows[relation], subgraph.cols[relation] = rows[inside], targets[inside]
            subgraph.edges[relation] = chosen[inside]
        subgraph.num_sampled_nodes = subgraph.num_sampled_edges = None


def _reverses(kinds: Sequence[EdgeType]) -> dict[EdgeType, EdgeType]:
    """Return the type of the reversed edges of each type: the one named `rev_`, or the type itself, or the only one."""
    result = {}
    for kind in kinds:
        source, name, target = kind
        opposite = [other for other in kinds if (other[2], other[0]) == (source, target)]
        named = [other for other in opposite if other[1] == f"rev_{name}" or name == f"rev_{other[1]}"]
        if named or source == target or len(opposite) == 1:
            result[kind] = named[0] if named else kind if source == target else opposite[0]
        else:
            warnings.warn(f"NeighborLoader: the edges {kind} stay as they are drawn, as subgraph_type='bidirectional' "
                          f"needs a type of reversed edges, for example {(target, f'rev_{name}', source)}; got "
                          f"{len(opposite)}.", stacklevel=4)
    return result


def _make_bidirectional(subgraph: Subgraph, reverses: Mapping[EdgeType, EdgeType]) -> None:
    """Each pair of nodes once in both directions, sorted by target; of the edges of a pair the first stays.

    Edges of another type, reversed, have no number, as in PyTorch Geometric.
    """
    rows, cols = dict(subgraph.rows), dict(subgraph.cols)
    for relation, reverse in reverses.items():
        size = len(subgraph.nodes[relation[0]])
        pairs, inverse = (torch.cat([cols[relation], rows[reverse]]) * size
                          + torch.cat([rows[relation], cols[reverse]])).unique(return_inverse=True)
        subgraph.rows[relation], subgraph.cols[relation] = (pairs % size, pairs // size) if size else (pairs, pairs)
        if reverse == relation:
            first = torch.full_like(pairs, len(inverse)).scatter_reduce(0, inverse, torch.arange(len(inverse)), "amin")
            subgraph.edges[relation] = subgraph.edges[relation].repeat(2)[first]
        else:
            subgraph.edges[relation] = None
    subgraph.num_sampled_nodes = subgraph.num_sampled_edges = None


def _fanouts(fanouts: Any, relations: Mapping[EdgeType, InEdges]) -> dict[EdgeType, list[int]]:
    """Return the numbers of neighbors of each relation; also takes PyTorch Geometric's `NumNeighbors`."""
    expected, default = "a list with -1 (all) or a number of edges for each hop", ()
    if isinstance(fanouts, Tensor):
        raise ConfigError("NeighborLoader", f"num_neighbors must be {expected}", "a tensor")
    if hasattr(fanouts, "get_mapped_values"):  # whose types of edges are strings
        kinds = {"__".join(map(str, kind)): kind for kind in relations}
        fanouts, default = fanouts.values, fanouts.default or ()
        if isinstance(fanouts, Mapping):
            fanouts = {kinds.get(name, name): numbers for name, numbers in fanouts.items()}
    if isinstance(fanouts, Mapping):
        unknown = [kind for kind in fanouts if kind not in relations]
        if unknown:
            raise ConfigError("NeighborLoader", f"num_neighbors must name types of edges out of {list(relations)}",
                              unknown)
    lists = fanouts if isinstance(fanouts, Mapping) else dict.fromkeys(relations, fanouts)
    return {kind: check_counts("NeighborLoader", "num_neighbors", lists.get(kind, default), expected, -1)
            for kind in relations}
