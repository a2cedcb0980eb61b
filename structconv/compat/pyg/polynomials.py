"""Layers over powers and Chebyshev polynomials of one matrix of the graph."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.compiler import is_compiling
from torch.nn import functional

from structconv.bases.matrices import scaled_laplacian
from structconv.bases.polynomial import Polynomial
from structconv.bases.sparse import Sparse
from structconv.compat.pyg.convolutions import normalized
from structconv.compat.pyg.edges import group_count, without_loops
from structconv.compat.pyg.layer import Layer
from structconv.compat.pyg.linear import Linear, is_plain, is_product, project
from structconv.compat.pyg.operator import apply
from structconv.compat.pyg.pooling import pooled
from structconv.compat.pyg.tracing import is_tracing
from structconv.derived import derived
from structconv.errors import ConfigError
from structconv.nn.direct import FEW_NUMBERS
from structconv.structures.graph import Graph
from structconv.weights import Eye, Full, HeadBlocks, Separable

__all__ = ["APPNP", "ChebConv", "MixHopConv", "SGConv", "SSGConv", "TAGConv"]


class _Polynomial(Layer):
    """Base of the layers over powers of one matrix."""

    lins: nn.ModuleList

    def _summed(self, x: Tensor, messages: Sparse, kind: str, bias: Tensor | None) -> Tensor:
        """sum_k lins[k](A_k^T x) + b, of the polynomials A_k of a kind."""
        order = len(self.lins) - 1
        weights = _weights(self.lins, x) if self._is_matrix() and not self._is_few(x) else None
        if weights is not None:
            return apply(x, Polynomial(self._messages(messages, x.dtype), order, kind), Full.of(weights), bias)
        y = sum(lin(rows) for lin, rows in zip(self.lins, self._steps(x, messages, order, kind), strict=True))
        return cast(Tensor, y) if bias is None else y + bias

    def _is_few(self, x: Tensor) -> bool:
        """Return True if one node for each step takes less time than a plan of a polynomial."""
        return not is_compiling() and x.numel() <= FEW_NUMBERS and x.dtype in (torch.float32, torch.float64)

    def _steps(self, x: Tensor, messages: Sparse, order: int, kind: str = "monomial") -> Sequence[Tensor]:
        """x, x aggregated once, and so on."""
        if self._is_matrix() and not self._is_few(x):
            return Polynomial(self._messages(messages, x.dtype), order, kind).analysis(x).unbind(-3)
        steps = [x]
        absent = self._replaced(messages.graph) if getattr(self, "add_self_loops", False) else None
        for k in range(order):
            y = self._aggregated(steps[-1], messages, absent=absent)
            steps.append(2 * y - steps[-2] if kind == "chebyshev" and k else y)
        return steps


def _weights(lins: Sequence[nn.Module] | nn.ModuleList, x: Tensor) -> Tensor | None:
    """The weights (K, P, Q) of linear layers; `None` where one is wrapped, replaced or has a bias."""
    if not all(is_product(lin) for lin in lins):
        return None
    for lin in lins:
        cast(Linear, lin).materialize(x.shape[-1])
    return torch.stack([cast(Linear, lin).weight.mT for lin in lins])


class TAGConv(_Polynomial):
    """y = sum_k A^k^T x Theta_k + b, k = 0 .. K. Arguments: those of `torch_geometric.nn.TAGConv`.

    Example:

        >>> from structconv.compat.pyg import TAGConv
        >>> edges = torch.tensor([[0, 1], [1, 2]])               # 0 -> 1 -> 2
        >>> layer = TAGConv(8, 4, K=2)
        >>> layer(torch.randn(3, 8), edges).shape
        torch.Size([3, 4])
        >>> list(layer.state_dict())
        ['bias', 'lins.0.weight', 'lins.1.weight', 'lins.2.weight']
    """

    shown = ("K",)

    def __init__(self, in_channels: int, out_channels: int, K: int = 3, bias: bool = True, normalize: bool = True,
                 **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.in_channels, self.out_channels, self.K, self.normalize = in_channels, out_channels, K, normalize
        self.lins = nn.ModuleList(Linear(in_channels, out_channels, bias=False) for _ in range(K + 1))
        self.bias = nn.Parameter(torch.empty(out_channels)) if bias else None
        self.reset_parameters()

    def forward(self, x: Tensor, edge_index: Any, edge_weight: Tensor | None = None) -> Tensor:
        """x (..., N, P), edges and their weights (E,) -> (..., N, Q)."""
        messages = normalized(self, edge_index, x, edge_weight, loops=False, normalize=self.normalize)
        return self._summed(x, messages, "monomial", self.bias)


class ChebConv(_Polynomial):
    """y = sum_k T_k(2 L / lambda - I)^T x Theta_k + b, k = 0 .. K - 1. Arguments: those of
    `torch_geometric.nn.ChebConv`.

    Without `lambda_max` it is twice the largest entry of L, as there; with `batch` that of each graph.

    Example:

        >>> from structconv.compat.pyg import ChebConv
        >>> edges = torch.tensor([[0, 1], [1, 2]])               # 0 -> 1 -> 2
        >>> layer = ChebConv(8, 4, K=3)
        >>> layer(torch.randn(3, 8), edges, lambda_max=2.0).shape
        torch.Size([3, 4])
        >>> list(layer.state_dict())
        ['bias', 'lins.0.weight', 'lins.1.weight', 'lins.2.weight']
    """

    shown = ("K", "normalization")

    def __init__(self, in_channels: int, out_channels: int, K: int, normalization: str | None = "sym",
                 bias: bool = True, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        if K < 1:
            raise ConfigError("ChebConv", "K must be positive", K)
        if normalization not in ("sym", "rw", None):
            raise ConfigError("ChebConv", "normalization must be 'sym', 'rw' or None", repr(normalization))
        self.in_channels, self.out_channels, self.K, self.normalization = in_channels, out_channels, K, normalization
        self.lins = nn.ModuleList(Linear(in_channels, out_channels, bias=False, weight_initializer="glorot")
                                  for _ in range(K))
        self.bias = nn.Parameter(torch.empty(out_channels)) if bias else None
        self.reset_parameters()

    def forward(self, x: Tensor, edge_index: Any, edge_weight: Tensor | None = None, batch: Tensor | None = None,
                lambda_max: float | Tensor | None = None) -> Tensor:
        """x (..., N, P), edges and their weights (E,) -> (..., N, Q).

        `lambda_max` is a number, or one for each graph of a batch.
        """
        graph = self._graph(edge_index, x, x, weight=edge_weight)
        if lambda_max is None and graph.edge_weight is None and self.normalization is not None:
            lambda_max = 2.0

        def build() -> Sparse:
            return self._laplacian(without_loops(graph), batch, lambda_max, x.dtype)

        key = "bounded", self.normalization, self.flow, graph.num_inputs, x.dtype  # its edges are others: loops follow
        laplacian = (build() if graph.edge_weight is None or lambda_max is not None or batch is not None else
                     derived((graph.edge_index, graph.edge_weight), key, build))
        return self._summed(x, laplacian, "chebyshev", self.bias)

    def _laplacian(self, graph: Graph, batch: Tensor | None, bound: float | Tensor | None, dtype: torch.dtype
                   ) -> Sparse:
        """2 L / lambda - I; degrees are sums over the edges that have an entry in `edge_index[0]`, for both flows."""
        kind, forward = "row" if self.normalization == "rw" else self.normalization, self.flow == "source_to_target"
        turned = graph.reversed() if forward else graph
        if isinstance(bound, float | int) and self._is_sum():  # without loops where they are 0
            laplacian = scaled_laplacian(turned, kind, float(bound), dtype)
        else:
            twice = scaled_laplacian(turned, kind, 1.0, dtype)  # 2 L - I, loops after the edges
            values = cast(Tensor, twice.values)
            loop = (torch.arange(values.shape[-1], device=values.device) >= graph.num_edges).to(values)
            entries = values + loop
            group = None if batch is None else batch[twice.graph.target.long()]
            if bound is None:  # of each graph; a recorded program takes N, the largest number without empty ones
                count = graph.num_inputs if batch is None or is_tracing() or is_compiling() else group_count(batch)
                largest = pooled(entries, group, count, "max")
                largest = largest.masked_fill(largest == 0, 1.0)  # of graphs without edges
            else:
                largest = torch.as_tensor(bound).to(values)
            laplacian = Sparse(twice.graph, entries / (largest if largest.numel() == 1 else largest[group]) - loop)
        return cast(Sparse, laplacian.transpose()) if forward else laplacian


class SGConv(_Polynomial):
    """y = A^K^T x Theta + b with GCN's A. Arguments: those of `torch_geometric.nn.SGConv`.

    `cached` changes nothing: the powers are applied to each x, and no other graph is mistaken for the first.

    Example:

        >>> from structconv.compat.pyg import SGConv
        >>> layer = SGConv(1, 1, K=2, bias=False)
        >>> layer.lin.weight.data.fill_(1)
        tensor([[1.]])
        >>> edges = torch.tensor([[0, 1], [1, 0]])               # each entry of A is 1/2
        >>> layer(torch.tensor([[1.0], [3.0]]), edges).round().tolist()   # two averages
        [[2.0], [2.0]]
    """

    shown = ("K",)

    def __init__(self, in_channels: int, out_channels: int, K: int = 1, cached: bool = False,
                 add_self_loops: bool = True, bias: bool = True, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.in_channels, self.out_channels, self.K = in_channels, out_channels, K
        self.cached, self.add_self_loops = cached, add_self_loops
        self.lin = Linear(in_channels, out_channels, bias=bias)
        self.reset_parameters()

    def forward(self, x: Tensor, edge_index: Any, edge_weight: Tensor | None = None) -> Tensor:
        """x (..., N, P), edges and their weights (E,) -> (..., N, Q)."""
        messages = normalized(self, edge_index, x, edge_weight, loops=self.add_self_loops)
        if self._is_matrix() and self.K and (self.K == 1 or self._is_few(x)):
            x = x if self.K == 1 else self._steps(x, messages, self.K - 1)[-1]
            return self._aggregated(x, messages, self.lin)
        if self._is_matrix():
            return project(x, Polynomial(self._messages(messages, x.dtype), self.K, "monomial", self.K), self.lin)
        y: Tensor = self.lin(self._steps(x, messages, self.K)[-1])
        return y


class SSGConv(_Polynomial):
    """y = (alpha I + (1 - alpha) / K sum_k A^k)^T x Theta + b. Arguments: those of `torch_geometric.nn.SSGConv`.

    Example:

        >>> from structconv.compat.pyg import SSGConv
        >>> edges = torch.tensor([[0, 1], [1, 2]])               # 0 -> 1 -> 2
        >>> x = torch.randn(3, 8)
        >>> layer = SSGConv(8, 4, alpha=1.0, K=2)                # alpha = 1: x itself
        >>> torch.allclose(layer(x, edges), layer.lin(x), atol=1e-6)
        True
    """

    shown = ("K", "alpha")

    def __init__(self, in_channels: int, out_channels: int, alpha: float, K: int = 1, cached: bool = False,
                 add_self_loops: bool = True, bias: bool = True, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.in_channels, self.out_channels, self.alpha, self.K = in_channels, out_channels, alpha, K
        self.cached, self.add_self_loops = cached, add_self_loops
        self.lin = Linear(in_channels, out_channels, bias=bias)
        self.reset_parameters()

    def forward(self, x: Tensor, edge_index: Any, edge_weight: Tensor | None = None) -> Tensor:
        """x (..., N, P), edges and their weights (E,) -> (..., N, Q)."""
        messages = normalized(self, edge_index, x, edge_weight, loops=self.add_self_loops)
        if not self._is_matrix() or self._is_few(x):
            first, *rest = self._steps(x, messages, self.K)
            y: Tensor = self.lin(self.alpha * first + (1 - self.alpha) / max(self.K, 1) * sum(rest))
            return y
        powers = Polynomial(self._messages(messages, x.dtype), self.K, "monomial")
        mix = x.new_full((self.K + 1, 1), (1 - self.alpha) / max(self.K, 1))
        mix[0] = self.alpha
        if not is_plain(self.lin):
            return project(x, powers.mix(mix), self.lin)
        self.lin.materialize(x.shape[-1])
        return apply(x, powers, Separable.of(mix, self.lin.weight.mT.unsqueeze(0)), self.lin.bias)


class MixHopConv(_Polynomial):
    """y = ||_p A^p^T x Theta_p + b, p in `powers`. Arguments: those of `torch_geometric.nn.MixHopConv`.

    Example:

        >>> from structconv.compat.pyg import MixHopConv
        >>> edges = torch.tensor([[0, 1], [1, 2]])               # 0 -> 1 -> 2
        >>> layer = MixHopConv(8, 4, powers=[0, 1, 2])
        >>> layer(torch.randn(3, 8), edges).shape                # 4 channels for each power
        torch.Size([3, 12])
    """

    shown = ("powers",)

    def __init__(self, in_channels: int, out_channels: int, powers: list[int] | None = None,
                 add_self_loops: bool = True, bias: bool = True, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.in_channels, self.out_channels = in_channels, out_channels
        self.powers, self.add_self_loops = [0, 1, 2] if powers is None else powers, add_self_loops
        self.lins = nn.ModuleList(Linear(in_channels, out_channels, bias=False) if p in self.powers else nn.Identity()
                                  for p in range(max(self.powers) + 1))
        self.bias = nn.Parameter(torch.empty(len(self.powers) * out_channels)) if bias else None
        self.reset_parameters()

    def forward(self, x: Tensor, edge_index: Any, edge_weight: Tensor | None = None) -> Tensor:
        """x (..., N, P), edges and their weights (E,) -> (..., N, len(powers) Q)."""
        messages = normalized(self, edge_index, x, edge_weight, loops=self.add_self_loops)
        first, last = min(self.powers), max(self.powers)
        weights = None if self._is_few(x) else _weights([self.lins[p] for p in self.powers], x)
        if weights is not None and self.powers == list(range(first, last + 1)) and self._is_matrix():
            basis = Polynomial(self._messages(messages, x.dtype), last, "monomial", first)
            return apply(x, basis, HeadBlocks.of(weights), self.bias)
        steps = self._steps(x, messages, last)
        y = torch.cat([self.lins[p](steps[p]) for p in self.powers], -1)
        return y if self.bias is None else y + self.bias


class APPNP(_Polynomial):
    """K times h <- (1 - alpha) A^T h + alpha x, from h = x. Arguments: those of `torch_geometric.nn.APPNP`.

    As there, dropout adds up: an entry of A that one step drops is also zero in the steps after it.

    Example:

        >>> from structconv.compat.pyg import APPNP
        >>> edges = torch.tensor([[0, 1], [1, 0]])               # each entry of A is 1/2
        >>> APPNP(K=1, alpha=0.5)(torch.tensor([[1.0], [3.0]]), edges).tolist()
        [[1.5], [2.5]]
    """

    shown = ("K", "alpha")

    def __init__(self, K: int, alpha: float, dropout: float = 0.0, cached: bool = False, add_self_loops: bool = True,
                 normalize: bool = True, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.K, self.alpha, self.dropout, self.cached = K, alpha, dropout, cached
        self.add_self_loops, self.normalize = add_self_loops, normalize

    def forward(self, x: Tensor, edge_index: Any, edge_weight: Tensor | None = None) -> Tensor:
        """x (..., N, P), edges and their weights (E,) -> (..., N, P)."""
        loops = self.add_self_loops and self.normalize
        messages = normalized(self, edge_index, x, edge_weight, loops=loops, normalize=self.normalize)
        few = self._is_few(x)
        fixed = not (self.dropout and self.training) and not isinstance(self.alpha, Tensor)
        if few and fixed and self._is_matrix():  # all steps at once
            kept = 1 - self.alpha
            mix = [self.alpha * kept ** k for k in range(self.K)] + [kept ** self.K]
            powers = Polynomial(self._messages(messages, x.dtype), self.K, "monomial")
            theta = torch.tensor(mix, dtype=x.dtype, device=x.device).unsqueeze(-1)
            return apply(x, powers.mix(theta), Eye.of(1, x.shape[-1]))
        h, absent = x, self._replaced(messages.graph) if loops else None
        for _ in range(self.K):
            if self.dropout and self.training:
                messages = Sparse(messages.graph, functional.dropout(messages._rows(x.dtype)[0], self.dropout))
            h = (1 - self.alpha) * self._aggregated(h, messages, absent=absent) + self.alpha * x
        return h
