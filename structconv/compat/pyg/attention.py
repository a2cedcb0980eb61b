"""Layers that attend along edges."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.compiler import is_compiling
from torch.nn.functional import leaky_relu, linear, normalize
from torch.utils.hooks import RemovableHandle

from structconv.bases.entrywise import Normalized
from structconv.bases.scores import Additive, Affine, Bilinear, EdgeScore
from structconv.bases.tree import Term
from structconv.compat.pyg.convolutions import channels
from structconv.compat.pyg.edges import (
    Fill,
    edges_to_outputs,
    gather,
    has_repeats,
    is_sparse,
    matrix_of,
    warn_of_two_kinds,
    with_loops,
)
from structconv.compat.pyg.layer import Channels, Layer, Nodes, pair
from structconv.compat.pyg.linear import Linear, is_plain, is_product, project_together
from structconv.compat.pyg.operator import attend, is_few
from structconv.errors import ConfigError, ShapeError
from structconv.kernels.sparse_attention import SortedEdges, sorted_edges
from structconv.nn.direct import FEW_ALONG_EDGES, drawn, must_be_planned
from structconv.primitives.native.layer import attend_by_dots, attend_by_pairs, attend_by_terms
from structconv.primitives.native.node import is_direct
from structconv.structures.graph import Graph, with_attributes
from structconv.weights.base import plus

__all__ = ["AGNNConv", "GATConv", "GATv2Conv", "TransformerConv"]


class _Attention(Layer):
    """Base of the attention layers with heads."""

    shown = ("heads",)
    #: True if loops are added, and their attributes.
    add_self_loops: bool = False
    fill_value: Fill = "mean"
    lin_edge: Linear | None

    def register_message_forward_hook(self, hook: Callable[..., None]) -> RemovableHandle:
        """Call `hook(layer, ({"alpha": alpha},), None)` in each pass, with the weights (E, K), as explainers expect."""
        handle = RemovableHandle(self._message_forward_hooks)
        self._message_forward_hooks[handle.id] = hook
        return handle

    def _options(self, in_channels: Channels, out_channels: int, heads: int, concat: bool, dropout: float,
                 edge_dim: int | None) -> None:
        self.in_channels, self.out_channels, self.heads, self.concat = in_channels, out_channels, heads, concat
        self.dropout, self.edge_dim = dropout, edge_dim

    def _edges(self, edges: Any, x: Tensor, targets: Tensor | None, attr: Tensor | None, size: Any = None) -> Graph:
        """The graph of a call, with loops where the layer adds them and with attributes (E, A)."""
        owner = type(self).__name__
        for one in (x, targets):
            if one is not None and one.dim() < 2:
                raise ShapeError(owner, "x must have shape (..., M, P)", tuple(one.shape))
        graph = self._graph(edges, x, targets, size, attr=attr)
        attr = graph.edge_attr
        attr = attr.unsqueeze(-1) if attr is not None and attr.dim() == 1 else attr
        if attr is None and self.edge_dim is not None:
            if graph.edge_weight is not None and not isinstance(edges, Tensor):  # the numbers of a `SparseTensor`
                attr = graph.edge_weight.unsqueeze(-1)
            elif not self._edges_may_be_bare:
                raise ConfigError(owner, f"edge_attr must be given, with edge_dim={self.edge_dim}", "none")
        if attr is not None and self.edge_dim is None:
            if not self._attributes_may_be_unread:
                raise ConfigError(owner, "edge_dim must be given for a call with edge_attr", "none")
            attr = None
        if attr is not None and attr.shape[-1] != self.edge_dim:
            raise ShapeError(owner, f"edge_attr must have shape (E, edge_dim={self.edge_dim})", tuple(attr.shape))
        attr = attr if attr is None else self._before_loops(attr)
        if graph.edge_weight is not None or attr is not graph.edge_attr:
            graph = with_attributes(graph, attr)
        if not self.add_self_loops:
            return graph
        if targets is not x:
            warn_of_two_kinds(owner, x, targets, graph)
        if attr is None or self.flow == "source_to_target":
            return with_loops(graph, self.fill_value)
        # theirs reduces over `edge_index[1]` always
        return with_loops(graph.reversed(), self.fill_value).reversed()

    def _before_loops(self, attr: Tensor) -> Tensor:
        """The attributes (E, A) of edges as the layer reads them, before loops get theirs."""
        return attr

    #: True if `edge_dim` may be given without attributes, and attributes without it.
    _edges_may_be_bare = _attributes_may_be_unread = False

    def _heads(self, flat: Tensor) -> Tensor:
        """(..., M, K D) -> (..., K, M, D)."""
        return flat.unflatten(-1, (self.heads, -1)).movedim(-2, -3)

    def _attend(self, values: Tensor, heads: Tensor, scores: Any, graph: Graph, edges: Graph, *,
                mask: Tensor | None = None, bias: Tensor | None = None, weights: bool = False
                ) -> tuple[Tensor, Tensor | None]:
        """The weighted values, heads side by side or averaged, plus b; and the weights if requested.

        Args:
            graph: from the rows of the values. edges: the same, between entries.
            mask: an explainer's, where the values are those of edges.
        """
        hooks = self._message_forward_hooks
        if not self._is_sum():
            return self._aggregate_weighted(values, heads, scores, graph, edges, bias=bias)
        if mask is not None:
            values = values * mask.unsqueeze(-1)
            heads = self._heads(values)
        y, alpha = attend(values, heads, scores, graph, added=edges.edge_weight, bias=bias if self.concat else None,
                          dropout=self.dropout if self.training else 0.0, weights=weights or bool(hooks))
        for hook in hooks.values():  # of explainers, which read `alpha`
            if hook(self, ({"alpha": alpha},), None) is not None:
                raise ConfigError(type(self).__name__, "a message hook must return None", "another value",
                                  "No message is formed here. Use PyTorch Geometric's layer to change messages.")
        return self._joined(y, bias), alpha

    def _reads_edges(self, edges: Graph, mask: Tensor | None) -> bool:
        """Return True if the values must be those of edges: an explainer masks edges, or dropout draws for each of the
        edges between two entries. Compiled programs, which read no edges, draw once for these."""
        return mask is not None or (self.training and 0 < self.dropout < 1 and has_repeats(edges))

    def _few_edges(self, x: Tensor, z: Tensor | None, graph: Graph, width: int, lins: tuple[Any, ...],
                   *others: Tensor | None) -> SortedEdges | None:
        """The edges for a node of autograd that computes `width` products of each of few entries and attends; `None` if
        it does not apply. `others` are tensors that it reads beside x and the layers."""
        if (is_compiling() or z is not x or x.dim() != 2 or x.shape[0] * width > FEW_ALONG_EDGES or self.explain
                or graph.edge_attr is not None or graph.edge_weight is not None or self._message_forward_hooks
                or not self._is_sum() or (self.training and self.dropout >= 1) or must_be_planned(Normalized)
                or self._reads_edges(graph, None)):
            return None
        if not all(is_plain(lin) and lin.in_channels == x.shape[1] for lin in lins) or not is_direct(
                x, *others, *(t for lin in lins for t in (lin.weight, lin.bias))):
            return None
        return sorted_edges(graph, x.shape[0], x.shape[0])

    def _joined(self, y: Tensor, bias: Tensor | None) -> Tensor:
        """The heads side by side, to which b has been added, or their mean plus b."""
        if self.concat:
            return y
        y = y.unflatten(-1, (self.heads, self.out_channels)).mean(-2)
        return y if bias is None else y + bias

    def _aggregate_weighted(self, values: Tensor, heads: Tensor, scores: Any, graph: Graph, edges: Graph, *,
                            bias: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """`_attend` where weighted values are not summed: they are rows of the edges, which `aggr` joins."""
        alpha = cast(Tensor, attend(values, heads, scores, graph, added=edges.edge_weight,
                                    dropout=self.dropout if self.training else 0.0, weights=True)[1])
        rows = values if graph is not edges else gather(values, edges)
        rows = (rows.unflatten(-1, (self.heads, -1)) * alpha.unsqueeze(-1)).flatten(-2)
        y = self._of_edges(rows, edges, None if edges.edge_weight is None else edges.edge_weight.isinf())
        if not self.concat:
            self._check_width(y, values)
            y = y.unflatten(-1, (self.heads, self.out_channels)).mean(-2)
        self._check_width(y, bias)
        return y if bias is None else y + bias, alpha


def _with_weights(layer: Layer, y: Tensor, connectivity: Any, edges: Graph, alpha: Tensor | None) -> Any:
    """y, and the weights if there are some, with the edges in the form of the input: a list, or a sparse matrix."""
    if alpha is None:
        return y
    if isinstance(connectivity, Tensor) and is_sparse(connectivity):
        return y, matrix_of(alpha, edges, connectivity.layout)
    index = edges.edge_index
    if edges.edge_weight is not None:  # without the edges that take no part
        present = edges.edge_weight.isfinite().nonzero().squeeze(-1)
        index, alpha = index[:, present], alpha[present]
    return y, (index if layer.flow == "source_to_target" else index.flip(0), alpha)


class GATConv(_Attention):
    """y_n = ||_k sum_m a_kmn x_m Theta_k + b, a = softmax_m leaky_relu(<u_k, x_m Theta_k> + <v_k, x_n Theta_k> + w_k e)

    Arguments: those of `torch_geometric.nn.GATConv`. Weights come as (edge_index, alpha (E, K)), the input's edges in
    their order without loops, then the loops that were added.

    Example:

        >>> from structconv.compat.pyg import GATConv
        >>> edges = torch.tensor([[0, 1], [1, 2]])               # 0 -> 1 -> 2
        >>> layer = GATConv(8, 4, heads=2, add_self_loops=False)
        >>> y, (edge_index, alpha) = layer(torch.randn(3, 8), edges, return_attention_weights=True)
        >>> y.shape, torch.equal(edge_index, edges)              # weights in the order of your edges
        (torch.Size([3, 8]), True)
        >>> alpha.tolist()                                       # one edge at each output
        [[1.0, 1.0], [1.0, 1.0]]
    """

    _edges_may_be_bare = _attributes_may_be_unread = True

    def __init__(self, in_channels: Channels, out_channels: int, heads: int = 1, concat: bool = True,
                 negative_slope: float = 0.2, dropout: float = 0.0, add_self_loops: bool = True,
                 edge_dim: int | None = None, fill_value: Fill = "mean", bias: bool = True, residual: bool = False,
                 **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._options(in_channels, out_channels, heads, concat, dropout, edge_dim)
        self.negative_slope, self.add_self_loops, self.fill_value = negative_slope, add_self_loops, fill_value
        self.residual = residual
        linear = partial(Linear, bias=False, weight_initializer="glorot")
        sources, targets = channels(in_channels)
        shared = isinstance(in_channels, int)
        self.lin = linear(sources, heads * out_channels) if shared else None
        self.lin_src = None if shared else linear(sources, heads * out_channels)
        self.lin_dst = None if shared else linear(targets, heads * out_channels)
        self.att_src = nn.Parameter(torch.empty(1, heads, out_channels))
        self.att_dst = nn.Parameter(torch.empty(1, heads, out_channels))
        self.lin_edge = None if edge_dim is None else linear(edge_dim, heads * out_channels)
        self.att_edge = None if edge_dim is None else nn.Parameter(torch.empty(1, heads, out_channels))
        total = out_channels * (heads if concat else 1)
        self.res = linear(targets, total) if residual else None
        self.bias = nn.Parameter(torch.empty(total)) if bias else None
        self.reset_parameters()

    def forward(self, x: Nodes, edge_index: Any, edge_attr: Tensor | None = None, size: Any = None,
                return_attention_weights: bool | None = None) -> Any:
        """x (..., M, P), or (x_m, x_n) -> (..., N, K Q); with weights (y, (edge_index, alpha))."""
        x, z = pair(x)
        residual = None if self.res is None or z is None else self.res(z)
        edges = self._edges(edge_index, x, z, edge_attr, size)
        if not return_attention_weights and (few := self._as_one_node(x, z, edges)) is not None:
            return few if residual is None else few + residual
        source, target = (self.lin, self.lin) if self.lin is not None else (self.lin_src, self.lin_dst)
        values = source(x)  # type: ignore[misc]
        to = values if z is x and source is target else None if z is None else target(z)  # type: ignore[misc]
        graph, mask, term, few = edges, self._mask(edges), edges.edge_attr, None
        if term is not None and self.lin_edge is not None:
            term = term if self._has_terms_first() else self._of_attributes(term)
            if to is not None and values.dim() == 2 and is_few(edges, self.heads):
                few = self._few_scores(values, to, term, edges)
        heads = rows = self._heads(values)
        if self._reads_edges(edges, mask):
            values, graph = gather(values, edges), edges_to_outputs(edges)
            heads = self._heads(values)
        if few is not None:
            scores: Any = EdgeScore(graph, few.mT)
        else:
            of_target: Any = Term(rows if to is values else self._heads(to), self.att_dst[0]) if to is not None else (
                values.new_zeros(()).expand(*values.shape[:-2], self.heads, edges.num_outputs))
            scores = Affine(cast(Any, Term(heads, self.att_src[0])), of_target)
            scores = scores if term is None else scores + EdgeScore(graph, term.mT)
            scores = scores.leaky_relu(self.negative_slope)
        y, alpha = self._attend(values, heads, scores, graph, edges, mask=mask, bias=self.bias,
                                weights=bool(return_attention_weights))
        y = y if residual is None else y + residual
        return _with_weights(self, y, edge_index, edges, alpha if return_attention_weights else None)

    def _as_one_node(self, x: Tensor, z: Tensor | None, graph: Graph) -> Tensor | None:
        """The result for few entries, and a slope that keeps the order of scores."""
        lin, heads, source, target = self.lin, self.heads, self.att_src, self.att_dst
        bias = self.bias if self.concat else None
        if lin is None or self.negative_slope < 0:
            return None
        edges = self._few_edges(x, z, graph, heads * self.out_channels, (lin,), source, target, bias)
        if edges is None or lin.bias is not None:
            return None
        theta = lin.weight.unflatten(0, (heads, -1)).mT
        y = attend_by_terms(edges.adjacency, edges.layouts, x, theta, source[0], target[0], bias,
                            self.negative_slope, drawn(self.dropout, self, self.heads))
        return self._joined(y, self.bias)

    def _few_scores(self, values: Tensor, to: Tensor, term: Tensor, edges: Graph) -> Tensor:
        """The scores (E, K) of few edges, of rows of their sources and targets, (M, K C) and (N, K C), and a term."""
        source = (values.view(-1, self.heads, self.out_channels) * self.att_src).sum(-1)
        target = (to.view(-1, self.heads, self.out_channels) * self.att_dst).sum(-1)
        return leaky_relu(gather(source, edges) + gather(target, edges, targets=True) + term, self.negative_slope)

    def _has_terms_first(self) -> bool:
        """Return True if attributes of loops are sums or means, so that their terms are sums or means of terms."""
        return self.lin_edge is not None and is_product(self.lin_edge) and (
            not self.add_self_loops or (isinstance(self.fill_value, str) and self.fill_value in ("mean", "add")))

    def _before_loops(self, attr: Tensor) -> Tensor:
        return self._of_attributes(attr) if self._has_terms_first() else attr

    def _of_attributes(self, attr: Tensor) -> Tensor:
        """<w_k, e U_k> of each edge, (E, K): e (U_k w_k), unless a hook or another module is to read e U_k."""
        project, vector = cast(Linear, self.lin_edge), cast(Tensor, self.att_edge)[0]
        if not is_product(project):
            return Term(self._heads(project(attr)), vector).tensor().mT
        composed = (vector.unsqueeze(1) @ project.weight.view(*vector.shape, -1)).squeeze(1)
        return linear(attr if attr.is_floating_point() else attr.to(composed.dtype), composed)


class GATv2Conv(_Attention):
    """y_n = ||_k sum_m a_kmn x_m Theta_k + b, a = softmax_m v_k^T leaky_relu(x_m Theta_k + x_n W_k + e U_k).

    Arguments: those of `torch_geometric.nn.GATv2Conv`; weights as those of `GATConv`.

    Example:

        >>> from structconv.compat.pyg import GATv2Conv
        >>> edges = torch.tensor([[0, 1], [1, 2]])               # 0 -> 1 -> 2
        >>> layer = GATv2Conv(8, 4, heads=2, concat=False, edge_dim=3)
        >>> layer(torch.randn(3, 8), edges, torch.randn(2, 3)).shape
        torch.Size([3, 4])
        >>> list(layer.state_dict())
        ['att', 'bias', 'lin_l.weight', 'lin_l.bias', 'lin_r.weight', 'lin_r.bias', 'lin_edge.weight']
    """

    aggregation, _edges_may_be_bare = "sum", True

    def __init__(self, in_channels: Channels, out_channels: int, heads: int = 1, concat: bool = True,
                 negative_slope: float = 0.2, dropout: float = 0.0, add_self_loops: bool = True,
                 edge_dim: int | None = None, fill_value: Fill = "mean", bias: bool = True,
                 share_weights: bool = False, residual: bool = False, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._options(in_channels, out_channels, heads, concat, dropout, edge_dim)
        self.negative_slope, self.add_self_loops, self.fill_value = negative_slope, add_self_loops, fill_value
        self.residual, self.share_weights = residual, share_weights
        linear = partial(Linear, weight_initializer="glorot")
        sources, targets = channels(in_channels)
        self.lin_l = linear(sources, heads * out_channels, bias=bias)
        self.lin_r = self.lin_l if share_weights else linear(targets, heads * out_channels, bias=bias)
        self.att = nn.Parameter(torch.empty(1, heads, out_channels))
        self.lin_edge = None if edge_dim is None else linear(edge_dim, heads * out_channels, bias=False)
        total = out_channels * (heads if concat else 1)
        self.res = linear(targets, total, bias=False) if residual else None
        self.bias = nn.Parameter(torch.empty(total)) if bias else None
        self.reset_parameters()

    def forward(self, x: Nodes, edge_index: Any, edge_attr: Tensor | None = None,
                return_attention_weights: bool | None = None) -> Any:
        """x (..., M, P), or (x_m, x_n) -> (..., N, K Q); with weights (y, (edge_index, alpha))."""
        x, z = pair(x)
        if z is None:
            raise ConfigError("GATv2Conv", "x must be a tensor, or those of sources and targets", "no targets")
        residual = None if self.res is None else self.res(z)
        edges = self._edges(edge_index, x, z, edge_attr)
        if not return_attention_weights and (few := self._as_one_node(x, z, edges)) is not None:
            return few if residual is None else few + residual
        if z is x and not self.share_weights:
            values, of_target = project_together(x, self.lin_l, self.lin_r)
        else:
            values = self.lin_l(x)
            of_target = values if z is x else self.lin_r(z)
        heads = self._heads(values)
        target = heads if of_target is values else self._heads(of_target)
        source, graph, mask = heads, edges, self._mask(edges)
        if edges.edge_attr is not None or self._reads_edges(edges, mask):
            values, graph = gather(values, edges), edges_to_outputs(edges)
            source = heads = self._heads(values)
            if edges.edge_attr is not None and self.lin_edge is not None:
                source = self._heads(values + self.lin_edge(edges.edge_attr))
        scores = Additive(source, target, self.att[0], partial(leaky_relu, negative_slope=self.negative_slope))
        y, alpha = self._attend(values, heads, scores, graph, edges, mask=mask, bias=self.bias,
                                weights=bool(return_attention_weights))
        y = y if residual is None else y + residual
        return _with_weights(self, y, edge_index, edges, alpha if return_attention_weights else None)

    def _as_one_node(self, x: Tensor, z: Tensor, graph: Graph) -> Tensor | None:
        """The result for few entries, each of which has an edge, so that the bias of values is one of the result."""
        lins = self.lin_l, self.lin_r
        bias: Tensor | None = self.bias if self.concat else None
        dropped = self.training and self.dropout and self.lin_l.bias is not None  # then weights do not sum to one
        if dropped or not self.add_self_loops:
            return None
        edges = self._few_edges(x, z, graph, 2 * self.heads * self.out_channels, lins, self.att, bias)
        if edges is None:
            return None
        values, to = lins
        offset = to.bias if values.bias is None else plus(values.bias, to.bias)
        bias = bias if values.bias is None else plus(values.bias, bias)
        if offset is None:
            offset = x.new_zeros(to.out_channels)
        theta = values.weight.unflatten(0, (self.heads, -1)).mT
        y = attend_by_pairs(edges.adjacency, edges.layouts, x, theta, to.weight, offset, self.att[0], bias,
                            self.negative_slope, drawn(self.dropout, self, self.heads))
        return self._joined(y, self.bias)


class TransformerConv(_Attention):
    """y_n = ||_k sum_m a_kmn (x_m V_k + e U_k) + x_n W, a = softmax_m <x_n Q_k, x_m K_k + e U_k> / sqrt(D).

    Arguments: those of `torch_geometric.nn.TransformerConv`. The weights that are returned are those before dropout.

    Example:

        >>> from structconv.compat.pyg import TransformerConv
        >>> edges = torch.tensor([[0, 1], [1, 2]])               # 0 -> 1 -> 2
        >>> layer = TransformerConv(8, 4, heads=2, edge_dim=3)
        >>> layer(torch.randn(3, 8), edges, torch.randn(2, 3)).shape
        torch.Size([3, 8])
        >>> [name for name in layer.state_dict() if name.endswith("weight")]
        ['lin_key.weight', 'lin_query.weight', 'lin_value.weight', 'lin_edge.weight', 'lin_skip.weight']
    """

    _alpha: None = None  # theirs holds the weights here during a call

    def __init__(self, in_channels: Channels, out_channels: int, heads: int = 1, concat: bool = True,
                 beta: bool = False, dropout: float = 0.0, edge_dim: int | None = None, bias: bool = True,
                 root_weight: bool = True, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._options(in_channels, out_channels, heads, concat, dropout, edge_dim)
        self.beta, self.root_weight = beta and root_weight, root_weight
        sources, targets = channels(in_channels)
        total = out_channels * (heads if concat else 1)
        self.lin_key = Linear(sources, heads * out_channels, bias=bias)
        self.lin_query = Linear(targets, heads * out_channels, bias=bias)
        self.lin_value = Linear(sources, heads * out_channels, bias=bias)
        self.lin_edge = None if edge_dim is None else Linear(edge_dim, heads * out_channels, bias=False)
        self.lin_skip = Linear(targets, total, bias=bias)
        self.lin_beta = Linear(3 * total, 1, bias=False) if self.beta else None
        self.reset_parameters()

    def forward(self, x: Nodes, edge_index: Any, edge_attr: Tensor | None = None,
                return_attention_weights: bool | None = None) -> Any:
        """x (..., M, P), or (x_m, x_n) -> (..., N, K Q); with weights (y, (edge_index, alpha))."""
        x, z = pair(x)
        if z is None:
            raise ConfigError("TransformerConv", "x must be a tensor, or those of sources and targets", "no targets")
        edges = self._edges(edge_index, x, z, edge_attr)
        weights = return_attention_weights is not None
        few = None if weights else self._as_one_node(x, z, edges)
        if few is not None:
            return self._with_skip(few, self.lin_skip(x) if self.root_weight else None)
        if z is not x:
            of_query, key, values = self.lin_query(z), self.lin_key(x), self.lin_value(x)
            skip = self.lin_skip(z) if self.root_weight else None
        elif self.root_weight:
            of_query, key, values, skip = project_together(x, self.lin_query, self.lin_key, self.lin_value,
                                                           self.lin_skip)
        else:
            (of_query, key, values), skip = project_together(x, self.lin_query, self.lin_key, self.lin_value), None
        query = self._heads(of_query)
        graph, mask = edges, self._mask(edges)
        if edges.edge_attr is not None or self._reads_edges(edges, mask):
            key, values, graph = gather(key, edges), gather(values, edges), edges_to_outputs(edges)
            if edges.edge_attr is not None and self.lin_edge is not None:
                along = self.lin_edge(edges.edge_attr)
                key, values = key + along, values + along
        scores = Bilinear(query, self._heads(key)).scaled(1 / math.sqrt(self.out_channels))
        y, alpha = self._attend(values, self._heads(values), scores, graph, edges, mask=mask, weights=weights)
        if weights and self.training and self.dropout:
            alpha = attend(values, self._heads(values), scores, graph, weights=True)[1]
        return _with_weights(self, self._with_skip(y, skip), edge_index, edges, alpha if weights else None)

    def _as_one_node(self, x: Tensor, z: Tensor, graph: Graph) -> Tensor | None:
        """The result for few entries, without x_n W."""
        lins, heads = (self.lin_query, self.lin_key, self.lin_value), self.heads
        edges = self._few_edges(x, z, graph, 3 * heads * self.out_channels, lins)
        if edges is None:
            return None
        (query, key, value), scale = lins, 1 / math.sqrt(self.out_channels)
        y = attend_by_dots(edges.adjacency, edges.layouts, x, query.weight, query.bias, key.weight, key.bias,
                           value.weight, value.bias, None, heads, scale, drawn(self.dropout, self, heads))
        return self._joined(y, None)

    def _with_skip(self, y: Tensor, skip: Tensor | None) -> Tensor:
        if skip is None:
            return y
        if self.lin_beta is None:
            return y + skip
        share = self.lin_beta(torch.cat([y, skip, y - skip], -1)).sigmoid()
        return share * skip + (1 - share) * y


class AGNNConv(Layer):
    """y_n = sum_m a_mn x_m, a = softmax_m beta cos(x_m, x_n). Arguments: those of `torch_geometric.nn.AGNNConv`.

    Example:

        >>> from structconv.compat.pyg import AGNNConv
        >>> edges = torch.tensor([[0, 1], [1, 2]])               # 0 -> 1 -> 2
        >>> AGNNConv(add_self_loops=False)(torch.tensor([[1.0], [2.0], [3.0]]), edges).tolist()
        [[0.0], [1.0], [2.0]]
    """

    def __init__(self, requires_grad: bool = True, add_self_loops: bool = True, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.requires_grad, self.add_self_loops = requires_grad, add_self_loops
        self._register("beta", requires_grad, 1.0)

    def forward(self, x: Tensor, edge_index: Any) -> Tensor:
        """x (..., N, P) and edges -> (..., N, P)."""
        edges = self._graph(edge_index, x, x)
        edges = graph = with_loops(edges) if self.add_self_loops else edges
        unit, values, mask = normalize(x, p=2.0, dim=-1), x, self._mask(edges) if self._is_sum() else None
        key = unit
        if mask is not None:
            key, values, graph = gather(unit, edges), gather(x, edges) * mask.unsqueeze(-1), edges_to_outputs(edges)
        scores = Bilinear((self.beta * unit).unsqueeze(-3), key.unsqueeze(-3))
        added = edges.edge_weight if self.add_self_loops else None
        if self._is_sum():
            return attend(values, values.unsqueeze(-3), scores, graph, added=added)[0]
        alpha = attend(x, x.unsqueeze(-3), scores, edges, added=added, weights=True)[1]
        rows = gather(x, edges) * cast(Tensor, alpha)
        return self._of_edges(rows, edges, None if added is None else added.isinf())
