"""A plan is what runs: the object that a layer shows is the one that computes, a few steps from its call."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from examples.literature import ROWS
from structconv.nn import GCNConv
from structconv.structures import Graph
from tests.support.drawn import drawn
from tests.support.layers import planned
from tests.support.plans import (
    check_plan_is_what_runs,
    check_plans_hold_no_tensor,
)

USES = planned()


@pytest.mark.parametrize("name", drawn(USES, 4))
def test_the_plan_that_a_layer_shows_is_the_one_that_runs_and_holds_no_tensor(name):
    use = USES[name]()
    check_plan_is_what_runs(use.layer, *use.args, **use.kwargs)
    check_plans_hold_no_tensor(use)


@pytest.mark.parametrize("name", ROWS)
def test_the_plan_of_each_row_of_the_literature_is_the_one_that_runs_and_holds_no_tensor(name):
    layer, inputs = ROWS[name].build(), ROWS[name].inputs()
    layer.max_bytes = 1 << 40  # a limit asks for a plan, also in a small call
    check_plan_is_what_runs(layer, **inputs)
    check_plans_hold_no_tensor(lambda: layer(**inputs))


def test_a_plan_is_frozen():
    plan = GCNConv(4, 4).plan(torch.randn(3, 4), Graph(torch.tensor([[0, 1], [1, 2]]), num_nodes=3))
    for name in ("run", "reason", "candidates", "another"):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(plan, name, None)
