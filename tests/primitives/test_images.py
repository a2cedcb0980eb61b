"""Convolutions of small images by our kernel are those of torch in float64, in both passes and for all options."""

from __future__ import annotations

import random

import pytest
import torch
import torch.nn.functional as F
from torch.autograd import gradcheck, gradgradcheck

from structconv import nn
from structconv.compat.torch import Conv2d
from structconv.primitives import images
from structconv.primitives.images import convolve_images
from structconv.primitives.native.loader import core
from tests.support.layers import EVERY

TORCH = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}
needs_kernels = pytest.mark.skipif(core() is None, reason="native kernels are not available")


def drawn(seed):
    """Images, a kernel, a bias or none, and options."""
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    axes, groups = rng.choice((1, 2, 2, 3)), rng.choice((1, 1, 2, 3))
    sizes = [rng.randint(1, 4) for _ in range(axes)]
    stride, padding, dilation = ([rng.randint(least, most) for _ in range(axes)] for least, most in ((1, 3), (0, 3), (1, 2)))
    shape = [rng.randint(max(1, d * (k - 1) + 1 - 2 * p), (90, 20, 8)[axes - 1])
             for k, p, d in zip(sizes, padding, dilation, strict=True)]
    channels, outputs = rng.randint(1, 5) * groups, rng.randint(1, 14) * groups
    image = torch.randn(rng.randint(2, 4), channels, *shape, generator=generator)
    kernel = torch.randn(outputs, channels // groups, *sizes, generator=generator)
    bias = torch.randn(outputs, generator=generator) if rng.random() < 0.7 else None
    return (image, kernel, bias), (stride, padding, dilation, groups)


def gradients(function, tensors, options, grad=None):
    leaves = [None if t is None else t.clone().requires_grad_() for t in tensors]
    y = function(*leaves, *options)
    grad = torch.randn_like(y) if grad is None else grad.to(y)
    y.backward(grad)
    return (y.detach(), *(None if t is None else t.grad for t in leaves)), grad


@needs_kernels
@pytest.mark.parametrize("seed", range(400 if EVERY else 60))
def test_any_convolution(seed, monkeypatch):
    tensors, options = drawn(seed)
    monkeypatch.setattr(images, "_is_small", lambda *_: True)
    actual, grad = gradients(convolve_images, tensors, options)
    double = [None if t is None else t.double() for t in tensors]
    expected, _ = gradients(TORCH[tensors[0].dim() - 2], double, options, grad)
    for own, reference in zip(actual, expected, strict=True):
        if reference is not None:
            torch.testing.assert_close(own.double(), reference, rtol=1e-5, atol=2e-6 * float(reference.abs().max()) + 1e-6)


@needs_kernels
def test_what_it_takes():
    called = []
    node = images._images
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(images, "_images", lambda *arguments: called.append(True) or node(*arguments))
        for taken, image, kernel, stride in (
                (True, torch.randn(2, 3, 9, 9), torch.randn(4, 3, 3, 3), 1),
                (True, torch.randn(2, 3, 30), torch.randn(4, 3, 3), 1),
                (False, torch.randn(1, 3, 9, 9), torch.randn(4, 3, 3, 3), 1),
                (False, torch.randn(2, 3, 9, 9), torch.randn(4, 3, 3, 3), 2),
                (False, torch.randn(2, 3, 9, 9), torch.randn(4, 3, 1, 1), 1),
                (False, torch.randn(8, 64, 32, 32), torch.randn(64, 64, 3, 3), 1),
                (False, torch.randn(2, 3, 9, 9).double(), torch.randn(4, 3, 3, 3).double(), 1),
                (False, torch.randn(2, 3, 9, 9).to(memory_format=torch.channels_last), torch.randn(4, 3, 3, 3), 1)):
            called.clear()
            axes = image.dim() - 2
            options = [stride] * axes, [1] * axes, [1] * axes
            y = convolve_images(image, kernel, None, *options, 1)
            torch.testing.assert_close(y, TORCH[axes](image, kernel, None, *options), rtol=1e-4, atol=1e-4)
            assert bool(called) is taken


@needs_kernels
def test_derivatives_of_gradients():
    """They are torch's, in float32; `gradcheck` finds them in those of torch by the same function in float64."""
    tensors, options = (torch.randn(2, 2, 5, 4), torch.randn(3, 2, 3, 2), torch.randn(3)), ([1, 1], [1, 1], [1, 1], 1)
    double = [t.double().requires_grad_() for t in tensors]
    assert gradcheck(lambda *t: convolve_images(*t, *options), double)
    assert gradgradcheck(lambda *t: convolve_images(*t, *options), double)
    results = []
    for function in (convolve_images, F.conv2d):
        leaves = [t.clone().requires_grad_() for t in tensors]
        grads = torch.autograd.grad(function(*leaves, *options).tanh().sum(), leaves, create_graph=True)
        results.append(torch.autograd.grad(sum(g.square().sum() for g in grads), leaves))
    for own, reference in zip(*results, strict=True):
        torch.testing.assert_close(own, reference, rtol=1e-4, atol=1e-4)


@needs_kernels
def test_numbers_do_not_depend_on_threads():
    tensors, options = (torch.randn(9, 8, 30, 30), torch.randn(8, 8, 3, 3), torch.randn(8)), ([1, 1], [1, 1], [1, 1], 1)
    torch.manual_seed(0)
    threads, results, grad = torch.get_num_threads(), [], None
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            result, grad = gradients(convolve_images, tensors, options, grad)
            results.append(result)
    finally:
        torch.set_num_threads(threads)
    for result in results[1:]:
        assert all(map(torch.equal, result, results[0]))


@needs_kernels
def test_only_what_is_asked_for_has_a_gradient():
    image, kernel = torch.randn(2, 3, 9, 9), torch.randn(4, 3, 3, 3)
    for train_image, train_kernel in ((True, False), (False, True)):
        own = image.clone().requires_grad_(train_image), kernel.clone().requires_grad_(train_kernel)
        convolve_images(*own, None, [1, 1], [1, 1], [1, 1], 1).sum().backward()
        assert [t.grad is not None for t in own] == [train_image, train_kernel]


@needs_kernels
@pytest.mark.parametrize("make", [Conv2d, nn.Conv2d])
def test_layers_of_small_images_take_it(make):
    layer, x = make(3, 4, 3, padding=1), torch.randn(2, 3, 9, 9)
    assert layer(x).grad_fn.name() == "_ImagesBackward"
    assert torch.isnan(layer(x.index_fill(3, torch.tensor([0]), torch.nan)))[..., 2:].sum() == 0
