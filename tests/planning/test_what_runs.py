"""A plan is what runs: the object that a layer shows is the one that computes, a few steps from its call."""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import NamedTuple

import pytest
import torch

from examples.literature import ROWS
from structconv.nn import Conv2d, GATConv, GCNConv, MultiheadAttention
from structconv.structures import Graph
from tests.support.layers import planned
from tests.support.plans import (
    check_plan_is_what_runs,
    check_plans_hold_no_tensor,
    files_before_kernel,
    held_by,
    plans_that_run,
)

USES = planned()


class NamedInputs(NamedTuple):
    """A tuple with a tensor."""

    x: torch.Tensor


@pytest.mark.parametrize("name", USES)
def test_the_plan_that_a_layer_shows_is_the_one_that_runs(name):
    use = USES[name]()
    check_plan_is_what_runs(use.layer, *use.args, **use.kwargs)


@pytest.mark.parametrize("name", ROWS)
def test_the_plan_of_each_row_of_the_literature_is_the_one_that_runs(name):
    check_plan_is_what_runs(ROWS[name].build(), **ROWS[name].inputs())


@pytest.mark.parametrize("name", USES)
def test_a_plan_holds_no_tensor(name):
    check_plans_hold_no_tensor(USES[name]())


@pytest.mark.parametrize("name", ROWS)
def test_the_plan_of_each_row_of_the_literature_holds_no_tensor(name):
    layer, inputs = ROWS[name].build(), ROWS[name].inputs()
    check_plans_hold_no_tensor(lambda: layer(**inputs))


def test_what_a_function_holds_is_found():
    t = torch.ones(2)

    class Slotted:
        __slots__ = ("held",)

    slotted = Slotted()
    slotted.held = {"a": [t]}
    for holder in (lambda: t, lambda x=t: x, lambda *, x=t: x, partial(max, t), partial(max, x=(t,)), slotted.held,
                   t.sin, {t: 1}, slotted, lambda: slotted, NamedInputs(t)):
        assert list(held_by(holder, (torch.Tensor,))), holder
    assert not list(held_by(lambda x: torch.sin(x), (torch.Tensor,)))


def test_a_plan_is_frozen():
    plan = GCNConv(4, 4).plan(torch.randn(3, 4), Graph(torch.tensor([[0, 1], [1, 2]]), num_nodes=3))
    for name in ("run", "reason", "candidates", "another"):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(plan, name, None)


def test_a_plan_that_does_not_run_is_noticed():
    class Shown(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.other = Conv2d(2, 3, 3), Conv2d(2, 4, 3)

        def forward(self, image):
            return self.conv(image)

        def plan(self, image):
            return self.other.plan(image)

    with pytest.raises(AssertionError, match="did not run"):
        check_plan_is_what_runs(Shown(), torch.randn(1, 2, 4, 4))
    with plans_that_run() as ran:
        pass
    assert not ran


@pytest.mark.parametrize("name, most", [("gcn", 12), ("gat", 19), ("multihead", 18)])
def test_a_repeated_call_passes_few_files(name, most):
    nodes = torch.arange(8)
    graph = Graph(torch.stack([nodes, (nodes + 1) % 8]), num_nodes=8)
    layer, args = {"gcn": (GCNConv(8, 8), (torch.randn(8, 8), graph)),
                   "gat": (GATConv(8, 4, heads=2), (torch.randn(8, 8), graph)),
                   "multihead": (MultiheadAttention(8, 2), (torch.randn(1, 8, 8),))}[name]
    layer(*args)
    passed = files_before_kernel(lambda: layer(*args))
    assert passed[0] == "nn/conv.py"
    assert "planning/plan.py" in passed
    assert len(passed) <= most, passed
