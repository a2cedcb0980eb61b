"""Layers over grids in torch's layout (B, C, *S): convolutions, the depthwise separable one, average pooling."""

from __future__ import annotations

import math
from typing import Any, Self, cast

import torch
from torch import Tensor, nn
from torch.fx import Proxy

from structconv import torch_compat as private
from structconv.bases.base import Basis
from structconv.bases.shift import Ints, per_axis
from structconv.errors import ConfigError, ShapeError, StructconvError, text_of
from structconv.mechanisms.expression import check_mechanism
from structconv.mechanisms.grids import Cuboid, GridMechanism, Pool
from structconv.nn.composite import Composite
from structconv.nn.conv import ERRORS, Conv, call_of
from structconv.nn.expressed import Expressed
from structconv.nn.layer import Device, kind, name_owner, named, recorded, take
from structconv.planning import Plan, precision
from structconv.planning.plan import plan_for
from structconv.planning.problem import Call
from structconv.shapes import check_alike, check_divides, check_positive, check_tensor, shape_or_type
from structconv.weights import DepthwiseSeparable, Eye, Full, Grouped, Weight

__all__ = ["AvgPool1d", "AvgPool2d", "AvgPool3d", "Conv1d", "Conv2d", "Conv3d", "OnGrid", "SeparableConv2d"]


class OnGrid(Composite):
    """A `Conv`, applied to images in torch's layout: (..., P, *S) -> (..., Q, *S'), with their grid as its structure.

    Args:
        conv: a layer whose outputs lie on a grid.
        ndim: the number of axes of the images.

    Raises:
        ShapeError: an image with other channels or too few axes.

    Example:

        >>> from structconv import Conv, Shifts
        >>> from structconv.nn import OnGrid
        >>> OnGrid(Conv(Shifts([(0, 0), (2, -1)]), 3, 8), 2)(torch.randn(5, 3, 6, 6)).shape
        torch.Size([5, 8, 6, 6])
    """

    def __init__(self, conv: Conv, ndim: int) -> None:
        super().__init__()
        self.conv, self.ndim = conv, ndim

    @property
    def in_channels(self) -> int:
        """P."""
        return self.conv.in_channels

    @property
    def out_channels(self) -> int:
        """Q."""
        return self.conv.out_channels

    def forward(self, image: Tensor) -> Tensor:
        """(..., P, *S) -> (..., Q, *S')."""
        if type(image) is Proxy:
            return cast(Tensor, recorded(self, image))
        y: Tensor = private.called(self._modules["conv"], image, axes=self.ndim)  # type: ignore[arg-type]
        return y

    def plan(self, image: Tensor) -> Plan:
        """The plan that computes such a call; `print` it."""
        return self.conv.plan(image, axes=self.ndim)

    def basis(self, image: Tensor) -> Basis:
        """The basis that such a call would apply, over the pixels in order of memory."""
        return self.conv.basis(image, axes=self.ndim)


class _ImageLayer(Expressed):
    """A mechanism and the parameters that torch's layer of the same name has, on images in torch's layout."""

    axes: int = 0
    names_errors = True
    bias: nn.Parameter | None = None

    def __init__(self, mechanism: GridMechanism, path: str | None, max_bytes: int | None) -> None:
        super().__init__()
        self.mechanism = mechanism.bound(1)
        self.path, self.max_bytes = path, max_bytes

    def forward(self, image: Tensor) -> Tensor:
        """(..., P, *S) -> (..., Q, *S')."""
        if type(image) is Proxy:
            return cast(Tensor, recorded(self, image))
        if (y := self._directly(image)) is not None:
            return y
        try:
            call, plan = self._planned(image)
            return plan.run(call)
        except StructconvError as error:
            name_owner(self, error)
            raise
        except ERRORS:
            named(type(self)._check)(self, image)
            raise

    def plan(self, image: Tensor) -> Plan:
        """The plan that computes such a call; `print` it."""
        return self._explained(image)[1]

    def basis(self, image: Tensor) -> Basis:
        """The basis that such a call would apply, over the pixels in order of memory."""
        return self._explained(image)[0].materialized()

    def _explained(self, image: Tensor) -> tuple[Call, Plan]:
        try:
            return self._planned(image)
        except ERRORS:
            self._check(image)
            raise

    def _theta(self, image: Tensor) -> Weight:
        raise NotImplementedError

    def _planned(self, image: Tensor) -> tuple[Call, Plan]:
        bias = self._parameters["bias"] if "bias" in self._parameters else self.bias  # noqa: SIM401 - lazy
        call, sizes = call_of(self.mechanism, self._theta(image), bias, image, axes=self.axes)
        return call, plan_for(call, self.path, self.max_bytes, sizes)

    def _check(self, image: Tensor) -> None:
        """Raise an error for an image that does not fit."""
        check_mechanism(type(self).__name__, self.mechanism)
        check_tensor(type(self).__name__, "image", image)


def theta_of_kernel(kernel: Tensor, groups: int) -> Full | Grouped:
    """Theta over torch's kernel (Q, P / G, *kernel_size) of a convolution: views of it."""
    if groups == 1:
        return Full._over({"theta": kernel.flatten(2).permute(2, 1, 0)})
    return Grouped._over({"theta": kernel.flatten(2).unflatten(0, (groups, -1)).permute(3, 0, 2, 1)})


class _ConvNd(_ImageLayer):
    """Over `Cuboid`, with torch's arguments and parameters."""

    fixed = frozenset(("in_channels", "out_channels", "kernel_size", "stride", "padding", "dilation", "groups",
                       "padding_mode"))
    weight: nn.Parameter = private.parameter()
    bias: nn.Parameter | None = private.parameter()

    def __init__(self, in_channels: int, out_channels: int, kernel_size: Ints, stride: Ints = 1,
                 padding: str | Ints = 0, dilation: Ints = 1, groups: int = 1, bias: bool = True,
                 padding_mode: str = "zeros", device: Device = None, dtype: torch.dtype | None = None, *,
                 path: str | None = None, max_bytes: int | None = None) -> None:
        owner = type(self).__name__
        if isinstance(padding, str) and padding not in ("same", "valid"):
            raise ConfigError(owner, "padding must be 'same', 'valid' or a number", repr(padding))
        size = per_axis(owner, "kernel_size", kernel_size, self.axes, least=1)
        cuboid = Cuboid(size, stride, dilation, cast("str | int", padding), padding_mode)
        super().__init__(cuboid, path, max_bytes)
        self.in_channels = check_positive(owner, "in_channels", in_channels)
        self.out_channels = check_positive(owner, "out_channels", out_channels)
        each = [check_divides(owner, "groups", groups, name, getattr(self, name))
                for name in ("in_channels", "out_channels")]
        self.groups, self.kernel_size, self.stride, self.dilation = groups, size, cuboid.stride, cuboid.dilation
        self.padding, self.padding_mode = padding, padding_mode
        self.weight = nn.Parameter(torch.empty(out_channels, each[0], *size, device=device, dtype=dtype))
        self.bias = nn.Parameter(torch.empty(out_channels, device=device, dtype=dtype)) if bias else None
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draw all parameters again, in place, as those of a new layer."""
        bound = (3.0 / math.prod(self.weight.shape[1:])) ** 0.5
        self.weight.uniform_(-bound, bound)
        if self.bias is not None:
            self.bias.zero_()

    @classmethod
    def from_torch(cls, module: nn.Module) -> Self:
        """Build the layer from torch's layer of the same name, with copied weights; frozen parameters stay frozen."""
        expected = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}[cls.axes]
        if not isinstance(module, expected):
            raise ConfigError(cls.__name__, f"module must be a torch.nn.{expected.__name__}", kind(module))
        layer = cls(module.in_channels, module.out_channels, module.kernel_size, module.stride,
                    module.padding, module.dilation, module.groups, module.bias is not None, module.padding_mode)
        layer.to(module.weight)
        take(layer.weight, module.weight, module.weight)
        take(layer.bias, module.bias, module.bias)
        return layer.train(module.training)

    @torch.no_grad()
    def to_conv(self) -> Conv:
        """A `Conv` of the same numbers, copied, for entries on a grid."""
        theta = self._theta(self.weight)
        conv = Conv(self.mechanism, self.in_channels, self.out_channels, bias=self.bias is not None,
                    weight=Full() if self.groups == 1 else Grouped(self.groups)).to(self.weight)
        take(next(conv.weight.parameters()), theta.theta, self.weight)
        take(conv.bias, self.bias, self.bias)
        return conv

    def _theta(self, image: Tensor) -> Full | Grouped:
        own = self._parameters.get("weight")
        return theta_of_kernel(self.weight if own is None else own, self.groups)

    def _check(self, image: Tensor) -> None:
        super()._check(image)
        owner, axes = type(self).__name__, self.axes
        if image.dim() <= axes or image.shape[-1 - axes] != self.in_channels:
            raise ShapeError(owner, f"image must have shape (..., P={self.in_channels}, *S) with {axes} axes S",
                             tuple(image.shape))
        image = precision.cast(image, precision.autocast_dtype(image))
        check_alike(owner, image, self.weight, name="image", other_name="the layer's weight")

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "weight" and "weight" in self._parameters:
            shape = tuple(self.weight.shape)
            if not isinstance(value, Tensor) or tuple(value.shape) != shape:
                raise ShapeError(type(self).__name__, f"weight must be a tensor of shape {text_of(shape)}",
                                 shape_or_type(value))
        super().__setattr__(name, value)

    def extra_repr(self) -> str:
        return (f"{self.in_channels}, {self.out_channels}, kernel_size={self.kernel_size}, stride={self.stride}, "
                f"padding={self.padding!r}, dilation={self.dilation}, groups={self.groups}")


class Conv1d(_ConvNd):
    """torch's Conv1d as structured convolution: y_n = sum_j x_(stride n - padding + j dilation) W_j + b.

    Args:
        in_channels, out_channels, kernel_size, stride, padding, dilation, groups, bias, padding_mode: as in
            `torch.nn.Conv1d`. Here padding="same" goes with any stride: S' = ceil(S / stride).

    (B, P, S) -> (B, Q, S'), and unbatched (P, S) -> (Q, S'). Values, gradients and the `state_dict` are torch's: weight
    (Q, P / groups, *kernel_size) and bias (Q). `from_torch` copies one of its layers with the weights. A new weight has
    variance groups / (P K), so that outputs whose window is inside the grid keep the input's variance.

    Raises:
        ConfigError: arguments without meaning. ShapeError: another number of channels.

    Equals `Conv(Cuboid(kernel_size, stride, dilation, padding), P, Q)` on a grid.

    Example:

        >>> from structconv import Conv1d
        >>> Conv1d(3, 8, 5, stride=2, padding=2)(torch.randn(2, 3, 20)).shape
        torch.Size([2, 8, 10])
    """

    axes = 1


class Conv2d(_ConvNd):
    """torch's Conv2d as structured convolution: (B, P, H, W) -> (B, Q, H', W'); see `Conv1d`.

    Equals `Conv(Cuboid(kernel_size, stride, dilation, padding), P, Q)` on a grid.

    Example:

        >>> from structconv import Conv2d
        >>> theirs, image = torch.nn.Conv2d(3, 8, 3, padding=1), torch.randn(2, 3, 6, 6)
        >>> torch.allclose(Conv2d.from_torch(theirs)(image), theirs(image), atol=1e-5)
        True
    """

    axes = 2


class Conv3d(_ConvNd):
    """torch's Conv3d as structured convolution: (B, P, D, H, W) -> (B, Q, D', H', W'); see `Conv1d`.

    Equals `Conv(Cuboid(kernel_size, stride, dilation, padding), P, Q)` on a grid.

    Example:

        >>> from structconv import Conv3d
        >>> Conv3d(3, 8, 2)(torch.randn(2, 3, 4, 4, 4)).shape
        torch.Size([2, 8, 3, 3, 3])
    """

    axes = 3


class SeparableConv2d(OnGrid):
    """Depthwise separable convolution: one spatial filter a channel, then a 1x1 convolution (Chollet 2017, Xception).

    Theta_kpq = d_kp c_pq, P (K + Q) numbers; Andreoli's eq. 9 with H = P and a diagonal pattern, not with H = 1.
    Images (B, P, H, W) -> (B, Q, H', W').

    Args:
        in_channels, out_channels, kernel_size, stride, padding, dilation, bias, padding_mode: as in `Conv2d`; the
            stride, padding and dilation are those of the depthwise filter, the bias is added after the second.

    Equals `Conv(Cuboid(kernel_size, stride, dilation, padding), P, Q, weight=DepthwiseSeparable())` on a grid.

    Example:

        >>> from structconv.nn import SeparableConv2d
        >>> SeparableConv2d(3, 8, 3, padding=1)(torch.randn(2, 3, 6, 6)).shape
        torch.Size([2, 8, 6, 6])
    """

    def __init__(self, in_channels: int, out_channels: int, kernel_size: Ints, stride: Ints = 1,
                 padding: str | Ints = 0, dilation: Ints = 1, bias: bool = True, padding_mode: str = "zeros",
                 device: Device = None, dtype: torch.dtype | None = None) -> None:
        size = per_axis("SeparableConv2d", "kernel_size", kernel_size, 2, least=1)
        cuboid = Cuboid(size, stride, dilation, cast("str | int", padding), padding_mode)
        super().__init__(Conv(cuboid, in_channels, out_channels, weight=DepthwiseSeparable(), bias=bias, device=device,
                              dtype=dtype), 2)

    @classmethod
    def from_torch(cls, depthwise: nn.Conv2d, pointwise: nn.Conv2d) -> Self:
        """From torch's pair, a depthwise convolution without bias and a 1x1 convolution, weights copied."""
        if depthwise.groups != depthwise.in_channels or depthwise.out_channels != depthwise.in_channels:
            raise ConfigError(cls.__name__, "depthwise must have as many groups and outputs as inputs", depthwise)
        plain = pointwise.stride == (1, 1) and pointwise.padding == (0, 0) and pointwise.groups == 1
        if depthwise.bias is not None or pointwise.kernel_size != (1, 1) or not plain:
            raise ConfigError(cls.__name__, "depthwise must have no bias, and pointwise be a plain 1x1 convolution",
                              f"{depthwise} and {pointwise}")
        layer = cls(depthwise.in_channels, pointwise.out_channels, depthwise.kernel_size, depthwise.stride,
                    depthwise.padding, depthwise.dilation, pointwise.bias is not None, depthwise.padding_mode)
        layer.to(pointwise.weight)
        weight = cast(DepthwiseSeparable, layer.conv.weight)
        take(weight.depthwise, depthwise.weight.flatten(1).mT, depthwise.weight)
        take(weight.pointwise, pointwise.weight.flatten(1).mT, pointwise.weight)
        take(layer.conv.bias, pointwise.bias, pointwise.bias)
        return layer.train(pointwise.training)


class _AvgPoolNd(_ImageLayer):
    """Over `Pool`; there is nothing to train."""

    fixed = frozenset(("kernel_size", "stride", "padding"))

    def __init__(self, kernel_size: Ints, stride: Ints | None = None, padding: Ints = 0, *, path: str | None = None,
                 max_bytes: int | None = None) -> None:
        size = per_axis(type(self).__name__, "kernel_size", kernel_size, self.axes, least=1)
        pool = Pool(size, stride, padding)
        super().__init__(pool, path, max_bytes)
        self.kernel_size, self.stride, self.padding = size, pool.stride, pool.padding

    def _theta(self, image: Tensor) -> Eye:
        return Eye.of(1, image.shape[-1 - self.axes] if image.dim() > self.axes else 1)


class AvgPool1d(_AvgPoolNd):
    """The mean over windows, (B, C, S) -> (B, C, S') with S' = floor((S + 2 padding - kernel_size) / stride) + 1.

    Args:
        kernel_size: the window. stride: of the windows; the window's size by default.
        padding: zeros on both sides, which count, as torch's do by default.
        path, max_bytes: limits for the planner; see `ops.conv`.

    Equals `Conv(Pool(kernel_size, stride), C, C, weight=Eye(), bias=False)` on a grid.

    Example:

        >>> from structconv.nn import AvgPool1d
        >>> AvgPool1d(2)(torch.arange(6.0).reshape(1, 6))
        tensor([[0.5000, 2.5000, 4.5000]])
    """

    axes = 1


class AvgPool2d(_AvgPoolNd):
    """The mean over windows of an image, (B, C, H, W) -> (B, C, H', W'); see `AvgPool1d`.

    Equals `Conv(Pool(kernel_size, stride), C, C, weight=Eye(), bias=False)` on a grid.

    Example:

        >>> from structconv.nn import AvgPool2d
        >>> AvgPool2d(2)(torch.randn(5, 3, 8, 6)).shape
        torch.Size([5, 3, 4, 3])
    """

    axes = 2


class AvgPool3d(_AvgPoolNd):
    """The mean over windows of a volume, (B, C, D, H, W) -> (B, C, D', H', W'); see `AvgPool1d`.

    Equals `Conv(Pool(kernel_size, stride), C, C, weight=Eye(), bias=False)` on a grid.

    Example:

        >>> from structconv.nn import AvgPool3d
        >>> AvgPool3d(2)(torch.randn(5, 3, 8, 6, 4)).shape
        torch.Size([5, 3, 4, 3, 2])
    """

    axes = 3
