"""Fold a batch over one graph for kernels of attention along edges: into copies of the graph, or into heads."""

from __future__ import annotations

import math
from typing import NamedTuple

from torch import Tensor
from torch.compiler import is_compiling, is_exporting

from structconv.derived import latest
from structconv.primitives.layout import Csr, copies
from structconv.structures.graph import Graph

__all__ = ["COPIED", "Folding", "folded", "side_by_side"]

#: Edges, or entries, of all copies of a graph up to which they are made: layouts, 16 bytes an edge, stay with it.
COPIED = 1 << 23


class Folding(NamedTuple):
    """B samples over one graph, as rows of B `copies` of it, (B M, K, C), or in the heads of one, (M, B K, C). The
    `ends` are the edges of all copies by output and by input, none for all pairs; `lead` the dimensions of the
    samples."""

    lead: tuple[int, ...]
    size: int
    ends: tuple[Csr, Csr] | None = None
    copies: bool = False

    @property
    def layouts(self) -> tuple[Csr, Csr]:
        """The edges by output and by input."""
        assert self.ends is not None
        return self.ends

    @property
    def samples(self) -> int:
        """B."""
        return math.prod(self.lead)

    def rows(self, t: Tensor) -> Tensor:
        """(..., K or 1, M, C) -> (B M, K, C) or (M, B K, C)."""
        if t.dim() == 3 and t.shape[0] == self.size and not self.lead:
            return t.transpose(0, 1)
        whole = t if t.shape[:-2] == (*self.lead, self.size) else t.expand(*self.lead, self.size, *t.shape[-2:])
        if self.copies:
            return whole.transpose(-3, -2).reshape(self.samples * t.shape[-2], self.size, t.shape[-1])
        if is_exporting():  # torch 2.12 exports no reshape (B, K, M, C) -> (B K, M, C) for any M
            return whole.movedim(-2, 0).flatten(1, -2)
        return whole.reshape(self.samples * self.size, *t.shape[-2:]).transpose(0, 1)

    def heads(self, y: Tensor) -> Tensor:
        """(B N, K, C) or (N, B K, C) -> (..., K, N, C)."""
        if self.copies:
            return y.unflatten(0, (*self.lead, y.shape[0] // self.samples)).transpose(-3, -2)
        y = y.transpose(0, 1)
        return y.unflatten(0, (*self.lead, self.size)) if self.lead else y

    def by_head(self, t: Tensor) -> Tensor:
        """Vectors (K, C) -> (K, C) or (B K, C)."""
        return t if self.copies or not self.lead else t.expand(*self.lead, *t.shape).reshape(-1, t.shape[-1])

    def by_edge(self, values: Tensor) -> Tensor:
        """(..., K or 1, E) -> (K, B E) or (B K, E)."""
        each = values.expand(*self.lead, self.size, values.shape[-1])
        return each.movedim(-2, 0).flatten(1) if self.copies else each.flatten(0, -2)

    def weights(self, entries: Tensor) -> Tensor:
        """Numbers of edges (K, B E) or (B K, E) -> (..., K, E)."""
        if not self.copies:
            return entries.unflatten(0, (*self.lead, self.size))
        return entries.unflatten(1, (*self.lead, entries.shape[1] // self.samples)).movedim(0, -2)


def folded(graph: Graph, lead: tuple[int, ...], size: int, *, dropout: float = 0.0) -> Folding:
    """The folding of a batch over a graph: into copies, in the row layout of linear layers, but not with dropout, whose
    random numbers depend on entry and head, nor in traced programs, which take any number of samples."""
    count = math.prod(lead)
    several = not is_compiling() and count > 1 and not dropout and (
        count * max(graph.num_edges, graph.num_inputs, graph.num_outputs) <= COPIED)
    return Folding(lead, size, side_by_side(graph, count) if several else graph.layouts(), several)


def side_by_side(graph: Graph, count: int) -> tuple[Csr, Csr]:
    """The layouts of `count` copies of a graph, entry m of copy b being b M + m. O(count E) once; the last count is
    remembered."""
    sizes = graph.num_inputs, graph.num_outputs
    return latest(graph.edge_index, "copies", (count, *sizes), lambda: copies(graph.layouts(), sizes, count))
