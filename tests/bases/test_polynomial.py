import dataclasses

import pytest
import torch

from structconv import Chebyshev, ConfigError, Conv, Graph, ShapeError
from structconv.bases import Dense, Polynomial, Sparse, matrices
from structconv.primitives.polynomials import polynomial_analysis, polynomial_synthesis
from tests.support.errors import check_refused

F64 = torch.float64


def test_the_first_four_of_each_kind():
    a, identity = torch.randn(4, 4, dtype=F64), torch.eye(4, dtype=F64)
    for kind, powers in (("chebyshev", (identity, a, 2 * a @ a - identity, 4 * a @ a @ a - 3 * a)),
                         ("monomial", (identity, a, a @ a, a @ a @ a))):
        torch.testing.assert_close(Polynomial(Dense(a[None]), 3, kind).dense(), torch.stack(powers), rtol=0, atol=1e-12)


def test_no_power_is_formed():
    n = 3000
    line = torch.arange(n - 1)
    operator = Sparse(Graph(torch.stack([line, line + 1]), num_nodes=n))
    y = Polynomial(operator, 3, "monomial").analysis(torch.eye(n)[:, :2])
    assert y[3].nonzero().tolist() == [[3, 0], [4, 1]]


def test_errors_name_what_came():
    check_refused(
        (ShapeError, "K=1", lambda: Polynomial(Dense(torch.zeros(2, 3, 3)), 2)),
        (ShapeError, "M=N", lambda: Polynomial(Dense(torch.zeros(1, 3, 4)), 2)),
        (ConfigError, "first=3, order=2", lambda: Polynomial(Dense(torch.zeros(1, 3, 3)), 2, first=3)),
        (ConfigError, "legendre", lambda: Polynomial(Dense(torch.zeros(1, 3, 3)), 2, "legendre")))


def ring(nodes=40, extra=120):
    """A ring with random chords, repeated edges and loops among them, and one node without edges."""
    line, generator = torch.arange(nodes - 1), torch.Generator().manual_seed(3)
    chords = torch.randint(0, nodes - 1, (2, extra), generator=generator)
    return Graph(torch.cat([torch.stack([line, line.roll(1)]), chords], 1), num_nodes=nodes)


def over_edges(dtype, order=4, kind="chebyshev", first=0):
    graph, generator = ring(), torch.Generator().manual_seed(5)
    values = (torch.randn(graph.num_edges, generator=generator, dtype=F64) / 8).to(dtype)
    return Polynomial(Sparse(graph, values), order, kind, first)


@pytest.mark.parametrize(("kind", "order", "first"), [("chebyshev", 4, 0), ("chebyshev", 5, 2), ("monomial", 4, 1),
                                                      ("monomial", 0, 0), ("chebyshev", 3, 3)])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_edges_by_the_fused_recurrence(dtype, kind, order, first):
    """Values and gradients of both primitives against the dense polynomial in float64, in units of its terms."""
    basis = over_edges(dtype, order, kind, first)
    dense = Polynomial(Sparse(basis.operator.graph, basis.operator.values.double()), order, kind, first).dense()
    generator = torch.Generator().manual_seed(0)
    nodes, size = basis.num_inputs, basis.size
    x = torch.randn(2, nodes, 5, generator=generator, dtype=F64).to(dtype).requires_grad_()
    r = torch.randn(2, size, nodes, 5, generator=generator, dtype=F64).to(dtype).requires_grad_()
    for given, run, reference in ((x, basis.analysis, lambda t: dense.mT @ t.unsqueeze(-3)),
                               (r, basis.synthesis, lambda t: (dense.mT @ t).sum(-3))):
        copy = given.detach().double().requires_grad_()
        y, expected = run(given), reference(copy)
        seed = torch.randn(expected.shape, generator=generator, dtype=F64).to(dtype)
        expected.backward(seed.double())
        y.backward(seed)
        for ours, theirs in ((y, expected), (given.grad, copy.grad)):
            assert ours.dtype == dtype
            bound = 8 * (order + 1) * torch.finfo(dtype).eps * max(1.0, theirs.abs().max().item())
            torch.testing.assert_close(ours.double(), theirs, rtol=0, atol=bound)


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("kind", ["chebyshev", "monomial"])
def test_samples_of_few_channels_are_those_alone(kind, channels):
    """They lie side by side within the operators: values, gradients of both orders, any leading dimensions."""
    basis = dataclasses.replace(over_edges(F64, 4, first=1), kind=kind)
    x = torch.randn(2, 3, 40, channels, dtype=F64, requires_grad=True)
    r = torch.randn(3, 4, 40, channels, dtype=F64, requires_grad=True)
    for run, given in ((basis.analysis, x), (basis.synthesis, r)):
        y = run(given)
        single = torch.stack([run(part) for part in (given.flatten(0, -4) if run == basis.analysis else given)])
        torch.testing.assert_close(y.reshape(single.shape), single, rtol=0, atol=1e-12)
        seed = torch.randn_like(y)
        ours, theirs = (torch.autograd.grad(actual, given, seed.reshape(actual.shape))[0] for actual in (y, single))
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)
    assert torch.autograd.gradgradcheck(basis.analysis, torch.randn(2, 40, 1, dtype=F64, requires_grad=True),
                                        fast_mode=True)


def test_operators_refuse_what_does_not_fit():
    graph = Graph(torch.tensor([[0], [1]]), num_inputs=3, num_outputs=4)
    with pytest.raises(ShapeError, match="M=3, N=4"):
        polynomial_analysis(graph.by_target(), graph.by_source(), None, torch.zeros(3, 1), order=2)
    square = ring()
    with pytest.raises(ShapeError, match="M=40"):
        polynomial_synthesis(square.by_target(), square.by_source(), None, torch.zeros(2, 39, 1))
    with pytest.raises(ShapeError, match="dtype"):
        over_edges(torch.float32).analysis(torch.zeros(40, 2, dtype=F64))


@pytest.mark.parametrize("normalize", ["sym", None])
def test_the_largest_eigenvalue_of_a_laplacian_is_computed_where_asked(normalize, monkeypatch):
    edges = torch.randint(0, 40, (2, 90))
    edges = torch.cat([edges, edges.flip(0)], 1)
    graph = Graph(edges, num_nodes=40, edge_weight=torch.rand(90, dtype=torch.float64).repeat(2) + 0.1)
    laplacian = matrices.scaled_laplacian(graph, normalize, 2.0, torch.float64).dense(torch.float64)[0] + torch.eye(40)
    largest = torch.linalg.eigvalsh(laplacian).max().item()
    assert matrices.laplacian_bound(graph, normalize) == pytest.approx(largest, rel=1e-9)
    monkeypatch.setattr(matrices, "_DENSE_NODES", 0)
    graph.changed()
    again = dataclasses.replace(graph, edge_weight=graph.edge_weight.clone())
    assert matrices.laplacian_bound(again, normalize) == pytest.approx(largest, rel=1e-4)
    x = torch.randn(40, 3, dtype=torch.float64)
    asked, given = (Conv(Chebyshev(3, normalize, bound), 3, 2).to(torch.float64) for bound in ("computed", largest))
    given.load_state_dict(asked.state_dict())
    torch.testing.assert_close(asked(x, structure=graph), given(x, structure=graph), rtol=1e-4, atol=1e-4)
    assert "lambda_max='computed'" in repr(asked)
    assert matrices.laplacian_bound(Graph(edges[:, :0], num_nodes=3), None) == 2.0
    with pytest.raises(ConfigError, match="lambda_max"):
        Chebyshev(2, None, "largest")
