"""`Support`: the pairs (m, n) that exist, as a predicate and, if they are few, as a list of edges.

A support is a mask of the pairs to keep. Supports combine with `&`, `|` and `~`, transpose, and never build an (M, N)
table unless they were made from one. They are values compared by identity, and inputs of compiled and exported
programs. This file holds what all of them share and their combinations; `supports.py` has the supports themselves.
"""

from __future__ import annotations

import abc
import functools
from collections.abc import Callable
from typing import Any, ClassVar, Self, cast

import torch
from torch import Tensor

from structconv.derived import derived
from structconv.errors import StructureError
from structconv.shapes import broadcast
from structconv.structures.graph import Graph
from structconv.structures.values import Structure, map_tensors, structure

__all__ = ["And", "Device", "Not", "Or", "Support", "Transposed", "filtered", "inverted", "joined", "joined_by_and",
           "listed"]

Device = torch.device | str | None


class Support(Structure, abc.ABC):
    """A set of pairs (m, n) of an input and an output: the base class of masks.

    Example:

        >>> from structconv.structures import Support
        >>> from structconv.structures.values import structure
        >>> @structure()
        ... class Every(Support):
        ...     step: int
        ...     def _contains(self, m, n):
        ...         return (m - n) % self.step == 0
        >>> Every(2).contains(torch.arange(3)[:, None], torch.arange(3))
        tensor([[ True, False,  True],
                [False,  True, False],
                [ True, False,  True]])
    """

    @property
    def num_inputs(self) -> int | None:
        """M where the support fixes it, else `None`."""
        return None

    @property
    def num_outputs(self) -> int | None:
        """N where the support fixes it, else `None`."""
        return None

    @property
    def samples(self) -> Any:
        """The `Samples` of a batch outside which no pair exists, `None` where it is not for one."""
        return None

    def contains(self, m: Tensor, n: Tensor) -> Tensor:
        """Return booleans (..., *pairs): True where the pair exists.

        `m` and `n` are integer tensors that broadcast to the shape `pairs`: (M, 1) with (1, N), or (E,) with (E,).
        Batch dimensions of the support, if any, lead; there is no axis of heads. Two scalars are one pair.
        """
        if m.dim() == n.dim() == 0:
            return self._contains(m, n)
        pairs = torch.broadcast_shapes(m.shape, n.shape)
        m, n = m[(None,) * (len(pairs) - m.dim())], n[(None,) * (len(pairs) - n.dim())]
        keep = self._contains(m, n)
        if not isinstance(keep, Tensor) or keep.dtype != torch.bool:
            raise StructureError(type(self).__name__, "_contains must return a tensor of booleans",
                                 keep.dtype if isinstance(keep, Tensor) else type(keep).__name__)
        return keep.expand(keep.shape[:keep.dim() - len(pairs)] + pairs)

    @abc.abstractmethod
    def _contains(self, m: Tensor, n: Tensor) -> Tensor:
        """`contains` for m and n of equal rank; the result only has to broadcast to the pairs."""

    def edges(self, num_inputs: int, num_outputs: int, device: Device = None) -> Graph | None:
        """Exactly the pairs that exist, listed; `None` where they are not few, or differ along a batch.

        Never builds an (M, N) table: memory is that of the list. `None` also under `torch.compile` where the number
        of pairs depends on values.
        """
        return None

    def candidates(self, num_inputs: int, num_outputs: int, device: Device = None) -> Graph | None:
        """A list outside which no pair exists; `contains` tells which of its pairs do.

        There where `edges` is not: a window and the padding of a batch have candidates, the pairs of the window, also
        under `torch.compile`.
        """
        return self.edges(num_inputs, num_outputs, device)

    def edge_bound(self, num_inputs: int, num_outputs: int) -> int | None:
        """Return an upper bound of the length of `candidates`, without building it; `None` if there is no list."""
        return None

    def listing(self, num_inputs: int, num_outputs: int, device: Device = None) -> tuple[Graph | None, bool]:
        """`edges` if there are any, else `candidates`, and whether these are exactly the pairs; remembered."""
        exact = derived(self, ("edges", num_inputs, num_outputs, device),
                        lambda: self._checked_edges(num_inputs, num_outputs, device))
        return (exact, True) if exact is not None else (self.candidates(num_inputs, num_outputs, device), False)

    def _checked_edges(self, num_inputs: int, num_outputs: int, device: Device) -> Graph | None:
        graph: Any = self.edges(num_inputs, num_outputs, device)
        if graph is None or isinstance(graph, Graph):
            return graph
        raise StructureError(type(self).__name__, "edges must return a Graph, or None", type(graph).__name__)

    @property
    def listed(self) -> bool:
        """True if `edges` returns a list, judged only by types and sizes; by default if the class defines `edges` and
        `edge_bound`."""
        own = type(self)
        return own.edges is not Support.edges and own.edge_bound is not Support.edge_bound

    @property
    def repeats(self) -> bool:
        """True if a list of pairs may hold a pair several times, as the duplicate edges of a graph."""
        return False

    @property
    def batch_shape(self) -> tuple[int, ...]:
        """Leading dimensions: empty where the same pairs exist in the whole batch."""
        return ()

    #: True if `visible_inputs` should be called.
    may_mask_inputs: bool = True

    def visible_inputs(self) -> Tensor | None:
        """Return booleans (..., M), True for inputs in a pair, if they are cheap to compute; else `None`."""
        return None

    def restricted(self, to: Any) -> list[Support] | None:
        """The supports that the pairs of some samples of a batch (`Restriction`) must all be in, by their positions in
        these samples; an empty list for all pairs, `None` if this is unknown."""
        return None

    def transpose(self) -> Support:
        """The pairs (n, m): swap inputs and outputs."""
        return Transposed(self)

    def check(self, owner: str, num_inputs: int, num_outputs: int | None) -> None:
        """Raise `StructureError` where the support was made for another M, or for another N if that is known."""
        for letter, own, size in (("M", self.num_inputs, num_inputs), ("N", self.num_outputs, num_outputs)):
            if own is not None and size is not None and own != size:
                remedy = "If the outputs are other entries than x, pass them as z: layer(x, z=z)."
                raise StructureError(owner, f"the mask {self!r} must have length {letter}={size}", own,
                                     remedy if letter == "N" else "")

    def to(self, device: Device) -> Self:
        """Return the support on another device."""
        return cast(Self, map_tensors(self, lambda t: t.to(device)))

    #: The support of the edges of a graph.
    _of_graph: ClassVar[Callable[[Graph], Support]]

    def __and__(self, other: Support | Graph) -> Support:
        other = Support._of_graph(other) if isinstance(other, Graph) else other
        return And(self, other) if isinstance(other, Support) else NotImplemented

    def __or__(self, other: Support | Graph) -> Support:
        other = Support._of_graph(other) if isinstance(other, Graph) else other
        return Or(self, other) if isinstance(other, Support) else NotImplemented

    def __rand__(self, other: Graph) -> Support:
        return And(Support._of_graph(other), self) if isinstance(other, Graph) else NotImplemented

    def __ror__(self, other: Graph) -> Support:
        return Or(Support._of_graph(other), self) if isinstance(other, Graph) else NotImplemented

    def __invert__(self) -> Support:
        return inverted(self)


class _Pair(Support):
    """Two supports combined; batch dimensions broadcast, as those of tensors do."""

    first: Support
    second: Support

    @property
    def num_inputs(self) -> int | None:
        return self.second.num_inputs if self.first.num_inputs is None else self.first.num_inputs

    @property
    def num_outputs(self) -> int | None:
        return self.second.num_outputs if self.first.num_outputs is None else self.first.num_outputs

    @property
    def batch_shape(self) -> tuple[int, ...]:
        return broadcast(self.first.batch_shape, self.second.batch_shape)

    @property
    def repeats(self) -> bool:
        return self.first.repeats or self.second.repeats

    def check(self, owner: str, num_inputs: int, num_outputs: int | None) -> None:
        self.first.check(owner, num_inputs, num_outputs)
        self.second.check(owner, num_inputs, num_outputs)

    def transpose(self) -> Support:
        return type(self)(self.first.transpose(), self.second.transpose())  # type: ignore[call-arg]


@structure()
class And(_Pair):
    """The pairs in both: `first & second`. Sparse where either is: one list, filtered by the other.

    That of a graph, whose duplicate edges stay, whatever the sizes are; of two graphs the first; else the shorter list.
    """

    first: Support
    second: Support

    def _contains(self, m: Tensor, n: Tensor) -> Tensor:
        return self.first._contains(m, n) & self.second._contains(m, n)

    @property
    def samples(self) -> Any:
        return self.second.samples if self.first.samples is None else self.first.samples

    def restricted(self, to: Any) -> list[Support] | None:
        first, second = self.first.restricted(to), self.second.restricted(to)
        return None if first is None or second is None else [*first, *second]

    def visible_inputs(self) -> Tensor | None:
        kept = [k for k in (self.first.visible_inputs(), self.second.visible_inputs()) if k is not None]
        return kept[0] & kept[-1] if kept else None

    def edges(self, num_inputs: int, num_outputs: int, device: Device = None) -> Graph | None:
        if torch.compiler.is_compiling() or self.batch_shape:
            return None
        graph = self.candidates(num_inputs, num_outputs, device)
        return None if graph is None else filtered(graph, self.contains(graph.source, graph.target))

    def candidates(self, num_inputs: int, num_outputs: int, device: Device = None) -> Graph | None:
        for side in self._by_list(num_inputs, num_outputs):
            graph = side.listing(num_inputs, num_outputs, device)[0]
            if graph is not None:
                return graph
        return None

    @property
    def listed(self) -> bool:
        some = self.first.edge_bound(0, 0) is not None or self.second.edge_bound(0, 0) is not None
        return some and not self.batch_shape and not torch.compiler.is_compiling()

    def edge_bound(self, num_inputs: int, num_outputs: int) -> int | None:
        bounds = (side.edge_bound(num_inputs, num_outputs) for side in self._by_list(num_inputs, num_outputs))
        return next((bound for bound in bounds if bound is not None), None)

    def _by_list(self, num_inputs: int, num_outputs: int) -> tuple[Support, Support]:
        """The two supports, first the one whose list is filtered."""
        swapped = not self.first.repeats
        if swapped and not self.second.repeats:
            first, second = (side.edge_bound(num_inputs, num_outputs) for side in (self.first, self.second))
            swapped = second is not None and (first is None or second < first)
        return (self.second, self.first) if swapped else (self.first, self.second)

    def __repr__(self) -> str:
        return f"({self.first!r} & {self.second!r})"


def joined_by_and(support: Support | None) -> list[Support]:
    """Return the supports that `&` joined, or the support itself in a list; an empty list for `None`."""
    if isinstance(support, And):
        return [*joined_by_and(support.first), *joined_by_and(support.second)]
    return [] if support is None else [support]


def joined(supports: list[Support]) -> Support:
    """Join supports by `&`; the inverse of `joined_by_and`."""
    return functools.reduce(And, supports)


@structure()
class Or(_Pair):
    """The pairs in either: `first | second`. Sparse where both are."""

    first: Support
    second: Support

    def _contains(self, m: Tensor, n: Tensor) -> Tensor:
        return self.first._contains(m, n) | self.second._contains(m, n)

    def edges(self, num_inputs: int, num_outputs: int, device: Device = None) -> Graph | None:
        if torch.compiler.is_compiling() or self.edge_bound(num_inputs, num_outputs) is None:
            return None
        first = self.first.edges(num_inputs, num_outputs, device)
        second = self.second.edges(num_inputs, num_outputs, device)
        if first is None or second is None:
            return None
        new = filtered(second, ~self.first.contains(second.source, second.target))
        return listed(tuple(torch.cat([first.edge_index, new.edge_index], dim=1)), num_inputs, num_outputs)

    def restricted(self, to: Any) -> list[Support] | None:
        first, second = self.first.restricted(to), self.second.restricted(to)
        if first is None or second is None:
            return None
        return [Or(joined(first), joined(second))] if first and second else []

    @property
    def listed(self) -> bool:
        return self.first.listed and self.second.listed and not torch.compiler.is_compiling()

    def edge_bound(self, num_inputs: int, num_outputs: int) -> int | None:
        first, second = (side.edge_bound(num_inputs, num_outputs) for side in (self.first, self.second))
        return None if first is None or second is None else first + second

    def __repr__(self) -> str:
        return f"({self.first!r} | {self.second!r})"


@structure()
class Not(Support):
    """The pairs that are not in `kept`: `~kept`, for `drop=` masks. Never listed."""

    kept: Support

    @property
    def num_inputs(self) -> int | None:
        return self.kept.num_inputs

    @property
    def num_outputs(self) -> int | None:
        return self.kept.num_outputs

    @property
    def batch_shape(self) -> tuple[int, ...]:
        return self.kept.batch_shape

    def _contains(self, m: Tensor, n: Tensor) -> Tensor:
        return ~self.kept._contains(m, n)

    def check(self, owner: str, num_inputs: int, num_outputs: int | None) -> None:
        self.kept.check(owner, num_inputs, num_outputs)

    def restricted(self, to: Any) -> list[Support] | None:
        kept = self.kept.restricted(to)
        return [Not(joined(kept))] if kept else None

    def transpose(self) -> Support:
        return Not(self.kept.transpose())

    def __repr__(self) -> str:
        return f"~{self.kept!r}"


def inverted(support: Support) -> Support:
    """Return `~support`, also in compiled programs: torch does not trace the operator `~` of a Python class."""
    return support.kept if isinstance(support, Not) else Not(support)


@structure()
class Transposed(Support):
    """The pairs of `of` with inputs and outputs exchanged: for supports that have no simpler transpose."""

    of: Support

    @property
    def num_inputs(self) -> int | None:
        return self.of.num_outputs

    @property
    def num_outputs(self) -> int | None:
        return self.of.num_inputs

    @property
    def samples(self) -> Any:
        samples = self.of.samples
        return None if samples is None else samples.transpose()

    @property
    def listed(self) -> bool:
        return self.of.listed

    @property
    def repeats(self) -> bool:
        return self.of.repeats

    @property
    def batch_shape(self) -> tuple[int, ...]:
        return self.of.batch_shape

    def _contains(self, m: Tensor, n: Tensor) -> Tensor:
        return self.of._contains(n, m)

    def edges(self, num_inputs: int, num_outputs: int, device: Device = None) -> Graph | None:
        graph = self.of.edges(num_outputs, num_inputs, device)
        return None if graph is None else graph.reversed()

    def candidates(self, num_inputs: int, num_outputs: int, device: Device = None) -> Graph | None:
        graph = self.of.candidates(num_outputs, num_inputs, device)
        return None if graph is None else graph.reversed()

    def edge_bound(self, num_inputs: int, num_outputs: int) -> int | None:
        return self.of.edge_bound(num_outputs, num_inputs)

    def restricted(self, to: Any) -> list[Support] | None:
        turned = self.of.restricted(to.turned())
        return None if turned is None else [support.transpose() for support in turned]

    def transpose(self) -> Support:
        return self.of

    def __repr__(self) -> str:
        return f"{self.of!r}.transpose()"


def listed(pairs: tuple[Tensor, ...], num_inputs: int, num_outputs: int) -> Graph:
    """Return the graph of the pairs (m, n), two tensors (E,)."""
    return Graph(torch.stack(pairs), num_inputs=num_inputs, num_outputs=num_outputs)


def filtered(graph: Graph, keep: Tensor) -> Graph:
    """Return the pairs of `graph` where `keep` (E,) is true, without weights or attributes; on the meta device, which
    holds no values, all pairs."""
    kept = graph.edge_index if keep.is_meta else graph.edge_index[:, keep]
    return Graph(kept, num_inputs=graph.num_inputs, num_outputs=graph.num_outputs)
