"""Convolutions of images, and means over windows of them: our kernels, or torch's where these take less time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from math import prod
from operator import lt
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from structconv import torch_compat as private
from structconv.primitives.native.dispatch import Loaded, kernels
from structconv.primitives.native.loader import Core
from structconv.primitives.native.node import Gradients, as_node, is_direct

__all__ = ["FEWEST_SUMMED", "FEW_SUMMED", "convolve_images", "convolve_transposed", "few_means", "is_few",
           "window_means"]

_CONVOLUTIONS: dict[int, Callable[..., Tensor]] = {3: F.conv1d, 4: F.conv2d, 5: F.conv3d}
_TRANSPOSED: dict[int, Callable[..., Tensor]] = {3: F.conv_transpose1d, 4: F.conv_transpose2d, 5: F.conv_transpose3d}
_MEANS: dict[int, Callable[..., Tensor]] = {3: F.avg_pool1d, 4: F.avg_pool2d, 5: F.avg_pool3d}
#: Products up to which our kernel takes less time than torch's; where an image has few channels; where outputs read a
#: part of the channels, or lie apart.
_PRODUCTS, _FEW_CHANNELS, _PRODUCTS_OF_FEW, _PRODUCTS_OF_PARTS = 5 << 20, 3, 30 << 20, 5 << 16
#: Numbers below which our kernels take an image: kFewNumbers in native/src/operators.cpp.
_FEW_NUMBERS = 1 << 24
#: Numbers that are summed for all windows, below which a node of C++ is worth more than a faster kernel.
FEW_SUMMED = 12 << 10
#: Numbers of planes and cubes below which torch's kernel, without gradients, takes less time than the way to ours.
FEWEST_SUMMED = 4 << 10
#: Numbers of a kernel, which each call brings into an order of its own.
_MOST_WEIGHTS = 1 << 16
#: Bits of a number of one axis: kAxisBits in native/src/operators.cpp.
_AXIS_BITS = 20


class _Options(NamedTuple):
    """The options of a convolution or of windows for torch, and for our kernels with the axes' numbers in one."""

    lists: tuple[Any, ...]
    packed: tuple[int, ...]


@lru_cache(1024, typed=True)  # True is a count of windows, 1 a number of groups
def _packed(*options: tuple[int, ...] | int) -> _Options | None:
    """The options, unless one is too large for our kernels."""
    numbers = [number for option in options if isinstance(option, tuple) for number in option]
    if not all(0 <= number < 1 << _AXIS_BITS for number in numbers):
        return None
    return _Options(tuple(list(option) if isinstance(option, tuple) else option for option in options), tuple(
        sum(number << _AXIS_BITS * axis for axis, number in enumerate(option)) if isinstance(option, tuple) else option
        for option in options))


def convolve_images(image: Tensor, kernel: Tensor, bias: Tensor | None, stride: Sequence[int], padding: Sequence[int],
                    dilation: Sequence[int], groups: int) -> Tensor:
    """`torch.nn.functional.conv1d`, `conv2d` or `conv3d`, differentiable any number of times.

    Args:
        image: (B, P, *S). kernel: (Q, P / groups, *K). bias: (Q,) or none.
        stride, padding, dilation: a number for each axis.

    Returns:
        (B, Q, *S').

    Cost: 2 Q P / groups prod(K) B prod(S') flops; small batches of stride 1 in one pass over `src/images.cpp`.
    """
    if is_few(image, kernel, stride) and is_direct(image, kernel, bias):
        options = _packed(tuple(stride), tuple(padding), tuple(dilation), groups)
        if options is not None and (Loaded.core if Loaded.asked else kernels()) is not None:
            return _images(None, partial(_by_torch, options.lists), image, kernel, bias, options)
    return _by_torch((list(stride), list(padding), list(dilation), groups), image, kernel, bias)


def is_few(image: Tensor, kernel: Tensor, stride: Sequence[int]) -> bool:
    """Return True for images that our kernel should take; torch has another one, as fast, for a single image."""
    shape, read, weights = image.shape, kernel.shape, kernel.numel()
    if type(shape[0]) is not int or type(weights) is not int:  # a program is recorded
        return False
    if (image.dtype is not torch.float32 or len(read) != len(shape) or shape[0] < 2 or shape[1] < 1
            or not image.is_contiguous()):
        return False
    most = (_PRODUCTS_OF_PARTS if read[1] < shape[1] or max(stride) > 1 else
            _PRODUCTS_OF_FEW if read[1] <= _FEW_CHANNELS else _PRODUCTS)
    return read[0] * read[1] < weights <= _MOST_WEIGHTS and weights * (image.numel() // shape[1]) <= most


def _by_torch(options: tuple[Any, ...], *tensors: Any) -> Tensor:
    return _CONVOLUTIONS[tensors[0].dim()](*tensors, *options)


def _forward(_: Any, image: Tensor, kernel: Tensor, bias: Tensor | None, options: _Options) -> Tensor:
    y: Tensor = Loaded.core.images(image, kernel, bias, *options.packed)  # type: ignore[union-attr]
    return y if y.dim() > 1 else _by_torch(options.lists, image, kernel, bias)  # zeros of padding are to meet no NaN


def _backward(_: Any, image: Tensor, kernel: Tensor, bias: Tensor | None, grad: Tensor, needed: Any, options: _Options
              ) -> Gradients:
    gradients: Gradients = Loaded.core.images_backward(  # type: ignore[union-attr]
        image, kernel, grad, *options.packed, *needed)
    return gradients if any(g is not None for g in gradients) else _gradients_by_torch(
        image, kernel, grad, needed, *options.lists)


def _gradients_by_torch(image: Tensor, kernel: Tensor, grad: Tensor, needed: Any, stride: Any, padding: Any,
                        dilation: Any, groups: int, extra: Any = None) -> Gradients:
    more = [0] * len(stride) if extra is None else extra
    result: Gradients = torch.ops.aten.convolution_backward(
        grad, image, kernel, [grad.shape[1]], stride, padding, dilation, extra is not None, more, groups, needed)
    return result


_images = as_node("_Images", 3, _forward, _backward, readers={2: ()})


def convolve_transposed(image: Tensor, kernel: Tensor, bias: Tensor | None, stride: Sequence[int],
                        padding: Sequence[int], extra: Sequence[int], groups: int, dilation: Sequence[int]) -> Tensor:
    """`torch.nn.functional.conv_transpose1d`, `2d` or `3d`, differentiable any number of times.

    Args:
        image: (B, P, *S). kernel: (P, Q / groups, *K). bias: (Q,) or none.
        extra: entries added to the output on each axis. The others are those of `convolve_images`.

    Returns:
        (B, Q, *S').

    Of stride 1 it is a convolution with the reversed kernel, of which torch's is faster than its transposed one.
    """
    border = None if max(stride) > 1 or any(extra) else [
        apart * (size - 1) - cut for size, cut, apart in zip(kernel.shape[2:], padding, dilation, strict=True)]
    if border is None or min(border) < 0:
        if is_few(image, kernel, stride) and all(map(lt, extra, stride)) and is_direct(image, kernel, bias):
            options = _packed(tuple(stride), tuple(padding), tuple(dilation), groups, tuple(extra))
            if options is not None and kernels() is not None:
                return _transposed(None, partial(_transposed_by_torch, options.lists), image, kernel, bias, options)
        return _transposed_by_torch((stride, padding, dilation, groups, extra), image, kernel, bias)
    axes = list(range(2, kernel.dim()))
    sides = kernel.unflatten(0, (groups, -1)).transpose(1, 2).flatten(0, 1) if groups > 1 else kernel.transpose(0, 1)
    return convolve_images(image, sides.flip(axes), bias, stride, border, dilation, groups)


def _transposed_by_torch(options: tuple[Any, ...], *tensors: Any) -> Tensor:
    stride, padding, dilation, groups, extra = options
    return _TRANSPOSED[tensors[0].dim()](*tensors, stride, padding, extra, groups, dilation)


def _transposed_forward(_: Any, image: Tensor, kernel: Tensor, bias: Tensor | None, options: _Options) -> Tensor:
    *same, groups, extra = options.lists
    shape = [(size - 1) * step - 2 * cut + apart * (width - 1) + 1 + more for size, width, step, cut, apart, more in
             zip(image.shape[2:], kernel.shape[2:], *same, extra, strict=True)]
    finer = image.new_empty(image.shape[0], kernel.shape[1] * groups, *shape)
    y: Tensor = Loaded.core.images_backward(  # type: ignore[union-attr]
        finer, kernel, image, *options.packed[:4], True, False, False)[0]
    if y is None:  # see `_forward`
        return _transposed_by_torch(options.lists, image, kernel, bias)
    return y if bias is None else y.add_(bias.view(-1, *[1] * len(shape)))


def _transposed_backward(_: Any, image: Tensor, kernel: Tensor, bias: Tensor | None, grad: Tensor, needed: Any,
                         options: _Options) -> Gradients:
    same, core = options.packed[:4], cast(Core, Loaded.core)
    of_image = core.images(grad, kernel, None, *same) if needed[0] else None
    of_kernel = core.images_backward(grad, kernel, image, *same, False, True, False)[1] if needed[1] else None
    if (of_image is not None and of_image.dim() == 1) or (needed[1] and of_kernel is None):  # see `_forward`
        return _gradients_by_torch(image, kernel, grad, needed, *options.lists)
    return of_image, of_kernel, grad.flatten(2).sum((0, 2)) if needed[2] else None


_transposed = as_node("_ImagesTransposed", 3, _transposed_forward, _transposed_backward, readers={2: ()})


# -- means over windows -------------------------------------------------------------------------------------------

def window_means(image: Tensor, size: Sequence[int], stride: Sequence[int], padding: Sequence[int], all_count: bool
                 ) -> Tensor:
    """`torch.nn.functional.avg_pool1d`, `2d` or `3d`, differentiable any number of times.

    Args:
        image: (B, P, *S).
        size, stride, padding: a number for each axis.
        all_count: whether zeros of the padding count.

    Returns:
        (B, P, *S').

    Cost: rows are added up before windows along them: B P prod(S') (sum of the axes' sizes, roughly) additions.
    """
    numbers, trains = image.numel(), image.requires_grad and torch.is_grad_enabled()
    if (type(numbers) is int and numbers < _FEW_NUMBERS and is_direct(image) and image.is_contiguous()
            and (not trains or numbers * prod(size) >= FEW_SUMMED * prod(stride))):
        windows = _packed(tuple(size), tuple(stride), tuple(padding), all_count)
        if windows is not None and (Loaded.core if Loaded.asked else kernels()) is not None:
            if not trains:
                return _means_forward(None, image, windows)
            return _means(None, partial(_means_by_torch, windows.lists), image, windows)
    return _means_by_torch((size, stride, padding, all_count), image)


def few_means(image: Tensor, size: Any, stride: Any, padding: Any, axes: int) -> Tensor | None:
    """`window_means` of a few numbers without gradients, in fewer steps: for options of torch's layers that put windows
    side by side. `None` where it does not apply; errors are the kernel's."""
    core, windows = Loaded.core if Loaded.asked else kernels(), _side_by_side(size, stride, padding, axes)
    if (core is None or windows is None or image.dim() != axes + 2 or image.dtype is not torch.float32
            or not image.is_cpu or private.watched(profilers=False) or private.any_autocast()):
        return None
    y: Tensor = core.window_means(image, *windows)
    return y


@lru_cache(128)
def _side_by_side(size: Any, stride: Any, padding: Any, axes: int) -> tuple[Any, ...] | None:
    each = size if isinstance(size, tuple) else (size,) * axes
    if size != stride or padding not in (0, (0,)) or len(each) != axes or min(each) < 1:
        return None
    options = _packed(each, each, (0,) * axes, True)
    return None if options is None else options.packed


def _means_by_torch(options: tuple[Any, ...], image: Tensor) -> Tensor:
    size, stride, padding, all_count = options
    return _MEANS[image.dim()](image, size, stride, padding, False, all_count)


def _means_forward(_: Any, image: Tensor, options: _Options) -> Tensor:
    y: Tensor = Loaded.core.window_means(image, *options.packed)  # type: ignore[union-attr]
    return y


def _means_backward(_: Any, image: Tensor, grad: Tensor, needed: Any, options: _Options) -> Tensor:
    of_image: Tensor = Loaded.core.window_means_backward(  # type: ignore[union-attr]
        grad, image.shape[2:], *options.packed)
    return of_image


_means = as_node("_WindowMeans", 1, _means_forward, _means_backward, readers={})
