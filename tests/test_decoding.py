"""Decoding: outputs know their places, and what depends on x alone is made once, over every layer."""

from __future__ import annotations

import pytest
import torch

from structconv.errors import ConfigError, StructureError
from structconv.mechanisms import (
    Additive,
    ALiBi,
    DotProduct,
    Identity,
    RelativeBias,
    RelativeKey,
    Rotary,
)
from structconv.nn import Conv, RelativeValue
from structconv.structures import Causal, Window
from structconv.testing.decoding import check_positions, check_prepared, takes_positions
from structconv.testing.layers import uses
from structconv.weights import LowRank

USES = uses()
PREPARED = sorted(name for name, make in USES.items() if isinstance(make().layer, Conv) and "axes" not in make().kwargs)
POSITIONS = sorted(name for name in PREPARED if takes_positions(USES[name]()))
#: What has no outputs of its own among its inputs, or is given as a whole: matrices, graphs, samples, other entries.
REFUSED = {"edges", "given", "graph", "grid", "samples"}
DOT = DotProduct(heads=2, dim=4).scaled()
CAUSAL = {
    "plain": DOT, "relative_bias": DOT + RelativeBias(2), "relative_key": DOT + RelativeKey(2), "alibi": DOT + ALiBi(),
    "t5": DOT + RelativeBias(4, buckets="log_causal"), "rotary": DotProduct(heads=2, dim=4, rotary=Rotary()).scaled(),
    "rotary_half": DotProduct(heads=2, dim=4, rotary=Rotary(layout="half", channels=2)).scaled(),
    "shared_keys": DotProduct(heads=2, dim=4, shared_by=2).scaled(), "additive": Additive(5, heads=2),
    "projected": Additive(heads=2, on="projected"),
}
MASKS = {"causal": Causal(), "sliding": Window(2) & Causal()}


@pytest.mark.parametrize("name", PREPARED)
def test_prepared_inputs_give_what_the_inputs_give(name):
    check_prepared(USES[name]())


@pytest.mark.parametrize("name", POSITIONS)
def test_outputs_that_are_told_their_places_are_those_of_the_whole_call_or_refused(name):
    check_positions(USES[name]())


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("name", CAUSAL)
@pytest.mark.parametrize("mixed", [False, True])
def test_steps_are_the_whole_call(name, mask, mixed):
    torch.manual_seed(0)
    attention = CAUSAL[name].masked(keep=MASKS[mask]).softmax()
    layer = Conv(attention | Identity() if mixed else attention, 8, 6).double()
    x = torch.randn(2, 9, 8, dtype=torch.float64)
    whole = layer(x)
    with torch.no_grad():
        prepared = layer.prepare(x[:, :0])
        steps = [layer.step(prepared, x[:, start:stop]) for start, stop in ((0, 2), (2, 3), (3, 7), (7, 8), (8, 9))]
    torch.testing.assert_close(torch.cat(steps, 1), whole)
    assert prepared.length == 9
    assert prepared.dropped == (6 if mask == "sliding" and not mixed else 0)


def test_relative_values_count_from_the_places_of_the_outputs():
    torch.manual_seed(0)
    layer = Conv(DOT.masked(keep=Causal()).softmax(), 8, 6, weight=LowRank(4), relative_value=RelativeValue(2)).double()
    x = torch.randn(2, 6, 8, dtype=torch.float64)
    with torch.no_grad():
        prepared = layer.prepare(x[:, :3])
        steps = [layer.step(prepared, x[:, i:i + 1]) for i in range(3, 6)]
    torch.testing.assert_close(torch.cat(steps, 1), layer(x)[:, 3:])
