"""Wrong arguments of every named layer and every function: errors of this library, whose message is one line."""

import ast
import inspect
import re
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Protocol

import numpy as np
import pytest
import torch
from torch import nn

import structconv as sc
from structconv import STRUCTURE, Conv, DotProduct, ops, tensors
from structconv import nn as layers
from structconv.bases import TopK, register_normalization
from structconv.compat import pyg
from structconv.compat import torch as compat
from structconv.errors import ConfigError, ShapeError, StructconvError, StructureError
from structconv.mechanisms import Additive, Pair, Score
from structconv.nn.images import to_entries, to_image
from structconv.structures import DenseMask, EdgeSupport, Graph, Grid, KnowledgeGraph, Padding, membership, unbatch
from tests.support.layers import LAYERS, drawn_uses, in_float32, uses

INDEX = torch.tensor([[0, 1], [1, 2]])
GRAPH = Graph(INDEX)
#: In the place of a tensor.
NO_TENSORS = {
    "None": lambda t: None, "a list": lambda t: t.tolist(), "an array": lambda t: t.detach().numpy(),
    "a text": lambda t: "abc", "a number": lambda t: 3.5, "a pair": lambda t: (t, t), "a dictionary": lambda t: {},
    "a graph": lambda t: GRAPH, "a module": lambda t: nn.Linear(2, 2), "a sparse tensor": lambda t: t.to_sparse(),
    "integers": lambda t: t.detach().long(), "complex numbers": lambda t: t.to(torch.complex128),
    "booleans": lambda t: t.detach().bool(), "another dtype": lambda t: t.detach().half(),
    "a tensor without numbers": lambda t: t.to("meta"), "more channels": lambda t: torch.cat([t, t], -1),
    "no channels": lambda t: t[..., :0], "more entries": lambda t: torch.cat([t, t], -2),
    "no entries": lambda t: t[..., :0, :], "a scalar": lambda t: t.sum(), "a vector": lambda t: t.reshape(-1),
    "a larger batch": lambda t: torch.stack([t] * 3)}
#: In the place of a structure or of a mask.
NO_STRUCTURES = {
    "None": None, "a list": [1, 2], "an array": np.eye(3), "a text": "abc", "a number": 3,
    "a tensor": torch.zeros(2, 3), "booleans": torch.ones(6, dtype=torch.bool), "a dictionary": {},
    "another graph": Graph(INDEX, num_nodes=99),
    "another grid": Grid((50,)), "another mask": Padding(torch.ones(99, dtype=torch.bool)),
    "another batch": Padding(torch.ones(7, 6, dtype=torch.bool)), "a class": Graph}
#: In the place of any argument of a function or a class.
ANYTHING = [None, [1, 2], np.eye(3), "abc", 3.5, -1, {}, torch.zeros(2, 3), torch.zeros(2, 3, dtype=torch.bool),
            torch.tensor(1.5), Graph, GRAPH, (), True, float("nan")]


def in_one_line(call, *args, **kwargs):
    """A call may succeed; if it raises, then an error of this library whose message is one line."""
    message = ""
    try:
        call(*args, **kwargs)
    except StructconvError as error:
        message = str(error)
    assert "\n" not in message
    assert len(message) < 1500


@pytest.mark.parametrize("name", drawn_uses(8))
def test_every_layer_answers_bad_inputs_in_one_line(name):
    use = uses()[name]()
    given = {**dict(enumerate(use.args)), **use.kwargs}
    for place, value in given.items():
        tensor = isinstance(value, torch.Tensor)
        if not tensor and name.startswith("users"):
            continue  # what a user's mechanism reads of a structure is its own
        for bad in (partial(make, value) for make in NO_TENSORS.values()) if tensor else (
                partial(lambda bad: bad, bad) for bad in NO_STRUCTURES.values()):
            changed = {**given, place: bad()}
            args = [changed.pop(i) for i in range(len(use.args))]
            in_one_line(use.layer, *args, **changed)
            if hasattr(use.layer, "plan"):
                in_one_line(use.layer.plan, *args, **changed)


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])  # native kernels are for float32
def test_every_layer_refuses_a_scalar_and_a_vector(name, dtype):
    use = in_float32(LAYERS[name]) if dtype is torch.float32 else LAYERS[name]()
    first, *others = use.args
    if isinstance(first, dict):
        pytest.skip("its x goes by name")
    scalar, vector = torch.tensor(1.0, dtype=dtype), torch.ones(first.shape[-1], dtype=dtype)
    for x in (scalar,) if name.startswith("linear") else (scalar, vector):  # linear layers take vectors, as torch's do
        with pytest.raises(ShapeError, match=r"; got \("):
            use.layer(x, *others, **use.kwargs)


#: Layers that take any number of channels.
ANY_CHANNELS = {"pool1d", "pool2d", "pool3d", "pool_padded"}
IMAGES = (layers.Conv1d, layers.Conv2d, layers.Conv3d, layers.SeparableConv2d, layers.NonLocalBlock,
          layers.ConvTranspose1d, layers.ConvTranspose2d)


@pytest.mark.parametrize("name", [name for name in LAYERS if name not in ANY_CHANNELS])
def test_an_error_of_a_call_names_the_class_that_the_user_wrote(name):
    use = LAYERS[name]()
    axis = 1 if isinstance(use.layer, IMAGES) else -1
    first, *others = use.mapped(lambda t: torch.cat([t, t], axis)).args[:1] + use.args[1:]
    for call in (use.layer, getattr(use.layer, "plan", None)):
        if call is not None:
            with pytest.raises(ShapeError, match=rf"^{type(use.layer).__name__}: "):
                call(first, *others, **use.kwargs)


class MyGCN(sc.GCNConv):
    pass


class MyAttention(sc.Conv):
    pass


@pytest.mark.parametrize(("make", "name"), [
    (lambda: sc.GCNConv(3, 0), "GCNConv"), (lambda: sc.ChebConv(-1, 3, 2), "ChebConv"),
    (lambda: sc.Conv2d(2.5, 3, 3), "Conv2d"), (lambda: layers.ConvLSTMCell(sc.Cuboid(3), 2, 0), "ConvLSTMCell"),
    (lambda: MyGCN(3, 0), "MyGCN"), (lambda: sc.Conv(sc.Adjacency(), 3, 0), "Conv"),
    (lambda: layers.RelativeValue(-1), "RelativeValue")])
def test_an_error_of_a_constructor_names_the_class_that_the_user_wrote(make, name):
    with pytest.raises(ConfigError, match=rf"^{name}: "):
        make()


def test_other_errors_of_a_layer_name_it():
    samples = sc.Samples([2, 2])
    nested = torch.nested.as_nested_tensor([torch.ones(2, 4), torch.ones(3, 4)], layout=torch.jagged)
    for call in (lambda: sc.MultiheadAttention(4, 2)(nested, torch.ones(2, 5, 4)),
                 lambda: sc.MultiheadAttention(4, 2).prepare(torch.ones(2, 5)),
                 lambda: sc.MultiheadAttention(4, 2)(nested, structure=samples)):
        with pytest.raises(StructconvError, match=r"^MultiheadAttention: "):
            call()
    layer = MyAttention(sc.DotProduct(2, 3).masked(keep="bonds").softmax(), 4, 3)
    with pytest.raises(StructureError, match=r"^MyAttention: structure must have what the expression names"):
        layer(torch.ones(2, 4), structure={"bond": GRAPH})
    with pytest.raises(StructureError, match=r"^RelativeValue: "):
        sc.Conv(sc.DotProduct(2, 3).softmax(), 4, 3, weight=sc.LowRank(3), relative_value=layers.RelativeValue(2))(
            torch.ones(4, 4), sc.Samples([2, 2], [1, 2]), z=torch.ones(3, 4))


X, THETA, BASIS = torch.randn(4, 3), torch.randn(2, 3, 5), sc.Dense(torch.randn(2, 4, 4))
PAIR = (BASIS, THETA)
CHANNELS = {"in_channels": 3, "out_channels": 3}
#: Functions and classes with arguments that they take.
CALLS = {
    "Graph": (Graph, {"edge_index": INDEX, "num_nodes": 3, "edge_weight": torch.ones(2), "edge_attr": torch.ones(2, 1),
                      "num_inputs": 3, "num_outputs": 3}),
    "Graph alone": (Graph, {"edge_index": INDEX}),
    "Grid": (Grid, {"shape": (2, 3), "periodic": False}),
    "Grid.graph": (Grid((2, 3)).graph, {"diagonal": False}),
    "KnowledgeGraph": (KnowledgeGraph, {"triples": torch.tensor([[0, 0, 1]]), "num_entities": 2, "relations": ("a",),
                                        "entities": ("b", "c"), "counts": (1,)}),
    "from_labels": (KnowledgeGraph.from_labels, {"triples": [("a", "r", "b")], "entities": ("a", "b"),
                                                 "relations": ("r",)}),
    "relation": (KnowledgeGraph(torch.tensor([[0, 0, 1]]), 2, ("a",)).relation, {"name": "a"}),
    "Padding": (Padding, {"keep": torch.ones(3, dtype=torch.bool)}),
    "DenseMask": (DenseMask, {"keep": torch.ones(3, 3, dtype=torch.bool)}),
    "EdgeSupport": (EdgeSupport, {"graph": GRAPH}),
    "Window": (sc.Window, {"radius": 2, "dilation": 1}),
    "Blocks": (sc.structures.Blocks, {"size": 2}),
    "Global": (sc.structures.Global, {"entries": 2}),
    "batch": (sc.batch, {"structures": [GRAPH, GRAPH]}),
    "unbatch": (unbatch, {"y": X, "parts": [2, 2]}),
    "membership": (membership, {"parts": [2, 2]}),
    "conv": (sc.conv, {"x": X, "basis": BASIS, "theta": THETA, "path": None, "plan": None, "max_bytes": None}),
    "plan": (sc.plan, {"x": X, "basis": BASIS, "theta": THETA, "path": None, "max_bytes": None}),
    "compose": (sc.compose, {"first": PAIR, "second": (BASIS, torch.randn(2, 5, 3))}),
    "compose layers": (sc.compose, {"first": sc.Conv(sc.Adjacency(), 3, 3, bias=False),
                                    "second": sc.Conv(sc.Adjacency(), 3, 3)}),
    "compose_pairs": (ops.compose_pairs, {"first": PAIR, "second": (BASIS, torch.randn(2, 5, 3))}),
    "decompose": (ops.decompose, {"phi": torch.randn(4, 4, 3, 2), "basis": BASIS}),
    "factorize": (ops.factorize, {"phi": torch.randn(4, 4, 3, 2), "size": 1, "axes": None, "method": "auto",
                                  "seed": 0}),
    "to_entries": (to_entries, {"image": torch.randn(2, 3, 4), "ndim": 1}),
    "to_image": (to_image, {"entries": torch.randn(2, 6, 4), "grid": Grid((2, 3))}),
    "ravel": (tensors.ravel, {"index": torch.tensor([[0, 1]]), "shape": (2, 3)}),
    "unravel": (tensors.unravel, {"position": torch.tensor([1]), "shape": (2, 3)}),
    "take": (tensors.take, {"a": X, "axes": [0], "index": [1]}),
    "flatten": (tensors.flatten, {"a": X, "groups": [[0, 1]], "bijections": None}),
    "unflatten": (tensors.unflatten, {"b": X.flatten(), "shape": (4, 3), "groups": [[0, 1]], "bijections": None}),
    "outer": (tensors.outer, {"a": X, "b": X, "batch": 0}),
    "tensors.compose": (tensors.compose, {"a": torch.randn(4, 4), "b": torch.randn(4, 4), "axes": 1, "batch": 0}),
    "cuboid_offsets": (sc.bases.cuboid_offsets, {"kernel_size": (3, 3), "dilation": 1, "offset": 0}),
    "Conv": (sc.Conv, {"mechanism": sc.Adjacency(), **CHANNELS, "weight": None, "bias": True, "other_channels": None,
                       "relative_value": None, "path": None, "max_bytes": None}),
    "GCNConv": (sc.GCNConv, {**CHANNELS, "normalize": True}),
    "ChebConv": (sc.ChebConv, {**CHANNELS, "K": 2, "normalize": "sym", "lambda_max": None}),
    "DiffusionConv": (layers.DiffusionConv, {**CHANNELS, "K": 2}),
    "EdgeConditionedConv": (layers.EdgeConditionedConv, {**CHANNELS, "edge_channels": 2, "hidden": 3, "aggr": "mean"}),
    "RelationalConv": (sc.RelationalConv, {**CHANNELS, "num_relations": 2, "num_bases": None, "num_blocks": None,
                                           "aggr": "mean"}),
    "GATConv": (sc.GATConv, {**CHANNELS, "heads": 2, "negative_slope": 0.2, "dropout": 0.0, "edge_dim": None}),
    "GATv2Conv": (sc.GATv2Conv, {**CHANNELS, "heads": 2, "negative_slope": 0.2, "dropout": 0.0}),
    "MultiheadAttention": (sc.MultiheadAttention, {"embed_dim": 4, "num_heads": 2, "dropout": 0.0, "kdim": None,
                                                   "num_kv_heads": None}),
    "NonLocalBlock": (layers.NonLocalBlock, {"channels": 4, "inner": 2, "function": "gaussian", "axes": 2}),
    "Conv2d": (sc.Conv2d, {"in_channels": 4, "out_channels": 4, "kernel_size": 3, "stride": 1, "padding": 1,
                           "dilation": 1, "groups": 1, "padding_mode": "zeros"}),
    "SeparableConv2d": (layers.SeparableConv2d, {**CHANNELS, "kernel_size": 3, "stride": 1, "padding": 1,
                                                  "dilation": 1}),
    "AvgPool2d": (layers.AvgPool2d, {"kernel_size": 2, "stride": 2}),
    "ConvGRUCell": (sc.ConvGRUCell, {"mechanism": sc.Adjacency(), "in_channels": 3, "hidden_channels": 2,
                                     "weight": None, "reset": "before"}),
    "ConvLSTMCell": (sc.ConvLSTMCell, {"mechanism": sc.Adjacency(), "in_channels": 3, "hidden_channels": 2,
                                       "weight": None})}


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("name", CALLS)
def test_every_function_answers_bad_arguments_in_one_line(name):
    function, given = CALLS[name]
    function(**given)
    for place in given:
        for bad in ANYTHING:
            in_one_line(function, **{**given, place: bad})


#: Arguments by name, for those of a constructor that have no default.
ARGUMENTS = {
    "attributes": 2, "batch_size": 2, "channels": 4, "clip": 2, "count": 2, "data": GRAPH, "deviation": 1.0, "dim": 4,
    "edge_channels": 2, "edge_index": INDEX, "embed_dim": 4, "end": "sender", "features": {}, "groups": 2, "heads": 2,
    "hidden_channels": 4, "in_channels": 4, "in_features": 4, "inputs": 3, "K": 2, "kernel_size": 3, "length": 3,
    "mechanism": sc.Adjacency(), "multiplier": 2, "name": "a", "node_channels": 4, "num_heads": 2, "num_neighbors": [2],
    "num_parts": 2, "num_relations": 2, "offsets": [-1, 1], "operands": (sc.DotProduct(), sc.DotProduct()),
    "out_channels": 4, "out_features": 4, "queries": 2, "rank": 2, "relations": 2, "shape": (2, 3), "size": 2,
    "walk_length": 2, "walks": ["a"], "weights": [sc.Full()], "window": 2}
#: Values, and the words of an annotation that each of them may be for.
WRONG = {"an object": (object(), ()), "a text": ("mean", ("str", "Literal")), "a dictionary": ({}, ("Mapping", "dict")),
         "a tensor": (torch.zeros(2, 3), ("Tensor",)), "a fraction": (2.5, ("float",)), "True": (True, ("bool",)),
         "a class": (Graph, ("Callable",)), "nan": (float("nan"), ("float",)), "a negative": (-1, ("int", "float")),
         "a huge integer": (2 ** 70, ("int", "float")), "texts": (["mean", "max"], ("Sequence", "list"))}
#: Annotations of these words alone are judged; those of aliases and type variables may be for anything.
WORDS = {"int", "float", "bool", "str", "None", "tuple", "Sequence", "Mapping", "Tensor", "torch", "dtype", "Weight"}
#: Results and parts that a user does not make.
NOT_MADE = {"BoundWeight", "BoundWeights", "Cache", "Channels", "Inputs", "NeighborBatch", "Operation"}


def constructors():
    """Classes that are made once: layers, mechanisms, weights and loaders, and not values such as bases."""
    homes = (sc.nn, sc.mechanisms, sc.weights, sc.data)
    return {f"{home.__name__}.{name}": held for home in homes for name in home.__all__
            if isinstance(held := getattr(home, name), type) and name not in NOT_MADE
            and not issubclass(held, Exception) and not inspect.isabstract(held)}


CONSTRUCTORS = constructors()


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("name", CONSTRUCTORS)
def test_every_constructor_refuses_arguments_of_another_type(name):
    cls = CONSTRUCTORS[name]
    parameters = {name: p for name, p in inspect.signature(cls).parameters.items()
                  if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)}
    right = {name: ARGUMENTS.get(name) for name, p in parameters.items() if p.default is p.empty}
    accepted = []
    for place, parameter in parameters.items():
        words = set(re.findall(r"\w+", str(parameter.annotation)))
        for bad, (value, fits) in WRONG.items():
            if value is Graph and "Callable" in words:
                continue  # what it raises is its own
            with suppress(StructconvError):
                cls(**{**right, place: value})
                if words and words <= WORDS and not words & set(fits):
                    accepted.append((place, bad))
    assert not accepted


@pytest.mark.parametrize(("make", "message"), [
    (lambda: sc.GCNConv(3, 2, bias=3), "GCNConv: bias must be of type bool; got int"),
    (lambda: Grid(4, periodic="x"), "Grid: periodic must be True or False"),
    (lambda: sc.Rotary(base=-1), "Rotary: base must be a finite number greater than 0; got -1"),
    (lambda: sc.Rotary(base=float("nan")), "Rotary: base must be a finite number"),
    (lambda: sc.Dense("a"), "Dense: a must be a floating tensor of shape .*; got str"),
    (lambda: Padding("a"), "Padding: keep must be a boolean tensor .*; got str"),
    (lambda: sc.Adjacency(self_loops="yes"), "Adjacency: self_loops must be of type bool; got str"),
    (lambda: sc.Conv2d(3, 4, 3, device="nowhere"), "Conv2d: device must be a torch.device .*; got 'nowhere'"),
    (lambda: sc.Shift(3, [1]), "Shift: grid must be a Grid or a GridBatch; got int"),
    (lambda: sc.data.NeighborLoader(GRAPH, [2], seed=2 ** 70), "NeighborLoader: seed must be an integer of 64 bits")])
def test_arguments_that_were_accepted_silently_are_refused(make, message):
    with pytest.raises(StructconvError, match=f"^{message}"):
        make()


@pytest.mark.parametrize("number", [np.int64(4), np.uint8(4), np.array(4), torch.tensor(4),
                                    torch.tensor(4, dtype=torch.int32)], ids=lambda value: type(value).__name__)
def test_numbers_of_numpy_and_torch_are_numbers(number):
    """Such as the number of classes, `labels.max() + 1`."""
    for make in (lambda n: sc.GCNConv(3, n), lambda n: sc.nn.Linear(n, out_features=n), lambda n: sc.ChebConv(2, 2, n),
                 lambda n: sc.MultiheadAttention(n, n), lambda n: sc.Conv2d(n, n, (n, n), padding=[n, n]),
                 lambda n: sc.GATConv(n, n, n), lambda n: layers.EdgeConditionedConv(2, 2, 2, hidden=[n]),
                 lambda n: sc.Conv(sc.Shifts([(n,), (0,)]), 2, n)):
        assert repr(make(number)) == repr(make(4))
    assert sc.Samples([number, 1]).sizes() == sc.Samples(np.array([4, 1])).sizes() == sc.Samples([4, 1]).sizes()
    rate = sc.GATConv(2, 2, dropout=np.float32(0.5))
    assert repr(rate) == repr(sc.GATConv(2, 2, dropout=0.5))


class Unchecked(Protocol):
    def method(self) -> None:
        """A protocol without checks at run time."""


class LooselyAnnotated(sc.GCNConv):
    def __init__(self, size: int = None, kind: Unchecked = 3, other: "Absent" = 1):  # noqa: F821, RUF013
        super().__init__(2, 2)
        raise ValueError("the user's own")


class WithoutAbsent(LooselyAnnotated):
    def __init__(self, size: int = None, kind: Unchecked = 3):  # noqa: RUF013
        super().__init__(size, kind)


def test_the_error_of_a_users_constructor_is_not_replaced():
    for make in (LooselyAnnotated, WithoutAbsent):
        with pytest.raises(ValueError, match=r"^the user's own$"):
            make(None, 3)
    with pytest.raises(TypeError, match=r"^GCNConv: arguments must be \(in_channels, .*\); got no 'out_channels'\.$"):
        sc.GCNConv(2)


def test_torchs_own_layers_stay_as_they_are():
    for call in (lambda: nn.Conv2d(4, 2, 3, paddings=1), lambda: nn.TransformerDecoder(nn.Linear(2, 2), 1, norms=None)):
        with pytest.raises(TypeError) as raised:
            call()
        assert not isinstance(raised.value, sc.ConfigError)
    assert inspect.signature(compat.Conv2d) == inspect.signature(nn.Conv2d)


def without_super(base, trained):
    def construct(self):
        self.own = nn.Parameter(torch.ones(2)) if trained else 2

    return type("Mine", (base,), {"__init__": construct})


@pytest.mark.parametrize("base", [sc.Mechanism, Score, layers.Layer, sc.GCNConv])
@pytest.mark.parametrize("trained", [False, True])
def test_a_constructor_without_that_of_its_base_is_an_error(base, trained):
    with pytest.raises(ConfigError, match=r"^Mine: __init__ must call super\(\).__init__\(\) in its first line"):
        without_super(base, trained)()


def test_attention_refuses_a_graph_that_it_does_not_read():
    x, attention = torch.randn(3, 2), sc.Conv(sc.DotProduct(dim=2).softmax(), 2, 4)
    for structure in (GRAPH, KnowledgeGraph(torch.tensor([[0, 0, 1]]), 3, ("r",))):
        with pytest.raises(StructureError, match=r"must be one that some part of the expression reads; .*masked"):
            attention(x, structure)
    assert attention(x, sc.batch([GRAPH])).shape == (3, 4)  # which separates samples
    assert sc.Conv(sc.Identity(), 2, 4)(x, GRAPH).shape == (3, 4)
    along = sc.Conv(sc.DotProduct(dim=2).masked(keep=sc.STRUCTURE).softmax(), 2, 4)
    assert along.basis(x, GRAPH).dense()[0].count_nonzero() == 2


@pytest.mark.parametrize("layer", [lambda path: sc.Conv(sc.Identity(), 2, 4, path=path),
                                   lambda path: sc.Conv2d(2, 4, 3, path=path)])
def test_a_path_that_no_kernel_has_is_refused_at_once(layer):
    for make in (lambda: layer("fastest"), lambda: setattr(layer(None), "path", "fastest")):
        with pytest.raises(ConfigError, match=r"path must be one of 'between', .*'structure_first', or None; got"):
            make()
    assert layer("operator_first").path == "operator_first"


class Forwarding(sc.Mechanism):
    def __init__(self, size=1, **options):
        super().__init__(**options)


@pytest.mark.parametrize(("make", "message"), [
    (lambda: sc.DotProduct(num_heads=4), "DotProduct: arguments must be (heads, dim, *, shared_by, bias, rotary, "
     "feature, on); got 'num_heads'. Did you mean 'heads'?"),
    (lambda: sc.LowRank(), "LowRank: arguments must be (dim, shared_by); got no 'dim'."),
    (lambda: sc.Conv2d(3, 4, 3, pad=1), "got 'pad'. Did you mean 'padding'?"),
    (lambda: sc.Window(3, dilated=2), "Window: arguments must be (radius, dilation, grid, center); got 'dilated'. Did "
     "you mean 'dilation'?"),
    (lambda: Graph(torch.zeros(2, 1).long(), num_entries=1), "got 'num_entries'. Did you mean 'num_nodes'?"),
    (lambda: sc.DotProduct().masked(sc.Causal()), "DotProduct.masked: arguments must be (*, keep, drop); got too many "
     "positional arguments. Those after * go by keyword."),
    (lambda: sc.batch(Grid(3), Grid(3)), "batch: arguments must be (structures); got too many positional arguments."),
    (lambda: sc.MultiheadAttention(4, 2).prepare(torch.ones(3, 4), keep=None), "MultiheadAttention.prepare: arguments "
     "must be (key_value, structure); got 'keep'."),
    (lambda: Forwarding(sizes=3), "Forwarding: arguments must be (size, ...); got 'sizes'. Did you mean 'size'?"),
    (lambda: compat.MultiheadAttention(4, 2, drop=0.1), "MultiheadAttention: arguments must be (embed_dim, num_heads, "
     "dropout, bias, add_bias_kv, add_zero_attn, kdim, vdim, batch_first, device, dtype); got 'drop'. Did you mean "
     "'dropout'?"),
    (lambda: compat.Conv2d(4, 2, 3, paddings=1), "got 'paddings'. Did you mean 'padding'?"),
    (lambda: compat.ConvTranspose1d(4, 2), "got no 'kernel_size'."),
    (lambda: compat.AvgPool3d(3, strides=1), "got 'strides'. Did you mean 'stride'?"),
    (lambda: compat.TransformerEncoderLayer(4, 2, dim_ff=8), "got 'dim_ff'. Did you mean 'dim_feedforward'?"),
    (lambda: compat.TransformerEncoder(None, num_layer=2), "got 'num_layer'. Did you mean 'num_layers'?"),
    (lambda: compat.Transformer(4, num_encoders=2), "got 'num_encoders'. Did you mean 'num_encoder_layers'?"),
    (lambda: pyg.GCNConv(2, 3)(torch.ones(3, 2), INDEX, edge_weigth=None),
     "GCNConv.forward: arguments must be (x, edge_index, edge_weight); got 'edge_weigth'. Did you mean 'edge_weight'?"),
])
def test_arguments_that_a_signature_does_not_have_are_named(make, message):
    with pytest.raises(sc.ConfigError, match=re.escape(message)) as raised:
        make()
    assert isinstance(raised.value, TypeError)


@pytest.mark.parametrize(("make", "message"), [
    (lambda: sc.Conv(sc.Identity, 4, 8), "Identity is a class: write Identity(...)."),
    (lambda: sc.Conv(sc.Identity(), 4, 8, weight=sc.Full), "Conv: weight must be a Weight, or a list with one for each "
     "part of the mechanism; got <class 'structconv.weights.whole.Full'>. Full is a class: write Full(...)."),
    (lambda: sc.Conv(sc.Identity(), 4, 8, weight=[sc.Full]), "Full is a class: write Full(...)."),
    (lambda: sc.DotProduct().masked(keep=sc.Causal), "Causal is a class: write Causal(...)."),
    (lambda: sc.Identity() | sc.Dense(torch.ones(1, 2, 2)),
     "A basis or a tensor (..., K, M, N) becomes one by Given(basis)."),
    (lambda: Grid(8, 6), "For two axes write Grid((8, 6))."),
    (lambda: Graph(torch.zeros(5, 2).long()), "got (5, 2). Pass edge_index.T."),
    (lambda: sc.Conv(sc.DotProduct().map(torch.sum).softmax(), 2, 2)(torch.ones(3, 2)),
     "map: fn must return a tensor of the shape of its argument, (1, 3, 3); got ()."),
    (lambda: sc.Conv(sc.DotProduct().masked(keep=sc.STRUCTURE).softmax(), 2, 2)(
        torch.ones(3, 2), Graph(torch.tensor([[2], [0]]), num_inputs=3, num_outputs=1)),
     "If the outputs are other entries than x, pass them as z: layer(x, z=z)."),
    (lambda: sc.GATConv(2, 2)(torch.ones(3, 2), Graph(torch.tensor([[2], [0]]), num_inputs=3, num_outputs=1)),
     "Pass add_self_loops=False to the layer, or self_loops=False to its mechanism."),
    (lambda: sc.collate([{"x": torch.ones(3, 2)}], shared=("graph",)),
     "collate: shared must have keys or positions of a sample, 'x'; got 'graph'."),
])
def test_errors_say_what_to_write(make, message):
    with pytest.raises(sc.errors.StructconvError, match=re.escape(message)):
        make()


def test_aggregations_that_do_not_fit_a_layer_are_refused():
    layers = pytest.importorskip("structconv.compat.pyg")
    pytest.importorskip("torch_geometric")
    for make in (layers.GATConv, layers.GCNConv):
        with pytest.raises(ConfigError, match=rf"^{make.__name__}: aggr must keep the number of channels, 4; got 8"):
            make(4, 4, aggr=["mean", "max"])(torch.ones(3, 4), INDEX)
    with pytest.raises(ConfigError, match=r"^GCNConv: aggr_kwargs must be the arguments of 'lstm'"):
        layers.GCNConv(4, 4, aggr="lstm")


NAMED = {
    "x is None": (lambda: sc.GCNConv(2, 2)(None, GRAPH), ConfigError, "x must be a tensor; got NoneType"),
    "x is a list": (lambda: sc.Conv(sc.Identity(), 2, 2)([[1.0, 2.0]]), ConfigError,
                    r"got list. Convert it, for example torch.as_tensor\(x, dtype=torch.float32\)"),
    "x is an array": (lambda: layers.AvgPool1d(2)(np.ones((1, 2, 4))), ConfigError,
                      "image must be a tensor; got ndarray"),
    "x is sparse": (lambda: sc.GCNConv(3, 2)(torch.eye(3).to_sparse(), GRAPH), ShapeError,
                    "x must be dense; got torch.sparse_coo"),
    "h is a list": (lambda: sc.ConvGRUCell(sc.Identity(), 2, 2)(torch.ones(3, 2), [1]), ConfigError,
                    "ConvGRUCell: h must be a tensor; got list"),
    "a state of one": (lambda: sc.ConvLSTMCell(sc.Identity(), 2, 2)(torch.ones(3, 2), (torch.ones(3, 2),)), ConfigError,
                       r"state must be a pair \(h, c\); got tuple"),
    "a graph of a text": (lambda: Graph("abc", num_nodes=3), StructureError, "edge_index must be a tensor"),
    "a graph of a dictionary": (lambda: Graph({}, num_nodes=3), StructureError, "edge_index must be a tensor"),
    "a graph of a sparse matrix": (lambda: Graph(torch.eye(2).to_sparse()), StructureError, "from_torch_sparse"),
    "a graph of another library": (lambda: Graph(type("Data", (), {"edge_index": INDEX})()), StructureError,
                                   r"got Data. Convert it: Graph.from_data\(data\)"),
    "too many nodes": (lambda: Graph(INDEX, num_nodes=2 ** 70), StructureError,
                       "below 2.63; got 1180591620717411303424"),
    "too many offsets": (lambda: sc.bases.cuboid_offsets(2 ** 70), ConfigError,
                         "kernel_size must have at most 4194304"),
    "a window of a grid's size": (lambda: sc.Cuboid((2 ** 12, 2 ** 12)), ConfigError, "must have at most 4194304"),
    "weights as an array": (lambda: Graph(INDEX, edge_weight=np.ones(2)), StructureError,
                            "edge_weight must be a tensor; got ndarray"),
    "attributes as a list": (lambda: Graph(INDEX, edge_attr=[1, 2]), StructureError,
                             "edge_attr must be a tensor; got list"),
    "channels as a text": (lambda: sc.MultiheadAttention("abc", 2), ConfigError,
                           "MultiheadAttention: embed_dim must be of type int; got str"),
    "entries beside the grid": (lambda: to_image(torch.ones(5, 3), Grid((2, 3))), ShapeError,
                                r"entries must have shape \(..., N=6, C\); got \(5, 3\)")}


@pytest.mark.parametrize("name", NAMED)
def test_the_message_says_what_came(name):
    call, kind, message = NAMED[name]
    with pytest.raises(kind, match=message):
        call()


def test_a_padding_mask_without_a_batch_serves_a_batch_beside_other_parts():
    mask = Padding(torch.tensor([True, True, True, False]))
    scores = sc.DotProduct(heads=2, dim=3).masked(keep=mask).softmax()
    layer = sc.Conv(scores | sc.Shifts([-1, 1]), 3, 5)
    x = torch.randn(2, 4, 3)
    torch.testing.assert_close(layer(x), torch.stack([layer(one) for one in x]))
    batched = sc.Conv(sc.DotProduct().masked(keep=Padding(mask.keep.expand(2, 4))).softmax() | sc.Identity(), 3, 5)
    with pytest.raises(StructureError, match="leading dimensions of the mask"):
        batched(x[0])


@pytest.mark.parametrize(("layer", "args", "message"), [
    (lambda: sc.Conv(sc.DotProduct(2, 4).softmax(), 8, 8), (torch.randn(9, 7),), r"Conv: x must have shape .*P=8"),
    (lambda: sc.Conv(sc.DotProduct(2, 4).softmax(), 8, 8), (torch.randn(9, 8).double(),), "Conv: x and theta must"),
    (lambda: sc.Conv(sc.Adjacency(), 8, 8), (torch.randn(9, 8),), "Adjacency: structure must be a Graph"),
    (lambda: sc.GCNConv(8, 4), (torch.randn(9, 3), Grid((3, 3)).graph()), r"GCNConv: x must have shape .*P=8"),
    (lambda: sc.Conv(sc.DotProduct(2, 4).masked(keep=torch.ones(8) > 0).softmax(), 8, 8), (torch.randn(9, 8),),
     r"masked: a mask of inputs must have shape .*M=9"),
    (lambda: layers.ConvGRUCell(sc.Shifts([-1, 0]), 3, 4), (torch.randn(6, 3), torch.randn(5, 4)),
     r"ConvGRUCell: h must have shape \(6, 4\); got \(5, 4\)"),
    (lambda: sc.Conv(sc.DotProduct().masked(keep=torch.ones(7, 5) > 0).softmax(), 8, 8), (torch.randn(2, 5, 8),),
     r"masked: leading dimensions of the mask must broadcast to \(2,\), those of x and z; got \(7,\)")])
@pytest.mark.parametrize("dynamic", [None, True])
def test_a_compiled_program_raises_the_error_of_the_call_with_its_sizes(layer, args, message, dynamic):
    torch.compiler.reset()
    with pytest.raises(Exception, match=rf"^\w*(Shape|Structure)Error: {message}"):
        torch.compile(layer(), fullgraph=True, backend="eager", dynamic=dynamic)(*args)


def test_no_error_writes_a_tuple_of_sizes():
    """A compiler loses messages with `f"{tuple(t.shape)}"`, but not those with `text_of(t.shape)`."""
    wrong = [f"{path}:{node.lineno}" for path in Path(sc.__file__).parent.rglob("*.py")
             for raised in ast.walk(ast.parse(path.read_text())) if isinstance(raised, ast.Raise)
             for node in ast.walk(raised) if isinstance(node, ast.FormattedValue)
             and isinstance(node.value, ast.Call) and ast.unparse(node.value.func) == "tuple"
             and "testing" not in path.parts]
    assert not wrong


@pytest.mark.parametrize("lead", [(), (2,)])
@pytest.mark.parametrize(("expression", "message"), [
    (Pair(torch.nn.Linear(8, 3), heads=2).softmax(), r"Pair: the module must map .*K=2.*got .*3\)"),
    (Pair(torch.nn.Linear(8, 4), heads=2).masked(keep=STRUCTURE).softmax(), r"Pair: the module must map .*K=2"),
    (Additive(4, 2, activation=torch.nn.functional.glu).softmax(), "activation must return a tensor of the shape"),
    (DotProduct(2, 3).normalize(lambda scores, keep, dim: scores.sum(dim)), "normalize: the function must return"),
    (DotProduct(2, 3).masked(keep=STRUCTURE).normalize(lambda scores, keep, dim: scores.sum(dim)),
     "normalize: the function must return a tensor of the shape of its argument"),
    (DotProduct(2, 3).masked(keep=STRUCTURE).normalize(lambda scores, keep, dim: scores.sum(dim, keepdim=True)),
     "normalize: the function must return a tensor of the shape of its argument"),
    (DotProduct(2, 3, feature=lambda t: t[None]).normalize("sum"), "feature must change no size but the last"),
    (DotProduct(2, 3, feature=lambda t: t.mean(-2, keepdim=True)).softmax(), "feature must change no size but"),
])
def test_functions_of_the_user_must_keep_the_shape(expression, message, lead):
    graph = Grid(6).graph() if "STRUCTURE" in repr(expression) else None
    layer = Conv(expression, 4, 4)
    with pytest.raises(ShapeError, match=message):
        layer(torch.randn(*lead, 6, 4), structure=graph)


def test_a_class_is_no_normalization_and_a_text_no_list_of_names():
    with pytest.raises(ConfigError, match=r"TopK is a class: write TopK\(...\)"):
        DotProduct(2, 3).normalize(TopK)
    with pytest.raises(StructureError, match="relations must be a list of names; got 'likes'"):
        KnowledgeGraph(torch.tensor([[0, 0, 1]]), 2, "likes")


def test_a_registered_normalization_must_be_a_function():
    with pytest.raises(ConfigError, match=r"one of \(scores, keep, dim\)"):
        register_normalization("nothing", None)
