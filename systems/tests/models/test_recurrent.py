"""Recurrent encoders: their LSTM is torch's without biases, and holds no zeros of the weights' shapes."""

import copy
import re

import pytest
import torch
from torch import nn

from structconv_systems.models.recurrent import Recurrent


@pytest.mark.parametrize("bidirectional", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_the_lstm_is_torchs_without_biases(bidirectional, dtype):
    layer = Recurrent(nn.LSTM, 6, 5, bidirectional=bidirectional).to(dtype).layers[0]
    peer = nn.LSTM(7, 5, bias=False, batch_first=True, bidirectional=bidirectional, dtype=dtype)
    peer.load_state_dict(copy.deepcopy(layer).state_dict())
    x = torch.randn(3, 4, 7, dtype=dtype)
    for _ in range(2):
        actual = []
        for module in (layer, peer):
            y, (h, c) = module(x)
            actual.append((y, h, c, *torch.autograd.grad(y.square().sum() + c.sum(), module.parameters())))
        for own, expected in zip(*actual, strict=True):
            torch.testing.assert_close(own, expected)


@pytest.mark.parametrize("x", [torch.ones(3, 4, 8), torch.ones(3, 4, 6), torch.ones(3, 4, 7, dtype=torch.float64)])
def test_what_torch_refuses_is_refused_alike(x):
    layer, peer = Recurrent(nn.LSTM, 6, 5).layers[0], nn.LSTM(7, 5, bias=False, batch_first=True)
    with pytest.raises((RuntimeError, ValueError)) as by_torch:
        peer(x)
    with pytest.raises(by_torch.type, match=re.escape(str(by_torch.value))):
        layer(x)


def test_sequences_alone_and_first_states_are_torchs():
    layer, peer = Recurrent(nn.LSTM, 6, 5).layers[0], nn.LSTM(7, 5, bias=False, batch_first=True)
    peer.load_state_dict(layer.state_dict())
    x, state = torch.randn(3, 4, 7), (torch.randn(1, 3, 5), torch.randn(1, 3, 5))
    torch.testing.assert_close(layer(x, state)[0], peer(x, state)[0])
    torch.testing.assert_close(layer(x[0])[0], peer(x[0])[0])


def test_no_zeros_of_the_shapes_of_the_weights():
    layer = Recurrent(nn.LSTM, 300, 200).layers[0]
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], record_shapes=True) as profile:
        layer(torch.randn(2, 3, 301))
    kept = [event.input_shapes for event in profile.events() if event.name == "aten::zero_"]
    assert all(len(shapes[0]) != 2 for shapes in kept)
