"""Additive attention by one operator equals the expression evaluated node by node, values and gradients."""

from functools import partial

import pytest
import torch
from torch.nn import functional as F

from structconv import STRUCTURE, Additive, Causal, Window, ops
from structconv.bases import scores
from structconv.kernels.additive_attention import known
from structconv.structures.values import tensors_in
from tests.kernels.applied import check_computes_the_same, match_of, offered, on_a_graph

KERNEL = "structconv.additive_attention"
LEAKY = partial(F.leaky_relu, negative_slope=0.2)
GATV2 = Additive(8, 4, activation=LEAKY)
TANH = Additive(8, 4)
FUSED = {
    "gatv2": GATV2.masked(keep=STRUCTURE).softmax(),
    "gatv2 with dropout": GATV2.masked(keep=STRUCTURE).softmax().dropout(0.4),
    "tanh on a graph": TANH.masked(keep=STRUCTURE).softmax(),
    "window": TANH.masked(keep=Window(3)).softmax(),
    "relu": Additive(8, 4, activation=torch.relu).softmax(),
    "tanh": TANH.softmax(),
    "tanh with dropout": TANH.softmax().dropout(0.4),
    "causal": TANH.masked(keep=Causal()).softmax(),
    "sigmoid": Additive(8, 4, activation=torch.nn.Sigmoid()).masked(keep=Causal()).softmax(),
}
LISTED = ("gatv2", "gatv2 with dropout", "tanh on a graph", "window")
OTHERS = {
    "gelu": Additive(8, 4, activation=F.gelu).masked(keep=STRUCTURE).softmax(),
    "over outputs": TANH.masked(keep=STRUCTURE).softmax(over="outputs"),
    "sum": TANH.normalize("sum"),
    "causal graph": TANH.masked(keep=STRUCTURE).masked(keep=Causal()).normalize("count"),
    "scaled": (TANH * 0.5).softmax(),
}


@pytest.mark.parametrize("name", FUSED)
@pytest.mark.parametrize(("lead", "dtype", "tolerance"), [((), torch.float64, 1e-10), ((2,), torch.float32, 1e-4)])
def test_the_kernel_computes_the_same(name, lead, dtype, tolerance):
    check_computes_the_same(on_a_graph(FUSED[name], lead, dtype), KERNEL, tolerance)


@pytest.mark.parametrize("name", FUSED)
def test_pairs_are_listed_where_they_are_few(name):
    call = on_a_graph(FUSED[name])[2]
    assert (match_of(KERNEL, call).edges is not None) == (name in LISTED)


@pytest.mark.parametrize("name", OTHERS)
def test_what_the_operators_cannot_compute_is_left_alone(name):
    assert KERNEL not in offered(on_a_graph(OTHERS[name])[2])


@pytest.mark.parametrize(("activation", "expected"), [
    (torch.tanh, ("tanh", 0.0)), (F.relu, ("leaky_relu", 0.0)), (F.leaky_relu, ("leaky_relu", 0.01)),
    (LEAKY, ("leaky_relu", 0.2)), (lambda t: t.tanh(), None), (partial(LEAKY, inplace=True), None),
    (partial(F.softplus, beta=2), None),
])
def test_activations_are_recognized_by_what_they_are(activation, expected):
    assert known(activation) == expected


@pytest.mark.parametrize(("activation", "expected"), [
    (torch.nn.LeakyReLU(0.3), ("leaky_relu", 0.3)), (torch.nn.Identity(), ("leaky_relu", 1.0)),
    (torch.nn.Tanh(), ("tanh", 0.0)), (torch.nn.GELU(), None),
])
def test_modules_are_recognized_unless_somebody_changes_their_call(activation, expected):
    def actual():
        match = match_of(KERNEL, on_a_graph(Additive(8, 4, activation=activation).softmax())[2])
        return None if match is None else (match.activation, match.slope)

    assert actual() == expected
    handle = activation.register_forward_hook(lambda module, args, y: 2 * y)
    assert actual() is None
    handle.remove()


def test_autocast_gives_the_kernel_one_dtype():
    module, x = FUSED["tanh"].bound(16), torch.randn(30, 16)
    with torch.autocast("cpu", torch.bfloat16):
        basis, r = module.basis(x), torch.randn(4, 30, 8)
        assert {t.dtype for t in tensors_in(basis)} == {torch.bfloat16}
        y = ops.apply(basis, r)
    assert y.dtype == torch.bfloat16
    y = y.float()
    torch.testing.assert_close(y, module.basis(x).apply(r), rtol=0.05, atol=0.05)


def test_nothing_of_the_size_of_the_pairs_is_held():
    """The largest tensor that autograd keeps is an operand."""
    n, sizes = 600, []
    q, k, v = (torch.randn(1, n, 16, requires_grad=True) for _ in range(3))
    vector = torch.randn(1, 16, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: sizes.append(t.numel()) or t, lambda t: t):
        ops.apply(scores.Additive(k, q, vector).softmax(over="inputs"), v).sum().backward()
    assert max(sizes) <= n * 16
