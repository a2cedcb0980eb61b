"""Small calls that go straight to a kernel (`nn.direct`) give what a plan gives."""

import copy
from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize, prune

import structconv as sc
from structconv import (
    ALiBi,
    Causal,
    Conv,
    Conv1d,
    Conv2d,
    DotProduct,
    GATConv,
    GATv2Conv,
    GCNConv,
    Graph,
    MultiheadAttention,
    RelativeBias,
)
from structconv.mechanisms import STRUCTURE, Identity
from structconv.weights import Eye, Full, HeadBlocks, LowRank

EDGES = torch.tensor([[0, 1, 2, 3, 4, 0, 2], [1, 2, 3, 4, 0, 2, 2]])
GRAPH = Graph(EDGES, num_nodes=5)
WEIGHTED = Graph(EDGES, num_nodes=5, edge_weight=torch.rand(7) + 0.5)
MANY = Graph(torch.randint(2100, (2, 4000)), num_nodes=2100)
CAUSAL = DotProduct(heads=2, dim=3).masked(keep=Causal()).scaled(0.7).softmax()
ALONG = DotProduct(heads=2, dim=3).masked(keep=STRUCTURE).scaled().softmax()
CASES = {
    "linear": (lambda: Conv(Identity(), 6, 4), (5, 6), ()),
    "linear without bias": (lambda: Conv(Identity(), 6, 4, bias=False), (5, 6), ()),
    "conv1d": (lambda: Conv1d(6, 4, 3, stride=2, padding=1), (2, 6, 9), ()),
    "conv2d": (lambda: Conv2d(6, 4, (3, 2), padding=(1, 0), dilation=2, groups=2), (2, 6, 7, 5), ()),
    "many pixels": (lambda: Conv2d(3, 5, 3, padding=1, groups=1), (2, 3, 150, 90), ()),
    "same": (lambda: Conv2d(3, 4, 3, stride=2, padding="same"), (2, 3, 7, 6), ()),
    "gcn": (lambda: GCNConv(6, 4), (5, 6), (GRAPH,)),
    "gcn, weights": (lambda: GCNConv(3, 8, bias=False), (5, 3), (WEIGHTED,)),
    "row": (lambda: Conv(sc.Adjacency("row"), 6, 4), (5, 6), (WEIGHTED,)),
    "gat": (lambda: GATConv(6, 3, heads=2), (5, 6), (GRAPH,)),
    "gat, no loops": (lambda: GATConv(6, 3, heads=2, bias=False, add_self_loops=False), (5, 6), (GRAPH,)),
    "gatv2": (lambda: GATv2Conv(6, 3, heads=2), (5, 6), (GRAPH,)),
    "gatv2, no loops": (lambda: GATv2Conv(6, 3, heads=2, bias=False, add_self_loops=False), (5, 6), (GRAPH,)),
    "sums": (lambda: Conv(sc.Adjacency(None, self_loops=True), 6, 4), (5, 6), (GRAPH,)),
    "sage": (lambda: Conv(sc.Adjacency("row") | Identity(), 6, 4), (5, 6), (GRAPH,)),
    "sage, many nodes": (lambda: Conv(sc.Adjacency("row") | Identity(), 8, 4), (2100, 8), (MANY,)),
    "sage, itself first": (lambda: Conv(Identity() | sc.Adjacency("sym", self_loops=True), 6, 4, bias=False), (5, 6),
                           (WEIGHTED,)),
    "dots along edges": (lambda: Conv(ALONG, 6, 8, weight=HeadBlocks()), (5, 6), (GRAPH,)),
    "dots beside itself": (lambda: Conv(ALONG | Identity(), 6, 8, weight=[HeadBlocks(), Full()]), (5, 6), (GRAPH,)),
    "itself beside dots": (lambda: Conv(Identity() | ALONG, 6, 8, weight=[Full(), HeadBlocks()], bias=False), (5, 6),
                           (GRAPH,)),
    "attention": (lambda: MultiheadAttention(6, 2), (2, 5, 6), ()),
    "attention without bias": (lambda: MultiheadAttention(6, 3, bias=False), (5, 6), ()),
    "attention of more entries": (lambda: MultiheadAttention(16, 2), (2, 37, 16), ()),
    "attention of one sequence": (lambda: MultiheadAttention(16, 2, bias=False), (40, 16), ()),
    "causal, more entries": (lambda: Conv(CAUSAL, 6, 4, weight=LowRank(3)), (3, 35, 6), ()),
    "causal": (lambda: Conv(CAUSAL, 6, 4, weight=LowRank(5)), (3, 5, 6), ()),
    "heads added up": (lambda: Conv(CAUSAL, 6, 4), (3, 5, 6), ()),
    "heads added up, no bias": (lambda: Conv(DotProduct(3, 2).softmax(), 6, 4, bias=False), (5, 6), ()),
    "heads side by side": (lambda: Conv(DotProduct(2, 3).scaled().softmax(), 6, 4, weight=HeadBlocks()), (2, 5, 6), ()),
    "alibi": (lambda: Conv((DotProduct(2, 3).scaled() + ALiBi()).softmax(), 6, 4, weight=HeadBlocks()), (2, 5, 6), ()),
    "causal alibi": (lambda: Conv((ALiBi() + DotProduct(2, 3)).masked(keep=Causal()).softmax(), 6, 4,
                                  weight=LowRank(3)), (5, 6), ()),
    "relative bias": (lambda: Conv((DotProduct(2, 3).scaled(0.7) + RelativeBias(2)).softmax(), 6, 4), (2, 5, 6), ()),
    "relative bias, causal": (lambda: Conv((RelativeBias(4, buckets="log_causal") + DotProduct(2, 3)).masked(
        keep=Causal()).softmax(), 6, 4, weight=LowRank(3)), (3, 9, 6), ()),
    "one relative bias": (lambda: Conv((DotProduct(2, 3).scaled() + RelativeBias(3, heads=1)).softmax(), 6, 4,
                                       weight=HeadBlocks()), (2, 9, 6), ()),
}


def make(name):
    """A layer with nonzero parameters, in evaluation, x, and the other arguments."""
    torch.manual_seed(3)
    build, shape, others = CASES[name]
    layer = build().eval()
    for parameter in layer.parameters():
        nn.init.uniform_(parameter, -1, 1)
    return layer, torch.randn(shape, requires_grad=True), others


def planned(layer, *inputs):
    """A call that is planned: a limit of bytes that nothing exceeds asks for a plan."""
    layer.max_bytes = 1 << 40
    y = layer(*inputs)
    layer.max_bytes = None
    return y


def numbers(layer, x, others, second=False):
    """y, all gradients of a function of it, and those of one of them."""
    y = layer(x, *others)
    grads = torch.autograd.grad((y * y.detach().cos() + y ** 2).sum(), [x, *layer.parameters()], create_graph=second)
    if second:
        grads += torch.autograd.grad(sum(g.square().sum() for g in grads), [x, *layer.parameters()], allow_unused=True)
    return [y, *grads]


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("second", [False, True], ids=["first", "second"])
def test_values_and_derivatives_are_those_of_double_precision(name, second):
    layer, x, others = make(name)
    double = copy.deepcopy(layer).double()
    graphs = [Graph(g.edge_index, num_nodes=g.num_nodes,
                    edge_weight=None if g.edge_weight is None else g.edge_weight.double()) for g in others]
    expected = numbers(double, x.detach().double().requires_grad_(), graphs, second)
    scale = max(float(exact.abs().max()) for exact in expected)  # a key's bias has no gradient but rounding
    for own, exact in zip(numbers(layer, x, others, second), expected, strict=True):
        torch.testing.assert_close(own, exact.float(), rtol=1e-4, atol=1e-5 * scale)


@pytest.mark.parametrize("name", [name for name in CASES if not name.endswith(("more entries", "one sequence"))])
def test_a_call_is_one_node(name):
    layer, x, others = make(name)
    y = layer(x, *others)  # its node lives as long as it does
    above = {type(parent).__name__ for parent, _ in y.grad_fn.next_functions if parent is not None}
    dots = {"_AttendDotsBackward"} if "beside" in name else set()
    assert above <= {"AccumulateGrad", "SqueezeBackward1"} | dots, y.grad_fn


@pytest.mark.parametrize("name", [name for name in CASES if not name.startswith("linear")])
def test_transforms_compilers_autocast_and_double_precision_take_a_plan(name):
    layer, x, others = make(name)
    expected = layer(x, *others)
    tangent = torch.randn_like(x)
    _, forward = torch.func.jvp(lambda x: layer(x, *others), (x.detach(),), (tangent,))
    _, expected_forward = torch.func.jvp(lambda x: planned(layer, x, *others), (x.detach(),), (tangent,))
    torch.testing.assert_close(forward, expected_forward)
    torch.testing.assert_close(torch.vmap(lambda x: layer(x, *others))(torch.stack([x, x]))[1], expected)
    with torch.autocast("cpu", torch.bfloat16):
        assert layer(x, *others).dtype is torch.bfloat16


class Twice(nn.Module):
    def forward(self, w):
        return 2 * w


def test_hooks_parametrizations_and_pruned_parameters_count():
    seen = []
    for name in CASES:
        layer, x, others = make(name)
        whole = layer(x, *others)
        leaves = [module for module in layer.modules() if module is not layer]
        handles = [module.register_forward_hook(seen.append) for module in leaves]
        with pytest.raises(TypeError, match="takes exactly one argument") if leaves else nullcontext():
            layer(x, *others)
        for handle in handles:
            handle.remove()
        holder, key = next((m, k) for m in layer.modules() for k, p in m._parameters.items() if p is not None
                           and p.dim() > 1)
        parametrize.register_parametrization(holder, key, Twice())
        twice = layer(x, *others)
        assert not torch.allclose(twice, whole, rtol=1e-3), name
        torch.testing.assert_close(twice, planned(layer, x, *others))
        parametrize.remove_parametrizations(holder, key, leave_parametrized=False)
        prune.l1_unstructured(holder, key, amount=0.5)
        torch.testing.assert_close(layer(x, *others), planned(layer, x, *others))


def test_a_replaced_projection_is_called():
    layer, x, _ = make("attention")
    layer.attention.query = nn.Linear(6, 6)
    torch.testing.assert_close(layer(x), planned(layer, x))


DROPPED = {
    "gat": lambda: GATConv(6, 3, heads=2, dropout=0.5),
    "gatv2": lambda: GATv2Conv(6, 3, heads=2, dropout=0.5),
    "attention": lambda: MultiheadAttention(6, 2, dropout=0.5),
    "dots along edges": lambda: Conv(ALONG.dropout(0.5), 6, 8, weight=HeadBlocks()),
    "heads side by side": lambda: Conv(DotProduct(2, 3).scaled().softmax().dropout(0.5), 6, 4, weight=HeadBlocks()),
    "alibi": lambda: Conv((DotProduct(2, 3).scaled() + ALiBi()).softmax().dropout(0.5), 6, 4, weight=HeadBlocks()),
}


@pytest.mark.parametrize("name", DROPPED)
def test_dropout_draws_as_a_plan_does(name):
    (layer, x, others), dropped = make(name), DROPPED[name]()
    dropped.load_state_dict(layer.state_dict())
    results = []
    for limit in (None, 1 << 40):
        dropped.max_bytes = limit
        torch.manual_seed(5)
        results.append(numbers(dropped, x, others))
    scale = max(float(other.abs().max()) for other in results[1])  # a key's bias has no gradient but rounding
    torch.testing.assert_close(*results, rtol=1.3e-6, atol=1e-6 * scale)
    assert not torch.allclose(results[0][0], layer(x, *others))


def test_changed_edges_are_read_again_and_stop_a_second_derivative():
    for name in ("gcn", "gat", "gatv2", "sums", "sage", "dots beside itself"):
        layer, x, _ = make(name)
        edges = EDGES.clone()
        graph = Graph(edges, num_nodes=5)
        y = layer(x, graph)
        edges[1, 0] = 3
        torch.testing.assert_close(layer(x, graph), layer(x, Graph(edges.clone(), num_nodes=5)))
        assert not torch.allclose(layer(x, graph), y)
        with pytest.raises(RuntimeError, match="changed in place"):
            torch.autograd.grad(y.square().sum(), x, create_graph=True)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("limit", [None, 1 << 40], ids=["direct", "planned"])
def test_a_result_may_be_changed_in_place_and_differentiated_twice(name, limit):
    layer, x, others = make(name)
    layer.max_bytes = limit
    expected = torch.autograd.grad(layer(x, *others).relu().square().sum(), [x, *layer.parameters()])
    y = layer(x, *others).relu_()
    for _ in range(2):
        actual = torch.autograd.grad(y.square().sum(), [x, *layer.parameters()], retain_graph=True)
        torch.testing.assert_close(actual, expected)


@pytest.mark.parametrize(("build", "shape"), [
    (lambda: Conv1d(64, 32, 49, padding=24), (4, 64, 4000)),
    (lambda: Conv2d(256, 256, 3, stride=2, padding=1), (2, 256, 224, 224)),
    (lambda: Conv2d(64, 64, 7, padding=9, dilation=3, groups=64), (16, 64, 64, 64)),
    (lambda: sc.Conv3d(8, 64, 3), (2, 8, 64, 64, 64))])
def test_the_convolutions_that_are_not_planned_are_what_the_planner_would_choose(build, shape):
    x = torch.empty(shape)
    (chosen,) = [line for line in str(build().plan(x)).splitlines() if line.startswith("*")]
    assert "torch.conv" in chosen


@pytest.mark.parametrize("name", [name for name, (_, _, others) in CASES.items() if not others and any(
    part in name for part in ("attention", "causal", "heads", "bias", "alibi")) and "linear" not in name])
def test_attention_of_few_entries_is_what_the_planner_would_choose(name):
    layer, x, _ = make(name)
    (chosen,) = [line for line in str(layer.plan(x)).splitlines() if line.startswith("*")]
    assert "small_attention" in chosen
    torch.testing.assert_close(layer(x), planned(layer, x), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("scores", [
    DotProduct(2, 3).scaled(0.5).scaled(0.3), (DotProduct(2, 3).scaled(0.5) + ALiBi()).scaled(0.3),
    DotProduct(2, 3) + ALiBi() + ALiBi(), DotProduct(2, 3) + DotProduct(2, 3)],
    ids=["scaled twice", "scaled with its term", "two terms", "two products"])
def test_other_scores_are_planned(scores):
    layer, x = Conv(scores.softmax(), 6, 4, weight=HeadBlocks()), torch.randn(2, 5, 6)
    y = torch.einsum("...kmn,...mp,kpq->...nq", layer.basis(x).dense(), x, layer.weight().dense()) + layer.bias
    torch.testing.assert_close(layer(x), y, rtol=1e-4, atol=1e-5)


def test_a_small_call_of_a_named_x_checks_the_name():
    layer, x = Conv(sc.Adjacency("row").of("nodes"), {"nodes": 6}, 4), torch.randn(5, 6)
    torch.testing.assert_close(layer({"nodes": x}, GRAPH), planned(layer, {"nodes": x}, GRAPH))
    with pytest.raises(sc.ConfigError, match="x must be a dict of what the expression names, 'nodes'; got Tensor"):
        layer(x, GRAPH)


def test_long_kernels_over_many_pixels_are_planned():
    x, layer = torch.empty(16, 64, 64, 64), Conv2d(64, 64, 9, padding=4)
    assert layer._directly(x) is None and "transforms" in str(layer.plan(x))


def test_outputs_of_a_prepared_x_are_those_of_the_whole_call():
    torch.manual_seed(0)
    layer = Conv(sc.Additive(8).softmax(), 6, 6, weight=Eye(), other_channels=5)
    nn.init.uniform_(layer.bias, -1, 1)
    direct, taken = layer.__dict__["_expression"].step, []
    x, z = torch.randn(3, 7, 6, requires_grad=True), torch.randn(3, 12, 5, requires_grad=True)
    leaves = x, z, *layer.parameters()
    cache = layer.prepare(x)
    steps = torch.cat([layer(cache, z=one) for one in z.split([1, 1, 9, 1], 1)], 1)  # nine by a plan
    whole = layer(x, z=z)
    torch.testing.assert_close(steps, whole, rtol=1e-4, atol=1e-5)
    for own, other in zip(*(torch.autograd.grad(y.square().sum(), leaves) for y in (steps, whole)), strict=True):
        torch.testing.assert_close(own, other, rtol=1e-4, atol=1e-5)
    with torch.no_grad():
        cache = layer.prepare(x)
        expected = whole[:, :1]
        assert direct is not None
        torch.testing.assert_close(direct(layer, cache, z[:, :1]), expected, rtol=1e-4, atol=1e-5)
        cache.append(torch.randn(3, 2, 6))
        torch.testing.assert_close(layer(cache, z=z[:, :1]), layer(cache.x.clone(), z=z[:, :1]), rtol=1e-4, atol=1e-5)
        target = layer.get_submodule("attention.target")
        del target.bias  # a tensor takes its place
        target.bias = torch.ones(8)
        expected = layer(x, z=z[:, :1])
        torch.testing.assert_close(layer(layer.prepare(x), z=z[:, :1]), expected, rtol=1e-4, atol=1e-5)
        target.register_forward_hook(lambda *_: taken.append(0))
        taken.clear()
        cache = layer.prepare(x)
        layer(cache, z=z[:, :1])
        assert taken == [0]
        layer.bias.add_(1)
        with pytest.raises(sc.ConfigError, match="another bias"):
            layer(cache, z=z[:, :1])


@pytest.mark.parametrize("build, entries, others", [
    (lambda: Conv(DotProduct(2, 4, bias=True).softmax(), 8, 3), 5, ()),
    (lambda: Conv(DotProduct(2, 4, bias=True).softmax(), 8, 3), 300, ()),
    (lambda: Conv(DotProduct(2, 4, bias=True).softmax(), 8, 3, weight=LowRank(4)), 5, ()),
    (lambda: Conv(DotProduct(2, 4, bias=True).masked(keep=STRUCTURE).softmax(), 8, 8, weight=HeadBlocks()), 5,
     (GRAPH,)),
], ids=["few", "many", "low rank", "along edges"])
def test_a_tensor_takes_the_place_of_the_bias_of_a_projection(build, entries, others):
    layer, x = build(), torch.randn(entries, 8)
    expected = layer(x, *others)
    for part in layer.modules():
        if isinstance(part, nn.Linear) and part.bias is not None:
            bias = part.bias.detach().clone()
            del part.bias
            part.bias = bias
    torch.testing.assert_close(layer(x, *others), expected)


@pytest.mark.parametrize("name", ["alibi", "relative bias"])
def test_positions_are_those_of_each_call(name):
    layer, x, _ = make(name)
    for entries in (3, 5, 3, 1, 150, 4):
        x = torch.randn(2, entries, 6)
        for mode in (nullcontext(), torch.no_grad(), torch.inference_mode()):
            with mode:
                torch.testing.assert_close(layer(x), planned(layer, x), rtol=1e-4, atol=1e-5)


def test_a_term_that_is_watched_or_replaced_is_called():
    layer, x, _ = make("relative bias")
    before, (term,) = layer(x), [part for part in layer.modules() if isinstance(part, RelativeBias)]
    calls = []
    handle = term.register_forward_hook(lambda *_: calls.append(0))
    torch.testing.assert_close(layer(x), before, rtol=1e-4, atol=1e-5)
    assert calls == [0]
    handle.remove()
    term.forward = lambda inputs: RelativeBias.forward(term, inputs) * 0.0
    assert not torch.allclose(layer(x), before, rtol=1e-2, atol=1e-2)
    del term.forward
    with torch.no_grad():
        term.table.zero_()
    assert not torch.allclose(layer(x), before, rtol=1e-2, atol=1e-2)
    torch.testing.assert_close(layer(x), planned(layer, x), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("heads, bias, shapes", [(2, True, ((5, 8), (7, 6))), (4, False, ((3, 5, 8), (3, 9, 6))),
                                                 (2, True, ((2, 150, 8), (2, 140, 6)))], ids=str)
@pytest.mark.parametrize("p", [0.0, 0.3])
def test_attention_of_few_queries_to_other_keys_is_what_a_plan_gives(heads, bias, shapes, p, monkeypatch):
    layer = MultiheadAttention(8, heads, bias=bias, kdim=6, dropout=p)
    query, keys = (torch.randn(shape, requires_grad=True) for shape in shapes)
    leaves = [query, keys, *layer.parameters()]

    def gradients(call, second):
        torch.manual_seed(0)
        y = call(layer, query, keys)
        first = torch.autograd.grad(y.square().sum(), leaves, create_graph=second)
        if not second:
            return [y, *first]
        return [y, *first, *torch.autograd.grad(sum(g.square().sum() for g in first), leaves, allow_unused=True)]

    taken, direct = [], layer._directly_others
    monkeypatch.setattr(layer, "_directly_others", lambda *inputs: taken.append(direct(*inputs)) or taken[-1])
    for second in (False, True):
        expected = gradients(planned, second)
        scale = max(float(t.abs().max()) for t in expected)  # a key's bias has no gradient but rounding
        for own, other in zip(gradients(lambda layer, *inputs: layer(*inputs), second), expected, strict=True):
            torch.testing.assert_close(own, other, rtol=1e-4, atol=1e-5 * scale)
    assert [y is None for y in taken] == [True, False] * 2
    many = torch.func.vmap(layer.eval())(query.expand(2, *shapes[0]), keys.expand(2, *shapes[1]))
    torch.testing.assert_close(many[1], layer(query, keys), rtol=1e-4, atol=1e-5)
    with pytest.raises(sc.ShapeError):
        layer(query, query)


BIASED = (DotProduct(2, 3).scaled() + RelativeBias(2)).softmax()


@pytest.mark.parametrize("weight", [Full(), HeadBlocks(), LowRank(3)], ids=lambda weight: type(weight).__name__)
def test_a_table_of_each_output_has_a_gradient(weight):
    layer, x = Conv(BIASED, 6, 4, weight=weight), torch.randn(2, 7, 6)
    table = layer.position_bias.table = nn.Parameter(layer.position_bias.table.detach().expand(2, 7, 5).clone())
    wide = copy.deepcopy(layer).double()
    layer(x).square().sum().backward()
    y = torch.einsum("...kmn,...mp,kpq->...nq", wide.basis(x.double()).dense(), x.double(), wide.weight().dense())
    (y + wide.bias).square().sum().backward()
    assert table.grad is not None
    torch.testing.assert_close(table.grad.double(), wide.position_bias.table.grad, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("path", [None, "channels_first", "between"])
@pytest.mark.parametrize("weight", [Full(), HeadBlocks(), LowRank(3)], ids=lambda weight: type(weight).__name__)
def test_attention_of_few_entries_takes_one_number_as_its_bias(weight, path):
    if (path == "between") > (type(weight) is LowRank):
        pytest.skip("no such path")
    layer, x = Conv(BIASED, 6, 4, weight=weight), torch.randn(2, 7, 6)
    layer.path = path
    with torch.no_grad():
        layer.bias.fill_(0.7)
    expected = layer(x)
    layer.bias = nn.Parameter(torch.tensor([0.7]))
    y = layer(x)
    torch.testing.assert_close(y, expected)
    y.sum().backward()
    torch.testing.assert_close(layer.bias.grad, torch.tensor([2.0 * 7 * 4]))


@pytest.mark.parametrize("weight", [Full(), HeadBlocks(), LowRank(3)], ids=lambda weight: type(weight).__name__)
def test_errors_of_parameters_are_those_of_usual_operators(weight):
    layer, x = Conv(BIASED, 6, 4, weight=weight), torch.randn(2, 7, 6)
    query = layer.attention.query
    for wrong in ((5, 6), (8, 6), (6,)):
        original, query.weight = query.weight, nn.Parameter(torch.randn(wrong))
        with pytest.raises(RuntimeError) as raised:
            layer(x)
        assert "attend_entries" not in str(raised.value)
        query.weight = original
    layer.position_bias.table = nn.Parameter(torch.randn(2, 1, 4))
    with pytest.raises(RuntimeError) as raised:
        layer(x)
    assert "attend_entries" not in str(raised.value)
