"""`Grid`: sizes, coordinates and the pixel graph."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from structconv import Grid, StructureError


def test_shape_and_repr():
    assert Grid(10) == Grid((10,)) == Grid([10]) and hash(Grid(10)) == hash(Grid((10,)))
    assert Grid((2, 3)) != Grid((2, 3), periodic=True)
    assert (Grid((2, 3, 4)).num_entries, Grid((2, 3, 4)).ndim, Grid((2, 3, 4)).strides) == (24, 3, (12, 4, 1))
    assert repr(Grid((28, 28))) == "Grid((28, 28))" and repr(Grid(5, periodic=True)) == "Grid((5,), periodic=True)"


@pytest.mark.parametrize("shape, got", [((2, -1), "-1"), (2.5, "2.5"), ((3, "a"), "'a'"), ((), r"\(\)"),
                                        (True, "True")])
def test_bad_shapes(shape, got):
    with pytest.raises(StructureError, match=f"Grid: .*; got {got}"):
        Grid(shape)


@pytest.mark.parametrize("shape", [(4,), (2, 3), (2, 1, 3), (0,), (3, 0)])
def test_coordinates_are_row_major(shape):
    grid = Grid(shape)
    expected = torch.tensor(list(itertools.product(*map(range, shape)))).reshape(-1, len(shape)).long()
    assert torch.equal(grid.coordinates(), expected)
    assert torch.equal(grid.ravel(grid.coordinates()), torch.arange(grid.num_entries))


@settings(max_examples=40, deadline=None)
@given(shape=st.lists(st.integers(1, 4), min_size=1, max_size=3), periodic=st.booleans(), diagonal=st.booleans())
def test_pixel_graph_by_brute_force(shape, periodic, diagonal):
    grid = Grid(shape, periodic=periodic)
    points = list(itertools.product(*map(range, shape)))
    expected = set()
    for (m, p), step in itertools.product(enumerate(points), itertools.product((-1, 0, 1), repeat=len(shape))):
        if not any(step) or (not diagonal and sum(map(abs, step)) > 1):
            continue
        q = tuple((a + b) % s if periodic else a + b for a, b, s in zip(p, step, shape, strict=True))
        if q in points and q != p:
            expected.add((m, points.index(q)))
    edges = list(zip(*grid.graph(diagonal=diagonal).edge_index.tolist(), strict=True))
    assert edges == sorted(expected)


def test_pixel_graph_is_remembered_and_may_be_empty():
    grid = Grid((3, 3))
    assert grid.graph() is grid.graph() and grid.graph() is not grid.graph(diagonal=True)
    assert Grid((0, 3)).graph().num_edges == 0 and Grid(1).graph().num_edges == 0
