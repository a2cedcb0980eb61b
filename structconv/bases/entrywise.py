"""Operators that act entry by entry: sum, product, outer product, mask, map, normalization, dropout.

A node holds its children and restricts, combines or transforms their entries at the same pairs. A pair that a mask
removed stays absent in every node above the mask.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from structconv.bases.base import Basis, value
from structconv.bases.pairs import Pairs, normalized
from structconv.bases.pairwise import Pairwise, both, complete, entries, listed_graph, reach
from structconv.errors import ShapeError
from structconv.primitives.hashing import hash_uniform
from structconv.shapes import broadcast, check_same_shape
from structconv.structures.graph import Graph, distinct
from structconv.structures.masks import joined
from structconv.structures.samples import Restriction
from structconv.structures.supports import Support
from structconv.structures.values import altered

__all__ = ["Dropped", "LeakyReLU", "Mapped", "Masked", "Normalized", "Outer", "Product", "Sum"]


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


@value
class Unary(OverChild, Pairwise):
    """A node over one child, whose sizes, support and pattern it shares."""

    child: Basis

    def support(self) -> Support | None:
        return self.child.support()

    def restricted(self, to: Restriction) -> Basis | None:
        if self.normalizes and not to.within(self.child.support()):
            return None
        child = self.child.restricted(to)
        return None if child is None else altered(self, child=child)


class SamePattern(Unary):
    """A node whose entries are zero where those of its child are."""

    def pattern(self) -> Graph | None:
        return self.child.pattern()

    def reach(self) -> Support | None:
        return reach(self.child)


#: Classes with the K, M and N of their child.
AS_CHILD: set[type[Basis]] = set()


def sized(basis: Basis) -> Basis:
    """The first basis, from this one down, that does not take K, M and N from its child: faster to read them from."""
    while type(basis) in AS_CHILD:
        basis = basis.child  # type: ignore[attr-defined]
    return basis


def check_same_entries(owner: str, first: Basis, second: Basis) -> None:
    """Raise `ShapeError` unless two bases have the same M and N."""
    first, second = sized(first), sized(second)
    if first.num_inputs != second.num_inputs or first.num_outputs != second.num_outputs:
        raise ShapeError(owner, "both bases must have the same inputs M and outputs N",
                         " and ".join(f"M={basis.num_inputs}, N={basis.num_outputs}" for basis in (first, second)))


def check_sizes(owner: str, first: Basis, second: Basis) -> None:
    """Raise `ShapeError` unless the sizes K are equal or one of them is 1."""
    if first.size != second.size and 1 not in (first.size, second.size):
        raise ShapeError(owner, "the sizes K of both bases must be equal, or one of them 1",
                         f"{first.size} and {second.size}", "Use a.outer(b) for every pair of heads.")


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


@value
class Binary(OverTwo, Pairwise):
    """A node over two children with equal M and N."""

    #: Its operator in errors.
    written = ""

    first: Basis
    second: Basis

    @property
    def size(self) -> int:
        return max(self.first.size, self.second.size)

    @property
    def has_scores(self) -> bool:
        return self.first.has_scores or self.second.has_scores

    def support(self) -> Support | None:
        return both(self.first.support(), self.second.support())

    def restricted(self, to: Restriction) -> Basis | None:
        first, second = self.first.restricted(to), self.second.restricted(to)
        if first is None or second is None:
            return None
        return altered(self, first=first, second=second)

    def __post_init__(self) -> None:
        check_same_entries(self.written, self.first, self.second)


@value
class Sum(Binary):
    """a_k + b_k.

    Example:

        >>> from structconv import Dense
        >>> first, second = Dense(torch.tensor([[[1.0, 2.0], [3.0, 4.0]]])), Dense(torch.ones(1, 2, 2))
        >>> (first + second).dense()[0]
        tensor([[2., 3.],
                [4., 5.]])
    """

    written = "a + b"
    _shown = "({0.first!r} + {0.second!r})"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_sizes("a + b", sized(self.first), sized(self.second))

    def evaluate(self, pairs: Pairs) -> Tensor:
        return self.first.evaluate(pairs) + self.second.evaluate(pairs)


class Products(Binary):
    """A node whose entries are zero where those of one of its children are."""

    def pattern(self) -> Graph | None:
        """Return the graph on which the product can be evaluated; a side that normalizes needs all of its own pairs.
        Each pair is listed once, because the product of two sums over repeated edges is not the sum of products."""
        patterns = [basis.pattern() for basis in (self.first, self.second) if complete(basis)]
        if patterns:
            return patterns[0] if all(graph is patterns[0] for graph in patterns) else None
        graph = self.first.pattern() or self.second.pattern()
        return graph if graph is None or self.has_scores else distinct(graph)

    def reach(self) -> Support | None:
        return both(reach(self.first), reach(self.second))


@value
class Product(Products):
    """a_k * b_k, entry by entry; evaluated only where the sparser of the two is not zero.

    Example:

        >>> from structconv import Dense
        >>> first, second = Dense(torch.tensor([[[1.0, 2.0], [3.0, 4.0]]])), Dense(torch.ones(1, 2, 2))
        >>> (first * second).dense()[0]
        tensor([[1., 2.],
                [3., 4.]])
    """

    written = "a * b"
    _shown = "({0.first!r} * {0.second!r})"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_sizes("a * b", self.first, self.second)

    def evaluate(self, pairs: Pairs) -> Tensor:
        return self.first.evaluate(pairs) * self.second.evaluate(pairs)


@value
class Outer(Products):
    """a_k' * b_k'', entry by entry, for every pair of heads; k = k' K'' + k''.

    Example:

        >>> from structconv import Dense
        >>> three, two = Dense(torch.ones(3, 4, 4)), Dense(torch.ones(2, 4, 4))
        >>> three.outer(two).size
        6
    """

    written = "a.outer(b)"
    _shown = "{0.first!r}.outer({0.second!r})"

    @property
    def size(self) -> int:
        return self.first.size * self.second.size

    def evaluate(self, pairs: Pairs) -> Tensor:
        axis = -1 - len(pairs.shape)
        first, second = self.first.evaluate(pairs), self.second.evaluate(pairs)
        return (first.unsqueeze(axis) * second.unsqueeze(axis - 1)).flatten(axis - 1, axis)


@value
class Masked(SamePattern):
    """Only the pairs that `keep` contains exist.

    Example:

        >>> from structconv import Causal, Dense
        >>> Dense(torch.ones(1, 3, 3)).masked(keep=Causal()).dense()[0]
        tensor([[1., 1., 1.],
                [0., 1., 1.],
                [0., 0., 1.]])
    """

    mask: Support
    _shown = "{0.child!r}.masked(keep={0.mask!r})"

    def support(self) -> Support:
        return both(self.child.support(), self.mask)  # type: ignore[return-value]

    def reach(self) -> Support | None:
        return both(reach(self.child), self.mask)

    def restricted(self, to: Restriction) -> Basis | None:
        child, masks = self.child.restricted(to), self.mask.restricted(to)
        if child is None or masks is None:
            return None
        return Masked(child, joined(masks)) if masks else child

    def evaluate(self, pairs: Pairs) -> Tensor:
        return self.child.evaluate(pairs)


@value
class Mapped(Unary):
    """fn(a_kmn), entry by entry.

    Example:

        >>> from structconv import Dense
        >>> Dense(torch.tensor([[[-1.0, 2.0]]])).relu().dense()[0]
        tensor([[0., 2.]])
    """

    fn: Callable[[Tensor], Tensor]

    def evaluate(self, pairs: Pairs) -> Tensor:
        entries = self.child.evaluate(pairs)
        return check_same_shape("map", "fn", self.fn(entries), entries)

    def __repr__(self) -> str:
        return f"{self.child!r}.map({getattr(self.fn, '__name__', self.fn)})"


@value
class LeakyReLU(Unary):
    """max(a, 0) + negative_slope min(a, 0); a type of its own because kernels use that it is monotone.

    Example:

        >>> from structconv import Dense
        >>> Dense(torch.tensor([[[-1.0, 2.0]]])).leaky_relu(0.5).dense()[0]
        tensor([[-0.5000,  2.0000]])
    """

    negative_slope: float
    _shown = "{0.child!r}.leaky_relu({0.negative_slope})"

    def evaluate(self, pairs: Pairs) -> Tensor:
        return torch.nn.functional.leaky_relu(self.child.evaluate(pairs), self.negative_slope)


AS_CHILD.update((Masked, LeakyReLU))


def pattern_of_normalized(scores: Basis) -> Graph | None:
    """The pairs that exist, listed; `None` unless the list holds every group whole."""
    graph = listed_graph(scores)
    return None if complete(scores) and graph is not scores.pattern() else graph


@value
class Normalized(Unary):
    """Weights from scores: "softmax", "sum", "count" or "sigmoid", over inputs or outputs; absent pairs weigh zero.

    Example:

        >>> from structconv import Dense
        >>> scores = Dense(torch.tensor([[[0.0], [0.0]]]))
        >>> scores.softmax().dense().flatten()
        tensor([0.5000, 0.5000])
    """

    kind: str
    over: str
    has_scores = False

    @property
    def normalizes(self) -> str:  # type: ignore[override]
        return "" if self.kind == "sigmoid" else self.over

    _shown = "{0.child!r}.normalize({0.kind!r}, over={0.over!r})"

    def support(self) -> Support | None:
        return None

    def pattern(self) -> Graph | None:
        graph = pattern_of_normalized(self.child)
        return self.child.pattern() if graph is None and self.kind == "sum" else graph

    def reach(self) -> Support | None:
        return self.child.support()

    def evaluate(self, pairs: Pairs) -> Tensor:
        return normalized(self.child.evaluate(pairs), pairs, self.child.support(), self.kind, self.over)


@value
class Dropped(SamePattern):
    """Weights, each zeroed with probability p and else divided by 1 - p.

    The seed, the stream (a number for each part of a `|`) and the indices (batch, k, m, n) of a weight decide if it
    is dropped. So blocks, passes and lists of edges give the same weights.

    Example:

        >>> from structconv import Dense
        >>> from structconv.bases import Dropped
        >>> Dropped(Dense(torch.ones(1, 50, 50)), 0.5, torch.tensor(1)).dense().unique()
        tensor([0., 2.])
    """

    p: float
    seed: Tensor
    stream: int = 0
    _shown = "{0.child!r}.dropout({0.p})"

    def restricted(self, to: Restriction) -> Basis | None:
        child = self.child.restricted(to)
        if child is None:
            return None
        return DroppedWithin(child, self.p, self.seed, self.stream, *to.first(), to.total_outputs)

    def evaluate(self, pairs: Pairs) -> Tensor:
        a = entries(self.child, pairs)
        lead = a.shape[:-len(pairs.shape) - 1]
        pair = pairs.source_index() * pairs.num_outputs + pairs.target_index()
        return _dropped(a, self.p, self.seed + self.stream, lead, pair, len(pairs.shape))


@value
class DroppedWithin(SamePattern):
    """Dropout within samples of a batch: it drops the weights that it drops in the whole batch.

    Args:
        first_input, first_output: number of the sample's first entry in the batch; for several samples, leading
            dimensions.
        outputs: the number of outputs in the batch.
    """

    ENTRY_COUNTS = ("outputs",)

    p: float
    seed: Tensor
    stream: int
    first_input: Tensor
    first_output: Tensor
    outputs: int

    @property
    def batch_shape(self) -> tuple[int, ...]:
        return broadcast(self.first_input.shape, self.child.batch_shape)

    _shown = "{0.child!r}.dropout({0.p})"

    def restricted(self, to: Restriction) -> Basis | None:
        return None

    def evaluate(self, pairs: Pairs) -> Tensor:
        a = entries(self.child, pairs)
        rank, lead = len(pairs.shape), self.first_input.shape
        own = a.shape[:-rank - 1]
        m, n = (first.to(a.device).view(*lead, *(1,) * (rank + 1)) for first in (self.first_input, self.first_output))
        pair = (pairs.source_index() + m) * self.outputs + pairs.target_index() + n
        return _dropped(a, self.p, self.seed + self.stream, own[1:] if 0 < len(lead) == len(own) else own, pair, rank)


def _dropped(a: Tensor, p: float, seed: Tensor, lead: tuple[int, ...], pair: Tensor, rank: int) -> Tensor:
    """The weights at (batch, k, pair) whose hashed number is at least p, over 1 - p. The elements of the batch are
    numbered over the dimensions `lead`; pairs have `rank` axes."""
    batch = torch.arange(math.prod(lead), device=a.device).view(*lead, 1, *(1,) * rank)
    head = torch.arange(a.shape[-rank - 1], device=a.device).view(-1, *(1,) * rank)
    keep = hash_uniform(seed, batch, head, pair) >= p
    return torch.where(keep, a / (1 - p), torch.zeros((), dtype=a.dtype, device=a.device))
