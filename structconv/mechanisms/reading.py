"""Names of x: select the input that each part of `|` reads, and check that a call gives all of them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, TypeVar, cast

from structconv.errors import ConfigError
from structconv.structures.named import listed_names

__all__ = ["all_named", "by_name", "called_on", "names_of_x"]

T = TypeVar("T")


def names_of_x(mechanism: Any) -> tuple[str | None, ...]:
    """The name of the x that each part of `|` reads, in order; `None` for one without a name, `ConfigError` for one
    with two."""
    return tuple(_name_of(part) for part in mechanism._branches())


def _name_of(part: Any) -> str | None:
    result = dict.fromkeys(name for module in part.modules() if (name := getattr(module, "_input_name", None)))
    if len(result) > 1:
        raise ConfigError("of", "each part of | must read one x", listed_names(result),
                          "Parts of one softmax, sum or product read the same x; only those of | may differ.")
    return next(iter(result), None)


def all_named(mixture: Any) -> tuple[str, ...]:
    """Return the names of a mixture's parts, each of which must have one."""
    names = names_of_x(mixture)
    if None in names:
        unnamed = [repr(part) for part, name in zip(mixture._branches(), names, strict=True) if name is None]
        raise ConfigError("Conv", "each part of | must name the x that it reads, as others do", ", ".join(unnamed),
                          "Say expression.of(NAME).")
    return cast("tuple[str, ...]", names)


def called_on(mechanism: Any, x: Any) -> Any:
    """Return x as a bound mechanism needs it: a tensor, or a dict by name if its parts read several, with exactly their
    names."""
    reads: tuple[str, ...] = mechanism.__dict__.get("_reads", ())
    if type(x) is not dict and not reads:
        return x
    if not reads and len(x) == 1:
        return next(iter(x.values()))
    inputs = by_name("Conv", "x", reads, x)
    return inputs if mechanism._reads_by_name else next(iter(inputs.values()))


def by_name(owner: str, argument: str, reads: Iterable[str], values: Mapping[str, T] | Any) -> Mapping[str, T]:
    """Return the arguments by name, after a check that the names are exactly those of the expression."""
    names = dict.fromkeys(reads)
    if not names or not isinstance(values, Mapping) or values.keys() != names.keys():
        present = values if isinstance(values, Mapping) else ()
        missing, left = [n for n in names if n not in present], [n for n in present if n not in names]
        raise ConfigError(owner, f"{argument} must be a dict of what the expression names, {listed_names(names)}",
                          listed_names(present) if isinstance(values, Mapping) else type(values).__name__,
                          f"Missing: {listed_names(missing)}; left over: {listed_names(left)}. Parts of | have names "
                          f"by expression.of(NAME), calls and layers by {argument}={{NAME: ...}}.")
    return values
