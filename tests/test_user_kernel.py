"""A user's own kernel takes part in plans as soon as it is registered, without touching the package."""

import importlib
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from structconv import Basis, ConfigError, Conv, LowRank, Mechanism, conv, plan
from structconv.kernels.orders import Application, Applied
from structconv.planning import Cost, register, registered
from structconv.testing import Specimen, suite

F64 = torch.float64


@dataclass(frozen=True, eq=False)
class Backwards(Basis):
    """The entries in reversed order."""

    n: int
    size = 1
    num_inputs = property(lambda self: self.n)
    num_outputs = property(lambda self: self.n)

    def dense(self, dtype=None):
        return torch.eye(self.n, dtype=dtype or torch.get_default_dtype()).flip(0).unsqueeze(0)


class Backward(Mechanism):
    """`Backwards` over the entries of x."""

    def forward(self, inputs):
        return Backwards(inputs.num_inputs)


class Flip(Applied):
    """A flip instead of a product."""

    name, types, before = "flip", (Backwards,), ("primitives",)

    def match(self, problem):
        return problem.basis.n > 2

    def application_cost(self, match, problem, channels, mode):
        return Cost(bytes=problem.bytes(2 * problem.inputs * channels), calls=1)

    def application(self, match, problem):
        return Application(lambda r, call: r.flip(-2))


@pytest.fixture(scope="module")
def layer():
    """A layer whose plan was made before the kernel was there."""
    torch.manual_seed(0)
    layer = Conv(Backward(), 3, 3, weight=LowRank(2)).double()
    assert layer.plan(torch.randn(5, 3, dtype=F64)).kernel != "flip"
    register(Flip())
    return layer


def test_a_layer_that_was_called_before_takes_it_and_the_basis_serves_itself_where_it_does_not_match(layer):
    x, theta = torch.randn(5, 3, dtype=F64), torch.randn(1, 3, 4, dtype=F64)
    assert layer.plan(x).kernel == "flip"
    torch.testing.assert_close(layer(x), x.flip(0) @ layer.weight().dense()[0] + layer.bias, rtol=0, atol=1e-12)
    assert plan(x[:2], Backwards(2), theta).kernel != "flip"
    torch.testing.assert_close(conv(x[:2], Backwards(2), theta), x[:2].flip(0) @ theta[0], rtol=0, atol=1e-12)


def test_all_orders_of_products_are_its(layer):
    made = plan(torch.randn(5, 3), Backwards(5), torch.randn(1, 3, 4))
    assert {one.kernel for one in made.candidates if one.path != "operator_first"} == {"flip"}
    assert {"structure_first", "channels_first"} <= {one.path for one in made.candidates}


def test_it_passes_the_suite(layer):
    for _, check in suite(Specimen("backwards", lambda: Backwards(4))):
        check()


def test_a_refused_kernel_is_not_there(layer):
    class Circle(Flip):
        name, before = "circle", ("circle",)

    with pytest.raises(ConfigError, match="must not form a circle"):
        register(Circle())
    assert "circle" not in {kernel.name for kernel in registered()}


class Composed(Mechanism):
    """`Backwards` of the same number at a distance."""

    def forward(self, inputs):
        return Backwards(2 * (inputs.num_inputs // 2) + inputs.num_inputs % 2)


class Even(Applied):
    """Two halves at a time, where there are two."""

    name, types, before = "even", (Backwards,), ("flip", "primitives")

    def match(self, problem):
        return problem.basis.n % 2 == 0

    def application_cost(self, match, problem, channels, mode):
        return Cost(calls=1)

    def application(self, match, problem):
        return Application(lambda r, call: r.unflatten(-2, (2, -1)).flip(-3, -2).flatten(-3, -2))


@pytest.mark.parametrize("mechanism", [Composed, Backward])
def test_it_may_decide_by_an_option_that_a_mechanism_fills_with_the_number_of_entries(layer, mechanism):
    register(Even())
    own = Conv(mechanism(), 3, 2, bias=False).double()
    for entries in (1200, 1201, 1202, 1279, 1200, 6, 7):
        x = torch.randn(entries, 3, dtype=F64)
        assert (own.plan(x).kernel == "even") is (entries % 2 == 0)
        assert own.plan(x) is own.plan(2 * x)
        torch.testing.assert_close(own(x), x.flip(0) @ own.weight().dense()[0], rtol=0, atol=1e-12)


def test_the_kernel_in_triton_of_the_docs(monkeypatch):
    """In Triton's interpreter, or on a GPU; with gradients, leading dimensions and one r for all heads."""
    pytest.importorskip("triton")
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "docs"))
    try:
        example = importlib.import_module("triton_flips")
        basis = importlib.import_module("reversal").Reversal(12, (2, 3))
        device = "cpu" if example.INTERPRETED else "cuda"
        a = basis.dense(F64).to(device)
        for shape in ((12, 5), (2, 3, 12, 1), (0, 12, 5)):
            x = torch.randn(*shape, dtype=F64, device=device)
            theta = torch.randn(2, shape[-1], 7, dtype=F64, device=device)
            result = plan(x, basis, theta)
            assert result.kernel == "triton flips"
            torch.testing.assert_close(conv(x, basis, theta), torch.einsum("kmn,...mp,kpq->...nq", a, x, theta))
        for heads in (1, 2):
            r = torch.randn(3, heads, 12, 5, dtype=F64, device=device, requires_grad=True)
            torch.testing.assert_close(example.reversed_blocks(r, [2, 3]), a.mT @ r)
            torch.library.opcheck(example.reversed_blocks, (r, [2, 3]))
        if device == "cpu":
            for _, check in suite(Specimen("triton flips", lambda: basis)):
                check()
    finally:
        for name in ("triton_flips", "flips", "reversal"):
            sys.modules.pop(name, None)
