"""Transposed convolutions of images in torch's layout."""

from __future__ import annotations

from typing import Any, Self, cast

import torch
from torch import Tensor, nn
from torch.fx import Proxy
from torch.nn.functional import pad

from structconv.bases.base import Basis
from structconv.bases.shift import Ints, per_axis
from structconv.errors import ConfigError, ShapeError
from structconv.mechanisms.grids import Cuboid
from structconv.nn.composite import Composite
from structconv.nn.conv import ERRORS, Conv
from structconv.nn.images import to_entries, to_image
from structconv.nn.layer import Device, kind, recorded, take
from structconv.planning import Plan
from structconv.shapes import check_tensor
from structconv.structures.grid import Grid
from structconv.weights import Full, Grouped, Weight

__all__ = ["ConvTranspose1d", "ConvTranspose2d", "ConvTranspose3d"]


class _ConvTransposeNd(Composite):
    """Over the transpose of `Cuboid`, with torch's arguments."""

    axes: int = 0
    fixed = frozenset(("in_channels", "out_channels", "kernel_size", "stride", "padding", "output_padding", "dilation",
                       "groups"))

    def __init__(self, in_channels: int, out_channels: int, kernel_size: Ints, stride: Ints = 1, padding: Ints = 0,
                 output_padding: Ints = 0, groups: int = 1, bias: bool = True, dilation: Ints = 1, *,
                 device: Device = None, dtype: torch.dtype | None = None) -> None:
        super().__init__()
        owner = type(self).__name__
        self.kernel_size = per_axis(owner, "kernel_size", kernel_size, self.axes, least=1)
        self.stride = per_axis(owner, "stride", stride, self.axes, least=1)
        self.dilation = per_axis(owner, "dilation", dilation, self.axes, least=1)
        self.padding = per_axis(owner, "padding", padding, self.axes, least=0)
        self.output_padding = per_axis(owner, "output_padding", output_padding, self.axes, least=0)
        if any(more >= max(both) for more, *both in zip(self.output_padding, self.stride, self.dilation, strict=True)):
            raise ConfigError(owner, "output_padding must be smaller than the stride or the dilation",
                              self.output_padding)
        cuboid = Cuboid(self.kernel_size, self.stride, self.dilation, cast("int", self.padding), "zeros")
        weight: Weight = Full() if groups == 1 else Grouped(groups)
        self.conv = Conv(cuboid.transpose(), in_channels, out_channels, weight=weight, bias=bias,
                         device=device, dtype=dtype)
        self.in_channels, self.out_channels, self.groups = in_channels, out_channels, groups

    def forward(self, image: Tensor) -> Tensor:
        """(..., P, *S) -> (..., Q, *S')."""
        if type(image) is Proxy:
            return cast(Tensor, recorded(self, image))
        entries, finer = self._entries(image)
        return to_image(self.conv(entries, structure=finer), finer)

    def plan(self, image: Tensor) -> Plan:
        """The plan that computes such a call; `print` it."""
        entries, finer = self._entries(image)
        return self.conv.plan(entries, structure=finer)

    def basis(self, image: Tensor) -> Basis:
        """The basis that such a call would apply, over the pixels in order of memory."""
        entries, finer = self._entries(image)
        return self.conv.basis(entries, structure=finer)

    def _entries(self, image: Tensor) -> tuple[Tensor, Grid]:
        """The image's entries, after zeros for `output_padding` that is not smaller than the stride, and the grid of
        the outputs."""
        zeros = [more // step for more, step in zip(self.output_padding, self.stride, strict=True)]
        try:
            longer = pad(image, [size for more in reversed(zeros) for size in (0, more)]) if any(zeros) else image
            entries, grid = to_entries(longer, self.axes)
        except ERRORS:
            check_tensor(type(self).__name__, "image", image)
            raise
        before = [size - more for size, more in zip(grid.shape, zeros, strict=True)]
        return entries, self.output_grid(Grid(tuple(before)))

    def output_grid(self, grid: Grid) -> Grid:
        """Return the grid of the outputs: S' = stride (S - 1) + dilation (kernel_size - 1) + 1 - 2 padding +
        output_padding."""
        sizes = [step * (size - 1) + spread * (width - 1) + 1 - 2 * cut + more
                 for size, step, spread, width, cut, more in zip(grid.shape, self.stride, self.dilation,
                                                                 self.kernel_size, self.padding, self.output_padding,
                                                                 strict=True)]
        if any(size < 1 for size in sizes):
            raise ShapeError(type(self).__name__, "the image must leave an output without its padding", grid.shape)
        return Grid(tuple(sizes))

    @classmethod
    def from_torch(cls, module: nn.Module) -> Self:
        """Build the layer from torch's layer of the same name, with copied weights; frozen parameters stay frozen."""
        expected: Any = {1: nn.ConvTranspose1d, 2: nn.ConvTranspose2d, 3: nn.ConvTranspose3d}[cls.axes]
        if not isinstance(module, expected):
            raise ConfigError(cls.__name__, f"module must be a torch.nn.{expected.__name__}", kind(module))
        layer = cls(module.in_channels, module.out_channels, module.kernel_size, module.stride, module.padding,
                    module.output_padding, module.groups, module.bias is not None, module.dilation)
        layer.to(module.weight)
        blocks_GPQK = module.weight.flatten(2).unflatten(0, (module.groups, -1))
        theta_KGPQ = blocks_GPQK.permute(3, 0, 1, 2)
        theta = theta_KGPQ if module.groups > 1 else theta_KGPQ.squeeze(1)
        take(cast(Full | Grouped, layer.conv.weight).theta, theta, module.weight)
        take(layer.conv.bias, module.bias, module.bias)
        return layer.train(module.training)


class ConvTranspose1d(_ConvTransposeNd):
    """torch's ConvTranspose1d as structured convolution: y_m = sum of x_n W_j over m = stride n - padding + j dilation.

    Its matrices are the transposes of those of `Conv1d`, which leads from the finer grid to the coarser one.

    Args:
        in_channels, out_channels, kernel_size, stride, padding, output_padding, groups, bias, dilation: as in
            `torch.nn.ConvTranspose1d`; output_padding is smaller than the stride or the dilation.

    (B, P, S) -> (B, Q, S') with S' = stride (S - 1) + dilation (kernel_size - 1) + 1 - 2 padding + output_padding, and
    unbatched. Values and gradients are torch's; `from_torch` copies one of its layers with the weights.

    Raises:
        ConfigError: arguments without meaning. ShapeError: another number of channels, or no output.

    Equals `Conv(Cuboid(kernel_size, stride, dilation, padding).transpose(), P, Q)` on the grid of the outputs.

    Example:

        >>> from structconv.nn import ConvTranspose1d
        >>> ConvTranspose1d(3, 8, 2, stride=2)(torch.randn(2, 3, 5)).shape
        torch.Size([2, 8, 10])
    """

    axes = 1


class ConvTranspose2d(_ConvTransposeNd):
    """torch's ConvTranspose2d as structured convolution: (B, P, H, W) -> (B, Q, H', W'); see `ConvTranspose1d`.

    Equals `Conv(Cuboid(kernel_size, stride, dilation, padding).transpose(), P, Q)` on the grid of the outputs.

    Example:

        >>> from structconv.nn import ConvTranspose2d
        >>> ConvTranspose2d(3, 8, 2, stride=2)(torch.randn(2, 3, 5, 5)).shape
        torch.Size([2, 8, 10, 10])
    """

    axes = 2


class ConvTranspose3d(_ConvTransposeNd):
    """torch's ConvTranspose3d: (B, P, D, H, W) -> (B, Q, D', H', W'); see `ConvTranspose1d`.

    Equals `Conv(Cuboid(kernel_size, stride, dilation, padding).transpose(), P, Q)` on the grid of the outputs.

    Example:

        >>> from structconv.nn import ConvTranspose3d
        >>> ConvTranspose3d(3, 8, 2, stride=2)(torch.randn(2, 3, 5, 5, 5)).shape
        torch.Size([2, 8, 10, 10, 10])
    """

    axes = 3
