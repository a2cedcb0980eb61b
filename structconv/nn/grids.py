"""Layers over grids in torch's layout (B, C, *S): convolutions, the depthwise separable one, average pooling."""

from __future__ import annotations

from typing import Any, Self, cast

from torch import Tensor, nn

from structconv import torch_private as private
from structconv.bases.cuboid import Ints, per_axis
from structconv.errors import ConfigError, ShapeError
from structconv.mechanisms.expression import check_mechanism
from structconv.mechanisms.grids import Cuboid, Pool
from structconv.nn.conv import ERRORS, Conv, call_of
from structconv.nn.layer import Layer, kind, take
from structconv.planning import Plan
from structconv.planning.plan import plan_for
from structconv.planning.problem import Call
from structconv.shapes import check_tensor
from structconv.theta import EyeTheta
from structconv.weights import DepthwiseSeparable, Full, Grouped, Weight

__all__ = ["AvgPool1d", "AvgPool2d", "AvgPool3d", "Conv1d", "Conv2d", "Conv3d", "OnGrid", "SeparableConv2d"]


class OnGrid(Layer):
    """A `Conv`, applied to images in torch's layout: (..., P, *S) -> (..., Q, *S'), with their grid as its structure.

    Over a `Cuboid` a whole or grouped Theta keeps its shape, but lies in memory as torch's kernels (Q, P / G, K), so
    that no call rearranges it: 512 channels of a 3x3 window cost 6 ms each time. Such a parameter is not contiguous,
    as where torch's own layers are in `torch.channels_last`: flatten it by `reshape`, and save it by safetensors'
    `save_model`, not `save_file`. What asks for a `view` of a parameter (`torch.optim.LBFGS`, `parameters_to_vector`,
    `prune.l1_unstructured`) works once `theta.data = theta.data.contiguous()`, which every call then rearranges.

    Args:
        conv: a layer whose outputs lie on a grid.
        ndim: the number of axes of the images.

    Raises:
        ShapeError: an image with other channels or too few axes.
    """

    def __init__(self, conv: Conv, ndim: int) -> None:
        super().__init__()
        self.conv, self.ndim = conv, ndim
        if isinstance(conv.mechanism, Cuboid):
            _lie_as_kernel(conv.weight)

    def forward(self, image: Tensor) -> Tensor:
        """(..., P, *S) -> (..., Q, *S')."""
        y: Tensor = private.called(self._modules["conv"], image, axes=self.ndim)  # type: ignore[arg-type]
        return y

    def reset_parameters(self) -> None:
        """Draw all parameters anew, in place, as those of a new layer."""
        self.conv.reset_parameters()

    def plan(self, image: Tensor) -> Plan:
        """The plan that computes such a call; `print` it."""
        return self.conv.plan(image, axes=self.ndim)


def _lie_as_kernel(weight: Weight) -> None:
    """Rearrange Theta (K, P, Q) or (K, G, P / G, Q / G) in memory as a kernel (Q, P / G, K); shape and numbers stay."""
    if isinstance(weight, Full):
        weight.theta.data = weight.theta.detach().permute(2, 1, 0).contiguous().permute(2, 1, 0)
    elif isinstance(weight, Grouped):
        weight.theta.data = weight.theta.detach().permute(1, 3, 2, 0).contiguous().permute(3, 0, 2, 1)


def _theta_of(kernel: Tensor, groups: int) -> Tensor:
    """Theta (K, P, Q), or (K, G, P / G, Q / G) of several groups, of a kernel (Q, P / G, *S) as torch has it."""
    blocks_GQPK = kernel.flatten(2).unflatten(0, (groups, -1))
    theta_KGPQ = blocks_GQPK.permute(3, 0, 2, 1)
    return theta_KGPQ if groups > 1 else theta_KGPQ.squeeze(1)


class _ConvNd(OnGrid):
    """Over `Cuboid`, with torch's arguments."""

    axes: int = 0
    fixed = frozenset(("in_channels", "out_channels", "kernel_size", "stride", "padding", "dilation", "groups",
                       "padding_mode"))

    def __init__(self, in_channels: int, out_channels: int, kernel_size: Ints, stride: Ints = 1,
                 padding: str | Ints = 0, dilation: Ints = 1, groups: int = 1, bias: bool = True,
                 padding_mode: str = "zeros") -> None:
        owner = type(self).__name__
        if isinstance(padding, str) and padding not in ("same", "valid"):
            raise ConfigError(owner, "padding must be 'same', 'valid' or a number", repr(padding))
        size = per_axis(owner, "kernel_size", kernel_size, self.axes, least=1)
        cuboid = Cuboid(size, stride, dilation, cast("str | int", padding), padding_mode)
        weight: Weight = Full() if groups == 1 else Grouped(groups)
        super().__init__(Conv(cuboid, in_channels, out_channels, weight=weight, bias=bias), self.axes)
        self.in_channels, self.out_channels, self.groups = in_channels, out_channels, groups
        self.kernel_size, self.stride, self.dilation = size, cuboid.stride, cuboid.dilation
        self.padding, self.padding_mode = padding, padding_mode

    @classmethod
    def from_torch(cls, module: nn.Module) -> Self:
        """The same layer from torch's of the same name, weights copied; what is frozen stays so."""
        expected = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}[cls.axes]
        if not isinstance(module, expected):
            raise ConfigError(cls.__name__, f"module must be a torch.nn.{expected.__name__}", kind(module))
        layer = cls(module.in_channels, module.out_channels, module.kernel_size, module.stride,
                    module.padding, module.dilation, module.groups, module.bias is not None, module.padding_mode)
        layer.to(module.weight)
        take(cast(Full | Grouped, layer.conv.weight).theta, _theta_of(module.weight, module.groups), module.weight)
        take(layer.conv.bias, module.bias, module.bias)
        return layer.train(module.training)

    @property
    def weight(self) -> Tensor:
        """Theta as torch lays a kernel out, (Q, P / groups, *kernel_size): a view of `conv.weight.theta`.

        Numbers written into it are the parameter's; assigned, it replaces the parameter. What belongs to the parameter
        itself is found there alone: `.grad`, and `.data` to be assigned.
        """
        theta = cast(Full | Grouped, self.conv.weight).theta
        blocks_KGPQ = theta if self.groups > 1 else theta.unsqueeze(1)
        return blocks_KGPQ.permute(1, 3, 2, 0).flatten(0, 1).unflatten(-1, self.kernel_size)

    @property
    def bias(self) -> nn.Parameter | None:
        """b (Q), or none; it is `conv.bias`, also to be assigned."""
        return self.conv.bias

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "bias" and "conv" in self._modules:
            self.conv.bias = value
        elif name == "weight" and "conv" in self._modules:
            self._replace(value)
        else:
            super().__setattr__(name, value)

    def _replace(self, kernel: Any) -> None:
        """Make a parameter of a kernel in torch's layout."""
        shape = tuple(self.weight.shape)
        if not isinstance(kernel, Tensor) or tuple(kernel.shape) != shape:
            got = tuple(kernel.shape) if isinstance(kernel, Tensor) else type(kernel).__name__
            raise ShapeError(type(self).__name__, f"weight must be a tensor of shape {shape}", got)
        theta = _theta_of(kernel.detach().clone(), self.groups)
        weight = cast(Full | Grouped, self.conv.weight)
        weight.theta = nn.Parameter(theta, requires_grad=kernel.requires_grad or not isinstance(kernel, nn.Parameter))
        _lie_as_kernel(weight)


class Conv1d(_ConvNd):
    """torch's Conv1d as structured convolution: y_n = sum_j x_(stride n - padding + j dilation) W_j + b.

    Args:
        in_channels, out_channels, kernel_size, stride, padding, dilation, groups, bias, padding_mode: as in
            `torch.nn.Conv1d`. Here padding="same" goes with any stride: S' = ceil(S / stride).

    (B, P, S) -> (B, Q, S'), and unbatched (P, S) -> (Q, S'). Values and gradients are torch's; `from_torch` copies
    one of its layers with the weights. A new Theta has variance groups / (P K), so that outputs whose window is
    inside the grid keep the input's variance.

    Raises:
        ConfigError: arguments without meaning. ShapeError: another number of channels.
    """

    axes = 1


class Conv2d(_ConvNd):
    """torch's Conv2d as structured convolution: (B, P, H, W) -> (B, Q, H', W'); see `Conv1d`."""

    axes = 2


class Conv3d(_ConvNd):
    """torch's Conv3d as structured convolution: (B, P, D, H, W) -> (B, Q, D', H', W'); see `Conv1d`."""

    axes = 3


class SeparableConv2d(OnGrid):
    """Depthwise separable convolution: one spatial filter a channel, then a 1x1 convolution (Chollet 2017, Xception).

    Theta_kpq = d_kp c_pq, P (K + Q) numbers; Andreoli's eq. 9 with H = P and a diagonal pattern, not with H = 1.
    Images (B, P, H, W) -> (B, Q, H', W').

    Args:
        in_channels, out_channels, kernel_size, stride, padding, dilation, bias, padding_mode: as in `Conv2d`; the
            stride, padding and dilation are those of the depthwise filter, the bias is added after the second.
    """

    def __init__(self, in_channels: int, out_channels: int, kernel_size: Ints, stride: Ints = 1,
                 padding: str | Ints = 0, dilation: Ints = 1, bias: bool = True, padding_mode: str = "zeros") -> None:
        size = per_axis("SeparableConv2d", "kernel_size", kernel_size, 2, least=1)
        cuboid = Cuboid(size, stride, dilation, cast("str | int", padding), padding_mode)
        super().__init__(Conv(cuboid, in_channels, out_channels, weight=DepthwiseSeparable(), bias=bias), 2)

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


class _AvgPoolNd(Layer):
    """Over `Pool`; there is nothing to train."""

    axes: int = 0

    def __init__(self, kernel_size: Ints, stride: Ints | None = None, padding: Ints = 0, *, path: str | None = None,
                 max_bytes: int | None = None) -> None:
        super().__init__()
        pool = Pool(per_axis(type(self).__name__, "kernel_size", kernel_size, self.axes, least=1), stride, padding)
        self.pool = pool.bound(1)
        self.path, self.max_bytes = path, max_bytes

    def forward(self, image: Tensor) -> Tensor:
        """(..., C, *S) -> (..., C, *S')."""
        try:
            call, plan = self._planned(image)
            return plan.run(call)
        except ERRORS:
            self._explain(image)
            raise

    def plan(self, image: Tensor) -> Plan:
        """The plan that computes such a call; `print` it."""
        try:
            return self._planned(image)[1]
        except ERRORS:
            self._explain(image)
            raise

    def _planned(self, image: Tensor) -> tuple[Call, Plan]:
        channels = image.shape[-1 - self.axes] if image.dim() > self.axes else 1
        call, sizes = call_of(self.pool, EyeTheta(1, channels), None, image, axes=self.axes)
        return call, plan_for(call, self.path, self.max_bytes, sizes)

    def _explain(self, image: Tensor) -> None:
        """Say what was wrong in a call that failed."""
        check_mechanism(type(self).__name__, self.pool)
        check_tensor(type(self).__name__, "image", image)


class AvgPool1d(_AvgPoolNd):
    """The mean over windows, (B, C, S) -> (B, C, S') with S' = floor((S + 2 padding - kernel_size) / stride) + 1.

    Args:
        kernel_size: the window. stride: of the windows; the window's size by default.
        padding: zeros on both sides, which count, as torch's do by default.
        path, max_bytes: what the planner is held to; see `ops.conv`.
    """

    axes = 1


class AvgPool2d(_AvgPoolNd):
    """The mean over windows of an image, (B, C, H, W) -> (B, C, H', W'); see `AvgPool1d`."""

    axes = 2


class AvgPool3d(_AvgPoolNd):
    """The mean over windows of a volume, (B, C, D, H, W) -> (B, C, D', H', W'); see `AvgPool1d`."""

    axes = 3
