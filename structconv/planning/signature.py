"""Keys by which plans are remembered: the shapes and types of a basis or Theta, and never a value."""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Callable, Hashable
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from structconv.bases.base import Basis
from structconv.structures.graph import Graph
from structconv.structures.grid import Grid
from structconv.theta import Theta

#: Objects whose key is remembered, and distinct keys, before either memo starts anew.
RECALLED = 4096
_Reader = Callable[[Any], Hashable]
_READERS: dict[type, _Reader] = {}
_RECALLED: dict[int, tuple[weakref.ref[Any], object]] = {}
_TOKENS: dict[Hashable, object] = {}


def signature(value: Any) -> Hashable:
    """The shapes and types that a plan for a basis may depend on, as a key. O(nodes of the expression)."""
    kind = type(value)
    reader = _READERS.get(kind)
    if reader is None:
        reader = _READERS[kind] = _reader(kind)
    return reader(value)


def token(value: Basis | Theta) -> object:
    """An object that stands for `signature(value)`: one and the same for equal keys, and quick to hash and compare.

    O(1) for a basis or Theta that was seen before: they are frozen, so that its key holds as long as it lives.
    """
    known = _RECALLED.get(id(value))
    if known is not None and known[0]() is value:
        return known[1]
    key = signature(value)
    found = _TOKENS.get(key)
    if found is None:
        if len(_TOKENS) >= RECALLED:
            _TOKENS.clear()
            _RECALLED.clear()
        found = _TOKENS[key] = object()
    if len(_RECALLED) >= RECALLED:
        _RECALLED.clear()
    _RECALLED[id(value)] = weakref.ref(value), found
    return found


def coarse(key: Any) -> Any:
    """A key with every size above 64 rounded up to a power of two: the class of shapes that share a measurement."""
    if isinstance(key, tuple):
        return tuple(map(coarse, key))
    if type(key) is int and key > 64:
        return 1 << (key - 1).bit_length()
    return key


def _reader(kind: type) -> _Reader:
    """How a value of this type is read."""
    if issubclass(kind, Tensor):
        return attrgetter("shape")
    if issubclass(kind, Graph):
        return lambda graph: (graph.num_edges, graph.num_inputs, graph.num_outputs)
    if issubclass(kind, Grid | int | str | torch.device):
        return lambda value: value
    if issubclass(kind, tuple):
        return lambda items: items if _holds_integers(items) else tuple(map(signature, items))
    if dataclasses.is_dataclass(kind):
        return _dataclass_reader(kind)
    if issubclass(kind, Basis):
        return lambda basis: (kind, basis.size, basis.num_inputs, basis.num_outputs, basis.batch_shape)
    return lambda value: str(getattr(value, "__qualname__", kind))


def _dataclass_reader(kind: type) -> _Reader:
    names = [field.name for field in dataclasses.fields(kind)]
    if not names:
        return lambda value: kind
    fields = attrgetter(*names)
    if len(names) == 1:
        return lambda value: (kind, signature(fields(value)))
    return lambda value: (kind, *map(signature, fields(value)))


def _holds_integers(value: tuple[Any, ...]) -> bool:
    """Whether a tuple is one of integers or of tuples of integers (offsets, strides), judged by its first item."""
    while value and isinstance(value[0], tuple):
        value = value[0]
    return bool(value) and type(value[0]) is int
