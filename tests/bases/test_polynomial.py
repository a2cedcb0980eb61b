from __future__ import annotations

import pytest
import torch

from structconv.bases.dense import Dense
from structconv.bases.polynomial import Polynomial
from structconv.bases.sparse import Sparse
from structconv.errors import ConfigError, ShapeError
from structconv.structures import Graph

F64 = torch.float64


def operators():
    generator = torch.Generator().manual_seed(1)
    g = Graph(torch.randint(0, 5, (2, 9), generator=generator), num_nodes=5)
    def values(*shape):
        return torch.randn(shape, generator=generator, dtype=F64) / 3

    return [Dense(values(1, 5, 5)), Dense(values(2, 1, 5, 5)), Sparse(g, values(9)), Sparse(g, values(2, 1, 9))]


@pytest.mark.parametrize("kind", ["chebyshev", "monomial"])
@pytest.mark.parametrize("operator", operators(), ids=repr)
def test_laws(laws, operator, kind):
    for order in range(5):
        for first in {0, 1, order}:
            if first <= order:
                laws(Polynomial(operator, order, kind, first))


def test_the_first_four_of_each_kind():
    a = torch.randn(4, 4, dtype=F64)
    identity = torch.eye(4, dtype=F64)
    chebyshev = torch.stack([identity, a, 2 * a @ a - identity, 4 * a @ a @ a - 3 * a])
    monomial = torch.stack([identity, a, a @ a, a @ a @ a])
    torch.testing.assert_close(Polynomial(Dense(a[None]), 3).dense(), chebyshev, rtol=0, atol=1e-12)
    torch.testing.assert_close(Polynomial(Dense(a[None]), 3, "monomial").dense(), monomial, rtol=0, atol=1e-12)


def test_derivatives():
    a = torch.randn(1, 3, 3, dtype=F64, requires_grad=True)
    x = torch.randn(3, 2, dtype=F64, requires_grad=True)
    r = torch.randn(4, 3, 2, dtype=F64, requires_grad=True)
    for kind in ("chebyshev", "monomial"):
        assert torch.autograd.gradcheck(lambda a, x, kind=kind: Polynomial(Dense(a), 3, kind).analysis(x), (a, x))
        assert torch.autograd.gradcheck(lambda a, r, kind=kind: Polynomial(Dense(a), 3, kind).synthesis(r), (a, r))


def test_no_power_is_formed():
    n = 3000
    line = torch.arange(n - 1)
    operator = Sparse(Graph(torch.stack([line, line + 1]), num_nodes=n))
    y = Polynomial(operator, 3, "monomial").analysis(torch.eye(n)[:, :2])
    assert y[3].nonzero().tolist() == [[3, 0], [4, 1]]


def test_errors_name_what_came():
    with pytest.raises(ShapeError, match="K=1"):
        Polynomial(Dense(torch.zeros(2, 3, 3)), 2)
    with pytest.raises(ShapeError, match="M=N"):
        Polynomial(Dense(torch.zeros(1, 3, 4)), 2)
    with pytest.raises(ConfigError, match="first=3, order=2"):
        Polynomial(Dense(torch.zeros(1, 3, 3)), 2, first=3)
    with pytest.raises(ConfigError, match="legendre"):
        Polynomial(Dense(torch.zeros(1, 3, 3)), 2, "legendre")


def test_compiles_whole():
    def product(a, x):
        basis = Polynomial(Dense(a), 3)
        return basis.synthesis(basis.analysis(x))

    a, x = torch.randn(1, 4, 4), torch.randn(2, 4, 3)
    torch.testing.assert_close(torch.compile(product, fullgraph=True, backend="eager")(a, x), product(a, x))
