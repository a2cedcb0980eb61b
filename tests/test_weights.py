"""Weights: what they hold, what they yield, and that outputs start with the variance of the inputs."""

import copy

import pytest
import torch

from structconv import (
    ConfigError,
    Conv,
    Dense,
    Depthwise,
    DotProduct,
    Eye,
    Full,
    Grouped,
    LowRank,
    Separable,
    ShapeError,
    Shared,
    Shifts,
    Window,
    conv,
)
from structconv.bases.dense import Identity
from structconv.testing import by_definition
from structconv.weights import DepthwiseSeparable, EyeBlocks, HeadBlocks, Weight, WeightList

K, P, Q = 4, 32, 32
WEIGHTS = {
    "full": (lambda: Full(), K * P * Q),
    "separable": (lambda: Separable(rank=3), 3 * (K + P * Q)),
    "separable, rank 1": (lambda: Separable(rank=1), K + P * Q),
    "depthwise separable": (lambda: DepthwiseSeparable(), P * (K + Q)),
    "low rank": (lambda: LowRank(8), K * 8 * (P + Q)),
    "grouped queries": (lambda: LowRank(8, shared_by=2), 8 * (2 * P + K * Q)),
    "depthwise": (lambda: Depthwise(), K * Q),
    "depthwise, shared": (lambda: Depthwise(heads=8), K * 8),
    "grouped": (lambda: Grouped(4), K * P * Q // 4),
    "shared": (lambda: Shared(), P * Q),
    "concatenated heads": (lambda: HeadBlocks(), P * Q),
}


@pytest.mark.parametrize("name", WEIGHTS)
def test_numbers_and_values(name):
    make, count = WEIGHTS[name]
    recipe = make()
    weight = recipe.bound(K, P, Q, dtype=torch.float64)
    assert sum(p.numel() for p in weight.parameters()) == count
    assert not recipe.is_value, "binding must not touch the recipe"
    theta = weight()
    assert (theta.size, theta.in_channels, theta.out_channels, theta.dtype) == (K, P, Q, torch.float64)
    theta.dense().sum().backward()
    assert all(p.grad is not None for p in weight.parameters())
    before = theta.dense().detach().clone()
    weight.scale_(2.0)
    torch.testing.assert_close(weight().dense(), 2 * before, rtol=1e-12, atol=0)
    other = make().bound(K, P, Q, dtype=torch.float64)
    other.load_state_dict(weight.state_dict())
    torch.testing.assert_close(other().dense(), copy.deepcopy(weight)().dense(), rtol=0, atol=0)


@pytest.mark.parametrize("name", WEIGHTS)
def test_variance_is_kept(name):
    """The mean over `draws` layers of Var(y)/Var(x); its spread between draws bounds the error of that mean."""
    draws, entries, outputs = 24, 64, 64
    energy = torch.tensor([0.01, 3.0, 0.5, 0.2], dtype=torch.float64)
    x = torch.randn(8, entries, P, dtype=torch.float64)
    ratios = []
    for _ in range(draws):
        a = torch.randn(K, entries, outputs, dtype=torch.float64) * (energy / entries).sqrt().view(-1, 1, 1)
        weight = WEIGHTS[name][0]().bound(K, P, Q, dtype=torch.float64)
        weight.reset_parameters(energy)
        with torch.no_grad():
            ratios.append(by_definition(x, Dense(a), weight()).var() / x.var())
    measured = torch.stack(ratios)
    standard_error = measured.std() / draws**0.5
    assert standard_error < 0.08
    assert abs(measured.mean() - 1) < 4 * standard_error + 0.01


def test_shared_counts_the_overlap_of_its_matrices():
    """K equal matrices add up to one of K^2 times the energy, which only their Gram matrix tells."""
    a = torch.randn(1, 64, 64, dtype=torch.float64).expand(K, -1, -1) / 8
    gram = torch.einsum("kmn,lmn->kl", a, a) / 64
    x = torch.randn(64, 64, P, dtype=torch.float64)
    weight = Shared().bound(K, P, 256, dtype=torch.float64)
    weight.reset_parameters(gram)
    with torch.no_grad():
        ratio = by_definition(x, Dense(a), weight()).var() / x.var()
    assert abs(ratio - 1) < 0.1


def test_weight_list():
    weight = WeightList([Full(), LowRank(8), Full()]).bound((1, 2, 3), P, Q, dtype=torch.float64)
    theta = weight()
    assert isinstance(theta, WeightList)
    assert [part.size for part in theta.parts] == [1, 2, 3]
    energies = torch.tensor([0.5, 1.0, 2.0, 1.0, 1.0, 4.0], dtype=torch.float64)
    weight.reset_parameters(energies)
    shares = [float((e * part.dense().detach().square().sum((1, 2))).sum() / Q)
              for part, e in zip(weight().parts, energies.split([1, 2, 3]), strict=True)]
    for share, size in zip(shares, (1, 2, 3), strict=True):
        assert abs(share - size / 6) < 0.1 * size / 6
    with pytest.raises(ConfigError, match="WeightList: weights must be 2, one for each part"):
        WeightList([Full()]).bound((1, 2), P, Q)


def test_a_basis_of_zeros_gives_finite_numbers():
    for make, _ in WEIGHTS.values():
        weight = make().bound(K, P, Q)
        weight.reset_parameters(torch.zeros(K))
        assert weight().dense().isfinite().all()


@pytest.mark.parametrize(("build", "message"), [
    (lambda: Separable(rank=0), "Separable: rank must be a positive integer; got 0"),
    (lambda: LowRank(0), "dim must be a positive integer"),
    (lambda: LowRank(2, shared_by=3).bound(4, P, Q), "shared_by must divide size=4; got shared_by=3"),
    (lambda: Grouped(3).bound(K, P, Q), "groups must divide in_channels=32; got groups=3"),
    (lambda: Depthwise(2).bound(K, P, Q), r"out_channels must be multiplier \* in_channels = 64; got 32"),
    (lambda: Depthwise(heads=5).bound(K, P, Q), "heads must divide in_channels=32; got heads=5"),
    (lambda: Depthwise(normalize="sum"), "normalize must be one of 'none', 'softmax'; got 'sum'"),
    (lambda: EyeBlocks().bound(5, P, Q), "size must divide in_channels=32; got size=5"),
    (lambda: EyeBlocks().bound(K, 3, 4), "EyeBlocks: out_channels must equal in_channels=3; got 4"),
    (lambda: Eye().bound(K, 3, 4), "out_channels must equal in_channels=3; got 4"),
    (lambda: Full().bound(0, P, Q), "size must be a positive integer; got 0"),
    (lambda: Full().bound(K, P, 0), "out_channels must be a positive integer; got 0"),
    (lambda: conv(torch.ones(3, 2), Identity(3), Full()), r"theta must have numbers; got Full\(\)"),
    (lambda: WeightList([]), "one or more Weight objects"),
    (lambda: Full().bound(K, P, Q).reset_parameters(torch.ones(3)), "energy must be a number or have shape"),
])
def test_errors(build, message):
    with pytest.raises(ValueError, match=message):
        build()


def test_patterns_shared_by_channels_and_normalized_over_k():
    weight = Depthwise(2, heads=4, normalize="softmax").bound(K, 8, 16)
    assert weight.depthwise.shape == (K, 4, 2)
    dense = weight().dense()
    for p in range(8):
        for j in range(2):
            expected = weight.depthwise[:, p // 2, j].exp() / weight.depthwise[:, p // 2, j].exp().sum()
            torch.testing.assert_close(dense[:, p, 2 * p + j], expected)
    assert dense.count_nonzero() == K * 16
    before = weight.depthwise.clone()
    weight.scale_(3.0)
    assert torch.equal(weight.depthwise, before)
    assert repr(weight).startswith("Depthwise(multiplier=2, heads=4, normalize='softmax'")


def test_heads_hand_on_their_blocks():
    theta, x = EyeBlocks().bound(2, 6, 6)(), torch.randn(3, 5, 6)
    dense = torch.zeros(2, 6, 6)
    dense[0, :3, :3] = dense[1, 3:, 3:] = torch.eye(3)
    assert torch.equal(theta.dense(), dense)
    assert torch.equal(theta.expand(x), torch.einsum("bmp,kpq->bkmq", x, dense))
    r = torch.randn(3, 2, 5, 6)
    assert torch.equal(theta.contract(r), torch.einsum("bknp,kpq->bnq", r, dense))
    assert torch.equal(theta.join(theta.heads(x)), x)
    assert torch.equal(theta.slice(1, 2).dense(), dense[1:])


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("path", [None, "operator_first"])
def test_fixed_weights_without_numbers_take_the_dtype_of_x(dtype, path):
    near = DotProduct(1, 4).masked(keep=Window(1)).softmax()
    for mechanism in (Shifts([0, 1]), near | Shifts([-1]), near | DotProduct(1, 4).softmax()):
        layer = Conv(mechanism, 6, 6, weight=EyeBlocks(), path=path, dtype=dtype)
        x = torch.randn(2, 9, 6, dtype=dtype)
        basis, theta = layer.basis(x).dense(dtype), layer.weight().dense().to(dtype)
        expected = torch.einsum("...kmn,...mp,kpq->...nq", basis, x, theta) + layer.bias
        assert layer(x).dtype == dtype
        torch.testing.assert_close(layer(x), expected, atol=2e-2 if dtype == torch.bfloat16 else 1e-12, rtol=0)
    part = EyeBlocks().bound(3, 6, 6)().slice(1, 3)
    r, whole = torch.randn(2, 2, 5, 6, dtype=dtype), part.dense().to(dtype)
    assert torch.equal(part.expand(r[:, 0]), torch.einsum("bmp,kpq->bkmq", r[:, 0], whole))
    assert torch.equal(part.contract(r), torch.einsum("bknp,kpq->bnq", r, whole))
    assert torch.equal(part.slice(1, 2).dense(), part.dense()[1:])


class Outer(Weight, filters="KH", pointwise="HPQ"):
    """A user's weight, which says no more than what it is."""

    filters: torch.Tensor
    pointwise: torch.Tensor

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def _extents(self, size, in_channels, out_channels):
        return {"H": self.rank}

    def dense(self):
        return torch.einsum("kh,hpq->kpq", self.filters, self.pointwise)


@pytest.mark.parametrize("mechanism", [Shifts([-1, 0, 1]), DotProduct(2, 3).softmax(),
                                       DotProduct(2, 3).masked(keep=Window(1)).softmax() | Shifts([1])])
@pytest.mark.parametrize("path", [None, "structure_first", "channels_first"])
def test_a_weight_of_the_user_needs_dense_alone(mechanism, path):
    layer = Conv(mechanism, 8, 6, weight=Outer(2), path=path, dtype=torch.float64)
    x = torch.randn(3, 9, 8, dtype=torch.float64)
    expected = by_definition(x, layer.basis(x), layer.weight()) + layer.bias
    torch.testing.assert_close(layer(x), expected)
    assert {"weight.filters", "weight.pointwise"} < set(layer.state_dict())


def test_a_weight_of_the_user_is_drawn_with_the_variance_of_its_inputs():
    energy = torch.tensor([1.0, 2.0, 0.5])
    theta = Outer(2).bound(3, 40, 50)
    theta.reset_parameters(energy, 3.0)
    of_outputs = (energy[:, None, None] * theta().dense().detach().square()).sum((0, 1)).mean()
    assert of_outputs.item() == pytest.approx(3.0, rel=1e-4)


class Circulant(Weight, generator="KBCS"):
    """Blocks of circulant matrices, whose axes are none of P and Q, and which read the option of the constructor."""

    generator: torch.Tensor
    in_channels = property(lambda self: self.generator.shape[1] * self.block)
    out_channels = property(lambda self: self.generator.shape[2] * self.block)

    def __init__(self, block: int) -> None:
        self.block = block

    def _extents(self, size, in_channels, out_channels):
        return {"B": in_channels // self.block, "C": out_channels // self.block, "S": self.block}

    def dense(self):
        i = torch.arange(self.block)
        return self.generator[..., (i[:, None] - i) % self.block].transpose(2, 3).flatten(1, 2).flatten(2, 3)


def test_a_weight_of_the_user_reads_its_options():
    layer = Conv(Shifts([-1, 0, 1]), 8, 6, weight=Circulant(2), dtype=torch.float64)
    x = torch.randn(3, 9, 8, dtype=torch.float64)
    torch.testing.assert_close(layer(x), by_definition(x, layer.basis(x), layer.weight()) + layer.bias)
    torch.testing.assert_close(copy.deepcopy(layer)(x), layer(x))
    assert repr(layer.weight) == "Circulant(2, K=3, P=8, Q=6)" and layer.weight().slice(0, 2).size == 2


def user_weight(dense, extents=None, **letters):
    attributes = {"__annotations__": {"a": torch.Tensor}, "__module__": __name__, "dense": dense}
    if extents is not None:
        attributes["_extents"] = lambda self, size, in_channels, out_channels: extents
    return type(Weight)("OwnWeight", (Weight,), attributes, **letters)()


@pytest.mark.parametrize(("build", "error", "message"), [
    (lambda: user_weight(lambda self: self.factors, factors="KPQ"), ConfigError,
     r"^OwnWeight: no tensor may have the name of an attribute of Weight; got factors. Rename it"),
    (lambda: user_weight(lambda self: self.a[0], a="KPQ"), ShapeError,
     r"^OwnWeight: dense must return a tensor \(K=3, P=8, Q=6\); got \(8, 6\)"),
    (lambda: user_weight(lambda self: None, a="KPQ"), ShapeError, "dense must return a .*; got NoneType"),
    (lambda: user_weight(lambda self: self.a.sum(-1), a="KPQZ"), ConfigError,
     r"^OwnWeight: _extents must return the size of each letter other than K, P and Q, here Z; got \[\]"),
    (lambda: user_weight(lambda self: self.a.sum(-1), {"Y": 2}, a="KPQZ"), ConfigError, r"here Z; got \['Y'\]"),
    (lambda: user_weight(lambda self: self.a), ConfigError,
     r"^OwnWeight: each tensor must have its axes in the class line, a='KPQ'; got \{\}"),
    (lambda: user_weight(lambda self: self.a[..., None].expand(-1, -1, 6), a="KP"), ConfigError,
     r"^OwnWeight: its tensors must have an axis Q, or the class a property out_channels; got \{'a': 'KP'\}")])
def test_mistakes_in_a_weight_of_the_user_are_named(build, error, message):
    with pytest.raises(error, match=message):
        Conv(Shifts([-1, 0, 1]), 8, 6, weight=build())(torch.randn(9, 8))
