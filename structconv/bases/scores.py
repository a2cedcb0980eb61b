"""Scores of pairs as values, which kernels match by type.

Each holds tensors for its entries (queries, keys, terms, tables) and computes the score of (m, n) from them. The
mechanisms in `mechanisms/scores.py` compute these tensors.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from structconv.arguments import is_own
from structconv.bases.base import Basis, value
from structconv.bases.pairs import Block, Edges, Pairs
from structconv.bases.pairwise import Pairwise
from structconv.bases.sparse import OnGraph
from structconv.bases.tree import Projected, Term
from structconv.derived import values_known
from structconv.errors import ConfigError, ShapeError, text_of
from structconv.primitives.functions import finite
from structconv.primitives.segments import segment_sum
from structconv.shapes import broadcast, check_same_shape
from structconv.structures.graph import Graph
from structconv.structures.samples import Restriction
from structconv.structures.supports import EdgeSupport, Support
from structconv.structures.values import altered, map_tensors, tensors_in

__all__ = ["Additive", "Affine", "Bilinear", "EdgeScore", "PairFunction", "Score", "Uniform"]


def _guarded(pairs: Pairs, score: Callable[[Tensor, Tensor], Tensor], source: Tensor, target: Tensor) -> Tensor:
    """score(source, target) of (..., K, M, D) and (..., K, N, D'), NaN at the pairs of an entry that is not finite. No
    gradient passes through such a pair, so that a mask above it keeps the NaN from all other entries."""
    if torch.compiler.is_compiling() or (values_known(source, target) and finite(source) and finite(target)):
        return score(source, target)
    known = source.isfinite().all(-1), target.isfinite().all(-1)
    zeroed = [t.masked_fill(~finite.unsqueeze(-1), 0) for t, finite in zip((source, target), known, strict=True)]
    return score(*zeroed).masked_fill(~(pairs.source(known[0]) & pairs.target(known[1])), torch.nan)


class Score(Pairwise):
    """Scores, not computed by an operator from others: a softmax over them is meaningful.

    `evaluate(pairs)` returns (..., K, *pairs.shape); K and axes of one are expanded, also of a score
    with only inputs or only outputs.

    Example:

        >>> from structconv import Conv, Given
        >>> from structconv.bases import Score, value
        >>> @value
        ... class Nearness(Score):
        ...     s: torch.Tensor                                      # (K, M)
        ...     size = property(lambda self: self.s.shape[-2])
        ...     num_inputs = num_outputs = property(lambda self: self.s.shape[-1])
        ...     def evaluate(self, pairs):
        ...         return -(pairs.source(self.s) - pairs.target(self.s)).abs()
        >>> Conv(Given(Nearness(torch.tensor([[0.0, 1.0, 5.0]])).softmax()), 8, 8)(torch.randn(3, 8)).shape
        torch.Size([3, 8])
    """

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if "evaluate" in cls.__dict__:
            setattr(cls, "evaluate", _expanded(cls.__dict__["evaluate"]))  # noqa: B010 - mypy refuses an assignment

    has_scores = True


def _expanded(evaluate: Callable[[Any, Pairs], Tensor]) -> Callable[[Any, Pairs], Tensor]:
    """Wrap `evaluate` so that a score of only inputs, or only outputs, is expanded to all pairs.

    Raises:
        ShapeError: the scores do not have the shape of the pairs.
    """
    own = is_own(evaluate)
    known = own

    @functools.wraps(evaluate)
    def expanded(self: Any, pairs: Pairs) -> Tensor:
        nonlocal known
        a, tail = evaluate(self, pairs), pairs.shape
        if not known and isinstance(pairs, Block) and tail[0] == tail[1] > 1 and not torch.compiler.is_compiling():
            first, last = pairs.columns  # a table that ignores the pairs, or is transposed, has the right shape here
            with torch.no_grad():
                expanded(self, dataclasses.replace(pairs, columns=(first, last - 1)))
            known = True
        if isinstance(a, Tensor) and not a.is_floating_point() and not a.is_complex():
            raise ConfigError(type(self).__name__, "evaluate must return floating numbers", a.dtype,
                              "Convert them: .to(dtype).")
        rank = len(tail)
        whole = isinstance(a, Tensor) and a.shape[-rank:] == tail and a.dim() > rank
        if whole and not own and a.dim() <= rank + len(self.batch_shape):  # without K it fits, too, where B is K
            raise ShapeError(type(self).__name__, f"evaluate must return {_letters(tail)} at these pairs, "
                             f"{text_of((*self.batch_shape, self.size, *tail))}, for batch_shape is "
                             f"{text_of(self.batch_shape)}", tuple(a.shape), f"The axis of K is dim -{rank + 1}.")
        if whole and (own or a.shape[-rank - 1] == self.size):
            return a
        sizes = tuple(a.shape) if isinstance(a, Tensor) else ()
        full = (self.size, *tail)
        if len(sizes) <= rank or any(n not in (1, size) for n, size in zip(sizes[-rank - 1:], full, strict=True)):
            raise ShapeError(type(self).__name__, f"evaluate must return {_letters(tail)} at these pairs, (..., "
                             f"K={self.size}, {', '.join(map(str, tail))})",
                             sizes if isinstance(a, Tensor) else type(a).__name__, "It computes a part of all pairs. "
                             "pairs.source takes a tensor (..., K, M) there, pairs.target one (..., K, N). For vectors "
                             "(..., K, M, D) use pairs.combine(fn, source, target).")
        return a.expand(*sizes[:-rank - 1], *full)

    return expanded


def _letters(pairs: tuple[int, ...]) -> str:
    return "(..., K, M, N)" if len(pairs) == 2 else "(..., K, E)"


@value
class Bilinear(Score):
    """a_kmn = <query_kn, key_km>, with query (..., K, N, D) and key (..., K, M, D).

    Example:

        >>> from structconv.bases import Bilinear
        >>> query, key = torch.randn(2, 3, 8), torch.randn(2, 5, 8)         # K, N, D and K, M, D
        >>> scores = Bilinear(query, key)
        >>> torch.allclose(scores.dense(), key @ query.mT, atol=1e-5)
        True
    """

    query: Tensor
    key: Tensor

    @property
    def depth(self) -> int:
        """D, by whose square root `scaled()` divides."""
        return self.query.shape[-1]

    _terms = property(lambda self: self.depth)

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

    def evaluate(self, pairs: Pairs) -> Tensor:
        return _guarded(pairs, lambda key, query: pairs.bilinear(query, key), self.key, self.query)


@value
class Affine(Score):
    """a_kmn = source_km + target_kn, with source (..., K, M) and target (..., K, N).

    Example:

        >>> from structconv.bases import Affine
        >>> Affine(torch.tensor([[1.0, 2.0]]), torch.tensor([[10.0, 20.0, 30.0]])).dense()[0]
        tensor([[11., 21., 31.],
                [12., 22., 32.]])
    """

    ENTRY_COUNTS = ("source", "target")

    source: Tensor
    target: Tensor

    @property
    def size(self) -> int:
        return max(self.source.shape[-2], self.target.shape[-2])

    @property
    def num_inputs(self) -> int:
        source: Any = self.source
        rows: int = source.x.shape[-2] if type(source) is Term else source.shape[-1]
        return rows

    @property
    def num_outputs(self) -> int:
        target: Any = self.target
        rows: int = target.x.shape[-2] if type(target) is Term else target.shape[-1]
        return rows

    @property
    def batch_shape(self) -> tuple[int, ...]:
        return broadcast(self.source.shape[:-2], self.target.shape[:-2])

    def evaluate(self, pairs: Pairs) -> Tensor:
        return pairs.source(self.source) + pairs.target(self.target)

    def restricted(self, to: Restriction) -> Affine:
        return Affine(to.of_inputs(self.source, -1, 2), to.of_outputs(self.target, -1, 2))


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


@value
class Additive(SourceTarget, Score):
    """a_kmn = <vector_k, activation(target_kn + source_km)>, D channels (Bahdanau; GATv2 with a leaky ReLU).

    `source` (..., K, M, D), `target` (..., K, N, D), `vector` (K, D).

    Example:

        >>> from structconv.bases import Additive
        >>> source, target = torch.randn(2, 5, 8), torch.randn(2, 3, 8)        # K, M, D and K, N, D
        >>> Additive(source, target, torch.randn(2, 8)).softmax().dense().shape
        torch.Size([2, 5, 3])
    """

    source: Tensor
    target: Tensor
    vector: Tensor
    activation: Callable[[Tensor], Tensor] = torch.tanh

    @property
    def size(self) -> int:
        return self.vector.shape[0]

    @property
    def batch_shape(self) -> tuple[int, ...]:
        return broadcast(self.source.shape[:-3], self.target.shape[:-3])

    _width = property(lambda self: self.vector.shape[-1])

    def restricted(self, to: Restriction) -> Additive:
        return Additive(to.of_inputs(self.source, -2, 3), to.of_outputs(self.target, -2, 3), self.vector,
                        self.activation)

    def evaluate(self, pairs: Pairs) -> Tensor:
        shape = (self.size, self._width, 1) if isinstance(pairs, Edges) else (self.size, 1, self._width, 1)
        read = [self.vector, *tensors_in(self.activation)]

        def score(source: Tensor, target: Tensor, vector: Tensor, *trained: Tensor) -> Tensor:
            supply = iter(trained)
            activation = map_tensors(self.activation, lambda _: next(supply))
            units = source + target
            units = check_same_shape("Additive", "activation", activation(units), units)
            return (units @ vector.view(shape)).squeeze(-1)

        return _guarded(pairs, lambda source, target: pairs.combine(score, source, target, read),
                        self.source, self.target)


@value
class PairFunction(SourceTarget, Score):
    """a_kmn = fn(source_m, target_n)_k for any function of a pair, with source (..., M, P) and target (..., N, P').

    `fn(parameters, source, target)` maps (..., P) and (..., P'), broadcast against each other, to (..., K); it takes
    its parameters as arguments, so that a recomputed block sends gradients to them.

    Example:

        >>> from structconv.bases import PairFunction
        >>> source, target = torch.tensor([[1.0], [2.0]]), torch.tensor([[10.0], [20.0]])
        >>> PairFunction(lambda parameters, x, z: x + z, (), source, target, heads=1, hidden=1).dense()[0]
        tensor([[11., 21.],
                [12., 22.]])
    """

    fn: Callable[..., Tensor]
    parameters: tuple[Tensor, ...]
    source: Tensor
    target: Tensor
    heads: int
    hidden: int

    @property
    def size(self) -> int:
        return self.heads

    @property
    def batch_shape(self) -> tuple[int, ...]:
        return broadcast(self.source.shape[:-2], self.target.shape[:-2])

    _width = property(lambda self: self.hidden)

    def restricted(self, to: Restriction) -> PairFunction:
        return altered(self, source=to.of_inputs(self.source, -2, 2),
                       target=to.of_outputs(self.target, -2, 2))

    def evaluate(self, pairs: Pairs) -> Tensor:
        def score(source: Tensor, target: Tensor, *parameters: Tensor) -> Tensor:
            a = self.fn(parameters, source, target)
            lead = broadcast(source.shape[:-1], target.shape[:-1])
            if tuple(a.shape) != (*lead, self.heads):
                raise ShapeError("Pair", f"the module must map (..., {source.shape[-1] + target.shape[-1]}) to "
                                 f"(..., K={self.heads}), here {(*lead, self.heads)}", tuple(a.shape),
                                 "K is the number of heads: Pair(module, heads=K).")
            return a.movedim(-1, -2 if isinstance(pairs, Edges) else -3)

        def combine(source: Tensor, target: Tensor) -> Tensor:
            return pairs.combine(score, source.squeeze(-3), target.squeeze(-3), self.parameters)

        return _guarded(pairs, combine, self.source.unsqueeze(-3), self.target.unsqueeze(-3))


@value
class EdgeScore(OnGraph, Score):
    """a_kmn = values_ke at the edge e: m -> n, (..., K, E); pairs without an edge are absent.

    Example:

        >>> from structconv import Graph
        >>> from structconv.bases import EdgeScore
        >>> graph = Graph(torch.tensor([[0, 1, 0], [1, 1, 0]]), num_nodes=2)
        >>> EdgeScore(graph, torch.zeros(1, 3)).softmax().dense()[0]
        tensor([[1.0000, 0.5000],
                [0.0000, 0.5000]])
    """

    ENTRY_COUNTS = ("values",)

    graph: Graph
    values: Tensor

    @property
    def size(self) -> int:
        return self.values.shape[-2]

    @property
    def batch_shape(self) -> tuple[int, ...]:
        return tuple(self.values.shape[:-2])

    def support(self) -> Support:
        return EdgeSupport(self.graph)

    def evaluate(self, pairs: Pairs) -> Tensor:
        if isinstance(pairs, Edges) and _equal_edges(pairs.graph.edge_index, self.graph.edge_index):
            return self.values
        key = self.graph.source.long() * self.num_outputs + self.graph.target.long()
        flat = segment_sum(self.values, key, self.num_inputs * self.num_outputs)
        return pairs.pick(flat.unflatten(-1, (self.num_inputs, self.num_outputs)))


def _equal_edges(first: Tensor, second: Tensor) -> bool:
    if first is second or torch.compiler.is_compiling():
        return first is second
    return first.shape == second.shape and torch.equal(first, second)


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
        resized: Basis = altered(self, inputs=to.inputs, outputs=to.outputs)
        return resized


@value
class Uniform(Sized, Score):
    """a_mn = 1 at every pair: the window and the normalization do the rest.

    Example:

        >>> from structconv.bases import Uniform
        >>> Uniform(torch.empty(0), 3, 2).normalize("sum").dense()[0]
        tensor([[0.3333, 0.3333],
                [0.3333, 0.3333],
                [0.3333, 0.3333]])
    """

    like: Tensor
    inputs: int
    outputs: int
    size = 1

    def restricted(self, to: Restriction) -> Basis:
        return self._resized(to)

    def evaluate(self, pairs: Pairs) -> Tensor:
        shape = torch.broadcast_shapes(pairs.source_index().shape, pairs.target_index().shape)
        return torch.ones((1, *shape), dtype=pairs.dtype, device=pairs.device)
