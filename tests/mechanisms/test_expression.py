"""Expressions of mechanisms: recipes that a layer binds, and what they refuse."""

import copy

import pytest
import torch

from structconv import ConfigError, Conv, Mechanism, ShapeError, StructureError
from structconv import Identity as IdentityMechanism
from structconv.bases import Bilinear, Concat, Dense, Identity
from structconv.mechanisms import STRUCTURE, Additive, Adjacency, BiAffine, Concatenation, DotProduct, Shifts, Uniform
from structconv.structures import Causal, DenseMask, Graph, Padding, Window
from structconv.weights import HeadBlocks
from tests.support.errors import check_refused

F64 = torch.float64
M, P = 6, 4


def test_an_expression_is_a_recipe():
    recipe = DotProduct(heads=2, dim=3).scaled().softmax()
    first, second = recipe.bound(P), recipe.bound(P + 1)
    assert not list(recipe.parameters())
    shapes = [sorted(tuple(p.shape) for p in m.parameters()) for m in (first, second)]
    assert shapes == [[(6, P)] * 2, [(6, P + 1)] * 2]
    assert not any(p is q for p in first.parameters() for q in recipe.bound(P).parameters())


def test_a_part_used_twice_has_its_parameters_once():
    score = Additive(dim=3)
    m = (score.softmax() | score.softmax(over="outputs")).bound(P)
    assert len(list(m.parameters())) == len(list(score.bound(P).parameters()))
    x = torch.randn(M, P)
    basis = m.basis(x)
    assert isinstance(basis, Concat) and basis.size == 2 == m.size


@pytest.mark.parametrize(("expression", "size"), [
    (DotProduct(heads=2, dim=3) | Uniform(), 3), (Shifts([0, 1]) @ Shifts([0, 1, 2]), 6),
    (DotProduct(heads=3, dim=2) + Uniform(), 3), (Uniform() * DotProduct(heads=3, dim=2), 3),
    (DotProduct(heads=3, dim=2).outer(Shifts([0, 1])), 6), (DotProduct(heads=3, dim=2).transpose(), 3),
    (-DotProduct(heads=3, dim=2) / 2.0, 3), (DotProduct(heads=2, dim=2).exp().tanh().relu().softcap(1.0), 2)])
def test_sizes_are_known_before_there_is_input(expression, size):
    assert expression.size == size
    assert expression.bound(P).to(F64).basis(torch.randn(M, P, dtype=F64)).size == size


@pytest.mark.parametrize("within", [lambda a: a, lambda a: a.softmax(), lambda a: a | IdentityMechanism(),
                                    lambda a: (a + DotProduct(dim=3)).softmax() @ a.transpose()])
@pytest.mark.parametrize(("name", "option"), [("reads", "content"), ("reads", ("contents",)),
                                              ("reads", ("projection",)), ("batching", "pair")])
def test_what_a_mechanism_reads_is_checked(within, name, option):
    class Near(Uniform):
        pass

    setattr(Near, name, option)
    with pytest.raises(ConfigError, match=f"Near: {name} must be"):
        within(Near()).bound(P)


@pytest.mark.parametrize("name", ["mix", "map", "basis", "on", "of", "scaled", "evaluate", "bound", "tanh", "dropout",
                                  "output_structure", "bind", "sources", "reads", "has_scores"])
@pytest.mark.parametrize("make", [lambda: torch.nn.Linear(P, P), lambda: torch.nn.Parameter(torch.ones(P)),
                                  lambda: torch.ones(P), lambda: 0.5])
def test_an_attribute_does_not_hide_one_of_every_mechanism(name, make):
    mechanism, attribute = Uniform(), make()
    if callable(getattr(Mechanism, name)) or isinstance(attribute, torch.nn.Module | torch.nn.Parameter):
        with pytest.raises(ConfigError, match=f"Uniform: {name} is an? .* every mechanism.*Choose another name"):
            setattr(mechanism, name, attribute)
    else:
        setattr(mechanism, name, attribute)
    setattr(mechanism, f"own_{name}", attribute)


def test_the_size_is_a_property_of_the_class():
    class Assigned(Mechanism):
        def __init__(self, size):
            super().__init__()
            self.size = size

    class Fixed(Assigned):
        size = 2

    class WithSetter(Assigned):
        size = property(lambda self: self.heads, lambda self, heads: setattr(self, "heads", heads))

    with pytest.raises(ConfigError, match=r"Assigned: size is a read-only .*; got int.* size = property\(lambda"):
        Assigned(3)
    assert Fixed(3).size == WithSetter(3).size == 3
    with pytest.raises(ConfigError, match="Fixed: size is an attribute of every mechanism"):
        Fixed(torch.nn.Linear(2, 2))
    mechanism = Uniform()
    mechanism.forward = lambda inputs: torch.full((M, M), 2.0)  # tools replace it
    assert mechanism.bound(P).basis(torch.randn(M, P)).dense().unique().tolist() == [2.0]


def test_the_structure_of_the_call_is_named_in_the_expression():
    m = DotProduct(dim=3).masked(keep=STRUCTURE).softmax().bound(P)
    x = torch.randn(M, P)
    graph = Graph(torch.tensor([[0, 1], [1, 2]]), num_nodes=M)
    assert int((m.basis(x, graph).dense() != 0).sum()) == 2
    assert int((m.basis(x, Causal()).dense() != 0).sum()) == M * (M + 1) // 2
    with pytest.raises(StructureError, match="called with a Graph or a Support; got NoneType"):
        m.basis(x)
    assert copy.deepcopy(STRUCTURE) is STRUCTURE and repr(STRUCTURE) == "STRUCTURE"


SCORES = [DotProduct(heads=2, dim=3), Additive(dim=3, heads=2)]


@pytest.mark.parametrize("keep", [Padding(torch.arange(M) < 4), torch.arange(M) < 4,
                                  Padding(torch.arange(M) < torch.tensor([[4], [4]])),
                                  Window(2) & Padding(torch.arange(M) < 4),
                                  ~(Padding(torch.arange(M) >= 4) | ~Window(2)), ~Padding(torch.arange(M) >= 4),
                                  ~DenseMask((torch.arange(M) >= 4).unsqueeze(-1).expand(M, M))], ids=repr)
def test_padding_of_any_content_changes_nothing(keep):
    """Outputs of the true entries, and every gradient, are those with zeros, with NaN or with infinities as padding."""
    layer = Conv((SCORES[0].scaled(0.5).masked(keep=keep) + SCORES[1].masked(keep=keep)).softmax(), P, 3).to(F64)
    expected = None
    for padding in (0.0, 1e9, torch.nan, torch.inf):
        x = torch.randn(2, M, P, dtype=F64, generator=torch.Generator().manual_seed(1))
        x[:, 4:] = padding
        x.requires_grad_()
        layer.zero_grad()
        y = layer(x)[:, :4]
        y.square().sum().backward()
        actual = [y.detach(), x.grad[:, :4], *(p.grad for p in layer.parameters())]
        expected = actual if expected is None else expected
        torch.testing.assert_close(actual, expected, rtol=0, atol=1e-10)


@pytest.mark.parametrize("keep", [True, False])
def test_an_entry_that_one_of_two_matrices_sees_is_not_padding(keep):
    hidden = torch.arange(M) >= 4
    score = DotProduct(dim=3)
    masked = score.masked(keep=~hidden) if keep else score.masked(drop=hidden)
    x = torch.randn(M, P, dtype=F64)
    for expression in (masked.softmax() + IdentityMechanism(), masked.softmax() | IdentityMechanism(),
                       IdentityMechanism() @ masked.softmax()):
        layer = Conv(expression, P, 3).to(F64)
        mechanism = expression.bound(P).to(F64)
        mechanism.load_state_dict(layer.mechanism.state_dict())
        expected = torch.einsum("kmn,mp,kpq->nq", mechanism.basis(x).dense(F64), x, layer.weight().dense()) + layer.bias
        torch.testing.assert_close(layer(x), expected)


@pytest.mark.parametrize(("wrong", "error", "message"), [
    (lambda: Shifts([0, 1]).softmax(), ConfigError, "softmax: its basis must have scores"),
    (lambda: Adjacency().normalize("sigmoid"), ConfigError, "sigmoid: its basis must have scores"),
    (lambda: DotProduct(dim=2).softmax().softmax(), ConfigError, "its basis must have scores"),
    (lambda: DotProduct(heads=2, dim=2) + DotProduct(heads=3, dim=2), ShapeError, "or one of them 1; got 2 and 3"),
    (lambda: DotProduct(heads=2, dim=2) * Shifts([0, 1, 2]), ShapeError, "or one of them 1; got 2 and 3"),
    (lambda: DotProduct(heads=0), ConfigError, "heads must be a positive integer; got 0"),
    (lambda: Conv(DotProduct(3), 4, 4), ConfigError, "must divide the P=4 channels of x .*; got heads=3. Give dim="),
    (lambda: Conv(DotProduct(heads=3, dim=2), 4, 4, weight=HeadBlocks()), ConfigError,
     "size must divide out_channels=4; got size=3"),
    (lambda: DotProduct(dim=2).masked(), ConfigError, "exactly one of keep= and drop="),
    (lambda: run(DotProduct(dim=2).masked(keep=Causal(), drop=Causal())), ConfigError, "exactly one of keep= and"),
    (lambda: run(DotProduct(dim=2).masked(keep=torch.ones(M))), StructureError, "of booleans; got torch.float32"),
    (lambda: run(DotProduct(dim=2).masked(keep=torch.ones(M + 1).bool())), StructureError, r"M=6\); got \(7,\)"),
    (lambda: run(DotProduct(dim=2).masked(drop=torch.ones(M + 1).bool())), StructureError, r"M=6\); got \(7,\)"),
    (lambda: Conv(DotProduct(dim=2).masked(keep=torch.ones(M + 1).bool()), P, 3)(torch.zeros(M, P)), StructureError,
     r"M=6\); got \(7,\)"),
    (lambda: run(DotProduct(dim=2).normalize("max")), ConfigError, "kind must be one of"),
    (lambda: DotProduct(dim=2).softmax(over="rows"), ConfigError, "over must be one of"),
    (lambda: run(Adjacency()), StructureError, "structure must be a Graph; got NoneType"),
    *[(wrong, ConfigError, "both operands must be mechanisms") for wrong in (
        lambda: Uniform() | Identity(3), lambda: Uniform() + 1.0, lambda: Uniform() @ torch.ones(3, 3))],
])
def test_mistakes_are_named(wrong, error, message):
    check_refused((error, message, wrong))


def run(mechanism: Mechanism):
    return mechanism.bound(P).basis(torch.zeros(M, P)).dense()


class Wrong(Mechanism):
    """What is done with the rows of z and x."""

    def __init__(self, build, **attributes):
        super().__init__()
        self.build = build
        self.__dict__.update(attributes)

    def forward(self, inputs):
        return self.build(inputs.z.unsqueeze(-3), inputs.x.unsqueeze(-3))


@pytest.mark.parametrize(("wrong", "told"), [
    (lambda: Wrong(lambda z, x: (z, x)), r"forward must return a Basis, or a tensor \(..., K, M, N\); got tuple"),
    (lambda: Wrong(lambda z, x: None), "forward must return a Basis"),
    (lambda: Wrong(Bilinear, batching="pair"), "batching must be one of"),
    (lambda: Wrong(Bilinear, sources=("key",)), "sources must name")])
def test_a_mechanism_that_is_written_wrong_is_told(wrong, told):
    with pytest.raises(ConfigError, match=told):
        Conv(wrong() * 0.5, P, P)(torch.randn(M, P))


def test_forward_may_return_a_tensor():
    x = torch.randn(M, P)
    layer = Conv(Wrong(lambda z, x: x @ z.mT), P, P, bias=False)
    torch.testing.assert_close(layer(x), (x @ x.mT).mT @ x @ layer.weight.theta[0])


class Squared(Mechanism):
    """The entries of another mechanism, squared."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, inputs):
        return Dense(self.inner(inputs).dense().square())


@pytest.mark.parametrize("inner", [DotProduct(dim=3), BiAffine(bilinear=False), Concatenation(3)])
def test_a_mechanism_may_compute_with_the_basis_of_another(inner):
    x = torch.randn(M, P)
    layer = Conv(Squared(inner), P, P, bias=False)
    a = layer.mechanism.inner.basis(x).dense()[0]
    torch.testing.assert_close(layer(x), a.square().mT @ x @ layer.weight.theta[0])
