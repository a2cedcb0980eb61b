"""Products with narrow matrices: the numbers of `x @ w`, by whichever library."""

from __future__ import annotations

import pytest
import torch

from structconv.primitives.products import LEAST_NUMBERS, product


@pytest.mark.parametrize("columns", [1, 2, 7, 8, 9, 15, 16, 17])
@pytest.mark.parametrize("shape", [(300, 64), (3, 150, 64), (2, 3, 60, 64), (5, 4), (0, 64)])
@pytest.mark.parametrize("grad", ["none", "w", "both"])
def test_equal_to_the_plain_product(columns, shape, grad):
    x = torch.randn(shape, requires_grad=grad == "both")
    w = torch.randn(shape[-1], columns, requires_grad=grad != "none")
    wanted = [t for t in (x, w) if t.requires_grad]
    y, plain = product(x, w), (x.double() @ w.double())
    assert y.shape == plain.shape and y.is_contiguous() and y.dtype == torch.float32
    torch.testing.assert_close(y, plain.float(), rtol=1e-4, atol=1e-4)
    if wanted:
        up = torch.randn_like(y)
        for ours, theirs in zip(torch.autograd.grad(y, wanted, up), torch.autograd.grad(plain, wanted, up.double()),
                                strict=True):
            torch.testing.assert_close(ours, theirs.float(), rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("columns", [4, 12])
def test_strided_arguments(columns):
    x, w = torch.randn(64, 400).t(), torch.randn(columns, 64).t()
    torch.testing.assert_close(product(x, w), x @ w, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(product(x[::2], w), x[::2] @ w, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("grad", [False, True])
def test_rows_stay_apart(grad):
    x = torch.randn(600, 64)
    x[3], x[7] = torch.nan, torch.inf
    y = product(x.requires_grad_(grad), torch.randn(64, 5).requires_grad_(grad))
    assert x.numel() >= LEAST_NUMBERS
    assert not y[3].isfinite().any() and y[[0, 1, 2, 4, 5, 6]].isfinite().all() and y[8:].isfinite().all()


def test_other_dtypes_and_second_derivatives():
    x, w = torch.randn(300, 64, dtype=torch.float64), torch.randn(64, 5, dtype=torch.float64)
    assert torch.equal(product(x, w), x @ w)
    x, w = torch.randn(300, 64, requires_grad=True), torch.randn(64, 5, requires_grad=True)
    first, = torch.autograd.grad(product(x, w).square().sum(), x, create_graph=True)
    torch.testing.assert_close(torch.autograd.grad(first.sum(), w)[0],
                               torch.autograd.grad((2 * (x @ w) @ w.t()).sum(), w)[0], rtol=1e-3, atol=1e-2)


def test_one_program_for_any_number_of_rows():
    compiled = torch.compile(product, fullgraph=True, backend="aot_eager", dynamic=True)
    w = torch.randn(64, 5)
    for rows in (10, 300, 500):
        x = torch.randn(rows, 64)
        torch.testing.assert_close(compiled(x, w), x @ w, rtol=1e-4, atol=1e-4)
