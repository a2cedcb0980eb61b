"""Samples of a batch by plans of their own: numbers, gradients, memory, and where the planner takes that."""

from __future__ import annotations

from operator import itemgetter

import pytest
import torch
from torch import nn

from structconv.bases import pairs, pairwise
from structconv.bases.entrywise import Dropped
from structconv.bases.positions import GaussianBump
from structconv.bases.scores import Bilinear
from structconv.kernels import samples as kernel
from structconv.mechanisms import Additive, DotProduct, Location, RelativeKey
from structconv.nn import Conv, MultiheadAttention
from structconv.planning.cost import Cost
from structconv.planning.kernel import FORGET
from structconv.planning.plan import plan_for
from structconv.planning.problem import Call
from structconv.structures import Causal, DenseMask, Padding, Samples, Window
from structconv.testing.batches import check_samples, takes_samples
from structconv.testing.layers import uses
from structconv.theta import ApartTheta
from tests.test_batches import REFUSED

USES = {name: make for name, make in uses().items() if name not in REFUSED and takes_samples(make())}


@pytest.fixture
def preferred(monkeypatch):
    """The path costs nothing."""
    monkeypatch.setattr(kernel.SampleBySample, "application_cost", lambda *_: Cost())
    for forget in FORGET:
        forget()
    yield
    for forget in FORGET:
        forget()


@pytest.mark.parametrize("name", sorted(USES))
def test_by_plans_of_their_own_samples_give_what_each_gives_alone(name, preferred):
    check_samples(USES[name]())
