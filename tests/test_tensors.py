"""The tensor vocabulary against plain loops over multi-indices."""

import itertools
import math

import pytest
import torch

from structconv.errors import ConfigError, ShapeError, StructureError
from structconv.tensors import compose, flatten, outer, ravel, take, unflatten, unravel

F64 = torch.float64
SHAPES = [(), (1,), (5,), (2, 3), (3, 1, 4), (2, 3, 2, 2)]


def indices(shape):
    return list(itertools.product(*map(range, shape)))


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("shape", SHAPES)
def test_numbering_is_row_major_and_invertible(shape, dtype):
    every = torch.tensor(indices(shape), dtype=dtype).reshape(math.prod(shape), len(shape))
    numbers = ravel(every, shape)
    assert numbers.dtype == dtype and numbers.tolist() == list(range(math.prod(shape)))
    assert torch.equal(unravel(numbers, shape), every)
    batched = every.expand(2, *every.shape)
    assert torch.equal(ravel(batched, shape), numbers.expand(2, -1))
    assert torch.equal(unravel(numbers.expand(2, -1), shape), batched)


def test_shapes_without_entries():
    assert ravel(torch.zeros(0, 2, dtype=torch.int64), (3, 0)).shape == (0,)
    assert unravel(torch.zeros(0, dtype=torch.int64), (3, 0)).shape == (0, 2)


@pytest.mark.parametrize(("call", "error"), [
    (lambda: ravel(torch.tensor([0, 3]), (2, 3)), StructureError),
    (lambda: ravel(torch.tensor([-1, 0]), (2, 3)), StructureError),
    (lambda: unravel(torch.tensor(6), (2, 3)), StructureError),
    (lambda: unravel(torch.tensor(-1), (2, 3)), StructureError),
    (lambda: ravel(torch.tensor([0]), (2, 3)), ShapeError),
    (lambda: unravel(torch.tensor(0.0), (2, 3)), ShapeError),
    (lambda: take(torch.ones(2, 3), (0, 0), (1, 1)), ConfigError),
    (lambda: take(torch.ones(2, 3), (2,), (0,)), ConfigError),
    (lambda: take(torch.ones(2, 3), (1,), (3,)), StructureError),
    (lambda: flatten(torch.ones(2, 3), [(0,), (-2,)]), ConfigError),
    (lambda: flatten(torch.ones(2, 3), [(0,)], bijections={1: torch.arange(3)}), ConfigError),
    (lambda: flatten(torch.ones(2, 3), [(0, 1)], bijections={0: torch.zeros(6, dtype=torch.int64)}), StructureError),
    (lambda: flatten(torch.ones(2, 3), [(0, 1)], bijections={0: torch.arange(5)}), StructureError),
    (lambda: unflatten(torch.ones(5), (2, 3), [(0, 1)]), ShapeError),
    (lambda: outer(torch.ones(2), torch.ones(3), batch=1), ShapeError),
    (lambda: outer(torch.ones(2), torch.ones(3), batch=2), ShapeError),
    (lambda: compose(torch.ones(2, 3), torch.ones(3, 2)), ShapeError),
    (lambda: compose(torch.ones(2), torch.ones(2), axes=2), ShapeError),
])
def test_what_does_not_fit(call, error):
    with pytest.raises(error, match=r"; got "):
        call()


def test_slices_are_those_of_python():
    a = torch.randn(2, 3, 4, 5, dtype=F64)
    assert torch.equal(take(a, (2, 0), (3, 1)), a[1, :, 3])
    assert torch.equal(take(a, (), ()), a)
    assert torch.equal(take(a, range(4), (1, 2, 3, 4)), a[1, 2, 3, 4])
    batch = torch.tensor([[[0, 1], [3, 0]], [[2, 1], [1, 1]]])
    expected = torch.stack([torch.stack([a[j, :, i] for i, j in row.tolist()]) for row in batch])
    assert torch.equal(take(a, (-2, 0), batch), expected)


def loop_flatten(a, groups, bijections, batch):
    """One assignment an entry."""
    rank = a.dim()
    shape = [a.shape[d] for d in batch] + [math.prod([a.shape[d] for d in g]) for g in groups]
    b = torch.zeros(shape, dtype=a.dtype)
    for index in indices(a.shape):
        target = [index[d] for d in batch]
        for place, group in enumerate(groups):
            number = 0
            for d in group:
                number = number * a.shape[d % rank] + index[d]
            target.append(int(bijections[place][number]) if place in bijections else number)
        b[tuple(target)] = a[index]
    return b


@pytest.mark.parametrize(("groups", "batch"), [
    ([(0, 1, 2, 3)], []), ([(3, 1), (0, 2)], []), ([(2, 0)], [1, 3]), ([(1,), (), (3,)], [0, 2]), ([], [0, 1, 2, 3])])
def test_flattening_equals_a_loop_and_is_undone(groups, batch):
    a = torch.randn(2, 3, 4, 5, dtype=F64)
    sizes = [math.prod([a.shape[d] for d in g]) for g in groups]
    for bijections in ({}, {i: torch.randperm(size) for i, size in enumerate(sizes)}):
        b = flatten(a, groups, bijections=bijections)
        assert torch.equal(b, loop_flatten(a, groups, bijections, batch))
        assert torch.equal(unflatten(b, a.shape, groups, bijections=bijections), a)
    if not groups:
        return
    negative = [tuple(d - 4 for d in g) for g in groups]
    assert torch.equal(flatten(a, negative), flatten(a, groups))


@pytest.mark.parametrize(("i", "j"), [((), ()), ((2,), ()), ((2, 3), (4,)), ((), (2, 2)), ((0,), (3,))])
def test_outer_product_equals_a_loop(i, j):
    a, b = torch.randn(i, dtype=F64), torch.randn(j, dtype=F64)
    got = outer(a, b)
    assert got.shape == (*i, *j)
    for left, right in itertools.product(indices(i), indices(j)):
        assert got[left + right] == a[left] * b[right]


@pytest.mark.parametrize(("k", "i", "j"), [
    ((), (), ()), ((3,), (2,), (4,)), ((3, 1), (2, 2), (2,)), ((3, 2), (), ()), ((), (2,), (3, 2)),
    ((0,), (2,), (3,))])
def test_composition_is_equation_5(k, i, j):
    a, b = torch.randn((*k, *i), dtype=F64), torch.randn((*k, *j), dtype=F64)
    got = compose(a, b, axes=len(k))
    expected = torch.zeros((*i, *j), dtype=F64)
    for middle in indices(k):
        expected += outer(a[middle], b[middle])
    torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12)


def test_shared_axes_broadcast():
    a, b = torch.randn(4, 1, 3, 2, dtype=F64), torch.randn(1, 5, 3, 2, dtype=F64)
    composed, product = compose(a, b, batch=2), outer(a, b, batch=2)
    assert composed.shape == (4, 5, 2, 2) and product.shape == (4, 5, 3, 2, 3, 2)
    for s, t in itertools.product(range(4), range(5)):
        torch.testing.assert_close(composed[s, t], compose(a[s, 0], b[0, t]))
        torch.testing.assert_close(product[s, t], outer(a[s, 0], b[0, t]))
