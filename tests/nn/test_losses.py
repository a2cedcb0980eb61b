"""The cross entropy against torch's: numbers, derivatives of any order, options, second calls, and one table less."""

import re

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from benchmarks import memory
from structconv.nn import cross_entropy, losses

#: Of which the larger, 300,000 numbers, is not left to torch.
SIZES = ((7, 5), (600, 500))


def given(rows, classes, dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    x = 3 * torch.randn(rows, classes, generator=generator, dtype=dtype)
    target = torch.randint(0, classes, (rows,), generator=generator)
    target[::3] = 1
    return x.requires_grad_(), target


def both(function, *args, **options):
    """The loss and its gradient."""
    loss = function(*args, **options)
    return loss, *torch.autograd.grad(1.7 * loss, args[0])


@pytest.mark.parametrize("smoothing", [0.0, 0.1, 1.0])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("size", SIZES)
def test_values_and_gradients_are_torchs(size, reduction, smoothing):
    for dtype in (torch.float32, torch.float64):
        options = {"ignore_index": 1, "reduction": reduction, "label_smoothing": smoothing}
        pairs = (both(f, *given(*size, dtype), **options) for f in (cross_entropy, F.cross_entropy))
        torch.testing.assert_close(*pairs)


@pytest.mark.parametrize("smoothing", [0.0, 0.2])
def test_derivatives_of_any_order(monkeypatch, smoothing):
    monkeypatch.setattr(losses, "_BLOCK", 1)
    x, target = given(5, 4, torch.float64)

    def loss(x, function=cross_entropy):
        return function(x, target, ignore_index=1, label_smoothing=smoothing)

    assert torch.autograd.gradcheck(loss, x, check_forward_ad=True, fast_mode=True)
    assert torch.autograd.gradgradcheck(loss, x, fast_mode=True)
    by_torch = torch.func.hessian(loss)(x, F.cross_entropy)
    torch.testing.assert_close(torch.func.hessian(loss)(x), by_torch)
    torch.testing.assert_close(torch.autograd.functional.hessian(loss, x), by_torch)


@pytest.mark.parametrize("options", [{"reduction": "none"}, {"weight": torch.rand(500)}, {"label_smoothing": 0.1}])
def test_what_torch_takes_is_taken(options):
    x, target = given(*SIZES[1])
    torch.testing.assert_close(cross_entropy(x, target, **options), F.cross_entropy(x, target, **options))
    torch.testing.assert_close(cross_entropy(x, x.softmax(1), **options), F.cross_entropy(x, x.softmax(1), **options))
    image, classes = x.view(2, 300, 500).mT, target.view(2, 300)
    torch.testing.assert_close(cross_entropy(image, classes, **options), F.cross_entropy(image, classes, **options))
    compiled = torch.compile(cross_entropy, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(x, target, **options), F.cross_entropy(x, target, **options))
    with torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(cross_entropy(x, target, **options), F.cross_entropy(x, target, **options))
        low = x.detach().bfloat16()
        torch.testing.assert_close(cross_entropy(low, target, **options), F.cross_entropy(low, target, **options))


@pytest.mark.parametrize("size", SIZES)
def test_what_torch_refuses_is_refused_alike(size):
    x, target = given(*size)
    wrong = target.clone()
    wrong[3] = size[1]
    for bad in ((x, wrong), (x, wrong - 3 * size[1]), (x, target[1:]), (x, target.int()), (x[0], target)):
        with pytest.raises((IndexError, RuntimeError, ValueError)) as by_torch:
            F.cross_entropy(*bad)
        with pytest.raises(by_torch.type, match=re.escape(str(by_torch.value))):
            cross_entropy(*bad)
    for options in ({"reduction": "total"}, {"label_smoothing": 2.0}, {"ignore_index": True}, {"label_smoothing": "a"},
                    {"ignore_index": -100.0}):
        with pytest.raises((RuntimeError, ValueError, TypeError)) as by_torch:
            F.cross_entropy(x, target, **options)
        with pytest.raises(by_torch.type, match=re.escape(str(by_torch.value)[:40])):
            cross_entropy(x, target, **options)


def test_tensors_without_numbers_and_arguments_by_position():
    x, target = given(*SIZES[1])
    with FakeTensorMode() as mode:
        assert cross_entropy(mode.from_tensor(x), mode.from_tensor(target)).shape == ()
    assert cross_entropy(x.to("meta"), target.to("meta")).is_meta
    for places in ((None, None, 1), (torch.rand(500), False), (None, None, 1, None, "sum", 0.1)):
        torch.testing.assert_close(cross_entropy(x, target, *places), F.cross_entropy(x, target, *places))


@pytest.mark.parametrize("size", SIZES)
def test_nothing_to_tell_is_torchs_nothing(size):
    x, _ = given(*size)
    none = torch.full(size[:1], -100)
    for reduction in ("mean", "sum"):
        torch.testing.assert_close(*(both(f, x, none, reduction=reduction) for f in (cross_entropy, F.cross_entropy)),
                                   equal_nan=True)
    broken = x.detach().clone()
    broken[1] = torch.nan  # of a row that is left out
    target = none.clone()
    target[0] = 2
    torch.testing.assert_close(cross_entropy(broken, target), F.cross_entropy(broken, target))


@pytest.mark.parametrize("size", SIZES)
def test_a_second_backward_and_a_recomputed_block(size):
    x, target = given(*size)
    expected = both(F.cross_entropy, x, target)[1] / 1.7
    loss = cross_entropy(x, target)
    for _ in range(2):
        torch.testing.assert_close(torch.autograd.grad(loss, x, retain_graph=True)[0], expected)
    again = checkpoint(cross_entropy, x, target, use_reentrant=False)
    torch.testing.assert_close(torch.autograd.grad(again, x)[0], expected)


@pytest.mark.parametrize("size", SIZES)
def test_programs_and_batches_of_gradients(size):
    x, target = given(*size)
    expected = both(F.cross_entropy, x, target)[1] / 1.7
    loss, rows = cross_entropy(x, target), torch.tensor([1.0, -2.0])
    (batched,) = torch.autograd.grad(loss, x, rows, is_grads_batched=True, retain_graph=True)
    torch.testing.assert_close(batched, rows.view(2, 1, 1) * expected)
    traced = make_fx(lambda x, target: cross_entropy(x, target))(x, target)
    torch.testing.assert_close(traced(2 * x, target), F.cross_entropy(2 * x, target))
    rows = torch.export.Dim("rows", min=2, max=10_000)
    program = torch.export.export(Mean(), (x, target), dynamic_shapes=({0: rows}, {0: rows})).module()
    for number in (5, 4000):
        x, target = given(number, size[1])
        torch.testing.assert_close(program(x, target), F.cross_entropy(x, target))


class Mean(nn.Module):
    """The loss as a program."""

    def forward(self, x, target):
        return cross_entropy(x, target)


def test_the_backward_pass_holds_a_table_less():
    x, target = given(4000, 500)

    def tables(function):
        return memory._profiled(lambda: torch.autograd.grad(function(x, target), x)) / (4 * x.numel())

    assert tables(F.cross_entropy) > 2.9
    assert tables(cross_entropy) < 2.1
