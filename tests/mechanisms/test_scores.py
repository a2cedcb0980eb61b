"""Scores of pairs against their formulas, written out with torch's own operations on the mechanism's parameters."""

import pytest
import torch
from torch import nn

from structconv.bases.pairs import EDGE_BLOCK_ELEMENTS
from structconv.errors import ConfigError, ShapeError
from structconv.mechanisms import Additive, BiAffine, Channelwise, Context, DotProduct, General, Location, Pair, Rotary

F64 = torch.float64
B, M, N, P, R = 2, 6, 5, 4, 3
X = torch.randn(B, M, P, dtype=F64, generator=torch.Generator().manual_seed(1))
Z = torch.randn(B, N, R, dtype=F64, generator=torch.Generator().manual_seed(2))


def bound(mechanism, other=R):
    return mechanism.bound(P, None, other).to(F64)


def close(mechanism, expected, x=X, z=Z):
    torch.testing.assert_close(mechanism.basis(x, z=z).dense(F64), expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize(("parts", "rank"), [((1, 1, 1, 1), None), ((1, 0, 0, 0), 2), ((0, 1, 0, 0), None),
                                             ((0, 0, 1, 0), None), ((0, 0, 0, 1), 2), ((1, 0, 1, 1), 2)])
def test_biaffine_has_the_parts_it_is_asked_for(parts, rank):
    bilinear, source, target, constant = map(bool, parts)
    m = bound(BiAffine(3, bilinear=bilinear, source=source, target=target, constant=constant, rank=rank))
    a = torch.zeros(B, 3, M, N, dtype=F64)
    if bilinear:
        w = m.weight if rank is None else m.weight_source @ m.weight_target.mT
        a = a + torch.einsum("bmp,kpr,bnr->bkmn", X, w, Z)
    if source:
        a = a + torch.einsum("bmp,kp->bkm", X, m.vector_source).unsqueeze(-1)
    if target:
        a = a + torch.einsum("bnr,kr->bkn", Z, m.vector_target).unsqueeze(-2)
    if constant:
        nn.init.normal_(m.offset)
        a = a + m.offset.view(3, 1, 1)
    torch.testing.assert_close(m.basis(X, z=Z).dense(F64).expand_as(a), a, rtol=0, atol=1e-12)


def test_location_reads_z_alone():
    m = bound(Location(9, heads=2))
    a = m.basis(X, z=Z).dense()
    torch.testing.assert_close(a, m.basis(torch.randn_like(X), z=Z).dense())
    assert a.shape == (B, 2, M, N) and not torch.allclose(a[..., 0, :], a[..., 1, :])
    with pytest.raises(ShapeError, match="at most length=9 entries"):
        m.basis(torch.zeros(B, 10, P, dtype=F64), z=Z)


@pytest.mark.parametrize("module", [None, nn.Linear(P + R, 2, dtype=F64)])
def test_pair(module):
    m = bound(Pair(module, heads=2))
    pair = torch.cat([X.unsqueeze(-2).expand(B, M, N, P), Z.unsqueeze(-3).expand(B, M, N, R)], -1)
    close(m, m.module(pair).movedim(-1, 1))
    assert EDGE_BLOCK_ELEMENTS >= 1 and m.basis(X, z=Z)._width == m.hidden + P + R


@pytest.mark.parametrize("make", [
    lambda: DotProduct(heads=3, dim=5), lambda: General(heads=2), lambda: BiAffine(2, target=False, source=False),
    lambda: BiAffine(2, target=False, bilinear=False), lambda: BiAffine(2, rank=2, target=False, source=False)])
def test_scores_of_unit_variance_content_are_of_moderate_variance(make):
    m = make().bound(64)
    variance = m.basis(torch.randn(40, 64), z=torch.randn(40, 64)).dense().var().item()
    assert 0.05 < variance < 100


@pytest.mark.parametrize(("wrong", "error", "message"), [
    (lambda: DotProduct(heads=0), ConfigError, "DotProduct: heads must be a positive integer; got 0"),
    (lambda: Additive(dim=0), ConfigError, "dim must be a positive integer; got 0"),
    (lambda: BiAffine(heads=-1), ConfigError, "BiAffine: heads must be a positive integer; got -1"),
    (lambda: DotProduct(heads=2.0), ConfigError, "heads must be a positive integer; got 2.0"),
    (lambda: DotProduct(heads=3, dim=2, shared_by=2), ConfigError, "shared_by must divide heads=3; got shared_by=2"),
    (lambda: DotProduct().bound(4, 4, 5), ConfigError, "x and z must have the same number of channels; got 4 and 5"),
    (lambda: DotProduct(1, dim=3, rotary=Rotary()).bound(4).basis(torch.zeros(5, 4)), ConfigError,
     "must be even; got 3"),
    (lambda: BiAffine(bilinear=False, source=False, target=False), ConfigError, "at least one part must be there"),
    (lambda: BiAffine(on="values"), ConfigError, "on must be one of 'entries', 'projected'"),
    (lambda: BiAffine(on="projected").bound(4).basis(torch.zeros(5, 4)), ConfigError, "a layer must provide x Theta"),
    (lambda: Channelwise(5).bound(10), ConfigError, "Channelwise: channels must be those of x, P=10; got 5"),
    (lambda: Context(0), ConfigError, "queries must be a positive integer"),
])
def test_mistakes_are_named(wrong, error, message):
    with pytest.raises(error, match=message):
        wrong()
