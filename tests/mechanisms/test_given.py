"""A basis or a tensor as a mechanism, fixed or learned, and what is added to scores."""

from functools import partial

import pytest
import torch
from torch import nn

from structconv import ConfigError, Conv, LowRank, ShapeError, conv
from structconv.bases import Dense, Shift, Sparse, fourier_basis, haar_basis
from structconv.mechanisms import STRUCTURE, Adjacency, DotProduct, Given, Learned, RelativeBias, Shifts
from structconv.structures import Causal, DenseMask, Graph, Grid, Samples, Window
from tests.support.errors import check_refused
from tests.support.library import random

F64, INF, M, N, P, Q = torch.float64, float("inf"), 6, 4, 3, 2
close = partial(torch.testing.assert_close, rtol=1e-10, atol=1e-10)
DOT = DotProduct(heads=2, dim=3).scaled()
FUTURE = torch.zeros(M, M, dtype=F64).masked_fill(torch.ones(M, M, dtype=torch.bool).tril(-1), -INF)


@pytest.mark.parametrize("given", [
    lambda: random(2, M, N), lambda: random(M, N), lambda: random(5, 1, M, N), lambda: nn.Parameter(random(2, M, N)),
    lambda: Dense(random(2, M, N)), lambda: Shift(Grid(M), (0, 1)),
    lambda: Sparse(Graph(torch.tensor([[0, 3], [1, 1]]), num_inputs=M, num_outputs=N), random(3, 2))])
def test_a_layer_over_it_is_the_convolution_with_it(given):
    held, x = given(), random(5, M, P)
    layer = Conv(Given(held), P, Q).to(F64)
    basis = held if not isinstance(held, torch.Tensor) else Dense(held if held.dim() > 2 else held.unsqueeze(0))
    for _ in range(2):
        close(layer(x), conv(x, basis, layer.weight()) + layer.bias)


def test_a_parameter_is_learned_and_each_layer_has_its_own():
    table = nn.Parameter(random(2, M, N))
    recipe = Given(table) | Given(random(1, M, N))
    first, second = (Conv(recipe, P, Q).to(F64) for _ in range(2))
    assert [name for name, _ in first.named_parameters() if "given" in name] == ["given.tensor0"]
    first(random(M, P)).sum().backward()
    assert first.given.tensor0.grad.any() and table.grad is None
    assert second.given.tensor0 is not first.given.tensor0
    assert {"given.tensor0", "given_1.tensor0"} <= set(first.state_dict())
    with torch.no_grad():
        first.given.tensor0.zero_()
    close(first(x := random(M, P))[..., :], conv(x, first.basis(x), first.weight()) + first.bias)
    assert not first.basis(x).dense()[:2].any()


def test_what_does_not_fit():
    layer = Conv(Given(random(2, M, N)), P, Q).to(F64)
    check_refused(
        (ShapeError, "M=6", lambda: layer(random(M + 1, P))),
        (ShapeError, r"z must have N=4 entries", lambda: layer(random(M, P), z=random(N + 1, P))),
        (ShapeError, "floating tensor", lambda: Given(torch.ones(2, 2, dtype=torch.int64))),
        (ShapeError, "floating tensor", lambda: Given(torch.ones(3))),
        (ConfigError, "a basis or a tensor", lambda: Given([1, 2])),
        (ConfigError, "must be added to scores", lambda: Adjacency() + Causal()),
        (ConfigError, "must be mechanisms", lambda: DOT + 1.0))


@pytest.mark.parametrize("term", [
    FUTURE, Causal(), Window(1), random(M, M), FUTURE + random(M, M), nn.Parameter(random(2, M, M)),
    Dense(random(1, M, M)), Graph(torch.tensor([[0, 3, 4], [1, 1, 5]]), num_nodes=M)], ids=lambda t: type(t).__name__)
def test_terms_in_the_log_domain(term):
    x = random(2, M, P)
    for expression in (DOT + term, *([term + DOT] if isinstance(term, torch.Tensor) else [])):
        layer = Conv(expression.softmax(), P, Q, weight=LowRank(2)).to(F64)
        score = next(part for part in layer.mechanism.modules() if isinstance(part, DotProduct))
        expected = (Dense(score.basis(x).dense() / 3**0.5) + term).softmax()
        close(layer.basis(x).dense(), expected.dense())
        close(layer(x), conv(x, expected, layer.weight()) + layer.bias)


def test_a_table_of_infinities_is_a_mask_and_nothing_else():
    assert repr(DOT + FUTURE) == repr(DOT.masked(keep=DenseMask(FUTURE == 0)))
    assert "STRUCTURE" in repr(DOT + STRUCTURE)
    size = (RelativeBias(2, heads=2) + torch.nn.Parameter(torch.ones(2, M, M))).size
    assert size == 2
    layer = Conv(Shifts([0, 1]) + torch.ones(2, M, M), P, Q)
    close(layer.basis(torch.zeros(M, P)).dense(), Shift(Grid(M), (0, 1)).dense() + 1)


@pytest.mark.parametrize("length", [1, 4, M])
def test_a_learned_table_takes_any_length_up_to_its_own(length):
    layer, x = Conv(Learned(M, size=2), P, Q).to(F64), random(5, length, P)
    table, theta = layer.mechanism.table, layer.weight.theta
    y = layer(x)
    close(y, torch.einsum("kmn,bmp,kpq->bnq", table[:, :length, :length], x, theta) + layer.bias)
    y.square().sum().backward()
    assert table.grad[:, :length, :length].abs().min() > 0
    assert table.grad.count_nonzero() == 2 * length ** 2


def test_a_learned_table_has_outputs_of_its_own_and_is_a_term_of_scores_of_others():
    layer, x = Conv(Learned(M, N, size=2), P, Q).to(F64), random(5, 3, P)
    close(layer(x), torch.einsum("kmn,bmp,kpq->bnq", layer.mechanism.table[:, :3], x, layer.weight.theta) + layer.bias)
    assert layer.mechanism.table.shape == (2, M, N) and set(layer.state_dict()) == {
        "weight.theta", "bias", "learned.table"}
    layer, x, z = Conv((DOT + Learned(M, size=2)).softmax(), P, Q, other_channels=5).to(F64), random(4, P), random(3, 5)
    dot, learned = layer.mechanism.mechanisms()
    scores = dot.basis(x, z=z).dense() + learned.table[:, :4, :3]
    close(layer.basis(x, z=z).dense(), scores.softmax(-2))


def test_samples_of_a_learned_table_begin_at_its_first_row():
    for layer, sizes in ((Conv(Learned(M), P, Q).to(F64), (4, 2)), (Conv(Learned(M, N), P, Q).to(F64), (5, 3))):
        xs = [random(size, P) for size in sizes]
        close(layer(torch.cat(xs), structure=Samples(list(sizes))), torch.cat([layer(x) for x in xs]))


def test_sizes_beyond_a_learned_table_are_named():
    check_refused(
        (ShapeError, r"Learned: x must have at most M=6 entries; got 7\. .*Learned\(7, size=2\)",
         lambda: Conv(Learned(M, size=2), P, Q)(torch.randn(7, P))),
        (ShapeError, r"Learned: z must have at most N=6 entries; got 8\. .*Learned\(6, 8\)",
         lambda: Conv(Learned(M), P, Q)(torch.randn(4, P), z=torch.randn(8, P))),
        (ShapeError, r"N=4", lambda: Conv(Learned(M, N), P, Q)(torch.randn(3, P), z=torch.randn(5, P))),
        (ConfigError, "size", lambda: Learned(3, size=0)), (ConfigError, "Learned", lambda: Learned(0)),
        (ConfigError, "Learned", lambda: Learned(3, 0)), (ConfigError, "Learned", lambda: Learned(2.5)),
        (ConfigError, r"the table must be square; got 6, 4. Write Learned\(4, 6\)", Learned(M, N).transpose),
        (ConfigError, "haar_basis: num_entries must be a power of two; got 6", lambda: haar_basis(6)),
        (ConfigError, "fourier_basis", lambda: fourier_basis(0)))


@pytest.mark.parametrize("length", [1, 2, 5, 8, 12])
def test_a_fourier_basis_is_the_discrete_transform(length):
    real, imaginary = fourier_basis(length, dtype=F64)
    x = random(length, 3)
    expected = torch.fft.fft(x, dim=0)
    close(real.mT @ x, expected.real)
    close(imaginary.mT @ x, expected.imag)
    unitary = torch.complex(real, imaginary) / length ** 0.5
    close(unitary @ unitary.mH, torch.eye(length, dtype=torch.complex128))


@pytest.mark.parametrize("length", [1, 2, 8, 16])
def test_a_haar_basis_is_orthogonal_with_means_and_differences(length):
    (haar,) = haar_basis(length, dtype=F64)
    x = random(length)
    close(haar.mT @ haar, torch.eye(length, dtype=F64))
    coefficients = haar.mT @ x
    close(coefficients[0], x.mean() * length ** 0.5)
    if length > 1:
        half = length // 2
        close(coefficients[1], (x[:half].sum() - x[half:].sum()) / length ** 0.5)
        close(coefficients[half:], (x[::2] - x[1::2]) / 2 ** 0.5)


def test_a_given_basis_turns_around_with_its_tensors():
    table = nn.Parameter(random(2, M, N))
    layer, x = Conv(Given(table).transpose(), P, Q).to(F64), random(5, N, P)
    assert [name for name, _ in layer.named_parameters()] == ["bias", "weight.theta", "given.tensor0"]
    for _ in range(2):
        held = layer.mechanism.tensor0
        close(layer(x), torch.einsum("knm,bmp,kpq->bnq", held, x, layer.weight.theta) + layer.bias)
        layer.mechanism.tensor0 = nn.Parameter(random(2, M, N))
    autoencoder = Conv(Given(table) @ Given(table).transpose(), P, Q).to(F64)
    assert len(list(autoencoder.mechanism.parameters())) == 1
    a = next(autoencoder.mechanism.parameters())
    theta = autoencoder.weight.theta.unflatten(0, (2, 2))
    x = random(M, P)
    close(autoencoder(x), torch.einsum("kmr,jnr,mp,kjpq->nq", a, a, x, theta) + autoencoder.bias)
    assert Given(table).transpose().transpose().basis(x).num_inputs == M
