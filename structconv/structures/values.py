"""The base of frozen values: inputs of compilers and exporters, with a key, mapped over tensors."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable, Hashable, Iterable
from functools import cached_property, partial
from types import BuiltinFunctionType, FunctionType, MethodDescriptorType, MethodType, WrapperDescriptorType
from typing import Any, ClassVar, Self, TypeVar, cast, dataclass_transform

import numpy as np
import torch
from torch import Tensor

from structconv.arguments import explained
from structconv.derived import forget, mark
from structconv.errors import ConfigError
from structconv.torch_compat import pytree

__all__ = ["NOTED", "VALUES", "FrozenValue", "Structure", "class_volume", "frozen", "key_of", "map_tensors",
           "size_class", "static", "structure", "tensors_in"]

C = TypeVar("C", bound=type)
#: Names under which something is noted beside the fields of a value: what is static of it, what it is known by in the
#: entries, and which leaf of a call it stands for (`bases.tree`).
NOTED = frozenset(("static_key", "_known_key", "_content", "_get", "_reversed", "_base", "_looped", "_covered"))
#: Types whose values never change and are known by themselves.
VALUES = frozenset((bool, int, str, bytes, type(None), torch.dtype, torch.device, torch.Size, BuiltinFunctionType,
                    MethodDescriptorType, WrapperDescriptorType))
#: Sizes up to which each is a class of its own; larger ones share it with those of the same quarter octave.
EXACT = 64


class FrozenValue:
    """A frozen dataclass: what it holds never changes, so that what is noted beside its fields stays true."""

    #: True if the class was made by `@structure`.
    is_structure: ClassVar[bool] = False
    #: Fields that count entries or edges, or that are tensors without an axis of channels.
    ENTRY_COUNTS: ClassVar[tuple[str, ...]] = ()
    #: Fields that belong to the context of a pytree and are not leaves: names.
    NAMES: ClassVar[tuple[str, ...]] = ()
    #: Fields that the constructor finds from others; they are no part of a pytree.
    DERIVED: ClassVar[tuple[str, ...]] = ()

    @cached_property
    def static_key(self) -> Hashable:
        """The static side: types, options, dtypes, and the classes of sizes; equal for all that one plan serves."""
        return self._static()

    def _static(self) -> Hashable:
        if not field_names(self) and "__dataclass_fields__" not in vars(type(self)):
            return type(self), object()  # of a class that is no dataclass nothing is known
        return type(self), *(size_class(field) if name in self.ENTRY_COUNTS and type(field) is int else key_of(field)
                             for name, field in zip(field_names(self), fields(self), strict=True))

    def __repr__(self) -> str:
        shown = [f"{name}={_brief(getattr(self, name, None))}"
                 for name, field in getattr(self, "__dataclass_fields__", {}).items()
                 if field.default is dataclasses.MISSING or getattr(self, name, None) is not field.default]
        return f"{type(self).__name__}({', '.join(shown)})"

    def changed(self) -> None:
        """Forget what was derived from the tensors of this value: to be called after a write that torch does not count.

        Those are writes through `.data`, through NumPy or another library; any other change in place is noticed. Of
        inference tensors nothing is remembered.
        """
        forget(self)

    def to(self, device: Any) -> Self:
        """Return the value on another device; unchanged if it holds no tensors, like a grid."""
        moved: Self = map_tensors(self, lambda t: t.to(device))
        return moved

    def pin_memory(self) -> Self:
        """Return the value in page-locked memory, as a `DataLoader` with `pin_memory=True` needs it."""
        pinned: Self = map_tensors(self, Tensor.pin_memory)
        return pinned

    def __getstate__(self) -> dict[str, Any]:
        """Return the fields for a copy or a file, without cached properties and notes."""
        attrs = dict(self.__dict__)  # at once: another thread may note something meanwhile
        kind = type(self)
        return {name: value for name, value in attrs.items()
                if name not in NOTED and type(getattr(kind, name, None)) is not cached_property}


class Structure(FrozenValue):
    """A value from which layouts, degrees or lists of pairs are derived, and remembered while it lives."""


def size_class(size: int) -> int:
    """The class of a size: itself up to `EXACT`, else rounded up to the next quarter of an octave."""
    if size <= EXACT:
        return size
    try:
        quarter = size.bit_length() - 3
    except AttributeError:  # a tensor, under torch.jit.trace
        return size_class(int(size))
    return -(-size >> quarter) << quarter


def class_volume(sizes: Iterable[int]) -> int:
    """The product of the classes of the sizes: how many numbers the greatest call of a class has."""
    volume = 1
    for size in sizes:  # neither `map` nor a generator is followed by a tracer here
        volume *= size_class(size)
    return volume


def key_of(value: Any) -> Hashable:
    """The key of a field: of a tensor its dtype, device and the classes of its sizes; of options themselves."""
    if isinstance(value, Tensor):
        return value.dtype, value.device, *map(size_class, value.shape)
    if isinstance(value, tuple | list):
        return tuple(map(key_of, value))
    result = getattr(value, "static_key", None)
    return static(value) if result is None else result


def static(value: Any, within: tuple[int, ...] = ()) -> Hashable:
    """A hashable key of a value that does not hold it: its type and value, or its identity and contents. `within` are
    the objects that contain it, so that a value that contains itself ends the search."""
    kind, inside = type(value), (*within, id(value))
    if kind in VALUES or isinstance(value, type):
        return kind, value
    if isinstance(value, Tensor | torch.nn.Module | torch.SymInt):
        return kind, mark(value)
    if isinstance(value, float | complex | np.generic):
        return kind, repr(value)  # 0.0 is not -0.0, and nan is nan
    if isinstance(value, enum.Enum):
        return kind, value.name
    if isinstance(value, FrozenValue) and not tensors_in(value):
        return kind, *(static(field, inside) for field in fields(value))
    if isinstance(value, partial):
        return kind, *(static(part, inside) for part in (value.func, value.args, value.keywords))
    if isinstance(value, MethodType):
        return kind, static(value.__func__, inside), static(value.__self__, inside)
    if id(value) in within:
        return mark(value)
    return kind, *_contents(value, inside)


def _contents(value: Any, inside: tuple[int, ...]) -> tuple[Hashable, ...]:
    """Return the contents of an object; its identity if it may have contents that cannot be read."""
    attrs = tuple((name, static(value, inside)) for name, value in getattr(value, "__dict__", {}).items())
    if isinstance(value, list | tuple):
        return attrs, *(static(item, inside) for item in value)
    if isinstance(value, set | frozenset):
        return attrs, frozenset(static(item, inside) for item in value)
    if type(value) is dict:
        return attrs, *((static(name, inside), static(value, inside)) for name, value in value.items())
    if type(value) is FunctionType and value.__closure__ is None:
        return attrs, value
    return attrs, mark(value)


def field_names(value: Any) -> tuple[str, ...]:
    """The names of a dataclass's fields; none of anything else."""
    return tuple(getattr(value, "__dataclass_fields__", ()))


def fields(value: Any) -> list[Any]:
    """Return the fields of a dataclass, in order."""
    return [value.__dict__[name] if name in value.__dict__ else getattr(value, name) for name in field_names(value)]


def tensors_in(value: Any, whole: tuple[type, ...] = ()) -> list[Tensor]:
    """The tensors that a value holds, in the order of its fields, through tuples and nested values, but for those of
    the types in `whole`."""
    if isinstance(value, Tensor):
        return [value]
    result: list[Tensor] = []
    nested = isinstance(value, FrozenValue) and not (whole and isinstance(value, whole))
    for part in value if isinstance(value, tuple | list) else fields(value) if nested else ():
        result += tensors_in(part, whole)
    return result


def map_tensors(value: Any, fn: Callable[[Any], Any], whole: tuple[type, ...] = (), also: tuple[type, ...] = ()) -> Any:
    """The value with fn applied to each tensor in it, also in tuples and nested values, and to values of the types in
    `also`. Values of the types in `whole` stay unchanged."""
    return _mapped(value, fn, whole, also)[0]


def _mapped(value: Any, fn: Callable[[Any], Any], whole: tuple[type, ...] = (), also: tuple[type, ...] = (),
            renew: bool = False) -> tuple[Any, bool]:
    """The mapped value, and whether it differs: compilers do not compare two tuples by `is`. With `renew`, values that
    hold cached properties differ too."""
    if isinstance(value, Tensor) or (also and isinstance(value, also)):
        new = fn(value)
        return new, new is not value
    if isinstance(value, tuple | list):
        items, differs = [], False
        for item in value:
            new, changes = _mapped(item, fn, whole, also, renew)
            items.append(new)
            differs = differs or changes
        if not differs:
            return value, False
        return type(value)(items) if not hasattr(value, "_fields") else type(value)(*items), True
    if not isinstance(value, FrozenValue) or isinstance(value, whole):
        return value, False
    changed = {}
    for name, old in zip(field_names(value), fields(value), strict=True):  # compilers trace this loop
        new, changes = _mapped(old, fn, whole, also, renew)
        if changes:
            changed[name] = new
    cached = renew and bool(field_names(value)) and not value.__dict__.keys() <= {*field_names(value)} | NOTED
    return (altered(value, **changed), True) if changed or cached else (value, False)


def altered(value: Any, /, **changed: Any) -> Any:
    """The frozen value with other fields, which are not checked again; what `__post_init__` derives is computed again.
    Tensors beside its fields, which another constructor made, are an error."""
    return alterer(value)(changed)


def _brief(value: Any) -> str:
    """A tensor by its dtype and shape, anything else as it prints."""
    if isinstance(value, Tensor):
        return f"{str(value.dtype).removeprefix('torch.')}{tuple(value.shape)}"
    return repr(value)


def alterer(value: Any) -> Callable[[dict[str, Any]], Any]:
    """(other fields by name) -> `altered(value, ...)`, for many calls."""
    kind, attrs, names = type(value), value.__getstate__(), field_names(value)
    beside = [name for name in attrs if name not in names] if names and len(attrs) > len(names) else []

    def alter(changed: dict[str, Any]) -> Any:
        new = object.__new__(kind)
        new.__dict__.update(attrs)
        new.__dict__.update(changed)
        if beside:
            if hasattr(new, "__post_init__"):
                new.__post_init__()
            elif any(tensors_in(attrs[name]) for name in beside):
                raise ConfigError(kind.__name__, "tensors must be in its fields", ", ".join(beside),
                                  "Make what is derived from the fields a functools.cached_property.")
        return new

    return alter


def refreshed(value: Any) -> Any:
    """Return the value without its cached properties, because its tensors may have changed; unchanged if it has none.
    """
    return _mapped(value, lambda t: t, renew=True)[0]


def frozen(cls: type, *, eq: bool, init: bool) -> Any:
    """Make a class a frozen dataclass and register it with `torch.export.register_dataclass`; an error if it is no
    value, or a field has the name of an attribute of a base class."""
    if not issubclass(cls, FrozenValue):
        raise ConfigError(cls.__name__, "the class must derive from a Basis, a Score or a FrozenValue",
                          f"{cls.__mro__[1].__name__ if cls.__mro__[1:] else 'object'}",
                          "The Score of a basis is structconv.bases.Score; structconv.mechanisms.Score is a module.")
    try:
        result: Any = dataclasses.dataclass(frozen=True, eq=eq, repr=False, init=init)(cls)
    finally:  # such a field seems to have a default, so that fields after it may seem to be out of order
        if dataclasses.is_dataclass(cls):
            _check_names(cls)
    if result.NAMES or result.DERIVED:
        _register(result)
    else:
        torch.export.register_dataclass(result, serialized_type_name=f"{cls.__module__}.{cls.__qualname__}")
    return result


def _check_names(cls: type) -> None:
    """Raise `ConfigError` if a field hides an attribute of a base class, or is hidden by it. A field with a default,
    such as `size: int = 1`, may replace a property."""
    inherited = {name for base in cls.__mro__[1:] for name in vars(base).get("__dataclass_fields__", ())}
    for name in (field.name for field in dataclasses.fields(cls) if field.name not in inherited):
        homes = [base for base in cls.__mro__[1:] if name in vars(base)]
        first = vars(homes[-1])[name] if homes else None
        if not homes or (name in vars(cls) and isinstance(first, property | torch.device)):
            continue
        base = next(base.__name__ for base in cls.__bases__ if hasattr(base, name))
        raise ConfigError(cls.__name__, f"no field may have the name of an attribute of its base class {base}", name,
                          "Rename the field" + (f", and define {name} = property(lambda self: ...)." if isinstance(
                              first, property) else "."))


def _register(cls: Any) -> None:
    """Register a value with names, or with fields that its constructor finds, as `register_dataclass` does others."""
    leaves = [field for field in cls.__dataclass_fields__ if field not in (*cls.NAMES, *cls.DERIVED)]

    def flatten(value: Any) -> tuple[list[Any], Any]:
        present = [field for field in leaves if getattr(value, field) is not None]
        return [getattr(value, field) for field in present], (
            tuple(present), tuple(getattr(value, field) for field in cls.NAMES))

    def unflatten(parts: Iterable[Any], context: Any) -> Any:
        values = dict.fromkeys(leaves) | dict(zip(context[0], parts, strict=True))
        return cls(**values, **dict(zip(cls.NAMES, context[1], strict=True)))

    register_node(cls, flatten, unflatten)


def register_node(cls: type, flatten: Callable[[Any], tuple[list[Any], Any]], unflatten: Callable[..., Any]) -> None:
    """Register a node of pytrees, whose context is the names of its parts and a tuple of tuples."""
    def flatten_with_keys(value: Any) -> tuple[list[Any], Any]:
        parts, context = flatten(value)
        return [(pytree.GetAttrKey(name), part) for name, part in zip(context[0], parts, strict=True)], context

    pytree.register_pytree_node(cls, flatten, unflatten, flatten_with_keys_fn=flatten_with_keys,
                                serialized_type_name=f"{cls.__module__}.{cls.__qualname__}", to_dumpable_context=list,
                                from_dumpable_context=lambda read: (tuple(read[0]), tuple(map(tuple, read[1]))))


@dataclass_transform(frozen_default=True, eq_default=False)
def structure(*, eq: bool = False, init: bool = True) -> Callable[[C], C]:
    """Make a subclass of `FrozenValue` a structure: a frozen dataclass that compilers and exporters take as an input.

    Its tensors and numbers become leaves of a pytree, so that `torch.compile`, `torch.export`, DDP and recomputation
    take the value as an input. They also rebuild it with stand-ins in the place of tensors and numbers, which is why
    constructors check plain tensors and plain integers only. `eq=False` compares by identity: right for a value that
    holds tensors.
    """
    def decorate(cls: C) -> C:
        cls.is_structure = True  # type: ignore[attr-defined]
        result = frozen(cls, eq=eq, init=init)
        if "__init__" in result.__dict__:
            result.__init__ = explained(result.__init__)
        return cast("C", result)

    return decorate
