"""The sources of M and N of a basis: a graph, other bases, the rows of two tensors, or given numbers."""

from __future__ import annotations

import torch
from torch import Tensor

from structconv.bases.base import Basis
from structconv.bases.tree import Projected
from structconv.errors import ShapeError
from structconv.shapes import broadcast
from structconv.structures.graph import Graph, listed_edges
from structconv.structures.samples import Restriction
from structconv.structures.values import altered

__all__ = ["AS_CHILD", "GraphValues", "OnGraph", "OverChild", "OverParts", "OverTwo", "QueryKey", "Sized",
           "SourceTarget", "check_same_entries", "first_dtype", "sized"]


class Sized(Basis):
    """A basis without a tensor of M or N rows: the sizes are given as numbers."""

    ENTRY_COUNTS = ("inputs", "outputs")

    inputs: int
    outputs: int

    @property
    def num_inputs(self) -> int:
        return self.inputs

    @property
    def num_outputs(self) -> int:
        return self.outputs

    def _resized(self, to: Restriction) -> Basis:
        """Return the basis with the numbers of inputs and outputs of the selected samples."""
        resized: Basis = altered(self, inputs=to.inputs, outputs=to.outputs)
        return resized


class OverChild(Basis):
    """Sizes and device are those of another basis."""

    child: Basis

    @property
    def size(self) -> int:
        return self.child.size

    @property
    def num_inputs(self) -> int:
        return self.child.num_inputs

    @property
    def num_outputs(self) -> int:
        return self.child.num_outputs

    @property
    def batch_shape(self) -> tuple[int, ...]:
        return self.child.batch_shape

    @property
    def device(self) -> torch.device:
        return self.child.device

    @property
    def has_scores(self) -> bool:
        return self.child.has_scores


#: Classes with the K, M and N of their child.
AS_CHILD: set[type[Basis]] = set()


def sized(basis: Basis) -> Basis:
    """The basis that tells K, M and N, below nodes that have those of their child."""
    while type(basis) in AS_CHILD:
        basis = basis.child  # type: ignore[attr-defined]
    return basis


def check_same_entries(owner: str, first: Basis, second: Basis) -> None:
    """Raise `ShapeError` unless two bases have the same M and N."""
    first, second = sized(first), sized(second)
    if first.num_inputs != second.num_inputs or first.num_outputs != second.num_outputs:
        raise ShapeError(owner, "both bases must have the same inputs M and outputs N",
                         " and ".join(f"M={basis.num_inputs}, N={basis.num_outputs}" for basis in (first, second)))


def first_dtype(*bases: Basis) -> torch.dtype | None:
    """The dtype of the first basis that has one; bases without tensors of numbers take the dtype of the others."""
    return next((dtype for dtype in (getattr(basis, "dtype", None) for basis in bases) if dtype is not None), None)


class OverTwo(Basis):
    """Inputs and outputs are those of two bases."""

    first: Basis
    second: Basis

    @property
    def num_inputs(self) -> int:
        return self.first.num_inputs

    @property
    def num_outputs(self) -> int:
        return self.first.num_outputs

    @property
    def batch_shape(self) -> tuple[int, ...]:
        return broadcast(self.first.batch_shape, self.second.batch_shape)


class OverParts(Basis):
    """A basis with the K matrices of each part, in order."""

    parts: tuple[Basis, ...]

    @property
    def size(self) -> int:
        return sum(part.size for part in self.parts)

    @property
    def num_inputs(self) -> int:
        return self.parts[0].num_inputs

    @property
    def num_outputs(self) -> int:
        return self.parts[0].num_outputs

    @property
    def batch_shape(self) -> tuple[int, ...]:
        return broadcast(*(part.batch_shape for part in self.parts))

    @property
    def dtype(self) -> torch.dtype | None:
        """The dtype of the first part that has one."""
        return first_dtype(*self.parts)

    @property
    def device(self) -> torch.device:
        return self.parts[0].device


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


class QueryKey(Basis):
    """Entries that come from query (..., K, N, D) and key (..., K, M, D), or from products not computed yet, of an `x`
    with as many rows."""

    query: Tensor
    key: Tensor

    @property
    def size(self) -> int:
        query, key = self.query, self.key
        first: int = query.heads if type(query) is Projected else query.shape[-3]
        second: int = key.heads if type(key) is Projected else key.shape[-3]
        return max(first, second)

    @property
    def device(self) -> torch.device:
        return self.query.device

    @property
    def num_inputs(self) -> int:
        rows: Tensor = getattr(self.key, "x", self.key)
        return rows.shape[-2]

    @property
    def num_outputs(self) -> int:
        rows: Tensor = getattr(self.query, "x", self.query)
        return rows.shape[-2]

    @property
    def batch_shape(self) -> tuple[int, ...]:
        return broadcast(self.query.shape[:-3], self.key.shape[:-3])

    def restricted(self, to: Restriction) -> Basis | None:
        cut: Basis = altered(self, query=to.of_outputs(self.query, -2, 3), key=to.of_inputs(self.key, -2, 3))
        return cut


class SourceTarget(Basis):
    """Entries that come from rows (..., M, P) of the inputs and (..., N, P') of the outputs."""

    source: Tensor
    target: Tensor

    @property
    def num_inputs(self) -> int:
        return self.source.shape[-2]

    @property
    def num_outputs(self) -> int:
        return self.target.shape[-2]

