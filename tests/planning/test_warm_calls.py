"""A warm call runs few functions of the library: a cost that no load of the machine changes."""

from __future__ import annotations

import pytest
import torch

from structconv import STRUCTURE, Conv, Conv2d, DotProduct, GATConv, GATv2Conv, GCNConv, Graph, MultiheadAttention
from structconv.weights import HeadBlocks
from tests.support.own_calls import own_calls

NODES = 300
EDGES = torch.cat([torch.randint(0, NODES, (2, 2000)), torch.arange(NODES).repeat(2, 1)], 1)
ATTENTION = DotProduct(2, 4).scaled().masked(keep=STRUCTURE).softmax()
CALLS = {"gcn": (lambda: GCNConv(8, 8), 33), "gat": (lambda: GATConv(8, 4, heads=2), 38),
         "gatv2": (lambda: GATv2Conv(8, 4, heads=2), 69),
         "graph-masked attention": (lambda: Conv(ATTENTION, 8, 8, weight=HeadBlocks()), 67)}
MODES = {"gradients": torch.enable_grad, "none": torch.no_grad}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", CALLS)
def test_over_a_graph(name, mode):
    layer, most = CALLS[name][0](), CALLS[name][1]
    x, graph = torch.randn(NODES, 8), Graph(EDGES.clone(), num_nodes=NODES)
    with MODES[mode]():
        layer(x, graph), layer(x, graph)
        assert own_calls(lambda: layer(x, graph)) <= most


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("build", "shape", "most"), [
    (lambda: MultiheadAttention(32, 4), (2, 10, 32), 45), (lambda: Conv2d(3, 8, 3), (2, 3, 16, 16), 19)])
def test_of_sequences_and_images(build, shape, most, mode):
    layer, x = build(), torch.randn(shape)
    with MODES[mode]():
        layer(x), layer(x)
        assert own_calls(lambda: layer(x)) <= most
