"""Cuboids of offsets in the layout of libraries: kernel size, dilation, stride and padding on each axis."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from structconv.arguments import explained
from structconv.errors import ConfigError

__all__ = ["CuboidSpec", "cuboid_offsets"]

Offset = tuple[int, ...]
Ints = int | Sequence[int]
#: Positions of a window, above which it was meant for something else.
_TOO_MANY = 2 ** 22


class CuboidSpec(NamedTuple):
    """A set of shifts read as one strided, dilated, padded window, the last axis of the grid last in each tuple.

    Output n on an axis reads the inputs stride n - pad_low + j dilation, 0 <= j < kernel_size, of a grid to which
    pad_low and pad_high entries are added in the manner of `padding`; a negative amount takes entries away.
    `permutation[j]` is the k of the window's j-th position in row-major order: Theta[permutation] is in the layout
    of a convolution kernel.

    Example:

        >>> from structconv import Grid, Shift
        >>> Shift(Grid(9), [-2, 0, 2]).as_cuboid().dilation
        (2,)
    """

    kernel_size: tuple[int, ...]
    dilation: tuple[int, ...]
    stride: tuple[int, ...]
    pad_low: tuple[int, ...]
    pad_high: tuple[int, ...]
    padding: str
    permutation: tuple[int, ...]


_INTEGERS = (int, np.integer, torch.SymInt)


def per_axis(owner: str, name: str, value: Ints, ndim: int, least: int | None = None) -> tuple[int, ...]:
    """One integer an axis, from one for all or from a sequence; `ConfigError` on another count or a value < least."""
    values: tuple[Any, ...] = tuple(value) if isinstance(value, (list, tuple)) else (value,) * ndim
    bad = len(values) != ndim or not all(isinstance(v, _INTEGERS) and type(v) is not bool for v in values)
    if bad or (least is not None and any(v < least for v in values)):
        bound = "" if least is None else f" >= {least}"
        raise ConfigError(owner, f"{name} must be an integer{bound}, or {ndim} of them, one an axis", repr(value))
    return values


@explained
def cuboid_offsets(kernel_size: Ints, dilation: Ints = 1, offset: Ints = 0) -> tuple[Offset, ...]:
    """The offsets Delta of a cuboid, in the row-major order of a convolution kernel (Andreoli 2019, Definition 2).

    On each axis Delta_j = offset - j dilation for 0 <= j < kernel_size, so that output n reads input n - offset + j
    dilation: a library's cross-correlation, with `offset` as its padding. The strides delta_i of Definition 2 are the
    dilation.

    Args:
        kernel_size: an integer for a single axis, or a sequence with one integer for each axis.
        dilation, offset: one integer for all axes, or one for each axis.

    Raises:
        ConfigError: more than 2^22 offsets, each of which is a matrix with a Theta_k of its own.

    Example:

        >>> from structconv.bases import cuboid_offsets
        >>> cuboid_offsets(3), cuboid_offsets(3, offset=1)
        (((0,), (-1,), (-2,)), ((1,), (0,), (-1,)))
    """
    sizes = per_axis("cuboid_offsets", "kernel_size", kernel_size,
                     len(kernel_size) if isinstance(kernel_size, (list, tuple)) else 1, least=1)
    if math.prod(sizes) > _TOO_MANY:
        raise ConfigError("cuboid_offsets", f"kernel_size must have at most {_TOO_MANY} positions", repr(kernel_size),
                          "Give the size of the window, not of the grid.")
    dilations = per_axis("cuboid_offsets", "dilation", dilation, len(sizes), least=1)
    origins = per_axis("cuboid_offsets", "offset", offset, len(sizes))
    axes = [[origin - j * step for j in range(size)]
            for size, step, origin in zip(sizes, dilations, origins, strict=True)]
    return tuple(itertools.product(*axes))


def recognize(starts: Sequence[Offset], stride: tuple[int, ...], grow: tuple[int, ...],
              padding: str) -> CuboidSpec | None:
    """The cuboid whose window positions, relative to stride n, are `starts`; `None` if they form none. O(K).

    `grow` is by how many entries the output grid, before striding, is larger than the input grid.
    """
    sizes, dilations, lows = [], [], []
    for coordinates in zip(*starts, strict=True):
        levels = sorted(set(coordinates))
        step = levels[1] - levels[0] if len(levels) > 1 else 1
        if any(b - a != step for a, b in itertools.pairwise(levels)):
            return None
        sizes.append(len(levels))
        dilations.append(step)
        lows.append(-levels[0])
    if math.prod(sizes) != len(starts) or len(set(starts)) != len(starts):
        return None
    window = itertools.product(*([j * step - low for j in range(size)]
                                 for size, step, low in zip(sizes, dilations, lows, strict=True)))
    number = {start: k for k, start in enumerate(starts)}
    highs = [extra + step * (size - 1) - low
             for size, step, low, extra in zip(sizes, dilations, lows, grow, strict=True)]
    return CuboidSpec(tuple(sizes), tuple(dilations), stride, tuple(lows), tuple(highs), padding,
                      tuple(number[start] for start in window))
