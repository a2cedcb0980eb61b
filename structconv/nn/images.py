"""Images as entries on a grid, and back."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from structconv.arguments import explained
from structconv.errors import ShapeError, StructureError, text_of
from structconv.shapes import check_entries
from structconv.structures.grid import Grid

__all__ = ["to_entries", "to_image"]

_known = lru_cache(maxsize=64)(Grid)


@explained
def to_entries(image: Tensor, ndim: int) -> tuple[Tensor, Grid]:
    """(..., C, S_1, ..., S_ndim) -> entries (..., M, C) in row-major order, and their grid.

    Example:

        >>> from structconv.nn import to_entries
        >>> x, grid = to_entries(torch.randn(5, 3, 8, 10), 2)
        >>> x.shape, grid
        (torch.Size([5, 80, 3]), Grid((8, 10)))
    """
    grid = grid_of(image, ndim)
    return image.flatten(-ndim).mT, grid


@explained
def to_image(entries: Tensor, grid: Grid) -> Tensor:
    """Entries (..., N, C) on a grid -> (..., C, *S): the inverse of `to_entries`.

    Example:

        >>> from structconv.nn import to_entries, to_image
        >>> image = torch.randn(5, 3, 8, 10)
        >>> torch.equal(to_image(*to_entries(image, 2)), image)
        True
    """
    check_entries("to_image", entries, entries=grid.num_entries, name="entries", letters="NC")
    return entries.mT.unflatten(-1, grid.shape)


def grid_of(image: Tensor, ndim: int, grid: Any = None) -> Grid:
    """The grid of an image's pixels; `grid` itself, which may be periodic, if it has their shape.

    Raises:
        StructureError: `grid` has another shape, or is no grid.
    """
    if image.dim() <= ndim:
        raise ShapeError("to_entries", f"image must have shape (..., C, *S) with {ndim} axes S", tuple(image.shape))
    shape = image.shape[-ndim:]
    if grid is None:
        return Grid(shape) if torch.compiler.is_compiling() else _known(shape)
    if not isinstance(grid, Grid) or grid.shape != shape:
        raise StructureError("Conv", f"structure must be a Grid of the image's shape {text_of(shape)}, or left out",
                             repr(grid), "Another structure goes with entries: layer(x, structure=...), without axes.")
    return grid
