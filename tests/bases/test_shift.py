import itertools

import pytest
import torch
from torch.nn import functional

from structconv.bases import Pooling, Shift, ShiftTransposed, cuboid_offsets
from structconv.bases.shift import PADDINGS
from structconv.errors import ConfigError, ShapeError, StructureError
from structconv.structures import Grid, GridBatch
from structconv.testing import CHECKS, Specimen
from tests.support.errors import check_refused

F64 = torch.float64
GRIDS = [Grid(7), Grid((4, 5)), Grid((3, 2, 4), periodic=True), Grid(1), Grid(0), Grid((0, 3)),
         GridBatch((Grid(3), Grid(5), Grid(0))), GridBatch((Grid((3, 2)), Grid((4, 4))))]


def axes(grid):
    return (grid.grids[0] if isinstance(grid, GridBatch) else grid).ndim


@pytest.mark.parametrize("padding", PADDINGS)
@pytest.mark.parametrize("grid", GRIDS, ids=repr)
def test_laws(grid, padding):
    generator = torch.Generator().manual_seed(3)
    offsets = [tuple(torch.randint(-3, 4, (axes(grid),), generator=generator).tolist()) for _ in range(3)]
    for stride, grow in ((1, None), (2, None)) if padding == "none" else ((1, 2), (2, -1), (2, None)):
        basis = Shift(grid, offsets, padding, stride, grow)
        specimen = Specimen("shift", lambda basis=basis, grow=grow: basis if grow is None else Pooling(basis, 0.25))
        for name in ("reference", "adjoint", "entries"):
            CHECKS[name](specimen)


def by_definition(shape, offset, stride, padding):
    """One shift matrix, entry by entry, from the rule of the padding written for a single coordinate."""
    def read(position, size):
        if padding == "circular":
            return position % size
        if padding == "replicate":
            return min(max(position, 0), size - 1)
        while padding == "reflect" and not 0 <= position < size:
            position = -position if position < 0 else 2 * (size - 1) - position
        return position if 0 <= position < size else None

    outputs = [-(-size // stride) for size in shape]
    inputs = list(itertools.product(*map(range, shape)))
    a = torch.zeros(len(inputs), len(list(itertools.product(*map(range, outputs)))), dtype=F64)
    for column, n in enumerate(itertools.product(*map(range, outputs))):
        m = tuple(read(stride * i - d, size) for i, d, size in zip(n, offset, shape, strict=True))
        if None not in m:
            a[inputs.index(m), column] = 1
    return a


@pytest.mark.parametrize("padding", ["zeros", "circular", "reflect", "replicate"])
@pytest.mark.parametrize("stride", [1, 2, 3])
def test_definition_one(padding, stride):
    for shape, offsets in (((6,), [(0,), (4,), (-9,)]), ((3, 4), [(1, -2), (-3, 5)])):
        basis = Shift(Grid(shape), offsets, padding, stride)
        expected = torch.stack([by_definition(shape, offset, stride, padding) for offset in offsets])
        assert torch.equal(basis.dense(F64), expected)


def test_convolution_shifts_forward():
    x = torch.arange(5.0).unsqueeze(-1)
    assert Shift(Grid(5), [2]).analysis(x).flatten().tolist() == [0, 0, 0, 1, 2]
    assert Shift(Grid(5, periodic=True), [2]).analysis(x).flatten().tolist() == [3, 4, 0, 1, 2]
    assert Shift(Grid(5), [-1, 2], "none").analysis(x).squeeze(-1).tolist() == [[3, 4], [0, 1]]


def test_a_cuboid_is_recognized_in_any_order_and_nothing_else_is():
    offsets = cuboid_offsets((3, 2), (1, 3), (1, 0))
    order = [4, 0, 5, 1, 3, 2]
    spec = Shift(Grid((5, 6)), [offsets[i] for i in order]).as_cuboid()
    assert [order[k] for k in spec.permutation] == list(range(6))
    assert spec.dilation == (1, 3)
    assert (spec.pad_low, spec.pad_high) == ((1, 0), (1, 3))
    assert Shift(Grid((5, 6)), [(0, 0), (1, 1)]).as_cuboid() is None
    assert Shift(Grid(9), [0, 1, 3]).as_cuboid() is None
    assert Shift(Grid(9), [1, 1]).as_cuboid() is None
    assert Shift(Grid(2), [2, 1, 0], "reflect").as_cuboid() is None
    assert Shift(Grid(9), [9, 10], "circular").as_cuboid() is None


def test_offsets_of_a_cuboid():
    assert cuboid_offsets(3, 2, 1) == ((1,), (-1,), (-3,))
    assert cuboid_offsets((2, 2)) == ((0, 0), (0, -1), (-1, 0), (-1, -1))


def test_transposes():
    same = Shift(Grid(5), [1, -2])
    assert isinstance(same.transpose(), Shift)
    assert same.transpose().offsets == ((-1,), (2,))
    strided = Shift(Grid(6), [0, -1], "zeros", 2)
    assert isinstance(strided.transpose(), ShiftTransposed)
    assert strided.transpose().transpose() is strided
    x = torch.randn(1, 1, 3, dtype=F64)
    up = strided.transpose().synthesis(x.mT.expand(2, 3, 1) * torch.tensor([2.0, 3.0], dtype=F64).view(2, 1, 1))
    expected = functional.conv_transpose1d(x, torch.tensor([[[2.0, 3.0]]], dtype=F64), stride=2)
    torch.testing.assert_close(up.flatten(), expected.flatten(), rtol=0, atol=1e-12)


def test_absent_pairs_leak_nothing():
    x = torch.tensor([[torch.nan], [1.0], [2.0]])
    assert Shift(Grid(3), [-1]).analysis(x).flatten().tolist() == [1, 2, 0]
    assert not Shift(Grid(3), [3]).analysis(x).any()


def test_errors_name_what_came():
    check_refused(
        (ConfigError, "2 of them", lambda: Shift(Grid((3, 3)), [(1,)])),
        (ConfigError, "empty", lambda: Shift(Grid(3), [])),
        (ConfigError, "sequence", lambda: Shift(Grid(3), 2)),
        (ConfigError, "'mirror'", lambda: Shift(Grid(3), [1], "mirror")),
        (ConfigError, "stride", lambda: Shift(Grid(3), [1], stride=0)),
        (ConfigError, "grow", lambda: Shift(Grid(3), [0, 1], "none", grow=0)),
        (ConfigError, "each offset", lambda: Shift(Grid(3), [0.5])),
        (StructureError, "one number of axes", lambda: Shift(GridBatch((Grid(3), Grid((3, 3)))), [1])),
        (ShapeError, "M=3", lambda: Shift(Grid(3), [1]).analysis(torch.zeros(4, 1))))


@pytest.mark.parametrize("padding", ["zeros", "none", "circular"])
def test_pairs_on_the_meta_device_are_as_many(padding):
    edges, expected = (Shift(Grid(6), [0, 1, 2], padding, 2, device=device).pattern().edge_index
                       for device in ("meta", "cpu"))
    assert edges.is_meta and edges.shape == expected.shape and edges.dtype == expected.dtype
