"""Sparsemax, entmax, top-k, hard attention, sinks and one's own normalizations, against plain torch, masks included."""

import pickle

import pytest
import torch

from structconv import Causal, ConfigError, Conv, DotProduct, Graph, Identity, ShapeError, Window
from structconv.bases import Bilinear, TopK, normalizations, register_normalization
from structconv.structures import DenseMask

F64, M, N = torch.float64, 7, 6
POWER_LAW = Graph(torch.tensor([[*range(M), 0, 1, 2, 3, 5, 6], [0] * M + [1, 1, 1, 2, 4, 4]]), num_inputs=M,
                  num_outputs=N)
MASKS = {"all": None, "causal": Causal(), "window": Window(1), "graph": POWER_LAW,
         "table": DenseMask(torch.arange(M * N).view(M, N) % 3 > 0),
         "nothing": DenseMask(torch.zeros(M, N, dtype=torch.bool))}


def scores(heads=2):
    return Bilinear(torch.randn(heads, N, 3, dtype=F64), torch.randn(heads, M, 3, dtype=F64)) * 1.5


def groups(basis, over):
    """The existing scores of each head and group, with where they are."""
    a = basis.dense(absent=float("nan"))
    for head in range(a.shape[0]):
        for n in range(a.shape[2 if over == "inputs" else 1]):
            at = (head, slice(None), n) if over == "inputs" else (head, n, slice(None))
            yield at, a[at]


def bisected(s, alpha):
    """entmax of a vector by 80 halvings (Blondel et al. 2019): what the exact ones must find."""
    low, high = ((alpha - 1) * s.max() - 1), (alpha - 1) * s.max()
    for _ in range(80):
        tau = (low + high) / 2
        total = ((alpha - 1) * s - tau).clamp(min=0).pow(1 / (alpha - 1)).sum()
        low, high = (tau, high) if total >= 1 else (low, tau)
    return ((alpha - 1) * s - low).clamp(min=0).pow(1 / (alpha - 1))


def largest(s, k):
    out, top = torch.zeros_like(s), s.topk(min(k, len(s))).indices
    out[top] = s[top].softmax(0)
    return out


EXPECTED = {"sparsemax": lambda s: bisected(s, 2.0), "entmax": lambda s: bisected(s, 1.5),
            "hard": lambda s: largest(s, 1), TopK(2): lambda s: largest(s, 2), TopK(100): lambda s: largest(s, 100)}


@pytest.mark.parametrize("over", ["inputs", "outputs"])
@pytest.mark.parametrize("kind", EXPECTED, ids=str)
def test_each_group_by_itself(kind, over):
    for mask in MASKS.values():
        basis = scores() if mask is None else scores().masked(keep=mask)
        actual = basis.normalize(kind, over).dense()
        for at, s in groups(basis, over):
            exists = ~s.isnan()
            expected = torch.zeros_like(s)
            if exists.any():
                expected[exists] = EXPECTED[kind](s[exists])
            torch.testing.assert_close(actual[at], expected, rtol=0, atol=1e-9)


@pytest.mark.parametrize("over", ["inputs", "outputs"])
@pytest.mark.parametrize(("mask", "sink"), list(zip(
    MASKS, [0.0, torch.tensor([0.3, -2.0], dtype=F64), -1.5] * 2, strict=True)))
def test_a_sink_is_one_more_score(mask, sink, over):
    basis = scores() if MASKS[mask] is None else scores().masked(keep=MASKS[mask])
    a, dim = basis.dense(absent=-torch.inf), -2 if over == "inputs" else -1
    more = torch.as_tensor(sink, dtype=F64).expand(2).view(2, 1, 1).expand(a.select(dim, 0).unsqueeze(dim).shape)
    expected = torch.cat([a, more], dim).softmax(dim).narrow(dim, 0, a.shape[dim])
    torch.testing.assert_close(basis.softmax(over, sink=sink).dense(), expected)
    large = (basis * 1e3).softmax(over, sink=sink)
    assert large.dense().isfinite().all()


def test_a_sink_is_learned_by_head_and_parts_have_their_own():
    dot = DotProduct(heads=2, dim=3)
    layer = Conv((dot | DotProduct(dim=3)).softmax(sink=torch.nn.Parameter(torch.zeros(3))), 4, 4)
    layer(torch.randn(5, 4)).sum().backward()
    (sink,) = (p for p in layer.mechanism.parameters() if p.shape == (3,))
    assert (sink.grad != 0).all()
    with pytest.raises(ShapeError, match="1 or K=2"):
        Conv(dot.softmax(sink=torch.zeros(3)), 4, 4)(torch.randn(5, 4))
    with pytest.raises(ConfigError, match="must have scores"):
        Identity().softmax(sink=0.0)
    assert not dot.softmax(sink=0.0).has_scores


def test_ones_own(monkeypatch):
    monkeypatch.setattr(normalizations, "_REGISTERED", dict(normalizations._REGISTERED))
    seen = []

    def squared(scores, keep, dim):
        seen.append(scores[~keep.expand_as(scores)].any().item())
        powers = scores.square() * keep
        return powers / powers.sum(dim, keepdim=True)

    register_normalization("squared", squared)
    for mask in MASKS.values():
        basis = scores() if mask is None else scores().masked(keep=mask)
        expected = basis.dense().square()
        total = expected.sum(-2, keepdim=True)
        expected = expected / total.masked_fill(total == 0, 1)
        for kind in ("squared", squared):
            torch.testing.assert_close(basis.normalize(kind).dense(), expected)
    assert not any(seen)
    layer = Conv(DotProduct(heads=2, dim=3).masked(keep=Causal()).normalize("squared"), 4, 4)
    assert pickle.loads(pickle.dumps(layer))(torch.ones(5, 4)).isfinite().all()
    assert "normalize(kind='squared'" in repr(layer)


@pytest.mark.parametrize("call", [
    lambda: scores().normalize("sparsmax"), lambda: DotProduct().normalize("sparsmax"), lambda: TopK(0),
    lambda: scores().normalize("sparsemax", over="rows"), lambda: register_normalization("sum", torch.sum),
    lambda: register_normalization("sparsemax", torch.sum), lambda: scores().normalize(torch.nn.Softmax(-1)),
    lambda: Identity().normalize("entmax")])
def test_what_is_refused(call):
    with pytest.raises(ConfigError, match=r"; got "):
        call()


def test_minus_infinity_is_absent():
    table = torch.tensor([[1.0, -torch.inf], [2.0, -torch.inf]], dtype=F64)
    dense = Bilinear(torch.zeros(1, 2, 1, dtype=F64), torch.zeros(1, 2, 1, dtype=F64))
    for kind in ("sparsemax", "entmax", TopK(1)):
        weights = (dense + table).normalize(kind).dense()[0]
        assert not weights[:, 1].any() and weights[:, 0].sum() == pytest.approx(1)
