"""Code shared by the recipes that predict links: both queries of each triple, the loss, and filtered ranks."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal, Self

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from structconv.errors import DataError
from structconv.structures import KnowledgeGraph
from structconv_systems.data.knowledge import Triples, read_triples
from structconv_systems.ranking import KnownAnswers, filtered_ranks, ranking_figures
from structconv_systems.recipes.base import BatchTask, Parts, Windows
from structconv_systems.recipes.options.knowledge import Links

__all__ = ["COLUMNS", "Facts", "LinkTask", "consecutive"]

COLUMNS = {"test_mrr": "MRR, %", "test_hits_1": "Hits@1, %", "test_hits_3": "Hits@3, %", "test_hits_10": "Hits@10, %"}
#: Questions ranked at a time, at most, and entries of scores computed at a time.
_MANY, _ENTRIES = 512, 1 << 22


@dataclass(frozen=True, kw_only=True, eq=False)
class Facts:
    """A knowledge graph and its questions: (m, r, ?) for n, and (n, r^-1, ?) for m.

    Attributes:
        graph: the training triples, each once, and their inverses.
        parts: (T, 3) of each part; those of ``train`` are the graph's without inverses.
        learned: answers in training.
        known: right answers that the ranks of ``val`` and ``test`` leave out: of training and validation, and of all
            parts.
    """

    graph: KnowledgeGraph
    parts: Parts[Tensor]
    learned: KnownAnswers
    known: Parts[KnownAnswers]

    @classmethod
    def read(cls, recipe: Links, *, own_entities: bool) -> Self:
        """Read the folder or archive of the recipe.

        The test triples come from `recipe.test` if it names another one: of the entities of training with
        `own_entities`, else in the graph of its own training triples.

        Raises:
            DataError: as of `read_triples`, or a name there is unknown here.
        """
        unseen: Literal["error", "admit"] = "admit" if recipe.unseen == "admit" else "error"
        data, known = read_triples(recipe.path(recipe.triples), unseen=unseen), torch.empty(0, 3, dtype=torch.int64)
        if recipe.test:
            path = recipe.path(recipe.test)
            other = read_triples(path, unseen=unseen)
            relations = _numbers_in(path, "relation", other.relations, data.relations)
            entities = torch.arange(len(other.entities))
            if own_entities:
                entities = _numbers_in(path, "entity", other.entities, data.entities)
            parts = {part: torch.stack([entities[rows[:, 0]], relations[rows[:, 1]], entities[rows[:, 2]]], 1)
                     for part, rows in other.parts.items()}
            known = torch.cat(list(parts.values()))
            data = (replace(data, parts={**data.parts, "test": parts["test"]}) if own_entities else
                    Triples(entities=other.entities, relations=data.relations, parts=parts))
        train = data.parts["train"].unique(dim=0)
        twice = next((name for name in data.relations if f"{name}^-1" in data.relations), None)
        if twice is not None:
            raise DataError(recipe.path(recipe.triples), f"relations without inverses of their own, as {twice} has",
                            f"{twice}^-1", remedy="They are added here.")
        graph = data.graph(train).with_inverses()
        sizes = graph.num_entities, graph.num_relations
        right = {"val": [train, data.parts["valid"]], "test": [known, *data.parts.values()]}
        return cls(graph=graph, parts=Parts({**data.parts, "train": train}, of="triples"),
                   learned=KnownAnswers(both_ways(train, graph), *sizes),
                   known=Parts({part: KnownAnswers(both_ways(torch.cat(triples), graph), *sizes)
                                for part, triples in right.items()}))

    @torch.no_grad()
    def figures(self, scores: Callable[[Tensor], Tensor], entries: Callable[[Tensor], Tensor], part: str
                ) -> dict[str, float]:
        """Return MRR and hits of ``val`` or ``test``, in percent, by scores (B, N) of questions (B, 3), which take
        `entries` (B,) numbers for heads (B,)."""
        questions, known = both_ways(self.parts["valid" if part == "val" else part], self.graph), self.known[part]
        ranks = [filtered_ranks(scores(some), some[:, 2], known(some)) for many in questions.split(_MANY)
                 for some in many.split(consecutive(entries(many[:, 0])))]
        return ranking_figures(torch.cat(ranks), part)


def both_ways(triples: Tensor, graph: KnowledgeGraph) -> Tensor:
    """Return the triples, then their inverses, (2 T, 3), numbered as in a graph `with_inverses()`."""
    head, relation, tail = triples.unbind(-1)
    turned = torch.stack([tail, relation + graph.num_relations // 2, head], -1)
    return torch.cat([triples, turned])


def consecutive(entries: Tensor) -> list[int]:
    """Return the sizes of consecutive parts of the questions: at most `_ENTRIES` numbers of scores, or one question."""
    counts, total = [0], 0
    for size in entries.tolist():
        if counts[-1] and total + size > _ENTRIES:
            counts, total = [*counts, 0], 0
        counts[-1], total = counts[-1] + 1, total + size
    return counts


def _numbers_in(path: object, kind: str, names: Sequence[str], known: Sequence[str]) -> Tensor:
    """Return the number of each name in `known`."""
    numbers = {name: number for number, name in enumerate(known)}
    unknown = next((name for name in names if name not in numbers), None)
    if unknown is not None:
        raise DataError(path, f"names of {kind} that the training has", repr(unknown))
    return torch.tensor([numbers[name] for name in names])


class LinkTask(BatchTask):
    """Cross-entropy of the tail among all entities that are no other known answer, for both directions."""

    metric, higher = "val_mrr", True

    def __init__(self, recipe: Links, facts: Facts, model: nn.Module, seed: int) -> None:
        self.facts, self.parts = facts, facts.parts
        super().__init__(model, recipe, Windows(len(facts.parts["train"]), size=recipe.batch_size, seed=seed))

    def loss(self, samples: Sequence[int]) -> tuple[Tensor, float]:
        questions = both_ways(self.facts.parts["train"][list(samples)], self.facts.graph)
        answer = questions[:, 2:]
        others = self.facts.learned(questions).scatter(-1, answer, False)
        scores = self.trained(questions).masked_fill(others, -torch.inf)
        return F.cross_entropy(scores, answer.squeeze(-1), reduction="sum"), float(len(questions))

    def trained(self, questions: Tensor) -> Tensor:
        """Return scores (B, N) of questions (B, 3) whose answer is in the graph."""
        return self.score(questions)

    def score(self, questions: Tensor) -> Tensor:
        """Return scores (B, N) of any questions."""
        scores: Tensor = self.model(self.facts.graph, questions[:, :2])
        return scores

    def entries(self, heads: Tensor) -> Tensor:
        """Return how many numbers the scores of a question from each head take, (B,)."""
        return torch.full_like(heads, self.facts.graph.num_entities)

    def figures(self, part: str) -> dict[str, float]:
        return self.facts.figures(self.score, self.entries, part)
