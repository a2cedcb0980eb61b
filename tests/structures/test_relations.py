"""`KnowledgeGraph`: typed edges by name."""


import pytest
import torch

from structconv import KnowledgeGraph, StructureError
from tests.support.errors import check_refused

TRIPLES = torch.tensor([[0, 1, 2], [2, 0, 1], [1, 1, 0], [0, 1, 2]])
LABELS = [("Nimoy", "played", "Spock"), ("Spock", "characterIn", "Star Trek"), ("Star Trek", "genre", "SciFi"),
          ("Guinness", "played", "Obi-Wan")]

BAD = {
    "float": (lambda: KnowledgeGraph(TRIPLES.float(), 3, ("a", "b")), "int32 or int64; got torch.float32"),
    "shape": (lambda: KnowledgeGraph(TRIPLES.T, 3, ("a", "b")), r"shape \(T, 3\); got \(3, 4\)"),
    "entity": (lambda: KnowledgeGraph(TRIPLES, 2, ("a", "b")), r"num_entities=2\) in row 0; got 2 at triple 1"),
    "relation": (lambda: KnowledgeGraph(TRIPLES, 3, ("a",)), r"num_relations=1\) in row 1; got 1 at triple 0"),
    "negative": (lambda: KnowledgeGraph(TRIPLES - 1, 3, ("a", "b")), "got -1 at triple"),
    "twice": (lambda: KnowledgeGraph(TRIPLES, 3, ("a", "a")), "relations must be different names; got 'a' twice"),
    "no name": (lambda: KnowledgeGraph(TRIPLES, 3, ("a", 7)), "relations must be different names; got 7"),
    "entities": (lambda: KnowledgeGraph(TRIPLES, 3, ("a", "b"), entities=("x",)), "num_entities=3 names; got 1"),
    "counts": (lambda: KnowledgeGraph(TRIPLES, 3, ("a", "b"), counts=(2, 2)), r"counts must be \(1, 3\); got \(2, 2\)"),
    "list": (lambda: KnowledgeGraph([[0, 0, 0]], 3, "ab"), "got list"),
    "unknown": (lambda: KnowledgeGraph.from_labels(LABELS).relation("plaid"), "got 'plaid'. The nearest is 'played'"),
    "no relations": (lambda: KnowledgeGraph(TRIPLES[:0], 3, ()).relation("a"), "one of its 0; got 'a'"),
    "not in order": (lambda: KnowledgeGraph.from_labels(LABELS, relations=["genre"]), "got 'played'"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input(case):
    build, message = BAD[case]
    check_refused((StructureError, message, build))


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_relations_keep_triple_order_and_duplicates(dtype):
    graph = KnowledgeGraph(TRIPLES.to(dtype), 4, ("a", "b", "none"))
    assert graph.relation("a").edge_index.tolist() == [[2], [1]]
    assert graph.relation("b").edge_index.tolist() == [[0, 1, 0], [2, 0, 2]]
    assert graph.relation("none").num_edges == 0 and graph.relation("none").num_nodes == 4
    assert graph.relation("b").edge_index.dtype == dtype
    assert graph.relation("b") is graph.relation("b") and len(graph.graphs()) == graph.num_relations == 3


def test_from_labels():
    graph = KnowledgeGraph.from_labels(LABELS)
    assert graph.relations == ("played", "characterIn", "genre") and graph.num_triples == 4
    played = graph.relation("played")
    assert played.edge_index[:, 0].tolist() == [graph.entity("Nimoy"), graph.entity("Spock")]
    given = KnowledgeGraph.from_labels(LABELS, relations=["genre", "played", "characterIn", "unused"])
    assert given.counts == (1, 2, 1, 0)
    assert KnowledgeGraph.from_labels([]).num_entities == 0


def test_inverses():
    graph = KnowledgeGraph(TRIPLES, 3, ("a", "b"))
    inverse = graph.inverse()
    assert inverse.relations == ("a^-1", "b^-1") and inverse.inverse().relations == ("a", "b")
    assert torch.equal(inverse.relation("b^-1").edge_index, graph.relation("b").edge_index.flip(0))
    both = graph.with_inverses()
    assert both.relations == ("a", "b", "a^-1", "b^-1") and both.num_triples == 8
    for name in inverse.relations:
        assert torch.equal(both.relation(name).edge_index, inverse.relation(name).edge_index)


def test_repr():
    text = "KnowledgeGraph(T=4, entities=6, relations=3: played, characterIn, genre)"
    assert repr(KnowledgeGraph.from_labels(LABELS)) == text
