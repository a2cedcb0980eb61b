"""Pool the rows of a group into one row: the edges into a node, or the nodes of each graph of a batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import torch
from torch import Tensor
from torch.compiler import is_compiling
from torch.nn.functional import pad

from structconv.derived import derived, is_plain
from structconv.errors import ShapeError, StructureError
from structconv.mechanisms.expression import Mechanism
from structconv.mechanisms.given import Identity
from structconv.mechanisms.graphs import Adjacency
from structconv.mechanisms.masks import STRUCTURE
from structconv.mechanisms.scores import BiAffine, DotProduct
from structconv.nn.composite import Composite
from structconv.nn.conv import Conv
from structconv.nn.layer import Device, move
from structconv.nn.recurrent import ConvLSTMCell
from structconv.primitives.functions import finite
from structconv.primitives.layout import Csr
from structconv.primitives.native.adjacency import adjacency_of, unchanged
from structconv.primitives.native.layer import gather_maxima, gather_sums, pool_groups
from structconv.primitives.native.node import is_direct
from structconv.primitives.segments import segment_max
from structconv.shapes import check_choice, check_entries, check_positive, check_tensor
from structconv.structures.batching import Structure, entries_to_samples
from structconv.structures.graph import Graph, listed_edges
from structconv.weights import Eye

__all__ = ["GraphPool", "GroupPool"]

#: Rows of a table of groups, for each edge, up to which reading it is faster than spreading the rows.
_SPREAD = 4
#: The mechanism of each kind of pooling, except "max", which is not a convolution.
_MECHANISMS: dict[str, Mechanism | None] = {
    "sum": Adjacency(None, weighted=False), "mean": Adjacency("row", weighted=False), "max": None,
    "softmax": BiAffine(bilinear=False, target=False).masked(keep=STRUCTURE).softmax(),
    "set2set": DotProduct().masked(keep=STRUCTURE).softmax()}
POOLINGS = tuple(_MECHANISMS)
#: The kinds that run as one node of autograd, sorting included.
_DIRECT = frozenset(("sum", "mean", "max"))


class GroupPool(Composite):
    """y_g = an aggregation of the rows x_m in group g; it does not depend on their order.

    - "sum", "mean", "max": of each channel.
    - "softmax": sum_m softmax_m(<u, x_m>) x_m, u learned.
    - "set2set": [q; r] after some steps of q = LSTM([q; r]), r = sum_m softmax_m(<q, x_m>) x_m (Vinyals et al. 2016,
      eq. 3 to 7): 2 C channels.

    A group without rows gets zeros, except for the q of "set2set".

    Args:
        channels: C. kind: one of these. steps: the number of steps of "set2set".
        device, dtype: device and dtype of the parameters.

    x (..., M, C), and a `Graph` from M rows to G groups, an edge for each row and its group -> (..., G, C). A row may
    be in several groups, or in none. Weights of edges are not read. O(E C) for E edges.

    Example:

        >>> from structconv import Graph
        >>> from structconv.nn import GroupPool
        >>> groups = Graph(torch.tensor([[0, 1, 2], [0, 0, 1]]), num_inputs=3, num_outputs=2)   # 2 groups
        >>> GroupPool(1, "max")(torch.tensor([[1.0], [5.0], [2.0]]), groups).flatten()
        tensor([5., 2.])
    """

    fixed = frozenset(("channels", "kind", "steps"))

    def __init__(self, channels: int, kind: str = "sum", *, steps: int = 3, device: Device = None,
                 dtype: torch.dtype | None = None) -> None:
        super().__init__()
        owner = type(self).__name__
        check_choice(owner, "kind", kind, POOLINGS)
        self.channels, self.kind = check_positive(owner, "channels", channels), kind
        self.steps = check_positive(owner, "steps", steps)
        if kind == "set2set":
            self.cell = ConvLSTMCell(Identity(), 2 * channels, channels)
        if (mechanism := _MECHANISMS[kind]) is not None:
            self.conv = Conv(mechanism, channels, channels, weight=Eye(), bias=False)
        move(self, device, dtype)

    @property
    def out_channels(self) -> int:
        """C, or 2 C of "set2set"."""
        return self.channels * (2 if self.kind == "set2set" else 1)

    def forward(self, x: Tensor, groups: Graph) -> Tensor:
        """(..., M, C) -> (..., G, C)."""
        owner = type(self).__name__
        check_tensor(owner, "x", x)
        if not isinstance(groups, Graph):
            raise StructureError(owner, "groups must be a Graph", type(groups).__name__)
        check_entries(owner, x, entries=groups.num_inputs, channels=self.channels)
        if not x.is_floating_point():
            raise ShapeError(owner, "x must be floating", x.dtype)
        if self.kind in _DIRECT and (y := of_groups(x, groups, self.kind, self._composed)) is not None:
            return y
        return self._composed(x, groups)

    def _composed(self, x: Tensor, groups: Graph) -> Tensor:
        """The pooled rows by differentiable operators."""
        if self.kind == "max":
            return _largest(x, groups)
        start = x.new_zeros(*x.shape[:-2], groups.num_outputs, self.channels)
        if self.kind != "set2set":
            return cast(Tensor, self.conv(x, groups, z=start if self.kind == "softmax" else None))
        q = c = r = start
        for _ in range(self.steps):
            q, c = self.cell(torch.cat([q, r], -1), (q, c))
            r = self.conv(x, groups, z=q)
        return torch.cat([q, r], -1)

    def extra_repr(self) -> str:
        return f"{self.channels}, {self.kind!r}" + (f", steps={self.steps}" if self.kind == "set2set" else "")


def of_groups(x: Tensor, groups: Graph, kind: str, otherwise: Callable[[Tensor, Graph], Tensor]) -> Tensor | None:
    """The rows x (M, C) pooled along the edges of a graph by a native kernel; `None` if no kernel can read them."""
    if x.dim() != 2 or not is_direct(x):
        return None
    index, loops = listed_edges(groups)
    adjacency = adjacency_of(index, groups.num_inputs, groups.num_outputs, loops=loops, square=groups.is_square,
                             normalize="row" if kind == "mean" else None)
    if adjacency is None:
        return None
    composed = unchanged(index, lambda x: otherwise(x, groups))
    return (gather_maxima if kind == "max" else gather_sums)(adjacency, composed, x)


def _in_order(groups: Graph) -> bool:
    """Return True if edge e belongs to row e, as in graphs that the library builds."""
    index = groups.edge_index
    return is_plain(index) and derived(index, ("in order", groups.num_inputs), lambda: torch.equal(
        groups.source.long(), torch.arange(groups.num_inputs, device=index.device)))


def _largest(x: Tensor, groups: Graph) -> Tensor:
    """Return the maximum of each channel, by a table of each group's rows unless the group sizes differ much."""
    members = _members(groups) if x.is_cpu and is_plain(x) and x.numel() else None
    if members is not None:
        rows = pad(x, (0, 0, 0, 1), value=-torch.inf).index_select(-2, members.flatten())
        y = rows.unflatten(-2, members.shape).amax(-2)
        if finite(y):  # else a maximum of -inf would share its gradient with the padding
            return y
    rows = x if _in_order(groups) else x.index_select(-2, groups.source)
    return segment_max(rows, groups.target, groups.num_outputs, rows=True)


def _members(groups: Graph) -> Tensor | None:
    """Return the rows of each group, (G, W), padded by M, with W the largest group; `None` if a group is empty or the
    table exceeds `_SPREAD` times the edges."""
    if not groups.num_outputs or is_compiling():
        return None
    return derived(groups, "members", lambda: _table(groups.by_target(), groups.num_inputs))


def _table(by_group: Csr, rows: int) -> Tensor | None:
    ends = by_group.indptr.long()
    counts = ends.diff()
    width = int(counts.max())
    edges = by_group.indices.shape[0]
    if int(counts.min()) == 0 or width * len(counts) > _SPREAD * edges:
        return None
    positions = ends[:-1, None] + torch.arange(width)
    members = by_group.indices.long()[positions.clamp(max=edges - 1)]
    return members.masked_fill(positions >= ends[1:, None], rows)


class GraphPool(GroupPool):
    """A row for each graph of a batch, from those of its nodes; of one that is no batch, one row. See `GroupPool`.

    x (..., M, C), and the batch -> (..., B, C).

    Example:

        >>> from structconv import Grid, batch
        >>> from structconv.nn import GraphPool
        >>> graphs = batch([Grid((2, 2)).graph(), Grid((3, 3)).graph()])
        >>> GraphPool(8, "mean")(torch.randn(13, 8), graphs).shape
        torch.Size([2, 8])
    """

    def forward(self, x: Tensor, graph: Structure) -> Tensor:
        """(..., M, C) -> (..., B, C)."""
        check_tensor("GraphPool", "x", x)
        if self.kind in _DIRECT and (y := self._of_samples(x, graph)) is not None:
            return y
        return super().forward(x, entries_to_samples(graph, x.device))

    def _of_samples(self, x: Tensor, graph: Structure) -> Tensor | None:
        """The pooled rows of a batch, which is sorted by sample, without a list of edges; `None` if no kernel can read
        them, or something does not fit."""
        samples = getattr(graph, "samples", None)
        if samples is None or x.dim() != 2 or x.shape != (samples.num_inputs, self.channels) or not is_direct(x):
            return None
        return pool_groups(x, samples.input_starts, self.kind,
                           lambda x: self._composed(x, entries_to_samples(graph, x.device)))
