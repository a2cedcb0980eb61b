"""`derived` computes a value from tensors once. `Reused` does so for one owner, gradients included.

Entries are keyed by identity and version: a tensor that was changed in place is a new one. Call `forget` after a write
that torch does not count, through `.data` or NumPy. Nothing is remembered for inference tensors, because torch does not
count their changes: build a structure outside of `torch.inference_mode` to have its layouts remembered inside.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable
from operator import is_
from typing import Any, TypeVar, cast

import torch
from torch import Tensor
from torch.autograd.graph import increment_version
from torch.compiler import is_compiling

from structconv import torch_compat as private

__all__ = ["Owner", "Reused", "cached", "derived", "forget", "forget_changed", "is_plain", "latest", "mark",
           "values_known"]

T = TypeVar("T")
_PLAIN = (Tensor, torch.nn.Parameter)
_COPY = "a copy, to compare with"
_NUMBERS = frozenset((bool, int, float, str, type(None), torch.dtype))


class _Entry:
    """The values derived from one owner: by key, the other tensors with their versions, and the value."""

    __slots__ = ("ref", "values", "version")

    def __init__(self, owner: object, version: int | None) -> None:
        self.ref = weakref.ref(owner, _forgets(_ENTRIES, id(owner)))
        self.version = version
        self.values: dict[Hashable, tuple[tuple[Any, ...], Any]] = {}


_ENTRIES: dict[int, _Entry] = {}
_MARKS: dict[int, tuple[weakref.ref[Any], object]] = {}


def derived(owner: Any, key: Hashable, build: Callable[[], T], *, numbers: bool = False) -> T:
    """`build()`, remembered under `key` for as long as `owner` lives unchanged.

    Args:
        owner: a tensor, a tuple of tensors, or a value that holds some (a structure, a basis). A value is known by
            the identity of its tensors and by all else that it holds, so that equal values over the same tensors share
            what is derived; one without tensors by its own identity.
        build: its result must not hold the owner's first tensor, or neither would ever be freed. It runs without
            gradients and outside of every mode of the caller: inference, transforms, fake tensors, autocast.
        numbers: True if the result serves also when the owner requires a gradient: for numbers that a kernel reads,
            never for a part of an expression.

    Nothing is remembered while a compiler traces, nor when a tensor of the owner requires a gradient, is a stand-in or
    an inference tensor; `build` then runs again in each call. O(1) when remembered.
    """
    if is_compiling():
        return build()
    if isinstance(owner, Tensor):
        tensors: tuple[Tensor, ...] = (owner,)
    elif isinstance(owner, tuple):
        tensors = owner
    else:
        tensors, rest = owner.__dict__.get("_content") or _content(owner)
        key = (rest, key)
    first: Any = tensors[0] if tensors else owner
    entry = _ENTRIES.get(id(first))
    if entry is not None and entry.ref() is first and (not tensors or (
            entry.version == private.known_version(tensors[0]) and (numbers or not tensors[0].requires_grad))):
        known = entry.values.get(key)
        if known is not None and (len(tensors) < 2 if not known[0] else _same(known[0], tensors[1:], numbers)):
            return known[1]
    return _build(first, tensors, key, build, numbers)


def _build(first: Any, tensors: tuple[Tensor, ...], key: Hashable, build: Callable[[], T], numbers: bool) -> T:
    if (not numbers and any(t.requires_grad for t in tensors)) or not all(map(is_plain, tensors)):
        return build()
    versions = [private.version(t) for t in tensors]
    value = private.outside_modes(build)
    assert all(t is not first for t in _tensors(value)), "a derived value must not hold its owner"
    if None in versions:
        return value
    entry = _ENTRIES.get(id(first))
    version = versions[0] if versions else None
    if entry is None or entry.ref() is not first or entry.version != version:
        entry = _ENTRIES[id(first)] = _Entry(first, version)
    marks = tuple((weakref.ref(t), v) for t, v in zip(tensors[1:], versions[1:], strict=True))
    entry.values[key] = marks, value
    return value


def latest(owner: Any, name: str, key: Hashable, build: Callable[[], T]) -> T:
    """Like `derived`, but remember only the last `key` of each `name`: for sizes that change often."""
    if is_compiling() or (isinstance(owner, Tensor) and owner.requires_grad):
        return build()
    of_last: dict[Hashable, T] = derived(owner, name, dict)
    state = key, torch.is_grad_enabled()
    if state not in of_last:
        value = private.outside_modes(build)
        of_last.clear()
        of_last[state] = value
    return of_last[state]


def cached(owner: Tensor, key: Hashable, build: Callable[[], T]) -> T:
    """A faster `derived` without its checks: the owner is a plain tensor without a gradient, such as a list of edges;
    no mode of the caller changes the result, which does not hold the owner."""
    entry, version = _ENTRIES.get(id(owner)), None if owner.is_inference() else owner._version
    if entry is None or entry.version != version or entry.ref() is not owner:
        value = build()
        if version is None:
            return value
        entry = _ENTRIES[id(owner)] = _Entry(owner, version)
    elif (known := entry.values.get(key)) is not None and not known[0]:  # otherwise it is derived of several tensors
        return cast(T, known[1])
    else:
        value = build()
    entry.values[key] = (), value
    return value


class Owner:
    """An object whose `derived` values are freed with it: for what makes many calls of equal sizes, such as a plan."""


class Reused:
    """The last value computed from some tensors, remembered until they change by an object that makes many calls with
    them."""

    def __init__(self) -> None:
        self._last: tuple[Hashable, tuple[Tensor, ...], Any] = None, (), None

    def of(self, tensors: tuple[Tensor, ...], key: Hashable, build: Callable[[], T]) -> T:
        """`build()`, or what it gave before; of inference tensors always `build()`."""
        versions = [private.version(t) for t in tensors]
        if None in versions:
            return build()
        state = key, torch.is_grad_enabled(), *[(v, t.requires_grad) for v, t in zip(versions, tensors, strict=True)]
        known, others, value = self._last
        if known != state or not all(map(is_, tensors, others)):
            value = build()
            self._last = state, tensors, value
        return cast(T, value)


def forget(owner: Any) -> None:
    """Forget what was derived from the tensors of `owner`, after a change that torch does not count."""
    for t in _tensors(owner) or [owner]:
        _ENTRIES.pop(id(t), None)
        if weakref.getweakrefcount(t):  # what is derived of others and of it
            for entry in [*_ENTRIES.values()]:
                for key, (others, _) in [*entry.values.items()]:
                    if any(ref() is t for ref, _ in others):
                        entry.values.pop(key, None)


def forget_changed(t: Tensor) -> None:
    """Count a change of the tensor by a NumPy array that shares its memory, as torch counts its own changes in place.

    O(E) for a tensor whose memory is shared, which cannot be resized; O(1) for others.
    """
    if is_compiling() or type(t) not in _PLAIN or private.is_functional(t) or private.is_batched(t):
        return
    if t.untyped_storage().resizable() or t.requires_grad or t.is_inference():  # the latter are not remembered
        return
    entry = _ENTRIES.get(id(t))
    known = None if entry is None or entry.ref() is not t or entry.version != t._version else entry.values.get(_COPY)
    if known is not None and (torch.equal(t, known[1]) or torch.allclose(t, known[1], 0, 0, equal_nan=True)):
        return
    if known is None:
        forget(t)
    else:
        increment_version(t)  # what is derived of other tensors too is kept with those
    cached(t, _COPY, t.clone)


def _forgets(known: dict[int, Any], number: int) -> Callable[[object], object]:
    """Return the callback that drops an object's entry when the object is freed, also at the end of the process."""
    return lambda _: known.pop(number, None)


def mark(value: Any) -> Hashable:
    """Return a key of an object that is unique while the object lives."""
    entry = _MARKS.get(id(value))
    if entry is not None and entry[0]() is value:
        return entry[1]
    try:
        ref = weakref.ref(value, _forgets(_MARKS, id(value)))
    except TypeError:  # nothing tells when it goes, so that it is like nothing else
        return object()
    _MARKS[id(value)] = ref, object()
    return _MARKS[id(value)][1]


def is_plain(value: Any) -> bool:
    """Return True if `value` is a tensor whose numbers Python may read: not traced, not transformed, not meta."""
    return not (type(value) not in _PLAIN or is_compiling() or value.is_meta or private.is_functional(value)
                or private.is_batched(value))


def values_known(*tensors: Tensor) -> bool:
    """Return True if results may depend on the numbers in these tensors: no compiler, tracer or transform is active."""
    return (not private.transforms_active() and all(map(is_plain, tensors))
            and not (private.dispatch_modes() and _recording()))


def _recording() -> bool:
    """Return True if `make_fx` or `torch.func.linearize` records operators, which refuse to give numbers."""
    from torch.fx.experimental.proxy_tensor import get_proxy_mode  # imports SymPy
    return get_proxy_mode() is not None


class _Rest:
    """The contents of a value beside its tensors, hashed once."""

    __slots__ = ("content", "number")

    def __init__(self, content: Hashable) -> None:
        self.content, self.number = content, hash(content)

    def __hash__(self) -> int:
        return self.number

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, _Rest) and self.content == other.content)


def _content(value: Any) -> tuple[tuple[Tensor, ...], _Rest]:
    """The tensors of a value in the order of its fields, and the rest; noted beside its fields, which are frozen."""
    content = tuple(_tensors(value)), _Rest(_rest(value))
    if "_base" not in value.__dict__:  # tensors of a value over another one are made again when that changes
        value.__dict__["_content"] = content
    return content


def _fields(value: Any) -> list[Any]:
    return [getattr(value, name) for name in getattr(value, "__dataclass_fields__", ())]


def _tensors(value: Any) -> list[Tensor]:
    """Return the tensors of a value in the order of its fields; written as loops because new graphs call it often."""
    if isinstance(value, Tensor):
        return [value]
    tensors: list[Tensor] = []
    for item in value if isinstance(value, tuple | list) else _fields(value):
        if isinstance(item, Tensor):
            tensors.append(item)
        elif type(item) not in _NUMBERS:
            tensors += _tensors(item)
    return tensors


def _rest(value: Any) -> Hashable:
    if isinstance(value, Tensor):
        return None
    if isinstance(value, tuple | list):
        return tuple(map(_rest, value))
    fields = _fields(value)
    return (type(value), *map(_rest, fields)) if fields else value


def _same(marks: tuple[Any, ...], others: tuple[Tensor, ...], numbers: bool) -> bool:
    if len(marks) != len(others):
        return False
    for (ref, version), t in zip(marks, others, strict=True):
        if ref() is not t or version != private.known_version(t) or (t.requires_grad and not numbers):
            return False
    return True
