"""Polynomials behind a product with channels, whose backward runs in the memory of x's gradient."""

import pytest
import torch

from structconv import Full, Graph, conv
from structconv.bases import Polynomial, Sparse
from structconv.kernels import polynomial
from structconv.primitives import polynomials
from tests.support.derivatives import same

F64 = torch.float64
M, P, Q = 50, 20, 4
KINDS = [("chebyshev", 4, 0), ("chebyshev", 5, 2), ("monomial", 4, 1), ("monomial", 3, 0), ("chebyshev", 1, 0)]


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """Several blocks of rows, the last of them short, and no input too small."""
    monkeypatch.setattr(polynomial, "LEAST_NUMBERS", 1)
    monkeypatch.setattr(polynomial, "LEAST_WIDTH", 1)
    monkeypatch.setattr(polynomials, "ROWS", 16)


@pytest.fixture
def calls(monkeypatch):
    """How often the backward in place ran."""
    actual, inner = [], polynomials._backward
    monkeypatch.setattr(polynomials, "_backward", lambda *given: (actual.append(1), inner(*given))[1])
    return actual


def problem(kind, order, first, dtype=F64):
    index = torch.randint(0, M - 1, (2, 200))
    values = (torch.randn(200, dtype=F64) / 8).to(dtype)
    basis = Polynomial(Sparse(Graph(index, num_nodes=M), values), order, kind, first)
    theta = torch.randn(basis.size, P, Q, dtype=F64).to(dtype).requires_grad_()
    return torch.randn(M, P, dtype=F64).to(dtype).requires_grad_(), basis, theta


def dense(x, basis, theta):
    wide = Polynomial(Sparse(basis.operator.graph, basis.operator.values.to(F64)), basis.order, basis.kind, basis.first)
    return torch.einsum("kmn,mp,kpq->nq", wide.dense(), x, theta)


@pytest.mark.parametrize(("kind", "order", "first"), KINDS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_values_and_gradients(kind, order, first, dtype, calls):
    x, basis, theta = problem(kind, order, first, dtype)
    copies = [t.detach().to(F64).requires_grad_() for t in (x, theta)]
    expected, before = dense(copies[0], basis, copies[1]), x.detach().clone()
    y = conv(x, basis, Full.of(theta), path="channels_first")
    seed = torch.randn(M, Q, dtype=F64).to(dtype)
    kept = seed.clone()
    bound = 1e-10 if dtype is F64 else 1e-4
    reference = torch.autograd.grad(expected, copies, seed.to(F64))
    actual = torch.autograd.grad(y, [x, theta], seed)
    for ours, theirs in ((y, expected), *zip(actual, reference, strict=True)):
        torch.testing.assert_close(ours.to(F64), theirs, rtol=bound, atol=bound)
    assert torch.equal(x, before) and torch.equal(seed, kept) and calls == [1]


def test_only_x_wants_a_gradient(calls):
    x, basis, theta = problem("chebyshev", 4, 0)
    y = conv(x.unsqueeze(0), basis, Full.of(theta.detach()), path="channels_first")
    expected = dense(x, basis, theta.detach())
    assert y.shape == (1, M, Q)
    same(y[0], expected, [x], 0, 1e-10)
    assert calls == [1]


def test_second_derivatives():
    x, basis, theta = problem("chebyshev", 3, 1)
    assert torch.autograd.gradgradcheck(lambda x, theta: conv(x, basis, Full.of(theta), path="channels_first"),
                                        (x, theta), fast_mode=True)


@pytest.mark.parametrize("change", ["no gradient of x", "more heads than channels", "values that learn", "bfloat16"])
def test_what_else_goes_head_by_head(change, calls):
    x, basis, theta = problem("chebyshev", 4, 0)
    if change == "no gradient of x":
        x = x.detach()
    elif change == "more heads than channels":
        theta = torch.randn(5, P, 8, dtype=F64, requires_grad=True)
    elif change == "values that learn":
        basis = Polynomial(Sparse(basis.operator.graph, basis.operator.values.clone().requires_grad_()), 4)
    else:
        values = basis.operator.values.bfloat16()
        x, theta = (t.detach().bfloat16().requires_grad_() for t in (x, theta))
        basis = Polynomial(Sparse(basis.operator.graph, values), 4)
    expected = dense(x.to(F64), basis, theta.to(F64))
    y = conv(x, basis, Full.of(theta), path="channels_first")
    y.sum().backward()
    tolerance = 0.1 if change == "bfloat16" else 1e-10
    torch.testing.assert_close(y.to(F64), expected, rtol=tolerance, atol=tolerance)
    assert not calls


@pytest.mark.parametrize("path", ["channels_first", "structure_first"])
def test_values_that_learn_after_others_did_not(path, calls):
    """The plan is the same; the recurrences take values for constants."""
    x, basis, theta = problem("chebyshev", 4, 0)
    conv(x, basis, theta, path=path)
    calls.clear()
    values = basis.operator.values.clone().requires_grad_()
    learned = Polynomial(Sparse(basis.operator.graph, values), 4)
    same(conv(x, learned, theta, path=path), dense(x, learned, theta), [x, theta, values], 0, 1e-10)
    assert not calls


def test_a_stranger_does_not_leak():
    index = torch.tensor([[0, 1, 2, 3], [1, 0, 3, 2]])
    basis = Polynomial(Sparse(Graph(index, num_nodes=4), torch.ones(4)), 2)
    x, theta = torch.randn(4, 16, requires_grad=True), torch.randn(3, 16, 4)
    y = conv(x, basis, Full.of(theta), path="channels_first")
    seed = torch.ones(4, 4)
    seed[3] = torch.nan
    y.backward(seed)
    assert x.grad[:2].isfinite().all() and x.grad[2:].isnan().all()
