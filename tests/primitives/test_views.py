"""Tensors whose numbers are not the ones in memory: the negative bit of `z.conj().imag`."""

import pytest
import torch
from torch import Tensor

from structconv import Graph, nn
from structconv.primitives.operator import OPERATORS
from tests.primitives.raw_calls import same, with_backwards

CALLS = {dtype: with_backwards(dtype) for dtype in (torch.float32, torch.bfloat16)}


def negated(t):
    """The same numbers as the negative of what lies in memory."""
    if not isinstance(t, Tensor) or t.dtype is not torch.float32:
        return t
    actual = torch.complex(torch.zeros_like(t), -t).conj().imag
    assert actual.is_neg() and torch.equal(actual, t)
    return actual


def bit(t):
    return torch._neg_view(-t) if isinstance(t, Tensor) and t.is_floating_point() else t


@pytest.mark.parametrize("dtype", CALLS, ids=str)
@pytest.mark.parametrize("name", sorted(CALLS[torch.float32]))
def test_operators_read_what_a_tensor_means(name, dtype):
    arguments = CALLS[dtype][name]
    change = negated if dtype is torch.float32 else bit
    expected = getattr(torch.ops.structconv, name)(*arguments)
    assert same(getattr(torch.ops.structconv, name)(*map(change, arguments)), expected)
    assert same(OPERATORS[name](*map(change, arguments)), expected)  # past the dispatcher
    for i, t in enumerate(arguments):
        single = [*arguments[:i], change(t), *arguments[i + 1:]]
        assert same(getattr(torch.ops.structconv, name)(*single), expected), i


def graph():
    return Graph(torch.randint(50, (2, 400)), num_nodes=50)


LAYERS = {
    "GCN": (lambda: nn.GCNConv(8, 8), graph), "Chebyshev": (lambda: nn.ChebConv(8, 8, 3), graph),
    "GAT": (lambda: nn.GATConv(8, 4, 2), graph), "GATv2": (lambda: nn.GATv2Conv(8, 4, 2), graph),
    "grid": (lambda: nn.Conv2d(8, 8, 3, padding=1), None),
}


@pytest.mark.parametrize("name", LAYERS)
def test_layers_and_gradients(name):
    make, structure = LAYERS[name]
    layer, more = make(), () if structure is None else (structure(),)
    x = torch.randn(8, 5, 10) if structure is None else torch.randn(50, 8)
    grad = torch.randn_like(layer(x, *more))
    results = []
    for change in (lambda t: t, negated):
        leaf = x.clone().requires_grad_()
        y = layer(change(leaf), *more)
        results.append([y, *torch.autograd.grad(y, [leaf, *layer.parameters()], change(grad))])
    torch.testing.assert_close(*results)
