"""torch.fx takes a layer as one module, as it takes torch's own; type checkers know the names."""

import pytest
import torch
from torch import fx, nn
from torch.fx.experimental.proxy_tensor import make_fx

from structconv import ConfigError, Conv, DotProduct, MultiheadAttention, RelativeBias, Shifts
from structconv import nn as layers
from structconv.bases import TopK
from structconv.structures import Causal, Window
from tests.support.layers import LAYERS

DOT = DotProduct(heads=2, dim=4).scaled()


class Around(nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.inner = nn.Sequential(layer)

    def forward(self, x, *others, **options):
        return self.inner[0](2 * x, *others, **options).relu()


def takes_x_alone(use):
    return len(use.args) == 1 and not use.structures


@pytest.mark.parametrize("name", [name for name, make in LAYERS.items()
                                  if takes_x_alone(make()) and "lstm" not in name])
def test_a_layer_is_one_node(name):
    use = LAYERS[name]()
    whole = Around(use.layer).eval()

    class Called(nn.Module):
        def __init__(self):
            super().__init__()
            self.whole = whole

        def forward(self, x):
            return self.whole(x, **use.kwargs)

    traced = fx.symbolic_trace(Called())
    place = "whole.inner.0.conv" if "non_local" in name else "whole.inner.0"  # a block adds its input
    assert [node.target for node in traced.graph.nodes if node.op == "call_module"] == [place]
    torch.testing.assert_close(traced(use.args[0]), Called()(use.args[0]))


class Steps(nn.Module):
    """Three steps of a recurrent cell, of states that it passes on."""

    def __init__(self, cell):
        super().__init__()
        self.cell = cell

    def forward(self, x):
        state = self.cell(x)
        for _ in range(2):
            state = self.cell(x, state)
        return state


@pytest.mark.parametrize("cell", [layers.ConvGRUCell(Shifts([-1, 0]), 3, 4),
                                  layers.ConvGRUCell(Shifts([-1, 0]), 3, 4, reset="after"),
                                  layers.ConvLSTMCell(Shifts([-1, 0]), 3, 4, peephole=True)])
def test_a_recurrent_cell_is_one_node_a_step(cell):
    steps, x = Steps(cell), torch.randn(2, 5, 3)
    traced = fx.symbolic_trace(steps)
    assert [node.target for node in traced.graph.nodes if node.op == "call_module"] == ["cell"] * 3
    torch.testing.assert_close(traced(x), steps(x))
    with pytest.raises(ConfigError, match=r"Trace torch.nn.Sequential"):
        fx.symbolic_trace(cell)


class OnGraph(nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x, graph):
        return self.layer(x, graph).relu()


@pytest.mark.parametrize("name", ["gcn", "cheb", "gat", "gatv2", "rgcn"])
def test_a_graph_is_an_argument(name):
    use = LAYERS[name]()
    model = OnGraph(use.layer)
    torch.testing.assert_close(fx.symbolic_trace(model)(*use.args), model(*use.args))


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning", "ignore:`torch.jit.trace:DeprecationWarning")
def test_torchscript_traces_attention_or_says_what_to_do():
    layer, x, other = layers.MultiheadAttention(8, 2), torch.randn(2, 5, 8), torch.randn(3, 7, 8)
    traced = torch.jit.trace(layer, (x,))
    for each in (x, other):
        torch.testing.assert_close(traced(each), layer(each))
    torch.testing.assert_close(torch.jit.trace(layer, (torch.randn(1, 100, 8),))(x), layer(x))
    biased = layers.Conv((DotProduct(2, 4) + RelativeBias(2)).softmax(), 8, 8)
    with pytest.raises(ConfigError, match=r"got torch.jit.trace. Use torch.export.export\(layer"):
        torch.jit.trace(biased, (x,))
    torch.testing.assert_close(torch.export.export(biased, (x,)).module()(x), biased(x))


@pytest.mark.parametrize("mechanism", [
    DotProduct(2, 4).masked(keep=Window(2)).softmax(), DotProduct(2, 4).masked(keep=Causal() & Window(2)).softmax(),
    DotProduct(2, 4).normalize(TopK(3)), Shifts([-1, 0, 1]), DotProduct(2, 4).softmax() | Shifts([-1, 0, 1])])
@pytest.mark.parametrize("entries", [3, 9, 100])
@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning", "ignore:`torch.jit.trace:DeprecationWarning")
def test_a_trace_that_would_keep_a_size_is_refused(mechanism, entries):
    with pytest.raises(ConfigError, match=r"got torch.jit.trace. Use torch.export.export\(layer"):
        torch.jit.trace(layers.Conv(mechanism, 8, 8), (torch.randn(2, entries, 8),), check_trace=False)


@pytest.mark.parametrize("expression", [
    DOT.softmax(), DOT.masked(keep=Causal()).softmax(), (DOT + RelativeBias(3)).softmax(),
    DotProduct(heads=2, dim=4).masked(keep=Window(2)).softmax()])
def test_make_fx_records_programs_for_any_sizes(expression):
    layer = Conv(expression, 8, 8)
    program = make_fx(layer, tracing_mode="symbolic", _allow_non_fake_inputs=True)(torch.randn(2, 9, 8))
    for shape in ((2, 9, 8), (3, 6, 8), (1, 14, 8)):
        x = torch.randn(shape)
        torch.testing.assert_close(program(x), layer(x))


@pytest.mark.parametrize("layer", [
    Conv(DotProduct(heads=2, dim=3).softmax(), 6, 4), MultiheadAttention(6, 2),
    Conv(DotProduct(heads=2, dim=3).masked(keep=Causal()).softmax(), 6, 4)])
def test_make_fx_and_linearize_record_attention(layer):
    x, t = torch.randn(2, 2, 7, 6, generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(make_fx(layer)(x)(t), layer(t))
    y, pushed = torch.func.linearize(layer, x)
    torch.testing.assert_close((y, pushed(t)), torch.func.jvp(layer, (x,), (t,)))
