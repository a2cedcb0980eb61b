"""Shift sets that are no cuboid, by products of slices: every padding, one to four axes, against the definition."""

import pytest
import torch

from structconv import Depthwise, Full, Grid, LowRank, Shift, conv, plan
from structconv.bases.shift import cuboid_offsets
from structconv.testing import by_definition
from tests.kernels.applied import computed, convolution_of, match_of, numbers
from tests.support.derivatives import same

SLICES = "structconv.slices"


def by_slices(x, basis, theta):
    return computed(SLICES, convolution_of(x, basis, theta), "per_shift")


def taken(x, basis, theta):
    """Whether products of slices are for these."""
    return match_of(SLICES, convolution_of(x, basis, theta)) is not None


SETS = {
    "line": ((9,), ((0,), (2,), (-3,))),
    "far along a line": ((5,), ((0,), (4,), (-4,), (1,))),
    "one side of a line": ((7,), ((1,), (2,), (4,))),
    "plane": ((5, 6), ((0, 0), (1, -2), (-2, 1))),
    "cross": ((4, 5), ((0, 0), (1, 0), (-1, 0), (0, 1), (0, -1))),
    "twice the same": ((4, 5), ((0, 1), (2, 2), (0, 1))),
    "space": ((3, 4, 3), ((0, 0, 0), (1, -1, 2), (-2, 0, 1), (0, 3, -1))),
    "thin": ((1, 6), ((0, 0), (0, 2), (0, -1))),
    "four axes": ((2, 3, 2, 3), cuboid_offsets((2, 2, 1, 2))),
}
PADDINGS = ("zeros", "circular", "reflect", "replicate", "none")


@pytest.mark.parametrize(("name", "padding", "grow"), [
    (name, padding, (0, -1, 2)[(at + number) % 3]) for at, name in enumerate(SETS)
    for number, padding in enumerate(PADDINGS)])
def test_equals_the_definition(name, padding, grow):
    shape, offsets = SETS[name]
    basis = Shift(Grid(shape), offsets, padding, grow=None if padding == "none" else grow)
    if basis.num_outputs == 0:
        pytest.skip("no offset stays on so small a grid")
    x, theta = numbers(2, basis.num_inputs, 4).requires_grad_(), numbers(basis.size, 4, 3).requires_grad_()
    if not taken(x, basis, theta):
        assert basis.as_cuboid() is not None
        pytest.skip("a cuboid after all")
    same(by_slices(x, basis, theta), by_definition(x, basis, theta), [x, theta], 0, 1e-10)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("padding", ["zeros", "circular"])
def test_narrow_dtypes(dtype, padding):
    """Values and gradients within the rounding of a sum of K P, K Q or M terms."""
    basis = Shift(Grid((9, 8)), ((0, 0), (1, -2), (2, 1), (-4, 3)), padding)
    x, theta, seed = (t.to(dtype) for t in (numbers(2, 72, 16), numbers(4, 16, 8), numbers(2, 72, 8)))
    grads = []
    for convert, run in ((lambda t: t.clone(), lambda x, t: by_slices(x, basis, t)),
                         (torch.Tensor.double, lambda x, t: by_definition(x, basis, t))):
        leaves = [convert(t).requires_grad_() for t in (x, theta)]
        y = run(*leaves)
        grads.append([y, *torch.autograd.grad((y * convert(seed)).sum(), leaves)])
    for got, right in zip(*grads, strict=True):
        assert got.dtype == dtype
        bound = 16 * torch.finfo(dtype).eps * right.abs().max().item()
        torch.testing.assert_close(got.double(), right, rtol=0, atol=bound)


def test_the_planner_takes_slices_for_far_offsets_and_convolution_for_cuboids():
    x = torch.randn(2, 56 * 56, 64, requires_grad=True)
    theta = torch.randn(5, 64, 64, requires_grad=True)
    far = Shift(Grid((56, 56)), ((0, 0), (8, -8), (-8, 8), (3, 7), (-5, -2)))
    assert plan(x, far, theta).kernel == SLICES
    window = Shift(Grid((56, 56)), cuboid_offsets((1, 5), 1, (0, 2)))
    assert plan(x, window, theta).kernel == "torch.conv"
    assert "slices" not in str(plan(x, window, theta))


@pytest.mark.parametrize("theta", [LowRank.of(numbers(1, 4, 2), numbers(3, 2, 3)), Depthwise.of(numbers(3, 4, 2))])
def test_factored_theta(theta):
    basis, x = Shift(Grid((5, 6)), ((0, 0), (1, -2), (-2, 1))), numbers(2, 30, 4)
    torch.testing.assert_close(by_slices(x, basis, theta), by_definition(x, basis, theta), rtol=0, atol=1e-10)


def test_what_it_leaves_to_others():
    x, theta = numbers(30, 2), Full.of(numbers(3, 2, 2))
    offsets = ((0, 0), (1, -2), (-2, 1))
    assert taken(x, Shift(Grid((5, 6)), offsets), theta)
    assert not taken(x, Shift(Grid((5, 6)), offsets, stride=2), theta)
    assert not taken(numbers(0, 2), Shift(Grid((0, 6)), offsets), theta)


def test_a_nan_reaches_only_those_who_read_it():
    basis = Shift(Grid((6, 7)), ((0, 0), (1, -2), (-2, 1)))
    x, theta = numbers(42, 2), numbers(3, 2, 2)
    x[17] = torch.nan
    y = conv(x, basis, theta, path="per_shift")
    assert y.isnan().any(-1).equal((basis.dense()[:, 17] != 0).any(0))
