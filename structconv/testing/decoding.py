"""The laws of decoding: outputs at given positions, and outputs of prepared inputs, equal those of the whole call."""

from __future__ import annotations

import dataclasses
import inspect
from typing import Any

import torch
from torch import Tensor

from structconv.errors import ConfigError, ShapeError, StructureError
from structconv.nn.attention import MultiheadAttention
from structconv.nn.conv import Conv
from structconv.testing.checks import same, same_gradients
from structconv.testing.use import Use

__all__ = ["check_positions", "check_prepared", "takes_positions", "takes_prepared"]


def takes_prepared(use: Use) -> bool:
    """Return True if the layer reads one x that is not an image."""
    return isinstance(use.layer, Conv) and isinstance(use.args[0], Tensor) and "axes" not in use.kwargs


def takes_positions(use: Use) -> bool:
    """Return True if the layer also takes positions of its outputs."""
    return takes_prepared(use) and "positions" in inspect.signature(use.layer.forward).parameters


def check_positions(use: Use) -> None:
    """Only the last outputs, and all outputs in another order, at given positions, equal those of the whole call; or
    the layer refuses positions by an error."""
    layer: Any = use.layer.eval()
    x, z, others = _parted(use)
    others.pop("return_weights", None)
    z = x if z is None else z

    def of(outputs: Tensor, **options: Any) -> Any:
        args, by_name = layer._arguments(x, outputs)
        return layer(*args, **by_name, **others, **options)

    whole, count = of(z), z.shape[-2]
    for first in range(1, count, max(count - 2, 1)):
        own = of(z[..., first:, :], positions=first)
        same(own, whole[..., first:, :], f"the outputs from {first} on")
    turned = torch.arange(count - 1, -1, -1)
    same(of(z.flip(-2), positions=turned), whole.flip(-2), "the outputs in turned order")


def check_prepared(use: Use) -> None:
    """A call of prepared inputs gives what the call gives, the second one too, gradients included."""
    layer: Any = use.layer
    x, z, others = _parted(use)
    expected = use()

    def of(cache: Any) -> Use:
        args, by_name = layer._arguments(cache, z)
        return dataclasses.replace(use, args=args, kwargs={**by_name, **others})

    def run() -> Tensor:
        return use.run(lambda *args, **kwargs: of(layer.prepare(x))())

    for turn in ("", ", again"):
        same_gradients(run(), expected, use.variables, f"prepared{turn}")
    cache = layer.prepare(x)
    for turn in ("first", "second"):
        same(of(cache)(), expected, f"the {turn} call of one prepared")
    try:
        cache = layer.prepare(x[..., :2, :])
        for entry in x[..., 2:, :].split(1, -2):
            cache.append(entry)
        appended = of(cache)()
    except (ConfigError, ShapeError, StructureError):
        return  # a structure of all entries, say
    same(appended, expected, "entries that were appended one by one")


def _parted(use: Use) -> tuple[Any, Any, dict[str, Any]]:
    """x and z of a call of a `Conv`, by whichever names its layer has for them, and the other arguments."""
    others: dict[str, Any] = dict(inspect.signature(use.layer.forward).bind(*use.args, **use.kwargs).arguments)
    if isinstance(use.layer, MultiheadAttention):
        x, z = use.layer._inputs(others.pop("query"), others.pop("key_value", None))
        return x, z, others
    return others.pop("x"), others.pop("z", None), others
