"""The GPU kernels against torch's operators in float64: on a GPU where there is one, else in Triton's interpreter."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from structconv.primitives.csr import sddmm, spmm
from structconv.primitives.layout import compress
from structconv.primitives.native import calls
from structconv.primitives.native.additive import additive_attention
from structconv.primitives.native.affine import affine_attention
from structconv.primitives.native.bilinear import bilinear_attention
from structconv.primitives.native.product import spmm_add
from structconv.primitives.native.projected import projected_attention
from structconv.primitives.triton import choice, splits

triton = pytest.importorskip("triton", reason="Triton is not installed: `pip install structconv[gpu]`")
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
SHAPES = [(4, 32, 32), (8, 8, 8), (3, 5, 7), (1, 130, 1), (5, 1, 20)]


class Edges:
    """An edge list with its two layouts."""

    def __init__(self, source, target, m, n, dtype=torch.int64):
        self.m, self.n, self.e = m, n, len(source)
        self.source, self.target = source.to(DEVICE, dtype), target.to(DEVICE, dtype)
        self.layouts = (compress(self.target, self.source, n), compress(self.source, self.target, m))


def random_edges(m=17, n=13, e=70, dtype=torch.int64):
    """A bipartite graph with isolated entries on both sides, duplicates, and a hub on both sides."""
    g = torch.Generator().manual_seed(0)
    source, target = torch.randint(m - 2, (e,), generator=g), torch.randint(n - 2, (e,), generator=g)
    target[: e // 3], source[e // 4: e // 2] = 2, 4
    source[:3], target[:3] = 1, 1
    return Edges(source, target, m, n, dtype)


def ring(size=6):
    """A square graph with self-loops, each of them twice."""
    nodes = torch.arange(size)
    return Edges(torch.cat([nodes, nodes, nodes]), torch.cat([nodes, nodes, nodes.roll(1)]), size, size)


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
    monkeypatch.setattr(calls, "usable", lambda x, edges: None)
    monkeypatch.setattr(choice, "DEVICES", ("cuda", "cpu"))
    found, reason = choice._probe(DEVICE)
    assert found is not None, reason
    return found


@pytest.fixture(params=[1024, 8], ids=["whole", "split"])
def longest(request, monkeypatch):
    """Rows stay whole, or are cut into parts of eight edges."""
    monkeypatch.setattr(splits, "LONGEST", request.param)
    return request.param


def leaves(*tensors, dtype=torch.float32):
    """Inputs in `dtype` and the same numbers in float64, which torch's operators take."""
    inputs = [t.to(DEVICE, dtype).requires_grad_() for t in tensors]
    return inputs, [t.detach().double().requires_grad_() for t in inputs]


def affine_inputs(edges, heads, channels, dtype=torch.float32):
    return leaves(torch.randn(edges.m, heads), torch.randn(edges.n, heads), torch.randn(edges.m, heads, channels),
                  dtype=dtype)


def bilinear_inputs(edges, heads, channels, depth, dtype=torch.float32, bias=True):
    tensors = [torch.randn(edges.n, heads, depth), torch.randn(edges.m, heads, depth),
               torch.randn(edges.m, heads, channels)]
    return leaves(*tensors, *([torch.randn(heads, edges.e)] if bias else []), dtype=dtype)


def additive_inputs(edges, heads, channels, depth, dtype=torch.float32):
    return leaves(torch.randn(edges.n, heads, depth), torch.randn(edges.m, heads, depth),
                  torch.randn(edges.m, heads, channels), torch.randn(heads, depth), dtype=dtype)


def compare(call, inputs, doubles, tol=2e-5):
    """Numbers and gradients of a call in the dtype of the inputs and in float64."""
    got, expected = call(*inputs), call(*doubles)
    assert got.dtype == inputs[0].dtype and expected.dtype == torch.float64
    torch.testing.assert_close(got.double(), expected, rtol=tol, atol=tol)
    grad = torch.randn(got.shape).to(got)
    for a, b in zip(torch.autograd.grad(got, inputs, grad), torch.autograd.grad(expected, doubles, grad.double()),
                    strict=True):
        assert a.dtype == got.dtype
        torch.testing.assert_close(a.double(), b, rtol=tol, atol=5 * tol)


# -- attention ----------------------------------------------------------------------------------------------------

@pytest.mark.parametrize(("heads", "channels", "depth"), SHAPES)
def test_affine_attention(longest, heads, channels, depth):
    edges = random_edges(dtype=torch.int32)
    compare(lambda *t: affine_attention(*edges.layouts, *t, slope=0.2), *affine_inputs(edges, heads, channels))


@pytest.mark.parametrize("slope", [0.0, 1.0])
def test_slopes_and_self_loops(slope):
    edges = ring()
    compare(lambda *t: affine_attention(*edges.layouts, *t, slope=slope), *affine_inputs(edges, 2, 3))


@pytest.mark.parametrize(("heads", "channels", "depth"), SHAPES)
def test_bilinear_attention(longest, heads, channels, depth):
    edges = random_edges()
    compare(lambda *t: bilinear_attention(*edges.layouts, *t, scale=depth**-0.5),
            *bilinear_inputs(edges, heads, channels, depth))


@pytest.mark.parametrize("index", [torch.int32, torch.int64])
def test_bilinear_attention_without_bias(index):
    edges = random_edges(dtype=index)
    compare(lambda *t: bilinear_attention(*edges.layouts, *t), *bilinear_inputs(edges, 2, 6, 3, bias=False))


@pytest.mark.parametrize(("heads", "channels", "depth"), SHAPES)
def test_additive_attention(longest, heads, channels, depth):
    edges, activation = random_edges(dtype=torch.int32), "tanh" if heads % 2 else "leaky_relu"
    compare(lambda *t: additive_attention(*edges.layouts, *t, activation=activation),
            *additive_inputs(edges, heads, channels, depth), tol=5e-5)


@pytest.mark.parametrize(("activation", "slope"), [("leaky_relu", 0.0), ("leaky_relu", 1.0), ("sigmoid", 0.0)])
def test_activations_with_keys_that_are_the_values(activation, slope):
    """GATv2's rows, gathered once: as they are, and in an order that makes a copy."""
    edges = ring()
    (q, k, _, v), (q64, k64, _, v64) = additive_inputs(edges, 3, 5, 5)

    def call(q, k, v):
        return additive_attention(*edges.layouts, q, k, k, v, activation=activation, slope=slope)

    compare(call, [q, k, v], [q64, k64, v64])
    strided, strided64 = (t.detach().mT.contiguous().requires_grad_() for t in (k, k64))
    compare(lambda q, k, v: call(q, k.mT, v), [q, strided, v], [q64, strided64, v64])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sixteen_bits(longest, dtype):
    edges, tol = random_edges(), 0.04 if dtype == torch.bfloat16 else 0.006
    compare(lambda *t: affine_attention(*edges.layouts, *t), *affine_inputs(edges, 2, 20, dtype), tol)
    compare(lambda *t: bilinear_attention(*edges.layouts, *t), *bilinear_inputs(edges, 2, 20, 8, dtype), tol)
    compare(lambda *t: additive_attention(*edges.layouts, *t), *additive_inputs(edges, 2, 20, 8, dtype), tol)


@pytest.mark.parametrize("batch_heads", [None, 2])
def test_dropout_is_that_of_the_hash(longest, batch_heads):
    edges, seed = random_edges(), torch.tensor(-(2**62) + 12345)
    chosen = {"dropout": 0.4, "seed": seed, "batch_heads": batch_heads}
    compare(lambda *t: affine_attention(*edges.layouts, *t, **chosen), *affine_inputs(edges, 4, 16))
    compare(lambda *t: bilinear_attention(*edges.layouts, *t, **chosen), *bilinear_inputs(edges, 4, 16, 8))
    if batch_heads is not None:
        compare(lambda *t: additive_attention(*edges.layouts, *t, **chosen), *additive_inputs(edges, 4, 16, 8))


def test_dropout_drops_what_the_cpu_drops(kernels):
    """Every source has its own column of x: y then shows which weights fell, beyond any rounding."""
    edges, seed = random_edges(12, 12, 60), torch.tensor(77)
    source, target = torch.randn(12, 2), torch.randn(12, 2)
    x = torch.eye(12).unsqueeze(1).repeat(1, 2, 1)
    inputs = [t.to(DEVICE) for t in (source, target, x)]
    found = affine_attention(*edges.layouts, *inputs, dropout=0.5, seed=seed)
    expected = affine_attention(*edges.layouts, *(t.double() for t in inputs), dropout=0.5, seed=seed)
    assert torch.equal(found == 0, expected == 0) and (found == 0).any()


def test_attention_with_its_vectors(longest):
    edges = random_edges()
    inputs, doubles = leaves(torch.randn(edges.m, 2, 5), torch.randn(2, 5), torch.randn(2, 5),
                             torch.randn(edges.n, 2, 5), torch.randn(2, 5))
    compare(lambda *t: projected_attention(*edges.layouts, *t), inputs, doubles, 4e-5)


def test_strides_are_read_as_they_are():
    edges = random_edges()
    (a, b, x), (a64, b64, x64) = affine_inputs(edges, 3, 8)
    compare(lambda a, b, x: affine_attention(*edges.layouts, a, b, x.transpose(0, 1)),
            [a, b, x.detach().transpose(0, 1).contiguous().requires_grad_()],
            [a64, b64, x64.detach().transpose(0, 1).contiguous().requires_grad_()])
    square = ring()
    (fused,), (fused64,) = leaves(torch.randn(square.n, 3, 2, 4))
    compare(lambda t: bilinear_attention(*square.layouts, *t.unbind(1)), [fused], [fused64])
    affine_attention(*edges.layouts, a, b, x).sum().backward()  # a gradient without strides
    assert x.grad is not None and x.grad.isfinite().all()


@pytest.mark.parametrize(("m", "n"), [(0, 4), (4, 0), (0, 0), (3, 4)])
def test_without_edges(longest, m, n):
    edges = Edges(torch.zeros(0), torch.zeros(0), m, n)
    for call, (inputs, _) in ((affine_attention, affine_inputs(edges, 2, 8)),
                              (bilinear_attention, bilinear_inputs(edges, 2, 8, 4)),
                              (additive_attention, additive_inputs(edges, 2, 8, 4))):
        y = call(*edges.layouts, *inputs)
        assert y.shape == (n, 2, 8) and not y.any()
        assert not any(g.any() for g in torch.autograd.grad(y.sum(), inputs))
    assert not spmm(*edges.layouts, None, torch.ones(m, 3, device=DEVICE)).any()


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_what_is_not_finite_stays_with_its_edges(bad):
    edges = Edges(torch.tensor([0, 1, 1, 2]), torch.tensor([0, 1, 2, 2]), 5, 5)
    for call, (inputs, _) in ((affine_attention, affine_inputs(edges, 2, 16)),
                              (bilinear_attention, bilinear_inputs(edges, 2, 16, 8, bias=False)),
                              (additive_attention, additive_inputs(edges, 2, 16, 8))):
        with torch.no_grad():
            for t in inputs[:3]:
                t[0], t[3], t[4] = bad, bad, bad  # edge 0 -> 0 alone sees them
        y = call(*edges.layouts, *inputs)
        assert y[1:].isfinite().all() and not y[3:].any() and not y[0].isfinite().any()
        grad = torch.ones_like(y)
        grad[3:], grad[0] = bad, 0
        for g in torch.autograd.grad(y, inputs[:3], grad):
            assert g[1:].isfinite().all() and not g[3:].any()


def test_scores_of_minus_infinity_weigh_nothing(longest):
    """In a row of twelve edges, whose second part has no other score; and in a row that has none at all."""
    source = torch.cat([torch.arange(8), torch.full((4,), 8), torch.full((10,), 8)])
    edges = Edges(source, torch.cat([torch.zeros(12), torch.ones(10)]), 9, 2)
    (a, b, x), _ = affine_inputs(edges, 2, 8)
    with torch.no_grad():
        a[8] = -torch.inf
    y = affine_attention(*edges.layouts, a, b, x)
    few = Edges(torch.arange(8), torch.zeros(8), 9, 2)
    torch.testing.assert_close(y, affine_attention(*few.layouts, a.double(), b.double(), x.double()).to(y))
    assert not y[1].any()
    assert all(g.isfinite().all() for g in torch.autograd.grad(y.sum(), [b, x]))


def test_large_scores_do_not_overflow(longest):
    edges = random_edges()
    inputs, doubles = affine_inputs(edges, 2, 8)
    with torch.no_grad():
        for t in (*inputs[:2], *doubles[:2]):
            t *= 1000
    compare(lambda *t: affine_attention(*edges.layouts, *t), inputs, doubles, 1e-3)


def test_the_same_input_gives_the_same_bits(longest):
    edges = random_edges()
    inputs, _ = affine_inputs(edges, 2, 8)
    runs = []
    for _ in range(2):
        y = affine_attention(*edges.layouts, *inputs)
        runs.append((y, *torch.autograd.grad(y.square().sum(), inputs)))
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))


def test_operator_contracts():
    edges = random_edges(5, 4, 12)
    flat, seed = [t for layout in edges.layouts for t in layout], torch.tensor(3)
    inputs, _ = affine_inputs(edges, 2, 4)
    torch.library.opcheck(torch.ops.structconv.affine_attention.default, (*flat, *inputs, 0.2, 0.3, seed, 2, True))
    inputs, _ = bilinear_inputs(edges, 2, 4, 3)
    torch.library.opcheck(torch.ops.structconv.bilinear_attention.default, (*flat, *inputs, 0.5, 0.3, seed, 2))
    inputs, _ = additive_inputs(edges, 2, 4, 3)
    torch.library.opcheck(torch.ops.structconv.additive_attention.default,
                          (*flat, *inputs, "tanh", 0.0, 0.3, seed, 2))


# -- products -----------------------------------------------------------------------------------------------------

@pytest.mark.parametrize(("values_lead", "x_lead", "sum_heads"), [
    (None, (), False), ((), (), False), ((3,), (3,), False), ((5,), (), False), ((4,), (4,), True), ((3,), (1,), True),
    ((2, 3), (3,), True)])
def test_products(longest, values_lead, x_lead, sum_heads):
    edges = random_edges()
    values = [] if values_lead is None else [torch.randn(*values_lead, edges.e)]
    inputs, doubles = leaves(torch.randn(*x_lead, edges.m, 7), *values)
    compare(lambda x, values=None: spmm(*edges.layouts, values, x, sum_heads=sum_heads), inputs, doubles)


def test_products_of_many_channels_and_bfloat16():
    edges = random_edges()
    compare(lambda x, v: spmm(*edges.layouts, v, x), *leaves(torch.randn(edges.m, 300), torch.randn(2, edges.e)))
    compare(lambda x, v: spmm(*edges.layouts, v, x),
            *leaves(torch.randn(edges.m, 9), torch.randn(2, edges.e), dtype=torch.bfloat16), 0.03)


@pytest.mark.parametrize("values_shape", [None, (), (3,)])
def test_product_with_addend(longest, values_shape):
    edges = random_edges(dtype=torch.int32)
    values = [] if values_shape is None else [torch.randn(*values_shape, edges.e)]
    inputs, doubles = leaves(torch.randn(3, edges.m, 20), torch.randn(3, edges.n, 20), *values)
    compare(lambda x, z, values=None: spmm_add(*edges.layouts, values, x, z, alpha=2.0, beta=-0.5), inputs, doubles)


def test_what_is_not_finite_stays_in_its_rows(longest):
    edges = random_edges()
    x = torch.randn(edges.m, 5, device=DEVICE)
    expected = spmm(*edges.layouts, None, x)
    x[4] = torch.nan
    seen = torch.zeros(edges.n, dtype=torch.bool, device=DEVICE)
    seen[edges.target[edges.source == 4]] = True
    found = spmm(*edges.layouts, None, x)
    assert found[seen].isnan().all() and torch.equal(found[~seen], expected[~seen]) and not seen.all()


@pytest.mark.parametrize("depth", [1, 300])
def test_sampled_products(longest, depth):
    edges = random_edges()
    compare(lambda q, k: sddmm(*edges.layouts, q, k), *leaves(torch.randn(2, edges.n, depth),
                                                              torch.randn(edges.m, depth)), 1e-4)


# -- long rows ----------------------------------------------------------------------------------------------------

def test_parts_cover_the_long_rows(monkeypatch):
    monkeypatch.setattr(splits, "LONGEST", 4)
    indptr = torch.tensor([0, 3, 12, 12, 16, 21])
    parts = splits.parts(indptr)
    assert parts.length == 4 and parts.long.tolist() == [1, 4] and parts.ends.tolist() == [0, 3, 5]
    assert parts.row.tolist() == [1, 1, 1, 4, 4] and parts.start.tolist() == [3, 7, 11, 16, 20]
    assert splits.parts(indptr) is parts
    indptr[5] = 17
    assert splits.parts(indptr).long.tolist() == [1]


def test_a_hub_of_a_hundred_thousand_edges_is_the_work_of_many_programs():
    parts = splits.parts(torch.tensor([0, 3, 100_003, 100_010]))
    assert parts.total == 98 and parts.row.eq(1).all() and parts.start[-1] + parts.length >= 100_003


def test_a_hub_at_the_length_that_is_used():
    hub = 2 * splits.LONGEST + 5
    g = torch.Generator().manual_seed(1)
    edges = Edges(torch.randint(9, (hub,), generator=g), torch.full((hub,), 1), 9, 3)
    assert splits.parts(edges.layouts[0].indptr).total == 3
    compare(lambda *t: affine_attention(*edges.layouts, *t), *affine_inputs(edges, 1, 4), 1e-4)


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
        "additive": ("_forward", "_backward"), "affine": ("_forward", "_backward"),
        "bilinear": ("_forward", "_backward"), "combine": ("_add", "_softmax"), "dots": ("_pack",),
        "product": ("_spmm", "_sddmm")}.items() for name in names}
