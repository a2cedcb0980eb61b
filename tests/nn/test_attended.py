"""A repeated call of attention builds nothing anew, gives what the first gave, and never what is stale."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations

from structconv import Graph, ops
from structconv.bases.base import Basis
from structconv.bases.pairwise import Normalised
from structconv.kernels.forms import Form
from structconv.mechanisms import BiAffine, Concatenation, DotProduct
from structconv.mechanisms.expression import STRUCTURE, Operation
from structconv.mechanisms.scores import Linear
from structconv.nn import Conv, GATConv, GATv2Conv, MultiheadAttention
from structconv.nn import attended as attended_module
from structconv.nn.recall import recalled
from structconv.structures.supports import Causal, DenseMask, Padding, Window

ENTRIES = 6
TABLE = torch.arange(ENTRIES**2).view(ENTRIES, ENTRIES) % 5 > 0
TABLE[2] = False
PADDING = Padding(torch.tensor([True, True, False, True, True, True]))


def ring(entries: int = ENTRIES) -> Graph:
    index = torch.arange(entries)
    return Graph(torch.stack([index, (index + 1) % entries]), num_nodes=entries)


RING = ring()

#: name -> (layer, arguments beside x).
LAYERS = {
    "gat": lambda: (GATConv(4, 3, heads=2), (RING,), {}),
    "gat, dropout": lambda: (GATConv(4, 3, heads=2, dropout=0.5), (RING,), {}),
    "gat, z": lambda: (GATConv(4, 3, heads=2, add_self_loops=False), (RING, torch.randn(ENTRIES, 4)), {}),
    "gatv2": lambda: (GATv2Conv(4, 3, heads=2), (RING,), {}),
    "multihead": lambda: (MultiheadAttention(4, 2), (), {}),
    "multihead, no bias": lambda: (MultiheadAttention(4, 2, bias=False), (), {}),
    "multihead, dropout": lambda: (MultiheadAttention(4, 2, dropout=0.5), (), {}),
    "multihead, causal": lambda: (MultiheadAttention(4, 2), (), {"keep": Causal()}),
    "multihead, padding": lambda: (MultiheadAttention(4, 2), (), {"keep": PADDING}),
    "multihead, both": lambda: (MultiheadAttention(4, 2), (), {"keep": Causal() & PADDING}),
    "multihead, table": lambda: (MultiheadAttention(4, 2), (),
                                 {"keep": DenseMask(TABLE)}),
    "multihead, graph": lambda: (MultiheadAttention(4, 2), (), {"structure": RING.with_self_loops()}),
    "multihead, other queries": lambda: (MultiheadAttention(4, 2, kdim=4), (torch.randn(5, 4),), {}),
    "multihead, grouped": lambda: (MultiheadAttention(4, 4, num_kv_heads=2), (), {}),
    "affine": lambda: (Conv(BiAffine(2, bilinear=False).masked(keep=STRUCTURE).leaky_relu().softmax(), 4, 6),
                       (None, RING), {}),
    "dot products along edges": lambda: (
        Conv(DotProduct(2, 3, rotary=None).scaled().masked(keep=STRUCTURE).softmax(), 4, 6), (None, RING), {}),
    "window": lambda: (Conv(DotProduct(2, 3).masked(keep=Window(9)).softmax(), 4, 6), (), {}),
    "feature map": lambda: (Conv(DotProduct(2, 3, feature=torch.relu).normalize("sum"), 4, 6), (), {}),
}


def made(name: str):
    torch.manual_seed(0)
    layer, more, options = LAYERS[name]()
    for parameter in layer.parameters():
        nn.init.normal_(parameter, std=0.5)
    return layer, more, options


def conv_of(layer) -> Conv:
    return layer if isinstance(layer, Conv) else layer.conv


def results(layer, x, more=(), options=None, seed: int = 1) -> list[torch.Tensor]:
    """y and all gradients."""
    torch.manual_seed(seed)
    x = x.detach().clone().requires_grad_()
    y = layer(x, *more, **(options or {}))
    wanted = [x, *(p for p in layer.parameters() if p.requires_grad)]
    return [y, *torch.autograd.grad(y.square().sum(), wanted, allow_unused=True)]


def assert_same(found, expected):
    for one, other in zip(found, expected, strict=True):
        assert (one is None) == (other is None)
        if one is not None:
            assert torch.equal(one, other)


def assert_like_new(layer, x, more=(), options=None, seed: int = 1):
    """What the layer gives now is what a copy gives, which has nothing kept."""
    assert_same(results(layer, x, more, options, seed), results(copy.deepcopy(layer), x, more, options, seed))


@pytest.fixture
def nothing_is_built(monkeypatch):
    """Whatever builds an expression, looks up a plan or recognises a form counts itself from now on."""
    counted: list[str] = []

    def counting(name, function):
        def call(*args, **kwargs):
            counted.append(name)
            return function(*args, **kwargs)
        return call

    monkeypatch.setattr(Operation, "build", counting("build", Operation.build))
    monkeypatch.setattr(ops, "plan_for", counting("plan", ops.plan_for))
    monkeypatch.setattr(Normalised, "__init__", counting("basis", Normalised.__init__))
    monkeypatch.setattr(Form, "of", counting("recognise", Form.of))
    return counted


@pytest.mark.parametrize("name", LAYERS)
def test_a_repeated_call_builds_nothing(name, nothing_is_built):
    layer, more, options = made(name)
    x = torch.randn(ENTRIES, 4)
    expected = results(layer, x, more, options)
    assert "build" in nothing_is_built and "basis" in nothing_is_built
    nothing_is_built.clear()
    assert_same(results(layer, x, more, options), expected)
    assert not nothing_is_built


@pytest.mark.parametrize("name", LAYERS)
def test_other_numbers_in_batches(name):
    layer, more, options = made(name)
    for lead in ((), (2,), (2, 3)):
        for seed in (1, 2, 3):
            assert_like_new(layer, torch.randn(*lead, ENTRIES, 4), more, options, seed)
    with torch.no_grad():
        x = torch.randn(ENTRIES, 4)
        torch.manual_seed(5)
        first = layer(x, *more, **options)
        torch.manual_seed(5)
        assert torch.equal(layer(x, *more, **options), first)


@pytest.mark.parametrize("name", ["gat, dropout", "multihead, dropout"])
def test_dropout_falls_as_in_a_first_call(name):
    layer, more, options = made(name)
    x = torch.randn(ENTRIES, 4)
    falls = [results(layer, x, more, options, seed)[0] for seed in (1, 2, 1)]
    assert torch.equal(falls[0], falls[2]) and not torch.equal(falls[0], falls[1])
    layer.eval()
    still = [results(layer, x, more, options, seed)[0] for seed in (1, 2)]
    assert torch.equal(*still) and not torch.equal(still[0], falls[0])
    assert_like_new(layer, x, more, options)
    layer.train()
    assert_like_new(layer, x, more, options)
    dropout = next(part for part in layer.modules() if isinstance(part, Operation) and part.name == "dropout")
    dropout.options["p"] = 0.9
    assert_like_new(layer, x, more, options)


def changed_weight(layer):
    conv_of(layer).weight.value = nn.Parameter(torch.randn_like(conv_of(layer).weight.value))


def changed_query(layer):
    query = next(part for part in layer.modules() if hasattr(part, "query")).query
    query.linear = Linear(4, 4)


def scaled_query(layer):
    query = next(part for part in layer.modules() if hasattr(part, "query")).query
    parametrizations.weight_norm(query.linear)
    with torch.no_grad():
        query.linear.parametrizations.weight.original0.mul_(2)


def without_bias(layer):
    next(part for part in layer.modules() if hasattr(part, "query")).query.linear.bias = None


def in_place(layer):
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.mul_(-0.5)


def frozen(layer):
    conv_of(layer).weight.requires_grad_(False)


def all_frozen(layer):
    layer.requires_grad_(False)


def other_data(layer):
    for parameter in layer.parameters():
        parameter.data = torch.randn_like(parameter)


def no_output_bias(layer):
    layer.conv.bias = None


def no_value_bias(layer):
    layer.value_bias = None


def another_mechanism(layer):
    layer.conv.mechanism = MultiheadAttention(4, 2).conv.mechanism


def hooked(layer):
    layer.conv.register_forward_hook(lambda module, args, y: 2 * y)


def hooked_weight(layer):
    def doubled(module, args, theta):
        return type(theta)(2 * theta.values, theta.outputs)
    layer.conv.weight.register_forward_hook(doubled)


def hooked_query(layer):
    query = next(part for part in layer.modules() if hasattr(part, "query")).query
    query.linear.register_forward_hook(lambda module, args, y: -y)


@pytest.mark.parametrize("change", [
    changed_weight, changed_query, scaled_query, without_bias, in_place, frozen, all_frozen, other_data, no_output_bias,
    no_value_bias, another_mechanism, hooked, hooked_weight, hooked_query], ids=lambda change: change.__name__)
def test_what_changes_in_the_layer_is_seen(change):
    layer, _, _ = made("multihead")
    x = torch.randn(ENTRIES, 4)
    before = results(layer, x)[0]
    results(layer, x)
    change(layer)
    assert_like_new(layer, x)
    if change not in (frozen, all_frozen):
        assert not torch.equal(results(layer, x)[0], before)


def test_other_types_and_modes():
    layer, _, _ = made("multihead")
    x = torch.randn(ENTRIES, 4)
    results(layer, x)
    layer.double()
    assert_like_new(layer, x.double())
    with pytest.raises(ValueError, match="dtype"):
        layer(x)
    layer.float()
    assert_like_new(layer, x)
    with torch.no_grad():
        assert not layer(x).requires_grad
    with torch.autocast("cpu", torch.bfloat16):
        assert_like_new(layer, x)
        assert recalled(layer.conv, x, None) is None
    with torch.inference_mode():
        torch.testing.assert_close(layer(x), copy.deepcopy(layer)(x))


def test_transforms_and_compilers_take_the_whole_way():
    layer, _, _ = made("multihead")
    x = torch.randn(3, ENTRIES, 4)
    expected = torch.stack([layer(row) for row in x])
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*batching rule")
        torch.testing.assert_close(torch.func.vmap(layer)(x), expected)
    torch.testing.assert_close(torch.compile(layer, fullgraph=True, backend="eager")(x), expected)
    swapped = {name: torch.zeros_like(p) for name, p in layer.named_parameters()}
    assert not torch.func.functional_call(layer, swapped, (x[0],)).any()


def test_other_structures():
    layer, _, _ = made("gat")
    x = torch.randn(ENTRIES, 4)
    first = results(layer, x, (RING,))[0]
    reverse = RING.reversed()
    assert_like_new(layer, x, (reverse,))
    assert not torch.equal(results(layer, x, (reverse,))[0], first)
    assert torch.equal(results(layer, x, (RING,))[0], first)
    edges = RING.edge_index.clone()
    graph = Graph(edges, num_nodes=ENTRIES)
    results(layer, x, (graph,))
    edges.copy_(edges.flip(0))
    assert_like_new(layer, x, (graph,))


def test_masks_that_change():
    layer, _, _ = made("multihead")
    x, keep = torch.randn(ENTRIES, 4), torch.ones(ENTRIES, dtype=torch.bool)
    first = results(layer, x, (), {"keep": keep})[0]
    assert recalled(layer.conv, x.clone().requires_grad_(), Padding(keep)) is not None
    keep[2] = False
    assert_like_new(layer, x, (), {"keep": keep})
    assert not torch.equal(results(layer, x, (), {"keep": keep})[0], first)
    assert_like_new(layer, x, (), {"drop": keep})
    assert_like_new(layer, x)
    with pytest.raises(ValueError, match="mask"):
        layer(x, keep=torch.ones(ENTRIES + 1, dtype=torch.bool))


@pytest.mark.parametrize("name", ["multihead, causal", "multihead, padding", "multihead, table", "multihead, both"])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_masked_out_does_not_leak_in_repeated_calls(name, bad):
    layer, more, options = made(name)
    x = torch.randn(ENTRIES, 4)
    layer(x, *more, **options)
    with torch.no_grad():
        layer(x, *more, **options)
        x[2, 1] = bad
        found, expected = layer(x, *more, **options), copy.deepcopy(layer)(x, *more, **options)
    torch.testing.assert_close(found, expected, equal_nan=True)
    assert found[0].isfinite().all()


def test_nothing_of_the_first_call_stays_alive():
    layer, more, options = made("multihead")
    x = torch.randn(ENTRIES, 4, requires_grad=True)
    layer(x, *more, **options)
    call = recalled(layer.conv, x, None)
    expression = next(cell.cell_contents for cell in call.run.__closure__
                      if isinstance(cell.cell_contents, attended_module._Expression))
    held = [*expression.chain.nodes, *(cell.cell_contents for cell in expression.follow.__closure__)]
    found = [field for value in held if isinstance(value, Basis) for field in vars(value).values()]
    assert held and not any(isinstance(field, torch.Tensor | Basis) for field in found)


def test_weights_come_from_the_expression():
    layer, _, _ = made("multihead")
    x = torch.randn(ENTRIES, 4)
    y = layer(x)
    again, weights = layer(x, return_weights=True)
    torch.testing.assert_close(again, y)
    torch.testing.assert_close(weights.sum(-2), torch.ones(2, ENTRIES))


def test_what_may_depend_on_more_is_not_kept():
    class Twice(DotProduct):
        pass

    x = torch.randn(ENTRIES, 4)
    for mechanism in (Twice(2, 3).softmax(), (DotProduct(2, 3) * torch.tensor([1.0, 2.0])).softmax(),
                      (Concatenation(3, 2) + DotProduct(2, 3)).softmax()):
        layer = Conv(mechanism, 4, 4)
        layer(x)
        assert recalled(layer, x, None) is None
