"""`compose`: two linear layers, or two (basis, Theta) pairs, become one, exactly (Andreoli 2019, Proposition 3)."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor

from structconv import ops
from structconv.bases.dense import Identity as IdentityBasis
from structconv.bases.shift import Shift
from structconv.errors import ConfigError, ShapeError
from structconv.mechanisms.expression import Mechanism
from structconv.mechanisms.given import Identity
from structconv.mechanisms.grids import Cuboid, Pool, Shifts
from structconv.mechanisms.masks import Mask
from structconv.mechanisms.naming import names_of_x
from structconv.mechanisms.operations import Operation
from structconv.nn.conv import Conv
from structconv.nn.grids import Conv1d, Conv2d, Conv3d, OnGrid
from structconv.structures.grid import Grid
from structconv.weights import Eye, Full, Weight

__all__ = ["compose"]


def compose(first: Any, second: Any) -> Any:
    """One layer, or one pair, that does what `first`, then `second`, do: K = K' K''.

    Pairs (basis, Theta) give a pair, see `ops.compose_pairs`. Two `Conv` whose mechanisms read only the structure
    give a `Conv` whose Theta is the product, a new parameter in the dtype of the first; two image layers (`Conv2d`,
    ...) give an `OnGrid`. The structure of the call is that of the first; the second gets the grid that the first
    puts out. Shifts whose products are shifts on any grid (unpadded ones, or circular ones without stride) are
    merged: two unpadded 3x3 convolutions give one of 25 shifts.

    A bias of the first passes through the second as sum_k (sum_m A''_kmn) b' Theta''_k. It is one vector where every
    column of A'' sums to one: unpadded, circular, reflected or replicated shifts, pooling, the identity.

    Raises:
        ShapeError: channels that do not fit (entries are compared in the call).
        ConfigError: a mechanism that is content-based, or has parameters; heads laid side by side; a bias of the first
            that the second turns into another vector at each output; a layer and a pair.

    Example:

        >>> from structconv import Conv2d, compose
        >>> first, second, image = Conv2d(3, 6, 3), Conv2d(6, 4, 3), torch.randn(1, 3, 9, 9)
        >>> torch.allclose(compose(first, second)(image), second(first(image)), atol=1e-4)
        True
    """
    if isinstance(first, tuple) and isinstance(second, tuple):
        return ops.compose_pairs(cast(Any, first), cast(Any, second))
    one, two = _on_grid(first), _on_grid(second)
    if one is not None and two is not None:
        if one.ndim != two.ndim:
            raise ShapeError("compose", f"second must be for images of {one.ndim} axes", f"{two.ndim} axes")
        return OnGrid(compose(one.conv, two.conv), one.ndim)
    if not (isinstance(first, Conv) and isinstance(second, Conv)):
        raise ConfigError("compose", "first and second must be two layers of structconv, or two pairs (basis, Theta)",
                          f"{type(first).__name__} and {type(second).__name__}", "For layers of torch use "
                          "structconv.compat.merge_linear(model), or structconv.Conv2d.from_torch(layer).")
    for name, layer in (("first", first), ("second", second)):
        _check_linear(name, layer)
    if first.out_channels != second.in_channels:
        raise ShapeError("compose", f"second must take the Q={first.out_channels} output channels of first",
                         f"P={second.in_channels}")
    return _composed(first, second)


def _on_grid(layer: Any) -> OnGrid | None:
    """An image layer as a `Conv` on images; `None` for another layer."""
    if isinstance(layer, Conv1d | Conv2d | Conv3d):
        return OnGrid(layer.to_conv(), layer.axes)
    return layer if isinstance(layer, OnGrid) else None


@torch.no_grad()
def _composed(first: Conv, second: Conv) -> Conv:
    mechanism, theta = _merged(first, second)
    bias = _bias(first, second)
    eye = isinstance(theta, Eye)
    layer = Conv(mechanism, first.in_channels, second.out_channels, weight=Eye() if eye else Full(),
                 bias=bias is not None)
    like = next((t for part in (first, second) for t in part.parameters()), None)
    if like is not None:
        layer.to(like)
    if not eye:
        cast(Full, layer.weight).theta.copy_(theta.dense())
    if bias is not None and layer.bias is not None:
        layer.bias.copy_(bias)
    return layer


def _merged(first: Conv, second: Conv) -> tuple[Mechanism, Weight]:
    """The mechanism of all products A'_k' A''_k'' and their Theta, merged where that holds on every grid."""
    one, two = first.mechanism, second.mechanism
    alike = one._structure_name == two._structure_name
    if alike and isinstance(one, Shifts | Cuboid) and isinstance(two, Shifts | Cuboid) and one.ndim == two.ndim:
        probe = Grid((_REACH,) * (one.ndim or 1))
        before = one.shift(probe)
        after = two.shift(before.output_grid)
        if _merge_anywhere(before, after):
            basis, theta = ops.compose_pairs((before, first.weight()), (after, second.weight()))
            if isinstance(basis, Shift):
                merged = Shifts(list(basis.offsets), basis.padding, basis.stride, structure=one._structure_name)
                return merged, cast(Weight, theta)
    pairs = tuple((IdentityBasis(0, part.mechanism.size), part.weight()) for part in (first, second))
    _, theta = ops.compose_pairs(*pairs)
    for part, other in ((one, two), (two, one)):
        if isinstance(part, Identity) and part.size == 1 and part._structure_name is None:
            return other, cast(Weight, theta)
    return one @ two, cast(Weight, theta)


# Larger than any sum of offsets and windows, so that what merges on a grid of this size does so on every grid.
_REACH = 1 << 20


def _merge_anywhere(before: Shift, after: Shift) -> bool:
    if before.padding != after.padding:
        return False
    same_size = not any((*before.grow, *after.grow)) and all(step == 1 for step in (*before.stride, *after.stride))
    return before.padding == "none" or (before.padding == "circular" and same_size)


def _bias(first: Conv, second: Conv) -> Tensor | None:
    """second's bias, and its response to first's."""
    if first.bias is None:
        return second.bias
    if not _columns_sum_to_one(second.mechanism):
        raise ConfigError("compose", "first must have no bias where the matrices of second do not sum to one over the "
                          "inputs of every output, so that a constant comes out different at each",
                          type(second.mechanism).__name__, "Build first with bias=False, or compose pairs.")
    response = second.weight().contract(first.bias.expand(second.mechanism.size, 1, -1)).squeeze(0)
    return response if second.bias is None else response + second.bias


def _columns_sum_to_one(mechanism: Mechanism) -> bool:
    if isinstance(mechanism, Shifts):
        return mechanism.padding not in (None, "zeros")
    if isinstance(mechanism, Cuboid):
        return mechanism.padding_mode not in (None, "zeros")
    if isinstance(mechanism, Operation) and mechanism.join in ("compose", "concat") and not mechanism.steps:
        return all(map(_columns_sum_to_one, mechanism.mechanisms()))
    return isinstance(mechanism, Identity) or (isinstance(mechanism, Pool) and not any(mechanism.padding))


def _check_linear(name: str, layer: Conv) -> None:
    if any(result is not None for result in names_of_x(layer.mechanism)):
        raise ConfigError("compose", f"{name} must read an x without a name", repr(layer.mechanism))
    parts = [module for module in layer.mechanism.modules() if isinstance(module, Mechanism | Mask)]
    content = [part for part in parts if "content" in part.reads and not isinstance(part, Operation)]
    if content:
        raise ConfigError("compose", f"{name} must have a mechanism that reads only the structure",
                          type(content[0]).__name__, "Attention is not linear in x. A mechanism of your own that reads "
                          "only the structure says so by reads = (\"structure\",).")
    trained = [part for part in parts if isinstance(part, Mechanism) and type(part).bind is not Mechanism.bind
               and next(part.parameters(), None) is not None]
    if trained:
        raise ConfigError("compose", f"{name} must have a mechanism without parameters", type(trained[0]).__name__,
                          "The composed layer would make new ones.")
    if layer.relative_value is not None:
        raise ConfigError("compose", f"{name} must have no relative_value", "one")
