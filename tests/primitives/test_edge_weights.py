"""The weights of attention along edges, native and not, against float64 softmaxes, and against what is applied."""

from __future__ import annotations

import pytest
import torch
from torch.autograd import gradcheck, gradgradcheck

from structconv.errors import ConfigError, ShapeError
from structconv.primitives.hashing import hash_uniform
from structconv.primitives.native import core
from structconv.primitives.native.additive import activate, additive_attention
from structconv.primitives.native.affine import affine_attention
from structconv.primitives.native.bilinear import bilinear_attention
from structconv.primitives.native.weights import additive_weights, affine_weights, bilinear_weights
from tests.primitives.edge_lists import Edges, edge_softmax, random_edges

F64 = torch.float64
M, N, E = 60, 40, 500
SIZES = [(4, 32), (8, 8), (1, 7), (3, 20), (2, 64), (1, 300), (5, 1), (17, 8)]
ADDITIVE = [("leaky_relu", 0.2), ("leaky_relu", 0.0), ("tanh", 0.0), ("sigmoid", 0.0)]


def scores_of(name, edges, q, k, more, options):
    """(K, E), edge by edge."""
    source, target = edges.source, edges.target
    if name == "affine":
        return torch.nn.functional.leaky_relu(k[source] + q[target], options["slope"]).t()
    if name == "bilinear":
        found = options["scale"] * (q[target] * k[source]).sum(-1).t()
        return found if more is None else found + more
    return (activate(q[target] + k[source], options["activation"], options["slope"]) * more).sum(-1).t()


def problems(heads, depth, m=M, n=N, e=E):
    """Names, what computes them, shapes of q, k and a third operand, and options."""
    three = (n, heads, depth), (m, heads, depth)
    yield from (("affine", lambda layouts, q, k, more, **o: affine_weights(*layouts, k, q, **o),
                 (n, heads), (m, heads), None, {"slope": slope}) for slope in (0.2, 1.0, 0.0))
    yield from (("bilinear", lambda layouts, q, k, more, **o: bilinear_weights(*layouts, q, k, more, **o),
                 *three, bias, {"scale": 0.5}) for bias in (None, (heads, e)))
    yield from (("additive", lambda layouts, q, k, more, **o: additive_weights(*layouts, q, k, more, **o),
                 *three, (heads, depth), {"activation": name, "slope": slope}) for name, slope in ADDITIVE)


def operands(shapes, dtype):
    """In `dtype`, and the same numbers in float64."""
    inputs = [None if shape is None else torch.randn(shape).to(dtype).requires_grad_() for shape in shapes]
    return inputs, [None if t is None else t.detach().double().requires_grad_() for t in inputs]


def present(tensors):
    return [t for t in tensors if t is not None]


@pytest.mark.parametrize(("dtype", "tol"), [(torch.float32, 2e-5), (torch.bfloat16, 2e-2)])
@pytest.mark.parametrize("index", [torch.int32, torch.int64])
@pytest.mark.parametrize(("heads", "depth"), SIZES)
def test_values_and_gradients(path, heads, depth, index, dtype, tol):
    edges = random_edges(M, N, E, index)
    for name, fn, *shapes, options in problems(heads, depth):
        inputs, doubles = operands(shapes, dtype)
        got = fn(edges.layouts, *inputs, **options)
        expected = edge_softmax(edges, scores_of(name, edges, *doubles, options))
        assert got.shape == (heads, E)
        assert got.dtype == torch.float32
        torch.testing.assert_close(got.double(), expected, rtol=tol, atol=tol)
        cotangent = torch.randn(got.shape)
        found = torch.autograd.grad(got, present(inputs), cotangent)
        for a, b in zip(found, torch.autograd.grad(expected, present(doubles), cotangent.double()), strict=True):
            assert a.dtype == dtype
            torch.testing.assert_close(a.double(), b, rtol=10 * tol, atol=10 * tol * max(1.0, float(b.abs().max())))


@pytest.mark.parametrize("batch_heads", [None, 2])
def test_they_are_what_is_applied(path, batch_heads):
    """With the dropout of the operators: the same weights fall."""
    edges = random_edges(M, N, E)
    source, target, layouts = edges.source, edges.target, edges.layouts
    drop = {"dropout": 0.4, "seed": torch.tensor(7), "batch_heads": batch_heads}
    q, k, x, v = (torch.randn(shape) for shape in ((N, 4, 8), (M, 4, 8), (M, 4, 5), (4, 8)))
    for weights, y in (
            (affine_weights(*layouts, k[..., 0], q[..., 0], **drop),
             affine_attention(*layouts, k[..., 0], q[..., 0], x, **drop)),
            (bilinear_weights(*layouts, q, k, scale=0.3, **drop),
             bilinear_attention(*layouts, q, k, x, scale=0.3, **drop)),
            (additive_weights(*layouts, q, k, v, **drop), additive_attention(*layouts, q, k, x, v, **drop))):
        messages = weights.t().unsqueeze(-1) * x[source]
        torch.testing.assert_close(torch.zeros_like(y).index_add(0, target, messages), y, rtol=1e-5, atol=1e-5)
        head, every = torch.arange(4).unsqueeze(-1), batch_heads or 4
        fallen = hash_uniform(drop["seed"], head // every, head % every, source * N + target) < 0.4
        assert torch.equal(weights == 0, fallen)


def test_a_row_of_many_chunks(path):
    e = 3000
    edges = Edges(torch.arange(e) % M, torch.zeros(e, dtype=torch.int64), M, 1)
    for name, fn, *shapes, options in problems(3, 8, M, 1, e):
        inputs, doubles = operands(shapes, torch.float32)
        expected = edge_softmax(edges, scores_of(name, edges, *doubles, options))
        torch.testing.assert_close(fn(edges.layouts, *inputs, **options).double(), expected, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize(("m", "n"), [(0, 4), (4, 0), (0, 0), (3, 4)])
def test_without_edges(path, m, n):
    edges = Edges(torch.zeros(0).long(), torch.zeros(0).long(), m, n)
    for _, fn, *shapes, options in problems(2, 3, m, n, 0):
        inputs, _ = operands(shapes, torch.float32)
        weights = fn(edges.layouts, *inputs, **options)
        assert weights.shape == (2, 0)
        assert all(not g.any() for g in torch.autograd.grad(weights.sum(), present(inputs)))


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_what_is_not_finite_stays_with_its_outputs(path, bad):
    edges = random_edges(M, N, E)
    source, target = edges.source, edges.target
    for _, fn, *shapes, options in problems(2, 8):
        inputs = [None if t is None else t.detach() for t in operands(shapes, torch.float32)[0]]
        clean = fn(edges.layouts, *inputs, **options)
        inputs[1][int(source[-1])] = bad
        reached = torch.isin(target, target[source == source[-1]])
        dirty = fn(edges.layouts, *inputs, **options)
        torch.testing.assert_close(dirty[:, ~reached], clean[:, ~reached], rtol=0, atol=0)


def test_scores_of_minus_infinity_weigh_nothing(path):
    edges = random_edges(M, N, E)
    source, target, layouts = edges.source, edges.target, edges.layouts
    terms = torch.randn(M, 2), torch.randn(N, 2)
    terms[0][source[0]] = -torch.inf
    terms[1][3] = -torch.inf
    weights = affine_weights(*layouts, *terms)
    assert not weights[:, (source == source[0]) | (target == 3)].any()
    assert weights.isfinite().all()


def test_the_numbers_do_not_depend_on_threads():
    if core() is None:
        pytest.skip("the native core cannot be built here")
    layouts = random_edges(3000, 3000, 60_000).layouts
    q, k, v = torch.randn(3000, 4, 32), torch.randn(3000, 4, 32), torch.randn(4, 32)
    found, before = [], torch.get_num_threads()
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            found.append((affine_weights(*layouts, k[..., 0], q[..., 0]), bilinear_weights(*layouts, q, k),
                          additive_weights(*layouts, q, k, v)))
    finally:
        torch.set_num_threads(before)
    for other in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], other, strict=True))


def test_derivatives_of_second_order():
    edges = random_edges(7, 6, 20)
    for _, fn, *shapes, options in problems(2, 3, 7, 6, 20):
        inputs = operands(shapes, F64)[1]

        def weights(*given, fn=fn, options=options, every=inputs):
            given = iter(given)
            return fn(edges.layouts, *(None if t is None else next(given) for t in every), **options)

        assert gradcheck(weights, present(inputs))
        assert gradgradcheck(weights, present(inputs))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, F64])
def test_operator_contracts(dtype):
    layouts = random_edges(9, 8, 30).layouts
    flat, drop = [t for layout in layouts for t in layout], (0.3, torch.tensor(3), 2)
    q, k, v, bias = (torch.randn(s).to(dtype).requires_grad_() for s in ((8, 2, 4), (9, 2, 4), (2, 4), (2, 30)))
    ops = torch.ops.structconv
    terms = [t[..., 0].detach().requires_grad_() for t in (k, q)]
    torch.library.opcheck(ops.affine_weights.default, (*flat, *terms, 0.2, *drop))
    torch.library.opcheck(ops.bilinear_weights.default, (*flat, q, k, bias, 0.5, *drop))
    torch.library.opcheck(ops.bilinear_weights.default, (*flat, q, k, None, 0.5, 0.0, None, 2))
    torch.library.opcheck(ops.additive_weights.default, (*flat, q, k, v, "tanh", 0.0, *drop))


def test_compiles_whole():
    torch._dynamo.reset()

    def layer(by_target, by_source, q, k, vector):
        found = (affine_weights(by_target, by_source, k[..., 0], q[..., 0]),
                 bilinear_weights(by_target, by_source, q, k), additive_weights(by_target, by_source, q, k, vector))
        return sum(w.square().sum() for w in found)

    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager", dynamic=True)
    for m, e in ((20, 90), (31, 200)):
        layouts = random_edges(m, m, e).layouts
        inputs = [torch.randn(*s, requires_grad=True) for s in ((m, 2, 8), (m, 2, 8), (2, 8))]
        expected, got = layer(*layouts, *inputs), compiled(*layouts, *inputs)
        torch.testing.assert_close(got, expected)
        torch.testing.assert_close(torch.autograd.grad(got, inputs), torch.autograd.grad(expected, inputs))


@pytest.mark.parametrize(("call", "error", "message"), [
    (lambda e, q, k, v: affine_weights(*e, q[..., 0], k[..., 0]), ShapeError, "source must have shape"),
    (lambda e, q, k, v: affine_weights(*e, k[..., 0], q[..., 0].double()), ShapeError, "target must have"),
    (lambda e, q, k, v: affine_weights(*e, k[..., 0], q[..., 0], slope=-1.0), ConfigError, "slope"),
    (lambda e, q, k, v: bilinear_weights(*e, k, q), ShapeError, "q must have shape"),
    (lambda e, q, k, v: bilinear_weights(*e, q, k[..., :2]), ShapeError, "k must have shape"),
    (lambda e, q, k, v: bilinear_weights(*e, q, k, v), ShapeError, "bias must have shape"),
    (lambda e, q, k, v: bilinear_weights(*e, q, k, dropout=0.5), ConfigError, "seed"),
    (lambda e, q, k, v: additive_weights(*e, q, k, v[:1]), ShapeError, "vector must have shape"),
    (lambda e, q, k, v: additive_weights(*e, q, k, v, activation="gelu"), ConfigError, "activation"),
])
def test_refuses(call, error, message):
    with pytest.raises(error, match=message):
        call(random_edges(M, N, E).layouts, torch.randn(N, 2, 4), torch.randn(M, 2, 4), torch.randn(2, 4))
