"""Values of one's own: what they note beside their fields, which pairs they are asked for, and who trains them."""

import copy
from functools import cached_property

import pytest
import torch
from torch import Tensor, nn

from structconv import STRUCTURE, Basis, ConfigError, Conv, Given, Graph, conv
from structconv.bases import Block, Edges, value
from structconv.bases import Score as ScoreValue
from structconv.mechanisms.scores import Score
from tests.support.library import random

F64 = torch.float64
M, P, Q = 6, 3, 4


class Circulant(Basis):
    """A circulant matrix for each filter, whose products need what is derived of the filters."""

    filter: Tensor
    size = property(lambda self: self.filter.shape[0])
    num_inputs = num_outputs = property(lambda self: self.filter.shape[1])

    def dense(self, dtype=None):
        i = torch.arange(self.num_inputs)
        return self.filter[:, (i - i[:, None]) % self.num_inputs].to(dtype)

    def apply(self, r):
        return torch.fft.irfft(torch.fft.rfft(r, dim=-2) * self.spectrum[..., None], self.num_inputs, dim=-2)


@value
class ByProperty(Circulant):
    filter: Tensor

    @cached_property
    def spectrum(self):
        return torch.fft.rfft(self.filter)


@value
class ByConstructor(Circulant):
    filter: Tensor

    def __post_init__(self):
        object.__setattr__(self, "spectrum", torch.fft.rfft(self.filter))


def same_as_dense(layer, x):
    basis = layer.basis(x)
    expected = torch.einsum("kmn,mp,kpq->nq", basis.dense(F64), x, layer.weight().dense()) + layer.bias
    torch.testing.assert_close(layer(x), expected)
    torch.testing.assert_close(conv(x, basis, layer.weight()) + layer.bias, expected)


@pytest.mark.parametrize("kind", [ByProperty, ByConstructor])
def test_what_a_value_derives_of_its_tensors_is_that_of_its_tensors(kind):
    basis, x = kind(random(2, M)), random(M, P)
    basis.analysis(x)
    layer, other = (Conv(Given(held), P, Q).double() for held in (basis, kind(random(2, M))))
    layer(x)
    state = copy.deepcopy(other.state_dict())
    layer.load_state_dict(state)
    same_as_dense(layer, x)
    with torch.no_grad():
        layer.mechanism.tensor0.mul_(2)                # in place, as an optimizer does
    same_as_dense(layer, x)


def test_tensors_that_nobody_knows_how_to_make_anew_are_refused():
    class Own(ByConstructor):
        __post_init__ = property()

        def __init__(self, filters):
            object.__setattr__(self, "filter", filters)
            object.__setattr__(self, "spectrum", torch.fft.rfft(filters))

    with pytest.raises(ConfigError, match="cached_property"):
        Conv(Given(Own(random(2, M).float())), P, Q).double()(random(M, P))


class Diagonal(Basis):
    def __init__(self, weight):
        self.weight = weight

    size = 1
    num_inputs = num_outputs = property(lambda self: self.weight.shape[0])

    def dense(self, dtype=None):
        return torch.diag(self.weight)[None].to(dtype)


@pytest.mark.parametrize("of", [lambda b: b, lambda b: 2 * b, lambda b: b | b, lambda b: (b @ b).transpose()])
def test_parameters_that_would_not_be_trained_are_refused(of):
    with pytest.raises(ConfigError, match=r"weight of a Diagonal.*frozen dataclass"):
        Given(of(Diagonal(nn.Parameter(torch.ones(M)))))
    x = random(M, P)
    same_as_dense(Conv(Given(of(Diagonal(torch.arange(M) + 1.0))), P, Q).double(), x)


def score_with(**fields):
    annotations = {"__annotations__": {"s": Tensor, **dict.fromkeys(fields, object)}}
    defaults = {name: default for name, default in fields.items() if default is not None}
    sizes = {name: property(lambda self: self.s.shape[-1]) for name in ("num_inputs", "num_outputs")
             if name not in fields}
    return type("Gauss", (ScoreValue,), {
        "__module__": __name__, **annotations, "size": 1, **sizes, **defaults,
        "evaluate": lambda self, pairs: -(pairs.source(self.s) - pairs.target(self.s)).square() / self.width})


@pytest.mark.parametrize("name", ["support", "pattern", "map", "device", "dtype", "normalizes", "flips", "to",
                                  "changed", "num_inputs", "batch_shape", "static_key", "_present"])
def test_a_field_does_not_have_the_name_of_an_attribute_of_the_base(name):
    with pytest.raises(ConfigError, match=rf"Gauss: no field may have the name of .* class Score; got {name}\. Rename"):
        value(score_with(**{name: None}))
    with pytest.raises(ConfigError, match="Gauss: no field"):          # dataclasses find a default before s
        value(score_with(**{name: None}, other=None))


@pytest.mark.parametrize("name", ["support", "flips", "normalizes", "map"])
def test_a_default_does_not_make_a_field_of_a_method_or_a_class_attribute(name):
    with pytest.raises(ConfigError, match=rf"got {name}\. Rename the field\.$"):
        value(score_with(**{name: 2.0}))


def test_fields_whose_names_are_free():
    s = torch.rand(1, M)
    learned = value(score_with(width=None, terms=None))(s, nn.Parameter(torch.tensor(2.0)), 1)
    torch.testing.assert_close(learned.dense()[0], -(s.T - s).square() / 2)
    torch.testing.assert_close(conv(s.T, learned.softmax(), torch.ones(1, 1, 1)), learned.dense()[0].softmax(0).T @ s.T)

    @value
    class Ones(Basis):
        entries: int = M
        size: int = 1                                                  # a default in the place of a property
        num_inputs = num_outputs = property(lambda self: self.entries)

        def dense(self, dtype=None):
            return torch.ones(self.size, self.entries, self.entries, dtype=dtype)

    @value
    class Twos(Ones):
        size: int = 2                                                  # a field of the base with another default

    assert Ones(3, 4).dense().shape == (4, 3, 3) and Twos().dense().shape == (2, M, M)


@value
class Decay(ScoreValue):
    """-rate_k |m - n|, which asks whether pairs are listed, as the package's own scores do."""

    rate: Tensor
    inputs: int
    outputs: int
    ENTRY_COUNTS = ("inputs", "outputs")
    size = property(lambda self: self.rate.shape[0])
    num_inputs = property(lambda self: self.inputs)
    num_outputs = property(lambda self: self.outputs)

    def evaluate(self, pairs):
        assert isinstance(pairs, Block | Edges)
        rate = self.rate[:, None] if isinstance(pairs, Edges) else self.rate[:, None, None]
        return -rate * (pairs.source_index() - pairs.target_index()).abs()


class Decays(Score):
    batching = "offsets"

    def bind(self, channels):
        self.rate = nn.Parameter(torch.arange(1.0, self.heads + 1))

    def forward(self, inputs):
        return Decay(self.rate, inputs.num_inputs, inputs.num_outputs)


@pytest.mark.parametrize("heads", [1, 2])
@pytest.mark.parametrize("at", [5, [5, 7], [[5, 7], [0, 3]]])
def test_outputs_at_places_are_asked_for_at_pairs_of_the_same_kind(heads, at):
    x, graph = random(9, P), Graph(torch.tensor([[0, 3, 5, 1, 7], [0, 0, 0, 1, 1]]), num_inputs=9, num_outputs=2)
    z = random(2, P)
    places = torch.arange(2) + at if isinstance(at, int) else torch.tensor(at)
    keep = torch.zeros(9, 2, dtype=torch.bool)
    keep[tuple(graph.edge_index)] = True
    for layer, seen, structure in (
            (Conv(Decays(heads).masked(keep=STRUCTURE).softmax(), P, Q).double(), keep, graph),
            (Conv(Decays(heads).softmax(), P, Q).double(), torch.ones_like(keep), None)):
        rate = torch.arange(1.0, heads + 1, dtype=F64)
        scores = -rate[:, None, None] * (torch.arange(9)[:, None] - places[..., None, None, :]).abs()
        a = scores.masked_fill(~seen, -torch.inf).softmax(-2)
        expected = torch.einsum("...kmn,mp,kpq->...nq", a, x, layer.weight().dense()) + layer.bias
        given = at if isinstance(at, int) else places
        torch.testing.assert_close(layer(x, z=z, structure=structure, positions=given), expected)
