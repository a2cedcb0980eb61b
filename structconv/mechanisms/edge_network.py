"""`EdgeNetwork`: matrices whose entries a network computes from edge attributes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn

from structconv.bases.base import Basis
from structconv.bases.linear import Mixed
from structconv.bases.matrices import adjacency
from structconv.bases.sparse import Sparse
from structconv.bases.typed import Typed
from structconv.derived import derived, is_plain
from structconv.errors import ConfigError, ShapeError, StructureError
from structconv.mechanisms.expression import Channels, Inputs
from structconv.mechanisms.graphs import GraphMechanism, graph_of
from structconv.shapes import check_choice, check_positive, converted
from structconv.written import written

__all__ = ["EdgeNetwork"]

#: Edges looked at before all are, and how many there must be of a kind on average.
_TRIED, _SHARED = 1024, 8


class EdgeNetwork(GraphMechanism):
    """A_k[m, n] = h_k(attributes of the edge m -> n), the last hidden units of a network, and A_0[m, n] = 1.

    With a weight `Full()` the filter of an edge is Theta_0 + sum_k h_k Theta_k, the output of one more linear layer:
    edge-conditioned convolution (Simonovsky and Komodakis 2017, equation 1), the edge network of Gilmer et al. (2017,
    section 5). The filters of all edges, (E, P, Q), are never formed. If many edges have equal attributes, such as
    bonds of a few kinds, the network runs once for each kind.

    Args:
        attributes: A, channels of `graph.edge_attr` (..., E, A).
        hidden: widths of the hidden layers, for example (128,); the last one is K - 1.
        activation: a function that returns the module after each hidden layer.
        normalize: "row" divides by the number of edges into each output, which gives a mean; None gives a sum.
        structure: the name of the one that it reads, in a call with several.

    Example:

        >>> from structconv import Conv, Graph
        >>> from structconv.mechanisms import EdgeNetwork
        >>> graph = Graph(torch.tensor([[0, 1], [1, 2]]), num_nodes=3, edge_attr=torch.randn(2, 5))
        >>> Conv(EdgeNetwork(5, hidden=16), 8, 4)(torch.randn(3, 8), graph).shape
        torch.Size([3, 4])
    """

    def __init__(self, attributes: int, hidden: int | Sequence[int] = 128, *,
                 activation: Callable[[], nn.Module] = nn.ReLU, normalize: str | None = None,
                 structure: str | None = None) -> None:
        super().__init__(structure=structure)
        owner = type(self).__name__
        check_choice(owner, "normalize", normalize, ("row", None))
        self.attributes = check_positive(owner, "attributes", attributes)
        self.hidden = tuple(check_positive(owner, "hidden", width)
                            for width in ((hidden,) if isinstance(hidden, int) else hidden))
        if not self.hidden:
            raise ConfigError(owner, "hidden must have one width or more", hidden)
        self.activation, self.normalize_by = activation, normalize

    @property
    def size(self) -> int:
        return self.hidden[-1] + 1

    def bind(self, channels: Channels) -> None:
        self.network = nn.Sequential(*(module for before, after in pairwise((self.attributes, *self.hidden))
                                       for module in (nn.Linear(before, after), self.activation())))

    def forward(self, inputs: Inputs) -> Basis:
        graph, owner = graph_of(self, inputs.structure), type(self).__name__
        if graph.edge_attr is None:
            raise StructureError(owner, "the graph must have edge_attr", "none",
                                 f"Make it as Graph(edge_index, ..., edge_attr=...), (E, {self.attributes}).")
        attributes = _by_channels(graph.edge_attr)
        if attributes.shape[-1] != self.attributes:
            raise ShapeError(owner, f"edge_attr must have A={self.attributes} channels", tuple(graph.edge_attr.shape))
        shares = None if self.normalize_by is None else adjacency(graph, "row", inputs.dtype, weighted=False).values
        kinds = _kinds(graph.edge_attr)
        if kinds is not None:
            kind, entries = kinds[0], self._entries(converted(owner, "edge_attr", kinds[1], inputs.dtype))
            return Mixed(Typed(graph, kind, entries.shape[0], shares), entries)
        values = self._entries(converted(owner, "edge_attr", attributes, inputs.dtype)).mT
        return Sparse(graph, values if shares is None else values * shares)

    def _entries(self, attributes: Tensor) -> Tensor:
        """(..., E, K)."""
        result: Tensor = self.network(attributes)
        return torch.cat([result.new_ones(*result.shape[:-1], 1), result], -1)

    def extra_repr(self) -> str:
        return written(self, {"hidden": self.hidden[0] if len(self.hidden) == 1 else self.hidden})


def _by_channels(attributes: Tensor) -> Tensor:
    """(..., E, A), also of attributes (E,)."""
    return attributes.unsqueeze(-1) if attributes.dim() == 1 else attributes


def _kinds(attributes: Tensor) -> tuple[Tensor, Tensor] | None:
    """Return the kind of each edge and the attributes of each kind, possibly with duplicates; `None` if most edges
    differ."""
    known = attributes.dim() <= 2 and is_plain(attributes) and not attributes.requires_grad
    return derived(attributes, "kinds", lambda: _distinct(_by_channels(attributes))) if known else None


def _distinct(attributes: Tensor) -> tuple[Tensor, Tensor] | None:
    if attributes.is_complex():
        return None
    keys = attributes.double() @ torch.linspace(1, 2, attributes.shape[1], dtype=torch.float64,
                                                device=attributes.device).exp()
    if _SHARED * torch.unique(keys[:_TRIED]).shape[0] > min(_TRIED, keys.shape[0]):
        return None
    result, kind = torch.unique(keys, return_inverse=True)
    count = 1 << max(result.shape[0] - 1, 0).bit_length()  # few numbers of kinds, few plans
    if _SHARED * count > keys.shape[0]:
        return None
    edges = torch.arange(kind.shape[0], device=kind.device)
    rows = attributes.index_select(0, edges.new_zeros(count).scatter(0, kind, edges))
    return (kind, rows) if torch.equal(rows.index_select(0, kind), attributes) else None
