"""Cuboids of shifts by torch's convolutions, entries in row-major order and channels last."""

from __future__ import annotations

import math
from typing import Any, NamedTuple, cast

from torch import Tensor
from torch.nn import functional

from structconv.bases.base import Basis
from structconv.bases.cuboid import CuboidSpec
from structconv.bases.shift import Shift
from structconv.planning.cost import Cost
from structconv.planning.rules import Problem, Rule, Run, rule
from structconv.structures.grid import Grid
from structconv.theta import (
    DepthwiseSeparableTheta,
    DepthwiseTheta,
    EyeTheta,
    FullTheta,
    GroupedTheta,
    SharedTheta,
    Theta,
)

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
        return self.biased(x, basis, theta, None)

    def biased(self, x: Tensor, basis: Basis, theta: Theta, bias: Tensor | None) -> Tensor:
        return self.prepared(x, basis, theta)(x, bias)

    def prepared(self, x: Tensor, basis: Basis, theta: Theta) -> Run:
        window, lead, channels = Window.of(cast(Shift, basis)), x.shape[:-2], x.shape[-1]
        batch, shape, convolve = math.prod(lead), cast(Grid, cast(Shift, basis).grid).shape, _convolution(window, theta)

        def run(x: Tensor, bias: Tensor | None) -> Tensor:
            y = convolve(x.reshape(batch, *shape, channels).movedim(-1, 1), bias).movedim(1, -1)
            return y.reshape(*lead, math.prod(y.shape[1:-1]), y.shape[-1])

        return run

    def prepared_image(self, image: Tensor, basis: Basis, theta: Theta) -> Run | None:
        window = Window.of(cast(Shift, basis))
        return _convolution(window, theta) if image.dim() == window.ndim + 2 else None


class Window(NamedTuple):
    """What a convolution is told about a cuboid of shifts; `pads` is what it cannot add around the image by itself.

    Args:
        pads: amounts as `torch.nn.functional.pad` takes them, none where the convolution pads. mode: how.
        places: the order of Theta's matrices in the kernel, none where it is theirs.
    """

    ndim: int
    kernel_size: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    pads: tuple[int, ...]
    mode: str
    places: list[int] | None

    @classmethod
    def of(cls, shift: Shift) -> Window:
        """The window that the offsets of a shift form."""
        spec = cast(CuboidSpec, shift.as_cuboid())
        ndim = len(spec.kernel_size)
        none = (0,) * ndim
        alike = spec.padding == "zeros" and spec.pad_low == spec.pad_high and min(spec.pad_low) >= 0
        ends = zip(reversed(spec.pad_low), reversed(spec.pad_high), strict=True)
        pads = none if alike else tuple(amount for pair in ends for amount in pair)
        order = list(spec.permutation)
        return cls(ndim, spec.kernel_size, spec.stride, spec.pad_low if alike else none, spec.dilation,
                   pads if any(pads) else (),
                   "constant" if spec.padding == "zeros" else spec.padding,
                   None if order == list(range(len(order))) else order)

    def convolve(self, image: Tensor, blocks_KGPQ: Tensor, groups: int, bias: Tensor | None) -> Tensor:
        """(B, P, *S) -> (B, Q, *S') with Theta as (K, G, P / G, Q / G)."""
        blocks = blocks_KGPQ if self.places is None else blocks_KGPQ[self.places]
        kernel = blocks.permute(1, 3, 2, 0).flatten(0, 1).unflatten(-1, self.kernel_size)
        return self.correlate(image, kernel, groups, bias)

    def correlate(self, image: Tensor, kernel: Tensor, groups: int, bias: Tensor | None) -> Tensor:
        """(B, P, *S) -> (B, Q, *S') with a kernel (Q, P / G, *kernel_size)."""
        if self.pads:
            image = functional.pad(image, self.pads, mode=self.mode)
        if bias is not None and bias.dtype != kernel.dtype:
            y = self.correlate(image, kernel, groups, None)
            return y + bias.view(-1, *(1,) * self.ndim)
        convolution = _CONVOLUTIONS[self.ndim - 1]
        return convolution(image, kernel, bias, self.stride, self.padding, self.dilation, groups)


def _convolution(window: Window, theta: Theta) -> Run:
    """(image, b) -> y, for images (B, C, *S)."""
    if isinstance(theta, DepthwiseSeparableTheta):
        return lambda image, bias: _mixed(window.convolve(image, theta.depthwise.unsqueeze(-1).unsqueeze(-1),
                                                          theta.in_channels, None), theta.pointwise, bias)
    if isinstance(theta, SharedTheta):
        shared = theta.theta
        if theta.out_channels < theta.in_channels:
            return lambda image, bias: _plus(_box(window, _mixed(image, shared, None), theta.size), bias)
        return lambda image, bias: _mixed(_box(window, image, theta.size), shared, bias)
    if isinstance(theta, EyeTheta):
        return lambda image, bias: _plus(_box(window, image, theta.size), bias)
    if isinstance(theta, FullTheta) and window.places is None:
        whole, shape = theta.theta, (theta.out_channels, theta.in_channels, *window.kernel_size)
        return lambda image, bias: window.correlate(image, whole.permute(2, 1, 0).view(shape), 1, bias)
    groups = _groups(theta)
    return lambda image, bias: window.convolve(image, _blocks(theta), groups, bias)


def _groups(theta: Theta) -> int:
    if isinstance(theta, DepthwiseTheta | EyeTheta):
        return theta.in_channels
    return theta.groups if isinstance(theta, GroupedTheta) else 1


def _blocks(theta: Theta) -> Tensor:
    """Theta as (K, G, P / G, Q / G)."""
    if isinstance(theta, DepthwiseTheta):
        return theta.depthwise.unsqueeze(-2)
    return theta.theta if isinstance(theta, GroupedTheta) else theta.dense().unsqueeze(1)


def _box(window: Window, image: Tensor, size: int) -> Tensor:
    """Every channel by itself, with ones."""
    channels = image.shape[1]
    return window.convolve(image, image.new_ones(size, channels, 1, 1), channels, None)


def _mixed(image: Tensor, matrix: Tensor, bias: Tensor | None) -> Tensor:
    """The channels of an image by a matrix (P, Q)."""
    y = image.flatten(2).mT @ matrix
    return (y if bias is None else y + bias).mT.unflatten(-1, image.shape[2:])


def _plus(image: Tensor, bias: Tensor | None) -> Tensor:
    return image if bias is None else image + bias.view(-1, *(1,) * (image.dim() - 2))
