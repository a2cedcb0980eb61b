"""Apply an expression of scores: along the edges of its pattern, or in blocks of the (M, N) rectangle.

`Pairwise` is the base of every basis that is defined by its entries. If the pairs are listed (a graph, a window), the
entries are evaluated there and applied as a sparse product: O(E K + N C) memory. Otherwise blocks of outputs are
evaluated, applied and freed, and evaluated again in the backward pass: O(N C) memory beside one block. Normalization
over outputs needs whole rows, so such expressions run in blocks of inputs, summed. Only `dense()` builds all entries at
once.
"""

from __future__ import annotations

import abc
from collections.abc import Iterator
from itertools import chain

import torch
from torch import Tensor

from structconv.bases.base import Basis
from structconv.bases.pairs import Block, Edges, Pairs, full
from structconv.bases.sparse import Sparse
from structconv.derived import values_known
from structconv.primitives.blocks import recompute_blocks
from structconv.primitives.segments import segment_sum
from structconv.structures.graph import Graph
from structconv.structures.supports import EdgeSupport, Support
from structconv.structures.values import field_names, fields, map_tensors, tensors_in

__all__ = ["Pairwise", "weights_at"]

#: The greatest number of elements in a temporary of one block: 8 MB in float32; a cache holds a few.
BLOCK_ELEMENTS = 1 << 21


class Pairwise(Basis):
    """A basis given by its entries at pairs; a subclass implements `evaluate` and, if it restricts them, `support`.

    Example:

        >>> from structconv.bases import Pairwise, value
        >>> @value
        ... class Product(Pairwise):
        ...     s: torch.Tensor
        ...     size = 1
        ...     num_inputs = num_outputs = property(lambda self: self.s.shape[-1])
        ...     def evaluate(self, pairs):
        ...         return pairs.source(self.s) * pairs.target(self.s)
        >>> Product(torch.tensor([[1.0, 2.0]])).dense()[0]
        tensor([[1., 2.],
                [2., 4.]])
    """

    @property
    def _width(self) -> int:
        """Numbers held at one pair while it is evaluated, for one head."""
        return 1

    @property
    def _terms(self) -> int:
        """Products that are added up for one pair, for one head."""
        return self._width

    @property
    def device(self) -> torch.device:
        """The device of the tensors that the entries are made of, or of the bases if there are none; else the CPU."""
        tensor = next(iter(tensors_in(self)), None)
        if tensor is not None:
            return tensor.device
        child = next(children(self), None)
        return torch.device("cpu") if child is None else child.device

    @property
    def dtype(self) -> torch.dtype | None:
        """The floating dtype of the tensors that the entries are made of; `None` where there are none."""
        dtypes = (t.dtype for t in tensors_in(self) if t.is_floating_point())
        below = (getattr(child, "dtype", None) for child in children(self))
        return next((dtype for dtype in chain(dtypes, below) if dtype is not None), None)

    @abc.abstractmethod
    def evaluate(self, pairs: Pairs) -> Tensor:
        """The entries at `pairs`, (..., K, *pairs.shape); arbitrary where `support` says that a pair is absent."""

    def reach(self) -> Support | None:
        """The pairs outside which a mask makes every entry zero; `None` where no mask says so."""
        return self.support()

    def apply(self, r: Tensor) -> Tensor:
        return _contract(self, r, sum_heads=False)

    def analysis(self, x: Tensor) -> Tensor:
        return _contract(self, x.unsqueeze(-3), sum_heads=False)

    def synthesis(self, r: Tensor) -> Tensor:
        return _contract(self, r, sum_heads=True)

    def dense(self, dtype: torch.dtype | None = None) -> Tensor:
        dtype = dtype or self.dtype or torch.get_default_dtype()
        pairs = listed(self, dtype)
        if pairs is not None:
            return Sparse(pairs.graph, entries(self, pairs).to(dtype)).dense(dtype)
        return entries(self, full(self.num_inputs, self.num_outputs, dtype, self.device)).to(dtype)


def entries(basis: Basis, pairs: Pairs) -> Tensor:
    """The entries at `pairs`, exactly zero at those that are absent."""
    a = basis.evaluate(pairs)
    keep = pairs.keep(basis.support())
    return a if keep is None else torch.where(keep, a, torch.zeros((), dtype=a.dtype, device=a.device))


def listed(basis: Basis, dtype: torch.dtype) -> Edges | None:
    """The pairs that count as a list of edges, where the support or the pattern is sparse.

    Where a node normalizes, only its own pattern will do: a mask above it may list fewer pairs than it sums over.
    """
    graph = None if complete(basis) else listed_graph(basis)
    graph = basis.pattern() if graph is None else graph
    return None if graph is None else Edges(graph, dtype)


def reach(basis: Basis) -> Support | None:
    """`Pairwise.reach` of any basis."""
    return basis.reach() if isinstance(basis, Pairwise) else basis.support()


def both(first: Support | None, second: Support | None) -> Support | None:
    """The pairs in both supports, `None` standing for all."""
    if first is None or second is None:
        return second if first is None else first
    if first is second or (isinstance(first, EdgeSupport) and isinstance(second, EdgeSupport)
                           and first.graph.edge_index is second.graph.edge_index):
        return second
    return first & second


def weights_at(basis: Basis, dtype: torch.dtype) -> Tensor:
    """The entries where they count: (..., K, E) along the basis's edges in their order, else (..., K, M, N).

    Example:

        >>> from structconv import Dense, Window
        >>> from structconv.bases import weights_at
        >>> scores = Dense(torch.zeros(1, 3, 3)).masked(keep=Window(1)).softmax()
        >>> weights_at(scores, torch.float32).shape                  # one column for each of the 7 pairs
        torch.Size([1, 7])
    """
    pairs = listed(basis, dtype) if isinstance(basis, Pairwise) else None
    if pairs is None and isinstance(basis, Sparse):
        pairs = Edges(basis.graph, dtype)
    return basis.dense(dtype) if pairs is None else entries(basis, pairs)


def children(basis: Basis) -> Iterator[Basis]:
    """The bases that a node of an expression holds."""
    for field in fields(basis):
        if isinstance(field, tuple):
            yield from (part for part in field if isinstance(part, Basis))
        elif isinstance(field, Basis):
            yield field


def nodes(basis: Basis) -> Iterator[Basis]:
    """The expression's nodes, itself first."""
    yield basis
    for child in children(basis):
        yield from nodes(child)


def complete(basis: Basis) -> frozenset[str]:
    """The sides, "inputs" or "outputs", along which a node normalizes, so that all pairs are evaluated together."""
    result = {basis.normalizes} - {""}
    for child in children(basis):
        result |= complete(child)
    return frozenset(_OTHER[over] for over in result) if basis.flips else frozenset(result)


_OTHER = {"inputs": "outputs", "outputs": "inputs"}


def _contract(basis: Pairwise, r: Tensor, *, sum_heads: bool) -> Tensor:
    pairs = listed(basis, r.dtype)
    if pairs is None:
        return _in_blocks(basis, r, sum_heads)
    a = entries(basis, pairs).to(r.dtype)
    sparse, keep = Sparse(pairs.graph, a), pairs.keep(reach(basis))
    bad = None if keep is None else _not_finite(r)
    if keep is None or bad is None:
        return sparse.synthesis(r) if sum_heads else sparse.apply(r.expand(*r.shape[:-3], basis.size, *r.shape[-2:]))
    touched = (keep & pairs.source(bad)).to(r.dtype)
    reached = segment_sum(touched, pairs.target_index(), basis.num_outputs) > 0
    sparse = Sparse(pairs.graph, a.masked_fill(~keep, 0))  # a factor of a product may be NaN where the other is absent
    y = sparse.apply(r.masked_fill(bad.unsqueeze(-1), 0).expand(*r.shape[:-3], basis.size, *r.shape[-2:]))
    y = y.masked_fill(reached.unsqueeze(-1), torch.nan)
    return y.sum(-3) if sum_heads else y


def _not_finite(r: Tensor) -> Tensor | None:
    """Return the rows of r (..., M, C) that are not finite, (..., M); `None` if all are finite or values cannot be
    read."""
    if torch.compiler.is_compiling():
        return None
    bad = ~r.isfinite().all(-1)
    return bad if not values_known(bad) or bad.any() else None


def _in_blocks(basis: Pairwise, r: Tensor, sum_heads: bool) -> Tensor:
    tensors = tensors_in(basis)
    opaque = not all(map(field_names, nodes(basis)))
    together = complete(basis)
    by_rows = "outputs" in together
    whole = opaque or len(together) == 2 or torch.compiler.is_compiling()
    blocks = _blocks(basis, r, by_rows, whole)

    def contract(block: Block, *values: Tensor) -> Tensor:
        supply = iter(values[:-1])
        tree = basis if opaque else map_tensors(basis, lambda _: next(supply))
        rows = values[-1] if len(blocks) == 1 or not by_rows else values[-1][..., slice(*block.rows), :]
        y = _product(tree, block, rows)
        return y.sum(-3) if sum_heads else y

    if len(blocks) == 1:
        return contract(blocks[0], *tensors, r)
    return recompute_blocks(contract, [*tensors, r], blocks, reduce="sum" if by_rows else "cat", dim=-2)


def _blocks(basis: Pairwise, r: Tensor, by_rows: bool, whole: bool) -> list[Block]:
    size_m, size_n = basis.num_inputs, basis.num_outputs
    if whole:
        return [full(size_m, size_n, r.dtype, r.device)]
    batch = 1
    for size in torch.broadcast_shapes(basis.batch_shape, r.shape[:-3]):
        batch *= size
    width = max((getattr(node, "_width", 1) for node in nodes(basis)), default=1)
    across, along = (size_n, size_m) if by_rows else (size_m, size_n)
    step = max(1, BLOCK_ELEMENTS // max(1, batch * basis.size * width * across))
    spans = [(start, min(start + step, along)) for start in range(0, along, step)] or [(0, 0)]
    whole_m, whole_n = (0, size_m), (0, size_n)
    return [Block(size_m, size_n, span if by_rows else whole_m, whole_n if by_rows else span, r.dtype, r.device)
            for span in spans]


def _product(basis: Basis, block: Block, r: Tensor) -> Tensor:
    """A^T r over a block. Rows of r that are not finite reach only the outputs whose pair with them exists."""
    a = entries(basis, block).to(r.dtype)
    mask = reach(basis)
    bad = None if mask is None else _not_finite(r)
    keep = None if bad is None else block.keep(mask)
    if keep is None or bad is None:
        return a.mT @ r
    reached = (keep & bad.unsqueeze(-1)).any(-2)
    y = a.masked_fill(~keep, 0).mT @ r.masked_fill(bad.unsqueeze(-1), 0)
    return y.masked_fill(reached.unsqueeze(-1), torch.nan)


def listed_graph(basis: Basis) -> Graph | None:
    """The pairs of a basis's support as a graph, where the support is sparse."""
    support = basis.support()
    return None if support is None else support.listing(basis.num_inputs, basis.num_outputs, basis.device)[0]
