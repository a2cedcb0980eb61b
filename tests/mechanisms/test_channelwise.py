"""Aggregation channel by channel: a maximum over neighbors, the softmax whose limit it is, and scatter_reduce."""

import pytest
import torch

from structconv import STRUCTURE, ConfigError, Conv, Graph
from structconv.mechanisms import Channelwise
from structconv.weights import EyeBlocks
from tests.support.derivatives import same

F64, P = torch.float64, 5
MAXIMUM = Channelwise(P).masked(keep=STRUCTURE).normalize("hard")


@pytest.mark.parametrize("dtype", [F64, torch.float32])
@pytest.mark.parametrize("lead", [(), (3,)])
def test_a_maximum_with_its_gradient(lead, dtype):
    graph = Graph(torch.unique(torch.randint(0, 39, (2, 200)), dim=1), num_nodes=40)  # an edge twice is a tie
    x, index = torch.randn(*lead, 40, P, dtype=dtype, requires_grad=True), graph.target[:, None].expand(*lead, -1, P)
    expected = torch.zeros_like(x).scatter_reduce(-2, index, x[..., graph.source, :], "amax", include_self=False)
    same(Conv(MAXIMUM, P, P, weight=EyeBlocks(), bias=False)(x, structure=graph), expected, [x])


def test_an_output_without_neighbors_is_zero_and_negative_numbers_are_kept():
    graph, x = Graph(torch.tensor([[0, 1], [2, 2]]), num_nodes=3), -torch.ones(3, P, dtype=F64)
    y = Conv(MAXIMUM, P, P, weight=EyeBlocks(), bias=False)(x, structure=graph)
    assert torch.equal(y, torch.tensor([[0.0], [0.0], [-1.0]], dtype=F64).expand(3, P))


def test_the_number_of_channels_is_checked():
    with pytest.raises(ConfigError, match="Channelwise: channels must be those of x, P=10; got 5"):
        Conv(MAXIMUM, 10, 10, weight=EyeBlocks())
