"""Additive attention by one operator equals the expression evaluated node by node, values and gradients."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch.nn import functional as F

from structconv import ops
from structconv.bases import scores
from structconv.errors import ConfigError
from structconv.kernels.additive_attention import AdditiveEdges, AdditivePairs, known, recognise
from structconv.kernels.forms import fused
from structconv.mechanisms import STRUCTURE, Additive
from structconv.structures import Causal, Window
from tests.kernels.fused_forms import built, check_computes_the_same

LEAKY = partial(F.leaky_relu, negative_slope=0.2)
GATV2 = Additive(8, 4, activation=LEAKY)
TANH = Additive(8, 4)
FUSED = {
    "gatv2": (GATV2.masked(keep=STRUCTURE).softmax(), AdditiveEdges),
    "gatv2 with dropout": (GATV2.masked(keep=STRUCTURE).softmax().dropout(0.4), AdditiveEdges),
    "tanh on a graph": (TANH.masked(keep=STRUCTURE).softmax(), AdditiveEdges),
    "window": (TANH.masked(keep=Window(3)).softmax(), AdditiveEdges),
    "relu": (Additive(8, 4, activation=torch.relu).softmax(), AdditivePairs),
    "tanh": (TANH.softmax(), AdditivePairs),
    "tanh with dropout": (TANH.softmax().dropout(0.4), AdditivePairs),
    "causal": (TANH.masked(keep=Causal()).softmax(), AdditivePairs),
    "sigmoid": (Additive(8, 4, activation=torch.nn.Sigmoid()).masked(keep=Causal()).softmax(), AdditivePairs),
}
OTHERS = {
    "gelu": Additive(8, 4, activation=F.gelu).masked(keep=STRUCTURE).softmax(),
    "over outputs": TANH.masked(keep=STRUCTURE).softmax(over="outputs"),
    "sum": TANH.normalize("sum"),
    "causal graph": TANH.masked(keep=STRUCTURE).masked(keep=Causal()).normalize("count"),
    "scaled": (TANH * 0.5).softmax(),
}


@pytest.mark.parametrize("lead", [(), (2,)])
@pytest.mark.parametrize("name", FUSED)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-10), (torch.float32, 1e-4)])
def test_the_fused_form_computes_the_same(name, lead, dtype, tolerance):
    check_computes_the_same(*FUSED[name], lead, dtype, tolerance)


@pytest.mark.parametrize("name", OTHERS)
def test_what_the_operators_cannot_compute_is_left_alone(name):
    assert recognise(built(OTHERS[name])[0]) is None


@pytest.mark.parametrize(("activation", "expected"), [
    (torch.tanh, ("tanh", 0.0)), (F.relu, ("leaky_relu", 0.0)), (F.leaky_relu, ("leaky_relu", 0.01)),
    (LEAKY, ("leaky_relu", 0.2)), (torch.nn.LeakyReLU(0.3), ("leaky_relu", 0.3)), (torch.nn.Identity(),
                                                                                  ("leaky_relu", 1.0)),
    (torch.nn.Tanh(), ("tanh", 0.0)), (lambda t: t.tanh(), None), (partial(LEAKY, inplace=True), None),
    (partial(F.softplus, beta=2), None), (torch.nn.GELU(), None),
])
def test_activations_are_recognised_by_what_they_are(activation, expected):
    assert known(activation) == expected


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_isolated_outputs_are_zero_and_strangers_do_not_leak(dtype):
    basis, _, r = built(FUSED["gatv2"][0], (), dtype)
    dirty = r.detach().clone()
    dirty[:, 25:] = torch.nan
    y = fused(basis, dirty).apply(dirty)
    assert not y[:, 25:].any()
    assert y.isfinite().all()
    basis, _, r = built(FUSED["causal"][0], (), dtype)
    dirty = r.detach().clone()
    dirty[:, 20:] = torch.nan
    y = fused(basis, dirty).apply(dirty)
    torch.testing.assert_close(y[:, :20], fused(basis, r).apply(r)[:, :20])
    assert y[:, 20:].isnan().all()


def test_autocast_may_mix_dtypes():
    module, x = FUSED["tanh"][0].bound(16), torch.randn(30, 16)
    with torch.autocast("cpu", torch.bfloat16):
        basis, r = module(x), torch.randn(4, 30, 8)
        assert basis.child.source.dtype == torch.bfloat16
        y = fused(basis, r).apply(r)
    assert y.dtype == torch.float32
    torch.testing.assert_close(y, module(x).apply(r), rtol=0.05, atol=0.05)


def test_nothing_of_the_size_of_the_pairs_is_held():
    """The largest tensor that autograd keeps is an operand."""
    n, sizes = 600, []
    q, k, v = (torch.randn(1, n, 16, requires_grad=True) for _ in range(3))
    vector = torch.randn(1, 16, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: sizes.append(t.numel()) or t, lambda t: t):
        ops.apply(scores.Additive(k, q, vector).softmax(over="inputs"), v).sum().backward()
    assert max(sizes) <= n * 16


@pytest.mark.parametrize("options", [{}, {"dim": 4, "on": "projected"}, {"dim": 4, "on": "both"}])
def test_sizes_come_from_one_place(options):
    with pytest.raises(ConfigError):
        Additive(**options)
