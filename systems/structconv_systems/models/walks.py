"""Links predicted from typed walks in a knowledge graph (Andreoli 2019, section 2.2), with a weight for each walk."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from structconv.bases import Dense, Mixed
from structconv.derived import derived
from structconv.errors import ConfigError, StructureError
from structconv.mechanisms import Mechanism, Relations
from structconv.shapes import check_positive
from structconv.structures import KnowledgeGraph

__all__ = ["LARGEST", "WalkScores", "check_size"]

#: Numbers that the matrices of all walks may have.
LARGEST = 1 << 28


def check_size(relations: int, entities: int, length: int) -> None:
    """Raise `StructureError` if the dense matrices of all walks of up to `length` relations, K or K^2 times N^2
    numbers, are more than `LARGEST`."""
    numbers = relations ** length * entities ** 2
    if numbers > LARGEST:
        remedy = "Use a smaller graph" + (", or length=1." if length > 1 else ".")
        raise StructureError(
            "WalkScores", f"walks times entities squared must be at most {LARGEST:,}, {LARGEST * 4 / 2**30:,.3g} GiB",
            f"{relations:,}{f'^{length}' if length > 1 else ''} x {entities:,}^2, {numbers * 4 / 2**30:,.3g} GiB",
            remedy)


class WalkScores(nn.Module):
    """s_r(m, n) = sum_i theta_ir A_i[m, n] + sum_ij theta_ijr (A_i A_j)[m, n], over all relations i and j.

    `Relations(K, None).mix(K) + (Relations(K, None) @ Relations(K, None)).mix(K)`, a basis of scores that is read
    itself, without a Theta behind it; of the walks that were `learned` the second part is `Walks(["i.j", ...]).mix(K)`.
    A_i[m, n] is 1 where the triple (m, i, n) is known, A_i A_j counts the walks from m over i and then j to n; what is
    learned is by how much each walk speaks for each relation, whoever walks it: no number belongs to an entity.

    Args:
        relations: K, of the graphs that will come, inverses included.
        length: 2, or 1 for the first sum alone.

    Calling it: a graph `with_inverses()`, in which no triple comes twice, and queries (B, 2) of a head m and a relation
    r -> scores (B, N) of all tails. With `without`, the tail n of each query, they are the scores of the graph in which
    the triple (m, r, n) and its inverse are absent: what trains then says nothing of itself. Those of heads that are
    their own tail are as if the triple stayed. O(K^3 N^2) flops, O(K^2 N^2) memory.

    Raises:
        StructureError: in a call, a graph of another number of relations, or too large a one.

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
        self.singles = nn.Parameter(torch.zeros(count, count))
        self.pairs = nn.Parameter(torch.zeros(count, count, count)) if length == 2 else None

    def forward(self, graph: KnowledgeGraph, queries: Tensor, without: Tensor | None = None) -> Tensor:
        head, relation = queries.unbind(-1)
        y = self.scores(graph)[relation, head]
        if without is None:
            return y
        return y - self._of_itself(graph, head, relation, without) * (head != without).unsqueeze(-1)

    def scores(self, graph: KnowledgeGraph) -> Tensor:
        """All of them, (K, N, N)."""
        check_size(len(self.singles), graph.num_entities, 1 if self.pairs is None else 2)
        y = Mixed(Dense(self._relations(graph)), self.singles).dense()
        if self.pairs is None:
            return y
        return y + Mixed(Dense(self._walks(graph)), self.pairs.flatten(0, 1)).dense()

    def learned(self, graph: KnowledgeGraph) -> tuple[list[tuple[str, str]], Tensor]:
        """The walks (i, j) that have a weight for some relation, by name, and their weights (walks, K).

        `Walks(walks).mix(weights)` is the second sum.
        """
        if self.pairs is None:
            return [], self.singles.new_empty(0, len(self.singles))
        pairs = self.pairs.detach()
        chosen = (pairs != 0).any(-1)
        return [(graph.relations[i], graph.relations[j]) for i, j in chosen.nonzero().tolist()], pairs[chosen]

    def shrink(self, by: float) -> None:
        """Bring each weight of a walk of two relations nearer to 0, where it stays: a step of the proximal method for
        the sum of their sizes (Tibshirani 1996), by which training chooses the walks that count."""
        if self.pairs is not None:
            with torch.no_grad():
                self.pairs.copy_(F.softshrink(self.pairs, by))

    def _relations(self, graph: KnowledgeGraph) -> Tensor:
        """A_i, (K, N, N)."""
        count = self.singles.shape[0]
        if graph.num_relations != count:
            raise StructureError("WalkScores", f"the graph must have {count} relations", graph.num_relations)
        return self._dense(graph, Relations(count, None))

    def _walks(self, graph: KnowledgeGraph) -> Tensor:
        """A_i A_j, (K^2, N, N)."""
        count = self.singles.shape[0]
        return self._dense(graph, Relations(count, None) @ Relations(count, None))

    def _dense(self, graph: KnowledgeGraph, mechanism: Mechanism) -> Tensor:
        x = self.singles.detach().new_zeros(graph.num_entities, 1)
        return derived(graph, ("walks", repr(mechanism), x.dtype, x.device), lambda: mechanism.bound(1).basis(
            x, structure=graph).dense(x.dtype))

    def _of_itself(self, graph: KnowledgeGraph, head: Tensor, relation: Tensor, tail: Tensor) -> Tensor:
        """Return the part of the scores (B, N) of r from m that comes from the triples (m, r, n) and (n, r^-1, m), for
        m != n.

        Without them A_i becomes A_i - E_i, so that A_i A_j loses E_i A_j + A_i E_j - E_i E_j: the walks n -> over any j
        behind the triple, those over a loop i at m before it, and those over any other i from m to n and back.
        """
        a_KNN, count = self._relations(graph), graph.num_entities
        at_tail = self.singles.diagonal()[relation]
        if self.pairs is None:
            return F.one_hot(tail, count) * at_tail.unsqueeze(-1)
        inverse, pairs = _inverses(graph)[relation], self.pairs
        behind = Mixed(Dense(a_KNN), pairs.diagonal(dim1=0, dim2=2)).dense()[relation, tail]
        at_tail = at_tail + (pairs[:, relation, relation] * a_KNN[:, head, head]).sum(0)
        others = torch.arange(len(a_KNN), device=head.device).unsqueeze(-1) != relation
        at_head = (pairs[:, inverse, relation] * a_KNN[:, head, tail] * others).sum(0)
        return behind + F.one_hot(tail, count) * at_tail.unsqueeze(-1) + F.one_hot(head, count) * at_head.unsqueeze(-1)


def _inverses(graph: KnowledgeGraph) -> Tensor:
    """Return the number of each relation's inverse."""
    numbers = {name: number for number, name in enumerate(graph.relations)}
    turned = graph.inverse().relations
    if not set(turned) <= set(numbers):
        raise StructureError("WalkScores", "each relation must have its inverse", "others",
                             "Say graph.with_inverses().")
    return torch.tensor([numbers[name] for name in turned], device=graph.triples.device)
