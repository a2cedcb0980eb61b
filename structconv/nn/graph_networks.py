"""The graph network block (Battaglia et al. 2018), with special cases of the literature.

Each update begins with one `Conv` over concatenated incidence bases. Its inputs are not concatenated, so that no tensor
of size (E, 2 P) is built. The planner projects each part before or after gathering it, or gathers all parts for one
product if P is much smaller than Q.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import reduce
from itertools import pairwise
from operator import or_
from typing import Any, NamedTuple, Self, cast

import torch
from torch import Tensor, nn

from structconv.derived import derived
from structconv.errors import ConfigError, StructureError
from structconv.mechanisms.expression import Mechanism
from structconv.mechanisms.given import Identity
from structconv.mechanisms.graphs import Incidence
from structconv.mechanisms.masks import STRUCTURE
from structconv.mechanisms.scores import DotProduct
from structconv.nn.composite import Composite
from structconv.nn.conv import Conv
from structconv.nn.layer import Device, move
from structconv.nn.linear import Linear
from structconv.nn.pooling import POOLINGS, GroupPool
from structconv.shapes import check_choice, check_entries, check_tensor
from structconv.structures.batching import entries_to_samples, num_samples_of
from structconv.structures.graph import Graph, edges_to_receivers, rows_to_groups

__all__ = ["Attributes", "GraphNetwork"]

#: The kinds of pooling that keep the number of channels.
_KINDS = tuple(kind for kind in POOLINGS if kind != "set2set")
Reads = Sequence[str] | None
Widths = int | Sequence[int] | None


class Attributes(NamedTuple):
    """Attributes of nodes (..., N, C_v), edges (..., E, C_e) and graphs (..., B, C_u); `None` for absent ones.

    Example:

        >>> from structconv import Graph
        >>> from structconv.nn import GraphNetwork
        >>> block = GraphNetwork.independent(4, node=8)
        >>> block(torch.randn(3, 4), Graph.complete(3)).nodes.shape
        torch.Size([3, 8])
    """

    nodes: Tensor | None = None
    edges: Tensor | None = None
    globals: Tensor | None = None


class GraphNetwork(Composite):
    """e' = f([e, v_s, v_r, u]), v' = g([sum_(r_e = n) e', v, u]), u' = h([sum e', sum v', u]) (Battaglia et al. 2018,
    algorithm 1).

    f, g and h are networks W_L act(... W_1 [...]), whose first layer is `Conv(Incidence("sender") |
    Incidence("receiver") | ..., ...)`. Attributes without an update are returned unchanged.

    Args:
        node_channels, edge_channels, global_channels: C_v, C_e, C_u; 0 for absent attributes.
        edge, node, globals: widths of the layers of f, g and h, for example (64, 32) or 32; `None` for no update.
        edge_reads, node_reads, globals_reads: the inputs of each update, among "edges", "senders", "receivers", "nodes"
            and "globals"; default: all that exist.
        aggregate: aggregation of the edges into a node: "sum", "mean", "max" or "softmax" (see `GroupPool`).
        readout: aggregation of the edges, and of the nodes, of a graph: one of these.
        neighbors: a mechanism along the graph, for example `DotProduct(1,
            8).scaled().masked(keep=STRUCTURE).softmax()`; the node update also reads its result.
        bipartite: if True, edges lead from nodes to other nodes, the receivers, which are updated.
        activation: a function that returns the module between two layers.
        device, dtype: device and dtype of the parameters.

    Call it with nodes (..., M, C_v), a graph or a `batch` of graphs, edges (..., E, C_e) in its order, and globals
    (..., B, C_u) with a row for each graph; it returns `Attributes`. Memory: O(E + N) rows of the layers' widths.

    Raises:
        ConfigError: an update reads absent attributes. ShapeError: attributes do not match the graph.

    Example:

        >>> from structconv import Graph
        >>> from structconv.nn import GraphNetwork
        >>> block = GraphNetwork.interaction(4, 2, edge=8, node=6)
        >>> graph = Graph(torch.tensor([[0, 1, 2], [1, 2, 0]]), num_nodes=3)
        >>> nodes, edges, _ = block(torch.randn(3, 4), graph, torch.randn(3, 2))
        >>> nodes.shape, edges.shape
        (torch.Size([3, 6]), torch.Size([3, 8]))
    """

    fixed = frozenset(("node_channels", "edge_channels", "global_channels", "aggregate", "readout", "bipartite"))

    def __init__(self, node_channels: int, edge_channels: int = 0, global_channels: int = 0, *, edge: Widths = None,
                 node: Widths = None, globals: Widths = None, edge_reads: Reads = None, node_reads: Reads = None,
                 globals_reads: Reads = None, aggregate: str = "sum", readout: str = "sum",
                 neighbors: Mechanism | None = None, bipartite: bool = False,
                 activation: Callable[[], nn.Module] = nn.ReLU, device: Device = None,
                 dtype: torch.dtype | None = None) -> None:
        super().__init__()
        check_choice("GraphNetwork", "aggregate", aggregate, _KINDS)
        check_choice("GraphNetwork", "readout", readout, _KINDS)
        self.node_channels, self.edge_channels, self.global_channels = node_channels, edge_channels, global_channels
        self.aggregate, self.readout, self.bipartite = aggregate, readout, bipartite
        if edge is node is globals is None:
            raise ConfigError("GraphNetwork", "at least one of edge, node and globals must be given", "none")
        if node is None and neighbors is not None:
            raise ConfigError("GraphNetwork", "an update of nodes must be there to read its neighbors", "none")
        own = "receivers" if bipartite else "nodes"
        counts = self._channels()

        def update(name: str, widths: Widths, reads: Reads, parts: dict[str, _Part], outputs: str | None = None
                   ) -> _Update | None:
            if widths is None and reads is not None:
                raise ConfigError("GraphNetwork", f"{name} must be given where {name}_reads is", "none")
            return None if widths is None else _Update(_read(name, reads, parts, counts), counts, widths, activation,
                                                       outputs)

        samples = Incidence("sample")
        self.edge = update("edge", edge, edge_reads, {
            "edges": _Part("edges", Identity()), "senders": _Part("nodes", Incidence("sender")),
            "receivers": _Part(own, Incidence("receiver")),
            "globals": _Part("globals", samples.transpose() @ Incidence("sender"))})
        counts["edges"] = edge_channels if self.edge is None else self.edge.out_channels
        reached = _pooled("edges", Incidence("receiver").transpose(), aggregate, edges_to_receivers)
        self.node = update("node", node, node_reads, {
            **({} if neighbors is None else {"neighbors": _Part("nodes", neighbors)}),
            "edges": reached, "nodes": _Part(own, Identity()),
            **({} if bipartite else {"globals": _Part("globals", samples.transpose())})},
            own if bipartite and neighbors is not None else None)
        counts["nodes"] = node_channels if self.node is None else self.node.out_channels
        of_nodes = {} if bipartite else {"nodes": _pooled("nodes", samples, readout, _to_graphs)}
        edges_of = Incidence("sender").transpose() @ samples
        self.globals = update("globals", globals, globals_reads, {
            "edges": _pooled("edges", edges_of, readout, _edges_to_graphs), **of_nodes,
            "globals": _Part("globals", Identity())})
        move(self, device, dtype)

    def forward(self, nodes: Tensor | None, graph: Graph, edges: Tensor | None = None, globals: Tensor | None = None, *,
                receivers: Tensor | None = None) -> Attributes:
        """The updated attributes."""
        x = {"nodes": nodes, "receivers": nodes if receivers is None else receivers, "edges": edges, "globals": globals}
        self._check(x, graph, receivers)
        if self.edge is not None:
            x["edges"] = self.edge(x, graph)
        updated = x["receivers"] if self.node is None else self.node(x, graph)
        x["nodes"] = updated
        if self.globals is not None:
            x["globals"] = self.globals(x, graph)
        return Attributes(updated, x["edges"], x["globals"])

    @classmethod
    def independent(cls, node_channels: int, edge_channels: int = 0, global_channels: int = 0, **options: Any) -> Self:
        """Each of nodes, edges and graphs by itself (section 4.3.1, figure 4b, without the recurrence: a state is
        carried on by a next call whose attributes hold it)."""
        reads: dict[str, Any] = {
            f"{name}_reads": (own,) for name, own in (("edge", "edges"), ("node", "nodes"), ("globals", "globals"))
            if options.get(name) is not None}
        return cls(node_channels, edge_channels, global_channels, **reads, **options)

    @classmethod
    def message_passing(cls, node_channels: int, edge_channels: int = 0, *, edge: Widths, node: Widths,
                        globals: Widths = None, **options: Any) -> Self:
        """Messages f([e, v_s, v_r]), nodes g([sum of messages, v]) and, if asked for, a readout h(sum v') (Gilmer et
        al. 2017, eq. 1 to 3)."""
        return cls(node_channels, edge_channels, edge=edge, node=node, globals=globals,
                   globals_reads=None if globals is None else ("nodes",), **options)

    @classmethod
    def interaction(cls, node_channels: int, edge_channels: int = 0, global_channels: int = 0, *, edge: Widths,
                    node: Widths, **options: Any) -> Self:
        """Effects f([e, v_s, v_r]) of relations, nodes g([sum of effects, v, u]), u being what acts from outside
        (Battaglia et al. 2016, eq. 1 to 4)."""
        return cls(node_channels, edge_channels, global_channels, edge=edge, node=node,
                   edge_reads=("edges", "senders", "receivers") if edge_channels else ("senders", "receivers"),
                   **options)

    @classmethod
    def relation(cls, node_channels: int, *, edge: Widths, globals: Widths, **options: Any) -> Self:
        """h(sum of f([v_s, v_r])) over the pairs of a graph, `Graph.complete(n)` say (Santoro et al. 2017, eq. 1)."""
        return cls(node_channels, edge=edge, globals=globals, globals_reads=("edges",), **options)

    @classmethod
    def non_local(cls, node_channels: int, *, node: Widths, heads: int = 1, dim: int | None = None, **options: Any
                  ) -> Self:
        """g(sum_s softmax_s(<W v_r, W' v_s> / sqrt(D)) v_s) along the graph (Wang et al. 2018; section 4.2.2)."""
        attention = DotProduct(heads, dim or max(1, node_channels // heads)).scaled().masked(keep=STRUCTURE).softmax()
        return cls(node_channels, node=node, neighbors=attention, node_reads=("neighbors",), **options)

    @classmethod
    def deep_sets(cls, node_channels: int, global_channels: int = 0, *, node: Widths, globals: Widths, **options: Any
                  ) -> Self:
        """h(sum of g([v, u])): edges are not read (Zaheer et al. 2017, theorem 2)."""
        return cls(node_channels, 0, global_channels, node=node, globals=globals, globals_reads=("nodes",), **options)

    def _check(self, x: dict[str, Tensor | None], graph: Any, receivers: Tensor | None) -> None:
        owner = type(self).__name__
        if not isinstance(graph, Graph):
            raise StructureError(owner, "the second argument must be a Graph", type(graph).__name__,
                                 "Make one, for example Graph(edge_index, num_nodes=...); batch(graphs) of many.")
        if self.bipartite is (receivers is None):
            raise ConfigError(owner, "receivers= must be given of a block with bipartite=True, and of no other",
                              "none" if receivers is None else "receivers")
        channels = self._channels()
        rows = {"nodes": graph.num_inputs, "receivers": graph.num_outputs, "edges": graph.num_edges,
                "globals": 0 if x["globals"] is None else num_samples_of(graph)}
        for name, tensor in x.items():
            if tensor is not None:
                check_tensor(owner, name, tensor)
                check_entries(owner, tensor, entries=rows[name], channels=channels[name], name=name)
            elif channels[name]:
                raise ConfigError(owner, f"{name} must be given, with {channels[name]} channels", "none")

    def _channels(self) -> dict[str, int]:
        """Return the channels of a call's results, by name."""
        return {"nodes": self.node_channels, "receivers": self.node_channels, "edges": self.edge_channels,
                "globals": self.global_channels}


class _Part(NamedTuple):
    """An input of an update: an x by name, the basis that maps it to the updated entries, and a pool before it."""

    x: str
    mechanism: Mechanism
    pool: str = ""
    groups: Callable[[Graph], Graph] | None = None


class _Update(nn.Module):
    """A network whose first layer is a `Conv` of parts by name; those with a pool are pooled before, and scores have
    the x named `outputs` for z."""

    def __init__(self, parts: dict[str, _Part], counts: dict[str, int], widths: Widths,
                 activation: Callable[[], nn.Module], outputs: str | None) -> None:
        super().__init__()
        sizes = [widths] if isinstance(widths, int) else list(widths or ())
        if not sizes:
            raise ConfigError("GraphNetwork", "an update must have one width or more", widths)
        pools, channels, mechanisms = {}, {}, []
        for name, part in parts.items():
            source = part.x
            if part.pool:
                pools[name] = GroupPool(counts[part.x], part.pool)
                source = f"pooled {name}"
            channels[source] = counts[part.x]
            mechanisms.append(part.mechanism.of(source))
        self._parts, self._reads, self.pools = parts, tuple(channels), nn.ModuleDict(pools)
        self.first = Conv(reduce(or_, mechanisms), channels, sizes[0],
                          other_channels=None if outputs is None else counts["nodes"])
        self._outputs = outputs
        reads = self.first.mechanism.reads
        self._reads_structure, self._attends = "structure" in reads, "content" in reads
        self.rest = nn.Sequential(*(module for before, after in pairwise(sizes)
                                    for module in (activation(), Linear(before, after))))
        self.out_channels = sizes[-1]

    def forward(self, x: dict[str, Tensor], graph: Graph) -> Tensor:
        inputs = dict(x)
        for name, pool in self.pools.items():
            part = self._parts[name]
            inputs[f"pooled {name}"] = pool(x[part.x], cast(Callable[[Graph], Graph], part.groups)(graph))
        reads = self._reads_structure or (self._attends and graph.samples is not None)  # attention within samples
        structure = graph if reads else None
        z = None if self._outputs is None else x[self._outputs]
        y: Tensor = self.rest(self.first({name: inputs[name] for name in self._reads}, structure, z=z))
        return y


def _read(update: str, reads: Reads, parts: dict[str, _Part], counts: dict[str, int]) -> dict[str, _Part]:
    """The parts that an update reads."""
    there = {name: part for name, part in parts.items() if counts[part.x]}
    wrong = [name for name in reads or () if name not in there]
    if wrong or not there or reads == ():
        raise ConfigError("GraphNetwork", f"{update}_reads must be of {', '.join(there) or 'attributes with channels'}",
                          ", ".join(wrong) or "none")
    return {name: part for name, part in there.items() if reads is None or name in reads}


def _pooled(x: str, members: Mechanism, kind: str, groups: Callable[[Graph], Graph]) -> _Part:
    """Sums and means are bases; of others the rows are there when the update reads them."""
    if kind == "sum":
        return _Part(x, members)
    return _Part(x, members.normalize("sum")) if kind == "mean" else _Part(x, Identity(), kind, groups)


def _edges_to_graphs(graph: Graph) -> Graph:
    """From the edges of a batch to the graphs that they are of."""
    nodes = _to_graphs(graph)
    return derived((graph.edge_index, nodes.edge_index), "edges to graphs", lambda: rows_to_groups(
        nodes.target[graph.source.long()], nodes.num_outputs))


def _to_graphs(graph: Graph) -> Graph:
    return entries_to_samples(graph, graph.edge_index.device)
