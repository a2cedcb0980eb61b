"""A warm call runs few functions of the library: a cost that no load of the machine changes."""

import pytest
import torch

from structconv import STRUCTURE, Conv, Conv2d, DotProduct, GATConv, GATv2Conv, GCNConv, Graph, MultiheadAttention
from structconv.weights import HeadBlocks
from tests.support.own_calls import own_calls

NODES = 300
EDGES = torch.cat([torch.randint(0, NODES, (2, 2000)), torch.arange(NODES).repeat(2, 1)], 1)
MODES = {"gradients": torch.enable_grad, "none": torch.no_grad}
ATTENTION = DotProduct(2, 4).scaled().masked(keep=STRUCTURE).softmax()
#: A layer, a shape of x, and the calls of one without a plan (`nn.direct`) and of one that is planned.
CALLS = {
    "gcn": (lambda: GCNConv(8, 8), (NODES, 8), 21, 40),
    "gat": (lambda: GATConv(8, 4, heads=2), (NODES, 8), 21, 46),
    "gatv2": (lambda: GATv2Conv(8, 4, heads=2), (NODES, 8), 21, 73),
    "graph-masked attention": (lambda: Conv(ATTENTION, 8, 8, weight=HeadBlocks()), (NODES, 8), 68, 68),
    "graph-masked attention, whole Theta": (lambda: Conv(ATTENTION, 8, 8), (NODES, 8), 61, 61),
    "multi-head": (lambda: MultiheadAttention(32, 4), (2, 10, 32), 22, 54),
    "conv2d": (lambda: Conv2d(3, 8, 3), (2, 3, 16, 16), 13, 31),
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("planned", [False, True], ids=["direct", "planned"])
def test_a_warm_call(name, mode, planned):
    build, shape, *most = CALLS[name]
    layer, x = build(), torch.randn(shape)
    graph = Graph(EDGES.clone(), num_nodes=NODES)
    layer.max_bytes = 1 << 40 if planned else None
    inputs = (x, graph) if shape[0] == NODES else (x,)
    with MODES[mode]():
        layer(*inputs), layer(*inputs)
        assert own_calls(lambda: layer(*inputs)) <= most[planned]
