"""A window with global entries: one softmax over both lists, each pair once, and no table of all pairs."""

import pytest
import torch

from structconv import Causal, Conv, DotProduct, LowRank, Padding, Window
from structconv.structures import Global
from tests.kernels.applied import LargestTensor
from tests.support.derivatives import same

F64 = torch.float64
DOT = DotProduct(heads=2, dim=8).scaled()


def layer(mask, dtype=F64):
    torch.manual_seed(0)
    return Conv(DOT.masked(keep=mask).softmax(), 8, 8, weight=LowRank(8)).to(dtype)


def looped(of, x, contains):
    """Attention output by output, each over the inputs that `contains` gives it."""
    query, key = (getattr(of.mechanism.mechanisms()[0], name).weight for name in ("query", "key"))
    y = []
    for n in range(x.shape[-2]):
        near = [m for m in range(x.shape[-2]) if contains(m, n)]
        heads = 0
        for k in range(2):
            rows = slice(8 * k, 8 * k + 8)
            scores = (x[near] @ key[rows].mT) @ (query[rows] @ x[n]) / 8 ** 0.5
            heads = heads + scores.softmax(0) @ x[near] @ of.weight().value[k] @ of.weight().output[k]
        y.append(heads + of.bias)
    return torch.stack(y)


@pytest.mark.parametrize("entries", [1, (0, 3, 11), 20])
def test_global_entries_see_all_and_are_seen_by_all(entries):
    among = set(range(entries)) if isinstance(entries, int) else set(entries)
    of, x = layer(Window(2) | Global(entries)), torch.randn(12, 8, dtype=F64, requires_grad=True)
    expected = looped(of, x, lambda m, n: abs(m - n) <= 2 or m in among or n in among)
    same(of(x), expected, [x, *of.parameters()])


def test_causal_and_padded():
    x, kept = torch.randn(12, 8, dtype=F64), torch.arange(12) < 9
    of = layer((Window(2) | Global(1)) & Causal() & Padding(kept))
    expected = looped(of, x, lambda m, n: m <= n and m < 9 and (n - m <= 2 or m == 0))
    torch.testing.assert_close(of(x), expected)


def test_no_table_of_all_pairs_is_held():
    length, width = 2048, 16
    of, x = layer(Window(4) | Global(2), torch.float32), torch.randn(length, 8, requires_grad=True)
    pairs = (Window(4) | Global(2)).edges(length, length).num_edges
    assert pairs == 9 * length - 20 + 4 * length - 4 - 18
    with LargestTensor() as largest:
        of(x).square().sum().backward()
    assert largest.elements <= 2 * pairs * width < length * length
