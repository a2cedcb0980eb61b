import pytest
import torch

from structconv import Graph, ShapeError, StructureError
from structconv.bases import Edges, Typed

F64 = torch.float64


def typed(m=6, n=7, edges=15, count=3, dtype=torch.int64, weighted=True, low=0):
    """Random typed edges with repeats; the last input and the last output have none, and the last type neither."""
    generator = torch.Generator().manual_seed(edges)
    index = torch.stack([torch.randint(0, size - 1, (edges,), generator=generator) for size in (m, n)]).to(dtype)
    kind = torch.randint(low, count - 1, (edges,), generator=generator)
    values = torch.randn(edges, dtype=F64, generator=generator) if weighted else None
    return Typed(Graph(index, num_inputs=m, num_outputs=n), kind, count, values)


def test_repeated_edges_add_up_within_their_type():
    graph = Graph(torch.tensor([[0, 0, 0], [1, 1, 1]]), num_nodes=2)
    basis = Typed(graph, torch.tensor([0, 0, 1]), 2, torch.tensor([2.0, 3.0, 4.0]))
    assert basis.dense()[:, 0, 1].tolist() == [5.0, 4.0]
    pattern = basis.pattern()
    assert pattern.num_edges == 1 and basis.pattern() is pattern
    assert basis.evaluate(Edges(pattern, torch.float32)).tolist() == [[5.0], [4.0]]
    torch.testing.assert_close(basis.map(torch.cos).dense(), basis.dense().cos())


def test_layouts_are_shared_and_follow_their_tensors():
    basis = typed()
    again = Typed(basis.graph, basis.kind, basis.count, 2 * basis.values)
    made = []
    for each in (basis, again):
        each.derived("mark", lambda: made.append(1))
    assert len(made) == 1
    x = torch.randn(6, 2, dtype=F64)
    before = basis.analysis(x)
    torch.testing.assert_close(again.analysis(x), 2 * before)
    basis.kind.copy_(1 - basis.kind)
    torch.testing.assert_close(basis.analysis(x), before[[1, 0, 2]])
    basis.graph.edge_index[1].copy_((basis.graph.edge_index[1] + 1) % 7)
    torch.testing.assert_close(basis.analysis(x), basis.dense().mT @ x)


def test_errors():
    graph = Graph(torch.tensor([[0, 1], [1, 0]]), num_nodes=2)
    kind = torch.tensor([0, 1])
    for wrong in (torch.tensor([0]), kind.int(), kind.float(), kind.unsqueeze(0)):
        with pytest.raises(ShapeError, match="kind must be int64"):
            Typed(graph, wrong, 2)
    for values in (torch.ones(3), torch.ones(1, 2), kind):
        with pytest.raises(ShapeError, match="values must be floating"):
            Typed(graph, kind, 2, values)
    for wrong in (torch.tensor([0, 2]), torch.tensor([-1, 0])):
        with pytest.raises(StructureError, match=r"\[0, K=2\)"):
            Typed(graph, wrong, 2)
    basis = Typed(graph, kind, 2, torch.ones(2))
    with pytest.raises(ShapeError, match="r must have shape"):
        basis.synthesis(torch.zeros(3, 2, 1))
    with pytest.raises(ShapeError):
        basis.analysis(torch.zeros(2, 1, dtype=F64))
    assert repr(basis) == "Typed(K=2, M=2, N=2, E=2, values=(2,))"
