"""Modes of torch that change: gradients, inference, training, autocast, recomputation, threads."""

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from structconv.bases.pairs import NORMALIZATIONS
from structconv.mechanisms.expression import Position
from structconv.structures import Samples
from structconv.testing.checks import same, same_gradients
from structconv.testing.use import Use, joined
from tests.support.calls import as_written, check_now, forgotten
from tests.support.mutations.register import mutation
from tests.support.mutations.subjects import cast, has_graph, has_random_numbers, trains

MODES: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "no_grad": torch.no_grad, "inference_mode": torch.inference_mode, "enable_grad": torch.enable_grad,
}


@mutation()
def first_used_without_gradients(use: Use) -> None:
    """Lightning's order: a check of the validation comes before training."""
    for name in ("no_grad", "inference_mode"):
        with forgotten():
            with MODES[name]():
                use.layer.eval()
                use()
            use.layer.train()
            check_now(use, f"first used under {name}, then trained")


@mutation()
def grad_modes_in_turn(use: Use) -> None:
    use()
    for name in ("inference_mode", "no_grad", "enable_grad", "inference_mode"):
        with MODES[name]():
            y = use()
            with as_written():
                expected = use()
            same(y.detach(), expected.detach(), f"under {name}")
        check_now(use, f"after {name}")
    with torch.no_grad():
        assert not use().requires_grad
        with torch.enable_grad():
            assert use().requires_grad == bool(use.variables)


@mutation()
def arguments_made_under_inference(use: Use) -> None:
    use()
    with torch.inference_mode():
        made = use.mapped(lambda t: t.detach().clone())
        y = made()
    same(y, use().detach(), "arguments that were made under inference_mode")
    check_now(use, "after arguments that were made under inference_mode")


@mutation()
def train_and_eval(use: Use) -> None:
    use()
    for training in (False, True, False):
        use.layer.train(training)
        check_now(use, f"train({training})")
    if has_random_numbers(use):
        quiet = use()
        use.layer.train()
        assert not torch.equal(use(), quiet), "no dropout when training"


@mutation()
def recomputed_on_the_first_call(use: Use) -> None:
    """Checkpointing: the call and its recomputation save the same tensors, whatever is remembered by then."""
    if not use.variables:
        return
    with as_written():
        expected = use()
    for name in ("first", "second"):
        y = use.run(partial(checkpoint, use.layer, use_reentrant=False))
        same_gradients(y, expected, use.variables, f"recomputed, {name} call")


@mutation(lambda use: not has_random_numbers(use))
def autocast_on_and_off(use: Use) -> None:
    low = cast(use, torch.float32)
    before = low().detach()
    with torch.autocast("cpu", torch.bfloat16):
        y = low()
        with forgotten():
            fresh = low.copied()()
        narrow = low.mapped(lambda t: t.detach().bfloat16() if t.is_floating_point() else t)()
        with torch.no_grad():
            quiet = low.mapped(lambda t: t.detach())()
    assert y.dtype == fresh.dtype
    same(narrow.detach(), fresh.detach(), "of what another layer gives under autocast", 2.0**-4)
    same(quiet, fresh.detach(), "without gradients under autocast", 2.0**-4)
    same(y.detach(), fresh.detach(), "under autocast", 8 * torch.finfo(torch.bfloat16).eps)
    assert torch.equal(low().detach(), before), "another result after autocast"


@mutation(lambda use: trains(use) and not getattr(use.layer, "activation", None))
def a_result_in_place(use: Use) -> None:
    """A function in the place of the result, as an activation with `inplace=True`, leaves all gradients as they are."""
    expected = _gradients(use().clamp(min=-0.1), use)
    for actual, grad in zip(_gradients(use().clamp_(min=-0.1), use), expected, strict=True):
        same(actual, grad, "a gradient with the result changed in place")


@mutation()
def several_threads(use: Use) -> None:
    """At once, from the first call on."""
    with as_written():
        expected = use()
        gradients = _gradients(expected, use)
    expected = expected.detach()
    failures: list[BaseException] = []
    barrier = threading.Barrier(3)

    def work() -> None:
        try:
            barrier.wait()
            for _ in range(2):
                if not random:  # their generator is shared, and cannot be set in several threads
                    y = joined(use.layer(*use.args, **use.kwargs))
                    same(y.detach(), expected, "in a thread")
                    for one, other in zip(_gradients(y, use), gradients, strict=True):
                        same(one, other, "a gradient in a thread")
        except BaseException as error:  # raised below, in the thread of the test
            failures.append(error)

    random = has_random_numbers(use)
    with forgotten():
        threads = [threading.Thread(target=work) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    if failures:
        raise failures[0]


def _gradients(y: Tensor, use: Use) -> list[Tensor]:
    if not use.variables:
        return []
    actual = torch.autograd.grad(y.square().sum(), use.variables, allow_unused=True)
    return [torch.zeros_like(t) if g is None else g for g, t in zip(actual, use.variables, strict=True)]


def without_numbers(use: Use) -> bool:
    """Whether what a call computes, and which pairs it lists, depends on sizes and structure alone, and no structure is
    held where the layer does not move it. Within samples pairs are listed, and then left out, by their numbers."""
    held = [part for part in use.layer.modules() if type(part).__name__ == "Given" or isinstance(part, Position)]
    samples = any(isinstance(structure, Samples) for structure in use.structures)
    return not (has_graph(use) or samples or held or any(map(_by_groups, use.layer.modules())))


def _by_groups(part: nn.Module) -> bool:
    """Whether it normalizes each group of listed pairs by itself, whose sizes it reads."""
    kinds = [dict(step.options)["kind"] for step in getattr(part, "steps", ()) if step.name == "normalize"]
    return any(kind not in NORMALIZATIONS for kind in kinds)


@mutation(without_numbers)
def on_the_meta_device(use: Use) -> None:
    """Shapes and dtypes without numbers: nothing is read on the way, which would stall a GPU too."""
    expected, twin = use(), use.copied().mapped(lambda t: t.detach().to("meta")).on(lambda s: s.to("meta"))
    twin.layer.to("meta")
    for _ in range(2):
        y = twin()
        assert y.is_meta and y.shape == expected.shape and y.dtype == expected.dtype
    check_now(use, "a copy of it on the meta device")
