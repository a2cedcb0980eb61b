"""Convolution, recurrence and attention in one model: each learns, sees what it should, and costs what is predicted."""

import pytest
import torch

from structconv.analysis.flops import forward_flops
from structconv_systems.data.generated import MARKS, NOISE, temporal_order
from structconv_systems.models.architectures import ARCHITECTURES, SequenceClassifier, layer_of, predicted

EACH = pytest.mark.parametrize("architecture", ARCHITECTURES)


def make(architecture, seed=0, **options):
    torch.manual_seed(seed)
    return SequenceClassifier(architecture, NOISE + MARKS, 4, channels=16, **{"kernel": 3, **options})


def tokens(samples=12, length=14):
    data = temporal_order(samples, length, first=length - 5, end=length, seed=1)
    return data.inputs, data.labels


def seen(fn, x):
    """Which entries of x (1, N, C) the last output depends on."""
    x = x.clone().requires_grad_()
    fn(x)[0, -1].sum().backward()
    return (x.grad[0].abs().sum(-1) > 0).nonzero().flatten().tolist()


def test_convolutions_see_no_further_than_they_reach():
    model, (given, _) = make("convolution", layers=3), tokens()
    other, near = given.clone(), given.clone()
    other[:, :-7] = (other[:, :-7] + 1) % 6
    near[:, -7] = (near[:, -7] + 1) % 6
    torch.testing.assert_close(model(other), model(given))
    assert not torch.allclose(model(near), model(given))


@pytest.mark.parametrize(("architecture", "layers"), [("dilated", 3), ("recurrence", 2), ("attention", 2)])
def test_the_others_see_everything(architecture, layers):
    model, (given, _) = make(architecture, layers=layers), tokens()
    other = given.clone()
    other[:, 0] = (other[:, 0] + 1) % 6
    assert not torch.allclose(model(other), model(given), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("architecture", ["convolution", "dilated"])
@pytest.mark.parametrize("kernel", [2, 3, 5])
def test_paths_of_convolutions_are_as_long_as_predicted(architecture, kernel):
    """So many layers connect the first entry with the last, and not one less."""
    x = torch.randn(1, 12, 4, dtype=torch.float64)
    path = predicted(architecture, 12, 4, kernel=kernel).path

    def stacked(layers):
        return torch.nn.Sequential(*(layer_of(architecture, 4, kernel=kernel, depth=depth).double()
                                     for depth in range(layers)))

    assert 0 in seen(stacked(path), x)
    assert 0 not in seen(stacked(path - 1), x)


@pytest.mark.parametrize("architecture", ["recurrence", "attention"])
def test_one_layer_of_the_others_connects_all(architecture):
    assert seen(layer_of(architecture, 4), torch.randn(1, 12, 4)) == list(range(12))


@EACH
@pytest.mark.parametrize("entries", [9, 40])
def test_the_flops_are_the_predicted_ones(architecture, entries):
    layer = layer_of(architecture, 16, kernel=3, heads=2)
    counted = forward_flops(layer, torch.randn(1, entries, 16))
    assert counted == predicted(architecture, entries, 16, kernel=3).flops
