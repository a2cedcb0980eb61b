"""Code shared by the recipes that classify generated sequences and images."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from structconv.errors import DataError
from structconv_systems.data.generated import Labeled
from structconv_systems.data.images import Images, read_images
from structconv_systems.recipes.base import Batches, BatchTask, Job, Parts, jobs_of
from structconv_systems.recipes.options.comparisons import Generated
from structconv_systems.recipes.options.images import OnImages

__all__ = ["Classification", "ImageTask", "image_parts", "parts_of", "trainings"]

_PARTS = ("train", "val", "test")


def parts_of(recipe: Generated, make: Callable[[int, int], Labeled]) -> dict[str, Labeled]:
    """Make ``train``, ``val`` and ``test`` from a number of samples and the seeds 0, 1 and 2."""
    return {part: make(recipe.samples if part == "train" else recipe.held_out, seed)
            for seed, part in enumerate(_PARTS)}


class Classification(BatchTask):
    """Cross-entropy of the labels, which chooses the weights, and accuracy in percent.

    Args:
        model: inputs -> logits (B, classes). parts: the data, each with `inputs`, `labels` and a length.
    """

    samples: ClassVar[str] = "generated sequences"

    def __init__(self, model: nn.Module, recipe: Generated | OnImages, parts: Mapping[str, Any], seed: int) -> None:
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
    """Return a training of a model for each seed."""
    return jobs_of(recipe, group, lambda options, seed: kind(make(), options, parts, seed), kind)


class ImageTask(Classification):
    """Cross-entropy of images, and accuracy in percent, which chooses the weights."""

    metric, higher, samples = "val_accuracy", True, "images"


def image_parts(recipe: OnImages) -> dict[str, Images]:
    """Read ``train``, ``val`` (the last of the training images) and ``test``; `DataError` if they do not fit."""
    known, test = (read_images(recipe.path(name)) for name in (recipe.train, recipe.test))
    first = len(known) - recipe.held_out
    if first < 1:
        raise DataError(recipe.path(recipe.train), f"more than held_out={recipe.held_out} images", len(known))
    if test.inputs.shape[1:] != known.inputs.shape[1:]:
        sizes = [" x ".join(map(str, images.inputs.shape[1:])) for images in (known, test)]
        raise DataError(recipe.path(recipe.test), f"images of {sizes[0]} pixels, as those that train", sizes[1])
    if test.names != known.names[:len(test.names)]:
        raise DataError(recipe.path(recipe.test), f"the classes {', '.join(known.names)}", ", ".join(test.names))
    return {"train": known[:min(first, recipe.samples or first)], "val": known[first:], "test": test}
