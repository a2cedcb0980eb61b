"""Recurrent cells against torch's, and against cells written out by hand."""

from functools import partial

import pytest
import torch
from torch import nn

from structconv import ConfigError, ConvGRUCell, ConvLSTMCell, Cuboid, DotProduct, Grid, Identity, Pool, ShapeError
from structconv.nn import to_entries, to_image
from tests.support.derivatives import same
from tests.support.errors import check_refused

F64 = torch.float64
close = partial(torch.testing.assert_close, rtol=0, atol=1e-10)
P, H = 3, 4


def test_lstm_of_the_identity_is_torchs():
    theirs = nn.LSTMCell(P, H, dtype=F64)
    ours = ConvLSTMCell(Identity(), P, H).to(F64)
    with torch.no_grad():
        ours.gates.weight.theta[0].copy_(torch.cat([theirs.weight_ih, theirs.weight_hh], 1).mT)
        ours.gates.bias.copy_(theirs.bias_ih + theirs.bias_hh)
    x, h, c = (torch.randn(5, size, dtype=F64, requires_grad=True) for size in (P, H, H))
    close(ours(x), theirs(x))
    for y, y_ in zip(ours(x, (h, c)), theirs(x, (h, c)), strict=True):
        same(y, y_, [x, h, c], 0, 1e-10)


def test_gru_of_the_identity_is_torchs():
    theirs = nn.GRUCell(P, H, dtype=F64)
    ours = ConvGRUCell(Identity(), P, H, reset="after").to(F64)
    with torch.no_grad():
        for ours_part, weight, bias in ((ours.of_input, theirs.weight_ih, theirs.bias_ih),
                                        (ours.of_hidden, theirs.weight_hh, theirs.bias_hh)):
            ours_part.weight.theta[0].copy_(weight.mT)
            ours_part.bias.copy_(bias)
    x, h = (torch.randn(5, size, dtype=F64, requires_grad=True) for size in (P, H))
    close(ours(x), theirs(x))
    same(ours(x, h), theirs(x, h), [x, h], 0, 1e-10)


def test_conv_lstm_on_images():
    cell = ConvLSTMCell(Cuboid((3, 3)), P, H, peephole=True).to(F64)
    nn.init.normal_(cell.peephole)
    conv = nn.Conv2d(P + H, 4 * H, 3, padding=1).to(F64)
    with torch.no_grad():
        conv.weight.copy_(cell.gates.weight.theta.permute(2, 1, 0).unflatten(-1, (3, 3)))
        conv.bias.copy_(cell.gates.bias)
    h_image = c_image = torch.zeros(2, H, 5, 6, dtype=F64)
    state = None
    w_i, w_f, w_o = cell.peephole.view(3, H, 1, 1)
    for image in torch.randn(3, 2, P, 5, 6, dtype=F64):
        i, f, g, o = conv(torch.cat([image, h_image], 1)).chunk(4, 1)
        c_next = (f + w_f * c_image).sigmoid() * c_image + (i + w_i * c_image).sigmoid() * g.tanh()
        h_image, c_image = (o + w_o * c_next).sigmoid() * c_next.tanh(), c_next
        x, grid = to_entries(image, 2)
        state = cell(x, state, grid)
        close(to_image(state[0], grid), h_image)
        close(to_image(state[1], grid), c_image)


@pytest.mark.parametrize(("error", "call"), [
    (ConfigError, lambda: ConvGRUCell(Identity(), 0, H)),
    (ConfigError, lambda: ConvGRUCell(Identity(), P, H, reset="never")),
    (ConfigError, lambda: ConvLSTMCell(Identity(), P, 0)),
    (ShapeError, lambda: ConvGRUCell(Identity(), P, H)(torch.randn(5, P), torch.randn(5, P))),
    (ShapeError, lambda: ConvLSTMCell(Identity(), P, H)(torch.randn(5, P), (torch.randn(5, H), torch.randn(4, H)))),
    (ShapeError, lambda: ConvLSTMCell(Identity(), P, H)(torch.randn(5, P + 1))),
    (ConfigError, lambda: ConvLSTMCell(Identity(), P, H, peephole="diagonal")),
    (ConfigError, lambda: ConvLSTMCell(Identity(), P, H, peephole=0)),
    (ShapeError, lambda: ConvLSTMCell(Identity(), P, H, peephole=4)(torch.randn(5, P))),
])
def test_errors(error, call):
    check_refused((error, r"got .*\.", call))


@pytest.mark.parametrize("reset", ["before", "after"])
def test_plans_draw_no_random_number(reset):
    cell = ConvGRUCell(DotProduct(dim=2).softmax().dropout(0.5), P, H, reset=reset)
    x, h = torch.randn(5, P), torch.randn(5, H)
    state = torch.get_rng_state()
    assert all(plan is cell.plans(x, h)[name] for name, plan in cell.plans(x, h).items())
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("cell", [lambda m: ConvLSTMCell(m, P, H), lambda m: ConvGRUCell(m, P, H),
                                  lambda m: ConvGRUCell(m, P, H, reset="after")])
@pytest.mark.parametrize("mechanism", [Cuboid((3, 3), stride=2), Pool(2), Cuboid((3, 3), padding="valid")])
def test_a_mechanism_that_leads_to_another_grid_is_refused_by_name(cell, mechanism):
    made = cell(mechanism)
    with pytest.raises(ShapeError, match=f"{type(made).__name__}: its mechanism must lead .* without stride"):
        made(torch.randn(2, 24, P), structure=Grid((4, 6)))


def test_peepholes_of_positions():
    cell, channels = (ConvLSTMCell(Identity(), P, H, peephole=kind).to(F64) for kind in (5, True))
    with torch.no_grad():
        channels.peephole.normal_()
        cell.peephole.copy_(channels.peephole.unsqueeze(1).expand(3, 5, H))
    cell.gates.load_state_dict(channels.gates.state_dict())
    x, state = torch.randn(2, 5, P, dtype=F64), tuple(torch.randn(2, 2, 5, H, dtype=F64))
    close(cell(x, state), channels(x, state))
    with torch.no_grad():
        cell.peephole[:, 3] = 0
    h, other = cell(x, state)[0], channels(x, state)[0]
    same = (h == other).flatten(2).all(-1).all(0)
    assert same.tolist() == [True, True, True, False, True]
