"""Autocast: one dtype for kernels, torch's for results, float32 for what is summed and normalized."""

import pytest
import torch
from torch import nn

from structconv import Graph, ShapeError, Window, ops
from structconv.bases import Identity as IdentityBasis
from structconv.mechanisms import Adjacency, Cuboid, DotProduct, GaussianWindow, Identity
from structconv.nn import AvgPool2d, Conv, Conv2d, GCNConv, MultiheadAttention
from structconv.planning.precision import autocast_dtype, cast
from structconv.structures.values import tensors_in
from tests.support.drawn import drawn

LOW = (torch.bfloat16, torch.float16)


def autocast(dtype):
    return torch.autocast("cpu", dtype)


@pytest.mark.parametrize("dtype", LOW)
@pytest.mark.parametrize("given", [torch.float32, torch.bfloat16, torch.float16])
def test_results_have_the_dtype_of_torchs_layers(dtype, given):
    x, image = torch.randn(2, 6, 8, dtype=given), torch.randn(2, 8, 4, 4, dtype=given)
    pairs = [(Conv(Identity(), 8, 8), nn.Linear(8, 8), (x,), (x,)),
             (MultiheadAttention(8, 2), nn.MultiheadAttention(8, 2, batch_first=True), (x,), (x, x, x)),
             (Conv2d(8, 4, 3), nn.Conv2d(8, 4, 3), (image,), (image,)),
             (AvgPool2d(2), nn.AvgPool2d(2), (image,), (image,))]
    with autocast(dtype):
        for ours, theirs, own, others in pairs:
            actual = theirs(*others)
            expected = actual[0] if isinstance(actual, tuple) else actual
            assert ours(*own).dtype == expected.dtype, type(ours).__name__


@pytest.mark.parametrize("dtype", LOW)
def test_a_function_call_casts_as_a_layer_does(dtype):
    x, theta = torch.randn(6, 8), torch.randn(1, 8, 3, requires_grad=True)
    with autocast(dtype):
        y = ops.conv(x, IdentityBasis(6), theta)
        expected = torch.matmul(x, theta[0])
        assert ops.plan(x, IdentityBasis(6), theta) is ops.plan(x, IdentityBasis(6), theta)
    assert y.dtype == dtype
    torch.testing.assert_close(y, expected)
    assert torch.autograd.grad(y.float().sum(), theta)[0].dtype == torch.float32


def test_float64_stays():
    layer, x = MultiheadAttention(8, 2).double(), torch.randn(2, 6, 8, dtype=torch.float64)
    with autocast(torch.bfloat16):
        assert autocast_dtype(x) is None
        y = layer(x)
    torch.testing.assert_close(y, layer(x))


def test_weights_come_in_the_dtype_of_the_result():
    layer, x = MultiheadAttention(8, 2), torch.randn(2, 6, 8)
    with autocast(torch.bfloat16):
        y, weights = layer(x, return_weights=True)
        basis = layer.basis(x)
    assert y.dtype == weights.dtype == torch.bfloat16
    assert {t.dtype for t in tensors_in(basis)} == {torch.bfloat16}
    torch.testing.assert_close(weights.float(), layer(x, return_weights=True)[1], rtol=0.1, atol=2.0**-6)


def test_structures_are_not_cast():
    graph = Graph(torch.tensor([[0, 1], [1, 0]]), num_nodes=2, edge_weight=torch.rand(2))
    window = Window(1, center=torch.tensor([300.5, 301.5]))
    assert cast(graph, torch.bfloat16) is graph
    assert cast((window, torch.ones(1)), torch.bfloat16)[0] is window
    with autocast(torch.bfloat16):
        values = Conv(Adjacency(normalize=None), 3, 2).basis(torch.randn(2, 3), structure=graph).values
    assert values.dtype == torch.bfloat16


@pytest.mark.parametrize("dtype", LOW)
def test_mixed_dtypes_without_autocast_are_refused(dtype):
    with pytest.raises(ShapeError, match=r"must share one dtype.*Convert one"):
        Conv(DotProduct(heads=2).softmax(), 4, 4)(torch.randn(5, 4, dtype=dtype))


def test_a_layer_of_another_dtype_than_x_is_refused_under_autocast_too():
    with autocast(torch.bfloat16), pytest.raises(ShapeError, match="must share one dtype"):
        Conv(DotProduct(heads=2).softmax(), 4, 4)(torch.randn(5, 4, dtype=torch.float64))


@pytest.mark.parametrize("dtype", LOW)
@pytest.mark.parametrize("kind", ["sum", "count"])
def test_sums_over_many_inputs_are_taken_in_float32(dtype, kind):
    """4096 scores of 40 are beyond float16, and more than bfloat16 counts in steps of one."""
    scores = DotProduct(heads=1, dim=4, feature=lambda t: t.square() + 1)
    layer = Conv(scores.normalize(kind), 4, 4)
    x = torch.randn(4096, 4) + 1
    exact = layer(x).detach()
    with autocast(dtype):
        y = layer(x)
    torch.testing.assert_close(y.float(), exact, rtol=2.0**-4, atol=float(exact.abs().max()) * 2.0**-4)


@pytest.mark.parametrize("dtype", LOW)
def test_sums_over_many_edges_are_taken_in_float32(dtype):
    """A hub of 3000 neighbors, each with weight one: 16-bit running sums would stop at 256, or at 2048."""
    index = torch.stack([torch.arange(3000), torch.zeros(3000, dtype=torch.long)])
    layer, graph = Conv(Adjacency(normalize=None), 1, 1, bias=False), Graph(index, num_nodes=3000)
    x = torch.ones(3000, 1)
    with autocast(dtype):
        y = layer(x, structure=graph)
    torch.testing.assert_close(y[0].float(), layer(x, structure=graph)[0], rtol=2.0**-6, atol=0.0)


def test_positions_of_many_entries_are_exact():
    """Each output sees most of itself, also where bfloat16 does not tell entries apart."""
    layer, x = Conv(GaussianWindow(0.5), 1, 1, bias=False), torch.randn(600, 1)
    with autocast(torch.bfloat16):
        y = layer(x)
        window = layer.basis(x).dense(torch.bfloat16)
    torch.testing.assert_close(y.float(), layer(x), rtol=2.0**-5, atol=2.0**-5)
    torch.testing.assert_close(window.float(), layer.basis(x).dense(torch.float32), rtol=2.0**-7, atol=2.0**-9)


@pytest.mark.parametrize("make", drawn([lambda: Conv(Cuboid(3), 8, 8), lambda: MultiheadAttention(8, 2)], 2))
def test_compiled_under_autocast(make):
    layer, x = make(), torch.randn(2, 6, 8)
    compiled = torch.compile(layer, backend="eager", fullgraph=True)
    with autocast(torch.bfloat16):
        y, expected = compiled(x), layer(x)
    assert y.dtype == torch.bfloat16
    torch.testing.assert_close(y, expected, rtol=2.0**-5, atol=2.0**-6)
    torch.testing.assert_close(compiled(x), layer(x))


def test_a_graph_layer_keeps_its_layouts_when_the_precision_changes():
    graph = Graph(torch.randint(0, 50, (2, 200)), num_nodes=50)
    layer, x = GCNConv(4, 4), torch.randn(50, 4)
    plans = []
    for dtype in (None, torch.bfloat16, None, torch.bfloat16):
        with torch.autocast("cpu", dtype or torch.bfloat16, enabled=dtype is not None):
            plans.append(layer.plan(x, graph))
    assert plans[0] is plans[2] and plans[1] is plans[3] and plans[0] is not plans[1]
