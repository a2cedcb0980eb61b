"""Image layers: torch's convolutions and pooling, values and gradients."""

from functools import partial

import pytest
import torch
from torch import nn
from torch.nn.utils import prune

from structconv import ConfigError, Conv, Conv1d, Conv2d, Conv3d, Grid, ShapeError, StructureError, batch
from structconv import nn as layers
from structconv.mechanisms import Cuboid, Pool, Shifts
from structconv.nn import AvgPool1d, AvgPool2d, AvgPool3d, SeparableConv2d, to_entries, to_image
from tests.support.errors import check_refused

F64 = torch.float64
PAIRS = {1: (Conv1d, nn.Conv1d), 2: (Conv2d, nn.Conv2d), 3: (Conv3d, nn.Conv3d)}


def assert_same(ours: nn.Module, theirs: nn.Module, shape: tuple[int, ...], *pairs: tuple) -> None:
    """Values and gradients of the input, and of pairs of parameters, ours laid out as theirs."""
    x = torch.randn(shape, dtype=F64, requires_grad=True)
    y, y_ = ours(x), theirs(x)
    torch.testing.assert_close(y, y_, rtol=0, atol=1e-10)
    g = torch.randn_like(y)
    grads = torch.autograd.grad(y, [x, *(pair[0] for pair in pairs)], g)
    grads_ = torch.autograd.grad(y_, [x, *(pair[1] for pair in pairs)], g)
    turned = [grad if len(pair) == 2 else pair[2](grad) for grad, pair in zip(grads_[1:], pairs, strict=True)]
    torch.testing.assert_close([*grads], [grads_[0], *turned], rtol=0, atol=1e-10)


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel")
@pytest.mark.parametrize(("axes", "options"), [
    (1, {"kernel_size": 3}),
    (1, {"kernel_size": 4, "stride": 3, "padding": 2, "dilation": 2}),
    (1, {"kernel_size": 4, "padding": "same"}),
    (2, {"kernel_size": 3, "padding": 1}),
    (2, {"kernel_size": (3, 2), "stride": (2, 1), "padding": (2, 1), "dilation": (1, 3)}),
    (2, {"kernel_size": 3, "padding": "same", "dilation": 2, "bias": False}),
    (2, {"kernel_size": 3, "padding": "valid", "stride": 2}),
    (2, {"kernel_size": 3, "padding": 1, "groups": 2}),
    (2, {"kernel_size": 3, "padding": 1, "groups": 4, "stride": 2}),
    (2, {"kernel_size": 3, "padding": 1, "padding_mode": "circular"}),
    (2, {"kernel_size": 3, "padding": 2, "padding_mode": "reflect", "stride": 2}),
    (2, {"kernel_size": (5, 3), "padding": (2, 1), "padding_mode": "replicate"}),
    (2, {"kernel_size": 1}),
    (3, {"kernel_size": (1, 2, 3), "stride": (1, 2, 1), "padding": (0, 1, 2)}),
])
def test_convolutions_equal_torchs(axes, options):
    ours_type, theirs_type = PAIRS[axes]
    theirs = theirs_type(4, 8, **options).to(F64)
    ours = ours_type.from_torch(theirs)
    torch.testing.assert_close(ours.weight, theirs.weight, rtol=0, atol=0)
    bias = [] if ours.bias is None else [(ours.bias, theirs.bias)]
    assert_same(ours, theirs, (2, 4, *(7, 6, 5)[:axes]), (ours.weight, theirs.weight), *bias)


@pytest.mark.parametrize("options", [{"padding": 1}, {"stride": 2, "dilation": 2}, {"padding": "same"}])
def test_depthwise_separable_is_torchs_pair(options):
    depthwise = nn.Conv2d(4, 4, 3, groups=4, bias=False, **options).to(F64)
    pointwise = nn.Conv2d(4, 6, 1).to(F64)
    ours = SeparableConv2d.from_torch(depthwise, pointwise)
    weight = ours.conv.weight
    assert_same(ours, nn.Sequential(depthwise, pointwise), (2, 4, 9, 8), (ours.conv.bias, pointwise.bias),
                *[(own, part.weight, lambda g: g.flatten(1).mT) for own, part in (
                    (weight.depthwise, depthwise), (weight.pointwise, pointwise))])
    assert sum(p.numel() for p in weight.parameters()) == 4 * (9 + 6)


@pytest.mark.parametrize(("ours", "theirs", "shape"), [
    (AvgPool1d(3), nn.AvgPool1d(3), (2, 3, 10)),
    (AvgPool2d(2), nn.AvgPool2d(2), (2, 3, 6, 7)),
    (AvgPool2d((3, 2), 1), nn.AvgPool2d((3, 2), 1), (2, 3, 6, 7)),
    (AvgPool2d(3, 2, 1), nn.AvgPool2d(3, 2, 1), (2, 3, 6, 7)),
    (AvgPool1d(4, padding=2), nn.AvgPool1d(4, padding=2), (3, 9)),
    (AvgPool2d((3, 2), 1, (1, 0)), nn.AvgPool2d((3, 2), 1, (1, 0)), (2, 3, 6, 7)),
    (AvgPool3d(2, (1, 2, 1)), nn.AvgPool3d(2, (1, 2, 1)), (1, 2, 4, 5, 3)),
])
def test_average_pooling_equals_torchs(ours, theirs, shape):
    assert_same(ours, theirs, shape)


def test_entries_and_images_are_inverse():
    image = torch.randn(2, 3, 4, 5)
    entries, grid = to_entries(image, 2)
    assert entries.shape == (2, 20, 3) and grid == Grid((4, 5))
    assert entries[1, 7, 2] == image[1, 2, 1, 2]
    assert torch.equal(to_image(entries, grid), image)


@pytest.mark.parametrize("options", [{}, {"groups": 2}])
def test_the_kernel_is_read_as_it_lies(options):
    """No call rearranges it: what the plan is handed is a view of the parameter, whose gradient lies alike."""
    layer = Conv2d(4, 6, 3, **options)
    theta = layer._theta(layer.weight).theta
    assert theta.shape == ((9, 2, 2, 3) if options else (9, 4, 6))
    assert layer.weight.data_ptr() == theta.data_ptr()
    layer(torch.randn(1, 4, 6, 6)).sum().backward()
    assert layer.weight.grad.stride() == layer.weight.stride()


@pytest.mark.parametrize(("error", "call"), [
    (ShapeError, lambda: Conv2d(3, 4, 3)(torch.randn(2, 5, 8, 8))),
    (ShapeError, lambda: Conv2d(3, 4, 3)(torch.randn(8, 8))),
    (ConfigError, lambda: Conv2d(3, 4, 3, padding="full")),
    (ConfigError, lambda: Conv2d(3, 4, (3, 3, 3))),
    (ConfigError, lambda: Conv2d(3, 4, 3, groups=2)),
    (ConfigError, lambda: Conv2d(3, 4, 3, padding_mode="mirror")),
    (ConfigError, lambda: Conv2d(3, 4, 0)),
    (ConfigError, lambda: Conv2d(0, 4, 3)),
    (ConfigError, lambda: Conv2d.from_torch(nn.Conv1d(2, 2, 3))),
    (ConfigError, lambda: SeparableConv2d.from_torch(nn.Conv2d(2, 2, 3), nn.Conv2d(2, 2, 1))),
    (ConfigError, lambda: SeparableConv2d(2, 2, (3, 3, 3))),
    (ConfigError, lambda: AvgPool2d(0)),
    (ConfigError, lambda: AvgPool1d(3, padding=2)),
    (ConfigError, lambda: layers.ConvTranspose2d(2, 2, 0)),
    (ConfigError, lambda: layers.ConvTranspose1d(2, 2, 3, output_padding=1)),
    (ConfigError, lambda: layers.ConvTranspose1d.from_torch(nn.ConvTranspose2d(2, 2, 3))),
    (ShapeError, lambda: layers.ConvTranspose1d(2, 2, 3)(torch.ones(1, 3, 5))),
    ((ConfigError, ShapeError), lambda: layers.ConvTranspose1d(2, 2, 1, padding=2)(torch.ones(2, 3))),
])
def test_errors(error, call):
    check_refused((error, r"got .*\.", call))


@pytest.mark.parametrize("groups", [1, 2])
def test_from_torch_keeps_what_is_frozen_and_the_mode(groups):
    theirs = nn.Conv2d(4, 6, 3, groups=groups).eval()
    theirs.weight.requires_grad_(False)
    ours = Conv2d.from_torch(theirs)
    assert (ours.training, ours.weight.requires_grad, ours.bias.requires_grad) == (False, False, True)
    theirs.requires_grad_(False)
    assert not any(p.requires_grad for p in Conv2d.from_torch(theirs).parameters())
    depthwise = nn.Conv2d(4, 4, 3, groups=4, bias=False).requires_grad_(False)
    ours = SeparableConv2d.from_torch(depthwise, nn.Conv2d(4, 6, 1).eval())
    weight = ours.conv.weight
    assert (ours.training, weight.depthwise.requires_grad, weight.pointwise.requires_grad) == (False, False, True)
    with pytest.raises(ConfigError, match=r"torch\.nn\.Conv2d; got structconv's Conv2d"):
        Conv2d.from_torch(Conv2d(4, 6, 3))


@pytest.mark.parametrize(("layer", "sizes"), [
    (Conv2d(4, 2, 5), (2, 7)), (Conv2d(4, 2, 5, padding=1), (9, 2)), (nn.Conv2d(4, 2, 5), (2, 7)),
    (Conv2d(4, 2, 3, dilation=3), (6, 6)), (AvgPool2d(3), (2, 6)),
])
def test_a_window_larger_than_the_image_is_refused(layer, sizes):
    with pytest.raises((StructureError, RuntimeError), match=r"larger than|can't be greater than|Kernel size"):
        layer(torch.randn(1, 4, *sizes))


def test_a_window_larger_than_the_grid_is_refused_in_any_layer():
    for mechanism in (Cuboid(5, padding="none"), Shifts([0, 4], padding="none"), Pool(4)):
        for entries, structure in ((3, Grid(3)), (10, batch([Grid(7), Grid(3)]))):
            with pytest.raises(StructureError, match=r"larger than the grid.*Grid\(\(3"):
                Conv(mechanism, 2, 2)(torch.randn(entries, 2), structure=structure)
    assert Conv(Cuboid(5), 2, 2)(torch.randn(3, 2), structure=Grid(3)).shape == (3, 2)


@pytest.mark.parametrize("groups", [1, 2])
def test_weight_and_bias_can_be_assigned(groups):
    layer, theirs = Conv2d(4, 6, 3, groups=groups), nn.Conv2d(4, 6, 3, groups=groups)
    x = torch.randn(2, 4, 7, 6)
    layer(x)
    layer.weight, layer.bias = nn.Parameter(theirs.weight.detach()), theirs.bias
    torch.testing.assert_close(layer(x), theirs(x))
    assert layer.bias is theirs.bias
    layer(x).sum().backward()
    assert layer.weight.grad is not None
    layer.bias = None
    assert list(layer.state_dict()) == ["weight"]
    layer.weight = nn.Parameter(torch.zeros_like(theirs.weight), requires_grad=False)
    assert not layer(x).any()


@pytest.mark.parametrize("name", ["in_channels", "out_channels", "kernel_size", "stride", "padding_mode", "dilation",
                                  "groups"])
def test_arguments_have_torchs_names(name):
    theirs = nn.Conv2d(4, 6, (3, 2), stride=2, dilation=(1, 2), groups=2, padding=1)
    layer = Conv2d.from_torch(theirs)
    assert getattr(layer, name) == getattr(theirs, name)
    with pytest.raises(ConfigError, match=f"{name} is fixed"):
        setattr(layer, name, getattr(layer, name))


UTILITIES = {"weight_norm": nn.utils.parametrizations.weight_norm,
             "spectral_norm": nn.utils.parametrizations.spectral_norm,
             "old weight_norm": nn.utils.weight_norm, "old spectral_norm": nn.utils.spectral_norm,
             "l1_unstructured": partial(prune.l1_unstructured, name="weight", amount=0.5),
             "ln_structured": partial(prune.ln_structured, name="weight", amount=0.5, n=2, dim=0)}


@pytest.mark.filterwarnings("ignore:.*weight_norm.* is deprecated:FutureWarning")
@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("name", UTILITIES)
def test_what_torch_does_to_a_weight(name, groups):
    theirs = nn.Conv2d(4, 6, 3, groups=groups)
    ours, x = Conv2d.from_torch(theirs), torch.randn(2, 4, 7, 6)
    before = ours(x)
    for layer in (ours, theirs):
        torch.manual_seed(0)
        UTILITIES[name](layer)
    for _ in range(2):
        torch.testing.assert_close(ours(x), theirs(x))
    assert "weight_norm" in name or not torch.equal(ours(x), before)
    assert ours.state_dict().keys() == theirs.state_dict().keys()


@pytest.mark.parametrize(("axes", "options", "size"), [
    (1, {"kernel_size": 3}, (5,)), (1, {"kernel_size": 4, "stride": 3, "padding": 2, "output_padding": 2}, (5,)),
    (2, {"kernel_size": 3, "stride": 2, "padding": 1, "output_padding": 1}, (4, 3)),
    (2, {"kernel_size": (2, 3), "stride": (1, 3), "dilation": (2, 1), "groups": 2}, (3, 4)),
    (2, {"kernel_size": 1, "stride": 2, "bias": False}, (3, 4)),
    (1, {"kernel_size": 2, "stride": 1, "dilation": 2, "output_padding": 1}, (4,)),
    (2, {"kernel_size": (3, 2), "stride": (2, 1), "dilation": (4, 3), "output_padding": (3, 2), "groups": 2}, (4, 3)),
    (3, {"kernel_size": 2, "stride": (1, 2, 2), "padding": (1, 0, 0), "groups": 2}, (3, 2, 2))])
def test_transposed_convolutions_equal_torchs(axes, options, size):
    theirs = getattr(nn, f"ConvTranspose{axes}d")(4, 6, **options).double()
    ours = getattr(layers, f"ConvTranspose{axes}d").from_torch(theirs)
    for shape in ((2, 4, *size), (4, *size)):
        assert_same(ours, theirs, shape)
    x = torch.randn(2, 4, *size, dtype=F64)
    assert ours.plan(x) is ours.plan(x)
    assert len(ours.state_dict()) == len(theirs.state_dict())
