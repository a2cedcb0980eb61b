"""`Pairs`: the pairs (m, n) at which an expression is evaluated, as a rectangle or as a list of edges.

A score states once how it depends on its two entries. `Pairs` decides if that is broadcasting over a block of the (M,
N) rectangle or gathering along E edges. Evaluated tensors have shape (..., K, *pairs.shape).
"""

from __future__ import annotations

import abc
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from structconv.errors import ConfigError, ShapeError
from structconv.primitives.blocks import recompute_blocks
from structconv.primitives.csr import sddmm
from structconv.primitives.functions import sum_dtype
from structconv.primitives.segments import masked_softmax, segment_softmax, segment_sum
from structconv.structures.graph import Graph
from structconv.structures.supports import Support

__all__ = ["Block", "Edges", "Pairs"]

#: Elements that a temporary of one block of edges may have: 64 MB in float32.
EDGE_BLOCK_ELEMENTS = 1 << 24
NORMALIZATIONS = ("softmax", "sum", "count", "sigmoid", "none")


class Pairs(abc.ABC):
    """Pairs of entries; `num_inputs` is M, `num_outputs` N, `shape` the trailing shape of what is evaluated at them.

    Example:

        >>> from structconv.bases import Score, value
        >>> @value
        ... class Offset(Score):
        ...     like: torch.Tensor                                   # (M,)
        ...     size = 1
        ...     num_inputs = num_outputs = property(lambda self: self.like.shape[0])
        ...     def evaluate(self, pairs):                           # pairs is a block or a list of edges
        ...         return (pairs.source_index() - pairs.target_index())[None].to(pairs.dtype)
        >>> Offset(torch.empty(3)).dense()[0]
        tensor([[ 0., -1., -2.],
                [ 1.,  0., -1.],
                [ 2.,  1.,  0.]])
    """

    num_inputs: int
    num_outputs: int
    dtype: torch.dtype
    device: torch.device

    @property
    @abc.abstractmethod
    def shape(self) -> tuple[int, ...]:
        """(m, n) of a block, (E,) of edges."""

    @abc.abstractmethod
    def source_index(self) -> Tensor:
        """The input m of each pair, int64, broadcastable to `shape`."""

    @abc.abstractmethod
    def target_index(self) -> Tensor:
        """The output n of each pair, int64, broadcastable to `shape`."""

    @abc.abstractmethod
    def source(self, t: Tensor) -> Tensor:
        """(..., M) -> values of the pairs' inputs."""

    @abc.abstractmethod
    def target(self, t: Tensor) -> Tensor:
        """(..., N) -> values of the pairs' outputs."""

    @abc.abstractmethod
    def bilinear(self, query: Tensor, key: Tensor) -> Tensor:
        """<query_n, key_m> from (..., N, D) and (..., M, D)."""

    @abc.abstractmethod
    def combine(self, fn: Callable[..., Tensor], source: Tensor, target: Tensor,
                extra: Sequence[Tensor] = ()) -> Tensor:
        """fn(source_m, target_n, *extra) from vectors (..., M, D) and (..., N, D'); fn reduces the last axis.

        A list of edges is computed in blocks, again in the backward pass: O(E) numbers are stored, never (E, D).
        Parameters that fn reads go into `extra`.
        """

    @abc.abstractmethod
    def table(self, values: Tensor, index: Tensor) -> Tensor:
        """values[..., n, index(m, n)] from (..., N or 1, L) and an index of the pairs' shape."""

    @abc.abstractmethod
    def pick(self, a: Tensor) -> Tensor:
        """The pairs' entries of a dense (..., M, N)."""

    @abc.abstractmethod
    def _head_axis(self, keep: Tensor) -> Tensor:
        """Insert the axis of K into booleans of a support."""

    @abc.abstractmethod
    def softmax(self, scores: Tensor, keep: Tensor | None, over: str) -> Tensor:
        """Softmax over all pairs that share an output ("inputs") or an input ("outputs")."""

    @abc.abstractmethod
    def total(self, values: Tensor, over: str) -> Tensor:
        """Sums over inputs or outputs, broadcastable against `values`."""

    @abc.abstractmethod
    def transposed(self) -> Pairs:
        """Return the pairs with m and n exchanged."""

    @abc.abstractmethod
    def restore(self, values: Tensor) -> Tensor:
        """Rearrange values evaluated at `transposed()` in the layout of these pairs."""

    def _lists(self, support: Support) -> bool:
        """Return True if these are known to be exactly the pairs of the support."""
        return False

    def keep(self, support: Support | None) -> Tensor | None:
        """Return booleans, True for pairs that exist, broadcastable to (..., K, *shape); `None` for all."""
        if support is None or self._lists(support):
            return None
        return self._head_axis(support.contains(self.source_index(), self.target_index()))


@dataclass(frozen=True, eq=False)
class Block(Pairs):
    """Inputs `rows` and outputs `columns` of the (M, N) rectangle, as half-open ranges.

    Example:

        >>> from structconv.bases import Block
        >>> block = Block(4, 4, (0, 4), (2, 4), torch.float32, torch.device("cpu"))
        >>> block.shape
        (4, 2)
    """

    num_inputs: int
    num_outputs: int
    rows: tuple[int, int]
    columns: tuple[int, int]
    dtype: torch.dtype
    device: torch.device

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.rows[1] - self.rows[0], self.columns[1] - self.columns[0])

    def source_index(self) -> Tensor:
        return torch.arange(*self.rows, device=self.device).unsqueeze(-1)

    def target_index(self) -> Tensor:
        return torch.arange(*self.columns, device=self.device).unsqueeze(-2)

    def source(self, t: Tensor) -> Tensor:
        return self._rows(t.unsqueeze(-1))

    def target(self, t: Tensor) -> Tensor:
        return self._columns(t.unsqueeze(-2), -1)

    def bilinear(self, query: Tensor, key: Tensor) -> Tensor:
        rows, columns = self._rows(key), self._columns(query, -2)
        if rows.shape[-3] == 1 or columns.shape[-3] > 1:
            return rows @ columns.mT
        by_entry = rows.transpose(-3, -2)  # the same outputs for all heads of an input: one product
        flat = by_entry.flatten(-3, -2) @ columns.squeeze(-3).mT
        return flat.unflatten(-2, by_entry.shape[-3:-1]).transpose(-3, -2)

    def combine(self, fn: Callable[..., Tensor], source: Tensor, target: Tensor,
                extra: Sequence[Tensor] = ()) -> Tensor:
        return fn(self._rows(source).unsqueeze(-2), self._columns(target, -2).unsqueeze(-3), *extra)

    def table(self, values: Tensor, index: Tensor) -> Tensor:
        columns = values if values.shape[-2] == 1 else self._columns(values, -2)
        columns = columns.expand(*columns.shape[:-2], self.shape[1], columns.shape[-1])
        index_nm = index.expand(*index.shape[:-2], *self.shape).mT
        lead = torch.broadcast_shapes(columns.shape[:-2], index_nm.shape[:-2])
        return columns.expand(*lead, *columns.shape[-2:]).gather(-1, index_nm.expand(*lead, *index_nm.shape[-2:])).mT

    def pick(self, a: Tensor) -> Tensor:
        return self._columns(self._rows(a), -1)

    def _head_axis(self, keep: Tensor) -> Tensor:
        return keep.unsqueeze(-3)

    def softmax(self, scores: Tensor, keep: Tensor | None, over: str) -> Tensor:
        return masked_softmax(scores, keep, _axis(over))

    def total(self, values: Tensor, over: str) -> Tensor:
        return values.sum(_axis(over), keepdim=True)

    def transposed(self) -> Pairs:
        return Block(self.num_outputs, self.num_inputs, self.columns, self.rows, self.dtype, self.device)

    def restore(self, values: Tensor) -> Tensor:
        return values.mT

    def _rows(self, t: Tensor) -> Tensor:
        return t if self.rows == (0, self.num_inputs) else t[..., self.rows[0]:self.rows[1], :]

    def _columns(self, t: Tensor, dim: int) -> Tensor:
        whole = self.columns == (0, self.num_outputs)
        return t if whole else t.narrow(dim, self.columns[0], self.columns[1] - self.columns[0])


@dataclass(frozen=True, eq=False)
class Edges(Pairs):
    """The edges of a graph, in its order.

    Example:

        >>> from structconv import Graph
        >>> from structconv.bases import Edges
        >>> graph = Graph(torch.tensor([[0, 2], [1, 0]]), num_nodes=3)
        >>> Edges(graph, torch.float32).shape
        (2,)
    """

    graph: Graph
    dtype: torch.dtype
    num_inputs: int = field(init=False)
    num_outputs: int = field(init=False)
    device: torch.device = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "num_inputs", self.graph.num_inputs)
        object.__setattr__(self, "num_outputs", self.graph.num_outputs)
        object.__setattr__(self, "device", self.graph.edge_index.device)

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.graph.num_edges,)

    def source_index(self) -> Tensor:
        return self.graph.source.long()

    def target_index(self) -> Tensor:
        return self.graph.target.long()

    def _lists(self, support: Support) -> bool:
        graph, exact = support.listing(self.num_inputs, self.num_outputs, self.device)
        return exact and graph is self.graph

    def source(self, t: Tensor) -> Tensor:
        _check_entries("source", t, "M", self.num_inputs)
        return t.index_select(-1, self.graph.source)

    def target(self, t: Tensor) -> Tensor:
        _check_entries("target", t, "N", self.num_outputs)
        return t.index_select(-1, self.graph.target)

    def bilinear(self, query: Tensor, key: Tensor) -> Tensor:
        return sddmm(self.graph.by_target(), self.graph.by_source(), query, key)

    def combine(self, fn: Callable[..., Tensor], source: Tensor, target: Tensor,
                extra: Sequence[Tensor] = ()) -> Tensor:
        def evaluate(block: slice, s: Tensor, t: Tensor, *more: Tensor) -> Tensor:
            m, n = self.graph.source[block], self.graph.target[block]
            return fn(s.index_select(-2, m), t.index_select(-2, n), *more)

        if torch.compiler.is_compiling():
            return evaluate(slice(None), source, target, *extra)
        lead = torch.broadcast_shapes(source.shape[:-2], target.shape[:-2])
        width = max(1, math.prod(lead) * max(source.shape[-1], target.shape[-1]))
        step, edges = max(1, EDGE_BLOCK_ELEMENTS // width), self.graph.num_edges
        blocks = [slice(start, min(start + step, edges)) for start in range(0, edges, step)] or [slice(0, 0)]
        return recompute_blocks(evaluate, [source, target, *extra], blocks, reduce="cat", dim=-1)

    def table(self, values: Tensor, index: Tensor) -> Tensor:
        if values.shape[-2] == 1:
            row = values.squeeze(-2)
            return row.index_select(-1, index) if index.dim() == 1 else row.gather(-1, index)
        flat = values.flatten(-2)
        return flat.index_select(-1, self.graph.target.long() * values.shape[-1] + index)

    def pick(self, a: Tensor) -> Tensor:
        return a.flatten(-2).index_select(-1, self.source_index() * a.shape[-1] + self.graph.target.long())

    def _head_axis(self, keep: Tensor) -> Tensor:
        return keep.unsqueeze(-2)

    def softmax(self, scores: Tensor, keep: Tensor | None, over: str) -> Tensor:
        return segment_softmax(scores, *self._segments(over), keep=keep)

    def total(self, values: Tensor, over: str) -> Tensor:
        index, num = self._segments(over)
        return segment_sum(values, index, num).index_select(-1, index)

    def transposed(self) -> Pairs:
        return Edges(self.graph.reversed(), self.dtype)

    def restore(self, values: Tensor) -> Tensor:
        return values

    def _segments(self, over: str) -> tuple[Tensor, int]:
        if over == "inputs":
            return self.graph.target, self.graph.num_outputs
        return self.graph.source, self.graph.num_inputs


def _check_entries(name: str, t: Tensor, letter: str, size: int) -> None:
    """Raise `ShapeError` unless t has a number for each entry; compiled programs read no sizes."""
    if not torch.compiler.is_compiling() and t.shape[-1] != size:
        raise ShapeError(f"pairs.{name}", f"the tensor must have shape (..., {letter}={size})", tuple(t.shape))


def _axis(over: str) -> int:
    if over not in ("inputs", "outputs"):
        raise ConfigError("normalize", "over must be 'inputs' or 'outputs'", repr(over))
    return -2 if over == "inputs" else -1


def normalized(values: Tensor, pairs: Pairs, support: Support | None, kind: str, over: str) -> Tensor:
    """Apply one of `NORMALIZATIONS` to values at `pairs`; absent pairs weigh zero and get no gradient.

    16-bit types are summed and divided in float32.
    """
    keep = pairs.keep(support)
    if kind == "softmax":
        return pairs.softmax(values, keep, over)
    result = values.to(sum_dtype(values.dtype))
    if kind == "sigmoid":
        result = torch.sigmoid(result)
    if keep is not None:
        result = torch.where(keep, result, torch.zeros((), dtype=result.dtype, device=result.device))
    if kind == "sum":
        total = pairs.total(result, over)
        result = result / torch.where(total == 0, torch.ones_like(total), total)
    elif kind == "count" and support is None:
        result = result / max(pairs.num_inputs if over == "inputs" else pairs.num_outputs, 1)
    elif kind == "count":
        present = torch.ones_like(result) if keep is None else keep.to(result.dtype).expand_as(result)
        result = result / pairs.total(present, over).clamp(min=1)
    return result.to(values.dtype)


def full(num_inputs: int, num_outputs: int, dtype: torch.dtype, device: torch.device) -> Block:
    """The whole rectangle as one block."""
    return Block(num_inputs, num_outputs, (0, num_inputs), (0, num_outputs), dtype, device)
