"""Graph layers against plain dense formulas."""

import dataclasses
from functools import partial

import pytest
import torch

from structconv import Adjacency, Conv, GATConv, GATv2Conv, GCNConv, Graph, KnowledgeGraph, RelationalConv, batch
from structconv.bases.matrices import NORMALIZATIONS, laplacian_bound
from structconv.errors import ConfigError, ShapeError, StructureError
from structconv.nn import ChebConv, DiffusionConv, EdgeConditionedConv
from tests.support.errors import check_refused
from tests.support.graphs import matrix

F64 = torch.float64
close = partial(torch.testing.assert_close, rtol=0, atol=1e-10)
EDGES = torch.tensor([[0, 1, 1, 2, 3, 3, 4, 0], [1, 0, 2, 1, 2, 0, 0, 3]])  # node 5 is isolated
WEIGHTS = torch.tensor([0.5, 0.5, 2.0, 1.5, 1.0, 0.25, 3.0, 0.75], dtype=F64)
M, P, Q = 6, 4, 3


@pytest.fixture
def x() -> torch.Tensor:
    return torch.randn(M, P, dtype=F64)


def graph(weighted: bool = True) -> Graph:
    return Graph(EDGES, num_nodes=M, edge_weight=WEIGHTS if weighted else None)


def theta(layer) -> torch.Tensor:
    return layer.weight().dense()


def test_gcn_without_normalization(x):
    layer = GCNConv(P, Q, normalize=False, bias=False).to(F64)
    close(layer(x, graph()), matrix(graph()).mT @ x @ theta(layer)[0])
    layer = GCNConv(P, Q, add_self_loops=False, bias=False).to(F64)
    degree = matrix(graph()).sum(0)
    d = torch.where(degree > 0, degree, torch.inf).rsqrt()
    close(layer(x, graph()), (d[:, None] * matrix(graph()) * d).mT @ x @ theta(layer)[0])


KNOWLEDGE = KnowledgeGraph(torch.tensor([[0, 0, 1], [2, 0, 1], [3, 1, 1], [4, 1, 0], [1, 2, 5], [5, 2, 5]]), M,
                           ("likes", "knows", "owns"))


@pytest.mark.parametrize("options", [{}, {"num_bases": 2}, {"aggr": "add"}, {"root_weight": False},
                                     {"num_blocks": 2}])
def test_relational(x, options):
    layer = RelationalConv(P, 4, 3, **options).to(F64)
    a = torch.zeros(3, M, M, dtype=F64)
    for m, r, n in KNOWLEDGE.triples.tolist():
        a[r, m, n] += 1
    if options.get("aggr") != "add":
        a = a / a.sum(1, keepdim=True).clamp(min=1)
    weights = theta(layer)
    expected = torch.einsum("rmn,mp,rpq->nq", a, x, weights[:3]) + layer.bias
    if options.get("root_weight", True):
        expected = expected + x @ weights[3]
    close(layer(x, KNOWLEDGE), expected)
    if "num_bases" in options:
        parts = dict(layer.weight.named_parameters())
        assert sum(p.numel() for p in parts.values()) == 2 * (3 + P * 4) + P * 4
    if "num_blocks" in options:
        assert not weights[:3, :2, 2:].any()


def test_gat_on_a_bipartite_graph(x):
    layer = GATConv(P, Q, heads=2, add_self_loops=False).to(F64)
    z = torch.randn(3, P, dtype=F64)
    edges = torch.tensor([[0, 1, 5, 2], [0, 0, 2, 1]])
    y = layer(x, Graph(edges, num_inputs=M, num_outputs=3), z=z)
    score = next(module for module in layer.modules() if hasattr(module, "vector_source"))
    for k in range(2):
        h, g = x @ layer.weight.theta[k], z @ layer.weight.theta[k]
        raw = (h @ score.vector_source[k])[[0, 1]] + g[0] @ score.vector_target[k]
        expected = torch.nn.functional.leaky_relu(raw, 0.2).softmax(0) @ h[[0, 1]]
        close(y[0, k * Q:(k + 1) * Q], expected + layer.bias[k * Q:(k + 1) * Q])


def attributed(edges: int, kinds: int | None) -> Graph:
    """A multigraph whose edges are of a few kinds, or all different."""
    attributes = torch.randn(edges if kinds is None else kinds, 3, dtype=F64)
    attributes = attributes if kinds is None else attributes[torch.arange(edges) % kinds]
    return Graph(torch.randint(M - 1, (2, edges)), num_nodes=M, edge_attr=attributes)


@pytest.mark.parametrize("aggr", ["add", "mean"])
@pytest.mark.parametrize("kinds, kernel", [(None, "blocks of heads"), (5, "mixed filters")])
def test_edge_conditioned(x, kinds, kernel, aggr):
    """Edge by edge: x_m times the matrix that the network and one more linear layer make of the attributes."""
    layer, edges = EdgeConditionedConv(P, Q, 3, (7, 5), aggr=aggr).to(F64), attributed(80, kinds)
    matrices, root = (part().dense() for part in layer.weight.weights)
    expected = x @ root[0] + layer.bias
    counts = edges.target.bincount(minlength=M)
    for e, (m, n) in enumerate(edges.edge_index.T.tolist()):
        hidden = layer.mechanism.operands[0].network(edges.edge_attr[e])
        share = 1.0 if aggr == "add" else 1 / int(counts[n])
        expected[n] = expected[n] + share * x[m] @ (matrices[0] + torch.einsum("k,kpq->pq", hidden, matrices[1:]))
    close(layer(x, edges), expected)
    reference = torch.autograd.grad(expected.square().sum(), list(layer.parameters()))
    actual = torch.autograd.grad(layer(x, edges).square().sum(), list(layer.parameters()))
    torch.testing.assert_close(actual, reference, rtol=1e-9, atol=1e-9)
    assert kernel in str(layer.plan(x, edges))


def test_learned_attributes_of_edges_get_each_their_gradient(x):
    edges = attributed(80, 5)
    attributes = edges.edge_attr.clone().requires_grad_()
    layer = EdgeConditionedConv(P, Q, 3, 5).to(F64)
    y = layer(x, dataclasses.replace(edges, edge_attr=attributes))
    close(y, layer(x, edges))
    y.square().sum().backward()
    assert (attributes.grad.abs().sum(1) > 0).all()


def test_without_a_root_the_filters_are_mixed_too():
    layer = EdgeConditionedConv(P, Q, 3, 5, root_weight=False).to(F64)
    assert "mixed filters" in str(layer.plan(torch.randn(M, P, dtype=F64), attributed(80, 5)))


def test_filters_of_edges_are_not_held():
    """One (E, P, Q) would be 33 MB, one (N, K, P) 13 MB."""
    edges = Graph(torch.randint(400, (2, 2000)), num_nodes=400, edge_attr=torch.randn(2000, 3))
    layer, x = EdgeConditionedConv(64, 64, 3), torch.randn(400, 64)
    assert layer.plan(x, edges).cost.peak_bytes < 1e6


def test_gatv2_weights_and_bipartite_graphs(x):
    layer, z = GATv2Conv(P, Q, heads=2, add_self_loops=False).to(F64), torch.randn(3, P, dtype=F64)
    edges = torch.tensor([[0, 1, 5, 2], [0, 0, 2, 1]])
    y, weights = layer(x, Graph(edges, num_inputs=M, num_outputs=3), z=z, return_weights=True)
    close(layer(x, Graph(edges, num_inputs=M, num_outputs=3), z=z), y)
    score = next(module for module in layer.modules() if hasattr(module, "vector"))
    for k in range(2):
        h, target = x @ layer.weight.theta[k], score.target(z)[:, k * Q:(k + 1) * Q]
        raw = torch.nn.functional.leaky_relu(h[edges[0]] + target[edges[1]], 0.2) @ score.vector[k]
        expected = raw[:2].softmax(0)
        close(weights[k], torch.cat([expected, torch.ones(2, dtype=F64)]))
        close(y[0, k * Q:(k + 1) * Q], expected @ h[:2] + layer.bias[k * Q:(k + 1) * Q])


@pytest.mark.parametrize(("error", "call"), [
    (StructureError, lambda: GCNConv(P, Q)(torch.randn(M, P), EDGES)),
    (StructureError, lambda: GATConv(P, Q)(torch.randn(M, P), EDGES)),
    (StructureError, lambda: RelationalConv(P, Q, 3)(torch.randn(M, P), graph(False))),
    (StructureError, lambda: RelationalConv(P, Q, 2)(torch.randn(M, P), KNOWLEDGE)),
    (StructureError, lambda: GATConv(P, Q)(torch.randn(2, P), Graph(EDGES[:, :1], num_inputs=2, num_outputs=3))),
    (ShapeError, lambda: GCNConv(P, Q)(torch.randn(M, P + 1), graph(False))),
    (ShapeError, lambda: GCNConv(P, Q)(torch.randn(M + 1, P), graph(False))),
    (ConfigError, lambda: ChebConv(P, Q, 0)),
    (ConfigError, lambda: ChebConv(P, Q, 3, normalize="rw")),
    (ConfigError, lambda: DiffusionConv(P, Q, 0)),
    (ConfigError, lambda: GATConv(P, Q, 0)),
    (ConfigError, lambda: GATv2Conv(P, Q, 0)),
    (ConfigError, lambda: RelationalConv(P, Q, 3, num_bases=2, num_blocks=2)),
    (ConfigError, lambda: RelationalConv(P, Q, 3, aggr="max")),
])
def test_errors(error, call):
    check_refused((error, r"got .*\.", call))


@pytest.mark.parametrize("layer", [GCNConv(4, 3), GATConv(4, 3), GATv2Conv(4, 3)])
def test_the_graph_may_be_called_the_structure(layer):
    graph, x = Graph(torch.tensor([[0, 1, 2], [1, 2, 0]]), num_nodes=3), torch.randn(3, 4)
    assert torch.equal(layer(x, structure=graph), layer(x, graph))
    assert str(layer.plan(x, structure=graph)) == str(layer.plan(x, graph))


#: Layers whose graph may have other weights in each sample of a batch.
WEIGHED = {
    "gcn": lambda: GCNConv(P, Q), "plain": lambda: GCNConv(P, Q, normalize=False),
    "by rows": lambda: Conv(Adjacency("row"), P, Q), "cheb": lambda: ChebConv(P, Q, 3),
    "cheb by rows": lambda: ChebConv(P, Q, 3, normalize="row", lambda_max=3.0),
    "cheb plain": lambda: ChebConv(P, Q, 3, normalize=None, lambda_max=9.0), "walks": lambda: DiffusionConv(P, Q, 3),
    "transposed": lambda: Conv(Adjacency().transpose(), P, Q),
}


@pytest.mark.parametrize("name", WEIGHED)
def test_each_sample_has_its_own_weights_on_one_graph(name):
    layer = WEIGHED[name]().to(F64)
    weights = torch.stack([WEIGHTS, WEIGHTS.flip(0), WEIGHTS.square()]).requires_grad_()
    x = torch.randn(3, M, P, dtype=F64)
    shared = Graph(EDGES, num_nodes=M, edge_weight=weights)
    single = [dataclasses.replace(shared, edge_weight=own) for own in weights]
    y, each = layer(x, structure=shared), torch.stack([layer(t, structure=g) for t, g in zip(x, single, strict=True)])
    close(y, each)
    close(*(torch.autograd.grad(t.cos().sum(), weights)[0] for t in (y, each)))
    close(layer(x[0], structure=shared)[1], layer(x[0], structure=single[1]))
    twice = batch([shared, shared])
    close(layer(torch.cat([x, x.flip(1)], 1), structure=twice)[:, :M], y)
    few = torch.arange(4)
    close(layer(x, structure=shared.select(few))[2], layer(x[2], structure=single[2].select(few)))
    with pytest.raises(ShapeError, match="must broadcast"):
        layer(x[:2], structure=shared)


def test_the_largest_eigenvalue_is_that_of_all_samples():
    weights = torch.stack([WEIGHTS, 4 * WEIGHTS])
    shared = Graph(EDGES, num_nodes=M, edge_weight=weights)
    large = Graph(torch.arange(600).repeat(2, 1), num_nodes=600, edge_weight=torch.ones(2, 600, dtype=F64))
    a = [matrix(graph()), 4 * matrix(graph())]
    reference = max(float(torch.linalg.eigvals(torch.diag(one.sum(0)) - one).abs().max()) for one in a)
    assert laplacian_bound(shared, None) == pytest.approx(reference)
    assert laplacian_bound(large, "row") == 2.0, "L = I - I is zero"


def test_weights_of_a_batch_are_degrees_of_each_and_nothing_for_other_libraries():
    shared = Graph(EDGES, num_nodes=M, edge_weight=torch.stack([WEIGHTS, 4 * WEIGHTS]))
    close(shared.in_degree(), torch.stack([matrix(graph()).sum(0), 4 * matrix(graph()).sum(0)]))
    close(shared.reversed().in_degree(), shared.out_degree())
    for made in (shared.to_scipy, shared.to_networkx, shared.to_torch_sparse):
        with pytest.raises(StructureError, match=r"one number an edge.*got \(2, 8\)"):
            made()
    with pytest.raises(StructureError, match="the same samples"):
        batch([shared, dataclasses.replace(shared, edge_weight=shared.edge_weight[:1])])


@pytest.mark.parametrize("graph", [Graph(torch.zeros(2, 2, dtype=torch.long), num_nodes=1),
                                   Graph(torch.zeros(2, 3, dtype=torch.long), num_nodes=700),
                                   Graph(torch.arange(3).repeat(2, 7), num_nodes=3, edge_weight=torch.rand(21))])
@pytest.mark.parametrize("normalize", ["sym", "row", None])
def test_a_laplacian_that_is_zero_but_for_rounding_is_bounded_as_one_without_edges(graph, normalize):
    bound = laplacian_bound(graph, normalize)
    others = torch.ones(graph.num_nodes).index_fill(0, graph.source, 0).any() and normalize is not None
    assert bound == (pytest.approx(1.0, abs=1e-4) if others else 2.0)  # L is one at nodes without edges


def test_a_small_laplacian_is_none_of_rounding():
    path = torch.tensor([[0, 1], [1, 0]])
    assert laplacian_bound(Graph(path, edge_weight=torch.full((2,), 1e-20)), None) == pytest.approx(2e-20)


@pytest.mark.parametrize("kind", [GATConv, GATv2Conv])
def test_the_mean_of_heads_is_that_of_those_side_by_side(x, kind):
    mean, beside = (kind(P, Q, heads=3, concat=concat, bias=False).to(F64) for concat in (False, True))
    mean.load_state_dict(beside.state_dict())
    (y, a), (heads, weights) = (layer(x, graph(False), return_weights=True) for layer in (mean, beside))
    close(y, heads.unflatten(-1, (3, Q)).mean(1))
    close(mean(x, graph(False)), y)
    close(a, weights)


@pytest.mark.parametrize("fill_value", ["mean", "max", 2.5])
def test_loops_have_attributes(x, fill_value):
    options = {} if fill_value == "mean" else {"fill_value": fill_value}
    layer, plain = (GATConv(P, Q, 2, edge_dim=3, **o).to(F64) for o in (options, {"add_self_loops": False}))
    plain.load_state_dict(layer.state_dict())
    attributed = Graph(EDGES, num_nodes=M, edge_attr=torch.randn(EDGES.shape[1], 3, dtype=F64))
    looped = attributed.with_self_loops(attr=fill_value)
    assert looped.num_edges == EDGES.shape[1] + M
    close(layer(x, attributed), plain(x, looped))


def test_attributes_of_loops_of_each_kind():
    index, values = torch.tensor([[0, 1, 2], [1, 1, 0]]), torch.tensor([1, 4, 6])
    for kind, of in [("mean", [6, 2.5, 0]), ("add", [6, 5, 0]), ("min", [6, 1, 0]), ("max", [6, 4, 0]),
                     ("mul", [6, 4, 1])]:
        for attr in (values, values[:, None].expand(3, 2), values[:, None].expand(4, 3, 2)):
            looped = Graph(index, num_nodes=3, edge_attr=attr).with_self_loops(attr=kind).edge_attr
            loops = looped[3:] if attr.dim() < 3 else looped[:, 3:]
            expected = torch.tensor(of, dtype=loops.dtype).view(3, *[1] * (attr.dim() > 1)).expand_as(loops)
            assert torch.equal(loops, expected)
    for call in (lambda: Graph(index).with_self_loops(attr="median"), lambda: GATConv(P, Q, edge_dim=2, fill_value="x"),
                 lambda: GATConv(P, Q, edge_dim=2, fill_value=[1.0])):
        with pytest.raises(ConfigError, match="must be"):
            call()


@pytest.mark.parametrize("loops", [False, True])
@pytest.mark.parametrize("normalize", NORMALIZATIONS)
def test_one_list_of_edges_serves_graphs_with_and_without_weights(normalize, loops):
    layer, x, edges = Conv(Adjacency(normalize, self_loops=loops), P, Q), torch.randn(M, P), EDGES.clone()
    for weight in (WEIGHTS.float(), None, WEIGHTS.float().flip(0), None):
        y, other = (layer(x, Graph(index, num_nodes=M, edge_weight=weight)) for index in (edges, EDGES.clone()))
        torch.testing.assert_close(y, other)
