"""Keys of `state_dict`: the same whatever is done to an expression, and files that were written once."""

from __future__ import annotations

import pickle
from functools import cache
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.distributed import checkpoint
from torch.func import functional_call

from structconv.errors import ConfigError
from structconv.mechanisms import (
    ALiBi,
    Cuboid,
    DotProduct,
    EdgeBias,
    General,
    Identity,
    Mechanism,
    RelativeBias,
    RelativeKey,
    Shifts,
)
from structconv.nn import Conv, GATConv, MultiheadAttention, OnGrid, RelationalConv, compose, state_keys
from structconv.structures import Causal, Padding, Window
from structconv.weights import Full, LowRank
from tests.support.layers import LAYERS

P, Q, M = 4, 3, 6
DOT = DotProduct(heads=2, dim=3)
KEPT = torch.arange(M) < 4

SAME = {
    "bare": DOT, "softmax": DOT.softmax(), "scaled": DOT.scaled().softmax(), "dropout": DOT.softmax().dropout(0.1),
    "causal": DOT.masked(keep=Causal()).softmax(), "two masks": DOT.masked(keep=Causal()).masked(keep=Window(2)),
    "slopes": (DOT.scaled() + ALiBi()).softmax(), "beside": DOT.softmax() | Shifts([0, 1]),
    "behind": Identity() | (DOT + ALiBi()).softmax() | Identity(), "composed": Identity() @ DOT.softmax(),
    "capped": (DOT * 0.5).softcap(3.0).softmax(), "transposed": DOT.softmax().transpose(),
    "twice": DOT.softmax() | DOT.softmax().transpose(),
}


def keys(mechanism, **options):
    return sorted(Conv(mechanism, P, Q, **options).state_dict())


@pytest.mark.parametrize("name", SAME)
def test_what_is_done_to_scores_changes_no_key(name):
    assert keys(SAME[name]) == ["bias", "key.weight", "query.weight", "theta"]


def test_tensors_of_masks_and_factors_are_beside():
    assert keys(DOT.masked(keep=Padding(KEPT)).softmax() * torch.ones(2)) == [
        "bias", "factor", "key.weight", "mask0", "query.weight", "theta"]
    masked, plain = Conv(DOT.masked(keep=Padding(KEPT)), P, Q), Conv(DOT.softmax(), P, Q)
    plain.load_state_dict(masked.state_dict())
    masked.load_state_dict(plain.state_dict())


def test_terms_have_their_own():
    terms = DOT.scaled() + RelativeKey(2) + RelativeBias(3)
    expected = ["bias", "key.weight", "query.weight", "relative_bias.table", "relative_key.table", "theta"]
    assert keys(terms.softmax()) == expected
    assert keys(((RelativeBias(3, heads=2) + DOT) + RelativeKey(2, dim=3)).softmax())[-2] == "relative_key.table"
    assert keys((DOT + EdgeBias(2)).softmax())[1] == "edge_bias.linear.weight"


@pytest.mark.parametrize("join", [
    lambda a, b, c: (a | b) | c, lambda a, b, c: a | (b | c),
    lambda a, b, c: (a | Identity()).dropout(0.1) | b | (c.masked(drop=Causal()) | ALiBi(1))])
def test_equal_roles_are_numbered_by_their_places(join):
    expression = join(DotProduct(2, 3).softmax(), General(), DotProduct(2, 3).softmax())
    assert keys(expression) == ["bias", "key.weight", "key_1.weight", "key_2.weight", "query.weight",
                                "query_1.weight", "theta"]


def test_weights_of_parts():
    layer = Conv(DOT.softmax() | Shifts([0, 1]), P, Q, weight=[LowRank(3), Full()])
    assert {"value", "output", "theta"} < set(layer.state_dict())
    for options in ({}, {"num_bases": 2}, {"aggr": "add"}, {"bias": False}):
        assert "root.theta" in RelationalConv(P, Q, 3, **options).state_dict()


class Own(Mechanism):
    """A user's mechanism with a bias, a name that the layer has too, and an expression inside."""

    def __init__(self):
        super().__init__()
        self.inner = DotProduct(2, 3).softmax()

    def bind(self, channels):
        self.bias = nn.Parameter(torch.ones(1))

    def forward(self, inputs):
        return self.inner.evaluate(inputs) * self.bias


def test_names_of_the_layer_are_its_own():
    names = {bias: state_keys(Conv(Own(), P, Q, bias=bias)) for bias in (True, False)}
    assert names[True].pop("bias") == "bias"
    assert names[True] == names[False]
    assert names[True]["mechanism.bias"] == "bias_1"
    assert names[True]["mechanism.inner.operands.0.query.weight"] == "inner.query.weight"


def test_a_state_handed_to_functional_call_is_refused():
    layer, x = MultiheadAttention(P, 2), torch.randn(M, P)
    for state in (layer.state_dict(), {"value": layer.weight.value.detach()}):
        with pytest.raises((ConfigError, AttributeError), match=r"functional_call takes|no attribute"):
            functional_call(layer, dict(state), (x,))
    names = state_keys(layer)
    state = layer.state_dict()
    given = {name: 2 * state[key] for name, key in names.items()}
    assert not torch.equal(functional_call(layer, given, (x,)), layer(x))


def test_layers_that_hold_a_layer():
    layer = OnGrid(Conv(Shifts([0, 1]), P, Q), 1)
    assert list(layer.state_dict()) == ["bias", "theta"]
    assert list(compose(layer, OnGrid(Conv(Identity(), Q, Q, bias=False), 1)).state_dict()) == ["bias", "theta"]


def test_a_pickled_or_older_torch_state_with_metadata():
    layer = GATConv(P, Q, 2)
    state = pickle.loads(pickle.dumps(layer.state_dict()))
    assert hasattr(state, "_metadata")
    GATConv(P, Q, 2, dropout=0.5).load_state_dict(state)


@cache
def kept(kind):
    return load_file(Path(__file__).parent / "saved" / f"{kind}.safetensors")


def state_of(kind, name):
    return {key.removeprefix(f"{name}/"): t for key, t in kept(kind).items() if key.startswith(f"{name}/")}


@pytest.mark.parametrize("name", LAYERS)
def test_files_load_for_ever(name):
    """Written when keys named roles, and before, of the same layers: `tools/states.py` adds a new layer's."""
    use = LAYERS[name]()
    results = []
    for kind in ("by_role", "by_module"):
        state = state_of(kind, name)
        if not state:  # a layer that is younger than the files, or one without numbers
            assert kind == "by_module" or not use.layer.state_dict(), f"run tools/states.py for {name}"
            continue
        for p in use.layer.parameters():
            nn.init.constant_(p, torch.nan)
        use.layer.load_state_dict(state)
        results.append(use().detach())
        assert results[-1].isfinite().all()
        if kind == "by_role":
            assert state.keys() == use.layer.state_dict().keys()
    for result in results[1:]:
        torch.testing.assert_close(result, results[0], rtol=0, atol=0)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_distributed_checkpoints_hold_a_layer(tmp_path):
    expression = (DotProduct(heads=2, dim=3) + RelativeBias(2, 2)).softmax() | Cuboid(3)
    layer, other = Conv(expression, 4, 4), Conv(expression, 4, 4)
    checkpoint.save(layer.state_dict(), checkpoint_id=tmp_path, no_dist=True)
    state = other.state_dict()
    checkpoint.load(state, checkpoint_id=tmp_path, no_dist=True)
    other.load_state_dict(state)
    x = torch.randn(5, 4)
    torch.testing.assert_close(other(x), layer(x), rtol=0, atol=0)
