"""Cuboids run by torch's convolution, on one to three axes, with every padding, stride and dilation."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from structconv.bases.cuboid import cuboid_offsets
from structconv.bases.shift import Shift
from structconv.ops import conv, plan
from structconv.structures.grid import Grid
from structconv.testing import by_definition
from structconv.weights import Depthwise, Grouped
from tests.kernels.applied import numbers

CASES = [
    ((9,), 3, 1, 1, "zeros", 1, 0),
    ((9,), 3, 2, 2, "zeros", 2, 0),
    ((6, 7), (3, 3), 1, 1, "zeros", 1, 0),
    ((6, 7), (3, 2), 1, (1, 0), "zeros", (2, 1), (0, -1)),
    ((6, 7), (3, 3), 2, 2, "circular", 1, 0),
    ((6, 7), (3, 3), 1, 1, "reflect", 2, 0),
    ((6, 7), (3, 3), 1, 1, "replicate", 1, 0),
    ((6, 7), (3, 3), 1, 0, "none", 1, None),
    ((6, 7), (2, 3), (2, 1), 0, "none", (1, 2), None),
    ((3, 4, 5), (2, 3, 1), 1, 1, "zeros", 1, 0),
]


@pytest.mark.parametrize("sizes", [(2, 3), (1, 1)])
@pytest.mark.parametrize(("shape", "kernel", "dilation", "offset", "padding", "stride", "grow"), CASES)
def test_equals_the_definition(shape, kernel, dilation, offset, padding, stride, grow, sizes):
    samples, channels = sizes  # torch has no gradient for one channel of a kernel that lies channels last
    basis = Shift(Grid(shape), cuboid_offsets(kernel, dilation, offset), padding, stride, grow)
    x = numbers(samples, basis.num_inputs, 4).requires_grad_()
    theta = numbers(basis.size, 4, channels).requires_grad_()
    assert plan(x, basis, theta).kernel == "torch.conv"
    y, expected = conv(x, basis, theta), by_definition(x, basis, theta)
    torch.testing.assert_close(y, expected, rtol=0, atol=1e-10)
    seed = numbers(*y.shape)
    for ours, theirs in zip(torch.autograd.grad((y * seed).sum(), [x, theta]),
                            torch.autograd.grad((expected * seed).sum(), [x, theta]), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-10)


def test_equals_conv2d():
    """In the layout of torch: kernel (Q, P, 3, 2), stride and dilation as there, Delta = padding - j dilation."""
    x, kernel = numbers(2, 4, 8, 9), numbers(5, 4, 3, 2)
    expected = functional.conv2d(x, kernel, stride=(2, 1), padding=(1, 2), dilation=(1, 3))
    basis = Shift(Grid((8, 9)), cuboid_offsets((3, 2), (1, 3), (1, 2)), "zeros", (2, 1), (2 - 2, 4 - 3))
    y = conv(x.flatten(2).mT, basis, kernel.flatten(2).permute(2, 1, 0))
    torch.testing.assert_close(y.mT.unflatten(-1, expected.shape[2:]), expected, rtol=0, atol=1e-12)


def test_order_of_offsets_does_not_matter():
    offsets = cuboid_offsets((3, 3), 1, 1)
    order = torch.randperm(9, generator=torch.Generator().manual_seed(0)).tolist()
    shuffled = Shift(Grid((5, 5)), tuple(offsets[k] for k in order), "zeros")
    x, theta = numbers(25, 4), numbers(9, 4, 3)
    y = conv(x, Shift(Grid((5, 5)), offsets, "zeros"), theta)
    assert plan(x, shuffled, theta[order]).kernel == "torch.conv"
    torch.testing.assert_close(conv(x, shuffled, theta[order]), y, rtol=0, atol=1e-12)


def test_groups_are_groups():
    x = numbers(1, 6, 5, 5)
    for theta, kernel, groups in (
            (Depthwise.of(numbers(9, 6, 2)), lambda t: t.depthwise.permute(1, 2, 0).flatten(0, 1).unsqueeze(1), 6),
            (Grouped.of(numbers(9, 3, 2, 2)), lambda t: t.theta.permute(1, 3, 2, 0).flatten(0, 1), 3)):
        expected = functional.conv2d(x, kernel(theta).unflatten(-1, (3, 3)), padding=1, groups=groups)
        y = conv(x.flatten(2).mT, Shift(Grid((5, 5)), cuboid_offsets((3, 3), 1, 1), "zeros"), theta)
        torch.testing.assert_close(y.mT.unflatten(-1, (5, 5)), expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("basis", [
    Shift(Grid((5, 5)), ((0, 0), (1, 2), (2, -1)), "zeros"),
    Shift(Grid((2, 2, 2, 2)), cuboid_offsets((2, 2, 2, 2)), "zeros"),
])
def test_what_is_no_convolution_goes_another_way(basis):
    x, theta = numbers(basis.num_inputs, 4), numbers(basis.size, 4, 3)
    made = plan(x, basis, theta)
    assert made.kernel != "torch.conv"
    assert "torch.conv" not in str(made)
    torch.testing.assert_close(conv(x, basis, theta), by_definition(x, basis, theta), rtol=0, atol=1e-10)
