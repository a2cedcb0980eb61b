"""RNNsearch and its twin without attention: they learn, decode and do not see padding; alignments are its weights."""

import pytest
import torch

from structconv.errors import ConfigError
from structconv_systems.models.rnnsearch import RNNsearch
from systems.tests.models.sequences import WORDS, pairs


def make(attention=True, seed=0):
    torch.manual_seed(seed)
    return RNNsearch(WORDS, WORDS, embed=12, hidden=16, attention=attention)


def test_alignments_are_weights_over_the_words_of_a_source():
    model, (source, target) = make(), pairs()
    whole = model.alignment(source, target)
    assert whole.shape == (3, target.shape[1], source.shape[1])
    torch.testing.assert_close(whole.sum(-1), torch.ones(3, target.shape[1]))
    assert not whole[source.unsqueeze(1).expand_as(whole) == 0].any()
    own, words = source[1, :3], target[1]
    torch.testing.assert_close(model.alignment(own, words), whole[1, :, :3], rtol=1e-5, atol=1e-6)
    with pytest.raises(ConfigError, match="attention"):
        make(attention=False).alignment(source, target)


def test_alignments_are_those_of_the_contexts():
    """The context that a step takes is the mean of the states by the row of the alignment."""
    model, (source, target) = make(), pairs()
    decoding = model.begin(source)
    states = decoding.context.x
    y = model.context(decoding.context, z=decoding.state.unsqueeze(1)).squeeze(1)
    mean = (model.alignment(source, target)[:, :1] @ states).squeeze(1)
    theta = model.context.weight().dense()[0]
    torch.testing.assert_close(y, mean @ theta + model.context.bias, rtol=1e-5, atol=1e-5)
