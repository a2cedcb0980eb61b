"""Cuboids run by torch's convolutions and poolings, on one to three axes, with every padding, stride and dilation."""

import pytest
import torch

from structconv import Depthwise, Eye, Full, Grid, Grouped, Shift, conv, plan
from structconv.bases import Pooling, ShiftTransposed, cuboid_offsets
from structconv.testing import by_definition
from tests.kernels.applied import numbers
from tests.support.derivatives import same

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
    theta = Full.of(numbers(basis.size, 4, channels))
    assert_defined(numbers(samples, basis.num_inputs, 4), basis, theta, "torch.conv")


def test_order_of_offsets_does_not_matter():
    offsets = cuboid_offsets((3, 3), 1, 1)
    order = torch.randperm(9, generator=torch.Generator().manual_seed(0)).tolist()
    shuffled = Shift(Grid((5, 5)), tuple(offsets[k] for k in order), "zeros")
    x, theta = numbers(25, 4), numbers(9, 4, 3)
    y = conv(x, Shift(Grid((5, 5)), offsets, "zeros"), theta)
    assert plan(x, shuffled, theta[order]).kernel == "torch.conv"
    torch.testing.assert_close(conv(x, shuffled, theta[order]), y, rtol=0, atol=1e-12)


def assert_defined(x, basis, theta, kernel):
    """The kernel is planned, and its numbers and gradients are those of the definition."""
    leaves = [x.requires_grad_(), *(tensor.requires_grad_() for tensor in theta.tensors if tensor.is_floating_point())]
    assert plan(x, basis, theta).kernel == kernel
    same(conv(x, basis, theta), by_definition(x, basis, theta), leaves, 0, 1e-10)


@pytest.mark.parametrize("kind", ["full", "single", "grouped", "depthwise"])
@pytest.mark.parametrize(("shape", "kernel", "dilation", "low", "padding", "stride", "grow"), [
    ((9,), 3, 1, 1, "zeros", 2, 0),
    ((10,), 3, 1, 1, "zeros", 2, 0),  # an output after those of the last input
    ((6, 7), (3, 3), 1, 1, "zeros", 1, 0),
    ((6, 7), (2, 3), (2, 1), 0, "none", (1, 2), None),
    ((4, 5, 6), (2, 3, 1), 1, 0, "none", 2, None),
])
def test_transposed_convolution(shape, kernel, dilation, low, padding, stride, grow, kind):
    basis = ShiftTransposed(Shift(Grid(shape), cuboid_offsets(kernel, dilation, low), padding, stride, grow))
    theta = {"full": lambda k: Full.of(numbers(k, 4, 3)), "single": lambda k: Full.of(numbers(k, 4, 1)),
             "grouped": lambda k: Grouped.of(numbers(k, 2, 2, 3)),
             "depthwise": lambda k: Depthwise.of(numbers(k, 4, 2))}[kind](basis.size)
    assert_defined(numbers(2, basis.num_inputs, 4), basis, theta, "torch.conv_transpose")


@pytest.mark.parametrize("mixes", [False, True])
@pytest.mark.parametrize(("shape", "kernel", "low", "padding", "stride", "grow"), [
    ((9,), 2, 0, "none", 2, None),
    ((6, 7), (3, 2), 0, "none", (2, 1), None),
    ((6, 7), (3, 3), 1, "zeros", 2, 0),
    ((4, 5, 6), (2, 3, 1), 0, "none", 2, None),
])
def test_pooling(shape, kernel, low, padding, stride, grow, mixes):
    shift = Shift(Grid(shape), cuboid_offsets(kernel, 1, low), padding, stride, grow)
    theta = Full.of(numbers(1, 4, 3)) if mixes else Eye.of(1, 4)
    for scale in (1.0, 1 / shift.size):
        assert_defined(numbers(2, shift.num_inputs, 4), Pooling(shift, scale), theta, "torch.avg_pool")


@pytest.mark.parametrize("basis", [
    Shift(Grid((5, 5)), ((0, 0), (1, 2), (2, -1)), "zeros"),
    Shift(Grid((2, 2, 2, 2)), cuboid_offsets((2, 2, 2, 2)), "zeros"),
    ShiftTransposed(Shift(Grid((5, 5)), cuboid_offsets((3, 3), 1, 1), "circular")),
    ShiftTransposed(Shift(Grid((6, 7)), cuboid_offsets((3, 2), 1, (2, 1)), "zeros", 1, (0, -1))),
    ShiftTransposed(Shift(Grid((5, 5)), ((0, 0), (1, 2), (2, -1)), "zeros")),
    Pooling(Shift(Grid((5, 5)), cuboid_offsets((3, 3), 1, 1), "circular"), 0.5),
    Pooling(Shift(Grid(9), cuboid_offsets(3, 1, 2), "zeros", 1, 2), 0.5),
    Pooling(Shift(Grid(9), cuboid_offsets(3, 2), "none"), 0.5),
])
def test_what_torch_does_not_convolve_transpose_or_pool_goes_another_way(basis):
    x, theta = numbers(basis.num_inputs, 4), numbers(basis.size, 4, 3)
    assert "torch." not in str(plan(x, basis, theta))
    torch.testing.assert_close(conv(x, basis, theta), by_definition(x, basis, theta), rtol=0, atol=1e-10)
