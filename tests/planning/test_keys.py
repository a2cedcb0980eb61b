"""Calls that look alike to a careless key: each gives what a layer that was never called before gives."""

import enum
import functools
from typing import ClassVar

import numpy as np
import pytest
import torch
from torch import nn

from structconv import Additive, BiAffine, Conv, DotProduct, Identity, Mechanism, RelativeBias, Uniform, conv, ops
from structconv.bases import Basis, Bilinear, Dense, value
from structconv.mechanisms import EmbeddedGaussian
from structconv.planning import plan
from structconv.structures import Causal, Grid, Padding, Window


def check(layer, x, z=None, structure=None):
    a = layer.basis(x, structure, z=z).dense()
    expected = torch.einsum("...kmn,...mp,kpq->...nq", a, x, layer.weight().dense()) + layer.bias
    torch.testing.assert_close(layer(x, structure, z=z), expected, rtol=1e-4, atol=1e-5)


@pytest.fixture
def x():
    return torch.randn(2, 9, 4, generator=torch.Generator().manual_seed(0))


def drawn(layer):
    with torch.no_grad():
        for p in layer.parameters():
            p.normal_()
    return layer


def test_one_table_in_two_places_and_two_tables(x):
    table = RelativeBias(2, 2)
    tied = drawn(Conv((DotProduct(2, 3) + table + table).softmax(), 4, 4))
    own = drawn(Conv((DotProduct(2, 3) + RelativeBias(2, 2) + RelativeBias(2, 2)).softmax(), 4, 4))
    for layer in (tied, own, tied):
        check(layer, x)
    tables = [p for name, p in own.named_parameters() if name.endswith("table")]
    assert len(tables) == 2
    assert all(g.abs().sum() > 0 for g in torch.autograd.grad(own(x).square().sum(), tables))


class Own(Mechanism):
    """A dot product whose `fill` multiplies by `factor()`."""

    has_scores = True

    def __init__(self, option=None):
        super().__init__()
        self.option = option

    def bind(self, channels):
        self.query, self.key = nn.Linear(channels.others, 3), nn.Linear(channels.inputs, 3)

    def forward(self, inputs):
        key = self.key(inputs.x).unsqueeze(-3)
        query = key if inputs.z is inputs.x else self.query(inputs.z).unsqueeze(-3)
        return Bilinear(query, key) * float(self.factor())

    def factor(self):
        return 1.0


def test_leaves_that_are_one_in_some_calls(x):
    layer = Conv(Own().softmax(), 4, 4)
    check(layer, x)
    check(layer, x, torch.randn(2, 9, 4))


@value
class Listed(Basis):
    """The product of two matrices in a list."""

    held: list
    size = 1
    num_inputs = num_outputs = property(lambda self: self.held[0].shape[-1])

    def dense(self, dtype=None):
        return (self.held[0] @ self.held[1]).unsqueeze(0).to(dtype or self.held[0].dtype)


def test_tensors_in_a_list_are_told_apart():
    one, two, theta = torch.randn(5, 5), torch.randn(5, 5, requires_grad=True), torch.randn(1, 4, 3)
    plans = [ops.plan(torch.randn(5, 4), Listed(held), theta).served
             for held in ([one, one], [one, one.clone()], [one, two], [two, two], (one, two))]
    assert len(set(plans)) == len(plans)


class First(enum.IntEnum):
    ONE = 1


class Second(enum.IntEnum):
    ONE = 1


class Tagged(int):
    tag = 1.0


def tagged(tag):
    number = Tagged(1)
    number.tag = tag
    return number


class ByOption(Own):
    def factor(self):
        option = self.option
        if isinstance(option, list | dict):
            return 2.0 + len(option)
        if isinstance(option, Tagged):
            return option.tag
        kinds = (First, Second, bool, np.floating, float, int)
        return [3.0, 5.0, 7.0, 11.0, 13.0 if np.signbit(float(option)) else 17.0, 19.0][
            next(i for i, kind in enumerate(kinds) if isinstance(option, kind))]


@pytest.mark.parametrize("options", [(First.ONE, Second.ONE, True, 1, 1.0, np.float32(1)), (0.0, -0.0),
                                     (tagged(2.0), tagged(3.0)), ([], [1], {}, {1: 2})])
def test_options_that_are_equal_and_not_the_same(x, options):
    for option in (*options, *options):
        check(Conv(ByOption(option).softmax(), 4, 4), x)


class Held:
    def __init__(self):
        self.factor = 2.0
        self.itself = self


class ByObject(Own):
    def factor(self):
        return self.option.factor


def test_an_object_that_changes(x):
    layer = Conv(ByObject(Held()).softmax(), 4, 4)
    for factor in (2.0, 5.0):
        layer.mechanism.operands[0].option.factor = factor
        check(layer, x)


class Wrapper(Mechanism):
    has_scores = True

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    size = property(lambda self: self.inner.size)

    def forward(self, inputs):
        return self.inner(inputs)


def test_a_mechanism_within_a_mechanism(x):
    for inner in (DotProduct(2, 3), EmbeddedGaussian(3, 2), DotProduct(2, 3)):
        check(Conv(Wrapper(inner).softmax(), 4, 4), x)


@pytest.mark.parametrize("read", [lambda self: self.training, lambda self: self.query.in_features,
                                  lambda self: self.key.bias[0], lambda self: self.shift])
def test_forward_reads_modes_parameters_and_buffers_in_each_call(x, read):
    class Reads(Own):
        def bind(self, channels):
            super().bind(channels)
            self.shift = torch.ones(())

        def factor(self):
            return read(self)

    layer = Conv(Reads().softmax(), 4, 4).train()
    check(layer, x)
    with torch.no_grad():
        layer.mechanism.mechanisms()[0].key.bias += 1
        layer.mechanism.mechanisms()[0].shift += 1
    check(layer.eval(), x)


READS = [
    lambda inputs: inputs.structure.periodic, lambda inputs: inputs.structure is None, lambda inputs: inputs.samples,
    lambda inputs: inputs.structure.num_entries, lambda inputs: inputs.z is inputs.x, lambda inputs: inputs.x.shape[-2],
    lambda inputs: inputs.z.shape[-2], lambda inputs: inputs.output_positions, lambda inputs: inputs.visible,
    lambda inputs: inputs.of_x(lambda x, start: x), lambda inputs: inputs.positions_of_outputs()]
WITHIN = [lambda own: own, lambda own: own @ own, lambda own: (own | own) * 2, lambda own: own.masked(keep=Causal())]


@pytest.mark.parametrize(("read", "within"), [(read, WITHIN[at % 4]) for at, read in enumerate(READS)])
def test_forward_may_read_anything_of_a_call(read, within):
    class Reads(Own):
        def forward(self, inputs):
            actual = read(inputs)
            return super().forward(inputs) * (2.0 if actual is not None and torch.as_tensor(actual).any() else 1.0)

    layer = Conv(within(Reads()), 4, 4)
    check(layer, torch.randn(5, 4), structure=Grid(5))
    check(layer, torch.randn(5, 4), structure=Grid(5, periodic=True))


def test_what_forward_reads_of_a_structure_is_that_of_the_call():
    class OnLines(Own):
        def forward(self, inputs):
            line = inputs.structure
            scores = super().forward(inputs) * (1.0 / line.num_entries)
            return scores if line.periodic else scores.masked(keep=Causal())

    layer = Conv(OnLines().softmax(), 4, 4)
    for line in (Grid(5, periodic=True), Grid(5), Grid(5, periodic=True), Grid(100), Grid(102), Grid(100)):
        check(layer, torch.randn(2, line.num_entries, 4), structure=line)


def test_a_tensor_of_no_parameter_is_that_of_the_call():
    class Keeps(Own):
        kept = torch.randn(1, 5, 3)

        def forward(self, inputs):
            return Bilinear(self.kept, super().forward(inputs).child.key)

    layer = Conv(Keeps().softmax(), 4, 4)
    for _ in range(2):
        check(layer, torch.randn(5, 4))
        layer.mechanism.mechanisms()[0].kept = torch.randn(1, 5, 3)


class ByDefault(ByOption):
    option = 1.0

    def __init__(self, option):
        super().__init__()
        self.option = option


def test_an_option_is_taken_away(x):
    layer = Conv(ByDefault(3).softmax(), 4, 4)
    check(layer, x)
    del layer.by_default.option
    check(layer, x)


def test_sizes_of_the_parts_above_the_exact_ones():
    x, theta = torch.randn(5, 2), torch.randn(145, 2, 3)
    first, second = Dense(torch.randn(70, 5, 5)), Dense(torch.randn(75, 5, 5))
    for basis in (first | second, second | first, first | second):
        expected = torch.einsum("kmn,mp,kpq->nq", basis.dense(), x, theta)
        torch.testing.assert_close(conv(x, basis, theta), expected, rtol=1e-4, atol=1e-4)


def test_replaced_parts_of_an_expression(x):
    layer = Conv(DotProduct(2, 3).masked(keep=Window(2)).softmax(), 4, 4)
    layer(x)
    keep = torch.tensor([True] * 5 + [False] * 4)
    layer.mask = Conv(DotProduct(2, 3).masked(keep=Padding(keep)).softmax(), 4, 4).mask
    broken = x.clone()
    broken[:, 8] = torch.nan
    assert layer(broken).isfinite()[:, :8].all()
    layer.attention = BiAffine(2, on="projected").bound(4, 4)
    assert layer(x).shape == x.shape


class Softened:
    def __call__(self, t):
        return 0.5 * t


@pytest.mark.parametrize("expression", [
    lambda: DotProduct(2, 3).map(Softened()).softmax(), lambda: DotProduct(2, 3).map(torch.Tensor.tanh).softmax(),
    lambda: Additive(3, 2, activation=Softened()).softmax(), lambda: DotProduct(2, 3).scaled(np.float32(0.5)).softmax(),
    lambda: ByOption(First.ONE).softmax(), lambda: ByObject(Held()).softmax(),
    lambda: DotProduct(2, 3).map(functools.partial(torch.clamp, min=-1.0)).softmax()])
def test_a_layer_with_an_option_of_any_kind_has_one_plan(x, expression):
    layer = Conv(expression(), 4, 4)
    layer(x)
    known = len(plan._PLANS)
    for _ in range(3):
        check(layer, x)
    assert len(plan._PLANS) == known


@value
class Noted(Basis):
    """A dense basis with something beside it."""

    a: torch.Tensor
    beside: object

    size = property(lambda self: self.a.shape[0])
    num_inputs = property(lambda self: self.a.shape[1])
    num_outputs = property(lambda self: self.a.shape[2])

    def dense(self, dtype=None):
        return self.a if dtype is None else self.a.to(dtype)


class Plain(Noted):
    """The same, but no dataclass: what it holds is known by its names."""

    __dataclass_fields__: ClassVar = {}

    def __init__(self, a, beside):
        self.__dict__.update(a=a, beside=beside)


@pytest.mark.parametrize("factors", [{"a": 2.0}, {1, 2}, np.ones(3), [1.0, [2.0]], object()])
@pytest.mark.parametrize("kind", [Noted, Plain])
def test_a_basis_may_hold_what_cannot_be_hashed(kind, factors):
    x, theta, a = torch.randn(5, 2), torch.randn(3, 2, 4), torch.randn(3, 5, 5)
    expected = torch.einsum("kmn,mp,kpq->nq", a, x, theta)
    for _ in range(2):
        torch.testing.assert_close(conv(x, kind(a, factors), theta), expected, rtol=1e-4, atol=1e-4)


def test_specs_that_say_only_how_many_entries_there_are_share_a_plan():
    x = torch.randn(103, 4)
    for mechanism in (Own(), RelativeBias(2, 2) + DotProduct(2, 3), Identity() + DotProduct(),
                      (DotProduct() @ DotProduct().softmax()) | Uniform()):
        layer = Conv(mechanism, 4, 4)
        assert len({id(layer.plan(x[:entries])) for entries in (99, 100, 101, 103)}) == 1
