"""A CNN with and without a non-local block."""

import pytest
import torch

from structconv.errors import ConfigError
from structconv_systems.models.non_local import FUNCTIONS, NonLocalNetwork
from systems.tests.models.images import drawn

EACH = pytest.mark.parametrize("function", FUNCTIONS)
BLOCKS = pytest.mark.parametrize("function", FUNCTIONS[1:])


def make(function, seed=0):
    torch.manual_seed(seed)
    return NonLocalNetwork(3, function=function, channels=8, inner=4)


def stirred(function):
    """As after training: the block, which begins as zeros, has its share."""
    model = make(function)
    torch.manual_seed(2)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) / 4)
    return model


@BLOCKS
def test_a_new_block_changes_nothing(function):
    model, plain = make(function), make("none", seed=1)
    plain.load_state_dict({name: value for name, value in model.state_dict().items() if "block" not in name})
    assert torch.equal(model(drawn()[0]), plain(drawn()[0]))


@EACH
def test_who_sees_what_is_far_away(function):
    """The gradient of what leaves the block at one corner, at a pixel of the other corner of the image."""
    model, images = stirred(function).eval(), drawn()[0].requires_grad_()
    x = model.features(images.unsqueeze(1))
    y = x if model.block is None else model.block(x)
    y[..., 0, 0].square().sum().backward()
    assert (images.grad[:, -3:, -3:].abs().sum() > 0) == (function != "none")
    assert images.grad[:, :3, :3].abs().sum() > 0


def test_the_receptive_field_without_a_block_is_11_by_11():
    """By the gradient of a pixel behind the last convolution, with weights by which no ReLU is 0."""
    model, images = make("none").eval(), torch.rand(1, 40, 40, requires_grad=True)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.abs_()
    model.last(model.features(images.unsqueeze(1)))[0, :, 5, 5].sum().backward()
    rows, columns = images.grad[0].nonzero().unbind(-1)
    assert (len(rows), rows.unique().numel(), columns.unique().numel()) == (11 * 11, 11, 11)


@BLOCKS
def test_where_it_looks(function):
    """The weights of one pixel, by eq. 2 to 5 of Wang et al. (2018)."""
    model, image = stirred(function).eval(), drawn()[0][0]
    weights = model.looks(image, (2, 4))
    x = model.features(image[None, None])[0].flatten(1).mT
    assert weights.shape == (6, 6)
    if function == "gaussian":
        expected = torch.softmax(x @ x[2 * 6 + 4], 0)
        torch.testing.assert_close(weights.flatten(), expected, rtol=1e-4, atol=1e-6)
    if function == "embedded_gaussian":
        torch.testing.assert_close(weights.sum(), torch.tensor(1.0))
    if function == "concatenation":
        assert weights.min() >= 0


def test_no_block_looks_nowhere():
    with pytest.raises(ConfigError, match="the model must have a block"):
        make("none").looks(drawn()[0][0], (0, 0))
