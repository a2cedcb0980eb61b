"""Cuboids of shifts by torch's convolutions, entries in row-major order and channels last."""

from __future__ import annotations

import math
from typing import Any, cast

from torch import Tensor
from torch.nn import functional

from structconv.bases.base import Basis
from structconv.bases.cuboid import CuboidSpec
from structconv.bases.shift import Shift
from structconv.planning.cost import Cost
from structconv.planning.rules import Problem, Rule, rule
from structconv.structures.grid import Grid
from structconv.theta import DepthwiseSeparableTheta, DepthwiseTheta, EyeTheta, GroupedTheta, SharedTheta, Theta

_CONVOLUTIONS: tuple[Any, ...] = (functional.conv1d, functional.conv2d, functional.conv3d)


@rule(Shift, "operator_first", kernel="torch.conv")
class GridConvolution(Rule):
    """Theta as the kernel of a strided, dilated convolution, whose padding is that of the grid.

    Depthwise and grouped Theta become groups; a depthwise separable Theta is a depthwise convolution, then a product
    with channels; any other is a dense kernel. Grids of one, two or three axes.
    """

    def applies(self, basis: Basis, theta: Theta, x: Tensor) -> bool:
        shift = cast(Shift, basis)
        spec = shift.as_cuboid() if isinstance(shift.grid, Grid) and shift.grid.ndim <= 3 else None
        return spec is not None and x.dim() >= 2

    def cost(self, problem: Problem) -> Cost:
        theta = problem.theta
        per_output = 2 * theta.size * theta.in_channels * theta.out_channels // _groups(theta)
        if isinstance(theta, DepthwiseSeparableTheta | SharedTheta):
            per_output = 2 * theta.in_channels * (theta.size + theta.out_channels)
        moved = problem.channel_product(per_output, problem.outputs, 1, theta.out_channels, 0)
        read = Cost(bytes=problem.bytes(problem.inputs * theta.in_channels)).repeated(1 + problem.x_grad)
        padded = 0 if cast(Shift, problem.basis).padding in ("zeros", "none") else problem.inputs * theta.in_channels
        return moved + read + Cost(peak_bytes=problem.bytes(padded))

    def run(self, x: Tensor, basis: Basis, theta: Theta) -> Tensor:
        shift = cast(Shift, basis)
        spec = cast(CuboidSpec, shift.as_cuboid())
        if isinstance(theta, DepthwiseSeparableTheta):
            filters = theta.depthwise.unsqueeze(-1).unsqueeze(-1)
            return _convolve(x, shift, spec, filters, theta.in_channels) @ theta.pointwise
        if isinstance(theta, SharedTheta):
            if theta.out_channels < theta.in_channels:
                return _box(x @ theta.theta, shift, spec)
            return _box(x, shift, spec) @ theta.theta
        if isinstance(theta, EyeTheta):
            return _box(x, shift, spec)
        return _convolve(x, shift, spec, _blocks(theta), _groups(theta))


def _groups(theta: Theta) -> int:
    if isinstance(theta, DepthwiseTheta | EyeTheta):
        return theta.in_channels
    return theta.groups if isinstance(theta, GroupedTheta) else 1


def _blocks(theta: Theta) -> Tensor:
    """Theta as (K, G, P / G, Q / G)."""
    if isinstance(theta, DepthwiseTheta):
        return theta.depthwise.unsqueeze(-2)
    return theta.theta if isinstance(theta, GroupedTheta) else theta.dense().unsqueeze(1)


def _box(x: Tensor, shift: Shift, spec: CuboidSpec) -> Tensor:
    """Every channel by itself, with ones."""
    return _convolve(x, shift, spec, x.new_ones(shift.size, x.shape[-1], 1, 1), x.shape[-1])


def _convolve(x: Tensor, shift: Shift, spec: CuboidSpec, blocks_KGPQ: Tensor, groups: int) -> Tensor:
    """(..., M, P) -> (..., N, Q) with Theta as (K, G, P / G, Q / G)."""
    order = spec.permutation
    if order != tuple(range(len(order))):
        blocks_KGPQ = blocks_KGPQ[list(order)]
    kernel = blocks_KGPQ.permute(1, 3, 2, 0).flatten(0, 1).unflatten(-1, spec.kernel_size)
    grid = cast(Grid, shift.grid)
    image = x.reshape(math.prod(x.shape[:-2]), *grid.shape, x.shape[-1]).movedim(-1, 1)
    image, padding = _padded(image, spec)
    y = _CONVOLUTIONS[grid.ndim - 1](image, kernel, None, spec.stride, padding, spec.dilation, groups)
    return y.movedim(1, -1).reshape(*x.shape[:-2], math.prod(y.shape[2:]), y.shape[1])


def _padded(image: Tensor, spec: CuboidSpec) -> tuple[Tensor, tuple[int, ...]]:
    """The image with what the convolution cannot pad by itself, and what it can."""
    none = (0,) * len(spec.pad_low)
    if spec.padding == "zeros" and spec.pad_low == spec.pad_high and min(spec.pad_low) >= 0:
        return image, spec.pad_low
    ends = zip(reversed(spec.pad_low), reversed(spec.pad_high), strict=True)
    amounts = [amount for pair in ends for amount in pair]
    if not any(amounts):
        return image, none
    mode = "constant" if spec.padding == "zeros" else spec.padding
    return functional.pad(image, amounts, mode=mode), none
