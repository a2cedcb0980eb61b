"""Functional transforms and fake tensors, also before the first plain call."""

from collections.abc import Callable, Sequence
from contextlib import suppress

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
from torch.func import hessian, jacfwd, jacrev, jvp, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel

from structconv.testing.checks import same
from structconv.testing.use import Use
from tests.support.calls import as_written, check_now, forgotten
from tests.support.mutations.register import mutation
from tests.support.mutations.subjects import smooth, trains


def tangents(tensors: Sequence[Tensor]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(t.shape, dtype=t.dtype, generator=generator) for t in tensors]


def as_function(use: Use) -> tuple[Callable[..., Tensor], list[Tensor]]:
    """The layer as a function of its floating arguments, then of its parameters, and those."""
    named = dict(use.layer.named_parameters())
    counted = len(use.arguments)

    def function(*tensors: Tensor) -> Tensor:
        given = iter(tensors[:counted])
        moved = use.mapped(lambda t: next(given) if t.is_floating_point() else t)
        return moved.given(dict(zip(named, tensors[counted:], strict=True)))

    return function, [t.detach() for t in (*use.arguments, *named.values())]


@mutation(smooth)
def forward_derivatives(use: Use) -> None:
    """jvp equals finite differences, jacfwd the jacobian of eq. 8: never zero."""
    function, tensors = as_function(use)
    moved = tangents(tensors)
    y, tangent, *_ = jvp(function, tuple(tensors), tuple(moved))
    same(y, use().detach(), "the value under jvp")
    step = 1e-6
    with torch.no_grad():
        ahead = function(*(t + step * d for t, d in zip(tensors, moved, strict=True)))
        behind = function(*(t - step * d for t, d in zip(tensors, moved, strict=True)))
    same(tangent, (ahead - behind) / (2 * step), "jvp against finite differences", 1e-6)
    check_now(use, "after jvp")


@mutation(smooth)
def second_derivatives(use: Use) -> None:
    """Both modes over both modes, of a number in two directions."""
    function, tensors = as_function(use)
    ways = [torch.stack([d, e]) for d, e in zip(tangents(tensors), tangents([t * 2 for t in tensors]), strict=True)]
    ways = [torch.stack([w[0], w[0].flip(-1) if w.dim() > 1 else 2 * w[0]]) for w in ways]

    def number(at: Tensor) -> Tensor:
        return function(*(t + torch.tensordot(at, w, 1) for t, w in zip(tensors, ways, strict=True))).square().sum()

    start = torch.tensor([0.1, -0.2], dtype=torch.float64)
    with as_written():
        expected = torch.autograd.functional.hessian(number, start)
    with sdpa_kernel(SDPBackend.MATH):  # torch's fused operators have no second derivative
        for name, order in {"hessian": hessian, "jacrev(jacrev)": lambda f: jacrev(jacrev(f)),
                            "jacfwd(jacfwd)": lambda f: jacfwd(jacfwd(f))}.items():
            same(order(number)(start), expected, name, 1e-8)
    check_now(use, "after second derivatives")


def _under_jvp(use: Use) -> None:
    function, tensors = as_function(use)
    jvp(function, tuple(tensors), tuple(tangents(tensors)))


def _under_vmap(use: Use) -> None:
    function, tensors = as_function(use)
    vmap(function)(*(torch.stack([t, t]) for t in tensors))


def _under_grad(use: Use) -> None:
    function, tensors = as_function(use)
    torch.func.grad(lambda *ts: function(*ts).square().sum())(*tensors)


def _under_fake_tensors(use: Use) -> None:
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        use.mapped(mode.from_tensor)()


def _under_autocast(use: Use) -> None:
    with torch.autocast("cpu", torch.bfloat16):
        use()


FIRST: dict[str, Callable[[Use], None]] = {
    "jvp": _under_jvp, "vmap": _under_vmap, "grad": _under_grad, "fake tensors": _under_fake_tensors,
    "autocast": _under_autocast}


def _first_used(name: str) -> Callable[[Use], None]:
    def check(use: Use) -> None:
        with forgotten():
            with suppress(DataDependentOutputException):  # a mechanism that lists pairs by their numbers has no fake
                FIRST[name](use)
            check_now(use, f"first used under {name}")

    check.__name__ = f"first_used_under_{name.replace(' ', '_')}"
    return check


for _name in FIRST:
    mutation(smooth)(_first_used(_name))


@mutation(lambda use: smooth(use) and trains(use))
def vmap_over_parameters(use: Use) -> None:
    """An ensemble: each member gives what it gives alone."""
    use()
    names = [name for name, _ in use.layer.named_parameters()]
    many = [torch.stack([p.detach(), 2 * p.detach(), -p.detach()]) for _, p in use.layer.named_parameters()]
    fixed = use.mapped(lambda t: t.detach())

    def member(*parameters: Tensor) -> Tensor:
        return fixed.given(dict(zip(names, parameters, strict=True)))

    with as_written():
        expected = torch.stack([member(*(t[i] for t in many)) for i in range(3)])
    same(vmap(member, randomness="same")(*many), expected, "vmap over parameters")
    same(vmap(member, in_dims=-1, randomness="same")(*(t.movedim(0, -1) for t in many)), expected,
         "vmap over the last axis of parameters")
    for i, name in enumerate(names):
        single = vmap(lambda p, i=i: member(*(p if i == j else t[0] for j, t in enumerate(many))), randomness="same")
        same(single(many[i])[1], member(*(t[1] if i == j else t[0] for j, t in enumerate(many))),
             f"vmap over {name}")


@mutation(smooth)
def vmap_over_arguments(use: Use) -> None:
    use()
    function, tensors = as_function(use)
    count = len(use.arguments)
    many = [torch.stack([t, 2 * t, -t]) for t in tensors[:count]]
    with as_written():
        expected = torch.stack([function(*(t[i] for t in many), *tensors[count:]) for i in range(3)])
    mapped = vmap(function, in_dims=(*(0,) * count, *(None,) * (len(tensors) - count)))
    same(mapped(*many, *tensors[count:]), expected, "vmap over arguments")
    actual = vmap(torch.func.grad(lambda t: function(t, *tensors[1:]).square().sum()))(many[0])
    with as_written():
        one = torch.func.grad(lambda t: function(t, *tensors[1:]).square().sum())(many[0][1])
    same(actual[1], one, "vmap over a gradient")


@mutation(lambda use: smooth(use) and trains(use))
def batches_of_gradients(use: Use) -> None:
    """Several gradients of a result pulled back at once are those of each."""
    expected = [p for p in use.layer.parameters() if p.requires_grad]
    y = use()
    rows = torch.stack([torch.ones_like(y), *tangents([y])])
    actual = torch.autograd.grad(y, expected, rows, is_grads_batched=True, retain_graph=True, allow_unused=True)
    for i, row in enumerate(rows):
        single = torch.autograd.grad(y, expected, row, retain_graph=True, allow_unused=True)
        for several, one in zip(actual, single, strict=True):
            if one is not None:
                same(several[i], one, "of gradients in a batch")
    check_now(use, "after gradients in a batch")
