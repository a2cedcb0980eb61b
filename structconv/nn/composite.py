"""`Composite`: a layer made of convolutions. `watched`: record the arguments of calls of some modules."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from structconv.nn.conv import Conv
from structconv.nn.layer import Layer
from structconv.planning import Plan

__all__ = ["Composite", "watched"]


class Composite(Layer):
    """A layer whose parameters are those of its inner layers, ours or torch's."""

    def reset_parameters(self) -> None:
        """Draw all parameters again, in place, as those of a new layer."""
        _reset(self.children())

    def plans(self, *args: Any, **kwargs: Any) -> dict[str, Plan]:
        """The plans of its convolutions in such a call, by name. The call runs once; random numbers stay."""
        result: dict[str, Plan] = {}

        def note(name: str, conv: Conv, args: Any, kwargs: Any) -> None:
            result.setdefault(name, conv.plan(*args, **kwargs))

        convs = [(name, module) for name, module in self.named_modules() if isinstance(module, Conv)]
        with torch.random.fork_rng([]), watched(convs, note):
            self(*args, **kwargs)
        return result


def _reset(modules: Iterable[nn.Module]) -> None:
    """Reset each module, or else its children."""
    for module in modules:
        own = getattr(module, "reset_parameters", None)
        _reset(module.children()) if own is None else own()


@contextmanager
def watched(modules: Iterable[tuple[str, nn.Module]], note: Callable[[str, Any, Any, Any], None]) -> Iterator[None]:
    """Within the context `note(name, module, args, kwargs)` runs after each call of these modules."""
    def hook(name: str) -> Callable[..., None]:
        return lambda module, args, kwargs, result: note(name, module, args, kwargs)

    handles = [module.register_forward_hook(hook(name), with_kwargs=True) for name, module in modules]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
