"""Decoding of any model: against one that can be enumerated, and options that have no meaning."""

import itertools

import pytest
import torch

from structconv.errors import ConfigError
from structconv_systems.models.decoding import beam, greedy, sample

BEGIN, END, VOCABULARY, MOST = 1, 2, 4, 4


class Table:
    """P(next | the last two tokens, source): a model of which every sequence can be scored."""

    def __init__(self, tables, sources):
        self.tables, self.sources = tables, sources
        self.before = torch.full_like(sources, 0)
        self.rows = []

    def step(self, tokens):
        self.rows.append(len(tokens))
        logits = self.tables[self.sources, self.before, tokens]
        self.before = tokens
        return logits

    def reorder(self, samples):
        self.sources, self.before = self.sources[samples], self.before[samples]


def tables(seed, sources=3, scale=2.0):
    generator = torch.Generator().manual_seed(seed)
    return scale * torch.randn(sources, VOCABULARY, VOCABULARY, VOCABULARY, generator=generator)


def score(table, tokens):
    """log P of a sequence, with its end."""
    before, last, total = 0, BEGIN, 0.0
    for token in tokens:
        total += float(table[before, last].log_softmax(-1)[token])
        before, last = last, token
    return total


def sequences():
    """All that a search may find: those that end, and those that reach their length."""
    others = [token for token in range(VOCABULARY) if token != END]
    for length in range(MOST):
        for tokens in itertools.product(others, repeat=length):
            yield [*tokens, END]
    yield from map(list, itertools.product(others, repeat=MOST))


def best(table, penalty):
    actual = max(sequences(), key=lambda tokens: score(table, tokens) / penalty(len(tokens)))
    return [token for token in actual if token != END]


@pytest.mark.parametrize(("normalization", "power"), [("gnmt", 0.6), ("gnmt", 0.0), ("length", 1.0), ("length", 2.0)])
@pytest.mark.parametrize("seed", range(4))
def test_a_wide_beam_finds_the_best_of_all_sequences(normalization, power, seed):
    own = tables(seed)
    penalties = {"gnmt": lambda size: ((5 + size) / 6) ** power, "length": lambda size: size ** power}
    actual = beam(Table(own, torch.arange(3)), 3, width=VOCABULARY ** MOST, begin=BEGIN, end=END, most=MOST,
                 length_penalty=power, normalization=normalization)
    assert actual == [best(table, penalties[normalization]) for table in own]


@pytest.mark.parametrize("most", [0, 1, 9])
@pytest.mark.parametrize("seed", range(5))
def test_one_beam_is_greedy(seed, most):
    own, sources = tables(seed, 8), torch.arange(8)
    actual = beam(Table(own, sources), 8, width=1, begin=BEGIN, end=END, most=most)
    assert actual == greedy(Table(own, sources), 8, begin=BEGIN, end=END, most=most)


def test_wider_beams_find_likelier_sequences():
    own, sources = tables(7, 40, 1.0), torch.arange(40)
    means = []
    for width in (1, 2, 4):
        actual = beam(Table(own, sources), 40, width=width, begin=BEGIN, end=END, most=MOST, length_penalty=0.0)
        ended = [tokens + [END] * (len(tokens) < MOST) for tokens in actual]
        means.append(sum(map(score, own, ended)))
    assert means[0] < means[1] < means[2]


def test_a_sample_is_decoded_as_it_is_alone():
    own = tables(11, 6)
    together = [beam(Table(own, torch.arange(6)), 6, width=3, begin=BEGIN, end=END, most=9),
                greedy(Table(own, torch.arange(6)), 6, begin=BEGIN, end=END, most=9)]
    single = [[beam(Table(own, torch.tensor([i])), 1, width=3, begin=BEGIN, end=END, most=9)[0] for i in range(6)],
             [greedy(Table(own, torch.tensor([i])), 1, begin=BEGIN, end=END, most=9)[0] for i in range(6)]]
    assert together == single
    assert len({len(tokens) for tokens in together[1]}) > 1


def test_greedy_takes_the_likeliest_and_cuts_at_the_end():
    logits = torch.full((1, VOCABULARY, VOCABULARY, VOCABULARY), -9.0)
    for before, token, following in ((0, BEGIN, 3), (BEGIN, 3, 0), (3, 0, END)):
        logits[0, before, token, following] = 9.0
    assert greedy(Table(logits, torch.zeros(2).long()), 2, begin=BEGIN, end=END, most=9) == [[3, 0], [3, 0]]
    assert greedy(Table(logits, torch.zeros(1).long()), 1, begin=BEGIN, end=END, most=1) == [[3]]
    assert greedy(Table(logits, torch.zeros(1).long()), 1, begin=BEGIN, end=None, most=3) == [[3, 0, END]]
    assert greedy(Table(logits, torch.zeros(1).long()), 1, begin=torch.tensor([[BEGIN, 3]]), end=END, most=9) == [[0]]


def test_samples_that_have_ended_leave_the_batch():
    logits = torch.zeros(4, VOCABULARY, VOCABULARY, VOCABULARY)
    logits[0, ..., 3], logits[1:, ..., END] = 9.0, 9.0
    decoding = Table(logits, torch.arange(4))
    assert greedy(decoding, 4, begin=BEGIN, end=END, most=3) == [[3, 3, 3], [], [], []]
    assert decoding.rows == [4, 1, 1]
    decoding = Table(logits, torch.arange(4))
    assert beam(decoding, 4, width=2, begin=BEGIN, end=END, most=3, length_penalty=0.0)[1:] == [[], [], []]
    assert decoding.rows[:2] == [8, 2]


@pytest.mark.parametrize(("options", "likely"), [
    ({}, [0.4, 0.3, 0.2, 0.1]), ({"temperature": 0.5}, [16 / 30, 9 / 30, 4 / 30, 1 / 30]),
    ({"top_k": 2}, [4 / 7, 3 / 7, 0, 0]), ({"top_p": 0.65}, [4 / 7, 3 / 7, 0, 0]), ({"top_p": 0.35}, [1, 0, 0, 0]),
    ({"top_k": 3, "top_p": 0.8}, [4 / 9, 3 / 9, 2 / 9, 0]), ({"top_k": 9, "top_p": 1.0}, [0.4, 0.3, 0.2, 0.1])])
def test_samples_are_drawn_as_often_as_they_are_likely(options, likely):
    logits = torch.tensor([0.4, 0.3, 0.2, 0.1]).log().expand(1, VOCABULARY, VOCABULARY, VOCABULARY)
    draws = 4000
    actual = sample(Table(logits, torch.zeros(draws).long()), draws, begin=BEGIN, end=None, most=5,
                   generator=torch.Generator().manual_seed(0), **options)
    share = torch.tensor(actual).flatten().bincount(minlength=VOCABULARY) / (5 * draws)
    torch.testing.assert_close(share, torch.tensor(likely).float(), atol=0.012, rtol=0)
    assert not share[torch.tensor(likely) == 0].any()


def test_samples_are_those_of_their_generator():
    own = tables(0)
    actual = [sample(Table(own, torch.arange(3)), 3, begin=BEGIN, end=END, most=9,
                    generator=torch.Generator().manual_seed(seed)) for seed in (0, 0, 1)]
    assert actual[0] == actual[1] != actual[2]


@pytest.mark.parametrize(("decode", "options", "match"), [
    (sample, {"temperature": 0.0}, r"above 0.*greedy"), (sample, {"temperature": float("nan")}, "temperature"),
    (sample, {"top_k": 0}, "top_k"), (sample, {"top_p": 0.0}, "top_p"), (sample, {"top_p": 1.5}, "top_p"),
    (beam, {"width": 0}, "width"), (beam, {"width": 2, "length_penalty": -1.0}, "length_penalty"),
    (beam, {"width": 2, "normalization": "none"}, "normalization"), (greedy, {"most": -1}, "most"),
    (greedy, {"begin": torch.tensor([1])}, "begin"), (greedy, {"begin": torch.ones(2, 1).long()}, "begin"),
    (greedy, {"batch": 0}, "batch")])
def test_options_that_have_no_meaning_are_told(decode, options, match):
    options = {"batch": 1, "begin": BEGIN, "end": END, "most": 3, **options}
    with pytest.raises(ConfigError, match=match):
        decode(Table(tables(0, 1), torch.zeros(1).long()), **options)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_logits_that_are_no_numbers_are_told(bad):
    broken, begins = torch.full_like(tables(0), bad), {"begin": BEGIN, "end": END, "most": MOST}
    for decode in (greedy, sample, lambda *args, **options: beam(*args, width=2, **options)):
        with pytest.raises(ConfigError, match="largest logit"):
            decode(Table(broken, torch.arange(3)), 3, **begins)


@pytest.mark.parametrize(("options", "told"), [
    ({"length_penalty": 1000.0}, "length_penalty must be from 0 to 20"),
    ({"length_penalty": float("inf")}, "length_penalty must be from 0 to 20"), ({"end": None}, "end must be a token")])
def test_a_search_that_could_not_end_is_told_before_it_begins(options, told):
    with pytest.raises(ConfigError, match=told):
        beam(None, 1, **{"width": 2, "begin": 1, "end": 2, "most": 3, **options})
