"""Normalizations of scores within groups: sparsemax, entmax, top-k, hard attention, and your own functions.

A group is the pairs that share an output ("inputs") or an input ("outputs"). Each function maps (scores, keep, dim) to
weights of the same shape: `keep` is True for pairs that exist, and `dim` is the axis of a group. Absent scores are
passed as zeros, and their results are dropped. Along edges, groups of similar sizes are stacked, with at most twice as
many slots as edges.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from structconv.bases.base import Basis, value
from structconv.bases.entrywise import Unary, pattern_of_normalized
from structconv.bases.pairs import NORMALIZATIONS, Block, Edges, Pairs
from structconv.derived import derived
from structconv.errors import ConfigError, class_remedy
from structconv.primitives.functions import sum_dtype
from structconv.primitives.segments import masked_softmax
from structconv.shapes import check_not_traced, check_positive, check_same_shape
from structconv.structures.graph import Graph
from structconv.structures.supports import Support
from structconv.structures.values import FrozenValue, structure

__all__ = ["LogSoftmax", "NormalizedBy", "SinkSoftmax", "TopK", "register_normalization"]

Normalization = Callable[[Tensor, Tensor, int], Tensor]
_REGISTERED: dict[str, Normalization] = {}


def register_normalization(name: str, function: Normalization) -> None:
    """Let `scores.normalize(name)` mean a function of one's own, for bases and for mechanisms.

    Args:
        name: any name that is not taken.
        function: (scores, keep, dim) -> weights. `scores` (..., K, *, *) are finite, zero at absent pairs; `keep`,
            broadcast to them, tells which pairs exist; `dim` is the axis of the groups. It is made of differentiable
            operations, and reads no tensor that is trained.

    Raises:
        ConfigError: if the name is taken, or `function` is not a function.

    Example:

        >>> from structconv import Dense
        >>> from structconv.bases import register_normalization
        >>> register_normalization("share", lambda scores, keep, dim: scores / scores.sum(dim, keepdim=True))
        >>> Dense(torch.tensor([[[1.0], [3.0]]])).normalize("share").dense().flatten()
        tensor([0.2500, 0.7500])
    """
    if name in NORMALIZATIONS or name in _REGISTERED:
        raise ConfigError("register_normalization", "name must be new", repr(name))
    if not _is_function(function):
        raise ConfigError("register_normalization", "function must be one of (scores, keep, dim)", repr(function))
    _REGISTERED[name] = function


def _is_function(kind: Any) -> bool:
    return callable(kind) and not isinstance(kind, torch.nn.Module | type)


def normalization(kind: Any) -> Normalization:
    """Return the function of this name, or the function itself.

    Raises:
        ConfigError: the name is unknown, or the function is a module, whose parameters evaluation in blocks would miss.
    """
    if isinstance(kind, str) and kind in _REGISTERED:
        return _REGISTERED[kind]
    if not _is_function(kind):
        names = ", ".join(map(repr, (*NORMALIZATIONS, *_REGISTERED)))
        raise ConfigError("normalize", f"kind must be one of {names}, or a function of (scores, keep, dim)", repr(kind),
                          class_remedy(kind))
    return kind


# -- functions of a group -----------------------------------------------------------------------------------------

def sparsemax(scores: Tensor, keep: Tensor, dim: int) -> Tensor:
    """max(s - tau, 0) with the tau at which the weights sum to one (A. Martins and R. Astudillo 2016, eq. 2)."""
    shifted, ordered, present, rank = _ordered(scores, keep, dim)
    sums = ordered.cumsum(dim)
    tau = (sums - 1) / rank
    return (shifted - _at_support(tau, present & (ordered > tau), dim)).clamp(min=0)


def entmax(scores: Tensor, keep: Tensor, dim: int) -> Tensor:
    """max(s / 2 - tau, 0)^2 with the tau at which the weights sum to one: 1.5-entmax (Peters et al. 2019, eq. 12)."""
    shifted, ordered, present, rank = _ordered(scores / 2, keep, dim)
    mean = ordered.cumsum(dim) / rank
    spread = rank * (ordered.square().cumsum(dim) / rank - mean.square())
    room = (1 - spread) / rank
    tau = mean - torch.where(room > 0, torch.where(room > 0, room, 1).sqrt(), 0)
    return (shifted - _at_support(tau, present & (tau <= ordered), dim)).clamp(min=0).square()


def hard(scores: Tensor, keep: Tensor, dim: int) -> Tensor:
    """Weight 1 for the largest score of each group, the first of equal ones; no gradient reaches the scores."""
    first = scores.masked_fill(~keep, -torch.inf).argmax(dim, keepdim=True)
    return torch.zeros_like(scores).scatter(dim, first, 1)


@structure(eq=True)
class TopK(FrozenValue):
    """A softmax over the k largest scores of each group; the others get weight 0: `scores.normalize(TopK(8))`.

    Example:

        >>> from structconv import Dense
        >>> from structconv.bases import TopK
        >>> scores = Dense(torch.tensor([[[1.0], [2.0], [3.0]]]))
        >>> scores.normalize(TopK(2)).dense().flatten()
        tensor([0.0000, 0.2689, 0.7311])
    """

    k: int

    def __post_init__(self) -> None:
        check_positive("TopK", "k", self.k)

    def __call__(self, scores: Tensor, keep: Tensor, dim: int) -> Tensor:
        check_not_traced(scores.shape[dim])
        largest = scores.masked_fill(~keep, -torch.inf).topk(min(self.k, scores.shape[dim]), dim).indices
        chosen = torch.zeros_like(keep).scatter(dim, largest, True)
        return masked_softmax(scores, chosen & keep, dim)

    def __repr__(self) -> str:
        return f"TopK({self.k})"


def _ordered(scores: Tensor, keep: Tensor, dim: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The scores less their largest, -inf where absent; in descending order, zero where absent; which of these are
    there; and 1, 2, 3, ... along the group."""
    shifted = scores.masked_fill(~keep, -torch.inf)
    shifted = shifted - _finite(shifted.detach().amax(dim, keepdim=True))
    ordered = shifted.sort(dim, descending=True).values
    rank = torch.arange(1, scores.shape[dim] + 1, dtype=scores.dtype, device=scores.device)
    present = ordered > -torch.inf
    return shifted, torch.where(present, ordered, 0), present, rank.view(-1, *(1,) * (-1 - dim))


def _at_support(tau: Tensor, inside: Tensor, dim: int) -> Tensor:
    """tau of the last rank that is inside."""
    return tau.gather(dim, (inside.sum(dim, keepdim=True) - 1).clamp(min=0))


def _finite(top: Tensor) -> Tensor:
    return top.masked_fill(top == -torch.inf, 0)


# -- nodes --------------------------------------------------------------------------------------------------------

class GroupWise(Unary):
    """A node whose entries depend on all scores of their group."""

    over: str

    @property
    def normalizes(self) -> str:  # type: ignore[override]
        return self.over

    def of_group(self, scores: Tensor, keep: Tensor, dim: int) -> Tensor:
        """Normalize scores (..., K, *, *) in groups along `dim`, -1 or -2."""
        raise NotImplementedError

    def pattern(self) -> Graph | None:
        return pattern_of_normalized(self.child)

    def reach(self) -> Support | None:
        return self.child.support()

    def evaluate(self, pairs: Pairs) -> Tensor:
        """The entries at the pairs: exact zeros, without gradients, where a pair is absent. In the log domain a weight
        of zero is -inf, if its pair exists."""
        values = self.child.evaluate(pairs)
        if values.numel() == 0:
            return values
        scores = values.to(sum_dtype(values.dtype))
        keep, present = pairs.keep(self.child.support()), scores != -torch.inf
        present = present if keep is None else present & keep
        scores, present = torch.broadcast_tensors(torch.where(present, scores, 0), present)
        if isinstance(pairs, Block):
            result = self.of_group(scores, present, -2 if self.over == "inputs" else -1)
        else:
            assert isinstance(pairs, Edges)
            result = _along_edges(self, scores, present, pairs.graph)
        absent: Tensor | float = -torch.inf if self.has_scores else 0
        if self.has_scores and keep is not None:  # finite where a pair is absent: 0 times -inf is NaN in a gradient
            absent = torch.where(keep, -torch.inf, 0.0)
        return torch.where(present, result, absent).to(values.dtype)


class _Weights(GroupWise):
    """Weights, where absent pairs weigh zero."""

    has_scores = False

    def support(self) -> Support | None:
        return None


@value
class NormalizedBy(_Weights):
    """fn(scores, keep, dim) for each group, over inputs or outputs.

    Example:

        >>> from structconv import Dense
        >>> scores = Dense(torch.tensor([[[0.0], [0.0]]]))
        >>> scores.normalize(lambda s, keep, dim: keep / keep.sum(dim, keepdim=True)).dense().flatten()
        tensor([0.5000, 0.5000])
    """

    child: Basis
    fn: Normalization
    over: str

    def of_group(self, scores: Tensor, keep: Tensor, dim: int) -> Tensor:
        return check_same_shape("normalize", "the function", self.fn(scores, keep, dim), scores)

    def __repr__(self) -> str:
        return f"{self.child!r}.normalize({getattr(self.fn, '__name__', self.fn)}, over={self.over!r})"


@value
class SinkSoftmax(_Weights):
    """e^s_kmn / (e^sink_k + sum of e^s over the group): a softmax with one more score, whose weight is thrown away.

    `sink` is one number, or a tensor of one or of K.

    Example:

        >>> from structconv import Dense
        >>> scores = Dense(torch.tensor([[[0.0], [0.0]]]))
        >>> scores.softmax(sink=0.0).dense().flatten()        # 1 / (1 + 1 + 1)
        tensor([0.3333, 0.3333])
    """

    child: Basis
    sink: float | Tensor
    over: str

    def of_group(self, scores: Tensor, keep: Tensor, dim: int) -> Tensor:
        sink = self.sink.to(scores.dtype) if isinstance(self.sink, Tensor) else scores.new_full((1,), self.sink)
        sink = sink.reshape(-1, 1, 1)
        top = torch.maximum(scores.detach().masked_fill(~keep, -torch.inf).amax(dim, keepdim=True), sink.detach())
        powers = torch.where(keep, torch.exp(scores - top), 0)
        return powers / (powers.sum(dim, keepdim=True) + torch.exp(sink - top))

    def __repr__(self) -> str:
        sink = self.sink if isinstance(self.sink, float) else "sink"
        return f"{self.child!r}.softmax(over={self.over!r}, sink={sink})"


@value
class LogSoftmax(GroupWise):
    """s_kmn - log(sum of e^s over the group): scores in the log domain, where absent pairs are -inf.

    Example:

        >>> from structconv import Dense
        >>> scores = Dense(torch.tensor([[[0.0], [0.0]]]))
        >>> scores.log_softmax().dense().flatten()
        tensor([-0.6931, -0.6931])
    """

    child: Basis
    over: str
    _shown = "{0.child!r}.log_softmax(over={0.over!r})"

    def of_group(self, scores: Tensor, keep: Tensor, dim: int) -> Tensor:
        top = _finite(scores.detach().masked_fill(~keep, -torch.inf).amax(dim, keepdim=True))
        total = torch.where(keep, torch.exp(scores - top), 0).sum(dim, keepdim=True)
        return scores - top - torch.where(total > 0, total, 1).log()


# -- groups of a list of edges ------------------------------------------------------------------------------------

class _Slots(NamedTuple):
    """Stacked groups of similar sizes: the edge of each slot (G, W), which slots are used, and the groups' numbers."""

    edges: Tensor
    filled: Tensor
    positions: Tensor


def _along_edges(node: GroupWise, scores: Tensor, keep: Tensor, graph: Graph) -> Tensor:
    if graph.edge_index.is_meta:  # of unknown groups the shapes are known
        return node.of_group(scores.unsqueeze(-2), keep.unsqueeze(-2), -1).squeeze(-2)
    layout, order = derived(graph, ("groups", node.over), lambda: _laid_out(graph, node.over))
    result = []
    for slots in layout:
        there = _at(keep, slots.edges) & slots.filled
        weights = node.of_group(torch.where(there, _at(scores, slots.edges), 0), there, -1)
        result.append(weights.flatten(-2).index_select(-1, slots.positions))
    return torch.cat(result, -1).index_select(-1, order)


def _at(values: Tensor, edges: Tensor) -> Tensor:
    return values.index_select(-1, edges.flatten()).unflatten(-1, edges.shape)


def _laid_out(graph: Graph, over: str) -> tuple[tuple[_Slots, ...], Tensor]:
    """The groups, stacked by the power of two that holds their sizes, and the filled slot of each edge."""
    index, count = ((graph.target, graph.num_outputs) if over == "inputs" else (graph.source, graph.num_inputs))
    sizes = torch.bincount(index.long(), minlength=count)
    by_group, start = index.argsort(stable=True), sizes.cumsum(0) - sizes
    layout, width, least = [], 1, 0
    while least < int(sizes.max()):
        groups = ((sizes > least) & (sizes <= width)).nonzero().squeeze(-1)
        number = torch.arange(width, device=index.device)
        filled = number < sizes[groups].unsqueeze(-1)
        edges = by_group[torch.where(filled, start[groups].unsqueeze(-1) + number, 0)]
        layout.append(_Slots(edges, filled, filled.flatten().nonzero().squeeze(-1)))
        least, width = width, 2 * width
    order = torch.cat([slots.edges[slots.filled] for slots in layout]).argsort()
    return tuple(layout), order


for _name, _function in {"sparsemax": sparsemax, "entmax": entmax, "hard": hard}.items():
    register_normalization(_name, _function)
