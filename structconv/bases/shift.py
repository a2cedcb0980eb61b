"""Shift matrices on grids of any number of axes, their transposes, and cuboids of offsets in the layout of libraries.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from functools import reduce
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from structconv.arguments import explained
from structconv.bases.base import Basis, value
from structconv.bases.dense import check_heads
from structconv.bases.pairs import Pairs
from structconv.derived import derived
from structconv.errors import ConfigError, StructureError
from structconv.shapes import check_choice, check_device
from structconv.structures.batching import GridBatch
from structconv.structures.graph import Graph
from structconv.structures.grid import Grid

__all__ = ["CuboidSpec", "Shift", "ShiftTransposed", "cuboid_offsets"]

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


PADDINGS = ("zeros", "circular", "reflect", "replicate", "none")


@value
class Shift(Basis):
    """A[k, m, n] = 1 iff m = stride n - Delta_k + origin, on each axis of a grid (Andreoli 2019, Definition 1).

    A layer over it is a convolution, y_n = sum_k x_(n - Delta_k) Theta_k. The padding applies to positions m off the
    grid: "zeros" (the pair does not exist), "circular" (m modulo the size), "reflect" (the grid is mirrored at its end
    entries, which are not repeated), "replicate" (the end entry). With "none" the output grid shrinks to the positions
    at which no offset leaves the grid, the first of which is output 0; otherwise origin = 0. Memory: the (K, N) table
    of positions, computed once for each grid, and the products' output.

    Args:
        grid: the grid of the M inputs; in a batch of grids shifts stay within each grid.
        offsets: Delta_k for each k, one integer for each axis (or an integer, for a single axis); may exceed the grid.
        padding: one of the five above; default: "circular" on a periodic grid, else "zeros".
        stride: distance of neighboring outputs, for all axes or for each.
        grow: the number of entries by which the output grid exceeds the input grid, before striding: an axis of size S
            has floor((S - 1 + grow) / stride) + 1 outputs. Default: 0, or the shrinkage of "none". A convolution with
            kernel size k, dilation d and padding p has grow = 2 p - d (k - 1).
        device: the device of the pairs of `pattern()`; products run on the device of x.

    Raises:
        ConfigError: there are no offsets, an offset lacks an integer for an axis, or an option is unknown.

    Example:

        >>> from structconv import Grid, Shift
        >>> Shift(Grid(4), [1]).dense()[0]
        tensor([[0., 1., 0., 0.],
                [0., 0., 1., 0.],
                [0., 0., 0., 1.],
                [0., 0., 0., 0.]])
    """

    keeps_key = True

    grid: Grid | GridBatch
    offsets: tuple[Offset, ...]
    padding: str
    stride: tuple[int, ...]
    grow: tuple[int, ...]
    device: torch.device = torch.device("cpu")

    def __init__(self, grid: Grid | GridBatch, offsets: Sequence[Ints], padding: str | None = None, stride: Ints = 1,
                 grow: Ints | None = None, device: torch.device | str = "cpu") -> None:
        ndim, periodic = _axes_of(grid)
        padding = padding or ("circular" if periodic else "zeros")
        check_choice("Shift", "padding", padding, PADDINGS)
        listed = tuple(per_axis("Shift", "each offset", offset, ndim) for offset in _checked_offsets(offsets))
        shrunk = (0,) * ndim
        if padding == "none":
            shrunk = tuple(min(axis) - max(axis) for axis in zip(*listed, strict=True))
        grown = per_axis("Shift", "grow", shrunk if grow is None else grow, ndim)
        if padding == "none" and any(a > b for a, b in zip(grown, shrunk, strict=True)):
            raise ConfigError("Shift", f"grow must be at most {shrunk} without padding", grown)
        fields = {"grid": grid, "offsets": listed, "padding": padding, "grow": grown,
                  "device": check_device("Shift", device), "stride": per_axis("Shift", "stride", stride, ndim, least=1)}
        for name, field in fields.items():
            object.__setattr__(self, name, field)

    @property
    def size(self) -> int:
        return len(self.offsets)

    @property
    def num_inputs(self) -> int:
        return self.grid.num_entries

    @property
    def num_outputs(self) -> int:
        return sum(math.prod(self._output_shape(grid)) for grid in self._grids)

    @property
    def input_grid(self) -> Grid | GridBatch:
        """The grid of the M inputs."""
        return self.grid

    @property
    def output_grid(self) -> Grid | GridBatch:
        """The grid of the N outputs."""
        if not any(self.grow) and all(stride == 1 for stride in self.stride):
            return self.grid
        outputs = [Grid(self._output_shape(grid), periodic=grid.periodic) for grid in self._grids]
        return GridBatch(tuple(outputs)) if isinstance(self.grid, GridBatch) else outputs[0]

    @property
    def starts(self) -> tuple[Offset, ...]:
        """The position that output 0 reads, for each k: origin - Delta_k."""
        origin = tuple(max(axis) if self.padding == "none" else 0 for axis in zip(*self.offsets, strict=True))
        return tuple(tuple(o - d for o, d in zip(origin, offset, strict=True)) for offset in self.offsets)

    def as_cuboid(self) -> CuboidSpec | None:
        """The window that the offsets form, if it is one that a library's padding and convolution can express."""
        mode = "zeros" if self.padding == "none" else self.padding
        spec = recognize(self.starts, self.stride, self.grow, mode)
        if spec is None or isinstance(self.grid, GridBatch) or self.num_outputs == 0 or self.num_inputs == 0:
            return None
        if mode == "zeros":
            cut = zip(spec.pad_low, spec.pad_high, self.grid.shape, strict=True)
            return None if any(min(low, high) < -size for low, high, size in cut) else spec
        room = {"circular": 0, "reflect": -1, "replicate": None}[mode]
        for low, high, size in zip(spec.pad_low, spec.pad_high, self.grid.shape, strict=True):
            if min(low, high) < 0 or (room is not None and max(low, high) > size + room):
                return None
        return spec

    def table(self, device: torch.device | str = "cpu") -> Tensor:
        """Return the input that each output reads, int64 (K, N); -1 if there is none. O(K N) once for each grid."""
        key = ("shift", self.offsets, self.padding, self.stride, self.grow, str(device))
        return derived(self.grid, key, lambda: self._table(device))

    def dense(self, dtype: torch.dtype | None = None) -> Tensor:
        blocks = [self._dense(grid, dtype or torch.get_default_dtype()) for grid in self._grids]
        if len(blocks) == 1:
            return blocks[0]
        return torch.stack([torch.block_diag(*(block[k] for block in blocks)) for k in range(self.size)])

    def analysis(self, x: Tensor) -> Tensor:
        self.check_input(x, "Shift")
        rows = self._rows(x.device)
        y = self._with_gap(x).index_select(-2, rows.flatten())
        return y.unflatten(-2, rows.shape)

    def apply(self, r: Tensor) -> Tensor:
        check_heads(self, r)
        if r.shape[-3] != self.size:
            return self.analysis(r.squeeze(-3))
        rows, r = self._rows(r.device), self._with_gap(r)
        head = torch.arange(self.size, device=r.device).unsqueeze(-1) * r.shape[-2]
        return r.flatten(-3, -2).index_select(-2, (rows + head).flatten()).unflatten(-2, rows.shape)

    def synthesis(self, r: Tensor) -> Tensor:
        check_heads(self, r)
        heads = self._with_gap(r).expand(*r.shape[:-3], self.size, -1, -1).unbind(-3)
        return reduce(torch.add, (head.index_select(-2, rows)
                                  for head, rows in zip(heads, self._rows(r.device), strict=True)))

    def pattern(self) -> Graph | None:
        if torch.compiler.is_compiling():
            return None
        return derived(self.grid, ("shift pattern", self.offsets, self.padding, self.stride, self.grow,
                                   str(self.device)), self._pattern)

    def evaluate(self, pairs: Pairs) -> Tensor:
        table, target = self.table(pairs.device), pairs.target_index()
        read = table.index_select(-1, target.flatten()).unflatten(-1, target.shape)
        return (read == pairs.source_index()).to(pairs.dtype)

    def _transposed(self) -> Basis:
        mirrors = self.padding in ("zeros", "none") or (self.padding == "circular" and not any(self.grow))
        whole = all(size >= -grow for grid in self._grids for size, grow in zip(grid.shape, self.grow, strict=True))
        if not mirrors or not whole or any(s != 1 for s in self.stride):
            return ShiftTransposed(self)
        padding = "circular" if self.padding == "circular" else "zeros"
        shrink = tuple(-grow for grow in self.grow)
        return Shift(self.output_grid, self.starts, padding, grow=shrink, device=self.device)

    def __repr__(self) -> str:
        offsets = [offset[0] if len(offset) == 1 else offset for offset in self.offsets]
        listed = str(offsets) if len(offsets) <= 9 else f"[{str(offsets[:8])[1:-1]}, ... {len(offsets)} in all]"
        stride = "" if all(s == 1 for s in self.stride) else f", stride={self.stride}"
        return f"Shift({self.grid!r}, offsets={listed}, padding={self.padding!r}{stride})"

    _grids = property(lambda self: self.grid.grids if isinstance(self.grid, GridBatch) else (self.grid,))

    def _output_shape(self, grid: Grid) -> tuple[int, ...]:
        sizes = []
        for size, stride, grow in zip(grid.shape, self.stride, self.grow, strict=True):
            outputs = (size - 1 + grow) // stride + 1
            sizes.append(outputs if stride == 1 and grow >= 0 else max(outputs, 0))
        return tuple(sizes)

    def _positions(self, grid: Grid, device: torch.device | str) -> list[Tensor]:
        """Return the coordinate that each output coordinate reads, (K, N_a) for each axis a; -1 if there is none."""
        axes = zip(grid.shape, self._output_shape(grid), self.stride, zip(*self.starts, strict=True), strict=True)
        return [axis_positions(*axis, self.padding, device) for axis in axes]

    def _dense(self, grid: Grid, dtype: torch.dtype) -> Tensor:
        axes = []
        for size, positions in zip(grid.shape, self._positions(grid, self.device), strict=True):
            source = torch.arange(size, device=self.device).unsqueeze(-1)
            axes.append((positions.unsqueeze(-2) == source).to(dtype))
        return torch.stack([reduce(torch.kron, (a[k] for a in axes)) for k in range(self.size)])

    def _table(self, device: torch.device | str) -> Tensor:
        tables, first = [], 0
        for grid in self._grids:
            table = self._grid_table(grid, device)
            tables.append(torch.where(table < 0, table, table + first) if first else table)
            first += grid.num_entries
        return torch.cat(tables, dim=1) if len(tables) > 1 else tables[0]

    def _grid_table(self, grid: Grid, device: torch.device | str) -> Tensor:
        index, missing = torch.zeros((), dtype=torch.int64, device=device), torch.tensor(False, device=device)
        for axis, (position, step) in enumerate(zip(self._positions(grid, device), grid.strides, strict=True)):
            position = position.view(self.size, *(-1 if a == axis else 1 for a in range(grid.ndim)))
            index, missing = index + position * step, missing | (position < 0)
        return torch.where(missing, -1, index).flatten(1)

    def _rows(self, device: torch.device) -> Tensor:
        """The table with M, the row that `_with_gap` appends, in the place of -1."""
        if not self._gaps:
            return self.table(device)
        key = ("shift rows", self.offsets, self.padding, self.stride, self.grow, str(device))
        return derived(self.grid, key, lambda: _replace_missing(self.table(device), self.num_inputs))

    @property
    def _gaps(self) -> bool:
        return self.padding == "zeros" or any(size == 0 for grid in self._grids for size in grid.shape)

    def _with_gap(self, x: Tensor) -> Tensor:
        return functional.pad(x, (0, 0, 0, 1)) if self._gaps else x

    def _pattern(self) -> Graph:
        table = self.table("cpu" if self.device.type == "meta" else self.device)  # how many pairs depends on numbers
        target = torch.arange(table.shape[1], device=table.device).expand_as(table)
        exists = table >= 0
        key = torch.unique(target[exists] * self.num_inputs + table[exists])
        edges = torch.stack([key % max(self.num_inputs, 1), key // max(self.num_inputs, 1)])
        return Graph(edges.to(self.device), num_inputs=self.num_inputs, num_outputs=self.num_outputs)


@value
class ShiftTransposed(Basis):
    """A[k, m, n] = shift[k, n, m]: what a strided convolution scatters, back on the finer grid (upsampling).

    Every primitive is one scatter-add of K N C numbers.

    Example:

        >>> from structconv import Grid, Shift
        >>> from structconv.bases import ShiftTransposed
        >>> ShiftTransposed(Shift(Grid(4), [0], stride=2)).dense()[0]
        tensor([[1., 0., 0., 0.],
                [0., 0., 1., 0.]])
    """

    keeps_key = True

    shift: Shift

    @property
    def size(self) -> int:
        return self.shift.size

    @property
    def num_inputs(self) -> int:
        return self.shift.num_outputs

    @property
    def num_outputs(self) -> int:
        return self.shift.num_inputs

    _shown = "{0.shift!r}.transpose()"

    @property
    def input_grid(self) -> Grid | GridBatch:
        """The grid of the M inputs."""
        return self.shift.output_grid

    @property
    def output_grid(self) -> Grid | GridBatch:
        """The grid of the N outputs."""
        return self.shift.input_grid

    @property
    def device(self) -> torch.device:
        return self.shift.device

    def dense(self, dtype: torch.dtype | None = None) -> Tensor:
        return self.shift.dense(dtype).mT

    def apply(self, r: Tensor) -> Tensor:
        check_heads(self, r)
        slots = self.num_outputs + 1
        rows = _replace_missing(self.shift.table(r.device), self.num_outputs)
        rows = rows + torch.arange(self.size, device=r.device).unsqueeze(-1) * slots
        y = self._scatter(r, rows, self.size * slots).unflatten(-2, (self.size, slots))
        return y[..., :self.num_outputs, :]

    def synthesis(self, r: Tensor) -> Tensor:
        check_heads(self, r)
        rows = _replace_missing(self.shift.table(r.device), self.num_outputs)
        return self._scatter(r, rows, self.num_outputs + 1)[..., :self.num_outputs, :]

    def analysis(self, x: Tensor) -> Tensor:
        self.check_input(x, "ShiftTransposed")
        return self.apply(x.unsqueeze(-3))

    def pattern(self) -> Graph | None:
        graph = self.shift.pattern()
        return None if graph is None else graph.reversed()

    def evaluate(self, pairs: Pairs) -> Tensor:
        return pairs.restore(self.shift.evaluate(pairs.transposed()))

    def _transposed(self) -> Basis:
        return self.shift

    def _scatter(self, r: Tensor, rows: Tensor, slots: int) -> Tensor:
        r = r.expand(*r.shape[:-3], self.size, *r.shape[-2:]).flatten(-3, -2)
        return r.new_zeros(*r.shape[:-2], slots, r.shape[-1]).index_add(-2, rows.flatten(), r)


def _checked_offsets(offsets: Sequence[Ints]) -> Sequence[Ints]:
    if not isinstance(offsets, (list, tuple)):
        raise ConfigError("Shift", "offsets must be a sequence of offsets", repr(offsets), "For one write [(2, 4)].")
    if not offsets:
        raise ConfigError("Shift", "offsets must not be empty", repr(offsets), "K is their number.")
    return offsets


def _axes_of(grid: Grid | GridBatch) -> tuple[int, bool]:
    """The number of axes, and True if they are periodic, of one grid or of all grids of a batch."""
    if not isinstance(grid, Grid | GridBatch):
        raise StructureError("Shift", "grid must be a Grid or a GridBatch", type(grid).__name__)
    grids = grid.grids if isinstance(grid, GridBatch) else (grid,)
    kinds = {(g.ndim, g.periodic) for g in grids}
    if len(kinds) != 1:
        raise StructureError("Shift", "all grids of a batch must have one number of axes and agree on periodic", grid)
    return kinds.pop()


def axis_positions(size: int, outputs: int, stride: int, starts: Sequence[int], padding: str,
                   device: torch.device | str) -> Tensor:
    """Return the input that each output reads on one axis, (K, outputs), by the padding's rule; -1 if there is none."""
    position = stride * torch.arange(outputs, device=device) + torch.tensor(starts, device=device).unsqueeze(-1)
    if size == 0 or padding in ("zeros", "none"):
        return torch.where((position >= 0) & (position < size), position, -1)
    if padding == "circular":
        return position % size
    if padding == "replicate":
        return position.clamp(0, size - 1)
    period = max(2 * (size - 1), 1)
    position = position % period
    return torch.where(position < size, position, period - position)


def _replace_missing(table: Tensor, row: int) -> Tensor:
    return torch.where(table < 0, row, table)
