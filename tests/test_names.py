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


class Renamed(Conv):
    """Wrong on purpose: a hook renames what is saved."""

    def state_dict(self, *args, **options):
        return {key.removeprefix("attention."): t for key, t in super().state_dict(*args, **options).items()}


class Copied(Conv):
    """Wrong on purpose: a hook saves copies."""

    def state_dict(self, *args, **options):
        return {key: t + 0 for key, t in super().state_dict(*args, **options).items()}


class Placed(Conv):
    """Wrong on purpose: a node of the expression is a child."""

    def __init__(self, *args):
        super().__init__(*args)
        self.add_module("root", self.mechanism)


class Tied(Conv):
    """Wrong on purpose: a parameter has two names."""

    def __init__(self, *args):
        super().__init__(*args)
        self.again = self.attention.query


@pytest.mark.parametrize("kind", [Renamed, Copied, Placed, Tied])
def test_the_law_finds_what_breaks_it(kind):
    with pytest.raises(AssertionError):
        check_names(kind(DotProduct(2, 3).softmax(), 4, 4))


def test_buffers_that_are_not_persistent_are_no_part_of_a_state():
    layer = nn.Sequential(Conv(DotProduct(2, 3).softmax(), 4, 4))
    layer[0].register_buffer("passing", torch.ones(1), persistent=False)
    check_names(layer)
