"""The bi-affine parser: it learns trees, padding changes nothing, and decoding finds the best tree with one root."""

import functools
import itertools

import pytest
import torch

from structconv_systems.models.parser import Parser, at_heads, dropped_parts
from structconv_systems.models.trees import are_trees, best_trees
from systems.tests.models.sequences import batch, check_learns, check_saved
from tests.support.drawn import slow

TAGS, RELATIONS, CHARACTERS = 6, 5, 11
LENGTHS = (7, 1, 5)


def make(characters=True, seed=0, dropout=0.0):
    torch.manual_seed(seed)
    return Parser(13, TAGS, RELATIONS, characters=CHARACTERS if characters else None, embed=8, hidden=12, layers=2,
                  arc=10, label=6, dropout=dropout)


def inputs(characters=True):
    words, generator = batch(LENGTHS), torch.Generator().manual_seed(1)
    tags = torch.randint(1, TAGS, words.shape, generator=generator) * (words != 0)
    letters = torch.randint(1, CHARACTERS, (*words.shape, 6), generator=generator)
    lengths = torch.randint(1, 7, words.shape, generator=generator) * (words != 0)
    letters = letters * (torch.arange(6) < lengths.unsqueeze(-1))
    return (words, tags, letters) if characters else (words, tags)


def trees():
    """Heads of the three sentences, and their relations."""
    heads = torch.tensor([[2, 0, 2, 3, 6, 3, 6], [0] * 7, [3, 1, 0, 3, 4, 0, 0]])
    relations = torch.tensor([[2, 1, 3, 4, 2, 3, 4], [1, 0, 0, 0, 0, 0, 0], [2, 3, 1, 4, 2, 0, 0]])
    return heads, relations


@functools.cache
def every_tree(size):
    """All trees with one word below the root."""
    every = torch.tensor(list(itertools.product(range(size + 1), repeat=size)))
    return every[are_trees(every, torch.full((len(every),), size))]


def best_by_hand(scores):
    """The best of all trees, of scores (N + 1, N)."""
    every = every_tree(scores.shape[1])
    return every[scores.gather(0, every).sum(1).argmax()]


@pytest.mark.parametrize("scores", ["biaffine", "additive"])
def test_a_parser_without_tags_learns_with_both_scores(scores):
    model = Parser(13, None, RELATIONS, characters=CHARACTERS, embed=8, hidden=12, layers=1, arc=10, label=6,
                   dropout=0.0, scores=scores)
    words, tags, letters = inputs()
    heads, relations = trees()
    check_learns(model, lambda: model.loss(words, tags, heads, relations, letters), 60, until=0.2)
    torch.testing.assert_close(model(words, 0 * tags, letters), model(words, tags, letters))


def test_its_layers_may_be_watched():
    model, seen = make(), []
    for module in model.modules():
        if module is not model:
            module.register_full_backward_hook(lambda *_: None)
    model.perceptrons.register_forward_hook(lambda module, given, actual: seen.append((actual, actual.clone())))
    model.loss(*inputs()[:2], *trees(), inputs()[2]).backward()
    assert torch.equal(*seen[0])


@pytest.mark.parametrize("characters", [True, False])
def test_it_learns_trees_and_their_relations(characters):
    model, given, (heads, relations) = make(characters), inputs(characters), trees()
    check_learns(model, lambda: model.loss(*given[:2], heads, relations, *given[2:]), 80, stop=0.03)
    for actual, expected in zip(model.parse(*given), (heads, relations), strict=True):
        assert torch.equal(actual, expected)


def test_a_sentence_alone_has_the_scores_and_the_loss_of_the_padded_batch():
    model, given, gold = make(), inputs(), trees()
    arcs, labels = model(*given)
    losses = []
    for i, length in enumerate(LENGTHS):
        own = [t[i:i + 1, :length] for t in given]
        single, of_relations = model(*own)
        torch.testing.assert_close(arcs[i, :length + 1, :length], single[0], rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(labels[i, :, :length + 1, :length], of_relations[0], rtol=1e-5, atol=1e-5)
        assert torch.isneginf(arcs[i, length + 1:]).all()
        losses.append(model.loss(*own[:2], *(t[i:i + 1, :length] for t in gold), own[2]) * length)
    whole = model.loss(*given[:2], *gold, given[2])
    torch.testing.assert_close(whole, sum(losses) / sum(LENGTHS), rtol=1e-5, atol=1e-5)
    whole.backward()
    for embedding in (model.words, model.tags, model.letters.characters):
        assert not embedding.weight.grad[0].any()
        assert embedding.weight.grad[1:].any()


def test_heads_in_padding_do_not_matter():
    model, (words, tags, letters), (heads, relations) = make(), inputs(), trees()
    loss = model.loss(words, tags, heads, relations, letters)
    assert torch.equal(loss, model.loss(words, tags, heads.masked_fill(words == 0, -100), relations, letters))


def test_labels_are_scored_at_the_heads():
    model, given, (heads, _) = make(), inputs(), trees()
    _, labels = model(*given)
    actual = at_heads(labels, heads)
    assert torch.equal(actual[0, :, 4], labels[0, :, 6, 4])
    assert torch.equal(actual[2, :, 2], labels[2, :, 0, 2])


def test_a_saved_parser():
    class Arcs(torch.nn.Module):
        def __init__(self, model):
            super().__init__()
            self.model = model

        def forward(self, *given):
            return self.model(*given)[0]

    check_saved(Arcs(make()), Arcs(make(seed=1)), *inputs())


@slow
def test_export_with_any_batch():
    """Of sentences padded to the length of the example, for which torch's LSTM is exported."""
    model, given = make().eval(), inputs()
    samples = torch.export.Dim("samples")
    program = torch.export.export(model, given, dynamic_shapes=({0: samples},) * 3).module()
    for actual, expected in zip(program(*(t[:2] for t in given)), model(*(t[:2] for t in given)), strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)


def test_parts_of_a_word_make_up_for_each_other():
    actual = dropped_parts([torch.ones(50, 40, 3), torch.ones(50, 40, 3)], 0.33, training=True).unflatten(-1, (2, 3))
    assert set(actual[..., 0].flatten(0, 1).unique(dim=0).flatten().tolist()) == {0.0, 1.0, 2.0}
    both = actual[..., 0].sum(-1)
    assert set(both.unique().tolist()) == {0.0, 2.0}
    assert (both == 0).float().mean() == pytest.approx(0.33**2, abs=0.02)


@pytest.mark.parametrize("spread", [0.3, 3.0])
@pytest.mark.parametrize("length", [1, 2, 3, 6])
def test_the_best_tree_of_all(length, spread):
    torch.manual_seed(length)
    scores = spread * torch.randn(12, length + 1, length)
    actual = best_trees(scores, torch.full((12,), length))
    for i in range(12):
        assert torch.equal(actual[i], best_by_hand(scores[i].double()))


def test_the_best_tree_of_longer_sentences_is_that_of_networkx():
    networkx = pytest.importorskip("networkx")
    scores = torch.randn(20, 19, 18).double()
    scores[:10, 1:] += 2 * scores[:10, 1:].abs().cumsum(1) % 1  # some with long cycles
    for own in scores:
        graph = networkx.DiGraph()
        graph.add_weighted_edges_from((m, n + 1, float(own[m, n]) - 1e3 * (m == 0))
                                      for m in range(19) for n in range(18) if m != n + 1)
        tree = {n: m for m, n in networkx.maximum_spanning_arborescence(graph).edges}
        assert best_trees(own[None], torch.tensor([18]))[0].tolist() == [tree[n + 1] for n in range(18)]


def test_a_sentence_of_a_thousand_words_has_a_tree():
    heads = best_trees(torch.randn(1, 1001, 1000), torch.tensor([1000]))
    assert are_trees(heads, torch.tensor([1000])).all()


def test_one_word_is_below_the_root_though_more_would_score_higher():
    scores = torch.zeros(1, 4, 3)
    scores[:, 0] = 10
    heads = best_trees(scores, torch.tensor([3]))
    assert are_trees(heads, torch.tensor([3])).all()


def test_trees_of_padded_sentences_are_those_alone():
    scores, lengths = torch.randn(20, 9, 8), torch.randint(1, 9, (20,))
    actual = best_trees(scores, lengths)
    assert are_trees(actual, lengths).all()
    for own, heads, length in zip(scores, actual, lengths.tolist(), strict=True):
        single = best_trees(own[None, :length + 1, :length], torch.tensor([length]))
        assert torch.equal(single[0], heads[:length])
        assert not heads[length:].any()


@pytest.mark.parametrize(("heads", "tree"), [
    ([0, 1, 2], True), ([2, 0, 2], True), ([0, 0, 1], False), ([2, 1, 0], False), ([2, 3, 1], False),
    ([0, 2, 1], False)])
def test_what_is_a_tree(heads, tree):
    assert are_trees(torch.tensor([heads]), torch.tensor([3])).item() is tree
