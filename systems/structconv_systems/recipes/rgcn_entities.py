"""Classes of entities by R-GCN (Schlichtkrull et al. 2018, section 5.1), with and without types of relations."""

import math
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from structconv import ConfigError, KnowledgeGraph
from structconv_systems.data.knowledge import Classes, read_classes
from structconv_systems.models.rgcn import EntityClassifier
from structconv_systems.recipes.base import Job, Parts, Run, Schedule, Study, Task, generator
from structconv_systems.recipes.options.knowledge import RGCNEntities
from structconv_systems.train.stopping import Last

__all__ = ["RUNNER", "EntityTask", "without_types"]

_DROPPED, _UNTYPED = "relation-dropout", "without-types"


class EntityTask(Task):
    """Full-batch classification: a step is an epoch, and all training entities train, for the number of epochs of the
    paper. With `held_out` that share of them validates instead, to compare learning rates.

    With `drop_relations` each step leaves out the triples of each relation, both ways, with that probability."""

    def __init__(self, recipe: RGCNEntities, data: Classes, seed: int = 0, drop_relations: float = 0.0) -> None:
        self.drop_relations, self.seed = drop_relations, seed
        self.graph = data.graph
        self.nodes, self.labels = (Parts(_held_out(recipe, parts, seed), of="entities")
                                   for parts in (data.nodes, data.labels))
        self.parts = self.nodes
        self.model = EntityClassifier(self.graph, recipe.hidden, len(data.classes), num_bases=recipe.bases or None,
                                      dropout=recipe.dropout)
        groups: list[dict[str, Any]] = [
            {"params": list(self.model.first.parameters()), "weight_decay": recipe.weight_decay},
            {"params": list(self.model.second.parameters())}]
        self.optimizer = torch.optim.Adam(groups, lr=recipe.learning_rate)

    def train_step(self, step: int) -> dict[str, float]:
        self.model.train()
        self.optimizer.zero_grad()
        loss, accuracy = self._measured("train", self._some_relations(step) if self.drop_relations else self.graph)
        loss.backward()
        self.optimizer.step()
        return {"loss": loss.item(), "accuracy": accuracy}

    @torch.no_grad()
    def validate(self) -> dict[str, float]:
        """Measure loss, and accuracy in percent, of the entities held out, if any."""
        if "val" not in self.nodes:
            return {}
        self.model.eval()
        loss, accuracy = self._measured("val", self.graph)
        return {"val_loss": loss.item(), "val_accuracy": accuracy}

    @torch.no_grad()
    def test(self) -> dict[str, float]:
        """Measure the accuracy of the test entities, in percent."""
        self.model.eval()
        return {"test_accuracy": self._measured("test", self.graph)[1]}

    def _some_relations(self, step: int) -> KnowledgeGraph:
        """Draw the graph of a step."""
        graph, count = self.graph, self.graph.num_relations // 2  # the others are their inverses
        stays = torch.rand(count, generator=generator(self.seed, step)) >= self.drop_relations
        triples = graph.triples[stays.to(graph.triples.device)[graph.triples[:, 1] % count]]
        return KnowledgeGraph(triples, graph.num_entities, graph.relations)

    def _measured(self, part: str, graph: KnowledgeGraph) -> tuple[Tensor, float]:
        logits, labels = self.model(graph)[self.nodes[part]], self.labels[part]
        return F.cross_entropy(logits, labels), 100 * float((logits.argmax(-1) == labels).double().mean())


def _held_out(recipe: RGCNEntities, parts: Mapping[str, Tensor], seed: int) -> dict[str, Tensor]:
    """Move the share `held_out` of ``train``, at least one entity unless it is 0, to ``val``."""
    count = len(parts["train"])
    held = math.ceil(recipe.held_out * count)
    if not held:
        return {**parts}
    if held == count:
        raise ConfigError(recipe.name, f"held_out must leave one of {count} training entities", recipe.held_out)
    order = torch.randperm(count, generator=generator(seed, 0), device="cpu")
    return {**parts, "train": parts["train"][order[held:].sort().values], "val": parts["train"][order[:held]]}


def without_types(graph: KnowledgeGraph) -> KnowledgeGraph:
    """Return the graph with one relation, which joins each related pair of entities once."""
    triples = graph.triples.clone()
    triples[:, 1] = 0
    return KnowledgeGraph(triples.unique(dim=0), graph.num_entities, ("related",), entities=graph.entities)


def _jobs(recipe: RGCNEntities, run: Run | None) -> list[Job]:
    data = read_classes(*(recipe.path(name) for name in (recipe.facts, recipe.train, recipe.test)), leaks=recipe.leaks)
    graph = data.graph.with_inverses()
    groups = {recipe.name: (graph, 0.0), _DROPPED: (graph, recipe.relation_dropout),
              _UNTYPED: (without_types(graph), 0.0)}
    return [Job(name=f"{name}/seed-{seed}",
                make=partial(EntityTask, recipe, replace(data, graph=known), seed, dropped),
                schedule=partial(_schedule, recipe, seed), higher=True,
                metric="val_accuracy" if recipe.held_out else "")
            for name, (known, dropped) in groups.items() for seed in range(recipe.seeds)]


def _schedule(recipe: RGCNEntities, seed: int) -> Schedule:
    return Schedule(steps=recipe.epochs, seed=seed, stopping=Last(), validate_every=recipe.epochs,
                    device=recipe.device, compile=recipe.compile)


RUNNER = Study(jobs=_jobs, columns={"test_accuracy": "test accuracy, %"}).runner
