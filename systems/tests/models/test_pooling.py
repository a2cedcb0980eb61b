"""Poolings: weights that sum to one, by place alone, by content alone, or by relations; each learns what it can."""

import pytest
import torch

from structconv_systems.data.generated import entry_channels, labeled_entries
from structconv_systems.models.pooling import POOLINGS, PoolingClassifier

LENGTH, CLASSES = 6, 3
EACH = pytest.mark.parametrize("name", POOLINGS)
BY_CONTENT = pytest.mark.parametrize("name", ["context", "self-attention"])


def make(name, seed=0):
    torch.manual_seed(seed)
    return PoolingClassifier(name, LENGTH, entry_channels(LENGTH, CLASSES), CLASSES, channels=16, dim=8)


def data(question="content", samples=12):
    return labeled_entries(question, samples, LENGTH, classes=CLASSES, seed=2)


@EACH
def test_the_output_is_the_mean_by_the_weights(name):
    model, x = make(name), data().inputs
    weights = model.weights(x)
    assert weights.shape == (12, LENGTH)
    torch.testing.assert_close(weights.sum(-1), torch.ones(12))
    mean = (weights.unsqueeze(-1) * x).sum(1)
    expected = mean @ model.pool.weight().dense()[0] + model.pool.bias
    torch.testing.assert_close(model.pool(x).squeeze(1), expected, rtol=1e-5, atol=1e-5)


def test_weights_by_place_are_the_same_for_all_sequences():
    model, x = make("spatial"), data().inputs
    assert torch.equal(model.weights(x), model.weights(x.flip(0)))
    assert len(model.weights(x).unique(dim=0)) == 1


@BY_CONTENT
def test_weights_by_content_go_with_their_entries(name):
    model, x = make(name), data().inputs
    order = torch.randperm(LENGTH, generator=torch.Generator().manual_seed(3))
    torch.testing.assert_close(model.weights(x[:, order]), model.weights(x)[:, order])
    torch.testing.assert_close(model(x[:, order]), model(x))


def test_a_query_scores_an_entry_whatever_stands_beside_it():
    """The ratio of two weights of the context is that of the two entries alone; among entries that ask it is not."""
    x = data().inputs
    other = torch.cat([x[:, :2], x[:, 2:].flip(0)], 1)

    def ratio(model, x):
        return model.weights(x)[:, 0] / model.weights(x)[:, 1]

    for name, alike in (("context", True), ("self-attention", False)):
        model = make(name)
        assert torch.allclose(ratio(model, x), ratio(model, other), rtol=1e-4) is alike


def test_the_weights_of_self_attention_are_the_mean_over_those_who_ask():
    model, x = make("self-attention"), data().inputs
    attention = model.attention(x)
    assert attention.shape == (12, LENGTH, LENGTH)
    torch.testing.assert_close(attention.sum(1), torch.ones(12, LENGTH))
    torch.testing.assert_close(model.weights(x), attention.mean(2))
