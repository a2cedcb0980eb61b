"""What a layer keeps from call to call never outlives what it was made of."""

from __future__ import annotations

import copy

import pytest
import torch
from torch.nn.utils import parametrizations

from structconv import Graph, Grid
from structconv.errors import ShapeError
from structconv.mechanisms import Adjacency, DotProduct, Identity, Shifts
from structconv.nn import Conv
from structconv.nn.recall import KINDS, LARGEST, Calls, recalled


def ring(entries=6, weight=None):
    index = torch.arange(entries)
    return Graph(torch.stack([index, (index + 1) % entries]), num_nodes=entries, edge_weight=weight)


def fresh(layer, x, structure):
    """The layer's result with nothing kept."""
    return copy.deepcopy(layer)(x, structure=structure)


def test_a_repeated_call_is_recalled():
    layer, graph, x = Conv(Adjacency(), 3, 4), ring(), torch.randn(6, 3)
    assert recalled(layer, x, graph) is None
    first = layer(x, structure=graph)
    assert recalled(layer, x, graph) is not None
    other = torch.randn(6, 3)
    assert torch.equal(layer(x, structure=graph), first)
    assert torch.equal(layer(other, structure=graph), fresh(layer, other, graph))


def test_grids_are_compared_by_value():
    layer, x = Conv(Shifts([(0, 1), (1, 0)]), 2, 2), torch.randn(6, 2)
    first = layer(x, structure=Grid((2, 3)))
    assert recalled(layer, x, Grid((2, 3))) is not None
    assert recalled(layer, x, Grid((3, 2))) is None
    assert not torch.equal(layer(x, structure=Grid((3, 2))), first)


def test_another_structure_or_a_changed_one():
    weight, x = torch.ones(6), torch.randn(6, 3)
    layer, graph = Conv(Adjacency(normalize=None), 3, 4), ring(weight=weight)
    first = layer(x, structure=graph)
    assert recalled(layer, x, ring(weight=weight)) is None
    weight.mul_(2)
    assert recalled(layer, x, graph) is None
    torch.testing.assert_close(layer(x, structure=graph), 2 * first)


def test_weights_that_change():
    layer, graph, x = Conv(Adjacency(), 3, 4), ring(), torch.randn(6, 3)
    layer(x, structure=graph)
    with torch.no_grad():
        layer.weight.theta.mul_(2)
    torch.testing.assert_close(layer(x, structure=graph), fresh(layer, x, graph))
    layer.weight.theta = torch.nn.Parameter(torch.randn(1, 3, 4))
    torch.testing.assert_close(layer(x, structure=graph), fresh(layer, x, graph))
    swapped = {"weight.theta": torch.zeros(1, 3, 4), "bias": torch.zeros(4)}
    assert not torch.func.functional_call(layer, swapped, (x,), {"structure": graph}).any()
    layer.weight.requires_grad_(False)
    layer.bias.requires_grad_(False)
    assert not layer(x, structure=graph).requires_grad
    layer.double()
    with pytest.raises(ShapeError, match="dtype"):
        layer(x, structure=graph)


def test_hooks_and_parametrisations_are_run():
    layer, graph, x = Conv(Adjacency(), 3, 4), ring(), torch.randn(6, 3)
    layer(x, structure=graph)
    called = []
    handle = layer.weight.register_forward_hook(lambda *_: called.append(1))
    layer(x, structure=graph)
    handle.remove()
    assert called
    parametrizations.spectral_norm(layer.weight, "theta")
    layer.eval()
    torch.testing.assert_close(layer(x, structure=graph), fresh(layer, x, graph))


def test_gradients_of_repeated_calls():
    layer, graph = Conv(Adjacency(), 3, 4), ring()
    x = torch.randn(6, 3, requires_grad=True)
    with torch.no_grad():
        assert not layer(x, structure=graph).requires_grad
        assert not layer(x, structure=graph).requires_grad
    grads = [torch.autograd.grad(layer(x, structure=graph).square().sum(), [x, *layer.parameters()])
             for _ in range(3)]
    for other in grads[1:]:
        assert all(torch.equal(a, b) for a, b in zip(grads[0], other, strict=True))


def test_what_is_not_kept():
    x = torch.randn(6, 3)
    attention = Conv(DotProduct().softmax(), 3, 4)
    attention(x)
    assert recalled(attention, x, None) is None
    layer, learnt = Conv(Adjacency(), 3, 4), ring(weight=torch.ones(6, requires_grad=True))
    layer(x, structure=learnt)
    assert recalled(layer, x, learnt) is None
    large = ring(LARGEST)
    layer(torch.randn(LARGEST, 3), structure=large)
    assert not layer._calls
    with torch.inference_mode():
        layer(x, structure=ring())
    assert not layer._calls


def test_copies_and_files_begin_with_none():
    layer = Conv(Identity(), 3, 4)
    layer(torch.randn(6, 3))
    assert len(layer._calls) == 1
    assert not copy.deepcopy(layer)._calls and not copy.copy(layer._calls)
    assert layer._calls.__reduce__() == (Calls, ())
    for entries in range(1, 20):
        layer(torch.randn(entries, 3))
    assert len(layer._calls) <= KINDS


def test_wrong_shapes_after_a_right_one():
    layer, graph = Conv(Adjacency(), 3, 4), ring()
    layer(torch.randn(6, 3), structure=graph)
    for x in (torch.randn(5, 3), torch.randn(6, 2), torch.randn(6, 3, dtype=torch.float64)):
        with pytest.raises(ShapeError):
            layer(x, structure=graph)


def test_compile_after_a_kept_call():
    layer, graph, x = Conv(Adjacency(), 3, 4), ring(), torch.randn(2, 6, 3)
    layer(x[0], structure=graph)
    expected = torch.stack([layer(row, structure=graph) for row in x])
    torch.testing.assert_close(torch.compile(layer, fullgraph=True, backend="eager")(x, structure=graph), expected)
