"""`explained`: if torch or Python fails, name the argument whose type differs from the signature."""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, TypeVar, Union, get_args, get_origin

import torch

from structconv.errors import ConfigError, StructconvError

__all__ = ["explained"]

F = TypeVar("F", bound=Callable[..., Any])
_COLLECTIONS = (Sequence, Iterable, list)


def explained(function: F) -> F:
    """Wrap a function so that a foreign error becomes a `ConfigError` if an argument's type explains it.

    Types are checked only after a failure, so that calls that work are as fast as before.
    """
    @functools.wraps(function)
    def called(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
            if not isinstance(error, StructconvError):
                _explain(function, args, kwargs)
            raise

    return called  # type: ignore[return-value]


def _explain(function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """Raise `ConfigError` for the first argument that is not of the type of its annotation."""
    signature = inspect.signature(function)
    given = signature.bind(*args, **kwargs).arguments
    hints = inspect.get_annotations(inspect.unwrap(function), eval_str=True)
    for name, value in given.items():
        if name in hints and not _fits(value, hints[name]):
            written = signature.parameters[name].annotation
            raise ConfigError(_owner(function), f"{name} must be of type {written}", _kind(value))


def _fits(value: Any, hint: Any) -> bool:
    """Return True if a value has a type, judged without its nested contents."""
    origin, inner = get_origin(hint), get_args(hint)
    if origin in (types.UnionType, Union):
        return any(_fits(value, one) for one in inner)
    if origin in _COLLECTIONS:
        if isinstance(value, (str, torch.Tensor)):
            return inner[0] is str and isinstance(value, str)
        return isinstance(value, origin) and all(_fits(item, inner[0]) for item in value)
    if origin is tuple:
        items = inner[:1] * len(value) if isinstance(value, tuple) and inner[1:] == (...,) else inner
        return isinstance(value, tuple) and len(value) == len(items) and all(map(_fits, value, items))
    if origin is Literal:
        return isinstance(value, tuple(map(type, inner)))
    if origin is not None:
        return not isinstance(origin, type) or isinstance(value, origin)
    if hint is int:
        return isinstance(value, (int, torch.SymInt)) and not isinstance(value, bool)
    if hint is float:
        return isinstance(value, (int, float, torch.SymFloat)) and not isinstance(value, bool)
    return hint is Any or not isinstance(hint, type) or isinstance(value, hint)


def _owner(function: Callable[..., Any]) -> str:
    """The function, or the class that it makes."""
    name = function.__qualname__
    return name.removesuffix(".__init__").removesuffix(".__post_init__")


def _kind(value: Any) -> str:
    held = sorted({type(item).__name__ for item in value}) if isinstance(value, (list, tuple)) else []
    return type(value).__name__ + (f" of {', '.join(held)}" if held else "")
