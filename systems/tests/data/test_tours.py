"""Shortest tours: two ways to find them agree with all permutations."""

import itertools

import pytest
import torch

from structconv.errors import ConfigError, ShapeError
from structconv_systems.data.tours import (
    distances,
    exact,
    farthest_insertion,
    lengths,
    local_search,
    two_opt,
    uniform,
    ways,
)


def of_all(table):
    """The least length of each of (B, N, N), by all permutations."""
    every = torch.tensor(list(itertools.permutations(range(table.shape[-1]))))
    return torch.stack([lengths(own.expand(len(every), -1, -1), every).min() for own in table])


@pytest.mark.parametrize("nodes", [1, 2, 3, 4, 7])
def test_all_find_the_best_of_all_permutations(nodes):
    table = distances(uniform(5, nodes, 0))
    known = of_all(table)
    for actual in (local_search(table, kicks=10), torch.stack([exact(own) for own in table])):
        torch.testing.assert_close(lengths(table, actual), known)


def test_local_search_is_within_a_percent_of_twenty_nodes_and_kicks_help():
    table = distances(uniform(100, 20, 2))
    once, often = (lengths(table, local_search(table, kicks=kicks)) for kicks in (0, 30))
    assert (often <= once + 1e-12).all() and often.mean() < once.mean()
    proven = torch.stack([lengths(table[i], exact(table[i])) for i in range(3)])
    assert (often[:3] >= proven - 1e-9).all() and (often[:3] / proven).mean() < 1.01


def test_local_search_ends_on_points_that_lie_together():
    points = torch.zeros(2, 9, 2)
    table = distances(points)
    assert torch.equal(lengths(table, local_search(table, kicks=3)), torch.zeros(2, dtype=torch.float64))


def test_the_same_seed_gives_the_same():
    assert torch.equal(uniform(3, 4, 7), uniform(3, 4, 7)) and not torch.equal(uniform(3, 4, 7), uniform(3, 4, 8))
    table = distances(uniform(3, 15, 0))
    assert torch.equal(local_search(table, seed=1), local_search(table, seed=1))


def test_lengths_by_hand():
    points = torch.tensor([[[0.0, 0], [0, 1], [1, 1], [1, 0]]])
    around, across = torch.tensor([[0, 1, 2, 3]]), torch.tensor([[0, 2, 1, 3]])
    for tours, length in ((around, 4.0), (across, 2 + 2 * 2 ** 0.5)):
        assert ways(points, tours).item() == pytest.approx(length)
        assert lengths(distances(points), tours).item() == pytest.approx(length)
    several = lengths(distances(points).expand(2, -1, -1)[None], torch.stack([around, across], 1))
    assert several.shape == (1, 2) and several[0, 0] == 4


def test_what_is_no_table_or_no_tour():
    table = distances(uniform(2, 5, 0))
    with pytest.raises(ShapeError, match="each of N=5 nodes once"):
        lengths(table, torch.zeros(2, 5, dtype=torch.int64))
    with pytest.raises(ShapeError, match=r"\(B, N, N\)"):
        two_opt(table[0], torch.arange(5))
    with pytest.raises(ShapeError, match="finite"):
        local_search(table / 0)
    with pytest.raises(ShapeError, match="symmetric"):
        exact(torch.arange(16.0).view(4, 4))
    with pytest.raises(ConfigError, match="kicks"):
        local_search(table, kicks=-1)


def test_farthest_insertion_and_2_opt_make_tours_that_are_short_and_never_longer():
    table = distances(uniform(20, 12, 0))
    inserted = farthest_insertion(table)
    mended = two_opt(table, inserted)
    best = lengths(table, torch.stack([exact(own) for own in table]))
    own, better = lengths(table, inserted), lengths(table, mended)
    assert (better <= own + 1e-9).all() and (best <= better + 1e-9).all()
    assert (better < own - 1e-9).any()
    assert own.mean() < 1.08 * best.mean()
    square = torch.tensor([[[0.0, 0.0], [1.0, 1.0], [0.0, 1.0], [1.0, 0.0], [0.4, 0.5]]])
    assert lengths(distances(square), farthest_insertion(distances(square))).item() == pytest.approx(4.28, abs=0.02)
    for nodes in (1, 2, 3):
        same = torch.zeros(2, nodes, nodes)
        assert lengths(same, two_opt(same, farthest_insertion(same))).tolist() == [0, 0]
