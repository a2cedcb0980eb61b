"""`batch`: block-diagonal structures, and `unbatch`."""

import pytest
import torch

from structconv import RelationalConv, ShapeError, StructureError
from structconv.structures import Graph, Grid, GridBatch, KnowledgeGraph, batch, membership, unbatch
from tests.support.graphs import matrix


def random_graph(inputs, outputs, edges, **fields):
    index = torch.stack([torch.randint(inputs, (edges,)), torch.randint(outputs, (edges,))])
    return Graph(index, num_inputs=inputs, num_outputs=outputs, **fields)


def test_graphs_become_block_diagonal():
    graphs = [random_graph(3, 4, 5, edge_weight=torch.rand(5), edge_attr=torch.rand(5, 2)),
              random_graph(2, 2, 0, edge_weight=torch.rand(0), edge_attr=torch.rand(0, 2)),
              random_graph(4, 2, 6, edge_weight=torch.rand(6), edge_attr=torch.rand(6, 2))]
    together = batch(graphs)
    assert torch.equal(matrix(together), torch.block_diag(*map(matrix, graphs)))
    assert torch.equal(together.edge_attr, torch.cat([graph.edge_attr for graph in graphs]))
    y = torch.rand(2, 8, 3)
    parts = unbatch(y, graphs)
    assert [part.shape for part in parts] == [(2, 4, 3), (2, 2, 3), (2, 2, 3)] and torch.equal(torch.cat(parts, 1), y)
    assert membership(graphs).tolist() == [0, 0, 0, 0, 1, 1, 2, 2]


def test_knowledge_graphs_share_relations_by_name():
    first = KnowledgeGraph(torch.tensor([[0, 0, 1], [1, 1, 0]]), 2, ("a", "b"))
    second = KnowledgeGraph(torch.tensor([[2, 1, 0], [0, 0, 1]]), 3, ("c", "a"))
    together = batch([first, second])
    assert together.relations == ("a", "b", "c") and together.num_entities == 5 and together.counts == (2, 1, 1)
    assert together.relation("a").edge_index.tolist() == [[0, 4], [1, 2]]
    assert together.relation("c").edge_index.tolist() == [[2], [3]]


def test_knowledge_graphs_of_all_relations_have_them_in_one_order():
    """A layer reads relations by their order, so that another one would give other values than each graph alone."""
    triples = torch.tensor([[0, 0, 1], [1, 1, 2]])
    one, two, part = (KnowledgeGraph(triples[:len(names)], 3, names) for names in (("a", "b"), ("b", "a"), ("a",)))
    for graphs in ([one, two], [part, two], [batch([one, one]), two]):
        with pytest.raises(StructureError, match=r"^batch: relation 0 of structure 1 must be 'a', .*; got 'b'\. Give"):
            batch(graphs)
    assert batch([two, part]).triples.tolist() == [[0, 0, 1], [1, 1, 2], [3, 1, 4]]
    layer, x = RelationalConv(4, 4, num_relations=2), torch.randn(3, 4)
    for y in unbatch(layer(torch.cat([x, x]), batch([two, two])), [two, two]):
        torch.testing.assert_close(y, layer(x, two))


def test_grids():
    grids = batch([Grid((2, 3)), Grid(4, periodic=True), Grid(0)])
    assert isinstance(grids, GridBatch) and grids.sizes == (6, 4, 0) and grids.offsets == (0, 6, 10, 10)
    assert grids.num_entries == 10 and grids == GridBatch((Grid((2, 3)), Grid(4, periodic=True), Grid(0)))
    assert [part.shape[0] for part in unbatch(torch.rand(10, 1), grids.grids)] == [6, 4, 0]
    assert repr(grids).startswith("GridBatch(Grid((2, 3)), Grid((4,), periodic=True)")


@pytest.mark.parametrize("parts, message", [
    ([], "got an empty list"),
    ([Grid(3), random_graph(2, 2, 1)], "all of one kind; got Graph, Grid"),
    ([3], "got int"),
    ([random_graph(2, 2, 1), random_graph(2, 2, 1, edge_weight=torch.ones(1))], "edge_weight; got 1 of 2 with"),
    ([random_graph(2, 2, 1), random_graph(2, 2, 1).to(torch.int32)], "one dtype and device; got torch.int32"),
    ([random_graph(2, 2, 1, edge_attr=torch.ones(1, 2)), random_graph(2, 2, 1, edge_attr=torch.ones(1, 3))],
     "one number of channels"),
])
def test_bad_batches(parts, message):
    with pytest.raises(StructureError, match=message):
        batch(parts)


def test_unbatch_checks_entries():
    with pytest.raises(ShapeError, match=r"N=5, Q\); got \(4, 2\)"):
        unbatch(torch.rand(4, 2), [2, 3])
