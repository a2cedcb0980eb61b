"""Segment reductions and the two softmaxes against loops, with nothing left in a group, NaN behind masks, 16 bits."""

import pytest
import torch
from torch.autograd import gradcheck, gradgradcheck

from structconv.errors import ShapeError
from structconv.primitives.segments import masked_softmax, segment_max, segment_softmax, segment_sum
from tests.support.drawn import drawn
from tests.support.errors import check_refused

F64 = torch.float64
NAN, INF = torch.nan, torch.inf
INDEX = torch.tensor([3, 0, 3, 1, 0, 3, 5, 0])  # segments 2 and 4 are empty
NUM = 6


def scores(*lead, dtype=F64):
    torch.manual_seed(0)
    return torch.randn(*lead, 8, dtype=dtype)


@pytest.mark.parametrize("index", [INDEX, INDEX.int()])
@pytest.mark.parametrize("lead", [(), (3,), (2, 3), (0,)])
def test_reductions_equal_loops(lead, index):
    values = scores(*lead)
    total, peak = segment_sum(values, index, NUM), segment_max(values, index, NUM)
    weights = segment_softmax(values, index, NUM)
    for result, function in ((total, segment_sum), (peak, segment_max), (weights, segment_softmax)):
        of_rows = function(torch.stack([values, 2 * values], -1), index, NUM, rows=True)
        assert of_rows.shape == (*result.shape, 2)
        torch.testing.assert_close(of_rows[..., 0], result, rtol=1e-13, atol=1e-13)
        torch.testing.assert_close(of_rows[..., 1], function(2 * values, index, NUM), rtol=1e-13, atol=1e-13)
    for n in range(NUM):
        mine = values[..., index == n]
        torch.testing.assert_close(total[..., n], mine.sum(-1), rtol=1e-13, atol=1e-13)
        if mine.shape[-1]:
            assert torch.equal(peak[..., n], mine.amax(-1))
            torch.testing.assert_close(weights[..., index == n], torch.softmax(mine, -1), rtol=1e-13, atol=1e-13)
        else:
            assert not peak[..., n].any() and not total[..., n].any()


def test_maximum_of_an_empty_segment_is_told():
    assert segment_max(scores(), INDEX, NUM, empty=-INF)[2] == -INF


def test_a_maximum_that_equals_what_an_empty_segment_has_keeps_its_gradient():
    values = torch.tensor([0.0, -1, 0, 0, 2], dtype=torch.float64, requires_grad=True)
    segment_max(values, torch.tensor([0, 0, 1, 1, 3]), 4).sum().backward()
    assert values.grad.tolist() == [1, 0, 0.5, 0.5, 1]


def test_no_edges_and_no_segments():
    none = torch.zeros(0, dtype=torch.int64)
    for function in (segment_sum, segment_max):
        assert function(torch.ones(2, 0), none, 3).eq(torch.zeros(2, 3)).all()
        assert function(torch.ones(2, 0), none, 0).shape == (2, 0)
    assert segment_softmax(torch.ones(2, 0), none, 3).shape == (2, 0)
    assert masked_softmax(torch.ones(2, 0), None, -1).shape == (2, 0)
    assert masked_softmax(torch.ones(0, 2), torch.ones(0, 2, dtype=torch.bool), 0).shape == (0, 2)


def test_scores_of_any_magnitude():
    weights = segment_softmax(torch.tensor([1e4, 1e4 - 1, -1e4, -1e4]), torch.tensor([0, 0, 1, 1]), 2)
    torch.testing.assert_close(weights, torch.tensor([0.7310586, 0.2689414, 0.5, 0.5]))


def test_masked_entries_have_no_weight_no_gradient_and_no_influence():
    keep = torch.tensor([True, False, False, False, True, True, False, True])
    s = scores(2)
    s[:, ~keep] = torch.tensor([NAN, INF, NAN, -INF], dtype=F64)
    s.requires_grad_(True)
    weights = segment_softmax(s, INDEX, NUM, keep=keep)
    assert weights.isfinite().all() and not weights[:, ~keep].any()
    expected = segment_softmax(s.detach()[:, keep], INDEX[keep], NUM)
    torch.testing.assert_close(weights[:, keep], expected, rtol=1e-13, atol=1e-13)
    behind_mask = torch.where(keep, torch.arange(8.0, dtype=F64), NAN)
    (grad,) = torch.autograd.grad(weights, s, behind_mask.expand(2, 8))
    assert grad.isfinite().all() and not grad[:, ~keep].any() and grad[:, keep].any()


def test_minus_infinity_is_a_mask():
    s = scores()
    s[[1, 4, 7, 0]] = -INF
    s.requires_grad_(True)
    weights = segment_softmax(s, INDEX, NUM)
    assert not weights[[1, 4, 7, 0]].any() and weights[[2, 5]].sum().item() == pytest.approx(1)
    weights.square().sum().backward()
    assert s.grad.isfinite().all() and not s.grad[[1, 4, 7, 0]].any()


def test_nan_that_nobody_masked_is_seen_in_its_segment_only():
    s = scores()
    s[0] = NAN
    weights = segment_softmax(s, INDEX, NUM)
    assert weights[INDEX == 3].isnan().all() and weights[INDEX != 3].isfinite().all()


def test_derivatives():
    s = scores(2).requires_grad_(True)
    keep = torch.tensor([True, False, True, True, False, True, True, False])
    for function in (lambda s: segment_sum(s, INDEX, NUM), lambda s: segment_max(s, INDEX, NUM),
                     lambda s: segment_softmax(s, INDEX, NUM), lambda s: segment_softmax(s, INDEX, NUM, keep=keep),
                     lambda s: segment_sum(s.mT, INDEX, NUM, rows=True),
                     lambda s: segment_softmax(s.mT, INDEX, NUM, rows=True),
                     lambda s: masked_softmax(s, keep, -1), lambda s: masked_softmax(s, keep, 0),
                     lambda s: masked_softmax(s, None, 0)):
        assert gradcheck(function, (s,), fast_mode=True)
        assert gradgradcheck(function, (s,), fast_mode=True)


def test_dense_softmax_equals_softmax_of_what_is_kept():
    s, keep = torch.randn(3, 4, 5, dtype=F64), torch.rand(4, 5) > 0.4
    keep[:, 2] = False
    weights = masked_softmax(s, keep, -2)
    assert not weights[..., 2].any() and not weights[:, ~keep].any()
    for n in (0, 1, 3, 4):
        torch.testing.assert_close(weights[:, keep[:, n], n], torch.softmax(s[:, keep[:, n], n], -1))
    torch.testing.assert_close(masked_softmax(s, None, -2), torch.softmax(s, -2))
    assert masked_softmax(s[0], keep.expand(2, 4, 5), -2).shape == (2, 4, 5)


def test_dense_masks_do_not_leak():
    keep = torch.tensor([[True, False, False], [True, True, False]])
    s = torch.tensor([[1.0, NAN, NAN], [2.0, 3.0, INF]], dtype=F64, requires_grad=True)
    weights = masked_softmax(s, keep, 0)
    assert weights.isfinite().all() and not weights[~keep].any()
    (grad,) = torch.autograd.grad(weights, s, torch.where(keep, torch.eye(2, 3, dtype=F64), NAN))
    assert grad.isfinite().all() and not grad[~keep].any() and grad[:, 0].all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sixteen_bits_accumulate_in_float32(dtype):
    ones = torch.ones(3000, dtype=dtype, requires_grad=True)
    index = torch.zeros(3000, dtype=torch.int64)
    total = segment_sum(ones, index, 1)
    assert total.dtype == dtype and total.item() == pytest.approx(3000, rel=torch.finfo(dtype).eps)
    weights = segment_softmax(ones, index, 1)
    assert weights.dtype == dtype
    torch.testing.assert_close(weights.float(), torch.full((3000,), 1 / 3000), rtol=torch.finfo(dtype).eps, atol=1e-7)
    dense = masked_softmax(ones, None, 0)
    assert dense.dtype == dtype and torch.equal(dense, weights)
    dense[0].backward()
    assert ones.grad.dtype == dtype


@pytest.mark.parametrize("dense", drawn([False, True], 2))
def test_compiles_whole(dense):
    torch._dynamo.reset()

    def loss(s, keep, index):
        weights = masked_softmax(s, keep, -1) if dense else segment_softmax(s, index, 9, keep=keep)
        return (weights * s.detach().cos()).sum()

    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager", dynamic=True)
    for edges in (20, 31):
        s = torch.randn(2, edges, dtype=F64, requires_grad=True)
        keep, index = torch.rand(edges) > 0.3, torch.randint(9, (edges,))
        got, expected = compiled(s, keep, index), loss(s, keep, index)
        torch.testing.assert_close(got, expected)
        torch.testing.assert_close(torch.autograd.grad(got, s), torch.autograd.grad(expected, s))


def test_sizes_that_do_not_fit():
    check_refused(
        (ShapeError, "index", lambda: segment_sum(torch.ones(3), INDEX, NUM)),
        (ShapeError, "keep", lambda: segment_softmax(torch.ones(8), INDEX, NUM, keep=torch.ones(7, dtype=torch.bool))),
        (ShapeError, "keep", lambda: masked_softmax(torch.ones(8), torch.ones(7, dtype=torch.bool), 0)))


@pytest.mark.parametrize("spelled", [False, True])
def test_a_nan_among_those_that_are_kept_is_no_affair_of_the_others(spelled):
    scores = torch.tensor([[1.0, torch.nan, 2.0, 3.0]], dtype=torch.float64)
    keep = torch.tensor([True, True, False, True])
    index = torch.tensor([0, 0, 0, 1])

    def masked(t):
        return masked_softmax(t, keep, -1)

    def segments(t):
        return segment_softmax(t, index, 2, keep=keep)

    for softmax, other in ((masked, torch.nan), (segments, 1.0)):
        weights = torch.func.vmap(softmax)(scores) if spelled else softmax(scores)
        expected = torch.tensor([[torch.nan, torch.nan, 0.0, other]], dtype=torch.float64)
        torch.testing.assert_close(weights, expected, equal_nan=True)
