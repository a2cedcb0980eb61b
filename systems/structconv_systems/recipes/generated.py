"""Code shared by the recipes that classify generated sequences and images."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from structconv_systems.data.generated import Labeled
from structconv_systems.recipes.options.comparisons import Generated
from structconv_systems.recipes.options.images import OnImages
from structconv_systems.train.batches import Batches
from structconv_systems.train.parts import Parts
from structconv_systems.train.study import Job, jobs_of
from structconv_systems.train.task import BatchTask

__all__ = ["Classification", "parts_of", "trainings"]

_PARTS = ("train", "val", "test")


def parts_of(recipe: Generated, make: Callable[[int, int], Labeled]) -> dict[str, Labeled]:
    """``train``, ``val`` and ``test`` by `make` of a number of samples and a seed, which is 0, 1 and 2."""
    return {part: make(recipe.samples if part == "train" else recipe.held_out, seed)
            for seed, part in enumerate(_PARTS)}


class Classification(BatchTask):
    """Cross-entropy of the labels, by which weights are chosen, and accuracy in percent.

    Args:
        model: inputs -> logits (B, classes).
        parts: of the data, each with `inputs`, `labels` and a length.
    """

    samples: ClassVar[str] = "generated sequences"

    def __init__(self, model: nn.Module, recipe: Generated | OnImages, parts: Mapping[str, Any],
                 seed: int) -> None:
        self.parts = Parts(parts, of=self.samples)
        batches = Batches([1] * len(parts["train"]), cost=recipe.batch_size, seed=seed)
        super().__init__(model, recipe, batches)

    def loss(self, samples: Sequence[int]) -> tuple[Tensor, float]:
        data, chosen = self.parts["train"], torch.tensor(samples)
        loss = F.cross_entropy(self.model(data.inputs[chosen]), data.labels[chosen], reduction="sum")
        return loss, float(len(samples))

    def figures(self, part: str) -> dict[str, float]:
        data = self.parts[part]
        logits = torch.cat([self.model(inputs) for inputs in data.inputs.split(256)])
        right = int((logits.argmax(-1) == data.labels).sum())
        return {f"{part}_loss": F.cross_entropy(logits, data.labels).item(),
                f"{part}_accuracy": 100 * right / len(data)}


def trainings(recipe: Generated | OnImages, group: str, make: Callable[[], nn.Module], parts: Mapping[str, Any],
              kind: type[Classification] = Classification) -> list[Job]:
    """One of a model for each seed."""
    return jobs_of(recipe, group, lambda options, seed: kind(make(), options, parts, seed), kind)
