"""Keys of `state_dict` are the names of parameters and persistent buffers, of every layer that there is."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from examples.literature import ROWS
from structconv.mechanisms import DotProduct
from structconv.nn import Conv
from tests.support.layers import LAYERS, over_specimens
from tests.support.mutations.states import check_names

SPECIMENS = over_specimens()


@pytest.mark.parametrize("name", LAYERS)
def test_named_layers(name):
    check_names(LAYERS[name]().layer)


@pytest.mark.parametrize("name", SPECIMENS)
def test_layers_over_specimens(name):
    check_names(SPECIMENS[name]().layer)


@pytest.mark.parametrize("name", ROWS)
def test_rows_of_the_literature(name):
    check_names(ROWS[name].build())


def test_buffers_that_are_not_persistent_are_no_part_of_a_state():
    layer = nn.Sequential(Conv(DotProduct(2, 3).softmax(), 4, 4))
    layer[0].register_buffer("passing", torch.ones(1), persistent=False)
    check_names(layer)
