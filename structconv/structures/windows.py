"""`Window`: the inputs near each output, on a sequence or on a grid of any number of axes."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

from structconv import torch_compat as private
from structconv.errors import StructureError
from structconv.shapes import NO_TENSORS
from structconv.structures import enumeration
from structconv.structures.graph import Graph, check_size
from structconv.structures.grid import Grid
from structconv.structures.masks import Device, Support, Transposed, filtered, listed
from structconv.structures.values import structure

__all__ = ["Window"]


@structure()
class Window(Support):
    """The inputs near each output, clipped at the borders.

    Args:
        radius: one integer r keeps |m - n| <= r, on every axis of a grid. A tuple gives instead the *size* of the
            neighborhood on each axis of an image, odd numbers as for a convolution: `Window((7, 7))` has radius 3.
        dilation: keep only every dilation-th entry, with as many of them: |m - n| <= r dilation. One, or one an axis.
        grid: the grid whose entries both inputs and outputs are, periodic or not; `None` for a sequence.
        center: (..., N), floating: keep |m - center_n| <= r instead, for predicted positions (Luong's local-p). On
            sequences only, without dilation.

    Raises:
        StructureError: a size that is negative or even, a number of axes that is not the grid's, a center on a grid.

    Lists O(N (2r + 1)^L) edges. Sources: Luong et al. 2015, section 3.2; Hassani et al. 2023 (neighborhoods; here
    the window shrinks at the border and does not slide).

    Example:

        >>> from structconv import Causal, Conv, DotProduct, Window
        >>> layer = Conv(DotProduct(dim=4).masked(keep=Window(1)).softmax(), 8, 8)
        >>> layer.basis(torch.randn(4, 8)).dense()[0].count_nonzero(0)     # inputs of each output
        tensor([2, 3, 3, 2])
        >>> Window(2) & Causal()
        (Window(radius=2) & Causal())
    """

    radius: int | tuple[int, ...]
    dilation: int | tuple[int, ...] = 1
    grid: Grid | None = None
    center: Tensor | None = None

    def __post_init__(self) -> None:
        _check_numbers(self.radius, self.dilation)
        if isinstance(self.grid, (*NO_TENSORS, tuple, Graph)):
            raise StructureError("Window", "grid must be a Grid", type(self.grid).__name__)
        if self.grid is not None:
            self._check_axes()
        dilated = isinstance(self.dilation, tuple) or (type(self.dilation) is int and self.dilation != 1)
        if self.center is not None and (self.grid is not None or dilated or isinstance(self.radius, tuple)):
            raise StructureError("Window", "a center goes with an integer radius, no grid and no dilation", repr(self))
        if isinstance(self.center, Tensor) and not self.center.is_floating_point():
            raise StructureError("Window", "center must be floating", self.center.dtype, "Convert it with .float().")
        if isinstance(self.center, Tensor) and not self.center.dim():
            raise StructureError("Window", "center must have shape (..., N)", (), "Expand it to the outputs.")

    @property
    def num_inputs(self) -> int | None:
        return None if self.grid is None else self.grid.num_entries

    @property
    def num_outputs(self) -> int | None:
        return self.num_inputs if self.center is None else self.center.shape[-1]

    def on(self, grid: Grid) -> Window:
        """Return the window over the entries of `grid`."""
        return dataclasses.replace(self, grid=grid)

    def _contains(self, m: Tensor, n: Tensor) -> Tensor:
        axes = self.axes()
        if self.center is not None:
            return (m - self.center[..., n]).abs() <= axes[0][0]
        if self.grid is None:
            return _near(m - n, *axes[0])
        keep = torch.ones((), dtype=torch.bool, device=m.device)
        for (radius, dilation), stride, size in zip(axes, self.grid.strides, self.grid.shape, strict=True):
            stride, size = max(stride, 1), max(size, 1)
            offset = m // stride % size - n // stride % size
            if self.grid.periodic:
                circle = torch.zeros(size, dtype=torch.bool, device=m.device)
                circle[enumeration.circle_offsets(size, radius, dilation)] = True
                keep = keep & circle[offset % size]
            else:
                keep = keep & _near(offset, radius, dilation)
        return keep

    def edges(self, num_inputs: int, num_outputs: int, device: Device = None) -> Graph | None:
        self.check("Window", num_inputs, num_outputs)
        if self.center is not None:
            return self._edges_near(self.center.detach().to(device), num_inputs)
        shape = (num_inputs,) if self.grid is None else self.grid.shape
        periodic = self.grid is not None and self.grid.periodic
        axes = [enumeration.circle_pairs(size, radius, dilation, device) if periodic
                else enumeration.window_pairs(size, size if self.grid else num_outputs, radius, dilation, device)
                for (radius, dilation), size in zip(self.axes(), shape, strict=True)]
        return listed(enumeration.product_pairs(axes, shape), num_inputs, num_outputs)

    @property
    def listed(self) -> bool:
        return self.center is None or (self.center.dim() == 1 and not torch.compiler.is_compiling())

    @property
    def batch_shape(self) -> tuple[int, ...]:
        return () if self.center is None else tuple(self.center.shape[:-1])

    def edge_bound(self, num_inputs: int, num_outputs: int) -> int | None:
        if self.center is not None and self.center.dim() > 1:
            return None
        sizes = (num_inputs,) if self.grid is None else self.grid.shape
        bound = num_outputs
        for (radius, _), size in zip(self.axes(), sizes, strict=True):
            bound *= enumeration.at_most(2 * radius + 1, size)
        return bound

    def restricted(self, to: Any) -> list[Support] | None:
        if self.center is not None:
            return [dataclasses.replace(self, center=to.from_first_input(to.of_outputs(self.center, -1, 1)))]
        return [self] if self.grid is None and to.aligned else None

    def transpose(self) -> Support:
        return self if self.center is None else Transposed(self)

    def _edges_near(self, center: Tensor, num_inputs: int) -> Graph | None:
        if center.dim() > 1 or torch.compiler.is_compiling() or private.is_wrapped(center):
            return None
        wider = enumeration.near_pairs(num_inputs, center, self.axes()[0][0] + 1)
        graph = listed(wider, num_inputs, center.shape[0])
        return filtered(graph, self.to(center.device).contains(graph.source, graph.target))

    def axes(self) -> list[tuple[int, int]]:
        """Return (radius, dilation) of each axis."""
        self._check_axes()
        axes = 1 if self.grid is None else self.grid.ndim
        sizes, steps = self.radius, self.dilation
        radii = tuple((size - 1) // 2 for size in sizes) if isinstance(sizes, tuple) else (sizes,) * axes
        return list(zip(radii, steps if isinstance(steps, tuple) else (steps,) * axes, strict=True))

    def _check_axes(self) -> None:
        axes = 1 if self.grid is None else self.grid.ndim
        for name, value in (("radius", self.radius), ("dilation", self.dilation)):
            if isinstance(value, tuple) and len(value) != axes:
                where = "a sequence" if self.grid is None else repr(self.grid)
                raise StructureError("Window", f"{name} must have one number for each axis of {where}", value,
                                     "A window on several axes needs their grid: window.on(grid).")


def _check_numbers(radius: int | tuple[int, ...], dilation: int | tuple[int, ...]) -> None:
    for size in radius if isinstance(radius, tuple) else (radius,):
        check_size("Window", "radius", size)
        if isinstance(radius, tuple) and type(size) is int and size % 2 == 0:
            raise StructureError("Window", "a tuple gives neighborhood sizes, each odd", radius,
                                 "Give one integer for a radius.")
    for step in dilation if isinstance(dilation, tuple) else (dilation,):
        if check_size("Window", "dilation", step) == 0:
            raise StructureError("Window", "dilation must be a positive integer", step)


def _near(offset: Tensor, radius: int, dilation: int) -> Tensor:
    near = offset.abs() <= radius * dilation
    return near if dilation == 1 else near & (offset % dilation == 0)
