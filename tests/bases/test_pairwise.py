"""How expressions of scores are applied: along edges, in blocks or at once, and what they hold in memory."""

import math
from functools import partial

import pytest
import torch
from torch.utils._pytree import tree_leaves

from structconv import Conv, mechanisms
from structconv.bases import Additive, Affine, Bilinear, Edges, EdgeScore, Lookup, Sparse, pairs, pairwise, weights_at
from structconv.bases.algebra import dropout
from structconv.structures import Blocks, Causal, DenseMask, EdgeSupport, Graph, Samples, Window
from tests.kernels.applied import LargestTensor
from tests.support.library import random

F64 = torch.float64
close = partial(torch.testing.assert_close, rtol=0, atol=1e-11)
M, HEADS = 6, 2


def leaf(*shape):
    return random(*shape).requires_grad_()


@pytest.fixture
def in_blocks(monkeypatch):
    """Make every block as small as it can be."""
    def shrink(elements=1):
        for module, limit in ((pairs, "EDGE_BLOCK_ELEMENTS"), (pairwise, "BLOCK_ELEMENTS")):
            monkeypatch.setattr(module, limit, elements)
    return shrink


LEAVES = {
    "bilinear": lambda: Bilinear(leaf(HEADS, M, 3), leaf(HEADS, M, 3)),
    "affine": lambda: Affine(leaf(HEADS, M), leaf(HEADS, M)),
    "additive": lambda: Additive(leaf(HEADS, M, 3), leaf(HEADS, M, 3), leaf(HEADS, 3)),
    "lookup": lambda: Lookup(leaf(HEADS, M, 5), "clip", 2, M, M),
    "sum": lambda: Bilinear(leaf(HEADS, M, 3), leaf(HEADS, M, 3)).leaky_relu(0.1) + Affine(leaf(1, M), leaf(1, M)),
}
HEADS_OF = {
    "softmax": lambda a: a.softmax(), "softmax over outputs": lambda a: a.softmax(over="outputs"),
    "sum": lambda a: a.map(torch.square).normalize("sum"), "count": lambda a: a.normalize("count", over="outputs"),
    "both": lambda a: a.softmax() * a.softmax(over="outputs"), "sigmoid": lambda a: a.normalize("sigmoid"),
    "dropout": lambda a: a.softmax().map(torch.square).softcap(3.0),
}


def table(support):
    i = torch.arange(M)
    return DenseMask(support.contains(i[:, None], i).expand(M, M).clone())


def results(basis, tensors):
    x, r = (torch.linspace(-1, 1, math.prod(shape), dtype=F64).cos().view(shape).requires_grad_()
            for shape in ((2, M, 3), (2, HEADS, M, 3)))
    y, s = basis.analysis(x), basis.synthesis(r)
    gradients = torch.autograd.grad((y.sin().sum() + s.cos().sum()), [x, r, *tensors], allow_unused=True)
    return [y, s, basis.dense(), *[g for g in gradients if g is not None]]


SUPPORTS = [EdgeSupport(Graph(torch.tensor([[0, 1, 1, 4, 2, 0, 3], [0, 0, 2, 3, 3, 5, 3]]), num_nodes=M)), Window(1),
            Blocks(2), Window(2) & Causal()]


@pytest.mark.parametrize(("number", "scores", "head"), [(i + j, scores, head) for i, scores in enumerate(LEAVES)
                                                        for j, head in enumerate(HEADS_OF)])
def test_along_edges_as_over_a_table(number, scores, head, in_blocks):
    a, support = LEAVES[scores](), SUPPORTS[number % len(SUPPORTS)]
    tensors = [t for t in tree_leaves(a) if isinstance(t, torch.Tensor)]
    along = HEADS_OF[head](a.masked(keep=support))
    over = HEADS_OF[head](a.masked(keep=table(support)))
    expected = results(over, tensors)
    close(results(along, tensors), expected)
    in_blocks()
    close(results(over, tensors), expected)


def test_a_sparse_support_is_evaluated_along_its_edges_only(monkeypatch):
    graph = Graph(torch.tensor([[0, 1, 2], [1, 2, 0]]), num_nodes=M)
    seen = []
    evaluate = Affine.evaluate
    monkeypatch.setattr(Affine, "evaluate", lambda self, at: seen.append(at) or evaluate(self, at))
    attention_on_graph = Affine(random(1, M), random(1, M)).masked(keep=graph).softmax()
    attention_on_graph.analysis(random(M, 2))
    attention_on_graph.transpose().analysis(random(M, 2))
    assert len(seen) == 2 and all(isinstance(at, Edges) and at.shape == (3,) for at in seen)


@pytest.mark.parametrize("order", [torch.arange(5), torch.tensor([3, 1, 4, 0, 2])])
def test_weights_come_in_the_order_of_the_edges(order):
    edges = torch.tensor([[0, 2, 1, 5, 4], [1, 1, 3, 0, 3]])[:, order]
    graph = Graph(edges, num_nodes=M)
    scores = Bilinear(random(HEADS, M, 3), random(HEADS, M, 3))
    weights = weights_at(scores.masked(keep=graph).softmax(), F64)
    a = scores.masked(keep=graph).softmax().dense()
    close(weights, a[:, edges[0], edges[1]])
    close(weights_at(Sparse(graph, weights), F64), weights)
    close(weights_at(scores.softmax(), F64), scores.softmax().dense())


def test_repeated_edges_share_their_output_each_with_a_weight_of_its_own():
    graph = Graph(torch.tensor([[0, 0, 1], [2, 2, 2]]), num_nodes=3)
    attention_on_graph = EdgeScore(graph, torch.log(torch.tensor([[1.0, 2.0, 5.0]], dtype=F64))).softmax()
    close(weights_at(attention_on_graph, F64), torch.tensor([[0.125, 0.25, 0.625]], dtype=F64))
    close(attention_on_graph.dense()[0, :, 2], torch.tensor([0.375, 0.625, 0.0], dtype=F64))


class TestDropout:
    seed = torch.tensor(123456789)

    def dropped(self, mask=None, p=0.4):
        torch.manual_seed(1)
        scores = Bilinear(leaf(2, HEADS, M, 3), leaf(2, HEADS, M, 3))
        scores = scores if mask is None else scores.masked(keep=mask)
        return dropout(scores.softmax(), p, self.seed)

    def test_is_the_same_whichever_way_it_is_evaluated(self, in_blocks):
        support = Window(1)
        at_once, along = self.dropped(table(support)), self.dropped(support)
        assert isinstance(pairwise.listed(along, F64), Edges) and pairwise.listed(at_once, F64) is None
        x = random(2, M, 3)
        expected = at_once.analysis(x)
        close(along.analysis(x), expected)
        close(along.transpose().dense(), at_once.dense().mT)
        close(at_once.transpose().analysis(x), at_once.dense() @ x.unsqueeze(1))
        in_blocks()
        close(at_once.analysis(x), expected)

    def test_keeps_the_mean_and_zeroes_a_share(self):
        scores = Affine(torch.zeros(4, 60, dtype=F64), torch.zeros(4, 60, dtype=F64))
        a = dropout(scores.softmax(), 0.25, self.seed).dense() * 60
        assert ((a == 0) | ((a - 1 / 0.75).abs() < 1e-12)).all()
        share = float((a == 0).double().mean())
        assert abs(share - 0.25) < 5 * math.sqrt(0.25 * 0.75 / a.numel())

    def test_differs_between_heads_elements_parts_and_seeds(self):
        zeros = Affine(torch.zeros(2, HEADS, 20, dtype=F64), torch.zeros(2, HEADS, 20, dtype=F64))
        both = dropout(zeros.softmax() | zeros.softmax(), 0.5, self.seed).dense() == 0
        masks = [*both.flatten(0, 1), *(dropout(zeros.softmax(), 0.5, self.seed + 7).dense() == 0)[0]]
        for i, one in enumerate(masks):
            assert all(0.3 < float((one == other).double().mean()) < 0.7 for other in masks[:i])

    def test_draws_its_seed_from_the_generator(self):
        scores = Bilinear(random(1, M, 3), random(1, M, 3)).softmax()
        torch.manual_seed(3)
        first = scores.dropout(0.5)
        torch.manual_seed(3)
        close(scores.dropout(0.5).dense(), first.dense())
        assert not torch.equal(scores.dropout(0.5).dense(), first.dense())
        assert scores.dropout(0.0) is scores


@pytest.mark.parametrize("head", ["softmax", "softmax over outputs", "dropout"])
def test_additive_attention_holds_one_block(head, in_blocks):
    n, d, limit = 1024, 8, 1 << 19
    in_blocks(limit)
    source, target, x = (torch.randn(1, n, d, requires_grad=True) for _ in range(3))
    vector = torch.randn(1, d, requires_grad=True)
    with LargestTensor() as largest:
        y = HEADS_OF[head](Additive(source, target, vector)).synthesis(x)
        y.square().sum().backward()
    assert n * d <= largest.elements <= limit < n * n
    assert all(t.grad is not None and t.grad.isfinite().all() for t in (source, target, vector, x))


def test_additive_attention_on_a_graph_holds_edges_in_blocks(in_blocks):
    n, d, edges = 512, 16, 20000
    in_blocks(1 << 15)
    graph = Graph(torch.randint(n, (2, edges)), num_nodes=n)
    source, target, x = (torch.randn(1, n, d, requires_grad=True) for _ in range(3))
    with LargestTensor() as largest:
        y = Additive(source, target, torch.randn(1, d)).masked(keep=graph).softmax().synthesis(x)
        y.square().sum().backward()
    assert largest.elements <= 4 * edges < edges * d


class Curve(torch.nn.Module):
    """a t + b tanh(t), with two trained numbers."""

    def __init__(self):
        super().__init__()
        self.a, self.b = (torch.nn.Parameter(torch.tensor(value, dtype=torch.float64)) for value in (0.7, 0.3))

    def forward(self, t):
        return self.a * t + self.b * torch.tanh(t)


@pytest.mark.parametrize("structure", [None, Graph.complete(5), Samples([2, 3])], ids=["pairs", "edges", "samples"])
@pytest.mark.parametrize("part", [
    lambda curve: mechanisms.DotProduct(heads=2, dim=3).map(curve),
    lambda curve: mechanisms.Additive(3, heads=2, activation=curve)], ids=["map", "activation"])
def test_a_module_of_entries_is_trained_also_where_they_are_evaluated_in_blocks(part, structure, in_blocks):
    scores = part(Curve())
    masked = scores.masked(keep=structure) if isinstance(structure, Graph) else scores
    layer = Conv(masked.softmax(), 4, 4).double()
    x, given = torch.randn(5, 4, dtype=torch.float64), structure if isinstance(structure, Samples) else None

    def gradients():
        return torch.autograd.grad(layer(x, structure=given).square().sum(), list(layer.parameters()))

    whole = gradients()
    in_blocks()
    close(gradients(), whole)
    names = [name for name, _ in layer.named_parameters()]
    assert sum(name.endswith((".a", ".b")) and bool(grad) for name, grad in zip(names, whole, strict=True)) == 2


@pytest.mark.parametrize("of", [
    lambda t: mechanisms.DotProduct(2, 3).map(lambda s: torch.tanh(s * t)).softmax(),
    lambda t: mechanisms.DotProduct(2, 3).normalize(lambda s, keep, dim: torch.softmax(s * t, dim)),
    lambda t: mechanisms.DotProduct(2, 3).map(lambda s: s * t).masked(keep=Window(1)).softmax()])
def test_a_parameter_that_a_function_reads_has_its_gradient_at_every_size(of, in_blocks):
    t, x = leaf(1), random(M, 4)
    layer = Conv(of(t), 4, 4).double()
    expected = torch.autograd.grad(layer(x).square().sum(), t)
    in_blocks()
    close(torch.autograd.grad(layer(x).square().sum(), t), expected)
