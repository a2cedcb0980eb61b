"""Results and gradients are the same numbers in each run and with any number of threads, if torch is told to be
deterministic."""

import pytest
import torch

from structconv import STRUCTURE, DotProduct, Graph, KnowledgeGraph, Samples, Window
from structconv.nn import Conv, Conv2d, GATConv, GATv2Conv, GCNConv, GraphPool, MultiheadAttention, RelationalConv
from tests.support.threads import on_threads

NODES, EDGES, CHANNELS = 3000, 24000, 32  # enough for several threads in every kernel


def graph():
    g = torch.Generator().manual_seed(0)
    index = torch.randint(NODES, (2, EDGES), generator=g)
    index[1, : EDGES // 3] = 7  # a hub
    return Graph(index, num_nodes=NODES)


def nodes(*shape):
    return torch.randn(*(shape or (NODES, CHANNELS)), generator=torch.Generator().manual_seed(1))


def facts():
    source, target = graph().edge_index
    return KnowledgeGraph(torch.stack([source, torch.arange(EDGES) % 3, target], 1), NODES, ("a", "b", "c"))


def attention(keep):
    return Conv(DotProduct(4, 8).scaled().masked(keep=keep).softmax(), CHANNELS, CHANNELS)


LAYERS = {
    "GCN": lambda: (GCNConv(CHANNELS, CHANNELS), nodes(), graph()),
    "GAT": lambda: (GATConv(CHANNELS, 8, heads=4), nodes(), graph()),
    "GATv2": lambda: (GATv2Conv(CHANNELS, 8, heads=4), nodes(), graph()),
    "attention along edges": lambda: (attention(STRUCTURE), nodes(), graph()),
    "R-GCN": lambda: (RelationalConv(CHANNELS, CHANNELS, 3), nodes(), facts()),
    **{f"pooling, {how}": lambda how=how: (GraphPool(CHANNELS, how), nodes(), Samples([NODES // 3] * 3))
       for how in ("sum", "mean", "softmax")},
    "windows": lambda: (attention(Window(20)), nodes(2, 1500, CHANNELS)),
    "dense attention": lambda: (MultiheadAttention(CHANNELS, 4), nodes(2, 300, CHANNELS)),
    "convolution": lambda: (Conv2d(8, 16, 3, padding=1), nodes(4, 8, 40, 40)),
}


@pytest.fixture(autouse=True)
def deterministic():
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(before)


@pytest.mark.parametrize("name", LAYERS)
def test_runs_and_threads_change_no_bit(name):
    torch.manual_seed(2)
    layer, x, *more = LAYERS[name]()

    def run():
        given = x.clone().requires_grad_()
        y = layer(given, *more)
        return y, *torch.autograd.grad(y.square().sum(), [given, *layer.parameters()])

    first, *others = on_threads(run, (1, 2, 2, 1))
    assert all(all(map(torch.equal, first, again)) for again in others)
