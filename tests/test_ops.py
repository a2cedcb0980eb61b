"""The functional operator, its errors, composition of pairs, and both compilers."""

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounter

from structconv import ConfigError, Depthwise, Eye, Full, Graph, Grid, LowRank, Separable, ShapeError, conv, plan
from structconv.bases import Dense, Identity, Polynomial, Shift, Sparse, cuboid_offsets
from structconv.ops import compose_pairs
from tests.support.layers import drawn


def numbers(*shape):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(sum(shape)))


def ring(entries=6):
    index = torch.arange(entries)
    return Graph(torch.stack([index, (index + 1) % entries]), num_nodes=entries)


@pytest.mark.parametrize(("call", "message"), [
    (lambda: conv(numbers(5, 3), Identity(6), numbers(1, 3, 2)),
     r"^Conv: x must have shape \(..., M=6, P=3\); got \(5, 3\). Entries are dim -2, channels dim -1.$"),
    (lambda: conv(numbers(2, 3, 6), Identity(6), numbers(1, 3, 2)), r"If channels are dim 1, pass x.flatten\(2\).mT.$"),
    (lambda: conv(numbers(6, 4), Identity(6), numbers(1, 3, 2)), r"P=3\); got \(6, 4\)"),
    (lambda: conv(numbers(6), Identity(6), numbers(1, 3, 2)), r"got \(6,\)"),
    (lambda: conv(numbers(6, 3), Identity(6), numbers(2, 3, 2)), "theta must have the basis's size K=1; got K=2"),
    (lambda: conv(numbers(6, 3).float(), Identity(6), numbers(1, 3, 2)), "x and theta must share one dtype"),
    (lambda: conv(numbers(6, 3), Identity(6), numbers(1, 3, 2).to("meta")), "x and theta must be on one device"),
    (lambda: conv(numbers(6, 3), Identity(6), numbers(3, 2)), r"Full: theta must have shape \(K, P, Q\)"),
    (lambda: conv(numbers(3, 6, 3), Dense(numbers(2, 1, 6, 6)), numbers(1, 3, 2)),
     r"leading dimensions of x must broadcast with the basis's \(2,\); got \(3, 6, 3\)"),
    (lambda: plan(numbers(5, 3), Identity(6), numbers(1, 3, 2)), "M=6, P=3"),
    (lambda: compose_pairs((Identity(6), numbers(1, 3, 2)), (Identity(5), numbers(1, 2, 2))),
     "compose: second must take the N=6 output entries of first; got M=5"),
    (lambda: compose_pairs((Identity(6), numbers(1, 3, 2)), (Identity(6), numbers(1, 3, 2))),
     "compose: second must take the Q=2 output channels of first; got P=3"),
    (lambda: compose_pairs((Identity(6), numbers(2, 3, 2)), (Identity(6), numbers(1, 2, 2))), "size K=1; got K=2"),
])
def test_shape_errors(call, message):
    with pytest.raises(ShapeError, match=message):
        call()


def test_a_plan_may_be_made_before():
    x, basis, theta = numbers(6, 3), Sparse(ring(), numbers(2, 6)), numbers(2, 3, 4)
    made = plan(x, basis, theta, path="structure_first")
    assert made.path == "structure_first"
    torch.testing.assert_close(conv(x, basis, theta, plan=made), conv(x, basis, theta), rtol=0, atol=1e-12)
    with pytest.raises(ConfigError, match="at most one of path= and plan="):
        conv(x, basis, theta, plan=made, path="structure_first")
    between = plan(x, basis, LowRank.of(numbers(2, 3, 1), numbers(2, 1, 4)), path="between")
    with pytest.raises(ConfigError, match="plan must be for Sparse and Full"):
        conv(x, basis, theta, plan=between)


COMPOSED = {
    "no padding": (lambda: Shift(Grid((7, 8)), cuboid_offsets((3, 3)), "none"),
                   lambda: Shift(Grid((5, 6)), cuboid_offsets((3, 3)), "none"), 25),
    "periodic": (lambda: Shift(Grid((5, 6), periodic=True), cuboid_offsets((3, 3), 1, 1)),
                 lambda: Shift(Grid((5, 6), periodic=True), cuboid_offsets((3, 3), 1, 1)), 25),
    "periodic, around": (lambda: Shift(Grid((4,), periodic=True), ((1,), (3,))),
                         lambda: Shift(Grid((4,), periodic=True), ((1,), (-1,))), 2),
    "no padding, strides": (lambda: Shift(Grid((13,)), cuboid_offsets(3, 2), "none", 2),
                            lambda: Shift(Grid((5,)), cuboid_offsets(2), "none", 2), 4),
    "periodic, strides": (lambda: Shift(Grid((12,), periodic=True), cuboid_offsets(3, 1, 1), None, 2),
                          lambda: Shift(Grid((6,), periodic=True), cuboid_offsets(3, 1, 1), None, 3), 7),
    "periodic, stride that does not divide": (
        lambda: Shift(Grid((7,), periodic=True), cuboid_offsets(2), None, 2),
        lambda: Shift(Grid((4,), periodic=True), cuboid_offsets(2)), 4),
    "zeros": (lambda: Shift(Grid((5, 6)), cuboid_offsets((3, 3), 1, 1), "zeros"),
              lambda: Shift(Grid((5, 6)), cuboid_offsets((3, 3), 1, 1), "zeros"), 81),
    "zeros, then none": (lambda: Shift(Grid((5,)), cuboid_offsets(3, 1, 1), "zeros"),
                         lambda: Shift(Grid((5,)), cuboid_offsets(3), "none"), 9),
    "graph, then dense": (lambda: Sparse(ring(), numbers(2, 6)), lambda: Dense(numbers(3, 6, 4)), 6),
    "identity first": (lambda: Identity(6), lambda: Sparse(ring(), numbers(2, 6)), 2),
    "identity last": (lambda: Sparse(ring(), numbers(2, 6)), lambda: Identity(6), 2),
    "polynomials": (lambda: Polynomial(Sparse(ring(), numbers(1, 6)), 2), lambda: Polynomial(
        Sparse(ring(), numbers(1, 6)), 1, "monomial"), 6),
}


@pytest.mark.parametrize("name", COMPOSED)
def test_composition_is_exact(name):
    """Applying the pair is applying one after the other, border and all; equal shifts are merged where they may be."""
    first, second = COMPOSED[name][0](), COMPOSED[name][1]()
    theta, weight = numbers(first.size, 3, 4), numbers(second.size, 4, 2)
    x = numbers(2, first.num_inputs, 3)
    expected = conv(conv(x, first, theta), second, weight)
    basis, product = compose_pairs((first, theta), (second, weight))
    assert (basis.size, product.size) == (COMPOSED[name][2],) * 2
    torch.testing.assert_close(conv(x, basis, product), expected, rtol=0, atol=1e-10)
    dense = torch.einsum("kmn,lno->klmo", first.dense(torch.float64), second.dense(torch.float64)).flatten(0, 1)
    torch.testing.assert_close(conv(x, Dense(dense), (theta.unsqueeze(1) @ weight).flatten(0, 1)), expected,
                               rtol=0, atol=1e-10)


def test_composition_is_differentiable():
    first, second = COMPOSED["periodic"][0](), COMPOSED["periodic"][1]()
    theta, weight = numbers(9, 3, 4).requires_grad_(), numbers(9, 4, 2).requires_grad_()
    x = numbers(30, 3)
    basis, product = compose_pairs((first, theta), (second, weight))
    ours = torch.autograd.grad(conv(x, basis, product).square().sum(), [theta, weight])
    theirs = torch.autograd.grad(conv(conv(x, first, theta), second, weight).square().sum(), [theta, weight])
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-9)


def test_composition_of_fixed_weights():
    grid = Grid((5,), periodic=True)
    once = (Shift(grid, ((0,), (1,))), Eye.of(2, 3))
    x = numbers(5, 3)
    basis, theta = compose_pairs(once, once)
    assert basis.size == 3
    assert isinstance(theta, Eye)
    torch.testing.assert_close(conv(x, basis, theta), conv(conv(x, *once), *once), rtol=0, atol=1e-12)
    sparse, eye = compose_pairs((Sparse(ring(), numbers(2, 6)), Eye.of(2, 3)), (Identity(6), Eye.of(1, 3)))
    assert isinstance(eye, Eye)
    assert sparse.size == eye.size == 2


THETAS = {
    "full": lambda k: Full.of(numbers(k, 4, 6)),
    "separable": lambda k: Separable.of(numbers(k, 2), numbers(2, 4, 6)),
    "low rank": lambda k: LowRank.of(numbers(1, 4, 2), numbers(k, 2, 6)),
    "depthwise": lambda k: Depthwise.of(numbers(k, 4, 1)),
}


class Layer(nn.Module):
    """A layer over a basis that is made from x, as layers do."""

    def __init__(self, make, theta):
        super().__init__()
        self.make, self.theta = make, theta

    def forward(self, x):
        return conv(x, self.make(x), self.theta)


def heads(x):
    return Dense((x @ x.mT).unsqueeze(-3).softmax(-2)) | Identity(x.shape[-2])


@pytest.mark.parametrize("name", drawn(["depthwise", "full", "separable", "low rank"], 4))
def test_one_program_serves_any_number_of_entries(name):
    """Compiled once for any M: the planner adds no guard on the number of entries."""
    torch._dynamo.reset()
    counter = CompileCounter()
    layer = Layer(heads, THETAS[name](2))
    compiled = torch.compile(layer, backend=counter, fullgraph=True, dynamic=True)
    for entries in (9, 12, 1500):
        x = numbers(2, entries, 4) / entries
        torch.testing.assert_close(compiled(x), layer(x), rtol=0, atol=1e-10)
    assert counter.frame_count == 1
