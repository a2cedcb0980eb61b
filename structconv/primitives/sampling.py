"""Draw neighbors of nodes at random and number nodes: natively, or by torch's operators with equal results.

A draw is a function of (seed, relation, group, node, draw), so that a sample does not depend on threads, on other nodes
of the batch, or on the implementation.
"""

from __future__ import annotations

import math
from typing import NamedTuple, cast

import torch
from torch import Tensor

from structconv.errors import StructureError
from structconv.primitives.hashing import hash_bits
from structconv.primitives.native.dispatch import kernels

__all__ = ["InEdges", "Numbers", "draw_neighbors", "random_below"]

_MOST = 2**31  # edges into one node
#: `Numbering` of src/api.h.
_ENTER, _ADD, _FIND = range(3)


class InEdges(NamedTuple):
    """Edges by target: node n owns the slots indptr[n] to indptr[n + 1].

    Args:
        indptr: (N + 1,), int32 or int64. All tensors are contiguous.
        sources: (E,), dtype of `indptr`: the source of the edge in each slot.
        order: (E,), dtype of `indptr`: the number of the edge in each slot; `None`: slot s is edge s.
        edge_times: (E,) int64, by slot; `node_times`: (M,) int64, of the nodes where edges begin. The times of the
            edges of a node rise with its slots.
        weights: (E,) float64, by slot, finite and not negative.
    """

    indptr: Tensor
    sources: Tensor
    order: Tensor | None = None
    edge_times: Tensor | None = None
    node_times: Tensor | None = None
    weights: Tensor | None = None

    @property
    def num_nodes(self) -> int:
        """N."""
        return self.indptr.shape[0] - 1


def random_below(sizes: Tensor | int, seed: int, *indices: Tensor) -> Tensor:
    """A random integer in [0, size) for each tuple of indices, size at most 2^31. Each is likely to within 2^-32."""
    return (hash_bits(torch.tensor(seed), *indices) * sizes) >> 32


def draw_neighbors(edges: InEdges, nodes: Tensor, fanout: int, *, seed: int, relation: int = 0, base: int = 0,
                   groups: Tensor | None = None, limits: Tensor | None = None, replace: bool = False,
                   last: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    """At most `fanout` of the edges into each node.

    Args:
        nodes: (n,) int64.
        fanout: -1 for all edges.
        relation, groups: as the nodes, these make draws independent; groups (n,) int64, or none.
        base: the number of the first node; nodes follow one another.
        limits: (n,) int64: no edge is later.
        replace: an edge may be drawn more than once; `fanout` are drawn of a node that has any.
        last: only the last `fanout` edges may be drawn, of those with a positive weight.

    Returns:
        Where each edge begins, which edge it is, and the number of the node that it leads to, by node.

    Cost: O(1) an edge and a node, plus O(log degree) with `limits`; with weights O(degree) a draw.

    Raises:
        StructureError: if there is no such node.
    """
    core = kernels()
    if core is None:
        first, population, offsets, bad = _bounds(edges, nodes, limits, fanout, replace, last)
        drawn = [nodes] * 3 if bad >= 0 else _draw(edges, nodes, groups, (first, population, offsets), fanout, replace,
                                                   seed, relation, base)
    else:
        *drawn, bad = core.sample(*edges, nodes, groups, limits, fanout, replace, last, seed, relation, base)
    if bad >= 0:
        raise StructureError("sampling", f"nodes must be in [0, {edges.num_nodes}), each with fewer than 2^31 edges",
                             int(nodes[bad]), "Is the number of nodes too small?")
    sources, numbers, targets = drawn
    return sources, numbers, targets


class Numbers:
    """Numbers of keys (int64) in the order in which they come.

    Args:
        limit: keys are in [0, limit).
    """

    def __init__(self, limit: int) -> None:
        self.limit, self.count = limit, 0
        self._keys: list[Tensor] = []
        self._core = kernels()
        self._table = torch.empty(0, 1 if limit <= _MOST else 2, dtype=torch.int64)

    def enter(self, keys: Tensor) -> None:
        """Number keys by their positions; a key that comes twice has the first."""
        self._reserve(keys)
        if self._core is not None:
            self._number(keys, self.count, _ENTER)
        self._keys.append(keys)
        self.count += keys.shape[0]

    def add(self, keys: Tensor) -> tuple[Tensor, Tensor]:
        """Return the number of each key, and the new keys, which get the next numbers."""
        self._reserve(keys)
        if self._core is not None:
            numbers, fresh, added = self._number(keys, self.count, _ADD)
            fresh = fresh[:added]
        else:
            numbers, fresh = self._by_sorting(keys)
        self._keys.append(fresh)
        self.count += fresh.shape[0]
        return numbers, fresh

    def find(self, keys: Tensor) -> Tensor:
        """Return the number of each key, -1 for an unknown key."""
        if self._core is not None:
            self._reserve(keys[:0])
            return self._number(keys, self.count, _FIND)[0]
        numbers = self._by_sorting(keys)[0]
        return torch.where(numbers < self.count, numbers, -1)

    def _reserve(self, keys: Tensor) -> None:
        """Make room for more keys, half of the table staying free. O(keys there are), when they have doubled.

        A number for each possible key takes the place of a table that would not be smaller.
        """
        most = min(self.count + keys.shape[0], self.limit)
        if self._core is None or self._table.dtype is torch.int32 or self._table.shape[0] >= max(2 * most, 1):
            return
        shape = 1 << max(2 * most - 1, 15).bit_length(), self._table.shape[1]
        direct = self.limit <= 2 * math.prod(shape) and self.limit < _MOST
        self._table = torch.full((self.limit, 1), -1, dtype=torch.int32) if direct else torch.full(shape, -1)
        entered = 0
        for known in self._keys:
            self._number(known, entered, _ENTER)
            entered += known.shape[0]

    def _number(self, keys: Tensor, first: int, numbering: int) -> tuple[Tensor, Tensor, int]:
        try:
            return cast(tuple[Tensor, Tensor, int],
                        self._core.number(self._table, keys, first, numbering))  # type: ignore[union-attr]
        except ValueError as error:
            raise StructureError("sampling", f"edges must begin at nodes in [0, {self.limit})",
                                 (int(keys.min()), int(keys.max())), "Is the number of nodes too small?") from error

    def _by_sorting(self, keys: Tensor) -> tuple[Tensor, Tensor]:
        every = torch.cat([*self._keys, keys])
        different, inverse = every.unique(return_inverse=True)
        first = torch.full_like(different, every.shape[0]).scatter_reduce(0, inverse, torch.arange(len(every)), "amin")
        fresh = first[first >= self.count].sort().values
        numbers = torch.where(first < self.count, first, self.count + torch.searchsorted(fresh, first))
        return numbers[inverse[self.count:]], every[fresh]


# -- by torch's operators -----------------------------------------------------------------------------------------

def _bounds(edges: InEdges, nodes: Tensor, limits: Tensor | None, fanout: int, replace: bool, last: bool
            ) -> tuple[Tensor, Tensor, Tensor, int]:
    wrong = (nodes < 0) | (nodes >= edges.num_nodes)
    inside = nodes.masked_fill(wrong, 0)
    indptr = edges.indptr if edges.num_nodes else torch.zeros(2, dtype=torch.int64)
    first, end = indptr[inside].long(), indptr[inside + 1].long()
    wrong |= (first < 0) | (end < first) | (end > edges.sources.shape[0]) | (end - first >= _MOST)
    if wrong.any():
        return first, end, nodes, int(wrong.nonzero()[0])
    if limits is not None:
        end = _later(edges, first, end, limits)
    if last and fanout >= 0:
        first = torch.maximum(first, end - fanout) if edges.weights is None else _last_drawable(
            edges.weights, first, end, fanout)
    population = drawn = end - first
    if fanout >= 0:
        if edges.weights is not None:
            drawn = (_padded(edges.weights, first, population) > 0).sum(1)
        drawn = (drawn > 0) * fanout if replace else drawn.clamp(max=fanout)
    return first, population, torch.cat([drawn.new_zeros(1), drawn.cumsum(0)]), -1


def _last_drawable(weights: Tensor, first: Tensor, end: Tensor, fanout: int) -> Tensor:
    """Return where the last `fanout` slots of positive weight of each [first, end) begin."""
    drawable = (_padded(weights, first, end - first) > 0).long()
    after = drawable.flip(1).cumsum(1).flip(1)  # how many from here on
    kept = ((after <= fanout) & (torch.arange(drawable.shape[1]) < (end - first).unsqueeze(1))).sum(1)
    return end - kept


def _later(edges: InEdges, low: Tensor, high: Tensor, limits: Tensor) -> Tensor:
    """Return the first slot of each [low, high) that is later than the limit."""
    while bool((low < high).any()):
        middle = (low + high) // 2
        slots = middle.clamp(max=edges.sources.shape[0] - 1)
        if edges.edge_times is not None:
            times = edges.edge_times[slots]
        else:
            assert edges.node_times is not None
            times = edges.node_times[edges.sources[slots].long()]
        passes, open_ = times <= limits, low < high
        low, high = torch.where(open_ & passes, middle + 1, low), torch.where(open_ & ~passes, middle, high)
    return low


def _padded(values: Tensor, first: Tensor, population: Tensor) -> Tensor:
    """Return the values of the slots of each node, padded by zeros: (n, largest population)."""
    offsets = torch.arange(int(population.max()) if len(population) else 0)
    there = offsets < population[:, None]
    return values[(first[:, None] + offsets).masked_fill(~there, 0)].masked_fill(~there, 0) if there.numel() else (
        values.new_zeros(there.shape))


def _draw(edges: InEdges, nodes: Tensor, groups: Tensor | None, neighbors: tuple[Tensor, Tensor, Tensor], fanout: int,
          replace: bool, seed: int, relation: int, base: int) -> tuple[Tensor, Tensor, Tensor]:
    first, population, offsets = neighbors
    draws = offsets.diff()
    most = int(draws.max()) if len(draws) else 0
    number = torch.arange(most)
    groups = nodes.new_zeros(()) if groups is None else groups
    bits = hash_bits(torch.tensor(seed), torch.tensor(relation), groups[..., None], nodes[:, None], number)
    if fanout < 0:
        chosen = number.expand(len(nodes), most)
    elif edges.weights is not None:
        chosen = _weighted(bits, _padded(edges.weights, first, population), replace)
    elif replace:
        chosen = (bits * population[:, None]) >> 32
    else:
        chosen = torch.where((draws == population)[:, None], number, _distinct(bits, draws, population))
    there = number < draws[:, None]
    slots = (first[:, None] + chosen)[there]
    numbers = slots if edges.order is None else edges.order[slots].long()
    return edges.sources[slots].long(), numbers, base + torch.repeat_interleave(draws)


def _distinct(bits: Tensor, draws: Tensor, population: Tensor) -> Tensor:
    """R. Floyd's algorithm: any `draws` of `population` offsets are equally likely. (Bentley and Floyd 1987)"""
    chosen = torch.full(bits.shape, -1)
    for d in range(bits.shape[1]):
        last = population - draws + d
        offset = (bits[:, d] * (last + 1)) >> 32
        met = (chosen[:, :d] == offset[:, None]).any(1)
        chosen[:, d] = torch.where(met, last, offset)
    return chosen


def _weighted(bits: Tensor, weights: Tensor, replace: bool) -> Tensor:
    """Offsets with probabilities as their weights, of those that are left."""
    chosen = torch.empty(bits.shape, dtype=torch.int64)
    for d in range(bits.shape[1]):
        sums = weights.cumsum(1)
        target = (bits[:, d].double() * 2.0**-32) * sums[:, -1]
        chosen[:, d] = (sums <= target[:, None]).sum(1).clamp(max=weights.shape[1] - 1)
        if not replace:
            weights = weights.scatter(1, chosen[:, d:d + 1], 0.0)
    return chosen
