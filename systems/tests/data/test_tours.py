"""Shortest tours: two ways to find them agree with all permutations."""

import itertools

import pytest
import torch

from structconv.errors import ConfigError, ShapeError
from structconv_systems.data import tours


def of_all(table):
    """The least length of each of (B, N, N), by all permutations."""
    every = torch.tensor(list(itertools.permutations(range(table.shape[-1]))))
    return torch.stack([tours.lengths(own.expand(len(every), -1, -1), every).min() for own in table])


@pytest.mark.parametrize("nodes", [1, 2, 3, 4, 7])
def test_all_find_the_best_of_all_permutations(nodes):
    table = tours.distances(tours.uniform(5, nodes, 0))
    known = of_all(table)
    for actual in (tours.local_search(table, kicks=10), torch.stack([tours.exact(own) for own in table])):
        torch.testing.assert_close(tours.lengths(table, actual), known)


def test_local_search_is_within_a_percent_of_twenty_nodes_and_kicks_help():
    table = tours.distances(tours.uniform(100, 20, 2))
    once, often = (tours.lengths(table, tours.local_search(table, kicks=kicks)) for kicks in (0, 30))
    assert (often <= once + 1e-12).all() and often.mean() < once.mean()
    proven = torch.stack([tours.lengths(table[i], tours.exact(table[i])) for i in range(3)])
    assert (often[:3] >= proven - 1e-9).all() and (often[:3] / proven).mean() < 1.01


def test_local_search_ends_on_points_that_lie_together():
    points = torch.zeros(2, 9, 2)
    table = tours.distances(points)
    assert torch.equal(tours.lengths(table, tours.local_search(table, kicks=3)), torch.zeros(2, dtype=torch.float64))


def test_the_same_seed_gives_the_same():
    first, again, other = (tours.uniform(3, 4, seed) for seed in (7, 7, 8))
    assert torch.equal(first, again) and not torch.equal(first, other)
    table = tours.distances(tours.uniform(3, 15, 0))
    assert torch.equal(tours.local_search(table, seed=1), tours.local_search(table, seed=1))


def test_lengths_by_hand():
    points = torch.tensor([[[0.0, 0], [0, 1], [1, 1], [1, 0]]])
    around, across = torch.tensor([[0, 1, 2, 3]]), torch.tensor([[0, 2, 1, 3]])
    for order, length in ((around, 4.0), (across, 2 + 2 * 2 ** 0.5)):
        assert tours.ways(points, order).item() == pytest.approx(length)
        assert tours.lengths(tours.distances(points), order).item() == pytest.approx(length)
    several = tours.lengths(tours.distances(points).expand(2, -1, -1)[None], torch.stack([around, across], 1))
    assert several.shape == (1, 2) and several[0, 0] == 4


def test_what_is_no_table_or_no_tour():
    table = tours.distances(tours.uniform(2, 5, 0))
    with pytest.raises(ShapeError, match="each of N=5 nodes once"):
        tours.lengths(table, torch.zeros(2, 5, dtype=torch.int64))
    with pytest.raises(ShapeError, match=r"\(B, N, N\)"):
        tours.two_opt(table[0], torch.arange(5))
    with pytest.raises(ShapeError, match="finite"):
        tours.local_search(table / 0)
    with pytest.raises(ShapeError, match="symmetric"):
        tours.exact(torch.arange(16.0).view(4, 4))
    with pytest.raises(ConfigError, match="kicks"):
        tours.local_search(table, kicks=-1)


def test_farthest_insertion_and_2_opt_make_tours_that_are_short_and_never_longer():
    table = tours.distances(tours.uniform(20, 12, 0))
    inserted = tours.farthest_insertion(table)
    mended = tours.two_opt(table, inserted)
    best = tours.lengths(table, torch.stack([tours.exact(own) for own in table]))
    own, better = tours.lengths(table, inserted), tours.lengths(table, mended)
    assert (better <= own + 1e-9).all() and (best <= better + 1e-9).all()
    assert (better < own - 1e-9).any()
    assert own.mean() < 1.08 * best.mean()
    square = tours.distances(torch.tensor([[[0.0, 0.0], [1.0, 1.0], [0.0, 1.0], [1.0, 0.0], [0.4, 0.5]]]))
    assert tours.lengths(square, tours.farthest_insertion(square)).item() == pytest.approx(4.28, abs=0.02)
    for nodes in (1, 2, 3):
        same = torch.zeros(2, nodes, nodes)
        assert tours.lengths(same, tours.two_opt(same, tours.farthest_insertion(same))).tolist() == [0, 0]
