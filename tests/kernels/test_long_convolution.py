"""Long windows by transforms, against torch's convolution: values, gradients, NaN, and where the planner takes them."""

import copy

import pytest
import torch

from structconv import Conv, Cuboid, Depthwise, Full, Grid, Shifts

F64, P = torch.float64, 4
CASES = {
    "causal": (Shifts(list(range(100))), Grid(100)),
    "two-sided": (Shifts(list(range(-40, 41))), Grid(90)),
    "ahead": (Shifts(list(range(-3, -80, -1))), Grid(77)),
    "beyond": (Shifts(list(range(-5, 100))), Grid(30)),
    "circular": (Shifts(list(range(70))), Grid(97, periodic=True)),
    "around and around": (Shifts(list(range(-10, 60))), Grid(64, periodic=True)),
    "dilated": (Cuboid(65, dilation=2), Grid(200)),
    "image": (Cuboid((9, 11)), Grid((20, 15))),
    "torus": (Cuboid((9, 9)), Grid((11, 13), periodic=True)),
}


def layers(mechanism, weight, dtype):
    torch.manual_seed(0)
    layer = Conv(mechanism, P, 2 * P, weight=weight, path="by_transforms").to(dtype)
    direct = copy.deepcopy(layer)
    direct.path = "structure_first"
    return layer, direct


@pytest.mark.parametrize(("weight", "dtype", "tolerance"), [(Full(), torch.float32, 1e-5), (Depthwise(2), F64, 1e-11)])
@pytest.mark.parametrize("case", CASES)
def test_transforms_compute_the_convolution(case, dtype, tolerance, weight):
    mechanism, grid = CASES[case]
    layer, direct = layers(mechanism, weight, dtype)
    x = torch.randn(2, 3, grid.num_entries, P, dtype=dtype, requires_grad=True)
    assert layer.plan(x, structure=grid).kernel == "transforms"
    ours, theirs = (each(x, structure=grid) for each in (layer, direct))
    torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance * float(theirs.detach().abs().max()))
    weights = torch.randn_like(ours)
    for actual, expected in zip(torch.autograd.grad((ours * weights).sum(), [x, *layer.parameters()]),
                             torch.autograd.grad((theirs * weights).sum(), [x, *direct.parameters()]), strict=True):
        torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance * float(expected.abs().max()))


@pytest.mark.parametrize("case", ["causal", "image"])
@pytest.mark.parametrize("weight", [Full(), Depthwise(2)], ids=repr)
def test_what_is_not_finite_stays_where_the_window_sees_it(case, weight):
    mechanism, grid = CASES[case]
    layer, direct = layers(mechanism, weight, F64)
    x = torch.randn(grid.num_entries, P, dtype=F64)
    x[-1] = torch.nan
    ours, theirs = (each(x, structure=grid) for each in (layer, direct))
    seen = theirs.isnan()
    assert seen.any()
    assert not seen.all()
    torch.testing.assert_close(ours[~seen], theirs[~seen])
    assert torch.equal(ours.isnan(), seen)


def test_the_planner_takes_them_where_they_are_cheaper():
    def kernel(offsets, entries, channels=64):
        layer = Conv(Shifts(list(range(offsets))), channels, channels, weight=Depthwise())
        return layer.plan(torch.randn(2, entries, channels)).kernel

    assert kernel(4096, 4096) == "transforms"
    assert kernel(64, 256) == "torch.conv"
    assert kernel(7, 4096) == "torch.conv"


@pytest.mark.parametrize("layer", [
    Conv(Shifts(list(range(63))), P, P), Conv(Cuboid(65, stride=2), P, P), Conv(Cuboid(65, padding=3), P, P),
    Conv(Shifts(list(range(64)), "reflect"), P, P), Conv(Cuboid((4, 4, 4)), P, P)])
def test_other_windows_are_left_to_others(layer):
    grid = Grid((5, 5, 5)) if layer.mechanism.ndim == 3 else Grid(100)
    assert "transforms" not in str(layer.plan(torch.randn(2, grid.num_entries, P), structure=grid))


def test_second_derivatives_and_maps_pass_through():
    mechanism, grid = CASES["two-sided"]
    layer, direct = layers(mechanism, Depthwise(2), F64)
    x = torch.randn(3, grid.num_entries, P, dtype=F64)

    def energy(each):
        return lambda one: each(one, structure=grid).square().sum().square()

    for transform in (torch.func.grad, lambda fn: torch.func.vmap(torch.func.grad(fn)),
                      lambda fn: torch.func.grad(lambda v: torch.func.grad(fn)(v).sum())):
        ours, theirs = (transform(energy(each))(x) for each in (layer, direct))
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-9 * float(theirs.detach().abs().max()))
