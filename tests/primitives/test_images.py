"""Convolutions of images and means over windows by our kernels are those of torch in float64, for all options."""

import random

import pytest
import torch
import torch.nn.functional as F

from structconv import StructureError, nn
from structconv.compat.torch import AvgPool2d, Conv2d, ConvTranspose2d
from structconv.primitives import images
from structconv.primitives.images import convolve_images, convolve_transposed, window_means
from structconv.primitives.native.loader import core
from tests.support.drawn import EVERY
from tests.support.threads import on_threads

TORCH = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}
TRANSPOSED = {1: F.conv_transpose1d, 2: F.conv_transpose2d, 3: F.conv_transpose3d}
MEANS = {1: F.avg_pool1d, 2: F.avg_pool2d, 3: F.avg_pool3d}
needs_kernels = pytest.mark.skipif(core() is None, reason="native kernels are not available")


def drawn(seed):
    """Images, a kernel, a bias or none, and options."""
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    axes, groups = rng.choice((1, 2, 2, 3)), rng.choice((1, 1, 2, 3))
    sizes = [rng.randint(1, 4) for _ in range(axes)]
    stride, padding, dilation = ([rng.randint(*bounds) for _ in range(axes)] for bounds in ((1, 3), (0, 3), (1, 2)))
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


def check(function, reference, tensors, options):
    """Values and gradients in float32 are those of torch in float64, to the rounding of a sum: a part of the sum of the
    sizes of what is added up, which the same function gives of the sizes of all numbers."""
    actual, grad = gradients(function, tensors, options)
    double = [None if t is None else t.double() for t in tensors]
    expected, _ = gradients(reference, double, options, grad)
    sizes, _ = gradients(reference, [None if t is None else t.abs() for t in double], options, grad.abs())
    for own, correct, size in zip(actual, expected, sizes, strict=True):
        if correct is not None:
            assert bool(((own.double() - correct).abs() <= 1e-6 * size).all())


SEEDS = pytest.mark.parametrize("seed", range(400 if EVERY else 60))


@needs_kernels
@SEEDS
def test_any_convolution(seed, monkeypatch):
    tensors, options = drawn(seed)
    monkeypatch.setattr(images, "is_few", lambda *_: True)
    check(convolve_images, TORCH[tensors[0].dim() - 2], tensors, options)


@needs_kernels
@SEEDS
def test_any_transposed_convolution(seed, monkeypatch):
    (image, kernel, bias), (stride, padding, dilation, groups) = drawn(seed)
    rng, axes = random.Random(seed), image.dim() - 2
    stride = stride if rng.random() < 0.7 else [1] * axes
    extra = [rng.randrange(step) for step in stride]
    padding = [min(cut, apart * (width - 1) // 2) for cut, apart, width in
               zip(padding, dilation, kernel.shape[2:], strict=True)]  # so that there are outputs
    image = F.pad(image, [amount for _ in padding for amount in (3, 3)])
    finer = TORCH[axes](image, kernel, bias, stride, padding, dilation, groups)
    monkeypatch.setattr(images, "is_few", lambda *_: True)
    bias = None if bias is None else torch.randn(kernel.shape[1] * groups)
    check(convolve_transposed, TRANSPOSED[axes], (finer, kernel, bias), (stride, padding, extra, groups, dilation))


@needs_kernels
@SEEDS
def test_any_means(seed, monkeypatch):
    (image, *_), (stride, *_) = drawn(seed)
    rng = random.Random(seed)
    size = [rng.randint(1, min(most, 4)) for most in image.shape[2:]]
    padding = [rng.randint(0, width // 2) for width in size]
    monkeypatch.setattr(images, "FEW_SUMMED", 0)
    all_count = rng.random() < 0.5

    def reference(image, size, stride, padding, all_count):
        return MEANS[image.dim() - 2](image, size, stride, padding, False, all_count)

    check(window_means, reference, (image,), (size, stride, padding, all_count))


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
                (True, torch.randn(2, 3, 9, 9), torch.randn(4, 3, 3, 3), 2),
                (False, torch.randn(2, 3, 90, 90), torch.randn(9, 3, 3, 3), 2),
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
@pytest.mark.parametrize("name", ["convolve", "transposed", "means"])
def test_derivatives_of_gradients(name, monkeypatch):
    monkeypatch.setattr(images, "FEW_SUMMED", 0)
    tensors, one = [torch.randn(2, 2, 5, 4), torch.randn(3, 2, 3, 2), torch.randn(3)], [1, 1]
    ours, theirs = {
        "convolve": (lambda *t: convolve_images(*t, one, one, one, 1), lambda *t: F.conv2d(*t, one, one)),
        "transposed": (lambda x, w, b: convolve_transposed(x, w.mT.transpose(0, 1), b, [2, 2], one, one, 1, one),
                       lambda x, w, b: F.conv_transpose2d(x, w.mT.transpose(0, 1), b, 2, 1, 1)),
        "means": (lambda x: window_means(x, [2, 3], [1, 2], one, False),
                  lambda x: F.avg_pool2d(x, [2, 3], [1, 2], 1, False, False)),
    }[name]
    results = []
    for function in (ours, theirs):
        leaves = [t.clone().requires_grad_() for t in tensors[:1 if name == "means" else 3]]
        grads = torch.autograd.grad(function(*leaves).tanh().sum(), leaves, create_graph=True)
        results.append(torch.autograd.grad(sum(g.square().sum() for g in grads), leaves))
    torch.testing.assert_close(*results, rtol=1e-4, atol=1e-4)


@needs_kernels
def test_numbers_do_not_depend_on_threads():
    tensors, options = (torch.randn(9, 8, 30, 30), torch.randn(8, 8, 3, 3), torch.randn(8)), ([1, 1], [1, 1], [1, 1], 1)
    grad = torch.randn(9, 8, 30, 30)
    first, *others = on_threads(lambda: gradients(convolve_images, tensors, options, grad)[0])
    assert all(all(map(torch.equal, first, other)) for other in others)


@needs_kernels
def test_only_what_is_asked_for_has_a_gradient():
    image, kernel = torch.randn(2, 3, 9, 9), torch.randn(4, 3, 3, 3)
    for train_image, train_kernel in ((True, False), (False, True)):
        own = image.clone().requires_grad_(train_image), kernel.clone().requires_grad_(train_kernel)
        convolve_images(*own, None, [1, 1], [1, 1], [1, 1], 1).sum().backward()
        assert [t.grad is not None for t in own] == [train_image, train_kernel]


@needs_kernels
@pytest.mark.parametrize("name, layer", [
    ("_Images", Conv2d(3, 4, 3, padding=1)), ("_Images", nn.Conv2d(3, 4, 3, padding=1)),
    ("_Images", ConvTranspose2d(3, 4, 3, padding=1)), ("_ImagesTransposed", ConvTranspose2d(3, 4, 3, 2, 1, 1)),
    ("_WindowMeans", AvgPool2d(3)), ("_WindowMeans", nn.AvgPool2d(3, padding=1)),
    ("_WindowMeans", AvgPool2d(3, padding=1, count_include_pad=False))])
def test_layers_of_images_take_them(name, layer):
    x = torch.randn(2, 3, *([30, 30] if name == "_ImagesTransposed" else [60, 60]))
    assert layer(x.requires_grad_()).grad_fn.name() == f"{name}Backward"
    hidden = layer(x.detach().index_fill(3, torch.tensor([0]), torch.nan))  # reaches what reads it, and nothing else
    assert torch.isnan(hidden)[..., 0].all()
    assert not torch.isnan(hidden)[..., 3:].any()


@needs_kernels
def test_padding_meets_no_number_that_is_not_finite():
    """A NaN of the kernel reaches the outputs that read it, an infinite gradient the weights of entries that exist."""
    for make, stride in ((Conv2d, 1), (Conv2d, 2), (ConvTranspose2d, 2)):
        layer, x = make(3, 4, 3, stride, padding=1), torch.randn(2, 3, 8, 8)
        theirs = getattr(torch.nn, make.__name__)(3, 4, 3, stride, padding=1)
        grad = torch.zeros_like(layer(x)).index_fill(3, torch.tensor([0]), torch.inf)
        theirs.load_state_dict(layer.state_dict())
        results = [torch.autograd.grad(own(x), own.weight, grad)[0].isnan() for own in (layer, theirs)]
        assert torch.equal(*results)
        with torch.no_grad():
            for own in (layer, theirs):
                own.weight[0, 0, 0, 0] = torch.nan
        assert torch.equal(*(own(x).isnan() for own in (layer, theirs)))


def test_more_outputs_than_the_stride_are_those_of_torch():
    ours, theirs = (make(3, 2, (1, 4), dilation=(1, 2), output_padding=(0, 1))
                    for make in (ConvTranspose2d, torch.nn.ConvTranspose2d))
    theirs.load_state_dict(ours.state_dict())
    x = torch.randn(2, 3, 3, 5)
    torch.testing.assert_close(ours(x), theirs(x))


@pytest.mark.parametrize("layer", [Conv2d(3, 2, 5), nn.Conv2d(3, 2, 5), AvgPool2d(7)])
def test_images_that_are_too_small_are_refused_as_ever(layer):
    with pytest.raises(StructureError, match="window"):
        layer(torch.randn(2, 3 if isinstance(layer, Conv2d | nn.Conv2d) else 3000, 3, 5))


@pytest.mark.parametrize("means_first", [True, False])
def test_options_of_means_and_of_convolutions_are_apart(means_first):
    """A count of the padding, True, equals a number of groups, 1; torch's operators tell them apart."""
    images._packed.cache_clear()
    image, kernel = torch.randn(2, 3, 60, 60, requires_grad=True), torch.randn(4, 3, 3, 3)
    small, options = image[..., :9, :9].contiguous(), [(2, 2), (2, 2), (1, 1)]
    calls = {"means": lambda: (window_means(image, *options, True), F.avg_pool2d(image, 2, 2, 1)),
             "sums": lambda: (convolve_images(small, kernel, None, *options, 1), F.conv2d(small, kernel, None, 2, 2))}
    for name in ("means", "sums") if means_first else ("sums", "means"):
        actual, expected = ([y, *torch.autograd.grad(y.square().sum(), image, create_graph=True)]
                            for y in calls[name]())
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)
