"""Sequences padded to one length, with a mask of what exists, give what each gives alone; and so for a whole batch."""

import itertools
import re
from functools import partial

import pytest
import torch
from torch import nn

from structconv import Additive, ALiBi, BiAffine, ConfigError, Conv, MultiheadAttention, ShapeError, StructureError
from structconv.mechanisms import (
    STRUCTURE_IF_GIVEN,
    Concatenation,
    Context,
    Cuboid,
    DotProduct,
    GaussianWindow,
    General,
    Given,
    Incidence,
    Learned,
    Location,
    Pair,
    Pool,
    PredictedPosition,
    RelativeBias,
    RelativeKey,
    Rotary,
    Uniform,
)
from structconv.structures import Blocks, Causal, DenseMask, Graph, Padding, Samples, Window, batch

P, Q = 4, 3
LENGTHS = (3, 6, 5)
#: Names of tensors of masks.
MASK = re.compile(r"mask(_\d+)?\.mask\d+$")
DOT = DotProduct(heads=2, dim=4)
SCORES = {
    "dot": DOT.scaled(), "plain": DotProduct(), "rotary": DotProduct(heads=2, dim=4, rotary=Rotary()),
    "general": General(), "biaffine": BiAffine(2), "additive": Additive(3), "concatenation": Concatenation(3),
    "pair": Pair(heads=2), "location": Location(9), "uniform": Uniform(), "alibi": DOT + ALiBi(),
    "bias": DOT + RelativeBias(2), "logarithmic": DOT + RelativeBias(4, buckets="log"), "key": DOT + RelativeKey(2),
    "causal": DOT.masked(keep=Causal()), "window": DOT.masked(keep=Window(1)), "blocks": DOT.masked(keep=Blocks(2)),
    "not_causal": DOT.masked(drop=Causal()), "predicted": General().masked(keep=Window(1, center=PredictedPosition()))}
ENDS = {"softmax": lambda scores, keep: scores.masked(keep=keep).softmax(),
        "count": lambda scores, keep: scores.masked(keep=keep).normalize("count"),
        "gaussian": lambda scores, keep: scores.masked(keep=keep).softmax() * GaussianWindow(1.0, PredictedPosition())}
PLACES = ["the call", "the expression", "two parts of it"]


def sequences():
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(n, P, dtype=torch.float64, generator=generator) for n in LENGTHS]


def padded(own, number):
    """Sequences as long as the longest, and which of their entries exist."""
    keep = torch.arange(max(LENGTHS)) < torch.tensor(LENGTHS).unsqueeze(-1)
    return nn.utils.rnn.pad_sequence(own, batch_first=True, padding_value=number), keep


def single_results(layer, masked, own, masks):
    """What each sequence gives alone, by the parameters of a layer."""
    state = {key: value for key, value in layer.state_dict().items() if not MASK.search(key)}
    for t, keep in zip(own, masks, strict=True):
        single = Conv(masked(keep), P, P).double()
        single.load_state_dict(state, strict=False)
        yield single(t)


@pytest.mark.parametrize(("name", "end"), list(zip(SCORES, itertools.cycle(ENDS))))
def test_a_padded_sequence_gives_what_it_gives_alone(name, end):
    masked, own = partial(ENDS[end], SCORES[name]), sequences()
    x, keep = padded(own, 7.0)
    layer = Conv(masked(keep), P, P).double()
    masks = [torch.ones(n, dtype=torch.bool) for n in LENGTHS]
    for actual, expected in zip(layer(x), single_results(layer, masked, own, masks), strict=True):
        torch.testing.assert_close(actual[:len(expected)], expected)


@pytest.mark.parametrize(("name", "end"), list(zip(SCORES, itertools.cycle(ENDS))))
def test_entries_that_are_masked_out_of_a_batch_of_samples_do_not_count(name, end):
    masked, own = partial(ENDS[end], SCORES[name]), sequences()
    masks = [torch.arange(n) < n - 1 for n in LENGTHS]
    layer = Conv(masked(torch.cat(masks)), P, P).double()
    y = layer(torch.cat(own), structure=Samples(LENGTHS))
    torch.testing.assert_close(y, torch.cat([*single_results(layer, masked, own, masks)]))


def test_booleans_of_a_batch_as_long_as_the_sequence_are_a_mask_of_inputs_in_a_call_and_refused_in_an_expression():
    x = torch.randn(5, 5, 8)
    keep = torch.rand(5, 5) > 0.3
    keep[:, 0] = True
    layer = MultiheadAttention(8, 2)
    torch.testing.assert_close(layer(x, keep=keep), layer(x, keep=Padding(keep)))
    with pytest.raises(StructureError, match=r"Say which it is: DenseMask\(mask\) .* Padding\(mask\)"):
        DotProduct().masked(keep=keep)


def test_a_table_of_pairs_says_so():
    x, table = torch.randn(5, 8), torch.rand(5, 5) > 0.3
    layer = MultiheadAttention(8, 2)
    with pytest.raises(StructureError, match=r"DenseMask\(table\)"):
        layer(x, keep=table)
    torch.testing.assert_close(layer(x, keep=DenseMask(table)), layer(x, keep=~DenseMask(~table)))
    with pytest.raises(StructureError, match=r"DenseMask\(mask\)"):
        DotProduct().bound(8).basis(x).masked(keep=table)


def test_nested_tensors_give_nested_tensors():
    own = [t.requires_grad_() for t in sequences()]
    x = torch.nested.as_nested_tensor(own, layout=torch.jagged)
    for layer in (MultiheadAttention(P, 2).double(), Conv(DOT.masked(keep=Causal()).softmax(), P, P).double()):
        y = layer(x)
        for actual, t in zip(y.unbind(), own, strict=True):
            torch.testing.assert_close(actual, layer(t))
        assert (x + y).shape == x.shape
        y.values().sum().backward()
    with pytest.raises(ConfigError, match="both be nested"):
        MultiheadAttention(P, 2).double()(own[0], x)


@pytest.mark.parametrize("expression", [
    Incidence("sample").normalize("sum"), Pool(3, 2, 1) @ Incidence("sample"), Learned(9, 3) @ Incidence("sample")])
def test_a_readout_of_nested_tensors_is_one_row_for_each(expression):
    own = [t.detach() for t in sequences()]
    layer = Conv(expression, P, Q).double()
    for xs in (own, [t[:1] for t in own]):
        y = layer(torch.nested.as_nested_tensor(xs, layout=torch.jagged))
        assert not y.is_nested and y.shape == (len(xs), Q)
        torch.testing.assert_close(y, torch.cat([layer(t, structure=Samples([len(t)])) for t in xs]))


@pytest.mark.parametrize("expression", [
    Context(2).softmax(), Pool(2), Cuboid(3, stride=2), Learned(9, 3), DOT.softmax(), Cuboid(3),
    Incidence("sample").normalize("sum") @ Incidence("sample").transpose()])
def test_nested_outputs_know_the_length_of_the_longest(expression):
    """As torch's layers, which padding makes as long as that, and as wide as the samples alone."""
    own = [t.detach() for t in sequences()]
    x, layer = torch.nested.as_nested_tensor(own, layout=torch.jagged), Conv(expression, P, Q).double()
    single = [layer(t, structure=Samples([len(t)])) for t in own]
    torch.testing.assert_close(layer(x).to_padded_tensor(0.0), nn.utils.rnn.pad_sequence(single, batch_first=True))


def test_edges_of_a_batch_of_nested_nodes_are_nested():
    graphs = [Graph.complete(n) for n in LENGTHS]
    x = torch.nested.as_nested_tensor(sequences(), layout=torch.jagged)
    layer = Conv(Incidence("sender"), P, Q).double()
    y = layer(x, structure=batch(graphs))
    for actual, t, graph in zip(y.unbind(), sequences(), graphs, strict=True):
        torch.testing.assert_close(actual, layer(t, structure=graph))


def test_nested_tensors_are_prepared_as_entries_of_samples():
    layer = MultiheadAttention(P, 2).double()
    x = torch.nested.as_nested_tensor(sequences(), layout=torch.jagged)
    with pytest.raises(ShapeError, match=r"must not be nested.*structure=Samples\(key_value.offsets\(\).diff\(\)\)"):
        layer.prepare(x)
    cache = layer.prepare(x.values(), structure=Samples(x.offsets().diff()))
    torch.testing.assert_close(layer(cache), layer(x).values())


@pytest.mark.parametrize(("name", "place"), list(zip(SCORES, itertools.cycle(PLACES))))
def test_what_is_prepared_of_padded_entries_passes_no_gradient_of_them(name, place):
    """Padding that holds NaN: the gradients of the ordinary call."""
    x, keep = padded(sequences(), torch.nan)
    mask, given = (STRUCTURE_IF_GIVEN, Padding(keep)) if place == "the call" else (keep, None)
    expression = SCORES[name].masked(keep=mask).softmax()
    expression = expression | (0.5 * SCORES[name]).masked(keep=mask).softmax() if place[:3] == "two" else expression
    layer = Conv(expression, P, P).double()
    z = x.nan_to_num(1.0)
    actual = []
    for call in (lambda: layer(x, given, z=z), lambda: layer(layer.prepare(x, given), z=z)):
        layer.zero_grad()
        call().sum().backward()
        actual.append([parameter.grad for parameter in layer.parameters() if parameter.grad is not None])
    for ours, expected in zip(*actual, strict=True):
        assert ours.isfinite().all()
        torch.testing.assert_close(ours, expected)


def tables():
    """Two tables of pairs (5, 6), each of which leaves the last input to some outputs, both together to none."""
    first, second = torch.ones(2, 5, 6, dtype=torch.bool).unbind()
    first[4, :3], second[4, 3:] = False, False
    return DenseMask(first), DenseMask(second)


FIRST, SECOND = tables()
MET = {
    "and": lambda scores: scores.masked(keep=FIRST & SECOND).softmax(),
    "one after the other": lambda scores: scores.masked(keep=FIRST).masked(keep=SECOND).softmax(),
    "neither left out": lambda scores: scores.masked(drop=~FIRST | ~SECOND).softmax(),
    "product": lambda scores: (scores.masked(keep=FIRST) * (2 * scores).masked(keep=SECOND)).softmax()}


@pytest.mark.parametrize(("name", "how"), list(zip(SCORES, itertools.cycle(MET))))
def test_an_input_that_masks_together_leave_to_no_output_may_be_anything(how, name):
    layer = Conv(MET[how](SCORES[name]), P, P, other_channels=P).double()
    x, z = torch.randn(5, P, dtype=torch.float64), torch.randn(6, P, dtype=torch.float64)
    actual = []
    for hidden in (0.0, torch.nan):
        x[4] = hidden
        layer.zero_grad()
        y = layer(x, z=z)
        y.sum().backward()
        actual.append([y.detach(), *[p.grad for p in layer.parameters() if p.grad is not None]])
    torch.testing.assert_close(*actual)


def test_masks_before_and_after_a_composition_have_outputs_of_their_own():
    first, second = torch.ones(2, 5, 5, dtype=torch.bool).unbind()
    first[4, 1:], second[4, 0] = False, False  # the last input goes through the first entry to other outputs
    scores, matrix = Uniform().masked(keep=DenseMask(first)).normalize("count"), torch.randn(1, 5, 5)
    layer, x = Conv((scores @ Given(matrix)).masked(keep=DenseMask(second)), P, P), torch.randn(5, P)
    a = (first / first.sum(0)) @ matrix[0] * second
    torch.testing.assert_close(layer(x), a.mT @ x @ layer.weight().dense()[0] + layer.bias)
