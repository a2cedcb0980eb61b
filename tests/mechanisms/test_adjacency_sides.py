"""Degrees of each side of a graph, weighted or counted, against dense diagonals."""

import pytest
import torch

from structconv import Adjacency, ConfigError, Conv, Graph, batch
from tests.support.derivatives import same

F64 = torch.float64
SIDES = ("sum", "sqrt", "count", "sqrt_count", None)


def bipartite(weight=None):
    index = torch.tensor([[0, 1, 2, 1, 3, 0, 3], [0, 0, 0, 1, 1, 3, 1]])
    return Graph(index, num_inputs=5, num_outputs=4, edge_weight=weight)


def divided(graph, normalize, weighted):
    """The matrix by dense diagonals; repeated edges add up."""
    w, ones = (torch.zeros(5, 4, dtype=F64).index_put(tuple(graph.edge_index), values, accumulate=True)
               for values in (graph.edge_weight, torch.ones(7, dtype=F64)))
    a = w if weighted else ones
    for axis, side in enumerate(normalize):
        if side is not None:
            degree = (ones if side.endswith("count") else w).sum(1 - axis)
            scale = degree.clamp(min=1e-9) ** (-0.5 if side.startswith("sqrt") else -1.0) * (degree > 0)
            a = a * scale.unsqueeze(1 - axis)
    return a


@pytest.mark.parametrize(("normalize", "weighted"), [
    ((side, SIDES[(i + step) % 5]), bool(step)) for i, side in enumerate(SIDES) for step in (0, 1, 3)], ids=str)
def test_each_side_by_its_own_degrees(normalize, weighted):
    weight = torch.rand(7, dtype=F64).add(0.5).requires_grad_()
    graph, x = bipartite(weight), torch.randn(5, 2, dtype=F64)
    basis = Adjacency(normalize, weighted=weighted).basis(x, structure=graph)
    expected = divided(graph, normalize, weighted)
    torch.testing.assert_close(basis.dense(F64)[0], expected)
    y = basis.analysis(x)[0]
    assert y.requires_grad == expected.requires_grad
    if y.requires_grad:
        same(y, expected.T @ x, [weight])
    else:
        torch.testing.assert_close(y, expected.T @ x)


def test_the_transpose_goes_from_targets_to_sources():
    graph, x = bipartite(torch.rand(7, dtype=F64)), torch.randn(4, 2, dtype=F64)
    layer = Conv(Adjacency(("sum", None)).transpose(), 2, 3).to(F64)
    expected = divided(graph, ("sum", None), True) @ x @ layer.weight.theta[0] + layer.bias
    torch.testing.assert_close(layer(x, structure=graph), expected)


def test_a_batch_of_hypergraphs():
    layer = Conv(Adjacency(("sqrt", "count"), weighted=False) @ Adjacency(("sqrt", None)).transpose(), 2, 3).to(F64)
    graphs = [bipartite(torch.rand(7, dtype=F64)), Graph(torch.tensor([[0, 1], [0, 0]]), num_inputs=2, num_outputs=1,
                                                          edge_weight=torch.ones(2, dtype=F64))]
    xs = [torch.randn(graph.num_inputs, 2, dtype=F64) for graph in graphs]
    torch.testing.assert_close(layer(torch.cat(xs), structure=batch(graphs)),
                               torch.cat([layer(x, structure=graph) for x, graph in zip(xs, graphs, strict=True)]))


def test_without_weights_the_named_normalizations_count():
    graph, x = bipartite(torch.rand(7, dtype=F64)), torch.randn(5, 2, dtype=F64)
    bare = Graph(graph.edge_index, num_inputs=5, num_outputs=4)
    for normalize in ("sym", "row", None):
        ours = Adjacency(normalize, weighted=False).basis(x, structure=graph).dense(F64)
        torch.testing.assert_close(ours, Adjacency(normalize).basis(x, structure=bare).dense(F64))


def test_errors():
    with pytest.raises(ConfigError, match="one for the inputs and one for the outputs"):
        Adjacency(("sum",))
    with pytest.raises(ConfigError, match="each side of normalize must be one of 'sum'"):
        Adjacency(("sym", None))
