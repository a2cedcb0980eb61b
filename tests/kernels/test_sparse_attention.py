"""Attention along edges by one operator equals the expression evaluated node by node, values and gradients."""

import pytest
import torch

from structconv import STRUCTURE, BiAffine, Causal, Conv, DotProduct, Graph, LowRank, RelativeBias, Window, conv, ops
from structconv.bases import Bilinear, EdgeScore, weights_at
from structconv.kernels import sparse_attention
from structconv.kernels.sparse_attention import AffineEdges, BilinearEdges, ScoredEdges
from structconv.mechanisms import EdgeBias
from structconv.primitives.edge_attention import packed_attention
from structconv.structures.supports import EdgeSupport
from structconv.weights import HeadBlocks
from tests.kernels.applied import (
    PRIMITIVES,
    applied,
    call_of,
    check_computes_the_same,
    match_of,
    offered,
    on_a_graph,
    planned,
)
from tests.support.derivatives import same
from tests.support.drawn import slow

KERNEL = "structconv.edge_attention"
AFFINE = BiAffine(heads=4, bilinear=False)
DOT = DotProduct(heads=4).scaled()
FUSED = {
    "gat": (AFFINE.leaky_relu(0.2).masked(keep=STRUCTURE).softmax(), AffineEdges),
    "gat, masked first": (AFFINE.masked(keep=STRUCTURE).leaky_relu(0.2).softmax(), AffineEdges),
    "affine": (AFFINE.masked(keep=STRUCTURE).softmax(), AffineEdges),
    "gat with dropout": (AFFINE.leaky_relu(0.2).masked(keep=STRUCTURE).softmax().dropout(0.4), AffineEdges),
    "dot": (DOT.masked(keep=STRUCTURE).softmax(), BilinearEdges),
    "dot with dropout": (DOT.masked(keep=STRUCTURE).softmax().dropout(0.4), BilinearEdges),
    "dot with edge bias": ((DOT + EdgeBias(3)).masked(keep=STRUCTURE).softmax(), BilinearEdges),
    "dot with edge bias alone": ((EdgeBias(3) + DOT).softmax(), BilinearEdges),
    "window": (DOT.masked(keep=Window(3)).softmax(), BilinearEdges),
    "gat with edge bias": ((AFFINE + EdgeBias(3)).leaky_relu(0.2).masked(keep=STRUCTURE).softmax(), ScoredEdges),
    "negative slope below zero": (AFFINE.leaky_relu(-0.2).masked(keep=STRUCTURE).softmax(), ScoredEdges),
    "leaky dot with dropout": (DOT.leaky_relu(0.2).masked(keep=STRUCTURE).softmax().dropout(0.4), ScoredEdges),
    "relative bias": ((DOT + RelativeBias(2)).masked(keep=STRUCTURE).softmax(), ScoredEdges),
}
OTHERS = {
    "causal": DOT.masked(keep=Causal()).softmax(),
    "over outputs": DOT.masked(keep=STRUCTURE).softmax(over="outputs"),
    "sum": AFFINE.masked(keep=STRUCTURE).normalize("sum"),
    "window of scores": DOT.leaky_relu(0.2).masked(keep=Window(3)).softmax(),
    "masked term": (AFFINE + DOT.masked(keep=Window(3))).masked(keep=STRUCTURE).softmax(),
    "normalized term": (AFFINE + DOT.masked(keep=STRUCTURE).softmax()).masked(keep=STRUCTURE).softmax(),
}


@pytest.mark.parametrize("name", FUSED)
@pytest.mark.parametrize(("lead", "dtype", "tolerance"), [((), torch.float64, 1e-10), ((2,), torch.float32, 1e-4)])
def test_the_kernel_computes_the_same(name, lead, dtype, tolerance):
    mechanism, kind = FUSED[name]
    built = on_a_graph(mechanism, lead, dtype)
    assert type(match_of(KERNEL, built[2])) is kind
    check_computes_the_same(built, KERNEL, tolerance)


def test_a_multiple_of_attention_keeps_its_weights():
    basis, leaves, call = on_a_graph(FUSED["gat"][0])
    half = call_of(0.5 * basis, call.projected)
    same(planned(half, "operands' kernels").weights(half), 0.5 * weights_at(basis, torch.float64), leaves, 1e-10, 1e-10)


def test_a_bias_along_other_edges_has_another_plan():
    """All sizes are alike: which edges are the same is known by identity."""
    edges, other = (torch.randint(0, 25, (2, 200)) for _ in range(2))
    q, values, r = (torch.randn(*shape, dtype=torch.float64) for shape in ((2, 30, 4), (2, 200), (2, 30, 5)))
    graph, copy, apart = Graph(edges, num_nodes=30), Graph(edges, num_nodes=30), Graph(other, num_nodes=30)
    for of, kernel in ((graph, KERNEL), (copy, KERNEL), (apart, PRIMITIVES), (graph, KERNEL)):
        basis = (Bilinear(q, q) + EdgeScore(of, values)).masked(keep=EdgeSupport(graph)).softmax()
        torch.testing.assert_close(ops.apply(basis, r), basis.dense().mT @ r)
        applied(basis, r, kernel)


@pytest.fixture
def tables(monkeypatch):
    """The shapes of the tables that joint products make."""
    actual = []

    def noted(by_target, by_source, table, *args, **options):
        actual.append(tuple(table.shape))
        return packed_attention(by_target, by_source, table, *args, **options)

    monkeypatch.setattr(sparse_attention, "packed_attention", noted)
    return actual


def layer_and_inputs(mechanism, weight, other=None, path="between", dtype=torch.float64):
    edges = torch.randint(0, 25, (2, 200))
    graph = Graph(edges, num_nodes=30, edge_attr=torch.randn(200, 3, dtype=dtype))
    layer = Conv(mechanism.masked(keep=STRUCTURE).softmax(), 16, 32, weight=weight, other_channels=other,
                 path=path).to(dtype)
    x = torch.randn(30, 16, dtype=dtype, requires_grad=True)
    z = None if other is None else torch.randn(30, other, dtype=dtype, requires_grad=True)
    return layer, graph, x, z


def alone(layer, graph, x, z):
    """What the layer computes, with queries, keys and values each by their own product."""
    return conv(x, layer.basis(x, graph, z=z), layer.weight()) + layer.bias


@pytest.mark.parametrize("other", [None, 12])
@pytest.mark.parametrize("weight", [HeadBlocks(), LowRank(8)])
@pytest.mark.parametrize("mechanism", [DotProduct(4, 6).scaled(), DotProduct(4, 8, bias=True).scaled(),
                                       DotProduct(4, 8, bias=True) + EdgeBias(3)], ids=repr)
def test_projections_of_the_same_entries_are_one_product(mechanism, weight, other, tables):
    layer, graph, x, z = layer_and_inputs(mechanism, weight, other)
    y, expected = layer(x, z=z, structure=graph), alone(layer, graph, x, z)
    depth = next(part for part in layer.modules() if isinstance(part, DotProduct)).dim
    assert tables == [(30, 4 * (8 + (2 if z is None else 1) * depth))]
    torch.testing.assert_close(y, expected)
    leaves = [x, *([] if z is None else [z]), *layer.parameters()]
    cotangent = torch.randn_like(y)
    actual, reference = (torch.autograd.grad(t, leaves, cotangent, create_graph=True) for t in (y, expected))
    torch.testing.assert_close(actual, reference)
    slopes = [torch.autograd.grad(sum(g.square().sum() for g in grads), leaves, materialize_grads=True)
              for grads in (actual, reference)]
    torch.testing.assert_close(*slopes)


def test_the_weights_of_a_joint_product_are_those_of_its_parts(tables):
    layer, graph, x, _ = layer_and_inputs(DotProduct(4, 8).scaled(), HeadBlocks())
    y, weights = layer(x, structure=graph, return_weights=True)
    assert len(tables) == 1
    torch.testing.assert_close(weights, weights_at(layer.basis(x, graph), x.dtype))
    torch.testing.assert_close(y, alone(layer, graph, x, None))


@pytest.mark.parametrize("case", ["path", "batch", "hook", "grouped", "feature", "normalization"])
def test_what_is_not_one_product_is_computed_part_by_part(case, tables):
    dot = {"grouped": DotProduct(4, 8, shared_by=2), "feature": DotProduct(4, 8, feature=torch.tanh)}.get(
        case, DotProduct(4, 8)).scaled()
    layer, graph, x, _ = layer_and_inputs(dot, HeadBlocks(), path="structure_first" if case == "path" else "between")
    if case == "normalization":
        layer = Conv(dot.masked(keep=STRUCTURE).normalize("sum"), 16, 32, weight=HeadBlocks(), path="between").double()
    if case == "batch":
        x = torch.randn(2, 30, 16, dtype=x.dtype)
    if case == "hook":
        query = next(part for part in layer.modules() if isinstance(part, DotProduct)).query
        query.register_forward_hook(lambda module, args, y: 2 * y)
    torch.testing.assert_close(layer(x, structure=graph), alone(layer, graph, x, None))
    assert not tables


@slow
def test_a_joint_product_compiles_whole(tables):
    layer, graph, x, _ = layer_and_inputs(DotProduct(4, 8, bias=True).scaled(), HeadBlocks(), dtype=torch.float32)
    expected = layer(x, structure=graph)
    graph.by_target(), graph.by_source()
    compiled = torch.compile(lambda x: layer(x, structure=graph), fullgraph=True, backend="aot_eager")
    got = compiled(x)
    torch.testing.assert_close(got, expected)
    leaves, cotangent = [x, *layer.parameters()], torch.randn_like(got)
    for a, b in zip(*(torch.autograd.grad(y, leaves, cotangent) for y in (got, expected)), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", OTHERS)
def test_what_the_operators_cannot_compute_is_left_alone(name):
    assert KERNEL not in offered(on_a_graph(OTHERS[name])[2])
