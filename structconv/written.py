"""`written`: the constructor arguments of a module as text, for its `repr`."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

__all__ = ["one_or_each", "text", "written"]

_MODULES = {"torch": torch, "torch.nn": torch.nn, "torch.nn.functional": torch.nn.functional}
_ABSENT = object()


def written(module: object, others: Mapping[str, Any] | None = None) -> str:
    """The arguments of an object's constructor that have no default or differ from it. The value of one is the
    attribute of its name, of its name followed by `_by`, or preceded by `_`; those of `others`, and without attribute,
    are left out."""
    result, attrs, by_name = [], {**vars(module), **getattr(module, "_modules", {}), **(others or {})}, False
    for name, parameter in inspect.signature(type(module)).parameters.items():
        value = next((attrs[own] for own in (name, f"{name}_by", f"_{name}") if own in attrs), _ABSENT)
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD) or name == "structure":
            continue
        if value is _ABSENT or _same(value, parameter.default):
            by_name = True
            continue
        by_name = by_name or parameter.default is not parameter.empty or parameter.kind is parameter.KEYWORD_ONLY
        result.append(f"{name}={text(value)}" if by_name else text(value))
    return ", ".join(result)


def text(value: Any) -> str:
    """The value as Python text; torch's functions and classes by the names that they have there."""
    name = getattr(value, "__name__", None)
    for home, names in _MODULES.items():
        if name is not None and getattr(names, name, None) is value:
            return f"{home}.{name}"
    if type(value) is partial:
        named = [f"{name}={text(argument)}" for name, argument in value.keywords.items()]
        return f"functools.partial({', '.join([text(value.func), *map(text, value.args), *named])})"
    return repr(value)


def one_or_each(sizes: tuple[Any, ...]) -> Any:
    """Return the size of all axes if it is the same, else the sizes."""
    return sizes[0] if len(set(sizes)) == 1 else sizes


def _same(value: Any, default: Any) -> bool:
    if value is default:
        return True
    return type(value) is type(default) and not isinstance(value, Tensor) and bool(value == default)
