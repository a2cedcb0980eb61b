"""What native kernels' layers keep for the backward: read once, and the same on a graph's first path and on later ones.

The suite of mutations recomputes every layer in float64, which these kernels leave to torch's operators.
"""

from collections import Counter

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from structconv import Graph, KnowledgeGraph, nn
from tests.support.layers import drawn

NODES, EDGES, C = 300, 20_000, 16  # so many edges that values seen twice are kept in the order of slots


def graph(weighted=False, attributes=None):
    weight = torch.rand(EDGES) if weighted else None
    return Graph(torch.randint(NODES, (2, EDGES)), num_nodes=NODES, edge_weight=weight,
                 edge_attr=None if attributes is None else torch.randn(EDGES, attributes))


def knowledge():
    columns = (torch.randint(size, (EDGES,)) for size in (NODES, 3, NODES))
    return KnowledgeGraph(torch.stack(list(columns), 1), NODES, ("a", "b", "c"))


CASES = {
    "GCN": (lambda: nn.GCNConv(C, C), graph),
    "GCN, weighted": (lambda: nn.GCNConv(C, C), lambda: graph(weighted=True)),
    "Chebyshev": (lambda: nn.ChebConv(C, C, 4), graph),
    "diffusion": (lambda: nn.DiffusionConv(C, C, 3), graph),
    "edge-conditioned": (lambda: nn.EdgeConditionedConv(C, C, 3), lambda: graph(attributes=3)),
    "R-GCN": (lambda: nn.RelationalConv(C, C, 3), knowledge),
    "R-GCN, bases": (lambda: nn.RelationalConv(C, C, 3, num_bases=2), knowledge),
    "R-GCN, blocks": (lambda: nn.RelationalConv(C, C, 3, num_blocks=2), knowledge),
    "GAT": (lambda: nn.GATConv(C, C, 2), graph),
    "GATv2": (lambda: nn.GATv2Conv(C, C, 2), graph),
}


def gradients(layer, y):
    return torch.autograd.grad(y.square().sum(), list(layer.parameters()))


@pytest.mark.parametrize("name", drawn(CASES, 2))
def test_recomputed_on_the_first_call_with_each_graph(name):
    make, structure = CASES[name]
    layer, x = make(), torch.randn(NODES, C, requires_grad=True)
    for _ in range(2):
        given = structure()
        for turn in ("first", "second", "third"):
            actual = gradients(layer, checkpoint(layer, x, given, use_reentrant=False))
            for a, b in zip(actual, gradients(layer, layer(x, given)), strict=True):
                torch.testing.assert_close(a, b, msg=lambda text, turn=turn: f"{turn} call: {text}")


@pytest.mark.parametrize("name", CASES)
def test_what_is_kept_is_read_once(name):
    make, structure = CASES[name]
    layer, given, reads = make(), structure(), Counter()
    kept = []

    def pack(t):
        kept.append(t)
        return len(kept) - 1

    def unpack(number):
        reads[number] += 1
        return kept[number]

    with saved_tensors_hooks(pack, unpack):
        y = layer(torch.randn(NODES, C, requires_grad=True), given)
    gradients(layer, y)
    assert reads and set(reads.values()) == {1}


def test_relations_go_by_their_distinct_pairs():
    x = torch.randn(NODES, C, requires_grad=True)
    assert "distinct pairs" in str(nn.RelationalConv(C, C, 3).plan(x, knowledge()))
