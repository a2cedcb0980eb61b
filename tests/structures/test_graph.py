"""`Graph`: validation, layouts, degrees, loops, selection, conversion of dtype."""

import dataclasses

import pytest
import torch

from structconv import ConfigError, Graph, StructureError
from tests.support.errors import check_refused
from tests.support.graphs import matrix

INDEX = torch.tensor([[0, 1, 2, 0, 0], [1, 0, 2, 3, 1]])


def test_attributes_of_a_batch_share_the_edges():
    graph = Graph(INDEX, num_nodes=5, edge_attr=torch.randn(3, INDEX.shape[1], 2))
    looped = graph.with_self_loops(attr=7.0)
    assert looped.edge_attr.shape == (3, INDEX.shape[1] + 5, 2)
    assert torch.equal(looped.edge_attr[:, :INDEX.shape[1]], graph.edge_attr)
    assert bool((looped.edge_attr[:, INDEX.shape[1]:] == 7).all())
    keep = torch.arange(INDEX.shape[1]) % 2 == 0
    assert torch.equal(graph.select(keep).edge_attr, graph.edge_attr[:, keep])
    assert repr(graph).endswith("A=2)")
    with pytest.raises(StructureError, match=r"edge_attr must have shape \(..., E="):
        Graph(INDEX, num_nodes=5, edge_attr=torch.randn(INDEX.shape[1], 3, 2))


def test_a_complete_graph_has_every_ordered_pair_once():
    for nodes in range(5):
        graph = Graph.complete(nodes)
        assert graph.edge_index.T.tolist() == [[m, n] for m in range(nodes) for n in range(nodes) if m != n]
        assert graph.num_nodes == nodes
        looped = Graph.complete(nodes, self_loops=True)
        assert looped.edge_index.T.tolist() == [[m, n] for m in range(nodes) for n in range(nodes)]
    with pytest.raises(StructureError, match=r"Graph\.complete: num_nodes must be an integer >= 0; got -1"):
        Graph.complete(-1)
    assert Graph.complete(3, device="meta").edge_index.is_meta
    with pytest.raises(StructureError, match=r"Graph\.complete: num_nodes must be an integer >= 0; got <object object"):
        Graph.complete(object())
    for device in (object(), "gpu"):
        with pytest.raises(ConfigError, match=r"Graph\.complete: device must be a torch\.device or the name of one"):
            Graph.complete(3, device=device)

    @torch.compile(fullgraph=True, dynamic=True, backend="eager")
    def edges(x):
        return Graph.complete(x.shape[0], device=x.device).edge_index

    assert [edges(torch.ones(n)).shape[1] for n in (4, 5)] == [12, 20]


BAD = {
    "list": (lambda: Graph([[0], [1]], num_nodes=2), r"edge_index must be a tensor.*got list"),
    "array": (lambda: Graph(INDEX.numpy(), num_nodes=4), r"got ndarray"),
    "float index": (lambda: Graph(INDEX.float(), num_nodes=4), r"int32 or int64; got torch.float32"),
    "bool index": (lambda: Graph(INDEX.bool(), num_nodes=4), r"int32 or int64; got torch.bool"),
    "shape": (lambda: Graph(INDEX.T, num_nodes=4), r"shape \(2, E\); got \(5, 2\)"),
    "rank": (lambda: Graph(INDEX[0], num_nodes=4), r"shape \(2, E\); got \(5,\)"),
    "out of range": (lambda: Graph(INDEX, num_nodes=3), r"\[0, num_outputs=3\) in row 1; got 3 at edge 3"),
    "negative": (lambda: Graph(INDEX - 1, num_nodes=4), r"got -1 at edge 0.*negative"),
    "bipartite range": (lambda: Graph(INDEX, num_inputs=2, num_outputs=9), r"num_inputs=2\) in row 0; got 2 at edge 2"),
    "negative size": (lambda: Graph(INDEX[:, :0], num_nodes=-1), r"num_inputs must be an integer >= 0; got -1"),
    "float size": (lambda: Graph(INDEX, num_nodes=4.0), r"must be an integer >= 0; got 4.0"),
    "weight shape": (lambda: Graph(INDEX, num_nodes=4, edge_weight=torch.ones(4)), r"\(\.\.\., E=5\); got \(4,\)"),
    "weight dtype": (lambda: Graph(INDEX, num_nodes=4, edge_weight=torch.ones(5).int()), r"floating; got torch.int32"),
    "attr shape": (lambda: Graph(INDEX, num_nodes=4, edge_attr=torch.ones(2, 5)), r"E=5, A\).*got \(2, 5\)"),
    "attr rank": (lambda: Graph(INDEX, num_nodes=4, edge_attr=torch.ones(5, 2, 2)), r"got \(5, 2, 2\)"),
    "device": (lambda: Graph(INDEX, num_nodes=4, edge_weight=torch.ones(5, device="meta")), r"cpu; got meta"),
    "mask length": (lambda: Graph(INDEX).select(torch.ones(4).bool()), r"mask of length E=5; got \(4,\)"),
    "loops": (lambda: Graph(INDEX, num_inputs=3, num_outputs=4).with_self_loops(), r"as many inputs as outputs.*M=3"),
    "num_nodes": (lambda: Graph(INDEX, num_inputs=3, num_outputs=4).num_nodes, r"got M=3, N=4"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_one_line_that_says_what_came(case):
    build, message = BAD[case]
    check_refused((StructureError, message, build))


def test_in_place_damage_is_seen_by_the_next_construction():
    index = INDEX.clone()
    Graph(index, num_nodes=4)
    index[0, 0] = 9
    with pytest.raises(StructureError, match="got 9 at edge 0"):
        Graph(index, num_nodes=4)


@pytest.mark.parametrize("sizes, expected", [({}, (4, 4)), ({"num_nodes": 7}, (7, 7)), ({"num_inputs": 5}, (5, 4)),
                                             ({"num_inputs": 3, "num_outputs": 6}, (3, 6))])
def test_sizes(sizes, expected):
    graph = Graph(INDEX, **sizes)
    assert (graph.num_inputs, graph.num_outputs) == expected


@pytest.mark.parametrize("nodes", [0, 3])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_no_edges(nodes, dtype):
    graph = Graph(torch.zeros(2, 0, dtype=dtype), num_nodes=nodes)
    assert graph.by_target().indptr.tolist() == [0] * (nodes + 1)
    assert graph.in_degree().shape == (nodes,)
    assert graph.with_self_loops().num_edges == nodes
    assert graph.reversed().num_edges == 0
    assert Graph(torch.zeros(2, 0, dtype=dtype)).num_nodes == 0


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_layouts_group_stably_and_keep_duplicates(dtype):
    graph = Graph(INDEX.to(dtype), num_nodes=5)
    by_target, by_source = graph.by_target(), graph.by_source()
    assert by_target.indptr.tolist() == [0, 1, 3, 4, 5, 5] and by_target.indices.tolist() == [1, 0, 0, 2, 0]
    assert by_target.order.tolist() == [1, 0, 4, 2, 3]
    assert by_source.indptr.tolist() == [0, 3, 4, 5, 5, 5] and by_source.indices.tolist() == [1, 3, 1, 0, 2]
    assert {t.dtype for t in by_target} == {torch.int32}


def test_degrees_are_sums_of_the_matrix():
    graph = Graph(INDEX, num_nodes=5, edge_weight=torch.rand(5, dtype=torch.float64))
    torch.testing.assert_close(graph.in_degree(), matrix(graph).sum(0))
    torch.testing.assert_close(graph.out_degree(), matrix(graph).sum(1))
    counts = Graph(INDEX, num_nodes=5).in_degree()
    assert counts.dtype == torch.int64 and counts.tolist() == [1, 2, 1, 1, 0]


def test_reversed_is_the_transpose():
    graph = Graph(INDEX, num_inputs=3, num_outputs=4, edge_weight=torch.rand(5))
    assert torch.equal(matrix(graph.reversed()), matrix(graph).T)


def test_self_loops_come_last_and_add_up():
    graph = Graph(INDEX, num_nodes=4, edge_weight=torch.rand(5), edge_attr=torch.rand(5, 3))
    looped = graph.with_self_loops(0.5, attr=2.0)
    torch.testing.assert_close(matrix(looped), matrix(graph) + 0.5 * torch.eye(4, dtype=torch.float64))
    assert torch.equal(looped.edge_index[:, :5], INDEX) and looped.edge_attr[5:].eq(2).all()
    assert Graph(INDEX).with_self_loops().edge_weight is None
    assert Graph(INDEX).with_self_loops(2.0).edge_weight.tolist() == [1] * 5 + [2] * 4


def test_derived_graphs_are_remembered_and_layouts_shared_by_weights():
    graph = Graph(INDEX, num_nodes=4)
    assert graph.with_self_loops() is graph.with_self_loops()
    assert graph.reversed() is graph.reversed()
    assert graph.by_target() is graph.by_target() and graph.in_degree() is graph.in_degree()
    other = dataclasses.replace(graph, edge_weight=torch.ones(5, requires_grad=True))
    assert other.by_target() is graph.by_target()
    assert other.with_self_loops().by_target() is other.with_self_loops().by_target()


@pytest.mark.parametrize("keep", [torch.tensor([True, False, True, False, False]), torch.tensor([0, 2])])
def test_select(keep):
    graph = Graph(INDEX, num_nodes=4, edge_weight=torch.arange(5.0), edge_attr=torch.rand(5))
    chosen = graph.select(keep)
    assert chosen.edge_index.tolist() == [[0, 2], [1, 2]] and chosen.edge_weight.tolist() == [0, 2]
    assert chosen.num_nodes == 4 and torch.equal(chosen.edge_attr, graph.edge_attr[[0, 2]])


def test_to_converts_weights_or_indices():
    graph = Graph(INDEX, num_nodes=4, edge_weight=torch.rand(5), edge_attr=torch.arange(5))
    double = graph.to(torch.float64)
    assert double.edge_weight.dtype == torch.float64 and double.edge_attr.dtype == torch.int64
    assert double.edge_index.dtype == torch.int64 and double is not graph
    assert graph.to(dtype=torch.int32).edge_index.dtype == torch.int32
    assert graph.to("meta").edge_weight.device.type == "meta"


def test_repr_and_frozen():
    graph = Graph(INDEX, num_nodes=5, edge_weight=torch.rand(5), edge_attr=torch.rand(5, 2))
    assert repr(graph) == "Graph(M=5, N=5, E=5, int64, weighted, A=2)"
    assert repr(Graph(INDEX.int(), num_inputs=3, num_outputs=4)) == "Graph(M=3, N=4, E=5, int32)"
    with pytest.raises(dataclasses.FrozenInstanceError):
        Graph(INDEX).num_inputs = 3
