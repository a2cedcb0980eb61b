"""torch.fx takes a layer as one module, as it takes torch's own; type checkers know the names."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import fx, nn

import structconv
from structconv import nn as layers
from structconv.errors import ConfigError
from structconv.mechanisms import DotProduct, RelativeBias
from tests.support.layers import LAYERS


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


@pytest.mark.parametrize("name", LAYERS)
def test_pytorch_geometric_summarizes_a_model(name):
    pyg = pytest.importorskip("torch_geometric.nn")
    pytest.importorskip("tabulate")
    use = LAYERS[name]()
    shown = pyg.summary(Around(use.layer) if name == "gcn" else use.layer, *use.args, **use.kwargs,
                        leaf_module=(pyg.MessagePassing, layers.Layer))
    assert type(use.layer).__name__ in shown


def test_a_layer_alone_is_refused():
    with pytest.raises(ConfigError, match=r"Trace torch.nn.Sequential"):
        fx.symbolic_trace(layers.Conv2d(2, 3, 3))


PROGRAM = """
from structconv import Causal, Conv, Dense, DotProduct, Graph, GCNConv, Shifts
import structconv, torch
a = DotProduct(2, 3)
reveal_type((a.scaled().masked(keep=Causal()).softmax() | Shifts([1])) + 2 * a)
reveal_type(Dense(torch.ones(1, 2, 2)).softmax())
reveal_type(Conv(a, 4, 3).plan(torch.ones(2, 4)))
reveal_type(structconv.__version__)
structconv.nope
a.sotfmax()
GCNConv("a", 2)
"""
TOLD = ["structconv.mechanisms.expression.Mechanism", "structconv.bases.base.Basis", "structconv.planning.tables.Plan",
        "str", 'no attribute "nope"', "not callable", '"GCNConv" has incompatible type "str"']


@pytest.mark.slow
def test_a_checker_knows_the_names(tmp_path):
    pytest.importorskip("mypy")
    (tmp_path / "program.py").write_text(PROGRAM, encoding="utf-8")
    root = str(Path(structconv.__file__).parents[1])
    done = subprocess.run([sys.executable, "-m", "mypy", "--config-file", os.devnull, "--cache-dir",
                           str(tmp_path / "cache"), "program.py"], cwd=tmp_path, env={**os.environ, "MYPYPATH": root},
                          capture_output=True, text=True, check=False)
    lines = [line for line in done.stdout.splitlines() if line.startswith("program.py:")]
    assert len(lines) == len(TOLD), done.stdout
    assert all(told in line for told, line in zip(TOLD, lines, strict=True)), done.stdout


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning", "ignore:`torch.jit.trace:DeprecationWarning")
def test_torchscript_traces_attention_or_says_what_to_do():
    layer, x, other = layers.MultiheadAttention(8, 2), torch.randn(2, 5, 8), torch.randn(3, 7, 8)
    traced = torch.jit.trace(layer, (x,))
    for each in (x, other):
        torch.testing.assert_close(traced(each), layer(each))
    biased = layers.Conv((DotProduct(2, 4) + RelativeBias(2)).softmax(), 8, 8)
    with pytest.raises(ConfigError, match=r"got torch.jit.trace. Use torch.export.export\(layer"):
        torch.jit.trace(biased, (x,))
    torch.testing.assert_close(torch.export.export(biased, (x,)).module()(x), biased(x))
