"""Additive attention, along edges and over all pairs, native and not, against float64 sums, with its gradients."""

from __future__ import annotations

import pytest
import torch
from torch.autograd import gradcheck, gradgradcheck

from structconv.errors import ConfigError, ShapeError
from structconv.primitives.native import core
from structconv.primitives.native.additive import activate, additive_attention
from structconv.primitives.native.additive_dense import dense_additive_attention
from tests.primitives.edge_lists import Edges, random_edges, softmax_sum

F64 = torch.float64
SHAPES = [(4, 32, 32), (8, 8, 8), (1, 7, 5), (3, 20, 12), (2, 64, 64), (1, 300, 16), (1, 16, 300), (5, 1, 1),
          (17, 8, 3), (1, 128, 130)]
ACTIVATIONS = [("leaky_relu", 0.2), ("leaky_relu", 0.0), ("tanh", 0.0), ("sigmoid", 0.0)]


def every_pair(m, n, causal=False):
    source, target = torch.arange(m).repeat(n), torch.arange(n).repeat_interleave(m)
    keep = source <= target if causal else torch.ones_like(source, dtype=torch.bool)
    return Edges(source[keep], target[keep], m, n)


def leaves(m, n, heads, depth, channels, dtype=torch.float32, scale=1.0):
    """q, k, x and vector in `dtype`, and the same numbers in float64."""
    torch.manual_seed(heads * channels)
    shapes = (n, heads, depth), (m, heads, depth), (m, heads, channels), (heads, depth)
    inputs = [(scale if i < 2 else 1.0) * torch.randn(shape) for i, shape in enumerate(shapes)]
    inputs = [t.to(dtype).requires_grad_() for t in inputs]
    return inputs, [t.detach().double().requires_grad_() for t in inputs]


def reference(edges, q, k, x, vector, activation, slope, drop=None):
    """Edge by edge in float64, the softmax by a loop over outputs."""
    scores = (activate(q[edges.target] + k[edges.source], activation, slope) * vector).sum(-1).t()
    return softmax_sum(edges, scores, x, drop)


def compare(got, expected, inputs, doubles, tol=2e-5):
    torch.testing.assert_close(got.double(), expected, rtol=tol, atol=tol)
    grad = torch.randn(got.shape, generator=torch.Generator().manual_seed(3)).to(got.dtype)
    found = torch.autograd.grad(got, inputs, grad)
    for a, b in zip(found, torch.autograd.grad(expected, doubles, grad.double()), strict=True):
        assert a.dtype == got.dtype
        torch.testing.assert_close(a.double(), b, rtol=tol, atol=5 * tol * max(1.0, float(b.abs().max())))


@pytest.mark.parametrize(("heads", "depth", "channels"), SHAPES)
@pytest.mark.parametrize(("activation", "slope"), ACTIVATIONS)
def test_along_edges(path, activation, slope, heads, depth, channels):
    edges = random_edges(dtype=torch.int32 if heads % 2 else torch.int64)
    inputs, doubles = leaves(edges.m, edges.n, heads, depth, channels)
    chosen = {"activation": activation, "slope": slope}
    compare(additive_attention(*edges.layouts, *inputs, **chosen), reference(edges, *doubles, **chosen), inputs,
            doubles)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("heads", "depth", "channels"), SHAPES)
@pytest.mark.parametrize(("activation", "slope"), ACTIVATIONS[1:])
def test_over_all_pairs(path, activation, slope, heads, depth, channels, causal):
    m, n = (50, 70) if heads % 2 else (70, 50)
    edges, chosen = every_pair(m, n, causal), {"activation": activation, "slope": slope}
    inputs, doubles = leaves(m, n, heads, depth, channels)
    compare(dense_additive_attention(*inputs, causal=causal, **chosen), reference(edges, *doubles, **chosen), inputs,
            doubles)


@pytest.mark.parametrize("scale", [1e-3, 15.0, 200.0])
@pytest.mark.parametrize("activation", ["tanh", "sigmoid"])
def test_saturated_and_cancelling_sums(path, activation, scale):
    """Numbers of which the factors would overflow, and sums of large numbers that nearly cancel."""
    edges = every_pair(40, 40)
    inputs, _ = leaves(40, 40, 2, 16, 8, scale=scale)
    with torch.no_grad():
        inputs[0][:20] = 1e-2 * torch.randn(20, 2, 16) - inputs[1][:20]
    doubles = [t.detach().double().requires_grad_() for t in inputs]
    expected = reference(edges, *doubles, activation, 0.0)
    compare(dense_additive_attention(*inputs, activation=activation), expected, inputs, doubles)
    compare(additive_attention(*edges.layouts, *inputs, activation=activation),
            reference(edges, *doubles, activation, 0.0), inputs, doubles, 2e-5 + 1e-6 * scale)


def test_products_of_factors_are_as_good_as_exponentials():
    """The scores alone: one channel, two inputs, so that y is the logistic function of their difference."""
    if core() is None:
        pytest.skip("the native core cannot be built here")
    q = torch.linspace(-39, 39, 4001).view(-1, 1, 1)
    for key in (-39.0, -7.3, -0.1, 0.0, 1e-3, 2.0, 21.0, 39.0):
        k, x = torch.tensor([key, 0.0]).view(2, 1, 1), torch.tensor([1.0, 0.0]).view(2, 1, 1)
        y = dense_additive_attention(q, k, x, torch.ones(1, 1)).flatten().double()
        exact = (torch.tanh(q.double() + k.double()[0]) - torch.tanh(q.double())).sigmoid().flatten()
        assert (y - exact).abs().max() < 2**-20


@pytest.mark.parametrize("batch_heads", [None, 2])
def test_dropout_is_that_of_the_hash(path, batch_heads):
    seed = torch.tensor(-(2**62) + 12345)
    drop = (0.4, seed, batch_heads or 4)
    chosen = {"dropout": 0.4, "seed": seed, "batch_heads": batch_heads}
    edges, pairs = random_edges(), every_pair(60, 40, causal=True)
    inputs, doubles = leaves(60, 40, 4, 8, 16)
    compare(additive_attention(*edges.layouts, *inputs, **chosen),
            reference(edges, *doubles, "leaky_relu", 0.2, drop), inputs, doubles)
    compare(dense_additive_attention(*inputs, causal=True, **chosen), reference(pairs, *doubles, "tanh", 0.0, drop),
            inputs, doubles)


def test_bfloat16(path):
    edges, pairs = random_edges(), every_pair(60, 40)
    inputs, doubles = leaves(60, 40, 2, 8, 20, torch.bfloat16)
    compare(additive_attention(*edges.layouts, *inputs), reference(edges, *doubles, "leaky_relu", 0.2), inputs, doubles,
            0.04)
    for activation in ("tanh", "leaky_relu"):
        compare(dense_additive_attention(*inputs, activation=activation), reference(pairs, *doubles, activation, 0.2),
                inputs, doubles, 0.04)


def test_values_that_are_the_keys(path):
    """GATv2's layout: heads in one row, values and keys one tensor, whose gradients add up."""
    edges = random_edges(60, 60)
    fused = torch.randn(60, 2, 4, 16, requires_grad=True)
    vector = torch.randn(4, 16)
    q, k = fused.unbind(1)
    y = additive_attention(*edges.layouts, q, k, k, vector)
    doubles = fused.detach().double().requires_grad_()
    q, k = doubles.unbind(1)
    compare(y, reference(edges, q, k, k, vector.double(), "leaky_relu", 0.2), [fused], [doubles])
    additive_attention(*edges.layouts, *fused.unbind(1), fused[:, 1], vector).sum().backward()  # without strides


def test_a_node_of_100_000_edges(path):
    edges = random_edges(300, 50, 300_000)
    inputs, doubles = leaves(300, 50, 2, 4, 8)
    compare(additive_attention(*edges.layouts, *inputs), reference(edges, *doubles, "leaky_relu", 0.2), inputs, doubles,
            2e-4)


@pytest.mark.parametrize(("m", "n"), [(0, 4), (4, 0), (0, 0), (3, 4)])
def test_without_edges(path, m, n):
    edges, inputs = Edges(torch.zeros(0).long(), torch.zeros(0).long(), m, n), leaves(m, n, 2, 4, 8)[0]
    for y in (additive_attention(*edges.layouts, *inputs), dense_additive_attention(*inputs)):
        assert y.shape == (n, 2, 8)
        if m == 0 or n == 0 or y.grad_fn.name().startswith("additive"):
            assert not y.any()
            assert not any(g.any() for g in torch.autograd.grad(y.sum(), inputs))


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_what_is_not_finite_stays_with_its_edges(path, bad):
    edges = Edges(torch.tensor([0, 1, 1, 2]), torch.tensor([0, 1, 2, 2]), 5, 5)
    q, k, x, vector = leaves(5, 5, 2, 8, 16)[0]
    with torch.no_grad():
        for t in (q, k, x):
            t[0], t[3], t[4] = bad, bad, bad  # edge 0 -> 0 alone sees them
    y = additive_attention(*edges.layouts, q, k, x, vector)
    assert y[1:].isfinite().all() and not y[3:].any() and not y[0].isfinite().any()
    grad = torch.ones_like(y)
    grad[3:] = bad
    grad[0] = 0
    for g in torch.autograd.grad(y, [q, k, x], grad):
        assert g[1:].isfinite().all() and not g[3:].any()


@pytest.mark.parametrize("activation", ["tanh", "leaky_relu"])
def test_a_causal_mask_keeps_later_entries_out(activation):
    if core() is None:
        pytest.skip("the native core cannot be built here")
    inputs, _ = leaves(30, 30, 2, 8, 16)
    k, x = (t.detach().clone() for t in inputs[1:3])
    k[20:], x[20:] = torch.nan, torch.nan
    y = dense_additive_attention(inputs[0], k, x, inputs[3], activation=activation, causal=True)
    clean = dense_additive_attention(*inputs, activation=activation, causal=True)
    torch.testing.assert_close(y[:20], clean[:20])
    assert y[20:].isnan().all()


def test_the_numbers_do_not_depend_on_threads():
    edges, inputs = random_edges(2000, 2000, 60_000), leaves(2000, 2000, 4, 32, 32)[0]
    before, found = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            for y in (additive_attention(*edges.layouts, *inputs), dense_additive_attention(*inputs)):
                found.append((y, *torch.autograd.grad(y.square().sum(), inputs)))
    finally:
        torch.set_num_threads(before)
    for at, other in enumerate(found[2:]):
        assert all(torch.equal(a, b) for a, b in zip(found[at % 2], other, strict=True))


@pytest.mark.parametrize("activation", ["tanh", "sigmoid", "leaky_relu"])
def test_second_derivatives(activation):
    edges = random_edges(7, 6, 20)
    inputs = leaves(7, 6, 2, 3, 2, F64)[0]
    calls = (lambda *t: additive_attention(*edges.layouts, *t, activation=activation),
             lambda *t: dense_additive_attention(*t, activation=activation, causal=True))
    for call in calls:
        assert gradcheck(call, inputs)
        assert gradgradcheck(call, inputs)


def test_second_derivatives_after_a_native_forward(path):
    edges, pairs = random_edges(), every_pair(60, 40)
    inputs, doubles = leaves(60, 40, 2, 4, 8)

    def slope_of(call, tensors):
        grads = torch.autograd.grad(call(*tensors).square().sum(), tensors, create_graph=True)
        return torch.autograd.grad(sum(g.square().sum() for g in grads), tensors)

    for got, expected in ((lambda *t: additive_attention(*edges.layouts, *t), (edges, "leaky_relu", 0.2)),
                          (lambda *t: dense_additive_attention(*t), (pairs, "tanh", 0.0))):
        where, activation, slope = expected
        found = slope_of(got, inputs)
        wanted = slope_of(lambda *t, w=where, a=activation, s=slope: reference(w, *t, a, s), doubles)
        for a, b in zip(found, wanted, strict=True):
            torch.testing.assert_close(a.double(), b, rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("dtype", [torch.float32, F64])
def test_operator_contracts(dtype):
    edges, seed = random_edges(9, 8, 30), torch.tensor(3)
    flat, inputs = [t for layout in edges.layouts for t in layout], leaves(9, 8, 2, 4, 8, dtype)[0]
    along = torch.ops.structconv.additive_attention.default
    dense = torch.ops.structconv.dense_additive_attention.default
    for options in (("leaky_relu", 0.2, 0.3, seed, 2), ("tanh", 0.0, 0.0, None, 2)):
        torch.library.opcheck(along, (*flat, *inputs, *options))
        torch.library.opcheck(dense, (*inputs, *options, True, None))


def test_compiles_whole():
    torch._dynamo.reset()

    def layer(by_target, by_source, q, k, vector):
        y = additive_attention(by_target, by_source, q, k, k, vector)
        return dense_additive_attention(q, k, y, vector, causal=True).square().sum()

    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager", dynamic=True)
    for m, e in ((20, 90), (31, 200)):
        edges = random_edges(m, m, e)
        inputs = [torch.randn(*s, requires_grad=True) for s in ((m, 2, 8), (m, 2, 8), (2, 8))]
        expected, got = layer(*edges.layouts, *inputs), compiled(*edges.layouts, *inputs)
        torch.testing.assert_close(got, expected)
        torch.testing.assert_close(torch.autograd.grad(got, inputs), torch.autograd.grad(expected, inputs))


@pytest.mark.parametrize(("change", "error", "message"), [
    ({"q": torch.ones(60, 2, 4)}, ShapeError, "N=40"), ({"k": torch.ones(60, 2, 5)}, ShapeError, "k must"),
    ({"x": torch.ones(60, 3, 8)}, ShapeError, "x must"), ({"vector": torch.ones(2, 5)}, ShapeError, "vector must"),
    ({"x": torch.ones(60, 2, 8).double()}, ShapeError, "dtype"), ({"activation": "gelu"}, ConfigError, "activation"),
    ({"dropout": 0.5}, ConfigError, "seed"),
])
def test_refuses(change, error, message):
    edges = random_edges()
    given = {"q": torch.ones(40, 2, 4), "k": torch.ones(60, 2, 4), "x": torch.ones(60, 2, 8),
             "vector": torch.ones(2, 4)} | change
    with pytest.raises(error, match=message):
        additive_attention(*edges.layouts, **given)
    if "q" not in change:
        with pytest.raises(error, match=message):
            dense_additive_attention(**given)
