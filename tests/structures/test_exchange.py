"""Graphs from and to NetworkX, SciPy, torch's sparse tensors and data objects."""

import os
import sys
import types
import warnings

import pytest
import torch

from structconv import ConfigError, Conv, Eye, Graph, KnowledgeGraph, Samples, StructureError, batch
from structconv.mechanisms import STRUCTURE, Adjacency, DotProduct
from tests.support.errors import check_refused

INDEX = torch.tensor([[2, 0, 1, 0], [1, 2, 0, 1]])
WEIGHT = torch.tensor([1.0, 2.0, 3.0, 4.0])
LAYOUTS = [torch.sparse_coo, torch.sparse_csr, torch.sparse_csc]


@pytest.fixture(autouse=True)
def _quiet():
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Sparse")
        yield


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_torch_sparse_round_trip(layout, dtype):
    graph = Graph(INDEX.to(dtype), num_inputs=3, num_outputs=4, edge_weight=WEIGHT)
    sparse = graph.to_torch_sparse(layout)
    assert sparse.layout == layout and sparse.shape == (3, 4)
    dense = torch.zeros(3, 4).index_put((INDEX[0], INDEX[1]), WEIGHT, accumulate=True)
    assert torch.equal(sparse.to_dense(), dense)
    back = Graph.from_torch_sparse(sparse)
    assert (back.num_inputs, back.num_outputs) == (3, 4)
    assert torch.equal(back.to_torch_sparse(torch.sparse_coo).to_dense(), dense)


PANDAS_GRAPHS = {
    "bare": lambda: Graph(INDEX, num_nodes=5), "empty": lambda: Graph(INDEX[:, :0], num_nodes=3),
    "weighted": lambda: Graph(INDEX, num_nodes=3, edge_weight=WEIGHT.double()),
    "bipartite": lambda: Graph(INDEX, num_inputs=3, num_outputs=6, edge_weight=WEIGHT),
    "attributes": lambda: Graph(INDEX, num_nodes=4, edge_weight=WEIGHT, edge_attr=torch.randn(4, 3)),
    "kinds": lambda: Graph(INDEX, num_nodes=3, edge_attr=torch.tensor([3, 0, 1, 1])),
    "no attributes": lambda: Graph(INDEX, num_nodes=3, edge_attr=torch.ones(4, 0)),
    "batch": lambda: batch([Graph(INDEX, num_nodes=4), Graph(INDEX, num_nodes=3)]),
    "repeated": lambda: Graph(INDEX[:, [0, 0, 3]], num_nodes=3, edge_weight=WEIGHT[:3])}


def check_same(back, graph, *but):
    """Raise unless two graphs have the same sizes, samples and tensors, `but` for some fields."""
    assert (back.num_inputs, back.num_outputs) == (graph.num_inputs, graph.num_outputs)
    assert (None if graph.samples is None else graph.samples.sizes()) == (
        None if back.samples is None else back.samples.sizes())
    for field in {"edge_index", "edge_weight", "edge_attr"} - {*but}:
        own, other = getattr(graph, field), getattr(back, field)
        assert other is own is None or (own.dtype == other.dtype and torch.equal(own, other)), field


@pytest.mark.parametrize("name", PANDAS_GRAPHS)
def test_pandas_round_trip(name, tmp_path):
    pandas = pytest.importorskip("pandas", reason="pandas is in the extra `graph`")
    graph = PANDAS_GRAPHS[name]()
    frame = graph.to_pandas()
    assert len(frame) == graph.num_edges
    back = Graph.from_pandas(frame.copy())
    check_same(back, graph, *(["edge_attr"] if name == "no attributes" else []))  # a frame has no columns of none
    assert name != "no attributes" or back.edge_attr is None
    frame.to_csv(tmp_path / "edges.csv", index=False)  # without what is noted beside the columns
    read = Graph.from_pandas(pandas.read_csv(tmp_path / "edges.csv"), num_nodes=graph.num_inputs)
    assert torch.equal(read.edge_index, graph.edge_index)


def test_pandas_with_names():
    pandas = pytest.importorskip("pandas", reason="pandas is in the extra `graph`")
    frame = pandas.DataFrame({"from": ["b", "a", "b"], "to": ["a", "c", "c"], "km": [3, 1, 2], "lanes": [2.0, 1.0, 4.0],
                              "toll": [0.5, 0.0, 1.5]})
    graph = Graph.from_pandas(frame, "from", "to", weight="km", edge_attr=["lanes", "toll"], nodes=["a", "b", "c", "d"])
    assert graph.edge_index.tolist() == [[1, 0, 1], [0, 2, 2]] and graph.num_nodes == 4
    assert graph.edge_weight.tolist() == [3.0, 1.0, 2.0]
    assert graph.edge_attr.tolist() == [[2.0, 0.5], [1.0, 0.0], [4.0, 1.5]]
    roads = Graph.from_pandas(frame, "from", "to", edge_attr="lanes", nodes=(["a", "b"], ["c", "a", "x"]))
    assert (roads.num_inputs, roads.num_outputs, roads.edge_index.tolist()) == (2, 3, [[1, 0, 1], [1, 0, 0]])
    assert roads.edge_attr.tolist() == [2.0, 1.0, 4.0] and roads.edge_weight is None
    assert Graph.from_pandas(pandas.DataFrame({"source": [4, 0], "target": [1, 2]})).num_nodes == 5
    assert Graph.from_pandas(pandas.DataFrame({"source": [], "target": []}), num_nodes=3).num_nodes == 3
    check_refused(
        (StructureError, "columns 'source'", lambda: Graph.from_pandas(frame, target="to")),
        (StructureError, "nodes=labels", lambda: Graph.from_pandas(frame, "from", "to")),
        (StructureError, "every label of an edge; got none for 'c'",
         lambda: Graph.from_pandas(frame, "from", "to", nodes=["a", "b"])),
        (StructureError, "integers", lambda: Graph.from_pandas(frame, "km", "lanes")))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_duplicates_stay_in_coo_and_add_up_in_csr(layout):
    twice = Graph(torch.tensor([[0, 0], [1, 1]]), num_nodes=2, edge_weight=torch.tensor([1.0, 2.0]))
    sparse = twice.to_torch_sparse(layout)
    assert sparse._nnz() == (2 if layout == torch.sparse_coo else 1) and sparse.to_dense()[0, 1] == 3
    assert Graph.from_torch_sparse(sparse).num_edges == sparse._nnz()


def test_unweighted_becomes_ones_and_integers_become_floating():
    assert Graph(INDEX).to_torch_sparse(dtype=torch.float64).values().dtype == torch.float64
    assert Graph.from_torch_sparse(torch.eye(3).long().to_sparse()).edge_weight.tolist() == [1.0] * 3


@pytest.mark.parametrize("layout", LAYOUTS)
def test_gradients_reach_the_values(layout):
    weight = WEIGHT.clone().requires_grad_()
    back = Graph.from_torch_sparse(Graph(INDEX, edge_weight=weight).to_torch_sparse(layout))
    (back.edge_weight * (1 + back.source + 10 * back.target)).sum().backward()
    assert weight.grad.tolist() == (1 + INDEX[0] + 10 * INDEX[1]).tolist()


def test_bad_sparse():
    check_refused(
        (StructureError, r"COO, CSR or CSC tensor \(M, N\); got torch.strided \(3, 3\)",
         lambda: Graph.from_torch_sparse(torch.eye(3))),
        (StructureError, "got list", lambda: Graph.from_torch_sparse([[1.0]])),
        (ConfigError, r"got torch\.strided", lambda: Graph(INDEX).to_torch_sparse(torch.strided)))


@pytest.mark.parametrize("kind", ["coo_array", "csr_array", "csc_matrix", "lil_array"])
def test_scipy_round_trip(kind):
    sparse = pytest.importorskip("scipy.sparse")
    graph = Graph(INDEX, num_inputs=3, num_outputs=4, edge_weight=WEIGHT.double())
    there = graph.to_scipy()
    back = Graph.from_scipy(getattr(sparse, kind)(there))
    assert torch.equal(torch.tensor(back.to_scipy().toarray()), torch.tensor(there.toarray()))
    assert back.edge_weight.dtype == torch.float64 and back.edge_index.dtype == torch.int64


def test_complex_weights_and_other_arrays_are_refused():
    """Complex weights would lose their imaginary parts."""
    sparse = pytest.importorskip("scipy.sparse")
    with pytest.raises(StructureError, match=r"edge_weight must be floating; got torch\.complex64"):
        Graph.from_torch_sparse(torch.eye(2, dtype=torch.complex64).to_sparse())
    with pytest.raises(StructureError, match=r"edge_weight must be floating; got torch\.complex128"):
        Graph.from_scipy(sparse.csr_array([[0, 1j]]))
    with pytest.raises(StructureError, match=r"sparse matrix or array \(M, N\); got coo_array \(3,\)"):
        Graph.from_scipy(sparse.coo_array([1.0, 0.0, 2.0]))
    with pytest.raises(StructureError, match="got Tensor"):
        Graph.from_scipy(torch.eye(2))


def test_networkx_undirected_gives_both_directions():
    networkx = pytest.importorskip("networkx")
    path = networkx.Graph()
    path.add_nodes_from("cab")
    path.add_edge("a", "b", weight=2)
    path.add_edge("b", "c")
    path.add_edge("c", "c", weight=5)
    graph = Graph.from_networkx(path)
    edges = {(m, n): w for m, n, w in zip(*graph.edge_index.tolist(), graph.edge_weight.tolist(), strict=True)}
    assert edges == {(1, 2): 2, (2, 1): 2, (2, 0): 1, (0, 2): 1, (0, 0): 5}
    expected = networkx.to_numpy_array(path)
    assert torch.equal(graph.to_torch_sparse(torch.sparse_coo).to_dense().double(), torch.tensor(expected))


def test_networkx_multigraph_and_bipartite():
    pytest.importorskip("networkx")
    twice = Graph(torch.tensor([[0, 0], [1, 1]]), edge_weight=torch.tensor([1.0, 2.0]))
    assert Graph.from_networkx(twice.to_networkx()).edge_weight.tolist() == [1, 2]
    bipartite = Graph(torch.tensor([[0, 1], [2, 0]]), num_inputs=2, num_outputs=3).to_networkx()
    assert list(bipartite.edges) == [(0, 4), (1, 2)]
    assert [side for _, side in bipartite.nodes(data="bipartite")] == [0, 0, 1, 1, 1]


@pytest.mark.parametrize("sizes", [(0, 5), (3, 0), (0, 0)])
def test_networkx_keeps_a_side_without_entries(sizes):
    pytest.importorskip("networkx")
    graph = Graph(torch.empty(2, 0, dtype=torch.int64), num_inputs=sizes[0], num_outputs=sizes[1])
    back = Graph.from_networkx(graph.to_networkx())
    assert (back.num_inputs, back.num_outputs) == sizes


def test_networkx_attributes_may_be_tensors_and_must_be_numbers():
    networkx = pytest.importorskip("networkx")
    pairs, rows = [(0, 1), (1, 2)], torch.rand(2, 3, requires_grad=True)
    attributes = [{"edge_attr": row, "weight": row[0]} for row in rows]
    graph = Graph.from_networkx(networkx.DiGraph([(*pairs[e], attributes[e]) for e in range(2)]))
    assert torch.equal(graph.edge_attr, rows) and torch.equal(graph.edge_weight, rows[:, 0])
    graph.edge_attr.sum().backward()
    read = networkx.DiGraph([(0, 1, {"weight": "2.5"}), (1, 2, {"weight": True})])
    assert Graph.from_networkx(read).edge_weight.tolist() == [2.5, 1.0]
    assert torch.equal(rows.grad, torch.ones(2, 3))
    wrong_ones = ("edge_attr", ([1.0], [1.0, 2.0])), ("weight", ("x", 1.0)), ("edge_attr", (rows[0], rows[:, 0]))
    for name, values in wrong_ones:
        wrong = networkx.DiGraph([(*pair, {name: value}) for pair, value in zip(pairs, values, strict=True)])
        with pytest.raises(StructureError, match=f"the attribute '{name}' of each edge must hold as many numbers"):
            Graph.from_networkx(wrong)


@pytest.mark.parametrize("sizes", [{"num_nodes": 4}, {"num_inputs": 3, "num_outputs": 5}])
@pytest.mark.parametrize("weight", [None, torch.rand(4)], ids=["plain", "weighted"])
def test_networkx_loses_nothing(sizes, weight):
    pytest.importorskip("networkx")
    index = torch.tensor([[0, 0, 1, 2], [1, 3, 0, 2]])  # by sources, as NetworkX lists edges
    graph = Graph(index, edge_weight=weight, edge_attr=torch.rand(4, 3), **sizes)
    check_same(Graph.from_networkx(graph.to_networkx()), graph)


def test_what_networkx_lacks_is_told(monkeypatch):
    networkx = pytest.importorskip("networkx")
    graph = networkx.DiGraph([(0, 1, {"edge_attr": [1.0]}), (1, 2, {})])
    with pytest.raises(StructureError, match="every edge, or none, must have the attribute 'edge_attr'; got 1 without"):
        Graph.from_networkx(graph)
    monkeypatch.setitem(sys.modules, "networkx", None)
    with pytest.raises(ConfigError, match=r"networkx must be installed.*pip install 'structconv\[graph\]'"):
        Graph(INDEX).to_networkx()


def test_data_objects():
    data = types.SimpleNamespace(edge_index=INDEX, edge_attr=torch.rand(4, 2), num_nodes=7)
    graph = Graph.from_data(data)
    assert graph.num_nodes == 7 and graph.edge_attr is data.edge_attr and graph.edge_weight is None
    assert Graph.from_data(types.SimpleNamespace(edge_index=INDEX, edge_weight=WEIGHT)).edge_weight is WEIGHT
    with pytest.raises(StructureError, match="must have an edge_index; got SimpleNamespace"):
        Graph.from_data(types.SimpleNamespace())


BATCH = {"edge_index": torch.tensor([[0, 1, 3], [1, 0, 4]]), "num_nodes": 6}


@pytest.mark.parametrize("told", [
    {"ptr": torch.tensor([0, 3, 6, 6]), "batch": torch.tensor([0, 0, 0, 1, 1, 1])},
    {"batch": torch.tensor([0, 0, 0, 1, 1, 1]), "num_graphs": 3}, {"batch": torch.tensor([0, 0, 0, 1, 1, 1])}])
def test_a_batch_of_data_objects_is_a_batch(told):
    graph = Graph.from_data(types.SimpleNamespace(**BATCH, **told))
    assert graph.samples.sizes()[0] == ([3, 3, 0] if len(told) > 1 else [3, 3])
    layer, x = Conv(DotProduct(2, 4).scaled().softmax(), 4, 4), torch.randn(6, 4)
    torch.testing.assert_close(layer(x, structure=graph), torch.cat([layer(x[:3]), layer(x[3:])]))


def test_a_batch_of_data_objects_is_checked_in_one_pass():
    data = {"edge_index": torch.tensor([[3, 0, 1, 5, 5], [4, 2, 1, 3, 5]]), "edge_weight": torch.rand(5)}
    graph = Graph.from_data(types.SimpleNamespace(**data, ptr=(starts := torch.tensor([0, 0, 3, 6]))))
    starts[1] = 1  # a later change does not reach the graph
    check_same(graph, Graph(**data, num_nodes=6, samples=Samples([0, 3, 3])))
    for change in ({"ptr": torch.tensor([0, 4, 6])}, {"ptr": torch.tensor([0, 4, 3, 6])}, {"num_nodes": 7},
                   {"edge_weight": torch.rand(4)}, {"edge_index": data["edge_index"] - 1}):
        with pytest.raises(StructureError):
            Graph.from_data(types.SimpleNamespace(**data | {"ptr": torch.tensor([0, 3, 6])} | change))


def test_data_objects_may_have_integer_weights():
    data = types.SimpleNamespace(edge_index=INDEX, edge_weight=torch.arange(INDEX.shape[1]))
    assert torch.equal(Graph.from_data(data).edge_weight, torch.arange(float(INDEX.shape[1])))


def test_a_batch_of_data_objects_out_of_order_is_refused():
    with pytest.raises(StructureError, match="one that is not sorted"):
        Graph.from_data(types.SimpleNamespace(**BATCH, batch=torch.tensor([0, 1, 0, 1, 1, 1])))
    with pytest.raises(StructureError, match="of one sample"):
        Graph.from_data(types.SimpleNamespace(**BATCH, ptr=torch.tensor([0, 1, 6])))


def test_pytorch_geometric_and_back_loses_nothing():
    data = pytest.importorskip("torch_geometric.data")
    one = Graph(INDEX, num_nodes=5, edge_weight=WEIGHT, edge_attr=torch.rand(4, 2))
    for graph in (one, batch([one, one, Graph(INDEX[:, :0], num_nodes=2, edge_weight=WEIGHT[:0],
                                              edge_attr=torch.rand(0, 2))])):
        check_same(Graph.from_data(graph.to_data()), graph)
    with pytest.raises(StructureError, match=r"M=2 must be N; got 3"):
        Graph(torch.tensor([[0], [2]]), num_inputs=2, num_outputs=3).to_data()
    typed = data.Data(edge_index=INDEX, edge_type=torch.tensor([0, 2, 1, 0]), num_nodes=5)
    knowledge = KnowledgeGraph.from_data(typed)
    assert (knowledge.num_entities, knowledge.relations) == (5, ("0", "1", "2"))
    again = KnowledgeGraph.from_data(knowledge.to_data(), 3)
    assert torch.equal(again.triples, knowledge.triples) and again.num_entities == 5
    both = KnowledgeGraph.from_data(data.Batch.from_data_list([typed, typed]), ["a", "b", "c"])
    assert both.samples.sizes()[0] == [5, 5] and both.relations == ("a", "b", "c")
    with pytest.raises(StructureError, match="data must have an edge_type; got Data"):
        KnowledgeGraph.from_data(data.Data(edge_index=INDEX))


def test_a_heterogeneous_graph_is_a_graph_for_each_type_of_edges():
    library = pytest.importorskip("torch_geometric.data")
    data = library.HeteroData()
    data["author"].num_nodes, data["paper"].x = 3, torch.rand(2, 4)
    data["author", "writes", "paper"].edge_index = torch.tensor([[0, 2], [1, 0]])
    data["author", "writes", "paper"].edge_attr = torch.rand(2, 1)
    data["paper", "cites", "paper"].edge_index = torch.tensor([[1], [0]])
    graphs = Graph.from_hetero_data(data)
    assert {name: (graph.num_inputs, graph.num_outputs) for name, graph in graphs.items()} == {
        "author__writes__paper": (3, 2), "paper__cites__paper": (2, 2)}
    assert graphs["author__writes__paper"].edge_attr is data["author", "writes", "paper"].edge_attr
    name = "paper__cites__paper"
    mechanism = DotProduct(2, 4).scaled().masked(keep=STRUCTURE).softmax().on(name)
    assert Conv(mechanism, 4, 4)(data["paper"].x, structure={name: graphs[name]}).shape == (2, 4)


DGL_GRAPHS = PANDAS_GRAPHS | {
    "int32": lambda: Graph(INDEX.int(), num_nodes=5),
    "batch with weights": lambda: batch([Graph(INDEX, num_nodes=4, edge_weight=WEIGHT, edge_attr=torch.randn(4, 2)),
                                         Graph(INDEX[:, :0], num_nodes=2, edge_weight=WEIGHT[:0],
                                               edge_attr=torch.randn(0, 2)),
                                         Graph(INDEX, num_nodes=3, edge_weight=-WEIGHT, edge_attr=torch.randn(4, 2))])}


def imported_dgl():
    """DGL, which writes a file into the home folder unless its backend is named."""
    os.environ.setdefault("DGLBACKEND", "pytorch")
    return pytest.importorskip("dgl", reason="dgl is in the extra `tools` on Linux, x86-64, Python 3.11")


@pytest.mark.parametrize("name", DGL_GRAPHS)
def test_dgl_and_back_loses_nothing(name):
    imported_dgl()
    graph = DGL_GRAPHS[name]()
    other = graph.to_dgl()
    assert other.num_edges() == graph.num_edges
    check_same(Graph.from_dgl(other), graph)


def test_dgl_of_several_graphs_and_of_several_types():
    dgl = imported_dgl()
    edges = (torch.tensor([0, 1]), torch.tensor([1, 0]))
    typed = dgl.heterograph({("user", "follows", "user"): edges, ("user", "likes", "item"): edges},
                            {"user": 3, "item": 2})
    with pytest.raises(StructureError, match=r"one type of edges.*graph\['follows'\]"):
        Graph.from_dgl(typed)
    assert repr(Graph.from_dgl(typed["follows"])) == "Graph(M=3, N=3, E=2, int64)"
    assert repr(Graph.from_dgl(typed["likes"])) == "Graph(M=3, N=2, E=2, int64)"
    both = dgl.batch([dgl.graph(edges, num_nodes=2), dgl.graph(edges, num_nodes=4)])
    assert Graph.from_dgl(both).samples.sizes()[0] == [2, 4]
    again = dgl.unbatch(Graph.from_dgl(both).to_dgl())
    assert [graph.num_nodes() for graph in again] == [2, 4] and [graph.num_edges() for graph in again] == [2, 2]
    turned = batch([Graph(INDEX, num_nodes=4), Graph(INDEX, num_nodes=3)])
    turned = Graph(turned.edge_index.flip(1), num_nodes=7, samples=turned.samples)
    with pytest.raises(StructureError, match=r"dgl\.batch them"):
        turned.to_dgl()


@pytest.mark.parametrize("bipartite", [False, True])
def test_a_layer_over_a_graph_of_dgl_has_the_sums_of_dgl(bipartite):
    dgl = imported_dgl()
    from dgl import function

    edges = (torch.tensor([0, 2, 1, 2]), torch.tensor([1, 1, 0, 0]))
    other = dgl.heterograph({("a", "to", "b"): edges}, {"a": 3, "b": 2}) if bipartite else dgl.graph(edges, num_nodes=3)
    other.edata["w"] = torch.tensor([1.0, 2.0, 3.0, 4.0])
    x = torch.randn(3, 5)
    other.srcdata["x"] = x
    other.update_all(function.u_mul_e("x", "w", "m"), function.sum("m", "y"))
    layer = Conv(Adjacency(normalize=None), 5, 5, weight=Eye(), bias=False)
    y = layer(x, structure=Graph.from_dgl(other, weight="w"))
    torch.testing.assert_close(y, other.dstdata["y"])


def test_blocks_of_dgl_are_bipartite():
    dgl = imported_dgl()
    whole = dgl.graph((torch.tensor([0, 1, 3]), torch.tensor([1, 2, 2])), num_nodes=4)
    seeds = torch.tensor([2])
    block = dgl.to_block(dgl.in_subgraph(whole, seeds), seeds)
    assert repr(Graph.from_dgl(block)) == "Graph(M=3, N=1, E=2, int64)"


@pytest.mark.parametrize("name, expected", [("from_networkx", "a graph of NetworkX"), ("from_pandas", "DataFrame"),
                                            ("from_hetero_data", "a HeteroData"), ("from_dgl", "a DGLGraph")])
def test_objects_of_other_kinds_are_refused(name, expected):
    for wrong in ({"source": [0]}, None, torch.eye(2), Graph.complete(2)):
        with pytest.raises(StructureError, match=rf"^Graph.{name}: the argument must be .*{expected}; got "):
            getattr(Graph, name)(wrong)


def test_numbers_that_torch_lacks_are_refused():
    sparse, numpy = pytest.importorskip("scipy.sparse"), pytest.importorskip("numpy")
    if numpy.longdouble is numpy.float64 or numpy.dtype(numpy.longdouble).itemsize == 8:
        pytest.skip("long doubles are doubles here")
    with pytest.raises(StructureError, match=r"^Graph.from_scipy: matrix must hold numbers"):
        Graph.from_scipy(sparse.csr_matrix(numpy.eye(2, dtype=numpy.longdouble)))
