"""Sequences made from a seed: the label is what their places say, and nothing else tells it."""

import pytest
import torch

from structconv.errors import ConfigError
from structconv_systems.data.generated import NOISE, QUESTIONS, entry_channels, labeled_entries, temporal_order


def test_marks_stand_between_the_bounds_and_make_the_label():
    data = temporal_order(2000, 20, first=3, end=9, seed=0)
    assert data.inputs.shape == (2000, 20)
    marked = (data.inputs >= NOISE).nonzero()[:, 1].view(2000, 2)
    assert torch.equal(marked, data.positions)
    assert (marked[:, 0] < marked[:, 1]).all() and marked.min() == 3 and marked.max() == 8
    marks = data.inputs.gather(1, data.positions) - NOISE
    assert torch.equal(data.labels, 2 * marks[:, 0] + marks[:, 1])
    assert (data.labels.bincount(minlength=4) > 400).all()


def test_a_seed_decides_everything():
    for make in (lambda seed: temporal_order(9, 20, first=0, end=20, seed=seed),
                 lambda seed: labeled_entries("content", 9, 20, classes=3, seed=seed)):
        assert torch.equal(make(1).inputs, make(1).inputs)
        assert not torch.equal(make(1).inputs, make(2).inputs)


@pytest.mark.parametrize(("first", "end"), [(0, 1), (-1, 4), (5, 21)])
def test_marks_need_two_places(first, end):
    with pytest.raises(ConfigError, match="two places"):
        temporal_order(1, 20, first=first, end=end, seed=0)


def test_the_labels_of_the_questions_are_read_off_the_same_entries():
    data = {question: labeled_entries(question, 500, 7, classes=3, seed=4) for question in QUESTIONS}
    x = data["place"].inputs
    assert x.shape == (500, 7, entry_channels(7, 3))
    assert all(torch.equal(one.inputs, x) for one in data.values())
    values, keys, asked, mark = x.split((3, 7, 7, 1), -1)
    marked, key = mark.squeeze(-1).argmax(-1), asked.sum(1)
    answering = (keys * key.unsqueeze(1)).sum(-1).argmax(-1)
    for question, place in (("place", torch.full((500,), 2)), ("content", marked), ("relation", answering)):
        own = data[question]
        assert torch.equal(own.positions.squeeze(-1), place)
        assert torch.equal(values[torch.arange(500), place].argmax(-1), own.labels)
        assert (values[torch.arange(500), place].sum(-1) == 1).all()
    assert (mark.sum((1, 2)) == 1).all() and (asked.sum((1, 2)) == 1).all()
    assert torch.equal(keys.sum(-1) + asked.sum(-1), torch.ones(500, 7))


def test_other_questions_and_short_sequences_are_refused():
    with pytest.raises(ConfigError, match="question"):
        labeled_entries("time", 1, 7, classes=3, seed=0)
    with pytest.raises(ConfigError, match="length must be at least 4"):
        labeled_entries("place", 1, 3, classes=3, seed=0)
