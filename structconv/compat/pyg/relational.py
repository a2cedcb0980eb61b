"""Layers whose messages depend on the kind or the attributes of an edge."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor
from torch import nn as modules
from torch.compiler import is_compiling

from structconv import torch_compat as private
from structconv.bases.dense import Identity
from structconv.bases.matrices import adjacency
from structconv.bases.sparse import Sparse
from structconv.bases.typed import Typed
from structconv.compat.pyg.aggregations import counts
from structconv.compat.pyg.convolutions import channels
from structconv.compat.pyg.edges import edges_to_outputs, gather
from structconv.compat.pyg.layer import Channels, Layer, Nodes, pair
from structconv.compat.pyg.linear import Linear, project
from structconv.compat.pyg.operator import apply, is_few, sum_heads
from structconv.derived import derived, forget_changed
from structconv.errors import ConfigError, ShapeError, StructureError, text_of
from structconv.planning.precision import cast as cast_tensors
from structconv.primitives.native.adjacency import adjacency_of, unchanged
from structconv.primitives.native.layer import gather_messages
from structconv.primitives.native.node import is_direct
from structconv.structures.graph import Graph
from structconv.weights import Full, Grouped, Separable, Weight, WeightList
from structconv.weights.base import plus

__all__ = ["GINEConv", "NNConv", "RGCNConv"]


class GINEConv(Layer):
    """y_n = nn(sum_m relu(x_m + e_mn) + (1 + eps) x_n). Arguments: those of `torch_geometric.nn.GINEConv`.

    Example:

        >>> from structconv.compat.pyg import GINEConv
        >>> edges = torch.tensor([[0, 1], [1, 2]])               # 0 -> 1 -> 2
        >>> layer = GINEConv(torch.nn.Identity())
        >>> layer(torch.tensor([[1.0], [10.0], [100.0]]), edges, torch.tensor([[2.0], [-20.0]])).tolist()
        [[1.0], [13.0], [100.0]]
    """

    shown = ("nn",)

    def __init__(self, nn: Any, eps: float = 0.0, train_eps: bool = False, edge_dim: int | None = None,
                 **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.nn, self.initial_eps = nn, eps
        self._register("eps", train_eps, eps)
        self.lin = None if edge_dim is None else Linear(edge_dim, _width("GINEConv", nn))
        self.reset_parameters()

    def forward(self, x: Nodes, edge_index: Any, edge_attr: Tensor | None = None, size: Any = None) -> Tensor:
        """x (..., M, P), or (x_m, x_n), edges and attributes (E, P) or (E, A) -> what `nn` gives for (..., N, P)."""
        x, x_root = pair(x)
        edges = self._graph(edge_index, x, x_root, size, attr=edge_attr)
        edge_attr = edges.edge_attr
        if edge_attr is None:
            raise ConfigError("GINEConv", "edge_attr must be given", "none")
        edge_attr = edge_attr if self.lin is None else self.lin(edge_attr)
        if edge_attr.shape[-1] != x.shape[-1]:
            raise ConfigError("GINEConv", f"edge_attr must have the {x.shape[-1]} channels of x", edge_attr.shape[-1],
                              "Say edge_dim=, which maps it to them.")
        y = self._sums(x, edge_attr, edges)
        out: Tensor = self.nn(y if x_root is None else y + (1 + self.eps) * x_root)
        return out

    def _sums(self, x: Tensor, attr: Tensor, edges: Graph) -> Tensor:
        """The aggregated messages relu(x_m + e_mn): sums are one node of autograd where a kernel can."""
        plain = self._is_matrix() and not self.explain and x.dim() == attr.dim() == 2 and not private.any_autocast()
        sides = None
        if plain and attr.shape[0] == edges.num_edges and is_direct(x, attr):
            sides = adjacency_of(edges.edge_index, edges.num_inputs, edges.num_outputs, numbered=True)
        if sides is None:
            return self._of_edges((gather(x, edges) + attr).relu(), edges)
        composed = unchanged(edges.edge_index, lambda x, attr: project(
            (gather(x, edges) + attr).relu(), Sparse(edges_to_outputs(edges)), None))
        y = gather_messages(sides, composed, x, attr)
        return y if self._is_sum() else y / counts(edges, y.dtype)


def _width(owner: str, network: Any) -> int:
    """The channels that a network takes, by its first layer."""
    first = network[0] if isinstance(network, modules.Sequential) else network
    width = getattr(first, "in_features", getattr(first, "in_channels", None))
    if not isinstance(width, int):
        raise ConfigError(owner, "nn must say its in_features or in_channels where edge_dim is given",
                          type(first).__name__)
    return width


class NNConv(Layer):
    """y_n = sum_m x_m nn(e_mn) + x_n Theta + b, nn giving P Q numbers. Arguments: those of `torch_geometric.nn.NNConv`.

    Where `nn` ends in a linear layer, sums and means form no (E, P, Q) tensor.

    Example:

        >>> from structconv.compat.pyg import NNConv
        >>> edges = torch.tensor([[0, 1], [1, 2]])               # 0 -> 1 -> 2
        >>> layer = NNConv(8, 4, nn=torch.nn.Linear(3, 8 * 4))   # an (8, 4) matrix for each edge
        >>> layer(torch.randn(3, 8), edges, torch.randn(2, 3)).shape
        torch.Size([3, 4])
    """

    shown = ("aggr", "nn")

    def __init__(self, in_channels: Channels, out_channels: int, nn: Any, aggr: Any = "add", root_weight: bool = True,
                 bias: bool = True, **kwargs: Any) -> None:
        super().__init__(aggr, **kwargs)
        self.in_channels, self.out_channels, self.nn, self.root_weight = in_channels, out_channels, nn, root_weight
        sources, targets = channels(in_channels)
        self.in_channels_l = sources
        if root_weight:
            self.lin = Linear(targets, out_channels, bias=False, weight_initializer="uniform")
        self.bias = modules.Parameter(torch.empty(out_channels)) if bias else None
        self.reset_parameters()

    def forward(self, x: Nodes, edge_index: Any, edge_attr: Tensor | None = None, size: Any = None) -> Tensor:
        """x (..., M, P), or (x_m, x_n), edges and their attributes (E, A) -> (..., N, Q)."""
        x, x_root = pair(x)
        edges, last = self._graph(edge_index, x, x_root, size, attr=edge_attr), self._last()
        edge_attr = edges.edge_attr
        if edge_attr is None:
            raise ConfigError("NNConv", "edge_attr must be given", "none")
        if last is None or not self._is_matrix():
            filters = self.nn(edge_attr).unflatten(-1, (x.shape[-1], self.out_channels))
            rows = gather(x, edges)
            rows = ((rows.unsqueeze(-2) @ filters).squeeze(-2) if private.any_autocast() else  # slower, but casts
                    (rows.unsqueeze(-1) * filters).sum(-2))
            y = self._of_edges(rows, edges)
            y = y if self.bias is None else y + self.bias
        else:
            hidden = edge_attr
            for layer in () if last is self.nn else list(self.nn)[:-1]:
                hidden = layer(hidden)
            if isinstance(last, Linear):
                last.materialize(hidden.shape[-1])
            expected = x.shape[-1] * self.out_channels, hidden.shape[-1]
            if tuple(last.weight.shape) != expected:
                raise ShapeError("NNConv", f"the weight of nn's last layer must have shape (P Q, A) = {expected}",
                                 tuple(last.weight.shape), "P are the channels of x, A those that the layer reads.")
            theta, shape = last.weight.mT, (-1, x.shape[-1], self.out_channels)
            if last.bias is not None:
                hidden = torch.cat([hidden, hidden.new_ones(hidden.shape[0], 1)], -1)
                theta = torch.cat([theta, last.bias.unsqueeze(0)])
            factors = self._messages(adjacency(edges, None, hidden.dtype), hidden.dtype).values
            values = hidden.mT if factors is None else hidden.mT * factors
            theta, messages = theta.reshape(shape), Sparse(edges, values)
            few = is_few(edges, len(values), self.out_channels)
            y = (plus(sum_heads(x @ theta.transpose(0, 1).flatten(1), messages), self.bias) if few else
                 apply(x, messages, Full.of(theta), self.bias))
        return y + self.lin(x_root) if self.root_weight and x_root is not None else y

    def _last(self) -> Any:
        """The linear layer in which the network ends, if calls of both only run their `forward`, which are torch's."""
        last: Any = self.nn
        if isinstance(last, modules.Sequential) and type(last).forward is modules.Sequential.forward and len(last) > 1:
            last = last[-1]
        return last if type(last) in (modules.Linear, Linear) and private.all_plain(last, self.nn) else None


class RGCNConv(Layer):
    """y_n = sum_r mean_(m: m -r-> n) x_m Theta_r + x_n Theta_0 + b. Arguments: those of `torch_geometric.nn.RGCNConv`.

    x may be `None` or integers (M,): the numbers of entities, whose rows of Theta_r are then the messages.

    Example:

        >>> from structconv.compat.pyg import RGCNConv
        >>> edges = torch.tensor([[0, 1], [1, 2]])               # 0 -> 1 -> 2
        >>> layer = RGCNConv(8, 4, num_relations=2, num_bases=1)
        >>> layer(torch.randn(3, 8), edges, edge_type=torch.tensor([0, 1])).shape
        torch.Size([3, 4])
        >>> {name: tuple(tensor.shape) for name, tensor in layer.state_dict().items()}
        {'weight': (1, 8, 4), 'comp': (2, 1), 'root': (8, 4), 'bias': (4,)}
    """

    shown = ("num_relations",)
    aggregation = "mean"

    def __init__(self, in_channels: Channels, out_channels: int, num_relations: int, num_bases: int | None = None,
                 num_blocks: int | None = None, aggr: Any = "mean", root_weight: bool = True, is_sorted: bool = False,
                 bias: bool = True, **kwargs: Any) -> None:
        super().__init__(aggr, **kwargs)
        if num_bases is not None and num_blocks is not None:
            raise ConfigError("RGCNConv", "at most one of num_bases and num_blocks must be given", "both")
        self.in_channels, self.out_channels, self.num_relations = in_channels, out_channels, num_relations
        self.num_bases, self.num_blocks, self.is_sorted = num_bases, num_blocks, is_sorted
        sources, targets = channels(in_channels)
        self.in_channels_l = sources
        shape: tuple[int, ...] = (num_relations if num_bases is None else num_bases, sources, out_channels)
        if num_blocks is not None:
            if sources % num_blocks or out_channels % num_blocks:
                raise ConfigError("RGCNConv", "num_blocks must divide in_channels and out_channels", num_blocks)
            shape = (num_relations, num_blocks, sources // num_blocks, out_channels // num_blocks)
        self.weight = modules.Parameter(torch.empty(shape))
        self.comp = None if num_bases is None else modules.Parameter(torch.empty(num_relations, num_bases))
        self.root = modules.Parameter(torch.empty(targets, out_channels)) if root_weight else None
        self.bias = modules.Parameter(torch.empty(out_channels)) if bias else None
        self.reset_parameters()

    def forward(self, x: Any, edge_index: Any, edge_type: Tensor | None = None) -> Tensor:
        """x (..., M, P), or (x_m, x_n), edges and the relation (E,) of each -> (..., N, Q)."""
        if private.any_autocast() and torch.is_autocast_enabled(self.weight.device.type):
            return self._without_autocast(x, edge_index, edge_type)
        x, z = x if isinstance(x, tuple) else (x, x)
        if x is None:
            x = torch.arange(self.in_channels_l, device=self.weight.device)
            z = x if z is None else z
        rows = (x if x.dim() > 1 else x.unsqueeze(-1)), (z if z.dim() > 1 else z.unsqueeze(-1))
        graph = self._graph(edge_index, *rows)
        kind = self._kinds(graph, edge_type)
        if not x.is_floating_point():
            return self._of_numbers(x, z, graph, kind)
        if not self._is_matrix():
            return self._by_relation(x, z, graph, kind)
        theta, root = self._theta(), self.root
        basis = self._typed(graph, kind, cast(torch.dtype, theta.dtype))
        if root is not None and z is x:
            both = WeightList.of((theta, Full.of(root.unsqueeze(0))))
            return apply(x, basis | Identity(x.shape[-2], device=x.device), both, self.bias)
        y = apply(x, basis, theta, self.bias)
        return y if root is None else y + apply(z, Identity(z.shape[-2]), Full.of(root.unsqueeze(0)))

    def _without_autocast(self, x: Any, edge_index: Any, edge_type: Tensor | None) -> Tensor:
        """The layer in the dtype of its parameters. PyTorch Geometric adds the products of all relations in float32;
        no kernel of ours does so without rounding their sum to autocast's dtype."""
        dtype = self.weight.dtype
        with private.without_autocast(self.weight.device.type):
            y = RGCNConv.forward(self, cast_tensors(x, dtype), edge_index, edge_type)
        return y.to(torch.promote_types(dtype, torch.get_default_dtype()))

    def _kinds(self, graph: Graph, edge_type: Any) -> Tensor:
        """The relation of each edge (E,), checked."""
        if edge_type is None:
            if graph.edge_weight is None:
                raise ConfigError("RGCNConv", "edge_type must be given", "none")
            edge_type = graph.edge_weight.long()  # the values of a sparse matrix
        integers = isinstance(edge_type, Tensor) and not edge_type.is_floating_point()
        if not integers or edge_type.shape != (graph.num_edges,):
            got = (f"{text_of(edge_type.shape)} of {edge_type.dtype}" if isinstance(edge_type, Tensor)
                   else type(edge_type))
            raise ShapeError("RGCNConv", f"edge_type must be integers of shape (E={graph.num_edges},)", got)
        forget_changed(edge_type)
        kind: Tensor = edge_type.long()
        try:
            Typed(graph, kind, self.num_relations)
        except StructureError as error:
            raise StructureError("RGCNConv", f"edge_type must be in [0, num_relations={self.num_relations})",
                                 f"{int(kind.min())} to {int(kind.max())}") from error
        return kind

    def _by_relation(self, x: Tensor, z: Tensor, graph: Graph, kind: Tensor) -> Tensor:
        """One row for each output and relation, by an aggregation that no matrix gives; then Theta_r and their sum."""
        rows = self._of_relations(x, graph, kind)
        y = rows.flatten(-2) @ self._theta().dense().flatten(0, 1)
        y = y if self.root is None else y + z @ self.root
        return y if self.bias is None else y + self.bias

    def _of_relations(self, x: Tensor, graph: Graph, kind: Tensor, own_rows: bool = False) -> Tensor:
        """The aggregated rows of x (..., M, C) by output and relation, (..., N, R, C).

        Args:
            own_rows: each relation has its own rows, those of x (R M, C).
        """
        count, inputs = self.num_relations, graph.num_inputs
        index = derived((graph.edge_index, kind), ("relations of outputs", count, own_rows), lambda: torch.stack(
            [graph.source.long() + kind * (inputs * own_rows), graph.target.long() * count + kind]))
        rows = self._aggregated(x, Sparse(Graph(index, num_inputs=x.shape[-2], num_outputs=graph.num_outputs * count)))
        return rows.unflatten(-2, (-1, count))

    def _theta(self) -> Weight:
        comp = self.comp
        if comp is not None:
            return Separable.of(comp, self.weight)
        return Full.of(self.weight) if self.num_blocks is None else Grouped.of(self.weight)

    def _of_numbers(self, x: Tensor, z: Tensor, graph: Graph, kind: Tensor) -> Tensor:
        """Compute the layer on one-hot rows, given by their numbers."""
        if self.num_blocks is not None:
            raise ConfigError("RGCNConv", "x must be floating with num_blocks", "numbers of entities, or none",
                              "Give x (M, P), or leave num_blocks out.")
        rows = self._theta().dense()[:, x]
        y = (self._typed(graph, kind, rows.dtype).synthesis(rows) if self._is_matrix() else
             self._of_relations(rows.flatten(0, 1), graph, kind, own_rows=True).sum(-2))
        y = y if self.root is None else y + self.root[z]
        return y if self.bias is None else y + self.bias

    def _typed(self, graph: Graph, kind: Tensor, dtype: torch.dtype) -> Typed:
        """A matrix for each relation, of sums or means over its edges into each output."""
        def shares() -> Tensor:
            group = graph.target.long() * self.num_relations + kind
            if is_compiling():  # the size of the result of bincount depends on the values: a break of the graph
                counts = group.new_zeros(graph.num_outputs * self.num_relations)
                counts = counts.index_add(0, group, torch.ones_like(group))
            else:
                counts = torch.bincount(group)
            return counts[group].to(dtype).reciprocal()

        values = None
        if self.aggr == "mean":
            values = derived((graph.edge_index, kind), ("shares", self.num_relations, dtype), shares)
        mask = self._mask(graph)
        if mask is not None:
            values = mask if values is None else values * mask
        return Typed(graph, kind, self.num_relations, values)
