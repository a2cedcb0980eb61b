"""Decoding: outputs know their places, and what depends on x alone is made once, over every layer."""

import copy
import dataclasses

import pytest
import torch

from structconv import (
    Additive,
    Adjacency,
    ALiBi,
    DotProduct,
    Grid,
    Identity,
    LowRank,
    Mechanism,
    RelativeBias,
    Rotary,
    Shifts,
    Uniform,
)
from structconv.bases import Bilinear
from structconv.errors import ConfigError, ShapeError, StructureError
from structconv.mechanisms import GaussianWindow, General, PredictedPosition, RelativeKey
from structconv.nn import Conv, MultiheadAttention, RelativeValue
from structconv.structures import Causal, DenseMask, Graph, Padding, Window
from structconv.testing import Setup, Specimen, suite
from structconv.testing.layers import check_positions, check_prepared, takes_positions, takes_prepared
from tests.support.errors import check_refused
from tests.support.layers import drawn, uses

USES = uses()
#: What is given as a whole (matrices, graphs and masks of one size), or has outputs that do not stand among its inputs.
SPECIMENS_REFUSED = """
selected selected_in_a_batch dropped_within moved_in_a_batch additive affine attention_of_attention
attention_over_repeated_edges attention_without_edges bilinear bipartite_adjacency bipartite_attention
causal_over_outputs composed concatenated context_attention context_by_additive_scores context_by_masked_scores
cuboid_strided deformable deformable_on_a_grid deformable_strided dense dense_batched dense_without_entries distance
dropped dynamic_shifts edge_bias edge_bias_by_a_module edge_bias_of_a_batch edge_score entmax_over_outputs
entmax_over_repeated_edges everything_masked factorized_biaffine gaussian_bump given given_table graph_additive
graph_attention graph_attention_over_outputs graph_concatenation graph_logarithm graph_pair graph_sparsemax grid_bias
hypergraph identity laplacian_by_its_spectrum learned learned_scores log_softmax log_softmax_over_outputs lookup
lookup_by_output lookup_by_position lookup_on_a_grid masked_columns masked_matrix masked_zeros maximum mixed_matrices
nodes_from_edges of_two_inputs one_term_learned outer plus_a_table polynomial_chebyshev polynomial_monomial
pool_padded pooling product product_over_repeated_edges samples_of_attention samples_of_global_tokens
samples_of_two_sides scaled_by_head senders_and_receivers shared_taps shift_circular shift_on_a_batch shift_reflect
shift_shrinking shift_strided shift_strided_transposed shift_zeros side_by_side sink_by_head sink_over_repeated_edges
softmax_by_channel sparse sparse_batched sparse_with_repeated_edges sparse_without_edges sparsemax summed
table_with_infinities talking_heads_on_a_graph taps transposed_product transposed_scores typed
typed_with_repeated_edges uniform unpool
"""
LAYERS_REFUSED = """
masked_by_graph mha_graph named_bias named_grid_then_graph named_mask named_users on_graph_or_not swin users
users_masked users_options
"""
REFUSED = {"over_" + name for name in SPECIMENS_REFUSED.split()} | set(LAYERS_REFUSED.split())
DOT = DotProduct(heads=2, dim=4).scaled()
CAUSAL = {
    "plain": DOT, "relative_bias": DOT + RelativeBias(2), "relative_key": DOT + RelativeKey(2), "alibi": DOT + ALiBi(),
    "t5": DOT + RelativeBias(4, buckets="log_causal"), "rotary": DotProduct(heads=2, dim=4, rotary=Rotary()).scaled(),
    "rotary_half": DotProduct(heads=2, dim=4, rotary=Rotary(layout="half", channels=2)).scaled(),
    "shared_keys": DotProduct(heads=2, dim=4, shared_by=2).scaled(), "additive": Additive(5, heads=2),
    "projected": Additive(heads=2, on="projected"),
}
MASKS = {"causal": Causal(), "sliding": Window(2) & Causal()}


@pytest.mark.parametrize("name", drawn(sorted(USES), 3))
def test_prepared_inputs_give_what_the_inputs_give(name):
    use = USES[name]()
    if takes_prepared(use):
        check_prepared(use)


@pytest.mark.parametrize("name", drawn(sorted(USES.keys() - REFUSED), 2))
def test_outputs_that_are_told_their_places_are_those_of_the_whole_call(name):
    use = USES[name]()
    if takes_prepared(use) and takes_positions(use):
        check_positions(use)


@pytest.mark.parametrize("name", drawn(sorted(REFUSED), 8))
def test_what_has_no_places_refuses_to_be_told_them(name):
    with pytest.raises((ConfigError, ShapeError, StructureError)):
        check_positions(USES[name]())


SLIDING = Window(2) & Causal()


@pytest.mark.parametrize(("name", "mask", "mixed"), [
    (name, mask, bool((i + j) % 2)) for i, name in enumerate(CAUSAL) for j, mask in enumerate(MASKS)])
def test_steps_are_the_whole_call(name, mask, mixed):
    attention = CAUSAL[name].masked(keep=MASKS[mask]).softmax()
    layer = Conv(attention | Identity() if mixed else attention, 8, 6).double()
    x = torch.randn(2, 9, 8, dtype=torch.float64)
    whole = layer(x)
    with torch.no_grad():
        cache = layer.prepare(x[:, :0])
        steps = [layer.step(cache, x[:, start:stop]) for start, stop in ((0, 2), (2, 3), (3, 7), (7, 8), (8, 9))]
    torch.testing.assert_close(torch.cat(steps, 1), whole)
    assert cache.length == 9
    assert cache.dropped == (6 if mask == "sliding" and not mixed else 0)


@pytest.mark.parametrize("mean", [
    Uniform(window=2).normalize("sum"), Uniform().masked(keep=SLIDING).normalize("sum"),
    Uniform(window=2).masked(keep=Causal()).normalize("sum")])
def test_means_of_the_last_entries_keep_only_these(mean):
    layer, x = Conv(mean, 8, 6).double(), torch.randn(2, 9, 8, dtype=torch.float64)
    with torch.no_grad():
        cache = layer.prepare(x[:, :0])
        for t in range(9):
            torch.testing.assert_close(layer.step(cache, x[:, t:t + 1]), layer(x[:, :t + 1])[:, t:])
    assert cache.dropped == 6


class _AroundSharedKeys(Mechanism):
    """A user's mechanism that calls another in its `forward`."""

    def __init__(self):
        super().__init__()
        self.inner = DotProduct(heads=4, dim=3, shared_by=2)

    size = property(lambda self: self.inner.size)
    has_scores, batching = True, "pairs"

    def bind(self, channels):
        self.inner.bind(channels)

    def forward(self, inputs):
        return self.inner(inputs)


@pytest.mark.parametrize("hooked", [False, True])
@pytest.mark.parametrize(("scores", "weight"), [
    (_AroundSharedKeys(), None), (DotProduct(heads=4, dim=3, shared_by=2), None),
    (DotProduct(heads=4, dim=3), LowRank(3, shared_by=2))], ids=["user", "keys", "values"])
def test_steps_read_shared_heads_that_hooks_or_users_mechanisms_call_for(scores, weight, hooked):
    layer = Conv(scores.scaled(0.5).masked(keep=Causal()).softmax(), 8, 6, weight=weight)
    x = torch.randn(2, 9, 8)
    with torch.no_grad():
        cache, whole = layer.prepare(x[:, :4]), layer(x)
        for name, module in layer.named_modules():
            if name and hooked:
                module.register_forward_hook(lambda module, args, result: None)
        steps = [layer.step(cache, x[:, start:stop]) for start, stop in ((4, 5), (5, 6), (6, 8), (8, 9))]
    torch.testing.assert_close(torch.cat(steps, 1), whole[:, 4:])


def test_beams_are_reordered_and_drafts_taken_back():
    layer, x = MultiheadAttention(8, 2).double(), torch.randn(3, 7, 8, dtype=torch.float64)
    with torch.no_grad():
        cache = layer.prepare(x[:, :5], Causal())
        draft = cache.copy()
        layer.step(draft, x[:, 5:].flip(0))
        best = torch.tensor([2, 2, 0])
        draft.truncate(5).reorder(best)
        actual = layer.step(draft, x[:, 5:])
        torch.testing.assert_close(layer.step(cache, x[:, 5:]), layer(x, keep=Causal())[:, 5:])
    mixed = torch.cat([x[best, :5], x[:, 5:]], 1)
    torch.testing.assert_close(actual, layer(mixed, keep=Causal())[:, 5:])


@pytest.mark.parametrize(("outputs", "channels"), [(1, 5), (3, 16), (8, 70), (1, 70)])
def test_few_outputs_of_additive_attention_have_the_numbers_of_many(outputs, channels):
    layer = Conv(Additive(channels, heads=2).softmax(), channels, 4, other_channels=6)
    x, z = (torch.randn(3, n, c, requires_grad=True) for n, c in ((70, channels), (outputs, 6)))
    wide = [t.detach().double().requires_grad_() for t in (x, z)]
    twin = layer.double()
    expected = torch.autograd.grad(twin(wide[0], z=wide[1]).cos().sum(), [*wide, *twin.parameters()])
    layer = layer.float()
    for actual, reference in zip(torch.autograd.grad(layer(x, z=z).cos().sum(), [x, z, *layer.parameters()]), expected,
                             strict=True):
        torch.testing.assert_close(actual.double(), reference, rtol=1e-4, atol=1e-5)


def test_a_window_around_predicted_positions_and_one_without_them_keep_their_places():
    x = torch.randn(2, 9, 8)
    for weights in (GaussianWindow(1.5), GaussianWindow(1.5, PredictedPosition())):
        layer = Conv(DOT.softmax() * weights, 8, 6)
        torch.testing.assert_close(layer(x, z=x[:, 4:], positions=4), layer(x)[:, 4:])


@pytest.mark.parametrize("positions", [1, torch.tensor([2, 0])])
def test_a_plan_at_positions_refuses_a_window_without_its_grid(positions):
    layer, x = Conv(DotProduct(1, 2).masked(keep=Window((3, 3))).softmax(), 4, 4), torch.randn(3, 4)
    with pytest.raises(StructureError, match="for each axis of a sequence"):
        layer.plan(x, z=x[:2], positions=positions)


@pytest.mark.parametrize("positions", [
    -1, 1.5, torch.tensor([0.5]), True, torch.tensor([1, 2, 3]), "last", torch.tensor([-1, 0])])
def test_positions_that_are_none_are_told(positions):
    layer, x = MultiheadAttention(8, 2), torch.randn(2, 5, 8)
    with pytest.raises(StructureError, match="positions"):
        layer(x[:, :2], x, keep=Causal(), positions=positions)


def test_what_was_prepared_otherwise_is_refused():
    layer, x = MultiheadAttention(8, 2), torch.randn(2, 5, 8)
    cache = layer.prepare(x)
    check_refused(
        (ConfigError, "prepared by this layer", lambda: MultiheadAttention(8, 2)(x, cache)),
        (ShapeError, r"m, P=8", lambda: cache.append(x[:1])),
        (ShapeError, "P=8", lambda: cache.append(x[..., :3])),
        (ConfigError, "length", lambda: cache.truncate(6)),
        (ShapeError, r"\(B", lambda: layer.prepare(x[0]).reorder(torch.tensor([0]))))
    with torch.no_grad():
        layer.bias.add_(1)
    with pytest.raises(ConfigError, match="Prepare x again"):
        layer(x, cache)


#: Found by an adversary: windows that do not bound the inputs of an output, and masks that remove pairs.
FOUND = {
    "dropped_pairs": DOT.masked(drop=Causal()).softmax(),
    "dropped_behind_kept": DOT.masked(keep=Causal()).masked(drop=SLIDING).softmax(),
    "sum_of_weights": DOT.masked(keep=SLIDING).softmax() + DOT.masked(keep=Causal()).softmax(),
    "difference": DOT.masked(keep=SLIDING).softmax() - DOT.masked(keep=Causal()).softmax(),
    "sum_behind_a_window": (DOT.masked(keep=SLIDING).softmax() + DOT.masked(keep=Causal()).softmax()).masked(
        keep=Window(4) & Causal()),
    "outer": DOT.masked(keep=SLIDING).softmax().outer(DOT.masked(keep=Causal()).softmax()),
    "window_behind_softmax": DOT.masked(keep=Causal()).softmax().masked(keep=SLIDING),
    "window_behind_sum": DOT.masked(keep=Causal()).map(torch.exp).normalize("sum").masked(keep=SLIDING),
    "zeros_that_are_mapped": DOT.masked(keep=SLIDING).softmax().map(torch.exp).masked(keep=Causal()),
    "bump_behind_a_window": DOT.masked(keep=SLIDING).softmax() * GaussianWindow(2.0),
    "bump_in_a_window": (DOT + GaussianWindow(1.5)).masked(keep=SLIDING).softmax(),
    "bump_alone": GaussianWindow(1.5).masked(keep=SLIDING),
}
#: Weights of low rank: of queries that heads share, and with values by position.
OF_LOW_RANK = {
    "shared_queries": (General(heads=2).masked(keep=Causal()).softmax(), {}),
    "shared_queries_of_all_pairs": (DotProduct().softmax(), {}),
    "relative_values": (DOT.masked(keep=Causal()).softmax(), {"relative_value": RelativeValue(2)}),
}


@pytest.mark.parametrize("start", [0, 4])
@pytest.mark.parametrize("name", [*FOUND, *OF_LOW_RANK])
def test_steps_of_what_an_adversary_found(name, start):
    if name in FOUND:
        layer = Conv(FOUND[name], 8, 6).double()
    else:
        expression, options = OF_LOW_RANK[name]
        layer = Conv(expression, 8, 6, weight=LowRank(3), **options).double()
    x = torch.randn(2, 9, 8, dtype=torch.float64)
    with torch.no_grad():
        cache = layer.prepare(x[:, :start])
        for t in range(start, 9):
            step, whole = layer.step(cache, x[:, t:t + 1]), layer(x[:, :t + 1])[:, t:]
            torch.testing.assert_close(step, whole)


def test_inputs_that_are_gone_are_not_made_up():
    layer, x = Conv(DOT.masked(keep=SLIDING).softmax(), 8, 6), torch.randn(2, 9, 8)
    with torch.no_grad():
        cache = layer.prepare(x[:, :0])
        for t in range(9):
            layer.step(cache, x[:, t:t + 1])
        with pytest.raises(ConfigError, match="positions must be given"):
            layer(cache, z=x[:, 8:])
        for positions in (3, 6, torch.tensor([3]), torch.tensor([[7], [8]])):
            with pytest.raises(ConfigError, match="inputs that are gone"):
                layer(cache, z=x[:, 8:], positions=positions)
        with pytest.raises(ConfigError, match=r"prepared\.copy"):
            cache.truncate(7)
        attention = MultiheadAttention(8, 2)
        cache = attention.prepare(x[:, :0], SLIDING)
        for t in range(8):
            attention.step(cache, x[:, t:t + 1])
        with pytest.raises(ConfigError, match="inputs that are gone"):
            attention.step(cache, x[:, 8:], structure=Window(5) & Causal())
        torch.testing.assert_close(attention.step(cache, x[:, 8:]), attention(x, structure=SLIDING)[:, 8:])


def test_what_is_appended_without_gradients_takes_none_from_what_was_there():
    layer = Conv(DOT.masked(keep=Causal()).softmax(), 8, 6)
    x, more = torch.randn(2, 5, 8, requires_grad=True), torch.randn(2, 4, 8)
    cache = layer.prepare(x)
    with torch.no_grad():
        cache.append(more)
    actual, = torch.autograd.grad(layer(cache, z=more, positions=5).square().sum(), x, retain_graph=True)
    reference, = torch.autograd.grad(layer(torch.cat([x, more], 1), z=more, positions=5).square().sum(), x)
    torch.testing.assert_close(actual, reference)
    cache.truncate(0)
    with torch.no_grad():
        cache.append(more)
    assert not torch.autograd.grad(layer(cache, z=more).square().sum(), x, allow_unused=True)[0].any()


def test_copies_go_on_by_themselves_and_a_failed_step_appends_nothing():
    layer, x = MultiheadAttention(8, 2), torch.randn(2, 9, 8)
    with torch.no_grad():
        cache = layer.prepare(x[:, :4], Causal())
        twins = [copy.copy(cache), copy.deepcopy(cache)]
        layer.step(cache, x[:, 4:5])
        for twin in twins:
            torch.testing.assert_close(layer.step(twin, x[:, 4:6]), layer(x, keep=Causal())[:, 4:6])
        with pytest.raises(ShapeError):
            layer.step(cache, x[:, 5:6], query=torch.randn(2, 1, 5))
        assert cache.length == 5
        torch.testing.assert_close(layer.step(cache, x[:, 5:6]), layer(x, keep=Causal())[:, 5:6])


@pytest.mark.parametrize("index", [torch.tensor([2]), torch.tensor([-1]), [0, 1], torch.tensor([0.0]),
                                   torch.tensor([[0]]), torch.tensor(0), torch.tensor([True, False])])
def test_an_index_of_no_samples_is_told(index):
    with pytest.raises(ConfigError, match="reorder"):
        MultiheadAttention(8, 2).prepare(torch.randn(2, 3, 8)).reorder(index)


def test_autocast_is_as_it_was_prepared():
    layer, x = MultiheadAttention(8, 2), torch.randn(2, 5, 8)
    with torch.autocast("cpu", torch.bfloat16):
        cache = layer.prepare(x)
        torch.testing.assert_close(layer(x, cache), layer(x))
    with pytest.raises(ConfigError, match="autocast"):
        layer.step(cache, x[:, :1])


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("weight", [None, LowRank(4)])
def test_steps_under_autocast_are_the_whole_call(weight, grad):
    layer = Conv(DotProduct(4, 4).scaled().masked(keep=Causal()).softmax(), 8, 8, weight=weight)
    x = torch.randn(2, 9, 8)
    with torch.set_grad_enabled(grad), torch.autocast("cpu", torch.bfloat16):
        cache = layer.prepare(x[:, :5])
        steps = torch.cat([layer.step(cache, x[:, at:at + 1]) for at in range(5, 9)], 1)
        assert steps.dtype == torch.bfloat16
        torch.testing.assert_close(steps, layer(x)[:, 5:], atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize("name", sorted(CAUSAL.keys() - {"projected"}))  # whose values project queries too
@torch.no_grad()
def test_a_hook_of_a_projection_runs_once_an_entry(name):
    layer, x = Conv(CAUSAL[name].masked(keep=Causal()).softmax(), 8, 8, weight=LowRank(3)), torch.randn(2, 8, 8)
    for part, module in layer.named_modules():
        if part.endswith(("key", "value")) and isinstance(module, torch.nn.Linear):
            lengths = []
            cache = layer.prepare(x[:, :3])
            with module.register_forward_hook(lambda module, args, y, to=lengths: to.append(args[0].shape[-2])):
                steps = [layer.step(cache, x[:, start:stop]) for start, stop in ((3, 4), (4, 5), (5, 7))]
            assert lengths == [1, 1, 2], part
            torch.testing.assert_close(torch.cat(steps, 1), layer(x[:, :7])[:, 3:])


@pytest.mark.parametrize("part", ["attention.key", "attention.query", "weight.value", "weight"])
@pytest.mark.parametrize("call", ["step", "append"])
@torch.no_grad()
def test_a_step_in_which_a_part_fails_appends_nothing(part, call):
    layer = Conv(DotProduct(4, 4).scaled().masked(keep=Causal()).softmax(), 8, 6, weight=LowRank(3),
                 dtype=torch.float64)
    x = torch.randn(2, 6, 8, dtype=torch.float64)
    cache = layer.prepare(x[:, :3])

    def fail(*_):
        raise RuntimeError("out of memory, say")

    with layer.get_submodule(part).register_forward_pre_hook(fail):
        if call == "step" or part in ("attention.key", "weight.value"):
            with pytest.raises(RuntimeError, match="out of memory"):
                layer.step(cache, x[:, 3:4]) if call == "step" else cache.append(x[:, 3:4])
            assert cache.length == 3
    for at in range(cache.length, 6):
        step = layer.step(cache, x[:, at:at + 1])
        torch.testing.assert_close(step, layer(x[:, :at + 1])[:, at:])


PER_SAMPLE = {"padding": lambda: Padding(torch.arange(5)[None] < torch.tensor([[5], [2]])),
              "both": lambda: Causal() & Padding(torch.arange(5)[None] < torch.tensor([[5], [2]])),
              "table": lambda: DenseMask(torch.rand(2, 5, 1) < 0.6), "shared": Causal}


@pytest.mark.parametrize(("name", "index"), list(zip(PER_SAMPLE, ([1, 1], [0, 0, 1, 1], [1, 0], [0, 0]), strict=True)))
def test_what_a_structure_has_for_each_sample_is_reordered_with_it(name, index):
    layer, structure, index = MultiheadAttention(8, 2).eval(), PER_SAMPLE[name](), torch.tensor(index)
    x, z = torch.randn(2, 5, 8), torch.randn(len(index), 1, 8)
    keep = getattr(structure, "keep", None)
    own = type(structure)(keep[index]) if keep is not None else structure
    if name == "both":
        own = Causal() & Padding(structure.second.keep[index])
    actual = layer(z, layer.prepare(x, structure).reorder(index), positions=4)
    torch.testing.assert_close(actual, layer(z, x[index], structure=own, positions=4))


def test_weights_of_each_sample_are_reordered_with_it():
    graph = Graph(torch.tensor([[0, 1, 2, 2], [1, 2, 0, 1]]), edge_weight=torch.rand(2, 4))
    index = torch.tensor([1, 1, 0])
    layer, x = Conv(DotProduct(1, 4).softmax() * Adjacency(), 3, 2), torch.randn(2, 3, 3)
    own = dataclasses.replace(graph, edge_weight=graph.edge_weight[index])
    torch.testing.assert_close(layer(layer.prepare(x, graph).reorder(index)), layer(x[index], structure=own))


def test_masks_of_each_sample_in_the_layer_are_not_reordered():
    layer = Conv(DotProduct(1, 4).masked(keep=torch.rand(2, 5) < 0.7).softmax(), 3, 2)
    with pytest.raises(ConfigError, match="in the call, not in the layer"):
        layer.prepare(torch.randn(2, 5, 3)).reorder(torch.tensor([1, 0]))


@torch.no_grad()
def test_a_draft_behind_a_window_is_taken_back_as_far_as_it_can_be():
    layer, x, window = MultiheadAttention(8, 2).eval(), torch.randn(1, 9, 8), Causal() & Window(3)
    cache = layer.prepare(x[:, :4], window)
    for t in range(4, 8):
        layer.step(cache, x[:, t:t + 1])
    with pytest.raises(ConfigError, match=r"prepared\.copy"):
        cache.truncate(6)
    actual = layer.step(cache.truncate(7), x[:, 8:])
    torch.testing.assert_close(actual, layer(torch.cat([x[:, :7], x[:, 8:]], 1), structure=window)[:, 7:])


def test_what_is_made_of_prepared_inputs_is_named():
    class Own(DotProduct):
        def forward(self, inputs):
            return inputs.z.unsqueeze(-3), inputs.of_x(lambda x, start: x.unsqueeze(-3))

    layer = Conv(Own(1, 4).softmax(), 4, 4)
    with pytest.raises(ConfigError, match="a method of the mechanism that its `sources` names"):
        layer(layer.prepare(torch.randn(5, 4)))


class Near(Mechanism):
    """Products of one number of each entry: `places` of the wrong shape, or with a count from the start of a call."""

    has_scores, batching, sources = True, "pairs", ("places",)

    def __init__(self, fault):
        super().__init__()
        self.fault = fault

    def bind(self, channels):
        self.place = torch.nn.Linear(channels.inputs, 1)

    def places(self, x, start):
        numbers = self.place(x) + (0.5 * start if self.fault == "start" else 0)
        if self.fault == "later" and start:
            numbers = torch.cat([numbers, numbers[:1]])
        return numbers if self.fault == "shape" else numbers.unsqueeze(-3)

    def forward(self, inputs):
        return Bilinear(self.place(inputs.z).unsqueeze(-3), inputs.of_x(self.places))


@pytest.mark.parametrize("mask", [Causal(), Window(1) & Causal()])
def test_sources_of_another_shape_are_refused(mask):
    layer = Conv(Near("shape").masked(keep=mask).softmax(), 4, 3)
    with pytest.raises(ShapeError, match=r"Near: places must return \(..., K, M\) or \(..., K, M, D\) for M=2"):
        layer.prepare(torch.randn(2, 4))


@pytest.mark.parametrize("call", ["step", "append"])
@pytest.mark.parametrize("grad", [True, False])
def test_rows_of_another_shape_are_not_appended(grad, call):
    layer, x = Conv(Near("later").masked(keep=Causal()).softmax(), 4, 3), torch.randn(5, 4)
    with torch.set_grad_enabled(grad):
        cache = layer.prepare(x[:3])
        before = cache.x.clone()
        with pytest.raises(ShapeError, match=r"Near: places must return .* for M=2 inputs"):
            getattr(layer if call == "step" else cache, call)(*(cache,) * (call == "step"), x[3:])
        assert cache.length == 3
        torch.testing.assert_close(cache.x, before)
        torch.testing.assert_close(layer(cache, z=x[:2]), layer(x[:3], z=x[:2]))


def test_the_suite_appends_entries_one_by_one():
    for fault in ("", "start"):
        def make(fault=fault):
            return Setup(Near(fault).masked(keep=Causal()).softmax().bound(4).double(), torch.randn(6, 4).double())

        law = next(check for name, check in suite(Specimen("near", make)) if name.endswith("cache"))
        if fault:
            with pytest.raises(AssertionError, match="appended one by one"):
                law()
        else:
            law()


@pytest.mark.parametrize("mechanism", [Shifts([-1, 1]), Adjacency(None), DotProduct(2, 3).softmax().outer(Shifts([1]))])
@pytest.mark.parametrize("positions", [5, torch.tensor([4, 6]), torch.tensor([[0, 9], [1, 2]])])
def test_positions_beyond_the_outputs_raise_an_error(mechanism, positions):
    layer, x, graph = Conv(mechanism, 4, 4), torch.randn(2, 6, 4), Grid(6).graph()
    structure = graph if isinstance(mechanism, Adjacency) else None
    with pytest.raises(StructureError, match="positions must be below the number of outputs, 6; got"):
        layer(x, structure, z=x[:, :2], positions=positions)
    right = layer(x, structure, z=x[:, [5, 0]], positions=torch.tensor([5, 0]))
    torch.testing.assert_close(right, layer(x, structure)[:, [5, 0]])
