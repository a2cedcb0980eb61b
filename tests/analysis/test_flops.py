"""What a flop counter sees of the package's operators: all of them, forward and backward."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from structconv import Adjacency, Chebyshev, Conv, DotProduct, GATConv, Graph, Grid, Window
from structconv.analysis.flops import FORMULAS, counted, forward_flops
from structconv.nn import EdgeConditionedConv
from structconv.primitives.operator import OPERATORS
from tests.support.layers import drawn, uses

EDGES, NODES = 90, 40


def test_no_operator_is_left_out():
    assert FORMULAS.keys() == OPERATORS.keys()


@pytest.mark.parametrize("name", drawn(uses(), 8))
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


GRAPH = Graph(torch.randint(NODES, (2, EDGES), generator=torch.Generator().manual_seed(0)), num_nodes=NODES,
              edge_attr=torch.randn(EDGES, 3))
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


def random(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


OPS = torch.ops.structconv
#: Products of dense tensors, by an operator and by operators that torch counts.
PRODUCTS = {
    "project": (OPS.project, (random(6, 3), random(3, 4), random(4)), lambda x, w, bias: x @ w),
    "project_relu": (OPS.project_relu, (random(6, 3), random(3, 4), random(4)), lambda x, w, bias: x @ w),
    "outer": (OPS.outer, (random(6, 3), random(6, 4)), lambda x, y: x.T @ y),
    "group_products": (OPS.group_products, (random(7, 4), random(3, 2, 2, 3), [0, 3, 3, 7]),
                       lambda x, theta, ends: x.view(7, 2, 2).mT.reshape(2, 7, 2) @ theta[0]),
    "group_outer": (OPS.group_outer, (random(7, 4), random(7, 6), [0, 3, 3, 7], 2),
                    lambda x, y, ends, blocks: x.view(7, 2, 2).permute(1, 2, 0) @ y.view(7, 2, 3).transpose(0, 1)),
    "shift_products": (OPS.shift_products, (random(2, 5, 3), random(1, 3, 4), [0], 5),
                       lambda x, theta, *_: x @ theta[0]),
    "shift_correlation": (OPS.shift_correlation, (random(2, 5, 3), random(2, 5, 4), [0]), lambda x, g, _: x.mT @ g),
}


def flops_of(call):
    with FlopCounterMode(display=False, custom_mapping=counted()) as counter:
        call()
    return counter.get_total_flops()


@pytest.mark.parametrize("name", PRODUCTS)
def test_flops_of_products_are_those_of_torch(name):
    operator, arguments, of_torch = PRODUCTS[name]
    assert flops_of(lambda: operator(*arguments)) == flops_of(lambda: of_torch(*arguments)) > 0
