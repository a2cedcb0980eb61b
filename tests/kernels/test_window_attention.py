"""Attention within a window by one operator equals the expression evaluated as dense matrices, values and gradients."""

import math

import pytest
import torch

from structconv import Causal, ConfigError, Grid, Samples, ShapeError, Window
from structconv.bases import Bilinear, Distance, Dropped, GridLookup, Lookup
from structconv.kernels import dense_attention, window_attention
from structconv.primitives import window as native
from structconv.primitives.native import core
from tests.kernels.applied import applied, call_of, computed, offered
from tests.support.threads import on_threads

KERNEL = "structconv.window_attention"
F64 = torch.float64
SEQUENCE, IMAGE = Grid((70,)), Grid((5, 40))
WINDOWS = {
    "sequence": (70, Window(9)),
    "wider than the sequence": (70, Window(200)),
    "many chunks": (300, Window(120)),
    "dilated": (70, Window(8, dilation=3)),
    "causal": (70, Window(17) & Causal()),
    "causal, dilated": (70, Causal() & Window(20, dilation=2)),
    "grid of one axis": (70, Window(9, grid=SEQUENCE)),
    "image": (200, Window((3, 19), grid=IMAGE)),
    "image, dilated": (200, Window((3, 19), dilation=(2, 1), grid=IMAGE)),
    "image, dilated along lines": (200, Window((5, 19), dilation=(1, 2), grid=IMAGE)),
    "samples": (70, Samples([30, 0, 1, 35, 4])),
    "causal samples": (70, Causal() & Samples([30, 0, 40])),
    "window within samples": (70, Samples([7, 33, 30]) & Window(9)),
    "causal window within samples": (70, Samples([7, 33, 30]) & (Window(9) & Causal())),
    "long samples": (700, Samples([300, 17, 383])),
    "three axes": (120, Window((3, 1, 19), grid=Grid((2, 3, 20)))),
}
HEADS = 3


def scores_of(name, lead=(), dtype=F64, kind=None, depth=6):
    """Scores in a window with their leaves."""
    length, window = WINDOWS[name]
    generator = torch.Generator().manual_seed(len(name))

    def leaf(*shape):
        return torch.randn(*shape, generator=generator).to(dtype).requires_grad_()

    q, k = leaf(*lead, HEADS, length, depth), leaf(HEADS, length, depth)
    basis, leaves = Bilinear(q, k) * depth**-0.5, [q, k]
    if kind in ("clip", "log"):
        table = leaf(HEADS, 1, 15 if kind == "clip" else 14)
        basis, leaves = basis + Lookup(table, kind, 7, length, length), [*leaves, table]
    elif kind == "grid":
        table = leaf(HEADS, *(2 * radius + 1 for radius in range(1, window.grid.ndim + 1)))
        basis, leaves = basis + GridLookup(table, window.grid), [*leaves, table]
    elif kind == "distance":
        slope = (leaf(HEADS).detach() * 0.1).requires_grad_()
        basis, leaves = Distance(slope, length, length) + basis, [*leaves, slope]
    r = leaf(*lead, HEADS, length, 5)
    return basis.masked(keep=window).softmax(over="inputs"), [*leaves, r]


def by_the_kernel(basis, r):
    """However narrow the window is; what is chosen is tested in test_window_choice.py."""
    return computed(KERNEL, call_of(basis, r), "between")


def check(basis, leaves, wide_basis, wide_leaves, tolerance):
    """The kernel against a product with the dense matrices of the same expression in float64."""
    got = by_the_kernel(basis, leaves[-1])
    expected = wide_basis.dense(F64).mT @ wide_leaves[-1]
    torch.testing.assert_close(got.double(), expected, rtol=tolerance, atol=tolerance)
    cotangent = torch.randn_like(expected)
    reference = torch.autograd.grad(expected, wide_leaves, cotangent)
    for a, b in zip(torch.autograd.grad(got, leaves, cotangent.to(got.dtype)), reference, strict=True):
        summed = 100 if b.dim() == 1 else 1  # the gradient of a slope adds up all pairs, times their distances
        torch.testing.assert_close(a.double(), b, rtol=tolerance, atol=summed * tolerance)


@pytest.fixture
def doubles(monkeypatch):
    """Float64 is given to the operator too, which computes it by torch's operators."""
    monkeypatch.setattr(window_attention, "STORED", (F64,))


@pytest.mark.parametrize(("name", "lead", "kind"), [  # each window with two kinds of bias, its neighbors with others
    (name, lead, (None, "clip", "log", "distance")[(at + 2 * len(lead)) % 4]) for at, name in enumerate(WINDOWS)
    if WINDOWS[name][0] < 300 for lead in ((), (2,))])
def test_equals_dense_matrices_in_float64(doubles, name, lead, kind):
    check(*scores_of(name, lead, F64, kind), *scores_of(name, lead, F64, kind), 1e-10)


@pytest.mark.parametrize(("name", "lead", "kind"), [
    (name, lead, (None, "clip", "distance")[(at + len(lead)) % 3]) for at, name in enumerate(WINDOWS)
    for lead in ((), (2,))])
def test_equals_dense_matrices_natively(name, lead, kind):
    if core() is None:
        pytest.skip("the native core cannot be built here")
    check(*scores_of(name, lead, torch.float32, kind), *scores_of(name, lead, F64, kind), 2e-5)


@pytest.mark.parametrize("lead", [(), (2,)])
@pytest.mark.parametrize("name", ["grid of one axis", "image", "image, dilated", "image, dilated along lines",
                                  "three axes"])
def test_a_bias_for_each_offset_on_a_grid(monkeypatch, name, lead):
    if core() is not None:
        check(*scores_of(name, lead, torch.float32, "grid"), *scores_of(name, lead, F64, "grid"), 2e-5)
    monkeypatch.setattr(window_attention, "STORED", (F64,))
    check(*scores_of(name, lead, F64, "grid"), *scores_of(name, lead, F64, "grid"), 1e-10)


@pytest.mark.parametrize("held", [0, 1 << 22])
@pytest.mark.parametrize("shape", [(7, 7), (3, 20), (2, 3, 4)])
@pytest.mark.parametrize("lead", [(), (4,)])
def test_a_bias_on_all_of_a_grid(monkeypatch, shape, held, lead):
    """A window of Swin is a small grid in which every pair exists."""
    monkeypatch.setattr(dense_attention, "HELD_WEIGHTS", held)
    kernel = "structconv.dense_attention" if held else KERNEL
    grid, actual = Grid(shape), []
    for dtype in (torch.float32, F64):
        generator = torch.Generator().manual_seed(5)
        leaves = [torch.randn(4, 2, grid.num_entries, 6, generator=generator).to(dtype) for _ in range(3)]
        leaves.append(torch.randn(*lead, 2, *(2 * size - 1 for size in shape), generator=generator).to(dtype))
        q, k, v, table = (t.requires_grad_() for t in leaves)
        basis = (Bilinear(q, k) * 0.4 + GridLookup(table, grid)).softmax(over="inputs")
        y = applied(basis, v, kernel) if dtype == torch.float32 else basis.dense(F64).mT @ v
        actual.append((y.double(), *(g.double() for g in torch.autograd.grad(y.square().sum(), leaves))))
    torch.testing.assert_close(*actual, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("depth", [1, 20, 64, 200])
def test_any_number_of_channels_in_either_storage(depth):
    for dtype, tolerance in ((torch.float32, 2e-5), (torch.bfloat16, 0.03)):
        _, leaves = scores_of("image", (), F64, None, depth)
        stored = [t.detach().to(dtype).requires_grad_() for t in leaves]
        wide = [t.detach().double().requires_grad_() for t in stored]
        actual = []
        for q, k, r in (stored, wide):
            basis = (Bilinear(q, k) * depth**-0.5).masked(keep=WINDOWS["image"][1]).softmax(over="inputs")
            y = by_the_kernel(basis, r) if dtype == q.dtype else basis.apply(r)
            assert y.dtype == q.dtype
            actual.append((y, *torch.autograd.grad(y, (q, k, r), torch.ones_like(y) / 7)))
        for a, b in zip(*actual, strict=True):
            torch.testing.assert_close(a.double(), b, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, F64])
def test_dropout_falls_where_the_pair_says(monkeypatch, dtype):
    monkeypatch.setattr(window_attention, "STORED", (torch.float32, F64))
    basis, leaves = scores_of("dilated", (2,), dtype, "clip")
    seed, r = torch.tensor(11), leaves[-1]
    dropped = Dropped(basis, 0.4, seed)
    expected = dropped.dense(dtype).mT @ r
    got = by_the_kernel(dropped, r)
    tolerance = 1e-10 if dtype == F64 else 2e-5
    torch.testing.assert_close(got, expected, rtol=tolerance, atol=tolerance)
    reference = torch.autograd.grad(expected.square().sum(), leaves)
    torch.testing.assert_close(torch.autograd.grad(got.square().sum(), leaves), reference, rtol=10 * tolerance,
                               atol=10 * tolerance)


def test_what_lies_outside_the_windows_does_not_leak(monkeypatch):
    for stored in (torch.float32, F64):
        monkeypatch.setattr(window_attention, "STORED", (stored,))
        for bad in (torch.nan, torch.inf):
            basis, leaves = scores_of("image", (), stored)
            with torch.no_grad():
                for t in leaves:
                    t[..., 5, :] = bad  # point (0, 5): a neighbor of lines 0, 1 and columns 0 to 14
            r = leaves[-1]
            y = by_the_kernel(basis, r)
            touched = torch.zeros(5, 40, dtype=torch.bool)
            touched[:2, :15] = True
            assert y[:, ~touched.flatten()].isfinite().all() and not y[:, touched.flatten()].isfinite().all(-1).any()
            grad = torch.zeros_like(y).index_fill_(1, torch.tensor([160]), 1.0)  # (4, 0), far from all of these
            for g in torch.autograd.grad(y, leaves, grad):
                assert g[:, 120:].isfinite().all()


def test_the_numbers_do_not_depend_on_threads():
    if core() is None:
        pytest.skip("the native core cannot be built here")
    basis, leaves = scores_of("many chunks", (2,), torch.float32, "clip")

    def run():
        y = by_the_kernel(basis, leaves[-1])
        return y, *torch.autograd.grad(y.square().sum(), leaves)

    assert all(map(torch.equal, *on_threads(run, (1, 3))))


def test_scores_that_are_no_scaled_product_with_a_bias_by_offset():
    q = torch.randn(2, 70, 4)
    window = Window(20)
    by_output = Lookup(torch.randn(2, 70, 15), "clip", 7, 70, 70)
    by_position = Lookup(torch.randn(2, 1, 70), "position", 70, 70, 70)
    by_place = GridLookup(torch.randn(2, 3, 3), Grid((7, 10)))
    for scores in (Bilinear(q, q) + by_output, Bilinear(q, q) + by_position, Bilinear(q, q) + by_place,
                   Bilinear(q, q).leaky_relu(0.2),
                   Bilinear(q.double(), q.double())):
        assert KERNEL not in offered(call_of(scores.masked(keep=window).softmax(over="inputs"), q))
    assert KERNEL not in offered(call_of(Bilinear(q, q).masked(keep=window).softmax(over="outputs"), q))
    fewer = q[:, :60]
    assert KERNEL not in offered(call_of(Bilinear(q, fewer).masked(keep=window).softmax(over="inputs"), fewer))


def test_large_scores_after_none():
    """A window whose first offsets are dropped and whose others score far below zero."""
    q = torch.full((200, 1, 1), 30.0)
    table = torch.zeros(1, 201)
    table[:, :90] = -torch.inf
    y = native.window_attention(q, -q, torch.ones(200, 1, 3), table, shape=(200,), below=(100,), above=(100,),
                                dilation=(1,))
    torch.testing.assert_close(y, torch.ones(200, 1, 3))
    none = native.window_attention(q, q, q, torch.full((1, 3), -torch.inf), shape=(200,), below=(1,), above=(1,),
                                   dilation=(1,))
    assert not none.any()


@pytest.mark.parametrize("change", [
    {"q": torch.ones(9, 2, 4)}, {"k": torch.ones(10, 2, 5)}, {"v": torch.ones(10, 3, 8)}, {"table": torch.ones(2, 4)},
    {"v": torch.ones(10, 2, 8).double()}, {"below": (1, 1)}, {"above": (-1,)}, {"dilation": (0,)}, {"dropout": 0.5}])
def test_sizes_and_options_are_checked(change):
    given = {"q": torch.ones(10, 2, 4), "k": torch.ones(10, 2, 4), "v": torch.ones(10, 2, 8), "shape": (10,),
             "below": (1,), "above": (1,), "dilation": (1,)}
    with pytest.raises(ShapeError if {*change} & {"q", "k", "v", "table"} else ConfigError):
        native.window_attention(**given | change)


def test_without_entries():
    for length in (0, 1):
        q = torch.randn(length, 2, 4, requires_grad=True)
        y = native.window_attention(q, q, q, shape=(length,), below=(3,), above=(3,), dilation=(1,))
        assert y.shape == q.shape and math.prod(y.shape) == 8 * length
        torch.testing.assert_close(y, q)
        y.sum().backward()


@pytest.mark.parametrize("dtype", [torch.float32, F64])
def test_sequences_of_different_lengths_and_numbers_of_inputs(dtype):
    """With a bias for each offset, and its gradient, against each sequence alone; second derivatives too."""
    inputs, outputs = (5, 3, 17, 0, 30), (2, 7, 0, 20, 33)
    starts = [torch.tensor([0, *sizes]).cumsum(0) for sizes in (outputs, inputs)]
    generator = torch.Generator().manual_seed(0)
    q, k, v, table = (torch.randn(*shape, generator=generator).to(dtype).requires_grad_() for shape in (
        (sum(outputs), 2, 8), (sum(inputs), 2, 8), (sum(inputs), 2, 5), (2, 65)))
    y = native.window_attention(q, k, v, table, shape=(33,), below=(32,), above=(32,), dilation=(1,),
                                outputs=starts[0], inputs=starts[1], scale=0.3)
    actual = []
    for q_, k_, v_ in zip(q.split(outputs), k.split(inputs), v.split(inputs), strict=True):
        offset = torch.arange(len(k_)) - torch.arange(len(q_)).unsqueeze(-1) + 32
        weights = (0.3 * torch.einsum("nkd,mkd->knm", q_, k_) + table[:, offset]).softmax(-1)
        actual.append(torch.einsum("knm,mkc->nkc", weights, v_))
    close = {"rtol": 1e-4, "atol": 1e-5}
    torch.testing.assert_close(y, torch.cat(actual), **close)
    cotangent = torch.randn(y.shape, generator=generator).to(dtype)
    own, reference = (torch.autograd.grad(result, (q, k, v, table), cotangent, create_graph=True)
                   for result in (y, torch.cat(actual)))
    torch.testing.assert_close(own, reference, **close)
    again, expected = (torch.autograd.grad(sum(g.square().sum() for g in grads), (q, k, v, table))
                       for grads in (own, reference))
    torch.testing.assert_close(again, expected, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("starts", [torch.tensor([0, 4, 3, 10]), torch.tensor([1, 10]), torch.tensor([0, 5, 9]),
                                    torch.tensor([0, 5, 10], dtype=torch.int32), torch.tensor([0, 10]), None])
def test_starts_of_sequences_that_would_lead_astray_are_refused(starts):
    q = torch.randn(10, 1, 3)
    with pytest.raises((ShapeError, ConfigError), match="window_attention"):
        native.window_attention(q, q, q, shape=(6,), below=(5,), above=(5,), dilation=(1,), outputs=starts,
                                inputs=torch.tensor([0, 5, 10]))


@pytest.mark.skipif(core() is None, reason="the native core cannot be built here")
def test_gradients_of_large_scores_are_exact():
    """Both passes of the backward round the scores as the forward does, and weights know the largest one exactly."""
    tensors, grad = [300 * torch.randn(70, 2, 6, generator=torch.Generator().manual_seed(i)) for i in range(3)], None
    results = []
    for dtype in (torch.float32, F64):
        leaves = [t.to(dtype).requires_grad_() for t in tensors]
        y = native.window_attention(*leaves, shape=[70], below=[5], above=[5], dilation=[1], scale=6**-0.5)
        grad = torch.ones_like(y).cumsum(0) / 70 if grad is None else grad
        results.append([y, *torch.autograd.grad(y, leaves, grad.to(dtype))])
    for ours, exact in zip(*results, strict=True):
        largest = float(exact.detach().abs().max())
        torch.testing.assert_close(ours.double(), exact, rtol=0, atol=1e-5 * max(largest, 1e-3))
