"""`mix`: combinations of heads before and after a softmax (talking heads), against einsums over dense tensors."""

import pytest
import torch

from structconv import STRUCTURE, BiAffine, ConfigError, Conv, Dense, DotProduct, ShapeError
from structconv.bases import Bilinear
from tests.support.errors import check_refused

F64, M, N = torch.float64, 7, 6


def numbers(*shape):
    return torch.randn(*shape, dtype=F64, requires_grad=True)


def scores(heads=3):
    return Bilinear(numbers(heads, N, 4), numbers(heads, M, 4))


def test_a_score_of_minus_infinity_is_absent_in_every_mixture():
    a = torch.randn(2, M, N, dtype=F64)
    a[1, 2, 3] = -torch.inf
    w = torch.tensor([[1.0, 1.0], [0.0, -1.0]], dtype=F64)
    weights = Dense(a).mix(w).softmax().dense()
    assert weights[:, 2, 3].abs().max() == 0
    assert weights.isfinite().all()


def test_learned_matrices_are_drawn_with_each_layer():
    expression = DotProduct(heads=4, dim=8).mix(6).softmax().mix(torch.eye(6))
    first, second = Conv(expression, 8, 8), Conv(expression, 8, 8)
    assert first.mechanism.size == 6
    learned = first.mixing.mixing
    assert learned.shape == (4, 6)
    assert not torch.equal(learned, second.state_dict()["mixing.mixing"])
    assert set(first.state_dict()) == {
        "weight.theta", "bias", "attention.query.weight", "attention.key.weight", "mixing.mixing", "mixing_1.mixing"}
    assert not first.state_dict()["mixing_1.mixing"].requires_grad
    before = learned.clone()
    first.reset_parameters()
    assert not torch.equal(before, learned)
    assert torch.equal(first.state_dict()["mixing_1.mixing"], torch.eye(6))


def test_errors_say_what_to_do():
    check_refused(
        (ShapeError, r"mix: the matrix must have shape \(K=4, J\); got \(3, 4\)",
         lambda: DotProduct(heads=4, dim=8).mix(torch.eye(3, 4))),
        (ShapeError, r"mix: the matrix must be floating, of shape \(K=3, J\)", lambda: scores().mix(torch.eye(4))),
        (ConfigError, "a basis must be given a matrix", lambda: scores().mix(3)),
        (ConfigError, "mix: heads must be", lambda: DotProduct(heads=4, dim=8).mix(0)),
        (ConfigError, "the matrix must be floating",
         lambda: DotProduct(heads=4, dim=8).mix(torch.ones(4, 4, dtype=torch.int64))))
    gat = BiAffine(heads=4, bilinear=False, on="projected").leaky_relu(0.2).masked(keep=STRUCTURE).softmax()
    assert gat.mix(4).size == 4
    with pytest.raises(ConfigError, match="on='projected'"):
        gat.mix(3)
