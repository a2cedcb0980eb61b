"""K matrices over the edges of one graph."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import reduce
from typing import NamedTuple

import torch
from torch import Tensor

from structconv.bases.base import OPERATORS, Basis, value
from structconv.bases.dense import check_heads
from structconv.bases.pairs import Edges, Pairs
from structconv.bases.tree import tensor
from structconv.derived import derived
from structconv.errors import ConfigError, ShapeError, text_of
from structconv.primitives.csr import spmm
from structconv.primitives.sorting import search, stable_sort
from structconv.shapes import alike
from structconv.structures.graph import Graph, listed_edges

__all__ = ["Sparse"]


class OnGraph(Basis):
    """Entries at the edges of a graph."""

    graph: Graph

    @property
    def num_inputs(self) -> int:
        return self.graph.num_inputs

    @property
    def num_outputs(self) -> int:
        return self.graph.num_outputs


class GraphValues(OnGraph):
    """Given values at the edges, or ones where there are none."""

    ENTRY_COUNTS = ("values",)

    values: Tensor | None

    @property
    def dtype(self) -> torch.dtype | None:
        """The dtype of the values, which x must share; `None` where they are ones."""
        return None if self.values is None else self.values.dtype

    @property
    def device(self) -> torch.device:
        return listed_edges(self.graph)[0].device


@value
class Sparse(GraphValues):
    """A[k, m, n] = sum of values[k, e] over the edges e: m -> n of a graph.

    Products are CSR products: O(K E C) flops, and O(N C + E K) memory, a gradient step included. Edges that join the
    same two entries add up. The graph's own `edge_weight` is not read: it is one possible choice of `values`.

    Args:
        graph: the edges that all K matrices share; `Sparse.stack` joins matrices over different ones.
        values: (..., K, E), or (E,) for K = 1, in the order of the edges; `None` for ones, in the dtype of x.

    Raises:
        ShapeError: if the last dimension of `values` is not E, or if they are not floating; on use, if x has another
            dtype or device than they.

    Example:

        >>> from structconv import Graph
        >>> from structconv.bases import Sparse
        >>> graph = Graph(torch.tensor([[0, 1], [1, 2]]), num_nodes=3)
        >>> Sparse(graph, torch.tensor([5.0, 7.0])).dense()[0]
        tensor([[0., 5., 0.],
                [0., 0., 7.],
                [0., 0., 0.]])
    """

    graph: Graph
    values: Tensor | None = None

    def __post_init__(self) -> None:
        values = self.values
        if type(values) is not Tensor or not isinstance(self.graph, Graph):
            return
        edges = self.graph.num_edges
        if values.dim() < 1 or values.shape[-1] != edges or not values.is_floating_point():
            got = f"{text_of(values.shape)} of {values.dtype}"
            raise ShapeError("Sparse", f"values must be floating, of shape (..., K, E={edges}) or (E={edges},)", got,
                             "One value an edge, in the graph's order.")

    @staticmethod
    def stack(bases: Sequence[Basis]) -> Basis:
        """The bases' matrices side by side, K summed, whether or not they share their graph.

        Those over one graph become one `Sparse` of all their values; others are joined by the algebra's `|`.
        """
        if not bases:
            raise ConfigError("Sparse.stack", "bases must not be empty", "none")
        first = bases[0]
        if all(isinstance(basis, Sparse) and basis.values is not None and basis.graph is first.graph  # type: ignore
               and basis.batch_shape == first.batch_shape for basis in bases):
            return Sparse(first.graph, torch.cat([basis._rows() for basis in bases], dim=-2))  # type: ignore
        joined: Basis = reduce(OPERATORS["concat"], bases)
        return joined

    @property
    def size(self) -> int:
        return 1 if self.values is None or self.values.dim() == 1 else self.values.shape[-2]

    @property
    def batch_shape(self) -> tuple[int, ...]:
        return () if self.values is None else tuple(self.values.shape[:-2])

    def dense(self, dtype: torch.dtype | None = None) -> Tensor:
        values = self._rows(dtype)
        flat = values.reshape(math.prod(values.shape[:-1]), values.shape[-1])
        row = torch.arange(flat.shape[0], device=flat.device).unsqueeze(-1)
        a = flat.new_zeros(flat.shape[0], self.num_inputs, self.num_outputs)
        a = a.index_put((row, self.graph.source.long(), self.graph.target.long()), flat, accumulate=True)
        return a.reshape(*values.shape[:-1], self.num_inputs, self.num_outputs)

    def apply(self, r: Tensor) -> Tensor:
        return self._product(r, sum_heads=False)

    def analysis(self, x: Tensor) -> Tensor:
        self.check_input(x, "Sparse")
        return self._product(x.unsqueeze(-3), sum_heads=False)

    def synthesis(self, r: Tensor) -> Tensor:
        return self._product(r, sum_heads=True)

    def pattern(self) -> Graph:
        return self.graph

    def evaluate(self, pairs: Pairs) -> Tensor:
        values = self._rows(None if self.values is not None else pairs.dtype)
        if isinstance(pairs, Edges) and pairs.graph.edge_index is self.graph.edge_index:
            return values
        groups = derived(self.graph.edge_index, ("groups", self.num_outputs), self._groups)
        return groups.sums(values, pairs.source_index() * self.num_outputs + pairs.target_index())

    def _transposed(self) -> Basis:
        return Sparse(self.graph.reversed(), self.values)

    def __repr__(self) -> str:
        values = "ones" if self.values is None else f"{tuple(self.values.shape)}"
        return (f"Sparse(K={self.size}, M={self.num_inputs}, N={self.num_outputs}, E={self.graph.num_edges}, "
                f"values={values})")

    def _rows(self, dtype: torch.dtype | None = None) -> Tensor:
        """The values as (..., K, E)."""
        if self.values is None:
            return torch.ones(1, self.graph.num_edges, dtype=dtype, device=self.device)
        values = tensor(self.values)
        values = values.unsqueeze(0) if values.dim() == 1 else values
        return values if dtype is None else values.to(dtype)

    def _groups(self) -> EdgeGroups:
        return EdgeGroups.by(self.graph.source.long() * self.num_outputs + self.graph.target.long())

    def _product(self, r: Tensor, sum_heads: bool) -> Tensor:
        check_heads(self, r)
        values = None if self.values is None else alike("Sparse", r, tensor(self.values))
        return spmm(self.graph.by_target(), self.graph.by_source(), values, r, sum_heads=sum_heads)


class EdgeGroups(NamedTuple):
    """Edges grouped by keys: the sorted keys (E,), the edges in that order, and the first place of each key."""

    keys: Tensor
    order: Tensor
    first: Tensor

    @classmethod
    def by(cls, keys: Tensor) -> EdgeGroups:
        """Group edges by one key for each. O(E log E)."""
        keys, order = stable_sort(keys)
        return cls(keys, order, search(keys, keys))

    def sums(self, values: Tensor, keys: Tensor) -> Tensor:
        """The sum of the values (..., E) of the edges with each key, (..., *keys.shape); 0 for a key without edges."""
        if not self.keys.shape[0]:
            return values.new_zeros(*values.shape[:-1], *keys.shape)
        totals = torch.zeros_like(values).index_add(-1, self.first, values.index_select(-1, self.order))
        position = search(self.keys, keys).clamp(max=self.keys.shape[0] - 1)
        result = totals.index_select(-1, position.flatten()).unflatten(-1, keys.shape)
        zero = torch.zeros((), dtype=values.dtype, device=values.device)
        return torch.where(self.keys[position] == keys, result, zero)
