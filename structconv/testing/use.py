"""`Use`: a layer with the arguments of a call."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils import _pytree as pytree

from structconv.testing.specimens import random_numbers

__all__ = ["Make", "Use", "joined", "seeded", "use"]


@dataclass(frozen=True, eq=False)
class Use:
    """A module, and the arguments of a call of it; the result as one tensor, from equal random numbers each time."""

    layer: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any] = field(default_factory=dict)

    def __call__(self) -> Tensor:
        return self.run(self.layer)

    def run(self, function: Callable[..., Any]) -> Tensor:
        """The result of a function of the layer's arguments."""
        with random_numbers(0):
            return joined(function(*self.args, **self.kwargs))

    def given(self, parameters: Mapping[str, Tensor]) -> Tensor:
        """The result with these tensors in the place of parameters."""
        def called(*args: Any, **kwargs: Any) -> Any:
            # torch restores the wrong tensor in a module that is registered twice, unless it gets one name
            return functional_call(self.layer, dict(parameters), args, kwargs, tie_weights=False)

        return self.run(called)

    @property
    def arguments(self) -> list[Tensor]:
        """The floating tensors among the arguments that are no part of a structure."""
        return [t for t in self._values() if isinstance(t, Tensor) and t.is_floating_point()]

    @property
    def variables(self) -> list[Tensor]:
        """The tensors with gradients: arguments and parameters."""
        return [t for t in (*self.arguments, *self.layer.parameters()) if t.requires_grad and t.is_leaf]

    def mapped(self, fn: Callable[[Tensor], Tensor]) -> Use:
        """Return the layer with mapped arguments; tensors inside structures are not mapped."""
        return self._each(lambda t: fn(t) if isinstance(t, Tensor) else t)

    def on(self, fn: Callable[[Any], Any]) -> Use:
        """Return the layer with fn applied to each structure among the arguments."""
        return self._each(lambda value: value if value is None or isinstance(value, Tensor) else fn(value))

    def _each(self, fn: Callable[[Any], Any]) -> Use:
        def of(value: Any) -> Any:
            return {name: of(item) for name, item in value.items()} if isinstance(value, dict) else fn(value)

        return replace(self, args=tuple(map(of, self.args)), kwargs=of(self.kwargs))

    @property
    def structures(self) -> list[Any]:
        """The arguments that are structures."""
        return [item for item in self._values() if item is not None and not isinstance(item, Tensor)]

    def _values(self) -> list[Any]:
        """The arguments, those by name too."""
        arguments = (*self.args, *self.kwargs.values())
        return [item for value in arguments for item in (value.values() if isinstance(value, dict) else (value,))]

    def copied(self) -> Use:
        """A deep copy of the layer on the same arguments."""
        return replace(self, layer=copy.deepcopy(self.layer))


def joined(result: Any) -> Tensor:
    """The tensors of a result as one."""
    tensors = [t for t in pytree.tree_leaves(result) if isinstance(t, Tensor)]
    return tensors[0] if len(tensors) == 1 else torch.cat([t.reshape(-1) for t in tensors])


#: Makes a use again.
Make = Callable[[], Use]


def use(layer: nn.Module, *args: Any, **kwargs: Any) -> Use:
    """A use of a layer in float64, whose parameters are no zeros and whose floating arguments want a gradient."""
    layer = layer.to(torch.float64)
    with torch.no_grad():
        for parameter in layer.parameters():
            if not parameter.any():
                parameter.normal_()
    return Use(layer, args, kwargs).mapped(lambda t: t.requires_grad_() if t.is_floating_point() else t)


def seeded(make: Make) -> Make:
    """Return a function that draws equal random numbers in each call."""
    def again() -> Use:
        with random_numbers(0):
            return make()

    return again
