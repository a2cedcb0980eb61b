"""K matrices over one list of typed edges: each edge belongs to one of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor

from structconv.bases.base import Basis, value
from structconv.bases.dense import check_heads
from structconv.bases.pairs import Pairs
from structconv.bases.sparse import EdgeGroups, GraphValues
from structconv.derived import derived, is_plain
from structconv.errors import ShapeError, StructureError, text_of
from structconv.primitives.csr import spmm
from structconv.primitives.layout import Csr, compress
from structconv.primitives.sorting import search
from structconv.shapes import alike, check_positive
from structconv.structures.graph import Graph, distinct
from structconv.structures.relations import KnowledgeGraph

__all__ = ["Typed"]

T = TypeVar("T")


@value
class Typed(GraphValues):
    """A[k, m, n] = the sum of the values of the edges m -> n of type k: the relations of a knowledge graph.

    Each primitive is one CSR product over all edges: 2 E C flops in one pass, instead of K passes. Results and
    arguments with heads are O(K N C); `synthesis` holds O(N C) beside its argument. Edges of one type between the same
    two entries add up.

    Args:
        graph: all edges. Its own `edge_weight` is not read.
        kind: (E,) int64, the type of each edge in the graph's order, in [0, K).
        count: K, types without an edge included.
        values: (E,), or `None` for ones, in the dtype of x.

    Raises:
        ShapeError: `kind` or `values` has a wrong shape or dtype; on use, x has another dtype or device.
        StructureError: a type is not in [0, K). One synchronization on a GPU for each `kind` tensor.

    Example:

        >>> from structconv import Graph
        >>> from structconv.bases import Typed
        >>> graph = Graph(torch.tensor([[0, 1], [1, 2]]), num_nodes=3)
        >>> Typed(graph, torch.tensor([0, 1]), 2).dense()[1]       # edges of type 1
        tensor([[0., 0., 0.],
                [0., 0., 1.],
                [0., 0., 0.]])
    """

    graph: Graph
    kind: Tensor
    count: int
    values: Tensor | None = None

    def __post_init__(self) -> None:
        kind, values = self.kind, self.values
        if not is_plain(kind) or not isinstance(self.graph, Graph):
            return
        check_positive("Typed", "count", self.count)
        edges = self.graph.num_edges
        if tuple(kind.shape) != (edges,) or kind.dtype != torch.int64:
            raise ShapeError("Typed", f"kind must be int64 of shape (E={edges},)",
                             f"{text_of(kind.shape)} of {kind.dtype}", "One type an edge, in the graph's order.")
        if isinstance(values, Tensor) and (tuple(values.shape) != (edges,) or not values.is_floating_point()):
            raise ShapeError("Typed", f"values must be floating, of shape (E={edges},)",
                             f"{text_of(values.shape)} of {values.dtype}", "One value an edge, in the graph's order.")
        low, high = derived(kind, "bounds", lambda: _bounds(kind))
        if low < 0 or high >= self.count:
            raise StructureError("Typed", f"kind must be in [0, K={self.count})", f"{low} to {high}")

    @property
    def size(self) -> int:
        return self.count

    def weights(self, dtype: torch.dtype | None = None) -> Tensor:
        """The values as a tensor (E,), ones where there are none."""
        if self.values is None:
            return torch.ones(self.graph.num_edges, dtype=dtype, device=self.device)
        return self.values if dtype is None else self.values.to(dtype)

    def dense(self, dtype: torch.dtype | None = None) -> Tensor:
        values = self.weights(dtype)
        a = values.new_zeros(self.count, self.num_inputs, self.num_outputs)
        index = (self.kind, self.graph.source.long(), self.graph.target.long())
        return a.index_put(index, values, accumulate=True)

    def apply(self, r: Tensor) -> Tensor:
        check_heads(self, r)
        if r.shape[-3] == 1:
            return self.analysis(r.squeeze(-3))
        return self._heads(self._product(_stacked(r), True, True))

    def analysis(self, x: Tensor) -> Tensor:
        self.check_input(x, "Typed")
        return self._heads(self._product(x, False, True))

    def synthesis(self, r: Tensor) -> Tensor:
        check_heads(self, r)
        if r.shape[-3] == 1:
            return self._product(r.squeeze(-3), False, False)
        return self._product(_stacked(r), True, False)

    def pattern(self) -> Graph | None:
        """The pairs that some edge joins, each once; `None` while compiling, where their number is not known."""
        return distinct(self.graph)

    def evaluate(self, pairs: Pairs) -> Tensor:
        values = self.weights(None if self.values is not None else pairs.dtype)
        at = pairs.source_index() * self.num_outputs + pairs.target_index()
        types = torch.arange(self.count, device=self.device).view(-1, *(1,) * at.dim())
        return self.derived("groups", self._groups).sums(values, at * self.count + types)

    def derived(self, key: object, build: Callable[[], T], *, of_values: bool = False) -> T:
        """Compute a value from the edges and their types, and with `of_values` from the values, too, once, and remember
        it until one of them changes."""
        if of_values and self.values is not None:
            return derived(self.values, (self.derived("identity", _Identity), key), build)
        edges = derived(self.graph.edge_index, "identity", _Identity)
        return derived(self.kind, (edges, self.num_inputs, self.num_outputs, self.count, key), build)

    def _transposed(self) -> Basis:
        return Typed(self.graph.reversed(), self.kind, self.count, self.values)

    def __repr__(self) -> str:
        values = "ones" if self.values is None else f"{tuple(self.values.shape)}"
        return (f"Typed(K={self.size}, M={self.num_inputs}, N={self.num_outputs}, E={self.graph.num_edges}, "
                f"values={values})")

    def _product(self, x: Tensor, stacked_inputs: bool, stacked_outputs: bool) -> Tensor:
        """The product over all edges, from rows m, or m K + k, to rows n, or n K + k."""
        values = None if self.values is None else alike("Typed", x, self.values)
        by_target, by_source = self.graph.by_target(), self.graph.by_source()
        if stacked_inputs or stacked_outputs:
            by_target, by_source = self.derived(("layouts", stacked_inputs, stacked_outputs),
                                                lambda: self._layouts(stacked_inputs, stacked_outputs))
        return spmm(by_target, by_source, values, x)

    def _layouts(self, stacked_inputs: bool, stacked_outputs: bool) -> tuple[Csr, Csr]:
        rows, columns = self.graph.target.long(), self.graph.source.long()
        num_rows, num_columns = self.num_outputs, self.num_inputs
        if stacked_outputs:
            rows, num_rows = rows * self.count + self.kind, num_rows * self.count
        if stacked_inputs:
            columns, num_columns = columns * self.count + self.kind, num_columns * self.count
        return compress(rows, columns, num_rows), compress(columns, rows, num_columns)

    def _groups(self) -> EdgeGroups:
        pair = self.graph.source.long() * self.num_outputs + self.graph.target.long()
        return EdgeGroups.by(pair * self.count + self.kind)

    def _heads(self, y: Tensor) -> Tensor:
        """(..., N K, C) -> (..., K, N, C)."""
        return y.unflatten(-2, (self.num_outputs, self.count)).movedim(-2, -3)


class _Identity:
    """Stands for a tensor, or for typed edges, in a key without keeping them alive."""


def _stacked(r: Tensor) -> Tensor:
    """(..., K, M, C) -> (..., M K, C)."""
    return r.movedim(-3, -2).flatten(-3, -2)


def _bounds(kind: Tensor) -> tuple[int, int]:
    return (0, -1) if kind.numel() == 0 else (int(kind.amin()), int(kind.amax()))


def relational(knowledge: KnowledgeGraph, normalize: str | None, dtype: torch.dtype) -> Typed:
    """One matrix a relation, A[k, m, n] = the number of triples (m, k, n), normalized within it. O(T log T).

    Args:
        normalize: "row" divides by the triples (., k, n); "sym" by the roots of those and of the triples (., k, m),
            and 0 where there are none; None leaves the counts. As `adjacency` does for one relation.
        dtype: of the values; without normalization they are ones in the dtype of x.
    """
    graph, kind = derived(knowledge, "typed edges", lambda: _typed_edges(knowledge))
    values = None
    if normalize is not None:
        values = _normalized(graph, kind, knowledge.num_relations, normalize, dtype)
    return Typed(graph, kind, knowledge.num_relations, values)


def _typed_edges(knowledge: KnowledgeGraph) -> tuple[Graph, Tensor]:
    edges = knowledge.triples[:, ::2].T.clone(memory_format=torch.contiguous_format)
    kind = knowledge.triples[:, 1].to(torch.int64, copy=True, memory_format=torch.contiguous_format)
    return Graph(edges, num_nodes=knowledge.num_entities), kind


def _normalized(graph: Graph, kind: Tensor, count: int, normalize: str, dtype: torch.dtype) -> Tensor:
    reached = torch.sort(graph.target.long() * count + kind).values
    into = _occurrences(reached, graph.target.long() * count + kind).to(torch.promote_types(dtype, torch.float32))
    if normalize == "row":
        return into.reciprocal().to(dtype)
    around = _occurrences(reached, graph.source.long() * count + kind).to(into.dtype)
    return torch.where(around == 0, 0.0, around.clamp(min=1).rsqrt() * into.rsqrt()).to(dtype)


def _occurrences(ordered: Tensor, keys: Tensor) -> Tensor:
    """How often each key occurs in a sorted list."""
    return search(ordered, keys, right=True) - search(ordered, keys)
