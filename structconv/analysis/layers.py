"""The bases of a model's layers, as one call of the model binds them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from structconv.bases import Basis
from structconv.nn.composite import watched
from structconv.nn.layer import Layer

__all__ = ["layer_bases"]


@torch.no_grad()
def layer_bases(model: nn.Module, *args: Any, **kwargs: Any) -> dict[str, list[Basis]]:
    """Return the basis of every layer of a model in one call.

    >>> import torch
    >>> from structconv.analysis.layers import layer_bases
    >>> from structconv.nn import MultiheadAttention
    >>> attention = torch.nn.Sequential(MultiheadAttention(8, 2), torch.nn.ReLU(), MultiheadAttention(8, 2))
    >>> bases = layer_bases(attention, torch.randn(5, 8))
    >>> [(name, tuple(basis.dense().shape)) for name, [basis] in bases.items()]
    [('0', (2, 5, 5)), ('2', (2, 5, 5))]

    Args:
        model: called once, without gradients, as ``model(*args, **kwargs)``. In training mode, dropout on weights is
            drawn again for the basis.

    Returns:
        For each layer's name in `named_modules`, one basis for each call of the layer, in order. A step of decoding
        (`Conv.step`) does not count as a call.

    Cost: one call of the model, and the leaves of each layer once more.
    """
    result: dict[str, list[Basis]] = {}

    def note(name: str, layer: Any, args: Any, kwargs: Any) -> None:
        arguments = {key: value for key, value in kwargs.items() if not key.startswith("return_")}
        result.setdefault(name, []).append(layer.basis(*args, **arguments))

    with watched(_outermost(model), note):
        model(*args, **kwargs)
    return result


def _outermost(module: nn.Module, name: str = "") -> Iterator[tuple[str, Layer]]:
    """The layers that have a basis, without those that they are made of."""
    if isinstance(module, Layer) and hasattr(module, "basis"):
        yield name, module
    else:
        for part, child in module.named_children():
            yield from _outermost(child, f"{name}.{part}" if name else part)
