"""Samples of a batch by plans of their own: numbers, gradients, memory, and where the planner takes that."""

import dataclasses

import pytest
import torch
from torch import nn

from structconv.bases import Bilinear, Dropped, GaussianBump, pairwise
from structconv.kernels import samples as kernel
from structconv.mechanisms import Additive, DotProduct, Location, RelativeKey
from structconv.nn import Conv, MultiheadAttention, RelativeValue
from structconv.planning import Call, Cost, plan_for
from structconv.planning.tables import PLANS
from structconv.structures import Causal, DenseMask, Padding, Samples, Window
from structconv.testing.layers import check_samples
from structconv.weights import LowRank
from structconv.weights.whole import ByHead
from tests.kernels.applied import LargestTensor
from tests.support.derivatives import same
from tests.support.drawn import drawn
from tests.test_batches import REFUSED, USES


@pytest.fixture
def preferred(monkeypatch):
    """The path costs nothing."""
    monkeypatch.setattr(kernel.SampleBySample, "application_cost", lambda *_: Cost())
    PLANS.clear()
    yield
    PLANS.clear()


@pytest.mark.parametrize("name", drawn(sorted(USES.keys() - REFUSED), 6))
def test_by_plans_of_their_own_samples_give_what_each_gives_alone(name, preferred):
    check_samples(USES[name]())


def layers():
    """By name, a layer of 8 channels whose samples a native kernel of windows does not take in float64."""
    return {"mha": MultiheadAttention(8, 2), "causal": Conv(product().masked(keep=Causal()).softmax(), 8, 8),
            "relative_key": Conv((DotProduct(heads=2, dim=4) + RelativeKey(3)).scaled().softmax(), 8, 8),
            "location": Conv(Location(400, heads=2).softmax(), 8, 8), "sink": Conv(product().softmax(sink=0.5), 8, 8),
            "additive": Conv(Additive(4, heads=2).softmax(), 8, 8),
            "over_outputs": Conv(product().softmax(over="outputs"), 8, 8),
            "linear": Conv(DotProduct(2, 4, feature=lambda t: nn.functional.elu(t) + 1).normalize("sum"), 8, 8)}


#: The kernels that compute one sample; the pairs of the other expressions are evaluated.
KERNELS = {"mha": ("structconv.dense_attention",), "causal": ("structconv.dense_attention",),
           "relative_key": ("structconv.blocked_attention",),
           "additive": ("structconv.additive_attention",),
           "linear": ("structconv.reassociated", "structconv.blocked_attention")}


def product():
    return DotProduct(heads=2, dim=4).scaled()


def result(layer, x, structure=None):
    y = layer(x, structure=structure)
    return y[0] if isinstance(y, tuple) else y


@pytest.mark.parametrize(("sizes", "lead"), [([150, 0, 210, 150, 180], ()), ([170] * 4, (2,))], ids=["unlike", "alike"])
@pytest.mark.parametrize("name", sorted(layers()))
def test_samples_of_some_size_have_plans_of_their_own(name, sizes, lead):
    layer = layers()[name].double()
    x = torch.randn(*lead, sum(sizes), 8, dtype=torch.float64, requires_grad=True)
    plan = layer.plan(x, structure=Samples(sizes))
    assert plan.kernel == "samples, each alone"
    assert plan.parts[0].kernel in KERNELS.get(name, ("value, apply, output",))
    single = torch.cat([result(layer, each) for each in x.split(sizes, -2)], -2)
    same(result(layer, x, Samples(sizes)), single, [x, *layer.parameters()])


@pytest.mark.parametrize("name", sorted(layers()))
def test_a_second_derivative_is_that_of_the_samples(name, preferred):
    layer, sizes = layers()[name].double(), [3, 5, 3]
    x = torch.randn(sum(sizes), 8, dtype=torch.float64, requires_grad=True)

    def second(of):
        first, = torch.autograd.grad(of().cos().sum(), x, create_graph=True)
        return torch.autograd.grad(first.square().sum(), x)[0]

    torch.testing.assert_close(second(lambda: result(layer, x, Samples(sizes))),
                               second(lambda: torch.cat([result(layer, each) for each in x.split(sizes)])))


def test_attention_of_one_sample_has_second_derivatives_with_and_without_a_mask():
    q, k, r = (torch.randn(2, 5, 4, dtype=torch.float64, requires_grad=True) for _ in range(3))
    for mask in (None, Causal(), Padding(torch.tensor([True, True, False, True, True]))):
        scores = Bilinear(q, k)
        weights = (scores if mask is None else scores.masked(keep=mask)).softmax()

        def of(r, q, k, weights=weights):
            basis = dataclasses.replace(weights, child=with_operands(weights.child, q, k))
            return applied(basis, r)[1]

        assert applied(weights, r)[0] == "structconv.dense_attention"
        assert torch.autograd.gradgradcheck(of, (r, q, k), fast_mode=True)


def with_operands(node, query, key):
    if isinstance(node, Bilinear):
        return Bilinear(query, key)
    return dataclasses.replace(node, child=with_operands(node.child, query, key))


def applied(basis, r):
    """The kernel that applies a basis to what the heads have, and what it gives."""
    call = Call(r.select(-3, 0), basis, ByHead.of(basis.size, r.shape[-1]), None, r)
    plan = plan_for(call)
    return plan.kernel, plan.run(call)


@pytest.mark.parametrize("own", [(), (3,)], ids=["shared", "batch"])
@pytest.mark.parametrize(("inputs", "outputs"), [([4, 0, 7, 4], None), ([4, 4, 4], None), ([3, 5, 3], [2, 6, 2])],
                         ids=["unlike", "alike", "other_outputs"])
@pytest.mark.parametrize("lead", [(), (3,)], ids=str)
def test_masks_positions_and_dropout_are_those_of_the_whole_batch(inputs, outputs, lead, own, preferred):
    samples = Samples(inputs, outputs)
    m, n = samples.num_inputs, samples.num_outputs
    q, k, r, turned = (torch.randn(*batch, 2, count, 5, dtype=torch.float64, requires_grad=True)
                       for batch, count in ((own, n), (own, m), (lead, m), (lead, n)))
    center = torch.rand(*own, n, dtype=torch.float64) * m
    scores = Bilinear(q, k).masked(keep=samples)
    padded = scores.masked(keep=Padding(torch.rand(*own, m) > 0.2)).softmax()
    dropped = Dropped(padded, 0.4, torch.tensor(7), stream=3)
    table = DenseMask(torch.rand(m, n) > 0.3)
    cases = [(padded, r), (dropped, r), (dropped.transpose(), turned), (padded * GaussianBump(center, 2.0, m), r),
             (Bilinear(q, k).masked(keep=samples & (table | ~Padding(torch.rand(m) > 0.5))).softmax(), r),
             (Bilinear(q, k).masked(keep=samples & Window(2, center=center)).softmax(sink=0.3), r),
             (Dropped(scores.softmax(over="outputs"), 0.5, torch.tensor(3)), r)]
    for basis, values in cases:
        name, y = applied(basis, values)
        assert name == "samples, each alone"
        same(y, basis.dense().mT @ values, [values, q, k])


@pytest.mark.parametrize("name", ["sink", "location", "over_outputs", "relative_key"])
def test_pairs_beyond_a_block_are_evaluated_again_and_not_kept(name, monkeypatch):
    """The backward makes no table of all pairs, and what it keeps does not grow with their number."""
    for module in (pairwise, kernel):
        monkeypatch.setattr(module, "BLOCK_ELEMENTS", 1 << 12)
    torch.manual_seed(0)
    layer, sizes, kept = layers()[name].double(), [140, 150, 160, 170, 145, 155], []
    x = torch.randn(sum(sizes), 8, dtype=torch.float64, requires_grad=True)
    result(layer, x, Samples(sizes))
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.numel()) or t, lambda t: t):
        y = result(layer, x, Samples(sizes))
    with LargestTensor() as largest:
        y.sum().backward()
    assert layer.plan(x, structure=Samples(sizes)).kernel == "samples, each alone"
    pairs = sum(size**2 for size in sizes)
    rows = sum(sizes) * 2 * 400 if name == "location" else sum(sizes) * 2 * 8
    assert max(kept) <= rows
    assert largest.elements <= max(rows, 4 * 2 * max(sizes) ** 2) < 2 * sum(sizes) ** 2
    assert name == "location" or sum(kept) < 2 * pairs


def test_linear_attention_visits_no_pairs_of_any_sample():
    layer, sizes = layers()["linear"].double(), [900, 1000, 1100]
    x = torch.randn(sum(sizes), 8, dtype=torch.float64, requires_grad=True)
    assert layer.plan(x, structure=Samples(sizes)).parts[0].kernel == "structconv.reassociated"
    with LargestTensor() as largest:
        result(layer, x, Samples(sizes)).sum().backward()
    assert largest.elements <= 2 * sum(sizes) * 8


def test_relative_values_are_those_of_each_sample():
    layer = Conv((DotProduct(heads=2, dim=4) + RelativeKey(3)).scaled().softmax(), 8, 8, weight=LowRank(4),
                 relative_value=RelativeValue(3)).double()
    sizes = [150, 210, 180]
    x = torch.randn(sum(sizes), 8, dtype=torch.float64, requires_grad=True)
    assert layer.plan(x, structure=Samples(sizes)).kernel == "samples, each alone"
    single = torch.cat([result(layer, each) for each in x.split(sizes)])
    same(result(layer, x, Samples(sizes)), single, [x, *layer.parameters()])


def test_many_small_samples_have_no_plans_of_their_own_and_equal_ones_have_one():
    many, equal = [10 + i % 21 for i in range(64)], [20] * 64
    for name in ("sink", "relative_key", "over_outputs"):
        layer = layers()[name].double()
        chosen = [layer.plan(torch.randn(sum(sizes), 8, dtype=torch.float64), structure=Samples(sizes)).kernel
                  for sizes in (many, equal)]
        assert chosen == ["analysis, contract", "samples, each alone"]
    native = MultiheadAttention(8, 2)
    assert native.plan(torch.randn(sum(many), 8), structure=Samples(many)).kernel == "structconv.window_attention"


def test_samples_of_equal_sizes_are_computed_together(preferred, monkeypatch):
    sizes, actual = [4, 6, 4, 4, 6], []
    restrict = kernel.Restriction
    monkeypatch.setattr(kernel, "Restriction", lambda *args: actual.append(args[1]) or restrict(*args))
    layer = layers()["sink"].double()
    result(layer, torch.randn(sum(sizes), 8, dtype=torch.float64), Samples(sizes))
    assert set(actual) == {(0, 2, 3), (1, 4)}


def test_masks_after_a_softmax_or_for_other_samples_are_applied_as_they_are(preferred):
    """The first leaves pairs out after a softmax that they are part of, so that no sample has a plan."""
    q, k, r = (torch.randn(1, 7, 2, dtype=torch.float64) for _ in range(3))
    later = Bilinear(q, k).softmax().masked(keep=Samples([3, 4]))
    assert applied(later, r)[0] != "samples, each alone"
    for basis in (later, Bilinear(q, k).masked(keep=Samples([3, 4])).masked(keep=Samples([5, 2])).softmax()):
        torch.testing.assert_close(applied(basis, r)[1], basis.dense().mT @ r)


def test_samples_without_any_pair_give_zeros(preferred):
    layer = layers()["sink"].double()
    x = torch.randn(3, 8, dtype=torch.float64, requires_grad=True)
    z = torch.randn(2, 8, dtype=torch.float64)
    y = layer(x, Samples([3, 0], [0, 2]), z=z)
    torch.testing.assert_close(y, layer.bias.expand(2, 8))
    y.sum().backward()
    assert x.grad is not None
