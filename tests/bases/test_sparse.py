from __future__ import annotations

import pytest
import torch

from structconv.bases.dense import Identity
from structconv.bases.pairs import Edges
from structconv.bases.sparse import Sparse
from structconv.errors import ConfigError, ShapeError
from structconv.structures import Graph

F64 = torch.float64


def graph(m=6, n=7, edges=15, dtype=torch.int64):
    generator = torch.Generator().manual_seed(edges)
    index = torch.stack([torch.randint(0, m, (edges,), generator=generator),
                         torch.randint(0, n, (edges,), generator=generator)]).to(dtype)
    return Graph(index, num_inputs=m, num_outputs=n)


def test_duplicate_edges_add_up():
    g = Graph(torch.tensor([[0, 0], [1, 1]]), num_nodes=2)
    basis = Sparse(g, torch.tensor([2.0, 3.0]))
    assert basis.dense().tolist() == [[[0.0, 5.0], [0.0, 0.0]]]
    assert basis.analysis(torch.tensor([[1.0], [1.0]])).tolist() == [[[0.0], [5.0]]]


def test_entries_at_the_edges_of_another_graph():
    basis, other = Sparse(graph(), torch.randn(2, 15, dtype=F64)), graph(edges=11)
    expected = basis.dense()[:, other.source, other.target]
    torch.testing.assert_close(basis.evaluate(Edges(other, F64)), expected, rtol=0, atol=1e-12)


def test_stack_shares_one_graph_where_it_can():
    g = graph()
    stacked = Sparse.stack([Sparse(g, torch.ones(15)), Sparse(g, torch.ones(2, 15))])
    assert isinstance(stacked, Sparse)
    assert stacked.size == 3


def test_stack_joins_other_graphs_by_concatenation():
    first, second = Sparse(graph()), Sparse(graph(edges=4))
    stacked = Sparse.stack([first, second])
    expected = torch.cat([first.dense(F64), second.dense(F64)])
    assert torch.equal(stacked.dense(F64), expected)
    x = torch.randn(6, 2, dtype=F64)
    torch.testing.assert_close(stacked.analysis(x), expected.mT @ x, rtol=0, atol=1e-12)
    with pytest.raises(ConfigError, match="empty"):
        Sparse.stack([])


def test_a_step_holds_no_channel_for_each_edge():
    edges, channels = 20000, 64
    g = graph(100, 100, edges)
    x = torch.randn(100, channels, requires_grad=True)
    values = torch.randn(edges, requires_grad=True)
    seen = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: seen.append(t.numel()) or t, lambda t: t):
        y = Sparse(g, values).analysis(x)
    y.sum().backward()
    assert values.grad.shape == (edges,)
    assert max(seen) < edges * channels


def test_errors_name_what_came():
    with pytest.raises(ShapeError, match=r"E=15.*got \(2, 14\)"):
        Sparse(graph(), torch.zeros(2, 14))
    with pytest.raises(ShapeError, match="floating, of shape"):
        Sparse(graph(), torch.zeros(15, dtype=torch.int64))
    with pytest.raises(ShapeError, match=r"float32 and torch\.float64"):
        Sparse(graph(), torch.zeros(15, dtype=F64)).analysis(torch.zeros(6, 1))
    with pytest.raises(ShapeError, match="M=6"):
        Sparse(graph()).analysis(torch.zeros(7, 1))
    with pytest.raises(ShapeError, match="same inputs"):
        Sparse.stack([Sparse(graph()), Identity(3)])
