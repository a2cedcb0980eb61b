"""Every operator along edges, native and not: the laws of a sum over edges, and what is special to some of them."""

import pytest
import torch

from structconv.errors import ConfigError, ShapeError
from structconv.primitives.csr import spmm, spmm_add, write_spmm
from structconv.primitives.dense_additive import dense_additive_attention
from structconv.primitives.edge_attention import (
    additive_attention,
    additive_weights,
    affine_attention,
    affine_weights,
    bilinear_attention,
    bilinear_weights,
    packed_attention,
    projected_attention,
)
from structconv.primitives.native import core
from tests.primitives.edge_operators import OPERATORS, SHAPES, Edges, random_edges
from tests.support.drawn import EVERY, drawn
from tests.support.threads import on_threads

F32, F64 = torch.float32, torch.float64
DROPPED = [name for name, operator in OPERATORS.items() if operator.drops]
#: Each operator with a sixth of the shapes, its neighbors with the others; `make test-every`: with all of them.
CASES = [(name, shape) for number, name in enumerate(OPERATORS) for at, shape in enumerate(SHAPES)
         if EVERY or at % 6 == number % 6]
each = pytest.mark.parametrize("name", OPERATORS)
half = pytest.mark.parametrize("name", drawn(OPERATORS, 2))
other_half = pytest.mark.parametrize("name", list(OPERATORS)[1::2] if not EVERY else list(OPERATORS))


def doubles(tensors):
    return [t.detach().double().requires_grad_(t.requires_grad) for t in tensors]


def wanting(tensors):
    return [t for t in tensors if t.requires_grad]


def gradients(y, tensors):
    if not y.requires_grad:  # there was nothing to sum
        return [torch.zeros_like(t) for t in wanting(tensors)]
    grad = torch.randn(y.shape, generator=torch.Generator().manual_seed(3), dtype=F64).to(y.dtype)
    return torch.autograd.grad(y, wanting(tensors), grad, materialize_grads=True)


def close(actual, exact, tol, relative=None):
    """To `tol`, relative to the largest number; and `relative` to each."""
    largest = max(1.0, float(exact.detach().abs().max())) if exact.numel() else 1.0
    torch.testing.assert_close(actual.double(), exact, rtol=relative or tol, atol=tol * largest)


def check(operator, edges, inputs, tol=2e-5, drop=None, **options):
    """The operator against its reference in float64, see `compare`."""
    exact = doubles(inputs)
    reference = operator.reference(edges, *exact) if drop is None else operator.reference(edges, *exact, drop=drop)
    compare(operator.call(edges, *inputs, **options), reference, inputs, exact, tol)


def compare(got, expected, inputs, exact, tol=2e-5):
    """Values, and gradients in the dtypes of the inputs."""
    close(got, expected, tol)
    for a, b, t in zip(gradients(got, inputs), gradients(expected, exact), wanting(inputs), strict=True):
        assert a.dtype == t.dtype
        close(a, b, 5 * tol, tol)


@pytest.mark.parametrize(("name", "shape"), CASES)
def test_values_and_gradients_are_those_of_the_sums_over_the_edges(path, name, shape):
    operator = OPERATORS[name]
    edges = operator.edges(*((60, 40) if shape[0] % 2 else (40, 60)), dtype=(torch.int32, torch.int64)[shape[1] % 2])
    check(operator, edges, operator.tensors(edges, *shape, F32))


@half
def test_bfloat16_is_summed_in_float32(path, name):
    operator = OPERATORS[name]
    dtype = torch.bfloat16 if 16 in operator.bits else F32
    edges = operator.edges()
    inputs = operator.tensors(edges, 3, 20, 12, dtype)
    assert operator.call(edges, *inputs).dtype == (F32 if name.startswith("weights") else dtype)
    check(operator, edges, inputs, 0.03 if dtype is torch.bfloat16 else 2e-5)


@pytest.mark.parametrize("name", drawn(DROPPED, 2))
def test_dropout_is_that_of_the_hash(path, name):
    operator, seed = OPERATORS[name], torch.tensor(-(2**62) + 12345)
    edges = operator.edges()
    for heads in (None, 2):
        check(operator, edges, operator.tensors(edges, 4, 16, 8, F32), drop=(0.4, seed, heads or 4), dropout=0.4,
              seed=seed, batch_heads=heads)


@other_half
def test_strides_are_read_as_they_are(path, name):
    """Rows that lie apart, or are one and the same; the gradient of a sum has no strides."""
    operator = OPERATORS[name]
    edges = operator.edges()
    inputs = operator.tensors(edges, 4, 16, 8, F32)
    grads = torch.autograd.grad(operator.call(edges, *inputs).sum(), wanting(inputs))
    for turn in (lambda t: t.detach().mT.contiguous().mT, lambda t: torch.stack([t.detach()] * 2, -1)[..., 0],
                 lambda t: t.detach().unsqueeze(-2).expand(*t.shape[:-1], 2, t.shape[-1]).flatten(-3, -2)[..., ::2, :]):
        turned = [turn(t).requires_grad_(t.requires_grad) if t.dim() > 1 else t for t in inputs]
        y = operator.call(edges, *turned)
        torch.testing.assert_close(y, operator.call(edges, *inputs), rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(torch.autograd.grad(y.sum(), wanting(turned)), grads, rtol=1e-4, atol=1e-4)


def hub():
    """One output of 20,000 edges, one input of 6,000, and 2,000 entries with few."""
    g = torch.Generator().manual_seed(1)
    source, target = torch.randint(2000, (40_000,), generator=g), torch.randint(2000, (40_000,), generator=g)
    target[:20_000], source[18_000:24_000] = 7, 11
    return Edges(source, target, 2000, 2000)


@half
def test_a_hub_has_the_same_numbers_on_any_number_of_threads(name):
    if core() is None:
        pytest.skip("the native core cannot be built here")
    operator = OPERATORS[name]
    edges = hub() if operator.pairs in ("listed", "square") else operator.edges(400, 300)
    inputs = operator.tensors(edges, 2, 16, 8, F32)
    if name.startswith("recurrence"):
        inputs = [inputs[0] / 50, inputs[1]]  # of a matrix with a row of 20,000
    actual = on_threads(lambda: ((y := operator.call(edges, *inputs)), *gradients(y, inputs)), (1, 3))
    if name not in ("relational", "conditioned"):  # whose products of rows are torch's
        first, second = (one[:1] if name.startswith("weights") else one for one in actual)  # gradients by torch too
        assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    exact = doubles(inputs)
    y = operator.call(edges, *exact)  # by torch's operators
    for a, b in zip(actual[0], (y, *gradients(y, exact)), strict=True):
        close(a, b, 1e-4, 2e-4)


@each
@pytest.mark.parametrize(("m", "n"), drawn([(0, 4), (3, 4), (4, 0), (0, 0)], 2))
def test_without_edges_there_are_zeros(path, name, m, n):
    operator = OPERATORS[name]
    if operator.pairs not in ("listed", "square") and m and n:
        pytest.skip("there is an edge")
    n = m if operator.pairs == "square" else n
    edges = Edges(torch.zeros(0), torch.zeros(0), m, n)
    check(operator, edges, operator.tensors(edges, 2, 8, 4, F32))


@pytest.mark.parametrize("bad", drawn([torch.nan, torch.inf, -torch.inf], 3))
@pytest.mark.parametrize("name", [name for name in OPERATORS if OPERATORS[name].pairs in ("listed", "square")])
def test_what_is_not_finite_stays_with_its_neighbors(path, name, bad):
    """Two components, and entries without edges: bad rows in the second component and in these leave the first."""
    operator = OPERATORS[name]
    edges = Edges(*torch.cat([torch.randint(30, (2, 200)), torch.randint(30, 60, (2, 220))], 1), 70, 70)
    clean = operator.tensors(edges, 3, 20, 12, F32)
    dirty = [t.detach().clone() for t in clean]
    of_entries = [[axis for axis, length in enumerate(t.shape) if length == 70] for t in dirty]
    for t, axes in zip(dirty, of_entries, strict=True):
        for axis in axes:
            t.index_fill_(axis, torch.arange(45, 70), bad)
    dirty = [t.requires_grad_(c.requires_grad) for t, c in zip(dirty, clean, strict=True)]
    results = []
    for tensors, outside in ((clean, 0.0), (dirty, 0.0 if name in ("relational", "conditioned", "sddmm") else bad)):
        y = operator.call(edges, *tensors)
        grad = torch.randn(y.shape, generator=torch.Generator().manual_seed(3))
        for axis, length in enumerate(y.shape):
            grad = grad.index_fill(axis, torch.arange(30, 70), outside) if length == 70 else grad
            grad = grad.index_fill(axis, torch.arange(200, 420), 0.0) if length == 420 else grad
        results.append((y, *torch.autograd.grad(y, wanting(tensors), grad)))
    for a, b in zip(*results, strict=True):
        for axis, length in enumerate(b.shape):
            if length in (70, 420):
                part = 30 if length == 70 else 200
                torch.testing.assert_close(a.narrow(axis, 0, part), b.narrow(axis, 0, part))
    assert "weights" in name or not results[1][0].isfinite().all()


@half
def test_second_derivatives_after_a_native_forward(path, name):
    operator = OPERATORS[name]
    edges = operator.edges()
    inputs = operator.tensors(edges, 2, 8, 4, F32)
    exact = doubles(inputs)
    actual = []
    for run, tensors in ((operator.call, inputs), (operator.reference, exact)):
        first = torch.autograd.grad(run(edges, *tensors).square().sum(), wanting(tensors), create_graph=True)
        actual.append(torch.autograd.grad(sum(g.square().sum() for g in first), wanting(tensors)))
    for a, b in zip(*actual, strict=True):
        close(a, b, 1e-4, 1e-3)


@pytest.mark.parametrize("name", drawn(["projected", "causal pairs, tanh", "weights, tanh"], 3))
def test_one_program_for_graphs_of_any_size(name):
    torch._dynamo.reset()
    operator = OPERATORS[name]

    def layer(by_target, by_source, m, n, *tensors):
        edges = Edges.__new__(Edges)
        edges.layouts, edges.m, edges.n = (by_target, by_source), m, n
        return operator.call(edges, *tensors).square().sum()

    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager", dynamic=True)
    for m, e in ((20, 90), (31, 200)):
        edges = operator.edges(m, m + 2, e)
        inputs = operator.tensors(edges, 2, 8, 4, F32)
        results = [(y, *torch.autograd.grad(y, inputs)) for y in (
            run(*edges.layouts, edges.m, edges.n, *inputs) for run in (layer, compiled))]
        torch.testing.assert_close(*results)


# -- attention ----------------------------------------------------------------------------------------------------

def test_scores_of_minus_infinity_weigh_nothing(path):
    edges = Edges(torch.tensor([0, 1, 0]), torch.tensor([0, 0, 1]), 2, 2)
    source, target, x = torch.randn(2, 2), torch.randn(2, 2), torch.randn(2, 2, 8)
    source[0] = -torch.inf
    y = affine_attention(*edges.layouts, source, target, x)
    torch.testing.assert_close(y[0], x[1])
    assert not y[1].any()
    assert affine_weights(*edges.layouts, source, target).tolist() == [[0, 1, 0]] * 2


def test_low_scores_behind_many_of_minus_infinity(path):
    """Where the first edges of a row weigh nothing, the largest score may still lie far below zero."""
    q, k, v = torch.ones(1, 1, 8), torch.zeros(300, 1, 8), torch.randn(300, 1, 8)
    edges = Edges(torch.arange(300), torch.zeros(300), 300, 1).layouts
    bias = torch.full((1, 300), -torch.inf)
    bias[:, 290:] = -88.8  # whose reciprocal of the exponential is infinite
    torch.testing.assert_close(bilinear_attention(*edges, q, k, v, bias)[0], v[290:].mean(0))


def test_large_scores_do_not_overflow(path):
    operator, edges = OPERATORS["affine"], random_edges()
    inputs = operator.tensors(edges, 2, 8, 4, F32)
    with torch.no_grad():
        for t in inputs[:2]:
            t *= 1000
    check(operator, edges, inputs, 1e-3)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize("name", ["projected", "projected, one side"])
def test_rows_without_edges_do_not_reach_the_vectors(path, bad, name):
    operator, edges = OPERATORS[name], Edges(torch.tensor([0, 1, 1, 2]), torch.tensor([0, 1, 2, 2]), 5, 5)
    x, u, v, *z = operator.tensors(edges, 2, 16, 8, F32)
    with torch.no_grad():
        for rows in (x, *z):
            rows[3:] = bad
    y = operator.call(edges, x, u, v, *z)
    assert y[:3].isfinite().all() and not y[3:].any()
    grad = torch.ones_like(y)
    grad[3:] = bad
    assert all(g.isfinite().all() for g in torch.autograd.grad(y, (x, u, v, *z), grad))


def test_results_larger_than_the_caches():
    operator, edges = OPERATORS["projected, bias"], random_edges(70_000, 70_000, 300)
    check(operator, edges, operator.tensors(edges, 2, 32, 4, F32), 1e-4)


@pytest.mark.parametrize("scale", [1e-3, 15.0, 200.0])
@pytest.mark.parametrize("name", ["additive, tanh", "additive, sigmoid", "every pair, tanh", "every pair, sigmoid",
                                  "few outputs, tanh"])
def test_saturated_and_cancelling_sums(path, name, scale):
    """Numbers of which the factors would overflow, and sums of large numbers that nearly cancel."""
    operator = OPERATORS[name]
    edges = operator.edges(40, 40)
    inputs = operator.tensors(edges, 2, 8, 16, F32)
    with torch.no_grad():
        inputs[0] *= scale
        inputs[1] *= scale
        half = len(inputs[0]) // 2
        inputs[0][:half] = 1e-2 * torch.randn(half, 2, 16) - inputs[1][:half]
    check(operator, edges, inputs, 2e-5 + 1e-6 * scale)


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


def test_values_that_are_the_keys(path):
    """GATv2's layout: heads in one row, values and keys one tensor, whose gradients add up."""
    operator, edges = OPERATORS["additive"], random_edges(60, 60)
    fused, vector = torch.randn(60, 2, 4, 16, requires_grad=True), torch.randn(4, 16)
    exact = fused.detach().double().requires_grad_()
    (q, k), (q64, k64) = fused.unbind(1), exact.unbind(1)
    compare(operator.call(edges, q, k, k, vector), operator.reference(edges, q64, k64, k64, vector.double()), [fused],
            [exact])


@pytest.mark.parametrize("activation", ["tanh", "leaky_relu"])
def test_a_causal_mask_keeps_later_entries_out(activation):
    if core() is None:
        pytest.skip("the native core cannot be built here")
    operator = OPERATORS["causal pairs, tanh"]
    q, k, x, vector = operator.tensors(operator.edges(30, 30), 2, 16, 8, F32)
    clean = dense_additive_attention(q, k, x, vector, activation=activation, causal=True)
    with torch.no_grad():
        k[20:], x[20:] = torch.nan, torch.nan
    y = dense_additive_attention(q, k, x, vector, activation=activation, causal=True)
    torch.testing.assert_close(y[:20], clean[:20])
    assert y[20:].isnan().all()


# -- products -----------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("dtype", [F32, torch.bfloat16, F64])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("channels", [3, 16, 300])
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


@pytest.mark.parametrize("dtype", [F32, torch.bfloat16])
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


# -- what is refused ----------------------------------------------------------------------------------------------

def ones(*shape):
    return torch.ones(shape)


#: Arguments of right calls with 60 inputs, 40 outputs and 400 edges, and what is wrong with others.
REFUSED = {
    affine_attention: ({"source": ones(60, 2), "target": ones(40, 2), "x": ones(60, 2, 8)}, [
        ({"x": ones(59, 2, 8)}, "M=60"), ({"target": ones(60, 2)}, "target"), ({"slope": -0.1}, "slope"),
        ({"dropout": 1.0}, "dropout"), ({"dropout": 0.5}, "seed")]),
    projected_attention: ({"x": ones(60, 2, 8), "of_source": ones(2, 8), "of_target": ones(2, 8),
                           "z": ones(40, 2, 8)}, [
        ({"x": ones(59, 2, 8)}, "M=60"), ({"z": ones(41, 2, 8)}, "N=40"), ({"z": None}, "x must have shape .N=40"),
        ({"z": ones(40, 2, 8).double()}, "dtype"), ({"of_source": ones(2, 7)}, "of_source"),
        ({"of_target": ones(8)}, "of_target"), ({"bias": ones(8)}, "bias"), ({"slope": -0.1}, "slope"),
        ({"dropout": 0.5}, "seed"),
        ({"x": ones(60, 2, 8).bfloat16(), "z": ones(40, 2, 8).bfloat16(), "bias": ones(2, 8)}, "16 bits")]),
    bilinear_attention: ({"q": ones(40, 2, 4), "k": ones(60, 2, 4), "v": ones(60, 2, 8)}, [
        ({"q": ones(60, 2, 4)}, "N=40"), ({"k": ones(60, 2, 5)}, "k must"), ({"v": ones(60, 3, 8)}, "v must"),
        ({"bias": ones(2, 399)}, "E=400"), ({"v": ones(60, 2, 8).double()}, "dtype")]),
    packed_attention: ({"table": ones(60, 24), "q": ones(40, 2, 4), "heads": 2, "depth": 4}, [
        ({"table": ones(59, 24)}, "M=60"), ({"table": ones(60, 7)}, "table"), ({"q": None}, "inputs are not"),
        ({"q": ones(40, 2, 5)}, "q must"), ({"q": ones(40, 2, 4).double()}, "dtype"),
        ({"bias": ones(2, 399)}, "E=400")]),
    additive_attention: ({"q": ones(40, 2, 4), "k": ones(60, 2, 4), "x": ones(60, 2, 8), "vector": ones(2, 4)}, [
        ({"q": ones(60, 2, 4)}, "N=40"), ({"k": ones(60, 2, 5)}, "k must"), ({"x": ones(60, 3, 8)}, "x must"),
        ({"vector": ones(2, 5)}, "vector must"), ({"x": ones(60, 2, 8).double()}, "dtype"),
        ({"activation": "gelu"}, "activation"), ({"dropout": 0.5}, "seed")]),
    affine_weights: ({"source": ones(60, 2), "target": ones(40, 2)}, [
        ({"source": ones(40, 2)}, "source must have shape"), ({"target": ones(40, 2).double()}, "target must have"),
        ({"slope": -1.0}, "slope")]),
    bilinear_weights: ({"q": ones(40, 2, 4), "k": ones(60, 2, 4)}, [
        ({"q": ones(60, 2, 4)}, "q must have shape"), ({"k": ones(60, 2, 2)}, "k must have shape"),
        ({"bias": ones(2, 4)}, "bias must have shape"), ({"dropout": 0.5}, "seed")]),
    additive_weights: ({"q": ones(40, 2, 4), "k": ones(60, 2, 4), "vector": ones(2, 4)}, [
        ({"vector": ones(1, 4)}, "vector must have shape"), ({"activation": "gelu"}, "activation")]),
    spmm_add: ({"values": ones(400), "x": ones(60, 2)}, [
        ({"x": ones(59, 2)}, ""), ({"values": ones(399)}, ""), ({"z": ones(60, 2)}, "")]),
}


@pytest.mark.parametrize("operator", REFUSED, ids=lambda operator: operator.__name__)
def test_what_does_not_fit_is_refused(operator):
    layouts, (given, changes) = random_edges().layouts, REFUSED[operator]
    operator(*layouts, **given)
    for change, message in changes:
        with pytest.raises((ShapeError, ConfigError), match=message):
            operator(*layouts, **given | change)
        if operator is additive_attention and "q" not in change:
            with pytest.raises((ShapeError, ConfigError), match=message):
                dense_additive_attention(**given | change)
