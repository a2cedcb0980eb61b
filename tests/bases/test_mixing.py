"""`mix`: combinations of heads before and after a softmax (talking heads), against einsums over dense tensors."""

from __future__ import annotations

import pytest
import torch

from structconv.bases import Bilinear, Dense, Sparse
from structconv.errors import ConfigError, ShapeError
from structconv.mechanisms import STRUCTURE, BiAffine, DotProduct, Identity, Shifts
from structconv.nn.conv import Conv
from structconv.structures import Causal, Graph, Window
from structconv.weights import LowRank

F64, M, N = torch.float64, 7, 6
GRAPH = Graph(torch.tensor([[0, 1, 1, 2, 3, 3, 4, 5, 0, 6], [1, 0, 2, 1, 2, 0, 5, 4, 3, 0]]), num_nodes=M)


def numbers(*shape):
    return torch.randn(*shape, dtype=F64, requires_grad=True)


def scores(heads=3):
    return Bilinear(numbers(heads, N, 4), numbers(heads, M, 4))


@pytest.mark.parametrize("mask", [None, Causal(), Window(1)], ids=str)
def test_scores_are_mixed_before_the_softmax_and_weights_after_it(mask):
    query, key, before, after = numbers(3, N, 4), numbers(3, M, 4), numbers(3, 4), numbers(4, 2)
    x, r = numbers(M, 5), numbers(2, M, 5)
    basis = Bilinear(query, key).mix(before)
    basis = (basis if mask is None else basis.masked(keep=mask)).softmax().mix(after)

    def dense():
        a = torch.einsum("knd,kmd,kj->jmn", query, key, before)
        if mask is not None:
            there = mask.contains(torch.arange(M)[:, None], torch.arange(N))
            a = a.masked_fill(~there, -torch.inf)
            a = torch.where(there.any(0), a, 0).softmax(-2) * there
        else:
            a = a.softmax(-2)
        return torch.einsum("kmn,kj->jmn", a, after)

    tensors = (query, key, before, after, x, r)
    cases = ((basis.dense(), dense()), (basis.analysis(x), dense().mT @ x), (basis.apply(r), dense().mT @ r),
             (basis.synthesis(r), (dense().mT @ r).sum(0)),
             (basis.transpose().dense(), dense().mT))
    for ours, theirs in cases:
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)
        weights = torch.randn_like(ours)
        found, expected = (torch.autograd.grad((y * weights).sum(), tensors, allow_unused=True) for y in (ours, theirs))
        for g, e in zip(found, expected, strict=True):
            assert (g is None) == (e is None)
            assert g is None or (g - e).abs().max() < 1e-11


def test_heads_of_two_masks_are_mixed_where_both_exist():
    a, b, w = numbers(2, M, N), numbers(1, M, N), numbers(3, 2)
    mixed = (Dense(a).masked(keep=Causal()) | Dense(b).masked(keep=Window(1))).mix(w)
    m, n = torch.arange(M)[:, None], torch.arange(N)
    there = (m <= n) & ((m - n).abs() <= 1)
    expected = torch.einsum("kmn,kj->jmn", torch.cat([a, b]), w)
    torch.testing.assert_close(mixed.dense(absent=-torch.inf), expected.masked_fill(~there, -torch.inf))
    x = numbers(M, 2)
    torch.testing.assert_close(mixed.analysis(x), (expected * there).mT @ x)
    assert mixed.softmax().dense()[:, ~there].abs().max() == 0


def test_matrices_side_by_side_are_mixed_where_one_of_them_exists():
    sparse = Sparse(GRAPH, numbers(2, GRAPH.num_edges))
    other, w = Dense(numbers(1, M, M)).softmax(), numbers(3, 2)
    mixed = (sparse | other).mix(w)
    expected = torch.einsum("kmn,kj->jmn", torch.cat([sparse.dense(), other.dense()]), w)
    torch.testing.assert_close(mixed.dense(), expected)
    torch.testing.assert_close(sparse.mix(w[:2]).normalize("count").dense(),
                               torch.einsum("kmn,kj->jmn", sparse.dense(), w[:2]) / M)


def test_a_score_of_minus_infinity_is_absent_in_every_mixture():
    a = torch.randn(2, M, N, dtype=F64)
    a[1, 2, 3] = -torch.inf
    w = torch.tensor([[1.0, 1.0], [0.0, -1.0]], dtype=F64)
    weights = Dense(a).mix(w).softmax().dense()
    assert weights[:, 2, 3].abs().max() == 0
    assert weights.isfinite().all()


def test_nan_stays_where_a_mask_keeps_it():
    x = torch.randn(M, 2, dtype=F64)
    x[-1] = torch.nan
    basis = Bilinear(torch.randn(3, M, 4, dtype=F64), torch.randn(3, M, 4, dtype=F64)).masked(keep=Causal())
    for mixed in (basis.mix(numbers(3, 2)).softmax(), basis.softmax().mix(numbers(3, 2))):
        y = mixed.analysis(x)
        assert y[:, :-1].isfinite().all()
        assert y[:, -1].isnan().all()


def test_a_layer_whose_weights_are_mixed():
    layer = Conv(DotProduct(heads=4, dim=8).scaled().softmax().mix(4), 8, 8, weight=LowRank(8)).to(torch.float32)
    x = torch.randn(2, 6, 8)
    whole = layer.basis(x).dense()
    values = torch.einsum("bmp,kpd->bkmd", x, layer.weight().value)
    expected = torch.einsum("bkmn,bkmd,kdq->bnq", whole, values, layer.weight().output) + layer.bias
    torch.testing.assert_close(layer(x), expected, rtol=1e-4, atol=1e-5)


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


def test_heads_beside_others_are_mixed_with_them():
    layer = Conv((DotProduct(heads=2, dim=4).softmax() | Shifts([-1, 1]) | Identity()).mix(3), 8, 8).to(F64)
    x = torch.randn(2, 6, 8, dtype=F64)
    parts = (layer.mechanism.mechanisms()[0].basis(x) | Identity().basis(x)).dense()
    matrix = layer.state_dict()["mixing.mixing"]
    torch.testing.assert_close(layer.basis(x).dense(), torch.einsum("bkmn,kj->bjmn", parts, matrix))
    expected = torch.einsum("bkmn,kj,bmp,jpq->bnq", parts, matrix, x, layer.state_dict()["weight.theta"]) + layer.bias
    torch.testing.assert_close(layer(x), expected)


def test_errors_say_what_to_do():
    with pytest.raises(ShapeError, match=r"mix: the matrix must have shape \(K=4, J\); got \(3, 4\)"):
        DotProduct(heads=4, dim=8).mix(torch.eye(3, 4))
    with pytest.raises(ShapeError, match=r"mix: the matrix must be floating, of shape \(K=3, J\)"):
        scores().mix(torch.eye(4))
    with pytest.raises(ConfigError, match="a basis must be given a matrix"):
        scores().mix(3)
    with pytest.raises(ConfigError, match="mix: heads must be"):
        DotProduct(heads=4, dim=8).mix(0)
    with pytest.raises(ConfigError, match="the matrix must be floating"):
        DotProduct(heads=4, dim=8).mix(torch.ones(4, 4, dtype=torch.int64))
    gat = BiAffine(heads=4, bilinear=False, on="projected").leaky_relu(0.2).masked(keep=STRUCTURE).softmax()
    assert gat.mix(4).size == 4
    with pytest.raises(ConfigError, match="on='projected'"):
        gat.mix(3)
