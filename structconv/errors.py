"""The errors of structconv, one format for all of them.

Every message names the owner, what was expected, what came, and the remedy::

    Conv: x must have shape (..., M=2708, P=1433); got (2708, 1000). Channels are dim -1.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable

__all__ = ["ConfigError", "DataError", "ShapeError", "StructconvError", "StructureError"]


_MOST_LETTERS = 400


def _brief(got: object) -> str:
    """The value in one line that a terminal can show."""
    text = " ".join(str(got).split())
    return text if len(text) <= _MOST_LETTERS else f"{text[:_MOST_LETTERS]} ..."


def _message(owner: str, expected: str, got: object, remedy: str) -> str:
    message = f"{owner}: {expected}; got {_brief(got)}."
    return f"{message} {remedy}" if remedy else message


def nearest(name: str, known: Iterable[str]) -> str:
    """The question whether the nearest of the known names was meant; empty where none is near."""
    near = difflib.get_close_matches(name, list(known), n=1, cutoff=0.5)
    return f"Did you mean {near[0]!r}?" if near else ""


def class_remedy(value: object) -> str:
    """What to do where a class was passed instead of an object; empty for an object."""
    return f"{value.__name__} is a class: write {value.__name__}(...)." if isinstance(value, type) else ""


class StructconvError(ValueError):
    """Base of the library's errors; a `ValueError`, so that `except ValueError` keeps working.

    Args:
        owner: the class, function or layer that raises, as its user wrote it.
        expected: the sentence's first half, ``"x must have shape (..., M, P)"``.
        got: the actual value, printed unchanged.
        remedy: what to do about it; a whole sentence, or nothing.

    Example:

        >>> from structconv.errors import StructconvError
        >>> raise StructconvError("MyLayer", "kernel_size must be odd", 4, "Take 3 or 5.")
        Traceback (most recent call last):
        structconv.errors.StructconvError: MyLayer: kernel_size must be odd; got 4. Take 3 or 5.
    """

    def __init__(self, owner: str, expected: str, got: object, remedy: str = "") -> None:
        if IS_COMPILING():
            _raise_now(type(self), owner, expected, _written(got), remedy)
        super().__init__(_message(owner, expected, got, remedy))
        self.owner = owner

    def rename(self, owner: str) -> None:
        """Name another owner in the message."""
        self.args = (owner + self.args[0].removeprefix(self.owner),)
        self.owner = owner


def text_of(shape: Iterable[object]) -> str:
    """A shape, as its tuple prints. A compiler writes symbolic sizes in a text of its own, but not those of a tuple."""
    items = [f"{item!r}" for item in shape]
    return f"({', '.join(items)}{',' if len(items) == 1 else ''})"


def _written(got: object) -> object:
    """The value for `_raise_now`: a compiler writes symbolic sizes as text, but does not pass them to a function."""
    if isinstance(got, tuple):
        return text_of(got)
    return f"{got}" if isinstance(got, int) else got


def _raise_now(kind: type[StructconvError], owner: str, expected: str, got: object, remedy: str) -> None:
    """Raise the error outside of the compiler, which would report an exception without this message."""
    error = kind.__new__(kind)
    error.args, error.owner = (_message(owner, expected, got, remedy),), owner
    raise error


#: Return True while torch compiles; `torch_compat` sets it when torch is imported, which this module does not need.
IS_COMPILING: Callable[[], bool] = bool


class ShapeError(StructconvError):
    """Sizes, dtypes or devices of tensors that do not fit each other.

    Example:

        >>> from structconv import Conv, Identity, ShapeError
        >>> try:
        ...     Conv(Identity(), 4, 8)(torch.randn(5, 3))
        ... except ShapeError as error:
        ...     print(error)
        Conv: x must have shape (..., M, P=4); got (5, 3). Entries are dim -2, channels dim -1.
    """


class StructureError(StructconvError):
    """A structure that cannot exist: an index out of range, a mask of the wrong length, a missing grid.

    Example:

        >>> from structconv import Graph, StructureError
        >>> try:
        ...     Graph(torch.tensor([[0], [7]]), num_nodes=4)
        ... except StructureError as error:
        ...     print(error)
        Graph: edge_index must be in [0, num_outputs=4) in row 1; got 7 at edge 0. Is num_outputs too small?
    """


class ConfigError(StructconvError):
    """An option of a layer, mechanism or recipe is invalid.

    Example:

        >>> from structconv import ConfigError, MultiheadAttention
        >>> try:
        ...     MultiheadAttention(10, 4)
        ... except ConfigError as error:
        ...     print(error)
        MultiheadAttention: num_heads must divide embed_dim=10; got num_heads=4.
    """


class ArgumentsError(ConfigError, TypeError):
    """A call has an unknown argument, lacks one, or has too many; a `TypeError` too, as Python's own."""


class DataError(StructureError):
    """A file is torn or empty, or a line of it cannot be read.

    Args:
        path: the file, as its user named it.
        expected: the content that the file must have, ``"ten columns"``.
        got: the content that it has.
        line: the number of the line, from 1; `None` for the whole file.
        remedy: what to do about it; a whole sentence, or nothing.

    Example:

        >>> from structconv.errors import DataError
        >>> raise DataError("graph.csv", "two columns", "1;2", line=7)
        Traceback (most recent call last):
        structconv.errors.DataError: graph.csv, line 7: expected two columns; got 1;2.
    """

    def __init__(self, path: object, expected: str, got: object, line: int | None = None, remedy: str = "") -> None:
        super().__init__(str(path) if line is None else f"{path}, line {line}", f"expected {expected}", got, remedy)
