"""Shifts that depend on the content: weights of taps computed at each position (dynamic convolution), and offsets
computed at each position (deformable convolution).
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from structconv.bases.base import Basis
from structconv.bases.shift import Ints
from structconv.bases.taps import Taps
from structconv.errors import ShapeError
from structconv.mechanisms.expression import Channels, Inputs
from structconv.mechanisms.grids import Cuboid, Shifts, grids_of
from structconv.mechanisms.scores import Projection, heads_of
from structconv.primitives.functions import sum_dtype
from structconv.shapes import check_positive
from structconv.structures.grid import Grid

__all__ = ["Deformable", "DynamicShifts"]


class DynamicShifts(Shifts):
    """A_kmn = sum_j softmax_j(W_k z_n)_j [m = n - Delta_j]: each head reads the same shifts, weighed by the position.

    Dynamic convolution (Wu et al. 2019, eq. 6 and 7) is `Conv(DynamicShifts(offsets, heads=H), P, P,
    weight=EyeBlocks())`: head k weighs the k-th of H blocks of channels. Taps off the grid read zeros, and keep their
    share of the softmax. 2 H J N C flops for J offsets.

    Args:
        offsets: Delta_j, one integer an axis, or one integer for a sequence.
        heads: H, which is K.
        padding: as that of `Shifts`.
        structure: the name of the one that it reads, in a call with several.

    Raises:
        ShapeError: if z has not as many entries as the shifts have outputs.

    Example:

        >>> from structconv import Conv
        >>> from structconv.mechanisms import DynamicShifts
        >>> from structconv.weights import EyeBlocks
        >>> layer = Conv(DynamicShifts([-1, 0, 1], heads=4), 16, 16, weight=EyeBlocks())      # dynamic convolution
        >>> layer(torch.randn(9, 16)).shape
        torch.Size([9, 16])
    """

    reads = ("content", "structure")
    _reads_sizes = True

    def __init__(self, offsets: Sequence[Ints], heads: int = 1, padding: str | None = None, *,
                 structure: str | None = None) -> None:
        super().__init__(offsets, padding, structure=structure)
        self.heads = check_positive("DynamicShifts", "heads", heads)

    @property
    def size(self) -> int:
        return self.heads

    def bind(self, channels: Channels) -> None:
        self.taps = Projection(channels.others, self.heads, len(self.offsets))

    def forward(self, inputs: Inputs) -> Basis:
        table = self.shift(self._grid(inputs.structure, inputs.num_inputs), inputs.device).table(inputs.device)
        _check_outputs("DynamicShifts", inputs, table.shape[-1])
        return Taps(table.mT.unsqueeze(0), heads_of(self.taps, inputs.z, self.heads).softmax(-1), inputs.num_inputs)


class Deformable(Cuboid):
    """The window of a `Cuboid` whose taps move, by fractions of an entry: y_n = sum_k x(p_n + p_k + W_k z_n) Theta_k.

    x at a point between entries is interpolated, linearly on each axis of the grid, and zero off a grid that is not
    periodic (Dai et al. 2017, eq. 2 to 4). The offsets are a linear map of z_n, one number an axis for each tap, which
    starts at zero as in the paper: a new layer is the convolution over the window. Gradients reach the offsets. 2^L
    reads for each tap: 2^(L + 1) K N C flops on L axes.

    Args:
        kernel_size, stride, dilation, padding, structure: as those of `Cuboid`.

    Raises:
        ShapeError: if z, by which taps move, has not as many entries as there are outputs.

    Example:

        >>> from structconv import Conv, Grid
        >>> from structconv.mechanisms import Deformable
        >>> Conv(Deformable((3, 3)), 4, 8)(torch.randn(36, 4), Grid((6, 6))).shape
        torch.Size([36, 8])
    """

    reads = ("content", "structure")
    _reads_sizes = True

    def __init__(self, kernel_size: Ints, stride: Ints = 1, dilation: Ints = 1,
                 padding: str | int | Sequence[int | tuple[int, int]] | None = None, *,
                 structure: str | None = None) -> None:
        super().__init__(kernel_size, stride, dilation, padding, structure=structure)

    def bind(self, channels: Channels) -> None:
        self.offsets = Projection(channels.others, self.size, len(self.kernel_size), bias=True)
        nn.init.zeros_(self.offsets.weight)
        nn.init.zeros_(self.offsets.bias)

    def forward(self, inputs: Inputs) -> Basis:
        shift = self.shift(self._grid(inputs.structure, inputs.num_inputs), inputs.device)
        _check_outputs("Deformable", inputs, shift.num_outputs)
        moved_KNL = heads_of(self.offsets, inputs.z, self.size)
        wide, start_K1L = moved_KNL.to(sum_dtype(moved_KNL.dtype)), torch.tensor(
            shift.starts, device=inputs.device).unsqueeze(1)
        grids, outputs = (grids_of(side) for side in (shift.grid, shift.output_grid))
        result, first = [], 0
        for grid, after, moved in zip(grids, outputs, wide.split([g.num_entries for g in outputs], -2), strict=True):
            position_NL = after.coordinates(inputs.device) * torch.tensor(self.stride, device=inputs.device)
            index, weights = _interpolated(grid, position_NL + start_K1L + moved)
            result.append((torch.where(index < 0, index, index + first), weights.to(moved_KNL.dtype)))
            first += grid.num_entries
        index, shares = result[0] if len(result) == 1 else (torch.cat(part, -2) for part in zip(*result, strict=True))
        return Taps(index, shares, inputs.num_inputs)


def _interpolated(grid: Grid, points: Tensor) -> tuple[Tensor, Tensor]:
    """Return the entries around points (..., L) of a grid, int64 (..., 2^L) with -1 off the grid, and their weights."""
    low = points.detach().floor()
    share = points - low
    sizes = torch.tensor(grid.shape, device=points.device)
    index, weights = [], []
    for corner in itertools.product((0, 1), repeat=grid.ndim):
        at = low + torch.tensor(corner, dtype=low.dtype, device=low.device)
        inside = at.isfinite() if grid.periodic else (at >= 0) & (at < sizes)
        whole = torch.where(inside, at, 0).long()
        entry = grid.ravel(whole % sizes.clamp(min=1) if grid.periodic else whole)
        index.append(torch.where(inside.all(-1), entry, -1))
        weights.append(torch.stack([share[..., axis] if upper else 1 - share[..., axis]
                                    for axis, upper in enumerate(corner)]).prod(0))
    return torch.stack(index, -1), torch.stack(weights, -1)


def _check_outputs(owner: str, inputs: Inputs, outputs: int) -> None:
    """Raise `ShapeError` unless z has a row for each output."""
    if not torch.compiler.is_compiling() and inputs.num_outputs != outputs:
        raise ShapeError(owner, f"z must have a row for each of N={outputs} outputs", tuple(inputs.z.shape),
                         "Call it as layer(x, structure, z=z).")
