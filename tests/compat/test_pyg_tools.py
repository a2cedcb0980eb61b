"""`patch()`, and PyTorch Geometric's tools on models of our layers. Skipped where torch_geometric is not installed."""

import copy
import importlib
import pickle
import sys
import types
from pathlib import Path

import pytest
import torch
from torch import nn

import structconv.compat.pyg as ours
from structconv import ConfigError, convert, data
from structconv.compat import to_pyg
from structconv.compat.pyg.layer import Layer

theirs = pytest.importorskip("torch_geometric.nn")
EDGES = torch.tensor([[0, 1, 2, 2, 3, 1, 4, 3], [1, 0, 3, 2, 3, 4, 0, 4]])  # with loops at 2 and 3
ATTENTION = ("GATConv", "GATv2Conv", "TransformerConv")


class Net(nn.Module):
    """Two layers and a nonlinearity, as in PyTorch Geometric's documentation."""

    def __init__(self, make, **options):
        super().__init__()
        self.conv1, self.conv2 = make(-1, 8, **options), make(-1, 3, **options)

    def forward(self, x, edge_index):
        return self.conv2(self.conv1(x, edge_index).relu(), edge_index)


def close(got, want):
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


def pair_of_nets(name, **options):
    nets = []
    for library in (ours, theirs):
        net = Net(getattr(library, name), **options)
        torch.manual_seed(2)
        net(torch.randn(5, 4), EDGES)
        nets.append(net)
    nets[1].load_state_dict(nets[0].state_dict())
    return nets


# -- patch --------------------------------------------------------------------------------------------------------

def test_a_program_runs_on_our_layers_and_is_given_back():
    plain = theirs.GCN(4, 8, 2, 3)
    x, batch = torch.randn(5, 4), torch.tensor([0, 0, 1, 1, 1])
    with ours.patch() as report:
        torch.manual_seed(0)
        net = theirs.GCN(4, 8, 2, 3)
        assert all(isinstance(conv, Layer) and isinstance(conv, theirs.GCNConv) for conv in net.convs)
        close(net(x, EDGES), plain(x, EDGES))
        close(theirs.global_mean_pool(x, batch), ours.global_mean_pool(x, batch))
    assert report.replaced["GCNConv"] == 2 and report.replaced["global_mean_pool"] == 1 and not report.left
    assert not isinstance(theirs.GCNConv(4, 8), Layer) and theirs.global_mean_pool is not ours.global_mean_pool
    for twin in (copy.deepcopy(net), pickle.loads(pickle.dumps(net))):
        close(twin(x, EDGES), plain(x, EDGES))
    assert repr(net) == repr(plain)


def test_what_is_imported_under_another_name_is_replaced():
    home = types.ModuleType("of_a_user")
    exec("from torch_geometric.nn import global_max_pool as gmp\nfrom torch_geometric.utils import scatter as join\n"
         "from torch_geometric.loader import HGTLoader as Loader", home.__dict__)
    before, x, batch = dict(vars(home)), torch.randn(4, 3), torch.tensor([0, 0, 1, 1])
    expected = [home.gmp(x, batch), home.join(x, batch)]
    sys.modules[home.__name__] = home
    try:
        with ours.patch() as report:
            close([home.gmp(x, batch), home.join(x, batch)], expected)
            assert issubclass(home.Loader, data.HGTLoader)
        assert report.replaced == {"global_max_pool": 1, "scatter": 1} and vars(home) == before
    finally:
        del sys.modules[home.__name__]


@pytest.mark.parametrize("batch", [torch.tensor([0, 0, 1]), torch.tensor([1, 0, 1])])
@pytest.mark.parametrize("name", ["global_add_pool", "global_mean_pool", "global_max_pool"])
def test_readouts_of_integers_are_theirs_under_a_patch(name, batch):
    x = torch.tensor([[1, 2], [5, 3], [4, 4]])
    expected = getattr(theirs, name)(x, batch)
    with pytest.raises(ConfigError, match=f"{name}: x must be floating; got torch.int64"):
        getattr(ours, name)(x, batch)
    with ours.patch() as report:
        torch.testing.assert_close(getattr(theirs, name)(x, batch), expected)
    assert name in report.left
    with pytest.raises(ConfigError, match=r"SumAggregation: x must be floating"):
        ours.SumAggregation()(x, batch)


def test_what_is_not_supported_stays_theirs_and_is_reported():
    class Halved(theirs.GCNConv):
        def message(self, x_j, edge_weight):
            return 0.5 * super().message(x_j, edge_weight)

    with ours.patch() as report:
        other, halved, own = theirs.SAGEConv(4, 3, node_dim=1), Halved(4, 3), theirs.SAGEConv(4, 3)
    assert not isinstance(other, Layer) and not isinstance(halved, Layer) and isinstance(own, Layer)
    x = torch.randn(5, 4)
    assert halved(x, EDGES).shape == (5, 3)
    assert set(report.left) == {"SAGEConv", "Halved"} and report.replaced == {"SAGEConv": 1}
    assert "node_dim must be" in str(report) and "SAGEConv: 1 made" in str(report)


def test_copies_of_their_layers_stay_theirs_under_a_patch():
    plain = theirs.AGNNConv()
    with ours.patch():
        assert type(copy.deepcopy(plain)) is theirs.AGNNConv


def test_the_documented_examples_run_with_another_import_and_under_a_patch():
    from examples import pyg_citation as plain

    source = Path(plain.__file__).read_text(encoding="utf-8")
    before, line, after = source.partition("from torch_geometric.nn import GATConv, GCNConv\n")
    assert line
    changed = {"__name__": "changed"}
    exec(f"{before}from structconv.compat.pyg import GATConv, GCNConv\n{after}", changed)
    data = plain.made_up()
    for name in ("GCN", "GAT"):
        net = getattr(plain, name)
        expected, accuracy = plain.train(net, data, 8)
        assert expected[-1] < expected[0] and accuracy > 0.5
        for actual in (plain.train(changed[name], data, 8), patched(plain.train, net, data, 8)):
            assert actual == (pytest.approx(expected, rel=1e-4), pytest.approx(accuracy, abs=0.01))


def patched(function, *args):
    with ours.patch() as report:
        actual = function(*args)
    assert sum(report.replaced.values()) == 2 and not report.left
    return actual


# -- tools --------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("name, args, more", [
    *((name, (4, 3), ()) for name in ("GCNConv", "SAGEConv", "GraphConv", "TAGConv", *ATTENTION)),
    ("GINConv", (nn.Linear(4, 3),), ()), ("SAGEConv", (4, 3, "max"), ()), ("AGNNConv", (), ()),
    ("ChebConv", (4, 3, 3), ()), ("APPNP", (2, 0.1), ()), ("GINEConv", (nn.Linear(4, 3),), (torch.ones(8, 4),)),
    ("NNConv", (4, 3, nn.Sequential(nn.Linear(2, 5), nn.Linear(5, 12))), (torch.ones(8, 2),)),
    ("GATConv", (4, 3), (torch.ones(8, 2),))])
def test_explainers_mask_the_edges(name, args, more):
    """An edge's mask multiplies its message; gradients reach it."""
    from torch_geometric.explain.algorithm.utils import clear_masks, set_masks

    options = {"edge_dim": 2} if name == "GATConv" and more else {}
    x, actual = torch.randn(5, 4), []
    for library in (ours, theirs):
        torch.manual_seed(0)
        layer, mask = getattr(library, name)(*copy.deepcopy(args), **options), torch.linspace(-1, 1, 8).requires_grad_()
        set_masks(layer, mask, EDGES)
        y = layer(x, EDGES, *more)
        gradient = torch.autograd.grad(y.square().sum(), mask)[0]
        clear_masks(layer)
        actual.append([y, gradient, layer(x, EDGES, *more)])
    close(*actual)


@pytest.mark.parametrize("name", ["GCNConv", "SAGEConv", "GINConv", "GATConv", "GraphConv"])
def test_ensembles_by_vmap(name):
    """`stack_module_state` makes batches of buffers, too: `GINConv` must not read its eps as a number."""
    x, networks = torch.randn(5, 4), []
    for seed in range(3):
        torch.manual_seed(seed)
        networks.append(getattr(ours, name)(*((nn.Linear(4, 3),) if name == "GINConv" else (4, 3))))
    parameters, buffers = torch.func.stack_module_state(networks)
    y = torch.func.vmap(lambda *state: torch.func.functional_call(networks[0], state, (x, EDGES)))(parameters, buffers)
    close(y, torch.stack([network(x, EDGES) for network in networks]))


def test_a_fake_call_reads_no_numbers():
    from torch._subclasses import FakeTensorMode

    layer, x = ours.GINConv(nn.Linear(4, 3)), torch.randn(5, 4)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        y = layer(mode.from_tensor(x), EDGES)
    assert y.shape == (5, 3)


def test_summary_and_sequential():
    nets, x = pair_of_nets("GCNConv"), torch.randn(5, 4)
    assert theirs.summary(nets[0], x, EDGES) == theirs.summary(nets[1], x, EDGES)
    stacked = theirs.Sequential("x, edge_index", [(nets[0].conv1, "x, edge_index -> x"), nn.ReLU(),
                                                  (nets[0].conv2, "x, edge_index -> x")])
    close(stacked(x, EDGES), nets[1](x, EDGES))


def test_profile(capsys):
    from torch_geometric import profile

    (net, peer), x = pair_of_nets("GATConv"), torch.randn(5, 4)
    assert profile.count_parameters(net) == profile.count_parameters(peer) == sum(p.numel() for p in net.parameters())
    assert profile.get_model_size(net) == pytest.approx(profile.get_model_size(peer), rel=0.05)
    with profile.timeit(log=False) as time:
        net(x, EDGES)
    assert time.duration > 0
    profile.benchmark([net, peer], (x, EDGES), num_steps=2, num_warmups=1, func_names=["ours", "theirs"], backward=True)
    assert {"ours", "theirs", "Forward", "Backward"} <= {*capsys.readouterr().out.replace("|", " ").split()}
    with profile.torch_profile(export_chrome_trace=False):
        net(x, EDGES)
    assert "CPU" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["SAGEConv", "GraphConv", *ATTENTION])
@pytest.mark.parametrize("convert", ["to_hetero", "HeteroConv"])
def test_heterogeneous_models(name, convert):
    kinds = ["paper", "author"], [("paper", "cites", "paper"), ("author", "writes", "paper"),
                                  ("paper", "by", "author")]
    xs = {"paper": torch.randn(5, 4), "author": torch.randn(3, 6)}
    edges = {kinds[1][0]: EDGES, kinds[1][1]: torch.tensor([[0, 2, 1], [4, 0, 0]]),
             kinds[1][2]: torch.tensor([[4, 0, 0], [0, 2, 1]])}
    options, actual, state = {"add_self_loops": False} if name.startswith("GAT") else {}, [], None
    for library in (ours, theirs):
        make = getattr(library, name)
        if convert == "to_hetero":
            net = theirs.to_hetero(Net(lambda *a, make=make, **k: make((-1, -1), a[1], **k), **options), kinds)
        else:
            net = theirs.HeteroConv({kind: make((-1, -1), 3, **options) for kind in kinds[1]})
        net(xs, edges)
        net.load_state_dict(state := net.state_dict() if state is None else state)
        actual.append(net(xs, edges))
    close(*actual)


# -- functions ----------------------------------------------------------------------------------------------------

def with_gradient(x, name, args, options):
    """The result of a function of `torch_geometric.utils` for x, patched or not, and a gradient."""
    return value_and_gradient(x, getattr(importlib.import_module("torch_geometric.utils"), name)(x, *args, **options))


def value_and_gradient(x, y):
    return [y, torch.autograd.grad((y * torch.linspace(-1, 1, y.numel()).view(y.shape)).sum(), x)[0]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("shape, dim", [((7,), 0), ((7, 3), 0), ((2, 7), 1), ((2, 7), -1), ((2, 7, 3, 2), -3),
                                        ((7, 0), 0)])
def test_functions_of_groups(shape, dim, dtype):
    x = (torch.randn(shape, dtype=dtype).round() + 0.25).requires_grad_()  # with equal maxima
    index, starts = torch.tensor([0, 2, 2, 0, 3, 2, 2]), torch.tensor([0, 2, 2, 5, 7])
    calls = [("scatter", (index, dim), {"dim_size": size, "reduce": reduce})
             for reduce in ("sum", "add", "mean", "max", "min") for size in (None, 6)]
    calls += [("softmax", (), {"dim": dim, **options})
              for options in ({"index": index}, {"index": index, "num_nodes": 6}, {"ptr": starts})
              if "ptr" not in options or dim == 0]  # theirs needs torch-scatter otherwise
    with ours.patch() as report:
        actual = [with_gradient(x, *call) for call in calls]
    assert report.replaced["scatter"] == 10 and report.replaced["softmax"] == len(calls) - 10 and not report.left
    bound = 1e-10 if dtype is torch.float64 else 1e-6
    torch.testing.assert_close(actual, [with_gradient(x, *call) for call in calls], rtol=bound, atol=bound)


def test_results_of_softmax_may_change_in_place():
    from torch_geometric import utils

    x, index = torch.randn(5, 2, requires_grad=True), torch.tensor([1, 0, 1, 1, 0])
    expected = value_and_gradient(x, utils.softmax(x, index).mul(2.0))
    with ours.patch() as report:
        actual = value_and_gradient(x, utils.softmax(x, index).mul_(2.0))
    assert report.replaced["softmax"] == 1
    close(actual, expected)


@pytest.mark.parametrize("name, options", [*(("scatter", {"reduce": kind}) for kind in ("sum", "mean", "max", "min")),
                                           ("softmax", {})])
@pytest.mark.parametrize("rows", [3, 70_000])
@pytest.mark.parametrize("index, size", [([0, 4], 4), ([-1, 2], 4), ([0, 1], -2)])
def test_a_group_out_of_range_raises_an_error_of_torch(name, options, rows, index, size):
    from torch_geometric import utils

    index = torch.tensor(index)[torch.arange(rows) % 2]
    options = {**options, "dim_size" if name == "scatter" else "num_nodes": size}
    with ours.patch(), pytest.raises((IndexError, RuntimeError)):
        getattr(utils, name)(torch.randn(rows, 1), index, **options)


@pytest.mark.parametrize("name", ["add", "mean", "max"])
def test_gradients_of_groups_in_int32(name):
    x, index = torch.randn(7, 3, requires_grad=True), torch.tensor([0, 2, 2, 0, 3, 2, 2])
    pool = getattr(ours, f"global_{name}_pool")
    close(value_and_gradient(x, pool(x, index.int())), value_and_gradient(x, pool(x, index)))


@pytest.mark.filterwarnings("ignore:Converting sparse tensor to CSR", "ignore:Sparse")
@pytest.mark.parametrize("reduce", ["sum", "add", "mean", "max", "min"])
def test_sparse_products(reduce):
    from torch_geometric import utils

    matrix = torch.sparse_coo_tensor(EDGES, torch.linspace(-1, 1, 8).double(), (6, 5)).coalesce()
    x = torch.randn(5, 2).double().requires_grad_()
    for one in (matrix, matrix.to_sparse_csr()):
        expected = value_and_gradient(x, utils.spmm(one, x, reduce=reduce))
        with ours.patch() as report:
            actual = value_and_gradient(x, utils.spmm(one, x, reduce=reduce))
        assert report.replaced["spmm"] == 1 and not report.left
        torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-10)


def test_functions_that_are_not_supported_stay_theirs():
    from torch_geometric import utils

    counts = torch.tensor([1, 1, 2])
    with ours.patch() as report:
        assert utils.scatter(counts, counts, reduce="mul").tolist() == [1, 1, 2]
        assert utils.scatter(counts.float(), counts, reduce="any").tolist() == [0, 1, 2]
    assert set(report.left) == {"scatter"} and not report.replaced
    assert "structconv" not in utils.scatter.__module__ and utils.scatter(counts.float(), counts).tolist() == [0, 2, 2]


@pytest.mark.parametrize("make", [lambda: theirs.GCN(4, 8, 2, 3), lambda: theirs.TransformerConv(4, 3, 2),
                                  lambda: theirs.GINEConv(nn.Linear(4, 3)), lambda: theirs.GatedGraphConv(4, 2),
                                  lambda: theirs.RGATConv(4, 3, 2), lambda: theirs.JumpingKnowledge("lstm", 4, 2)])
def test_a_program_computes_the_same_under_a_patch(make):
    """Layers that we have, and others that call `softmax`, `scatter` and `spmm`."""
    def program():
        torch.manual_seed(3)
        net, x, edges = make(), torch.randn(30, 4, requires_grad=True), torch.randint(30, (2, 90))
        more = {"GINEConv": (torch.randn(90, 4),), "RGATConv": (torch.randint(2, (90,)),)}
        name = type(net).__name__
        y = net([x, x]) if name == "JumpingKnowledge" else net(x, edges, *more.get(name, ()))
        return [y, *torch.autograd.grad(y.square().sum(), [x, *net.parameters()], allow_unused=True)]

    expected = program()
    with ours.patch() as report:
        actual = program()
    close(actual, expected)
    assert report.replaced


def norms():
    """One of each, between which a model stays in the same range."""
    return nn.ModuleList([theirs.GraphNorm(4), theirs.InstanceNorm(4, affine=True, track_running_stats=True),
                          theirs.LayerNorm(4), theirs.PairNorm(), theirs.GraphSizeNorm(), theirs.MeanSubtractionNorm(),
                          theirs.DiffGroupNorm(4, 2), theirs.MessageNorm(True)])


def normalized(layers, x):
    batch = torch.arange(6).repeat_interleave(5)
    for layer in layers:
        one = type(layer).__name__
        x = layer(x) if one == "DiffGroupNorm" else layer(x, x.cos()) if one == "MessageNorm" else layer(x, batch)
    return x


def test_norms_are_converted_and_back_and_patched():
    torch.manual_seed(3)
    layers, x = norms(), torch.randn(30, 4, requires_grad=True)
    expected = normalized(layers, x)
    layers.eval()
    converted, report = convert(layers)
    assert len(report.converted) == len(layers) and not report.refused
    close(normalized(converted, x), normalized(layers, x))
    back, _ = to_pyg(converted)
    assert [type(one) for one in back.modules()] == [type(one) for one in layers.modules()]
    with ours.patch() as patched:
        torch.manual_seed(3)
        made = norms()
        assert len(patched.replaced) == len(layers) and not patched.left
        assert all(isinstance(one, getattr(ours, type(one).__name__)) for one in made)
        copy.deepcopy(made), pickle.loads(pickle.dumps(made))
    close(normalized(made, x), expected)
    assert not isinstance(norms()[5], ours.MeanSubtractionNorm)


# -- classes of PyTorch Geometric on our layers -------------------------------------------------------------------

@pytest.mark.parametrize("make", [
    lambda library: theirs.SAGPooling(4, 0.6, GNN=library.GraphConv), lambda library: theirs.TopKPooling(4, 0.6),
    lambda library: theirs.SAGPooling(4, 0.6, GNN=library.GATConv)])
def test_pooling_of_nodes(make):
    actual = []
    for library in (ours, theirs):
        torch.manual_seed(0)
        conv, pool = library.GraphConv(4, 4), make(library)
        x, edges, _, batch, *_ = pool(conv(torch.linspace(-1, 1, 20).view(5, 4), EDGES), EDGES,
                                      batch=torch.tensor([0, 0, 1, 1, 1]))
        actual.append(conv(x, edges))
    close(*actual)
    assert batch.tolist() == [0, 0, 1, 1]


def test_classes_that_hold_our_layers_are_theirs():
    for name in ("AttentionalAggregation", "GlobalAttention", "HeteroConv", "MLP", "MessagePassing", "SAGPooling",
                 "Sequential", "Set2Set", "TopKPooling", "summary"):
        assert getattr(ours, name) is getattr(theirs, name)
    with pytest.raises(AttributeError, match=r"'structconv.compat.pyg' has no attribute 'GCNConvolution'"):
        _ = ours.GCNConvolution
    x, index = torch.randn(5, 4), torch.tensor([0, 0, 1, 1, 1])
    for make in (lambda: ours.Set2Set(4, 2), lambda: ours.AttentionalAggregation(nn.Linear(4, 1))):
        torch.manual_seed(0)
        readout = make()
        expected = readout(x, index)
        with ours.patch() as report:  # their softmax and sums
            close(readout(x, index), expected)
        assert report.replaced["softmax"]


@pytest.mark.parametrize("name", ATTENTION)
def test_attention_explainer(name):
    from torch_geometric.explain import AttentionExplainer, Explainer

    masks = []
    for net in pair_of_nets(name):
        explainer = Explainer(net, AttentionExplainer(), explanation_type="model", edge_mask_type="object",
                              model_config={"mode": "multiclass_classification", "task_level": "node",
                                            "return_type": "raw"})
        masks.append(explainer(torch.linspace(-1, 1, 20).view(5, 4), EDGES, index=1).edge_mask)
    close(*masks)
    assert masks[0].count_nonzero() > 0


# -- a linear layer that is wrapped or replaced, options that are set later -----------------------------------------

LINEAR = [lambda: nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)), lambda: nn.Linear(4, 3)]


@pytest.mark.parametrize("make", LINEAR)
@pytest.mark.parametrize("name, child", [("GCNConv", "lin"), ("SGConv", "lin"), ("SSGConv", "lin"), ("GATConv", "lin"),
                                         ("SAGEConv", "lin_l"), ("GraphConv", "lin_rel"), ("FeaStConv", "lin")])
def test_a_replaced_linear_layer_computes_the_same(name, child, make):
    x, actual = torch.randn(5, 4), []
    torch.manual_seed(0)
    lin = make()
    for library in (ours, theirs):
        torch.manual_seed(1)
        layer = getattr(library, name)(4, 3, *((0.1,) if name == "SSGConv" else ()))
        setattr(layer, child, lin)
        actual.append(layer(x, EDGES))
    close(*actual)


@pytest.mark.parametrize("name, args, options", [
    ("GCNConv", (4, 3), {"normalize": False}), ("GCNConv", (4, 3), {"add_self_loops": False}),
    ("GCNConv", (4, 3), {"improved": True}), ("GATConv", (4, 3), {"add_self_loops": False, "negative_slope": 0.7}),
    ("SAGEConv", (4, 3), {"normalize": True, "root_weight": False}), ("APPNP", (2, 0.1), {"normalize": False, "K": 1}),
    ("TAGConv", (4, 3), {"normalize": False}), ("SGConv", (4, 3), {"K": 3, "add_self_loops": False}),
    ("SSGConv", (4, 3, 0.2), {"alpha": 0.5, "K": 2}), ("MixHopConv", (4, 3), {"add_self_loops": False}),
    ("ChebConv", (4, 3, 3), {"normalization": "rw"}), ("FeaStConv", (4, 3), {"add_self_loops": False}),
    ("AGNNConv", (), {"add_self_loops": False}), ("GraphConv", (4, 3), {"flow": "target_to_source"}),
    ("ARMAConv", (4, 3), {"act": None})])
def test_options_that_are_set_later(name, args, options):
    x, weight, actual = torch.randn(5, 4), (torch.rand(8),) if name in ("GCNConv", "TAGConv") else (), []
    for library in (ours, theirs):
        torch.manual_seed(1)
        layer = getattr(library, name)(*args)
        for option, value in options.items():
            setattr(layer, option, value)
        actual.append(layer(x, EDGES, *weight))
    close(*actual)


@pytest.mark.parametrize("name", ["GCNConv", "GraphConv", "SAGEConv", "TAGConv", "TransformerConv"])
@pytest.mark.parametrize("before", ["add", "mean", "std"])
@pytest.mark.parametrize("after", ["add", "mean", "max", "std", "median"])
def test_an_aggregation_that_is_set_later_takes_effect(name, before, after):
    x, actual = torch.randn(5, 4), []
    for first in (before, after):
        torch.manual_seed(1)
        layer = getattr(ours, name)(4, 3, aggr=first)
        if first != after:
            layer.aggr = after
        actual.append(layer(x, EDGES))
    close(*actual)
    assert layer.aggr == after


@pytest.mark.parametrize("name", ["GCNConv", "GATConv", "SAGEConv"])
def test_a_layer_for_each_direction_starts_from_equal_numbers(name):
    """`DirGNNConv` copies a layer, switches its loops and root weight off and draws it again."""
    actual = []
    for library in (ours, theirs):
        torch.manual_seed(1)
        layer = theirs.DirGNNConv(getattr(library, name)(4, 3))
        actual.append([*layer.parameters(), torch.rand(1)])
    assert all(map(torch.equal, *actual))


def test_loaders_of_a_patch_reach_workers_that_are_not_patched():
    from torch_geometric.data import Data
    from torch_geometric.loader import NeighborLoader

    node = torch.arange(40)
    whole = Data(x=node.unsqueeze(-1).float(), edge_index=torch.stack([node, (node + 1) % 40]))
    with ours.patch():
        from torch_geometric.loader import GraphSAINTNodeSampler

        batches = list(NeighborLoader(whole, [1], batch_size=20, num_workers=1, multiprocessing_context="spawn"))
        drawn = pickle.loads(pickle.dumps(GraphSAINTNodeSampler(whole, batch_size=10, num_steps=2, log=False)))
    assert [batch.num_nodes for batch in batches] == [21, 21]
    for batch in batches:
        source, target = batch.x.squeeze(-1)[batch.edge_index]
        assert torch.equal((source + 1) % 40, target)
    assert len(list(drawn)) == 2
