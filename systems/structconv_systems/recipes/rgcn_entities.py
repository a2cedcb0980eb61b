"""Classes of entities without features by R-GCN (Schlichtkrull et al. 2018, section 5.1), beside the same network over
the graph without the types of its relations."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from structconv.structures import KnowledgeGraph
from structconv_systems.data.knowledge import Classes, read_classes
from structconv_systems.models.rgcn import EntityClassifier
from structconv_systems.recipes.options.knowledge import RGCNEntities
from structconv_systems.train.loop import Schedule, Task
from structconv_systems.train.parts import Parts
from structconv_systems.train.run import Run
from structconv_systems.train.stopping import Last
from structconv_systems.train.study import Job, Study

__all__ = ["RUNNER", "EntityTask", "without_types"]

_UNTYPED = "without-types"


class EntityTask(Task):
    """Full-batch classification: a step is an epoch, and all training entities train, as the published code has it; the
    number of epochs is the paper's, so that nothing is chosen by looking at others."""

    def __init__(self, recipe: RGCNEntities, data: Classes) -> None:
        self.graph, self.nodes, self.labels = data.graph, Parts(data.nodes), Parts(data.labels)
        self.model = EntityClassifier(self.graph, recipe.hidden, len(data.classes), num_bases=recipe.bases or None,
                                      dropout=recipe.dropout)
        groups: list[dict[str, Any]] = [
            {"params": list(self.model.first.parameters()), "weight_decay": recipe.weight_decay},
            {"params": list(self.model.second.parameters())}]
        self.optimizer = torch.optim.Adam(groups, lr=recipe.learning_rate)

    def train_step(self, step: int) -> dict[str, float]:
        self.model.train()
        self.optimizer.zero_grad()
        loss, accuracy = self._measured("train")
        loss.backward()
        self.optimizer.step()
        return {"loss": loss.item(), "accuracy": accuracy}

    def validate(self) -> dict[str, float]:
        """Nothing: no entity is held out."""
        return {}

    @torch.no_grad()
    def test(self) -> dict[str, float]:
        """Accuracy of the test entities, in percent."""
        self.model.eval()
        return {"test_accuracy": self._measured("test")[1]}

    def _measured(self, part: str) -> tuple[Tensor, float]:
        logits, labels = self.model(self.graph)[self.nodes[part]], self.labels[part]
        return F.cross_entropy(logits, labels), 100 * float((logits.argmax(-1) == labels).double().mean())


def without_types(graph: KnowledgeGraph) -> KnowledgeGraph:
    """The graph with one relation, which joins each pair of entities once that any relation joins."""
    triples = graph.triples.clone()
    triples[:, 1] = 0
    return KnowledgeGraph(triples.unique(dim=0), graph.num_entities, ("related",), entities=graph.entities)


def _jobs(recipe: RGCNEntities, run: Run | None) -> list[Job]:
    data = read_classes(*(recipe.path(name) for name in (recipe.facts, recipe.train, recipe.test)), leaks=recipe.leaks)
    graph = data.graph.with_inverses()
    graphs = {recipe.name: graph, _UNTYPED: without_types(graph)}
    return [Job(name=f"{name}/seed-{seed}", make=partial(EntityTask, recipe, replace(data, graph=known)),
                schedule=partial(_schedule, recipe, seed)) for name, known in graphs.items()
            for seed in range(recipe.seeds)]


def _schedule(recipe: RGCNEntities, seed: int) -> Schedule:
    return Schedule(steps=recipe.epochs, seed=seed, stopping=Last(), validate_every=recipe.epochs,
                    device=recipe.device, compile=recipe.compile)


RUNNER = Study(jobs=_jobs, columns={"test_accuracy": "test accuracy, %"}).runner
