"""Random layers with masks anywhere in their expression: values and gradients against an einsum in float64.

The matrices A are computed by plain torch from x, operator by operator, and never pass through a basis.
`STRUCTCONV_RANDOM_LAYERS` sets how many are drawn (150 by default; the release check runs 20,000).
"""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from structconv import Conv, DotProduct, Given, Padding, Uniform
from structconv.bases.linear import Concat
from structconv.testing.checks import same
from tests.support.expressions import Drawn, expressions

F64, P = torch.float64, 3
SETTINGS = settings(max_examples=int(os.environ.get("STRUCTCONV_RANDOM_LAYERS", 150)), deadline=None,
                    derandomize=True, suppress_health_check=list(HealthCheck))


class Both:
    """A mechanism, and the basis that it makes of x: each operator of the algebra is applied to both."""

    def __init__(self, mechanism: Any, basis: Any) -> None:
        self.mechanism, self.basis = mechanism, basis

    @property
    def size(self) -> int:
        return self.basis.size

    @property
    def joined_parts(self) -> list[Any] | None:
        return list(self.basis.parts) if isinstance(self.basis, Concat) else None

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_repr"):
            raise AttributeError(name)

        def applied(*others: Any, **options: Any) -> Both:
            sides = [[getattr(other, side) if isinstance(other, Both) else other for other in others]
                     for side in ("mechanism", "basis")]
            return Both(getattr(self.mechanism, name)(*sides[0], **options),
                        getattr(self.basis, name)(*sides[1], **options))

        return applied

    def __or__(self, other: Any) -> Both:
        return self.__getattr__("__or__")(other)

    def __matmul__(self, other: Any) -> Both:
        return self.__getattr__("__matmul__")(other)

    def __add__(self, other: Any) -> Both:
        return self.__getattr__("__add__")(other)

    def __mul__(self, other: Any) -> Both:
        return self.__getattr__("__mul__")(other)

    __rmul__ = __mul__

    def __repr__(self) -> str:
        return repr(self.mechanism)


def leaves(x):
    """Scores of x itself, through one of three functions, a table that ignores x, or ones."""
    def strategy(m, n):
        def make(kind, seed):
            if kind == "given":
                table = torch.randn(1, n, n, dtype=F64, generator=torch.Generator().manual_seed(seed))
                raw, mechanism = table, Given(table)
            elif kind == "uniform":
                raw, mechanism = x.new_ones(1, n, n), Uniform()
            else:
                feature = {"plain": None, "tanh": torch.tanh, "square": torch.square}[kind]
                own = x if feature is None else feature(x)
                raw, mechanism = (own @ own.mT).unsqueeze(0), DotProduct(feature=feature)
            basis = mechanism.bound(P).basis(x)
            return Drawn(Both(mechanism, basis), raw, torch.ones(1, n, n, dtype=torch.bool), True)

        return st.builds(make, st.sampled_from(["plain", "tanh", "square", "given", "uniform"]), st.integers(0, 99))

    return strategy


@SETTINGS
@given(st.data(), st.integers(2, 5), st.integers(0, 999))
def test_a_random_layer_is_the_einsum_that_it_means(data, n, seed):
    generator = torch.Generator().manual_seed(seed)
    x = (0.6 * torch.randn(n, P, dtype=F64, generator=generator)).requires_grad_()
    g = torch.randn(n, 2, dtype=F64, generator=generator)
    drawn = data.draw(expressions(n, n, 3, leaves(x)))
    layer = Conv(drawn.basis.mechanism, P, 2, bias=False).double()
    y, basis = layer(x), layer.basis(x)
    a, theta = drawn.dense, layer.weight.theta
    same(basis.dense(F64), a, f"the basis of {layer.mechanism!r}")
    expected = torch.einsum("kmn,mp,kpq->nq", a, x, theta)
    same(y, expected, repr(layer.mechanism))
    if not expected.requires_grad:
        return
    actual, right = (torch.autograd.grad(out, [x, theta], g, allow_unused=True) for out in (y, expected))
    for own, other, at in zip(actual, right, (x, theta), strict=True):
        own, other = (torch.zeros_like(at) if gradient is None else gradient for gradient in (own, other))
        same(own, other, f"a gradient of {layer.mechanism!r}")


#: Expressions whose hidden inputs no output reads, whatever they hold.
UNREAD = {
    "weights over outputs, then shares":
        lambda d, e, keep: d.masked(keep=keep).softmax(over="outputs").normalize("sum"),
    "shares of dropped weights": lambda d, e, keep: d.masked(keep=keep).softmax(sink=0.0).normalize("count"),
    "relu": lambda d, e, keep: d.masked(keep=keep).softmax().relu(),
    "tanh": lambda d, e, keep: d.masked(keep=keep).softmax().tanh(),
    "leaky": lambda d, e, keep: d.masked(keep=keep).softmax().leaky_relu(),
    "softcap": lambda d, e, keep: d.masked(keep=keep).softmax().softcap(3.0),
    "either of two masks": lambda d, e, keep: d.masked(keep=keep | keep).softmax(),
    "neither of two masks": lambda d, e, keep: d.masked(drop=~keep & ~keep).softmax()}


@pytest.mark.parametrize("name", UNREAD)
def test_what_hidden_inputs_hold_does_not_matter(name):
    keep = Padding(torch.tensor([True, True, True, False]))
    layer = Conv(UNREAD[name](DotProduct(dim=3), None, keep), P, P).double()
    z, actual = torch.randn(2, P, dtype=F64), []
    for hidden in (0.5, torch.nan):
        x = torch.randn(4, P, dtype=F64, generator=torch.Generator().manual_seed(1))
        x[3] = hidden
        y = layer(x, z=z)
        actual.append([y, *torch.autograd.grad(y.sum(), list(layer.parameters()), materialize_grads=True)])
    for own, other in zip(*actual, strict=True):
        same(own, other, name)


@pytest.mark.parametrize("weights", [lambda e: e.softmax(), lambda e: e.normalize("sigmoid")])
def test_a_masked_logarithm_times_weights_has_finite_gradients(weights):
    keep = Padding(torch.tensor([True, True, True, False]))
    for join in (lambda a, b: a * b, lambda a, b: a.outer(b)):
        expression = join(DotProduct(dim=3).masked(keep=keep).log_softmax(), weights(DotProduct(dim=3)))
        layer = Conv(expression, P, P).double()
        layer(torch.randn(4, P, dtype=F64)).sum().backward()
        assert all(p.grad is not None and p.grad.isfinite().all() for p in layer.parameters())
