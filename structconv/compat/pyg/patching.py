"""`patch`: an unchanged PyTorch Geometric program runs on our layers; `unpatch`, and a report of what was replaced."""

from __future__ import annotations

import importlib
import sys
from collections import Counter
from collections.abc import Callable
from functools import cache, wraps
from types import TracebackType
from typing import Any

from torch.compiler import is_compiling

from structconv.compat.pyg import pooling, sampling
from structconv.compat.pyg.conversion import OURS, turn
from structconv.compat.pyg.layer import Layer
from structconv.compat.pyg.tracing import is_tracing
from structconv.errors import ConfigError, StructconvError
from structconv.structures.exchange import require

__all__ = ["Patch", "joined", "patch", "unpatch"]

#: Our layers and readouts, by their names in `torch_geometric.nn`.
_OURS: dict[str, Any] = {**OURS, **{name: getattr(pooling, name) for name in (
    "JumpingKnowledge", "global_add_pool", "global_max_pool", "global_mean_pool")}}
#: Our functions, by their names in `torch_geometric.utils`.
_FUNCTIONS = {name: getattr(pooling, name) for name in ("scatter", "softmax", "spmm")}
#: Names whose calls a report counts; it counts the objects of the others.
_CALLED = {*_FUNCTIONS, *(name for name, replacement in _OURS.items() if not isinstance(replacement, type))}


class Patch:
    """The layers and functions that a patch replaces. Print it for a table; as a context it ends with the block.

    Args:
        library, utils, loader: the modules `torch_geometric.nn`, `torch_geometric.utils` and `torch_geometric.loader`.

    Example:

        >>> from structconv.compat.pyg import patch
        >>> from torch_geometric.nn import GCNConv
        >>> with patch() as report:
        ...     model = GCNConv(8, 4)
        >>> report.replaced["GCNConv"]
        1
    """

    def __init__(self, library: Any, utils: Any, loader: Any) -> None:
        #: How many layers were made ours, or calls were, by name.
        self.replaced: Counter[str] = Counter()
        #: The layers that are PyTorch Geometric's own, each with the reason.
        self.left: dict[str, str] = {}
        self.names = [name for name in _OURS if hasattr(library, name)] + [*_FUNCTIONS]
        self._undo: list[tuple[Any, str, Any]] = []
        replacements: list[tuple[Any, Any]] = []
        for name in self.names:
            module, ours = (utils, _FUNCTIONS) if name in _FUNCTIONS else (library, _OURS)
            original, replacement = getattr(module, name), ours[name]
            if isinstance(replacement, type):
                self._set(original, "__init__", self._maker(name, replacement, original))
            else:
                replacements.append((original, self._counted(name, replacement, original)))
        sampling.take_over(self._set, self.replaced, _in_worker)
        for name in sampling.LOADERS:
            kind: Any = sampling.loader(name)
            kind.counts = self.replaced
            replacements.append((getattr(loader, name), kind))
        self._set_everywhere(replacements)

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
                    self.replaced[name] += 1
                    return
            elif not isinstance(layer, ours):
                self.left[type(layer).__name__] = f"it is derived from {name}, whose methods it may use"
            initialize(layer, *args, **options)

        return init

    def _counted(self, name: str, function: Any, original: Any) -> Any:
        @wraps(original)
        def called(*args: Any, **options: Any) -> Any:
            if is_compiling() or is_tracing():
                return original(*args, **options)
            try:
                y = function(*args, **options)
            except StructconvError as error:
                y = original(*args, **options)  # which raises its own error where the arguments are wrong
                self.left[name] = str(error)
                return y
            self.replaced[name] += 1
            return y

        called.__dict__["__prepare_scriptable__"] = lambda: original  # what torch.jit.script compiles
        return called

    def _set_everywhere(self, replacements: list[tuple[Any, Any]]) -> None:
        """Replace each original by its value where modules have imported it, under its name or another."""
        values = {id(original): value for original, value in replacements}
        for module in list(sys.modules.values()):
            for name, own in list(getattr(module, "__dict__", {}).items()):
                if id(own) in values:
                    self._set(module, name, values[id(own)])

    def _set(self, owner: Any, name: str, value: Any) -> None:
        self._undo.append((owner, name, owner.__dict__.get(name)))
        setattr(owner, name, value)

    def undo(self) -> None:
        """Give PyTorch Geometric back its own; layers that were made stay ours."""
        while self._undo:
            owner, name, value = self._undo.pop()
            delattr(owner, name) if value is None else setattr(owner, name, value)

    def __enter__(self) -> Patch:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:
        unpatch()

    def __str__(self) -> str:
        lines = [f"structconv computes {len(self.names)} layers and functions of torch_geometric:",
                 "  " + ", ".join(self.names)]
        lines += [f"  {name}: {count} {'calls' if name in _CALLED else 'made'}"
                  for name, count in sorted(self.replaced.items())]
        lines += [f"  {name} is PyTorch Geometric's own: {reason}" for name, reason in self.left.items()]
        return "\n".join(lines)

    __repr__ = __str__


@cache
def joined(name: str) -> type:
    """Our layer of this name as a subclass of theirs too, so that `isinstance` finds it."""
    original, ours = getattr(importlib.import_module("torch_geometric.nn"), name), _OURS[name]
    kind = type(name, (ours, original), {"__module__": __name__, "__doc__": ours.__doc__, "__init__": ours.__init__})
    if issubclass(ours, Layer):
        for method in [method for method in dir(ours) if getattr(ours, method, None) is Layer.propagate]:
            setattr(kind, method, _of_theirs(method))
        setattr(kind, "_need_messages", _hand_back)  # noqa: B010 - mypy refuses an assignment
    if name in OURS:
        setattr(kind, "__prepare_scriptable__", _scriptable)  # noqa: B010 - mypy refuses an assignment
    return kind


def _of_theirs(method: str) -> Callable[..., Any]:
    """A method that only PyTorch Geometric's layer has, so that the layer becomes that one."""
    def called(layer: Any, *args: Any, **options: Any) -> Any:
        _hand_back(layer, method)
        return getattr(layer, method)(*args, **options)

    return called


def _scriptable(layer: Any) -> Any:
    """The layer for `torch.jit.script`, which compiles PyTorch Geometric's."""
    _hand_back(layer, "torch.jit.script")
    return layer


def _hand_back(layer: Any, use: str) -> None:
    """Make a layer PyTorch Geometric's own, in place."""
    name = type(layer).__name__
    reason = turn(layer, more=True)
    if reason is not None:
        raise ConfigError(name, f"the layer must be one that can become PyTorch Geometric's, for {use}", reason)
    for report in _active:
        report.left[name] = f"{name}: {use} needs PyTorch Geometric's layer"


def __getattr__(name: str) -> type:
    """The classes of layers that were made under a patch, by which pickle finds them."""
    if isinstance(_OURS.get(name), type):
        return joined(name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


_active: list[Patch] = []


def patch() -> Patch:
    """Make PyTorch Geometric's layers ours, and `softmax`, `scatter` and `spmm` of its `utils`, wherever a program has
    imported them; until `unpatch()`.

    Its `NeighborLoader` and `LinkNeighborLoader` draw neighbors by our sampler, `ClusterData`, `ClusterLoader`,
    `HGTLoader` and the GraphSAINT samplers are those of `structconv.data`: they need neither pyg-lib nor torch-sparse.
    Clusters are those of `partition`, not of METIS, and nothing is kept in `save_dir`.

    A layer with arguments that we do not support is PyTorch Geometric's own; the report names it and the reason. So is
    a class derived from one of its layers.

    Returns:
        The report; `print` it at the end of the program. It is a context manager too.

    Raises:
        ConfigError: where torch_geometric is not installed.

    Example:

        >>> from structconv.compat.pyg import patch, unpatch
        >>> from torch_geometric.nn import GCNConv
        >>> report = patch()
        >>> y = GCNConv(8, 4)(torch.randn(3, 8), torch.tensor([[0, 1], [1, 2]]))   # computed by structconv
        >>> print(str(report).splitlines()[-1])
          GCNConv: 1 made
        >>> unpatch()
    """
    if not _active:
        _active.append(Patch(*(require(f"torch_geometric.{name}", "structconv.compat.pyg.patch", "tools")
                               for name in ("nn", "utils", "loader"))))
    return _active[0]


def _in_worker(kind: Any) -> Any:
    """An empty sampler of theirs in a process that samples from now on as the one that has pickled it."""
    patch()
    return kind.__new__(kind)


def unpatch() -> None:
    """End `patch()`. Layers that were made under it stay ours.

    Example:

        >>> from structconv.compat import pyg
        >>> from torch_geometric.nn import GCNConv
        >>> _ = pyg.patch()
        >>> pyg.unpatch()
        >>> isinstance(GCNConv(8, 4), pyg.GCNConv)
        False
    """
    while _active:
        _active.pop().undo()
