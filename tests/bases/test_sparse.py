import torch

from structconv import ConfigError, Graph, ShapeError
from structconv.bases import Edges, Identity, Sparse
from tests.support.errors import check_refused

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


def test_stack_shares_one_graph_where_it_can_and_concatenates_others():
    g = graph()
    stacked = Sparse.stack([Sparse(g, torch.ones(15)), Sparse(g, torch.ones(2, 15))])
    assert isinstance(stacked, Sparse) and stacked.size == 3
    first, second = Sparse(g), Sparse(graph(edges=4))
    stacked, expected = Sparse.stack([first, second]), torch.cat([first.dense(F64), second.dense(F64)])
    assert torch.equal(stacked.dense(F64), expected)
    x = torch.randn(6, 2, dtype=F64)
    torch.testing.assert_close(stacked.analysis(x), expected.mT @ x, rtol=0, atol=1e-12)


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
    check_refused(
        (ShapeError, r"E=15.*got \(2, 14\)", lambda: Sparse(graph(), torch.zeros(2, 14))),
        (ShapeError, "floating, of shape", lambda: Sparse(graph(), torch.zeros(15, dtype=torch.int64))),
        (ShapeError, r"float32 and torch\.float64",
         lambda: Sparse(graph(), torch.zeros(15, dtype=F64)).analysis(torch.zeros(6, 1))),
        (ShapeError, "M=6", lambda: Sparse(graph()).analysis(torch.zeros(7, 1))),
        (ShapeError, "same inputs", lambda: Sparse.stack([Sparse(graph()), Identity(3)])),
        (ConfigError, "empty", lambda: Sparse.stack([])))
