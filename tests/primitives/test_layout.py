"""Edges into layouts: as sorts group them, and no index that is out of range becomes a place in memory."""

import pytest
import torch

from structconv import Graph, KnowledgeGraph, StructureError, nn
from structconv.primitives import layout as layouts_file
from structconv.primitives.layout import check_bounds, compress, layouts
from structconv.primitives.native import core
from tests.support.drawn import drawn

NODES, C = 12, 8
SIZES = [(7, 5, 40), (5, 7, 40), (1, 1, 3), (4, 4, 0), (0, 3, 0), (0, 0, 0), (300, 200, 100_000)]


@pytest.fixture(params=["native", "torch"])
def way(request, monkeypatch):
    if request.param == "torch":
        monkeypatch.setattr(layouts_file, "kernels", lambda: None)
        monkeypatch.setattr(layouts_file, "loaded", lambda: None)
    elif core() is None:
        pytest.skip("the native core cannot be built here")
    return request.param


def edges(inputs, outputs, count, dtype=torch.int64):
    ends = [torch.randint(max(size, 1), (count,), dtype=dtype) for size in (inputs, outputs)]
    return torch.stack(ends)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("sizes", SIZES)
def test_grouped_as_a_stable_sort_groups(way, sizes, dtype):
    inputs, outputs, _ = sizes
    index = edges(*sizes, dtype)
    for given in (index, index.t().contiguous().t(), torch.stack([index, index], -1)[..., 0]):
        ahead, back = layouts(given, inputs, outputs)
        for actual, rows, columns, number in ((ahead, index[1], index[0], outputs), (back, index[0], index[1], inputs)):
            expected = compress(rows, columns, number)
            assert all(t.dtype is torch.int32 for t in actual)
            assert all(torch.equal(a.long(), b.long()) for a, b in zip(actual, expected, strict=True))


@pytest.mark.parametrize("value", [-1, 5, 10**9, -(2**31)])
@pytest.mark.parametrize(("row", "size"), [(0, "num_inputs=5"), (1, "num_outputs=5")])
def test_the_first_edge_that_is_out_of_range_is_named(way, row, size, value):
    index = edges(5, 5, 30)
    index[row, [11, 20]] = value
    with pytest.raises(StructureError, match=f"{size}.*row {row}.*{value} at edge 11"):
        layouts(index, 5, 5)
    with pytest.raises(StructureError, match=f"{value} at edge 11"):
        check_bounds("a test", "index", "edge", index, (("num_inputs", 5), ("num_outputs", 5)))


WRITES = {
    "torch": lambda t, at, value: t.__setitem__(at, value),
    "data": lambda t, at, value: t.data.__setitem__(at, value),
    "numpy": lambda t, at, value: t.numpy().__setitem__(at, value),
}
LAYERS = {
    "GCN": lambda: nn.GCNConv(C, C),
    "Chebyshev": lambda: nn.ChebConv(C, C, 3),
    "GAT": lambda: nn.GATConv(C, C, 2),
    "GAT, without loops": lambda: nn.GATConv(C, C, 2, add_self_loops=False),
    "GATv2": lambda: nn.GATv2Conv(C, C, 2),
}
BAD = [10**9, NODES, -1]


@pytest.mark.parametrize(("write", "value"), list(zip(WRITES, BAD, strict=True)))
@pytest.mark.parametrize("name", LAYERS)
def test_a_graph_that_was_changed_in_place_is_refused(way, name, write, value):
    layer, x = LAYERS[name](), torch.randn(NODES, C)
    for row in (0, 1):
        graph = Graph(edges(NODES, NODES, 40), num_nodes=NODES)
        WRITES[write](graph.edge_index, (row, 3), value)
        with pytest.raises((StructureError, IndexError)):
            layer(x, graph)
        with pytest.raises(StructureError, match=f"{value} at edge 3"):
            Graph(graph.edge_index, num_nodes=NODES)


@pytest.mark.parametrize(("write", "value"), list(zip(WRITES, BAD, strict=True)))
@pytest.mark.parametrize("name", LAYERS)
def test_a_graph_that_was_used_before_is_refused_too_or_taken_as_it_was(way, name, write, value):
    """Torch does not count writes that go past it: what was derived before them stays, and is sound."""
    layer, x = LAYERS[name](), torch.randn(NODES, C, requires_grad=True)
    graph = Graph(edges(NODES, NODES, 40), num_nodes=NODES)
    before = layer(x, graph)
    WRITES[write](graph.edge_index, (0, 3), value)
    if write == "torch":
        with pytest.raises((StructureError, IndexError)):
            layer(x, graph)
    else:
        y = layer(x, graph)
        assert torch.equal(y, before)
        y.sum().backward()
        graph.changed()
        with pytest.raises((StructureError, IndexError)):
            layer(x, graph)


@pytest.mark.parametrize(("column", "value"), list(zip([0, 1, 2], BAD, strict=True)))
@pytest.mark.parametrize("options", [{}, {"num_bases": 2}, {"num_blocks": 2}], ids=str)
def test_knowledge_that_was_changed_in_place_is_refused(way, options, value, column):
    triples = torch.stack([torch.randint(NODES, (40,)), torch.randint(3, (40,)), torch.randint(NODES, (40,))], 1)
    layer, x = nn.RelationalConv(C, C, 3, **options), torch.randn(NODES, C)
    for write in WRITES.values():
        given = triples.clone()
        graph = KnowledgeGraph(given, NODES, ("a", "b", "c"))
        write(given, (3, column), value)
        with pytest.raises(StructureError, match=f"{value} at triple 3"):
            KnowledgeGraph(given, NODES, ("a", "b", "c"))
        with pytest.raises((StructureError, IndexError)):
            layer(x, graph)


@pytest.mark.parametrize(("program", "value"), drawn([("compiled", NODES), ("exported", -1)], 2))
def test_programs_check_the_graphs_they_are_given(way, program, value):
    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.GCNConv(C, C)

        def forward(self, x, graph):
            return self.layer(x, graph)

    net, x = Net(), torch.randn(NODES, C)
    graph = Graph(edges(NODES, NODES, 40), num_nodes=NODES)
    run = (torch.compile(net, backend="aot_eager", fullgraph=True) if program == "compiled"
           else torch.export.export(net, (x, graph)).module())
    torch.testing.assert_close(run(x, graph), net(x, graph))
    graph.edge_index[1, 3] = value
    with pytest.raises((StructureError, IndexError)):
        run(x, graph)


def test_a_layout_that_is_none_is_no_place_in_memory(way):
    """What was built elsewhere is read through before its first use."""
    ahead, back = layouts(edges(NODES, NODES, 40), NODES, NODES)
    x = torch.randn(1, NODES, C)
    for name, at, value in (("indptr", 5, 10**6), ("indptr", 3, -1), ("indices", 0, 10**9), ("indices", 7, -1),
                            ("order", 2, 40), ("order", 2, 3)):
        broken = getattr(ahead, name).clone()
        broken[at] = value
        with pytest.raises(StructureError):
            torch.ops.structconv.spmm(*ahead._replace(**{name: broken}), *back, torch.randn(40), x, 1)
