"""The GPU kernels against torch's operators in float64: on a GPU where there is one, else in Triton's interpreter."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from structconv.primitives.edge_attention import additive_attention, affine_attention, bilinear_attention
from structconv.primitives.native import dispatch
from structconv.primitives.triton import choice, splits
from tests.primitives.edge_operators import OPERATORS, Edges
from tests.support.drawn import EVERY, drawn

triton = pytest.importorskip("triton", reason="Triton is not installed: `pip install structconv[gpu]`")
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
SHAPES = [(4, 32, 32), (8, 8, 8), (3, 5, 7), (1, 130, 1), (5, 1, 20)]
NAMES = [name for name in OPERATORS
         if name.startswith(("affine", "projected", "bilinear", "additive", "spmm", "sddmm"))]


def edges_of(source, target, m, n, dtype=torch.int64):
    return Edges(source, target, m, n, dtype, DEVICE)


def random_edges(m=6, n=5, e=24, dtype=torch.int64):
    """A bipartite graph with isolated entries on both sides, duplicates, and a hub on both sides."""
    g = torch.Generator().manual_seed(0)
    source, target = torch.randint(m - 2, (e,), generator=g), torch.randint(n - 2, (e,), generator=g)
    target[: e // 2], source[e // 4: 3 * e // 4] = 2, 3
    source[:3], target[:3] = 1, 1
    return edges_of(source, target, m, n, dtype)


def ring(size=6):
    """A square graph with self-loops, each of them twice."""
    nodes = torch.arange(size)
    return edges_of(torch.cat([nodes, nodes, nodes]), torch.cat([nodes, nodes, nodes.roll(1)]), size, size)


@triton.jit
def count(numbers, length):
    for _ in range(0, triton.language.load(length)):
        triton.language.store(numbers, triton.language.load(numbers) + 1)


@pytest.fixture(scope="module")
def working():
    """Skip where Triton itself does not run: its interpreter before 3.9 cannot loop with NumPy 2.4."""
    numbers, length = torch.zeros(1, device=DEVICE), torch.full((1,), 3, device=DEVICE)
    try:
        count[(1,)](numbers, length)
    except triton.runtime.errors.InterpreterError as error:
        pytest.skip(f"the interpreter of Triton {triton.__version__} does not work here: {error}")
    assert numbers.item() == 3


@pytest.fixture(autouse=True)
def kernels(monkeypatch, working):
    """Every operator runs the kernels, also on a CPU. Yields their module."""
    monkeypatch.setattr(dispatch, "usable", lambda x, edges: None)
    monkeypatch.setattr(choice, "DEVICES", ("cuda", "cpu"))
    actual, reason = choice._probe(DEVICE)
    assert actual is not None, reason
    return actual


@pytest.fixture(params=[1024, 8], ids=["whole", "split"])
def longest(request, monkeypatch):
    """Rows stay whole, or are cut into parts of eight edges."""
    monkeypatch.setattr(splits, "LONGEST", request.param)
    return request.param


def arguments(name, edges, shape, dtype=torch.float32):
    return [t.detach().to(DEVICE).requires_grad_() for t in OPERATORS[name].tensors(edges, *shape, dtype)]


def compare(call, inputs, tol=4e-5):
    """Numbers and gradients of a call in the dtype of the inputs, and in float64, which torch's operators take."""
    doubles = [t.detach().double().requires_grad_() for t in inputs]
    got, expected = call(*inputs), call(*doubles)
    assert got.dtype == inputs[0].dtype and expected.dtype == torch.float64
    torch.testing.assert_close(got.double(), expected, rtol=tol, atol=tol)
    grad = torch.randn(got.shape).to(got)
    for a, b in zip(torch.autograd.grad(got, inputs, grad), torch.autograd.grad(expected, doubles, grad.double()),
                    strict=True):
        assert a.dtype == got.dtype
        torch.testing.assert_close(a.double(), b, rtol=tol, atol=5 * tol)


def check(name, edges, shape, dtype=torch.float32, tol=4e-5, **options):
    compare(lambda *t: OPERATORS[name].call(edges, *t, **options), arguments(name, edges, shape, dtype), tol)


def graph(name, dtype=torch.int64):
    return ring() if OPERATORS[name].pairs == "square" else random_edges(dtype=dtype)


@pytest.mark.parametrize(("name", "shape", "length"), [  # the interpreter is slow: one of them an operator
    (name, shape, length) for number, name in enumerate(drawn(NAMES, 3)) for at, shape in enumerate(SHAPES)
    for length in (1024, 8) if EVERY or (at == number % 5 and (length == 8) is (number % 2 == 0))])
def test_values_and_gradients(name, shape, length, monkeypatch):
    """Rows stay whole, or are cut into parts of eight edges."""
    monkeypatch.setattr(splits, "LONGEST", length)
    check(name, graph(name, torch.int32 if shape[0] % 2 else torch.int64), shape, tol=1e-4 if name == "sddmm" else 4e-5)


@pytest.mark.parametrize(("dtype", "tol"), [(torch.bfloat16, 0.04), (torch.float16, 0.006)], ids=str)
@pytest.mark.parametrize("name", drawn(["affine", "bilinear", "additive", "spmm"], 3))
def test_sixteen_bits(monkeypatch, name, dtype, tol):
    monkeypatch.setattr(splits, "LONGEST", 8 if dtype is torch.bfloat16 else 1024)
    check(name, random_edges(), (2, 20, 8), dtype, tol)


@pytest.mark.parametrize("name", drawn(["bilinear, bias", "additive, tanh", "affine"], 2))
def test_dropout_is_that_of_the_hash(longest, name):
    check(name, random_edges(), (4, 16, 8), dropout=0.4, seed=torch.tensor(-(2**62) + 12345),
          batch_heads=2 if longest == 8 else None)


def test_dropout_drops_what_the_cpu_drops():
    """Every source has its own column of x: y then shows which weights fell, beyond any rounding."""
    edges, seed = random_edges(12, 12, 60), torch.tensor(77)
    x = torch.eye(12).unsqueeze(1).repeat(1, 2, 1)
    inputs = [t.to(DEVICE) for t in (torch.randn(12, 2), torch.randn(12, 2), x)]
    actual = affine_attention(*edges.layouts, *inputs, dropout=0.5, seed=seed)
    expected = affine_attention(*edges.layouts, *(t.double() for t in inputs), dropout=0.5, seed=seed)
    assert torch.equal(actual == 0, expected == 0) and (actual == 0).any()


def test_strides_are_read_as_they_are():
    """Of heads that lie apart, of three in one table, and of values that are the keys, gathered once or as a copy."""
    edges, square = random_edges(), ring()
    a, b, x = arguments("affine", edges, (3, 8, 1))
    compare(lambda a, b, x: affine_attention(*edges.layouts, a, b, x.transpose(0, 1)),
            [a, b, x.detach().transpose(0, 1).contiguous().requires_grad_()])
    compare(lambda t: bilinear_attention(*square.layouts, *t.unbind(1)),
            [torch.randn(square.n, 3, 2, 4, device=DEVICE, requires_grad=True)])
    affine_attention(*edges.layouts, a, b, x).sum().backward()  # a gradient without strides
    assert x.grad is not None and x.grad.isfinite().all()
    q, k, _, v = arguments("additive", square, (3, 5, 5))
    compare(lambda q, k, v: additive_attention(*square.layouts, q, k, k, v), [q, k, v])
    compare(lambda q, k, v: additive_attention(*square.layouts, q, k.mT, k.mT, v),
            [q, k.detach().mT.contiguous().requires_grad_(), v])


@pytest.mark.parametrize(("m", "n"), drawn([(0, 4), (3, 4), (4, 0), (0, 0)], 2))
@pytest.mark.parametrize("name", drawn(["affine", "bilinear", "additive", "spmm"], 3))
def test_without_edges(longest, name, m, n):
    edges = edges_of(torch.zeros(0), torch.zeros(0), m, n)
    inputs = arguments(name, edges, (2, 8, 4))
    y = OPERATORS[name].call(edges, *inputs)
    assert n in y.shape and not y.any()
    assert not any(g.any() for g in torch.autograd.grad(y.sum(), inputs))


@pytest.mark.parametrize("bad", drawn([torch.nan, torch.inf, -torch.inf], 3))
@pytest.mark.parametrize("name", ["affine", "bilinear", "additive", "spmm, ones"])
def test_what_is_not_finite_stays_with_its_edges(name, bad):
    edges = edges_of(torch.tensor([0, 1, 1, 2]), torch.tensor([0, 1, 2, 2]), 5, 5)
    inputs = arguments(name, edges, (2, 16, 8))[:3]
    vector = arguments(name, edges, (2, 16, 8))[3:]
    axis = 1 if name == "spmm, ones" else 0
    with torch.no_grad():
        for t in inputs:
            t.index_fill_(axis, torch.tensor([0, 3, 4], device=DEVICE), bad)  # edge 0 -> 0 alone sees them
    y = OPERATORS[name].call(edges, *inputs, *vector)
    rows, grad = y.transpose(0, axis), torch.ones_like(y)
    assert rows[1:].isfinite().all() and not rows[3:].any() and not rows[0].isfinite().any()
    grad.transpose(0, axis)[3:], grad.transpose(0, axis)[0] = bad, 0
    for g in torch.autograd.grad(y, inputs, grad):
        assert g.transpose(0, axis)[1:].isfinite().all() and not g.transpose(0, axis)[3:].any()


def test_scores_of_minus_infinity_weigh_nothing(longest):
    """In a row of twelve edges, whose second part has no other score; and in a row that has none at all."""
    source = torch.cat([torch.arange(8), torch.full((4,), 8), torch.full((10,), 8)])
    edges = edges_of(source, torch.cat([torch.zeros(12), torch.ones(10)]), 9, 2)
    a, b, x = arguments("affine", edges, (2, 8, 4))
    with torch.no_grad():
        a[8] = -torch.inf
    y = affine_attention(*edges.layouts, a, b, x)
    few = edges_of(torch.arange(8), torch.zeros(8), 9, 2)
    torch.testing.assert_close(y, affine_attention(*few.layouts, a.double(), b.double(), x.double()).to(y))
    assert not y[1].any()
    assert all(g.isfinite().all() for g in torch.autograd.grad(y.sum(), [b, x]))


def test_large_scores_do_not_overflow(longest):
    edges = random_edges()
    a, b, x = arguments("affine", edges, (2, 8, 4))
    with torch.no_grad():
        a *= 1000
        b *= 1000
    compare(lambda *t: affine_attention(*edges.layouts, *t), [a, b, x], 1e-3)


def test_the_same_input_gives_the_same_bits(longest):
    edges = random_edges()
    inputs, runs = arguments("affine", edges, (2, 8, 4)), []
    for _ in range(2):
        y = affine_attention(*edges.layouts, *inputs)
        runs.append((y, *torch.autograd.grad(y.square().sum(), inputs)))
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))


def test_operator_contracts():
    edges, drop = random_edges(5, 4, 12), (0.3, torch.tensor(3), 2)
    flat, operators = [t for layout in edges.layouts for t in layout], torch.ops.structconv
    for name, operator, options in (
            ("affine", operators.affine_attention, (0.2, *drop, True)),
            ("bilinear, bias", operators.bilinear_attention, (0.5, *drop)),
            ("additive", operators.additive_attention, (1, 2.0, False, *drop)))[::1 if EVERY else 3]:
        torch.library.opcheck(operator.default, (*flat, *arguments(name, edges, (2, 4, 3)), *options))


# -- long rows ----------------------------------------------------------------------------------------------------

def test_parts_cover_the_long_rows(monkeypatch):
    monkeypatch.setattr(splits, "LONGEST", 4)
    indptr = torch.tensor([0, 3, 12, 12, 16, 24])
    parts = splits.parts(indptr)
    assert parts.length == 4 and parts.long.tolist() == [1, 4] and parts.ends.tolist() == [0, 3, 5]
    assert parts.row.tolist() == [1, 1, 1, 4, 4] and parts.start.tolist() == [3, 7, 11, 16, 20]
    assert splits.parts(indptr) is parts
    indptr[5] = 17
    assert splits.parts(indptr).long.tolist() == [1]


def test_a_hub_is_the_work_of_many_programs():
    parts = splits.parts(torch.tensor([0, 3, 100_003, 100_010]))
    assert parts.total == 98 and parts.row.eq(1).all() and parts.start[-1] + parts.length >= 100_003
    hub = 2 * splits.LONGEST + 5
    g = torch.Generator().manual_seed(1)
    edges = edges_of(torch.randint(9, (hub,), generator=g), torch.full((hub,), 1), 9, 3)
    assert splits.parts(edges.layouts[0].indptr).total == 3
    check("affine", edges, (1, 4, 1), tol=1e-4)


# -- choice -------------------------------------------------------------------------------------------------------

def test_what_the_kernels_take(kernels, monkeypatch):
    assert choice.usable(torch.ones(2, 1, 1024), 5) is kernels
    assert choice.usable(torch.ones(2, 1, 1025), 5) is None
    assert choice.usable_product(torch.ones(2, 1, 1025), 5) is kernels
    assert choice.usable(torch.ones(2, 1, 4, dtype=torch.float64), 5) is None
    assert choice.usable(torch.ones(2, 1, 4), 2**31) is None
    monkeypatch.setattr(choice, "DEVICES", ("cuda",))
    assert choice.usable(torch.ones(2, 1, 4), 5) is None


def test_every_kernel_compiles_for_a_gpu_that_is_not_here(tmp_path):
    """The interpreter accepts more than the compiler: to machine code, from the arguments of real calls."""
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, str(root / "tests" / "primitives" / "compile_triton.py"), "90"],
                          env={**env, "TRITON_CACHE_DIR": str(tmp_path), "STRUCTCONV_NATIVE": "0",
                               "PYTHONPATH": os.pathsep.join([str(root), *sys.path])},
                          capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    names = {line.split()[0] for line in done.stdout.splitlines()}
    assert names == {f"{file}.{name}" for file, names in {
        "affine": ("_forward", "_backward"), "queries": ("_forward", "_backward"), "combine": ("_add", "_softmax"),
        "common": ("_pack",), "product": ("_spmm", "_sddmm")}.items() for name in names}
