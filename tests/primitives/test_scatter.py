"""`scatter_rows`: groups of rows in any order, against the same by torch in float64."""

import pytest
import torch

from structconv.primitives.native.dispatch import kernels
from structconv.primitives.native.layer import scatter_rows
from structconv.primitives.segments import segment_max, segment_softmax, segment_sum

pytestmark = pytest.mark.skipif(kernels() is None, reason="no native kernels")
KINDS = ("sum", "mean", "max", "min", "softmax")


def composed(kind, groups):
    """Return the same function by torch's differentiable operators."""
    def run(x, index):
        if kind == "softmax":
            return segment_softmax(x.mT, index, groups).mT
        if kind in ("max", "min"):
            sign = 1 if kind == "max" else -1
            return sign * segment_max(sign * x, index, groups, rows=True)
        counts = torch.bincount(index, minlength=groups).clamp(min=1) if kind == "mean" else torch.ones(groups)
        return segment_sum(x.mT, index, groups).mT / counts.to(x.dtype).unsqueeze(-1)

    return run


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("rows", "groups", "channels"), [
    (9, 4, 1), (40, 3, 17), (33, 60, 64), (1, 1, 5), (0, 3, 4), (5, 2, 0), (0, 0, 2), (9000, 7, 40)])
def test_values_and_derivatives(kind, rows, groups, channels):
    generator = torch.Generator().manual_seed(rows)
    x = (torch.randn(rows, channels, generator=generator) * 2).round() / 2  # with equal numbers
    index, weights = torch.randint(max(groups, 1), (rows,), generator=generator), None
    found = []
    for dtype in (torch.float32, torch.float64):
        own = x.to(dtype).requires_grad_()
        by_torch = composed(kind, groups)
        y = (scatter_rows(own, index, groups, kind, by_torch) if dtype is torch.float32 and x.numel() else
             by_torch(own, index))
        weights = torch.randn(y.shape, generator=generator, dtype=torch.float64) if weights is None else weights
        (gradient,) = torch.autograd.grad((y * weights.to(dtype)).sum(), own, create_graph=kind == "softmax")
        second = torch.autograd.grad(gradient.square().sum(), own) if kind == "softmax" else ()
        found.append([t.double() for t in (y, gradient, *second)])
    torch.testing.assert_close(*found, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_groups_do_not_reach_each_other(kind):
    x = torch.randn(6, 3)
    index = torch.tensor([1, 0, 1, 2, 0, 2])
    ours, others = scatter_rows(x, index, 4, kind, composed(kind, 4)), index == 2
    for wrong in (torch.nan, torch.inf, -torch.inf):
        x[others] = wrong
        y = scatter_rows(x, index, 4, kind, composed(kind, 4))
        kept = ~others if kind == "softmax" else torch.tensor([True, True, False, True])
        assert torch.equal(y[kept], ours[kept])
    if kind == "softmax":  # all scores of the group are -inf
        assert not y[others].any()


@pytest.mark.parametrize("kind", KINDS)
def test_results_do_not_depend_on_threads(kind):
    x, index = torch.randn(9000, 48), torch.randint(50, (9000,))
    before, found = torch.get_num_threads(), []
    for threads in (1, 2):
        torch.set_num_threads(threads)
        own = x.clone().requires_grad_()
        y = scatter_rows(own, index, 50, kind, composed(kind, 50))
        found.append([y, *torch.autograd.grad(y.square().sum(), own)])
    torch.set_num_threads(before)
    torch.testing.assert_close(*found, rtol=0, atol=0)


@pytest.mark.parametrize("index", [[0, 3], [-1, 0], [0, 1, 2]])
def test_an_index_of_no_group_is_an_error(index):
    with pytest.raises(ValueError, match="index must"):
        scatter_rows(torch.ones(2, 3), torch.tensor(index), 3, "sum", composed("sum", 3))
