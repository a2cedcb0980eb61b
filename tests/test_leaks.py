"""Programs that once gave a sample of a batch something of another one, or took a number of entries for a constant."""

import dataclasses

import pytest
import torch

from structconv import Adjacency, Chebyshev, Cuboid, DotProduct, Given, Identity, Incidence, Mechanism, Shifts, Uniform
from structconv.bases import Bilinear, Dense
from structconv.errors import ConfigError, ShapeError, StructureError
from structconv.mechanisms import STRUCTURE_IF_GIVEN, Context, GaussianWindow
from structconv.nn import Conv, ConvLSTMCell, GCNConv, MultiheadAttention, RelativeValue
from structconv.structures import Blocks, Causal, Graph, Samples, batch
from structconv.structures.batching import parts_of

P = 4
DOT = DotProduct(heads=2, dim=4)
F64 = torch.float64


class Constant(Mechanism):
    """A basis of one number everywhere, of the numbers of entries alone."""

    def forward(self, inputs):
        return Dense(torch.full((1, inputs.num_inputs, inputs.num_outputs), 0.9, dtype=inputs.dtype))


class Mean(Mechanism):
    """Scores divided by the number of inputs."""

    has_scores = True

    def forward(self, inputs):
        return Bilinear(inputs.z.unsqueeze(-3), inputs.x.unsqueeze(-3)) / inputs.num_inputs


EXPRESSIONS = {
    "score times matrix": (DOT * Constant()).softmax(), "score times identity": (DOT * Identity()).softmax(),
    "mapped weights": DOT.softmax().map(torch.sigmoid), "mapped shifts": Shifts([0, 1]).map(torch.cos),
    "mapped product": (DOT.softmax() * GaussianWindow(1.0)).exp(), "mapped beside": (DOT.softmax() | Identity()).exp(),
    "counted": Shifts([0, 1]).normalize("count"), "counted strided": Cuboid(3, stride=2).normalize("count"),
    "counted constant": Constant().normalize("count"), "mapped constant": Constant().map(torch.cos),
    "turned and mapped": DOT.softmax().transpose().map(torch.cos),
    "masked context": Context(3).masked(keep=Causal()).softmax(),
    "context in blocks": Context(3).masked(keep=Blocks(2)).softmax(),
    "dropped context": Context(3).masked(drop=Causal()).softmax(),
    "masked stride": Cuboid(3, stride=2).masked(keep=Causal()), "composed": DOT.softmax() @ DOT.softmax(),
    "if given": DOT.masked(keep=STRUCTURE_IF_GIVEN).softmax(), "given, dropped": DOT.masked(
        drop=STRUCTURE_IF_GIVEN).softmax(), "divided": Mean().softmax(), "sink": DOT.softmax(sink=0.0)}


@pytest.mark.parametrize("sizes", [(2, 3), (5, 4, 1, 7)])
@pytest.mark.parametrize("name", EXPRESSIONS)
def test_expressions_that_leaked(name, sizes):
    layer = Conv(EXPRESSIONS[name], P, P).to(F64)
    x = torch.randn(sum(sizes), P, dtype=F64)
    expected = torch.cat([layer(part) for part in x.split(sizes)])
    torch.testing.assert_close(layer(x, structure=Samples(sizes)), expected)


@pytest.mark.parametrize("expression", [DOT.softmax() @ DOT.softmax(), Uniform().normalize("sum") @ DOT.softmax(),
                                        Uniform(1).normalize("sum"), DOT.softmax() @ DOT.softmax().transpose()])
def test_two_sides_that_leaked(expression):
    inputs, outputs = (2, 3), (4, 2)
    layer = Conv(expression, P, P).to(F64)
    x, z = torch.randn(5, P, dtype=F64), torch.randn(6, P, dtype=F64)
    expected = torch.cat([layer(own, z=other) for own, other in zip(x.split(inputs), z.split(outputs), strict=True)])
    torch.testing.assert_close(layer(x, Samples(inputs, outputs), z=z), expected)


X = torch.randn(5, P)
COMPLETE = batch([Graph.complete(3), Graph.complete(2)])
TWO_SIDES = Graph(torch.tensor([[0, 1], [0, 2]]), num_inputs=2, num_outputs=3)
CROSSED = batch([TWO_SIDES, TWO_SIDES.reversed()])


@pytest.mark.parametrize("call", [
    lambda: dataclasses.replace(COMPLETE, edge_index=torch.tensor([[0, 4], [4, 0]])),
    lambda: dataclasses.replace(COMPLETE, num_inputs=7, num_outputs=7),
    lambda: Conv(DOT.softmax(), P, P, relative_value=RelativeValue(1))(X, Samples([2, 3], [3, 3]), z=torch.randn(6, P)),
    lambda: GCNConv(P, P)(X, CROSSED), lambda: Conv(Chebyshev(1), P, P)(X, CROSSED),
    lambda: Conv(DOT.masked(keep=Samples([4, 1])).softmax(), P, P)(X, Samples([2, 3])),
    lambda: MultiheadAttention(P, 2)(X, keep=batch([Graph.complete(4), Graph.complete(1)]), structure=Samples([2, 3])),
    lambda: Conv(Given(torch.randn(1, 7, 7)), P, P)(torch.randn(14, P), Samples([6, 8])),
    lambda: MultiheadAttention(P, 2)(torch.randn(14, P), structure=Samples([3, 6, 5], [5, 6, 3])),
    lambda: ConvLSTMCell(Cuboid(3), P, P, peephole=14)(torch.randn(14, P), None, Samples([3, 6, 5])),
    lambda: Samples([2**62] * 3), lambda: Samples(torch.tensor(3)), lambda: Samples([True, 2])])
def test_what_cannot_be_had_is_refused(call):
    with pytest.raises((StructureError, ShapeError)):
        call()


def test_each_graph_of_two_sides_is_normalized_by_its_own_degrees():
    layer, z = Conv(Adjacency(), P, P), torch.randn(5, P)
    expected = torch.cat([layer(X[:2], TWO_SIDES, z=z[:3]), layer(X[2:], TWO_SIDES.reversed(), z=z[3:])])
    torch.testing.assert_close(layer(X, CROSSED, z=z), expected)


def test_a_number_of_entries_is_no_constant_of_a_plan():
    layer = Conv(Mean(), P, P).to(F64)
    for entries in (100, 110, 105):
        x = torch.randn(entries, P, dtype=F64)
        torch.testing.assert_close(layer.basis(x).dense()[0], x @ x.mT / entries)
        torch.testing.assert_close(layer(x), x @ x.mT / entries @ x @ layer.weight.theta[0] + layer.bias)


def nested(*lengths):
    return torch.nested.as_nested_tensor([torch.randn(n, P) for n in lengths], layout=torch.jagged)


def test_a_structure_beside_nested_tensors_keeps_their_samples():
    layer, x = MultiheadAttention(P, 2), nested(2, 3)
    expected = torch.cat([layer(part, keep=Causal()) for part in x.unbind()])
    for y in (layer(x, structure=Causal()), layer(x, keep=Causal())):
        torch.testing.assert_close(y.values(), expected)
    with pytest.raises(StructureError, match="samples of query"):
        layer(x, structure=Samples([4, 1]))
    assert "structconv" in str(layer.plan(x))
    Conv(DOT.softmax(), P, P).calibrate(x)


@pytest.mark.parametrize("x", [
    lambda: torch.nested.narrow(torch.ones(2, 6, P), 1, torch.zeros(2, dtype=torch.long), torch.tensor([3, 6]),
                                layout=torch.jagged),
    lambda: torch.nested.as_nested_tensor([torch.randn(2, 3, P), torch.randn(2, 6, P)], layout=torch.jagged),
    lambda: nested(2, 3).transpose(1, 2), lambda: torch.nested.nested_tensor([torch.ones(2, P), torch.ones(3, P)])])
def test_other_nested_tensors_are_refused(x):
    with pytest.raises(ConfigError, match="must be a nested tensor"):
        MultiheadAttention(P, 2)(x())
    with pytest.raises(ConfigError, match="both be nested"):
        MultiheadAttention(P, 2)(nested(2, 3), torch.randn(2, 3, P))


def test_the_backward_of_many_samples_that_are_asked_one_by_one_is_linear_in_their_number():
    """Memory that is saved for the backward: each sample is in it once, not the whole batch for each."""
    layer, saved = Conv(Constant(), P, P), []
    x = torch.randn(80, P, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t.numel()) or t, lambda t: t):
        layer(x, structure=Samples([2] * 40)).sum()
    assert sum(saved) < 40 * 80 * P


def test_a_readout_counts_its_own_entries():
    for end in ("sample", "sender", "receiver"):
        layer = Conv(Incidence(end).normalize("count").map(torch.cos), P, P)
        single = [layer(x, structure=graph) for x, graph in zip(X.split([3, 2]), parts_of(COMPLETE), strict=True)]
        torch.testing.assert_close(layer(X, structure=COMPLETE), torch.cat(single))
