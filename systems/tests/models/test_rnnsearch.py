"""RNNsearch and its twin without attention: they learn, decode and do not see padding; alignments are its weights."""

from __future__ import annotations

import pytest
import torch

from structconv.errors import ConfigError
from structconv_systems.models.rnnsearch import RNNsearch
from systems.tests.models.sequences import (
    WORDS,
    check_alone,
    check_causal,
    check_exported_with_any_batch,
    check_padding_has_no_gradient,
    check_saved,
    check_says_what_it_learned,
    check_steps,
    pairs,
)

BOTH = pytest.mark.parametrize("attention", [True, False])


def made(attention=True, seed=0):
    torch.manual_seed(seed)
    return RNNsearch(WORDS, WORDS, embed=12, hidden=16, attention=attention)


@BOTH
def test_it_overfits_and_says_what_it_learned(attention):
    check_says_what_it_learned(made(attention), *pairs())


@BOTH
@pytest.mark.parametrize("check", [check_alone, check_causal, check_steps])
def test_invariances(attention, check):
    check(made(attention), *pairs())


@BOTH
def test_padding(attention):
    model = made(attention)
    check_padding_has_no_gradient(model, *pairs(), model.source)


@BOTH
def test_a_saved_model(attention):
    check_saved(made(attention), made(attention, seed=1), *pairs())


@BOTH
def test_export_with_any_batch(attention):
    check_exported_with_any_batch(made(attention).eval(), *pairs())


def test_alignments_are_weights_over_the_words_of_a_source():
    model, (source, target) = made(), pairs()
    whole = model.alignment(source, target)
    assert whole.shape == (3, target.shape[1], source.shape[1])
    torch.testing.assert_close(whole.sum(-1), torch.ones(3, target.shape[1]))
    assert not whole[source.unsqueeze(1).expand_as(whole) == 0].any()
    own, words = source[1, :3], target[1]
    torch.testing.assert_close(model.alignment(own, words), whole[1, :, :3], rtol=1e-5, atol=1e-6)
    with pytest.raises(ConfigError, match="attention"):
        made(attention=False).alignment(source, target)


def test_alignments_are_those_of_the_contexts():
    """The context that a step takes is the mean of the states by the row of the alignment."""
    model, (source, target) = made(), pairs()
    decoding = model.begin(source)
    states = decoding.context.x
    y = model.context(decoding.context, z=decoding.state.unsqueeze(1)).squeeze(1)
    mean = (model.alignment(source, target)[:, :1] @ states).squeeze(1)
    theta = model.context.weight().dense()[0]
    torch.testing.assert_close(y, mean @ theta + model.context.bias, rtol=1e-5, atol=1e-5)
