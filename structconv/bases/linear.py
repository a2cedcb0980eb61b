"""Nodes that act through their operands' primitives: concatenation, product, sum, multiple, mixture, transpose.

No matrix is formed: each node calls `apply`, `analysis` and `synthesis` of its operands. It folds heads into channels
if that turns many products into one.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from structconv.bases.base import Basis, value
from structconv.bases.entrywise import AS_CHILD, OverTwo, SamePattern, Unary
from structconv.bases.pairs import Edges, Pairs
from structconv.bases.pairwise import entries, reach
from structconv.errors import ShapeError
from structconv.shapes import broadcast, concatenate, total
from structconv.structures.graph import Graph
from structconv.structures.samples import EachWithin, Restriction, Samples
from structconv.structures.supports import Support

__all__ = ["Composed", "Concat", "LinearSum", "Mixed", "Mixture", "Repeated", "Scaled", "Transposed"]


def _fold(t: Tensor) -> Tensor:
    """(..., K, N, C) -> (..., N, K C): heads become channels."""
    return t.movedim(-3, -2).flatten(-2)


def _unfold(t: Tensor, size: int) -> Tensor:
    """(..., N, K C) -> (..., K, N, C): the inverse of `_fold`."""
    return t.unflatten(-1, (size, -1)).movedim(-2, -3)


def first_dtype(*bases: Basis) -> torch.dtype | None:
    """The dtype of the first basis that has one; bases without tensors of numbers take the dtype of the others."""
    return next((dtype for dtype in (getattr(basis, "dtype", None) for basis in bases) if dtype is not None), None)


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


@value
class Concat(OverParts):
    """The K matrices of each part, in order: concatenation along the heads.

    Example:

        >>> from structconv import Dense
        >>> (Dense(torch.ones(3, 4, 4)) | Dense(torch.ones(2, 4, 4))).size
        5
    """

    parts: tuple[Basis, ...]

    @property
    def has_scores(self) -> bool:
        return any(part.has_scores for part in self.parts)

    def split(self, t: Tensor) -> tuple[Tensor, ...]:
        """Cut axis -3 at the parts' borders."""
        return t.split([part.size for part in self.parts], dim=-3)

    def apply(self, r: Tensor) -> Tensor:
        return concatenate([part.apply(piece) for part, piece in zip(self.parts, self.split(r), strict=True)], -3)

    def analysis(self, x: Tensor) -> Tensor:
        return concatenate([part.analysis(x) for part in self.parts], -3)

    def synthesis(self, r: Tensor) -> Tensor:
        pieces = zip(self.parts, self.split(r), strict=True)
        return total([part.synthesis(piece) for part, piece in pieces])

    def dense(self, dtype: torch.dtype | None = None) -> Tensor:
        return concatenate([part.dense(dtype or self.dtype) for part in self.parts], -3)

    def _present(self) -> Tensor | None:
        result = [(part.size, part._present()) for part in self.parts]
        known = [present for _, present in result if present is not None]
        if not known:
            return None
        everything = known[0].new_ones(1, *known[0].shape[-2:])
        masks = [(size, everything if present is None else present) for size, present in result]
        return concatenate([mask.expand(*mask.shape[:-3], size, *mask.shape[-2:]) for size, mask in masks], -3)

    def evaluate(self, pairs: Pairs) -> Tensor:
        return concatenate([entries(part, pairs) for part in self.parts], -1 - len(pairs.shape))

    def __repr__(self) -> str:
        return f"({' | '.join(map(repr, self.parts))})"


@value
class Operands(OverTwo):
    """Two operands, each computed through its own primitives."""

    first: Basis
    second: Basis

    @property
    def device(self) -> torch.device:
        return self.first.device

    @property
    def dtype(self) -> torch.dtype | None:
        """The dtype of the first operand that has one."""
        return first_dtype(self.first, self.second)


@value
class Composed(Operands):
    """All products A'_k' A''_k'': first `first`, then `second`; k = k' K'' + k'' (Proposition 3).

    Example:

        >>> from structconv import Dense
        >>> first, second = Dense(torch.tensor([[[1.0, 2.0], [3.0, 4.0]]])), Dense(torch.ones(1, 2, 2))
        >>> (first @ second).dense()[0]
        tensor([[3., 3.],
                [7., 7.]])
    """

    _shown = "({0.first!r} @ {0.second!r})"

    def __post_init__(self) -> None:
        if self.first.num_outputs != self.second.num_inputs:
            raise ShapeError("a @ b", f"b must take the N={self.first.num_outputs} outputs of a",
                             f"M={self.second.num_inputs}",
                             "A mechanism with other outputs than inputs says which by output_structure.")

    @property
    def size(self) -> int:
        return self.first.size * self.second.size

    @property
    def num_outputs(self) -> int:
        return self.second.num_outputs

    def analysis(self, x: Tensor) -> Tensor:
        y = self.second.analysis(_fold(self.first.analysis(x)))
        return _unfold(y, self.first.size).transpose(-4, -3).flatten(-4, -3)

    def synthesis(self, r: Tensor) -> Tensor:
        inner = self.first.synthesis(_fold(self._split(r)))
        return self.second.synthesis(_unfold(inner, self.second.size))

    def apply(self, r: Tensor) -> Tensor:
        inner = _unfold(self.first.apply(_fold(self._split(r))), self.second.size)
        y = _unfold(self.second.apply(_fold(inner.transpose(-4, -3))), self.first.size)
        return y.transpose(-4, -3).flatten(-4, -3)

    def dense(self, dtype: torch.dtype | None = None) -> Tensor:
        first, second = self.first.dense(dtype or self.dtype), self.second.dense(dtype or self.dtype)
        return (first.unsqueeze(-3) @ second.unsqueeze(-4)).flatten(-4, -3)

    def _split(self, r: Tensor) -> Tensor:
        """(..., K' K'', M, C) -> (..., K', K'', M, C)."""
        return r.unflatten(-3, (self.first.size, self.second.size))


@value
class Repeated(SamePattern):
    """A basis of one matrix, k times.

    Example:

        >>> from structconv import Dense
        >>> from structconv.bases import Repeated
        >>> Repeated(Dense(torch.ones(1, 3, 3)), 4).size
        4
    """

    times: int

    @property
    def size(self) -> int:
        return self.times

    _shown = "{0.child!r}"

    def apply(self, r: Tensor) -> Tensor:
        return _unfold(self.child.apply(_fold(r).unsqueeze(-3)).squeeze(-3), self.times)

    def analysis(self, x: Tensor) -> Tensor:
        y = self.child.analysis(x)
        return y.expand(*y.shape[:-3], self.times, *y.shape[-2:])

    def synthesis(self, r: Tensor) -> Tensor:
        return self.child.synthesis(r.sum(-3, keepdim=True))

    def dense(self, dtype: torch.dtype | None = None) -> Tensor:
        a = self.child.dense(dtype)
        return a.expand(*a.shape[:-3], self.times, *a.shape[-2:])

    def evaluate(self, pairs: Pairs) -> Tensor:
        a, rank = self.child.evaluate(pairs), len(pairs.shape)
        return a.expand(*a.shape[:-rank - 1], self.times, *a.shape[-rank:])


@value
class LinearSum(Operands):
    """a_k + b_k of two matrices, each through its own primitives.

    Example:

        >>> from structconv import Grid, Shift
        >>> from structconv.bases import LinearSum
        >>> LinearSum(Shift(Grid(3), [1]), Shift(Grid(3), [-1])).dense()[0]
        tensor([[0., 1., 0.],
                [1., 0., 1.],
                [0., 1., 0.]])
    """

    @property
    def size(self) -> int:
        return self.first.size

    _shown = "({0.first!r} + {0.second!r})"

    def apply(self, r: Tensor) -> Tensor:
        return self.first.apply(r) + self.second.apply(r)

    def analysis(self, x: Tensor) -> Tensor:
        return self.first.analysis(x) + self.second.analysis(x)

    def synthesis(self, r: Tensor) -> Tensor:
        return self.first.synthesis(r) + self.second.synthesis(r)

    def dense(self, dtype: torch.dtype | None = None) -> Tensor:
        return self.first.dense(dtype or self.dtype) + self.second.dense(dtype or self.dtype)


@value
class Scaled(SamePattern):
    """factor * a_k: one number, or a tensor of them, (K,) or (1,).

    Example:

        >>> from structconv import Dense
        >>> (2 * Dense(torch.tensor([[[1.0, 2.0], [3.0, 4.0]]]))).dense()[0]
        tensor([[2., 4.],
                [6., 8.]])
    """

    factor: float | Tensor

    def apply(self, r: Tensor) -> Tensor:
        return self.child.apply(r) * self._factor(r.dtype, 2)

    def analysis(self, x: Tensor) -> Tensor:
        return self.child.analysis(x) * self._factor(x.dtype, 2)

    def synthesis(self, r: Tensor) -> Tensor:
        return self.child.synthesis(r * self._factor(r.dtype, 2))

    def dense(self, dtype: torch.dtype | None = None) -> Tensor:
        a = self.child.dense(dtype)
        return a * self._factor(a.dtype, 2)

    def evaluate(self, pairs: Pairs) -> Tensor:
        a = self.child.evaluate(pairs)
        return a * self._factor(a.dtype, len(pairs.shape))

    def _factor(self, dtype: torch.dtype, rank: int) -> float | Tensor:
        if isinstance(self.factor, Tensor):
            return self.factor.to(dtype).view(-1, *(1,) * rank)
        return self.factor

    def __repr__(self) -> str:
        factor = self.factor if isinstance(self.factor, float) else "factor"
        return f"({factor} * {self.child!r})"


AS_CHILD.add(Scaled)


@value
class Transposed(Unary):
    """A_kmn -> A_knm of any basis, entry by entry.

    Example:

        >>> from structconv import Dense
        >>> Dense(torch.ones(1, 4, 3)).transpose().dense().shape
        torch.Size([1, 3, 4])
    """

    flips = True

    @property
    def num_inputs(self) -> int:
        return self.child.num_outputs

    @property
    def num_outputs(self) -> int:
        return self.child.num_inputs

    _shown = "{0.child!r}.transpose()"

    def restricted(self, to: Restriction) -> Basis | None:
        return super().restricted(to.turned())

    def support(self) -> Support | None:
        support = self.child.support()
        return None if support is None else support.transpose()

    def reach(self) -> Support | None:
        support = reach(self.child)
        return None if support is None else support.transpose()

    def pattern(self) -> Graph | None:
        graph = self.child.pattern()
        return None if graph is None else graph.reversed()

    def dense(self, dtype: torch.dtype | None = None) -> Tensor:
        return self.child.dense(dtype).mT

    def evaluate(self, pairs: Pairs) -> Tensor:
        return pairs.restore(self.child.evaluate(self._transposed_pairs(pairs)))

    def _transposed_pairs(self, pairs: Pairs) -> Pairs:
        """Return the child's own edges if these pairs are their transpose, so that its values need no search."""
        graph = self.child.pattern() if isinstance(pairs, Edges) else None
        if graph is not None and graph.reversed().edge_index is pairs.graph.edge_index:  # type: ignore[attr-defined]
            return Edges(graph, pairs.dtype)
        return pairs.transposed()


@value
class Mixed(SamePattern):
    """sum_k W_kj a_k for each of J heads: W (K, J) combines the heads of each pair.

    A score that is -inf in one of the heads, an absent pair in the log domain, is absent in every combination.

    Example:

        >>> from structconv import Dense
        >>> heads = Dense(torch.ones(2, 3, 3))
        >>> heads.mix(torch.tensor([[0.5], [2.0]])).dense()[0, 0]
        tensor([2.5000, 2.5000, 2.5000])
    """

    matrix: Tensor

    @property
    def size(self) -> int:
        return self.matrix.shape[1]

    _shown = "{0.child!r}.mix({0.child.size} -> {0.size})"
    #: The heads of the child that are held for one of its own.
    _width = property(lambda self: -(-self.child.size // max(self.size, 1)))
    _terms = property(lambda self: self.child.size)

    def apply(self, r: Tensor) -> Tensor:
        heads, channels = r.shape[-3], r.shape[-1]
        if heads != self.size:
            return self.analysis(r.squeeze(-3))
        y = self.child.analysis(r.movedim(-3, -2).flatten(-2)).unflatten(-1, (heads, channels))
        return torch.einsum("...knjc,kj->...jnc", y, self.matrix.to(y.dtype))

    def analysis(self, x: Tensor) -> Tensor:
        return self._combined(self.child.analysis(x), 2)

    def synthesis(self, r: Tensor) -> Tensor:
        return self.child.synthesis(torch.einsum("...jmc,kj->...kmc", r, self.matrix.to(r.dtype)))

    def dense(self, dtype: torch.dtype | None = None) -> Tensor:
        return self._mixed(self.child.dense(dtype), 2)

    def evaluate(self, pairs: Pairs) -> Tensor:
        return self._mixed(self.child.evaluate(pairs), len(pairs.shape))

    def _transposed(self) -> Basis:
        return Mixed(self.child.transpose(), self.matrix)

    def _mixed(self, entries: Tensor, rank: int) -> Tensor:
        """The combinations of the entries, where scores of -inf stay so."""
        if not self.has_scores:
            return self._combined(entries, rank)
        absent = entries == -torch.inf
        mixed = self._combined(entries.masked_fill(absent, 0), rank)
        return mixed.masked_fill(absent.any(-1 - rank, keepdim=True), -torch.inf)

    def _combined(self, heads: Tensor, rank: int) -> Tensor:
        """(..., K, *rank) -> (..., J, *rank)."""
        flat = heads.flatten(-rank)
        return (self.matrix.to(heads.dtype).mT @ flat).unflatten(-1, heads.shape[heads.dim() - rank:])


@value
class Mixture(OverParts):
    """The K matrices of each part, in order, over the concatenated inputs of all parts: M = M_1 + M_2 + ...

    A matrix of a part is zero at the inputs of the others. The parts share their outputs.

    Raises:
        ShapeError: the parts differ in their number of outputs, or there is no part.

    Example:

        >>> from structconv import Dense
        >>> from structconv.bases import Mixture
        >>> Mixture((Dense(torch.ones(1, 2, 3)), Dense(torch.ones(1, 4, 3)))).num_inputs
        6
    """

    parts: tuple[Basis, ...]

    def __post_init__(self) -> None:
        counts = [part.num_outputs for part in self.parts]
        if not counts or any(count != counts[0] for count in counts):
            raise ShapeError("Mixture", "all parts of a | must have the same outputs N",
                             " and ".join(f"N={count}" for count in counts) or "none")

    @property
    def num_inputs(self) -> int:
        return sum(part.num_inputs for part in self.parts)

    def apply(self, r: Tensor) -> Tensor:
        return concatenate([part.apply(own) for part, own in self._with_rows(r)], -3)

    def analysis(self, x: Tensor) -> Tensor:
        own = x.split([part.num_inputs for part in self.parts], -2)
        return concatenate([part.analysis(rows) for part, rows in zip(self.parts, own, strict=True)], -3)

    def synthesis(self, r: Tensor) -> Tensor:
        return total([part.synthesis(own) for part, own in self._with_rows(r)])

    def dense(self, dtype: torch.dtype | None = None) -> Tensor:
        blocks, before = [], 0
        for part in self.parts:
            after = self.num_inputs - before - part.num_inputs
            blocks.append(F.pad(part.dense(dtype or self.dtype), (0, 0, before, after)))
            before += part.num_inputs
        return concatenate(blocks, -3)

    def _with_rows(self, r: Tensor) -> list[tuple[Basis, Tensor]]:
        """Each part with its heads of r at its inputs."""
        heads = r.split([part.size for part in self.parts], -3)
        sizes = [part.num_inputs for part in self.parts]
        return [(part, own.split(sizes, -2)[i]) for i, (part, own) in enumerate(zip(self.parts, heads, strict=True))]

    __repr__ = Concat.__repr__


@value
class BlockDiagonal(OverParts):
    """A_k = diag(A_k^(1), ..., A_k^(B)): the matrices of sample b over its own inputs and outputs, zero elsewhere; all
    parts have one size K."""

    parts: tuple[Basis, ...]

    def __post_init__(self) -> None:
        if len({part.size for part in self.parts}) != 1:
            raise ShapeError("BlockDiagonal", "all parts must have the same size K", [part.size for part in self.parts])

    @property
    def size(self) -> int:
        return self.parts[0].size

    @property
    def num_inputs(self) -> int:
        return sum(part.num_inputs for part in self.parts)

    @property
    def num_outputs(self) -> int:
        return sum(part.num_outputs for part in self.parts)

    @property
    def has_scores(self) -> bool:
        return any(part.has_scores for part in self.parts)

    def support(self) -> Support | None:
        supports = tuple(part.support() for part in self.parts)
        sizes = ([part.num_inputs for part in self.parts], [part.num_outputs for part in self.parts])
        return None if not any(supports) else EachWithin(supports, Samples(*sizes))

    def restricted(self, to: Restriction) -> Basis | None:
        return None if to.number is None else self.parts[to.number]

    def apply(self, r: Tensor) -> Tensor:
        return concatenate([part.apply(own) for part, own in self._rows(r)], -2)

    def analysis(self, x: Tensor) -> Tensor:
        return concatenate([part.analysis(own) for part, own in self._rows(x)], -2)

    def synthesis(self, r: Tensor) -> Tensor:
        return concatenate([part.synthesis(own) for part, own in self._rows(r)], -2)

    def dense(self, dtype: torch.dtype | None = None) -> Tensor:
        blocks = [part.dense(dtype) for part in self.parts]
        rows, before = [], 0
        for block in blocks:
            rows.append(F.pad(block, (before, self.num_outputs - before - block.shape[-1])))
            before += block.shape[-1]
        return concatenate(rows, -2)

    def _rows(self, x: Tensor) -> list[tuple[Basis, Tensor]]:
        own = x.split([part.num_inputs for part in self.parts], -2)
        return list(zip(self.parts, own, strict=True))
