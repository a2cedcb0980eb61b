"""Code shared by the recipes that classify images."""

from __future__ import annotations

from structconv.errors import DataError
from structconv_systems.data.images import Images, read_images
from structconv_systems.recipes.generated import Classification
from structconv_systems.recipes.options.images import OnImages

__all__ = ["ImageTask", "parts_of"]


class ImageTask(Classification):
    """Cross-entropy, and accuracy in percent, by which weights are chosen."""

    metric, higher, samples = "val_accuracy", True, "images"


def parts_of(recipe: OnImages) -> dict[str, Images]:
    """``train``, ``val`` (the last of the training images) and ``test``; `DataError` where they do not fit."""
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
