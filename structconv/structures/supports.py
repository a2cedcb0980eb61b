"""The supports: sets of pairs (m, n) by order, window, block, padding, graph or table.

The base class and the combinations `&`, `|`, `~` are in `masks.py`.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Self

import torch
from torch import Tensor

from structconv import torch_compat as private
from structconv.derived import derived
from structconv.errors import StructureError, text_of
from structconv.shapes import NO_TENSORS
from structconv.structures import enumeration
from structconv.structures.graph import Graph, check_size
from structconv.structures.grid import Grid
from structconv.structures.masks import Device, Support, Transposed, filtered, listed
from structconv.structures.values import structure

__all__ = ["Blocks", "Causal", "DenseMask", "EdgeSupport", "Global", "Padding", "Support", "Window"]


@structure()
class Causal(Support):
    """m <= n: an output reads itself and the entries before it.

    Aligned at the first entry also where M differs from N, as `is_causal` of torch's scaled dot product attention.

    Example:

        >>> from structconv import Causal, Conv, DotProduct
        >>> layer = Conv(DotProduct(dim=4).masked(keep=Causal()).softmax(), 8, 8)
        >>> layer.basis(torch.randn(3, 8)).dense()[0].count_nonzero(0)     # inputs of each output
        tensor([1, 2, 3])
    """

    may_mask_inputs = False

    def _contains(self, m: Tensor, n: Tensor) -> Tensor:
        return m <= n

    def restricted(self, to: Any) -> list[Support] | None:
        return [self] if to.aligned else None


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
        for name in ("radius", "dilation"):
            if isinstance(numbers := getattr(self, name), list):
                object.__setattr__(self, name, tuple(numbers))
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


@structure()
class Blocks(Support):
    """m and n in the same block of `size` consecutive entries: m // size == n // size. Lists O(N size) edges.

    Example:

        >>> from structconv import Conv, DotProduct
        >>> from structconv.structures import Blocks
        >>> layer = Conv(DotProduct(dim=4).masked(keep=Blocks(2)).softmax(), 8, 8)
        >>> layer.basis(torch.randn(5, 8)).dense()[0].count_nonzero(0)     # inputs of each output
        tensor([2, 2, 2, 2, 1])
    """

    size: int

    def __post_init__(self) -> None:
        if check_size("Blocks", "size", self.size) == 0:
            raise StructureError("Blocks", "size must be a positive integer", repr(self.size))

    def _contains(self, m: Tensor, n: Tensor) -> Tensor:
        return m // self.size == n // self.size

    def edges(self, num_inputs: int, num_outputs: int, device: Device = None) -> Graph:
        return listed(enumeration.block_pairs(num_inputs, num_outputs, self.size, device), num_inputs, num_outputs)

    def edge_bound(self, num_inputs: int, num_outputs: int) -> int:
        return num_outputs * enumeration.at_most(self.size, num_inputs)

    listed = True

    def transpose(self) -> Blocks:
        return self


@structure()
class Global(Support):
    """The pairs whose input or output is a global entry: `Window(256) | Global(1)` is Longformer's attention.

    Args:
        entries: how many of the first entries are global, or which ones, by their numbers. Numbers beyond the
            entries are not counted.

    Raises:
        StructureError: a number that is no integer >= 0, or comes twice.

    Lists G (M + N) - G^2 edges for G global entries. (Beltagy et al. 2020, section 3.1.)

    Example:

        >>> from structconv import Conv, DotProduct, Window
        >>> from structconv.structures import Global
        >>> layer = Conv(DotProduct(dim=4).masked(keep=Window(1) | Global(1)).softmax(), 8, 8)
        >>> layer.basis(torch.randn(5, 8)).dense()[0].count_nonzero(0)     # inputs of each output
        tensor([5, 3, 4, 4, 3])
    """

    entries: int | tuple[int, ...]

    def __post_init__(self) -> None:
        numbers = self.entries if isinstance(self.entries, list | tuple) else (self.entries,)
        for number in numbers:
            check_size("Global", "entries", number)
        known = [number for number in numbers if type(number) is int]  # a tracer has stand-ins
        if len(set(known)) < len(known):
            raise StructureError("Global", "entries must be distinct numbers", self.entries)
        if isinstance(self.entries, list):
            object.__setattr__(self, "entries", tuple(self.entries))

    def _contains(self, m: Tensor, n: Tensor) -> Tensor:
        if not isinstance(self.entries, tuple):
            return (m < self.entries) | (n < self.entries)
        numbers = torch.tensor(self.entries, dtype=torch.int64, device=m.device)
        return torch.isin(m, numbers) | torch.isin(n, numbers)

    def edges(self, num_inputs: int, num_outputs: int, device: Device = None) -> Graph:
        inputs, outputs = self._among(num_inputs, device), self._among(num_outputs, device)
        return listed(enumeration.cross_pairs(inputs, outputs, num_inputs, num_outputs), num_inputs, num_outputs)

    def edge_bound(self, num_inputs: int, num_outputs: int) -> int:
        inputs, outputs = self._count(num_inputs), self._count(num_outputs)
        return outputs * num_inputs + inputs * (num_outputs - outputs)

    listed = True

    def transpose(self) -> Global:
        return self

    def _count(self, size: int) -> int:
        """Return the number of global entries among `size` entries."""
        if not isinstance(self.entries, tuple):
            return min(self.entries, size)
        return sum(number < size for number in self.entries)

    def _among(self, size: int, device: Device) -> Tensor:
        """The global entries below `size`, in ascending order."""
        if not isinstance(self.entries, tuple):
            return torch.arange(min(self.entries, size), device=device)
        return torch.tensor(sorted(number for number in self.entries if number < size), dtype=torch.int64,
                            device=device)


@structure()
class Padding(Support):
    """The inputs that exist: `keep` (..., M) is true where input m is an entry and false where it is padding.

    Leading dimensions are the batch's.

    Example:

        >>> from structconv import Conv, DotProduct, Padding
        >>> keep = torch.tensor([True, True, False])
        >>> layer = Conv(DotProduct(dim=4).masked(keep=Padding(keep)).softmax(), 8, 8)
        >>> layer.basis(torch.randn(3, 8)).dense()[0, 2].tolist()          # input 2 is padding
        [0.0, 0.0, 0.0]
    """

    keep: Tensor

    def __post_init__(self) -> None:
        _check_mask("Padding", self.keep, 1, "(..., M)")

    @property
    def num_inputs(self) -> int:
        return self.keep.shape[-1]

    @property
    def batch_shape(self) -> tuple[int, ...]:
        return tuple(self.keep.shape[:-1])

    def _contains(self, m: Tensor, n: Tensor) -> Tensor:
        return self.keep[..., m]

    def check(self, owner: str, num_inputs: int, num_outputs: int | None) -> None:
        if self.num_inputs != num_inputs:
            raise StructureError(owner, f"a mask of inputs must have shape (..., M={num_inputs})",
                                 tuple(self.keep.shape), "A table of pairs (..., M, N) goes as DenseMask(table).")

    def visible_inputs(self) -> Tensor:
        return self.keep

    def restricted(self, to: Any) -> list[Support]:
        return [Padding(to.of_inputs(self.keep, -1, 1))]


@structure()
class DenseMask(Support):
    """Any pairs at all, by a table: `keep` (..., M, N). The one support that holds M N booleans.

    Example:

        >>> from structconv import Conv, DotProduct
        >>> from structconv.structures import DenseMask
        >>> layer = Conv(DotProduct(dim=4).masked(keep=DenseMask(torch.eye(3, dtype=torch.bool))).softmax(), 8, 8)
        >>> layer.basis(torch.randn(3, 8)).dense()[0].tolist()
        [[1.0, 0.0, 0.0], [0.0, 1.0, 0.0], [0.0, 0.0, 1.0]]
    """

    keep: Tensor

    def __post_init__(self) -> None:
        _check_mask("DenseMask", self.keep, 2, "(..., M, N)")

    @property
    def num_inputs(self) -> int:
        return self.keep.shape[-2]

    @property
    def num_outputs(self) -> int:
        return self.keep.shape[-1]

    @property
    def batch_shape(self) -> tuple[int, ...]:
        return tuple(self.keep.shape[:-2])

    def _contains(self, m: Tensor, n: Tensor) -> Tensor:
        return self.keep[..., m, n]

    def check(self, owner: str, num_inputs: int, num_outputs: int | None) -> None:
        *_, inputs, outputs = self.keep.shape
        if inputs != num_inputs or (num_outputs is not None and num_outputs != outputs):
            raise StructureError(owner, f"a mask of pairs must have shape (..., M={num_inputs}, "
                                 f"{'N' if num_outputs is None else f'N={num_outputs}'})",
                                 tuple(self.keep.shape), "A mask of the inputs of a batch, (..., M), goes as "
                                 "Padding(keep)." if outputs == num_inputs else "")

    def visible_inputs(self) -> Tensor:
        return self.keep.any(-1)

    def restricted(self, to: Any) -> list[Support] | None:
        if to.number is None:
            return None
        return [DenseMask(to.of_outputs(to.of_inputs(self.keep, -2, 2), -1, 2))]

    def transpose(self) -> DenseMask:
        return DenseMask(self.keep.mT)


@structure()
class EdgeSupport(Support):
    """The pairs joined by an edge of `graph`; its weights are not read.

    The list is the graph itself, in its edge order. Duplicate edges stay in the list, each a pair of its own with its
    own weight, whereas `contains` says only that the pair exists.

    Example:

        >>> from structconv import Graph
        >>> from structconv.structures import EdgeSupport
        >>> support = EdgeSupport(Graph(torch.tensor([[0], [1]]), num_nodes=2))
        >>> support.contains(torch.tensor([[0], [1]]), torch.tensor([0, 1]))
        tensor([[False,  True],
                [False, False]])
    """

    graph: Graph

    @property
    def samples(self) -> Any:
        return self.graph.samples

    @property
    def num_inputs(self) -> int:
        return self.graph.num_inputs

    @property
    def num_outputs(self) -> int:
        return self.graph.num_outputs

    def _contains(self, m: Tensor, n: Tensor) -> Tensor:
        keys = derived(self.graph.edge_index, ("pair keys", self.graph.num_outputs), lambda: _pair_keys(self.graph))
        pairs = m.long() * self.graph.num_outputs + n.long()
        keys = keys.to(pairs.device)
        return keys[torch.searchsorted(keys, pairs)] == pairs

    def edges(self, num_inputs: int, num_outputs: int, device: Device = None) -> Graph:
        self.check("EdgeSupport", num_inputs, num_outputs)
        return self.graph if _same_device(self.graph.edge_index.device, device) else self.graph.to(device)

    def listing(self, num_inputs: int, num_outputs: int, device: Device = None) -> tuple[Graph | None, bool]:
        return self.edges(num_inputs, num_outputs, device), True

    listed = repeats = True

    def edge_bound(self, num_inputs: int, num_outputs: int) -> int:
        return self.graph.num_edges

    def transpose(self) -> Self:
        return type(self)(self.graph.reversed())


@structure()
class DistinctEdges(EdgeSupport):
    """The pairs of a graph without duplicate edges."""

    repeats = False


Support._of_graph = EdgeSupport


def _pair_keys(graph: Graph) -> Tensor:
    """The sorted keys m N + n of the edges, then one that is above all keys, so that a search always finds a place."""
    keys = graph.source.long() * graph.num_outputs + graph.target.long()
    above = keys.new_full((1,), torch.iinfo(torch.int64).max)
    return torch.cat([keys.sort().values, above])


def _same_device(own: torch.device, other: Device) -> bool:
    if other is None:
        return True
    other = torch.device(other)
    return own.type == other.type and other.index in (None, own.index)


def _check_mask(owner: str, keep: Any, dims: int, pattern: str) -> None:
    if keep is None or isinstance(keep, (tuple, *NO_TENSORS)):
        raise StructureError(owner, f"keep must be a boolean tensor {pattern}", type(keep).__name__)
    if isinstance(keep, Tensor) and (keep.dtype != torch.bool or keep.dim() < dims):
        raise StructureError(owner, f"keep must be a boolean tensor {pattern}", f"{keep.dtype} {text_of(keep.shape)}",
                             "True keeps a pair.")


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
