"""The text of a mechanism or a weight is the Python that makes it, with each option that differs from its default."""

import contextlib
import functools
import inspect

import pytest
import torch

from structconv import bases, mechanisms, structures, weights
from structconv.testing import SPECIMENS, Setup
from tests.support.layers import LAYERS

NAMES = {"torch": torch, "functools": functools, **{
    name: getattr(home, name) for home in (bases, structures, weights, mechanisms) for name in home.__all__}}
#: Specimens whose text is not Python that makes them, and why.
EXEMPT = {
    **dict.fromkeys(("one term learned", "causal sink", "table with infinities", "padded", "padded batch",
                     "padded window", "padded pairs", "masked columns", "everything masked", "masked then capped",
                     "masked sum", "sparsemax of nothing", "given table"), "it holds a tensor"),
    "edge bias by a module": "it holds a module", "local predictive": "two parts share one module"}
#: Mechanisms that others derive from, or that operators make.
NOT_WRITTEN = {"Mechanism", "Score", "Term", "GridMechanism", "Mixture"}
MADE = [name for name, specimen in SPECIMENS.items() if isinstance(specimen.subject(), Setup)]


def made_again(text):
    return eval(text, dict(NAMES))


@pytest.mark.parametrize("name", MADE)
def test_the_text_of_a_specimen_makes_it_again(name):
    setup = SPECIMENS[name].subject()
    mechanism, text = setup.mechanism, repr(setup.mechanism)
    if name in EXEMPT:
        with contextlib.suppress(SyntaxError, NameError, TypeError, ValueError):
            again = made_again(text)
            assert repr(again) != text or "share" in EXEMPT[name]
        return
    again = made_again(text)
    assert repr(again) == text
    channels = setup.x.shape[-1], 3, (setup.x if setup.z is None else setup.z).shape[-1]
    bound = again.bound(*channels)
    assert repr(bound) == text
    assert [(key, t.shape) for key, t in bound.state_dict().items()] == [
        (key, t.shape) for key, t in mechanism.state_dict().items()]


@pytest.mark.parametrize("text", [
    "DotProduct()", "DotProduct(heads=2, dim=8)", "DotProduct(dim=8)", "DotProduct(heads=1)", "DotProduct(heads=4)",
    "DotProduct(heads=4, dim=8, shared_by=2, bias=True)", "DotProduct(heads=2, on='projected')",
    "DotProduct(on='projected')", "DotProduct(heads=2, dim=8, feature=torch.nn.functional.elu)",
    "DotProduct(heads=2, dim=8, rotary=Rotary())",
    "DotProduct(heads=2, dim=8, rotary=Rotary(base=500000.0, layout='half', channels=4))",
    "DotProduct(dim=4, rotary=Rotary(scaling={'rope_type': 'linear', 'factor': 2.0}))", "General(heads=2)",
    "BiAffine(heads=2, bilinear=False, target=False, constant=True, on='projected')", "BiAffine(rank=3)",
    "Additive(dim=3, heads=2, activation=torch.relu)", "Additive(heads=2, on='projected')",
    "Additive(dim=3, activation=functools.partial(torch.nn.functional.leaky_relu, negative_slope=0.2))",
    "Concatenation(3, heads=2)",
    "Channelwise(4)", "Gaussian()", "EmbeddedGaussian(3, heads=2)", "Pair(heads=2, hidden=5)", "Uniform(window=2)",
    "Uniform(window=(3, 3))", "Context(3, heads=2)", "Context(3, score=Additive(dim=3))", "ALiBi(heads=2)",
    "RelativeBias(2, heads=3, buckets='log')", "RelativeBias((1, 2), grid=Grid((2, 3)))", "RelativeBias((2,))",
    "RelativeKey(2, heads=3, dim=4, sinusoidal=True)", "Location(9, heads=2)", "EdgeBias()",
    "EdgeBias(attributes=2, heads=3, bias=True)", "GaussianWindow(1.0)", "ClippedShifts(2)",
    "GaussianWindow(1.0, center=PredictedPosition(dim=3))", "Adjacency()", "Learned(9, 5, size=2)",
    "Adjacency(normalize='row', self_loops=True, weighted=False)", "Adjacency(normalize=('sqrt', 'count'))",
    "Chebyshev(3)", "Chebyshev(3, normalize=None, lambda_max=2.0)", "Chebyshev(3, lambda_max='computed')",
    "Chebyshev(2, normalize='row', lambda_max=1.5)", "Powers(3, walk='forward', self_loops=True, first=1)",
    "Powers(2, normalize='sym')", "Relation('played', normalize='row')", "Relations(3)", "Relations(3, normalize=None)",
    "Walks(['played.genre', 'genre^-1'])", "Walks([['a.b', 'c'], 'd'])", "Incidence('sender')", "Identity()",
    "Identity(size=3)", "EdgeNetwork(2)", "EdgeNetwork(2, hidden=(8, 4), activation=torch.nn.Tanh, normalize='row')",
    "Shifts([0, 1])", "Shifts([(0, 1), (2, 3)], padding='reflect', stride=(2, 1))", "Shifts([1], stride=2)",
    "Cuboid((3, 3))", "Cuboid((3, 2), stride=2, dilation=(1, 2), padding=((2, 1), (1, 1)))", "Cuboid((1, 1))",
    "Cuboid((2,), offset=7)", "Cuboid((3,), padding='valid')", "Cuboid((1,), padding='valid', offset=1)",
    "Cuboid((3,), padding_mode='circular')", "DynamicShifts([-1, 0], heads=2, padding='zeros')",
    "Deformable((3, 2), stride=2)", "Pool(2)", "Pool((2, 3), stride=1)", "Pool(3, stride=2, padding=1)",
    "Adjacency(structure='bonds')", "Identity().of('edges')", "(DotProduct(dim=3).map(torch.square) * 0.5)",
    "Separable(2)", "LowRank(8)", "LowRank(8, shared_by=2)", "Full()", "Shared()", "Eye()", "EyeBlocks()",
    "HeadBlocks()", "Grouped(2)", "Depthwise()", "Depthwise(multiplier=2, heads=4, normalize='softmax')",
    "DepthwiseSeparable()"])
def test_a_text_makes_what_it_says(text):
    assert repr(made_again(text)) == text


def test_every_public_mechanism_is_written():
    """Each is in the list above, or in a specimen that is made again from its text."""
    kinds = {name for name in mechanisms.__all__ if inspect.isclass(kind := getattr(mechanisms, name))
             and issubclass(kind, mechanisms.Mechanism)}
    texts = [text for mark in test_a_text_makes_what_it_says.pytestmark for text in mark.args[1]]
    written = {text.partition("(")[0] for text in texts} | {
        type(part).__name__ for name in MADE if name not in EXEMPT
        for part in SPECIMENS[name].subject().mechanism.modules()}
    assert kinds - written == NOT_WRITTEN


def test_weights_of_parts():
    made = weights.WeightList([weights.LowRank(3), weights.Shared()])
    assert repr(made) == "WeightList([LowRank(3), Shared()])"
    layer = LAYERS["mixed"]().layer
    assert "WeightList([LowRank(3, K=2, P=4, Q=3), Shared(K=2, P=4, Q=3)])" in repr(layer)
