"""The structs of src/api.h as Python packs them, and the comparison that makes a drift of the two impossible.

A file that calls a kernel declares its struct once, by the names and kinds of its fields; the packing follows. When
the core is loaded, every declaration is compared with what the compiler made of api.h, and a core that differs is
refused.

CONTRIBUTING.md says which files a new kernel touches.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Iterator
from typing import NamedTuple

__all__ = ["CONSTANTS", "STRUCTS", "Exported", "Struct", "constants", "exported", "integers", "pointers", "reals"]

#: What was declared here, by its name in api.h.
STRUCTS: dict[str, Struct] = {}
CONSTANTS: dict[str, int] = {}


class Field(NamedTuple):
    """Kind "P", "q" or "d", a pointer, an integer or a real number of 8 bytes, or "s", a struct."""

    name: str
    kind: str
    struct: Struct | None = None


class Struct:
    """A struct of api.h: `pack` takes the numbers of all fields, those of structs within it one after the other."""

    def __init__(self, name: str, *groups: tuple[Field, ...]) -> None:
        self.name, self.fields = name, [field for group in groups for field in group]
        self.format: str = "".join(field.struct.format if field.struct else field.kind for field in self.fields)
        self.pack = struct.Struct(self.format).pack
        STRUCTS[name] = self

    @property
    def size(self) -> int:
        """Bytes."""
        return struct.calcsize(self.format)

    def named(self, names: str) -> tuple[Field, ...]:
        """Fields that are such structs."""
        return tuple(Field(name, "s", self) for name in names.split())

    def places(self) -> dict[str, tuple[int, str]]:
        """Offset and kind of every field."""
        found, offset = {}, 0
        for field in self.fields:
            found[field.name] = offset, field.kind
            offset += field.struct.size if field.struct else struct.calcsize(field.kind)
        return found


def pointers(names: str) -> tuple[Field, ...]:
    """Fields that are pointers."""
    return tuple(Field(name, "P") for name in names.split())


def integers(names: str) -> tuple[Field, ...]:
    """Fields that are integers."""
    return tuple(Field(name, "q") for name in names.split())


def reals(names: str) -> tuple[Field, ...]:
    """Fields that are real numbers."""
    return tuple(Field(name, "d") for name in names.split())


def constants(**numbers: int) -> tuple[int, ...]:
    """Constants of api.h that Python needs without the core, with the values that it takes them to have."""
    CONSTANTS.update(numbers)
    return tuple(numbers.values())


# -- the other side -----------------------------------------------------------------------------------------------

class _Entry(ctypes.Structure):
    _fields_ = (("owner", ctypes.c_char_p), ("name", ctypes.c_char_p), ("value", ctypes.c_int64),
                ("kind", ctypes.c_int64))


class Exported(NamedTuple):
    """What the core says of api.h: the size of each struct, offset and kind of its fields, and all constants."""

    sizes: dict[str, int]
    fields: dict[str, dict[str, tuple[int, str]]]
    constants: dict[str, int]

    def differences(self) -> Iterator[str]:
        """What was declared here and is otherwise there, one line each."""
        for name, declared in STRUCTS.items():
            there, here = self.fields.get(name, {}), declared.places()
            for field in (*here, *(there.keys() - here.keys())):
                if here.get(field) != there.get(field):
                    yield f"{name}.{field} is {there.get(field)}, not {here.get(field)}"
            if self.sizes.get(name) != declared.size:
                yield f"{name} has {self.sizes.get(name)} bytes, not {declared.size}"
        for name, value in CONSTANTS.items():
            if self.constants.get(name) != value:
                yield f"{name} is {self.constants.get(name)}, not {value}"


def exported(library: ctypes.CDLL) -> Exported:
    """What a loaded core exports.

    Raises:
        ValueError: if it exports nothing.
    """
    found, place = Exported({}, {}, {}), 0
    entries = (_Entry * (1 << 16)).in_dll(library, "structconv_interface")
    while (entry := entries[place]).owner or entry.name:
        owner, name = (text.decode() if text else "" for text in (entry.owner, entry.name))
        if not owner:
            found.constants[name] = entry.value
        elif not name:
            found.sizes[owner] = entry.value
        else:
            found.fields.setdefault(owner, {})[name] = entry.value, chr(entry.kind)
        place += 1
    return found
