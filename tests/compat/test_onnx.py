"""Exported programs with dynamic sizes by torch's operators alone, and as ONNX in onnxruntime, against the layers."""

import importlib
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim

from structconv import Causal, Graph, Grid, KnowledgeGraph, Samples, Window, batch
from structconv.compat import decompositions, pyg
from structconv.compat import torch as compat
from structconv.mechanisms import STRUCTURE, Additive, DotProduct, Shifts
from structconv.nn import ChebConv, Conv, Conv2d, GATConv, GATv2Conv, GCNConv, MultiheadAttention, RelationalConv
from structconv.primitives.operator import OPERATORS
from tests.support.layers import drawn

#: Operators that no layer puts into an exported forward pass, or that have no composed form.
OUTSIDE = {"group_products", "group_outer", "shift_correlation"}


class OnGraph(nn.Module):
    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        graph = Graph(edge_index, num_nodes=x.shape[-2])
        for layer in self.layers:
            x = layer(x, graph).relu()
        return x


class OnEdges(nn.Module):
    """GAT with attributes of edges, whose loops get the mean of an entry's edges."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = GATConv(8, 4, heads=2, edge_dim=2)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        attributes = x[edge_index[0], :2] - x[edge_index[1], :2]
        y: Tensor = self.layer(x, Graph(edge_index, num_nodes=x.shape[-2], edge_attr=attributes))
        return y


class OnTriples(nn.Module):
    """R-GCN, of means and of sums."""

    def __init__(self) -> None:
        super().__init__()
        self.mean, self.sum = RelationalConv(8, 8, 2), RelationalConv(8, 4, 2, aggr="add", num_bases=2)

    def forward(self, x: Tensor, triples: Tensor) -> Tensor:
        facts = KnowledgeGraph(triples, x.shape[-2], ("likes", "knows"))
        y: Tensor = self.sum(self.mean(x, facts).relu(), facts)
        return y


class OnBatch(nn.Module):
    """Layers on a batch of two graphs, and the sum of each graph."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([GCNConv(8, 8), GATConv(8, 4, heads=2)])

    def forward(self, x: Tensor, *edge_indices: Tensor) -> Tensor:
        first, second = edge_indices
        graphs = batch([Graph(first, num_nodes=9), Graph(second, num_nodes=20)])
        for layer in self.layers:
            x = layer(x, graphs).relu()
        groups = graphs.samples.members()[0]
        return x.new_zeros((2, 8)).index_add(0, groups, x)


class OnSamples(nn.Module):
    """Attention within the two graphs of a batch, of all pairs and of near ones that precede."""

    def __init__(self) -> None:
        super().__init__()
        self.all, self.near = MultiheadAttention(8, 2), Conv(dot.masked(keep=Causal() & Window(2)).softmax(), 8, 8)

    def forward(self, x: Tensor, *edge_indices: Tensor) -> Tensor:
        first, second = edge_indices
        samples = batch([Graph(first, num_nodes=9), Graph(second, num_nodes=20)]).samples
        y: Tensor = self.near(self.all(x, structure=samples).relu(), samples)
        return y


class Encoder(nn.Module):
    """Both layers of attention and a network, with residuals."""

    def __init__(self, attention: nn.Module) -> None:
        super().__init__()
        self.attention, self.norm = attention, nn.LayerNorm(8)
        self.network = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x + self.attention(x))
        return x + self.network(x)


DYNAMIC = Dim.DYNAMIC
EDGES = [Grid(shape).graph().edge_index.flip(1) for shape in ((3, 3), (4, 5))]
NODES = (torch.randn(9, 8), EDGES[0]), ({0: DYNAMIC}, {1: DYNAMIC}), (torch.randn(20, 8), EDGES[1])
BATCH = (torch.randn(2, 9, 8), EDGES[0]), ({1: DYNAMIC}, {1: DYNAMIC}), (torch.randn(2, 20, 8), EDGES[1])
WORDS = (torch.randn(2, 7, 8),), ({0: DYNAMIC, 1: DYNAMIC},), (torch.randn(3, 11, 8),)
IMAGES = (torch.randn(2, 3, 10, 12),), ({0: DYNAMIC, 2: DYNAMIC, 3: DYNAMIC},), (torch.randn(3, 3, 15, 9),)
#: The edges of a grid, of two kinds by their direction.
FACTS = [torch.stack([source, (source > target).long(), target], 1) for source, target in EDGES]
TRIPLES = (torch.randn(9, 8), FACTS[0]), ({0: DYNAMIC}, {0: DYNAMIC}), (torch.randn(20, 8), FACTS[1])
GRAPHS = ((torch.randn(29, 8), *EDGES), ({}, ({1: DYNAMIC}, {1: DYNAMIC})),
          (torch.randn(29, 8), EDGES[0].repeat(1, 2), EDGES[1].flip(0)[:, 3:]))
dot = DotProduct(2, 4).scaled()
#: Name -> (model, (inputs, which sizes are dynamic, inputs of other sizes)).
MODELS: dict[str, tuple[Any, Any]] = {
    "mixed heads": (lambda: Encoder(Conv(dot.softmax() | Shifts([-1, 0, 1]), 8, 8)), WORDS),
    "GCN": (lambda: OnGraph(GCNConv(8, 16), GCNConv(16, 4)), NODES),
    "GAT": (lambda: OnGraph(GATConv(8, 8, heads=2), GATConv(16, 4)), NODES),
    "CNN": (lambda: nn.Sequential(Conv2d(3, 8, 3, padding=1), nn.ReLU(), compat.Conv2d(8, 4, 3, 2)), IMAGES),
    "Transformer": (lambda: nn.Sequential(Encoder(MultiheadAttention(8, 2)), Encoder(MultiheadAttention(8, 2))), WORDS),
    "GAT with attributes": (OnEdges, NODES),
    "shifts": (lambda: Encoder(Conv(Shifts([-1, 0, 2]), 8, 8)), WORDS),
    "GATv2": (lambda: OnGraph(GATv2Conv(8, 4, heads=2)), NODES),
    "Chebyshev": (lambda: OnGraph(ChebConv(8, 4, 3)), NODES),
    "dot product on edges": (lambda: OnGraph(Conv(dot.masked(keep=STRUCTURE).softmax(), 8, 8)), NODES),
    "GAT, samples that share a graph": (lambda: OnGraph(GATConv(8, 4, heads=2)), BATCH),
    "GCN, samples that share a graph": (lambda: OnGraph(GCNConv(8, 4)), BATCH),
    "causal window": (lambda: Encoder(Conv(dot.masked(keep=Causal() & Window(2)).softmax(), 8, 8)), WORDS),
    "additive": (lambda: Encoder(Conv(Additive(4, 2).softmax(), 8, 8)), WORDS),
    "relations": (OnTriples, TRIPLES),
    "batch of graphs": (OnBatch, GRAPHS),
    "samples": (OnSamples, GRAPHS),
}
#: Those that are written as ONNX, too.
IN_ONNX = ("mixed heads", "GCN", "GAT", "CNN", "Transformer", "GAT with attributes", "shifts",
           "relations", "batch of graphs", "samples")


def exported(name: str) -> tuple[Any, Any, tuple[Tensor, ...]]:
    """The model, its program, and inputs of other sizes."""
    torch.manual_seed(0)
    make, (inputs, dynamic, others) = MODELS[name]
    model = make().eval()
    return model, torch.export.export(model, inputs, dynamic_shapes=dynamic), others


@pytest.mark.parametrize("name", drawn([name for name in MODELS if name not in IN_ONNX], 4))
def test_a_program_by_operators_of_torch_alone(name: str) -> None:
    model, program, others = exported(name)
    program = program.run_decompositions(decompositions())
    assert not [node for node in program.graph.nodes if "structconv" in str(node.target)]
    torch.testing.assert_close(program.module()(*others), model(*others), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", drawn(IN_ONNX, 5))
@pytest.mark.filterwarnings("ignore")  # torch's and onnxscript's own
def test_onnx_computes_the_same(name: str, tmp_path: Any) -> None:
    model, program, others = exported(name)
    assert_same_in_onnx(program, (), model, others, tmp_path / "model.onnx")


@pytest.mark.parametrize("sizes", [[2, 3], [40, 0, 1]])
@pytest.mark.filterwarnings("ignore")
def test_onnx_of_attention_within_samples_that_are_an_input(sizes: list[int], tmp_path: Any) -> None:
    layer, samples = MultiheadAttention(8, 2).eval(), Samples(sizes)
    program = torch.export.export(layer, (torch.randn(sum(sizes), 8),), {"structure": samples})
    assert len(program.run_decompositions(decompositions()).graph.nodes) < 100  # no operators for each offset
    session = session_of(program, (), tmp_path / "model.onnx")
    x = torch.randn(sum(sizes), 8)
    x[0] = torch.nan  # which reaches the first sample only
    inputs = {held.name: (x if number == 0 else samples.input_starts).numpy()
              for number, held in enumerate(session.get_inputs())}
    y = torch.from_numpy(session.run(None, inputs)[0])
    torch.testing.assert_close(y, layer(x, structure=samples).detach(), rtol=1e-5, atol=1e-5, equal_nan=True)


@pytest.mark.filterwarnings("ignore")
def test_onnx_of_a_patched_model_of_pyg(tmp_path: Any) -> None:
    layers = pytest.importorskip("torch_geometric.nn")
    with pyg.patch():
        model = layers.GAT(8, 8, num_layers=2, heads=2).eval()
        assert_same_in_onnx(model, NODES[0], model, NODES[0], tmp_path / "model.onnx")


def session_of(program: Any, inputs: tuple[Tensor, ...], path: Path) -> Any:
    """The program in onnxruntime."""
    for module in ("onnx", "onnxscript"):
        pytest.importorskip(module)
    runtime = pytest.importorskip("onnxruntime")
    torch.onnx.export(program, inputs, dynamo=True, verbose=False).save(path)
    return runtime.InferenceSession(path)


def assert_same_in_onnx(program: Any, inputs: tuple[Tensor, ...], model: Any, others: tuple[Tensor, ...],
                        path: Path) -> None:
    session = session_of(program, inputs, path)
    given = {held.name: t.numpy() for held, t in zip(session.get_inputs(), others, strict=True)}
    torch.testing.assert_close(torch.from_numpy(session.run(None, given)[0]), model(*others).detach(), rtol=1e-5,
                               atol=1e-5)


def test_every_operator_of_a_forward_pass_is_decomposed() -> None:
    importlib.import_module("structconv.kernels")  # all operators
    table = {str(operator).split(".")[1] for operator in decompositions()}
    assert table | OUTSIDE == {name for name in OPERATORS if not name.endswith("_backward")} and not table & OUTSIDE


def test_the_table_may_be_the_first_thing_that_a_process_asks_for() -> None:
    code = "from structconv.compat import decompositions; print(len(decompositions()))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert int(done.stdout) == len(decompositions())
