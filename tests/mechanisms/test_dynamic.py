"""Shifts weighed by each position, and taps that move, against loops and torch's sampling of images."""

import pytest
import torch
from torch.nn import functional as F

from structconv import Conv, Cuboid, Grid, ShapeError
from structconv.bases import Taps
from structconv.mechanisms import Deformable, DynamicShifts
from structconv.weights import EyeBlocks, HeadBlocks
from tests.support.derivatives import same

F64, P, Q = torch.float64, 4, 6
CLOSE = {"rtol": 1e-9, "atol": 1e-9}


def numbers(*shape):
    return torch.randn(*shape, dtype=F64, requires_grad=True)


def moved(kernel_size, **options):
    torch.manual_seed(0)
    layer = Conv(Deformable(kernel_size, **options), P, Q).to(F64)
    torch.nn.init.normal_(layer.mechanism.offsets.weight, std=0.7)
    torch.nn.init.normal_(layer.mechanism.offsets.bias, std=0.7)
    return layer


@pytest.mark.parametrize("periodic", [False, True])
def test_shifts_are_weighed_by_each_position(periodic):
    offsets, grid = [(0, 1), (-2, 0), (1, 1)], Grid((4, 3), periodic)
    layer, x = Conv(DynamicShifts(offsets, heads=2), P, P, weight=EyeBlocks()).to(F64), numbers(2, 12, P)
    taps = (x @ layer.mechanism.taps.weight.mT).unflatten(-1, (2, 3)).softmax(-1)
    image, rows = x.unflatten(1, (4, 3)), []
    for i in range(4):
        for j in range(3):
            y = torch.zeros(2, P, dtype=F64)
            for t, (down, right) in enumerate(offsets):
                a, b = i - down, j - right
                if periodic or (0 <= a < 4 and 0 <= b < 3):
                    y = y + taps[:, i * 3 + j, :, t].repeat_interleave(2, -1) * image[:, a % 4, b % 3]
            rows.append(y)
    same(layer(x, structure=grid), torch.stack(rows, 1) + layer.bias, [x, *layer.parameters()], **CLOSE)


def test_taps_are_predicted_from_z_where_it_is_given():
    layer = Conv(DynamicShifts([0, 1], heads=2), P, Q, weight=HeadBlocks(), other_channels=3).to(F64)
    x, z = numbers(5, P), numbers(5, 3)
    taps = (z @ layer.mechanism.taps.weight.mT).unflatten(-1, (2, 2)).softmax(-1)
    before = torch.cat([torch.zeros(1, P, dtype=F64), x[:-1]])
    heads = [(taps[:, h, :1] * x + taps[:, h, 1:] * before) @ layer.weight.theta[h] for h in range(2)]
    same(layer(x, z=z), torch.cat(heads, -1) + layer.bias, [x, z, *layer.parameters()], **CLOSE)
    with pytest.raises(ShapeError, match="DynamicShifts: z must have a row for each of N=5 outputs"):
        layer(x, z=numbers(4, 3))


@pytest.mark.parametrize(("stride", "dilation", "padding"), [(1, 1, "same"), (1, 2, "same"), (2, 1, 1), (1, 1, 0)])
def test_a_window_of_moving_taps_is_sampled_as_torchvision_does(stride, dilation, padding):
    size, low = (6, 7), 0 if padding == 0 else dilation if padding == "same" else padding
    layer = moved((3, 3), stride=stride, dilation=dilation, padding=padding)
    x = numbers(2, 42, P)
    after = [(s + 2 * low - 2 * dilation - 1) // stride + 1 for s in size]
    z = x if after == list(size) else numbers(2, after[0] * after[1], P)
    offsets = (z @ layer.mechanism.offsets.weight.mT + layer.mechanism.offsets.bias).unflatten(-1, (9, 2))
    down, right = (t.flatten() for t in torch.meshgrid(*map(torch.arange, after), indexing="ij"))
    expected = layer.bias
    for k in range(9):
        rows = down * stride - low + (k // 3) * dilation + offsets[:, :, k, 0]
        columns = right * stride - low + (k % 3) * dilation + offsets[:, :, k, 1]
        places = torch.stack([2 * columns / (size[1] - 1) - 1, 2 * rows / (size[0] - 1) - 1], -1)
        sampled = F.grid_sample(x.mT.unflatten(-1, size), places.unsqueeze(1), align_corners=True)
        expected = expected + sampled.squeeze(2).mT @ layer.weight.theta[k]
    given = None if z is x else z
    leaves = [x, *layer.parameters()] if z is x else [x, z, *layer.parameters()]
    same(layer(x, z=given, structure=Grid(size)), expected, leaves, **CLOSE)


@pytest.mark.parametrize("periodic", [False, True])
def test_a_sequence_is_interpolated_between_neighbors(periodic):
    layer, x = moved(3), numbers(7, P)
    offsets = x @ layer.mechanism.offsets.weight.mT + layer.mechanism.offsets.bias
    rows = []
    for n in range(7):
        y = layer.bias
        for k in range(3):
            at = n + k - 1 + offsets[n, k]
            low = int(at.floor())
            for m, share in ((low, 1 - (at - low)), (low + 1, at - low)):
                if periodic or 0 <= m < 7:
                    y = y + share * x[m % 7] @ layer.weight.theta[k]
        rows.append(y)
    same(layer(x, structure=Grid(7, periodic)), torch.stack(rows), [x, *layer.parameters()], **CLOSE)


def test_a_new_layer_is_the_convolution_over_its_window():
    layer, plain = (Conv(kind((3, 2)), P, Q).to(F64) for kind in (Deformable, Cuboid))
    plain.load_state_dict({name: layer.state_dict()[name] for name in ("weight.theta", "bias")})
    x = numbers(2, 20, P)
    torch.testing.assert_close(layer(x, structure=Grid((4, 5))), plain(x, structure=Grid((4, 5))))
    layer(x, structure=Grid((4, 5))).square().sum().backward()
    assert layer.mechanism.offsets.weight.grad.abs().max() > 0


def test_taps_far_off_the_grid_read_nothing():
    layer, x = moved(3), torch.randn(7, P, dtype=F64)
    with torch.no_grad():
        layer.mechanism.offsets.bias.fill_(1e30)
    torch.testing.assert_close(layer(x), layer.bias.expand(7, Q))


def test_nan_off_the_taps_stays_away():
    a = Taps(torch.tensor([[[-1], [0], [2]]]), torch.ones(1, 3, 1), 4)
    x = torch.tensor([[float("nan")], [1.0], [2.0], [float("nan")]])
    torch.testing.assert_close(a.analysis(x)[0, :, 0], torch.tensor([0.0, torch.nan, 2.0]), equal_nan=True)


def test_positions_are_precise_under_autocast():
    layer = Conv(Deformable(1), P, Q)
    x = torch.randn(1000, P)
    with torch.no_grad():
        layer.mechanism.offsets.bias.fill_(0.25)
    with torch.autocast("cpu", torch.bfloat16):
        index = layer.basis(x).index
    assert torch.equal(index[0, :-1, 0], torch.arange(999))
