"""Mechanisms that read a grid: shifts, cuboids of shifts, pooling."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from functools import lru_cache
from typing import Any, cast

import torch

from structconv.bases.base import Basis
from structconv.bases.pooling import Pooling
from structconv.bases.shift import PADDINGS, Ints, Shift, cuboid_offsets, per_axis
from structconv.derived import derived
from structconv.errors import ConfigError, StructureError
from structconv.mechanisms.expression import Inputs, Mechanism
from structconv.shapes import check_choice, check_not_traced
from structconv.structures.batching import GridBatch
from structconv.structures.grid import Grid
from structconv.structures.samples import Samples
from structconv.written import one_or_each, written

__all__ = ["Cuboid", "GridMechanism", "Pool", "Shifts"]

AnyGrid = Grid | GridBatch
_MODES = ("zeros", "circular", "reflect", "replicate")
#: Remembered, because values that are derived from a grid or a shift live as long as it does.
_line = lru_cache(maxsize=64)(Grid)


@lru_cache(maxsize=256)
def _shift(mechanism: str, *args: Any) -> Shift:
    """The shifts; `StructureError` if their window is larger than a grid with its padding."""
    shift = Shift(*args)
    for before, after in zip(grids_of(shift.grid), grids_of(shift.output_grid), strict=True):
        if before.num_entries and not after.num_entries:
            raise StructureError(mechanism, "the window must not be larger than the grid with its padding",
                                 repr(before), "Add padding, or take a smaller window.")
    return shift


def _line_of(size: int) -> Grid:
    """A grid of one axis with `size` entries."""
    if type(size) is int and not torch.compiler.is_compiling():
        return _line(size)
    check_not_traced(size)
    return Grid(size)


def grids_of(grid: AnyGrid) -> tuple[Grid, ...]:
    """The grids of a batch; of one grid itself."""
    return grid.grids if isinstance(grid, GridBatch) else (grid,)


class GridMechanism(Mechanism):
    """A mechanism over a `Grid` or `GridBatch`; without a structure, one with one axis takes x's entries in a row.

    Example:

        >>> from structconv import Conv, Grid
        >>> from structconv.mechanisms import GridMechanism
        >>> class Knight(GridMechanism):
        ...     ndim, size = 2, 2
        ...     def shift_options(self, ndim):                       # offsets, padding, stride, growth
        ...         return ((1, 2), (2, 1)), "zeros", 1, 0
        >>> Conv(Knight(), 8, 4)(torch.randn(16, 8), Grid((4, 4))).shape
        torch.Size([16, 4])
    """

    reads: Collection[str] = ("structure",)
    _reads_sizes = False
    batching = "structure"
    #: The number of axes of the grid; `None` where any will do.
    ndim: int | None = None

    def shift_options(self, ndim: int) -> tuple[Any, ...]:
        """Return offsets, padding, stride and growth of the shifts that this mechanism builds on a grid."""
        raise NotImplementedError

    def shift(self, grid: AnyGrid, device: torch.device | str = "cpu") -> Shift:
        """The shifts that this mechanism makes of a grid."""
        options = self.shift_options(grid.ndim if isinstance(grid, Grid) else grid.grids[0].ndim)
        if torch.compiler.is_compiling():
            offsets, padding, stride, grow = options
            return Shift(grid, offsets, padding, stride, grow, device)
        return _shift(type(self).__name__, grid, *options, device)

    def forward(self, inputs: Inputs) -> Basis:
        grid = inputs.structure
        if type(grid) is not Grid or self.ndim not in (None, len(grid.shape)):
            grid = self._grid(grid, inputs.num_inputs)
        return self.shift(grid, inputs.x.device)

    def _outputs_are(self, structure: Any, num_inputs: int) -> str | None:
        grid = self._grid(structure, num_inputs)
        return "x" if self.shift(grid).output_grid == grid else None

    def output_structure(self, structure: AnyGrid | None) -> AnyGrid | None:
        """Return the grid of the outputs, for inputs on the grid `structure`; `None` without a grid."""
        return None if structure is None else self.shift(self._grid(structure, 0)).output_grid

    def _grid(self, structure: Any, num_inputs: int) -> AnyGrid:
        name = type(self).__name__
        if structure is None and self.ndim in (None, 1):
            return _line_of(num_inputs)
        axes = "any number of" if self.ndim is None else self.ndim
        expected = f"structure must be a Grid with {axes} axes"
        sizes = ", ".join("HWDTUV"[axis] for axis in range(self.ndim or 2))
        if isinstance(structure, Samples) and self.ndim in (None, 1):
            return derived(structure, "lines", lambda: GridBatch(tuple(map(_line_of, structure.sizes()[0]))))
        if not isinstance(structure, Grid | GridBatch):
            raise StructureError(name, expected, type(structure).__name__,
                                 f"Call it as layer(x, structure=Grid(({sizes}))).")
        if self.ndim is not None and any(grid.ndim != self.ndim for grid in grids_of(structure)):
            raise StructureError(name, expected, repr(structure), "Offsets and sizes need one number an axis.")
        return structure


class Shifts(GridMechanism):
    """Any set of shifts: y_n = sum_k x_(n - Delta_k) Theta_k (Andreoli 2019, Definition 1).

    Args:
        offsets: Delta_k, one integer an axis, or one integer for a sequence; K is their number.
        padding: "zeros", "circular", "reflect", "replicate" or "none" (the output grid shrinks); by default
            "circular" on a periodic grid, else "zeros".
        stride: distance of neighboring outputs, for all axes or for each.
        structure: the name of the one that it reads, in a call with several.

    Example:

        >>> from structconv import Shifts
        >>> Shifts([-1, 0, 1]).basis(torch.zeros(4, 1)).dense()[0]     # offset -1: output n reads input n + 1
        tensor([[0., 0., 0., 0.],
                [1., 0., 0., 0.],
                [0., 1., 0., 0.],
                [0., 0., 1., 0.]])
    """

    def __init__(self, offsets: Sequence[Ints], padding: str | None = None, stride: Ints = 1, *,
                 structure: str | None = None) -> None:
        super().__init__(structure=structure)
        if not isinstance(offsets, (list, tuple)) or not offsets:
            raise ConfigError("Shifts", "offsets must be a non-empty sequence of offsets", repr(offsets),
                              "For one write [(2, 4)].")
        self.ndim = len(offsets[0]) if isinstance(offsets[0], (list, tuple)) else 1
        self.offsets = tuple(per_axis("Shifts", "each offset", offset, self.ndim) for offset in offsets)
        if padding is not None:
            check_choice("Shifts", "padding", padding, PADDINGS)
        self.padding = padding
        self.stride = per_axis("Shifts", "stride", stride, self.ndim, least=1)

    @property
    def size(self) -> int:
        return len(self.offsets)

    def shift_options(self, ndim: int) -> tuple[Any, ...]:
        return self.offsets, self.padding, self.stride, None

    def extra_repr(self) -> str:
        offsets = [offset[0] if self.ndim == 1 else offset for offset in self.offsets]
        return written(self, {"offsets": offsets, "stride": one_or_each(self.stride)})


class Cuboid(GridMechanism):
    """A window of shifts, as convolution layers have it (Andreoli 2019, Definition 2).

    Output n reads the inputs stride n - low + j dilation - offset, 0 <= j < kernel_size, on each axis, low being the
    padding before the first input. An axis of size S has floor((S + low + high - dilation (kernel_size - 1) - 1) /
    stride) + 1 outputs. Heads are in row-major order of j, as in a convolution kernel.

    Args:
        kernel_size: one integer for a sequence, or one an axis; K is their product.
        stride, dilation: for all axes or for each. The strides of Definition 2 (delta_i) are the dilation.
        padding: how much is added around the grid. "same" centers the window, low = floor(dilation (kernel_size - 1)
            / 2), so that the output grid has ceil(S / stride) points; so does the name of a `padding_mode`, and
            `None`. "valid" or "none" adds nothing. An integer adds as much on both sides of all axes; a tuple has an
            integer, or a pair (low, high), an axis.
        padding_mode: "zeros", "circular", "reflect" or "replicate"; by default "circular" on a periodic grid, else
            "zeros".
        offset: added to Delta, for all axes or for each. Without padding it has no effect, because the output grid
            begins where the window fits.
        structure: the name of the one that it reads, in a call with several.

    Example:

        >>> from structconv import Conv, Cuboid, Grid
        >>> Conv(Cuboid((3, 3), stride=2), 4, 8)(torch.randn(36, 4), Grid((6, 6))).shape
        torch.Size([9, 8])
    """

    def __init__(self, kernel_size: Ints, stride: Ints = 1, dilation: Ints = 1,
                 padding: str | int | Sequence[int | tuple[int, int]] | None = None, padding_mode: str | None = None,
                 offset: Ints = 0, *, structure: str | None = None) -> None:
        super().__init__(structure=structure)
        ndim = len(kernel_size) if isinstance(kernel_size, (list, tuple)) else 1
        self.ndim = ndim
        self.kernel_size = per_axis("Cuboid", "kernel_size", kernel_size, ndim, least=1)
        self.stride = per_axis("Cuboid", "stride", stride, ndim, least=1)
        self.dilation = per_axis("Cuboid", "dilation", dilation, ndim, least=1)
        self.offset = per_axis("Cuboid", "offset", offset, ndim)
        if padding in _MODES:
            if padding_mode not in (None, padding):
                got = f"{padding!r} and {padding_mode!r}"
                raise ConfigError("Cuboid", "padding and padding_mode must agree", got)
            padding, padding_mode = "same", str(padding)
        if padding_mode is not None:
            check_choice("Cuboid", "padding_mode", padding_mode, _MODES)
        self.padding = self._amounts("same" if padding is None else padding)
        stays = not any(self.offset) and not any(amount for pair in self.padding for amount in pair)
        bare = stays or padding in ("valid", "none")
        self.padding_mode = "none" if bare else padding_mode
        low = tuple(pair[0] + offset for pair, offset in zip(self.padding, self.offset, strict=True))
        grow = tuple(sum(pair) - reach for pair, reach in zip(self.padding, self._reach(), strict=True))
        offsets = cuboid_offsets(self.kernel_size, self.dilation, low)
        self._options = offsets, self.padding_mode, self.stride, grow

    @property
    def size(self) -> int:
        return math.prod(self.kernel_size)

    def shift_options(self, ndim: int) -> tuple[Any, ...]:
        return self._options

    def extra_repr(self) -> str:
        own = {name: one_or_each(getattr(self, name)) for name in ("stride", "dilation", "offset")}
        same, bare = self.padding == self._amounts("same"), self.padding_mode == "none"
        padding = "valid" if bare and (any(self.offset) or not same) else None if same else self.padding
        return written(self, {**own, "padding": padding, "padding_mode": None if bare else self.padding_mode})

    def _reach(self) -> list[int]:
        """dilation (kernel_size - 1) on each axis."""
        return [step * (size - 1) for step, size in zip(self.dilation, self.kernel_size, strict=True)]

    def _amounts(self, padding: Any) -> tuple[tuple[int, int], ...]:
        """(low, high) on each axis."""
        if isinstance(padding, str):
            check_choice("Cuboid", "padding", padding, (*_MODES, "same", "valid", "none"))
            return tuple((reach // 2, reach - reach // 2) if padding == "same" else (0, 0) for reach in self._reach())
        if isinstance(padding, (list, tuple)) and all(isinstance(pair, (list, tuple)) for pair in padding):
            pairs = [per_axis("Cuboid", "padding", pair, 2, least=0) for pair in padding]
            if len(pairs) == self.ndim:
                return tuple((pair[0], pair[1]) for pair in pairs)
            raise ConfigError("Cuboid", f"padding must have {self.ndim} pairs, one an axis", repr(padding))
        ndim = len(self.kernel_size)
        return tuple((amount, amount) for amount in per_axis("Cuboid", "padding", padding, ndim, least=0))


class Pool(GridMechanism):
    """Average pooling: one matrix, A[m, n] = 1 / |window| where m is in the window of n, onto a coarser grid.

    Windows that would leave the grid and its padding are left out: an axis of size S has
    floor((S + 2 padding - window) / stride) + 1 outputs. Padded entries are zeros that count, as in torch's layers;
    `Pool(...).normalize("sum")` divides by the entries that there are.
    `Pool(...).transpose()`, called with the finer grid as its structure, spreads each entry over its window.

    Args:
        window: its size, for all axes of the grid of the call, or one an axis.
        stride: distance of neighboring windows; the window's size by default.
        padding: zeros before and after each axis, at most half a window.
        structure: the name of the one that it reads, in a call with several.

    Example:

        >>> from structconv import Pool
        >>> Pool(2).basis(torch.zeros(4, 1)).analysis(torch.tensor([[1.0], [3.0], [5.0], [7.0]])).flatten()
        tensor([2., 6.])
    """

    def __init__(self, window: Ints, stride: Ints | None = None, padding: Ints = 0, *,
                 structure: str | None = None) -> None:
        super().__init__(structure=structure)
        self.ndim = len(window) if isinstance(window, (list, tuple)) else None
        self.window = per_axis("Pool", "window", window, self.ndim or 1, least=1)
        stride = self.window if stride is None else stride
        if self.ndim is None and isinstance(stride, (list, tuple)) and len(stride) > 1:
            raise ConfigError("Pool", "a stride for each axis needs a window for each axis", repr(window))
        self.stride = per_axis("Pool", "stride", stride, self.ndim or 1, least=1)
        self.padding = per_axis("Pool", "padding", padding, self.ndim or 1, least=0)
        if any(2 * amount > size for amount, size in zip(self.padding, self.window, strict=True)):
            raise ConfigError("Pool", f"padding must be at most half of window={self.window}", self.padding)

    def shift_options(self, ndim: int) -> tuple[Any, ...]:
        window, stride, padding = ((sizes * ndim if self.ndim is None else sizes)
                                   for sizes in (self.window, self.stride, self.padding))
        if not any(padding):
            return cuboid_offsets(window), "none", stride, None
        grow = tuple(2 * amount - size + 1 for amount, size in zip(padding, window, strict=True))
        return cuboid_offsets(window, 1, padding), "zeros", stride, grow

    def forward(self, inputs: Inputs) -> Basis:
        shift = cast(Shift, super().forward(inputs))
        return Pooling(shift, 1 / shift.size)

    def extra_repr(self) -> str:
        window = one_or_each(self.window) if self.ndim is None else self.window
        stride = None if self.stride == self.window else one_or_each(self.stride)
        return written(self, {"window": window, "stride": stride, "padding": one_or_each(self.padding)})
