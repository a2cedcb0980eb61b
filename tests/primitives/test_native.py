"""The attention operators along edges, native and not, against float64 sums over the edges, with their gradients."""

from __future__ import annotations

import pytest
import torch
from torch.autograd import gradcheck, gradgradcheck

from structconv.errors import ConfigError, ShapeError
from structconv.primitives.csr import sddmm, spmm
from structconv.primitives.native.affine import affine_attention
from structconv.primitives.native.bilinear import bilinear_attention
from structconv.primitives.native.product import spmm_add, write_spmm
from structconv.primitives.native.projected import projected_attention
from tests.primitives.edge_lists import Edges, random_edges, softmax_sum

F64 = torch.float64
SHAPES = [(4, 32, 32), (8, 8, 8), (1, 7, 5), (3, 20, 12), (2, 64, 64), (1, 300, 16), (5, 1, 1), (17, 8, 3),
          (1, 128, 40)]


def affine_reference(edges, source, target, x, slope=0.2, drop=None):
    scores = torch.nn.functional.leaky_relu(source[edges.source] + target[edges.target], slope).t()
    return softmax_sum(edges, scores, x, drop)


def bilinear_reference(edges, q, k, v, bias=None, scale=1.0, drop=None):
    scores = scale * (q[edges.target] * k[edges.source]).sum(-1).t()
    return softmax_sum(edges, scores if bias is None else scores + bias, v, drop)


def compare(got, expected, inputs, doubles, tol=2e-5):
    torch.testing.assert_close(got.double(), expected, rtol=tol, atol=tol)
    grad = torch.randn(got.shape, generator=torch.Generator().manual_seed(3)).to(got.dtype)
    found = torch.autograd.grad(got, inputs, grad)
    for a, b in zip(found, torch.autograd.grad(expected, doubles, grad.double()), strict=True):
        assert a.dtype == got.dtype
        torch.testing.assert_close(a.double(), b, rtol=tol, atol=5 * tol)


def leaves(*tensors, dtype=torch.float32):
    """Inputs in `dtype`, and the same numbers in float64."""
    inputs = [t.to(dtype).requires_grad_() for t in tensors]
    return inputs, [t.detach().double().requires_grad_() for t in inputs]


def affine_inputs(edges, heads, channels, dtype=torch.float32):
    torch.manual_seed(heads * channels)
    return leaves(torch.randn(edges.m, heads), torch.randn(edges.n, heads), torch.randn(edges.m, heads, channels),
                  dtype=dtype)


def projected_inputs(edges, heads, channels, dtype=torch.float32, apart=True):
    """x, the two vectors, and z and the bias where z is apart; without, the edges must be among the same entries."""
    torch.manual_seed(heads * channels)
    x, z = (torch.randn(rows, heads, channels) for rows in (edges.m, edges.n))
    vectors = [torch.randn(heads, channels) * channels**-0.5 for _ in range(2)]
    more = [z] if dtype == torch.bfloat16 else [z, torch.randn(heads, channels)]
    return leaves(x, *vectors, *(more if apart else []), dtype=dtype)


def projected_reference(edges, x, of_source, of_target, z=None, bias=None, slope=0.2, drop=None):
    source, target = ((rows * vector).sum(-1) for rows, vector in ((x, of_source), (x if z is None else z, of_target)))
    y = affine_reference(edges, source, target, x, slope, drop)
    return y if bias is None else y + bias


def bilinear_inputs(edges, heads, channels, depth, dtype=torch.float32, bias=True):
    torch.manual_seed(heads * channels)
    tensors = [torch.randn(edges.n, heads, depth), torch.randn(edges.m, heads, depth),
               torch.randn(edges.m, heads, channels)]
    return leaves(*tensors, *([torch.randn(heads, edges.e)] if bias else []), dtype=dtype)


@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize(("heads", "channels", "depth"), SHAPES)
def test_affine_attention(path, heads, channels, depth, index_dtype):
    edges = random_edges(dtype=index_dtype)
    inputs, doubles = affine_inputs(edges, heads, channels)
    for slope in (0.2, 1.0, 0.0):
        compare(affine_attention(*edges.layouts, *inputs, slope=slope), affine_reference(edges, *doubles, slope=slope),
                inputs, doubles)


@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize(("heads", "channels", "depth"), SHAPES)
def test_projected_attention(path, heads, channels, depth, index_dtype, apart):
    edges = random_edges(n=40 if apart else 60, dtype=index_dtype)
    inputs, doubles = projected_inputs(edges, heads, channels, apart=apart)
    for slope in (0.2, 1.0, 0.0):
        compare(projected_attention(*edges.layouts, *inputs, slope=slope),
                projected_reference(edges, *doubles, slope=slope), inputs, doubles)
    bias = inputs[1].detach().clone().requires_grad_()
    inputs, doubles = [*inputs[:3], bias], [*doubles[:3], bias.detach().double().requires_grad_()]
    if not apart:
        compare(projected_attention(*edges.layouts, *inputs[:3], bias=bias),
                projected_reference(edges, *doubles[:3], bias=doubles[3]), inputs, doubles)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("heads", "channels", "depth"), SHAPES)
def test_bilinear_attention(path, heads, channels, depth, bias):
    edges = random_edges()
    inputs, doubles = bilinear_inputs(edges, heads, channels, depth, bias=bias)
    scale = depth**-0.5
    compare(bilinear_attention(*edges.layouts, *inputs, scale=scale), bilinear_reference(edges, *doubles, scale=scale),
            inputs, doubles)


@pytest.mark.parametrize("batch_heads", [None, 2])
def test_dropout_is_that_of_the_hash(path, batch_heads):
    edges, seed = random_edges(), torch.tensor(-(2**62) + 12345)
    drop = (0.4, seed, batch_heads or 4)
    chosen = {"dropout": 0.4, "seed": seed, "batch_heads": batch_heads}
    inputs, doubles = affine_inputs(edges, 4, 16)
    compare(affine_attention(*edges.layouts, *inputs, **chosen), affine_reference(edges, *doubles, drop=drop), inputs,
            doubles)
    inputs, doubles = projected_inputs(edges, 4, 16)
    compare(projected_attention(*edges.layouts, *inputs, **chosen), projected_reference(edges, *doubles, drop=drop),
            inputs, doubles)
    inputs, doubles = bilinear_inputs(edges, 4, 16, 8)
    got = bilinear_attention(*edges.layouts, *inputs, **chosen)
    compare(got, bilinear_reference(edges, *doubles, drop=drop), inputs, doubles)


def test_bfloat16(path):
    edges = random_edges()
    inputs, doubles = affine_inputs(edges, 4, 20, torch.bfloat16)
    compare(affine_attention(*edges.layouts, *inputs), affine_reference(edges, *doubles), inputs, doubles, 0.02)
    inputs, doubles = projected_inputs(edges, 4, 20, torch.bfloat16)
    compare(projected_attention(*edges.layouts, *inputs), projected_reference(edges, *doubles), inputs, doubles, 0.02)
    inputs, doubles = bilinear_inputs(edges, 2, 20, 8, torch.bfloat16)
    compare(bilinear_attention(*edges.layouts, *inputs), bilinear_reference(edges, *doubles), inputs, doubles, 0.04)


def test_strides_are_read_as_they_are(path):
    edges = random_edges()
    (source, target, x), doubles = affine_inputs(edges, 4, 16)
    other = x.detach().transpose(0, 1).contiguous().transpose(0, 1).requires_grad_()
    assert not other.is_contiguous()
    compare(affine_attention(*edges.layouts, source, target, other), affine_reference(edges, *doubles),
            [source, target, other], doubles)
    affine_attention(*edges.layouts, source, target, other).sum().backward()  # a gradient without strides
    (x, *others), doubles = projected_inputs(edges, 4, 16)
    other = x.detach().transpose(0, 1).contiguous().transpose(0, 1).requires_grad_()
    compare(projected_attention(*edges.layouts, other, *others), projected_reference(edges, *doubles),
            [other, *others], doubles)
    fused = torch.randn(edges.m, 3, 4, 16)
    square = Edges(edges.source % 40, edges.target, 60, 60)
    q, k, v = fused.unbind(1)
    torch.testing.assert_close(bilinear_attention(*square.layouts, q, k, v),
                               bilinear_attention(*square.layouts, *(t.contiguous() for t in (q, k, v))))


def test_a_node_of_100_000_edges(path):
    e, n = 120_000, 50
    g = torch.Generator().manual_seed(1)
    source, target = torch.randint(300, (e,), generator=g), torch.randint(n, (e,), generator=g)
    target[:100_000] = 3
    edges = Edges(source, target, 300, n)
    (a, b, x), doubles = affine_inputs(edges, 2, 8)
    compare(affine_attention(*edges.layouts, a, b, x), affine_reference(edges, *doubles), (a, b, x), doubles, 1e-3)
    for square in (edges, Edges(source, target * 6, 300, 300)):
        inputs, doubles = projected_inputs(square, 2, 8, apart=square is edges)
        compare(projected_attention(*square.layouts, *inputs), projected_reference(square, *doubles), inputs, doubles,
                2e-3)
    inputs, doubles = bilinear_inputs(edges, 2, 8, 4, bias=False)
    compare(bilinear_attention(*edges.layouts, *inputs), bilinear_reference(edges, *doubles), inputs, doubles, 1e-3)


@pytest.mark.parametrize("channels", [32, 36])
def test_results_larger_than_the_caches(channels):
    edges = random_edges(70_000, 70_000, 300)
    inputs, doubles = projected_inputs(edges, 2, channels)
    compare(projected_attention(*edges.layouts, *inputs), projected_reference(edges, *doubles), inputs, doubles, 1e-4)


@pytest.mark.parametrize(("m", "n"), [(0, 4), (4, 0), (0, 0), (3, 4)])
def test_without_edges(path, m, n):
    edges = Edges(torch.zeros(0).long(), torch.zeros(0).long(), m, n)
    inputs, _ = affine_inputs(edges, 2, 8)
    y = affine_attention(*edges.layouts, *inputs)
    assert y.shape == (n, 2, 8) and not y.any()
    assert not any(g.any() for g in torch.autograd.grad(y.sum(), inputs))
    for apart in (True, False) if m == n else (True,):
        inputs, _ = projected_inputs(edges, 2, 8, apart=apart)
        y = projected_attention(*edges.layouts, *inputs)
        assert torch.equal(y, (inputs[4] if apart else torch.zeros(2, 8)).expand(n, 2, 8))
        *grads, last = torch.autograd.grad(y.sum(), inputs)
        assert not any(g.any() for g in grads) and bool((last == (n if apart else 0)).all())
    inputs, _ = bilinear_inputs(edges, 2, 8, 4)
    y = bilinear_attention(*edges.layouts, *inputs)
    assert y.shape == (n, 2, 8) and not y.any()
    assert not any(g.any() for g in torch.autograd.grad(y.sum(), inputs))


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_what_is_not_finite_stays_with_its_edges(path, bad):
    source, target = torch.tensor([0, 1, 1, 2]), torch.tensor([0, 1, 2, 2])
    edges = Edges(source, target, 5, 5)
    for make, call in ((affine_inputs, affine_attention), (bilinear_inputs, bilinear_attention)):
        inputs, _ = make(edges, 2, 16) if make is affine_inputs else make(edges, 2, 16, 8, bias=False)
        with torch.no_grad():
            for t in inputs:
                t[0], t[3], t[4] = bad, bad, bad  # edge 0 -> 0 alone sees them
        y = call(*edges.layouts, *inputs)
        assert y[1:].isfinite().all() and not y[3:].any() and not y[0].isfinite().any()
        grad = torch.ones_like(y)
        grad[3:] = bad
        grad[0] = 0
        for g in torch.autograd.grad(y, inputs, grad):
            assert g[1:].isfinite().all() and not g[3:].any()


@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_rows_without_edges_do_not_reach_the_vectors(path, bad, apart):
    edges = Edges(torch.tensor([0, 1, 1, 2]), torch.tensor([0, 1, 2, 2]), 5, 5)
    (x, *others), _ = projected_inputs(edges, 2, 16, apart=apart)
    others = others[:3]
    with torch.no_grad():
        for rows in (x, *others[2:]):
            rows[3:] = bad
    y = projected_attention(*edges.layouts, x, *others)
    assert y[:3].isfinite().all() and not y[3:].any()
    grad = torch.ones_like(y)
    grad[3:] = bad
    assert all(g.isfinite().all() for g in torch.autograd.grad(y, (x, *others), grad))


def test_scores_of_minus_infinity_weigh_nothing(path):
    edges = Edges(torch.tensor([0, 1, 0]), torch.tensor([0, 0, 1]), 2, 2)
    (a, b, x), _ = affine_inputs(edges, 2, 8)
    with torch.no_grad():
        a[0] = -torch.inf
    y = affine_attention(*edges.layouts, a, b, x)
    torch.testing.assert_close(y[0], x[1])
    assert not y[1].any()


def test_low_scores_behind_many_of_minus_infinity(path):
    """Where the first edges of a row weigh nothing, the largest score may still lie far below zero."""
    q, k, v = torch.ones(1, 1, 8), torch.zeros(300, 1, 8), torch.randn(300, 1, 8)
    edges = Edges(torch.arange(300), torch.zeros(300), 300, 1).layouts
    bias = torch.full((1, 300), -torch.inf)
    bias[:, 290:] = -88.8  # whose reciprocal of the exponential is infinite
    y = bilinear_attention(*edges, q, k, v, bias)
    torch.testing.assert_close(y[0], v[290:].mean(0))


def test_large_scores_do_not_overflow(path):
    edges = random_edges()
    inputs, doubles = affine_inputs(edges, 2, 8)
    with torch.no_grad():
        for t in (*inputs[:2], *doubles[:2]):
            t *= 1000
    compare(affine_attention(*edges.layouts, *inputs), affine_reference(edges, *doubles), inputs, doubles, 1e-3)


def test_the_numbers_do_not_depend_on_threads():
    edges = random_edges(2000, 2000, 60_000)
    inputs, _ = affine_inputs(edges, 4, 32)
    before, found = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            y = affine_attention(*edges.layouts, *inputs)
            found.append((y, *torch.autograd.grad(y.square().sum(), inputs)))
            for apart in (True, False):
                more, _ = projected_inputs(edges, 4, 32, apart=apart)
                y = projected_attention(*edges.layouts, *more)
                found[-1] += (y, *torch.autograd.grad(y.square().sum(), more))
    finally:
        torch.set_num_threads(before)
    for other in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], other, strict=True))


def test_second_derivatives():
    edges = random_edges(7, 6, 20)
    inputs = [t.double().detach().requires_grad_() for t in affine_inputs(edges, 2, 3)[0]]
    assert gradcheck(lambda *t: affine_attention(*edges.layouts, *t), inputs)
    assert gradgradcheck(lambda *t: affine_attention(*edges.layouts, *t), inputs)
    for square, apart in ((edges, True), (random_edges(7, 7, 20), False)):
        inputs = [t.double().detach().requires_grad_() for t in projected_inputs(square, 2, 3, apart=apart)[0]]
        layouts = square.layouts
        assert gradcheck(lambda *t, layouts=layouts: projected_attention(*layouts, *t), inputs)
        assert gradgradcheck(lambda *t, layouts=layouts: projected_attention(*layouts, *t), inputs)
    inputs = [t.double().detach().requires_grad_() for t in bilinear_inputs(edges, 2, 3, 2)[0]]
    assert gradcheck(lambda *t: bilinear_attention(*edges.layouts, *t), inputs)
    assert gradgradcheck(lambda *t: bilinear_attention(*edges.layouts, *t), inputs)


def test_second_derivatives_after_a_native_forward(path):
    edges = random_edges()
    inputs, doubles = affine_inputs(edges, 2, 8)

    def slope_of(call, tensors):
        grads = torch.autograd.grad(call(*tensors).square().sum(), tensors, create_graph=True)
        return torch.autograd.grad(sum(g.square().sum() for g in grads), tensors)

    found = slope_of(lambda *t: affine_attention(*edges.layouts, *t), inputs)
    expected = slope_of(lambda *t: affine_reference(edges, *t), doubles)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a.double(), b, rtol=1e-3, atol=1e-3)
    inputs, doubles = projected_inputs(edges, 2, 8)
    found = slope_of(lambda *t: projected_attention(*edges.layouts, *t), inputs)
    expected = slope_of(lambda *t: projected_reference(edges, *t), doubles)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a.double(), b, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("dtype", [torch.float32, F64])
def test_operator_contracts(dtype):
    edges = random_edges(9, 8, 30)
    flat, seed = [t for layout in edges.layouts for t in layout], torch.tensor(3)
    inputs = [t.to(dtype).detach().requires_grad_() for t in affine_inputs(edges, 2, 8)[0]]
    torch.library.opcheck(torch.ops.structconv.affine_attention.default, (*flat, *inputs, 0.2, 0.0, None, 2, True))
    torch.library.opcheck(torch.ops.structconv.affine_attention.default, (*flat, *inputs, 0.2, 0.3, seed, 2, True))
    projected = torch.ops.structconv.projected_attention.default
    for m, n in ((9, 8), (9, 9)):
        other = random_edges(m, n, 30)
        x, u, v, *more = (t.to(dtype).detach().requires_grad_() for t in projected_inputs(other, 2, 8, apart=m != n)[0])
        z, bias = more or [None, None]
        layouts = [t for layout in other.layouts for t in layout]
        torch.library.opcheck(projected, (*layouts, x, z, u, v, bias, 0.2, 0.3, seed, 2, True))
    inputs = [t.to(dtype).detach().requires_grad_() for t in bilinear_inputs(edges, 2, 8, 4)[0]]
    bilinear = torch.ops.structconv.bilinear_attention.default
    torch.library.opcheck(bilinear, (*flat, *inputs, 0.5, 0.3, seed, 2))
    torch.library.opcheck(bilinear, (*flat, *inputs[:3], None, 0.5, 0.0, None, 2))
    x, z = (torch.randn(3, rows, 4, dtype=dtype, requires_grad=True) for rows in (9, 8))
    values = torch.randn(3, 30, dtype=dtype, requires_grad=True)
    torch.library.opcheck(torch.ops.structconv.spmm_add.default, (*flat, values, x, z, 2.0, -1.0))
    torch.library.opcheck(torch.ops.structconv.spmm_add.default, (*flat, None, x, None, 2.0, -1.0))


def test_compiles_whole():
    torch._dynamo.reset()

    def layer(by_target, by_source, a, b, x, q):
        y = affine_attention(by_target, by_source, a, b, x)
        y = projected_attention(by_target, by_source, y, q[0], q[1])
        return bilinear_attention(by_target, by_source, q, x, y[: x.shape[0]], scale=0.5).square().sum()

    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager", dynamic=True)
    for m, e in ((20, 90), (31, 200)):
        edges = random_edges(m, m, e)
        inputs = [torch.randn(*s, requires_grad=True) for s in ((m, 2), (m, 2), (m, 2, 8), (m, 2, 8))]
        expected, got = layer(*edges.layouts, *inputs), compiled(*edges.layouts, *inputs)
        torch.testing.assert_close(got, expected)
        for a, b in zip(torch.autograd.grad(got, inputs), torch.autograd.grad(expected, inputs), strict=True):
            torch.testing.assert_close(a, b)


# -- sparse products ----------------------------------------------------------------------------------------------

@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("channels", [1, 7, 16, 24, 128, 300])
def test_products_equal_those_of_torch(monkeypatch, channels, dtype):
    edges = random_edges()
    tol = 1e-5 if dtype == torch.float32 else 0.02
    cases = [((None, (1,), False)), (((), ()), (), False), (((3,), (3,)), (), False), (((9,), ()), (), False),
             (((4,), (4,)), (), True), (((3,), (1,)), (), True)]
    for lead, _, sum_heads in cases:
        values_lead, x_lead = lead or (None, ())
        values = None if values_lead is None else torch.randn(*values_lead, edges.e).to(dtype)
        x = torch.randn(*x_lead, edges.m, channels).to(dtype)
        found = spmm(*edges.layouts, values, x, sum_heads=sum_heads)
        wide = spmm(*edges.layouts, None if values is None else values.double(), x.double(), sum_heads=sum_heads)
        torch.testing.assert_close(found.double(), wide, rtol=tol, atol=5 * tol)
    q, k = torch.randn(2, edges.n, channels).to(dtype), torch.randn(edges.m, channels).to(dtype)
    wide = sddmm(*edges.layouts, q.double(), k.double())
    torch.testing.assert_close(sddmm(*edges.layouts, q, k).double(), wide, rtol=tol, atol=5 * tol * channels**0.5)


@pytest.mark.parametrize("values_shape", [None, (), (1,), (3,)])
def test_product_with_addend(path, values_shape):
    edges = random_edges()
    values = [] if values_shape is None else [torch.randn(*values_shape, edges.e)]
    inputs, doubles = leaves(torch.randn(3, edges.m, 20), torch.randn(3, edges.n, 20), *values)

    def add(x, z, *values):
        return spmm_add(*edges.layouts, values[0] if values else None, x, z, alpha=2.0, beta=-0.5)

    def reference(x, z, *values):
        messages = x[:, edges.source] if not values else values[0].unsqueeze(-1) * x[:, edges.source]
        return 2 * messages.new_zeros(z.shape).index_add(1, edges.target, messages) - 0.5 * z

    compare(add(*inputs), reference(*doubles), inputs, doubles)
    small = [t.detach()[..., :2].requires_grad_() if i < 2 else t for i, t in enumerate(doubles)]
    assert gradgradcheck(add, small, fast_mode=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("channels", [3, 16, 100, 300])
def test_product_into_given_memory(path, channels, weighted, dtype):
    edges = random_edges()
    values = torch.randn(edges.e).to(dtype) if weighted else None
    x, y = torch.randn(edges.m, channels).to(dtype), torch.full((edges.n, channels), torch.nan, dtype=dtype)
    at = y.data_ptr()
    write_spmm(y, *edges.layouts, values, x)
    expected = spmm(*edges.layouts, values, x)
    torch.testing.assert_close(y, expected, rtol=0, atol=0)
    write_spmm(y, *edges.layouts, values, x, alpha=2.0, beta=-0.5)
    torch.testing.assert_close(y, spmm_add(*edges.layouts, values, x, expected, alpha=2.0, beta=-0.5))
    assert y.data_ptr() == at and y.isfinite().all()


# -- what is refused ----------------------------------------------------------------------------------------------

@pytest.mark.parametrize(("change", "error", "message"), [
    ({"x": torch.ones(59, 2, 8)}, ShapeError, "M=60"), ({"target": torch.ones(60, 2)}, ShapeError, "target"),
    ({"slope": -0.1}, ConfigError, "slope"), ({"dropout": 1.0}, ConfigError, "dropout"),
    ({"dropout": 0.5}, ConfigError, "seed"),
])
def test_affine_refuses(change, error, message):
    edges = random_edges()
    given = {"source": torch.ones(60, 2), "target": torch.ones(40, 2), "x": torch.ones(60, 2, 8)} | change
    with pytest.raises(error, match=message):
        affine_attention(*edges.layouts, **given)


@pytest.mark.parametrize(("change", "error", "message"), [
    ({"x": torch.ones(59, 2, 8)}, ShapeError, "M=60"), ({"z": torch.ones(41, 2, 8)}, ShapeError, "N=40"),
    ({"z": None}, ShapeError, "x must have shape .N=40"), ({"z": torch.ones(40, 2, 8).double()}, ShapeError, "dtype"),
    ({"of_source": torch.ones(2, 7)}, ShapeError, "of_source"), ({"of_target": torch.ones(8)}, ShapeError, "of_target"),
    ({"bias": torch.ones(8)}, ShapeError, "bias"),
    ({"x": torch.ones(60, 2, 8).bfloat16(), "z": torch.ones(40, 2, 8).bfloat16(), "bias": torch.ones(2, 8)},
     ConfigError, "16 bits"),
    ({"slope": -0.1}, ConfigError, "slope"), ({"dropout": 0.5}, ConfigError, "seed"),
])
def test_projected_refuses(change, error, message):
    edges = random_edges()
    given = {"x": torch.ones(60, 2, 8), "of_source": torch.ones(2, 8), "of_target": torch.ones(2, 8),
             "z": torch.ones(40, 2, 8)} | change
    with pytest.raises(error, match=message):
        projected_attention(*edges.layouts, **given)


@pytest.mark.parametrize(("change", "message"), [
    ({"q": torch.ones(60, 2, 4)}, "N=40"), ({"k": torch.ones(60, 2, 5)}, "k must"),
    ({"v": torch.ones(60, 3, 8)}, "v must"),
    ({"bias": torch.ones(2, 399)}, "E=400"), ({"v": torch.ones(60, 2, 8).double()}, "dtype"),
])
def test_bilinear_refuses(change, message):
    edges = random_edges()
    given = {"q": torch.ones(40, 2, 4), "k": torch.ones(60, 2, 4), "v": torch.ones(60, 2, 8)} | change
    with pytest.raises(ShapeError, match=message):
        bilinear_attention(*edges.layouts, **given)


def test_spmm_add_refuses():
    edges = random_edges()
    for values, x, z in ((None, torch.ones(59, 2), None), (torch.ones(399), torch.ones(60, 2), None),
                         (None, torch.ones(60, 2), torch.ones(60, 2))):
        with pytest.raises(ShapeError):
            spmm_add(*edges.layouts, values, x, z)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("lead", [(), (3,)])
def test_repeated_products_with_the_same_values_agree_to_the_bit(lead, dtype):
    """From the second call on the values are read in the order of the slots."""
    edges = random_edges(300, 200, 1 << 14)
    values, x = torch.randn(*lead, edges.e).to(dtype), torch.randn(300, 20).to(dtype)

    def product():
        return spmm(*edges.layouts, values, x), spmm(*reversed(edges.layouts), values, x[:200])

    first = product()
    for _ in range(2):
        assert all(torch.equal(a, b) for a, b in zip(product(), first, strict=True))
    values.mul_(2)
    assert all(torch.equal(a, 2 * b) for a, b in zip(product(), first, strict=True))
