"""Layers as one node over edges that a kernel sorts: against the dense matrix, derivatives and changes included."""

import dataclasses

import pytest
import torch
import torch.autograd.forward_ad as fwAD
from torch.overrides import BaseTorchFunctionMode

from structconv import Graph, ShapeError, StructureError, batch, conv
from structconv import torch_compat as private
from structconv.bases import Sparse, Typed
from structconv.mechanisms import STRUCTURE, Additive, Adjacency, DotProduct, Identity
from structconv.nn import Conv, GATv2Conv, GraphPool, GroupPool
from structconv.primitives.native.loader import core
from structconv.structures.graph import rows_to_groups
from structconv.weights import Eye, Full, HeadBlocks
from tests.support.derivatives import autograd_nodes, derivatives
from tests.support.own_calls import own_calls

pytestmark = pytest.mark.skipif(core() is None, reason="there are no native kernels")
NODES, EDGES = 9, 30


def graph(dtype=torch.int64, weighted=False, outputs=NODES, strided=False):
    generator = torch.Generator().manual_seed(EDGES)
    index = torch.stack([torch.randint(NODES - 1, (EDGES,), generator=generator),
                         torch.randint(outputs - 1, (EDGES,), generator=generator)]).to(dtype)
    index = index.repeat_interleave(2, 1)[:, ::2] if strided else index
    weight = torch.rand(EDGES, generator=generator) + 0.5 if weighted else None
    return Graph(index, num_inputs=NODES, num_outputs=outputs, edge_weight=weight)


def matrix(graph, normalize, loops):
    """A (M, N) in float64, with entries of degree 0 that weigh 0."""
    weight = torch.ones(graph.num_edges) if graph.edge_weight is None else graph.edge_weight
    a = torch.zeros(graph.num_inputs, graph.num_outputs, dtype=torch.float64)
    a = a.index_put(tuple(graph.edge_index.long()), weight.double(), accumulate=True)
    a = a + torch.eye(graph.num_inputs, dtype=torch.float64) if loops else a
    columns, rows = a.sum(0), a.sum(0) if graph.is_square else a.sum(1)
    root, inverse = (lambda d: torch.where(d == 0, 0.0, d**-0.5)), (lambda d: torch.where(d == 0, 0.0, 1 / d))
    if normalize == "sym":
        return root(rows)[:, None] * a * root(columns)
    return a * inverse(columns) if normalize == "row" else a


CASES = [(normalize, loops, options) for normalize in ("sym", "row", None) for loops, options in (
    (True, {}), (False, {"weighted": True}), (True, {"weighted": True, "dtype": torch.int32}),
    (False, {"outputs": 5, "weighted": True}), (False, {"outputs": 5, "strided": True}))]


@pytest.mark.parametrize(("normalize", "loops", "options", "path"), [
    (*case, ("structure_first", "channels_first")[number % 2]) for number, case in enumerate(CASES)])
def test_values_and_derivatives_are_those_of_the_matrix(normalize, loops, options, path):
    given = graph(**options)
    layer = Conv(Adjacency(normalize, loops), 3, 4, path=path)
    torch.nn.init.normal_(layer.bias)
    x = torch.randn(NODES, 3, requires_grad=True)
    leaves = (x, *layer.parameters())
    theta, bias = (t.detach().double().requires_grad_() for t in (layer.weight.theta, layer.bias))
    doubles = (x.detach().double().requires_grad_(), *(bias if t.dim() == 1 else theta for t in layer.parameters()))
    y = layer(x, given)
    expected = matrix(given, normalize, loops).mT @ doubles[0] @ theta[0] + bias
    torch.testing.assert_close(y.double(), expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(layer(x, given), y, rtol=0, atol=0)
    first, reference = (torch.autograd.grad(t.square().sum(), of) for t, of in ((y, leaves), (expected, doubles)))
    again = torch.autograd.grad(layer(x, given).square().sum(), leaves, create_graph=True)
    second = torch.autograd.grad(sum(g.square().sum() for g in again), leaves)
    wanted_again = torch.autograd.grad((matrix(given, normalize, loops).mT @ doubles[0] @ theta[0]
                                        + bias).square().sum(), doubles, create_graph=True)
    wanted_second = torch.autograd.grad(sum(g.square().sum() for g in wanted_again), doubles)
    for actual, right in ((first, reference), (again, wanted_again), (second, wanted_second)):
        for one, other in zip(actual, right, strict=True):
            torch.testing.assert_close(one.double(), other, rtol=1e-4, atol=1e-3)


def dots(projection_bias=False, bias=True, dropout=0.0):
    attention = DotProduct(2, 3, bias=projection_bias).scaled().masked(keep=STRUCTURE).softmax()
    return Conv(attention.dropout(dropout) if dropout else attention, 3, 8, weight=HeadBlocks(), bias=bias)


ATTENTIONS = {"dots": (dots, "_AttendDotsBackward"),
              "dots with biases": (lambda: dots(True, dropout=0.4), "_AttendDotsBackward"),
              "dots without": (lambda: dots(bias=False), "_AttendDotsBackward"),
              "dots of full weights": (lambda: Conv(
                  DotProduct(2, 4, bias=True).scaled().masked(keep=STRUCTURE).softmax(), 3, 8),
                  "_AttendBilinearBackward"),
              "dots with dropout": (lambda: Conv(
                  DotProduct(1, 4).masked(keep=STRUCTURE).softmax().dropout(0.4), 3, 3, weight=Eye()),
                  "_AttendBilinearBackward"),
              "GATv2": (lambda: GATv2Conv(3, 4, heads=2), "_AttendPairsBackward"),
              "GATv2 with dropout": (lambda: GATv2Conv(3, 4, heads=2, add_self_loops=False, dropout=0.4),
                                     "_AttendPairsBackward"),
              "tanh": (lambda: Conv(Additive(3, heads=2).masked(keep=STRUCTURE).softmax(), 3, 8, weight=HeadBlocks()),
                       "_AttendAdditiveBackward")}


@pytest.mark.parametrize("kind", ATTENTIONS)
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
def test_attention_by_products_and_additive_scores_is_one_node(kind, dtype):
    """Held against the operators, which run where a mode sees all functions."""
    given, x = graph(dtype), torch.randn(NODES, 3, requires_grad=True)
    made, name = ATTENTIONS[kind]
    layer = made()
    for bias in (p for p in layer.parameters() if p.dim() == 1):
        torch.nn.init.normal_(bias)
    leaves = (x, *layer.parameters())

    def results():
        torch.manual_seed(1)
        return derivatives(layer(x, given), leaves)

    actual = results()
    assert name in autograd_nodes(actual[0].grad_fn)
    with BaseTorchFunctionMode():
        expected = results()
    assert name not in autograd_nodes(expected[0].grad_fn)
    scale = max(float(t.detach().abs().max()) for t in expected)  # of what cancels in the gradient of the keys' bias
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=3e-6 * scale)
    layer.eval()
    torch.testing.assert_close(layer(x.detach(), given), layer(x, given).detach(), rtol=0, atol=0)
    y = layer(x, given)
    jacobian = torch.func.jacrev(lambda x: layer(x, given))(x)
    torch.testing.assert_close(jacobian, torch.func.jacfwd(lambda x: layer(x, given))(x), rtol=1e-4, atol=1e-5)
    (row,) = torch.autograd.grad(y, x, torch.eye(y.numel()).view(-1, *y.shape), is_grads_batched=True)
    torch.testing.assert_close(row.view(jacobian.shape), jacobian, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(torch.func.vmap(lambda x: layer(x, given))(x.expand(2, NODES, 3))[1], y)
    y = layer(x, given)
    given.edge_index[0, 0] = (given.edge_index[0, 0] + 1) % NODES
    with pytest.raises(RuntimeError, match="edge_index was changed in place"):
        torch.autograd.grad(y.sum(), x, create_graph=True)


@pytest.mark.parametrize("small", [False, True])
@pytest.mark.parametrize("weighted", [False, True])
def test_relations_side_by_side_are_one_node(weighted, small):
    """Against the dense matrices in float64; the last type and output have no edge."""
    nodes = NODES if small else (1 << 14) // 6 + 1  # numbers from which products are those of `product`
    index = torch.stack([torch.randint(nodes, (EDGES,)), torch.randint(4, (EDGES,))])
    basis = Typed(Graph(index, num_inputs=nodes, num_outputs=5), torch.randint(3, (EDGES,)), 4,
                  torch.randn(EDGES) if weighted else None)
    x, theta = torch.randn(nodes, 3, requires_grad=True), torch.randn(4, 3, 6, requires_grad=True)

    y = conv(x, basis, Full.of(theta), path="structure_first")
    assert "_ConvolveBackward" in autograd_nodes(y.grad_fn)
    doubles = tuple(t.detach().double().requires_grad_() for t in (x, theta))
    expected = torch.einsum("kmn,mp,kpq->nq", basis.dense(torch.float64), *doubles)
    for one, other in zip(derivatives(y, (x, theta)), derivatives(expected, doubles), strict=True):
        torch.testing.assert_close(one.double(), other, rtol=1e-4, atol=1e-6 * float(other.detach().abs().max()))
    with torch.no_grad():
        torch.testing.assert_close(conv(x, basis, Full.of(theta), path="structure_first"), y)


def test_a_gradient_drawn_before_has_a_forward_derivative():
    given, x, layer = graph(), torch.randn(NODES, 3, requires_grad=True), Conv(Adjacency("sym", True), 3, 4)
    y, tangent = layer(x, given), torch.randn(NODES, 4)
    assert "_ConvolveBackward" in autograd_nodes(y.grad_fn)
    with fwAD.dual_level():
        (grad,) = torch.autograd.grad(y, x, fwAD.make_dual(torch.randn_like(y), tangent), retain_graph=True)
        moved = fwAD.unpack_dual(grad).tangent
    torch.testing.assert_close(moved, torch.autograd.grad(y, x, tangent)[0])  # a gradient is linear in that of y


def test_changes_in_place_are_noticed_and_bad_edges_refused():
    given, x = graph(), torch.randn(NODES, 3, requires_grad=True)
    layer = Conv(Adjacency("sym", True), 3, 4)
    y = layer(x, given)
    (before,) = torch.autograd.grad(y.sum(), x, retain_graph=True)
    given.edge_index[0, 0] = (given.edge_index[0, 0] + 1) % NODES
    (after,) = torch.autograd.grad(y.sum(), x, retain_graph=True)
    assert torch.equal(before, after)  # a gradient under way is that of the edges that were
    with pytest.raises(RuntimeError, match="edge_index was changed"):
        torch.autograd.grad(y.sum(), x, create_graph=True)
    changed = layer(x, given)
    assert not torch.equal(changed, y)
    torch.testing.assert_close(changed, layer(x, Graph(given.edge_index.clone(), num_nodes=NODES)))
    given.edge_index[1, 3] = NODES
    with pytest.raises(StructureError, match="at edge 3"):
        layer(x, given)


@pytest.mark.parametrize("path", ["structure_first", "channels_first"])
def test_rows_of_another_number_in_the_same_class_are_refused(path):
    """A plan serves all sizes of a class, so that the kernel must ask for itself."""
    basis, theta = Sparse(Graph(torch.randint(112, (2, 300)), num_nodes=112)), torch.randn(1, 3, 4)
    conv(torch.randn(112, 3), basis, theta, path=path)
    for rows in (100, 111):
        with pytest.raises((ShapeError, StructureError)):
            conv(torch.randn(rows, 3), basis, theta, path=path)


def test_a_batch_and_a_graph_with_loops_are_as_they_are_written():
    parts = [graph(), graph(torch.int64, outputs=NODES)]
    joined = batch(parts)
    looped = joined.with_self_loops()
    assert looped.num_edges == looped.edge_index.shape[1] == 2 * (EDGES + NODES)
    assert torch.equal(looped.edge_index[:, -1], torch.tensor([2 * NODES - 1] * 2))
    twin = dataclasses.replace(looped, edge_weight=torch.ones(looped.num_edges))
    x = torch.randn(2 * NODES, 3)
    layer = Conv(Adjacency("sym"), 3, 4)
    torch.testing.assert_close(layer(x, looped), layer(x, twin))
    torch.testing.assert_close(layer(x, looped)[NODES:], layer(x[NODES:], parts[1].with_self_loops()))
    with torch.inference_mode():
        y = layer(x, batch(parts).with_self_loops())
    torch.testing.assert_close(y, layer(x, looped))
    assert private.version(looped.edge_index) is not None


@pytest.mark.parametrize("kind", ["sum", "mean", "max"])
@pytest.mark.parametrize("form", ["neighbors", "groups", "samples"])
def test_pooling_is_that_of_the_operators(kind, form):
    """Equal maxima share a gradient, a group without rows has zeros, and second derivatives are right."""
    parts = [graph(), Graph(torch.zeros(2, 0, dtype=torch.int64), num_nodes=0), graph(weighted=False)]
    joined = batch(parts) if form == "samples" else graph(outputs=12)
    x = torch.randint(3, (joined.num_inputs, 5)).float().requires_grad_()
    pool = (GraphPool if form == "samples" else GroupPool)(5, kind)
    if form == "groups":
        joined = rows_to_groups(torch.tensor([0, 2, 2, 1, 0, 2, 4, 4, 4]), 6)

    def results():
        return derivatives(pool(x, joined), [x])

    actual = results()
    along = "_MaximaBackward" if kind == "max" else "_SumsBackward"
    assert ("_PoolBackward" if form == "samples" else along) in autograd_nodes(actual[0].grad_fn)
    with BaseTorchFunctionMode():
        expected = results()
    torch.testing.assert_close(actual, expected)
    assert not actual[0][1 if form == "samples" else 3 if form == "groups" else 11].any()
    with torch.no_grad():
        torch.testing.assert_close(pool(x, joined), expected[0])
    nan = x.detach().clone()
    nan[0, 0] = torch.nan
    with BaseTorchFunctionMode():
        expected = pool(nan, joined)
    torch.testing.assert_close(pool(nan, joined), expected, equal_nan=True)


ATTENTION = DotProduct(2, 4).scaled().masked(keep=STRUCTURE).softmax()


@pytest.mark.parametrize(("mechanism", "weight", "mode", "most"), [
    (Adjacency(self_loops=True), None, torch.enable_grad, 50),
    (Adjacency(self_loops=True), None, torch.inference_mode, 50),
    (Adjacency("row") | Identity(), None, torch.enable_grad, 80),
    (Adjacency("row") | Identity(), None, torch.inference_mode, 80),
    (ATTENTION, HeadBlocks(), torch.enable_grad, 90),
    (ATTENTION | Identity(), [HeadBlocks(), Full()], torch.enable_grad, 158)])
def test_a_new_batch_costs_few_own_calls(mechanism, weight, mode, most):
    layer, x = Conv(mechanism, 4, 8, weight=weight), torch.randn(2 * NODES, 4)
    with mode():
        one, other = (batch([graph(), graph()]) for _ in range(2))
        layer(x, one)
        assert own_calls(lambda: layer(x, other)) <= most
