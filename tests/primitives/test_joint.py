"""Attention on one table of queries, keys and values, native and not, against float64 sums over the edges."""

from __future__ import annotations

import pytest
import torch
from torch.autograd import gradcheck, gradgradcheck

from structconv.errors import ShapeError
from structconv.primitives.native.joint import joint_attention
from tests.primitives.edge_lists import random_edges, softmax_sum

F64 = torch.float64
SHAPES = [(4, 32, 32), (1, 7, 5), (3, 20, 12), (2, 64, 64), (5, 1, 1), (17, 8, 3)]


def tensors(edges, heads, channels, depth, square, dtype=torch.float32):
    """The table, and q and a bias where q is not in the table."""
    torch.manual_seed(heads * channels)
    table = torch.randn(edges.m, heads * ((2 if square else 1) * depth + channels))
    more = () if square else (torch.randn(edges.n, heads, depth), torch.randn(heads, edges.e))
    return [t.to(dtype).requires_grad_() for t in (table, *more)]


def reference(edges, heads, depth, table, q=None, bias=None, drop=None):
    narrow = [heads * depth] * (2 if q is None else 1)
    parts = [part.unflatten(-1, (heads, -1)) for part in table.split([*narrow, table.shape[1] - sum(narrow)], 1)]
    q, k, v = parts if q is None else (q, *parts)
    scores = 0.5 * (q[edges.target] * k[edges.source]).sum(-1).t()
    return softmax_sum(edges, scores if bias is None else scores + bias, v, drop)


@pytest.mark.parametrize("square", [False, True])
@pytest.mark.parametrize(("heads", "channels", "depth"), SHAPES)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-4), (torch.bfloat16, 0.03)], ids=str)
def test_values_and_gradients(path, heads, channels, depth, square, dtype, tolerance):
    edges, seed = random_edges(n=60 if square else 40), torch.tensor(17)
    inputs = tensors(edges, heads, channels, depth, square, dtype)
    doubles = [t.detach().double().requires_grad_() for t in inputs]
    for p, drop in ((0.0, None), (0.4, (0.4, seed, heads))):
        got = joint_attention(*edges.layouts, *inputs, heads=heads, depth=depth, scale=0.5, dropout=p, seed=seed)
        expected = reference(edges, heads, depth, *doubles, drop=drop)
        assert got.dtype == dtype
        grad = torch.randn(got.shape, generator=torch.Generator().manual_seed(3)).to(dtype)
        found, wanted = torch.autograd.grad(got, inputs, grad), torch.autograd.grad(expected, doubles, grad.double())
        for a, b in zip((got, *found), (expected, *wanted), strict=True):
            error = (a.double() - b).abs().max() / b.abs().max().clamp(min=1.0)
            assert error <= tolerance, f"{error:.2g}"


def test_second_derivatives():
    for square in (False, True):
        edges = random_edges(7, 7 if square else 6, 20)
        inputs = tensors(edges, 2, 3, 2, square, F64)

        def attend(*t, layouts=edges.layouts):
            return joint_attention(*layouts, *t, heads=2, depth=2)

        assert gradcheck(attend, inputs)
        assert gradgradcheck(attend, inputs)


@pytest.mark.parametrize("dtype", [torch.float32, F64])
@pytest.mark.parametrize("square", [False, True])
def test_operator_contracts(dtype, square):
    edges = random_edges(9, 9 if square else 8, 30)
    table, *more = tensors(edges, 2, 8, 4, square, dtype)
    layouts = [t for layout in edges.layouts for t in layout]
    torch.library.opcheck(torch.ops.structconv.joint_attention.default,
                          (*layouts, table, *(more or (None, None)), 2, 4, 0.5, 0.3, torch.tensor(3), 2))


@pytest.mark.parametrize(("change", "message"), [
    ({"table": torch.ones(59, 24)}, "M=60"), ({"table": torch.ones(60, 7)}, "table"),
    ({"q": None}, "inputs are not the outputs"), ({"q": torch.ones(40, 2, 5)}, "q must"),
    ({"q": torch.ones(40, 2, 4).double()}, "dtype"), ({"bias": torch.ones(2, 399)}, "E=400"),
])
def test_what_is_refused(change, message):
    edges = random_edges()
    given = {"table": torch.ones(60, 24), "q": torch.ones(40, 2, 4)} | change
    with pytest.raises(ShapeError, match=message):
        joint_attention(*edges.layouts, **given, heads=2, depth=4)
