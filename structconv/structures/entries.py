"""`Entries`: a number of entries that shows what of a spec depends on it."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any, ClassVar

from structconv.structures.values import FrozenValue, field_names, fields

__all__ = ["Entries", "show_use"]


class Entries:
    """Stands for a number of entries and shows where it is used: in what a spec holds, or in anything else made of it.

    What is computed of it and of integers is one again. Nothing else shows where it comes from (a real number as in
    `0.5 * M`, an index, a text, which of two numbers is larger), so that it is counted how often such was made.
    """

    __slots__ = ("number",)
    measured: ClassVar[int] = 0

    def __init__(self, number: int) -> None:
        self.number = number

    def __eq__(self, other: object) -> bool:
        return bool(self.number == _number(other))

    def __hash__(self) -> int:
        return hash(self.number)

    def __repr__(self) -> str:
        return repr(self.number)

    def __getattr__(self, name: str) -> Any:
        return _measured(getattr(self.number, name))


def _number(value: Any) -> Any:
    return value.number if isinstance(value, Entries) else value


def _measured(made: Any) -> Any:
    """What was made of a number of entries, itself one if it is an integer."""
    if type(made) is int:
        return Entries(made)
    Entries.measured += 1
    return made


def _operator(function: Callable[..., Any]) -> Callable[..., Any]:
    """An operator of numbers, for numbers of entries."""
    return lambda entries, *others: _measured(function(entries.number, *map(_number, others)))


def _reflected(function: Callable[..., Any]) -> Callable[..., Any]:
    """The same for one on its right."""
    return lambda entries, other: _measured(function(_number(other), entries.number))


def _plain(function: Callable[..., Any]) -> Callable[..., Any]:
    """What makes plain data of a number."""
    def made(entries: Entries, *options: Any) -> Any:
        Entries.measured += 1
        return function(entries.number, *options)

    return made


_BINARY: tuple[Callable[..., Any], ...] = (
    operator.add, operator.sub, operator.mul, operator.floordiv, operator.mod, operator.truediv, operator.and_,
    operator.or_, operator.xor, operator.lshift, operator.rshift, pow, divmod)
_OTHERS: tuple[Callable[..., Any], ...] = (
    operator.neg, operator.pos, operator.abs, operator.invert, operator.lt, operator.le, operator.gt, operator.ge,
    round)
_PLAIN: dict[str, Callable[..., Any]] = {"int": int, "index": int, "float": float, "bool": bool, "str": str,
                                         "format": format}
for _function in (*_BINARY, *_OTHERS):
    setattr(Entries, f"__{_function.__name__.strip('_')}__", _operator(_function))
for _function in _BINARY:
    setattr(Entries, f"__r{_function.__name__.strip('_')}__", _reflected(_function))
for _name, _function in _PLAIN.items():
    setattr(Entries, f"__{_name}__", _plain(_function))


def show_use(make: Callable[[], Any]) -> None:
    """Count it where a spec, made of `Entries` for once, says more of them than how many entries its values have.

    It was made of plain numbers before, so that where it fails now, something takes only such.
    """
    try:
        spec = make()
    except Exception:
        Entries.measured += 1
    else:
        Entries.measured += _holds(spec)


def _holds(value: Any) -> bool:
    """Whether a spec holds a number of entries elsewhere than among the counts of its values, as an option of one."""
    if isinstance(value, FrozenValue):
        return any(_holds(field) for name, field in zip(field_names(value), fields(value), strict=True)
                   if name not in value.ENTRY_COUNTS)
    return any(map(_holds, value)) if isinstance(value, tuple | list) else isinstance(value, Entries)
