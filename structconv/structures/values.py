"""`structure`: the decorator that makes a class a frozen value which compilers and exporters take as an input."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, TypeVar, dataclass_transform

import torch

C = TypeVar("C", bound=type)


def fields_only(value: Any) -> dict[str, Any]:
    """What a copy of a value, or a file, has of it: its fields, and nothing that was noted beside them."""
    return {name: held for name, held in value.__dict__.items() if not name.startswith("_")}


@dataclass_transform(frozen_default=True, eq_default=False)
def structure(*, eq: bool = False, init: bool = True) -> Callable[[C], C]:
    """Make a class a frozen dataclass and register it with `torch.export.register_dataclass`.

    Its tensors and numbers become leaves of a pytree, so that `torch.compile`, `torch.export`, DDP and recomputation
    take the value as an input. They also rebuild it with stand-ins in the place of tensors and numbers, which is why
    constructors check plain tensors and plain integers only. `eq=False` compares by identity: right for a value that
    holds tensors.
    """

    def decorate(cls: C) -> C:
        made: Any = dataclasses.dataclass(frozen=True, eq=eq, repr=False, init=init)(cls)
        made.__getstate__ = fields_only
        torch.export.register_dataclass(made, serialized_type_name=f"{cls.__module__}.{cls.__qualname__}")
        return made

    return decorate
