"""The laws of decoding: outputs at their places, and those of prepared inputs, are those of the whole call."""

from __future__ import annotations

import dataclasses
import inspect
from typing import Any

import torch
from torch import Tensor

from structconv.nn.conv import Conv
from structconv.testing.checks import same, same_gradients
from structconv.testing.use import Use

__all__ = ["check_positions", "check_prepared", "takes_positions", "takes_prepared"]


def takes_prepared(use: Use) -> bool:
    """Whether the layer reads one x, which is not an image."""
    return isinstance(use.layer, Conv) and isinstance(use.args[0], Tensor) and "axes" not in use.kwargs


def takes_positions(use: Use) -> bool:
    """Whether the layer can be told where its outputs stand, too."""
    return takes_prepared(use) and "positions" in inspect.signature(use.layer.forward).parameters


def check_positions(use: Use) -> None:
    """The last outputs alone, and all in another order, told their places, are those of the whole call.

    Raises:
        ConfigError, StructureError: the layer refuses to be told.
    """
    layer = use.layer.eval()
    given = inspect.signature(layer.forward).bind(*use.args, **use.kwargs).arguments
    x, z = given.pop("x"), given.pop("z", None)
    given.pop("return_weights", None)
    z = x if z is None else z
    whole, outputs = layer(x, z, **given), z.shape[-2]
    for first in range(1, outputs, max(outputs - 2, 1)):
        own = layer(x, z[..., first:, :], **given, positions=first)
        same(own, whole[..., first:, :], f"the outputs from {first} on")
    turned = torch.arange(outputs - 1, -1, -1)
    same(layer(x, z.flip(-2), **given, positions=turned), whole.flip(-2), "the outputs in turned order")


def check_prepared(use: Use) -> None:
    """A call of prepared inputs gives what the call gives, the second one too, gradients included."""
    layer: Any
    layer, (x, *others) = use.layer, use.args
    expected = use()

    def run() -> Tensor:
        return use.run(lambda *args, **kwargs: layer(layer.prepare(x), *others, **use.kwargs))

    for turn in ("", ", again"):
        same_gradients(run(), expected, use.variables, f"prepared{turn}")
    prepared = layer.prepare(x)
    for turn in ("first", "second"):
        again: Any = dataclasses.replace(use, args=(prepared, *others))
        same(again(), expected, f"the {turn} call of one prepared")
