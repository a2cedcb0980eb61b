"""`layer_bases`: what each layer of a model applied in a call, whatever the layer, and nothing stays behind."""

import pytest
import torch
from torch import nn

from structconv import Conv, GATConv, GCNConv, Graph, MultiheadAttention, Shifts, StructureError
from structconv.analysis.layers import layer_bases
from structconv_systems.models.transformer import Transformer
from tests.support.layers import drawn, planned

PLANNED = planned()


class Twice(nn.Module):
    """Calls one layer two times and another with a structure by name."""

    def __init__(self):
        super().__init__()
        self.attention, self.graph = MultiheadAttention(8, 2), GCNConv(8, 8)

    def forward(self, x, graph):
        return self.graph(self.attention(self.attention(x)), structure=graph)


def test_a_basis_for_each_call_by_the_layers_name():
    x, graph, model = torch.randn(4, 8), Graph(torch.tensor([[0, 1, 2], [1, 2, 3]]), num_nodes=4), Twice()
    actual = layer_bases(model, x, graph=graph)
    assert {name: len(bases) for name, bases in actual.items()} == {"attention": 2, "graph": 1}
    between = model.attention(x)
    torch.testing.assert_close(actual["attention"][0].dense(), model.attention.basis(x).dense())
    torch.testing.assert_close(actual["attention"][1].dense(), model.attention.basis(between).dense())
    torch.testing.assert_close(actual["graph"][0].dense(), model.graph.basis(between, structure=graph).dense())


@pytest.mark.parametrize("layer", [Conv(Shifts([0, 1]), 8, 5), MultiheadAttention(8, 2), GATConv(8, 4, 2)])
def test_a_layer_alone_has_no_name(layer):
    x = torch.randn(6, 8)
    given = (x, Graph(torch.tensor([[0, 5], [1, 2]]), num_nodes=6)) if isinstance(layer, GATConv) else (x,)
    [basis] = layer_bases(layer, *given)[""]
    torch.testing.assert_close(basis.dense(), layer.basis(*given).dense())


def test_no_hook_stays_even_where_the_call_fails():
    model = Twice()
    with pytest.raises(StructureError, match="must be a Graph"):
        layer_bases(model, torch.randn(4, 8), graph="none")
    assert not any(module._forward_hooks for module in model.modules())


def test_the_transformers_alignment_is_what_its_last_block_applies():
    model = Transformer(20, channels=16, heads=4, layers=2, hidden=32, dropout=0.0).eval()
    source, target = torch.tensor([3, 4, 5, 6, 2]), torch.tensor([1, 7, 8])
    weights = model.alignment(source, target)
    assert weights.shape == (3, 5)
    torch.testing.assert_close(weights.sum(-1), torch.ones(3))
    torch.testing.assert_close(model.alignment(source, target[:2]), weights[:2])
    model.packed = False
    torch.testing.assert_close(model.alignment(source, target), weights)


@pytest.mark.parametrize("name", drawn(PLANNED, 6))
def test_every_layer_says_what_it_applies(name):
    """By the arguments of its call; recurrent cells by the layers that they are made of."""
    used = PLANNED[name]()
    actual = layer_bases(used.layer, *used.args, **used.kwargs)
    assert actual
    for basis in (basis for bases in actual.values() for basis in bases):
        assert basis.dense().shape[-3] == basis.size
