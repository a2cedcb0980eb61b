"""Names of parameters: the same whatever is done to an expression, and the keys of `state_dict`."""

import copy
import pickle
from functools import cache
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from structconv import ALiBi, ConfigError, Cuboid, DotProduct, Full, Identity, LowRank, Mechanism, RelativeBias, Shifts
from structconv.mechanisms import EdgeBias, GaussianWindow, General, PredictedPosition, RelativeKey
from structconv.nn import Conv, OnGrid, RelationalConv, compose
from structconv.structures import Causal, Padding, Window
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
    assert keys(SAME[name]) == ["attention.key.weight", "attention.query.weight", "bias", "weight.theta"]


def test_tensors_of_masks_and_factors_are_beside():
    assert keys(DOT.masked(keep=Padding(KEPT)).softmax() * torch.ones(2)) == [
        "attention.key.weight", "attention.query.weight", "bias", "mask.mask0", "scale.factor", "weight.theta"]
    masked, plain = Conv(DOT.masked(keep=Padding(KEPT)), P, Q), Conv(DOT.softmax(), P, Q)
    plain.load_state_dict(masked.state_dict())
    masked.load_state_dict(plain.state_dict())


def test_a_mask_more_or_less_changes_no_other_name():
    one, two = (Conv(e.softmax(), P, Q) for e in (DOT.masked(keep=Padding(KEPT)), DOT.masked(
        keep=Padding(KEPT)).masked(keep=Padding(~KEPT))))
    assert two.state_dict().keys() - one.state_dict().keys() == {"mask_1.mask0"}
    one.load_state_dict(two.state_dict())
    two.load_state_dict(one.state_dict())
    dense = Conv(DOT.masked(keep=Causal()).softmax(), P, Q)
    dense.load_state_dict(one.state_dict())  # its mask has no tensors
    assert isinstance(dense.mask.mask, Causal)


def test_terms_have_their_own():
    terms = DOT.scaled() + RelativeKey(2) + RelativeBias(3)
    expected = ["attention.key.weight", "attention.query.weight", "bias", "position_bias.table", "relative_key.table",
                "weight.theta"]
    assert keys(terms.softmax()) == expected
    assert keys(((RelativeBias(3, heads=2) + DOT) + RelativeKey(2, dim=3)).softmax()) == expected
    assert "edge_bias.linear.weight" in keys((DOT + EdgeBias(2)).softmax())
    assert "sink.factor" in keys(DOT.softmax(sink=torch.zeros(2)))


@pytest.mark.parametrize("join", [
    lambda a, b, c: (a | b) | c, lambda a, b, c: a | (b | c),
    lambda a, b, c: (a | Identity()).dropout(0.1) | b | (c.masked(drop=Causal()) | ALiBi(1))])
def test_equal_roles_are_numbered_by_their_places(join):
    expression = join(DotProduct(2, 3).softmax(), General(), DotProduct(2, 3).softmax())
    assert keys(expression) == ["attention.key.weight", "attention.query.weight", "attention_1.key.weight",
                                "attention_2.key.weight", "attention_2.query.weight", "bias", "weight.theta"]


def test_leaves_without_tensors_are_children_too():
    layer = Conv((DOT + ALiBi()).masked(keep=Causal()).map(nn.Hardtanh()).softmax() | Identity(), P, Q)
    assert [name for name, _ in layer.named_children()] == ["weight", "attention", "alibi", "mask", "map", "identity"]
    assert [name for name, _ in Conv(Cuboid(3), P, Q).named_children()] == ["weight", "cuboid"]


def test_weights_of_parts():
    layer = Conv(DOT.softmax() | Shifts([0, 1]), P, Q, weight=[LowRank(3), Full()])
    assert {"weight.0.value.weight", "weight.0.output.weight", "weight.1.theta"} < set(layer.state_dict())
    for options in ({}, {"num_bases": 2}, {"aggr": "add"}, {"bias": False}):
        assert "weight.1.theta" in RelationalConv(P, Q, 3, **options).state_dict()


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
    for bias in (True, False):
        names = set(Conv(Own(), P, Q, bias=bias).state_dict())
        assert names == {"own.bias", "own.inner.operands.0.query.weight", "own.inner.operands.0.key.weight",
                         "weight.theta", *(["bias"] if bias else [])}
    for child_method_or_option, name in (("Weight", "weight_1"), ("Plan", "plan_1"), ("InChannels", "in_channels_1")):
        layer = Conv(type(child_method_or_option, (Own,), {})(), P, Q)
        assert f"{name}.bias" in layer.state_dict() and layer.mechanism is getattr(layer, name)


def test_layers_that_hold_a_layer():
    layer = OnGrid(Conv(Shifts([0, 1]), P, Q), 1)
    assert list(layer.state_dict()) == ["conv.bias", "conv.weight.theta"]
    both = compose(layer, OnGrid(Conv(Identity(), Q, Q, bias=False), 1))
    assert list(both.state_dict()) == ["conv.bias", "conv.weight.theta"]


EXPRESSION = DOT.masked(keep=Padding(KEPT)).softmax().dropout(0.5) | Shifts([0])


def test_a_leaf_that_is_replaced_takes_effect():
    layer, other, x = Conv(EXPRESSION, P, Q).eval(), Conv(EXPRESSION, P, Q).eval(), torch.randn(M, P)
    other.weight.load_state_dict(layer.weight.state_dict())
    before = layer(x)
    layer.attention = other.attention
    torch.testing.assert_close(layer(x), other(x))
    assert not torch.equal(layer(x), before)
    assert layer.mechanism.mechanisms()[0].mechanisms()[0] is other.attention is layer.attention
    layer.attention = nn.Sequential(layer.attention)
    with pytest.raises(ConfigError, match="Sequential"):
        layer(x)


def test_copies_and_files_keep_a_leaf_one_module():
    layer = Conv(EXPRESSION, P, Q)
    for twin in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        root = twin.__dict__["_expression"].root
        assert root is twin.mechanism and root.mechanisms()[0].mechanisms()[0] is twin.attention
        assert twin.attention is not layer.attention


def test_the_mode_of_a_layer_is_that_of_its_steps():
    layer, x = Conv(EXPRESSION, P, Q), torch.randn(M, P)
    assert not torch.equal(layer(x), layer(x))
    layer.eval()
    assert torch.equal(layer(x), layer(x))
    for module in layer.modules():
        module.training = True  # as tools do that call no `train`
    assert not torch.equal(layer(x), layer(x))
    nn.Sequential(layer).eval()
    assert torch.equal(layer(x), layer(x))


def test_an_expression_can_be_replaced():
    layer, x = Conv(DOT.softmax(), P, Q), torch.randn(M, P)
    layer.mechanism = (DotProduct(2, 3) + RelativeBias(2)).masked(keep=Causal()).softmax().bound(P)
    assert sorted(name for name, _ in layer.named_children()) == ["attention", "mask", "position_bias", "weight"]
    layer(x)
    with pytest.raises(ConfigError, match="must be a Mechanism"):
        layer.mechanism = nn.Identity()


def test_a_module_that_two_leaves_have_has_one_name():
    center = PredictedPosition()
    near = DOT.masked(keep=Window(2, center=center)).softmax() * GaussianWindow(1.0, center)
    layer, x = Conv(near | Identity(), P, Q), torch.randn(M, P)
    assert [key for key in layer.state_dict() if "hidden" in key] == ["mask.position0.hidden.weight"]
    y = layer(x)
    for twin in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer)), Conv(layer.mechanism, P, Q)):
        assert twin.mask.position0 is twin.gaussian_window.center is not layer.mask.position0
        assert twin.state_dict().keys() == layer.state_dict().keys()
    other = copy.deepcopy(layer.mask.position0)
    other.hidden.weight.data.mul_(-3)
    layer.mask.position0 = other
    assert not torch.equal(layer(x), y) and layer.gaussian_window.center is other
    layer.mask = copy.deepcopy(layer.mask)
    layer.reset_parameters()
    assert layer.gaussian_window.center is layer.mask.position0 is not other
    layer.mask = nn.Identity()  # of no use, and an error says so
    with pytest.raises((ConfigError, TypeError)):
        layer(x)


def test_a_factor_is_a_buffer_unless_it_is_a_parameter():
    for factor, trained in ((torch.ones(2), False), (nn.Parameter(torch.ones(2)), True)):
        layer = Conv(DOT.softmax() * factor, P, Q)
        assert ("scale.factor" in dict(layer.named_parameters())) is trained
        assert "scale.factor" in layer.state_dict() and layer.double().scale.factor.dtype == torch.float64


@cache
def kept():
    return load_file(Path(__file__).parent / "saved" / "states.safetensors")


@pytest.mark.parametrize("name", LAYERS)
def test_files_load_for_ever(name):
    """Of a layer in a file that was written once: `tools/states.py` adds a new layer's."""
    use = LAYERS[name]()
    state = {key.removeprefix(f"{name}/"): t for key, t in kept().items() if key.startswith(f"{name}/")}
    assert state.keys() == use.layer.state_dict().keys(), f"run tools/states.py for {name}"
    for p in use.layer.parameters():
        nn.init.constant_(p, torch.nan)
    use.layer.load_state_dict(state)
    assert use().isfinite().all()
