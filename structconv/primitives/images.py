"""Convolutions of images: our kernel where there are few numbers, else torch's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from structconv.primitives.native.dispatch import Loaded, kernels
from structconv.primitives.native.layer import Gradients, as_node, is_direct

__all__ = ["convolve_images"]

_CONVOLUTIONS: dict[int, Callable[..., Tensor]] = {3: F.conv1d, 4: F.conv2d, 5: F.conv3d}
#: Products up to which our kernel takes less time than torch's, and that where an output reads few channels.
_PRODUCTS, _FEW_CHANNELS, _PRODUCTS_OF_FEW = 5 << 20, 3, 30 << 20
#: Numbers of a kernel, which each call brings into an order of its own.
_MOST_WEIGHTS = 1 << 16


def convolve_images(image: Tensor, kernel: Tensor, bias: Tensor | None, stride: Sequence[int], padding: Sequence[int],
                    dilation: Sequence[int], groups: int, *, direct: bool = False) -> Tensor:
    """`torch.nn.functional.conv1d`, `conv2d` or `conv3d`, differentiable any number of times.

    Args:
        image: (B, P, *S). kernel: (Q, P / groups, *K). bias: (Q,) or none.
        stride, padding, dilation: a number for each axis.
        direct: whether `is_direct` is known to accept the tensors.

    Returns:
        (B, Q, *S').

    Cost: 2 Q P / groups prod(K) B prod(S') flops; small batches of stride 1 in one pass over `src/images.cpp`.
    """
    options = list(stride), list(padding), list(dilation), groups
    small = _is_small(image, kernel, stride) and (direct or is_direct(image, kernel, bias))
    if not small or (Loaded.core if Loaded.asked else kernels()) is None:
        return _by_torch(image, kernel, bias, *options)
    return _images(None, partial(_composed, options), image, kernel, bias, *options)


def _is_small(image: Tensor, kernel: Tensor, stride: Sequence[int]) -> bool:
    """Return True for images that our kernel should take; torch has another one, as fast, for a single image."""
    shape, read, weights = image.shape, kernel.shape, kernel.numel()
    if type(shape[0]) is not int or type(weights) is not int:  # a program is recorded
        return False
    if len(read) != len(shape) or shape[0] < 2 or shape[1] < 1 or max(stride) > 1 or not image.is_contiguous():
        return False
    most = _PRODUCTS_OF_FEW if read[1] <= _FEW_CHANNELS else _PRODUCTS
    return read[0] * read[1] < weights <= _MOST_WEIGHTS and weights * (image.numel() // shape[1]) <= most


def _by_torch(image: Tensor, kernel: Tensor, bias: Tensor | None, stride: Sequence[int], padding: Sequence[int],
              dilation: Sequence[int], groups: int) -> Tensor:
    return _CONVOLUTIONS[image.dim()](image, kernel, bias, stride, padding, dilation, groups)


def _composed(options: tuple[Any, ...], *tensors: Any) -> Tensor:
    return _by_torch(*tensors, *options)


def _forward(_: Any, *arguments: Any) -> Tensor:
    y: Tensor = Loaded.core.images(*arguments)  # type: ignore[union-attr]
    return y


def _backward(_: Any, image: Tensor, kernel: Tensor, bias: Tensor | None, grad: Tensor, needed: Any, *options: Any
              ) -> Gradients:
    gradients: Gradients = Loaded.core.images_backward(image, kernel, grad, *options, *needed)  # type: ignore[union-attr]
    return gradients


_images = as_node("_Images", 3, _forward, _backward, reads_result=False)
