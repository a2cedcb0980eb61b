"""Layers that weigh each edge by numbers of its own, made of its ends or of its attributes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.parameter import UninitializedParameter

from structconv import torch_compat as private
from structconv.bases.sparse import Sparse
from structconv.compat.pyg.convolutions import channels, normalized
from structconv.compat.pyg.edges import gather, is_sparse, matrix_of, warn_of_two_kinds, with_loops, without_edges
from structconv.compat.pyg.layer import Channels, Layer, Nodes, pair
from structconv.compat.pyg.linear import Linear, draw, glorot, is_product
from structconv.compat.pyg.operator import apply, is_few, sum_heads
from structconv.errors import ConfigError, ShapeError
from structconv.primitives.functions import sum_dtype
from structconv.structures.graph import Graph
from structconv.weights import Full
from structconv.weights.base import plus

__all__ = ["FAConv", "FeaStConv", "GMMConv"]


class FeaStConv(Layer):
    """y_n = mean_m sum_k q_kmn x_m Theta_k + b, q = softmax over k of <u_k, x_m - x_n> + c_k. Arguments: those of
    `torch_geometric.nn.FeaStConv`.

    Example:

        >>> from structconv.compat.pyg import FeaStConv
        >>> edges = torch.tensor([[0, 1], [1, 2]])               # 0 -> 1 -> 2
        >>> layer = FeaStConv(8, 4, heads=3)
        >>> layer(torch.randn(3, 8), edges).shape
        torch.Size([3, 4])
        >>> {name: tuple(tensor.shape) for name, tensor in layer.state_dict().items()}
        {'c': (3,), 'bias': (4,), 'lin.weight': (12, 8), 'u.weight': (3, 8)}
    """

    shown = ("heads",)
    aggregation = "mean"

    def __init__(self, in_channels: int, out_channels: int, heads: int = 1, add_self_loops: bool = True,
                 bias: bool = True, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.in_channels, self.out_channels, self.heads = in_channels, out_channels, heads
        self.add_self_loops = add_self_loops
        self.lin = Linear(in_channels, heads * out_channels, bias=False, weight_initializer="uniform")
        self.u = Linear(in_channels, heads, bias=False, weight_initializer="uniform")
        self.c = nn.Parameter(torch.empty(heads))
        self.bias = nn.Parameter(torch.empty(out_channels)) if bias else None
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draw all parameters again, in PyTorch Geometric's order."""
        draw(self.lin)
        draw(self.u)
        for parameter in (self.c, self.bias):
            if parameter is not None:
                parameter.normal_(0, 0.1)

    def forward(self, x: Nodes, edge_index: Any) -> Tensor:
        """x (..., M, P), or (x_m, x_n), and edges -> (..., N, Q)."""
        x, z = pair(x)
        if z is None:
            raise ConfigError("FeaStConv", "x must be a tensor, or those of sources and targets", "no targets")
        edges = self._graph(edge_index, x, z)
        if self.add_self_loops:
            if z is not x:
                warn_of_two_kinds("FeaStConv", x, z, edges)
            edges = with_loops(edges)
        absent = None if edges.edge_weight is None or not self.add_self_loops else edges.edge_weight.isinf()
        q = functional.softmax(self.u(gather(x, edges) - gather(z, edges, targets=True)) + self.c, -1)
        if self._is_matrix():
            present = edges if absent is None else without_edges(edges, absent)
            messages = self._messages(Sparse(present, q.mT), x.dtype)
            if is_product(self.lin) and not is_few(present, self.heads, self.lin.out_channels // self.heads):
                self.lin.materialize(x.shape[-1])
                theta = Full.of(self.lin.weight.unflatten(0, (self.heads, -1)).mT)
                y = apply(x, messages, theta, self.bias)
            else:
                y = plus(sum_heads(self.lin(x), messages), self.bias)
            return y if absent is None else y[..., :-1, :]
        rows = gather(self.lin(x), edges).unflatten(-1, (self.heads, -1))
        y = self._of_edges((rows * q.unsqueeze(-1)).sum(-2), edges, absent)
        return y if self.bias is None else y + self.bias


class GMMConv(Layer):
    """y_n = mean_m sum_k g_k(e_mn) x_m Theta_k + x_n Theta_0 + b, g_k Gaussians of the attributes of an edge.
    Arguments: those of `torch_geometric.nn.GMMConv`.

    With `separate_gaussians` each pair of an input and an output channel has its own.

    Example:

        >>> from structconv.compat.pyg import GMMConv
        >>> edges = torch.tensor([[0, 1], [1, 2]])               # 0 -> 1 -> 2
        >>> offsets = torch.tensor([[0.5, 1.0], [1.0, 0.0]])     # two coordinates of each edge
        >>> layer = GMMConv(8, 4, dim=2, kernel_size=5)
        >>> layer(torch.randn(3, 8), edges, offsets).shape
        torch.Size([3, 4])
        >>> tuple(layer.mu.shape)
        (5, 2)
    """

    shown = ("dim",)
    aggregation = "mean"

    def __init__(self, in_channels: Channels, out_channels: int, dim: int, kernel_size: int,
                 separate_gaussians: bool = False, aggr: Any = "mean", root_weight: bool = True, bias: bool = True,
                 **kwargs: Any) -> None:
        super().__init__(aggr, **kwargs)
        self.in_channels, self.out_channels, self.dim, self.kernel_size = in_channels, out_channels, dim, kernel_size
        self.separate_gaussians, self.root_weight = separate_gaussians, root_weight
        sources, targets = channels(in_channels)
        self.rel_in_channels = sources
        self.g, self.mu, self.sigma = (nn.Parameter(torch.empty(shape)) if sources > 0 else UninitializedParameter()
                                       for shape in self._shapes(sources))
        self.root = Linear(targets, out_channels, bias=False, weight_initializer="glorot") if root_weight else None
        self.bias = nn.Parameter(torch.empty(out_channels)) if bias else None
        self.reset_parameters()

    def _shapes(self, sources: int) -> tuple[tuple[int, ...], ...]:
        """Return the shapes of g, mu and sigma."""
        gaussians: tuple[int, ...] = (self.kernel_size, self.dim)
        gaussians = (sources, self.out_channels, *gaussians) if self.separate_gaussians else gaussians
        return (sources, self.out_channels * self.kernel_size), gaussians, gaussians

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draw all parameters again, in PyTorch Geometric's order."""
        for parameter in (self.g, self.mu, self.sigma):
            glorot(parameter)
        if self.root is not None:
            draw(self.root)
        if self.bias is not None:
            self.bias.zero_()

    @torch.no_grad()
    def _materialize(self, sources: int) -> None:
        for name, shape in zip(("g", "mu", "sigma"), self._shapes(sources), strict=True):
            parameter = self._parameters.get(name)
            if isinstance(parameter, UninitializedParameter):
                self.rel_in_channels = sources
                parameter.materialize(shape)
                glorot(parameter)

    def forward(self, x: Nodes, edge_index: Any, edge_attr: Tensor | None = None, size: Any = None) -> Tensor:
        """x (..., M, P), or (x_m, x_n), edges and their attributes (E, dim) -> (..., N, Q)."""
        x, x_root = pair(x)
        self._materialize(x.shape[-1])
        edges = self._graph(edge_index, x, x_root, size, attr=edge_attr)
        edge_attr = edges.edge_attr
        if edge_attr is None or edge_attr.dim() != 2 or edge_attr.shape[1] != self.dim:
            raise ShapeError("GMMConv", f"edge_attr must have shape (E, dim={self.dim})",
                             "none" if edge_attr is None else tuple(edge_attr.shape))
        g = self.g  # read once: a parametrization may change it at each reading
        wide = sum_dtype(g.dtype)  # squares of small deviations have no reciprocal in 16 bits
        mu, scale = self.mu.to(wide), -0.5 / (1e-15 + self.sigma.to(wide).pow(2))
        if mu.dim() == 2:  # operators are faster along the edges
            at = edge_attr.mT.contiguous().unsqueeze(1)
            gaussians = ((at - mu.mT.unsqueeze(-1)).pow(2) * scale.mT.unsqueeze(-1)).sum(0).exp().mT
        else:
            gaussians = ((edge_attr.view(-1, 1, 1, 1, self.dim) - mu).pow(2) * scale).sum(-1).exp()
        gaussians = gaussians if wide is g.dtype else gaussians.to(g.dtype)
        by_kernel = (self.kernel_size, self.out_channels)
        if self.separate_gaussians:
            filters = (gaussians * g.unflatten(-1, by_kernel[::-1])).sum(-1)
            y = self._of_edges((gather(x, edges).unsqueeze(-1) * filters).sum(-2), edges)
        elif not self._is_matrix():
            rows = gather(x @ g, edges).unflatten(-1, by_kernel)
            y = self._of_edges((rows * gaussians.unsqueeze(-1)).sum(-2), edges)
        elif private.any_autocast() or is_few(edges, *by_kernel):
            y = sum_heads(x @ g, self._messages(Sparse(edges, gaussians.mT), x.dtype))
        else:
            theta = Full.of(g.unflatten(-1, by_kernel).transpose(0, 1))
            y = apply(x, self._messages(Sparse(edges, gaussians.mT), x.dtype), theta)
        y = y if self.root is None or x_root is None else y + self.root(x_root)
        return y if self.bias is None else y + self.bias


class FAConv(Layer):
    """y_n = sum_m a_mn x_m + eps x0_n, a_mn = tanh(<u, x_m> + <v, x_n>) / sqrt(d_m d_n). Arguments: those of
    `torch_geometric.nn.FAConv`. `cached` changes nothing, as of `GCNConv`.

    Example:

        >>> from structconv.compat.pyg import FAConv
        >>> edges = torch.tensor([[0, 1], [1, 2]])               # 0 -> 1 -> 2
        >>> x = torch.randn(3, 8)
        >>> layer = FAConv(8, eps=0.1)
        >>> y, (edge_index, alpha) = layer(x, x, edges, return_attention_weights=True)
        >>> bool((alpha.abs() <= 1).all())                       # negative ones too: they sharpen
        True
    """

    shown = ("eps",)

    def __init__(self, channels: int, eps: float = 0.1, dropout: float = 0.0, cached: bool = False,
                 add_self_loops: bool = True, normalize: bool = True, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.channels, self.eps, self.dropout, self.cached = channels, eps, dropout, cached
        self.add_self_loops, self.normalize = add_self_loops, normalize
        self.att_l, self.att_r = Linear(channels, 1, bias=False), Linear(channels, 1, bias=False)
        self.reset_parameters()

    def forward(self, x: Tensor, x_0: Tensor, edge_index: Any, edge_weight: Tensor | None = None,
                return_attention_weights: bool | None = None) -> Any:
        """x and x_0 (..., N, P), and edges -> (..., N, P); with weights (y, (edge_index, alpha)).

        `edge_weight` (E,) is given without `normalize`, and only then.
        """
        messages = normalized(self, edge_index, x, edge_weight, loops=self.add_self_loops and self.normalize,
                              normalize=self.normalize)
        weighted = edge_weight is not None or (not self.normalize and is_sparse(edge_index))
        if self.normalize is weighted or messages.values is None:
            raise ConfigError("FAConv", f"edge_weight must {'not ' * self.normalize}be given with "
                              f"normalize={self.normalize}", "none" if edge_weight is None else "edge_weight")
        edges: Graph = messages.graph
        alpha = (gather(self.att_l(x), edges) + gather(self.att_r(x), edges, targets=True)).tanh().squeeze(-1)
        dropped = functional.dropout(alpha, self.dropout, self.training)
        y = self._aggregated(x, Sparse(edges, (dropped * messages.values).unsqueeze(-2)), absent=self._replaced(edges)
                             if self.add_self_loops and self.normalize else None)
        if self.eps:
            y = torch.add(y, x_0, alpha=self.eps) if type(self.eps) in (int, float) else y + self.eps * x_0
        if return_attention_weights is None:
            return y
        if isinstance(edge_index, Tensor) and is_sparse(edge_index):
            return y, matrix_of(alpha, edges, edge_index.layout)
        return y, (edges.edge_index if self.flow == "source_to_target" else edges.edge_index.flip(0), alpha)
