"""`Grid`: entries at the points of a regular grid of any number of axes; a sequence is a grid with one."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from structconv.arguments import explained
from structconv.derived import derived
from structconv.errors import StructureError
from structconv.structures.graph import Graph, check_size
from structconv.structures.values import FrozenValue, structure

__all__ = ["Grid"]


@structure(eq=True, init=False)
class Grid(FrozenValue):
    """Entries at the points of a grid S_1 x ... x S_L, numbered in row-major order: the last axis runs fastest.

    Args:
        shape: the size of each axis, or one integer for a sequence. An axis may have size 0: no entries.
        periodic: if True, a shift off one end of an axis comes back at the other end.

    Raises:
        StructureError: a size is negative or not an integer, or there is no axis.

    ::

        Grid((28, 28)), Grid(10), Grid((8, 8), periodic=True)

    Example:

        >>> from structconv import Grid
        >>> Grid((2, 3)).coordinates().tolist()
        [[0, 0], [0, 1], [0, 2], [1, 0], [1, 1], [1, 2]]
        >>> Grid((8, 8)).graph()
        Graph(M=64, N=64, E=224, int64)
    """

    shape: tuple[int, ...]
    periodic: bool

    def __init__(self, shape: int | Sequence[int], periodic: bool = False) -> None:
        sizes = tuple(shape) if isinstance(shape, (list, tuple, torch.Size)) else (shape,)
        if not sizes:
            raise StructureError("Grid", "shape must have at least one axis", repr(shape))
        if isinstance(periodic, (str, int, float, list, tuple)) and not isinstance(periodic, bool):
            raise StructureError("Grid", "periodic must be True or False, for all axes", repr(periodic),
                                 f"For two axes write Grid(({shape}, {periodic}))." if type(periodic) is int else "")
        object.__setattr__(self, "shape", tuple(check_size("Grid", "each size of shape", size) for size in sizes))
        object.__setattr__(self, "periodic", periodic)

    @property
    def ndim(self) -> int:
        """L, the number of axes."""
        return len(self.shape)

    @property
    def num_entries(self) -> int:
        """M, the number of points: the product of the sizes."""
        return math.prod(self.shape)

    @property
    def strides(self) -> tuple[int, ...]:
        """The distance, in entries, between two neighbors along each axis."""
        return tuple(math.prod(self.shape[axis + 1:]) for axis in range(self.ndim))

    def coordinates(self, device: torch.device | str | None = None) -> Tensor:
        """Return the coordinates of each entry: int64 (M, L), in entry order. O(M L)."""
        return self.unravel(torch.arange(self.num_entries, device=device))

    def unravel(self, entries: Tensor) -> Tensor:
        """The points of these entries: integers (...) -> (..., L)."""
        if not entries.numel():
            return entries.new_zeros(*entries.shape, self.ndim)
        axes = [entries // stride % size for stride, size in zip(self.strides, self.shape, strict=True)]
        return torch.stack(axes, dim=-1)

    def ravel(self, points: Tensor) -> Tensor:
        """The entries at these points, which must lie on the grid: integers (..., L) -> (...)."""
        strides = torch.tensor(self.strides, dtype=points.dtype, device=points.device)
        return (points * strides).sum(-1).to(points.dtype)

    @explained
    def graph(self, diagonal: bool = False, device: torch.device | str | None = None) -> Graph:
        """The pixel graph: each point joined, in both directions, to its neighbors.

        `diagonal=False` joins points at distance one along one axis (4 neighbors on an image); `True` at distance one
        along any number of axes (8). Edges come in order of their source, then target; no loop and no pair twice,
        also on a periodic axis of size 1 or 2. O(M 2L) edges, or O(M 3^L).
        """
        return derived(self, ("graph", diagonal, str(device)), lambda: _pixel_graph(self, diagonal, device))

    def __repr__(self) -> str:
        return f"Grid({self.shape}{', periodic=True' if self.periodic is True else ''})"


def _pixel_graph(grid: Grid, diagonal: bool, device: torch.device | str | None) -> Graph:
    entries = grid.num_entries
    if not entries:
        return Graph(torch.zeros(2, 0, dtype=torch.int64, device=device), num_nodes=0)
    steps = [step for step in itertools.product((-1, 0, 1), repeat=grid.ndim)
             if (any(step) if diagonal else sum(map(abs, step)) == 1)]
    points_M1L = grid.coordinates(device).unsqueeze(1)
    sizes = torch.tensor(grid.shape, device=device)
    reached_MKL = points_M1L + torch.tensor(steps, device=device)
    if grid.periodic:
        reached_MKL = reached_MKL % sizes
    on_grid_MK = ((reached_MKL >= 0) & (reached_MKL < sizes)).all(-1)
    source_MK = torch.arange(entries, device=device).unsqueeze(1).expand(on_grid_MK.shape)
    source, target = source_MK[on_grid_MK], grid.ravel(reached_MKL)[on_grid_MK]
    pairs = torch.unique((source * entries + target)[source != target])
    return Graph(torch.stack([pairs // entries, pairs % entries]), num_nodes=entries)
