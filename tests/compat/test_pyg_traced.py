"""`torch.jit.trace` and `torch.jit.script` of the layers, and what a patched layer does that only theirs can."""

import io
from types import MethodType

import pytest
import torch
from torch import nn

import structconv.compat.pyg as ours
from structconv.compat import to_pyg
from structconv.errors import ConfigError

theirs = pytest.importorskip("torch_geometric.nn")
pytestmark = [pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning"),
              pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")]
P, Q, A, N, E = 4, 6, 3, 5, 7
EDGES = (torch.tensor([[0, 1, 2, 2, 3, 1, 4], [1, 0, 3, 2, 3, 4, 0]]),
         torch.tensor([[4, 1, 2, 0, 0, 1, 4], [1, 3, 3, 2, 0, 4, 1]]))  # with other loops
TYPES = ["paper", "author"], [("paper", "cites", "paper"), ("author", "writes", "paper")]


def perceptron():
    return nn.Sequential(nn.Linear(P, 5), nn.Tanh(), nn.Linear(5, Q))


class OfTypes(nn.Module):
    """HGTConv with tensors as arguments, which are all that a trace takes."""

    def __init__(self):
        super().__init__()
        self.conv = ours.HGTConv(P, Q, TYPES, heads=2)

    def forward(self, x, z, edges, others):
        return self.conv(dict(zip(TYPES[0], (x, z), strict=True)), dict(zip(TYPES[1], (edges, others), strict=True)))[
            "paper"]


class Net(nn.Module):
    def __init__(self, library=ours):
        super().__init__()
        self.first, self.second, self.library = library.GCNConv(P, 8), library.GATConv(8, Q, edge_dim=A), library

    def forward(self, x, edges, attr):
        y = self.second(self.first(x, edges).relu(), edges, attr)
        return self.library.global_max_pool(y, edges.new_tensor([0, 0, 1, 1, 1]))


def x():
    return torch.randn(N, P)


def attr():
    return torch.randn(E, A)


#: Name -> (the layer, what a call takes; "edges" stands for those).
LAYERS = {
    "GCNConv": (lambda: ours.GCNConv(P, Q), lambda: (x(), "edges", torch.rand(E))),
    "GCNConv of maxima": (lambda: ours.GCNConv(P, Q, aggr="max"), lambda: (x(), "edges")),
    "SAGEConv": (lambda: ours.SAGEConv(P, Q), lambda: (x(), "edges")),
    "SAGEConv, bipartite": (lambda: ours.SAGEConv((P, P), Q, aggr="std"), lambda: ((x(), x()), "edges")),
    "GraphConv": (lambda: ours.GraphConv(P, Q), lambda: (x(), "edges", torch.rand(E))),
    "GINConv": (lambda: ours.GINConv(perceptron()), lambda: (x(), "edges")),
    "GATConv": (lambda: ours.GATConv(P, Q, 2), lambda: (x(), "edges")),
    "GATConv with attributes": (lambda: ours.GATConv(P, Q, 2, edge_dim=A), lambda: (x(), "edges", attr())),
    "GATv2Conv": (lambda: ours.GATv2Conv(P, Q, 2, edge_dim=A, share_weights=True), lambda: (x(), "edges", attr())),
    "TransformerConv": (lambda: ours.TransformerConv(P, Q, 2, edge_dim=A), lambda: (x(), "edges", attr())),
    "AGNNConv": (lambda: ours.AGNNConv(), lambda: (x(), "edges")),
    "ChebConv": (lambda: ours.ChebConv(P, Q, 3), lambda: (x(), "edges")),
    "TAGConv": (lambda: ours.TAGConv(P, Q), lambda: (x(), "edges")),
    "SGConv": (lambda: ours.SGConv(P, Q, K=2), lambda: (x(), "edges")),
    "SSGConv": (lambda: ours.SSGConv(P, Q, 0.2, K=2), lambda: (x(), "edges")),
    "MixHopConv": (lambda: ours.MixHopConv(P, Q), lambda: (x(), "edges")),
    "APPNP": (lambda: ours.APPNP(3, 0.2), lambda: (x(), "edges")),
    "GINEConv": (lambda: ours.GINEConv(perceptron(), edge_dim=A), lambda: (x(), "edges", attr())),
    "NNConv": (lambda: ours.NNConv(P, Q, nn.Linear(A, P * Q)), lambda: (x(), "edges", attr())),
    "RGCNConv": (lambda: ours.RGCNConv(P, Q, 3), lambda: (x(), "edges", torch.randint(3, (E,)))),
    "ClusterGCNConv": (lambda: ours.ClusterGCNConv(P, Q, 0.3), lambda: (x(), "edges")),
    "ARMAConv": (lambda: ours.ARMAConv(P, Q, 2, 2), lambda: (x(), "edges")),
    "FeaStConv": (lambda: ours.FeaStConv(P, Q, 2), lambda: (x(), "edges")),
    "GMMConv": (lambda: ours.GMMConv(P, Q, A, 2), lambda: (x(), "edges", attr())),
    "FAConv": (lambda: ours.FAConv(P), lambda: (x(), x(), "edges")),
    "HGTConv": (OfTypes, lambda: (x(), x(), "edges", "edges")),
    "a net": (Net, lambda: (x(), "edges", attr())),
}


def arguments(name, number):
    torch.manual_seed(number)
    return tuple(EDGES[number] if type(one) is str else one for one in LAYERS[name][1]())


def make(name):
    torch.manual_seed(0)
    return LAYERS[name][0]()


def test_every_layer_is_here():
    named = {name.split(",")[0].split(" ")[0] for name in LAYERS}
    assert {name for name, kind in vars(ours).items() if isinstance(kind, type) and name.endswith("Conv")
            and name in ours.__all__} | {"APPNP"} == named - {"a"}


@pytest.mark.parametrize("name", LAYERS)
def test_a_trace_computes_the_same_of_other_numbers(name):
    layer, others = make(name), arguments(name, 1)
    traced = torch.jit.trace(layer, arguments(name, 0), check_trace=False)  # which traces once more
    torch.testing.assert_close(traced(*others), layer(*others), rtol=1e-5, atol=1e-6)


def test_a_trace_is_saved_and_trained():
    layer, others = make("a net"), arguments("a net", 1)
    traced = torch.jit.trace(layer, arguments("a net", 0))
    file = io.BytesIO()
    torch.jit.save(traced, file)
    file.seek(0)
    loaded = torch.jit.load(file)
    torch.testing.assert_close(loaded(*others), layer(*others))
    actual, expected = (torch.autograd.grad(model(*others).square().sum(), list(model.parameters()))
                       for model in (loaded, layer))
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)


def test_a_trace_refuses_other_sizes():
    traced = torch.jit.trace(make("GCNConv"), arguments("GCNConv", 0))
    with pytest.raises(Exception, match=r"GCNConv: a tensor must have the shape of the trace, \[5, 4\]; got \[6, 4\]"):
        traced(torch.randn(N + 1, P), EDGES[0], torch.rand(E))


@pytest.mark.parametrize("pool", ["global_add_pool", "global_mean_pool", "global_max_pool"])
def test_a_trace_of_a_readout(pool):
    batch, other = torch.tensor([0, 0, 1, 1, 1]), torch.tensor([0, 1, 1, 1, 1])
    traced = torch.jit.trace(getattr(ours, pool), (x(), batch))
    rows = x()
    torch.testing.assert_close(traced(rows, other), getattr(ours, pool)(rows, other))


def test_a_trace_of_an_aggregation():
    index, other, rows = torch.tensor([0, 0, 1, 1, 1]), torch.tensor([1, 0, 1, 0, 1]), x()
    how = ours.MultiAggregation(["mean", "max", "std"])
    torch.testing.assert_close(torch.jit.trace(how, (x(), index))(rows, other), how(rows, other))


@pytest.mark.parametrize("name", LAYERS)
def test_torchscript_is_refused_with_what_to_use(name):
    with pytest.raises(ConfigError, match=r"torch.compile or torch.export; got torch.jit.script. Or .*to_pyg\(model\)"):
        torch.jit.script(nn.Sequential(make(name)))


@pytest.mark.parametrize("make", [
    ours.GraphSizeNorm, lambda: ours.InstanceNorm(P), lambda: ours.LayerNorm(P), lambda: ours.Linear(P, Q),
    ours.MeanSubtractionNorm, lambda: ours.MultiAggregation(["mean", "max"]), ours.PairNorm, ours.SumAggregation])
def test_torchscript_of_norms_and_aggregations_is_refused(make):
    with pytest.raises(ConfigError, match=f"{type(make()).__name__}.*or torch.export; got torch.jit.script"):
        torch.jit.script(nn.Sequential(make()))


@pytest.mark.parametrize("name", [name for name in LAYERS if name not in ("HGTConv", "a net")])
def test_a_layer_becomes_theirs(name):
    layer, others = make(name), arguments(name, 1)
    y = layer(*others)
    model, report = to_pyg(nn.ModuleList([layer]))
    assert type(model[0]) is getattr(theirs, name.split(",")[0].split(" ")[0]), report
    torch.testing.assert_close(model[0](*others), y, rtol=1e-5, atol=1e-5)


def test_under_a_patch_torchscript_compiles_theirs():
    with ours.patch() as report:
        net, (rows, edges, _) = theirs.GCN(P, 8, 2), arguments("GCNConv", 0)
        y = net(rows, edges)
        torch.testing.assert_close(torch.jit.script(net)(rows, edges), y)
    assert "GCNConv is PyTorch Geometric's own: GCNConv: torch.jit.script needs" in str(report)


def explained(layer):
    """As GraphMaskExplainer does."""
    def explain_message(layer, inputs):
        return 2 * inputs

    layer.explain_message = MethodType(explain_message, layer)
    layer.explain = True


@pytest.mark.parametrize("change, said", [
    (lambda layer: layer.register_message_forward_hook(lambda layer, inputs, output: 2 * output),
     "register_message_forward_hook"), (explained, "explain_message needs")], ids=["hook", "explainer"])
def test_under_a_patch_a_hook_or_an_explainer_of_messages_makes_a_layer_theirs(change, said):
    with ours.patch() as report:
        layer, (rows, edges, weight) = theirs.GCNConv(P, Q), arguments("GCNConv", 0)
        y = layer(rows, edges, weight)
        change(layer)
        torch.testing.assert_close(layer(rows, edges, weight) - layer.bias, 2 * (y - layer.bias))
    assert type(layer) is theirs.GCNConv and said in str(report)


def test_under_a_patch_functions_are_scripted_and_raise_as_theirs():
    from torch_geometric import utils

    with ours.patch():
        src, index = torch.randn(N), torch.tensor([0, 0, 1, 1, 2])
        torch.testing.assert_close(torch.jit.script(utils.softmax)(src, index), utils.softmax(src, index))
        with pytest.raises(RuntimeError, match="out of bounds"):
            utils.scatter(src, index, dim_size=1)


@pytest.mark.parametrize("name", ["GCNConv", "GATConv", "TransformerConv"])
def test_layers_export_for_any_number_of_nodes_and_edges(name):
    layer, sizes = getattr(ours, name)(P, Q).eval(), ({0: torch.export.Dim("nodes")}, {1: torch.export.Dim("edges")})
    program = torch.export.export(layer, (x(), EDGES[0]), dynamic_shapes=sizes).module()
    for nodes, edges in ((9, 30), (50, 3), (1, 2)):
        inputs = torch.randn(nodes, P), torch.randint(nodes, (2, edges))
        torch.testing.assert_close(program(*inputs), layer(*inputs), rtol=1e-5, atol=1e-5)
