"""Which windows are computed by the kernel that needs no list of pairs."""

from __future__ import annotations

import pytest
import torch

from structconv import ops, plan
from structconv.bases.positions import GridLookup
from structconv.bases.scores import Bilinear
from structconv.errors import ConfigError, StructureError
from structconv.kernels import dense_attention, sparse_attention, window_attention
from structconv.kernels.forms import fused
from structconv.mechanisms import DotProduct, RelativeBias
from structconv.structures import Blocks, Causal, Grid, Window
from structconv.theta import EyeTheta


def attention(window, length, heads=1):
    q = torch.randn(heads, length, 4)
    return Bilinear(q, q).masked(keep=window).softmax(over="inputs"), q


def test_no_pairs_are_listed(monkeypatch):
    basis, _ = attention(Window(60), 300, heads=3)
    theta, x = EyeTheta(3, 6), torch.randn(300, 6)
    monkeypatch.setattr(Window, "edges", lambda *_: pytest.fail("pairs were listed"))
    made = plan(x, basis, theta)
    assert made.kernel == "structconv.window_attention" and "structconv.edge_attention" not in str(made)
    assert made.run(x, basis, theta).shape == (300, 6)
    assert ops.apply(basis, torch.randn(3, 300, 5)).shape == (3, 300, 5)
    assert dense_attention.recognise(basis) is None and sparse_attention.recognise(basis) is None


@pytest.mark.parametrize("window", [Window(3), Window(20, grid=Grid(70, periodic=True)), Window(20) & Blocks(30),
                                    Window(20, centre=torch.arange(70.0)), Window((5, 7), grid=Grid((7, 10)))])
def test_narrow_and_other_windows_stay_with_their_lists(window):
    basis, q = attention(window, 70)
    assert window_attention.recognise(basis) is None
    assert type(fused(basis, q)) is sparse_attention.BilinearEdges


@pytest.mark.parametrize(("window", "length", "kernel"), [
    (Window(16), 4096, False), (Window(32), 4096, True), (Window(64), 1024, True), (Window(64), 256, True),
    (Window(16), 256, False), (Window(64) & Causal(), 1024, True), (Window(10) & Causal(), 1024, False),
    (Window(3, grid=Grid((28, 28))), 784, False), (Window(6, grid=Grid((28, 28))), 784, False),
    (Window(5, grid=Grid((56, 56))), 3136, False), (Window(12, grid=Grid((56, 56))), 3136, True)])
def test_the_faster_of_the_two_where_they_were_timed(window, length, kernel):
    basis, _ = attention(window, length)
    assert (window_attention.recognise(basis) is not None) == kernel


def test_the_cost_of_a_plan_grows_with_the_window():
    x, theta = torch.randn(2048, 8), EyeTheta(1, 8)
    costs = [plan(x, attention(Window(radius), 2048)[0], theta).seconds for radius in (40, 80, 400)]
    assert costs == sorted(costs) and costs[2] > 3 * costs[0]


def test_with_a_bias_no_window_is_too_narrow():
    grid = Grid((7, 10))
    q, table = torch.randn(2, 70, 4), torch.randn(2, 3, 3)
    scores = Bilinear(q, q) + GridLookup(table, grid)
    basis = scores.masked(keep=Window((3, 3), grid=grid)).softmax(over="inputs")
    assert type(fused(basis, q)) is window_attention.WindowAttention
    other = scores.masked(keep=Window(3)).softmax(over="inputs")
    assert window_attention.recognise(other) is None
    torch.testing.assert_close(ops.apply(other, q), other.dense().mT @ q)


def test_a_traced_program_lists_no_window():
    torch._dynamo.reset()

    def layer(q):
        basis = Bilinear(q, q).masked(keep=Window(2)).softmax(over="inputs")
        return ops.apply(basis, q)

    q = torch.randn(2, 40, 4)
    found = []

    def backend(graph, inputs):
        found.extend(str(node.target) for node in graph.graph.nodes)
        return graph.forward

    torch.testing.assert_close(torch.compile(layer, fullgraph=True, backend=backend)(q), layer(q))
    assert any("window_attention" in name for name in found)


@pytest.mark.parametrize("window", [None, Window((3, 3), grid=Grid((4, 5)))], ids=["whole", "window"])
def test_a_bias_on_a_grid_compiles_whole(window):
    torch._dynamo.reset()
    grid = Grid((4, 5))

    def layer(q, table):
        scores = Bilinear(q, q) + GridLookup(table, grid)
        basis = (scores if window is None else scores.masked(keep=window)).softmax(over="inputs")
        return ops.apply(basis, q)

    leaves = [torch.randn(3, 2, 20, 4, requires_grad=True), torch.randn(2, 7, 9, requires_grad=True)]
    found = [(y, *torch.autograd.grad(y.square().sum(), leaves))
             for y in (layer(*leaves), torch.compile(layer, fullgraph=True, backend="aot_eager")(*leaves))]
    torch.testing.assert_close(*found)


@pytest.mark.parametrize(("structure", "given"), [(None, None), (Grid(6), None), (None, Grid(6))])
def test_a_bias_for_two_axes_needs_a_grid_with_two(structure, given):
    mechanism = (DotProduct(heads=2, dim=3) + RelativeBias((1, 2), grid=given)).softmax().bound(4)
    with pytest.raises(StructureError, match="RelativeBias"):
        mechanism(torch.randn(6, 4), None, structure)
    with pytest.raises(ConfigError, match="buckets"):
        RelativeBias((1, 2), buckets="log")


@pytest.mark.parametrize(("table", "grid"), [((2, 3, 4), Grid((5, 6))), ((3, 3), Grid((5, 6))),
                                             ((2, 3, 3), Grid((5, 6), periodic=True))])
def test_a_table_must_have_the_offsets_of_its_grid(table, grid):
    with pytest.raises(StructureError, match="GridLookup"):
        GridLookup(torch.zeros(table), grid)
