"""Every kind of Theta against its dense tensor: slices and errors."""

import pytest
import torch

from structconv import Depthwise, Eye, Full, Grouped, LowRank, Separable, ShapeError, Shared
from structconv.weights import DepthwiseSeparable, HeadBlocks, WeightList
from structconv.weights.whole import as_weight
from tests.kernels.applied import numbers

K, P, Q = 4, 6, 6
THETAS = {
    "full": lambda: Full.of(numbers(K, P, Q)),
    "separable, few filters": lambda: Separable.of(numbers(K, 1), numbers(1, P, Q)),
    "separable, many filters": lambda: Separable.of(numbers(K, 9), numbers(9, P, Q)),
    "depthwise separable": lambda: DepthwiseSeparable.of(numbers(K, P), numbers(P, Q)),
    "low rank": lambda: LowRank.of(numbers(K, P, 2), numbers(K, 2, Q)),
    "low rank, grouped": lambda: LowRank.of(numbers(2, P, 3), numbers(K, 3, Q)),
    "depthwise": lambda: Depthwise.of(numbers(K, P, 1)),
    "grouped": lambda: Grouped.of(numbers(K, 3, 2, 2)),
    "shared": lambda: Shared.of(numbers(P, Q), K),
    "eye": lambda: Eye.of(K, P),
    "concatenated heads": lambda: HeadBlocks.of(numbers(K, P, 3)),
    "depthwise, multiplied": lambda: Depthwise.of(numbers(K, P, 2)),
    "concat": lambda: WeightList.of((Full.of(numbers(1, P, Q)), Eye.of(1, P), Shared.of(numbers(P, Q), 2))),
}


@pytest.fixture(params=THETAS, ids=list(THETAS))
def theta(request):
    return THETAS[request.param]()


def test_concatenated_heads_and_channels_of_a_multiplier():
    theta, x = HeadBlocks.of(numbers(K, P, 3)), numbers(2, 5, P)
    dense = theta.dense()
    assert dense.shape == (K, P, 12) and int((dense != 0).sum()) == K * P * 3
    torch.testing.assert_close(theta.join(theta.heads(x)), x @ dense.sum(0), rtol=0, atol=1e-12)
    theta = Depthwise.of(numbers(K, P, 2))
    assert theta.dense().shape == (K, P, 2 * P) and int((theta.dense() != 0).sum()) == K * P * 2
    assert theta.dense()[:, 1, 2:4].equal(theta.depthwise[:, 1])


def test_slices(theta):
    for start, stop in ((0, 4), (0, 2), (2, 4), (1, 3), (3, 4)):
        part = theta.slice(start, stop)
        assert part.size == stop - start
        torch.testing.assert_close(part.dense().double(), theta.dense().double()[start:stop], rtol=0, atol=1e-13)


@pytest.mark.parametrize(("build", "message"), [
    (lambda: Full.of(numbers(3, 4)), r"Full: theta must have shape \(K, P, Q\); got \(3, 4\)"),
    (lambda: Separable.of(numbers(4, 2), numbers(3, P, Q)), r"filters must have shape \(H=2, P, Q\); got \(3,"),
    (lambda: LowRank.of(numbers(3, P, 2), numbers(4, 2, Q)), "must divide K; got G=3, K=4"),
    (lambda: WeightList.of((Eye.of(1, 3), Eye.of(1, 4))), "share their channels"),
    (lambda: as_weight(numbers(3)), "must have shape"),
])
def test_errors(build, message):
    with pytest.raises(ShapeError, match=message):
        build()
