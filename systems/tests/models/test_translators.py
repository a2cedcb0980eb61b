"""Laws of models that translate: they learn a few pairs, a sentence alone is what it is in a padded batch, words to
come change nothing, steps are the full pass, they are saved, and exported for any batch."""

from functools import partial

import pytest
import torch

from structconv import Causal, LowRank
from structconv.mechanisms import STRUCTURE_IF_GIVEN, ALiBi, DotProduct, RelativeBias, RelativeKey, Rotary, Shifts
from structconv.nn import Conv, RelativeValue
from structconv_systems.models.luong import SCORES, WINDOWS, Luong
from structconv_systems.models.pervasive import Pervasive
from structconv_systems.models.rnnsearch import RNNsearch
from structconv_systems.models.transformer import Transformer
from systems.tests.models import sequences
from tests.support.drawn import EVERY, drawn

C, K, WORDS = 16, 4, sequences.WORDS
KEEPS = (STRUCTURE_IF_GIVEN, Causal())  # of an encoder, and of a decoder
DOT = DotProduct(K, C // K)
POSITIONS = {"plain": DOT.scaled(), "shaw": (DOT + RelativeKey(2)).scaled(), "alibi": DOT.scaled() + ALiBi(),
             "t5": DOT.scaled() + RelativeBias(4, buckets="log"),
             "rotary": DotProduct(K, C // K, rotary=Rotary()).scaled()}


def luong(score, window, feeding):
    return Luong(WORDS, WORDS, embed=12, hidden=16, input_feeding=feeding, score=score, window=window,
                 radius=None if window == "global" else 2, length=9 if score == "location" else None)


def transformer(attentions=None, **options):
    own = {"channels": C, "heads": K, "layers": 2, "hidden": 32, "dropout": 0.0, **options}
    if attentions:
        own |= {"positions": "none", "encoder_mechanism": attentions[0], "decoder_mechanism": attentions[1]}
    return Transformer(WORDS, **own)


def scored(scores):
    return [lambda layer, keep=keep: scores.masked(keep=keep).softmax() for keep in KEEPS]


def shaw_values():
    return transformer([lambda layer, keep=keep: Conv(POSITIONS["shaw"].masked(keep=keep).softmax(), C, C,
                                                      weight=LowRank(C // K), relative_value=RelativeValue(2))
                        for keep in KEEPS])


def shifts():
    one = DotProduct(1, C // K).scaled()
    return transformer([lambda layer, keep=keep, steps=steps: one.masked(keep=keep).softmax() | Shifts(
        steps, padding="zeros") for keep, steps in zip(KEEPS, ([-1, 0, 1], [0, 1, 2]), strict=True)])


TRANSFORMERS = {
    "transformer": transformer, "transformer, padded": partial(transformer, packed=False),
    "transformer, post, learned": partial(transformer, norm="post", positions="learned"),
    "transformer, apart, recomputed": partial(transformer, tied=False, recompute=True),
    **{f"transformer, {name}": partial(transformer, scored(scores)) for name, scores in POSITIONS.items()},
    "transformer, shaw values": shaw_values, "transformer, shifts": shifts}
LUONGS = {f"luong, {score}, {window}": partial(luong, score, window, place % 2 == 0)
          for place, (score, window) in enumerate((score, window) for score in SCORES for window in WINDOWS)}
RECURRENT = {
    "rnnsearch": partial(RNNsearch, WORDS, WORDS, embed=12, hidden=16),
    "rnnsearch without attention": partial(RNNsearch, WORDS, WORDS, embed=12, hidden=16, attention=False),
    **{f"pervasive, {pooling}, {kernel}": partial(
        Pervasive, WORDS, WORDS, embed=16, channels=12, layers=3, growth=6, hidden=24, kernel=kernel, pooling=pooling,
        positions=positions) for pooling, kernel, positions in (
            ("max", 3, "none"), ("attention", 5, "sinusoidal"), ("both", 3, "none"), ("both", 1, "sinusoidal"))},
    "luong without attention": partial(luong, None, "global", True), **LUONGS}
MODELS = {**TRANSFORMERS, **RECURRENT}
TWO = ["rnnsearch", "pervasive, both, 3"]  # learned, and the first exported; all with `make test-every`
FOUR = [f"luong, {name}" for name in ("location, global", "dot, local-m", "general, local-p", "additive, global")]
SOME = [name for name in MODELS if name not in LUONGS or name in FOUR]


def make(name, seed=0):
    torch.manual_seed(seed)
    return MODELS[name]()


@pytest.mark.parametrize("name", [name for name in SOME if name in RECURRENT] if EVERY else TWO)
def test_it_says_what_it_learned(name):
    sequences.check_says_what_it_learned(make(name), *sequences.pairs())


@pytest.mark.parametrize("name", drawn(list(TRANSFORMERS)[:4], 4))
def test_it_learns(name):
    sequences.check_overfits(make(name), *sequences.pairs(), steps=120)


@pytest.mark.parametrize("name", drawn(MODELS, 2))
def test_a_sentence_alone_the_future_and_steps(name):
    model = make(name).eval()
    sequences.check_alone(model, *sequences.pairs())
    sequences.check_causal(model, *sequences.pairs())
    sequences.check_steps(model, sequences.batch((7, 3, 5)), sequences.batch((4, 4, 4), begin=True, seed=1))


@pytest.mark.parametrize("name", drawn(RECURRENT, 2))
def test_padding_has_no_gradient(name):
    model = make(name)
    sequences.check_padding_has_no_gradient(model, *sequences.pairs(), getattr(model.source, "embedding", model.source))


@pytest.mark.parametrize("name", drawn(SOME, 2))
def test_a_saved_model(name):
    sequences.check_saved(make(name).eval(), make(name, seed=1).eval(), *sequences.pairs())


@pytest.mark.parametrize("name", [name for name in SOME if name in RECURRENT] if EVERY else TWO[:1])
def test_export_with_any_batch(name):
    sequences.check_exported_with_any_batch(make(name).eval())
