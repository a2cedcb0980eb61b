"""A window with global entries holds no table of all pairs."""

import torch

from structconv import Conv, DotProduct, LowRank, Window
from structconv.structures import Global
from tests.kernels.applied import LargestTensor


def test_no_table_of_all_pairs_is_held():
    length, width, mask = 2048, 16, Window(4) | Global(2)
    x = torch.randn(length, 8, requires_grad=True)
    layer = Conv(DotProduct(heads=2, dim=8).scaled().masked(keep=mask).softmax(), 8, 8, weight=LowRank(8))
    pairs = mask.edges(length, length).num_edges
    assert pairs == 9 * length - 20 + 4 * length - 4 - 18
    with LargestTensor() as largest:
        layer(x).square().sum().backward()
    assert largest.elements <= 2 * pairs * width < length * length
