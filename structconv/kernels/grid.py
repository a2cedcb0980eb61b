"""Convolutions, transposed ones, and means over windows, of images: entries in row-major order and channels last."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple, cast

from torch import Tensor
from torch.nn import functional

from structconv.bases.pooling import Pooling
from structconv.bases.shift import Shift, ShiftTransposed
from structconv.planning.cost import Cost
from structconv.planning.kernel import Kernel, register
from structconv.planning.problem import Call, Problem, Run
from structconv.primitives.images import convolve_images, convolve_transposed, window_means
from structconv.structures.grid import Grid
from structconv.weights import Depthwise, DepthwiseSeparable, Eye, Full, Grouped, Shared, Weight

__all__ = ["ConvolutionWindow", "GridConvolution", "GridPooling", "TransposedConvolution"]

#: Bytes that are gathered for a byte of Theta, which torch puts in an order of its own.
_GATHERED = 4
#: (image (B, P, *S), Theta, b or none) -> (B, Q, *S').
Convolve = Callable[[Tensor, Any, "Tensor | None"], Tensor]


class GridConvolution(Kernel):
    """Theta as the kernel of a strided, dilated convolution of one to three axes, with the padding of the grid.
    Depthwise and grouped Theta become groups; a depthwise separable Theta is a depthwise convolution, then a product
    with channels; any other is a dense kernel."""

    name, types, orders, images = "torch.conv", (Shift,), ("operator_first",), True
    before = ("structconv.slices", "dense operator")

    def match(self, problem: Problem) -> ConvolutionWindow | None:
        return ConvolutionWindow.of(cast(Shift, problem.basis))

    def cost(self, match: ConvolutionWindow, problem: Problem, path: str) -> Cost:
        theta, padding = problem.theta, cast(Shift, problem.basis).padding
        per_output = 2 * theta.size * theta.in_channels * theta.out_channels // _groups(theta)
        if isinstance(theta, DepthwiseSeparable | Shared):
            per_output = 2 * theta.in_channels * (theta.size + theta.out_channels)
        moved = problem.channel_product(per_output, problem.outputs, 1, theta.out_channels, 0)
        read = Cost(bytes=problem.bytes(problem.inputs * theta.in_channels)).repeated(1 + problem.x_grad)
        padded = 0 if padding in ("zeros", "none") else problem.inputs * theta.in_channels
        return moved + read + _reordered(problem) + Cost(peak_bytes=problem.bytes(padded))

    def compile(self, match: ConvolutionWindow, problem: Problem, path: str) -> Run:
        convolve = _convolution(match, problem.theta)
        if problem.image is not None:
            return _of_images(convolve, problem.image.axes)
        return _of_entries(convolve, cast(Grid, cast(Shift, problem.basis).grid).shape)


class TransposedConvolution(Kernel):
    """Theta, dense, grouped or depthwise, as the kernel of a transposed convolution, where both ends of an axis are
    padded by as many zeros."""

    name, types, orders = "torch.conv_transpose", (ShiftTransposed,), ("operator_first",)
    before = ("dense operator",)

    def match(self, problem: Problem) -> tuple[ConvolutionWindow, tuple[int, ...]] | None:
        """The window, and how many outputs follow those of the last input on each axis."""
        basis = cast(ShiftTransposed, problem.basis)
        window = ConvolutionWindow.of(basis.shift)
        if window is None or window.pads or not isinstance(problem.theta, Full | Grouped | Depthwise):
            return None
        coarse, fine = (cast(Grid, grid).shape for grid in (basis.input_grid, basis.output_grid))
        more = tuple(after - (before - 1) * step + 2 * cut - spread * (width - 1) - 1
                     for after, before, step, cut, spread, width in
                     zip(fine, coarse, window.stride, window.padding, window.dilation, window.kernel_size, strict=True))
        fits = all(0 <= one < max(step, spread)
                   for one, step, spread in zip(more, window.stride, window.dilation, strict=True))
        return (window, more) if fits else None

    def cost(self, match: Any, problem: Problem, path: str) -> Cost:
        theta = problem.theta
        per_input = 2 * theta.size * theta.in_channels * theta.out_channels // _groups(theta)
        moved = problem.channel_product(per_input, problem.inputs, 1, theta.in_channels, 0)
        written = Cost(bytes=problem.bytes(problem.outputs * theta.out_channels)).repeated(1 + problem.x_grad)
        return moved + written + _reordered(problem)

    def compile(self, match: Any, problem: Problem, path: str) -> Run:
        (window, more), groups = match, _groups(problem.theta)

        def convolve(image: Tensor, theta: Any, bias: Tensor | None) -> Tensor:
            blocks = _blocks(theta, image)
            blocks = blocks if window.order is None else blocks[window.order]
            kernel = blocks.permute(1, 2, 3, 0).flatten(0, 1).unflatten(-1, window.kernel_size)
            return convolve_transposed(image, kernel, bias, window.stride, window.padding, more, groups,
                                       window.dilation)

        return _of_entries(convolve, cast(Grid, cast(ShiftTransposed, problem.basis).input_grid).shape)


class GridPooling(Kernel):
    """Means over windows that are padded by as many zeros at both ends of an axis; a dense Theta is a product with
    them."""

    name, types, orders, images = "torch.avg_pool", (Pooling,), ("operator_first",), True
    before = ("dense operator",)

    def match(self, problem: Problem) -> ConvolutionWindow | None:
        shift = cast(Pooling, problem.basis).shift
        window = ConvolutionWindow.of(shift) if isinstance(shift, Shift) else None
        if window is None or window.pads or not isinstance(problem.theta, Eye | Full):
            return None
        axes = zip(window.kernel_size, window.padding, window.dilation, strict=True)
        fits = all(2 * cut <= size and (spread == 1 or size == 1) for size, cut, spread in axes)
        x = problem.x  # of three axes torch's is not deterministic on a GPU, and takes no 16-bit numbers on a CPU
        known = x.is_floating_point() and (window.ndim < 3 or (x.is_cpu and x.element_size() > 2))
        return window if fits and known and problem.theta.in_channels > 0 else None

    def cost(self, match: ConvolutionWindow, problem: Problem, path: str) -> Cost:
        theta = problem.theta
        means = problem.bytes((problem.inputs + problem.outputs) * theta.in_channels)
        flops = problem.sizes.batch * problem.outputs * theta.in_channels * math.prod(match.kernel_size)
        pooled = Cost(flops, means, calls=1).repeated(1 + problem.x_grad)
        if isinstance(theta, Eye):
            return pooled
        per_output = 2 * theta.in_channels * theta.out_channels
        return pooled + problem.channel_product(per_output, problem.outputs, 1, theta.out_channels, 0)

    def compile(self, match: ConvolutionWindow, problem: Problem, path: str) -> Run:
        basis, mixes = cast(Pooling, problem.basis), isinstance(problem.theta, Full)
        scale = basis.scale * math.prod(match.kernel_size)

        def pool(image: Tensor, theta: Any, bias: Tensor | None) -> Tensor:
            y = window_means(image, match.kernel_size, match.stride, match.padding, True)
            y = y if scale == 1 else y * scale
            return _mixed(y, theta.theta.squeeze(0), bias) if mixes else _plus(y, bias)

        if problem.image is not None:
            return _of_images(pool, problem.image.axes)
        return _of_entries(pool, cast(Grid, cast(Shift, basis.shift).grid).shape)


def _reordered(problem: Problem) -> Cost:
    """Theta in torch's order, which that of an image's layer is in already."""
    if problem.image is not None:
        return Cost()
    numbers = sum(part.numel() for part in problem.theta.tensors)
    gathered = _GATHERED * numbers * problem.sizes.itemsize
    return Cost(gathered=gathered).repeated(1 + problem.x_grad + problem.theta_grad)


def _of_images(convolve: Convolve, axes: int) -> Run:
    batched = axes + 2

    def run(call: Call) -> Tensor:
        x = call.x
        if x.dim() == batched:
            return convolve(x, call.theta, call.bias)
        lead = x.shape[:-1 - axes]
        y = convolve(x.reshape(math.prod(lead), *x.shape[-1 - axes:]), call.theta, call.bias)
        return y.reshape(*lead, *y.shape[1:])

    return run


def _of_entries(convolve: Convolve, shape: tuple[int, ...]) -> Run:
    def run(call: Call) -> Tensor:
        x = call.x
        lead = x.shape[:-2]
        image = x.reshape(math.prod(lead), *shape, x.shape[-1]).movedim(-1, 1)
        y = convolve(image, call.theta, call.bias).movedim(1, -1)
        return y.reshape(*lead, math.prod(y.shape[1:-1]), y.shape[-1])

    return run


class ConvolutionWindow(NamedTuple):
    """The arguments of a convolution for a cuboid of shifts. `pads` and `mode` are padding that it cannot do itself,
    for `torch.nn.functional.pad`; `order` is that of Theta's matrices in the kernel, none if it is unchanged."""

    ndim: int
    kernel_size: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    pads: tuple[int, ...]
    mode: str
    order: list[int] | None

    @classmethod
    def of(cls, shift: Shift) -> ConvolutionWindow | None:
        """The window that the offsets of a shift form, if it is one that torch convolves with."""
        spec = shift.as_cuboid() if isinstance(shift.grid, Grid) and shift.grid.ndim <= 3 else None
        if spec is None:
            return None
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
        blocks = blocks_KGPQ if self.order is None else blocks_KGPQ[self.order]
        kernel = blocks.permute(1, 3, 2, 0).flatten(0, 1).unflatten(-1, self.kernel_size)
        if kernel.shape[0] == 1:  # torch has no gradient where it and the image have their channels last in memory
            kernel = kernel.contiguous()
        return self.correlate(image, kernel, groups, bias)

    def correlate(self, image: Tensor, kernel: Tensor, groups: int, bias: Tensor | None) -> Tensor:
        """(B, P, *S) -> (B, Q, *S') with a kernel (Q, P / G, *kernel_size)."""
        if self.pads:
            image = functional.pad(image, self.pads, mode=self.mode)
        return convolve_images(image, kernel, bias, self.stride, self.padding, self.dilation, groups)


def _convolution(window: ConvolutionWindow, like: Weight) -> Convolve:
    """(image, Theta, b) -> y for all Theta of this kind."""
    if isinstance(like, DepthwiseSeparable):
        return lambda image, theta, bias: _mixed(window.convolve(
            image, theta.depthwise.unsqueeze(-1).unsqueeze(-1), theta.in_channels, None), theta.pointwise, bias)
    if isinstance(like, Shared):
        if like.out_channels < like.in_channels:
            return lambda image, theta, bias: _plus(_box(window, _mixed(image, theta.theta, None), theta.size), bias)
        return lambda image, theta, bias: _mixed(_box(window, image, theta.size), theta.theta, bias)
    if isinstance(like, Eye):
        return lambda image, theta, bias: _plus(_box(window, image, theta.size), bias)
    if isinstance(like, Full) and window.order is None:
        return _whole(window, (like.out_channels, like.in_channels, *window.kernel_size))
    groups = _groups(like)
    return lambda image, theta, bias: window.convolve(image, _blocks(theta, image), groups, bias)


def _whole(window: ConvolutionWindow, shape: tuple[int, ...]) -> Convolve:
    """Theta (K, P, Q) as a kernel (Q, P, *kernel_size), which it is already where it lies so (`Conv2d`)."""
    single = shape[0] == 1  # see `ConvolutionWindow.convolve`

    def convolve(image: Tensor, theta: Any, bias: Tensor | None) -> Tensor:
        blocks = theta.theta
        if blocks.is_contiguous() and not single:  # channels last, as entries are: transposed as a matrix, in tiles
            blocks = blocks.flatten(0, 1).t().contiguous().t().view(blocks.shape)
        kernel = blocks.permute(2, 1, 0).view(shape)
        kernel = kernel.contiguous() if single else kernel
        return window.correlate(image, kernel, 1, bias)

    return convolve


def _groups(theta: Weight) -> int:
    if isinstance(theta, Depthwise | Eye):
        return theta.in_channels
    return theta.theta.shape[1] if isinstance(theta, Grouped) else 1


def _blocks(theta: Weight, image: Tensor) -> Tensor:
    """Theta as (K, G, P / G, Q / G), in the dtype and on the device of the image also if it has no numbers."""
    if isinstance(theta, Depthwise):
        return theta.depthwise.unsqueeze(-2)
    return theta.theta if isinstance(theta, Grouped) else theta.dense().unsqueeze(1).to(image)


def _box(window: ConvolutionWindow, image: Tensor, size: int) -> Tensor:
    """Every channel by itself, with ones."""
    channels = image.shape[1]
    return window.convolve(image, image.new_ones(size, channels, 1, 1), channels, None)


def _mixed(image: Tensor, matrix: Tensor, bias: Tensor | None) -> Tensor:
    """The channels of an image by a matrix (P, Q)."""
    y = image.flatten(2).mT @ matrix
    return (y if bias is None else y + bias).mT.unflatten(-1, image.shape[2:])


def _plus(image: Tensor, bias: Tensor | None) -> Tensor:
    return image if bias is None else image + bias.view(-1, *(1,) * (image.dim() - 2))


register(GridConvolution())
register(TransposedConvolution())
register(GridPooling())
