"""Mixed precision: a layer between others under autocast gives what it gives in float64, as far as rounding lets it.

How far that is, is measured by Monte Carlo arithmetic (Parker 1997): eq. (1) as it is written runs in float64, forward
and backward, with every number that an operator makes moved at random by `UNITS` units of the narrow dtype. A kernel
rounds fewer numbers, by half a unit each.
"""

import copy
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch._subclasses.fake_tensor import DataDependentOutputException
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from structconv.nn import ConvGRUCell, ConvLSTMCell
from structconv.structures.values import map_tensors
from structconv.testing.checks import F64, same
from structconv.testing.specimens import random_numbers
from structconv.testing.use import Use, joined
from tests.support.calls import as_written, forgotten
from tests.support.mutations.register import mutation
from tests.support.mutations.subjects import cast, refusal

DTYPES = (torch.bfloat16, torch.float16)
#: Runs in which numbers are moved, and by how many units; linear layers of which one is taken.
RUNS, UNITS, LINEAR = 4, 4, 12


class Chain(nn.Module):
    """Linear -> layer -> ReLU -> layer, on the first argument of a call, or the first x by name; the same numbers in
    the shape of the next."""

    def __init__(self, layer: nn.Module, x: Any) -> None:
        super().__init__()
        first = _first(x)
        self.linear = nn.Linear(first.shape[-1], first.shape[-1], dtype=first.dtype)
        self.first, self.second = layer, copy.deepcopy(layer)

    def forward(self, x: Any, *others: Any, **options: Any) -> Tensor:
        """The result of the second layer."""
        y, first = joined(self.first(self.before(x), *others, **options)).relu(), _first(x)
        places = torch.arange(first.numel(), device=y.device).remainder(max(y.numel(), 1))
        following = y.flatten()[places].view(first.shape) if y.numel() else y.new_zeros(first.shape)
        return joined(self.second(_with_first(x, following), *others, **options))

    def before(self, x: Any) -> Any:
        """What the first layer is given."""
        return _with_first(x, self.linear(_first(x)))


def _first(x: Any) -> Tensor:
    actual: Tensor = next(iter(x.values())) if isinstance(x, dict) else x
    return actual


def _with_first(x: Any, first: Tensor) -> Any:
    return {**x, next(iter(x)): first} if isinstance(x, dict) else first


def _nearest(layer: nn.Module, use: Use) -> float:
    """The smallest number but zero that ReLU gets, as a share of the largest."""
    assert isinstance(layer, Chain)
    with torch.no_grad(), as_written():
        sizes = replace(use, layer=layer.first, args=(layer.before(use.args[0]), *use.args[1:]))().abs()
    return float(sizes[sizes > 0].min() / sizes.max()) if sizes.any() else 1.0


class Rounded(TorchDispatchMode):
    """Every float64 number that an operator makes, moved at random by `eps` of itself; whole numbers are exact."""

    def __init__(self, eps: float, seed: int) -> None:
        super().__init__()
        self.eps, self.generator = eps, torch.Generator().manual_seed(seed)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        y = func(*args, **(kwargs or {}))
        shares = any(actual.alias_info is not None for actual in func._schema.returns)
        return y if shares else pytree.tree_map_only(Tensor, self.moved, y)

    def moved(self, t: Tensor) -> Tensor:
        """The numbers, moved."""
        if t.dtype != F64:
            return t
        sign = torch.randint(0, 2, t.shape, generator=self.generator) * 2 - 1
        return torch.where(t == t.round(), t, t * (1 + self.eps * sign))


def chain(use: Use) -> Use:
    """The layer between others, of a few linear ones that which keeps the furthest from where ReLU's slope jumps."""
    made = []
    for seed in range(LINEAR):
        with random_numbers(seed):
            made.append(replace(use, layer=Chain(use.layer, use.args[0])))
    return max(made, key=lambda each: _nearest(each.layer, each))


def roundings(use: Use, dtype: torch.dtype, times: int = RUNS) -> tuple[list[Tensor], list[float]]:
    """What a use in float64 gives, then its gradients, and how far from each rounding to a narrow dtype may lead."""
    limits = torch.finfo(dtype)
    with as_written():
        exact = _results(use)
        runs = [_moved(use, Rounded(UNITS * limits.eps, seed)) for seed in range(times)]
    return exact, [max(limits.tiny, *(_distance(t, other) for t in actual))
                   for other, *actual in zip(exact, *runs, strict=True)]


def _moved(use: Use, mode: Rounded) -> list[Tensor]:
    """The results with all numbers moved, those of arguments and parameters too."""
    moved = use.copied().mapped(lambda t: mode.moved(t.detach()).requires_grad_(t.requires_grad))
    with torch.no_grad():
        for parameter in moved.layer.parameters():
            parameter.copy_(mode.moved(parameter))
    with mode:
        return _results(moved)


def _results(use: Use) -> list[Tensor]:
    """The result, and the gradients of a linear function of it."""
    y = use()
    if not y.requires_grad:
        return [y, *(torch.zeros_like(t) for t in use.variables)]
    weight = torch.randn(y.shape, dtype=F64, generator=torch.Generator().manual_seed(1))
    actual = torch.autograd.grad((y.to(F64) * weight).sum(), use.variables, allow_unused=True)
    return [y.detach(), *(torch.zeros_like(t) if g is None else g for g, t in zip(actual, use.variables, strict=True))]


def _distance(one: Tensor, other: Tensor) -> float:
    return float((one - other).abs().max()) if one.numel() else 0.0


@contextmanager
def _autocast(dtype: torch.dtype | None) -> Iterator[None]:
    with nullcontext() if dtype is None else torch.autocast("cpu", dtype):
        yield


@mutation()
def between_layers_under_autocast(use: Use) -> None:
    between = chain(use)
    bounds = {dtype: roundings(between, dtype) for dtype in DTYPES}
    low = cast(between.copied(), torch.float32)
    for dtype, (exact, allowed) in bounds.items():
        with _autocast(dtype):
            y = low()
            actual = _results(low)
        assert y.dtype == _dtype(use, dtype), f"{y.dtype} under autocast to {dtype}"
        for gradient, variable in zip(actual[1:], low.variables, strict=True):
            assert gradient.dtype == variable.dtype, f"a gradient in {gradient.dtype} under autocast to {dtype}"
        if any(_distance(one, other) > far for one, other, far in zip(actual, exact, allowed, strict=True)):
            exact, allowed = roundings(between, dtype, 4 * RUNS)  # the furthest of few runs is not the furthest
        for i, (one, other, far) in enumerate(zip(actual, exact, allowed, strict=True)):
            what = "the result" if i == 0 else f"gradient {i}"
            same(one, other, f"{what} under autocast to {dtype}", torch.full((), far, dtype=F64))


def _dtype(use: Use, dtype: torch.dtype) -> torch.dtype:
    """That of torch's layers; a recurrent cell keeps that of the state it is given, as torch's do."""
    given = isinstance(use.layer, ConvGRUCell | ConvLSTMCell) and len(use.arguments) > 1
    return torch.float32 if given else dtype


@mutation()
def autocast_in_any_order(use: Use) -> None:
    """What a layer gave in one precision is nothing to what it gives in the next, whatever was first."""
    low = cast(use, torch.float32)
    single = {}
    for dtype in (None, *DTYPES):
        with forgotten(), _autocast(dtype):
            single[dtype] = low.copied()().detach()
    for dtype in (torch.bfloat16, None, torch.float16, torch.bfloat16, torch.float16, None, torch.bfloat16):
        with _autocast(dtype):
            assert torch.equal(low().detach(), single[dtype]), f"another result under autocast to {dtype}"
            with torch.no_grad():
                same(low(), single[dtype], f"without gradients under autocast to {dtype}", 2.0**-4)
            with torch.autocast("cpu", enabled=False):
                assert torch.equal(low().detach(), single[None]), "another result where autocast is off"


@mutation()
def fake_tensors_under_autocast(use: Use) -> None:
    low, mode = cast(use, torch.float32), FakeTensorMode(allow_non_fake_inputs=True)
    for dtype in DTYPES:
        with _autocast(dtype), suppress(DataDependentOutputException):  # where pairs are listed by their numbers
            y = low()
            with forgotten(), mode:
                fake = low.mapped(mode.from_tensor)()
            assert (fake.shape, fake.dtype) == (y.shape, y.dtype), f"{fake} stands for {y.dtype}"


def on_meta(use: Use) -> Use:
    """The same without numbers."""
    layer = copy.deepcopy(use.layer).to("meta")
    meta = replace(use, layer=layer).mapped(lambda t: t.detach().to("meta"))
    return meta.on(lambda s: map_tensors(s, lambda t: t.to("meta")))


def _runs_on_meta(use: Use) -> bool:
    """Whether no layout is made of the numbers in a structure or a mask."""
    return refusal(on_meta(cast(use, torch.float32))) is None


@mutation(_runs_on_meta)
def meta_tensors_under_autocast(use: Use) -> None:
    """There torch's autocast casts nothing."""
    meta = on_meta(cast(use, torch.float32))
    y, linear = meta(), nn.Linear(1, 1, device="meta")
    for dtype in DTYPES:
        with _autocast(dtype):
            actual, expected = meta(), linear(torch.empty(1, 1, device="meta")).dtype
        assert (actual.shape, actual.dtype) == (y.shape, expected), f"{actual.dtype} on meta under autocast to {dtype}"
