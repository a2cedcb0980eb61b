"""Faults that attackers found: graphs changed through what was made of them, odd scores, saturated gradients."""

import copy

import pytest
import torch
from torch.func import functional_call, grad, stack_module_state, vmap

from structconv import Causal, ConfigError, Eye, Full, Graph, LowRank, Padding, RelativeBias, ShapeError, Window, conv
from structconv.bases import Bilinear, Dense, Score, value
from structconv.mechanisms import Adjacency, ALiBi, BiAffine, DotProduct, Given, Mechanism, Shifts
from structconv.nn import Conv, MultiheadAttention, StructureBuffer
from structconv.primitives.blocked_attention import Maps, Options, blocked_attention
from structconv.structures import DenseMask, EdgeSupport
from structconv.weights import Weight

EDGES = torch.tensor([[0, 1], [1, 2]])


class Mirrored(Weight, theta="KPQ"):
    theta: torch.Tensor

    def dense(self):
        return (self.theta + self.theta.flip(0)) / 2


def summed(structure, self_loops=False):
    layer = Conv(Adjacency(None, self_loops=self_loops), 1, 1, weight=Eye(), bias=False)
    return layer(torch.tensor([[1.0], [2.0], [3.0]]), structure=structure).flatten().tolist()


def test_a_loaded_graph_with_self_loops_is_the_one_that_is_read():
    other = Graph(torch.tensor([[2, 2], [0, 1]]), num_nodes=3)
    ours, theirs = (StructureBuffer(graph.with_self_loops()) for graph in (Graph(EDGES, num_nodes=3), other))
    ours.load_state_dict(theirs.state_dict())
    assert summed(ours()) == summed(theirs()) == [4.0, 5.0, 3.0]


def test_writing_into_a_buffer_leaves_other_graphs_alone():
    graph = Graph(EDGES.clone(), num_nodes=3)
    for made in (graph.with_self_loops(), graph.reversed()):
        StructureBuffer(made).edge_index.zero_()
    assert summed(graph, self_loops=True) == [1.0, 3.0, 5.0]
    assert graph.reversed().edge_index.tolist() == [[1, 2], [0, 1]]


def test_loops_on_loops_follow_the_edges():
    edges = torch.tensor([[0, 1], [1, 2]])
    looped = Graph(edges, num_nodes=3).with_self_loops()
    summed(looped, self_loops=True)
    looped.edge_index[:, :2] = torch.tensor([[2, 2], [0, 1]])
    assert summed(looped, self_loops=True) == summed(Graph(looped.edge_index.clone(), num_nodes=3), self_loops=True)


def test_scores_that_are_no_floating_numbers_name_the_class():
    @value
    class Whole(Score):
        places: torch.Tensor
        size = 1
        num_inputs = num_outputs = property(lambda self: self.places.shape[0])

        def evaluate(self, pairs):
            return (pairs.source_index() - pairs.target_index())[None]

    with pytest.raises(ConfigError, match="Whole: evaluate must return floating numbers"):
        Conv(Given(Whole(torch.zeros(3)).softmax()), 2, 2)(torch.randn(3, 2))


@pytest.mark.parametrize("p", [-0.5, float("nan"), 2, "a", True])
def test_a_probability_of_dropout_is_checked_when_it_is_written(p):
    with pytest.raises(ConfigError, match=r"p must be in \[0, 1\)"):
        DotProduct(heads=2).softmax().dropout(p)


def test_what_is_prepared_is_checked_as_what_is_called():
    layer = Conv(DotProduct(heads=2).softmax(), 4, 4)
    with pytest.raises(ShapeError, match="dtype"):
        layer.prepare(torch.randn(3, 4, dtype=torch.float64))
    with pytest.raises(ConfigError, match="step must be given what prepare made; got Tensor"):
        layer.step(torch.randn(3, 4), torch.randn(1, 4))


def test_what_is_prepared_is_of_the_buffers_as_they_were():
    class Scaled(torch.nn.Linear):
        def __init__(self, inputs, outputs):
            super().__init__(inputs, outputs)
            self.register_buffer("factor", torch.ones(()))

        def forward(self, x):
            return self.factor * super().forward(x)

    layer = Conv(DotProduct(1, 4).masked(keep=torch.tensor([True, True, False])).softmax(), 4, 4).eval()
    attention = next(module for module in layer.modules() if isinstance(module, DotProduct))
    attention.key = Scaled(4, 4).eval()
    cache, z = layer.prepare(torch.randn(3, 4)), torch.randn(2, 4)
    layer.mask.mask0.fill_(True)  # masks are read in each call
    torch.testing.assert_close(layer(cache, z=z), layer(cache.x, z=z))
    attention.key.factor.fill_(2)
    with pytest.raises(ConfigError, match="factor"):
        layer(cache, z=z)


def test_a_sparse_matrix_that_a_mechanism_returns_is_refused_by_name():
    class Ring(Mechanism):
        def forward(self, inputs):
            return torch.eye(3).to_sparse()

    with pytest.raises(ConfigError, match=r"Ring: .*sparse_coo.*Sparse"):
        Conv(Ring(), 2, 2)(torch.randn(3, 2))


def between(evaluate):
    @value
    class Mine(Score):
        s: torch.Tensor
        t: torch.Tensor
        size = property(lambda self: self.s.shape[-2])
        num_inputs = property(lambda self: self.s.shape[-1])
        num_outputs = property(lambda self: self.t.shape[-1])
        batch_shape = property(lambda self: self.s.shape[:-2])

        def evaluate(self, pairs):
            return evaluate(self, pairs)

    class Layer(Mechanism):
        has_scores, batching, size = True, "pairs", 2

        def bind(self, channels):
            self.place = torch.nn.Linear(channels.inputs, 2)

        def forward(self, inputs):
            return Mine(self.place(inputs.x).mT, self.place(inputs.z).mT)

    return Layer()


@pytest.mark.parametrize("evaluate", [lambda self, pairs: self.t.unsqueeze(-1) - self.s.unsqueeze(-2),
                                      lambda self, pairs: self.s.unsqueeze(-1) - self.t.unsqueeze(-2)])
def test_scores_that_are_transposed_or_of_all_pairs_are_refused_where_m_is_n(evaluate):
    layer = Conv(between(evaluate).softmax(), 3, 3)
    for _ in range(2):
        with pytest.raises(ShapeError, match=r"Mine: evaluate must return \(\.\.\., K, M, N\) at these pairs"):
            layer(torch.randn(6, 3))


def test_scores_of_sources_as_targets_name_the_function():
    graph = Graph(torch.tensor([[0, 1, 5], [0, 3, 2]]), num_inputs=6, num_outputs=4)
    layer = Conv(between(lambda self, pairs: pairs.target(self.s)).masked(keep=graph).softmax(), 3, 3)
    with pytest.raises(ShapeError, match=r"pairs.target: the tensor must have shape \(\.\.\., N=4\)"):
        layer(torch.randn(6, 3), z=torch.randn(4, 3))


@pytest.mark.parametrize(("wrong", "message"), [
    (lambda a: a.leaky_relu("a"), "leaky_relu: negative_slope must be a number"), (lambda a: a * "a", "c must be"),
    (lambda a: a.softcap("a"), "softcap: cap must be a number"), (lambda a: a.scaled("a"), "scale must be a number"),
    (lambda a: a.softmax(sink="a"), "softmax: sink must be a number"), (lambda a: a * None, "c must be a number")])
@pytest.mark.parametrize("operand", [DotProduct(heads=2), Bilinear(torch.ones(2, 3, 4), torch.ones(2, 3, 4))])
def test_numbers_are_numbers(wrong, message, operand):
    with pytest.raises(ConfigError, match=message):
        wrong(operand)


def test_a_mechanism_is_not_called_with_a_tensor():
    with pytest.raises(ConfigError, match="DotProduct: a mechanism must be called with the Inputs of a call"):
        DotProduct()(torch.randn(3, 4))


def test_a_value_derives_from_a_value():
    with pytest.raises(ConfigError, match=r"Mine: the class must derive from a Basis.*structconv\.bases\.Score"):
        @value
        class Mine(Mechanism):
            pass


def test_sparsemax_along_edges_without_numbers():
    layer = Conv(DotProduct(heads=2, dim=4).masked(keep=Graph(EDGES, num_nodes=3)).normalize("sparsemax"), 4, 6)
    assert layer.to("meta")(torch.randn(3, 4, device="meta")).shape == (3, 6)


def test_a_graph_is_combined_as_the_supports_of_the_docs():
    graph, window = Graph(EDGES, num_nodes=3), Window(0)
    m, n = torch.arange(3).unsqueeze(-1), torch.arange(3)
    pairs = EdgeSupport(graph).contains(m, n)
    for support, expected in ((window | graph, pairs | (m == n)), (graph | window, pairs | (m == n)),
                              (Causal() & graph, pairs & (m <= n)), (graph & Causal(), pairs & (m <= n))):
        assert torch.equal(support.contains(m, n), expected)
        layer = Conv(DotProduct(dim=4).masked(keep=support).softmax(), 4, 4)
        assert torch.equal(layer.basis(torch.randn(3, 4)).dense()[0] != 0, expected)
    with pytest.raises(TypeError):
        graph & 3


@pytest.mark.parametrize("scale", [0.0, -0.5])
@pytest.mark.parametrize("shape", [(7, 4), (2, 7, 4)])
def test_causal_attention_of_any_scale_equals_that_by_a_table(scale, shape):
    """torch's own kernel for causal pairs gives NaN where the scale is 0 or below."""
    layer = Conv(DotProduct(heads=2, dim=2).scaled(scale).masked(keep=Causal()).softmax(), 4, 4)
    table = Conv(DotProduct(heads=2, dim=2).scaled(scale).masked(
        keep=DenseMask(torch.ones(7, 7, dtype=torch.bool).triu())).softmax(), 4, 4)
    table.load_state_dict(layer.state_dict(), strict=False)
    results = []
    for each in (layer, table):
        x = torch.linspace(-1, 1, 56)[:torch.Size(shape).numel()].view(shape).requires_grad_()
        y = each(x)
        results.append([y.detach(), *torch.autograd.grad(y.square().sum(), [x, *each.parameters()])])
        with torch.no_grad():
            torch.testing.assert_close(each(x), y)
    torch.testing.assert_close(*results)


def test_a_divisor_has_a_gradient():
    """On bases; a mechanism, which would have to own it, refuses a parameter."""
    scores = Dense(torch.randn(2, 3, 3))
    for divisor in (torch.tensor(2.0, requires_grad=True), torch.tensor([2.0, 4.0], requires_grad=True)):
        dense = (scores / divisor).dense()
        torch.testing.assert_close(dense, scores.dense() / divisor.view(-1, 1, 1))
        (got,) = torch.autograd.grad(dense.square().sum(), divisor)
        (expected,) = torch.autograd.grad((scores.dense() / divisor.view(-1, 1, 1)).square().sum(), divisor)
        torch.testing.assert_close(got, expected)
    with pytest.raises(ConfigError, match=r"a / b: .* got an nn.Parameter. Learn the factor"):
        DotProduct(2, 4) / torch.nn.Parameter(torch.ones(2))
    torch.testing.assert_close(Conv((DotProduct(2, 4) / torch.tensor([2.0, 4.0])).softmax(), 3, 3)(
        torch.zeros(5, 3)), torch.zeros(5, 3))


@pytest.mark.parametrize("shape", [(6, 6), (2, 6, 6)])
def test_parameters_are_added_to_scores_and_subtracted_from_them(shape):
    x, table = torch.randn(6, 5), torch.nn.Parameter(torch.randn(shape))
    scores, results = DotProduct(2, 4), []
    for term in (scores + table, table + scores, scores - table, scores + Given(table)):
        layer = Conv(term.softmax(), 5, 5)
        own = {name: p for name, p in layer.named_parameters() if "tensor0" in name}
        assert [p.numel() for p in own.values()] == [table.numel()]
        with torch.no_grad():
            for parameter in layer.parameters():
                if all(parameter is not p for p in own.values()):
                    parameter.copy_(torch.linspace(-1, 1, parameter.numel()).view_as(parameter))
        y = layer(x)
        assert torch.autograd.grad(y.square().sum(), list(own.values()))[0].abs().sum() > 0
        results.append(y.detach())
    torch.testing.assert_close(results[0], results[1])
    torch.testing.assert_close(results[0], results[3])
    assert not torch.allclose(results[0], results[2])


@pytest.mark.parametrize("heads", [3, 4])
def test_scores_of_other_heads_than_they_say_are_refused(heads):
    """(B, M, N) without an axis of heads, or another number of them, would be read as other heads."""
    @value
    class Near(Score):
        places: torch.Tensor
        size = 2
        num_inputs = num_outputs = property(lambda self: self.places.shape[-1])

        def evaluate(self, pairs):
            return -(pairs.source(self.places) - pairs.target(self.places)).abs()

    for places in (torch.rand(heads, 6), torch.rand(5, heads, 6)):
        for structured in (lambda basis: basis, lambda basis: basis.masked(keep=Graph(EDGES, num_nodes=6))):
            with pytest.raises(ShapeError, match=r"Near: evaluate must return \(\.\.\., K"):
                Conv(Given(structured(Near(places)).softmax()), 3, 3)(torch.randn(6, 3))
    one = Conv(Given(Near(torch.rand(1, 6)).softmax()), 3, 3)(torch.randn(6, 3))  # one for all heads
    assert one.shape == (6, 3)


@pytest.mark.parametrize("make", [lambda: Given(torch.nn.Parameter(torch.randn(2, 6, 6))),
                                  lambda: DotProduct(2, 4).masked(keep=Padding(torch.arange(6) < 4)).softmax()])
def test_a_layer_keeps_no_tensors_of_a_functional_call(make):
    x, layers = torch.randn(3, 6, 8), [Conv(make(), 8, 8) for _ in range(2)]
    layer = layers[0]
    expected, state = layer(x), {name: p.detach().clone() for name, p in layer.named_parameters()}

    def ensemble():
        stacked = stack_module_state(layers)
        vmap(lambda p, b: functional_call(layer, (p, b), (x,)))(*stacked)

    def adapted():
        functional_call(layer, {name: p.requires_grad_() * 1 for name, p in state.items()}, (x,))

    for call in (lambda: grad(lambda p: functional_call(layer, p, (x,)).sum())(state), ensemble, adapted):
        call()
        torch.testing.assert_close(copy.deepcopy(layer)(x), expected)


@pytest.mark.parametrize("scores", [DotProduct(heads=2, dim=3).softcap(2.0), BiAffine(heads=2),
                                    (DotProduct(heads=2, dim=3) + ALiBi()).masked(keep=Causal())])
def test_third_derivatives(scores):
    layer, x = Conv(scores.softmax(), 6, 4).double(), torch.randn(5, 6, dtype=torch.float64, requires_grad=True)

    def third(fn):
        first, = torch.autograd.grad((fn(x) ** 3).sum(), x, create_graph=True)
        second, = torch.autograd.grad(first.sin().sum(), x, create_graph=True)
        return torch.autograd.grad(second.sin().sum(), x)[0]

    def by_einsum(x):
        return torch.einsum("kmn,mp,kpq->nq", layer.basis(x).dense(), x, layer.weight().dense()) + layer.bias

    torch.testing.assert_close(third(layer), third(by_einsum))


class Adapter(torch.nn.Module):
    """A module that adds what no matrix computes."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        y = self.inner(x)
        return y + y.relu()


PROJECTED = {"scores": lambda: Conv(DotProduct(heads=2, dim=8).scaled().softmax(), 16, 16, weight=LowRank(8)),
             "shifts": lambda: Conv(Shifts([-1, 0, 1]), 16, 16, weight=LowRank(2)),
             "two parts": lambda: Conv(Shifts([-1, 0]) | Shifts([1]), 16, 16, weight=LowRank(2)),
             "own weight of each part": lambda: Conv(Shifts([0]) | DotProduct(heads=2, dim=8).softmax(), 16, 16,
                                                     weight=[Full(), LowRank(2)]),
             "heads": lambda: MultiheadAttention(16, 4), "no bias": lambda: MultiheadAttention(16, 4, bias=False)}


@pytest.mark.parametrize("tokens", [3, 300])
@pytest.mark.parametrize("name", PROJECTED)
def test_a_module_in_the_place_of_a_projection_is_called_once_on_the_entries(name, tokens):
    layer, x = PROJECTED[name]().double(), torch.randn(2, tokens, 16).double()
    if name == "heads":
        torch.nn.init.normal_(layer.value_bias)
    weight = list(layer.weight.children())[1] if name.startswith("own") else layer.weight
    plain, shapes = layer(x), []
    hook = weight.output.register_forward_hook(lambda module, args, y: (shapes.append(args[0].shape), y + 1)[1])
    torch.testing.assert_close(layer(x), plain + 1)
    assert shapes == [(2, tokens, weight.output.in_features)]
    hook.remove()
    if not name.startswith("own"):
        weight.output = Adapter(weight.output)
        projected = plain if layer.bias is None else plain - layer.bias
        torch.testing.assert_close(layer(x), plain + projected.relu())
        assert not any(candidate.path != "between" for candidate in layer.plan(x).candidates)


def test_projections_whose_parameters_are_loaded_in_their_call(tmp_path):
    accelerate = pytest.importorskip("accelerate")
    for name in ("scores", "heads"):
        model, x = torch.nn.Sequential(PROJECTED[name]()).eval(), torch.randn(2, 3, 16)
        expected = model(x)
        offloaded = accelerate.disk_offload(model, tmp_path / name, execution_device=torch.device("cpu"))
        torch.testing.assert_close(offloaded(x), expected)


PRODUCT = DotProduct(heads=2, dim=4).scaled()
BIASED = PRODUCT + RelativeBias(3)


@pytest.mark.parametrize("scores", [BIASED, BIASED.masked(keep=Causal()), PRODUCT + ALiBi()])
def test_gradients_of_saturated_scores_with_biases(scores):
    """Weights of exactly 1 give scores no gradient, however large x is."""
    layer, x = Conv(scores.softmax(), 8, 6), 1e3 * torch.randn(2, 129, 8)
    found = []
    for wide, dense in ((False, False), (False, True), (True, True)):
        own, leaf = (copy.deepcopy(layer).double(), x.double()) if wide else (layer, x.clone())
        leaf.requires_grad_()
        y = torch.einsum("...kmn,...mp,kpq->...nq", own.basis(leaf).dense(), leaf, own.weight().dense()) if dense else (
            own(leaf))
        found.append(torch.autograd.grad(y, [leaf, *own.attention.parameters()], torch.ones_like(y).cumsum(1) / 129))
    for ours, original, exact in zip(*found, strict=True):
        error, expected = ((t - exact).abs().max() for t in (ours, original))
        assert error <= 8 * expected + 1e-6 * exact.abs().max() + 1e-30


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("weights", ["softmax", "sum"])
def test_gradients_of_scores_that_are_multiplied(weights, causal):
    q, k, v = (torch.randn(2, 7, 3, dtype=torch.float64, requires_grad=True) for _ in range(3))
    diagonal = torch.randn(2, 13, dtype=torch.float64, requires_grad=True)
    options = Options(weights, "identity" if weights == "softmax" else "exp", 2.5, causal, 0.7, 0.0, 1)
    assert torch.autograd.gradcheck(
        lambda *t: blocked_attention(*t[:3], Maps(t[3], None, None, None, None), options)[0], (q, k, v, diagonal))


@pytest.mark.parametrize("part", [DotProduct(heads=2, dim=4).softmax(), Shifts([2])])
def test_a_weight_that_mixes_its_matrices_within_parts_of_an_expression(part):
    """The tensors of a user's weight were cut into parts, each mixed by itself: other numbers, silently."""
    layer, x = Conv(Shifts([-1, 0, 1]) | part, 3, 2, weight=Mirrored()).double(), torch.randn(6, 3).double()
    a, theta = layer.basis(x).dense(torch.float64), layer.weight().dense()
    torch.testing.assert_close(layer(x), torch.einsum("kmn,mp,kpq->nq", a, x, theta) + layer.bias)


@pytest.mark.parametrize("over", ["inputs", "outputs"])
def test_transposed_weights_of_a_table_of_pairs(over):
    """Plans read shapes of the table alone, and failed with an AttributeError."""
    keep, x, theta = torch.rand(2, 5, 4) < 0.7, torch.randn(2, 4, 3).double(), torch.randn(1, 3, 2).double()
    scores = Dense(torch.randn(2, 1, 5, 4).double()).masked(keep=DenseMask(keep)).softmax(over)
    for basis in (scores.transpose(), (scores + Dense(torch.randn(1, 5, 4).double()).softmax()).transpose()):
        expected = torch.einsum("...kmn,...mp,kpq->...nq", basis.dense(torch.float64), x, theta)
        torch.testing.assert_close(conv(x, basis, theta), expected)


@pytest.mark.parametrize("mask", [Padding(torch.rand(2, 5) < 0.7), DenseMask(torch.rand(3, 2, 5, 5) < 0.7)])
@pytest.mark.parametrize("kind", ["softmax", "sigmoid"])
@pytest.mark.parametrize("shape", [(), (1,), (3, 1)])
def test_a_mask_of_a_batch_over_scores_and_x_without(mask, kind, shape):
    """Kernels took the batch of x and of the scores alone: "the number of sizes provided must be greater"."""
    basis = Bilinear(torch.randn(2, 5, 3).double(), torch.randn(2, 5, 3).double()).masked(keep=mask).normalize(kind)
    x, theta = torch.randn(*shape, 5, 3).double().requires_grad_(), torch.randn(2, 3, 2).double()
    y, expected = conv(x, basis, theta), torch.einsum("...kmn,...mp,kpq->...nq", basis.dense(torch.float64), x, theta)
    torch.testing.assert_close(y, expected)
    weights = torch.randn_like(y)
    ours, theirs = (torch.autograd.grad(t, x, weights) for t in (y, expected))
    torch.testing.assert_close(ours, theirs)
