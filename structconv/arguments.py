"""`checked` and `explained`: compare arguments with a signature, and name the one that differs."""

from __future__ import annotations

import functools
import inspect
import operator
import re
import types
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, Literal, TypeVar, Union, get_args, get_origin

import numpy as np
import torch

from structconv.errors import ArgumentsError, ConfigError, StructconvError, class_remedy, nearest
from structconv.shapes import check_device

__all__ = ["check_arguments", "check_constructor", "checked", "explained", "is_own", "plain", "suggesting"]

F = TypeVar("F", bound=Callable[..., Any])
_ATOMS = frozenset({bool, int, float, str, types.NoneType})
_INTEGERS = frozenset({torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64})
_COLLECTIONS = (Sequence, Iterable, Collection, list)
#: Errors of torch and Python that a wrong argument may cause.
_FOREIGN = (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)
_VARIADIC = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
_UNKNOWN = re.compile(r"got an unexpected keyword argument '(\w+)'")
_MISSING = re.compile(r"missing a required .*: ('\w+')")
#: The type of each parameter, and its annotation as text.
Hints = Mapping[str, tuple[Any, str]]


def checked(function: F) -> F:
    """Wrap a constructor so that an argument of another type than its annotation is a `ConfigError`, in each call:
    after the constructor's own checks, whose errors say more. Numbers of NumPy, and of tensors without dimensions,
    become Python's."""
    function = explained(function)

    @functools.wraps(function)
    def called(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return function(*args, **kwargs)
        owner, (names, hints) = type(args[0]).__name__, _typed(function)
        if kwargs.get("device") is not None:
            check_device(owner, kwargs["device"])
        args = tuple(map(plain, args))
        kwargs = {name: plain(value) for name, value in kwargs.items()}
        function(*args, **kwargs)
        _check(owner, hints, (*zip(names, args), *kwargs.items()))  # noqa: B905 - of a shorter call
        return None

    return called  # type: ignore[return-value]


def is_own(definition: Any) -> bool:
    """Return True for a class or function of this library, False for one of the user's."""
    return (definition.__module__ or "").startswith("structconv.")


def check_constructor(cls: type) -> None:
    """Let the constructor that a class defines name arguments of a wrong type: in each call, or after a failure, for
    classes of users, whose annotations need not be exact. One that does not call that of `torch.nn.Module` is an
    error."""
    if "__init__" in cls.__dict__:
        own = cls.__dict__["__init__"]
        cls.__init__ = checked(own) if is_own(cls) else _complete(own)  # type: ignore[misc]


def _complete(constructor: F) -> F:
    """Wrap the constructor of a user's class so that a module without `super().__init__()` is a `ConfigError`."""
    function = explained(constructor)

    @functools.wraps(constructor)
    def called(self: Any, *args: Any, **kwargs: Any) -> None:
        try:
            function(self, *args, **kwargs)
        except AttributeError:
            _check_module(self)
            raise
        _check_module(self)

    return called  # type: ignore[return-value]


def _check_module(module: Any) -> None:
    if isinstance(module, torch.nn.Module) and "_modules" not in module.__dict__:
        raise ConfigError(type(module).__name__, "__init__ must call super().__init__() in its first line",
                          "a constructor without it", "Parameters and submodules cannot be registered before.")


def check_arguments(function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
                    ) -> inspect.BoundArguments:
    """Return the arguments by name. Those that the signature of a function does not have are an `ArgumentsError`, which
    names the nearest."""
    try:
        return inspect.signature(function).bind(*args, **kwargs)
    except TypeError as misfit:
        raise _misfit(function, args, kwargs, str(misfit)) from None


def explained(function: F) -> F:
    """Wrap a function so that a foreign error becomes a `ConfigError` if an argument's name or type explains it:
    checked only after a failure, so that calls that work are as fast as before."""
    @functools.wraps(function)
    def called(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except _FOREIGN as error:
            if not isinstance(error, StructconvError):
                _explain(function, args, kwargs, error)
            raise

    return called  # type: ignore[return-value]


def suggesting(function: F) -> F:
    """Wrap a function of another library so that unknown, missing and excess arguments are an `ArgumentsError`."""
    @functools.wraps(function)
    def called(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except TypeError:
            check_arguments(function, args, kwargs)
            raise

    return called  # type: ignore[return-value]


def _explain(function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any],
             error: Exception) -> None:
    """Raise an error for arguments that the signature does not have, or for the first of another type than its own."""
    bound = check_arguments(function, args, kwargs)
    signature, arguments = bound.signature, bound.arguments
    passed_on = _UNKNOWN.search(str(error))
    if passed_on and passed_on[1] in kwargs and passed_on[1] not in signature.parameters:
        raise _misfit(function, args, kwargs, passed_on[0]) from None
    owner = function.__qualname__.removesuffix(".__init__").removesuffix(".__post_init__")
    try:
        hints = _typed(function)[1]
    except (AttributeError, NameError, TypeError):
        return  # annotations that only a type checker can read
    _check(owner, hints, arguments.items())


def _misfit(function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any], reason: str
            ) -> ArgumentsError:
    """The error for a call with an unknown or a missing argument, or with too many; it names the nearest known one."""
    names, owner = _names(function), function.__qualname__
    known = set(names)
    if args and names[:1] == ["self"]:
        kind, owner = type(args[0]), f"{type(args[0]).__name__}.{function.__name__}"
        if function.__name__ == "__init__":
            constructors = [vars(base)["__init__"] for base in kind.__mro__ if "__init__" in vars(base)]
            owner, names = kind.__name__, _names(constructors[0])
            known.update(*map(_names, constructors))
        names = names[1:]
    unknown, late = [name for name in kwargs if name not in known], "*" in names
    missing = _MISSING.search(reason)
    got = repr(unknown[0]) if unknown else f"no {missing[1]}" if missing else reason.removeprefix("got ")
    remedy = nearest(unknown[0], known) if unknown else "" if missing else "Those after * go by keyword." * late
    return ArgumentsError(owner, f"arguments must be ({', '.join(names)})", got, remedy)


def _names(function: Callable[..., Any]) -> list[str]:
    """The names of a function's parameters, with * before those that go by keyword, and ... for any others."""
    names, kinds = [], inspect.Parameter
    for name, parameter in inspect.signature(function).parameters.items():
        if parameter.kind is kinds.KEYWORD_ONLY and "*" not in names:
            names.append("*")
        names.append("..." if parameter.kind in _VARIADIC else name)
    return names


def _check(owner: str, hints: Hints, arguments: Iterable[tuple[str, Any]]) -> None:
    for name, value in arguments:
        if name in hints and not _fits(value, hints[name][0]):
            raise ConfigError(owner, f"{name} must be of type {hints[name][1]}", _kind(value), class_remedy(value))


@functools.cache
def _typed(function: Callable[..., Any]) -> tuple[tuple[str, ...], Hints]:
    """The names of the parameters, and the types of those that are checked, each with its text."""
    parameters = inspect.signature(function).parameters
    hints = inspect.get_annotations(inspect.unwrap(function), eval_str=True)
    return tuple(parameters), {
        name: (Union[hints[name], None] if parameter.default is None else hints[name],  # noqa: UP007 - of any hint
               parameter.annotation if isinstance(parameter.annotation, str) else inspect.formatannotation(hints[name]))
        for name, parameter in parameters.items() if name in hints and parameter.kind not in _VARIADIC}


def plain(value: Any) -> Any:
    """Return a number of NumPy, or a tensor of one integer, as Python's number, also within a list or a tuple."""
    kind = type(value)
    if kind in _ATOMS:
        return value
    if kind in (list, tuple):
        items = kind(map(plain, value))
        return value if all(map(operator.is_, items, value)) else items
    if isinstance(value, np.generic) or (kind is np.ndarray and value.shape == ()):
        return value.item()
    if kind is torch.Tensor and value.shape == () and value.dtype in _INTEGERS and value.device.type != "meta":
        return value.item()
    return value


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
    protocol = getattr(hint, "_is_protocol", False)
    return hint is Any or protocol or not isinstance(hint, type) or isinstance(value, hint)


def _kind(value: Any) -> str:
    if isinstance(value, type):
        return f"the class {value.__name__}"
    types = sorted({type(item).__name__ for item in value}) if isinstance(value, (list, tuple)) else []
    return type(value).__name__ + (f" of {', '.join(types)}" if types else "")
