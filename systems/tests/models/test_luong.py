"""Luong's attention in all its combinations: it learns, decodes, and does not see padding."""

import pytest
import torch

from structconv.errors import ConfigError
from structconv_systems.models.luong import WINDOWS, Luong
from systems.tests.models.sequences import WORDS, pairs


def make(score="general", window="global", feeding=True, seed=0):
    torch.manual_seed(seed)
    return Luong(WORDS, WORDS, embed=12, hidden=16, input_feeding=feeding, score=score, window=window,
                 radius=None if window == "global" else 2, length=9 if score == "location" else None)


@pytest.mark.parametrize("feeding", [True, False])
def test_windows_bound_what_a_word_sees(feeding):
    """Within two places of its own number; of a predicted one; and no more than a Gaussian weighs."""
    source, target = pairs()
    exists = (source != 0).unsqueeze(1)
    m, n = torch.arange(source.shape[1]), torch.arange(target.shape[1]).unsqueeze(1)
    near = exists & ((m - n).abs() <= 2)
    of_places = make("dot", "local-m", feeding).alignment(source, target)
    assert torch.equal(of_places > 0, near)
    torch.testing.assert_close(of_places.sum(-1), near.any(-1).float())
    predicted = make("dot", "local-p", feeding).alignment(source, target)
    assert ((predicted > 0).sum(-1) > 0).all() and ((predicted > 0).sum(-1) <= 5).all()
    assert (predicted.sum(-1) < 1).all()
    assert not predicted[~exists.expand_as(predicted)].any()


def test_local_p_is_equations_9_and_10():
    """Of one sentence, with the numbers of its parameters: p = S sigmoid(v tanh(W h)), a = softmax near p, bumped."""
    model, (source, target) = make("general", "local-p"), pairs()
    own, words = source[:1], target[1:2]
    decoding = model.begin(own)
    h, _ = decoding.advanced(words)
    parts = dict(model.context.mechanism.named_parameters())
    w, v = (next(p for name, p in parts.items() if part in name) for part in ("hidden", "vector"))
    key = next(p for name, p in parts.items() if "key" in name)
    p = own.shape[1] * torch.sigmoid(torch.tanh(h @ w.T) @ v.T)
    distance = torch.arange(own.shape[1]) - p
    scores = h @ (decoding.context.x @ key.T).mT
    weights = scores.masked_fill(distance.abs() > 2, -torch.inf).softmax(-1) * torch.exp(-distance**2 / 2)
    torch.testing.assert_close(model.alignment(own, words), weights, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("window", WINDOWS)
def test_a_source_beyond_the_length_weighs_nothing_there(window):
    """Words behind `length` are read by the encoder and get no weight."""
    model, target = make("location", window).eval(), torch.tensor([[1, 4, 5, 6]])
    source = torch.randint(4, WORDS, (1, 15))
    weights = model.alignment(source, target)
    assert weights.shape == (1, 4, 15)
    assert not weights[..., 9:].any()
    if window == "global":
        torch.testing.assert_close(weights.sum(-1), torch.ones(1, 4))
    assert model(source, target).isfinite().all()
    decoding = model.begin(source)
    stepped = torch.stack([decoding.step(word) for word in target.unbind(1)], 1)
    torch.testing.assert_close(stepped, model(source, target), rtol=1e-5, atol=1e-5)


def test_without_attention_the_source_is_read_through_the_last_states_only():
    """a_t = tanh(W_c h_t), and no parameter of attention."""
    model, (source, target) = Luong(WORDS, WORDS, embed=12, hidden=16, score=None).eval(), pairs()
    states, outputs = model.begin(source).advanced(target)
    torch.testing.assert_close(outputs, torch.tanh(states @ model.own.weight.T))
    assert {name.partition(".")[0] for name, _ in model.named_parameters()} == {
        "source", "target", "encoder", "decoder", "own", "words"}
    assert not torch.allclose(model(source, target)[0], model(source.roll(1, 0), target)[0])
    with pytest.raises(ConfigError, match="the model must have attention"):
        model.alignment(source, target)
