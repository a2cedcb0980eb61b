"""Sparse products against a loop over the edges, their derivatives, memory, and what a compiler makes of them."""

import warnings
from contextlib import nullcontext

import pytest
import torch
from torch.autograd import gradcheck, gradgradcheck
from torch.utils._python_dispatch import TorchDispatchMode

from structconv.errors import ShapeError
from structconv.primitives import csr
from structconv.primitives.csr import sddmm, spmm
from structconv.primitives.layout import compress
from tests.support.drawn import EVERY
from tests.support.threads import on_threads

F64 = torch.float64


class Edges:
    """A random bipartite edge list with its two layouts."""

    def __init__(self, m, n, e, dtype=torch.int64, seed=0):
        g = torch.Generator().manual_seed(seed)
        self.m, self.n, self.e = m, n, e
        self.source = torch.randint(max(m, 1), (e,), generator=g).to(dtype)
        self.target = torch.randint(max(n, 1), (e,), generator=g).to(dtype)
        self.layouts = (compress(self.target, self.source, n), compress(self.source, self.target, m))

    def dense(self, values):
        """(..., E) -> (..., M, N), duplicates added."""
        a = values.new_zeros((*values.shape[:-1], self.m, self.n))
        for i, (s, t) in enumerate(zip(self.source.tolist(), self.target.tolist(), strict=True)):
            a[..., s, t] += values[..., i]
        return a


def reference(edges, values, x):
    values = torch.ones(edges.e, dtype=x.dtype) if values is None else values
    return edges.dense(values).transpose(-1, -2) @ x


CASES = [
    (None, (7, 3)), ((), (7, 3)), ((4,), (7, 3)), ((), (2, 4, 7, 3)), (None, (2, 4, 7, 3)),
    ((4,), (2, 4, 7, 3)), ((4,), (2, 1, 7, 3)), ((4,), (4, 7, 3)), ((2, 1), (2, 4, 7, 3)), ((2, 4), (2, 1, 7, 3)),
    ((2, 4), (7, 3)), ((2, 4), (4, 7, 3)), ((2, 1), (1, 4, 7, 3)), ((1, 4), (2, 1, 7, 3)), ((0,), (7, 3)),
    ((4,), (0, 4, 7, 3)), ((5, 1, 4), (2, 1, 7, 3)), ((5, 1, 4), (1, 2, 4, 7, 3)),
]


def operands(values_lead, x_shape, e, dtype=F64):
    torch.manual_seed(1)
    values = None if values_lead is None else torch.randn(*values_lead, e, dtype=dtype)
    return values, torch.randn(x_shape, dtype=dtype)


@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize(("values_lead", "x_shape"), CASES)
def test_spmm_equals_a_loop_over_edges(values_lead, x_shape, index_dtype):
    edges, (values, x) = Edges(7, 5, 30, index_dtype), operands(values_lead, x_shape, 30)
    torch.testing.assert_close(spmm(*edges.layouts, values, x), reference(edges, values, x), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("values_lead", "x_shape"), [
    (v, x) for v, x in CASES if len(x) > 2 or (v is not None and len(v) > 0)])
def test_sum_heads_equals_sum_of_products(values_lead, x_shape):
    edges, (values, x) = Edges(7, 5, 30), operands(values_lead, x_shape, 30)
    torch.testing.assert_close(spmm(*edges.layouts, values, x, sum_heads=True),
                               spmm(*edges.layouts, values, x).sum(-3), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, F64])
@pytest.mark.parametrize("learned", [False, True])
@pytest.mark.parametrize("values_lead", [None, (), (1,), (2, 1), (2, 4)])
def test_a_batch_that_shares_its_values_is_taken_as_it_lies(values_lead, learned, dtype):
    """One product of all samples, whose x is neither copied nor turned, and whose y lies as x does."""
    edges = Edges(7, 5, 20)
    values, x = operands(values_lead, (2, 4, 7, 3), 20, dtype)
    if learned and values is not None:
        values.requires_grad_()
    asked = []

    class Seen(TorchDispatchMode):
        def __torch_dispatch__(self, op, types, args=(), kwargs=None):
            asked.append(op)
            return op(*args, **(kwargs or {}))

    with Seen():
        y = spmm(*edges.layouts, values, x)
    assert torch.ops.structconv.spmm.default in asked and torch.ops.aten.clone.default not in asked
    assert y.is_contiguous()
    torch.testing.assert_close(y, reference(edges, values, x), rtol=1e-5, atol=1e-5)
    rows = [None] * 8 if values is None else values.expand(*y.shape[:-2], 20).reshape(8, 20)
    for sample, weights, own in zip(y.flatten(0, -3), rows, x.flatten(0, 1), strict=True):
        torch.testing.assert_close(sample, spmm(*edges.layouts, weights, own), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("values_lead", [None, (), (1,), (3,)])
def test_no_samples(values_lead):
    """As a traced program meets them that was made for any number."""
    edges = Edges(7, 5, 20)
    values, x = operands(values_lead, (0, 7, 4), 20)
    leaves = [t.requires_grad_() for t in (values, x) if t is not None]
    y = csr.edge_product(*edges.layouts[0], *edges.layouts[1], values, x, 0)
    assert y.shape == (0, 5, 4)
    for leaf, grad in zip(leaves, torch.autograd.grad(y.sum(), leaves), strict=True):
        assert grad.shape == leaf.shape and not grad.any()
    if EVERY and values_lead != (3,):
        product = torch.compile(lambda x: spmm(*edges.layouts, values, x), dynamic=True, backend="aot_eager")
        for samples in (3, 2, 0):
            x = torch.randn(samples, 7, 4, dtype=F64)
            torch.testing.assert_close(product(x), spmm(*edges.layouts, values, x))


@pytest.mark.parametrize("channels", [3, 40])
def test_many_samples_of_a_small_graph_are_shared_among_threads(channels):
    """Whole samples go to threads, and each has the numbers that it has alone."""
    edges = Edges(7, 5, 20)
    values, x = operands((3000, 1), (3000, 2, 7, channels), 20, torch.float32)
    q = torch.randn(3000, 2, 5, channels)
    (y, s), *others = on_threads(lambda: (spmm(*edges.layouts, values, x), sddmm(*edges.layouts, q, x)))
    assert all(torch.equal(y, other) and torch.equal(s, more) for other, more in others)
    for i in (0, 1499, 2999):
        assert torch.equal(y[i, 1], spmm(*edges.layouts, values[i, 0], x[i, 1]))
        assert torch.equal(s[i, 1], sddmm(*edges.layouts, q[i, 1], x[i, 1]))


@pytest.mark.parametrize("values_lead", [(), (1,), (2,)])
@pytest.mark.parametrize(("tables", "rows"), [(4, 4), (4, 1), (1, 4), (4, 2)])
def test_a_row_of_values_for_several_tables(tables, rows, values_lead):
    """Of the operator itself: the rows of values that one stands for, and its gradient, a sum over them."""
    edges = Edges(7, 5, 30)
    values, x = (t.requires_grad_() for t in operands(values_lead, (tables, 7, 3), 30))
    count = max(tables, rows)

    def product(values, x):
        return csr.edge_product(*edges.layouts[0], *edges.layouts[1], values, x, rows)

    each = values.view(-1, 30)
    several = reference(edges, each.repeat_interleave(count // len(each), 0), x.repeat_interleave(count // tables, 0))
    torch.testing.assert_close(product(values, x), several.unflatten(0, (rows, -1)).sum(1), rtol=1e-12, atol=1e-12)
    assert gradcheck(product, (values, x), fast_mode=True) and gradgradcheck(product, (values, x), fast_mode=True)


@pytest.mark.parametrize(("q_lead", "k_lead"), [
    ((), ()), ((3,), (3,)), ((2, 3), (1, 3)), ((2, 3), (2, 1)), ((2, 1), (1, 3)), ((), (2, 3)), ((0,), (0,)),
    ((3,), ())])
def test_sddmm_equals_gathered_dots(q_lead, k_lead):
    edges = Edges(7, 5, 30)
    q, k = torch.randn(*q_lead, 5, 4, dtype=F64), torch.randn(*k_lead, 7, 4, dtype=F64)
    expected = (q[..., edges.target, :] * k[..., edges.source, :]).sum(-1)
    torch.testing.assert_close(sddmm(*edges.layouts, q, k), expected, rtol=1e-12, atol=1e-12)


def test_two_ways_of_sampled_dots_agree(monkeypatch):
    edges = Edges(40, 30, 500)
    q, k = torch.randn(30, 6, dtype=F64), torch.randn(40, 6, dtype=F64)
    monkeypatch.setattr(csr, "_GATHER_BYTES", 3 * 6 * 8 * 7)
    torch.testing.assert_close(csr._gathered_dots(edges.layouts[0], q, k), csr._pattern_dots(edges.layouts[0], q, k))


def test_no_channels_and_mixed_dtypes():
    """The latter promote as a product does."""
    edges = Edges(7, 5, 30).layouts
    assert spmm(*edges, torch.ones(30), torch.ones(7, 0)).shape == (5, 0)
    assert not sddmm(*edges, torch.ones(5, 0), torch.ones(7, 0)).any()
    assert spmm(*edges, torch.ones(30, dtype=F64), torch.ones(7, 2)).dtype == F64
    assert sddmm(*edges, torch.ones(5, 2).bfloat16(), torch.ones(7, 2)).dtype == torch.float32


KERNELS = {"structconv::spmm": csr._spmm_kernel, "structconv::sddmm": csr._sddmm_kernel}


class LargestTensor(TorchDispatchMode):
    """Records the largest strided tensor that any operation returns, inside the registered kernels too."""

    def __init__(self):
        super().__init__()
        self.numel, self.seen = 0, set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.name().split(".")[0]
        self.seen.add(name)
        if name in KERNELS:
            with self:
                out = KERNELS[name](*args)
        else:
            out = func(*args, **(kwargs or {}))
        for t in torch.utils._pytree.tree_leaves(out):
            if isinstance(t, torch.Tensor) and t.layout == torch.strided:
                self.numel = max(self.numel, t.untyped_storage().nbytes() // t.element_size())
        return out


def test_never_an_edge_by_channel_tensor():
    m, e, k, c = 80, 4000, 3, 64
    edges = Edges(m, m, e)
    values, x = torch.randn(k, e, requires_grad=True), torch.randn(m, c, requires_grad=True)
    bound = max(k * e, k * m * c)
    assert bound < e * c / 5
    with LargestTensor() as largest:
        spmm(*edges.layouts, values, x).square().sum().backward()
    assert {"structconv::spmm", "structconv::sddmm"} <= largest.seen
    assert largest.numel <= bound
    with LargestTensor() as largest:
        q = torch.randn(m, c, requires_grad=True)
        sddmm(*edges.layouts, q, x).square().sum().backward()
    assert largest.numel <= max(e, m * c)
    with LargestTensor() as largest:
        (x[edges.source] * values[0, :, None]).sum()
    assert largest.numel >= e * c


def test_torch_warning_about_csr_is_not_shown():
    csr._silence_beta_warning.cache_clear()
    edges = Edges(4, 3, 6)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        spmm(*edges.layouts, None, torch.ones(4, 2))
        sddmm(*edges.layouts, torch.ones(3, 2), torch.ones(4, 2))


@pytest.mark.parametrize(("call", "message"), [
    (lambda t, s: spmm(t, s, None, torch.ones(5, 2)), "M=4"),
    (lambda t, s: spmm(t, s, torch.ones(5), torch.ones(4, 2)), "E=6"),
    (lambda t, s: spmm(t, s, torch.ones(2, 6), torch.ones(3, 4, 2)), "broadcast"),
    (lambda t, s: spmm(t, s, torch.ones(6), torch.ones(4, 2), sum_heads=True), "leading"),
    (lambda t, s: sddmm(t, s, torch.ones(4, 2), torch.ones(4, 2)), "N=3"),
    (lambda t, s: sddmm(t, s, torch.ones(3, 2), torch.ones(4, 3)), "D=2"),
    (lambda t, s: sddmm(t, s, torch.ones(2, 3, 2), torch.ones(3, 4, 2)), "broadcast")])
def test_sizes_that_do_not_fit(call, message):
    with pytest.raises(ShapeError, match=message):
        call(*Edges(4, 3, 6).layouts)


@pytest.mark.parametrize("profiled", [False, True])
def test_results_may_be_changed_in_place(path, profiled):
    """`nn.ReLU(inplace=True)` after a layer: torch refuses it for views that an `autograd.Function` returns."""
    edges, x = Edges(7, 5, 20), torch.randn(7, 3, requires_grad=True)
    with torch.autograd.profiler.profile() if profiled else nullcontext():
        (grad,) = torch.autograd.grad(spmm(*edges.layouts, None, x).relu_().sum(), x)
    expected = reference(edges, None, x)
    torch.testing.assert_close(grad, torch.autograd.grad(expected.relu().sum(), x)[0])
