"""`checked` and `explained`: compare arguments with the types of a signature, and name the one that differs."""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, Literal, TypeVar, Union, get_args, get_origin

import numpy as np
import torch

from structconv.errors import ConfigError, StructconvError
from structconv.shapes import check_device

__all__ = ["check_constructor", "checked", "explained"]

F = TypeVar("F", bound=Callable[..., Any])
_COLLECTIONS = (Sequence, Iterable, Collection, list)
#: Errors of torch and Python that a wrong argument may cause.
_FOREIGN = (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)
#: Of each parameter its type, and how its annotation is written.
Hints = Mapping[str, tuple[Any, str]]


def checked(function: F) -> F:
    """Wrap a constructor so that an argument of another type than its annotation is a `ConfigError`.

    Types are checked in each call, for what is made once: a layer, a mechanism, a loader. The constructor's own checks
    come first, since their errors say more.
    """
    function = explained(function)

    @functools.wraps(function)
    def called(*args: Any, **kwargs: Any) -> Any:
        if not torch.compiler.is_compiling() and kwargs.get("device") is not None:
            check_device(type(args[0]).__name__, kwargs["device"])
        function(*args, **kwargs)
        if not torch.compiler.is_compiling():
            owner, (names, hints) = type(args[0]).__name__, _typed(function)
            _check(owner, hints, (*zip(names, args), *kwargs.items()))  # noqa: B905 - of a shorter call

    return called  # type: ignore[return-value]


def check_constructor(cls: type) -> None:
    """Let the constructor that a class defines name arguments of a wrong type: in each call, or after a failure.

    The latter is for classes of users, whose annotations need not be exact.
    """
    if "__init__" in cls.__dict__:
        wrap = checked if cls.__module__.startswith("structconv.") else explained
        cls.__init__ = wrap(cls.__dict__["__init__"])  # type: ignore[misc]


def explained(function: F) -> F:
    """Wrap a function so that a foreign error becomes a `ConfigError` if an argument's type explains it.

    Types are checked only after a failure, so that calls that work are as fast as before.
    """
    @functools.wraps(function)
    def called(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except _FOREIGN as error:
            if not isinstance(error, StructconvError):
                _explain(function, args, kwargs)
            raise

    return called  # type: ignore[return-value]


def _explain(function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """Raise `ConfigError` for the first argument that is not of the type of its annotation."""
    owner = function.__qualname__.removesuffix(".__init__").removesuffix(".__post_init__")
    _check(owner, _typed(function)[1], inspect.signature(function).bind(*args, **kwargs).arguments.items())


def _check(owner: str, hints: Hints, arguments: Iterable[tuple[str, Any]]) -> None:
    for name, value in arguments:
        if name in hints and not _fits(value, hints[name][0]):
            raise ConfigError(owner, f"{name} must be of type {hints[name][1]}", _kind(value))


@functools.cache
def _typed(function: Callable[..., Any]) -> tuple[tuple[str, ...], Hints]:
    """The names of the parameters, and the types of those that are checked, each with its text."""
    parameters = inspect.signature(function).parameters
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    hints = inspect.get_annotations(inspect.unwrap(function), eval_str=True)
    return tuple(parameters), {name: (hints[name], str(parameter.annotation)) for name, parameter in parameters.items()
                               if name in hints and parameter.kind not in variadic}


def _fits(value: Any, hint: Any) -> bool:
    """Return True if a value has a type, judged without its nested contents."""
    origin, inner = get_origin(hint), get_args(hint)
    if origin in (types.UnionType, Union):
        return any(_fits(value, one) for one in inner)
    if origin in _COLLECTIONS:
        if isinstance(value, (str, torch.Tensor)):
            return inner[0] is str and isinstance(value, str)
        return isinstance(value, origin) and (
            not isinstance(value, Collection) or all(_fits(item, inner[0]) for item in value))
    if origin is tuple:
        items = inner[:1] * len(value) if isinstance(value, tuple) and inner[1:] == (...,) else inner
        return isinstance(value, tuple) and len(value) == len(items) and all(map(_fits, value, items))
    if origin is Literal:
        return isinstance(value, tuple(map(type, inner)))
    if origin is not None:
        return not isinstance(origin, type) or isinstance(value, origin)
    if hint is bool:
        return isinstance(value, (bool, np.bool_, torch.SymBool))
    if hint is int:
        return isinstance(value, (int, np.integer, torch.SymInt)) and not isinstance(value, bool)
    if hint is float:
        return isinstance(value, (int, float, np.number, torch.SymInt, torch.SymFloat)) and not isinstance(value, bool)
    return hint is Any or not isinstance(hint, type) or isinstance(value, hint)


def _kind(value: Any) -> str:
    held = sorted({type(item).__name__ for item in value}) if isinstance(value, (list, tuple)) else []
    return type(value).__name__ + (f" of {', '.join(held)}" if held else "")
