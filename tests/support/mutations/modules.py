"""Hooks, patched calls, and submodules that are wrapped or exchanged."""

import copy
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook

from structconv import ConfigError, Mechanism
from structconv.testing.checks import same
from structconv.testing.specimens import mapped
from structconv.testing.use import Use
from structconv.weights import BoundWeight
from tests.support.calls import as_written, check_now
from tests.support.mutations.register import mutation
from tests.support.mutations.subjects import other, refusal

CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.ParameterList)


def called(layer: nn.Module) -> list[nn.Module]:
    """The modules that a call passes: all but containers and what another module calls as a function."""
    functions = {id(part) for module in layer.modules() if type(module).__name__ == "Pair"
                 for part in module.modules() if part is not module}
    return [module for module in layer.modules() if not isinstance(module, CONTAINERS) and id(module) not in functions]


def scaled(value: Any) -> Any:
    """The value with its floating tensors times 1.5."""
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*map(scaled, value))
    if isinstance(value, tuple | list):
        return type(value)(map(scaled, value))
    return mapped(value, lambda t: 1.5 * t)


class Counted:
    """Counts what it is told, and scales it."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, value: Any) -> Any:
        self.calls += 1
        return scaled(value)


def _check_each(use: Use, attach: Callable[[nn.Module, Counted], Callable[[], Any]], what: str) -> None:
    """What is attached to a module is called at each call of the layer, and its result counts; detached, it is not."""
    before = use().detach()
    for module in called(use.layer):
        counted = Counted()
        detach = attach(module, counted)
        name = f"{what} of {type(module).__name__}"
        y = use().detach()
        once = counted.calls
        assert once, f"{name}: not called"
        again = use().detach()
        assert counted.calls == 2 * once, f"{name}: called {counted.calls - once} times by the second call, not {once}"
        with as_written():
            expected = use().detach()
        counted.calls = 0
        same(y, expected, name)
        same(again, expected, f"{name}, called again")
        detach()
        same(use().detach(), before, f"{name} removed")
        assert not counted.calls, f"{name}: called after it was removed"


@mutation()
def forward_hooks(use: Use) -> None:
    _check_each(use, lambda module, fn: module.register_forward_hook(lambda m, args, out: fn(out)).remove, "a hook")


@mutation()
def forward_pre_hooks(use: Use) -> None:
    def attach(module: nn.Module, fn: Counted) -> Callable[[], Any]:
        return module.register_forward_pre_hook(lambda m, args: fn(args)).remove

    _check_each(use, attach, "a pre-hook")


@mutation()
def forward_patched(use: Use) -> None:
    def attach(module: nn.Module, fn: Counted) -> Callable[[], Any]:
        forward = module.forward
        module.forward = lambda *args, **kwargs: fn(forward(*args, **kwargs))
        return lambda: delattr(module, "forward")

    _check_each(use, attach, "a patched forward")


@mutation()
def calls_patched(use: Use) -> None:
    """As torch.fx does: every call of every module is seen."""
    use()
    seen: list[nn.Module] = []
    original = nn.Module.__call__

    def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        seen.append(module)
        return original(module, *args, **kwargs)

    with mock.patch.object(nn.Module, "__call__", call):
        y = use()
    _check_seen(seen, use, y)


@mutation()
def global_hooks(use: Use) -> None:
    use()
    seen: list[nn.Module] = []
    handle = register_module_forward_hook(lambda module, args, out: seen.append(module))
    y = use()
    handle.remove()
    _check_seen(seen, use, y)


def _check_seen(seen: list[nn.Module], use: Use, y: Tensor) -> None:
    missing = [type(m).__name__ for m in called(use.layer) if not any(m is s for s in seen)]
    assert not missing, f"calls of {', '.join(missing)} were not seen"
    same(y.detach(), use().detach(), "seen calls")


@mutation(lambda use: bool(use.variables) and any(isinstance(t, Tensor) for t in use.args))
def backward_hooks(use: Use) -> None:
    """Of layers called on tensors: torch does not look into a dict of them, and warns."""
    use()
    told: list[Any] = []
    handle = use.layer.register_full_backward_hook(lambda module, of_input, of_output: told.append(of_output))
    y = use()
    y.square().sum().backward()
    assert len(told) == 1, "the hook of the backward pass was not called once"
    handle.remove()
    use.layer.zero_grad()
    check_now(use, "after a hook of the backward pass")


def children(layer: nn.Module) -> Iterator[tuple[nn.Module, str, nn.Module]]:
    """Each submodule with its owner and its name there."""
    for owner in list(layer.modules()):
        for name, child in list(owner._modules.items()):
            if child is not None:
                yield owner, name, child


class Wrapper(nn.Module):
    """Calls a module and scales what comes."""

    def __init__(self, inside: nn.Module) -> None:
        super().__init__()
        self.inside, self.calls = inside, 0

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self.calls += 1
        return scaled(self.inside(*args, **kwargs))


@mutation()
def submodules_wrapped(use: Use) -> None:
    """A wrapper in a submodule's place takes part, or an error says what must stand there."""
    before = use().detach()
    for owner, name, child in list(children(use.layer)):
        if isinstance(child, CONTAINERS) or child not in called(use.layer):
            continue
        wrapper, what = Wrapper(child), f"a wrapped {type(child).__name__}"
        owner._modules[name] = wrapper
        error = refusal(use)
        if error is None:
            assert wrapper.calls, f"{what} was not called"
            with as_written():
                expected = use().detach()
            same(use().detach(), expected, what)
        else:
            assert isinstance(error, ConfigError), f"{what}: {error!r}"
            assert type(wrapper).__name__ in str(error), f"{what}: {error}"
        owner._modules[name] = child
        same(use().detach(), before, f"{what} put back")


@mutation()
def a_mechanism_in_another_place(use: Use) -> None:
    """A layer whose mechanism or weight was exchanged for a copy with other parameters."""
    use()
    for owner, name, child in list(children(use.layer)):
        if isinstance(child, Mechanism | BoundWeight):
            twin = copy.deepcopy(child)
            with torch.no_grad():
                for p in twin.parameters():
                    p.copy_(other(p))
            owner._modules[name] = twin
            check_now(use, f"another {type(child).__name__} in its place")
