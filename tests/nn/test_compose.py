"""`compose`: two layers, or two pairs, become one that computes the same."""

import pytest
import torch

from structconv import Cuboid, Dense, DotProduct, Identity, Incidence, Mechanism, Pool, RelativeBias, Shifts, Uniform
from structconv.errors import ConfigError, ShapeError
from structconv.mechanisms import Adjacency, ALiBi, ClippedShifts, GaussianWindow, PredictedPosition
from structconv.nn import Conv, Conv2d, OnGrid, compose
from structconv.structures import Graph, Grid, Window
from structconv.weights import Depthwise, Eye, HeadBlocks, Separable
from tests.support.errors import check_refused

F64 = torch.float64
GRAPH = Graph(torch.tensor([[0, 1, 2, 3, 3], [1, 2, 0, 0, 1]]), num_nodes=4)


def layer(mechanism, p: int, q: int, **options) -> Conv:
    conv = Conv(mechanism, p, q, **options).to(F64)
    if conv.bias is not None:
        torch.nn.init.normal_(conv.bias)
    return conv


def assert_one(first: Conv, second: Conv, structure, entries: int, middle=None) -> Conv:
    """The composed layer equals one layer after the other."""
    one = compose(first, second)
    x = torch.randn(2, entries, first.in_channels, dtype=F64)
    expected = second(first(x, structure=structure), structure=structure if middle is None else middle)
    torch.testing.assert_close(one(x, structure=structure), expected, rtol=0, atol=1e-10)
    assert one.in_channels == first.in_channels and one.out_channels == second.out_channels
    return one


def test_unpadded_windows_with_stride_and_dilation():
    first = layer(Cuboid((3, 2), stride=(2, 1), dilation=(1, 2), padding="valid"), 2, 3)
    second = layer(Cuboid((2, 3), stride=(1, 2), padding="valid"), 3, 4)
    one = assert_one(first, second, Grid((11, 12)), 132, Grid((5, 10)))
    assert one.mechanism.size < 36
    assert assert_one(layer(Cuboid(3, stride=3, padding="valid"), 2, 3), layer(Cuboid(2, padding="valid"), 3, 2),
                      None, 14).mechanism.size == 6


def test_padded_windows_are_exact_too_without_merging():
    first = layer(Cuboid((3, 3)), 2, 3, bias=False)
    one = assert_one(first, layer(Cuboid((3, 3), stride=2), 3, 4), Grid((5, 6)), 30)
    assert one.mechanism.size == 81
    assert_one(first, layer(Pool(2), 3, 3, weight=Eye()), Grid((5, 6)), 30)
    pool, after = layer(Pool(2), 2, 2, weight=Eye(), bias=False), layer(Cuboid((3, 3)), 2, 3)
    assert_one(pool, after, Grid((6, 4)), 24, Grid((3, 2)))


def test_a_bias_passes_through_what_keeps_a_constant():
    for second in (Cuboid((3, 3), padding="replicate"), Cuboid((3, 3), padding="reflect"), Pool(2), Identity(3),
                   Pool(2) | Pool(2)):
        one = assert_one(layer(Cuboid((3, 3)), 2, 3), layer(second, 3, 4), Grid((4, 6)), 24)
        assert one.bias is not None


def test_an_identity_adds_no_matrix():
    for first, second in ((layer(Adjacency(), 2, 3), layer(Identity(), 3, 4)),
                          (layer(Identity(), 2, 3, bias=False), layer(Adjacency(), 3, 4))):
        one = assert_one(first, second, GRAPH, 4)
        assert one.mechanism.size == 1 and isinstance(one.mechanism, Adjacency)


def test_graph_layers_and_factored_weights_multiply_out():
    one = assert_one(layer(Adjacency() | Identity(), 2, 3, bias=False), layer(Adjacency("row") | Identity(), 3, 2),
                     GRAPH, 4)
    assert one.mechanism.size == 4
    one = assert_one(layer(Incidence("sender") | Incidence("receiver"), 2, 3, bias=False),
                     layer(Incidence("receiver").transpose(), 3, 3, bias=False, weight=Eye()), GRAPH, 4)
    assert one.bias is None
    window = Cuboid((3,), padding="valid")
    for weight, q in ((Separable(2), 4), (Depthwise(2), 6), (HeadBlocks(), 6)):
        assert_one(layer(window, 3, q, weight=weight), layer(window, q, 2), None, 9)


def test_image_layers():
    first, second = Conv2d(2, 3, 3).to(F64), Conv2d(3, 4, 3, stride=2).to(F64)
    one = compose(first, second)
    image = torch.randn(2, 2, 9, 8, dtype=F64)
    assert isinstance(one, OnGrid)
    torch.testing.assert_close(one(image), second(first(image)), rtol=0, atol=1e-10)


def test_the_composed_layer_trains_by_itself():
    first, second = layer(Identity(), 2, 3), layer(Identity(), 3, 2)
    one = compose(first, second)
    before = [p.clone() for p in first.parameters()]
    one(torch.randn(4, 2, dtype=F64)).sum().backward()
    assert all(p.grad is not None for p in one.parameters())
    assert all(p.grad is None and torch.equal(p, q) for p, q in zip(first.parameters(), before, strict=True))


class ByContent(Mechanism):
    """A user's mechanism: entries of the basis that are no scores, and come from x."""

    def forward(self, inputs):
        return Dense((inputs.x @ inputs.x.mT).unsqueeze(-3))


class Turned(Mechanism):
    """A user's mechanism that reads the number of entries alone, and says so."""

    reads = ("structure",)

    def forward(self, inputs):
        return Dense(torch.eye(inputs.num_inputs, dtype=inputs.dtype).flip(0).unsqueeze(0))


@pytest.mark.parametrize("mechanism", [
    ByContent(), ByContent() | Identity(), Identity() @ ByContent(), ByContent().transpose(),
    GaussianWindow(1.0) * ByContent(), GaussianWindow(1.0, center=PredictedPosition()),
    Uniform().masked(keep=Window(1, center=PredictedPosition())).normalize("count")], ids=repr)
def test_what_reads_the_content_is_refused_whether_its_entries_are_scores_or_not(mechanism):
    one, other = Conv(mechanism, 2, 2), Conv(Identity(), 2, 2, bias=False)
    for pair in ((one, other), (other, one)):
        with pytest.raises(ConfigError, match="reads only the structure"):
            compose(*pair)


def test_what_reads_positions_alone_is_composed():
    after = layer(Adjacency(), 3, 2)
    for mechanism in (Turned(), GaussianWindow(1.0), ClippedShifts(1), Uniform(window=1).normalize("sum"),
                      ALiBi(2).softmax()):
        assert_one(layer(mechanism, 2, 3, bias=False), after, GRAPH, 4)


def test_a_mechanism_with_parameters_is_refused_since_a_layer_makes_new_ones():
    biased = Conv(RelativeBias(2).softmax(), 2, 2, bias=False)
    with pytest.raises(ConfigError, match="without parameters; got RelativeBias"):
        compose(biased, Conv(Identity(), 2, 2))
    assert_one(layer(Shifts([0, 1]) * torch.nn.Parameter(torch.tensor([2.0, 3.0])), 2, 2, bias=False),
               layer(Identity(2), 2, 2), None, 5)


@pytest.mark.parametrize(("error", "call"), [
    (ShapeError, lambda: compose(Conv(Identity(), 2, 3), Conv(Identity(), 4, 2))),
    (ShapeError, lambda: compose((Dense(torch.ones(1, 2, 2)), torch.ones(1, 2, 3)),
                                 (Dense(torch.ones(1, 2, 2)), torch.ones(1, 2, 3)))),
    (ShapeError, lambda: compose(Conv2d(2, 2, 3), OnGrid(Conv(Cuboid(3), 2, 2), 1))),
    (ConfigError, lambda: compose(Conv(Identity(), 2, 3), (Dense(torch.ones(1, 2, 2)), torch.ones(1, 3, 3)))),
    (ConfigError, lambda: compose(Conv(DotProduct().softmax(), 2, 2), Conv(Identity(), 2, 2))),
    (ConfigError, lambda: compose(Conv(Identity(), 2, 2), Conv(DotProduct().softmax(), 2, 2))),
    (ConfigError, lambda: compose(Conv(Cuboid(3), 2, 2), Conv(Cuboid(3), 2, 2))),
    (ConfigError, lambda: compose(Conv(Identity(), 2, 2), Conv(Adjacency(), 2, 2))),
    (ConfigError, lambda: compose(Conv(Identity(), 2, 2), Conv(Shifts([0, 1]), 2, 2))),
    (ConfigError, lambda: compose(Conv(Identity(), 2, 2), torch.nn.Linear(2, 2))),
])
def test_errors(error, call):
    check_refused((error, r"got .*\.", call))
