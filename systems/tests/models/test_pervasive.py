"""Pervasive attention: it learns, decodes row by row, and sees neither padding nor what is to come."""

import pytest
import torch

from structconv.errors import ConfigError
from structconv_systems.models.pervasive import Pervasive
from systems.tests.models.sequences import WORDS, pairs


def make(pooling="both", kernel=3, positions="none", seed=0):
    torch.manual_seed(seed)
    return Pervasive(WORDS, WORDS, embed=16, channels=12, layers=3, growth=6, hidden=24, kernel=kernel,
                     pooling=pooling, positions=positions)


def test_a_word_is_chosen_by_the_last_rows_and_all_of_the_source():
    """Three layers of kernel 3 read one row each before that of the word; its own and the source are seen whole."""
    model, (source, target) = make("max"), pairs()
    places, vectors = torch.arange(target.shape[1]), []
    hook = model.target.register_forward_hook(lambda module, given, words: vectors.append(words) or words.retain_grad())
    model(source, target)[1, 5].square().sum().backward()
    hook.remove()
    seen = vectors[0].grad[1].abs().sum(-1) > 0
    assert torch.equal(seen, (places <= 5) & (places >= 2))


def test_alignments_are_shares_of_the_channels():
    model, (source, target) = make(), pairs()
    own, words = source[1, :3], target[1]
    whole = model.alignment(own, words)
    assert whole.shape == (target.shape[1], 3)
    torch.testing.assert_close(whole.sum(-1), torch.ones(target.shape[1]))
    with pytest.raises(ConfigError, match="greatest value"):
        make("attention").alignment(own, words)


@pytest.mark.parametrize("pooling", ["max", "attention", "both"])
def test_a_source_without_words_has_finite_logits_and_disturbs_no_other(pooling):
    model = make(pooling).eval()
    source, target = torch.tensor([[4, 5], [0, 0]]), torch.tensor([[1, 4], [1, 4]])
    actual = model(source, target)
    assert actual.isfinite().all()
    torch.testing.assert_close(actual[:1], model(source[:1], target[:1]))
