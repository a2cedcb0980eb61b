"""Theta of a given basis, and the best basis, of a linear map."""

import pytest
import torch

from structconv.errors import ConfigError, ShapeError
from structconv.ops import decompose, factorize
from structconv.tensors import compose
from tests.support.errors import check_refused

F64 = torch.float64


def rebuild(basis, theta):
    return torch.einsum("kmn,kpq->mnpq", basis, theta)


def relative(phi, basis, theta):
    return ((phi - rebuild(basis, theta)).norm() / phi.norm()).item()


@pytest.fixture
def phi():
    torch.manual_seed(0)
    return torch.randn(4, 3, 5, 2, dtype=F64)


def test_a_complete_basis_is_exact(phi):
    torch.manual_seed(1)
    for basis in (torch.eye(12, dtype=F64).reshape(12, 4, 3), torch.randn(12, 4, 3, dtype=F64)):
        theta, residual = decompose(phi, basis)
        assert theta.shape == (12, 5, 2) and residual < 1e-12
        torch.testing.assert_close(rebuild(basis, theta), phi, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize(("s", "t"), [((), ()), ((6,), (2,)), ((2, 3, 2), ()), ((2, 1, 3), (2, 2, 5)), ((0,), (3,))])
def test_any_shapes_of_indices(s, t):
    basis, theta = torch.randn(2 if s else 1, *s, dtype=F64), torch.randn(2 if s else 1, *t, dtype=F64)
    actual = decompose(compose(basis, theta), basis)
    assert actual.theta.shape == theta.shape
    torch.testing.assert_close(compose(basis, actual.theta), compose(basis, theta), rtol=1e-10, atol=1e-10)


def test_an_incomplete_basis_gives_least_squares(phi):
    basis = torch.randn(4, 4, 3, dtype=F64)
    theta, residual = decompose(phi, basis)
    assert 0.1 < residual < 1
    assert residual == pytest.approx(relative(phi, basis, theta), abs=1e-13)
    misfit = phi - rebuild(basis, theta)
    assert torch.einsum("kmn,mnpq->kpq", basis, misfit).abs().max() < 1e-12
    for _ in range(5):
        assert relative(phi, basis, theta + 1e-3 * torch.randn_like(theta)) > residual


def test_dependent_matrices_give_the_theta_of_least_norm(phi):
    basis = torch.randn(3, 4, 3, dtype=F64)
    single = decompose(phi, basis)
    twice = decompose(phi, torch.cat([basis, basis, torch.zeros(1, 4, 3, dtype=F64)]))
    assert twice.residual == pytest.approx(single.residual, abs=1e-13)
    half = single.theta / 2
    expected = torch.cat([half, half, torch.zeros_like(half[:1])])
    torch.testing.assert_close(twice.theta, expected, rtol=1e-10, atol=1e-10)
    more = decompose(phi, torch.randn(20, 4, 3, dtype=F64))
    assert more.theta.shape == (20, 5, 2) and more.residual < 1e-12


@pytest.mark.parametrize("method", ["svd", "randomized"])
@pytest.mark.parametrize("size", [1, 3, 10])
def test_no_pair_of_that_size_is_nearer(phi, method, size):
    singular = torch.linalg.svdvals(phi.reshape(12, 10))
    best = (singular[size:].norm() / singular.norm()).item()
    basis, theta, residual = factorize(phi, size=size, method=method)
    assert residual == pytest.approx(best, rel=1e-6, abs=1e-12)
    assert relative(phi, basis, theta) == pytest.approx(best, rel=1e-6, abs=1e-12)
    assert decompose(phi, basis).residual == pytest.approx(residual, abs=1e-9)
    assert decompose(phi, torch.randn_like(basis)).residual > best - 1e-12
    top = basis.flatten(1).gather(1, basis.flatten(1).abs().argmax(1, keepdim=True))
    assert (top > 0).all()
    torch.testing.assert_close(basis.flatten(1).norm(dim=1), theta.flatten(1).norm(dim=1))


def test_dtype_is_kept():
    phi = rebuild(torch.randn(2, 3, 4), torch.randn(2, 5, 2)).bfloat16()
    basis, theta, residual = factorize(phi, size=2)
    assert basis.dtype == theta.dtype == torch.bfloat16 and residual < 0.02
    theta, residual = decompose(phi, basis)
    assert theta.dtype == torch.bfloat16 and residual < 0.05


@pytest.mark.parametrize(("call", "error"), [
    (lambda phi: decompose(phi[0], torch.ones(2, 4, 3, dtype=F64)), ShapeError),
    (lambda phi: decompose(phi.long(), torch.ones(2, 4, 3, dtype=F64)), ShapeError),
    (lambda phi: decompose(phi, torch.ones(2, 3, 4, dtype=F64)), ShapeError),
    (lambda phi: decompose(phi, torch.ones(1, 2, 4, 3, dtype=F64)), ShapeError),
    (lambda phi: decompose(phi, torch.ones(2, 4, 3)), ShapeError),
    (lambda phi: factorize(phi[0], size=1), ShapeError),
    (lambda phi: factorize(phi, size=0), ConfigError),
    (lambda phi: factorize(phi, size=11), ConfigError),
    (lambda phi: factorize(phi, size=1, method="qr"), ConfigError)])
def test_what_does_not_fit(phi, call, error):
    with pytest.raises(error, match=r"; got "):
        call(phi)


@pytest.mark.parametrize(("s", "t"), [((6,), (5,)), ((2, 3, 2), (4,)), ((12,), (2, 2, 3)), ((), ()), ((3, 2, 1), ()),
                                   ((3, 2), (5,)), ((3, 2), (2, 5, 2))])
def test_a_tensor_over_any_index_shapes_is_factorized(s, t):
    phi = torch.randn((*s, *t), dtype=F64)
    rank = min(phi.new_empty(s).numel(), phi.new_empty(t).numel())
    whole = factorize(phi, size=rank, axes=len(s))
    assert whole.basis.shape == (rank, *s)
    assert whole.theta.shape == (rank, *t)
    assert whole.residual < 1e-12
    torch.testing.assert_close(compose(whole.basis, whole.theta), phi, rtol=1e-10, atol=1e-10)
    if rank > 1:
        near = factorize(phi, size=rank - 1, axes=len(s))
        values = torch.linalg.svdvals(phi.reshape(phi.new_empty(s).numel(), -1))
        assert near.residual == pytest.approx(float(values[-1] / phi.norm()), abs=1e-12)


def test_linear_maps_with_more_than_two_axes_of_indices():
    basis, theta = torch.randn(2, 3, 2, 4, dtype=F64), torch.randn(2, 2, 3, dtype=F64)
    actual = factorize(compose(basis, theta), size=2, axes=3)
    assert actual.residual < 1e-12
    torch.testing.assert_close(compose(actual.basis, actual.theta), compose(basis, theta), rtol=1e-10, atol=1e-10)
    check_refused(
        (ShapeError, r"\(M, N, P, Q\); got \(3, 2, 4, 2, 3\).* axes=",
         lambda: factorize(compose(basis, theta), size=2)),
        (ShapeError, r"\(\*S, \*T\) with 6 axes of S", lambda: factorize(compose(basis, theta), size=2, axes=6)),
        (ConfigError, "axes must be an integer >= 0", lambda: factorize(compose(basis, theta), size=2, axes=-1)),
        (ConfigError, r"at most min\(\|S\|, \|T\|\) = 6; got 7",
         lambda: factorize(compose(basis, theta), size=7, axes=3)))
