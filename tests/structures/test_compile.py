"""Structures as inputs of compiled and exported programs."""

import io

import pytest
import torch
from torch.export import Dim
from torch.utils import _pytree as pytree

from structconv import Causal, Conv, Graph, Grid, KnowledgeGraph, Padding, Relations, Window, batch
from structconv.mechanisms import Walks
from structconv.structures import Blocks, EdgeSupport, Global
from tests.support.layers import drawn


def random_graph(nodes, edges, **fields):
    return Graph(torch.randint(nodes, (2, edges)), num_nodes=nodes, **fields)


def use_graph(graph, x):
    layout = graph.with_self_loops().by_target()
    back = graph.reversed().by_source()
    degree = graph.in_degree() + graph.out_degree()
    return layout.indices.sum() + layout.indptr[-1] + back.order[:1].sum() + (x[graph.source] * degree[:1]).sum()


def use_supports(graph, keep, x):
    m, n = torch.arange(x.shape[0])[:, None], torch.arange(x.shape[0])[None, :]
    support = (EdgeSupport(graph) | Window(1)) & Causal() & Padding(keep)
    listed = Window(2, dilation=2).edges(x.shape[0], x.shape[0])
    blocks = (Padding(keep) & Blocks(2)).candidates(4, 4)
    return support.contains(m, n).sum() + x[listed.source].sum() + blocks.target.sum()


@pytest.mark.parametrize("supports", [False, True])
def test_structures_compile_whole_for_any_size(supports):
    torch.compiler.reset()
    function = use_supports if supports else use_graph
    compiled = torch.compile(function, backend="eager", fullgraph=True)
    for nodes, edges in [(4, 4), (6, 9), (8, 30)]:
        graph, x = random_graph(nodes, edges, edge_weight=torch.rand(edges)), torch.rand(nodes, 2)
        given = (graph, torch.rand(nodes) > 0.3, x) if supports else (graph, x)
        torch.testing.assert_close(compiled(*given), function(*given))


class UseGraph(torch.nn.Module):
    def forward(self, graph, x):
        return use_graph(graph, x)


class UseSupport(torch.nn.Module):
    def forward(self, support, x):
        return support.contains(torch.arange(x.shape[0])[:, None], torch.arange(x.shape[0])).sum() + x.sum()


def test_graph_exports_with_any_number_of_edges():
    graph, x = random_graph(5, 9), torch.rand(5, 2)
    shapes = {"graph": [{1: Dim.DYNAMIC}, None, None], "x": None}
    program = torch.export.export(UseGraph(), (graph, x), dynamic_shapes=shapes)
    other = random_graph(5, 13)
    torch.testing.assert_close(program.module()(other, x), use_graph(other, x))


@pytest.mark.parametrize("strict", drawn([False, True], 2))
def test_supports_export(strict):
    x = torch.rand(4, 2)
    support = (Causal() & Padding(torch.tensor([True, True, False, True])) | Window(1, center=torch.rand(2, 1, 4))) & (
        Window((3, 1), dilation=1, grid=Grid((2, 2), periodic=True)) | Global((2, 3))) | (
            EdgeSupport(random_graph(4, 6)) & ~Blocks(2))
    program = torch.export.export(UseSupport(), (support, x), strict=strict)
    torch.testing.assert_close(program.module()(support, x), UseSupport()(support, x))


class OnStructure(torch.nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x, structure):
        return self.layer(x, structure=structure)


FEW = KnowledgeGraph(torch.tensor([[0, 0, 1], [1, 1, 2], [2, 0, 3]]), 4, ("a", "b"), entities=("e", "f", "g", "h"))
MORE = KnowledgeGraph(torch.tensor([[3, 1, 2], [1, 1, 3], [2, 0, 3], [0, 1, 3], [1, 0, 2]]), 4, ("a", "b"),
                      entities=("e", "f", "g", "h"))


@pytest.mark.parametrize(("mechanism", "strict"), drawn([(Walks(["a.b"]), False), (Relations(2), True)], 2), ids=repr)
def test_knowledge_exports_with_any_number_of_triples(mechanism, strict):
    model, x = OnStructure(Conv(mechanism, 3, 2)), torch.rand(4, 3)
    shapes = {"x": None, "structure": [{0: Dim.DYNAMIC}, None]}
    program = torch.export.export(model, (x, FEW), dynamic_shapes=shapes, strict=strict)
    saved = io.BytesIO()
    torch.export.save(program, saved)
    saved.seek(0)
    for made in (program, torch.export.load(saved)):
        for knowledge in (FEW, MORE):
            torch.testing.assert_close(made.module()(x, knowledge), model(x, knowledge))


def test_names_are_of_the_kind_of_a_pytree():
    leaves, kind = pytree.tree_flatten(FEW)
    assert [type(leaf) for leaf in leaves] == [torch.Tensor, int]
    twin = pytree.tree_unflatten(leaves, pytree.treespec_loads(pytree.treespec_dumps(kind)))
    assert (twin.relations, twin.entities, twin.counts) == (FEW.relations, FEW.entities, (2, 1))


@pytest.mark.parametrize("value", [
    random_graph(4, 5, edge_weight=torch.rand(5)), Grid((2, 3), periodic=True), batch([Grid(2), Grid((3, 1))]),
    KnowledgeGraph(torch.tensor([[0, 0, 1]]), 2, ("a",)), Window(2) & ~Padding(torch.ones(4).bool())])
def test_structures_are_pytrees(value):
    leaves, spec = pytree.tree_flatten(value)
    assert repr(pytree.tree_unflatten(leaves, spec)) == repr(value)
    assert all(isinstance(leaf, (torch.Tensor, int, str)) for leaf in leaves)


def test_rebuilding_shares_the_sorted_layout():
    graph = random_graph(4, 5)
    twin = pytree.tree_map(lambda leaf: leaf, graph)
    assert twin is not graph and twin.by_target() is graph.by_target()
