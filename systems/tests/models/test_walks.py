"""Typed walks: scores are those of the expression, a triple says nothing of itself, entities have no numbers."""

import pytest
import torch
from torch.nn import functional as F

from structconv import ConfigError, KnowledgeGraph, StructureError, batch
from structconv.mechanisms import Relations, Walks
from structconv_systems.models.walks import WalkScores
from systems.tests.models.sequences import check_saved

N, K = 9, 3


def facts(seed=0, entities=N, triples=30):
    """Among others loops, and relations both ways."""
    generator = torch.Generator().manual_seed(seed)
    drawn = [torch.randint(most, (triples,), generator=generator) for most in (entities, K, entities)]
    return KnowledgeGraph(torch.stack(drawn, 1).unique(dim=0), entities, tuple("abc"))


def model(seed=0, length=2):
    torch.manual_seed(seed)
    scores = WalkScores(2 * K, length=length).double()
    for parameter in scores.parameters():
        torch.nn.init.normal_(parameter)
    return scores


def every(known):
    return torch.cartesian_prod(torch.arange(known.num_entities), torch.arange(known.num_relations))


@pytest.mark.parametrize("length", [1, 2])
def test_scores_are_those_of_the_expression(length):
    known, scores = facts().with_inverses(), model(length=length)
    if length == 2:
        scores.shrink(0.8)
    walks, weights = scores.learned(known)
    x = torch.zeros(N, 1, dtype=torch.float64)
    y = Relations(2 * K, None).mix(scores.singles.detach()).bound(1).basis(x, structure=known).dense(x.dtype)
    if length == 2:
        assert len(walks) > 0
        assert (weights == 0).any()
        y = y + Walks(walks).mix(weights).bound(1).basis(x, structure=known).dense(x.dtype)
    else:
        assert walks == []
    actual = scores(known, every(known)).view(N, 2 * K, N)
    torch.testing.assert_close(actual, y.movedim(0, 1), rtol=1e-10, atol=1e-10)


def test_of_one_relation_walks_of_two_steps_are_not_those_of_one():
    known, scores = KnowledgeGraph(torch.tensor([[0, 0, 1], [1, 0, 2]]), 3, ("a",)), WalkScores(1)
    torch.nn.init.ones_(scores.singles)
    torch.nn.init.ones_(scores.pairs)
    expected = torch.tensor([[0.0, 1, 1], [0, 0, 1], [0, 0, 0]])
    torch.testing.assert_close(scores(known, every(known)), expected)


@pytest.mark.parametrize("length", [1, 2])
def test_a_triple_says_nothing_of_itself(length):
    own, scores = facts(), model(length=length)
    known, count = own.with_inverses(), own.num_triples
    actual, checked = scores(known, known.triples[:, :2], known.triples[:, 2]), 0
    for place, triple in enumerate(known.triples):
        if triple[0] == triple[2]:
            continue
        others = torch.arange(count) != place % count
        without = KnowledgeGraph(own.triples[others], N, own.relations).with_inverses()
        torch.testing.assert_close(actual[place:place + 1], scores(without, triple[None, :2]), rtol=1e-10, atol=1e-10)
        checked += 1
    assert checked > 40


def test_it_learns_a_rule_and_names_it():
    """c(m, n) where a(m, v) and b(v, n): held out of entities that were never seen."""
    def family(seed):
        order = torch.randperm(24, generator=torch.Generator().manual_seed(seed)).view(3, 8)
        rows = [(int(m), k, int(n)) for k, (m_, n_) in enumerate(((0, 1), (1, 2), (0, 2)))
                for m, n in zip(order[m_], order[n_], strict=True)]
        return KnowledgeGraph(torch.tensor(rows), 24, tuple("abc"))

    known, scores = family(0).with_inverses(), WalkScores(2 * K)
    optimizer, triples = torch.optim.Adam(scores.parameters(), 0.05), known.triples
    for _ in range(60):
        optimizer.zero_grad()
        F.cross_entropy(scores(known, triples[:, :2], triples[:, 2]), triples[:, 2]).backward()
        optimizer.step()
        scores.shrink(0.005)
    walks, weights = scores.learned(known)
    assert walks[int(weights[:, 2].argmax())] == ("a", "b")
    other = family(1)
    asked = other.triples[16:]
    rest = KnowledgeGraph(other.triples[:16], 24, other.relations).with_inverses()
    assert torch.equal(scores(rest, asked[:, :2]).argmax(-1), asked[:, 2])


def test_it_is_equivariant():
    known, scores, order = facts().with_inverses(), model(), torch.randperm(N)
    triples = torch.stack([order[known.triples[:, 0]], known.triples[:, 1], order[known.triples[:, 2]]], 1)
    renamed, asked = KnowledgeGraph(triples, N, known.relations), every(known)
    again = torch.stack([order[asked[:, 0]], asked[:, 1]], 1)
    torch.testing.assert_close(scores(renamed, again)[:, order], scores(known, asked), rtol=1e-10, atol=1e-10)


def test_a_graph_alone_and_in_a_batch():
    first, second, scores = facts().with_inverses(), facts(1, entities=5).with_inverses(), model()
    both = batch([first, second])
    y = scores(both, every(both)).view(N + 5, 2 * K, N + 5)
    torch.testing.assert_close(y[:N, :, :N].flatten(0, 1), scores(first, every(first)), rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(y[N:, :, N:].flatten(0, 1), scores(second, every(second)), rtol=1e-10, atol=1e-10)
    assert not y[:N, :, N:].any()


def test_it_is_saved():
    check_saved(model(), model(1), facts().with_inverses(), torch.tensor([[0, 1], [3, 5]]))


def test_what_does_not_fit(monkeypatch):
    known = facts().with_inverses()
    with pytest.raises(ConfigError, match="length must be 1 or 2"):
        WalkScores(6, length=3)
    with pytest.raises(StructureError, match="must have 6 relations; got 3"):
        model()(facts(), torch.tensor([[0, 0]]))
    strange = KnowledgeGraph(known.triples, N, tuple("abcdef"))
    with pytest.raises(StructureError, match=r"each relation must have its inverse.*with_inverses"):
        model()(strange, strange.triples[:, :2], strange.triples[:, 2])
    monkeypatch.setattr("structconv_systems.models.walks.LARGEST", 100)
    again = facts().with_inverses()
    with pytest.raises(StructureError, match=r"walks of two relations must be at most 100, .*Use a smaller graph"):
        model()(again, torch.tensor([[0, 0]]))
    assert model(length=1)(again, torch.tensor([[0, 0]])).shape == (1, N)
    few = KnowledgeGraph(torch.tensor([[0, 0, 1]]), N, tuple("abc")).with_inverses()
    with pytest.raises(StructureError, match=r"weights of walks .* at most 100, .*; got 216.*Use fewer relations"):
        model()(few, torch.tensor([[0, 0]]))


def test_a_graph_too_large_for_the_scores_of_all_pairs_has_the_same_scores_and_gradients(monkeypatch):
    results = []
    for _ in range(2):
        known, scores = facts().with_inverses(), model()
        y = scores(known, known.triples[:, :2], known.triples[:, 2])
        y.square().sum().backward()
        results.append((y.detach(), scores.singles.grad, scores.pairs.grad))
        monkeypatch.setattr("structconv_systems.models.walks._TABLE", N * N * 2 * K - 1)
    torch.testing.assert_close(*results, rtol=1e-12, atol=1e-12)
