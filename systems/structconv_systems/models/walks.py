"""Links predicted from typed walks in a knowledge graph (Andreoli 2019, section 2.2), with a weight for each walk."""

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from structconv import ConfigError, Graph, KnowledgeGraph, StructureError
from structconv.bases import Sparse
from structconv.derived import derived
from structconv.shapes import check_positive
from structconv_systems.ranking import numbers_between

__all__ = ["LARGEST", "WalkScores", "check_size", "entries"]

#: The greatest number of walks of two relations, and of their weights; each takes 16 bytes, a weight with Adam.
LARGEST = 1 << 26
#: The greatest size of the table of all scores, (N, N, K).
_TABLE = 1 << 25


def check_size(graph: KnowledgeGraph) -> None:
    """Raise `StructureError` if a graph has more than `LARGEST` walks of two relations, or weights of them."""
    ends = graph.triples[:, 2].bincount(minlength=graph.num_entities)
    walks = int((ends * graph.triples[:, 0].bincount(minlength=graph.num_entities)).sum())
    for name, number, remedy in (("walks of two relations", walks, "a smaller graph"),
                                 ("weights of walks of two relations", graph.num_relations ** 3, "fewer relations")):
        if number > LARGEST:
            raise StructureError("WalkScores", f"{name} must be at most {LARGEST:,}, {LARGEST * 16 / 2**30:.3g} GiB",
                                 f"{number:,}, {number * 16 / 2**30:,.3g} GiB", f"Use {remedy}, or length=1.")


class _Walks(NamedTuple):
    """Walks sorted by ``ends``, N times the first entity plus the last; ``kind`` is i of a walk over i, K i + j over i
    and j."""

    ends: Tensor
    kind: Tensor

    def between(self, low: Tensor, high: Tensor) -> tuple[Tensor, Tensor]:
        """Return the walks whose ends are from low[b] to high[b] - 1, and the b of each."""
        return numbers_between(torch.searchsorted(self.ends, low), torch.searchsorted(self.ends, high))

    def table(self, kinds: int, entities: int) -> Sparse:
        """Return the matrix (kinds, N N) of the numbers of walks from each head to each tail."""
        return Sparse(Graph(torch.stack([self.kind, self.ends]), num_inputs=kinds, num_outputs=entities * entities))


def _walks(graph: KnowledgeGraph, length: int) -> _Walks:
    """List the walks of one relation or two, once for a graph."""
    def listed() -> _Walks:
        head, kind, tail = graph.triples.unbind(-1)
        if length == 2:
            check_size(graph)
            starts, order = head.sort()
            tail = tail.contiguous()
            place, row = numbers_between(torch.searchsorted(starts, tail), torch.searchsorted(starts, tail, right=True))
            row = order[row]
            head, kind, tail = head[place], kind[place] * graph.num_relations + kind[row], tail[row]
        ends, order = (head * graph.num_entities + tail).sort()
        return _Walks(ends, kind[order])

    return derived(graph, ("listed walks", length), listed)


def _in_table(graph: KnowledgeGraph) -> bool:
    """Return True if the scores of all pairs are few enough for a table."""
    return graph.num_entities ** 2 * graph.num_relations <= _TABLE


def entries(graph: KnowledgeGraph, heads: Tensor, length: int = 2) -> Tensor:
    """Return how many numbers the scores from each head take, (B,): N and its walks, or N if there is a table."""
    count = graph.num_entities
    if _in_table(graph):
        return torch.full_like(heads, count)
    first, behind = (torch.searchsorted(_walks(graph, length).ends, (heads + place) * count) for place in (0, 1))
    return count + behind - first


class WalkScores(nn.Module):
    """s_r(m, n) = sum_i theta_ir A_i[m, n] + sum_ij theta_ijr (A_i A_j)[m, n], over all relations i and j.

    `Relations(K, None).mix(K) + (Relations(K, None) @ Relations(K, None)).mix(K)`, a basis of scores without a Theta;
    with the `learned` walks the second part is `Walks(["i.j", ...]).mix(K)`. A_i[m, n] is 1 if the triple (m, i, n) is
    known, A_i A_j counts the walks from m over i and then j to n. The model learns how much each walk supports each
    relation; no number belongs to an entity.

    Args:
        relations: K, of the graphs that will come, inverses included.
        length: 2, or 1 for the first sum alone.

    Calling it: a graph `with_inverses()` without duplicate triples, and queries (B, 2) of a head m and a relation r ->
    scores (B, N) of all tails. With `without`, the tail n of each query, the scores are those of the graph without the
    triple (m, r, n) and its inverse, so that a training triple does not support itself; if m = n, the triple stays.
    With W walks of two relations O(W K) flops and O(W + N^2 K) memory, or in a large graph O(B N) and the walks from
    the heads.

    Raises:
        StructureError: in a call, the graph has another number of relations, or is too large.

    Example:

        >>> from structconv import KnowledgeGraph
        >>> from structconv_systems.models.walks import WalkScores
        >>> graph = KnowledgeGraph(torch.tensor([[0, 0, 1], [1, 1, 2]]), 3, ("parent", "sibling"))
        >>> model = WalkScores(relations=2, length=2)
        >>> model(graph, torch.tensor([[0, 1]])).shape     # scores of all tails of (entity 0, "sibling", ?)
        torch.Size([1, 3])
    """

    def __init__(self, relations: int, *, length: int = 2) -> None:
        super().__init__()
        if length not in (1, 2):
            raise ConfigError("WalkScores", "length must be 1 or 2", length)
        count = check_positive("WalkScores", "relations", relations)
        self.length = length
        self.singles = nn.Parameter(torch.zeros(count, count))
        self.pairs = nn.Parameter(torch.zeros(count, count, count)) if length == 2 else None

    def forward(self, graph: KnowledgeGraph, queries: Tensor, without: Tensor | None = None) -> Tensor:
        count = len(self.singles)
        if graph.num_relations != count:
            raise StructureError("WalkScores", f"the graph must have {count} relations", graph.num_relations)
        head, relation = queries.unbind(-1)
        y = self._scores(graph, 1, self.singles, head, relation)
        if self.pairs is not None:
            y = y + self._scores(graph, 2, self.pairs.flatten(0, 1), head, relation)
        if without is None:
            return y
        return y - self._of_itself(graph, head, relation, without) * (head != without).unsqueeze(-1)

    def learned(self, graph: KnowledgeGraph) -> tuple[list[tuple[str, str]], Tensor]:
        """Return the walks (i, j) with a weight for some relation, by name, and their weights (walks, K):
        `Walks(walks).mix(weights)` is the second sum."""
        if self.pairs is None:
            return [], self.singles.new_empty(0, len(self.singles))
        pairs = self.pairs.detach()
        chosen = (pairs != 0).any(-1)
        return [(graph.relations[i], graph.relations[j]) for i, j in chosen.nonzero().tolist()], pairs[chosen]

    def shrink(self, by: float) -> None:
        """Move each weight of a walk of two relations towards 0: a proximal step for the sum of their sizes (Tibshirani
        1996), which selects walks."""
        if self.pairs is not None:
            with torch.no_grad():
                self.pairs.copy_(F.softshrink(self.pairs, by))

    def _scores(self, graph: KnowledgeGraph, length: int, weights: Tensor, head: Tensor, relation: Tensor) -> Tensor:
        """Sum the weights (kinds, K) of the walks from each head, (B, N)."""
        walks, (kinds, count), entities = _walks(graph, length), weights.shape, graph.num_entities
        if _in_table(graph):
            every = derived(graph, ("walks", length), lambda: walks.table(kinds, entities))
            return every.analysis(weights)[0].view(entities, entities, count)[head, :, relation]
        place, row = walks.between(head * entities, (head + 1) * entities)
        y = weights.new_zeros(len(head) * entities).index_add(
            0, place * entities + walks.ends[row] % entities, weights[walks.kind[row], relation[place]])
        return y.view(len(head), entities)

    def _between(self, graph: KnowledgeGraph, weights: Tensor, head: Tensor, tail: Tensor, relation: Tensor) -> Tensor:
        """Sum the weights (K, K) of the triples from each head to its tail, (B,)."""
        walks, ends = _walks(graph, 1), head * graph.num_entities + tail
        place, row = walks.between(ends, ends + 1)
        return weights.new_zeros(len(head)).index_add(0, place, weights[walks.kind[row], relation[place]])

    def _of_itself(self, graph: KnowledgeGraph, head: Tensor, relation: Tensor, tail: Tensor) -> Tensor:
        """Return the part of the scores (B, N) of r from m that comes from the triples (m, r, n) and (n, r^-1, m), m !=
        n.

        Without them A_i becomes A_i - E_i, so that A_i A_j loses E_i A_j + A_i E_j - E_i E_j: the walks over any j
        after the triple, those over a loop i at m before it, and those over any other i from m to n and back."""
        at_tail = self.singles.diagonal()[relation]
        if self.pairs is None:
            return _at(at_tail.new_zeros(len(tail), graph.num_entities), tail, at_tail)
        inverse, numbers = _inverses(graph), torch.arange(len(self.pairs), device=head.device)
        behind = self._scores(graph, 1, self.pairs.diagonal(dim1=0, dim2=2), tail, relation)
        before = self.pairs.diagonal(dim1=1, dim2=2)
        at_tail = at_tail + self._between(graph, before, head, head, relation)
        back = self.pairs[:, inverse, numbers] * (numbers.unsqueeze(-1) != numbers)
        at_head = self._between(graph, back, head, tail, relation)
        return _at(_at(behind, tail, at_tail), head, at_head)


def _at(scores: Tensor, place: Tensor, added: Tensor) -> Tensor:
    return scores.scatter_add(1, place.unsqueeze(-1), added.unsqueeze(-1))


def _inverses(graph: KnowledgeGraph) -> Tensor:
    """Return the number of each relation's inverse."""
    numbers = {name: number for number, name in enumerate(graph.relations)}
    turned = graph.inverse().relations
    if not set(turned) <= set(numbers):
        raise StructureError("WalkScores", "each relation must have its inverse", "others",
                             "Say graph.with_inverses().")
    return torch.tensor([numbers[name] for name in turned], device=graph.triples.device)
