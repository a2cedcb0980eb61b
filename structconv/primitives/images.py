"""Convolutions of images, and means over windows of them: our kernels, or torch's where these take less time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from math import prod
from operator import lt
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from structconv.primitives.native.dispatch import Loaded, kernels
from structconv.primitives.native.loader import Core
from structconv.primitives.native.node import Gradients, as_node, is_direct

__all__ = ["FEW_SUMMED", "convolve_images", "convolve_transposed", "is_few", "window_means"]

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
#: Numbers of a kernel, which each call brings into an order of its own.
_MOST_WEIGHTS = 1 << 16


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
    options = list(stride), list(padding), list(dilation), groups
    small = is_few(image, kernel, stride) and is_direct(image, kernel, bias)
    if not small or (Loaded.core if Loaded.asked else kernels()) is None:
        return _by_torch(options, image, kernel, bias)
    return _images(None, partial(_by_torch, options), image, kernel, bias, *options)


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


def _forward(_: Any, image: Tensor, kernel: Tensor, bias: Tensor | None, *options: Any) -> Tensor:
    y: Tensor = Loaded.core.images(image, kernel, bias, *options)  # type: ignore[union-attr]
    return y if y.dim() > 1 else _by_torch(options, image, kernel, bias)  # zeros of the padding are to meet no NaN


def _backward(_: Any, image: Tensor, kernel: Tensor, bias: Tensor | None, grad: Tensor, needed: Any, *options: Any
              ) -> Gradients:
    gradients: Gradients = Loaded.core.images_backward(image, kernel, grad, *options, *needed)  # type: ignore[union-attr]
    return gradients if any(g is not None for g in gradients) else _gradients_by_torch(
        image, kernel, grad, needed, *options)


def _gradients_by_torch(image: Tensor, kernel: Tensor, grad: Tensor, needed: Any, stride: Any, padding: Any,
                        dilation: Any, groups: int, extra: Any = None) -> Gradients:
    more = [0] * len(stride) if extra is None else extra
    result: Gradients = torch.ops.aten.convolution_backward(
        grad, image, kernel, [grad.shape[1]], stride, padding, dilation, extra is not None, more, groups, needed)
    return result


_images = as_node("_Images", 3, _forward, _backward, reads_result=False, read={2: ()})


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
        options = list(stride), list(padding), list(dilation), groups, list(extra)
        small = is_few(image, kernel, stride) and all(map(lt, extra, stride))
        if not small or not is_direct(image, kernel, bias) or kernels() is None:
            return _transposed_by_torch(options, image, kernel, bias)
        return _transposed(None, partial(_transposed_by_torch, options), image, kernel, bias, *options)
    axes = list(range(2, kernel.dim()))
    sides = kernel.unflatten(0, (groups, -1)).transpose(1, 2).flatten(0, 1) if groups > 1 else kernel.transpose(0, 1)
    return convolve_images(image, sides.flip(axes), bias, stride, border, dilation, groups)


def _transposed_by_torch(options: tuple[Any, ...], *tensors: Any) -> Tensor:
    stride, padding, dilation, groups, extra = options
    return _TRANSPOSED[tensors[0].dim()](*tensors, stride, padding, extra, groups, dilation)


def _transposed_forward(_: Any, image: Tensor, kernel: Tensor, bias: Tensor | None, *options: Any) -> Tensor:
    *same, groups, extra = options
    shape = [(size - 1) * step - 2 * cut + apart * (width - 1) + 1 + more for size, width, step, cut, apart, more in
             zip(image.shape[2:], kernel.shape[2:], *same, extra, strict=True)]
    finer = image.new_empty(image.shape[0], kernel.shape[1] * groups, *shape)
    y: Tensor = Loaded.core.images_backward(  # type: ignore[union-attr]
        finer, kernel, image, *same, groups, True, False, False)[0]
    if y is None:  # see `_forward`
        return _transposed_by_torch(options, image, kernel, bias)
    return y if bias is None else y.add_(bias.view(-1, *[1] * len(shape)))


def _transposed_backward(_: Any, image: Tensor, kernel: Tensor, bias: Tensor | None, grad: Tensor, needed: Any,
                         *options: Any) -> Gradients:
    same, core = options[:4], cast(Core, Loaded.core)
    of_image = core.images(grad, kernel, None, *same) if needed[0] else None
    of_kernel = core.images_backward(grad, kernel, image, *same, False, True, False)[1] if needed[1] else None
    if (of_image is not None and of_image.dim() == 1) or (needed[1] and of_kernel is None):  # see `_forward`
        return _gradients_by_torch(image, kernel, grad, needed, *options)
    return of_image, of_kernel, grad.flatten(2).sum((0, 2)) if needed[2] else None


_transposed = as_node("_ImagesTransposed", 3, _transposed_forward, _transposed_backward, reads_result=False,
                      read={2: ()})


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
    options = list(size), list(stride), list(padding), all_count
    if (_is_few_summed(image, prod(size), prod(stride)) or image.numel() >= _FEW_NUMBERS or not image.is_contiguous()
            or not is_direct(image) or kernels() is None):
        return _means_by_torch(options, image)
    if not (image.requires_grad and torch.is_grad_enabled()):
        return _means_forward(None, image, *options)
    return _means(None, partial(_means_by_torch, options), image, *options)


def _is_few_summed(image: Tensor, size: int, stride: int) -> bool:
    """Return True if the windows read so few numbers that torch's kernel is the faster one."""
    numbers = image.numel()
    if type(numbers) is not int:  # a program is recorded
        return True
    return numbers * size < FEW_SUMMED * stride and (  # of lines and planes, torch's is slow without gradients
        image.dim() == 5 or (image.requires_grad and torch.is_grad_enabled()))


def _means_by_torch(options: tuple[Any, ...], image: Tensor) -> Tensor:
    size, stride, padding, all_count = options
    return _MEANS[image.dim()](image, size, stride, padding, False, all_count)


def _means_forward(_: Any, image: Tensor, *options: Any) -> Tensor:
    y: Tensor = Loaded.core.window_means(image, *options)  # type: ignore[union-attr]
    return y


def _means_backward(_: Any, image: Tensor, grad: Tensor, needed: Any, *options: Any) -> Tensor:
    of_image: Tensor = Loaded.core.window_means_backward(grad, image.shape[2:], *options)  # type: ignore[union-attr]
    return of_image


_means = as_node("_WindowMeans", 1, _means_forward, _means_backward, reads_result=False)
