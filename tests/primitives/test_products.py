"""Products of tall matrices with small ones: the numbers of `x @ w + bias`, by whichever library."""

import itertools

import pytest
import torch
from torch import nn
from torch.autograd import gradcheck, gradgradcheck
from torch.utils.checkpoint import checkpoint

from structconv.errors import ConfigError, ShapeError
from structconv.nn import Linear
from structconv.primitives import products
from structconv.primitives.native import core, dispatch
from structconv.primitives.products import LEAST_NUMBERS, linear, outer, product
from tests.support.drawn import EVERY, drawn
from tests.support.threads import on_threads


@pytest.mark.parametrize(("columns", "shape", "grad"), [
    case for number, case in enumerate(itertools.product(
        [1, 2, 7, 8, 9, 15, 16, 17], [(300, 64), (3, 150, 64), (2, 3, 60, 64), (5, 4), (0, 64)], ["none", "w", "both"]))
    if EVERY or number % 4 == 0])
def test_equal_to_the_plain_product(columns, shape, grad):
    x = torch.randn(shape, requires_grad=grad == "both")
    w = torch.randn(shape[-1], columns, requires_grad=grad != "none")
    expected = [t for t in (x, w) if t.requires_grad]
    y, plain = product(x, w), (x.double() @ w.double())
    assert y.shape == plain.shape and y.is_contiguous() and y.dtype == torch.float32
    torch.testing.assert_close(y, plain.float(), rtol=1e-4, atol=1e-4)
    if expected:
        up = torch.randn_like(y)
        for ours, theirs in zip(torch.autograd.grad(y, expected, up), torch.autograd.grad(plain, expected, up.double()),
                                strict=True):
            torch.testing.assert_close(ours, theirs.float(), rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("columns", [4, 12])
def test_strided_arguments(columns):
    x, w = torch.randn(64, 400).t(), torch.randn(columns, 64).t()
    torch.testing.assert_close(product(x, w), x @ w, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(product(x[::2], w), x[::2] @ w, rtol=1e-4, atol=1e-4)


def test_strided_biases_and_rows_that_overlap(every_branch):
    """oneDNN takes any bias as a contiguous one, and no matrix whose rows overlap."""
    signal, bias = torch.randn(301), torch.randn(14)[::2]
    rows = signal.unfold(0, 24, 1)[:7]
    for x in (torch.randn(101, 48)[:, ::2], signal.unfold(0, 24, 1)):
        w, up = torch.randn(24, 7, requires_grad=True), torch.randn(len(x), 7)
        torch.testing.assert_close(product(x, w, bias), x @ w + bias, rtol=1e-5, atol=1e-4)
        torch.testing.assert_close(linear(x, rows, bias), x @ rows.t() + bias, rtol=1e-5, atol=1e-4)
        grad, = torch.autograd.grad(product(x, w), w, up)
        torch.testing.assert_close(grad, x.t() @ up, rtol=1e-5, atol=1e-3)


@pytest.mark.parametrize("grad", [False, True])
def test_rows_stay_apart(grad):
    x = torch.randn(600, 64)
    x[3], x[7] = torch.nan, torch.inf
    y = product(x.requires_grad_(grad), torch.randn(64, 5).requires_grad_(grad))
    assert x.numel() >= LEAST_NUMBERS
    assert not y[3].isfinite().any() and y[[0, 1, 2, 4, 5, 6]].isfinite().all() and y[8:].isfinite().all()


@pytest.mark.parametrize("rows", [600, 60_000])
def test_gradients_lie_as_the_matrix_does(rows):
    """Where they are added up, another layout would be copied."""
    x, w = torch.randn(rows, 64), torch.randn(64, 40)
    for given in (w, w.t().contiguous().t()):
        grad, = torch.autograd.grad(product(x, given.requires_grad_()).square().sum(), given)
        assert grad.stride() == given.stride()


@pytest.mark.parametrize("activation", [None, "relu"])
def test_a_linear_layer_has_the_numbers_of_torchs(activation):
    for rows in ((3, 300), (3,), ()):
        ours, x = Linear(128, 256, activation=activation), torch.randn(*rows, 128, requires_grad=True)
        theirs = nn.Sequential(nn.Linear(128, 256), nn.Identity() if activation is None else nn.ReLU())
        theirs[0].load_state_dict(ours.state_dict())
        actual, expected = (torch.autograd.grad(layer(x).square().sum(), [x, *layer.parameters()])
                           for layer in (ours, theirs))
        torch.testing.assert_close(ours(x), theirs(x), rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(actual, expected, rtol=1e-3, atol=1e-2)


def test_the_activation_passes_nan_on_and_its_result_is_held_once():
    x, layer = torch.randn(3000, 128), Linear(128, 256, activation="relu")
    x[3], x[5] = torch.nan, -torch.inf
    expected = torch.relu(nn.functional.linear(x, layer.weight, layer.bias))
    torch.testing.assert_close(layer(x), expected, equal_nan=True, rtol=1e-4, atol=1e-4)
    assert layer(x)[3].isnan().all()
    with torch.no_grad(), torch.profiler.profile(profile_memory=True) as seen:
        layer(x)
    made = sum(event.self_cpu_memory_usage for event in seen.events() if event.self_cpu_memory_usage > 0)
    assert 4 * 3000 * 256 <= made < 1.5 * 4 * 3000 * 256


def test_a_linear_layer_says_what_does_not_fit():
    layer = Linear(128, 256)
    with pytest.raises(ConfigError, match="activation must be one of None, 'relu'"):
        Linear(128, 256, activation="gelu")
    for x in (torch.randn(300, 127), torch.randn(300, 129), torch.tensor(1.0)):
        with pytest.raises(ShapeError, match=r"\(\.\.\., P=128\)"):
            layer(x)
    for rows in (5, 3000):
        layer.bias = nn.Parameter(torch.randn(255))
        with pytest.raises(RuntimeError, match="255"):
            layer(torch.randn(rows, 128))
        layer.bias = nn.Parameter(torch.randn(()))  # as torch's, whose bias broadcasts
        assert layer(torch.randn(rows, 128)).shape == (rows, 256)
    layer.weight = nn.Parameter(torch.randn(128))
    with pytest.raises(RuntimeError):
        layer(torch.randn(3000, 128))


@pytest.mark.parametrize(("rows", "columns"), drawn([(10, 10), (10, 256), (3000, 10), (3000, 256)], 3))
def test_a_linear_layer_of_every_size_goes_where_torchs_goes(rows, columns):
    x, layer = torch.randn(rows, 128), Linear(128, columns, activation="relu")
    plain = nn.Sequential(nn.Linear(128, columns), nn.ReLU())
    plain[0].load_state_dict(layer.state_dict())
    expected, = torch.autograd.grad(plain(x).square().sum(), plain[0].weight)
    actual, = torch.autograd.grad(checkpoint(layer, x, use_reentrant=False).square().sum(), layer.weight)
    torch.testing.assert_close(actual, expected, rtol=1e-3, atol=1e-2)
    compiled = torch.compile(layer, backend="aot_eager", dynamic=True)
    with torch.autocast("cpu", torch.bfloat16):
        assert layer(x).dtype == compiled(x).dtype == torch.bfloat16
    moved = torch.compile(lambda x: torch.func.jvp(layer, (x,), (x,))[1], backend="aot_eager")(x)
    torch.testing.assert_close(moved, torch.func.jvp(plain, (x,), (x,))[1], rtol=1e-3, atol=1e-3)
    sparse = Linear(128, columns, bias=False)
    sparse.weight = nn.Parameter(layer.weight.detach().to_sparse_csr(), requires_grad=False)
    torch.testing.assert_close(sparse(x), x @ layer.weight.mT, rtol=1e-3, atol=1e-3)


def test_a_linear_layer_without_inputs_compiles():
    layer = Linear(0, 5, activation="relu")
    assert torch.equal(torch.compile(layer, backend="aot_eager")(torch.randn(4, 0)), layer(torch.randn(4, 0)))


def test_other_dtypes_and_second_derivatives():
    x, w = torch.randn(300, 64, dtype=torch.float64), torch.randn(64, 5, dtype=torch.float64)
    assert torch.equal(product(x, w), x @ w)
    x, w = torch.randn(300, 64, requires_grad=True), torch.randn(64, 5, requires_grad=True)
    first, = torch.autograd.grad(product(x, w).square().sum(), x, create_graph=True)
    torch.testing.assert_close(torch.autograd.grad(first.sum(), w)[0],
                               torch.autograd.grad((2 * (x @ w) @ w.t()).sum(), w)[0], rtol=1e-3, atol=1e-2)


@pytest.fixture(params=["native", "small results", "fresh results"])
def every_branch(request, monkeypatch):
    """Sizes from which a branch is taken, brought down to those of a test."""
    if request.param == "native":
        monkeypatch.setattr(products, "LEAST_BYTES", 0)
    else:
        monkeypatch.setattr(dispatch, "usable_rows", lambda *_: None)
    for name, value in {"LEAST_NARROW": 1024, "LEAST_ROWS": 16, "LEAST_NUMBERS": 64, "LEAST_PRODUCTS": 1024,
                        "ON_INTEL": False, "TALL": 90, "WIDE": 20,
                        **({"FRESH_BYTES": 0} if request.param == "fresh results" else {})}.items():
        monkeypatch.setattr(products, name, value)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("sizes", [(30, 24, 6), (101, 40, 33), (101, 24, 14), (101, 6, 24), (60, 200, 12), (7, 5, 1)])
def test_every_branch_has_the_numbers_of_the_plain_product(every_branch, sizes, bias):
    rows, inputs, columns = sizes
    tensors = [torch.randn(s, requires_grad=True) for s in ((3, rows, inputs), (inputs, columns), (columns,))]
    tensors = tensors if bias else tensors[:2]
    doubles = [t.detach().double().requires_grad_() for t in tensors]
    y, plain = product(*tensors), doubles[0] @ doubles[1] + (doubles[2] if bias else 0)
    torch.testing.assert_close(y.double(), plain, rtol=1e-5, atol=1e-4)
    up = torch.randn_like(y)
    actual = torch.autograd.grad(y, tensors, up, create_graph=True)
    expected = torch.autograd.grad(plain, doubles, up.double(), create_graph=True)
    for ours, theirs in zip(actual, expected, strict=True):
        torch.testing.assert_close(ours.double(), theirs, rtol=1e-5, atol=1e-3)
    again = torch.autograd.grad(sum(t.square().sum() for t in actual[:2]), tensors[:2])
    exact = torch.autograd.grad(sum(t.square().sum() for t in expected[:2]), doubles[:2])
    x, w, u = (t.detach().double().abs().flatten(0, -2) for t in (*doubles[:2], up))
    sizes_of_terms = u @ (x.mT @ u).mT, w @ (u.mT @ u)  # of 2 u (x^T u)^T and 2 w u^T u
    most = 2 * (u.shape[0] + columns) * torch.finfo(torch.float32).eps  # of each term's rounding errors
    for ours, theirs, size in zip(again, exact, sizes_of_terms, strict=True):
        assert ((ours.double() - theirs).abs() <= most * size.view_as(theirs)).all()


@pytest.mark.parametrize("sizes", [(30, 24, 6), (101, 40, 33), (101, 33, 40), (101, 6, 24), (60, 200, 12), (9, 3, 1)])
def test_outer_products(every_branch, sizes):
    rows, p, q = sizes
    x, y = torch.randn(rows, p), torch.randn(rows, q)
    for a, b in ((x, y), (torch.randn(p, rows).t(), y), (x, torch.randn(q, rows).t())):
        torch.testing.assert_close(outer(a, b).double(), a.double().t() @ b.double(), rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("trained", [(0,), (1,), (2,), (0, 2), (1, 2), (0, 1)])
def test_what_no_gradient_reads_may_change_between_both_passes(trained):
    """Another change is refused, as torch refuses it; and what is not read is not held."""
    def gradients(function, changed):
        torch.manual_seed(1)
        tensors = [torch.randn(shape) for shape in ((4096, 8), (4, 8), (4,))]
        for i in trained:
            tensors[i].requires_grad_()
        y = function(*tensors)
        with torch.no_grad():
            tensors[changed].add_(1)
        return torch.autograd.grad(y.square().sum(), [tensors[i] for i in trained], create_graph=True)

    read = {"x" * (1 in trained), "w" * (0 in trained)}
    for changed, name in enumerate(("x", "w", "bias")):
        if name in read:
            for function in (linear, nn.functional.linear):
                with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                    gradients(function, changed)
        else:
            torch.testing.assert_close(gradients(linear, changed), gradients(nn.functional.linear, changed), rtol=1e-4,
                                       atol=1e-3)


def test_operators_in_float64(every_branch):
    x, w, bias, y = (torch.randn(s, dtype=torch.float64, requires_grad=True) for s in ((6, 3), (3, 4), (4,), (6, 4)))
    operators = torch.ops.structconv
    assert gradcheck(operators.project, (x, w, bias), fast_mode=True)
    assert gradgradcheck(operators.project, (x, w, bias), fast_mode=True)
    away = x.abs() + 0.5, w.abs(), bias.abs()  # of the kink
    assert gradcheck(operators.project_relu, away, fast_mode=True)
    assert gradgradcheck(operators.project_relu, away, fast_mode=True)
    assert gradcheck(operators.project_relu, (x, w, bias), check_forward_ad=True, fast_mode=True)
    assert gradcheck(operators.outer, (x, y), fast_mode=True) and gradgradcheck(operators.outer, (x, y), fast_mode=True)


@pytest.mark.parametrize("columns", [5, 40])
def test_transforms_and_autocast_take_torchs_product(every_branch, columns):
    x, w = torch.randn(4, 30, 24), torch.randn(24, columns)
    torch.testing.assert_close(torch.func.vmap(lambda v: product(v, w))(x), x @ w)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert product(x, w).dtype == torch.bfloat16


@pytest.mark.parametrize("columns", [5, 40])
def test_compiled_with_gradients(every_branch, columns):
    compiled = torch.compile(product, fullgraph=True, backend="aot_eager", dynamic=True)
    for rows in (10, 300):
        x, w = torch.randn(rows, 64, requires_grad=True), torch.randn(64, columns, requires_grad=True)
        actual = torch.autograd.grad(compiled(x, w).square().sum(), (x, w))
        torch.testing.assert_close(actual, torch.autograd.grad((x @ w).square().sum(), (x, w)), rtol=1e-4, atol=1e-2)


@pytest.fixture
def asked(monkeypatch):
    """Which native kernels ran."""
    actual = []
    if core() is None:
        pytest.skip("the native core cannot be built here")
    for name in ("project", "outer"):
        run = getattr(core(), name)
        monkeypatch.setattr(core(), name, lambda *args, name=name, run=run: actual.append(name) or run(*args))
    return actual


def test_the_native_kernels_run_where_the_rule_says(asked):
    x, w, y = torch.randn(600, 64), torch.randn(64, 8), torch.randn(600, 8)
    product(x, w)
    outer(x, y)
    torch.ops.structconv.outer(y, x)
    assert asked == ["project", "outer", "outer"]
    product(x.t().contiguous().t(), w)  # not row by row in memory
    product(x.double(), w.double())
    product(torch.randn(10, 64), w)
    assert asked == ["project", "outer", "outer"]


NARROW_AND_WIDE = [1, 7, 8, 9, 16, 17, 31, 32, 33, 48, 70, 129]


@pytest.mark.parametrize(("columns", "inputs", "rows"), [
    sizes for number, sizes in enumerate(itertools.product(NARROW_AND_WIDE, [1, 15, 16, 100, 256, 257, 600],
                                                           [1, 11, 12, 13, 500])) if EVERY or number % 4 == 0])
def test_native_kernels(asked, rows, inputs, columns):
    """Rows that lie apart, w of any strides; errors as those of sums of so many terms in float32."""
    table, other = torch.randn(rows, inputs + 3), torch.randn(rows, columns + 5)
    x, g, bias = table[:, 1:inputs + 1], other[:, 2:columns + 2], torch.randn(columns)
    for w in (torch.randn(inputs, columns), torch.randn(columns, inputs).t(), torch.randn(inputs, 2 * columns)[:, ::2]):
        for b in (None, bias):
            added = torch.zeros(columns) if b is None else b
            near(core().project(x, w, b), x.double() @ w.double() + added, x.abs() @ w.abs() + added.abs())
    near(core().outer(x, g), x.double().t() @ g.double(), x.abs().t() @ g.abs())


def near(actual, expected, size):
    assert actual.shape == expected.shape and ((actual.double() - expected).abs() <= 2e-6 * size).all()


def test_rows_that_collide_in_the_cache_and_large_w(asked):
    for rows, inputs, columns in ((50, 1024, 40), (50, 2048, 8), (300, 500, 400)):
        x, w = torch.randn(rows, inputs), torch.randn(inputs, columns)
        near(core().project(x, w, None), x.double() @ w.double(), x.abs() @ w.abs())


def test_results_do_not_depend_on_threads(asked):
    x, w, g = torch.randn(40_000, 70), torch.randn(70, 128), torch.randn(40_000, 90)
    first, *others = on_threads(lambda: (core().project(x, w, None), core().outer(x, g)))
    assert all(all(map(torch.equal, first, other)) for other in others)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_what_is_not_finite_goes_where_mm_puts_it(asked, bad):
    x, w, g = torch.randn(100, 40), torch.randn(40, 37), torch.randn(100, 37)
    x[17, 3], w[5, 36], g[40, 0] = bad, bad, bad
    for actual, expected in ((core().project(x, w, None), x @ w), (core().outer(x, g), x.t() @ g)):
        torch.testing.assert_close(actual, expected, equal_nan=True, rtol=1e-4, atol=1e-4)
