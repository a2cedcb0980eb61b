"""`public_names`: a package exports the public names of its modules, so that each name is written once."""

from __future__ import annotations

from types import ModuleType
from typing import Any

__all__ = ["public_names"]


def public_names(namespace: dict[str, Any]) -> list[str]:
    """The names that `from module import *` has put into the namespace of a package, in order, for its `__all__`."""
    return sorted(name for name, value in namespace.items()
                  if not (name.startswith("_") or isinstance(value, ModuleType) or value is public_names))
