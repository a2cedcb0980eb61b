"""Layers whose matrices come only from the graph."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.compiler import is_compiling
from torch.nn import functional
from torch.nn.parameter import UninitializedParameter

from structconv import torch_compat as private
from structconv.bases.matrices import adjacency, lazy_adjacency
from structconv.bases.sparse import Sparse
from structconv.compat.pyg.edges import is_sparse, with_remaining_loops
from structconv.compat.pyg.layer import Channels, Layer, Nodes, pair
from structconv.compat.pyg.linear import Linear, draw, glorot, is_product
from structconv.errors import ConfigError
from structconv.structures.graph import looped

__all__ = ["ARMAConv", "ClusterGCNConv", "GCNConv", "GINConv", "GraphConv", "SAGEConv"]

_RELU = nn.ReLU()


def normalized(layer: Layer, edges: Any, x: Tensor, weight: Tensor | None, *, loops: bool, improved: bool = False,
               normalize: bool = True, lazy: bool = False) -> Sparse:
    """D^-1/2 (A + I)^T D^-1/2, or A without `normalize`, loops by PyTorch Geometric's rule.

    An `edge_index` gets a loop at each node without one; a sparse matrix has the identity added. With `lazy` a kernel
    computes the numbers, and nothing else may read them.
    """
    if not isinstance(x, Tensor):
        raise ConfigError(type(layer).__name__, "x must be one tensor", type(x).__name__,
                          "For sources and targets use SAGEConv or GraphConv.")
    graph = layer._graph(edges, x, x, weight=weight)
    if loops:
        graph = with_remaining_loops(graph, 2.0 if improved else 1.0, summed=is_sparse(edges))
    return (lazy_adjacency if lazy else adjacency)(graph, "sym" if normalize else None, x.dtype)


class GCNConv(Layer):
    """y = D^-1/2 (A + I)^T D^-1/2 x Theta + b. Arguments: those of `torch_geometric.nn.GCNConv`.

    `cached` changes nothing: what is computed from a graph is remembered while its tensors live unchanged, and another
    graph is never mistaken for it.

    Example:

        >>> from structconv.compat.pyg import GCNConv
        >>> edges = torch.tensor([[0, 1], [1, 2]])               # 0 -> 1 -> 2
        >>> layer = GCNConv(8, 4, cached=True)
        >>> list(layer.state_dict())                             # PyTorch Geometric's keys
        ['bias', 'lin.weight']
        >>> x = torch.randn(3, 8)
        >>> y = layer(x, edges)
        >>> torch.equal(layer(x, edges[:, :1]), y)               # another graph is noticed
        False
    """

    def __init__(self, in_channels: int, out_channels: int, improved: bool = False, cached: bool = False,
                 add_self_loops: bool | None = None, normalize: bool = True, bias: bool = True, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        add_self_loops = normalize if add_self_loops is None else add_self_loops
        if add_self_loops and not normalize:
            raise ConfigError("GCNConv", "add_self_loops must be False: normalize=False "
                              "does not support adding self-loops", add_self_loops)
        self.in_channels, self.out_channels, self.improved, self.cached = in_channels, out_channels, improved, cached
        self.add_self_loops, self.normalize = add_self_loops, normalize
        self.lin = Linear(in_channels, out_channels, bias=False, weight_initializer="glorot")
        self.bias = nn.Parameter(torch.empty(out_channels)) if bias else None
        self.reset_parameters()

    def forward(self, x: Tensor, edge_index: Any, edge_weight: Tensor | None = None) -> Tensor:
        """x (..., N, P), edges and their weights (E,) -> (..., N, Q)."""
        messages = normalized(self, edge_index, x, edge_weight, loops=self.add_self_loops and self.normalize,
                              improved=self.improved, normalize=self.normalize,
                              lazy=self._is_sum() and not self.explain and not is_compiling())
        absent = self._replaced(messages.graph) if self.add_self_loops and self.normalize else None
        if is_product(self.lin) and self._is_matrix() and x.layout is torch.strided:
            return self._aggregated(x, messages, self.lin, bias=self.bias, absent=absent)
        # in the order of the formula: lin comes first
        return self._aggregated(self.lin(x), messages, bias=self.bias, absent=absent)


class SAGEConv(Layer):
    """y_n = mean_m x_m Theta_1 + x_n Theta_2 + b. Arguments: those of `torch_geometric.nn.SAGEConv`.

    Example:

        >>> from structconv.compat.pyg import SAGEConv
        >>> layer = SAGEConv(1, 1, aggr="max", root_weight=False, bias=False)
        >>> layer.lin_l.weight.data.fill_(1)
        tensor([[1.]])
        >>> layer(torch.tensor([[5.0], [2.0], [0.0]]), torch.tensor([[0, 1], [2, 2]])).tolist()
        [[0.0], [0.0], [5.0]]
    """

    shown = ("aggr",)
    aggregation = "mean"

    def __init__(self, in_channels: Channels, out_channels: int, aggr: Any = "mean", normalize: bool = False,
                 root_weight: bool = True, project: bool = False, bias: bool = True, **kwargs: Any) -> None:
        if aggr == "lstm":  # as there, where it has as many channels as x
            width = dict.fromkeys(("in_channels", "out_channels"), channels(in_channels)[0])
            kwargs["aggr_kwargs"] = {**width, **(kwargs.get("aggr_kwargs") or {})}
        super().__init__(aggr, **kwargs)
        self.in_channels, self.out_channels, self.normalize = in_channels, out_channels, normalize
        self.root_weight, self.project = root_weight, project
        sources, targets = channels(in_channels)
        if project:
            if sources <= 0:
                raise ConfigError("SAGEConv", "in_channels must be known: project=True does not support lazy "
                                  "initialization", in_channels)
            self.lin = Linear(sources, sources)
        joined = getattr(self.aggr_module, "get_out_channels", None)
        self.lin_l = Linear(joined(sources) if joined else sources, out_channels, bias=bias)
        if root_weight:
            self.lin_r = Linear(targets, out_channels, bias=False)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draw all parameters again, except those that `project` and `root_weight` switch off after construction."""
        for child in (self.aggr_module, self.lin if self.project else None, self.lin_l,
                      self.lin_r if self.root_weight else None):
            if child is not None:
                draw(child)

    def forward(self, x: Nodes, edge_index: Any, size: Any = None) -> Tensor:
        """x (..., M, P), or (x_m, x_n), and edges -> (..., N, Q)."""
        x, x_root = pair(x)
        graph = self._without_values(self._graph(edge_index, x, x_root, size), edge_index)
        x = self.lin(x).relu() if self.project else x
        root = self.lin_r if self.root_weight else None
        y = self._aggregated(x, adjacency(graph, None, x.dtype), self.lin_l, root, x_root)
        return functional.normalize(y, p=2.0, dim=-1) if self.normalize else y


class GraphConv(Layer):
    """y_n = sum_m w_mn x_m Theta_1 + x_n Theta_2 + b. Arguments: those of `torch_geometric.nn.GraphConv`.

    Example:

        >>> from structconv.compat.pyg import GraphConv
        >>> edges = torch.tensor([[0, 1], [1, 2]])               # 0 -> 1 -> 2
        >>> layer = GraphConv((1, 3), 4)                         # inputs with 1 channel, outputs with 3
        >>> layer((torch.randn(3, 1), torch.randn(3, 3)), edges, edge_weight=torch.tensor([0.5, 2.0])).shape
        torch.Size([3, 4])
        >>> list(layer.state_dict())
        ['lin_rel.weight', 'lin_rel.bias', 'lin_root.weight']
    """

    def __init__(self, in_channels: Channels, out_channels: int, aggr: Any = "add", bias: bool = True,
                 **kwargs: Any) -> None:
        super().__init__(aggr, **kwargs)
        self.in_channels, self.out_channels = in_channels, out_channels
        sources, targets = channels(in_channels)
        self.lin_rel = Linear(sources, out_channels, bias=bias)
        self.lin_root = Linear(targets, out_channels, bias=False)
        self.reset_parameters()

    def forward(self, x: Nodes, edge_index: Any, edge_weight: Tensor | None = None, size: Any = None) -> Tensor:
        """x (..., M, P), or (x_m, x_n), edges and their weights (E,) -> (..., N, Q)."""
        x, x_root = pair(x)
        graph = self._graph(edge_index, x, x_root, size, weight=edge_weight)
        return self._aggregated(x, self._weighted(graph, x.dtype), self.lin_rel, self.lin_root, x_root)


class GINConv(Layer):
    """y_n = nn(sum_m x_m + (1 + eps) x_n). Arguments: those of `torch_geometric.nn.GINConv`.

    Example:

        >>> from structconv.compat.pyg import GINConv
        >>> edges = torch.tensor([[0, 1], [1, 2]])               # 0 -> 1 -> 2
        >>> layer = GINConv(torch.nn.Identity(), eps=1.0)        # x_0 + 2 x_1 at node 1
        >>> layer(torch.tensor([[1.0], [10.0], [100.0]]), edges).tolist()
        [[2.0], [21.0], [210.0]]
    """

    shown = ("nn",)

    def __init__(self, nn: Any, eps: float = 0.0, train_eps: bool = False, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.nn, self.initial_eps = nn, eps
        self._register("eps", train_eps, eps)
        self.reset_parameters()

    def forward(self, x: Nodes, edge_index: Any, size: Any = None) -> Tensor:
        """x (..., M, P), or (x_m, x_n), and edges -> what `nn` gives for (..., N, P)."""
        x, x_root = pair(x)
        if not (x.is_floating_point() or x.is_complex()):  # a sum with eps x has its dtype
            x, x_root = pair(x.to(self.eps.dtype) if x_root is x else (x.to(self.eps.dtype), x_root))
        graph = self._without_values(self._graph(edge_index, x, x_root, size), edge_index)
        if x_root is x and self._is_plain_sum():
            graph, x_root = looped(graph), None
        y = self._aggregated(x, Sparse(graph) if graph.edge_weight is None else self._weighted(graph, x.dtype))
        out: Tensor = self.nn(y if x_root is None else torch.addcmul(y, x_root, 1 + self.eps))
        return out

    def _is_plain_sum(self) -> bool:
        """Return True if y is the sum over the edges and one more loop at each entry."""
        eps = self._buffers.get("eps")
        plain = eps is not None and eps.is_cpu and self._is_sum() and not (self.explain or is_compiling())
        if not plain or type(eps) is not Tensor or private.transforms_active() or private.dispatch_modes():
            return False  # what a transform or a fake tensor wraps has no number to read
        return not float(eps)


class ClusterGCNConv(Layer):
    """y_n = sum_m a_mn x_m Theta_1 + x_n Theta_2 + b, a = 1 / d_n, of loops (1 + diag_lambda) / d_n. Arguments:
    those of `torch_geometric.nn.ClusterGCNConv`. Weights of edges are not read.

    Example:

        >>> from structconv.compat.pyg import ClusterGCNConv
        >>> edges = torch.tensor([[0, 1], [1, 2]])               # 0 -> 1 -> 2
        >>> layer = ClusterGCNConv(8, 4, diag_lambda=0.5)
        >>> layer(torch.randn(3, 8), edges).shape
        torch.Size([3, 4])
        >>> list(layer.state_dict())
        ['lin_out.weight', 'lin_out.bias', 'lin_root.weight']
    """

    shown = ("diag_lambda",)

    def __init__(self, in_channels: int, out_channels: int, diag_lambda: float = 0.0, add_self_loops: bool = True,
                 bias: bool = True, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.in_channels, self.out_channels = in_channels, out_channels
        self.diag_lambda, self.add_self_loops = diag_lambda, add_self_loops
        self.lin_out = Linear(in_channels, out_channels, bias=bias, weight_initializer="glorot")
        self.lin_root = Linear(in_channels, out_channels, bias=False, weight_initializer="glorot")
        self.reset_parameters()

    def forward(self, x: Tensor, edge_index: Any) -> Tensor:
        """x (..., N, P) and edges -> (..., N, Q)."""
        graph = dataclasses.replace(self._graph(edge_index, x, x), edge_weight=None)
        if self.add_self_loops:
            graph = with_remaining_loops(graph, 1.0)
        shares = (None, "sum") if self.flow == "source_to_target" else ("sum", None)  # of `edge_index[1]`, as there
        messages = adjacency(graph, shares, x.dtype)
        if self.diag_lambda:
            loop = (graph.source == graph.target).to(x.dtype)
            messages = Sparse(graph, cast(Tensor, messages.values) * (1 + self.diag_lambda * loop))
        absent = self._replaced(graph) if self.add_self_loops else None
        return self._aggregated(x, messages, self.lin_out, self.lin_root, x, absent=absent)


class ARMAConv(Layer):
    """y = mean_k h_k, T times h_k <- act(A^T h_k W_k + x V_k + b_k) from h_k = x, A as GCN's without loops. Arguments:
    those of `torch_geometric.nn.ARMAConv`.

    Example:

        >>> from structconv.compat.pyg import ARMAConv
        >>> edges = torch.tensor([[0, 1], [1, 2]])               # 0 -> 1 -> 2
        >>> layer = ARMAConv(8, 4, num_stacks=3, num_layers=2, shared_weights=True)
        >>> layer(torch.randn(3, 8), edges).shape
        torch.Size([3, 4])
        >>> {name: tuple(tensor.shape) for name, tensor in layer.state_dict().items()}
        {'weight': (1, 3, 4, 4), 'init_weight': (3, 8, 4), 'root_weight': (1, 3, 8, 4), 'bias': (1, 3, 1, 4)}
    """

    shown = ("num_stacks", "num_layers")

    def __init__(self, in_channels: int, out_channels: int, num_stacks: int = 1, num_layers: int = 1,
                 shared_weights: bool = False, act: Callable[[Tensor], Tensor] | None = _RELU, dropout: float = 0.0,
                 bias: bool = True, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.in_channels, self.out_channels = in_channels, out_channels
        self.num_stacks, self.num_layers, self.shared_weights = num_stacks, num_layers, shared_weights
        self.act, self.dropout = act, dropout
        layers = 1 if shared_weights else num_layers
        self.weight = nn.Parameter(torch.empty(max(1, layers - 1), num_stacks, out_channels, out_channels))
        shapes = (num_stacks, in_channels, out_channels), (layers, num_stacks, in_channels, out_channels)
        self.init_weight, self.root_weight = (nn.Parameter(torch.empty(shape)) if in_channels > 0
                                              else UninitializedParameter() for shape in shapes)
        self.bias = nn.Parameter(torch.empty(layers, num_stacks, 1, out_channels)) if bias else None
        self.reset_parameters()

    def forward(self, x: Tensor, edge_index: Any, edge_weight: Tensor | None = None) -> Tensor:
        """x (..., N, P), edges and their weights (E,) -> (..., N, Q)."""
        if isinstance(self._parameters.get("init_weight"), UninitializedParameter):
            self._materialize(x.shape[-1])
        messages = normalized(self, edge_index, x, edge_weight, loops=False)
        y = x = x.unsqueeze(-3)
        for t in range(self.num_layers):
            at = 0 if self.shared_weights else t
            y = y @ (self.init_weight if t == 0 else self.weight[max(at - 1, 0)])
            dropped = functional.dropout(x, self.dropout, self.training)
            y = self._aggregated(y, messages) + dropped @ self.root_weight[at]
            y = y if self.bias is None else y + self.bias[at]
            y = y if self.act is None else self.act(y)
        return y.mean(-3)

    @torch.no_grad()
    def _materialize(self, in_channels: int) -> None:
        """Draw the weights; as in PyTorch Geometric, `root_weight` has one layer more than `weight`."""
        shape = (self.num_stacks, in_channels, self.out_channels)
        cast(UninitializedParameter, self.init_weight).materialize(shape)
        cast(UninitializedParameter, self.root_weight).materialize((self.weight.shape[0] + 1, *shape))
        glorot(self.init_weight)
        glorot(self.root_weight)


def channels(in_channels: Channels) -> tuple[int, int]:
    """Return the channels of sources and of targets."""
    return (in_channels, in_channels) if isinstance(in_channels, int) else (in_channels[0], in_channels[1])
