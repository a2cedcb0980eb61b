"""`patch`: an unchanged PyTorch Geometric program runs on our layers; `unpatch` and a report of what was taken over."""

from __future__ import annotations

import importlib
import sys
from collections import Counter
from collections.abc import Callable
from functools import cache, wraps
from types import TracebackType
from typing import Any

from structconv.compat.pyg import attention, convolutions, mixtures, polynomials, pooling, relational
from structconv.errors import ConfigError
from structconv.structures.exchange import require

__all__ = ["Patch", "joined", "patch", "unpatch"]

#: Our layers and functions, by their names in `torch_geometric.nn`.
_OURS = {name: getattr(module, name) for module in (attention, convolutions, mixtures, pooling, polynomials, relational)
         for name in module.__all__}


class Patch:
    """What is taken over while a patch is on. Print it for a table; as a context it ends with the block.

    Args:
        library: the module `torch_geometric.nn`.
    """

    def __init__(self, library: Any) -> None:
        #: How many layers were made ours, or calls were, by name.
        self.taken: Counter[str] = Counter()
        #: The layers that are PyTorch Geometric's own, each with the reason.
        self.left: dict[str, str] = {}
        self.names = [name for name in _OURS if hasattr(library, name)]
        self._undo: list[tuple[Any, str, Any]] = []
        for name in self.names:
            original, replacement = getattr(library, name), _OURS[name]
            if isinstance(replacement, type):
                self._set(original, "__init__", self._maker(name, replacement, original))
            else:
                counted = self._counted(name, replacement)
                for module in list(sys.modules.values()):
                    if getattr(module, "__dict__", {}).get(name) is original:
                        self._set(module, name, counted)

    def _maker(self, name: str, ours: Any, original: Any) -> Callable[..., None]:
        """An `__init__` for their class, which makes a new instance one of ours."""
        initialize = original.__init__

        @wraps(initialize)
        def init(layer: Any, *args: Any, **options: Any) -> None:
            if type(layer) is original:
                layer.__class__ = joined(name)
                try:
                    ours.__init__(layer, *args, **options)
                except ConfigError as error:
                    layer.__class__ = original
                    layer.__dict__.clear()
                    self.left[name] = str(error)
                else:
                    self.taken[name] += 1
                    return
            elif not isinstance(layer, ours):
                self.left[type(layer).__name__] = f"it is derived from {name}, whose methods it may use"
            initialize(layer, *args, **options)

        return init

    def _counted(self, name: str, function: Any) -> Any:
        @wraps(function)
        def called(*args: Any, **options: Any) -> Any:
            self.taken[name] += 1
            return function(*args, **options)

        return called

    def _set(self, owner: Any, name: str, value: Any) -> None:
        self._undo.append((owner, name, owner.__dict__[name]))
        setattr(owner, name, value)

    def undo(self) -> None:
        """Give PyTorch Geometric back its own; layers that were made stay ours."""
        while self._undo:
            setattr(*self._undo.pop())

    def __enter__(self) -> Patch:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:
        unpatch()

    def __str__(self) -> str:
        lines = [f"structconv computes {len(self.names)} layers and functions of torch_geometric.nn:",
                 "  " + ", ".join(self.names)]
        lines += [f"  {name}: {count} {'calls' if name.startswith('global') else 'made'}"
                  for name, count in sorted(self.taken.items())]
        lines += [f"  {name} is PyTorch Geometric's own: {reason}" for name, reason in self.left.items()]
        return "\n".join(lines)

    __repr__ = __str__


@cache
def joined(name: str) -> type:
    """Our layer of this name as a subclass of theirs too, so that `isinstance` finds it."""
    original = getattr(importlib.import_module("torch_geometric.nn"), name)
    return type(name, (_OURS[name], original), {"__module__": __name__, "__doc__": _OURS[name].__doc__,
                                                "__init__": _OURS[name].__init__})


def __getattr__(name: str) -> type:
    """The classes of layers that were made under a patch, by which pickle finds them."""
    if isinstance(_OURS.get(name), type):
        return joined(name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


_active: list[Patch] = []


def patch() -> Patch:
    """Make PyTorch Geometric's layers ours, wherever a program has imported them; until `unpatch()`.

    A layer with arguments that we do not support is PyTorch Geometric's own; the report names it and the reason. So is
    a class derived from one of its layers.

    Returns:
        The report; `print` it at the end of the program. It is a context manager too.

    Raises:
        ConfigError: where torch_geometric is not installed.
    """
    if not _active:
        _active.append(Patch(require("torch_geometric.nn", "structconv.compat.pyg.patch", "tools")))
    return _active[0]


def unpatch() -> None:
    """End `patch()`. Layers that were made under it stay ours."""
    while _active:
        _active.pop().undo()
