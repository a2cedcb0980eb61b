"""Filtered ranks by hand, and which answers are known."""

import pytest
import torch

from structconv.errors import ShapeError
from structconv_systems.ranking import KnownAnswers, filtered_ranks, ranking_figures


def test_known_answers_are_left_out_and_equals_share_a_rank():
    scores = torch.tensor([[5.0, 4, 3, 2], [1, 1, 1, 1], [2, 3, 3, 1], [1, 2, 3, 4]])
    known = torch.tensor([[1, 0, 1, 0], [0, 0, 0, 0], [0, 0, 1, 0], [0, 0, 0, 0]]).bool()
    assert filtered_ranks(scores, torch.tensor([2, 0, 1, 3]), known).tolist() == [2, 2.5, 1, 1]


def test_a_model_that_scores_all_alike_has_the_middle_rank_and_no_hit():
    ranks = filtered_ranks(torch.zeros(3, 9), torch.tensor([0, 4, 8]), torch.zeros(3, 9).bool())
    assert ranks.tolist() == [5, 5, 5]
    figures = ranking_figures(ranks, "test")
    assert figures == {"test_mrr": pytest.approx(20), "test_hits_1": 0, "test_hits_3": 0, "test_hits_10": 100}


def test_what_is_no_number_is_last():
    scores = torch.tensor([[torch.nan, 1, torch.nan], [torch.nan, 1, 2]])
    assert filtered_ranks(scores, torch.tensor([0, 1]), torch.zeros(2, 3).bool()).tolist() == [2.5, 2]


def test_sizes_must_fit():
    with pytest.raises(ShapeError, match="filtered_ranks"):
        filtered_ranks(torch.zeros(2, 3), torch.zeros(3, dtype=torch.int64), torch.zeros(2, 3).bool())


def test_known_answers_are_those_of_the_triples():
    triples = torch.randint(5, (40, 3))
    triples[:, 1] %= 2
    asked = torch.cartesian_prod(torch.arange(5), torch.arange(2))
    expected = [[[m, r, n] in triples.tolist() for n in range(5)] for m, r in asked.tolist()]
    assert KnownAnswers(triples, 5, 2)(asked).tolist() == expected
    assert not KnownAnswers(triples[:0], 5, 2)(asked).any()
