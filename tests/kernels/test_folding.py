"""A batch over one graph: copies of it side by side give each sample what it has alone."""

import pytest
import torch

from structconv import STRUCTURE, Additive, BiAffine, Conv, DotProduct, GATConv, GATv2Conv, Graph, batch
from structconv.kernels import folding
from structconv.mechanisms import EdgeBias
from structconv.primitives.layout import layouts
from tests.support.drawn import slow

EDGES = torch.tensor([[0, 1, 2, 3, 3, 1, 1], [1, 2, 3, 0, 0, 4, 4]])


def attention(scores, dropout=0.0):
    weights = scores.masked(keep=STRUCTURE).softmax()
    return Conv(weights.dropout(dropout) if dropout else weights, 6, 6)


LAYERS = {
    "affine of x Theta": lambda: GATConv(6, 3, heads=2),
    "affine of x": lambda: attention(BiAffine(2, bilinear=False).leaky_relu(0.2)),
    "additive": lambda: GATv2Conv(6, 3, heads=2),
    "Bahdanau": lambda: attention(Additive(2, 4)),
    "products": lambda: attention(DotProduct(2, 4).scaled()),
    "products and a bias of edges": lambda: attention(DotProduct(2, 4).scaled() + EdgeBias(3)),
}


@pytest.fixture
def graph():
    return Graph(EDGES.clone(), num_nodes=5, edge_attr=torch.randn(7, 3, dtype=torch.float64))


@pytest.fixture
def copied(monkeypatch):
    """How many copies were asked for, call by call."""
    asked, side_by_side = [], folding.side_by_side
    monkeypatch.setattr(folding, "side_by_side", lambda graph, count: asked.append(count) or side_by_side(graph, count))
    return asked


def results(layer, x, graph):
    """y, the weights, and the gradients of both in x and the parameters."""
    y, weights = layer(x, structure=graph, return_weights=True)
    grads = torch.autograd.grad(y.square().sum(), [x, *layer.parameters()], allow_unused=True)
    return y, weights, grads[0], grads[1:]


@pytest.mark.parametrize("lead", [(3,), (2, 2), (1,)])
@pytest.mark.parametrize("name", list(LAYERS))
def test_samples_are_as_alone(name, lead, graph, copied):
    layer = LAYERS[name]().double()
    x = torch.randn(*lead, 5, 6, dtype=torch.float64, requires_grad=True)
    for samples in (x, x[:1].detach().requires_grad_(), x):
        y, weights, grad, own = results(layer, samples, graph)
        single = [results(layer, one.detach().requires_grad_(), graph) for one in samples.flatten(0, -3)]
        for actual, parts in ((y, 0), (weights, 1), (grad, 2)):
            torch.testing.assert_close(actual.flatten(0, -3), torch.stack([one[parts] for one in single]))
        for number, actual in enumerate(own):
            if actual is not None:
                torch.testing.assert_close(actual, sum(one[3][number] for one in single))
    assert set(copied) == {len(x.flatten(0, -3)), len(x[:1].flatten(0, -3))} - {1}


def test_a_graph_changed_in_place_is_copied_anew(graph):
    layer, x = LAYERS["products"]().double(), torch.randn(3, 5, 6, dtype=torch.float64)
    layer(x, structure=graph)
    graph.edge_index[:, 0] = torch.tensor([4, 1])
    torch.testing.assert_close(layer(x, structure=graph)[1], layer(x[1], structure=graph))


def test_what_keeps_one_graph(graph, copied, monkeypatch):
    """Dropout, whose draws go by entries and heads; more edges than are copied."""
    x = torch.randn(3, 5, 6)
    graph = Graph(graph.edge_index, num_nodes=5)
    dropped = attention(DotProduct(2, 4).scaled(), dropout=0.5)
    dropped(x, structure=graph)
    layer = LAYERS["additive"]()
    expected = layer(x, graph)
    assert copied == [3]
    monkeypatch.setattr(folding, "COPIED", 14)
    torch.testing.assert_close(layer(x, graph), expected)
    assert copied == [3]


@slow
def test_a_traced_program_keeps_one_graph(graph, copied):
    x, layer = torch.randn(3, 5, 6), LAYERS["additive"]()
    graph = Graph(graph.edge_index, num_nodes=5)
    compiled = torch.compile(layer, fullgraph=True, backend="eager", dynamic=True)
    actual = [compiled(x[:samples], graph) for samples in (3, 2)]
    assert not copied
    for y in actual:
        torch.testing.assert_close(y, layer(x[:len(y)], graph))


@pytest.mark.parametrize("edges", [EDGES, EDGES[:, :0]])
def test_copies_are_the_layouts_of_disjoint_graphs(edges):
    one = Graph(edges, num_inputs=5, num_outputs=6)
    together = batch([one] * 4)
    for actual, expected in zip(folding.side_by_side(one, 4), layouts(together.edge_index, 20, 24), strict=True):
        for a, b in zip(actual, expected, strict=True):
            assert a.dtype is b.dtype and torch.equal(a, b)


def test_no_entries_and_no_edges():
    for nodes in (0, 3):
        graph = Graph(torch.empty(2, 0, dtype=torch.long), num_nodes=nodes)
        for name in list(LAYERS)[:5]:
            x = torch.randn(2, nodes, 6, requires_grad=True)
            y = LAYERS[name]()(x, structure=graph)
            assert y.shape == (2, nodes, 6)
            y.sum().backward()
