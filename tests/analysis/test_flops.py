"""What a flop counter sees of the package's operators: all of them, forward and backward."""

from __future__ import annotations

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from structconv import Graph
from structconv.analysis.flops import FORMULAS, counted, forward_flops
from structconv.mechanisms import Adjacency, Chebyshev, DotProduct
from structconv.nn import Conv, EdgeConditionedConv, GATConv
from structconv.primitives.native.operator import OPERATORS
from structconv.structures import Grid, Window
from tests.support.layers import drawn, uses

EDGES, NODES = 90, 40


def a_graph():
    index = torch.randint(NODES, (2, EDGES), generator=torch.Generator().manual_seed(0))
    return Graph(index, num_nodes=NODES, edge_attr=torch.randn(EDGES, 3))


def test_no_operator_is_left_out():
    assert FORMULAS.keys() == OPERATORS.keys()


@pytest.mark.parametrize("name", drawn(uses(), 4))
def test_every_layer_is_counted(name):
    """A training step, on the route that the planner takes."""
    use = uses()[name]()
    with FlopCounterMode(display=False, custom_mapping=counted()) as counter:
        y = use.layer(*use.args, **use.kwargs)
        y = y if isinstance(y, torch.Tensor) else next(part for part in y if isinstance(part, torch.Tensor))
        if y.requires_grad:
            y.abs().sum().backward()
    assert all(isinstance(flops, int) and flops >= 0
               for flops in counter.get_flop_counts().get("Global", {}).values())


GRAPH = a_graph()
KNOWN = {
    "GCN": (Conv(Adjacency(self_loops=False), 16, 8), (GRAPH,), 2 * NODES * 16 * 8 + 2 * EDGES * 8),
    "Chebyshev": (Conv(Chebyshev(4), 16, 128), (GRAPH,), 2 * 5 * NODES * 16 * 128 + 2 * 4 * EDGES * 16),
    "GAT": (GATConv(16, 8, 2), (GRAPH,), 2 * NODES * 16 * 16 + 2 * (EDGES + NODES + 2 * NODES) * 16),
    "filters": (EdgeConditionedConv(16, 8, 3, 5), (GRAPH,),
                2 * EDGES * 3 * 5 + 2 * 6 * 16 * (EDGES + NODES * 8) + 2 * NODES * 16 * 8),
    "window": (Conv(DotProduct(2, 8).masked(keep=Window(1)).softmax(), 16, 16), (Grid((NODES,)),),
               2 * 2 * NODES * 16 * 2 * 16 + 2 * 2 * (3 * NODES - 2) * (8 + 16)),
}


@pytest.mark.parametrize("name", KNOWN)
def test_flops_of_layers(name):
    layer, rest, expected = KNOWN[name]
    assert forward_flops(lambda x: layer(x, *rest), torch.randn(NODES, 16)) == expected
