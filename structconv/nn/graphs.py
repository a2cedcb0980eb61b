"""Graph layers, called as `layer(x, graph)`: short constructors over `Conv`, with PyTorch Geometric's arguments."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.fx import Proxy

from structconv.bases.base import Basis
from structconv.errors import ConfigError, StructureError
from structconv.mechanisms.edge_network import EdgeNetwork
from structconv.mechanisms.expression import Mechanism
from structconv.mechanisms.given import Identity
from structconv.mechanisms.graphs import Adjacency, Chebyshev, Powers, Relations
from structconv.mechanisms.masks import STRUCTURE
from structconv.mechanisms.positions import EdgeBias
from structconv.mechanisms.scores import Additive, BiAffine, leaky_relu
from structconv.nn.conv import Conv
from structconv.nn.layer import Device, recorded
from structconv.planning import Plan
from structconv.shapes import check_choice, check_positive
from structconv.structures.batching import AnyStructure
from structconv.structures.graph import Graph, looped
from structconv.structures.relations import KnowledgeGraph
from structconv.weights import Full, Grouped, HeadBlocks, Separable, Weight

__all__ = ["ChebConv", "DiffusionConv", "EdgeConditionedConv", "GATConv", "GATv2Conv", "GCNConv", "RelationalConv"]


class _GraphLayer(Conv):
    """A `Conv` that takes a graph as its second argument, or another `kind` of structure."""

    kind: type = Graph

    def forward(self, x: Tensor, graph: AnyStructure = None, *, structure: AnyStructure = None) -> Tensor:  # type: ignore[override]
        """x (..., M, P) and a graph, which may be called the structure as in `Conv` -> (..., N, Q)."""
        if type(x) is Proxy:
            return cast(Tensor, recorded(self, x, graph, structure=structure))
        if structure is not None or type(graph) is not self.kind:
            graph = _checked(self, graph, structure)
        y: Tensor = super().forward(x, graph)
        return y

    def plan(self, x: Tensor, graph: AnyStructure = None, *, structure: AnyStructure = None) -> Plan:  # type: ignore[override]
        """The plan that computes such a call; `print` it."""
        return super().plan(x, _checked(self, graph, structure))

    def basis(self, x: Tensor, graph: AnyStructure = None, *, structure: AnyStructure = None) -> Basis:  # type: ignore[override]
        """The basis that such a call would apply."""
        return super().basis(x, _checked(self, graph, structure))


def _checked(layer: Any, graph: Any, structure: Any) -> Any:
    """The graph, which may also be the argument `structure`."""
    if structure is not None:
        if graph is not None:
            raise ConfigError(type(layer).__name__, "the graph must be given once", "two", "structure= is the graph.")
        graph = structure
    if not isinstance(graph, layer.kind):
        raise StructureError(type(layer).__name__, f"the second argument must be a {layer.kind.__name__}",
                             type(graph).__name__, "Make one, for example Graph(edge_index, num_nodes=...).")
    return graph


class GCNConv(_GraphLayer):
    """y = D^-1/2 (A + I)^T D^-1/2 x Theta + b (Kipf and Welling 2017, eq. 2 and 8).

    Args:
        in_channels, out_channels: P and Q.
        add_self_loops: add I to A, also at nodes that have a loop; by default if the adjacency is normalized.
        normalize: scale by the degrees, self-loops included; else A itself.
        bias: add b.

    x (..., M, P) -> (..., M, Q); `graph.edge_weight` is A's. O(E min(P, Q) + M P Q).

    Equals `Conv(Adjacency(self_loops=True), P, Q)`.

    Example:

        >>> from structconv import GCNConv, Graph
        >>> graph = Graph(torch.tensor([[0, 1, 2], [1, 2, 0]]), num_nodes=3)
        >>> GCNConv(8, 4)(torch.randn(3, 8), graph).shape
        torch.Size([3, 4])
    """

    def __init__(self, in_channels: int, out_channels: int, *, add_self_loops: bool | None = None,
                 normalize: bool = True, bias: bool = True,
                 device: Device = None, dtype: torch.dtype | None = None) -> None:
        loops = normalize if add_self_loops is None else add_self_loops
        adjacency = Adjacency(normalize="sym" if normalize else None, self_loops=loops)
        super().__init__(adjacency, in_channels, out_channels, bias=bias, device=device, dtype=dtype)


class ChebConv(_GraphLayer):
    """y = sum_k T_k(2 L / lambda_max - I)^T x Theta_k + b, k = 0 .. K - 1 (Defferrard et al. 2016, eq. 4).

    Args:
        in_channels, out_channels: P and Q.
        K: the number of polynomials, one more than their highest degree (`Chebyshev(order=K - 1)`).
        normalize: "sym", "row" or None, which Laplacian; see `Chebyshev`.
        lambda_max: an upper bound of L's eigenvalues, 2 where absent; to be given, or "computed", without
            normalization.
        bias: add b.

    No power of L is formed: O(E K min(P, Q) + M K P Q).

    PyTorch Geometric's `ChebConv` gives other numbers on a directed graph: it counts the degree of an entry over the
    edges that leave it, and this layer over those that enter it, as `GCNConv` does. It also removes self-loops, which
    are edges here. `structconv.compat.pyg.ChebConv` gives its numbers.

    Equals `Conv(Chebyshev(K - 1), P, Q)`.

    Example:

        >>> from structconv import ChebConv, Grid
        >>> ChebConv(8, 4, K=3)(torch.randn(9, 8), Grid((3, 3)).graph()).shape
        torch.Size([9, 4])
    """

    def __init__(self, in_channels: int, out_channels: int, K: int, *, normalize: str | None = "sym",
                 lambda_max: float | str | None = None, bias: bool = True,
                 device: Device = None, dtype: torch.dtype | None = None) -> None:
        chebyshev = Chebyshev(check_positive("ChebConv", "K", K) - 1, normalize, lambda_max)
        super().__init__(chebyshev, in_channels, out_channels, bias=bias, device=device, dtype=dtype)


class DiffusionConv(_GraphLayer):
    """y = sum_k (D_O^-1 W)^k^T x Theta_k1 + (D_I^-1 W^T)^k^T x Theta_k2 + b, k = 0 .. K - 1 (Li et al. 2018, eq. 2).

    Args:
        in_channels, out_channels: P and Q.
        K: the number of steps of each walk, including the one of length 0.
        bias: add b.

    The products follow DCRNN's published code; see `Powers`. O(2 E K min(P, Q) + 2 M K P Q).

    Equals `Conv(Powers(K - 1, walk="forward") | Powers(K - 1, walk="backward"), P, Q)`.

    Example:

        >>> from structconv import Grid
        >>> from structconv.nn import DiffusionConv
        >>> DiffusionConv(8, 4, K=3)(torch.randn(9, 8), Grid((3, 3)).graph()).shape
        torch.Size([9, 4])
    """

    def __init__(self, in_channels: int, out_channels: int, K: int, *, bias: bool = True,
                 device: Device = None, dtype: torch.dtype | None = None) -> None:
        order = check_positive("DiffusionConv", "K", K) - 1
        walks = Powers(order, walk="forward") | Powers(order, walk="backward")
        super().__init__(walks, in_channels, out_channels, bias=bias, device=device, dtype=dtype)


class RelationalConv(_GraphLayer):
    """y_n = sum_r mean_(m: m -r-> n) x_m Theta_r + x_n Theta_0 + b (R-GCN; Schlichtkrull et al. 2018, eq. 2).

    Args:
        in_channels, out_channels: P and Q.
        num_relations: of the knowledge graphs that will come.
        num_bases: Theta_r = sum_b a_rb V_b with this many V (eq. 3); a matrix a relation where absent.
        num_blocks: block-diagonal Theta_r with this many blocks (eq. 4) instead.
        aggr: "mean" over the neighbors under a relation, or "add".
        root_weight: whether the term x_n Theta_0 is there.
        bias: add b.

    Called with x (..., M, P) and a `KnowledgeGraph`.

    Equals `Conv(Relations(num_relations) | Identity(), P, Q, weight=[Full(), Full()])`.

    Example:

        >>> from structconv import KnowledgeGraph, RelationalConv
        >>> facts = KnowledgeGraph(torch.tensor([[0, 0, 1], [1, 1, 2]]), 3, ("likes", "knows"))
        >>> RelationalConv(8, 4, num_relations=2)(torch.randn(3, 8), facts).shape
        torch.Size([3, 4])
    """

    kind = KnowledgeGraph

    def __init__(self, in_channels: int, out_channels: int, num_relations: int, *, num_bases: int | None = None,
                 num_blocks: int | None = None, aggr: str = "mean", root_weight: bool = True,
                 bias: bool = True,
                 device: Device = None, dtype: torch.dtype | None = None) -> None:
        if num_bases is not None and num_blocks is not None:
            raise ConfigError("RelationalConv", "at most one of num_bases and num_blocks must be given", "both")
        if aggr not in ("mean", "add"):
            raise ConfigError("RelationalConv", "aggr must be 'mean' or 'add'", repr(aggr))
        relations: Mechanism = Relations(num_relations, normalize="row" if aggr == "mean" else None)
        weight: Weight = Full()
        if num_bases is not None:
            weight = Separable(num_bases)
        elif num_blocks is not None:
            weight = Grouped(num_blocks)
        mechanism, weights = _rooted(relations, weight, root_weight)
        super().__init__(mechanism, in_channels, out_channels, weight=weights, bias=bias, device=device,
                         dtype=dtype)


def _rooted(mechanism: Mechanism, weight: Weight, root_weight: bool) -> tuple[Mechanism, list[Weight]]:
    """Add each node itself with its own matrix, if `root_weight` is True."""
    if not root_weight:
        return mechanism, [weight]
    return mechanism | Identity(), [weight, Full()]


class EdgeConditionedConv(_GraphLayer):
    """y_n = sum_(e: m -> n) x_m (Theta_0 + sum_k h_k(e) Theta_k) + x_n Theta_root + b, h(e) the last hidden units of a
    network of the edge's attributes.

    PyTorch Geometric's NNConv, with one more linear layer in its network, whose weight is Theta (Simonovsky and
    Komodakis 2017, eq. 1; Gilmer et al. 2017, section 5). See `EdgeNetwork`.

    Args:
        in_channels, out_channels: P and Q.
        edge_channels: A of `graph.edge_attr` (E, A).
        hidden: widths of the network's hidden layers, K - 1 being the last.
        aggr: "add", or "mean" over the edges into each output.
        root_weight: whether the term x_n Theta_root is there.
        activation: a function that makes the module after each hidden layer.
        bias: add b.

    x (..., M, P) -> (..., N, Q). O(N K P Q) flops and never a filter an edge, (E, P, Q); where edges are of U kinds,
    O(U K P Q + E P Q).

    Equals `Conv(EdgeNetwork(edge_channels, hidden) | Identity(), P, Q, weight=[Full(), Full()])`.

    Example:

        >>> from structconv import Graph
        >>> from structconv.nn import EdgeConditionedConv
        >>> graph = Graph(torch.tensor([[0, 1], [1, 2]]), num_nodes=3, edge_attr=torch.randn(2, 5))
        >>> EdgeConditionedConv(8, 4, edge_channels=5, hidden=16)(torch.randn(3, 8), graph).shape
        torch.Size([3, 4])
    """

    def __init__(self, in_channels: int, out_channels: int, edge_channels: int, hidden: int | Sequence[int] = 128, *,
                 aggr: str = "add", root_weight: bool = True, activation: Callable[[], nn.Module] = nn.ReLU,
                 bias: bool = True, device: Device = None, dtype: torch.dtype | None = None) -> None:
        if aggr not in ("mean", "add"):
            raise ConfigError("EdgeConditionedConv", "aggr must be 'mean' or 'add'", repr(aggr))
        network: Mechanism = EdgeNetwork(edge_channels, hidden, activation=activation,
                                         normalize="row" if aggr == "mean" else None)
        mechanism, weights = _rooted(network, Full(), root_weight)
        super().__init__(mechanism, in_channels, out_channels, weight=weights, bias=bias, device=device,
                         dtype=dtype)


class _AttentionLayer(Conv):
    """softmax of scores along the edges, applied to x Theta_k; the heads side by side, or their mean."""

    kind: type = Graph
    fixed = Conv.fixed | {"heads", "concat", "dropout"}
    #: The attributes of the loops that it adds.
    fill_value: float | str = 0.0

    def __init__(self, scores: Mechanism, in_channels: int, out_channels: int, heads: int, concat: bool,
                 dropout: float, add_self_loops: bool, bias: bool, device: Device, dtype: torch.dtype | None) -> None:
        attention = scores.masked(keep=STRUCTURE).softmax()
        attention = attention.dropout(dropout) if dropout else attention
        scale = 1.0 if concat else 1.0 / heads
        super().__init__(attention if concat else attention * scale, in_channels,
                         heads * out_channels if concat else out_channels, weight=HeadBlocks() if concat else None,
                         bias=bias, device=device, dtype=dtype)
        self.heads, self.concat, self.dropout, self.add_self_loops = heads, concat, dropout, add_self_loops

    def forward(self, x: Tensor, graph: Graph | None = None, *, z: Tensor | None = None,  # type: ignore[override]
                structure: Graph | None = None, return_weights: bool = False,
                return_attention_weights: bool = False) -> Any:
        """y; (y, weights (..., K, E')); or, as other libraries return them, (y, (edge_index, alpha (..., E', K))). The
        weights are in the order of the edges, appended loops last, and those that are applied: when training with
        dropout, after it. They cost one pass over the edges."""
        if type(x) is Proxy:
            return recorded(self, x, graph, z=z, structure=structure, return_weights=return_weights,
                            return_attention_weights=return_attention_weights)
        if structure is not None or type(graph) is not self.kind:
            graph = _checked(self, graph, structure)
        edges = cast(Graph, graph)
        if self.add_self_loops:
            edges = looped(edges, self.fill_value)
        if not (return_weights or return_attention_weights):
            return super().forward(x, edges, z=z)
        y, weights = super().forward(x, edges, z=z, return_weights=True)
        weights = weights if self.concat else weights * self.heads
        return (y, (edges.edge_index, weights.mT)) if return_attention_weights else (y, weights)

    def plan(self, x: Tensor, graph: Graph | None = None, *, z: Tensor | None = None,  # type: ignore[override]
             structure: Graph | None = None) -> Plan:
        """The plan that computes such a call; `print` it."""
        return super().plan(x, self._looped(graph, structure), z=z)

    def basis(self, x: Tensor, graph: Graph | None = None, *, z: Tensor | None = None,  # type: ignore[override]
              structure: Graph | None = None) -> Basis:
        """The basis that such a call would apply."""
        return super().basis(x, self._looped(graph, structure), z=z)

    def _looped(self, graph: Graph | None, structure: Graph | None) -> Graph:
        edges: Graph = _checked(self, graph, structure)
        return looped(edges, self.fill_value) if self.add_self_loops else edges


class GATConv(_AttentionLayer):
    """y_n = ||_k sum_m a_kmn x_m Theta_k + b with a = softmax_m leaky_relu(u_k^T x_m Theta_k + v_k^T x_n Theta_k).

    (Velickovic et al. 2018, eq. 3 to 6; Andreoli 2019, section 3.2: the mechanism reads x Theta_k.)

    Args:
        in_channels: P. out_channels: Q of one head.
        heads: K.
        concat: if True, concatenate the heads to K Q outputs, else take their mean, Q outputs.
        negative_slope: slope of the leaky ReLU.
        dropout: probability of dropout on the attention weights in training.
        add_self_loops: if True, every node also reads itself, by a loop appended after the graph's edges.
        edge_dim: A; then `graph.edge_attr` (E, A) adds a learned linear term to the scores.
        fill_value: attributes of the added loops: a number, or "mean", "add", "min", "max" or "mul" of the attributes
            of the edges into the node.
        bias: add b.

    x (..., M, P), z (..., N, P) or none -> (..., N, K Q), and the weights where `forward` is asked for them.
    O(E K + M P K Q) memory and never an (E, K, Q) tensor.

    Equals `Conv(BiAffine(heads, bilinear=False, on="projected").leaky_relu(negative_slope).masked(keep=STRUCTURE)
    .softmax(), P, heads * Q, weight=HeadBlocks())` on the graph with self-loops.

    Example:

        >>> from structconv import GATConv, Grid
        >>> layer, graph = GATConv(8, 4, heads=2), Grid((3, 3)).graph()
        >>> y, weights = layer(torch.randn(9, 8), graph, return_weights=True)
        >>> y.shape
        torch.Size([9, 8])
    """

    def __init__(self, in_channels: int, out_channels: int, heads: int = 1, *, concat: bool = True,
                 negative_slope: float = 0.2, dropout: float = 0.0, add_self_loops: bool = True,
                 edge_dim: int | None = None, fill_value: float | str = "mean", bias: bool = True,
                 device: Device = None, dtype: torch.dtype | None = None) -> None:
        scores: Mechanism = BiAffine(heads=heads, bilinear=False, on="projected")
        if edge_dim is not None:
            scores = scores + EdgeBias(edge_dim)
        super().__init__(scores.leaky_relu(negative_slope), in_channels, out_channels, heads, concat, dropout,
                         add_self_loops, bias, device, dtype)
        if edge_dim is not None:
            self.fill_value = _checked_fill(fill_value)


def _checked_fill(fill_value: Any) -> float | str:
    """Raise `ConfigError` if loops cannot have such attributes."""
    if isinstance(fill_value, str):
        check_choice("GATConv", "fill_value", fill_value, ("mean", "add", "min", "max", "mul"))
    elif not isinstance(fill_value, int | float):
        raise ConfigError("GATConv", "fill_value must be a number or the name of a reduction",
                          type(fill_value).__name__)
    return cast("float | str", fill_value)


class GATv2Conv(_AttentionLayer):
    """y_n = ||_k sum_m a_kmn x_m Theta_k + b, a = softmax_m v_k^T leaky_relu(x_m Theta_k + x_n W_k + c_k).

    (Brody et al. 2022, eq. 7, with a matrix for each end of an edge, as in section 4.) Sources are projected and
    gathered once, for scores and values.

    Args: as for `GATConv`, without `edge_dim`.

    Equals `Conv(Additive(heads=heads, activation=LeakyReLU(negative_slope), on="projected").masked(keep=STRUCTURE)
    .softmax(), P, heads * Q, weight=HeadBlocks())` on the graph with self-loops.

    x (..., M, P), z (..., N, P) or none -> (..., N, K Q), and the weights where `forward` is asked for them.
    O(M P K Q) memory, and nothing of the size of the edges but the weights that are returned.

    Example:

        >>> from structconv import GATv2Conv, Grid
        >>> GATv2Conv(8, 4, heads=2)(torch.randn(9, 8), Grid((3, 3)).graph()).shape
        torch.Size([9, 8])
    """

    def __init__(self, in_channels: int, out_channels: int, heads: int = 1, *, concat: bool = True,
                 negative_slope: float = 0.2, dropout: float = 0.0, add_self_loops: bool = True,
                 bias: bool = True,
                 device: Device = None, dtype: torch.dtype | None = None) -> None:
        scores = Additive(heads=heads, activation=leaky_relu(negative_slope), on="projected")
        super().__init__(scores, in_channels, out_channels, heads, concat, dropout, add_self_loops, bias,
                         device, dtype)
