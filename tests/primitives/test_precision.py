"""How far operators along edges are from float64 at entries of many edges."""

import pytest
import torch

from structconv.primitives.native import core, dispatch
from tests.primitives.edge_operators import OPERATORS, Edges
from tests.support.drawn import drawn

DEGREE = 100_000
LISTED = [name for name, operator in OPERATORS.items() if operator.pairs in ("listed", "square")
          and not name.startswith("recurrence")]  # whose matrix has a norm of the degree


def with_gradients(operator, edges, inputs):
    y = operator.call(edges, *inputs)
    expected = [t for t in inputs if t.requires_grad]
    grad = torch.randn(y.shape, generator=torch.Generator().manual_seed(3)).to(y.dtype)
    return [t.detach().double() for t in (y, *torch.autograd.grad(y, expected, grad, materialize_grads=True))]


def distances(actual, exact):
    return [float((a - b).square().mean().sqrt()) for a, b in zip(actual, exact, strict=True)]


def check_as_exact_as_plain_float32(operator, edges, inputs, monkeypatch, size=0.0):
    """`size`: of products of rows of inputs with inputs, which are rounded before they cancel."""
    if core() is None:
        pytest.skip("the native core cannot be built here")
    wide = [t.detach().double().requires_grad_(t.requires_grad) for t in inputs]
    exact = with_gradients(operator, edges, wide)
    actual = distances(with_gradients(operator, edges, inputs), exact)
    monkeypatch.setattr(dispatch, "usable", lambda x, edges: None)
    plain = distances(with_gradients(operator, edges, inputs), exact)
    for ours, others, numbers in zip(actual, plain, exact, strict=True):
        assert ours <= 3 * (others + 2.0**-24 * max(size, float(numbers.abs().max())))


@pytest.mark.parametrize("name", drawn(LISTED, 4))
def test_hubs_are_as_exact_as_in_plain_float32(name, monkeypatch):
    g = torch.Generator().manual_seed(0)
    source, target = torch.randint(500, (2, 2 * DEGREE), generator=g)
    target[:DEGREE], source[DEGREE:] = 7, 11
    edges, operator = Edges(source, target, 500, 500), OPERATORS[name]
    torch.manual_seed(0)
    check_as_exact_as_plain_float32(operator, edges, operator.tensors(edges, 2, 8, 8, torch.float32), monkeypatch)


@pytest.mark.parametrize("heads", [1, 2, 4])
@pytest.mark.parametrize("name", [name for name in OPERATORS if not name.startswith(("spmm", "sddmm", "recurrence",
                                                                                     "relational", "conditioned"))])
def test_large_scores_are_as_exact_as_in_plain_float32(name, heads, monkeypatch):
    operator = OPERATORS[name]
    torch.manual_seed(heads)
    edges = operator.edges(12, 9, 150)  # most pairs several times: their weights are equal
    inputs = [(30_000 * t.detach()).requires_grad_() for t in operator.tensors(edges, heads, 8, 8, torch.float32)]
    check_as_exact_as_plain_float32(operator, edges, inputs, monkeypatch, size=30_000.0**2 * 8**0.5)
