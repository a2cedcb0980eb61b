"""A plan is for a class of sizes, whichever call came first: a training that is resumed meets others first."""

import pytest
import torch

from structconv import Adjacency, ALiBi, Causal, Chebyshev, DotProduct, Graph, KnowledgeGraph, Shifts
from structconv.nn import Conv, EdgeConditionedConv, GATConv, RelationalConv
from structconv.planning import plan as plans
from structconv.weights import HeadBlocks, LowRank
from structconv_systems.models.transformer import Transformer

DOT = DotProduct(4, 8).scaled()


def a_graph(edges):
    index = torch.randint(66, (2, edges), generator=torch.Generator().manual_seed(edges))
    return Graph(index, num_nodes=66, edge_attr=torch.randn(edges, 3))


def relations(edges):
    columns = [torch.randint(size, (edges,)) for size in (66, 3, 66)]
    return KnowledgeGraph(torch.stack(columns, 1), 66, ("a", "b", "c"))


LAYERS = {
    "attention": (lambda: Conv(DOT.softmax(), 32, 32, weight=LowRank(8)), lambda n: (torch.randn(n % 3 + 65, n, 32),)),
    "causal": (lambda: Conv(DOT.masked(keep=Causal()).softmax(), 32, 32, weight=LowRank(8)),
               lambda n: (torch.randn(2, n, 32),)),
    "ALiBi": (lambda: Conv((DOT + ALiBi()).softmax(), 32, 32, weight=HeadBlocks()), lambda n: (torch.randn(n, 32),)),
    "shifts": (lambda: Conv(Shifts([-1, 0, 1]), 32, 32), lambda n: (torch.randn(3, n, 32),)),
    "GCN": (lambda: Conv(Adjacency(), 32, 16), lambda n: (torch.randn(66, 32), a_graph(n))),
    "Chebyshev": (lambda: Conv(Chebyshev(3), 32, 16), lambda n: (torch.randn(66, 32), a_graph(n))),
    "GAT": (lambda: GATConv(32, 8, 4), lambda n: (torch.randn(66, 32), a_graph(n))),
    "relations": (lambda: RelationalConv(16, 16, 3), lambda n: (torch.randn(66, 16), relations(n))),
    "filters": (lambda: EdgeConditionedConv(16, 16, 3, 8), lambda n: (torch.randn(66, 16), a_graph(n))),
}


@pytest.mark.parametrize("name", LAYERS)
def test_the_first_call_of_a_class_decides_nothing(name):
    """Sizes of one class in every order: the paths and the predicted costs are the same."""
    make, arguments = LAYERS[name]
    layer, seen = make(), set()
    for first in (97, 99, 105, 112):
        torch.manual_seed(0)
        plans._PLANS.clear()
        actual = layer.plan(*arguments(first))
        seen.add((actual.path, actual.kernel, actual.cost))
    assert len(seen) == 1


def batch_of_sentences(generator):
    """About as many words as another, with ends filled up."""
    length = int(torch.randint(4, 40, (), generator=generator))
    source, target = (torch.randint(3, 50, (512 // length, length + more), generator=generator) for more in (0, 2))
    for row in (*source, *target):
        row[len(row) - int(torch.randint(length // 3 + 1, (), generator=generator)):] = 0
    return source, target


def test_a_model_gives_the_same_bits_whatever_it_met_before():
    model = Transformer(50, channels=32, layers=1, heads=2, hidden=32, dropout=0.0)
    generator = torch.Generator().manual_seed(1)
    batches = [batch_of_sentences(generator) for _ in range(12)]
    actual, seen = [], []
    for warm in (batches, batches[-3:], batches[::-1]):
        plans._PLANS.clear()
        for each in warm:
            model(*each)
        loss = model(*batches[-1]).square().sum()
        actual.append(torch.autograd.grad(loss, list(model.parameters())))
        seen.append({key: (plan.path, plan.kernel, plan.cost) for key, plan in plans._PLANS.items()})
    for grads, known in zip(actual[1:], seen[1:], strict=True):
        assert all(torch.equal(a, b) for a, b in zip(actual[0], grads, strict=True))
        assert all(known[key] == seen[0][key] for key in known.keys() & seen[0].keys())
