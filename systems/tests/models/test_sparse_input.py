"""The sparse first layer against dense arithmetic, values and gradients."""

import pytest
import torch

from structconv import STRUCTURE, Adjacency, BiAffine, Chebyshev, Graph
from structconv.bases.sparse import Sparse
from structconv_systems.models.citation import chebyshev, gat, gcn
from structconv_systems.models.sparse_input import SparseConv, drop_values


@pytest.fixture
def words() -> Sparse:
    """12 papers, 9 words; each paper has 0 to 3 of them."""
    edges = torch.stack([torch.randint(9, (20,)), torch.randint(12, (20,))]).unique(dim=1)
    return Sparse(Graph(edges, num_inputs=9, num_outputs=12), torch.rand(edges.shape[1], dtype=torch.float64))


@pytest.fixture
def graph() -> Graph:
    edges = torch.randint(12, (2, 30), generator=torch.Generator().manual_seed(1))
    edges = edges[:, edges[0] != edges[1]]
    return Graph(torch.cat([edges, edges.flip(0)], 1).unique(dim=1), num_nodes=12)


def attention():
    return BiAffine(heads=3, bilinear=False, on="projected").leaky_relu(0.2).masked(keep=STRUCTURE).softmax()


@pytest.mark.parametrize("make", [lambda: Adjacency(self_loops=True), lambda: Chebyshev(order=2), attention])
def test_it_is_eq_1_with_dense_x(words, graph, make):
    layer = SparseConv(make(), 9, 4, bias=True).double()
    y = layer(words, graph)
    x_MP = words.dense()[0].mT
    r_KMQ = x_MP @ layer.theta
    dense_KMN = layer.mechanism(_setting(r_KMQ, graph)).dense(torch.float64)
    expected = torch.einsum("kmn,mp,kpq->nq", dense_KMN, x_MP, layer.theta) + layer.bias
    assert torch.allclose(y, expected, atol=1e-10)
    weight = torch.randn_like(y)
    got = torch.autograd.grad((y * weight).sum(), layer.theta)[0]
    assert torch.allclose(got, torch.autograd.grad((expected * weight).sum(), layer.theta)[0], atol=1e-10)


def _setting(r_KMQ, graph):
    from structconv.mechanisms import Inputs

    return Inputs(r_KMQ[0], r_KMQ[0], graph, (r_KMQ, r_KMQ))


def test_a_uniform_gat_is_the_mean_over_neighbors_and_the_node(words, graph):
    torch.manual_seed(0)
    model = gat(9, 4, heads=3, hidden=5, uniform=True).double().eval()
    edges = torch.zeros(12, 12, dtype=torch.float64)
    edges[tuple(graph.with_self_loops().edge_index)] = 1
    mean = edges / edges.sum(0)
    x = torch.einsum("mn,pm,kpq->nkq", mean, words.dense()[0], model.first.theta).flatten(1) + model.first.bias
    y = mean.mT @ torch.nn.functional.elu(x) @ model.second.weight.theta[0] + model.second.bias
    torch.testing.assert_close(model(words, graph), y)
    model.train()(words, graph).square().sum().backward()
    without = {name for name, parameter in model.named_parameters() if parameter.grad is None}
    assert without and all("attention" in name for name in without)


def test_heads_side_by_side_are_those_that_are_added(words, graph):
    torch.manual_seed(0)
    side = SparseConv(attention(), 9, 4, concat=True).double()
    added = SparseConv(attention(), 9, 4).double()
    added.load_state_dict(side.state_dict())
    y = side(words, graph)
    assert y.shape == (12, 12)
    assert torch.allclose(y.unflatten(-1, (3, 4)).sum(-2), added(words, graph), atol=1e-10)


def test_dropout_of_values_keeps_the_mean_and_the_zeros(words):
    torch.manual_seed(0)
    mean = torch.stack([drop_values(words, 0.5, True).dense() for _ in range(4000)]).mean(0)
    assert torch.allclose(mean, words.dense(), atol=0.1)
    assert (mean[words.dense() == 0] == 0).all()
    assert drop_values(words, 0.5, False) is words


@pytest.mark.parametrize("make", [gcn, chebyshev, gat])
def test_networks_train_every_parameter_and_are_still_in_eval(words, graph, make):
    torch.manual_seed(0)
    network = make(9, 5).double()
    network(words, graph).square().sum().backward()
    assert all(parameter.grad is not None and parameter.grad.abs().sum() > 0 for parameter in network.parameters())
    network.eval()
    assert torch.equal(network(words, graph), network(words, graph))
    assert network(words, graph).shape == (12, 5)


def test_gat_lets_every_node_see_itself(words):
    network = gat(9, 5).double().eval()
    single = Graph(torch.zeros(2, 0, dtype=torch.int64), num_nodes=12)
    y = network(words, single)
    assert not torch.allclose(y[0], y[1])
