"""The pixel network: every variant has the claimed receptive field, and only its layers differ."""

import pytest
import torch

from structconv.analysis.fields import receptive_field
from structconv.analysis.flops import forward_flops
from structconv.primitives.products import product
from structconv_systems.models.digits import VARIANTS, PixelNetwork
from structconv_systems.recipes.options.images import DIGIT_BASES


def test_the_recipe_names_the_variants():
    assert tuple(VARIANTS) == DIGIT_BASES


FIELDS = {"identity": 1, "shifts": 25, "separable": 25, "gcn": 13, "attention": 64, "mixed": 64}


@pytest.mark.parametrize("name", FIELDS)
def test_receptive_fields(name):
    network = PixelNetwork(VARIANTS[name], (8, 8), channels=8, classes=10).double()
    x = torch.rand(64, 1, dtype=torch.float64)
    assert receptive_field(lambda x: network.entries(x[None], smooth=True)[0], x) == FIELDS[name]


@pytest.mark.parametrize("name", VARIANTS)
def test_batched_equals_alone_and_all_parameters_learn(name):
    network = PixelNetwork(VARIANTS[name], (4, 5), channels=8, classes=3).double()
    images = torch.rand(6, 20, 1, dtype=torch.float64)
    logits = network(images)
    assert logits.shape == (6, 3)
    assert torch.allclose(logits[2:3], network(images[2:3]), atol=1e-10)
    logits.square().sum().backward()
    assert all(parameter.grad is not None for parameter in network.parameters())
    assert network.first_basis(images[0]).dense().shape[-2:] == (20, 20)


def test_flops_of_known_products():
    linear = torch.nn.Linear(5, 7)
    assert forward_flops(linear, torch.randn(3, 5)) == 2 * 3 * 5 * 7
    w = torch.randn(64, 7)
    assert forward_flops(lambda x: product(x, w), torch.randn(3, 200, 64)) == 2 * 600 * 64 * 7
    network = PixelNetwork(VARIANTS["identity"], (8, 8), channels=8, classes=10)
    hidden = 2 * 64 * 8 * 8
    assert forward_flops(network, torch.rand(1, 64, 1)) == 2 * 64 * 8 + 2 * hidden + 2 * 16 * 10
    sparse = PixelNetwork(VARIANTS["gcn"], (8, 8), channels=8, classes=10)
    edges = 2 * (2 * 7 * 8) + 64
    assert forward_flops(sparse, torch.rand(1, 64, 1)) == 2 * 64 * 8 + 2 * (hidden + 2 * edges * 8) + 2 * 16 * 10
