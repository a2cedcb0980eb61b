"""Each layer against PyTorch Geometric's own over random configurations: values, gradients, state_dict both ways, repr.

Skipped where torch_geometric is not installed; it is in the extra `tools`.
"""

import copy
import operator
import random
import subprocess
import sys
import weakref
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn.parameter import UninitializedParameter
from torch.nn.utils.parametrize import register_parametrization
from torch.overrides import BaseTorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import structconv
import structconv.compat.pyg as ours
from structconv.compat.pyg import aggregations, edges, polynomials
from structconv.compat.pyg import pooling as functions
from structconv.compat.pyg.edges import numbered
from structconv.errors import ConfigError, ShapeError, StructureError
from structconv.primitives.native.loader import core
from tests.support import layers
from tests.support.derivatives import autograd_nodes, derivatives
from tests.support.drawn import drawn as some
from tests.support.drawn import part
from tests.support.own_calls import own_calls

theirs = pytest.importorskip("torch_geometric.nn")
EdgeIndex = pytest.importorskip("torch_geometric").EdgeIndex
P, Q, A = 4, 6, 3
TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-10}
BOOL = [False, True]
AGGR = ["add", "sum", "mean", "max", "min", "var", "std", "softmax"]
DROPOUT = [0.0, 0.0, 0.0, 1.0]  # between these the random numbers differ; see `test_dropout_has_the_moments_of_pygs`
TYPES = {"a": P, "b": Q}
RELATIONS = [[("a", "to", "b"), ("b", "to", "a"), ("a", "next", "a")], [("a", "to", "b"), ("b", "next", "b")],
             [("a", "to", "b"), ("a", "too", "b"), ("b", "back", "a"), ("b", "next", "b")]]


def perceptron():
    return nn.Sequential(nn.Linear(P, 5), nn.Tanh(), nn.Linear(5, Q))


def one_layer():
    return nn.Linear(A, P * Q)


def two_layers():
    return nn.Sequential(nn.Linear(A, 5), nn.ReLU(), nn.Linear(5, P * Q))


@dataclass(frozen=True)
class Kind:
    """How a layer may be made, and what it may be called with.

    Args:
        args: of the constructor, a value or a list of choices each. options: those by keyword.
        inputs: of "initial", "weight", "attr", "type", "lambda", "pair", "size"; attributes are given too with
            `edge_dim`. "sparse": PyTorch Geometric's layer takes a sparse matrix, too.
    """

    args: tuple[Any, ...]
    options: dict[str, Any] = field(default_factory=dict)
    inputs: str = "sparse"


ATTENTIVE = ("GATConv", "GATv2Conv", "TransformerConv")
ATTENTION = {"heads": [1, 2, 3], "concat": BOOL, "bias": BOOL, "aggr": AGGR, "dropout": DROPOUT, "edge_dim": [None, A]}
LOOPED = {"negative_slope": [0.2, 0.5], "add_self_loops": BOOL, "residual": BOOL,
          "fill_value": ["mean", "add", "min", "max", "mul", 0.5, torch.tensor([1.0, -2.0, 0.5])]}
KINDS = {
    "GCNConv": Kind((P, Q), {"improved": BOOL, "cached": BOOL, "bias": BOOL, "aggr": AGGR,
                             "add_self_loops": [None, False]}, "weight sparse"),
    "SAGEConv": Kind((P, Q), {"aggr": AGGR, "normalize": BOOL, "root_weight": BOOL, "project": BOOL, "bias": BOOL},
                     "pair size sparse"),
    "GraphConv": Kind((P, Q), {"aggr": AGGR, "bias": BOOL}, "weight pair size sparse"),
    "GINConv": Kind((perceptron,), {"eps": [0.0, 0.3], "train_eps": BOOL, "aggr": AGGR}, "pair size sparse"),
    "GATConv": Kind((P, Q), {**ATTENTION, **LOOPED}, "attr pair size sparse"),
    "GATv2Conv": Kind((P, Q), {**ATTENTION, **LOOPED, "share_weights": BOOL}, "attr pair sparse"),
    "TransformerConv": Kind((P, Q), {**ATTENTION, "beta": BOOL, "root_weight": BOOL}, "attr pair sparse"),
    "AGNNConv": Kind((), {"requires_grad": BOOL, "add_self_loops": BOOL, "aggr": AGGR}),
    "ChebConv": Kind((P, Q, [1, 2, 3, 4]), {"normalization": ["sym", "rw", None], "bias": BOOL, "aggr": AGGR},
                     "weight lambda"),
    "TAGConv": Kind((P, Q), {"K": [1, 2, 3], "normalize": BOOL, "bias": BOOL, "aggr": AGGR}, "weight sparse"),
    "SGConv": Kind((P, Q), {"K": [1, 2, 3], "cached": BOOL, "add_self_loops": BOOL, "bias": BOOL, "aggr": AGGR},
                   "weight sparse"),
    "SSGConv": Kind((P, Q, 0.2), {"K": [1, 2, 3], "cached": BOOL, "add_self_loops": BOOL, "bias": BOOL, "aggr": AGGR},
                    "weight sparse"),
    "MixHopConv": Kind((P, Q), {"powers": [None, [1, 2], [0, 2], [3, 1]], "add_self_loops": BOOL,
                                "bias": BOOL, "aggr": AGGR}, "weight sparse"),
    "APPNP": Kind((3, 0.2), {"dropout": DROPOUT, "cached": BOOL, "add_self_loops": BOOL, "normalize": BOOL,
                             "aggr": AGGR}, "weight sparse"),
    "GINEConv": Kind((perceptron,), {"eps": [0.0, 0.3], "train_eps": BOOL, "aggr": AGGR, "edge_dim": [A, None]},
                     "attr pair size"),
    "NNConv": Kind((P, Q, [one_layer, two_layers]), {"aggr": AGGR, "root_weight": BOOL, "bias": BOOL},
                   "attr pair size"),
    "RGCNConv": Kind((P, Q, 3), {"aggr": ["mean", "add", "max", "min", "std"], "root_weight": BOOL,
                                 "bias": BOOL, "num_bases": [None, 2]}, "type pair"),
    "ClusterGCNConv": Kind((P, Q), {"diag_lambda": [0.0, 0.7], "aggr": AGGR, "bias": BOOL}),
    "ARMAConv": Kind((P, Q, [1, 2], [1, 2, 3]), {"shared_weights": BOOL, "dropout": DROPOUT, "bias": BOOL,
                                                 "aggr": AGGR}, "weight"),
    "FeaStConv": Kind((P, Q), {"heads": [1, 2, 3], "add_self_loops": BOOL, "bias": BOOL, "aggr": AGGR},
                      "pair"),
    "GMMConv": Kind((P, Q, A, 2), {"separate_gaussians": BOOL, "aggr": AGGR, "bias": BOOL}, "attr pair size"),
    "FAConv": Kind((P,), {"eps": [0.0, 0.3], "dropout": DROPOUT, "cached": BOOL, "add_self_loops": BOOL, "aggr": AGGR},
                   "initial sparse"),
    "HGTConv": Kind(([P, -1, TYPES, {"a": -1, "b": Q}], Q, [(list(TYPES), kinds) for kinds in RELATIONS], [1, 2, 3]),
                    {}, "types"),
    "HeteroConv": Kind((RELATIONS, ["sum", "mean", "min", "max", "cat", None]), {}, "types"),
}
#: How edges may be given: `edge_index`, PyTorch Geometric's class of it, and sparse matrices of torch.
LISTS, MATRICES = ["index", "int32", "EdgeIndex", "sorted EdgeIndex"], ["coo", "csr", "csc"]


#: Layers that PyTorch Geometric does not make of unknown channels.
NEVER_LAZY = {"ChebConv", "TAGConv", "MixHopConv", "NNConv", "RGCNConv", "ARMAConv", "GMMConv", "FAConv"}


class InTurn:
    """Chooses values in turn: of as many choices as there are values, each has another one."""

    def __init__(self, name):
        self.name, self.count = name, Counter()

    def __call__(self, values, label):
        turn, place = divmod(self.count[label], len(values))
        self.count[label] += 1
        return random.Random(f"{self.name} {label} {turn}").sample(list(values), len(values))[place]


def chosen(choose, value, label):
    if isinstance(value, list):
        value = choose(value, label)
    return value() if value in (perceptron, one_layer, two_layers) else value


for _name, _kind in KINDS.items():  # theirs reads sparse matrices only if the first layer of its class could
    if "sparse" in _kind.inputs:
        getattr(theirs, _name)(*(chosen(lambda values, _: values[0], value, "") for value in _kind.args))


class OtherRoundings(TorchDispatchMode):
    """Results of operations differ in their last bits; equal numbers stay equal, so that maxima keep their ties."""

    def __init__(self, number):
        super().__init__()
        self.number = number

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        y = operation(*args, **(kwargs or {}))
        if isinstance(y, torch.Tensor) and y.dtype in TOLERANCE and y.layout is torch.strided:
            given = {t.untyped_storage().data_ptr() for t in tree_leaves((args, kwargs))
                     if isinstance(t, torch.Tensor) and t.layout is torch.strided}
            if y.untyped_storage().data_ptr() not in given:
                y.mul_(1 + torch.finfo(y.dtype).eps * torch.sin(1e4 * y + self.number))
        return y


@dataclass
class Setup:
    """Both layers with the same parameters, and the arguments of a call of each."""

    layer: Any
    peer: Any
    inputs: list[torch.Tensor]
    run: Any
    choices: dict[str, Any] = field(default_factory=dict)

    def call(self, layer, *, gradients):
        """The output, and the gradients of its product with fixed numbers."""
        y = self.run(layer)
        return results(y, self.inputs, layer) if gradients else [y.detach()]

    def uncertain(self, *, gradients):
        """How far the peer's numbers go if its operations round otherwise."""
        right, farthest = self.call(self.peer, gradients=gradients), None
        for number in range(4):
            with OtherRoundings(number):
                actual = self.call(self.peer, gradients=gradients)
            apart = [(a - b).abs().max() if a.numel() else a.sum() for a, b in zip(actual, right, strict=True)]
            farthest = apart if farthest is None else [max(pair) for pair in zip(farthest, apart, strict=True)]
        return farthest

    def compare(self, *, gradients=False):
        """Values and gradients agree, or differ by no more than a few times what other roundings change.

        The variance of one neighbor is zero but for roundings, for example, and normalizing these gives any vector.
        """
        actual, expected = (self.call(layer, gradients=gradients) for layer in (self.layer, self.peer))
        tolerance = TOLERANCE[expected[0].dtype]
        apart = [float((got - want).abs().max()) if want.numel() else 0.0
                 for got, want in zip(actual, expected, strict=True)]
        bounds = [tolerance * max(1.0, float(want.abs().max())) if want.numel() else 0.0 for want in expected]
        if not all(map(operator.le, apart, bounds)):  # NaN, too
            bounds = [bound + 3 * float(more) for bound, more in zip(bounds, self.uncertain(gradients=gradients),
                                                                          strict=True)]
            for got, want, bound in zip(actual, expected, bounds, strict=True):
                torch.testing.assert_close(got, want, rtol=0, atol=bound)


def setup(choose, name):
    """A configuration of both layers, and a call: of any graph, with loops, repeated edges and isolated nodes."""
    kind, dtype = KINDS[name], choose(list(TOLERANCE), "dtype")
    torch.manual_seed(choose(range(100), "seed"))
    if "types" in kind.inputs:
        return of_types(choose, name, dtype)
    if name == "ClusterGCNConv":
        dtype = torch.float32  # theirs divides by degrees in float32
    options = {key: chosen(choose, value, key) for key, value in kind.options.items() if key != "fill_value"}
    bipartite, static = "pair" in kind.inputs and choose(BOOL, "bipartite"), choose([False, False, True], "static")
    theirs_too, rows_of_edges = "sparse" in kind.inputs, "attr" in kind.inputs
    sparse = (options.get("aggr", "add") in ("add", "sum", "mean") and not (theirs_too and options.get("edge_dim"))
              and choose([False, True, True], "sparse"))
    matrices = MATRICES if theirs_too or not rows_of_edges else ["coo"]  # only that has values that are rows
    form = choose(matrices, "matrix") if sparse else choose(LISTS, "list")
    if not sparse and choose(BOOL, "flow"):
        options["flow"] = "source_to_target" if bipartite else "target_to_source"
    if "fill_value" in kind.options:  # PyTorch Geometric's own layer fails for others
        options["fill_value"] = 0.5 if sparse or bipartite else choose(kind.options["fill_value"], "fill_value")
    if name == "FeaStConv" and bipartite:
        options["add_self_loops"] = False  # theirs adds one for each target, of which there may be more than sources
    if options.get("normalize") is False and "dropout" in options:
        options["dropout"] = 0.0  # theirs drops weights, of which it needs some
    args = [chosen(choose, value, str(place)) for place, value in enumerate(kind.args)]
    if bipartite and args and args[0] == P and name != "FeaStConv" and choose(BOOL, "two widths"):
        args[0] = (P, P)
    if args and args[0] == P and name not in NEVER_LAZY and not options.get("project") and choose(BOOL, "lazy"):
        args[0] = -1
    seed = choose(range(100), "seed of parameters")
    made = []
    if "aggr" in options:  # the first of a class in a process decides whether it may take a matrix
        getattr(theirs, name)(*copy.deepcopy(args), **{**options, "aggr": "add"})
    for library in (theirs, ours):
        torch.manual_seed(seed)
        made.append(getattr(library, name)(*copy.deepcopy(args), **options).to(dtype))
    lead, m = (2,) if static else (), choose([7, 1, 5], "sources")
    n, count = choose([5, 1, 7], "targets") if bipartite else m, choose([14, 9, 0, 14, 1], "edges")
    count = max(count, int(name == "FeaStConv" and not options["add_self_loops"]))  # theirs divides by the largest
    index = torch.stack([torch.randint(m, (count,)), torch.randint(n, (count,))])
    x = torch.randn(*lead, m, P, dtype=dtype, requires_grad=True)
    inputs, nodes = [x], x
    if bipartite:
        z = torch.randn(*lead, n, P, dtype=dtype, requires_grad=True)
        inputs, nodes = [x, z], (x, z)
    rows: list[Any] = [nodes]
    more: dict[str, Any] = {}
    if "initial" in kind.inputs:
        inputs.append(torch.randn(*lead, m, P, dtype=dtype, requires_grad=True))
        rows.append(inputs[-1])
    values: list[Any] = []  # of the edges
    if sparse or form == "sorted EdgeIndex":
        index = index.flip(0).unique(dim=1).flip(0).contiguous()
    count = index.shape[1]
    attr = A if options.get("edge_dim") or "edge_dim" not in options else P if name == "GINEConv" else 0
    if "attr" in kind.inputs and attr:
        values.append(torch.randn(count, attr, dtype=dtype, requires_grad=not sparse))
    elif "type" in kind.inputs:
        values.append(torch.randint(3, (count,)))
    elif sparse or ("weight" in kind.inputs and choose(BOOL, "weights")):
        values.append(torch.empty(count, dtype=dtype).uniform_(0.1, 1).requires_grad_(not sparse))
    edges, others = index, index
    if sparse:
        matrix = torch.sparse_coo_tensor(index.flip(0), values[0], (n, m, *values[0].shape[1:]), is_coalesced=True)
        edges, others = in_form(matrix, form), in_form(matrix, "coo" if form == "coo" else "csr")
        others = [others] if theirs_too else [index, *(values if name != "FeaStConv" else [])]
        values = []
    else:
        edges = index.int() if form == "int32" else index
        if "EdgeIndex" in form:
            edges = EdgeIndex(index, sparse_size=(m, n), sort_order="col" if "sorted" in form else None)
        others = [index, *values]
        inputs += [value for value in values if value.requires_grad]
    if "lambda" in kind.inputs and (not bool((index[0] != index[1]).any()) or choose(BOOL, "lambda_max")):
        batch = torch.arange(m).ge(m // 2).long() if choose(BOOL, "batch") else None  # theirs divides by the largest
        bound = 3.0 if batch is None else torch.tensor([2.5, 3.5][:int(batch.max()) + 1], dtype=dtype)
        more |= {"batch": batch, "lambda_max": bound}
    if bipartite and "size" in kind.inputs and choose(BOOL, "size"):
        more |= {"size": (m, n)}
        if choose(BOOL, "only sources") and not options.get("residual"):  # targets without features
            rows[0] = (x, None)
            del inputs[1]
    peer, layer = made

    def expected(*rows):
        peer.__dict__.update({key: None for key in vars(peer) if key.startswith("_cached")})
        return peer(*rows, *others, **more)

    def run(layer):
        torch.manual_seed(seed)  # a lazy layer draws its parameters now
        if layer is peer:
            return (torch.stack([expected(*(sample(one, i) for one in rows)) for i in range(2)]) if static
                    else expected(*rows))
        if options.get("cached"):  # of another graph
            layer(*rows, index.flip(0))
            torch.manual_seed(seed)
        return layer(*rows, edges, *values, **more)

    return Setup(layer, peer, inputs, run, {**options, **dict(enumerate(args)), "form": form})


def in_form(matrix, form):
    return {"coo": lambda: matrix, "csr": matrix.to_sparse_csr, "csc": matrix.to_sparse_csc}[form]()


def sample(nodes, i):
    """Features of one sample."""
    return tuple(one if one is None else one[i] for one in nodes) if isinstance(nodes, tuple) else nodes[i]


def of_types(choose, name, dtype):
    """Draw a setup, as `setup` does, for nodes and edges of several types."""
    args = [chosen(choose, value, str(place)) for place, value in enumerate(KINDS[name].args)]
    relations = args[0] if name == "HeteroConv" else args[2][1]
    widths = dict.fromkeys(TYPES, P) if args[0] == P else TYPES
    sizes = {kind: choose([6, 1, 4], kind) for kind in TYPES}
    nodes = {kind: torch.randn(sizes[kind], width, dtype=dtype, requires_grad=True) for kind, width in widths.items()}
    inputs, seed = list(nodes.values()), choose(range(100), "seed of parameters")
    forms = {kind: choose([*LISTS, *MATRICES], f"form of {kind}") for kind in relations}
    edges, others, attr, convs = {}, {}, {}, {}
    for kind in relations:
        ends = (sizes[kind[0]], sizes[kind[2]])
        count = choose([12, 5, 0], f"edges of {kind}")
        index = torch.stack([torch.randint(size, (count,)) for size in ends])
        index = index.flip(0).unique(dim=1).flip(0).contiguous()
        others[kind], form = index, forms[kind]
        edges[kind] = index.int() if form == "int32" else index
        if "EdgeIndex" in form:
            edges[kind] = EdgeIndex(index, sparse_size=ends, sort_order="col" if "sorted" in form else None)
        if form in MATRICES:
            ones = torch.ones(index.shape[1], dtype=dtype)
            edges[kind] = in_form(torch.sparse_coo_tensor(index.flip(0), ones, ends[::-1], is_coalesced=True), form)
        convs[kind] = choose(["SAGEConv", "GraphConv", "GATConv", "GATv2Conv", "TransformerConv"], f"layer of {kind}")
        if convs[kind] in ATTENTIVE and form in LISTS:
            attr[kind] = torch.randn(index.shape[1], A, dtype=dtype, requires_grad=True)
            inputs.append(attr[kind])

    def make(library):
        torch.manual_seed(seed)
        if name == "HGTConv":
            return library.HGTConv(*copy.deepcopy(args)).to(dtype)
        layers = {}
        for kind, conv in convs.items():
            options = {"heads": 2} if conv in ATTENTIVE else {}
            options |= {"edge_dim": A} if kind in attr else {}
            options |= {"add_self_loops": False} if conv.startswith("GAT") else {}
            layers[kind] = getattr(library, conv)((-1, -1), 2 * Q if conv not in ATTENTIVE else Q, **options)
        return library.HeteroConv(layers, args[1]).to(dtype)

    peer, layer = make(theirs), make(ours)
    if choose(BOOL, "reversed"):  # where the order differs from that of the metadata, theirs mixes up the types
        edges = dict(reversed(edges.items()))

    def run(layer):
        torch.manual_seed(seed)
        more = {"edge_attr_dict": attr} if attr else {}
        y = layer(nodes, others if layer is peer else edges, **more if name == "HeteroConv" else {})
        return torch.cat([y[kind].flatten() for kind in sorted(y)])

    if name == "HGTConv":
        inputs = list(nodes.values())
    return Setup(layer, peer, inputs, run, {**dict(enumerate(args)), "form": [*forms.values()]})


def results(y, inputs, layer):
    """The output and the gradients of its product with fixed numbers."""
    leaves = [*inputs, *(p for p in layer.parameters() if not isinstance(p, UninitializedParameter))]
    weights = torch.linspace(-1, 1, y.numel(), dtype=y.dtype).view(y.shape)
    return [y.detach(), *torch.autograd.grad((y * weights).sum(), leaves, allow_unused=True, materialize_grads=True)]


def check(one):
    dtype = one.run(one.peer).dtype  # a lazy layer knows its channels now
    assert one.run(one.layer).dtype == dtype
    assert repr(one.layer) == repr(one.peer)
    state, other = one.layer.state_dict(), one.peer.state_dict()
    assert list(state) == list(other)
    unknown = [key.removesuffix("weight") for key, value in other.items() if isinstance(value, UninitializedParameter)]
    for key, value in other.items():  # the same seed draws the same numbers
        if key.startswith(tuple(unknown)):
            assert isinstance(value, UninitializedParameter) is isinstance(state[key], UninitializedParameter)
        else:
            torch.testing.assert_close(state[key], value, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
    one.compare()
    for layer, peer in ((one.layer, one.peer), (one.peer, one.layer)):
        layer.reset_parameters()
        with torch.no_grad():
            for p in layer.parameters():  # no zeros and ones
                if not isinstance(p, UninitializedParameter):
                    p.add_(torch.empty_like(p).uniform_(-0.3, 0.3))
        peer.load_state_dict(layer.state_dict())
        one.compare(gradients=layer is one.layer)


#: Examples of each layer, at least one of each value of each option.
EXAMPLES = 28
of_layers = pytest.mark.filterwarnings("ignore:.*joins source n to target n", "ignore:Converting sparse tensor to CSR",
                                       "ignore:There exist node types")


@of_layers
@pytest.mark.parametrize("name", KINDS)
def test_a_layer_is_that_of_pyg(name):
    choices, choose = [], InTurn(name)
    for number in range(EXAMPLES):
        with part(f"example {number}"):
            check(one := setup(choose, name))
            choices.append(one.choices)
    forms = [*LISTS, *MATRICES] if "sparse" in KINDS[name].inputs else LISTS
    for key, values in {**dict(enumerate(KINDS[name].args)), **KINDS[name].options, "form": forms}.items():
        if isinstance(values, list) and not callable(values[0]) and "types" not in KINDS[name].inputs:
            assert {*map(repr, values)} <= {repr(each[key]) for each in choices}, key


@of_layers
@pytest.mark.parametrize("name", KINDS)
@settings(max_examples=60 if layers.EVERY else 2, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_a_random_layer_is_that_of_pyg(name, data):
    check(setup(lambda values, label: data.draw(st.sampled_from(values), label), name))


EDGES = torch.tensor([[0, 1, 2, 2, 3, 1, 4], [1, 0, 3, 2, 3, 4, 0]])  # with loops at 2 and 3


def pair(name, *args, **options):
    """Both layers with the same parameters."""
    made = []
    for library in (ours, theirs):
        torch.manual_seed(1)
        made.append(getattr(library, name)(*args, **options))
    return made


def both(name, *args, **options):
    return [layer.double() for layer in pair(name, *args, **options)]


MATRIX = torch.sparse_coo_tensor(EDGES.flip(0), torch.linspace(0.2, 1.8, 7).double(), (5, 5)).coalesce()
BY_ROWS = MATRIX.indices().flip(0)


@pytest.mark.parametrize("aggr", ["add", "mean", "max", "min", "std", "softmax", "powermean", "median", ["mean"],
                                  ["mean", "max"]], ids=str)
@pytest.mark.parametrize("name", ["SAGEConv", "GINConv", "GraphConv", "GCNConv"])
@pytest.mark.filterwarnings("ignore:Converting sparse tensor to CSR")
def test_values_of_a_sparse_matrix_count_where_they_do_there(name, aggr):
    if name != "SAGEConv" and isinstance(aggr, list):
        aggr = aggr[:1]  # more are more channels than the layer takes
    layer, peer = both(name, *((nn.Linear(P, Q),) if name == "GINConv" else (P, Q)), aggr=aggr)
    x = torch.randn(5, P).double()
    ones = torch.sparse_coo_tensor(MATRIX.indices(), torch.ones(7).double(), (5, 5), is_coalesced=True)
    for matrix in (MATRIX, MATRIX.to_sparse_csr(), ones, ones.to_sparse_csr()):
        torch.testing.assert_close(layer(x, matrix), peer(x, matrix), rtol=1e-10, atol=1e-10)
        matrix = matrix.clone()
        layer(x, matrix)
        matrix.values().mul_(2.0)
        torch.testing.assert_close(layer(x, matrix), peer(x, matrix), rtol=1e-10, atol=1e-10)


@pytest.mark.skipif(core() is None, reason="there are no native kernels")
@pytest.mark.parametrize("name, aggr, numbers", [
    ("SAGEConv", "mean", torch.ones(7)), ("SAGEConv", "mean", torch.rand(7)), ("GINConv", "add", torch.ones(7)),
    ("GINConv", "add", torch.rand(7))])
@pytest.mark.filterwarnings("ignore:Sparse")
def test_a_sparse_matrix_costs_few_more_own_calls_than_its_edges(name, aggr, numbers):
    layer = getattr(ours, name)(*((nn.Linear(P, Q),) if name == "GINConv" else (P, Q)), aggr=aggr)
    x = torch.randn(5, P)
    matrix = torch.sparse_coo_tensor(MATRIX.indices(), numbers, (5, 5), is_coalesced=True).to_sparse_csr()
    for run in (lambda: layer(x, matrix), lambda: layer(x, EDGES)):
        run()
    assert own_calls(lambda: layer(x, matrix)) <= own_calls(lambda: layer(x, EDGES)) + 40


@pytest.mark.parametrize("numbers", [torch.ones(7).double(), MATRIX.values()])
@pytest.mark.parametrize("name", ["SAGEConv", "GraphConv"])
def test_gradients_reach_the_values_of_a_sparse_matrix(name, numbers):
    layer, x = getattr(ours, name)(P, Q, aggr="mean").double(), torch.randn(5, P).double()
    matrix = torch.sparse_coo_tensor(MATRIX.indices(), numbers, (5, 5), is_coalesced=True)
    for _ in range(2):
        weight = numbers.clone().requires_grad_()
        got, = torch.autograd.grad(layer(x, torch.sparse_coo_tensor(
            matrix.indices(), weight, (5, 5), is_coalesced=True)).square().sum(), weight)
        moved = [torch.sparse_coo_tensor(matrix.indices(), numbers + h, (5, 5), is_coalesced=True)
                 for h in 1e-6 * torch.cat([torch.eye(7), -torch.eye(7)]).double()]
        ahead, back = torch.stack([layer(x, m).square().sum() for m in moved]).detach().split(7)
        torch.testing.assert_close(got, (ahead - back) / 2e-6, rtol=1e-6, atol=1e-7)


@pytest.mark.filterwarnings("ignore:Converting sparse tensor to CSR")
def test_values_of_a_sparse_matrix_are_the_weights_of_signed_attention():
    layer, peer = both("FAConv", P, normalize=False)
    x = torch.randn(5, P).double()
    for matrix in (MATRIX, MATRIX.to_sparse_csr()):
        got, want = (one(x, x, matrix, return_attention_weights=True) for one in (layer, peer))
        torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-10)


@pytest.mark.filterwarnings("ignore:Converting sparse tensor to CSR")
@pytest.mark.parametrize("layout", ["coo", "csr"])
def test_a_matrix_of_attention_weights_and_the_weights_have_a_gradient_together(layout):
    layer, peer = both("GATConv", P, 2, heads=3)
    gradients = []
    for one in (layer, peer):
        x, matrix = X.double().requires_grad_(), MATRIX if layout == "coo" else MATRIX.to_sparse_csr()
        _, (weights, alpha) = one(x, matrix, return_attention_weights=True)
        table = weights.to_dense() if layout == "coo" else weights.to_sparse_coo().to_dense()
        gradients.append(torch.autograd.grad(table.square().sum() + alpha.pow(3).sum(), x)[0])
    torch.testing.assert_close(*gradients, rtol=1e-10, atol=1e-10)


def test_narrow_gaussians_are_finite_in_16_bits():
    layer, peer = (library.GMMConv(P, Q, 1, 1).half() for library in (ours, theirs))
    with torch.no_grad():
        layer.sigma.fill_(0.003)
        layer.mu.fill_(0.5)
    peer.load_state_dict(layer.state_dict())
    attr = torch.linspace(0.49, 0.51, EDGES.shape[1]).half().unsqueeze(-1).requires_grad_()
    got, want = (one(X.half(), EDGES, attr) for one in (layer, peer))
    torch.testing.assert_close(got, want, rtol=2e-2, atol=2e-2)
    got.float().sum().backward()
    assert all(t.grad.isfinite().all() for t in (attr, *layer.parameters()))


@pytest.mark.parametrize("flow", ["source_to_target", "target_to_source"])
def test_edges_of_signed_attention_come_back_as_they_were_given(flow):
    layer, peer = both("FAConv", P, flow=flow)
    x = torch.randn(5, P).double()
    got, want = (one(x, x, EDGES, return_attention_weights=True) for one in (layer, peer))
    torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-10)


class SparseTensor:
    """The part of torch_sparse's class that a layer reads."""

    def __init__(self, values):
        self.values = values

    def coo(self):
        return *MATRIX.indices(), self.values

    def size(self, axis):
        return MATRIX.shape[axis]


def test_values_of_a_sparse_tensor_are_weights_or_attributes():
    x, weights, attr = torch.randn(5, P), MATRIX.values().float(), torch.randn(7, A)
    for name, args in (("SAGEConv", (P, Q)), ("GINConv", (nn.Linear(P, Q),))):  # these read none
        layer = getattr(ours, name)(*args)
        torch.testing.assert_close(layer(x, SparseTensor(weights)), layer(x, BY_ROWS))
    layer = ours.GraphConv(P, Q)
    torch.testing.assert_close(layer(x, SparseTensor(weights)), layer(x, BY_ROWS, weights))
    for kind in (ours.GATConv, ours.GATv2Conv, ours.TransformerConv):
        for values in (weights, attr):
            options = {} if kind is ours.TransformerConv else {"add_self_loops": False}
            layer = kind(P, Q, 2, edge_dim=values[0].numel(), **options)
            torch.testing.assert_close(layer(x, SparseTensor(values)), layer(x, BY_ROWS, values))


@pytest.mark.parametrize("name, options", [("GATConv", {}), ("GATv2Conv", {}), ("TransformerConv", {}),
                                           ("GATConv", {"edge_dim": A, "concat": False}),
                                           ("GATv2Conv", {"edge_dim": A}), ("TransformerConv", {"edge_dim": A}),
                                           *[(name, {"flow": "target_to_source", **loops}) for name, loops in (
                                               *((name, {"add_self_loops": own}) for name in ATTENTIVE[:2]
                                                 for own in BOOL), ("TransformerConv", {}))]])
def test_attention_weights_are_those_of_the_edges(name, options):
    layer, peer = both(name, P, Q, 2, **options)
    attr = (torch.randn(EDGES.shape[1], A).double(),) if "edge_dim" in options else ()
    x = torch.randn(5, P).double()
    for flag in (True, None) if name != "TransformerConv" else (True, False):
        got, want = (one(x, EDGES, *attr, return_attention_weights=flag) for one in (layer, peer))
        torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("name, dropped", [("GATConv", True), ("GATv2Conv", True), ("TransformerConv", False)])
def test_dropout_is_of_the_weights(name, dropped):
    layer, x = getattr(ours, name)(P, Q, 3, dropout=0.5), torch.randn(5, P)
    edges = torch.cartesian_prod(torch.arange(5), torch.arange(5)).T
    whole = layer.eval()(x, edges, return_attention_weights=True)[1][1]
    y, (_, weights) = layer.train()(x, edges, return_attention_weights=True)
    assert not torch.equal(y, layer.eval()(x, edges))
    if dropped:
        assert 0 < (weights == 0).sum() < weights.numel()
        whole = torch.where(weights == 0, 0, 2 * whole)
    torch.testing.assert_close(weights, whole)


@pytest.mark.parametrize("name, args", [
    ("GATConv", (P, Q, 2)), ("GATv2Conv", (P, Q, 2)), ("TransformerConv", (P, Q, 2)), ("FAConv", (P,)),
    ("APPNP", (2, 0.1)), ("ARMAConv", (P, Q))])
def test_dropout_has_the_moments_of_pygs(name, args):
    """Mean and variance over copies of a graph, within 5 standard errors of the difference."""
    copies, (layer, peer) = 3000, both(name, *args, dropout=0.3)
    x = torch.randn(5, P).double()
    edges = (EDGES.unsqueeze(1) + 5 * torch.arange(copies).view(-1, 1)).flatten(1)
    rows = (x.repeat(copies, 1),) * (2 if name == "FAConv" else 1)
    torch.manual_seed(0)
    got, want = (one(*rows, edges).detach().view(copies, -1) for one in (layer, peer))
    assert bool((want.var(0) > 0.01).any())
    for power in (1, 2):
        a, b = ((y if power == 1 else (y - y.mean(0)).square()) for y in (got, want))
        error = ((a.var(0) + b.var(0)) / copies).sqrt()
        assert bool(((a.mean(0) - b.mean(0)).abs() <= 5 * error + 1e-10).all()), power


SAMPLED = {"GCNConv": (P, Q), "SAGEConv": (P, Q, "max"), "GraphConv": (P, Q), "GINConv": (perceptron(),),
           "GATConv": (P, Q, 2), "GATv2Conv": (P, Q, 2), "TransformerConv": (P, Q, 2), "AGNNConv": (),
           "ChebConv": (P, Q, 3), "MixHopConv": (P, Q), "APPNP": (2, 0.1)}


@pytest.mark.parametrize("name, args", SAMPLED.items())
def test_samples_share_a_graph(name, args):
    layer, x = getattr(ours, name)(*args), torch.randn(2, 3, 5, P)
    y = layer(x, EDGES)
    for i in range(2):
        for j in range(3):
            torch.testing.assert_close(y[i, j], layer(x[i, j], EDGES), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name, args, options, message", [
    ("GCNConv", (P, Q), {"normalise": True}, "arguments must be .*; got 'normalise'. Did you mean 'normalize'"),
    ("GATConv", (P, Q), {"head": 2}, "arguments must be .*heads.*; got 'head'. Did you mean 'heads'"),
    ("SAGEConv", (P, Q), {"flows": "x"}, "arguments must be .*; got 'flows'. Did you mean 'flow'"),
    ("GATv2Conv", (P,), {}, "arguments must be .*; got no 'out_channels'"),
    ("SAGEConv", (P, Q), {"aggr": "softmx"}, "aggr must be one of 'add', .*; got 'softmx'. Did you mean 'softmax'"),
    ("GraphConv", (P, Q), {"flow": "both"}, "flow must be one of .*; got 'both'"),
])
def test_arguments_that_are_not_supported_are_named(name, args, options, message):
    with pytest.raises(ConfigError, match=f"{name}: {message}"):
        getattr(ours, name)(*args, **options)


def test_the_layers_need_no_pyg_and_a_patch_does():
    code = ("import sys; sys.modules['torch_geometric'] = None\n"
            "import torch, structconv.compat.pyg as pyg\n"
            "y = pyg.GATConv(-1, 3, 2)(torch.ones(2, 4), torch.tensor([[0], [1]]))\n"
            "assert y.shape == (2, 6)\n"
            "assert not pyg.GraphNorm(2)(torch.ones(3, 2), torch.tensor([0, 0, 1])).any()\n"
            "assert repr(pyg.DiffGroupNorm(2, 2)) == 'DiffGroupNorm(2, groups=2)'\n"
            "assert not hasattr(pyg, 'MLP')\n"
            "try:\n    pyg.patch()\n"
            "except ValueError as error:\n    sys.exit('torch_geometric must be' not in str(error))\n"
            "sys.exit(2)")
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=120).returncode == 0


@pytest.mark.parametrize("blocks", [None, 2])
def test_relations_of_numbered_entities_and_in_blocks(blocks):
    layer, peer = both("RGCNConv", P, Q, 3, num_blocks=blocks)
    kinds, x = torch.tensor([0, 2, 1, 0, 2, 1, 1]), torch.randn(5, P).double()
    numbers = () if blocks else (torch.tensor([1, 3, 0, 0, 2]),)
    for nodes in (x, *numbers):
        torch.testing.assert_close(layer(nodes, EDGES, kinds), peer(nodes, EDGES, kinds), rtol=1e-10, atol=1e-10)
    if not blocks:
        few, all_entities = EDGES.clamp(max=3), both("RGCNConv", P, Q, 3)
        torch.testing.assert_close(*(one.double()(None, few, kinds) for one in all_entities), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("aggr", ["max", "min", "std", "softmax"])
@pytest.mark.parametrize("bases", [None, 2])
def test_relations_of_numbered_entities_by_any_aggregation(bases, aggr):
    layer, peer = both("RGCNConv", 5, Q, 3, num_bases=bases, aggr=aggr)
    kinds = torch.tensor([0, 2, 1, 0, 2, 1, 1])
    for nodes in (None, torch.tensor([1, 3, 0, 0, 2])):
        torch.testing.assert_close(*(results(one(nodes, EDGES, kinds), [], one) for one in (layer, peer)), rtol=1e-10,
                                   atol=1e-10)


@pytest.mark.parametrize("size", [None, 4])
@pytest.mark.parametrize("name", ["global_add_pool", "global_mean_pool", "global_max_pool"])
def test_readouts(name, size):
    batch = torch.tensor([0, 0, 2, 2, 2])
    for x in (torch.randn(5, P), torch.randn(2, 5, P), torch.randn(5)):
        x.requires_grad_()
        for groups in (batch, None):
            got, want = (getattr(library, name)(x, groups, size) for library in (ours, theirs))
            torch.testing.assert_close(got, want)
            seed = torch.randn_like(want)
            torch.testing.assert_close(*(torch.autograd.grad(y, x, seed)[0] for y in (got, want)))


@pytest.mark.parametrize("needs_grad", [False, True])
@pytest.mark.parametrize("name", ["global_add_pool", "global_mean_pool", "global_max_pool"])
def test_readouts_of_a_batch_that_changes(name, needs_grad):
    x, numbers = torch.randn(600, 70, requires_grad=needs_grad), torch.arange(600).numpy() // 290
    batch, pool = torch.from_numpy(numbers), getattr(ours, name)
    for order in (1, -1, 1):
        numbers[:] = numbers[::order] + 1
        torch.testing.assert_close(pool(x, batch), getattr(theirs, name)(x, batch))
    with pytest.raises(StructureError, match="must not be negative"):
        pool(x, batch - 4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize(("groups", "size", "words"), [
    ([0, 1, 0, 5], 3, "got 5 at edge 3"), ([0, 1, 0, -1], 3, "got -1 at edge 3"), ([0, 1, 0, 1], 0, "got 0 at edge 0"),
    ([False, True, False, True], 2, "torch.bool"), ([0.0, 1.0, 0.0, 1.0], 2, "torch.float32")])
def test_wrong_groups_are_refused_by_name(dtype: torch.dtype, groups: list[Any], size: int, words: str) -> None:
    """softmax raised torch's errors ("setStorage"), booleans "arange_cpu", and maxima of float64 counted floats."""
    x, index = torch.randn(4, 3, dtype=dtype), torch.tensor(groups)
    for call in (lambda: functions.softmax(x, index, None, size), lambda: functions.softmax(x.mT, index, None, size, 1),
                 *(lambda kind=kind: functions.scatter(x, index, 0, size, kind) for kind in ("sum", "max", "mean"))):
        with pytest.raises(StructureError, match=words):
            call()


def test_maxima_without_groups_have_the_gradients_of_theirs() -> None:
    """Equal maxima shared the gradient, and one NaN made those of all rows NaN; there the first row has it."""
    x = torch.tensor([[1.0, 0.0, float("nan")], [1.0, 2.0, 0.0]], requires_grad=True)
    for dims in (x, torch.stack([x, x])):
        mine, = torch.autograd.grad(ours.global_max_pool(dims, None).nan_to_num().sum(), x)
        other, = torch.autograd.grad(theirs.global_max_pool(dims, None).nan_to_num().sum(), x)
        assert mine.equal(other)


@pytest.mark.parametrize("wrong", [-1, 3.0, "3"])
def test_sums_of_few_rows_refuse_a_wrong_number_of_groups(wrong):
    x, groups = torch.randn(3, P, requires_grad=True), torch.tensor([0, 2, 1])
    for call in (ours.global_add_pool, lambda x, groups, size: ours.SumAggregation()(x, groups, dim_size=size)):
        with pytest.raises(StructureError, match="num_outputs must be an integer"):
            call(x, groups, wrong)


@pytest.mark.parametrize("args", [("cat",), ("max",), ("lstm", P, 3)])
def test_jumping_knowledge(args):
    layer, peer = both("JumpingKnowledge", *args)
    assert repr(layer) == repr(peer)
    xs = [torch.randn(5, P).double() for _ in range(3)]
    torch.testing.assert_close(layer(xs), peer(xs), rtol=1e-10, atol=1e-10)


#: The softmax's options, and modes of several aggregations, of which one is learned.
JOINED = {"cat": {}, "proj": {"in_channels": P, "out_channels": 5}, "sum": {}, "max": {}, "logsumexp": {},
          "attn": {"in_channels": P, "out_channels": 4, "num_heads": 2}}
SEVERAL = ["mean", "max", "sum", "std", "var", "powermean", "softmax"]


@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.parametrize("mode", JOINED)
def test_several_aggregations_are_joined_as_there(mode, weighted):
    options = {"mode": mode, "mode_kwargs": JOINED[mode],
               "aggrs_kwargs": [{}, {}, {}, {}, {}, {"p": 2.0}, {"learn": True, "t": 0.7}]}
    widths = {"cat": P * len(SEVERAL), "proj": 5}
    if weighted:  # a layer whose messages have factors, and which maps them afterwards
        layer, peer = both("GINEConv", nn.Linear(widths.get(mode, P), Q), aggr=SEVERAL, aggr_kwargs=options)
        more = (torch.rand(EDGES.shape[1], P).double(),)
    else:
        layer, peer = both("SAGEConv", P, Q, aggr=SEVERAL, aggr_kwargs=options, root_weight=False)
        more = ()
    x = torch.randn(5, P, dtype=torch.float64, requires_grad=True)
    nodes = (x, None) if weighted else x
    size = {"size": (5, 5)} if weighted else {}
    assert list(layer.state_dict()) == list(peer.state_dict()) and repr(layer) == repr(peer)
    for one, other in ((layer, peer), (peer, layer)):
        one.reset_parameters()
        other.load_state_dict(one.state_dict())
        got, want = (results(each(nodes, EDGES, *more, **size), [x], each) for each in (layer, peer))
        torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("make", [
    lambda: theirs.SoftmaxAggregation(t=0.3, learn=True, channels=P), lambda: theirs.StdAggregation(semi_grad=True),
    lambda: theirs.MedianAggregation(), lambda: theirs.MultiAggregation(["sum", "std", "softmax"]),
    lambda: theirs.PowerMeanAggregation(2.0, learn=True), lambda: theirs.SoftmaxAggregation(semi_grad=True)])
def test_aggregations_of_pyg_are_taken(make):
    """Given as a module; ours are taken by theirs too."""
    one = make()
    layer, peer = both("SAGEConv", P, Q, aggr=one)
    x = torch.randn(5, P, dtype=torch.float64, requires_grad=True)
    torch.testing.assert_close(results(layer(x, EDGES), [x], layer), results(peer(x, EDGES), [x], peer))
    name = type(one).__name__
    if hasattr(ours, name) and name != "MultiAggregation":
        rows = x[EDGES[0]]
        torch.testing.assert_close(getattr(ours, name)()(rows, EDGES[1]), getattr(theirs, name)()(rows, EDGES[1]))


WHOLE = {"GCNConv": (P, Q), "SGConv": (P, Q, 2), "SSGConv": (P, Q, 0.1, 2), "MixHopConv": (P, Q), "APPNP": (2, 0.1),
         "ChebConv": (P, Q, 3), "GATConv": (P, Q, 2), "GATv2Conv": (P, Q, 2), "AGNNConv": (), "FAConv": (P,),
         "ClusterGCNConv": (P, Q, 0.5), "ARMAConv": (P, Q, 2, 2), "SAGEConv": (P, Q), "TransformerConv": (P, Q),
         "RGCNConv": (P, Q, 2), "FeaStConv": (P, Q, 2)}


#: With loops that others replace, which count in no aggregation.
AGGREGATED = [("GCNConv", "max"), ("FeaStConv", "mean"), ("ClusterGCNConv", "min"), ("APPNP", "std"),
              ("MixHopConv", "softmax")]


@pytest.mark.parametrize("name, aggr", layers.drawn([*((name, None) for name in WHOLE), *AGGREGATED], 21))
def test_layers_compile_whole_for_graphs_of_all_sizes(name, aggr):
    """Once for all: with loops that are there, twice too, and with others that are not."""
    layer = getattr(ours, name)(*WHOLE[name], **({} if aggr is None else {"aggr": aggr}))
    torch._dynamo.reset()
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager", dynamic=True)
    for nodes, count in ((5, 9), (8, 21), (13, 34)):
        x, edges = torch.randn(nodes, P, requires_grad=True), torch.randint(nodes, (2, count))
        edges[1, :2] = edges[0, :2] = 3
        args = (x, x, edges) if name == "FAConv" else (x, edges)
        args += (torch.arange(count) % 2,) if name == "RGCNConv" else ()
        got, want = (results(run(*args), [x], layer) for run in (compiled, layer))
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


@pytest.mark.filterwarnings("error:Dynamo")
@pytest.mark.parametrize("layer, kinds", [
    (ours.RGCNConv(P, Q, 2), (torch.arange(7) % 2,)), (ours.SAGEConv(P, Q, "max"), ())])
def test_a_layer_is_one_graph_without_warnings(layer, kinds):
    """Also without `fullgraph=True`, which would trace sizes that depend on values."""
    torch._dynamo.reset()
    assert torch._dynamo.explain(layer)(torch.randn(5, P), EDGES, *kinds).graph_break_count == 0


@pytest.mark.parametrize("layer, name", [
    (ours.SAGEConv(P, Q, "max"), "edge_index"), (ours.SAGEConv(P, Q, ["mean", "min"]), "edge_index"),
    (ours.GraphSizeNorm(), None), (ours.GraphSizeNorm(), "batch")])
def test_exported_layers_take_any_number_of_nodes_and_edges(layer, name):
    def inputs(nodes):
        x = {"x": torch.randn(nodes, P)}
        if name == "batch":
            return {**x, "batch": torch.arange(nodes) // 4, "batch_size": 3}
        return x if name is None else {**x, name: torch.randint(nodes, (2, 2 * nodes))}

    dynamic = torch.export.Dim.DYNAMIC
    shapes = {"x": {0: dynamic}, "edge_index": {1: dynamic}, "batch": {0: dynamic}, "batch_size": None}
    program = torch.export.export(
        layer, (), inputs(9), strict=False, dynamic_shapes={key: shapes[key] for key in inputs(9)})
    for nodes in (7, 12):
        args = inputs(nodes)
        torch.testing.assert_close(program.module()(**args), layer(**args))


@pytest.mark.skipif(not layers.EVERY, reason="runs with STRUCTCONV_EVERY_TEST=1 (make test-every)")
def test_a_layer_compiles_by_the_default_compiler():
    layer = ours.GATConv(P, Q, 2, True, 0.2, 0.0, True, A)
    torch._dynamo.reset()
    compiled = torch.compile(layer, fullgraph=True)
    for nodes, count in ((5, 9), (8, 21), (13, 34)):
        x, edges = torch.randn(nodes, P), torch.randint(nodes, (2, count))
        edges[1, :2] = edges[0, :2] = 3
        attr = torch.randn(count, A)
        torch.testing.assert_close(compiled(x, edges, attr), layer(x, edges, attr), rtol=1e-5, atol=1e-5)


def test_layers_take_meta_tensors():
    for aggr in ("mean", "max"):
        layer = ours.SAGEConv(P, Q, aggr).to("meta")
        assert layer(torch.empty(5, P, device="meta"), EDGES.to("meta")).shape == (5, Q)


X = torch.ones(5, P)


@pytest.mark.parametrize("call, message", [
    (lambda: ours.RGCNConv(P, Q, 3)(X, EDGES, torch.arange(7)), r"RGCNConv: edge_type must be in \[0, num_rel.*=3"),
    (lambda: ours.RGCNConv(P, Q, 3)(X, EDGES, torch.arange(3)), r"RGCNConv: edge_type must be integers of shape \(E=7"),
    (lambda: ours.RGCNConv(P, Q, 3, aggr="max")(X, EDGES, torch.arange(7)), r"RGCNConv: edge_type must .*got 0 to 6"),
    (lambda: ours.RGCNConv(6, Q, 3, num_blocks=2)(None, EDGES, torch.zeros(7, dtype=torch.int64)),
     "RGCNConv: x must be floating with num_blocks; got numbers of entities, or none"),
    (lambda: ours.GATConv(P, Q, edge_dim=3)(X, EDGES, torch.ones(7, 2)), r"GATConv: edge_attr must .*edge_dim=3\)"),
    (lambda: ours.GATConv(P, Q, edge_dim=3)(X, EDGES, torch.ones(6, 3)), r"GATConv: edge_attr must have .*E=7"),
    (lambda: ours.GATConv(P, Q)(X[:, 1:], EDGES), r"GATConv: x must have shape \(..., M, P=4\); got \(5, 3\)"),
    (lambda: ours.GCNConv(P, Q)(X[:, 1:], EDGES), r"GCNConv: x must have shape \(..., M, P=4\); got \(5, 3\)"),
    (lambda: ours.GCNConv(P, Q)(X, EDGES + 1), r"GCNConv: edge_index must be in \[0, .*; got 5 at edge 6"),
    (lambda: ours.SAGEConv(P, Q)(None, EDGES), r"SAGEConv: x must be a tensor"),
    *((lambda layer=layer: layer(P, Q)(X[:, 0], EDGES), rf"{layer.__name__}: x must have shape .*N, P\); got \(5,\)")
      for layer in (ours.GCNConv, ours.SAGEConv, ours.TAGConv)),
    (lambda: ours.SumAggregation()(X, EDGES[0, :4]), r"SumAggregation: the groups must .*E=5.*got \(4,\)"),
    (lambda: ours.global_mean_pool(X, EDGES[0, :4]), r"global_mean_pool: the groups must .*E=5.*got \(4,\)"),
    (lambda: ours.Linear(P, Q, weight_initializer="none"), "Linear: weight_initializer must be one of .*'glorot'"),
    (lambda: ours.Linear(P, Q, bias_initializer="glorot"), "Linear: bias_initializer must be one of None, 'zeros'"),
    (lambda: ours.NNConv(P, Q, one_layer())(X, EDGES), "NNConv: edge_attr must be given"),
    (lambda: ours.FAConv(P, normalize=False)(X, X, EDGES), "FAConv: edge_weight must be given with normalize=False"),
    (lambda: ours.GCNConv(P, Q).propagate(EDGES, x=X), "GCNConv: .*Use PyTorch Geometric's layer"),
    (lambda: ours.GCNConv(P, Q).register_propagate_forward_pre_hook(print), "GCNConv: .*Use PyTorch Geometric's layer"),
    (lambda: setattr(ours.GCNConv(P, Q), "explain_message", print), "GCNConv: .*Use PyTorch Geometric's layer"),
    (lambda: ours.GCNConv(P, Q).register_message_forward_hook(print), "GCNConv: .*Use PyTorch Geometric's layer"),
])
def test_errors_name_the_layer_and_the_argument(call, message):
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.parametrize("nodes", [torch.arange(10).view(5, 2), (torch.arange(10).view(5, 2), torch.ones(5, 2).long())])
@pytest.mark.parametrize("train_eps", [False, True])
def test_graph_isomorphism_layers_take_integers(nodes, train_eps):
    layer, peer = (library.GINConv(torch.nn.Linear(2, 3), 0.5, train_eps) for library in (ours, theirs))
    peer.load_state_dict(layer.state_dict())
    torch.testing.assert_close(layer(nodes, EDGES), peer(nodes, EDGES))


@pytest.mark.parametrize("name, options", [("GATConv", {"negative_slope": -0.5}), ("GATv2Conv", {"edge_dim": 3}),
                                           ("GATv2Conv", {"negative_slope": -0.5}), ("GATConv", {"edge_dim": 3})])
def test_attention_takes_negative_slopes_and_edges_without_attributes(name, options):
    layer, peer = pair(name, P, Q, 2, **options)
    torch.testing.assert_close(layer(X, EDGES), peer(X, EDGES), rtol=1e-5, atol=1e-5)


def test_a_subclass_with_messages_of_its_own_is_one_of_pyg():
    class Doubled(ours.GCNConv):
        def message(self, x_j, edge_weight):
            return 2 * super().message(x_j, edge_weight)

    layer, x = Doubled(P, Q), torch.randn(5, P)
    assert isinstance(layer, theirs.GCNConv) and not isinstance(layer, ours.GCNConv)
    plain = ours.GCNConv(P, Q)
    plain.load_state_dict(layer.state_dict())
    torch.testing.assert_close(layer(x, EDGES), 2 * plain(x, EDGES))
    with pytest.raises(ConfigError, match=r"Twice: a subclass must leave message passing as it is; got message.*Once"):
        type("Twice", (type("Once", (ours.GCNConv,), {}),), {"message": lambda self, x_j: 2 * x_j})


def test_messages_of_a_mixin_or_of_one_layer_are_not_ignored():
    """A mixin ahead of our layer makes the class one of PyTorch Geometric's. Setting `message` on a layer is refused,
    and under a patch makes the layer theirs."""
    def message(self, x_j, edge_weight):
        return 2 * x_j * edge_weight.view(-1, 1)

    class Doubling:
        pass

    Doubling.message = message
    mixed, plain, x = type("Mixed", (Doubling, ours.GCNConv), {})(P, Q), ours.GCNConv(P, Q), torch.randn(5, P)
    plain.load_state_dict(mixed.state_dict())
    torch.testing.assert_close(mixed(x, EDGES), 2 * plain(x, EDGES))
    behind = type("Behind", (ours.GCNConv, Doubling), {})(P, Q)
    assert isinstance(behind, ours.GCNConv)
    with pytest.raises(ConfigError, match="No messages are formed here"):
        plain.message = message.__get__(plain)
    with ours.patch() as report:
        own = theirs.GCNConv(P, Q)
        own.message = message.__get__(own)
    own.load_state_dict(plain.state_dict())
    assert type(own) is theirs.GCNConv and "GCNConv" in report.left
    torch.testing.assert_close(own(x, EDGES), 2 * plain(x, EDGES))
    converted, found = structconv.convert(own)
    assert converted is not own and found.refused and "its message" in str(found)
    torch.testing.assert_close(converted(x, EDGES), own(x, EDGES))


def check_is_planned_alike(results):
    """A call gives what it gives by the planner, to which a mode of functions sends it, but for the rounding of the
    largest of its numbers, of which the others are sums; its results."""
    actual = results()
    with BaseTorchFunctionMode():
        expected = results()
    largest = max(float(t.detach().abs().max()) for t in tree_leaves(expected) if t.numel())
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=max(1e-4, 1e-6 * largest))
    return actual


@pytest.mark.skipif(core() is None, reason="there are no native kernels")
@pytest.mark.parametrize("sizes", [(4, 6), (6, 4)])
@pytest.mark.parametrize("targets", [None, 3])
@pytest.mark.parametrize("make", [
    ours.GCNConv, ours.SAGEConv, ours.GraphConv, lambda *sizes: ours.SAGEConv(*sizes, "sum", bias=False),
    lambda *sizes: ours.SAGEConv(*sizes, root_weight=False)], ids=["gcn", "mean", "weighted", "sum", "no root"])
def test_a_layer_is_one_node_and_so_are_its_derivatives(make, targets, sizes):
    """Up to second derivatives."""
    layer, x = make(*sizes), torch.randn(6, sizes[0], requires_grad=True)
    if targets and isinstance(layer, ours.GCNConv):
        pytest.skip("a GCN has one kind of nodes")
    edges = torch.tensor([[0, 1, 2, 3, 4, 5, 0, 0], [1, 2, 0, 1, 2, 0, 2, 2]])
    given = (x, torch.randn(targets, sizes[0], requires_grad=True)) if targets else x
    leaves = (*(given if targets and hasattr(layer, "lin_r") else (x,)), *layer.parameters())

    y, *_ = check_is_planned_alike(lambda: derivatives(layer(given, edges), leaves))
    assert y.grad_fn.name() == "_ConvolveLinearBackward"


@pytest.mark.skipif(core() is None, reason="there are no native kernels")
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
@pytest.mark.parametrize("targets", [None, 3])
def test_messages_with_attributes_are_one_node_and_so_are_their_derivatives(targets, dtype):
    layer, x = ours.GINEConv(nn.Linear(4, 3), eps=0.5), torch.randn(6, 4, requires_grad=True)
    edges = torch.tensor([[0, 1, 2, 3, 4, 5, 0, 0], [1, 2, 0, 1, 2, 0, 2, 2]], dtype=dtype)
    attr = torch.randn(8, 4, requires_grad=True)
    given = (x, torch.randn(targets, 4)) if targets else x

    y, *_ = check_is_planned_alike(lambda: derivatives(layer(given, edges, attr), (x, attr, *layer.parameters())))
    assert "_MessagesBackward" in autograd_nodes(y.grad_fn)
    with torch.no_grad():
        torch.testing.assert_close(layer(given, edges, attr), y)
    y = layer(given, edges, attr)
    before = torch.autograd.grad(y.sum(), [x, attr], retain_graph=True)
    edges[:, :2] = torch.tensor([[4, 5], [0, 0]])
    after = torch.autograd.grad(y.sum(), [x, attr], retain_graph=True)
    assert all(map(torch.equal, before, after))     # a gradient under way is that of the edges that were
    with pytest.raises(RuntimeError, match="edge_index was changed"):
        torch.autograd.grad(y.sum(), x, create_graph=True)
    torch.testing.assert_close(layer(given, edges, attr), layer(given, edges.clone(), attr))


class Net(nn.Module):
    """Two layers and a readout."""

    def __init__(self, layer):
        super().__init__()
        self.first, self.second, self.head = layer, copy.deepcopy(layer), nn.Linear(8, 3)

    def forward(self, x, edges, batch):
        x = self.second(self.first(x, edges).relu(), edges).relu()
        return self.head(ours.global_mean_pool(x, batch))


@pytest.mark.skipif(core() is None, reason="there are no native kernels")
@pytest.mark.parametrize("layer, training, inference", [
    (ours.GCNConv(8, 8), 170, 150), (ours.SAGEConv(8, 8), 155, 125),
    (ours.GINConv(nn.Sequential(nn.Linear(8, 8), nn.ReLU())), 110, 100), (ours.GATConv(8, 4, 2), 150, 130),
    (ours.GATv2Conv(8, 4, 2), 160, 140), (ours.TransformerConv(8, 4, 2), 145, 125)], ids=lambda one: type(one).__name__)
def test_a_net_costs_few_own_calls_on_a_new_batch(layer, training, inference):
    net, x, batch = Net(layer), torch.randn(40, 8), torch.arange(4).repeat_interleave(10)

    def forward():
        source = torch.arange(40)
        return net(x, torch.stack([source, source // 10 * 10 + (source + 1) % 10]), batch.clone())

    def step():
        forward().sum().backward()

    for run, context, most in ((step, torch.enable_grad, training), (forward, torch.no_grad, inference)):
        with context():
            run()
            assert own_calls(run) <= most


@pytest.mark.parametrize("more", [{}, {"edge_dim": A}, {"aggr": "mean"}], ids=["", "attributes", "mean"])
@pytest.mark.parametrize("name, apart", [("GATConv", "add_self_loops"), ("GATv2Conv", "add_self_loops"),
                                         ("TransformerConv", "root_weight")])
@pytest.mark.parametrize("rows", [2, 3000])
def test_dropout_draws_for_each_of_several_edges_between_two_entries(name, apart, more, rows):
    layer = getattr(ours, name)(P, Q, dropout=0.5, bias=False, **{apart: False}, **more)
    x, index, drawn = torch.ones(rows, P, requires_grad=True), torch.tensor([[0, 0], [1, 1]]), set()
    attr = torch.ones(2, A) if "edge_dim" in more else None
    expected = layer.eval()(x, index, attr)[1].sum()
    layer.train()
    for seed in range(20):
        results = []
        for same in (index, index.clone()):
            torch.manual_seed(seed)
            y = layer(x, same, attr)[1].sum()
            results.append((y, *torch.autograd.grad(y, x)))
        torch.testing.assert_close(*results)
        drawn.add(round(float(y / expected), 3))
        if attr is None:  # y is linear in the one source, because both of its weights are a half
            torch.testing.assert_close(results[0][1][0].sum(), y)
    assert drawn == {0.0, 1.0, 2.0}


WEIGHED = [("GCNConv", {}), ("GraphConv", {}), ("GraphConv", {"aggr": "mean"}), ("TAGConv", {}), ("ARMAConv", {})]


@pytest.mark.parametrize("name, more, part", [
    ("GCNConv", {"cached": True}, None), ("GATConv", {}, None), ("SAGEConv", {"aggr": "max"}, None),
    *[(*each, part) for each in WEIGHED for part in ("edges", "weights")]])
@pytest.mark.parametrize("shared", ["before", "after"])
def test_a_write_through_numpy_takes_effect(name, more, part, shared):
    layer, x, index = getattr(ours, name)(P, Q, **more), torch.randn(5, P), EDGES.clone()
    weight = () if part is None else (torch.rand(EDGES.shape[1]),)
    written = weight[0] if part == "weights" else index if part is None else index[1]
    array = written.numpy() if shared == "before" else None
    before = layer(x, index, *weight)
    (written.numpy() if array is None else array)[1] = 3
    y = layer(x, index, *weight)
    assert not torch.equal(y, before)
    torch.testing.assert_close(y, layer(x, index.clone(), *(t.clone() for t in weight)))


@pytest.mark.parametrize("name", ["SAGEConv", "GCNConv", "GraphConv"])
@pytest.mark.parametrize("shared", ["before", "after"])
def test_a_write_to_the_values_of_a_sparse_matrix_through_numpy_takes_effect(name, shared):
    layer, x, index = getattr(ours, name)(P, Q), torch.randn(5, P), torch.tensor([[0, 1, 2, 4], [1, 0, 3, 2]])
    values = torch.ones(4)
    matrix = torch.sparse_coo_tensor(index, values, (5, 5), is_coalesced=True)
    array = values.numpy() if shared == "before" else None
    layer(x, matrix)
    (values.numpy() if array is None else array)[1] = 3
    torch.testing.assert_close(layer(x, matrix), layer(x, torch.sparse_coo_tensor(index, values.clone(), (5, 5))))


@pytest.mark.parametrize("layout", [None, torch.sparse_coo, torch.sparse_csr, torch.sparse_csc])
@pytest.mark.parametrize("name, aggr", [("GraphConv", "mean"), ("GraphConv", "sum"), ("SAGEConv", "max"),
                                        ("GATConv", "sum")])
def test_layers_hold_no_edges(name, aggr, layout):
    layer, x, weight = getattr(ours, name)(P, Q, aggr=aggr), torch.randn(5, P), torch.rand(EDGES.shape[1])
    inputs = [EDGES.clone(), *[weight] * (name == "GraphConv")] if layout is None else [
        torch.sparse_coo_tensor(EDGES, weight, (5, 5)).coalesce().to_sparse(layout=layout)]
    layer(x, *inputs)
    inputs = list(map(weakref.ref, inputs))
    del weight
    assert not any(ref() is not None for ref in inputs)


def test_weights_of_a_numpy_array_that_are_not_numbers_are_unchanged():
    weight = torch.full((EDGES.shape[1],), torch.nan)
    weight.numpy()
    layer, x = ours.GraphConv(P, P), torch.randn(2, 5, P, requires_grad=True)  # which keeps the weights
    layer(layer(x, EDGES, weight), EDGES, weight).sum().backward()
    assert x.grad.isnan().any() and weight._version == 0


SAGE = ours.SAGEConv(P, Q)


@pytest.mark.parametrize("function", [ours.global_mean_pool, ours.GraphNorm(P), lambda x, _: SAGE(x, EDGES)])
def test_layers_may_have_another_dtype_than_the_default(function):
    """Neither during a change of the default nor after it."""
    x, groups, results = torch.randn(5, P, requires_grad=True), torch.tensor([0, 0, 1, 2, 2]), []
    for default in (torch.float64, torch.float32):
        torch.set_default_dtype(default)
        try:
            loss = function(x, groups).square().sum()
            first, = torch.autograd.grad(loss, x, retain_graph=True)
            recorded, = torch.autograd.grad(loss, x, create_graph=True)
            results.append((first, recorded, *torch.autograd.grad(recorded.square().sum(), x)))
        finally:
            torch.set_default_dtype(torch.float32)
    torch.testing.assert_close(*results)
    torch.testing.assert_close(*results[0][:2])


TYPED = ours.RGCNConv(P, Q, 3)


@pytest.mark.parametrize("function", [
    ours.global_mean_pool, ours.global_max_pool, ours.GraphNorm(P), ours.InstanceNorm(P), ours.GraphSizeNorm(),
    lambda x, groups: ours.GraphSizeNorm()(x, groups, 6), lambda x, groups: functions.softmax(x, groups, num_nodes=6),
    lambda x, groups: functions.scatter(x, groups), lambda x, groups: TYPED(x, EDGES[:, :6], groups)])
@pytest.mark.parametrize("first", [[0, 0, 1, 1, 2, 2], [2, 0, 1, 1, 2, 0]], ids=["sorted", "mixed"])
def test_a_write_to_groups_through_numpy_takes_effect(function, first):
    x, groups = torch.randn(6, P), torch.tensor(first)
    array = groups.numpy()
    function(x, groups)
    for numbers in ([0, 1, 1, 1, 2, 2], [1, 0, 0, 2, 2, 1], first):
        array[:] = numbers
        torch.testing.assert_close(function(x, groups), function(x, groups.clone()))


@pytest.mark.parametrize("dtype", [torch.int64, torch.uint8, torch.bool])
def test_weights_may_be_integers(dtype):
    layer, peer = both("GraphConv", P, Q)
    x, weight = torch.randn(5, P).double(), torch.randint(0, 2, (EDGES.shape[1],)).to(dtype)
    torch.testing.assert_close(layer(x, EDGES, weight), peer(x, EDGES, weight))
    weight[0] ^= True
    torch.testing.assert_close(layer(x, EDGES, weight), peer(x, EDGES, weight))


@pytest.mark.parametrize("seed", some(range(12), 4))
def test_calls_in_any_order_equal_calls_with_fresh_edges(seed):
    """What is remembered of edges serves no other call: of other weights, layers, dtypes, modes or changed edges."""
    chance, edges, x = random.Random(seed), torch.randint(0, 9, (2, 30)), torch.randn(9, P)
    values = {"weight": [torch.rand(30), torch.rand(30)], "attr": [torch.randn(30, A), torch.randn(30, A)]}
    layers_and_values = []
    for name in ("GATConv", *(name for name, kind in KINDS.items() if "weight" in kind.inputs)):
        options = {each: chance.random() < 0.5 for each in ("add_self_loops", "normalize", "cached")
                   if each in KINDS[name].options}
        kind = "attr" if name == "GATConv" else "weight"
        args = (2 if isinstance(value, list) else value for value in KINDS[name].args)
        layer = getattr(ours, name)(*args, **options, **({"edge_dim": A} if kind == "attr" else {}))
        layers_and_values.append((layer, values[kind]))
    for _ in range(60):
        layer, known = chance.choice(layers_and_values)
        dtype, change = chance.choice([torch.float32, torch.float32, torch.float64]), chance.random()
        if change < 0.1:
            (edges[:, 3:5].random_(9) if change < 0.05 else chance.choice(known)[:5].uniform_())
        value = chance.choice([None, *known])
        value = value if value is None or dtype is torch.float32 else value.to(dtype)
        with chance.choice([torch.enable_grad, torch.no_grad])():
            y = layer.to(dtype)(x.to(dtype), edges, value)
            fresh = copy.deepcopy(layer)(x.to(dtype), edges.clone(), None if value is None else value.clone())
        torch.testing.assert_close(y, fresh)


def test_relational_layers_on_one_graph_do_not_share_their_means() -> None:
    x, edges, kind = torch.randn(40, 16), torch.randint(0, 37, (2, 150)), torch.randint(0, 3, (150,))
    for kinds in (("mean", "add"), ("add", "mean")):
        for layer, peer in [pair("RGCNConv", 16, 16, 3, aggr=aggr) for aggr in kinds]:
            torch.testing.assert_close(layer(x, edges, kind), peer(x, edges, kind), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("make", [lambda loops: ours.GATConv(P, Q, add_self_loops=loops),
                                  lambda loops: ours.GATConv((P, P), Q, add_self_loops=loops),
                                  lambda loops: ours.GATv2Conv(P, Q, add_self_loops=loops),
                                  lambda loops: ours.FeaStConv(P, Q, add_self_loops=loops)])
def test_loops_between_nodes_of_two_kinds_are_announced(make, recwarn):
    x, edges = torch.randn(5, P), torch.tensor([[0, 1, 4], [1, 0, 2]])
    for inputs in (x, (x, x), (x, x[:3])):  # nodes of one kind, of which the first are the targets
        make(True)(inputs, edges)
    make(False)((x, torch.randn(3, P)), edges)
    assert not recwarn.list
    with pytest.warns(UserWarning, match="Conv joins source n to target n, .*add_self_loops=False"):
        make(True)((x, torch.randn(3, P)), edges)
    if isinstance(make(True), ours.GATConv):
        with pytest.warns(UserWarning, match="joins source n to target n"):
            make(True)((x, None), edges, size=(5, 3))


@pytest.mark.parametrize("normalization, weighted", [(None, False), (None, True), ("sym", True), ("rw", True)])
@pytest.mark.parametrize("aggr", ["add", "max"])
def test_a_batch_gives_chebyshev_polynomials_of_each_graph(normalization, weighted, aggr):
    layer, peer = both("ChebConv", P, Q, 3, normalization, aggr=aggr)
    triangle, star = torch.tensor([[0, 1, 2, 1, 2, 0], [1, 2, 0, 0, 1, 2]]), torch.tensor([[0, 0, 0, 1, 2, 3],
                                                                                          [1, 2, 3, 0, 0, 0]])
    graphs = [(torch.randn(n, P, dtype=torch.float64), edges, 0.1 + torch.rand(6, dtype=torch.float64) if weighted
               else None) for n, edges in ((3, triangle), (4, star))]
    x, edges = torch.cat([x for x, _, _ in graphs]).requires_grad_(), torch.cat([triangle, star + 3], 1)
    weight = torch.cat([weight for _, _, weight in graphs]).requires_grad_() if weighted else None
    batch, leaves = torch.tensor([0, 0, 0, 1, 1, 1, 1]), [x, *([weight] if weighted else [])]
    separate = torch.cat([peer(rows, own, one) for rows, own, one in zip(
        x.split([3, 4]), (triangle, star), weight.split(6) if weighted else (None, None), strict=True)])
    torch.testing.assert_close(results(layer(x, edges, weight, batch), leaves, layer),
                               results(separate, leaves, peer))
    if normalization is None:
        assert (layer(x, edges, weight) - separate).abs().max() > 0.01     # one bound for all
        alone = layer(x[:3], triangle, None if weight is None else weight[:6], batch[:3])
        torch.testing.assert_close(alone, separate[:3])


def test_a_graph_without_edges_has_chebyshev_polynomials():
    layer, x = ours.ChebConv(P, Q, 2, None), torch.randn(3, P)
    together = layer(x, torch.tensor([[0, 1], [1, 0]]), None, torch.tensor([0, 0, 1]))
    torch.testing.assert_close(together[2:], layer.lins[0](x[2:]) - layer.lins[1](x[2:]) + layer.bias)
    torch.testing.assert_close(layer(x[2:], torch.empty(2, 0, dtype=torch.int64)), together[2:])


def test_an_aggregation_lays_out_its_groups_once(monkeypatch):
    """Until the numbers of the groups change, where a product with a matrix adds up many numbers."""
    calls = []
    monkeypatch.setattr(edges, "numbered", lambda index: calls.append(index) or numbered(index))
    x, index, layer = torch.randn(4, 1 << 15).double(), torch.tensor([0, 1, 1, 0]), ours.SumAggregation()
    for _ in range(2):
        torch.testing.assert_close(layer(x, index), torch.stack([x[0] + x[3], x[1] + x[2]]))
    assert len(calls) == 1
    index[1] = 0
    torch.testing.assert_close(layer(x, index), torch.stack([x[0] + x[1] + x[3], x[2]]))
    assert len(calls) == 2


@pytest.mark.skipif(core() is None, reason="there are no native kernels")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("index", [None, torch.tensor([2, 0, 0, 2, 0, 4]), torch.tensor([0, 0, 0, 2, 2, 3])])
@pytest.mark.parametrize("kind", ["sum", "mean", "max", "min", "softmax"])
def test_groups_of_few_rows_need_no_graph_in_any_dtype(monkeypatch, kind, index, dtype):
    """For it each new mini-batch would sort its groups. Equal maxima of a group share the gradient; it may be empty."""
    x = torch.randint(-4, 5, (6, 3)).to(dtype).requires_grad_()
    groups, spread = torch.zeros(6, dtype=torch.int64) if index is None else index, torch.randn(6, 3).to(dtype)
    if kind == "softmax":
        expected = torch.stack([x[groups == g].to(torch.promote_types(dtype, torch.float32)).softmax(0)[
            (groups[:n] == g).sum()] for n, g in enumerate(groups)])
    else:
        reduce = {"sum": torch.sum, "mean": torch.mean, "max": torch.amax, "min": torch.amin}[kind]
        if index is None and kind in ("max", "min"):  # one group; theirs, too, gives its first extreme the gradient
            reduce = lambda t, dim: getattr(t, kind)(dim).values  # noqa: E731
        expected = torch.stack([reduce(t, 0) if len(t) else x.new_zeros(3) for t in (
            x[groups == g] for g in range(int(groups.max()) + 1))])
    for name in ("memberships", "adjacency", "pool_extreme"):
        monkeypatch.setattr(functions, name, None)
    y = functions.softmax(x, groups) if kind == "softmax" else functions.pooled(x, index, None, kind)
    for result, peer in ((y, expected.to(dtype)), *[[torch.autograd.grad((t * spread[:len(t)]).sum(), x)[0] for t in (
            y, expected.to(dtype))]]):
        torch.testing.assert_close(result, peer, rtol=4 * torch.finfo(dtype).eps, atol=4 * torch.finfo(dtype).eps)


@pytest.mark.skipif(core() is None, reason="there are no native kernels")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("name, options", [
    ("Softmax", {}), ("Softmax", {"t": 0.5, "semi_grad": True}), ("Softmax", {"t": 2.0, "learn": True, "channels": 3}),
    ("Var", {}), ("Std", {"semi_grad": True}), ("Std", {})])
def test_softmaxes_and_deviations_of_groups_in_any_order_need_no_graph(monkeypatch, name, options, dtype):
    """Whose layout takes longer than the sums."""
    index, x = torch.tensor([2, 0, 0, 2, 0, 4, 2]), torch.randn(7, 3).to(dtype).requires_grad_()
    layer, peer = (getattr(library, f"{name}Aggregation")(**options).to(dtype) for library in (ours, theirs))
    expected = peer(x, index)
    for name in ("memberships", "attend", "project"):
        monkeypatch.setattr(aggregations, name, None)
    y = layer(x, index)
    tolerance = (2 if dtype is torch.bfloat16 else 16) * torch.finfo(dtype).eps
    torch.testing.assert_close(y, expected, rtol=tolerance, atol=tolerance)
    for result, other in zip(*(torch.autograd.grad(t.sum() + t.square().sum(), [x, *m.parameters()]) for t, m in (
            (y, layer), (expected, peer))), strict=True):
        torch.testing.assert_close(result, other, rtol=4 * tolerance, atol=4 * tolerance)


def test_groups_given_by_their_starts_have_the_same_deviations():
    """Also where the mean of the squares is no good: far from zero."""
    x, index, starts = 100 + torch.randn(6, 3), torch.tensor([0, 0, 0, 2, 2, 2]), torch.tensor([0, 3, 3, 6])
    layer = ours.StdAggregation()
    torch.testing.assert_close(layer(x, ptr=starts), layer(x, index), rtol=0, atol=0)
    torch.testing.assert_close(layer(x, ptr=starts)[0], x[:3].std(0, unbiased=False), rtol=1e-4, atol=0)


@pytest.mark.parametrize("options", [{}, {"weight_initializer": "kaiming_uniform", "bias_initializer": "zeros"},
                                     {"weight_initializer": "glorot"}, {"weight_initializer": "uniform"}])
@pytest.mark.parametrize("channels", [P, -1])
def test_linear_layers_are_drawn_as_there(channels, options):
    x, values = torch.randn(5, P), []
    for library in (ours, theirs):
        torch.manual_seed(0)
        layer = library.Linear(channels, Q, **options)
        values.append((layer(x), layer.state_dict()))
    torch.testing.assert_close(*values)


def test_a_linear_layer_that_loads_a_lazy_one_is_lazy():
    layer = ours.Linear(P, Q)
    layer.load_state_dict(ours.Linear(-1, Q).state_dict())
    assert repr(layer) == "Linear(-1, 6, bias=True)" and layer(torch.randn(3, 7)).shape == (3, Q)


def test_variances_with_and_without_the_gradient_of_squares_are_joined():
    x, index, seed = torch.randn(6, 3, requires_grad=True), torch.tensor([0, 0, 0, 1, 1, 1]), torch.randn(2, 3)
    parts = [ours.VarAggregation(semi_grad=True), ours.VarAggregation()]
    both = ours.MultiAggregation(parts, mode="sum")(x, index)
    expected = sum(torch.autograd.grad((part(x, index) * seed).sum(), x)[0] for part in parts)
    torch.testing.assert_close(torch.autograd.grad((both * seed).sum(), x)[0], expected)


@pytest.mark.parametrize("lead", [(), (2,)])
@pytest.mark.parametrize("index", [torch.tensor([0, 0, 1, 1, 1, 2]), torch.tensor([2, 1, 0, 1, 0, 1])], ids=str)
def test_each_of_several_variances_keeps_its_own_gradient(index, lead):
    """As theirs one by one, and joined over x of three axes; over rows theirs share one, and mix up equal classes."""
    def parts(library):
        return [library.VarAggregation(True), library.StdAggregation(), library.VarAggregation(),
                library.MeanAggregation(), library.StdAggregation(True)]

    x = torch.randn(*lead, 6, P, dtype=torch.float64, requires_grad=True)
    joined = results(ours.MultiAggregation(parts(ours))(x, index), [x], torch.nn.Module())
    expected = torch.cat([part(x, index) for part in parts(theirs)], -1)
    torch.testing.assert_close(joined, results(expected, [x], torch.nn.Module()))
    if lead:
        peer = theirs.MultiAggregation(parts(theirs))(x, index)
        torch.testing.assert_close(joined, results(peer, [x], torch.nn.Module()))


@pytest.mark.parametrize("name, args", [
    ("MeanAggregation", ()), ("VarAggregation", ()), ("StdAggregation", ()), ("SoftmaxAggregation", ()),
    ("PowerMeanAggregation", ()), ("MultiAggregation", (["mean", "max"],))])
def test_the_forward_pass_and_hooks_of_an_aggregation_are_called(name, args):
    x, index, edges, found = torch.rand(9, 3) + 0.1, torch.arange(9) // 2, torch.randint(9, (2, 20)), []
    for library in (ours, theirs):
        kind = getattr(library, name)

        class Doubled(kind):
            def forward(self, *args, **options):
                return 2 * super().forward(*args, **options)

        torch.manual_seed(0)
        hooked, doubled = kind(*args), Doubled(*args)
        hooked.register_forward_hook(lambda module, args, y: 3 * y)
        layers = [library.SAGEConv((3, 3), 2, aggr=how) for how in (hooked, doubled) if name != "MultiAggregation"]
        found.append([doubled(x, index), library.MultiAggregation([doubled])(x, index),
                      doubled(x[:, None], index, dim=0), *(layer(x, edges) for layer in layers)])
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-4)


def test_hooks_of_parts_of_an_aggregation_are_called():
    x, index, found = torch.rand(9, 3), torch.arange(9) // 3, []
    for library in (ours, theirs):
        layer = library.StdAggregation()
        layer.var_aggr.register_forward_hook(lambda module, args, y: 4 * y)
        found.append([layer(x, index), layer(x.flip(0), index.flip(0))])
    torch.testing.assert_close(*found)


@pytest.mark.parametrize("name", ["MaxAggregation", "MinAggregation"])
@pytest.mark.parametrize("lead", [(), (2,)])
@pytest.mark.parametrize("index", [torch.tensor([0, 0, 1, 1, 1, 2]), torch.tensor([2, 1, 0, 1, 0, 1])], ids=str)
def test_a_group_without_finite_numbers_keeps_its_gradient(index, lead, name):
    fill = -torch.inf if name == "MaxAggregation" else torch.inf
    x = torch.randn(*lead, 6, P, dtype=torch.float64)
    x[..., index == 0, :], x[..., index == 1, :1] = fill, fill
    x.requires_grad_()
    got, want = (results(getattr(library, name)()(x, index), [x], torch.nn.Module()) for library in (ours, theirs))
    torch.testing.assert_close(got, want)


def test_what_is_not_finite_in_a_group_reaches_what_it_should():
    x, index = torch.tensor([[1.0], [-torch.inf], [2.0], [3.0]], requires_grad=True), torch.tensor([0, 0, 0, 1])
    grad, = torch.autograd.grad(ours.SoftmaxAggregation(t=0.3, semi_grad=True)(x, index).sum(), x)
    torch.testing.assert_close(grad.flatten(), torch.tensor([0.42556, 0.0, 0.57444, 1.0]), atol=1e-4, rtol=0)
    for layer in (ours.MaxAggregation(), ours.MinAggregation()):
        for groups in (torch.tensor([0, 0, 1]), torch.tensor([1, 1, 0])):
            x = torch.tensor([[1.0], [torch.nan], [2.0]], requires_grad=True)
            grad, = torch.autograd.grad(layer(x, groups).sum(), x)
            torch.testing.assert_close(grad.flatten(), torch.tensor([torch.nan, torch.nan, 1.0]), equal_nan=True)


def test_graphs_without_rows_before_others_have_numbers_too():
    x, edge_index = torch.randn(2, 3), torch.tensor([[0, 1], [1, 0]])
    layer = ours.ChebConv(3, 2, 2, normalization=None)
    torch.testing.assert_close(layer(x, edge_index, batch=torch.tensor([3, 3])), layer(x, edge_index))


ONE_NODE = {"GATConv": "_AttendLayer", "GATv2Conv": "_AttendPairs", "TransformerConv": "_AttendDots",
            "GATConv with attributes": "_AttendBilinear"}


@pytest.mark.skipif(core() is None, reason="there are no native kernels")
@pytest.mark.parametrize("concat", [True, False])
@pytest.mark.parametrize("name", ONE_NODE)
def test_attention_among_few_nodes_is_one_node_of_autograd(name, concat):
    """It gives the numbers of the expression, with dropout and second derivatives. Node 4 has only a loop."""
    edges, x = torch.tensor([[0, 1, 2, 0, 3, 3], [1, 2, 0, 3, 1, 3]]), torch.randn(5, 6, requires_grad=True)
    kind, _, attributes = name.partition(" with ")
    edges = edges[:, :5] if attributes else edges  # a loop would be replaced
    options = {"edge_dim": 2, "fill_value": 1.0 if concat else "mean"} if attributes else {}
    attr = {"edge_attr": torch.randn(5, 2)} if attributes else {}
    for dropout in (0.0, 0.4):
        layer = getattr(ours, kind)(6, 4, heads=3, concat=concat, dropout=dropout, **options)
        layer.load_state_dict({key: torch.randn_like(t) for key, t in layer.state_dict().items()})
        found = []
        for weights in (None, True):
            torch.manual_seed(3)
            y = layer(x, edges, **attr, return_attention_weights=weights)
            y = y[0] if weights else y
            first = torch.autograd.grad(y.square().sum(), [x, *layer.parameters()], create_graph=True)
            found.append([y, *first, *torch.autograd.grad(sum(g.square().sum() for g in first), x)])
        torch.testing.assert_close(*found, rtol=2e-4, atol=1e-4 * float(found[1][-1].abs().max()))
        torch.manual_seed(3)
        y = layer(x, edges, **attr)  # torch 2.12 names the nodes of living results only
        names = autograd_nodes(y.grad_fn)
        assert f"{ONE_NODE[name]}Backward" in names or (name == "GATv2Conv" and dropout)


def _few(kind, *args, **options):
    return kind, args, options


FEW = {
    "attributes": _few("GATConv", 4, 3, heads=2, edge_dim=2), "pair": _few("GATConv", (4, 4), 3, heads=2, edge_dim=2,
                                                                           add_self_loops=False),
    "sums": _few("GATv2Conv", 4, 3, heads=2, edge_dim=2, fill_value="add"),
    "v2": _few("GATv2Conv", 4, 3, edge_dim=2, add_self_loops=False),
    "dots": _few("TransformerConv", 4, 3, heads=2, edge_dim=2), "cosines": _few("AGNNConv"),
    "gaussians": _few("GMMConv", 4, 3, dim=2, kernel_size=3), "gaussian": _few("GMMConv", 4, 3, 2, 1, aggr="add"),
    "linear": _few("NNConv", 4, 3, nn.Linear(2, 12)), "hidden": _few("NNConv", 4, 3, nn.Sequential(
        nn.Linear(2, 5), nn.ReLU(), nn.Linear(5, 12, bias=False)), aggr="mean"),
    "steered": _few("FeaStConv", 4, 3, heads=2), "one head": _few("FeaStConv", 4, 3, add_self_loops=False),
    "signed": _few("FAConv", 4), "means": _few("GINEConv", nn.Linear(4, 3), edge_dim=2, aggr="mean")}


@pytest.mark.skipif(core() is None, reason="there are no native kernels")
@pytest.mark.parametrize("dropout", [0.0, 0.5])
@pytest.mark.parametrize("name", FEW)
def test_few_edges_give_what_a_plan_gives(name, dropout):
    """Up to second derivatives; two edges join 0 and 1."""
    kind, args, options = FEW[name]
    if dropout and kind not in ("GATConv", "GATv2Conv", "TransformerConv", "FAConv"):
        pytest.skip("it has no dropout")
    layer = getattr(ours, kind)(*args, **options, **({"dropout": dropout} if dropout else {}))
    edges, x = torch.tensor([[0, 1, 2, 0, 3, 3, 0], [1, 2, 0, 3, 1, 3, 1]]), torch.randn(5, 4, requires_grad=True)
    attr = torch.rand(7, 2, requires_grad=True)
    calls = {"AGNNConv": (edges,), "FeaStConv": (edges,), "FAConv": (x, edges)}.get(kind, (edges, attr))
    inputs = (x, x) if name == "pair" else x
    leaves = [x, *([attr] if len(calls) == 2 and calls[1] is attr else []), *layer.parameters()]

    def results():
        torch.manual_seed(3)
        return derivatives(layer(inputs, *calls), leaves)

    check_is_planned_alike(results)
    y = layer(inputs, *calls)
    nodes = "_AttendBilinearBackward", "_AttendAdditiveBackward", "_WeighRowsBackward", "_MessagesBackward"
    assert {*nodes} & {*autograd_nodes(y.grad_fn)}
    if kind in ("GMMConv", "NNConv", "GINEConv"):  # others read a copy, or torch's operators refuse the change
        edges[:, 0] = torch.tensor([4, 0])
        with pytest.raises(RuntimeError, match="edge_index was changed"):
            torch.autograd.grad(y.sum(), leaves, create_graph=True)


class _Halves(nn.Sequential):
    """A network with arguments of its own, which may change what its layers give."""

    def __init__(self, factor=None):
        super().__init__(nn.Linear(2, 5), nn.ReLU(), nn.Linear(5, 12))
        if factor is not None:
            self.forward = lambda x: factor * nn.Sequential.forward(self, x)


HOOKS = {
    "before": lambda layer: layer.register_forward_pre_hook(lambda _, inputs: (2 * inputs[0],)),
    "after": lambda layer: layer.register_forward_hook(lambda _, inputs, y: 2 * y),
    "gradients": lambda layer: layer.register_full_backward_hook(lambda _, given, other: (2 * given[0],)),
    "forward": lambda layer: setattr(layer, "forward", lambda x, old=layer.forward: 2 * old(x)),
    "norm": lambda layer: (nn.utils.weight_norm(layer), layer.weight_g.data.mul_(2))}


@pytest.mark.filterwarnings("ignore:.*weight_norm")
@pytest.mark.parametrize("part", ["", "0", "2"])
@pytest.mark.parametrize("how", HOOKS)
def test_calls_of_the_network_of_edges_are_its_own(how, part):
    if how == "norm" and not part:
        pytest.skip("it has no weight")
    reference, layer = (module.NNConv(4, 3, _Halves()).double() for module in (theirs, ours))
    layer.load_state_dict(reference.state_dict())
    x, attr = torch.randn(5, 4).double(), torch.rand(9, 2, dtype=torch.float64, requires_grad=True)
    edges = torch.randint(5, (2, 9))
    results = []
    for conv in (reference, layer):
        HOOKS[how](conv.nn.get_submodule(part))
        results.append(derivatives(conv(x, edges, attr), [attr, *conv.parameters()]))
    torch.testing.assert_close(results[1], results[0])


def test_networks_of_edges_may_be_lazy_and_of_any_class():
    x, edges, attr = torch.randn(5, 4), torch.randint(5, (2, 9)), torch.rand(9, 2)
    for network in (lambda module: module.Linear(-1, 12), lambda module: nn.Sequential(
            nn.Linear(2, 5), module.Linear(-1, 12)), lambda _: _Halves(), lambda _: _Halves(0.5)):
        results = []
        for module in (theirs, ours):
            torch.manual_seed(0)
            results.append(module.NNConv(4, 3, network(module))(x, edges, attr))
        torch.testing.assert_close(*results[::-1])


@pytest.mark.parametrize("width, channels, outputs", [(2, 4, 12), (1, 2, 12), (1, 4, 24)])
def test_a_network_of_edges_that_does_not_fit_is_refused(width, channels, outputs):
    """Also where its numbers can be read as those of more or of wider heads."""
    layer = ours.NNConv(4, 3, nn.Linear(1, outputs, bias=False), bias=False, root_weight=False)
    with pytest.raises(ShapeError, match="the weight of nn's last layer"):
        layer(torch.randn(5, channels), torch.randint(5, (2, 9)), torch.rand(9, width))


@pytest.mark.parametrize("eps", [True, torch.tensor(0.3), nn.Parameter(torch.tensor(0.3))])
def test_eps_may_be_a_tensor(eps):
    layer, reference = pair("FAConv", 4)
    x, x_0, edges = torch.randn(5, 4), torch.randn(5, 4, requires_grad=True), torch.randint(5, (2, 9))
    results = []
    for conv in (reference, layer):
        conv.eps = eps
        results.append(derivatives(conv(x, x_0, edges), [x_0, *conv.parameters()]))
    torch.testing.assert_close(results[1], results[0], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("few", [True, False])
@pytest.mark.parametrize("kind, options, part", [
    ("GATConv", {"heads": 2}, "lin"), ("GATConv", {"heads": 2, "edge_dim": 2}, "lin_edge"),
    ("FeaStConv", {"heads": 2}, "lin"), ("GCNConv", {}, "lin"), ("ChebConv", {"K": 2}, "lins.0"),
    ("TAGConv", {"K": 2}, "lins.1")])
def test_a_bias_may_be_added_to_a_layer_within(kind, options, part, few):
    """As tools do that merge a layer with a normalization before it."""
    layer, reference = pair(kind, 4, 3, **options)
    nodes = 5 if few else 9000
    x, edges = torch.randn(nodes, 4), torch.randint(nodes, (2, 2 * nodes))
    calls = (torch.rand(2 * nodes, 2),) if "edge_dim" in options else ()
    bias, results = None, []
    for conv in (reference, layer):
        within = conv.get_submodule(part)
        bias = nn.Parameter(torch.randn(len(within.weight))) if bias is None else bias
        within.bias = bias
        y = conv(x, edges, *calls)
        results.append([y, *torch.autograd.grad(y.square().mean(), bias)])
    torch.testing.assert_close(results[1], results[0], rtol=1e-4, atol=1e-5)


def test_negated_views_are_propagated():
    x, edges = torch.randn(5, 4), torch.randint(5, (2, 9))
    layer = ours.APPNP(2, 0.1)
    torch.testing.assert_close(layer(torch._neg_view(x), edges), -layer(x, edges))


@pytest.mark.parametrize("name", ["GraphConv", "GCNConv", "TAGConv", "SGConv"])
@pytest.mark.parametrize("column", [torch.rand(7, 2)[:, 0], torch.tensor(0.5).expand(7)])
def test_weights_may_be_a_column_of_attributes(name, column):
    layer, x = getattr(ours, name)(P, Q), torch.randn(5, P)
    torch.testing.assert_close(layer(x, EDGES, column), layer(x, EDGES, column.contiguous()))


class Counting(nn.Module):
    """A parametrization that counts its readings."""

    readings = 0

    def forward(self, weight):
        self.readings += 1
        return weight


@pytest.mark.parametrize(("name", "args", "inputs"), [
    ("ARMAConv", (P, Q, 1, 2), ()), ("RGCNConv", (P, Q, 2, 3), (torch.tensor([0, 1, 1, 0, 1, 0, 0]),)),
    ("GMMConv", (P, Q, A, 2), (torch.randn(7, A),))])
def test_a_call_reads_a_parametrized_weight_once(name, args, inputs):
    """As PyTorch Geometric: a spectral norm changes at each reading, and dropout of weights draws others."""
    layer, read = getattr(ours, name)(*args, bias=False), {}
    for parameter, _ in list(layer.named_parameters(recurse=False)):
        read[parameter] = Counting()
        register_parametrization(layer, parameter, read[parameter], unsafe=True)
    layer(torch.randn(5, P), EDGES, *inputs)
    counts = {parameter: counting.readings for parameter, counting in read.items()}
    assert counts == {parameter: 2 if parameter == "root_weight" else 1 for parameter in read}  # that of two layers


_SUMS: dict[str, Any] = {
    "global_add_pool": lambda x, edges, groups: ours.global_add_pool(x, groups),
    "global_mean_pool": lambda x, edges, groups: ours.global_mean_pool(x, groups),
    "SumAggregation": lambda x, edges, groups: ours.SumAggregation()(x, groups),
    "MeanSubtractionNorm": lambda x, edges, groups: ours.MeanSubtractionNorm()(x, groups),
    "APPNP": lambda x, edges, groups: ours.APPNP(2, 0.1)(x, edges),
    "GINConv": lambda x, edges, groups: ours.GINConv(nn.Identity())(x, edges),
}


@pytest.mark.parametrize("name", _SUMS)
@pytest.mark.parametrize("channels", [8, 300])
def test_what_is_only_summed_may_change_before_the_backward(name: str, channels: int) -> None:
    leaf, groups = torch.randn(40, channels, requires_grad=True), torch.arange(40) // 9
    edges, grads = torch.randint(40, (2, 120), generator=torch.Generator().manual_seed(0)), []
    for change in (False, True):
        x = leaf * 1
        y = _SUMS[name](x, edges, groups)
        if change:
            x.zero_()
        grads.append(torch.autograd.grad(y.square().sum(), leaf, create_graph=True)[0])
    torch.testing.assert_close(*grads)
    grads[1].sum().backward()  # the second derivative


_MATRIX = torch.sparse_coo_tensor(EDGES.flip(0), torch.linspace(0.2, 1.8, 7), (5, 5)).coalesce()
_CHANGED: dict[str, Any] = {
    **{name: lambda x, name=name, args=args: getattr(ours, name)(*args)(x, EDGES) for name, args in (
        ("APPNP", (2, 0.1)), ("GCNConv", (P, Q)), ("GINConv", (nn.Identity(),)), ("TAGConv", (P, Q)))},
    **{name: lambda x, name=name: getattr(ours, name)(P, Q, bias=False)(x, EDGES)
       for name in ("ClusterGCNConv", "FeaStConv", "GATConv", "GATv2Conv", "SAGEConv", "SGConv", "TransformerConv")},
    **{f"spmm {reduce}": lambda x, reduce=reduce: functions.spmm(_MATRIX, x, reduce)
       for reduce in ("sum", "mean", "max")},
    **{f"scatter {reduce}": lambda x, reduce=reduce: functions.scatter(x, EDGES[0, :5], reduce=reduce)
       for reduce in ("sum", "mean", "max")},
    "global_mean_pool": lambda x: ours.global_mean_pool(x, EDGES[0, :5]),
}


@pytest.mark.parametrize("name", _CHANGED)
def test_what_a_layer_returns_may_be_changed_in_place(name: str) -> None:
    x, grads = torch.randn(5, P, requires_grad=True), []
    for change in (torch.Tensor.mul, torch.Tensor.mul_):
        torch.manual_seed(0)
        grads.append(torch.autograd.grad(change(_CHANGED[name](x * 1), 0.5).square().sum(), x)[0])
    torch.testing.assert_close(*grads)


@pytest.mark.parametrize("name, args", [("SGConv", (P, Q, 2)), ("SSGConv", (P, Q, 0.3, 2)), ("TAGConv", (P, Q)),
                                        ("ChebConv", (P, Q, 3)), ("MixHopConv", (P, Q)), ("APPNP", (3, 0.2))])
def test_polynomials_of_many_numbers(name, args):
    """By a plan; few numbers take a node for each step, or the other way round (APPNP)."""
    nodes = polynomials.FEW_NUMBERS // P + 1
    index, x = torch.randint(nodes, (2, 3 * nodes)), torch.randn(nodes, P)
    layer, peer = pair(name, *args)
    results = []
    for one in (layer, peer):
        leaves = [x.clone().requires_grad_(), *one.parameters()]
        y = one(leaves[0], index)
        results.append([y, *torch.autograd.grad(y, leaves, torch.ones_like(y).cumsum(0) / nodes)])
    for got, want in zip(*results, strict=True):
        torch.testing.assert_close(got, want, rtol=0, atol=1e-5 * float(want.detach().abs().max()))


@pytest.mark.parametrize("channels", [8, 32, 72])
def test_gradients_of_saturated_attention(channels):
    """Weights of exactly 1 give scores no gradient, however large x is."""
    index, x = torch.randint(7, (2, 20)), 1e3 * torch.randn(7, P)
    layer, peer = pair("TransformerConv", P, channels, heads=2)
    exact, found = copy.deepcopy(peer).double(), []
    for one, rows in ((layer, x), (peer, x), (exact, x.double())):
        leaf = rows.clone().requires_grad_()
        y = one(leaf, index)
        found.append(torch.autograd.grad(y, leaf, torch.ones_like(y).cumsum(0) / 7)[0])
    own, original = ((t - found[2]).abs().max() for t in found[:2])
    assert own <= 8 * original + 1e-6 * found[2].abs().max()
