"""The sources of loaders: PyTorch Geometric's `Data` and `HeteroData`, or a `Graph` with features.

PyTorch Geometric is imported for `transform_sampler_output` only: its objects are recognized by their attributes.
"""

from __future__ import annotations

import copy
import importlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from structconv.bases.matrices import adjacency
from structconv.data.subgraphs import EdgeType, NodeType, Subgraph, in_edges
from structconv.errors import ConfigError, ShapeError, text_of
from structconv.primitives.layout import check_bounds
from structconv.primitives.sampling import InEdges
from structconv.shapes import check_choice, check_natural
from structconv.structures import Graph

__all__ = ["NeighborBatch", "Source", "blocks", "sampler_output", "source_of"]

#: The types of graphs that have no types.
PLAIN_NODE: NodeType = None
PLAIN_EDGE: EdgeType = (None, None, None)
Key = NodeType | EdgeType
#: Attributes of PyTorch Geometric's outputs of samplers, and of `Subgraph`.
_OUTPUTS = {"node": "nodes", "row": "rows", "col": "cols", "edge": "edges", "batch": "groups",
            "num_sampled_nodes": "num_sampled_nodes", "num_sampled_edges": "num_sampled_edges"}


@dataclass(repr=False)
class NeighborBatch:
    """A sampled subgraph of a `Graph`.

    Args:
        graph: the sampled nodes and edges, with the weights and attributes of the edges.
        features: the features of the sampled nodes, by name; the seeds come first.
        n_id, e_id: (N,) and (E,), the nodes and edges in the whole graph.
        batch: (N,), the seed to whose subgraph each node belongs, of disjoint subgraphs.
        batch_size: the number of seeds, of a `NeighborLoader`.
        input_id: the seeds among all seeds.
        num_sampled_nodes, num_sampled_edges: how many nodes, the seeds first, and edges each hop has.
        seed_time: the times of the seeds, if they were given.
        edge_label_index, edge_label, edge_label_time: of a `LinkNeighborLoader`: pairs of nodes, labels, and times.
        src_index, dst_pos_index, dst_neg_index: of its triplets.
        node_norm, edge_norm: of the GraphSAINT samplers, if measured: weights of losses and of messages.

    Example:

        >>> from structconv import Graph
        >>> from structconv.data import NeighborLoader
        >>> graph = Graph(torch.tensor([[1, 2, 3], [0, 1, 2]]), num_nodes=4)
        >>> loader = NeighborLoader(graph, [-1, -1], input_nodes=torch.tensor([2]), features={"x": torch.arange(4)})
        >>> batch = next(iter(loader))
        >>> batch.n_id, batch.e_id, batch.features["x"], batch.graph.edge_index
        (tensor([2, 3]), tensor([2]), tensor([2, 3]), tensor([[1],
                [0]]))
    """

    graph: Graph
    features: dict[str, Tensor]
    n_id: Tensor | None = None
    e_id: Tensor | None = None
    batch: Tensor | None = None
    batch_size: int | None = None
    input_id: Tensor | None = None
    num_sampled_nodes: list[int] | None = None
    num_sampled_edges: list[int] | None = None
    seed_time: Tensor | None = None
    edge_label_index: Tensor | None = None
    edge_label: Tensor | None = None
    edge_label_time: Tensor | None = None
    src_index: Tensor | None = None
    dst_pos_index: Tensor | None = None
    dst_neg_index: Tensor | None = None
    node_norm: Tensor | None = None
    edge_norm: Tensor | None = None

    def __repr__(self) -> str:
        """Name what there is, tensors by their shapes."""
        values = {**self.features, **{field.name: getattr(self, field.name) for field in fields(self)[2:]}}
        return f"NeighborBatch({self.graph!r}, " + ", ".join(
            f"{name}={list(value.shape) if isinstance(value, Tensor) else value}" for name, value in values.items()
            if value is not None) + ")"


def blocks(batch: Any, *, normalize: str | None = None, self_loops: bool = False, num_nodes: int | None = None
           ) -> list[Graph]:
    """Return a bipartite graph for each layer of a network, so that no layer computes what the seeds do not need.

    With L hops, layer l = 1 ... L maps the nodes of the first L - l + 1 hops to those of the first L - l, along all
    edges into these. For the seeds the last layer gives what it gives over the whole sampled graph, unless layers read
    the degrees of inputs, as `Adjacency("sym")` does: then normalize here, for layers with `Adjacency(None)`. Outputs
    are the first of the inputs: x[:graph.num_outputs].

    Args:
        batch: of a `NeighborLoader` or a `LinkNeighborLoader`, with one kind of nodes: a `NeighborBatch`, or a `Data`.
            The graphs have its edge_weight and edge_attr.
        normalize: "sym" or "row": the weights are those of the whole sampled graph, normalized as by `Adjacency`.
        self_loops: each output also reads itself, by an edge after the others.
        num_nodes: of the whole graph. The inputs of the first layer are then all its nodes, read where they are, so
            that the features of the sampled ones need not be copied: call the loader without features, and give the
            layer those of all nodes; its outputs are the nodes batch.n_id[:graph.num_outputs]. Faster for layers that
            aggregate before they multiply by weights, not for attention, which multiplies all inputs.

    Raises:
        ConfigError: the hops of the edges are not known, as with `subgraph_type="induced"`, or nodes have types.

    Example:

        >>> from structconv import Adjacency, Conv, Graph
        >>> from structconv.data import NeighborLoader, blocks
        >>> graph = Graph(torch.randint(100, (2, 900)), num_nodes=100)
        >>> batch = next(iter(NeighborLoader(graph, [5, 5], batch_size=8, features={"x": torch.randn(100, 4)})))
        >>> x = batch.features["x"]
        >>> for layer, block in zip([Conv(Adjacency("row"), 4, 16), Conv(Adjacency("row"), 16, 3)], blocks(batch)):
        ...     x = layer(x, block)
        >>> x.shape                                                # of the seeds
        torch.Size([8, 3])

    The same, with the features read where they are:

        >>> x, (first, second) = torch.randn(100, 4), blocks(batch, num_nodes=100)
        >>> layer = Conv(Adjacency("row"), 4, 16)
        >>> torch.equal(layer(x, first), layer(x[batch.n_id], blocks(batch)[0]))
        True

    Reference: Wang et al., *Deep Graph Library*, 2019, where such graphs are called blocks.
    """
    check_choice("blocks", "normalize", normalize, (None, "sym", "row"))
    if not isinstance(self_loops, bool):
        raise ConfigError("blocks", "self_loops must be of type bool", type(self_loops).__name__)
    nodes, edges = getattr(batch, "num_sampled_nodes", None), getattr(batch, "num_sampled_edges", None)
    if not isinstance(nodes, list) or not isinstance(edges, list):
        raise ConfigError("blocks", "batch must come from a NeighborLoader, with one kind of nodes and directional "
                          "subgraphs, so that the hop of each edge is known", type(batch).__name__)
    numbers: Any = getattr(batch, "n_id", None)
    if num_nodes is not None:
        check_natural("blocks", "num_nodes", num_nodes)
        if not isinstance(numbers, Tensor):
            raise ConfigError("blocks", "num_nodes needs batch.n_id, the number of each node in the whole graph",
                              type(numbers).__name__)
        check_bounds("blocks", "batch.n_id", "node", numbers.unsqueeze(0), [("num_nodes", num_nodes)])
    whole = batch.graph if isinstance(batch, NeighborBatch) else batch
    weight, attr = getattr(whole, "edge_weight", None), getattr(whole, "edge_attr", None)
    graph = Graph(whole.edge_index, num_nodes=sum(nodes), edge_weight=weight, edge_attr=attr)
    graph = graph.with_self_loops() if self_loops else graph
    if normalize is not None:
        dtype = torch.get_default_dtype() if weight is None else weight.dtype
        graph = replace(graph, edge_weight=adjacency(graph, normalize, dtype).values)
    graphs: list[Graph] = []
    for hop in range(len(edges), 0, -1):
        inputs, outputs, count = sum(nodes[:hop + 1]), sum(nodes[:hop]), sum(edges[:hop])
        parts = [slice(0, count), slice(sum(edges), sum(edges) + outputs)][:1 + self_loops]
        lead = -2 if graph.edge_attr is not None and graph.edge_attr.dim() > 1 else -1
        weight, attr = (None if value is None else _joined(value, parts, axis)
                        for value, axis in ((graph.edge_weight, -1), (graph.edge_attr, lead)))
        index = _joined(graph.edge_index, parts, 1)
        if num_nodes is not None and not graphs:
            index, inputs = torch.stack([numbers.index_select(0, index[0]), index[1]]), num_nodes
        graphs.append(Graph(index, num_inputs=inputs, num_outputs=outputs, edge_weight=weight, edge_attr=attr))
    return graphs


def _joined(value: Tensor, parts: list[slice], axis: int) -> Tensor:
    """Concatenate parts of a tensor along an axis; a single part is a view."""
    views = [value.narrow(axis, part.start, part.stop - part.start) for part in parts]
    return views[0] if len(views) == 1 else torch.cat(views, axis)


class Source:
    """The whole graph, of one kind of nodes or several."""

    typed = False
    node_types: list[NodeType]
    edge_types: list[EdgeType]

    def __init__(self, data: Any) -> None:
        self.data = data
        self.node_types, self.edge_types = [PLAIN_NODE], [PLAIN_EDGE]

    #: The number of nodes of a type, and its edges (2, E).
    num_nodes: Callable[[NodeType], int]
    edge_index: Callable[[EdgeType], Tensor]
    #: A feature of all nodes, or of all edges, of a type, or `None`.
    node_value: Callable[[NodeType, str], Tensor | None]
    edge_value: Callable[[EdgeType, str], Tensor | None]
    #: The sampled part of the data.
    select: Callable[[Subgraph], Any]
    #: True if some of the data lies on another device.
    on_gpu: Callable[[], bool]

    def store(self, batch: Any, kind: Key) -> Any:
        """Return the part of a batch that belongs to a type."""
        return batch

    def transformed(self, subgraph: Subgraph, transform: Callable[[Any], Any]) -> Subgraph:
        """Apply a function of PyTorch Geometric's outputs of samplers."""
        raise ConfigError("NeighborLoader", "transform_sampler_output goes with data of PyTorch Geometric",
                          type(self.data).__name__)

    def relations(self, time_attr: str | None, weight_attr: str | None, is_sorted: bool) -> dict[EdgeType, InEdges]:
        """The edges as the sampler reads them."""
        node_times = {kind: self.node_value(kind, time_attr) for kind in self.node_types} if time_attr else {}
        edge_times = {kind: self.edge_value(kind, time_attr) for kind in self.edge_types} if time_attr else {}
        timed = [any(t is not None for t in times.values()) for times in (node_times, edge_times)]
        if time_attr and sum(timed) != 1:
            raise ConfigError("NeighborLoader", "time_attr must name an attribute of nodes or of edges, not of both",
                              f"{time_attr!r}, which {'both' if any(timed) else 'neither'} have")
        weights = {kind: self.edge_value(kind, weight_attr) for kind in self.edge_types} if weight_attr else {}
        if weight_attr and not any(w is not None for w in weights.values()):
            raise ConfigError("NeighborLoader", "weight_attr must name an attribute of edges", weight_attr)
        return {kind: in_edges(self.edge_index(kind), (self.num_nodes(kind[0]), self.num_nodes(kind[2])),
                               edge_times=edge_times.get(kind), node_times=node_times.get(kind[0]),
                               weights=weights.get(kind), is_sorted=is_sorted) for kind in self.edge_types}


class _Geometric(Source):
    """`Data` or `HeteroData` of PyTorch Geometric, or what has the same attributes."""

    def __init__(self, data: Any) -> None:
        super().__init__(data)
        self.typed = hasattr(data, "node_types") and hasattr(data, "edge_types")
        if self.typed:
            self.node_types, self.edge_types = list(data.node_types), [tuple(kind) for kind in data.edge_types]

    def store(self, batch: Any, kind: Key) -> Any:
        return batch[kind] if self.typed else batch

    def num_nodes(self, kind: NodeType) -> int:
        number = self.store(self.data, kind).num_nodes
        if number is None:
            raise ConfigError("NeighborLoader", "data must have num_nodes, or a feature of nodes that tells it",
                              f"neither for {kind!r}" if self.typed else "neither")
        return int(number)

    def edge_index(self, kind: EdgeType) -> Tensor:
        index = getattr(self.store(self.data, kind), "edge_index", None)
        if not isinstance(index, Tensor) or index.dim() != 2 or index.shape[0] != 2 or index.is_floating_point():
            raise ShapeError("NeighborLoader", "data must have an integer edge_index (2, E)",
                             None if index is None else getattr(index, "shape", type(index).__name__),
                             "Convert an adj_t of sparse tensors.")
        return index

    def node_value(self, kind: NodeType, name: str) -> Tensor | None:
        return self._value(kind, name, "is_node_attr", self.num_nodes(kind))

    def edge_value(self, kind: EdgeType, name: str) -> Tensor | None:
        return self._value(kind, name, "is_edge_attr", self.edge_index(kind).shape[1])

    def _value(self, kind: Key, name: str, belongs: str, length: int) -> Tensor | None:
        store = self.store(self.data, kind)
        if name not in store:
            return None
        if getattr(store, belongs)(name):
            return store[name]
        if self.typed:  # an attribute of `Data` may be one of nodes or of edges
            raise ShapeError("NeighborLoader", f"{name!r} of {kind!r} must have the length {length}",
                             getattr(store[name], "shape", type(store[name]).__name__))
        return None

    def on_gpu(self) -> bool:
        stores = [self.store(self.data, kind) for kind in (*self.node_types, *self.edge_types)]
        return any(isinstance(value, Tensor) and not value.is_cpu for store in stores for _, value in _items(store))

    def transformed(self, subgraph: Subgraph, transform: Callable[[Any], Any]) -> Subgraph:
        metadata = tuple(value for name, value in subgraph.inputs.items() if name != "batch_size")
        output = transform(sampler_output(subgraph, self.typed, metadata))
        if not all(hasattr(output, name) for name in _OUTPUTS):
            raise ConfigError("NeighborLoader", "transform_sampler_output must return a SamplerOutput, or of typed "
                              "nodes a HeteroSamplerOutput", type(output).__name__)
        parts = {own: getattr(output, name) for name, own in _OUTPUTS.items()}
        if not self.typed:
            kinds = {own: next(iter(getattr(subgraph, own) or {PLAIN_NODE: None})) for own in parts}
            parts = {own: None if value is None else {kinds[own]: value} for own, value in parts.items()}
        return replace(subgraph, **parts)

    def select(self, subgraph: Subgraph) -> Any:
        batch = copy.copy(self.data)
        for kind, nodes in subgraph.nodes.items():
            self._select_nodes(self.store(self.data, kind), self.store(batch, kind), nodes)
        for relation in subgraph.edges:
            self._select_edges(self.store(self.data, relation), self.store(batch, relation), subgraph, relation)
        return batch

    def _select_nodes(self, store: Any, target: Any, nodes: Tensor) -> None:
        names = [name for name, _ in _items(store) if name != "num_nodes" and store.is_node_attr(name)]
        for name in names:
            target[name] = _selected(store[name], nodes, self.data.__cat_dim__(name, store[name], store))
        if "num_nodes" in store or not names:
            target.num_nodes = len(nodes)
        if "n_id" not in store:
            target.n_id = nodes

    def _select_edges(self, store: Any, target: Any, subgraph: Subgraph, kind: EdgeType) -> None:
        edges = subgraph.edges[kind]
        for name, value in _items(store):
            if name == "edge_index":
                target.edge_index = torch.stack([subgraph.rows[kind], subgraph.cols[kind]]).to(value.device)
            elif store.is_edge_attr(name):
                target[name] = None if edges is None else _selected(value, edges,
                                                                    self.data.__cat_dim__(name, value, store))
        if edges is not None and "e_id" not in store:
            target.e_id = edges


class _Entries(Source):
    """A `Graph`, with features of its nodes."""

    def __init__(self, data: Graph, features: Mapping[str, Tensor]) -> None:
        super().__init__(data)
        if not isinstance(features, Mapping):
            raise ConfigError("NeighborLoader", "features must be a mapping from names to tensors",
                              type(features).__name__)
        self.features = dict(features)
        for name, value in self.features.items():
            if not isinstance(value, Tensor):
                raise ConfigError("NeighborLoader", "features must be tensors", f"{type(value).__name__} of {name!r}",
                                  "Convert it, for example torch.as_tensor(value).")
            if not value.dim() or value.shape[0] != data.num_nodes:
                raise ShapeError("NeighborLoader", f"features must have the length N={data.num_nodes}",
                                 f"{text_of(value.shape)} of {name!r}")

    def num_nodes(self, kind: NodeType) -> int:
        return self.data.num_nodes

    def edge_index(self, kind: EdgeType) -> Tensor:
        return self.data.edge_index

    def node_value(self, kind: NodeType, name: str) -> Tensor | None:
        return self.features.get(name)

    def edge_value(self, kind: EdgeType, name: str) -> Tensor | None:
        return getattr(self.data, name) if name in ("edge_weight", "edge_attr") else None

    def on_gpu(self) -> bool:
        return any(not value.is_cpu for value in (self.data.edge_index, *self.features.values()))

    def select(self, subgraph: Subgraph) -> NeighborBatch:
        nodes, edges = subgraph.nodes[PLAIN_NODE], subgraph.edges[PLAIN_EDGE]
        index = torch.stack([subgraph.rows[PLAIN_EDGE], subgraph.cols[PLAIN_EDGE]]).to(self.data.edge_index.device)
        weight, attr = self.data.edge_weight, self.data.edge_attr
        lead = -2 if attr is not None and attr.dim() > 1 else -1
        graph = Graph(index, num_nodes=len(nodes),
                      edge_weight=None if weight is None else _selected(weight, edges, -1),
                      edge_attr=None if attr is None else _selected(attr, edges, lead))
        features = {name: _selected(value, nodes, 0) for name, value in self.features.items()}
        return NeighborBatch(graph, features, nodes, edges)


def source_of(data: Any, features: Mapping[str, Tensor] | None) -> Source:
    """Return the source of a loader; a `ConfigError` for data from which no neighbors can be drawn."""
    if isinstance(data, Graph):
        return _Entries(replace(data, samples=None) if data.samples is not None else data,
                        {} if features is None else features)
    if features is not None:
        raise ConfigError("NeighborLoader", "features go with a Graph", type(data).__name__,
                          "Set them as attributes of the data.")
    if not hasattr(data, "is_edge_attr") and not hasattr(data, "edge_types"):
        raise ConfigError("NeighborLoader", "data must be a Graph, or PyTorch Geometric's Data or HeteroData",
                          type(data).__name__, "Make one, for example Graph(edge_index, num_nodes=...).")
    return _Geometric(data)


def sampler_output(subgraph: Subgraph, typed: bool, metadata: Any = None) -> Any:
    """Return a subgraph as PyTorch Geometric's `HeteroSamplerOutput`, or without types as its `SamplerOutput`."""
    module = importlib.import_module("torch_geometric.sampler")
    values = {name: getattr(subgraph, own) for name, own in _OUTPUTS.items()}
    if typed:
        return module.HeteroSamplerOutput(**values, metadata=metadata)
    return module.SamplerOutput(**{name: None if value is None else next(iter(value.values()))
                                   for name, value in values.items()}, metadata=metadata)


def _items(store: Any) -> Iterable[tuple[str, Any]]:
    """Names and values of a store or of a `Data`."""
    return [(name, store[name]) for name in list(store.keys())]


def _selected(value: Any, index: Tensor, dim: int) -> Any:
    """Return the selected entries of a feature; anything but a tensor or an array is indexed directly."""
    if isinstance(value, Tensor):
        return value.index_select(dim, index.to(value.device))
    if hasattr(value, "__array_interface__"):
        return torch.from_numpy(value.take(index.numpy(), axis=dim))
    return value if isinstance(value, (list, tuple)) else value[index]
